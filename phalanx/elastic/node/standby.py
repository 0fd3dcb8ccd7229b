"""Standby processes, forked early, that become the next ranks if the running ones fail.

A fork of the warm agent takes about 10 ms, so it is done ahead of time. A standby process shares its agent's memory,
waits until it is assigned a rank, and dies with its agent, as every rank does.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.core.placement import ExitCode, InMemoryCheckpoint, Placement, StateFileLocation, StoreAddress
from phalanx.elastic.node.worker import NodeJob, run_worker
from phalanx.recovery.replica_client import receive_frame, send_frame
from phalanx.system.fork import fork, kill_group

LATER_S = 2.0  # after an attempt has begun: its own ranks come first
TOLD_S = 5.0  # what one that waits gets to take its order

Worker = Callable[[Placement], int]


@dataclass(frozen=True)
class _StandbyProcess:
    worker: Worker
    pid: int
    pidfd: int
    channel: socket.socket

    def is_over(self) -> bool:
        return os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class StandbyPool:
    """The standby processes of an agent."""

    def __init__(self) -> None:
        self._waiting: list[_StandbyProcess] = []
        self._missing, self._not_before = 0, 0.0

    def begin(self, job: NodeJob) -> None:
        """Keep as many standby processes as a job has forked ranks; those for other jobs are killed."""
        self.close()
        self._missing, self._not_before = job.world, time.monotonic() + LATER_S

    def poll_once(self, job: NodeJob) -> None:
        """Fork a missing standby process, if it is time and there is room; ended ones are not replaced."""
        if self._missing and time.monotonic() >= self._not_before:
            self._missing -= 1
            try:
                ours, theirs = socket.socketpair()
            except OSError:  # no room: ranks are forked when needed, which then reports the error
                return
            ours.settimeout(TOLD_S)
            with theirs:
                try:
                    pid, pidfd = fork(
                        lambda: _wait(theirs, job), [theirs.fileno()], blocked_signals=job.blocked_signals
                    )
                except OSError:
                    ours.close()
                    return
            self._waiting.append(_StandbyProcess(job.worker, pid, pidfd, ours))

    def take(self, job: NodeJob, placement: Placement, interface: str | None) -> tuple[int, int] | None:
        """Make a standby process a rank of a job; returns (pid, pidfd), or None if there is none."""
        while self._waiting:
            each = self._waiting.pop(0)
            if each.worker is job.worker and not each.is_over():
                listen_fd = None if placement.store is None else placement.store.listen_fd
                with each.channel, contextlib.suppress(OSError):  # it has just died, or does not take it: a dead rank
                    socket.send_fds(each.channel, [b"s"], [] if listen_fd is None else [listen_fd])
                    send_frame(each.channel, {"placement": asdict(placement), "interface": interface})
                return each.pid, each.pidfd
            _end(each)
        return None

    def close(self) -> None:
        """Kill the remaining standby processes."""
        while self._waiting:
            _end(self._waiting.pop())
        self._missing = 0


def _end(each: _StandbyProcess) -> None:
    kill_group(each.pid)
    os.waitpid(each.pid, 0)
    os.close(each.pidfd)
    each.channel.close()


def _wait(told: socket.socket, job: NodeJob) -> int:
    """In a child: receive its rank, and run it."""
    with told:
        _, descriptors, _, _ = socket.recv_fds(told, 1, 1)
        try:
            message = receive_frame(told)
        except OSError:  # its agent could not tell it; who is not needed is killed
            return int(ExitCode.FAILED)
    placement = _placement_of(message["placement"])
    if placement.store is not None and placement.store.listen_fd is not None:
        if not descriptors:  # no room for it here, and the agent's number of it means something else
            return int(ExitCode.FAILED)
        os.set_inheritable(descriptors[0], False)
        placement = replace(placement, store=replace(placement.store, listen_fd=descriptors[0]))
    return run_worker(job.worker, placement, job.paths, message["interface"], job.logs)


def _placement_of(tree: dict[str, Any]) -> Placement:
    """Read what `asdict` makes of a placement and JSON of that."""
    store, kept, partner = tree["store"], tree["kept"], tree["partner"]
    files = (
        tuple(StateFileLocation(**{**each, "address": _address(each["address"])}) for each in kept["files"])
        if kept
        else ()
    )
    told = {
        "store": None if store is None else StoreAddress(**store),
        "kept": None if kept is None else InMemoryCheckpoint(kept["step"], files),
        "partner": _address(partner),
    }
    return Placement(**{**tree, **told})


def _address(told: list[Any] | None) -> tuple[str, int] | None:
    return None if told is None else (str(told[0]), int(told[1]))
