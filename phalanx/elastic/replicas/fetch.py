"""Whole copies of state files that lie on other nodes: made by the process that keeps replicas, while the ranks that go
on from them begin.

An agent has a copy begun as soon as it is told what its ranks go on from; a rank asks for the same, and waits. Whoever
is first has it begun, once. A file that is not whole says so itself (`state_file.py`).
"""

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from phalanx.core.errors import CheckpointError
from phalanx.core.placement import HostPort
from phalanx.recovery import state_file
from phalanx.recovery.replica_client import RemoteStateFile, receive_frame, receive_into, send_frame
from phalanx.recovery.state_file import StateFile, StateFileOwner

PART_BYTES = 4 << 20  # after which it is noted how far a copy is

Reach = Callable[[HostPort], socket.socket]


class StateFileFetch:
    """A copy that is being made. `made` is set when there is a file for it, called `name`, or there is no room for one
    (None); `finished` when that is `whole` or will not be."""

    def __init__(self) -> None:
        self.started, self.finished = threading.Event(), threading.Event()
        self.name: str | None = None
        self.whole = False
        self.bytes = 0  # that have come


class StateFileFetcher:
    """Copies of files into a `folder`; `reach` connects with the process of another node."""

    def __init__(self, folder: Path, reach: Reach) -> None:
        self._folder, self._reach = folder, reach
        self._copies: dict[tuple[str, int], StateFileFetch] = {}
        self._lock = threading.Lock()

    def fetch(self, name: str, address: HostPort, step: int, slots: int) -> StateFileFetch:
        """That of a file at an address, with a step that it holds; begun now, with so many slots, if it was not."""
        with self._lock:
            copy = self._copies.get((name, step))
            if copy is None:
                copy = self._copies[name, step] = StateFileFetch()
                threading.Thread(target=self._make, args=(copy, name, address, step, slots), daemon=True).start()
            return copy

    def _make(self, copy: StateFileFetch, name: str, address: HostPort, step: int, slots: int) -> None:
        path: Path | None = None
        inode = 0
        try:
            with self._reach(address) as there:
                far = RemoteStateFile(name, functools.partial(_read, there, name))
                facts, slot = far.metadata, far.metadata.steps.get(step)
                if slot is None:
                    raise CheckpointError(f"the state file {name} does not hold step {step} any more")
                index, header = far.index(), far.raw_header(slot)
                who = StateFileOwner(facts.generation, facts.rank, facts.world, facts.run, facts.part, facts.parts)
                _ask(
                    there, name, facts.slot_offset(slot), facts.slot_bytes
                )  # the link is not idle while room is made for it
                made = state_file.create_state_file(self._folder, who, index, facts.slot_bytes, slots, at_once=False)
                path, inode = made.metadata.path, os.stat(made.metadata.path).st_ino
                made.invalidate_all(facts.way)
                copy.name = path.name
                copy.started.set()
                self._fill(copy, there, made)
                made.commit(0, step, header)
                copy.whole = True
        except Exception:  # no room here, the other node is lost or sends nonsense: a rank that asks finds out which
            with contextlib.suppress(OSError):  # a rank that could not wait for it may have made another
                if path is not None and os.stat(path).st_ino == inode:
                    path.unlink()
        finally:
            copy.started.set()
            copy.finished.set()

    def _fill(self, copy: StateFileFetch, there: socket.socket, made: StateFile) -> None:
        """Take a slot that was asked for into the first of a file, in one stream."""
        count = made.metadata.slot_bytes
        _heed(there)
        for begin in range(0, count, PART_BYTES):
            with made.read_bytes(made.slot_offset(0) + begin, min(PART_BYTES, count - begin)) as part:
                receive_into(there, part)
            copy.bytes = begin + PART_BYTES


def _read(there: socket.socket, name: str, at: int, count: int) -> bytearray:
    """Bytes of a file."""
    _ask(there, name, at, count)
    _heed(there)
    found = bytearray(count)
    receive_into(there, memoryview(found))
    return found


def _ask(there: socket.socket, name: str, at: int, count: int) -> None:
    """Ask for bytes of a file."""
    send_frame(there, {"read": name, "at": at, "bytes": count})


def _heed(there: socket.socket) -> None:
    """Hear the answer; the bytes come next. Raises CheckpointError where there is no such file."""
    answer = receive_frame(there)
    if "error" in answer:
        raise CheckpointError(str(answer["error"]))
