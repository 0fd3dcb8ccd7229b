"""One attempt of a job on one node: its ranks are forked together, watched together, and killed together."""

import json
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.core import progress_page
from phalanx.core.errors import PhalanxError, RunError
from phalanx.core.placement import ExitCode, Placement, StoreAddress
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.channel import poll_descriptors
from phalanx.elastic.node.node_agent import AttemptLink
from phalanx.elastic.node.standby import StandbyPool
from phalanx.elastic.node.watchdog import Blame, Watchdog
from phalanx.elastic.node.worker import STACKS_SIGNAL, NodeJob, NodeRanks, StopSignals, ask_flight_recorder, run_worker
from phalanx.system.exit_causes import WorkerExit, find_root_cause, is_secondary_failure
from phalanx.system.fork import LEAVE_SIGNAL, fork, kill_group, out_of_memory_kills
from phalanx.system.memory import cgroup_oom_kills

IDLE_S = 0.1  # how often `on_idle` is called
SETTLE_S = 0.2  # how long a worker that merely lost a peer waits for the one that caused it to be seen
REPORT_S = 0.5  # interval of an agent's reports on its ranks to the leader
STACKS_S = 0.2  # time for a hung worker to write its stacks
DEATH_S = 10.0  # time for the kernel to remove a killed worker
KILLS_S, RECENT_S = 1.0, 10.0  # how often out-of-memory kills are counted; so recent ones explain a death
NOTICE_PART = 1 / 3  # of `stop_notice_s`, after which ranks that have not begun to save are ended
INTERRUPTIBLE = (*progress_page.STEP_PHASES, "evaluate", "callback", "profile")  # in others a rank saves, or will soon
CAUSE_FIELDS = {"exit_code", "type", "message", "reason", "step"}


@dataclass
class _Process:
    rank: int
    pid: int
    pidfd: int
    killed: bool = False
    status: int | None = None  # as os.waitstatus_to_exitcode gives it: an exit code, or minus a signal


