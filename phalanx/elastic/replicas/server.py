"""The process of a node that keeps replicas of other nodes' state, sends that of its own ranks, and lets others read.

An agent forks it before there are ranks, gives it the connections of other nodes that have proved themselves at the
agent's door, and ends it when an attempt is over: so nothing is written behind what the agents then agree on. Ranks
reach it through a socket in their folder in shared memory. What it keeps are files there, so whoever comes after it
finds them. Threads are fine here: it forks nothing.
"""

import contextlib
import mmap
import os
import select
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from phalanx.core.errors import CheckpointError
from phalanx.core.placement import HostPort
from phalanx.elastic.membership.channel import connect_and_greet, enable_keepalive
from phalanx.elastic.membership.store_relay import CALL_S
from phalanx.elastic.replicas.fetch import StateFileFetch, StateFileFetcher
from phalanx.recovery import inventory, state_file
from phalanx.recovery.inventory import REPLICAS
from phalanx.recovery.replica_client import SOCKET, Message, receive_frame, receive_into, send_frame
from phalanx.recovery.shared_memory import describe_shortage
from phalanx.recovery.state_file import StateFile, StateFileMetadata, StateFileOwner
from phalanx.system import memory as host_memory
from phalanx.system.fork import fork, kill_group

ROLE = "replicas"  # of a caller at an agent's door
CHUNK_BYTES = 4 << 20
WRITES, READS = b"w", b"r"  # how a connection is handed over
COPIES = b"c"  # what comes is no connection, but says what is to be copied
SIGN_S = 1.0  # how often a rank that waits for a copy hears that it gets on


class ReplicaUpdaterProtocol(Protocol):
    """Makes a rank's updates again in its replica, of the gradients that were written to `gradients`."""

    gradients: memoryview

    def apply_update(self, file: StateFile, old: int, message: Mapping[str, Any]) -> None: ...


# What makes the updates of a rank again, of what it has said of itself; None where that cannot be.
MakeReplicaUpdater = Callable[[Mapping[str, Any]], ReplicaUpdaterProtocol | None]


def never_update(form: Mapping[str, Any]) -> None:
    """Where nothing knows how to update."""
    return None


class ReplicaServer:
    """That process, as its agent sees it. `folder`: the run's in this node's shared memory; `run_id`: what the run is
    known by; `secret`: that by which nodes of the job know each other; `make_replica_updater`: what makes updates
    again."""

    def __init__(
        self, folder: Path, run_id: bytes, secret: str, make_replica_updater: MakeReplicaUpdater = never_update
    ) -> None:
        self.run_id = run_id
        self._ours, theirs = socket.socketpair()
        path = folder / SOCKET
        path.unlink(missing_ok=True)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            os.chmod(path, 0o600)
            listener.listen(socket.SOMAXCONN)
            keep = [theirs.fileno(), listener.fileno()]
            self.pid, self._pidfd = fork(
                lambda: _live(theirs, listener, folder, run_id, secret, make_replica_updater), keep=keep
            )
        self._ours.setblocking(False)

    @property
    def is_alive(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def hand_over(self, connection: socket.socket, writes: bool) -> None:
        """Give it a connection to another node, which may have replicas written or only read. Raises OSError when it
        has died."""
        socket.send_fds(self._ours, [WRITES if writes else READS], [connection.fileno()])

    def fetch(self, name: str, address: HostPort, step: int, slots: int) -> None:
        """Have it copy a state file of another node, with a step, to one of so many slots, for a rank that will ask for
        it."""
        with contextlib.suppress(OSError):  # it has died: so does the rank that asks
            self._ours.sendall(COPIES)
            send_frame(self._ours, {"fetch": name, "of": list(address), "step": step, "slots": slots})

    def kill(self) -> None:
        """Have it end; `stop` waits until it has."""
        kill_group(self.pid)

    def stop(self) -> None:
        self.kill()
        os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        self._ours.close()


def _live(
    handed: socket.socket,
    listener: socket.socket,
    folder: Path,
    run: bytes,
    secret: str,
    make_replica_updater: MakeReplicaUpdater,
) -> int:
    fetches = StateFileFetcher(folder, lambda address: connect_and_greet(address, secret, {"role": ROLE}, CALL_S))

    def let_in() -> None:
        while True:
            connection, _ = listener.accept()
            _in_thread(_Rank(connection, folder, secret, fetches).serve)

    _in_thread(let_in)
    while True:
        data, descriptors, _, _ = socket.recv_fds(handed, 1, 1)
        if not data:
            return 0
        if data == COPIES:
            _copy(fetches, receive_frame(handed))
            continue
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(True)
        enable_keepalive(connection)
        _in_thread(_Node(connection, folder, run, data == WRITES, make_replica_updater).serve)


def _copy(fetches: StateFileFetcher, message: Message) -> StateFileFetch:
    """The copy that a message speaks of."""
    host, port = message["of"]
    return fetches.fetch(str(message["fetch"]), (str(host), int(port)), int(message["step"]), int(message["slots"]))


def _in_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, daemon=True).start()


