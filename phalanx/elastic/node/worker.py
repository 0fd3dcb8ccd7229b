"""The life of one rank inside its forked process: output to a log, the worker function, a cause of death on disk.

A worker ends in one of three ways: its function returns an exit code, it raises (the exception goes to the cause file
and the log), or a signal kills it (the agent sees which). No torch here.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from phalanx.core.errors import PhalanxError
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode, HostPort, InMemoryCheckpoint, Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.messages import MessageRecord
from phalanx.elastic.node.watchdog import HangTimeouts, StepHistory
from phalanx.system.exit_causes import describe_exception
from phalanx.system.fork import LEAVE_SIGNAL, STOP_SIGNALS, active_stop_signals

STACKS_SIGNAL = signal.SIGUSR2  # a worker that gets it writes the stacks of its threads to its log


def run_worker(
    worker: Callable[[Placement], int],
    placement: Placement,
    paths: RunPaths | None,
    interface: str | None = "lo",
    logs: bool = True,
) -> int:
    """Run one rank to its end and return its exit code; an exception is written to the cause file and the log.
    `interface` is the network interface that leads to the other ranks, unless the environment names one; of threads the
    environment may say how many, too.

    A PhalanxError leaves its sentence in the log, anything else its traceback. With `paths` None, or without
    `logs`, both go to the inherited standard error; with None no cause file is written.
    """
    if paths is not None:
        if logs:
            _redirect_output(paths.log(placement.attempt, placement.rank))
        faulthandler.enable(file=2, all_threads=True)
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
        if placement.shared is not None:
            _record_flights(paths.flight_records(placement.attempt), _pipes(Path(placement.shared)))
    # Without this gloo asks the resolver for the host's own name, maybe in vain.
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface not in (None, "lo"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    chosen = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if chosen.isdecimal():
        placement = dataclasses.replace(placement, threads=int(chosen))
    try:
        return int(worker(placement))
    except SystemExit as error:
        return _code_of(error)
    except BaseException as error:
        cause = describe_exception(error) | {"rank": placement.rank, "attempt": placement.attempt}
        if paths is not None:
            _write_cause(paths.exit_cause(placement.attempt, placement.rank), cause)
        sys.stderr.write(cause["reason"] + "\n" if isinstance(error, PhalanxError) else cause["traceback"])
        return int(cause["exit_code"])


def _redirect_output(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _record_flights(records: Path, pipes: Path) -> None:
    """Configure NCCL's flight recorder: it keeps the last collectives and dumps them on request or after a timeout. It
    adds the rank to these names, and reads them when its groups are made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(records))
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(pipes))


def ask_flight_recorder(shared: Path, rank: int) -> None:
    """Request NCCL's flight recorder dump of a rank; no effect without NCCL."""
    pipe = f"{_pipes(shared)}{rank}.pipe"
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):  # it has just died, or does not read its socket
            os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)


def _pipes(shared: Path) -> Path:
    return shared / "flight-"


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return int(ExitCode.DONE)
    if isinstance(error.code, int):
        return error.code
    sys.stderr.write(f"{error.code}\n")
    return int(ExitCode.FAILED)


def _write_cause(path: Path, cause: dict[str, Any]) -> None:
    try:
        write_atomic(path, json.dumps(cause))
    except OSError as error:  # a full disk must not hide why the worker ended: the log and the exit code still say it
        sys.stderr.write(f"the cause of death could not be written to {path}: {error}\n")


# ------------------------------------------------------------------------------------------------------------- signals
# Stop signals: raised as an exception before ranks run, polled as a flag while ranks run.


class StopRequested(BaseException):
    """A stop signal came; its text is the signal's name. No error, so nothing that handles errors may catch it."""

    @property
    def leaves(self) -> bool:
        """Whether only this node stops, whose machine will soon be gone."""
        return str(self) == LEAVE_SIGNAL.name


