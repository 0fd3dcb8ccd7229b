"""Giving a run to Slurm, or to the background of this machine; how it stands there, waiting for it, ending it."""

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, PhalanxError, RunError
from phalanx.core.json_lines import write_atomic
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.rendezvous import refresh_listing
from phalanx.elastic.supervisor import node_requests
from phalanx.launch import job_supervisor
from phalanx.launch.job_supervisor import RESTART, LaunchSpec
from phalanx.launch.slurm import commands as slurm
from phalanx.launch.slurm import script as slurm_script
from phalanx.launch.slurm.commands import SlurmJob
from phalanx.launch.slurm.script import SlurmScriptOptions
from phalanx.recovery import fencing
from phalanx.report.console import Console, Follower
from phalanx.report.terminal import open_terminal
from phalanx.storage import mirror, permissions
from phalanx.system import symlinks, torchrun_env

ASK_S = 2.0  # between two questions to Slurm
DRAW_S = 0.2
OUTCOME_WAIT_S = 5.0  # what a shared file system gets, once a job is gone, to show how its run has ended
ENDS_S, BETWEEN_S = 60.0, 0.5  # what all nodes get to end their ranks at once, and between two signals
STARTS_S = 30.0  # what a process in the background gets to take its lock
MAX_STARTS = 100  # with --until-done, where nobody has said how many


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line of `phalanx launch` asks for, beside the recipe."""

    nodes: int
    spares: int = 0
    ranks: int | None = None
    until_done: bool = False
    max_jobs: int = MAX_STARTS


# ------------------------------------------------------------------------------------------------------------- starting


def make_job_spec(config: Config, paths: RunPaths, options: LaunchOptions) -> SlurmScriptOptions:
    """What a job is made of. Raises ConfigError for what could not run, before anything is submitted."""
    parts = slurm_script.parse_partition_counts(config.slurm.partition, options.nodes + options.spares)
    for option in config.slurm.extra:
        if not option.startswith("-"):
            raise ConfigError(
                f"{option} is no option of sbatch; write an option and its value as one word, such as --constraint=a100"
            )
    for key in ("mounts", "container_by"):
        section = config.slurm
        if section.container is None and getattr(section, key) != type(section).model_fields[key].get_default():
            raise ConfigError(
                f"slurm.{key} is about a container, and slurm.container names none; set that, or remove slurm.{key}"
            )
    python = config.slurm.python
    if python == "auto":
        python = sys.executable if config.slurm.container is None else "python3"
    return SlurmScriptOptions(
        paths.name, RunPaths(paths.root.resolve()), Path.cwd(), parts, config.slurm, python, options.until_done
    )


def check_partitions(asked: SlurmScriptOptions, found: list[slurm.SlurmPartition]) -> None:
    """Raises ConfigError where the cluster has no such partitions, or not so many nodes."""
    names = ", ".join(partition.name for partition in found) or "none"
    for name, nodes in asked.parts:
        fits = [each for each in found if each.name == name or (name is None and each.default)]
        if not fits and name is None:
            raise ConfigError(f"Slurm has no default partition here; name one with --partition: {names}")
        for each in fits or _largest_of_list(name, found, names):
            if not each.up:
                raise ConfigError(f"the partition {each.name} takes no jobs now; wait, or name another: {names}")
            if each.nodes < nodes:
                raise ConfigError(
                    f"the partition {each.name} has {each.nodes} node{'s' if each.nodes != 1 else ''}, but {nodes} are "
                    "asked for (--nodes and --spares); ask for fewer, or name another partition"
                )
            limit_s, asked_s = slurm.parse_time_limit(each.limit), slurm.parse_time_limit(asked.slurm.time or "0")
            if limit_s is not None and asked_s is not None and asked_s > limit_s:
                raise ConfigError(
                    f"the partition {each.name} lets a job run for {each.limit}, but --time asks for "
                    f"{asked.slurm.time}; ask for less, and add --until-done to go on in further jobs"
                )


def _largest_of_list(name: str | None, found: list[slurm.SlurmPartition], names: str) -> list[slurm.SlurmPartition]:
    """The largest of the partitions of a list such as `a,b`, of which Slurm takes any."""
    several = [each for each in found if each.name in (name or "").split(",")]
    if not several or len(several) < len((name or "").split(",")):
        raise ConfigError(f"there is no partition {name}; those of this cluster are: {names}")
    return [max((each for each in several if each.up), key=lambda each: each.nodes, default=several[0])]


def submit_to_slurm(config: Config, paths: RunPaths, options: LaunchOptions, environment: Mapping[str, str]) -> str:
    """Give the run to Slurm; returns the job's number. Raises PhalanxError before anything was submitted."""
    asked = make_job_spec(config, paths, options)
    script = slurm_script.render_script(asked)
    check_partitions(asked, slurm.partitions())
    _check_not_running(paths)
    _write_launch_files(config, paths, options, slurm_too=True)
    write_atomic(paths.launch_script, script)
    os.chmod(paths.launch_script, 0o755 & ~permissions.current_umask())
    number = slurm.submit(paths.launch_script.resolve(), torchrun_env.strip_job_variables(environment))
    with open(paths.jobs, "a", encoding="utf-8") as file:
        file.write(f"{number}\n")
    return number


