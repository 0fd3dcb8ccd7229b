"""The agent of one node: a warm parent that forks the ranks, watches them, kills them and forks again.

Starting Python and importing torch costs seconds, a fork of a process that has done so costs milliseconds; so the agent
imports what the workers need (`preload`) and starts nothing itself: it has one thread, never touches an accelerator and
never computes. Workers do not try to survive a broken process group: when one ends abnormally all are killed and the
next attempt starts at once. No torch here; the caller says what to preload and what a worker runs.
"""

import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from phalanx.cluster.causes import End, first_cause, is_aftermath
from phalanx.cluster.fork import STOP_SIGNALS, fork, heeded, kill_group, out_of_memory_kills
from phalanx.cluster.worker import STACKS_SIGNAL, run_worker
from phalanx.errors import PhalanxError, RunError
from phalanx.records import ExitCode, Kind, Placement, RunPaths, StoreAddress

IDLE_S = 0.1  # how often `on_idle` is called
SETTLE_S = 0.2  # how long a worker that merely lost a peer waits for the one that caused it to be seen
STACKS_S = 0.2  # what a hung worker gets to write its stacks down
DEATH_S = 10.0  # what the kernel gets to tear a killed worker down
CAUSE_FIELDS = {"exit_code", "type", "message", "reason", "step"}
NEVER_RETRIED = (ExitCode.CONFIG, ExitCode.OUT_OF_MEMORY, ExitCode.STOPPED)


def _nothing() -> None:
    return None


def _none() -> int:
    return 0


def _no_event(kind: str, details: dict[str, Any]) -> None:
    return None


@dataclass
class Job:
    """What an agent runs: `world` ranks of `worker` on this node, started anew up to `max_restarts` times in a row.

    `progress` says how far the run has come for good (the step of the newest checkpoint); when it has grown since the
    failure before, the count of restarts begins again.

    `devices` has one name per rank (none given: all on the CPU). `paths` says where logs and causes of death go (None:
    standard error, and no causes). `on_event(kind, details)` gets the events; details always hold `attempt`. `on_idle`
    is called about every 0.1 s. `grace_s`: seconds that workers get, after a stop signal, to finish their step and
    save, before they are killed.
    """

    world: int
    worker: Callable[[Placement], int]
    paths: RunPaths | None = None
    devices: Sequence[str] = ()
    max_restarts: int = 0
    on_event: Callable[[str, dict[str, Any]], None] = _no_event
    on_idle: Callable[[], None] = _nothing
    first_attempt: int = 1
    grace_s: float = 60.0
    progress: Callable[[], int] = _none

    def __post_init__(self) -> None:
        self.devices = list(self.devices) or ["cpu"] * self.world
        assert len(self.devices) == self.world >= 1, f"{self.world} ranks need as many devices, not {self.devices}"


def preload(modules: Sequence[str]) -> None:
    """Import modules that the workers will need, with every numerical library held to one thread meanwhile.

    Workers raise their thread count themselves (`torch.set_num_threads`). Objects alive afterwards are taken out of the
    garbage collector's sight, so that collections in the workers do not copy the shared pages.
    """
    limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in limits}
    os.environ.update(dict.fromkeys(limits, "1"))
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    gc.collect()
    gc.freeze()


def run(job: Job) -> int:
    """Run a job to its end and return its exit code.

    DONE when all ranks are done; STOPPED when they stopped for a signal; otherwise the code of the first real cause
    (FAILED for a death by signal). A configuration error and an exhausted memory are never retried, nor is anything
    once a stop was asked for. SIGTERM and SIGUSR1 are passed on to the workers, a first SIGINT and a SIGHUP that is not
    ignored as SIGTERM; a second SIGINT, or `grace_s` gone by, kills them. Must be called from the main thread; signal
    handlers are as before when it returns. However it ends, by an exception of a callback too, no worker is left.

    Raises:
        RunError: logs cannot be written.
        PhalanxError: a killed worker does not die.
    """
    failures, reached = 0, job.progress()
    with _Signals() as signals:
        for number in itertools.count(job.first_attempt):
            attempt = _Attempt(job, number, signals)
            try:
                attempt.start()
                code = attempt.watch()
            finally:
                attempt.kill()
            for late in signals.take():
                job.on_event(Kind.SIGNALLED, {"attempt": number, "signal": late.name})
            if code == ExitCode.DONE or code in NEVER_RETRIED or signals.asked:
                return code
            before, reached = reached, max(reached, job.progress())
            failures = 1 if reached > before else failures + 1
            if failures > job.max_restarts:
                return code
            job.on_event(Kind.RESTARTED, {"attempt": number + 1})
    raise AssertionError("unreachable")


