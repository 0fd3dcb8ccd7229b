"""`phalanx keep`: runs `phalanx train` on one node of a launched run, and goes on where that process cannot.

What it does is written in the run folder. It keeps the output of its `phalanx train` in a file of its own node, starts
it again when something has killed it (the other nodes wait for it meanwhile), says in a file how the run has ended and
whether another start follows, and ends the Slurm job where nothing is left that would: the machine that ran the job's
script may be gone. It imports no torch and does little else than wait.
"""

import contextlib
import json
import os
import platform
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from phalanx.core.errors import ConfigError, PhalanxError, RunError
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.launch import outcome
from phalanx.launch.slurm import commands as slurm
from phalanx.storage import permissions
from phalanx.system import locks
from phalanx.system.exit_causes import signal_name
from phalanx.system.fork import STOP_SIGNALS, active_stop_signals, die_with
from phalanx.system.slurm_env import SlurmStep, read_slurm_step

STALLED = 3  # starts in a row without a new checkpoint, after which no further one is made
REVIVALS = 3  # how often in a row an agent that was killed is started again
LOOK_S = 3.0  # between two looks whether the run was cancelled
SEEN_S = 5.0  # what a network file system gets to show what `phalanx launch` has written
NODE0_OUTCOME_WAIT_S = 10.0  # what node 0 gets to say how the run ended, before it is looked after
SRUN_FLUSH_S = 1.0  # what srun gets to hand on what a node has said, before its step is ended
ASK_S, AGAIN_S = 300.0, 5.0  # how long Slurm is asked to end a job whose script is gone, and how often
QUIET_S = 600.0  # a run whose records have not grown for so long has nobody left who trains
ASKED_S = 90.0  # once asked to stop, of which who trains makes a note; a shared folder may be shown a minute late
GROWN_S = 2.0  # between two looks whether they have grown
RESTART, END = "again", "end"


@dataclass(frozen=True)
class LaunchSpec:
    """What `phalanx launch` wants to be done; `nodes` are those that train, `spares` those that wait beside them."""

    slurm: bool
    nodes: int
    spares: int
    ranks: int | None
    until_done: bool
    max_starts: int
    submitted: float  # seconds since the epoch
    host: str


def write_launch_spec(paths: RunPaths, spec: LaunchSpec) -> None:
    write_atomic(paths.launched, json.dumps(asdict(spec), indent=2) + "\n")


def read_launch_spec(paths: RunPaths) -> LaunchSpec | None:
    """How the run was launched; None where it was not, or by another version."""
    try:
        tree = json.loads(paths.launched.read_text(encoding="utf-8"))
        return LaunchSpec(**{field.name: tree[field.name] for field in fields(LaunchSpec)})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class StartOutcome:
    """How one start of a launched run ended: by `code`, with `next_action` another one or not, at the saved `step`, as
    `node` says."""

    code: int
    next_action: str
    step: int
    node: int = 0


def read_start_outcome(path: Path) -> StartOutcome | None:
    try:
        words = path.read_text(encoding="utf-8").split()
        return StartOutcome(int(words[0]), words[1], int(words[2]), int(words[3]))
    except (OSError, ValueError, IndexError):
        return None


def read_start_outcomes(paths: RunPaths) -> list[StartOutcome]:
    """How the starts before ended, oldest first."""
    return [over for path in _outcome_files(paths) if (over := read_start_outcome(path)) is not None]


