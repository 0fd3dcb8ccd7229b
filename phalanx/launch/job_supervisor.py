"""`phalanx keep`: supervises `phalanx train` on one node of a launched run, and handles what that process cannot.

It keeps the output of `phalanx train` in a file of its node, restarts it when it was killed (the other nodes wait
meanwhile), writes how the run has ended and whether another start follows, and ends the job where the job's script is
gone with its machine. It imports no torch and mostly waits.
"""

import contextlib
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import election, rendezvous_client, shared_secret
from phalanx.launch import outcome
from phalanx.launch.launched_run import (
    RESTART,
    LaunchSpec,
    decide_restart,
    read_launch_spec,
)
from phalanx.launch.schedulers.registry import find_scheduler
from phalanx.launch.schedulers.scheduler import JobTask, Scheduler, hold_lock
from phalanx.launch.start_outcomes import StartOutcome, list_outcome_files, read_start_outcome, read_start_outcomes
from phalanx.storage import permissions
from phalanx.system.exit_causes import signal_name
from phalanx.system.fork import LEAVE_SIGNAL, STOP_SIGNALS, active_stop_signals, die_with

REVIVALS = 3  # consecutive restarts of a killed agent
LOOK_S = 3.0  # between two looks whether the run was cancelled
SEEN_S = 5.0  # time for a network file system to show the files of `phalanx launch`
NODE0_OUTCOME_WAIT_S = 10.0  # what node 0 gets to say how the run ended, before it is looked after
ASK_S, AGAIN_S = 300.0, 5.0  # time and interval of requests to the scheduler to end a job whose script is gone
QUIET_S = 600.0  # a run whose records have not grown for so long counts as dead
ASKED_S = 90.0  # after a stop request, which ranks record; a shared folder may be a minute late
GROWN_S = 2.0  # between two looks whether they have grown


# ------------------------------------------------------------------------------------------------------------- one node


