"""Connectivity check between all nodes: an echo server at one address of a node, behind the rendezvous secret.

A caller authenticates as nodes do (`channel.py`), asks for the time and sends some megabytes, which are echoed. The
server runs in a forked process that ends with its parent.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.elastic.membership.channel import Channel, Handshake, connect_and_greet
from phalanx.system.fork import fork, kill_group

SIZE_BYTES = 8 << 20
PART_BYTES = 1 << 18
PINGS = 5
CONNECT_S = 10.0  # to reach a node, and for its proof
TRANSFER_S = 60.0
MOST_CALLERS = 64  # at a time; strangers may call, too
HELLO = {"role": "echo"}
_TIME = struct.Struct("!d")


@dataclass(frozen=True)
class ConnectionProbe:
    """The connection from one node to another: round-trip time, bytes per second each way, clock offset; or the
    error."""

    latency_s: float | None = None
    bytes_per_s: float | None = None
    skew_s: float | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class EchoServer:
    """Answers at one address of this node until it is closed. `address` is where."""

    def __init__(self, host: str, secret: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
            listener.listen(128)
            self.address: tuple[str, int] = listener.getsockname()[:2]
            self._pid, self._pidfd = fork(lambda: _serve(listener, secret), keep=[listener.fileno()])

    def close(self) -> None:
        kill_group(self._pid)
        os.waitpid(self._pid, 0)
        os.close(self._pidfd)


def _serve(listener: socket.socket, secret: str) -> int:
    room = threading.BoundedSemaphore(MOST_CALLERS)

    def answer(connection: socket.socket) -> None:
        try:
            _answer(connection, secret)
        finally:
            room.release()

    while True:
        room.acquire()
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket, secret: str) -> None:
    channel = Channel(connection)
    with contextlib.suppress(OSError):  # the caller has disconnected
        if _is_friend(channel, secret):
            connection.setblocking(True)
            connection.settimeout(TRANSFER_S)
            while (asked := connection.recv(1)) == b"t":
                connection.sendall(_TIME.pack(time.time()))
            if asked == b"e":
                connection.sendall(_received(connection, SIZE_BYTES))
    channel.close("finished")


def _is_friend(channel: Channel, secret: str) -> bool:
    """Authenticate a caller that wants an echo; returns whether it was accepted."""
    proof = Handshake(channel, secret, calling=False)
    while channel.lost is None and proof.failed is None and time.monotonic() < proof.until:
        channel.wait(0.1)
        for message in channel.receive():
            if not proof.done:
                proof.feed(message)
            elif message == HELLO:
                channel.send({"ok": True})
                return channel.lost is None
    return False


def probe(address: tuple[str, int], secret: str) -> ConnectionProbe:
    """Call the echo of another node."""
    try:
        connection = connect_and_greet(address, secret, HELLO, CONNECT_S)
    except OSError as error:
        return ConnectionProbe(error=error.strerror or str(error))
    try:
        with connection:
            connection.settimeout(TRANSFER_S)
            pings = [_ping(connection) for _ in range(PINGS)]
            latency_s, skew_s = min(pings)
            begun = time.perf_counter()
            connection.sendall(b"e")
            sent = bytes(SIZE_BYTES)
            connection.sendall(sent)
            if _received(connection, SIZE_BYTES) != sent:
                return ConnectionProbe(latency_s, None, skew_s, "the data returned differs from the data sent")
            # There and then back, one after the other.
            return ConnectionProbe(latency_s, 2 * SIZE_BYTES / (time.perf_counter() - begun), skew_s)
    except OSError as error:
        return ConnectionProbe(error=f"the transfer failed ({error.strerror or error})")


def _ping(connection: socket.socket) -> tuple[float, float]:
    """The round-trip time in seconds, and the clock offset to half of it."""
    begun, at = time.perf_counter(), time.time()
    connection.sendall(b"t")
    (theirs,) = _TIME.unpack(_received(connection, _TIME.size))
    took_s = time.perf_counter() - begun
    return took_s, theirs - (at + took_s / 2)


def _received(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(PART_BYTES, size - len(parts)))
        if not part:
            raise ConnectionError("it closed the connection")
        parts += part
    return bytes(parts)