@dataclass
class JobAttempt:
    """An attempt on this node. `number` counts from 1 over all nodes; `part` has this node's ranks of the job, and
    `others` reports the other nodes; `signals` are those of this agent; `standby`: processes that become ranks, now and
    in the next attempt."""

    job: NodeJob
    part: NodeRanks
    number: int
    others: AttemptLink
    signals: StopSignals
    standby: StandbyPool
    processes: list[_Process] = field(default_factory=list)
    exits: list[WorkerExit] = field(default_factory=list)  # in order of detection
    forwarded: set[int] = field(default_factory=set)
    deadline: float | None = None  # of the grace period
    interrupt_at: float | None = None  # when ranks that have not begun to save are ended
    interrupted: bool = False
    next_idle: float = 0.0
    # When looked, and the kernel's out-of-memory kills, on this machine and in this control group.
    oom_kills: deque[tuple[float, int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._count_kills()

    def start(self) -> None:
        """Bind the socket where the ranks meet, fork them, close it here. Not on node 0, they meet at a relay's."""
        part = self.part
        if self.job.paths is not None:
            self._make_logs(self.job.paths)
        if part.first_rank > 0:
            store = self.others.begin(self.number, None)
            self._fork_all([store] * self.job.world)
            return
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))  # a new port each time, so that no rank connects to a dead attempt
            listener.listen(socket.SOMAXCONN)
            host, port = listener.getsockname()
            self.others.begin(self.number, port)
            if part.world == 1:
                self._fork_all([None])
            else:
                elsewhere = [StoreAddress(host, port)] * (self.job.world - 1)
                self._fork_all([StoreAddress(host, port, listener.fileno()), *elsewhere])

    def _fork_all(self, stores: Sequence[StoreAddress | None]) -> None:
        kept = self.job.find_in_memory_state()
        for local_rank, store in enumerate(stores):
            placement = Placement(
                rank=self.part.first_rank + local_rank,
                world=self.part.world,
                local_rank=local_rank,
                local_world=self.job.world,
                node=self.part.node,
                device=self.job.devices[local_rank],
                store=store,
                attempt=self.number,
                shared=None if self.job.shared is None else str(self.job.shared),
                kept=kept,
                keeps=self.job.keeps_state,
                nodes=self.part.nodes,
                partner=self.part.partner,
                epoch=self.part.epoch,
            )
            self._fork(placement)
        self.standby.begin(self.job)
        pids = {process.rank: process.pid for process in self.processes}
        self.job.on_event(EventKind.ATTEMPT_STARTED, {"attempt": self.number, "pids": pids})

    def _fork(self, placement: Placement) -> None:
        keep = [] if placement.store is None or placement.store.listen_fd is None else [placement.store.listen_fd]
        job, interface = self.job, self.part.interface
        taken = self.standby.take(job, placement, interface)
        try:
            pid, pidfd = taken or fork(
                lambda: run_worker(job.worker, placement, job.paths, interface, job.logs),
                keep,
                blocked_signals=job.blocked_signals,
            )
        except OSError as error:
            raise PhalanxError(
                f"rank {placement.rank} could not be started: this machine has no room for another process or open "
                f"file ({error.strerror}); raise the limits (ulimit -u, ulimit -n, the number of processes of a "
                "container)"
            ) from error
        self.processes.append(_Process(placement.rank, pid, pidfd))

    def _make_logs(self, paths: RunPaths) -> None:
        try:
            paths.log(self.number, 0).parent.mkdir(parents=True, exist_ok=True)
            for rank in range(self.part.first_rank, self.part.first_rank + self.job.world):
                paths.exit_cause(self.number, rank).unlink(missing_ok=True)  # of an older run with the same number
                if self.job.logs:
                    paths.log(self.number, rank).touch()
        except OSError as error:
            raise RunError(
                f"the workers' logs cannot be written under {paths.root} ({error.strerror}), so no worker was started; "
                "choose another run folder or make this one writable"
            ) from error

    def watch(self) -> int:
        """Wait until all have ended, or until the first abnormal end, and return the exit code."""
        pids = {process.rank: process.pid for process in self.processes}
        watchdog = Watchdog(self.job.shared, self.number, pids, self.job.hang_timeouts, self.job.step_history)
        while self._live_processes():
            self._count_kills()
            self._wait(IDLE_S, heed_signals=True)
            self._look_for_hangs(watchdog)
            for number in self.signals.take():
                if number != LEAVE_SIGNAL:  # then the leader decides whether the run stops
                    self._forward_signal(number)
                self.others.report_stop_signal(self.signals.describe(number))
            for name in self.others.take_stop_signals():
                self._forward_signal(signal.Signals[name])
            if self._is_broken():
                break
            if self._live_processes() and self._is_grace_over():
                return self._kill_after_grace()
            if self._must_interrupt():
                self.kill()
                self.interrupted = True
                return int(ExitCode.STOPPED)
            if time.monotonic() >= self.next_idle:
                self.next_idle = time.monotonic() + IDLE_S
                self.standby.poll_once(self.job)
                self.job.on_idle()
        if self._live_processes() or any(end.abnormal for end in self.exits):
            return self._handle_failure(watchdog)
        # Whatever has happened elsewhere meanwhile, all ranks of this node have finished.
        stopped = any(end.exit_code == ExitCode.STOPPED for end in self.exits)
        return int(ExitCode.STOPPED if stopped else ExitCode.DONE)

    def _count_kills(self) -> None:
        now = time.monotonic()
        if not self.oom_kills or now >= self.oom_kills[-1][0] + KILLS_S:
            self.oom_kills.append((now, out_of_memory_kills(), cgroup_oom_kills()))
        while len(self.oom_kills) > 1 and self.oom_kills[1][0] < now - RECENT_S:
            self.oom_kills.popleft()

    def _look_for_hangs(self, watchdog: Watchdog) -> None:
        """Report the state of this node's ranks to the leader, which judges hangs."""
        report = watchdog.make_report(
            [process.rank for process in self.processes if process.status is not None], REPORT_S
        )
        if report is not None:
            self.others.report_progress(self.number, report)
        if blamed := self.others.take_hung_ranks():
            self._mark_hung(blamed)

    def _mark_hung(self, blamed: Sequence[Blame]) -> None:
        """Declare hung ranks failed; all ranks write their stacks to their logs before they are killed."""
        self._dump_stacks(self._live_processes())
        pids = {process.rank: process.pid for process in self.processes}
        for blame in blamed:
            if blame.rank in pids:
                cause = {"exit_code": int(ExitCode.FAILED), "type": blame.kind, "message": blame.reason}
                cause |= {"reason": blame.reason, "step": blame.step}
                self.exits.append(WorkerExit(blame.rank, pids[blame.rank], None, int(ExitCode.FAILED), cause))

    def _dump_stacks(self, processes: Sequence[_Process]) -> None:
        """Have workers write their stacks to their logs, and NCCL its flight record of collectives."""
        if self.job.paths is None:
            return
        for process in processes:
            signal.pidfd_send_signal(process.pidfd, STACKS_SIGNAL)
            if self.job.shared is not None:
                ask_flight_recorder(self.job.shared, process.rank)
        time.sleep(STACKS_S)

    def _is_broken(self) -> bool:
        return any(end.abnormal for end in self.exits) or self.others.must_abort()

    def _live_processes(self) -> list[_Process]:
        return [process for process in self.processes if process.status is None]

    def _wait(self, seconds: float, heed_signals: bool) -> None:
        """Sleep until a worker ends, a signal or another node's word comes or the time is up; reap every worker that
        has ended, and hear every word."""
        watched = [process.pidfd for process in self._live_processes()] + [self.signals.fileno()] * heed_signals
        descriptors = {**self.others.descriptors(), **dict.fromkeys(watched, select.POLLIN)}
        poll_descriptors(descriptors, min(seconds, IDLE_S, self.others.due_s()))  # they wait for a sign of life, too
        self.others.poll_once()
        for process in self._live_processes():
            if os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._reap(process)

    def _reap(self, process: _Process) -> None:
        kill_group(process.pid)  # before the reaping, as the number is free for others afterwards
        process.status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        os.close(process.pidfd)
        by_us = process.killed and process.status == -signal.SIGKILL
        cause = self._read_cause(process.rank)
        if by_us and cause is None:
            return  # no error, as far as is known
        number = -process.status if process.status < 0 and not by_us else None
        code = process.status if process.status >= 0 else None
        if by_us and cause is not None:
            code = cause["exit_code"]  # it had failed before it was killed
        self.exits.append(WorkerExit(process.rank, process.pid, number, code, cause))

    def _read_cause(self, rank: int) -> dict[str, Any] | None:
        if self.job.paths is None:
            return None
        try:
            cause = json.loads(self.job.paths.exit_cause(self.number, rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing or unreadable: exit code and log remain
            return None
        return cause if isinstance(cause, dict) and cause.keys() >= CAUSE_FIELDS else None

    def _forward_signal(self, number: signal.Signals) -> None:
        self.job.on_event(EventKind.STOP_REQUESTED, {"attempt": self.number, "signal": number.name})
        if self.deadline is None:
            self.deadline = time.monotonic() + self.job.grace_s
            if self.job.stop_notice_s is not None:
                self.interrupt_at = time.monotonic() + NOTICE_PART * self.job.stop_notice_s
        sent = signal.SIGTERM if number in (signal.SIGINT, signal.SIGHUP, LEAVE_SIGNAL) else number
        if sent in self.forwarded:
            return
        self.forwarded.add(sent)
        for process in self._live_processes():
            signal.pidfd_send_signal(process.pidfd, sent)

    def _is_grace_over(self) -> bool:
        if self.signals.all_signals.count(signal.SIGINT) >= 2:
            return True
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _must_interrupt(self) -> bool:
        """Whether ranks that were asked to stop are still busy with what may take longer than this machine lives: a
        compilation, an evaluation, a long step. What is committed in memory outlives them, and is saved next."""
        if self.interrupt_at is None or time.monotonic() < self.interrupt_at or not self._live_processes():
            return False
        self.interrupt_at = time.monotonic() + REPORT_S  # it is looked again then
        beats = [self._last_progress(process.rank) for process in self._live_processes()]
        seen = [beat for beat in beats if beat is not None and beat.phase in INTERRUPTIBLE]
        if len(seen) < len(beats):
            return False
        steps = {beat.rank: beat.step - (beat.phase in progress_page.STEP_PHASES) for beat in seen}
        from_disk = self.others.in_memory_state is None and all(beat.steps == 0 for beat in seen)
        return from_disk or (self.job.keeps_state and self.others.has_committed(steps))

    def _handle_failure(self, watchdog: Watchdog) -> int:
        """After an abnormal end, here or elsewhere: find its cause, kill the others, report."""
        until = time.monotonic() + SETTLE_S
        while self._live_processes() and all(is_secondary_failure(end) for end in self.exits if end.abnormal):
            if self.others.knows_cause():
                break
            left = until - time.monotonic()
            if left <= 0:
                break
            self._wait(left, heed_signals=False)
        abnormal = [end for end in self.exits if end.abnormal]
        if abnormal and all(end.signal == signal.SIGABRT for end in abnormal):
            # So an accelerator's collectives end a rank that has waited for too long, and soon all that have.
            self._mark_hung(watchdog.blame_for_timeout(self.part.world))
        self.kill()
        # Ranks that had not got as far as to handle a signal which was passed on to them, nor to do a step.
        early = [end for end in self.exits if end.signal in self.forwarded]
        self.exits[:] = [end for end in self.exits if end not in early]
        ends = [end for end in self.exits if end.abnormal]
        if early and not ends:
            return int(ExitCode.STOPPED)
        if not ends or (self.others.must_abort() and all(is_secondary_failure(end) for end in ends)):
            # A node was lost, or the leader ended the attempt: that has been said. If one rank is done, all had saved.
            done = any(process.status == 0 or self._is_done(process.rank) for process in self.processes)
            return int(ExitCode.DONE if done else ExitCode.FAILED)
        end = find_root_cause(ends)
        killed = end.signal == signal.SIGKILL and end.host is None
        # What other groups of this machine have lost is no sign that this rank took too much. In a container the
        # machine's own count may not be there to be read.
        ours = killed and cgroup_oom_kills() > self.oom_kills[0][2]
        starved = ours or (killed and out_of_memory_kills() > self.oom_kills[0][1])
        if ours and (less := self._after_kernel_kill(end.rank)) is not None:
            code = int(ExitCode.OUT_OF_MEMORY)
            cause = {"exit_code": code, "type": "OutOfMemory", "message": less, "reason": less, "step": None}
            explained, starved = WorkerExit(end.rank, end.pid, None, code, cause), False
        else:
            explained = end
        if explained.signal is not None and (beat := self._last_progress(end.rank)) is not None:
            # After a signal the rank itself could not report it.
            explained = replace(explained, doing=f"{beat.phase} of step {beat.step}")
        self.exits[self.exits.index(end)] = end = replace(explained, starved=starved)
        self.job.on_event(EventKind.WORKER_DIED, {"attempt": self.number, **end.details()})
        return int(ExitCode.FAILED if end.exit_code is None else end.exit_code)

    def _is_done(self, rank: int) -> bool:
        """Whether a rank had said that the run is done, though it was killed before it had left."""
        beat = self._last_progress(rank)
        return beat is not None and beat.done

    def _last_progress(self, rank: int) -> progress_page.RankProgress | None:
        """The last progress of a rank in this attempt, if any."""
        try:
            content = (
                b"" if self.job.shared is None else progress_page.progress_page_path(self.job.shared, rank).read_bytes()
            )
        except OSError:
            content = b""
        return progress_page.read_progress(content, rank, self.number, time.monotonic_ns())

    def _after_kernel_kill(self, rank: int) -> str | None:
        """The job's explanation for a rank that the kernel killed because memory ran out, from its last progress."""
        beat = self._last_progress(rank)
        return None if beat is None else self.job.after_kernel_kill(rank, beat.largest, beat.steps)

    def _kill_after_grace(self) -> int:
        """Kill the workers that have not stopped in time; their logs get the stacks they were killed in."""
        unwilling = self._live_processes()
        self._dump_stacks(unwilling)
        self.kill()
        impatient = self.signals.all_signals.count(signal.SIGINT) >= 2
        why = "after a second SIGINT" if impatient else f"{self.job.grace_s:g} s after the stop signal"
        reason = f"killed by the agent: still running {why}"
        cause = {"exit_code": int(ExitCode.FAILED), "type": "StillRunning", "message": reason, "reason": reason}
        for process in unwilling:
            self.exits.append(WorkerExit(process.rank, process.pid, signal.SIGKILL, None, cause | {"step": None}))
        return int(ExitCode.FAILED)

    def kill(self) -> None:
        """SIGKILL every worker that still lives and reap it; nothing to do where all have ended."""
        for process in self._live_processes():
            process.killed = True
            kill_group(process.pid)
        until = time.monotonic() + DEATH_S
        while self._live_processes() and time.monotonic() < until:
            self._wait(until - time.monotonic(), heed_signals=False)
        if self._live_processes():
            names = ", ".join(f"rank {process.rank} (pid {process.pid})" for process in self._live_processes())
            raise PhalanxError(
                f"{names} did not die within {DEATH_S:g} s of SIGKILL, so no new attempt was started; check for a "
                "stuck device or file system (ps shows state D)"
            )
