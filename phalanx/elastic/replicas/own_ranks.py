"""The replica process's service for the ranks of its node: it sends their state to a partner, and fetches state from
other nodes.

Complete copies of state files are made while the ranks that resume from them start: an agent starts a copy as soon as
it knows what its ranks resume from; a rank requests the same copy, and waits. The first request starts it, once. An
incomplete file is marked so (`state_file.py`).
"""

import contextlib
import functools
import mmap
import os
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import CheckpointError
from phalanx.core.placement import HostPort
from phalanx.elastic.membership.channel import connect_and_greet
from phalanx.elastic.membership.store_relay import CALL_S
from phalanx.recovery import state_file
from phalanx.recovery.catalog import unframe_record
from phalanx.recovery.replica_client import Message, RemoteStateFile, receive_frame, receive_into, send_frame
from phalanx.recovery.state_file import StateFile, StateFileMetadata, StateFileOwner

PART_BYTES = 4 << 20  # that are passed on at a time
ROLE = "replicas"  # of a caller at an agent's door
SIGN_S = 1.0  # interval of progress messages to a rank that waits for a copy

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
        """The copy of a state file at an address that holds a step, with the given number of slots; started now
        unless in progress."""
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
                    raise CheckpointError(f"the state file {name} no longer holds step {step}")
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
    """Receive the answer; the bytes come next. Raises CheckpointError where the file does not exist."""
    answer = receive_frame(there)
    if "error" in answer:
        raise CheckpointError(str(answer["error"]))


def fetch_for(fetches: StateFileFetcher, message: Message) -> StateFileFetch:
    """The copy that a message speaks of."""
    address = _address(message["of"])
    return fetches.fetch(str(message["fetch"]), address, int(message["step"]), int(message["slots"]))


def _address(said: Sequence[Any]) -> HostPort:
    host, port = said
    return str(host), int(port)


