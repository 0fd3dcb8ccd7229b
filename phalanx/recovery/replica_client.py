"""Client of a rank to its node's replica process, which reaches copies of state on other nodes. It uses a socket in the
run's private folder in shared memory. The replica process knows the job's secret, ranks do not.

A frame is four bytes of length and JSON; some frames are followed by raw bytes, whose number they give. No torch here.
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
FRAME_BYTES = 64 << 20  # longest frame; an index has one line per parameter
PART_BYTES = 16 << 20  # bytes per read request

Message = dict[str, Any]


def send_frame(connection: socket.socket, message: Message) -> None:
    """Send a frame. Raises OSError."""
    raw = json.dumps(message).encode()
    connection.sendall(len(raw).to_bytes(4, "little") + raw)


def receive_frame(connection: socket.socket) -> Message:
    """Wait for a frame. Raises OSError if the connection is closed or the frame is invalid."""
    length = int.from_bytes(receive_into(connection, memoryview(bytearray(4))), "little")
    if length > FRAME_BYTES:
        raise ConnectionError("it sent a frame that is too long")
    message = parse_object(receive_into(connection, memoryview(bytearray(length))).tobytes())
    if message is None:
        raise ConnectionError("it sent an invalid frame")
    return message


def receive_into(connection: socket.socket, view: memoryview) -> memoryview:
    """Fill a view with received bytes. Raises OSError."""
    got = 0
    while got < len(view):
        count = connection.recv_into(view[got:])
        if not count:
            raise ConnectionError("it closed the connection")
        got += count
    return view


class ReplicaClient:
    """Connection to the replica process. `node` is this node's index among the `nodes` with ranks; `partner`: address
    of the next node, which holds replicas of this node's state (None: there is no other); `timeout_s`: limit for each
    answer. Errors are CollectiveErrors: a node, or a replica process, is lost."""

    def __init__(
        self, folder: Path, node: int, nodes: int, partner: HostPort | None, attempt: int, timeout_s: float
    ) -> None:
        self.node, self.previous_node, self.partner = node, (node - 1) % nodes, partner
        self._folder, self._attempt, self._timeout_s = folder, attempt, timeout_s
        self._connection: socket.socket | None = None
        self._unacknowledged: list[int] = []  # steps that were sent but not acknowledged
        self.replays = False  # the partner can repeat this rank's updates
        self.partner_steps: set[int] = set()  # steps that the partner holds from an earlier attempt

    def begin_replica(
        self, path: Path, requested: bool, bare: bool, rule: Message | None = None, newest: int | None = None
    ) -> str | None:
        """Have the partner allocate a replica of this rank's state file, or reuse an existing one. Returns the reason
        if it has no room. If replication was not `requested` by the user, more memory must stay free. `bare`: headers
        only, as another node holds the same state. `rule`: the update rule and its kernels, if updates can be repeated
        from gradients. `newest`: the step that the run resumes from, after which the partner keeps nothing (None: it
        has no part of this file)."""
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
        """Pass a descriptor of the memory for this rank's gradients to the replica process of this node."""
        self._send({"gradients": size})
        assert self._connection is not None
        socket.send_fds(self._connection, [b"g"], [gradients])

    def send_commit(self, step: int, update: Message | None = None) -> None:
        """Report a committed step of this rank's file, which starts sending its slot to the partner; or its gradients
        with `update`, if the partner has the previous step."""
        self._unacknowledged.append(step)
        self._send({"step": step, "told": update})

    def wait_for_ack(self) -> None:
        """Wait until the partner has acknowledged all steps sent."""
        while self._unacknowledged:
            self._answer()
            self._unacknowledged.pop(0)

    def invalidate_replica(self, way: int) -> None:
        """Have the partner void its replica; later steps belong to a new branch of the run."""
        self.wait_for_ack()
        self._ask({"forget": way})
        self.partner_steps = set()

    def release_replica(self) -> None:
        """Have the partner free the memory of the replica."""
        self.wait_for_ack()
        self._ask({"leave": True})

    def start_fetch(self, address: HostPort, name: str, step: int, slots: int) -> str | None:
        """Start copying a state file of another node that holds a step into this node's folder, with the given number
        of slots, unless a copy is in progress. Returns the name of the copy, or None if there is no room."""
        self.wait_for_ack()
        found = self._ask({"fetch": name, "of": list(address), "step": step, "slots": slots})["file"]
        return None if found is None else str(found)

    def wait_for_fetch(self) -> None:
        """Wait until the copy is complete. Raises CollectiveError if it fails."""
        answer = self._ask({"fetched": True})
        while "whole" not in answer:  # other answers report progress
            answer = self._answer()
        if not answer["whole"]:
            raise CollectiveError(
                "state could not be copied from another node; that node or its replica process was lost"
            )

    def read_bytes(self, address: HostPort, name: str, at: int, count: int) -> bytearray:
        """Read bytes of a state file on another node."""
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
        """Have another node compare a step in its state file with the checksum. Returns the damage found, in which case
        the step is voided, or None."""
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
        why = f"has not responded for {self._timeout_s:g} s" if isinstance(error, TimeoutError) else "is gone"
        return CollectiveError(
            f"this node's replica process {why} ({error}), so steps are no longer replicated; find out what killed "
            "it (see the kernel's log if memory was short)"
        )


class RemoteStateFile(StateFileReader):
    """Reader of a state file on another node; `read(at, count)` fetches its bytes."""

    def __init__(self, name: str, read: Callable[[int, int], bytearray]) -> None:
        """Raises CheckpointError if it is not a state file, and the errors of `read` if it cannot be reached."""
        self._read_bytes = read
        self.metadata = parse_metadata(Path(name), bytes(self._read_bytes(0, PAGE)))
        if self.metadata.index_bytes > FRAME_BYTES:
            raise CheckpointError(f"the state file {name} on another node has an impossibly long index")

    def read_bytes(self, at: int, count: int) -> memoryview:
        if not 0 <= at <= at + count <= self.metadata.end:
            raise CheckpointError(f"the state file {self.metadata.path} on another node is shorter than its index says")
        return memoryview(self._read_bytes(at, count))