def start_in_background(config: Config, paths: RunPaths, options: LaunchOptions, environment: Mapping[str, str]) -> int:
    """Start the run as a process of this machine that outlives this command; returns its number."""
    _check_not_running(paths)
    _write_launch_files(config, paths, options, slurm_too=False)
    log = paths.job_log("none").with_name("keeper.log")
    with open(log, "ab") as out:
        started = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "keep", str(paths.root.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=torchrun_env.strip_job_variables(environment),
        )
    until = time.monotonic() + STARTS_S
    while started.poll() is None and time.monotonic() < until:
        if job_supervisor.find_lock_holder(paths.job_supervisor) is not None:
            return started.pid
        time.sleep(0.02)
    if started.poll() is None:
        return started.pid
    words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise RunError(f"the run has not started: {words[-1] if words else f'exit code {started.returncode}'}")


def _check_not_running(paths: RunPaths) -> None:
    """Raises ConfigError where the run is going on, or waits in the queue, already; RunError where its folder has links
    that lead out of it."""
    symlinks.check_symlinks(paths)
    job = newest_job(paths)
    if job is not None and not job.over:
        raise ConfigError(
            f"the run {paths.display_name} is job {job.id} already, which is {job.state}; `phalanx cancel "
            f"{paths.display_name}` ends that one"
        )
    for lock in (paths.job_supervisor, paths.lock):
        if (held := job_supervisor.find_lock_holder(lock)) is not None:
            raise ConfigError(
                f"the run {paths.display_name} is going on already, as process {held[0]} on {held[1]}; "
                f"`phalanx cancel {paths.display_name}` ends that one"
            )


def _write_launch_files(config: Config, paths: RunPaths, options: LaunchOptions, slurm_too: bool) -> None:
    """Put what the nodes need into the run folder, in the stead of what an earlier launch has left."""
    try:
        paths.node_log(0).parent.mkdir(parents=True, exist_ok=True)
        paths.launch.mkdir(exist_ok=True)
        for old in [paths.cancelled, *paths.launch.glob("over-*"), *([] if slurm_too else [paths.jobs])]:
            old.unlink(missing_ok=True)
        write_atomic(paths.launch_recipe, load.to_yaml(config))
        launched = LaunchSpec(
            slurm=slurm_too,
            nodes=options.nodes,
            spares=options.spares,
            ranks=options.ranks,
            until_done=options.until_done,
            max_starts=options.max_jobs,
            submitted=time.time(),
            host=platform.node(),
        )
        job_supervisor.write_launch_spec(paths, launched)
    except OSError as error:
        raise RunError(
            f"the run folder {paths.display_name} cannot be written ({error.strerror}); choose another with --run-dir"
        ) from None


# -------------------------------------------------------------------------------------------------------------- looking