class _Signals:
    """Stop signals as bytes on a socket that poll() sees, instead of interruptions at any line."""

    def __init__(self) -> None:
        self.asked: list[signal.Signals] = []  # stop signals so far, over all attempts
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> "_Signals":
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _noted) for number in heeded()}
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
        self.asked += new
        return new


def _noted(number: int, frame: FrameType | None) -> None:
    """The byte on the wake-up descriptor is all that is needed."""


@dataclass
class _Process:
    rank: int
    pid: int
    pidfd: int
    killed: bool = False
    status: int | None = None  # as os.waitstatus_to_exitcode gives it: an exit code, or minus a signal


@dataclass
class _Attempt:
    job: Job
    number: int
    signals: _Signals
    processes: list[_Process] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)  # in order of detection
    forwarded: set[int] = field(default_factory=set)
    deadline: float | None = None  # of the grace period
    next_idle: float = 0.0
    kills_before: int = field(default_factory=out_of_memory_kills)

    def start(self) -> None:
        """Bind the socket where the ranks meet, fork them, close it here."""
        world = self.job.world
        if self.job.paths is not None:
            self._make_logs(self.job.paths)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))  # a new port each time: nobody can meet a dead attempt's addresses
            listener.listen(socket.SOMAXCONN)
            host, port = listener.getsockname()
            for rank in range(world):
                listen_fd = listener.fileno() if rank == 0 and world > 1 else None
                placement = Placement(
                    rank=rank,
                    world=world,
                    local_rank=rank,
                    local_world=world,
                    node=0,
                    device=self.job.devices[rank],
                    store=StoreAddress(host, port, listen_fd) if world > 1 else None,
                    attempt=self.number,
                )
                self._fork(placement)
        pids = {process.rank: process.pid for process in self.processes}
        self.job.on_event(Kind.ATTEMPT_STARTED, {"attempt": self.number, "pids": pids})

    def _fork(self, placement: Placement) -> None:
        keep = [] if placement.store is None or placement.store.listen_fd is None else [placement.store.listen_fd]
        pid, pidfd = fork(lambda: run_worker(self.job.worker, placement, self.job.paths), keep)
        self.processes.append(_Process(placement.rank, pid, pidfd))

    def _make_logs(self, paths: RunPaths) -> None:
        try:
            paths.log(self.number, 0).parent.mkdir(parents=True, exist_ok=True)
            for rank in range(self.job.world):
                paths.cause(self.number, rank).unlink(missing_ok=True)  # of an older run with the same number
                paths.log(self.number, rank).touch()
        except OSError as error:
            raise RunError(
                f"the workers' logs cannot be written under {paths.root} ({error.strerror}), so no worker was started; "
                "choose another run folder or make this one writable"
            ) from error

    def watch(self) -> int:
        """Wait until all have ended, or until the first abnormal end, and return the exit code."""
        while self._living():
            self._wait(IDLE_S, heed_signals=True)
            for number in self.signals.take():
                self._pass_on(number)
            if any(end.abnormal for end in self.ends):
                return self._incident()
            if self._living() and self._patience_is_over():
                return self._kill_the_unwilling()
            if time.monotonic() >= self.next_idle:
                self.next_idle = time.monotonic() + IDLE_S
                self.job.on_idle()
        if any(end.abnormal for end in self.ends):
            return self._incident()
        stopped = any(end.exit_code == ExitCode.STOPPED for end in self.ends)
        return int(ExitCode.STOPPED if stopped else ExitCode.DONE)

    def _living(self) -> list[_Process]:
        return [process for process in self.processes if process.status is None]

    def _wait(self, seconds: float, heed_signals: bool) -> None:
        """Sleep until a worker ends, a signal comes or the time is up; reap every worker that has ended."""
        poll = select.poll()
        if heed_signals:
            poll.register(self.signals, select.POLLIN)
        for process in self._living():
            poll.register(process.pidfd, select.POLLIN)
        poll.poll(seconds * 1000)
        for process in self._living():
            if os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._reap(process)

    def _reap(self, process: _Process) -> None:
        kill_group(process.pid)  # before the reaping, as the number is free for others afterwards
        process.status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        os.close(process.pidfd)
        by_us = process.killed and process.status == -signal.SIGKILL
        cause = self._read_cause(process.rank)
        if by_us and cause is None:
            return  # it was well, as far as anyone knows
        number = -process.status if process.status < 0 and not by_us else None
        code = process.status if process.status >= 0 else None
        if by_us and cause is not None:
            code = cause["exit_code"]  # it had failed before it was killed
        self.ends.append(End(process.rank, process.pid, number, code, cause))

    def _read_cause(self, rank: int) -> dict[str, Any] | None:
        if self.job.paths is None:
            return None
        try:
            cause = json.loads(self.job.paths.cause(self.number, rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # there is none, or none that can be read: exit code and log still say something
            return None
        return cause if isinstance(cause, dict) and cause.keys() >= CAUSE_FIELDS else None

    def _pass_on(self, number: signal.Signals) -> None:
        self.job.on_event(Kind.SIGNALLED, {"attempt": self.number, "signal": number.name})
        if self.deadline is None:
            self.deadline = time.monotonic() + self.job.grace_s
        sent = signal.SIGTERM if number in (signal.SIGINT, signal.SIGHUP) else number
        if sent in self.forwarded:
            return
        self.forwarded.add(sent)
        for process in self._living():
            signal.pidfd_send_signal(process.pidfd, sent)

    def _patience_is_over(self) -> bool:
        if self.signals.asked.count(signal.SIGINT) >= 2:
            return True
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _incident(self) -> int:
        """After an abnormal end: find its cause, kill the others, report."""
        until = time.monotonic() + SETTLE_S
        while self._living() and all(is_aftermath(end) for end in self.ends if end.abnormal):
            left = until - time.monotonic()
            if left <= 0:
                break
            self._wait(left, heed_signals=False)
        self.kill()
        end = first_cause([end for end in self.ends if end.abnormal])
        details = end.details()
        if end.signal == signal.SIGKILL and out_of_memory_kills() > self.kills_before:
            details["reason"] += "; the kernel has killed something for want of memory meanwhile"
        self.job.on_event(Kind.WORKER_DIED, {"attempt": self.number, **details})
        if end.signal in self.forwarded:
            return int(ExitCode.STOPPED)  # it had not got as far as to handle the signal, nor to do a step
        return int(ExitCode.FAILED if end.exit_code is None else end.exit_code)

    def _kill_the_unwilling(self) -> int:
        """Kill the workers that have not stopped in time; their logs get the stacks they were killed in."""
        unwilling = self._living()
        if self.job.paths is not None:
            for process in unwilling:
                signal.pidfd_send_signal(process.pidfd, STACKS_SIGNAL)
            time.sleep(STACKS_S)
        self.kill()
        impatient = self.signals.asked.count(signal.SIGINT) >= 2
        why = "at a second SIGINT" if impatient else f"{self.job.grace_s:g} s after the stop signal"
        for process in unwilling:
            details = {"rank": process.rank, "pid": process.pid, "signal": "SIGKILL"}
            reason = f"killed by the agent: still running {why}"
            self.job.on_event(Kind.WORKER_DIED, {"attempt": self.number, **details, "reason": reason})
        return int(ExitCode.FAILED)

    def kill(self) -> None:
        """SIGKILL every worker that still lives and reap it; nothing to do where all have ended."""
        for process in self._living():
            process.killed = True
            kill_group(process.pid)
        until = time.monotonic() + DEATH_S
        while self._living() and time.monotonic() < until:
            self._wait(until - time.monotonic(), heed_signals=False)
        if self._living():
            names = ", ".join(f"rank {process.rank} (pid {process.pid})" for process in self._living())
            raise PhalanxError(
                f"{names} did not die within {DEATH_S:g} s of SIGKILL, so nothing new was started beside it; "
                "look for a stuck device or file system (ps shows state D)"
            )
