"""A rank's way to copies of state on other nodes: it asks the process of its own node that keeps replicas, through a
socket in their folder in shared memory, which is their user's alone. That one knows the job's secret, ranks do not.

A frame is four bytes of length and JSON; some are followed by as many raw bytes as they say. No torch here.
"""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.core.errors import CheckpointError, CollectiveError
from phalanx.core.json_lines import parse_object
from phalanx.core.placement import HostPort
from phalanx.recovery.state_file import PAGE, StateFileReader, parse_metadata

SOCKET = "replicas.sock"
FRAME_BYTES = 64 << 20  # the longest frame: an index has a line for each parameter
PART_BYTES = 16 << 20  # that are asked for at a time

Message = dict[str, Any]


def send_frame(connection: socket.socket, message: Message) -> None:
    """Send a frame. Raises OSError."""
    raw = json.dumps(message).encode()
    connection.sendall(len(raw).to_bytes(4, "little") + raw)


def receive_frame(connection: socket.socket) -> Message:
    """Wait for a frame. Raises OSError where there is none any more, or no sense in it."""
    length = int.from_bytes(receive_into(connection, memoryview(bytearray(4))), "little")
    if length > FRAME_BYTES:
        raise ConnectionError("it sent a frame that is too long")
    message = parse_object(receive_into(connection, memoryview(bytearray(length))).tobytes())
    if message is None:
        raise ConnectionError("it sent what is no frame")
    return message


def receive_into(connection: socket.socket, view: memoryview) -> memoryview:
    """Fill a view with what comes. Raises OSError."""
    got = 0
    while got < len(view):
        count = connection.recv_into(view[got:])
        if not count:
            raise ConnectionError("it closed the connection")
        got += count
    return view