def newest_job(paths: RunPaths) -> SlurmJob | None:
    """The newest job of a run, as Slurm knows it; None where it was given to none, or Slurm has forgotten it."""
    numbers = job_numbers(paths)
    return slurm.query_job(numbers[-1]) if numbers else None


def job_numbers(paths: RunPaths) -> list[str]:
    """Numbers of the jobs that the run was given to, the newest last."""
    with contextlib.suppress(OSError):
        return [word for word in paths.jobs.read_text(encoding="utf-8").split() if word[0].isdigit()]
    return []


def find_local_process(paths: RunPaths) -> tuple[int, str] | None:
    """The process that runs a run without a scheduler, and its machine; None where there is none."""
    if paths.url is not None:
        return mirror.read_holder(paths)
    return job_supervisor.find_lock_holder(paths.job_supervisor) or job_supervisor.find_lock_holder(paths.lock)


def find_leading_node(paths: RunPaths) -> int:
    """The node of a launched run that leads it, and so shows its progress, as the newest file of epochs says: 0 where
    none says otherwise, or where that node has no log of its own."""
    launched = job_supervisor.read_launch_spec(paths)
    if launched is None or launched.nodes + launched.spares == 1:
        return 0
    node = (fencing.read_newest_epoch(paths) or {}).get("leader")
    return node if type(node) is int and paths.node_log(node).exists() else 0


def is_running(paths: RunPaths) -> bool:
    """Whether more may yet be heard of a run. Where Slurm cannot be asked it is taken to go on."""
    if paths.url is not None:
        return mirror.read_holder(paths) is not None
    try:
        return not _has_ended(paths, newest_job(paths)) or job_supervisor.find_lock_holder(paths.lock) is not None
    except PhalanxError:
        return True