def _outcome_files(paths: RunPaths) -> list[Path]:
    """Files of how starts ended, oldest first, but for those that another launch is just removing."""
    found: list[tuple[float, Path]] = []
    for path in paths.launch.glob("over-*"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def decide_restart(
    launched: LaunchSpec, code: int, cancelled: bool, saved: int, before: Sequence[StartOutcome]
) -> tuple[str, str]:
    """Whether another start follows one that ended with `code`, having `saved` that step, and why not if so.

    What has been done is done; what was a mistake of the recipe, or too much for the memory, would be so again.
    """
    if code in (ExitCode.DONE, ExitCode.CONFIG, ExitCode.OUT_OF_MEMORY) or not launched.until_done:
        return END, ""
    if cancelled:
        return END, "it was cancelled"
    if len(before) + 1 >= launched.max_starts:
        return END, f"it was started {len(before) + 1} times, which is all that --max-jobs allows"
    reached = [over.step for over in before]
    if len(reached) + 1 >= STALLED and saved <= [0, *reached][-STALLED]:
        return END, f"{STALLED} starts in a row have not come further than step {saved}"
    return RESTART, ""


# ------------------------------------------------------------------------------------------------------------- one node


class _StopHandler:
    """Passes stop signals on to the child, and remembers them for one that is about to be started."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.child: subprocess.Popen[bytes] | None = None

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
    step = read_slurm_step(environment)
    launched = _wait_for_launch_spec(paths)
    if launched is None and paths.launched.exists():
        raise ConfigError(
            f"{paths.launched} says nothing that this version of Phalanx knows; launch the run again, "
            "of the version that the nodes have"
        )
    if launched is None:
        raise ConfigError(
            f"node {platform.node()} does not see what `phalanx launch` has written to {paths.launch}; give --run-dir "
            "a folder on a file system that all nodes share"
        )
    node = 0 if step is None else step.node
    stop = _StopHandler()
    before = {number: signal.signal(number, stop) for number in active_stop_signals()}
    try:
        with _hold_lock(paths) if step is None else contextlib.nullcontext():
            while True:
                code = _run_training(paths, launched, node, step, stop)
                start = f"local-{os.getpid()}-{time.time_ns()}" if step is None else step.name
                follow = _record_outcome(paths, launched, node, start, code)
                if step is not None or follow != RESTART or stop.asked is not None:
                    break
        if step is not None:
            _end_orphaned_job(paths, step, code, follow, stop)
        return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_launch_spec(paths: RunPaths) -> LaunchSpec | None:
    until = time.monotonic() + SEEN_S
    while (launched := read_launch_spec(paths)) is None and time.monotonic() < until:
        time.sleep(0.2)
    return launched


def train_command(paths: RunPaths, launched: LaunchSpec, node: int) -> list[str]:
    """What is run on a node."""
    words = ["train", str(paths.launch_recipe), "--run-dir", str(paths.root)]
    words += [] if launched.ranks is None else ["--ranks", str(launched.ranks)]
    if launched.nodes + launched.spares > 1:
        words += ["--nodes", str(launched.nodes), "--node-rank", str(node)]
        words += ["--rendezvous", paths.rendezvous.resolve().as_uri()]
        words += ["--spares", str(launched.spares)] if launched.spares else []
    return [sys.executable, "-m", "phalanx", *words]


def _run_training(paths: RunPaths, launched: LaunchSpec, node: int, step: SlurmStep | None, stop: _StopHandler) -> int:
    """Run `phalanx train` until it ends of itself; one that is killed is started again."""
    log = paths.node_log(node)
    log.parent.mkdir(parents=True, exist_ok=True)
    revivals = 0
    with open(log, "ab", buffering=0) as out:
        while True:
            where = platform.node() if step is None else f"{platform.node()}, job {step.job}, start {step.start_count}"
            _note(out, f"{time.strftime('%Y-%m-%d %H:%M:%S')} on {where}")
            if stop.asked is None and paths.cancelled.exists():
                _note(out, "not started, as the run was cancelled: give it to `phalanx launch` again")
            began = _size(paths.metrics)
            code = _run_child(train_command(paths, launched, node), out.fileno(), stop, paths.cancelled)
            if code >= 0:
                return code
            if stop.asked is not None and -code in STOP_SIGNALS:
                return int(ExitCode.STOPPED)  # before it could heed it; or Slurm sent the signal to it, too, as it left
            revivals = 1 if _size(paths.metrics) > began else revivals + 1
            last = revivals > REVIVALS or stop.asked is not None
            then = "giving up" if last else "starting it again"
            _note(out, f"phalanx train was killed here by {signal_name(-code)}; {then}")
            if last:
                return int(ExitCode.FAILED)


def _note(out: BinaryIO, text: str) -> None:
    """Write a line of one's own among those of the child. A full disk must not end what still trains."""
    with contextlib.suppress(OSError):
        out.write(f"--- {text}\n".encode())


def _run_child(words: list[str], out: int, stop: _StopHandler, cancelled: Path) -> int:
    """Run a command that dies with this process; minus a signal's number where one has ended it. It is asked to stop
    when the file `cancelled` comes to be, too: a signal may have come before there was anybody to heed it."""
    parent = os.getpid()
    # Before it is looked whether one has come: the next is then heeded when there is a child to pass it on to.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if stop.asked is not None or cancelled.exists():
            return int(ExitCode.STOPPED)
        stop.child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,  # Slurm signals the whole group of a task; the child is to hear of it once
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


def _record_outcome(paths: RunPaths, launched: LaunchSpec, node: int, start: str, code: int) -> str:
    """Write down how this start ended, and return what follows.

    A node that failed may have failed alone; one that is done, or was stopped, is so with all others. So what a failure
    says is replaced by what comes later, and what a success says stays; of two that agree the lower node's word stays.
    """
    path = paths.start_outcome(start)
    there = read_start_outcome(path)
    if there is not None and _is_final(there, node, code):
        return there.next_action
    saved = outcome.checkpoint_step_in_events(paths)
    before = [over for other in _other_outcome_files(paths, path) if (over := read_start_outcome(other)) is not None]
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
                log.write(f"--- no further start: {why}\n")
    return follow


def _is_final(there: StartOutcome, node: int, code: int) -> bool:
    """Whether what another node has said is not replaced by what this one says."""
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


def _other_outcome_files(paths: RunPaths, path: Path) -> list[Path]:
    return [other for other in _outcome_files(paths) if other != path]


def _end_orphaned_job(paths: RunPaths, step: SlurmStep, code: int, follow: str, stop: _StopHandler) -> None:
    """End the job where its script is gone with the node that ran it, which is node 0's: nobody else would, before the
    time is up."""
    stop.asked = None  # what has ended the training is no word on this
    until = time.monotonic() + NODE0_OUTCOME_WAIT_S
    while step.node > 0:
        over = read_start_outcome(paths.start_outcome(step.name))
        if over is not None and over.node == 0:
            return
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    if step.node == 0 or _is_srun_listening(step.caller):
        return
    if code not in (ExitCode.DONE, ExitCode.STOPPED) and not _are_records_silent(paths, stop):
        return  # others train on
    _end_job(paths, step, follow, stop)


def _end_job(paths: RunPaths, step: SlurmStep, follow: str, stop: _StopHandler) -> None:
    """Have Slurm end the job; where it does not, as when its controller starts anew, it is asked again for a while. One
    that does not run any more is left alone: Slurm ends it or puts it back into the queue, as other nodes, or its user
    by `scancel`, have asked. One that is cancelled meanwhile is not put back."""
    until = time.monotonic() + ASK_S
    stop.asked = None  # what has ended the training is no word on this
    if not _is_job_running(step.job):
        return
    while True:
        try:
            back = follow == RESTART and not paths.cancelled.exists()
            (slurm.requeue if back else slurm.cancel)(step.job)
            return
        except ConfigError:  # in a container there are no commands of Slurm's
            return
        except PhalanxError as error:
            with contextlib.suppress(OSError), open(paths.node_log(step.node), "a", encoding="utf-8") as log:
                log.write(f"--- job {step.job} was not ended: {error}\n")
        if stop.asked is not None or time.monotonic() > until or not _is_job_running(step.job):
            return
        again = time.monotonic() + AGAIN_S
        while stop.asked is None and time.monotonic() < again:
            time.sleep(0.1)
        if stop.asked is not None and not paths.cancelled.exists():  # by Slurm, which ends the job
            return


def _is_job_running(job: str) -> bool:
    """Whether a job still runs; where Slurm does not say so it is taken to."""
    try:
        known = slurm.query_job(job)
    except PhalanxError:
        return True
    return known is not None and not (known.waits or known.ends or known.over)


def _is_srun_listening(caller: tuple[str, int] | None) -> bool:
    """Whether the `srun` of this step still listens; where that is not known it is taken to."""
    if caller is None:
        return True
    try:
        socket.create_connection(caller, timeout=3).close()
    except OSError:
        return False
    return True


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


def cancel_step(environment: Mapping[str, str]) -> None:
    """End the step that this node cannot be part of: the other nodes would wait for it in vain."""
    time.sleep(SRUN_FLUSH_S)
    step = read_slurm_step(environment)
    if step is not None:
        with contextlib.suppress(PhalanxError):
            slurm.cancel(f"{step.job}.{step.step}")


# -------------------------------------------------------------------------------------------------- without a scheduler


@contextlib.contextmanager
def _hold_lock(paths: RunPaths) -> Iterator[None]:
    """Hold the lock that says that this process keeps the run. Raises RunError when another does."""
    descriptor = os.open(paths.job_supervisor, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not locks.try_lock(descriptor):
            raise RunError(
                f"{paths.display_name} is kept already, by process {_text(paths.job_supervisor)}; stop that first"
            )
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} on {platform.node()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def find_lock_holder(lock: Path) -> tuple[int, str] | None:
    """Process and machine that hold a lock file of a run, as they have written it there; None where nobody does."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        match = re.match(r"(\d+) on (\S+)", _text(lock)) if locks.is_locked(descriptor) else None
        return (int(match[1]), match[2]) if match else None
    finally:
        os.close(descriptor)


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip() or "unknown"
    return "unknown"
