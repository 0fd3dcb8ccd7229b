"""Processes that are forked early: the next ranks, while those before them still end.

A fork of the warm agent takes about 10 ms, and the kernel longer than that to take a killed rank apart; so one is done
while the other is waited for. Such a process does nothing until it is told who it is, and dies with its agent, as every
rank does; one that is not needed is killed.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from phalanx.cluster.fork import fork, kill_group
from phalanx.cluster.job import Job
from phalanx.cluster.worker import run_worker
from phalanx.kept import Kept, KeptFile
from phalanx.records import ExitCode, Placement, RunPaths, StoreAddress
from phalanx.replicas import receive, send

Worker = Callable[[Placement], int]


class Early:
    """Those that wait, as their agent sees them; they were forked for `worker`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, socket.socket]] = []  # pid, pidfd, and where it is told
        self._worker: Worker | None = None

    def fork(self, job: Job) -> None:
        """Fork as many as a job has ranks here, if there is room for them."""
        self.close()
        self._worker = job.worker
        with contextlib.suppress(OSError):  # then they are forked when they are needed, or it is said why not
            for _ in range(job.world):
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        pid, pidfd = fork(lambda: _wait(theirs, job.worker, job.paths), [theirs.fileno()])  # noqa: B023
                    except OSError:
                        ours.close()
                        raise
                self._waiting.append((pid, pidfd, ours))

    def take(self, job: Job, placement: Placement, interface: str | None) -> tuple[int, int] | None:
        """Have one of them be a rank of a job; (pid, pidfd). None where nobody waits for that."""
        if job.worker is not self._worker:
            self.close()
        if not self._waiting:
            return None
        pid, pidfd, told = self._waiting.pop(0)
        listen_fd = None if placement.store is None else placement.store.listen_fd
        with told, contextlib.suppress(OSError):  # it has died, which is seen as any other rank's death
            socket.send_fds(told, [b"s"], [] if listen_fd is None else [listen_fd])
            send(told, {"placement": asdict(placement), "interface": interface})
        return pid, pidfd

    def close(self) -> None:
        """Kill those that still wait."""
        for pid, _, _ in self._waiting:
            kill_group(pid)
        for pid, pidfd, told in self._waiting:
            os.waitpid(pid, 0)
            os.close(pidfd)
            told.close()
        self._waiting = []


def _wait(told: socket.socket, worker: Worker, paths: RunPaths | None) -> int:
    """In a child: be told who it is, and be that."""
    with told:
        _, descriptors, _, _ = socket.recv_fds(told, 1, 1)
        try:
            message = receive(told)
        except OSError:  # nobody is needed
            return int(ExitCode.DONE)
    placement = _placement_of(message["placement"])
    if descriptors and placement.store is not None:
        os.set_inheritable(descriptors[0], False)
        placement = replace(placement, store=replace(placement.store, listen_fd=descriptors[0]))
    return run_worker(worker, placement, paths, message["interface"])


def _placement_of(tree: dict[str, Any]) -> Placement:
    """Read what `asdict` makes of a placement and JSON of that."""
    store, kept, partner = tree["store"], tree["kept"], tree["partner"]
    files = tuple(KeptFile(**{**each, "address": _address(each["address"])}) for each in kept["files"]) if kept else ()
    told = {
        "store": None if store is None else StoreAddress(**store),
        "kept": None if kept is None else Kept(kept["step"], files),
        "partner": _address(partner),
    }
    return Placement(**{**tree, **told})


def _address(told: list[Any] | None) -> tuple[str, int] | None:
    return None if told is None else (str(told[0]), int(told[1]))
