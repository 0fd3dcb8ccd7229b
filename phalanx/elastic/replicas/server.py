"""The replica process of a node: it keeps replicas of other nodes' state, sends the state of this node's ranks, and
serves reads.

An agent forks it before the ranks, gives it the authenticated connections of other nodes, and ends it when an attempt
is over: so nothing is written after the agents' agreement. Ranks reach it through a socket in their folder in shared
memory. Replicas are files there, so a later process finds them. Threads are fine here: it forks nothing.
"""

import contextlib
import os
import select
import socket
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from phalanx.core.errors import CheckpointError
from phalanx.core.placement import HostPort, InMemoryCheckpoint
from phalanx.core.records import EventKind
from phalanx.elastic.membership.channel import Channel, connect_and_greet, enable_keepalive
from phalanx.elastic.membership.store_relay import CALL_S
from phalanx.elastic.node.worker import NodeJob
from phalanx.elastic.replicas.own_ranks import ROLE, RankRequests, StateFileFetcher, fetch_for
from phalanx.elastic.supervisor.assignment import find_restore_source, list_files_to_fetch, list_reusable_replicas
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import inventory_to_message
from phalanx.recovery.inventory import REPLICAS
from phalanx.recovery.replica_client import SOCKET, Message, receive_frame, receive_into, send_frame
from phalanx.recovery.shared_memory import describe_shortage
from phalanx.recovery.state_file import StateFile, StateFileMetadata, StateFileOwner
from phalanx.system import memory as host_memory
from phalanx.system.fork import fork, kill_group

WRITES, READS = b"w", b"r"  # how a connection is handed over
COPIES = b"c"  # not a connection, but a request to copy


class ReplicaUpdaterProtocol(Protocol):
    """Recomputes a rank's updates in its replica from the gradients written to `gradients`."""

    gradients: memoryview

    def apply_update(self, file: StateFile, old: int, message: Mapping[str, Any]) -> None: ...


# Makes an updater from a rank's description of its update rule; None if updates cannot be repeated.
MakeReplicaUpdater = Callable[[Mapping[str, Any]], ReplicaUpdaterProtocol | None]


def never_update(form: Mapping[str, Any]) -> None:
    """Where nothing knows how to update."""
    return None


class ReplicaServer:
    """The agent's handle of the replica process. `folder`: the run's in this node's shared memory; `run_id`:
    identity of the run; `secret`: the job's; `make_replica_updater`: makes the object that repeats updates."""

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
        """Have the process copy a state file of another node, with a step, into one with the given number of
        slots, for a rank that will request it."""
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