@contextlib.contextmanager
def raise_on_stop_signal() -> Iterator[None]:
    """Raise StopAsked at a stop signal, once: more of them do not disturb the clearing away.

    Must be entered in the main thread; signal handlers are as before afterwards.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise StopRequested(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in active_stop_signals()}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """Stop signals as bytes on a socket that poll() sees, instead of interruptions at any line."""

    def __init__(self, read_notice: Callable[[], str] = str) -> None:
        """`read_notice`: why this machine will be gone, where LEAVE_SIGNAL came from a watcher that knows."""
        self.all_signals: list[signal.Signals] = []  # stop signals so far, over all attempts
        self.read_notice = read_notice
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> "StopSignals":
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _noted) for number in active_stop_signals()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """Stop signals since the last call."""
        try:
            received = self._reader.recv(4096)
        except BlockingIOError:
            return []
        new = [signal.Signals(number) for number in received if number in STOP_SIGNALS]
        self.all_signals += new
        return new

    def describe(self, number: signal.Signals) -> Message:
        """What the leader is told of a signal."""
        return {"stop": number.name} | ({"reason": self.read_notice()} if number == LEAVE_SIGNAL else {})


def _noted(number: int, frame: FrameType | None) -> None:
    """The byte on the wake-up descriptor is all that is needed."""


# -------------------------------- what an agent runs on its node, and what it knows of the other nodes of the same job


class LeaderRole(Protocol):
    """The extra work of the leading node."""

    def poll_once(self) -> None:
        """Run one turn without blocking."""

    def hear(self, node: int, message: MessageRecord) -> None:
        """Handle a member's message."""

    def greet(self, channel: Channel, hello: Message) -> None:
        """Take a caller who is no member."""

    def descriptors(self) -> Mapping[int, int]:
        """Descriptors for poll(), with their event masks."""

    def close(self, over: tuple[int, str] | None) -> None:
        """Clean up; joining nodes receive how the job ended, exit code and text, if it is `over`."""


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of a job on one node."""

    node: int
    first_rank: int
    world: int  # ranks of the whole job
    interface: str | None  # the network interface that leads to the other nodes, where it is known
    nodes: int = 1  # that have ranks
    partner: HostPort | None = None  # where the agent of the next one of them is
    epoch: int | None = None  # in which its attempt was ordered


def _nothing() -> None:
    return None


def _no() -> bool:
    return False


def _not_less(rank: int, tried: int, steps: int) -> None:
    return None


def _nothing_kept() -> None:
    return None


def _no_event(kind: str, details: dict[str, Any]) -> None:
    return None


@dataclass
class NodeJob:
    """The job of an agent: `world` ranks of `worker` on this node.

    `find_in_memory_state` returns the state in shared memory that an attempt resumes from; it is called when no rank is
    alive. `after_out_of_memory` returns whether, after a rank ran out of memory, the next attempt uses less: then it is
    made, whatever the count. `after_kernel_kill` receives a rank that the kernel killed because memory ran out, the
    sequences of its largest micro-batch and the number of its steps in the attempt; it reduces the memory use if
    possible and returns a message, or None: the death is treated like any other.

    `devices` has one name per rank (empty: all on the CPU). `paths` has the logs and causes of death (None: standard
    error, and no causes), `logs` says whether ranks have logs or write to the agent's output. `blocked_signals`:
    signals blocked until a rank unblocks them, as a training rank does once it can handle them. `on_event(kind,
    details)` receives the events; details always have `attempt`. `on_idle` is called about every 0.1 s. `grace_s`:
    seconds for workers, after a stop signal, to finish their step and save, before they are killed. `stop_notice_s`:
    seconds until this machine may be gone then; workers that have not begun to save after a third of it are killed, if
    no committed step is lost with them (None: never).

    `shared`: a folder in this node's shared memory, which outlives the ranks, for their state if `keeps_state`; it has
    their progress pages, by which ranks are killed that make no progress for longer than `hang_timeouts` (None: never);
    `step_history` has the step times of earlier attempts of this job.
    """

    world: int
    worker: Callable[[Placement], int]
    paths: RunPaths | None = None
    devices: Sequence[str] = ()
    on_event: Callable[[str, dict[str, Any]], None] = _no_event
    on_idle: Callable[[], None] = _nothing
    grace_s: float = 60.0
    stop_notice_s: float | None = None
    after_out_of_memory: Callable[[], bool] = _no
    after_kernel_kill: Callable[[int, int, int], str | None] = _not_less
    shared: Path | None = None
    keeps_state: bool = True
    hang_timeouts: HangTimeouts | None = None
    step_history: StepHistory = field(default_factory=StepHistory)
    find_in_memory_state: Callable[[], InMemoryCheckpoint | None] = _nothing_kept
    logs: bool = True
    blocked_signals: Collection[int] = ()

    def __post_init__(self) -> None:
        self.devices = list(self.devices) or ["cpu"] * self.world
        assert len(self.devices) == self.world >= 1, f"{self.world} ranks need one device each, not {self.devices}"
