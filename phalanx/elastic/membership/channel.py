"""Channels between the agents of a job: JSON lines over TCP, after both sides have proved that they know the secret.

Nothing here blocks: a channel sends and receives what the kernel can take or has, whenever its owner polls it. The
proof is HMAC-SHA256 over a nonce of each side (mutual challenge and response) and the called port, so that the secret
is never sent, replays fail, and a listener at another port cannot relay the proofs of two others. Messages after the
proof are neither encrypted nor signed.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import time
from collections.abc import Mapping
from typing import Any, TypeGuard

PROTOCOL = 4  # of messages; a node says at the meeting that it is ready by another one than in 3
MAX_HANDSHAKE_BYTES = 1 << 10  # the longest line of a side that has not proved itself
MAX_MESSAGE_BYTES = 16 << 20
HANDSHAKE_TIMEOUT_S = 10.0  # time limit of the proof
# A side that is silent because its machine or network is gone: the kernel asks it after IDLE seconds, then COUNT times.
IDLE_S, BETWEEN_S, COUNT = 5, 3, 3
SILENT_S = IDLE_S + BETWEEN_S * COUNT
# The kernel also answers for a stopped or stuck process: one that is silent for ASK_S is pinged itself, and
# has DEAF_S to answer. Node 0 may be busy for a while, with its report for instance.
ASK_S, DEAF_S = 30.0, 300.0
LINGER_S = 0.5  # what last words get to be taken
AGAIN_S = 0.1  # between two calls of a process that may wait, where the first one was hung up on
PART_BYTES = 1 << 16  # that are taken at a time
TOO_LONG = "it sent a line that is too long"

Message = dict[str, Any]


class HandshakeInterrupted(ConnectionError):
    """The other side has closed a connection before both have proved themselves."""


class Channel:
    """One connection. `lost` says why it is over, in words that follow "because"; None while it holds."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        enable_keepalive(connection)
        self.socket = connection
        self.lost: str | None = None
        self.most_bytes = MAX_HANDSHAKE_BYTES
        self._in, self._out = bytearray(), bytearray()
        self._quiet_since, self._asked = time.monotonic(), False

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def awaits(self) -> int:
        """Event mask for poll()."""
        return select.POLLIN | (select.POLLOUT if self._out else 0)

    def send(self, message: Message) -> None:
        """Send a message, now or when there is room."""
        self._out += json.dumps(message).encode() + b"\n"
        self._send()

    def receive(self) -> list[Message]:
        """Messages received since the last call; an invalid one closes the channel."""
        self._send()
        self._receive()
        messages: list[Message] = []
        *lines, self._in = self._in.split(b"\n")
        for line in lines:
            message = _read(line) if len(line) <= self.most_bytes else None
            if message is None:
                self.close("it sent an invalid message" if len(line) <= self.most_bytes else TOO_LONG)
                break
            messages.append(message)
        if len(self._in) > self.most_bytes:
            self.close(TOO_LONG)
        return messages

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to send or to receive."""
        poll_descriptors({self.fileno(): self.awaits}, timeout_s)

    def push_back(self, messages: list[Message]) -> None:
        """Put back the last received messages for the next owner of the channel."""
        self._in[:0] = b"".join(json.dumps(message).encode() + b"\n" for message in messages)

    def check_alive(self) -> None:
        """Ping the other side when due; one that does not answer in time is lost. Call it after `receive`, which may
        have the answer."""
        quiet_s = time.monotonic() - self._quiet_since
        if not self._asked and quiet_s > ASK_S:
            self._asked, self._quiet_since = True, time.monotonic()
            self.send({"ping": True})
        elif self._asked and quiet_s > DEAF_S:
            self.close(f"its process has not responded for {DEAF_S:g} s")

    def close(self, why: str) -> None:
        """Close the connection; unsent messages are dropped."""
        self.lost = self.lost or why
        self._in.clear()
        self.socket.close()

    def send_and_close(self, message: Message, why: str, timeout_s: float = LINGER_S) -> None:
        """Send a last message and close."""
        self.send(message)
        self.linger(why, timeout_s)

    def linger(self, why: str, timeout_s: float = LINGER_S) -> None:
        """Close after pending messages are sent. This waits a moment for a slow network and for the other side's
        last messages, since closing with unread data would discard sent data."""
        until, told = time.monotonic() + timeout_s, False
        while self.lost is None and time.monotonic() < until:
            if not self._out and not told:
                told = True
                with contextlib.suppress(OSError):  # it has gone already, as the next look shows
                    self.socket.shutdown(socket.SHUT_WR)
            self.wait(0.05)
            self.receive()
        self.close(why)

    def _send(self) -> None:
        while self._out and self.lost is None:
            try:
                sent = self.socket.send(self._out)
            except BlockingIOError:
                return
            except OSError as error:
                self._over(_words(error))
                return
            del self._out[:sent]

    def _receive(self) -> None:
        # At most one line: an endless sender must not keep this process busy.
        got, ended = 0, False
        while self.lost is None and len(self._in) <= self.most_bytes and not (ended and got >= PART_BYTES):
            try:
                part = self.socket.recv(min(PART_BYTES, self.most_bytes + 1 - len(self._in)))
            except BlockingIOError:
                return
            except OSError as error:
                self._over(_words(error))
                return
            if not part:
                self._over("it closed the connection")
                return
            self._in += part
            got, ended = got + len(part), ended or b"\n" in part
            self._quiet_since, self._asked = time.monotonic(), False

    def _over(self, why: str) -> None:
        """Handle a connection closed by the other side; its earlier messages are still read."""
        self.lost = why
        self.socket.close()


class Handshake:
    """One side of the authentication handshake; feed it with received messages until `done` or `failed`.

    The called side (node 0) gives its nonce first and proves itself last, so that an unauthenticated caller learns
    nothing about the secret.
    """

    def __init__(self, channel: Channel, secret: str, calling: bool) -> None:
        self.channel, self._calling = channel, calling
        self._secret = secret.encode(errors="surrogateescape")  # the environment may hold any bytes
        self.done = False
        self.failed: str | None = None
        self._mine, self._theirs = secrets.token_hex(16), ""
        self._port = 0 if calling else _port(channel.socket.getsockname())
        self.until = time.monotonic() + HANDSHAKE_TIMEOUT_S
        if not calling:
            channel.send({"phalanx": PROTOCOL, "nonce": self._mine})

    def feed(self, message: Message) -> None:
        """Take the next message of the other side."""
        if self._calling and not self._theirs:
            self._answer(message)
        elif self._calling:
            if message.get("unknown") is True:
                self.failed = "it does not accept this node's secret"
            elif not self._is_proved(message.get("proof"), b"called"):
                self.failed = "the process listening there does not know this job's secret"
        elif _is_ascii(message.get("nonce")):
            self._theirs = message["nonce"]
            if self._is_proved(message.get("proof"), b"calling"):
                self.channel.send({"proof": self._proof(b"called")})
            else:
                self.channel.send_and_close({"unknown": True}, "it does not know the secret", timeout_s=0)
                self.failed = "it does not know the secret"
        else:
            self.failed = "it did not answer the authentication challenge"

    def _answer(self, message: Message) -> None:
        nonce = message.get("nonce")
        if type(message.get("phalanx")) is not int or not _is_ascii(nonce):
            self.failed = "the process listening there is not node 0 of a Phalanx run"
            return
        if message["phalanx"] != PROTOCOL:
            self.failed = (
                f"the node listening there uses protocol version {message['phalanx']} but this node uses {PROTOCOL}; "
                "install the same release of Phalanx on all nodes"
            )
            return
        with contextlib.suppress(OSError):  # it has gone again, as the channel will find
            self._port = _port(self.channel.socket.getpeername())
        self._theirs = nonce
        self.channel.send({"nonce": self._mine, "proof": self._proof(b"calling")})

    def _proof(self, side: bytes) -> str:
        calling, called = (self._mine, self._theirs) if self._calling else (self._theirs, self._mine)
        text = b"|".join([b"phalanx", side, str(self._port).encode(), calling.encode(), called.encode()])
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    def _is_proved(self, proof: Any, side: bytes) -> bool:
        self.done = _is_ascii(proof) and hmac.compare_digest(proof, self._proof(side))
        if self.done:
            self.channel.most_bytes = MAX_MESSAGE_BYTES
            self.until = time.monotonic() + HANDSHAKE_TIMEOUT_S  # to authenticate
        return self.done


def poll_descriptors(descriptors: Mapping[int, int], timeout_s: float) -> bool:
    """Wait until one of the descriptors is ready for its poll() events; returns whether one is."""
    poll = select.poll()
    for descriptor, events in descriptors.items():
        poll.register(descriptor, events)
    return bool(poll.poll(1000 * timeout_s))


def enable_keepalive(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other side has been silent for SILENT_S, and send small parts at once."""
    options = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, BETWEEN_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, COUNT),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000),  # the same for what was sent and not taken
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ]
    for level, name, value in options:
        connection.setsockopt(level, name, value)