class RankRequests:
    """Handle a request of a rank of this node."""

    def __init__(self, connection: socket.socket, folder: Path, secret: str, fetches: StateFileFetcher) -> None:
        self._connection, self._folder, self._secret = connection, folder, secret
        self._fetches = fetches
        self._copy: StateFileFetch | None = None
        self._file: StateFile | None = None
        self._bytes = 0  # that are sent of a slot
        self._partner: socket.socket | None = None
        self._there: set[int] = set()  # steps that the partner has had from before
        self._newest: int | None = None  # of those that it has
        self._gradients: memoryview | None = None  # the rank's, where the partner makes updates again
        self._unchecked: int | None = None  # a step that the partner has made and that was not compared yet
        self._readers: dict[HostPort, socket.socket] = {}

    def serve(self) -> None:
        with self._connection, contextlib.suppress(OSError):  # until the rank is gone
            while True:
                message = receive_frame(self._connection)
                try:
                    self._do(message)
                except Exception as error:  # a partner may answer anything
                    what = "read from" if {"read", "check"} & message.keys() else "replicated to"
                    text = (
                        f"state could not be {what} another node ({error}); that node or its replica process was lost"
                    )
                    send_frame(self._connection, {"error": text})

    def _do(self, message: Message) -> None:
        if "read" in message:
            self._pass_on(message)
        elif "check" in message:
            there = self._reader(message)
            send_frame(there, {name: message[name] for name in ("check", "step")})
            send_frame(self._connection, receive_frame(there))
        elif "fetch" in message:
            self._copy = fetch_for(self._fetches, message)
            self._copy.started.wait()
            send_frame(self._connection, {"file": self._copy.name})
        elif "fetched" in message:
            self._await()
        elif "replicate" in message:
            send_frame(self._connection, self._begin(message))
        elif "step" in message:
            self._send_step(int(message["step"]), message.get("told"))
            send_frame(self._connection, {"kept": message["step"]})
            self._check()
        elif "gradients" in message:
            self._gradients = _gradients(self._connection, int(message["gradients"]))
        elif "forget" in message or "leave" in message:
            self._there.clear()
            self._newest = None
            send_frame(self._connection, self._ask_partner(message))

    def _reader(self, message: Message) -> socket.socket:
        """The connection with the node that a message speaks of."""
        address = _address(message["of"])
        if address not in self._readers:
            self._readers[address] = connect_and_greet(address, self._secret, {"role": ROLE}, CALL_S)
        return self._readers[address]

    def _pass_on(self, message: Message) -> None:
        there = self._reader(message)
        send_frame(there, {name: message[name] for name in ("read", "at", "bytes")})
        answer = receive_frame(there)
        send_frame(self._connection, answer)
        buffer, left = memoryview(bytearray(PART_BYTES)), 0 if "error" in answer else int(message["bytes"])
        while left:
            part = receive_into(there, buffer[: min(left, PART_BYTES)])
            self._connection.sendall(part)
            left -= len(part)

    def _await(self) -> None:
        """Say whether the copy that was asked for is whole, when it is over; and before, whenever it has got on."""
        assert self._copy is not None
        copy, before = self._copy, -1
        while not copy.finished.wait(SIGN_S):
            if copy.bytes > before:  # keeps a waiting rank from timing out
                before = copy.bytes
                send_frame(self._connection, {"bytes": before})
        send_frame(self._connection, {"whole": copy.whole})

    def _begin(self, message: Message) -> Message:
        self._file = file = StateFile(self._folder / str(message["replicate"]))
        facts = file.metadata
        hello = {"role": ROLE, "attempt": int(message["attempt"])}
        self._partner = connect_and_greet(_address(message["to"]), self._secret, hello, CALL_S)
        who = [facts.generation, facts.rank, facts.world, facts.part, facts.parts]
        bare = message["bare"] is True
        self._bytes = 0 if bare else facts.slot_bytes
        form = {
            "who": who, "way": facts.way, "index": state_file.EMPTY_INDEX if bare else file.index(),
            "slot_bytes": self._bytes, "asked": message["asked"] is True, "newest": message.get("newest"),
            **(message.get("rule") or {}),
        }  # fmt: skip
        answer = self._ask_partner({"keep": form})
        self._there = set(answer.get("steps", []))
        return answer

    def _ask_partner(self, message: Message) -> Message:
        if self._partner is None:
            raise ConnectionError("there is no partner")
        send_frame(self._partner, message)
        return self._hear_partner()

    def _hear_partner(self) -> Message:
        assert self._partner is not None
        answer = receive_frame(self._partner)
        if "error" in answer:
            raise ConnectionError(str(answer["error"]))
        return answer

    def _send_step(self, step: int, told: Message | None) -> None:
        assert self._file is not None
        if step not in self._there:  # of processes before, in the same place
            replays = told is not None and self._gradients is not None and self._newest == step - 1
            with self._mapped() as view:
                self._send_slot(step, view, told if replays else None)
        self._newest = step

    def _check(self) -> None:
        """Compare the partner's result of an update with the expected one; the rank waits no longer."""
        step, self._unchecked = self._unchecked, None
        if step is None or self._partner is None:
            return
        with self._mapped() as view:
            begin = self._facts(view).slot_offset(self._facts(view).steps[step])
            with view[begin : begin + self._bytes] as data:
                total = zlib.crc32(data)
        self._ask_partner({"sum": total})

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[memoryview]:
        assert self._file is not None
        path = self._file.metadata.path
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # Not the private view, which may be older than what the rank has written since.
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                yield view
        finally:
            os.close(descriptor)

    def _facts(self, view: memoryview) -> StateFileMetadata:
        assert self._file is not None
        return state_file.parse_metadata(self._file.metadata.path, bytes(view[: state_file.PAGE]))

    def _send_slot(self, step: int, view: memoryview, told: Message | None) -> None:
        assert self._partner is not None
        facts = self._facts(view)
        slot = facts.steps.get(step)
        if slot is None:
            raise CheckpointError(f"{facts.path} no longer holds step {step}")
        header = unframe_record(view[state_file.HEADERS[slot] :][: state_file.HEADER_BYTES]) or b""
        if told is not None and self._gradients is not None:
            send_frame(self._partner, {"replay": told, "header": header.decode()})
            self._partner.sendall(self._gradients)
            if self._hear_partner() != {"kept": step}:
                raise ConnectionError("it did not apply the update that it was told of")
            self._unchecked = step
            return
        send_frame(self._partner, {"write": step, "header": header.decode()})
        total, begin = 0, facts.slot_offset(slot)
        for at in range(begin, begin + self._bytes, PART_BYTES):
            with view[at : min(at + PART_BYTES, begin + self._bytes)] as part:
                self._partner.sendall(part)
                total = zlib.crc32(part, total)
        answer = self._ask_partner({"sum": total})
        if answer != {"kept": step}:
            raise ConnectionError("it did not keep the data that it was sent")


def _gradients(connection: socket.socket, size: int) -> memoryview:
    """The memory that a rank hands over."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    try:
        return memoryview(mmap.mmap(descriptors[0], max(size, 1), access=mmap.ACCESS_READ))[:size]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