class ReplicaHost:
    """This node's memory of a run, as its agent has it: its ranks' state files, and the process that keeps replicas of
    other nodes' state. `serves`: whether other nodes may have replicas here."""

    def __init__(self, secret: str, make_replica_updater: MakeReplicaUpdater) -> None:
        self.serves = True
        self._secret, self._make_replica_updater = secret, make_replica_updater
        self._server: ReplicaServer | None = None
        self._run = b""  # identity of the run; computed when its ranks begin, as later its folder may hang

    def open(self, job: NodeJob | None, forget_run: bool = False) -> ReplicaServer | None:
        """The replica process, restarted if it has died; None where no replicas are kept.
        `forget_run`: the run may have got its first records since."""
        if forget_run:
            self._run = b""
        if not self.serves:
            return None
        if self._server is not None and not self._server.is_alive:
            self.close()
        if job is None or job.shared is None or not job.keeps_state or job.paths is None:
            return self._server
        run = self._run_of(job)
        if self._server is not None and self._server.run_id != run:  # it had no records yet when it was forked
            self.close()
        if self._server is None:
            self._server = ReplicaServer(job.shared, run, self._secret, self._make_replica_updater)
        return self._server

    def hand_over(self, job: NodeJob | None, channel: Channel, writes: bool) -> None:
        """Give the process a connection of another node."""
        server = self.open(job)
        if server is not None:
            channel.send({"ok": True})
            with contextlib.suppress(OSError):  # it has died: the rank that waits for it fails
                server.hand_over(channel.socket, writes)
        channel.close("handed over to the replica process")

    def close(self) -> None:
        """Stop all writes before the inventory is reported."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _run_of(self, job: NodeJob) -> bytes:
        assert job.paths is not None
        self._run = self._run or state_file.compute_run_id(job.paths.events)
        return self._run

    def list_inventory(self, job: NodeJob | None) -> list[dict[str, Any]]:
        """The inventory of the run's state in this node's memory, for the leader."""
        if job is None or job.shared is None or job.paths is None:
            return []
        return inventory_to_message(inventory.read_inventory(job.shared, self._run_of(job)))

    def has_committed(self, job: NodeJob | None, steps: Mapping[int, int]) -> bool:
        """Whether living ranks, given with a step each, have committed that or a later one in this node's memory."""
        if job is None or job.shared is None or job.paths is None:
            return False
        newest: dict[int, int] = {}
        for facts in inventory.read_state_files(job.shared, self._run_of(job)):
            newest[facts.rank] = max(newest.get(facts.rank, 0), *facts.steps, 0)
        return all(newest.get(rank, 0) >= step for rank, step in steps.items())

    def adopt_restore_source(
        self, job: NodeJob, start: Message, node: int, address_of: Callable[[int], HostPort]
    ) -> InMemoryCheckpoint | None:
        """What an attempt begins with on this `node`, as the order to start says; whatever else lies here is removed,
        but for replicas of use. What another node has of it, and ranks here will take as it is, is on its way from now
        on."""
        assert job.shared is not None
        for message in inventory.find_damage(job.shared):
            job.on_event(EventKind.WARNING, {"attempt": int(start["attempt"]), "message": message})
        kept = find_restore_source(start, node, job.shared, address_of)
        own = {file.path for file in (kept.files if kept else ()) if file.address is None}
        reusable = {str(job.shared / name) for name in list_reusable_replicas(start, node)}
        inventory.remove_unused_files(job.shared, own | reusable)
        for file in list_files_to_fetch(start, node, kept):
            if kept is not None and file.address is not None and self._server is not None:
                self._server.fetch(file.path, file.address, kept.step, int(start["slots"]))
        return kept


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
            _in_thread(RankRequests(connection, folder, secret, fetches).serve)

    _in_thread(let_in)
    while True:
        data, descriptors, _, _ = socket.recv_fds(handed, 1, 1)
        if not data:
            return 0
        if data == COPIES:
            fetch_for(fetches, receive_frame(handed))
            continue
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(True)
        enable_keepalive(connection)
        _in_thread(_Node(connection, folder, run, data == WRITES, make_replica_updater).serve)


def _in_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, daemon=True).start()


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
                except Exception as error:  # a client may send anything, which must end this connection only
                    send_frame(self._connection, {"error": str(error)})
                    return

    def _there(self, name: str) -> StateFileMetadata:
        """A state file of the run. Raises CheckpointError if there is none of that name."""
        paths = inventory.list_with_replicas(self._folder)
        found = [path for path in paths if str(path.relative_to(self._folder)) == name]
        facts = state_file.read_metadata(found[0]) if found else None
        if facts is None or facts.run != self._run:
            raise CheckpointError(f"the state file {name} no longer exists")
        return facts

    def _read(self, name: str, at: int, count: int) -> None:
        facts = self._there(name)
        if not 0 <= at <= at + count <= facts.end:
            raise CheckpointError(f"the state file {name} is shorter than the requested range")
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
        gradients = int(form.get("gradients", 0))  # where updates are made again of them
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
                short = f"{folder} has no room for {need} bytes of a replica ({error.strerror})"
        return {"short": short} if short is not None else {"steps": []}

    def _write(self, file: StateFile, step: int, header: bytes) -> None:
        # The older of the two, or an empty one.
        slot = min((0, 1), key=file.slot_step)
        file.invalidate(slot)
        with file.read_bytes(file.slot_offset(slot), file.metadata.slot_bytes) as data:
            receive_into(self._connection, data)
            told = receive_frame(self._connection)["sum"]
            file.commit(slot, step, header)
            send_frame(self._connection, {"kept": step})
            # After the answer, since a rank waits for it.
            if zlib.crc32(data) != told:
                file.invalidate(slot)
                raise CheckpointError(f"the replica of step {step} was damaged in transfer")

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
        # After the answer, since a rank waits for it.
        wanted = receive_frame(self._connection)["sum"]
        with file.read_bytes(file.slot_offset(1 - old), file.metadata.slot_bytes) as data:
            if zlib.crc32(data) != wanted:
                file.invalidate(1 - old)
                raise CheckpointError(f"the recomputed update of step {step} differs")
        send_frame(self._connection, {"same": True})