class RunningPoller:
    """`is_running`, to be called again and again: who else has Slurm to answer wants to be asked too."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._asked_at, self._answer = paths, -ASK_S, True

    def __call__(self) -> bool:
        if time.monotonic() >= self._asked_at + ASK_S:
            self._answer = is_running(self._paths)
            self._asked_at = time.monotonic()
        return self._answer


def describe_scheduler_state(paths: RunPaths) -> dict[str, Any] | None:
    """What is known of the run beside its records: the job, or the process. Raises nothing: Slurm may be elsewhere."""
    numbers = job_numbers(paths)
    if not numbers:
        held = find_local_process(paths)
        return None if held is None else {"by": "process", "id": str(held[0]), "state": "RUNNING", "nodes": held[1]}
    known: dict[str, Any] = {"by": "slurm", "id": numbers[-1], "state": "", "nodes": ""}
    try:
        job = slurm.query_job(numbers[-1])
    except PhalanxError as error:
        return known | {"state": "not known", "reason": str(error)}
    if job is None:
        return known | {"state": "forgotten by Slurm"}
    return known | {
        "state": job.state, "reason": job.reason, "nodes": job.nodes, "restarts": job.restarts,
        "end_time": job.end_time, "time_limit": job.time_limit,
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- waiting


def wait_for_end(paths: RunPaths, config: Config) -> int:
    """Show a launched run until it has ended for good; returns its exit code.

    Ctrl-C ends the waiting, not the run: 130. Raises RunError where it ended without a word.
    """
    terminal = open_terminal()
    console = Console(config.train.steps, paths.name)
    follower = Follower(paths, console)
    asked, told, answers = 0.0, "", True
    state: SlurmJob | None = None
    gone: float | None = None
    try:
        while True:
            follower.poll()
            now = time.monotonic()
            if now >= asked + ASK_S:
                asked = now
                try:
                    state, answers = newest_job(paths), True
                    words = _describe_job(state)
                except RunError as error:  # Slurm's controller may be away for minutes, and jobs go on meanwhile
                    words, answers = f"{error}; waiting on", False
                if words != told:
                    told = words
                    console.say(words)
            if gone is not None:
                refresh_listing(paths.launch)
            over, ended = _newest_outcome(paths), answers and _has_ended(paths, state)
            if over is not None and over.next_action != RESTART and ended:
                return over.code
            if ended:
                gone = gone if gone is not None else now
                if now > gone + OUTCOME_WAIT_S:
                    if state is not None and (over := _outcome_of_job(paths, state)) is not None:
                        return over.code  # whatever was to follow: somebody has ended the job itself
                    raise RunError(_no_outcome_message(paths, state))
            else:
                gone = None
            time.sleep(DRAW_S)
    except KeyboardInterrupt:
        console.close()
        terminal.print(
            Text(
                f"no longer waiting; the run goes on: phalanx status {paths.display_name}, "
                f"phalanx cancel {paths.display_name}"
            )
        )
        return 128 + signal.SIGINT
    finally:
        follower.poll(final=True)
        console.close()


def _describe_job(job: SlurmJob | None) -> str:
    if job is None:
        return ""
    why = f" ({job.reason})" if job.waits and job.reason else ""
    where = f" on {job.nodes}" if job.nodes and not job.waits else ""
    return f"job {job.id} is {job.state}{why}{where}"


def _has_ended(paths: RunPaths, job: SlurmJob | None) -> bool:
    """Whether nothing of the run is left: no job, no process of this machine."""
    if job is not None:
        return job.over
    return bool(job_numbers(paths)) or job_supervisor.find_lock_holder(paths.job_supervisor) is None


def _newest_outcome(paths: RunPaths) -> job_supervisor.StartOutcome | None:
    found = job_supervisor.read_start_outcomes(paths)
    return found[-1] if found else None


def _outcome_of_job(paths: RunPaths, job: SlurmJob) -> job_supervisor.StartOutcome | None:
    """How the last start of a job ended, as its nodes say."""
    return job_supervisor.read_start_outcome(paths.start_outcome(f"{job.id}-{job.restarts + 1}"))


def _no_outcome_message(paths: RunPaths, job: SlurmJob | None) -> str:
    if job is None:
        return (
            f"the run {paths.display_name} has ended without saying how; its last words are in {paths.node_log(0)}, "
            "and the same command goes on with it"
        )
    log = paths.job_log(job.id)
    where = (
        f"what was said is in {log}"
        if log.exists()
        else f"nothing was written to {log}, as where the nodes do not see the run folder"
    )
    return f"job {job.id} has ended as {job.state} without a word of how the run ended; {where}"


# --------------------------------------------------------------------------------------------------------------- ending


def cancel_run(paths: RunPaths, now: bool) -> str:
    """Ask a run to save and leave, or end it at once; returns what was done, in words. Raises PhalanxError."""
    if paths.url is not None:
        return _cancel_at_url(paths, now)
    if not paths.root.is_dir():
        raise ConfigError(f"there is no run folder {paths.display_name}; name the folder of a run")
    symlinks.check_symlinks(paths)  # before anything is written there
    if paths.launch.is_dir():
        _note_cancelled(paths)
    job = newest_job(paths)
    if job is not None and not job.over:
        if now:
            slurm.cancel(job.id)
            return f"job {job.id} was cancelled"
        job = _end_gently(paths, job)
        if job.waits:
            return f"job {job.id} was cancelled before it has started"
        if job.ends:
            return f"job {job.id} was ending, and is not put back into the queue"
        if job.over:
            return f"job {job.id} has ended by itself meanwhile, as {job.state}"
        return f"job {job.id} was asked to stop: it finishes the step, saves and leaves"
    held = find_local_process(paths)
    if held is None:
        if any(lock.exists() and not os.access(lock, os.R_OK | os.W_OK) for lock in (paths.job_supervisor, paths.lock)):
            raise RunError(
                f"the run {paths.display_name} belongs to another user, who alone can see whether it goes on, "
                "and cancel it"
            )
        raise RunError(f"the run {paths.display_name} is not going on, so there is nothing to cancel")
    pid, host = held
    if host != platform.node():
        raise RunError(f"the run {paths.display_name} is going on as process {pid} on {host}; give this command there")
    if not now:
        _signal(paths, pid, signal.SIGTERM)
        return f"process {pid} was asked to stop: it finishes the step, saves and leaves"
    if _on_several_nodes(paths):  # of which the others would go on without the one that is killed
        return _end_everywhere(paths, pid)
    for lock in (paths.job_supervisor, paths.lock):  # the keeper first: it would start the other again
        if (held := job_supervisor.find_lock_holder(lock)) is not None and held[1] == platform.node():
            _signal(paths, held[0], signal.SIGKILL, needed=False)
    return f"process {pid} was killed; the newest checkpoint is what is left"


def _cancel_at_url(paths: RunPaths, now: bool) -> str:
    held = find_local_process(paths)
    if held is None:
        raise RunError(f"the run {paths.display_name} is not going on, so there is nothing to cancel")
    pid, host = held
    if now:
        raise RunError(
            f"the run {paths.display_name} is at a URL, by which it can be asked to stop, not be ended at once; leave "
            f"--now out, or end process {pid} on {host}"
        )
    if not mirror.request_stop(paths):
        raise RunError(
            f"process {pid} on {host}, which holds the run {paths.display_name}, has not answered for "
            f"{mirror.STALE_S:.0f} s; look whether that machine is still there"
        )
    return f"process {pid} on {host} was asked to stop: it finishes the step, saves and leaves"


def _on_several_nodes(paths: RunPaths) -> bool:
    rows = node_requests.list_nodes(paths) if paths.events.exists() else []
    return sum(row["state"] == node_requests.HERE for row in rows) > 1


def _end_everywhere(paths: RunPaths, pid: int) -> str:
    """Have the agent that leads end all ranks of all nodes at once, as a second Ctrl-C does. Raises RunError where it
    does not."""
    until, asked = time.monotonic() + ENDS_S, 0
    while time.monotonic() < until:
        held = job_supervisor.find_lock_holder(paths.lock)
        if held is None:
            return f"process {pid} has ended the run on all nodes; the newest checkpoint is what is left"
        if held[0] != pid:
            raise RunError(
                f"the run {paths.display_name} is led by process {held[0]} on {held[1]} meanwhile; "
                "give this command there"
            )
        if asked < 2:  # one after the other: two at a time are one
            _signal(paths, pid, signal.SIGINT, needed=False)
            asked += 1
        time.sleep(BETWEEN_S)
    raise RunError(
        f"process {pid}, which leads the run {paths.display_name}, was asked to end it on all nodes and has not within "
        f"{ENDS_S:g} s; look with phalanx status, and end what is left on each node (kill -KILL)"
    )


def _end_gently(paths: RunPaths, job: SlurmJob) -> SlurmJob:
    """Have a job save and leave, or leave the queue; returns it as it was then. While Slurm ends what ran of it, on the
    way back into the queue, it takes no signal; there it may then wait for nodes in vain, and nobody looks for the
    file."""
    for _ in range(2):  # it may come into another state meanwhile
        try:
            (slurm.cancel if job.waits or job.ends else slurm.stop)(job.id)
            break
        except RunError:  # its nodes look for the file, and it may be over
            job = newest_job(paths) or job
    return job


def _note_cancelled(paths: RunPaths) -> None:
    """Leave word for the nodes, which look for it: between two states a job takes no signal. Raises RunError."""
    try:
        paths.cancelled.touch()
    except OSError as error:
        raise RunError(
            f"{paths.cancelled} cannot be written ({error.strerror}), by which the run would hear of it; whoever has "
            "started the run can cancel it"
        ) from None


def _signal(paths: RunPaths, pid: int, number: signal.Signals, needed: bool = True) -> None:
    """Raises RunError where that cannot be done; one that has just ended is none unless it was `needed`."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        if not needed:
            return
        raise RunError(
            f"process {pid} of the run {paths.display_name} has just ended by itself; look with phalanx status"
        ) from None
    except PermissionError:
        raise RunError(
            f"process {pid} of the run {paths.display_name} belongs to somebody else, who alone can cancel it"
        ) from None