# ------------------------------------------------------------------------------------------------------- for own ranks


class _Rank:
    """What a rank of this node asks for."""

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
        self._unchecked: int | None = None  # a step that the partner has made and nobody has compared
        self._readers: dict[HostPort, socket.socket] = {}

    def serve(self) -> None:
        with self._connection, contextlib.suppress(OSError):  # until the rank is gone
            while True:
                message = receive_frame(self._connection)
                try:
                    self._do(message)
                except Exception as error:  # what a partner answers may be anything
                    what = "read from" if {"read", "check"} & message.keys() else "replicated to"
                    text = f"state could not be {what} another node ({error}); it or its process for that was lost"
                    send_frame(self._connection, {"error": text})

    def _do(self, message: Message) -> None:
        if "read" in message:
            self._pass_on(message)
        elif "check" in message:
            there = self._reader(message)
            send_frame(there, {name: message[name] for name in ("check", "step")})
            send_frame(self._connection, receive_frame(there))
        elif "fetch" in message:
            self._copy = _copy(self._fetches, message)
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
        host, port = message["of"]
        address = (str(host), int(port))
        if address not in self._readers:
            self._readers[address] = connect_and_greet(address, self._secret, {"role": ROLE}, CALL_S)
        return self._readers[address]

    def _pass_on(self, message: Message) -> None:
        there = self._reader(message)
        send_frame(there, {name: message[name] for name in ("read", "at", "bytes")})
        answer = receive_frame(there)
        send_frame(self._connection, answer)
        buffer, left = memoryview(bytearray(CHUNK_BYTES)), 0 if "error" in answer else int(message["bytes"])
        while left:
            part = receive_into(there, buffer[: min(left, CHUNK_BYTES)])
            self._connection.sendall(part)
            left -= len(part)

    def _await(self) -> None:
        """Say whether the copy that was asked for is whole, when it is over; and before, whenever it has got on."""
        assert self._copy is not None
        copy, before = self._copy, -1
        while not copy.finished.wait(SIGN_S):
            if copy.bytes > before:  # else whoever waits loses patience
                before = copy.bytes
                send_frame(self._connection, {"bytes": before})
        send_frame(self._connection, {"whole": copy.whole})

    def _begin(self, message: Message) -> Message:
        host, port = message["to"]
        self._file = file = StateFile(self._folder / str(message["replicate"]))
        facts = file.metadata
        hello = {"role": ROLE, "attempt": int(message["attempt"])}
        self._partner = connect_and_greet((str(host), int(port)), self._secret, hello, CALL_S)
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
        """Have the partner compare what its update has come to with what it should have; the rank waits no more."""
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
            # Not the private view, as what is read there may be older than what the rank has written since.
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
            raise CheckpointError(f"{facts.path} does not hold step {step} any more")
        header = state_file.unframe_header(view[state_file.HEADERS[slot] :][: state_file.HEADER_BYTES])
        if told is not None and self._gradients is not None:
            send_frame(self._partner, {"replay": told, "header": header.decode()})
            self._partner.sendall(self._gradients)
            if self._hear_partner() != {"kept": step}:
                raise ConnectionError("it has not made the update that it was told of")
            self._unchecked = step
            return
        send_frame(self._partner, {"write": step, "header": header.decode()})
        total, begin = 0, facts.slot_offset(slot)
        for at in range(begin, begin + self._bytes, CHUNK_BYTES):
            with view[at : min(at + CHUNK_BYTES, begin + self._bytes)] as part:
                self._partner.sendall(part)
                total = zlib.crc32(part, total)
        answer = self._ask_partner({"sum": total})
        if answer != {"kept": step}:
            raise ConnectionError("it has not kept what it was sent")


