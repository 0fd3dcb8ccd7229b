"""Submitting a run to a scheduler, its status there, waiting for it and cancelling it."""

import os
import platform
import signal
import time
from collections.abc import Mapping

from rich.text import Text

from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.json_lines import write_atomic
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.rendezvous import refresh_listing
from phalanx.elastic.supervisor import node_requests
from phalanx.launch.launched_run import (
    ASK_S,
    RESTART,
    LaunchSpec,
    has_ended,
    is_running,
    newest_job,
    scheduler_name_of,
    scheduler_of,
    write_launch_spec,
)
from phalanx.launch.schedulers.registry import find_scheduler
from phalanx.launch.schedulers.scheduler import Job, LaunchOptions, find_local_process, find_lock_holder
from phalanx.launch.start_outcomes import read_start_outcome, read_start_outcomes
from phalanx.report.console import Console, Follower
from phalanx.report.logs import open_terminal
from phalanx.storage import lease, permissions
from phalanx.system import locks

DRAW_S = 0.2
OUTCOME_WAIT_S = 5.0  # time for a shared file system, after the end of a job, to show the run's outcome
ENDS_S, BETWEEN_S = 60.0, 0.5  # what all nodes get to end their ranks at once, and between two signals


# ------------------------------------------------------------------------------------------------------------- starting


def submit_run(
    scheduler_name: str, config: Config, paths: RunPaths, options: LaunchOptions, environment: Mapping[str, str]
) -> str:
    """Submit the run to a scheduler; returns its state, in words. Raises PhalanxError before anything was submitted."""
    scheduler = find_scheduler(scheduler_name)
    script = scheduler.make_script(config, paths, options)
    scheduler.check_cluster(config, options)
    _check_not_running(paths)
    _write_launch_files(config, paths, options, scheduler_name)
    if script is not None:
        write_atomic(paths.launch_script, script)
        os.chmod(paths.launch_script, 0o755 & ~permissions.current_umask())
    number = scheduler.submit(paths, environment)
    if not scheduler.QUEUES:
        return f"running as process {number}"
    with open(paths.jobs, "a", encoding="utf-8") as file:
        file.write(f"{number}\n")
    return f"job {number} of {scheduler.TITLE}"


def _check_not_running(paths: RunPaths) -> None:
    """Raises ConfigError where the run is already running or queued; RunError where its folder has links that lead out
    of it."""
    locks.check_symlinks(paths)
    job = newest_job(paths)
    if job is not None and not job.over:
        raise ConfigError(
            f"the run {paths.display_name} is job {job.id} already ({job.state}); end it with `phalanx cancel "
            f"{paths.display_name}`"
        )
    for lock in (paths.job_supervisor, paths.lock):
        if (held := find_lock_holder(lock)) is not None:
            raise ConfigError(
                f"the run {paths.display_name} is already running as process {held[0]} on {held[1]}; end it with "
                f"`phalanx cancel {paths.display_name}`"
            )


def _write_launch_files(config: Config, paths: RunPaths, options: LaunchOptions, scheduler: str) -> None:
    """Write the nodes' files into the run folder, replacing those of an earlier launch."""
    try:
        paths.node_log(0).parent.mkdir(parents=True, exist_ok=True)
        paths.launch.mkdir(exist_ok=True)
        goes_on = find_scheduler(scheduler).QUEUES and scheduler_name_of(paths) == scheduler
        for old in [paths.cancelled, *paths.launch.glob("over-*"), *([] if goes_on else [paths.jobs])]:
            old.unlink(missing_ok=True)
        write_atomic(paths.launch_recipe, load.to_yaml(config))
        launched = LaunchSpec(
            scheduler=scheduler,
            nodes=options.nodes,
            spares=options.spares,
            ranks=options.ranks,
            until_done=options.until_done,
            max_starts=options.max_jobs,
            submitted=time.time(),
            host=platform.node(),
        )
        write_launch_spec(paths, launched)
    except OSError as error:
        raise RunError(
            f"the run folder {paths.display_name} cannot be written ({error.strerror}); choose another with --run-dir"
        ) from None


# -------------------------------------------------------------------------------------------------------------- waiting