class _StopHandler:
    """Passes stop signals on to the child, and remembers them for one that is about to be started."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.child: subprocess.Popen[bytes] | None = None

    @property
    def code(self) -> int:
        """How training ended that the signal came before: a node that leaves counts as unfit, since others continue."""
        return int(ExitCode.UNHEALTHY if self.asked == LEAVE_SIGNAL else ExitCode.STOPPED)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(number)


def supervise(run: Path, environment: Mapping[str, str]) -> int:
    """Keep this node's part of a launched run to its end; returns its exit code.

    Raises ConfigError where this node does not see the run folder that `phalanx launch` has written.
    """
    paths = RunPaths(run)
    permissions.restrict_permissions(paths.root)
    launched = _wait_for_launch_spec(paths)
    if launched is None and paths.launched.exists():
        raise ConfigError(
            f"{paths.launched} cannot be read by this version of Phalanx; launch the run again with the version "
            "installed on the nodes"
        )
    if launched is None:
        raise ConfigError(
            f"node {platform.node()} cannot see what `phalanx launch` wrote to {paths.launch}; give --run-dir a "
            "folder on a file system that all nodes share"
        )
    scheduler = find_scheduler(launched.scheduler)
    step = scheduler.read_task(environment, paths)
    node = 0 if step is None else step.node
    if step is not None and any(over.code == ExitCode.DONE for over in read_start_outcomes(paths)):
        return int(ExitCode.DONE)  # others were done before this node came, in place of another one
    stop = _StopHandler()
    before = {number: signal.signal(number, stop) for number in active_stop_signals()}
    try:
        with hold_lock(paths) if step is None else contextlib.nullcontext():
            while True:
                code = _run_training(paths, launched, node, step, stop)
                start = f"local-{os.getpid()}-{time.time_ns()}" if step is None else step.name
                leaves = stop.asked == LEAVE_SIGNAL and not paths.cancelled.exists()
                follow = _record_outcome(paths, launched, node, start, code)
                if step is not None or follow != RESTART or stop.asked is not None:
                    break
        if step is not None:
            if not leaves:  # else others are left who look after it, and this machine's time is short
                _end_orphaned_job(paths, scheduler, step, code, follow, stop)
            # A node that is unfit, or was cut off, ends nothing: the others may train on.
            ends = launched.until_done and follow != RESTART and code in (ExitCode.FAILED, ExitCode.STOPPED)
            return scheduler.exit_code(code, leaves, ends and not _is_led(paths, environment))
        return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_launch_spec(paths: RunPaths) -> LaunchSpec | None:
    until = time.monotonic() + SEEN_S
    while (launched := read_launch_spec(paths)) is None and time.monotonic() < until:
        time.sleep(0.2)
    return launched


def train_command(paths: RunPaths, launched: LaunchSpec, node: int, rendezvous: str) -> list[str]:
    """The command of a node."""
    words = ["train", str(paths.launch_recipe), "--run-dir", str(paths.root)]
    words += [] if launched.ranks is None else ["--ranks", str(launched.ranks)]
    if launched.nodes + launched.spares > 1:
        words += ["--nodes", str(launched.nodes), "--node-rank", str(node)]
        words += ["--rendezvous", rendezvous]
        words += ["--spares", str(launched.spares)] if launched.spares else []
    return [sys.executable, "-m", "phalanx", *words]


def _run_training(paths: RunPaths, launched: LaunchSpec, node: int, step: JobTask | None, stop: _StopHandler) -> int:
    """Run `phalanx train` until it ends by itself; restart it if it is killed."""
    log = paths.node_log(node)
    log.parent.mkdir(parents=True, exist_ok=True)
    revivals = 0
    with open(log, "ab", buffering=0) as out:
        while True:
            where = platform.node() if step is None else f"{platform.node()}, job {step.job}, start {step.start_count}"
            _note(out, f"{time.strftime('%Y-%m-%d %H:%M:%S')} on {where}")
            if stop.asked is None and paths.cancelled.exists():
                _note(out, "not started because the run was cancelled; submit it again with `phalanx launch`")
            began = _size(paths.metrics)
            meet = find_scheduler(launched.scheduler).find_rendezvous(paths, step)
            code = _run_child(train_command(paths, launched, node, meet), out.fileno(), stop, paths.cancelled)
            if code >= 0:
                return code
            if stop.asked is not None and -code in STOP_SIGNALS:
                return stop.code  # before it could heed it; or the scheduler sent the signal to it, too, as it left
            revivals = 1 if _size(paths.metrics) > began else revivals + 1
            last = revivals > REVIVALS or stop.asked is not None
            then = "giving up" if last else "restarting it"
            _note(out, f"phalanx train was killed here by {signal_name(-code)}; {then}")
            if last:
                return int(ExitCode.FAILED)


def _note(out: BinaryIO, text: str) -> None:
    """Write a line to the child's log. A full disk must not end training."""
    with contextlib.suppress(OSError):
        out.write(f"--- {text}\n".encode())