# ----------------------------------------------------------------------------------------------------- for other nodes


def _gradients(connection: socket.socket, size: int) -> memoryview:
    """The memory that a rank hands over."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    try:
        return memoryview(mmap.mmap(descriptors[0], max(size, 1), access=mmap.ACCESS_READ))[:size]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class _Node:
    """What another node asks for: to read, or to keep what its rank has."""

    def __init__(
        self,
        connection: socket.socket,
        folder: Path,
        run: bytes,
        writes: bool,
        make_replica_updater: MakeReplicaUpdater = never_update,
    ) -> None:
        self._connection, self._folder, self._run, self._writes = connection, folder, run, writes
        self._make_replica_updater = make_replica_updater
        self._replay: ReplicaUpdaterProtocol | None = None
        self._replica: StateFile | None = None

    def serve(self) -> None:
        with self._connection, contextlib.suppress(OSError):  # until the other side is gone
            while True:
                message = receive_frame(self._connection)
                try:
                    if "read" in message:
                        self._read(str(message["read"]), int(message["at"]), int(message["bytes"]))
                    elif "check" in message:
                        path = self._there(str(message["check"])).path
                        send_frame(
                            self._connection,
                            {"problem": state_file.invalidate_damaged_step(path, int(message["step"]))},
                        )
                    elif self._writes:
                        self._keep(message)
                except Exception as error:  # what comes may be anything, and ends no more than this connection
                    send_frame(self._connection, {"error": str(error)})
                    return

    def _there(self, name: str) -> StateFileMetadata:
        """A state file of the run. Raises CheckpointError where there is none of that name."""
        paths = [*inventory.list_state_files(self._folder), *inventory.list_state_files(self._folder / REPLICAS)]
        found = [path for path in paths if str(path.relative_to(self._folder)) == name]
        facts = state_file.read_metadata(found[0]) if found else None
        if facts is None or facts.run != self._run:
            raise CheckpointError(f"there is no state file {name} any more")
        return facts

    def _read(self, name: str, at: int, count: int) -> None:
        facts = self._there(name)
        if not 0 <= at <= at + count <= facts.end:
            raise CheckpointError(f"the state file {name} is shorter than was asked for")
        descriptor = os.open(facts.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            send_frame(self._connection, {"bytes": count})
            while count:
                sent = os.sendfile(self._connection.fileno(), descriptor, at, count)
                if not sent:
                    raise ConnectionError("the file has become shorter")
                at, count = at + sent, count - sent
        finally:
            os.close(descriptor)

    def _keep(self, message: Message) -> None:
        if "keep" in message:
            answer = self._make(message["keep"])
            if self._replica is not None and "rule" in message["keep"]:
                self._replay = self._make_replica_updater(message["keep"])
            send_frame(self._connection, answer | {"replays": self._replay is not None})
        elif "forget" in message and self._replica is not None:
            self._replica.invalidate_all(int(message["forget"]))
            send_frame(self._connection, {"forgotten": True})
        elif "leave" in message and self._replica is not None:
            self._replica.metadata.path.unlink(missing_ok=True)
            self._replica = None
            send_frame(self._connection, {"left": True})
        elif "replay" in message and self._replica is not None and self._replay is not None:
            self._make_again(self._replica, self._replay, dict(message["replay"]), str(message["header"]).encode())
        elif "write" in message and self._replica is not None:
            self._write(self._replica, int(message["write"]), str(message["header"]).encode())

    def _make(self, form: Message) -> Message:
        generation, rank, world, part, parts = (int(each) for each in form["who"])
        who = StateFileOwner(generation, rank, world, self._run, part, parts)
        index, slot_bytes, folder = dict(form["index"]), int(form["slot_bytes"]), self._folder / REPLICAS
        before = state_file.read_metadata(folder / state_file.state_file_name(who.generation, who.rank))
        if before is not None and before.layout == state_file.digest_json(index) and before.run == self._run:
            self._replica = StateFile(before.path, writable=True, at_once=False)
            if before.way != int(form["way"]):
                self._replica.invalidate_all(int(form["way"]))
                return {"steps": []}
            newest = form.get("newest")
            for step, slot in before.steps.items():
                if newest is not None and step > int(newest):
                    self._replica.invalidate(slot)
            return {"steps": sorted(step for step in before.steps if newest is None or step <= int(newest))}
        found, need = os.statvfs(self._folder), state_file.state_file_bytes(index, slot_bytes)
        gradients = slot_bytes // 3 if "rule" in form else 0  # of AdamW's state
        free = found.f_bavail * found.f_frsize
        short = describe_shortage(
            "a replica of the state of another node's rank",
            need + gradients,
            free,
            host_memory.free_bytes(),
            form["asked"] is True,
        )
        if short is None:
            try:
                # Room is taken now; a rank waits for the answer, and not for each page to be mapped.
                self._replica = state_file.create_state_file(folder, who, index, slot_bytes, at_once=False)
                self._replica.invalidate_all(int(form["way"]))
            except OSError as error:
                short = f"{folder} does not take {need} bytes for a replica ({error.strerror})"
        return {"short": short} if short is not None else {"steps": []}

    def _write(self, file: StateFile, step: int, header: bytes) -> None:
        # The older of the two, or one that holds nothing.
        slot = min((0, 1), key=file.slot_step)
        file.invalidate(slot)
        with file.read_bytes(file.slot_offset(slot), file.metadata.slot_bytes) as data:
            receive_into(self._connection, data)
            told = receive_frame(self._connection)["sum"]
            file.commit(slot, step, header)
            send_frame(self._connection, {"kept": step})
            # Behind the answer, since a rank waits for that.
            if zlib.crc32(data) != told:
                file.invalidate(slot)
                raise CheckpointError(f"the replica of step {step} was damaged on its way")

    def _make_again(self, file: StateFile, replay: ReplicaUpdaterProtocol, update: Message, header: bytes) -> None:
        step = int(update["step"])
        old = 0 if file.slot_step(0) == step - 1 else 1
        if file.slot_step(old) != step - 1:
            raise CheckpointError(f"there is no replica of step {step - 1}")
        receive_into(self._connection, replay.gradients)
        file.invalidate(1 - old)
        replay.apply_update(file, old, update)
        file.commit(1 - old, step, header)
        send_frame(self._connection, {"kept": step})
        # Behind the answer, since a rank waits for that.
        wanted = receive_frame(self._connection)["sum"]
        with file.read_bytes(file.slot_offset(1 - old), file.metadata.slot_bytes) as data:
            if zlib.crc32(data) != wanted:
                file.invalidate(1 - old)
                raise CheckpointError(f"the update of step {step}, made again, came to something else")
        send_frame(self._connection, {"same": True})