def wait_for_end(paths: RunPaths, config: Config) -> int:
    """Show a launched run until it has ended for good; returns its exit code.

    Ctrl-C ends the waiting, not the run: 130. Raises RunError where it ended without a recorded outcome.
    """
    terminal = open_terminal()
    console = Console(config.train.steps, paths.name, folder=paths.display_name)
    follower = Follower(paths, console)
    asked, told, answers = 0.0, "", True
    state: Job | None = None
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
                except RunError as error:  # Slurm's controller may be away for minutes, while jobs continue
                    words, answers = f"{error}; still waiting", False
                if words != told:
                    told = words
                    console.say(words)
            if gone is not None:
                refresh_listing(paths.launch)
            over = next(reversed(read_start_outcomes(paths)), None)
            ended = answers and has_ended(paths, state)
            if over is not None and over.next_action != RESTART and ended:
                return over.code
            if ended:
                gone = gone if gone is not None else now
                if now > gone + OUTCOME_WAIT_S:
                    last = None if state is None else paths.start_outcome(f"{state.id}-{state.restarts + 1}")
                    if last is not None and (over := read_start_outcome(last)) is not None:
                        return over.code  # whatever was to follow: somebody has ended the job itself
                    raise RunError(_no_outcome_message(paths, state))
            else:
                gone = None
            time.sleep(DRAW_S)
    except KeyboardInterrupt:
        console.close()
        terminal.print(
            Text(
                f"stopped waiting; the run continues (phalanx status {paths.display_name}, phalanx cancel "
                f"{paths.display_name})"
            )
        )
        return 128 + signal.SIGINT
    finally:
        follower.poll(final=True)
        console.close()


def _describe_job(job: Job | None) -> str:
    if job is None:
        return ""
    why = f" ({job.reason})" if job.waits and job.reason else ""
    where = f" on {job.nodes}" if job.nodes and not job.waits else ""
    return f"job {job.id} is {job.state}{why}{where}"


def _no_outcome_message(paths: RunPaths, job: Job | None) -> str:
    if job is None:
        return (
            f"the run {paths.display_name} ended without a recorded outcome; its last output is in "
            f"{paths.node_log(0)}; the same command resumes it"
        )
    log = scheduler_of(paths).find_log(paths, job.id)
    where = (
        f"its output is in {log}"
        if log.exists()
        else f"nothing was written to {log}; the nodes may not see the run folder"
    )
    return f"job {job.id} has ended as {job.state} and the run recorded no outcome; {where}"


# --------------------------------------------------------------------------------------------------------------- ending


def cancel_run(paths: RunPaths, now: bool) -> str:
    """Cancel a run: request it to save and exit, or kill it; returns a sentence about what was done. Raises
    PhalanxError."""
    if paths.url is not None:
        return _cancel_at_url(paths, now)
    if not paths.root.is_dir():
        raise ConfigError(f"no run folder {paths.display_name}; give the folder of a run")
    locks.check_symlinks(paths)  # before anything is written there
    if paths.launch.is_dir():
        _note_cancelled(paths)
    job = newest_job(paths)
    if job is not None and not job.over:
        if now:
            scheduler_of(paths).cancel(job.id)
            return f"job {job.id} was cancelled"
        job = _end_gently(paths, job)
        if job.waits:
            return f"job {job.id} was cancelled before it started"
        if job.ends:
            return f"job {job.id} was ending and will not be requeued"
        if job.over:
            return f"job {job.id} had already ended as {job.state}"
        return f"job {job.id} was asked to stop: it finishes the step, saves and exits"
    held = find_local_process(paths)
    if held is None:
        if any(lock.exists() and not os.access(lock, os.R_OK | os.W_OK) for lock in (paths.job_supervisor, paths.lock)):
            raise RunError(
                f"the run {paths.display_name} belongs to another user; only that user can check and cancel it"
            )
        raise RunError(f"the run {paths.display_name} is not running, so there is nothing to cancel")
    pid, host = held
    if host != platform.node():
        raise RunError(f"the run {paths.display_name} is running as process {pid} on {host}; run this command there")
    if not now:
        _signal(paths, pid, signal.SIGTERM)
        return f"process {pid} was asked to stop: it finishes the step, saves and exits"
    if _on_several_nodes(paths):  # the others would continue without a killed one
        return _end_everywhere(paths, pid)
    for lock in (paths.job_supervisor, paths.lock):  # the keeper first: it would start the other again
        if (held := find_lock_holder(lock)) is not None and held[1] == platform.node():
            _signal(paths, held[0], signal.SIGKILL, needed=False)
    return f"process {pid} was killed; the run can resume from its newest checkpoint"