def open_channel(address: tuple[str, int], secret: str, connect_s: float, handshake_s: float) -> Channel:
    """Connect and authenticate, blocking; the channel is then ready for what this side has to say.

    The other side has `connect_s` to be there, and `handshake_s` to answer, since its process may be busy. Raises
    ConnectionRefusedError when it is there but the two do not know the same secret, Interrupted when it has closed the
    connection before the proof was complete, and any other OSError when it is not there in time; the text says why.
    """
    channel = Channel(socket.create_connection(address, timeout=connect_s))
    until = time.monotonic() + handshake_s
    proof = Handshake(channel, secret, calling=True)
    while not proof.done and not proof.failed and channel.lost is None and time.monotonic() < until:
        channel.wait(0.1)
        for message in channel.receive():
            proof.feed(message)
    if proof.failed:
        channel.close(proof.failed)
        raise ConnectionRefusedError(proof.failed)
    if not proof.done:
        wanted = HandshakeInterrupted if channel.lost else ConnectionError
        channel.close("it did not answer in time")
        raise wanted(channel.lost)
    return channel


def start_connecting(address: tuple[str, int]) -> Channel:
    """A non-blocking connection attempt, for an agent, which must not wait.

    Raises OSError where it is known at once that nothing answers.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        with contextlib.suppress(BlockingIOError):
            connection.connect(address)
        return Channel(connection)
    except OSError:
        connection.close()
        raise


def connect_and_greet(address: tuple[str, int], secret: str, hello: Message, timeout_s: float) -> socket.socket:
    """Connect, authenticate, say hello and wait for {"ok": true}; returns the connection, which now blocks, for what
    follows.

    The other side must not send anything else before it hears something. Raises OSError.
    """
    until = time.monotonic() + timeout_s
    while True:
        left_s = max(0.1, until - time.monotonic())
        try:
            channel = open_channel(address, secret, left_s, left_s)
            break
        except (
            HandshakeInterrupted
        ):  # unauthenticated callers fill its queue, or it has just ended and no longer listens
            if time.monotonic() + AGAIN_S > until:
                raise
            time.sleep(AGAIN_S)
    channel.send(hello)
    while channel.lost is None and time.monotonic() < until:
        channel.wait(0.1)
        if {"ok": True} in channel.receive():
            channel.socket.setblocking(True)
            return channel.socket
    channel.close("it did not answer in time")
    raise ConnectionError(channel.lost)


def _read(line: bytearray) -> Message | None:
    """The message in a line; None where it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _port(name: Any) -> int:
    """The port of a socket's name; 0 for one of another kind."""
    return int(name[1]) if isinstance(name, tuple) else 0


def _is_ascii(text: Any) -> TypeGuard[str]:
    """Whether this is text that can be encoded: JSON may hold halves of characters."""
    return isinstance(text, str) and text.isascii()


def _words(error: OSError) -> str:
    return "it timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