class ReplicaClient:
    """`node` is this one's number among `nodes` with ranks; `partner`: where the next one is, which holds replicas of
    this one's state (None: there is no other); `timeout_s`: what any answer gets. Errors are CollectiveErrors: a node
    is lost, or the process that keeps replicas on one."""

    def __init__(
        self, folder: Path, node: int, nodes: int, partner: HostPort | None, attempt: int, timeout_s: float
    ) -> None:
        self.node, self.previous_node, self.partner = node, (node - 1) % nodes, partner
        self._folder, self._attempt, self._timeout_s = folder, attempt, timeout_s
        self._connection: socket.socket | None = None
        self._unacknowledged: list[int] = []  # steps that were sent and are not acknowledged
        self.replays = False  # the partner can make this rank's updates again
        self.partner_steps: set[int] = set()  # steps that the partner has had from before

    def begin_replica(
        self, path: Path, requested: bool, bare: bool, rule: Message | None = None, newest: int | None = None
    ) -> str | None:
        """Have the partner make room for a replica of this rank's state file, or find that which it has; why it has no
        room, where it has none. What nobody has asked for (not `requested`) must leave more room for others. `bare`:
        without state, as another node holds the same anyway. `rule`: what updates go by, and by which kernels, where
        they can be made again of gradients. `newest`: the step that is gone on from, behind which the partner has
        nothing to keep (None: it has nothing of this file)."""
        assert self.partner is not None
        answer = self._ask(
            {
                "replicate": path.name,
                "to": list(self.partner),
                "attempt": self._attempt,
                "asked": requested,
                "bare": bare,
                "rule": rule,
                "newest": newest,
            }
        )
        self.partner_steps = set(answer.get("steps", []))
        self.replays = answer.get("replays") is True
        return None if answer.get("short") is None else str(answer["short"])

    def share_gradients(self, gradients: int, size: int) -> None:
        """Give the process of this node a descriptor of the memory that this rank's gradients will be in."""
        self._send({"gradients": size})
        assert self._connection is not None
        socket.send_fds(self._connection, [b"g"], [gradients])

    def send_commit(self, step: int, update: Message | None = None) -> None:
        """A step is committed in this rank's file: its slot is on its way to the partner from now on; or its gradients,
        with what `update` says of it, if the partner has the step before."""
        self._unacknowledged.append(step)
        self._send({"step": step, "told": update})

    def wait_for_ack(self) -> None:
        """Wait until the partner has all that was sent."""
        while self._unacknowledged:
            self._answer()
            self._unacknowledged.pop(0)

    def invalidate_replica(self, way: int) -> None:
        """Have the partner make its replica void; what comes now is of another way."""
        self.wait_for_ack()
        self._ask({"forget": way})
        self.partner_steps = set()

    def release_replica(self) -> None:
        """Have the partner take the memory back that it has made room in."""
        self.wait_for_ack()
        self._ask({"leave": True})

    def start_fetch(self, address: HostPort, name: str, step: int, slots: int) -> str | None:
        """Have a state file of another node, which holds a step, copied to a file of so many slots in this node's
        folder, unless it is on its way already; the name of the copy, or None where there is no room for one."""
        self.wait_for_ack()
        found = self._ask({"fetch": name, "of": list(address), "step": step, "slots": slots})["file"]
        return None if found is None else str(found)

    def wait_for_fetch(self) -> None:
        """Wait until that is whole. Raises CollectiveError where it will not be."""
        answer = self._ask({"fetched": True})
        while "whole" not in answer:  # it gets on
            answer = self._answer()
        if not answer["whole"]:
            raise CollectiveError("state could not be copied from another node; it or its process for that was lost")

    def read_bytes(self, address: HostPort, name: str, at: int, count: int) -> bytearray:
        """Bytes of a state file on another node."""
        self.wait_for_ack()
        found = bytearray(count)
        view = memoryview(found)
        for begin in range(0, count, PART_BYTES):
            size = min(PART_BYTES, count - begin)
            self._ask({"read": name, "of": list(address), "at": at + begin, "bytes": size})
            assert self._connection is not None
            try:
                receive_into(self._connection, view[begin : begin + size])
            except OSError as error:
                raise self._connection_error(error) from None
        return found

    def verify_file(self, address: HostPort, name: str, step: int) -> str | None:
        """Have another node compare what a state file of it holds of a step with its checksum: what is wrong with it,
        in which case it is void from then on, or None."""
        self.wait_for_ack()
        problem = self._ask({"check": name, "of": list(address), "step": step})["problem"]
        return None if problem is None else str(problem)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _ask(self, message: Message) -> Message:
        self._send(message)
        return self._answer()

    def _send(self, message: Message) -> None:
        try:
            if self._connection is None:
                self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._connection.settimeout(self._timeout_s)
                self._connection.connect(str(self._folder / SOCKET))
            send_frame(self._connection, message)
        except OSError as error:
            raise self._connection_error(error) from None

    def _answer(self) -> Message:
        assert self._connection is not None
        try:
            answer = receive_frame(self._connection)
        except OSError as error:
            raise self._connection_error(error) from None
        if "error" in answer:
            raise CollectiveError(str(answer["error"]))
        return answer

    def _connection_error(self, error: OSError) -> CollectiveError:
        why = f"has not answered for {self._timeout_s:g} s" if isinstance(error, TimeoutError) else "is gone"
        return CollectiveError(
            f"the process of this node that keeps replicas {why} ({error}), so no step is safe any more; look for what "
            "has killed it (the kernel's log, where memory was short)"
        )


class RemoteStateFile(StateFileReader):
    """A state file on another node, to be read: `read(at, count)` gets bytes of it."""

    def __init__(self, name: str, read: Callable[[int, int], bytearray]) -> None:
        """Raises CheckpointError where it is none, and what `read` does where it cannot be reached."""
        self._read_bytes = read
        self.metadata = parse_metadata(Path(name), bytes(self._read_bytes(0, PAGE)))
        if self.metadata.index_bytes > FRAME_BYTES:
            raise CheckpointError(f"the state file {name} on another node says that its index is longer than any")

    def read_bytes(self, at: int, count: int) -> memoryview:
        if not 0 <= at <= at + count <= self.metadata.end:
            raise CheckpointError(f"the state file {self.metadata.path} on another node is shorter than its index says")
        return memoryview(self._read_bytes(at, count))