def request_save(paths: RunPaths) -> str:
    """Request a checkpoint of a running run after its current step; returns a sentence about what was done. Raises
    RunError."""
    locks.check_symlinks(paths)
    if find_local_process(paths) is None and not is_running(paths):
        raise RunError(f"the run {paths.display_name} is not running, so there is nothing to save")
    try:
        paths.save_request.touch()
    except OSError as error:
        raise RunError(
            f"{paths.save_request} cannot be written ({error.strerror}); only the user that started the run can ask "
            "it to save"
        ) from None
    return "the run was asked to save a checkpoint after its current step"


def _cancel_at_url(paths: RunPaths, now: bool) -> str:
    held = find_local_process(paths)
    if held is None:
        raise RunError(f"the run {paths.display_name} is not running, so there is nothing to cancel")
    pid, host = held
    if now:
        raise RunError(
            f"the run {paths.display_name} is at a URL, so it can be asked to stop but not killed; remove --now, "
            f"or kill process {pid} on {host}"
        )
    if not lease.request_stop(paths):
        raise RunError(
            f"process {pid} on {host}, which holds the run {paths.display_name}, has not responded for "
            f"{lease.STALE_S:.0f} s; check whether that machine is up"
        )
    return f"process {pid} on {host} was asked to stop: it finishes the step, saves and exits"


def _on_several_nodes(paths: RunPaths) -> bool:
    rows = node_requests.list_nodes(paths) if paths.events.exists() else []
    return sum(row["state"] == node_requests.HERE for row in rows) > 1


def _end_everywhere(paths: RunPaths, pid: int) -> str:
    """Have the leading agent kill all ranks of all nodes, as a second Ctrl-C does. Raises RunError where it does
    not."""
    until, asked = time.monotonic() + ENDS_S, 0
    while time.monotonic() < until:
        held = find_lock_holder(paths.lock)
        if held is None:
            return f"process {pid} ended the run on all nodes; it can resume from its newest checkpoint"
        if held[0] != pid:
            raise RunError(
                f"the run {paths.display_name} is led by process {held[0]} on {held[1]} now; run this command there"
            )
        if asked < 2:  # one after the other: two at a time are one
            _signal(paths, pid, signal.SIGINT, needed=False)
            asked += 1
        time.sleep(BETWEEN_S)
    raise RunError(
        f"process {pid}, which leads the run {paths.display_name}, did not end it on all nodes within {ENDS_S:g} s; "
        "check with phalanx status, and kill what remains on each node (kill -KILL)"
    )


def _end_gently(paths: RunPaths, job: Job) -> Job:
    """Stop a job gracefully, or remove it from the queue; returns its state at that time. While it is being requeued it
    takes no signal, and no node reads the file until it runs again."""
    scheduler = scheduler_of(paths)
    for _ in range(2):  # it may come into another state meanwhile
        try:
            (scheduler.cancel if job.waits or job.ends else scheduler.stop)(job.id)
            break
        except RunError:  # its nodes look for the file, and it may be over
            job = newest_job(paths) or job
    return job


def _note_cancelled(paths: RunPaths) -> None:
    """Write the cancellation for the nodes, which poll for it: between two states a job takes no signal. Raises
    RunError."""
    try:
        paths.cancelled.touch()
    except OSError as error:
        raise RunError(
            f"{paths.cancelled} cannot be written ({error.strerror}), so the run cannot be told to stop; only the "
            "user that started the run can cancel it"
        ) from None


def _signal(paths: RunPaths, pid: int, number: signal.Signals, needed: bool = True) -> None:
    """Raises RunError where that cannot be done; one that has just ended is none unless it was `needed`."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        if not needed:
            return
        raise RunError(
            f"process {pid} of the run {paths.display_name} has just ended; check with phalanx status"
        ) from None
    except PermissionError:
        raise RunError(
            f"process {pid} of the run {paths.display_name} belongs to another user; only that user can cancel it"
        ) from None