def _run_child(words: list[str], out: int, stop: _StopHandler, cancelled: Path) -> int:
    """Run a command that dies with this process; minus a signal's number where one has ended it. It is asked to stop
    when the file `cancelled` appears, too, since a signal may have come too early."""
    parent = os.getpid()
    # Before it is looked whether one has come: the next is then heeded when there is a child to pass it on to.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if cancelled.exists():
            return int(ExitCode.STOPPED)
        if stop.asked is not None:
            return stop.code
        stop.child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,  # a scheduler may signal the whole group of a task; the child is to hear of it once
            preexec_fn=lambda: _begin(parent, mask),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    child = os.pidfd_open(stop.child.pid)
    try:
        poll = select.poll()
        poll.register(child, select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            if stop.asked is None and cancelled.exists():
                stop(signal.SIGTERM, None)
    finally:
        os.close(child)
    code = stop.child.wait()
    stop.child = None
    return code


def _begin(parent: int, mask: Any) -> None:
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# --------------------------------------------------------------------------------------------------------- how it ended


def _is_led(paths: RunPaths, environment: Mapping[str, str]) -> bool:
    """Whether the leader of the newest epoch answers, so that other nodes continue the run."""
    leader, secret = election.read_leader_address(paths), environment.get(shared_secret.VARIABLE)
    if leader is None or not secret:
        return False
    return rendezvous_client.is_run_active((leader[0],), leader[1], secret)


def _record_outcome(paths: RunPaths, launched: LaunchSpec, node: int, start: str, code: int) -> str:
    """Record how this start ended, and return what follows.

    A node may fail alone, but is done or stopped together with all others. So the record of a failure is replaced by
    later ones, and that of a success stays; of equal ones the lower node's stays.
    """
    path = paths.start_outcome(start)
    there = read_start_outcome(path)
    if there is not None and _is_final(there, node, code):
        return there.next_action
    saved = outcome.checkpoint_step_in_events(paths)
    others = [read_start_outcome(other) for other in list_outcome_files(paths) if other != path]
    before = [over for over in others if over is not None]
    follow, why = decide_restart(launched, code, paths.cancelled.exists(), saved, before)
    text = f"{int(code)} {follow} {saved} {node}\n"
    with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
        if there is not None or not _create_file(path, text):
            there = read_start_outcome(path)  # again: another node may have ended in the same moment
            if there is not None and _is_final(there, node, code):
                return there.next_action
            write_atomic(path, text)
        if why:
            with open(paths.node_log(node), "a", encoding="utf-8") as log:
                log.write(f"--- no further restart: {why}\n")
    return follow


def _is_final(there: StartOutcome, node: int, code: int) -> bool:
    """Whether another node's outcome takes precedence over this node's."""
    sure = (ExitCode.DONE, ExitCode.STOPPED)
    return there.code in sure and (code not in sure or there.node < node)


def _create_file(path: Path, text: str) -> bool:
    """Write a file that is whole as soon as it is there; False where there is one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # not every file system has links
        write_atomic(path, text)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _end_orphaned_job(
    paths: RunPaths, scheduler: Scheduler, step: JobTask, code: int, follow: str, stop: _StopHandler
) -> None:
    """End the job where its script is gone with the node that ran it, node 0: otherwise it would last until its time
    limit."""
    stop.asked = None  # the signal that ended training does not concern this
    until = time.monotonic() + NODE0_OUTCOME_WAIT_S
    while step.node > 0:
        over = read_start_outcome(paths.start_outcome(step.name))
        if over is not None and over.node == 0:
            return
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    if step.node == 0 or scheduler.is_script_alive(step):
        return
    if code not in (ExitCode.DONE, ExitCode.STOPPED) and not _are_records_silent(paths, stop):
        return  # others train on
    _end_job(paths, scheduler, step, follow, stop)


def _end_job(paths: RunPaths, scheduler: Scheduler, step: JobTask, follow: str, stop: _StopHandler) -> None:
    """Have the scheduler end the job; where it does not, as while its controller restarts, it is asked again for a
    while. One that does not run any more is left alone: the scheduler ends it or puts it back into the queue, as other
    nodes or its user have asked. One that is cancelled meanwhile is not put back."""
    until = time.monotonic() + ASK_S
    stop.asked = None  # the signal that ended training does not concern this
    if not _is_job_running(scheduler, step.job):
        return
    while True:
        try:
            back = follow == RESTART and not paths.cancelled.exists()
            (scheduler.requeue if back else scheduler.cancel)(step.job)
            return
        except ConfigError:  # in a container there are no commands of the scheduler
            return
        except PhalanxError as error:
            with contextlib.suppress(OSError), open(paths.node_log(step.node), "a", encoding="utf-8") as log:
                log.write(f"--- job {step.job} could not be ended: {error}\n")
        if stop.asked is not None or time.monotonic() > until or not _is_job_running(scheduler, step.job):
            return
        again = time.monotonic() + AGAIN_S
        while stop.asked is None and time.monotonic() < again:
            time.sleep(0.1)
        if stop.asked is not None and not paths.cancelled.exists():  # by the scheduler, which ends the job
            return


def _is_job_running(scheduler: Scheduler, job: str) -> bool:
    """Whether a job still runs; assumed if Slurm does not answer."""
    try:
        known = scheduler.query_job(job)
    except PhalanxError:
        return True
    return known is not None and not (known.waits or known.ends or known.over)


def _are_records_silent(paths: RunPaths, stop: _StopHandler) -> bool:
    """Whether the records do not grow for QUIET_S, or for ASKED_S after a stop signal; false as soon as they do."""
    sizes = _size(paths.metrics), _size(paths.events)
    until, heard = time.monotonic() + QUIET_S, False
    while time.monotonic() < until:
        time.sleep(GROWN_S)
        if (_size(paths.metrics), _size(paths.events)) != sizes:
            return False
        if stop.asked is not None and not heard:
            until, heard = min(until, time.monotonic() + ASKED_S), True
    return True
