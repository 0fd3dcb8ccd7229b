"""The listening socket of an agent, and callers that have not yet authenticated.

Nothing here blocks. Any host that reaches the port can open connections, so unauthenticated ones are limited in total
and per address; above the limit the oldest of the address with the most is closed. Each gets a limited time, and each
turn of the owner's loop accepts a limited number.
"""

import contextlib
import errno
import ipaddress
import math
import resource
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.elastic.membership.channel import Channel, Handshake, Message
from phalanx.elastic.membership.member_list import TOKEN_BYTES

MAX_PENDING = 512  # unproved connections, if this process may open four times as many files
BACKLOG = 4096  # connections that the kernel queues meanwhile; limited by net.core.somaxconn
TURN = 256  # callers accepted in one turn of the owner's loop
PARTS = 8  # that a proof may come in: each costs a turn
CALM = 32  # up to so many pending callers each new one wakes the owner; with more, they are handled together
TOGETHER_S = 0.02
LOOK_S = 0.25  # between two checks for expired callers
FLOOD_THRESHOLD = 64  # unauthenticated callers closed or gone, after which the owner is warned
BUFFER_BYTES = 4 << 20  # for beats that come while this process does something else
EVERYWHERE = ("0.0.0.0", "::")
MOST_TOLD = 20  # refused hosts that are reported, once each


@dataclass
class PendingConnection:
    """A caller that has not identified itself."""

    channel: Channel
    handshake: Handshake
    host: str  # the address it calls from
    network: str  # what counts as one caller
    parts: int = 0  # in which it has sent something before its proof


@dataclass(frozen=True)
class BoundAddress:
    """One address of this machine with a TCP and a UDP socket bound to it, both for the other nodes of a job."""

    address: str
    listener: socket.socket
    beats: socket.socket
    token: str  # of this process

    def to_message(self) -> Message:
        """The address for other nodes."""
        ports = {"port": self.listener.getsockname()[1], "beats": self.beats.getsockname()[1]}
        return {"token": self.token, "address": self.address, **ports}

    def close(self) -> None:
        self.listener.close()
        self.beats.close()


def open_listener(address: str, port: int) -> socket.socket:
    """A socket that listens at one address; 0 is a port of the system's choice. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
        held.pop_all()
    return listener


def bind(address: str, listener: socket.socket | None = None) -> BoundAddress:
    """Listen at an address for the other nodes, or continue with a listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as held:
        if listener is None:
            listener = held.enter_context(open_listener(address, 0))
        beats = held.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        beats.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        beats.bind((address, 0))
        held.pop_all()
    return BoundAddress(address, listener, beats, secrets.token_hex(TOKEN_BYTES))


class ConnectionListener:
    """`on_refused(host, why)` is called once for each address whose call was refused."""

    def __init__(self, listener: socket.socket, secret: str, on_refused: Callable[[str, str], None]) -> None:
        listener.setblocking(False)
        self.socket, self.secret, self.on_refused = listener, secret, on_refused
        self._flooding_host: str | None = None
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MAX_PENDING if files == resource.RLIM_INFINITY else max(4, min(MAX_PENDING, files // 4))
        self._pending: dict[int, PendingConnection] = {}  # by descriptor, the oldest first
        self._of: dict[str, dict[int, None]] = {}  # their descriptors by network, the oldest first
        self._calls = select.epoll()  # one descriptor for any number of connections
        self._calls.register(listener, select.EPOLLIN)
        self._told: set[str] = set()
        self._unproved: dict[str, int] = {}
        self._look_at = self._turn = 0.0

    def descriptors(self) -> dict[int, int]:
        """Descriptors for poll(), with their event masks; nothing for `due_s` after a turn, where many call."""
        return {} if self.due_s() < math.inf else {self._calls.fileno(): select.POLLIN}

    def due_s(self) -> float:
        """Seconds until the next turn is due without a call; infinite if none is."""
        if len(self._pending) <= CALM:
            return math.inf
        left_s = self._turn + TOGETHER_S - time.monotonic()
        return left_s if left_s > 0 else math.inf

    def accept(self) -> list[tuple[Channel, Message]]:
        """Accept callers; returns newly authenticated ones with their first message."""
        found: list[tuple[Channel, Message]] = []
        if self.due_s() < math.inf:
            return found
        self._turn = time.monotonic()
        ready = {descriptor for descriptor, _ in self._calls.poll(0, TURN)}
        for number in ready & self._pending.keys():
            stranger = self._pending[number]
            hello = self._hear(number, stranger)
            if hello is not None:
                found.append((stranger.channel, hello))
        self._end_late(self._turn)
        if self.socket.fileno() in ready:
            self._let_in()
        return found

    def take_flooding_host(self) -> str | None:
        """The address with FLOOD_THRESHOLD unauthenticated connections, for a warning by the owner; once."""
        host, self._flooding_host = self._flooding_host, None
        return host

    def restrict_to(self, address: str) -> None:
        """From now on listen at this address alone, at the same port, where it was at all of this machine's: by which
        of them others come is not known before they have come. Who has called already stays. Raises OSError."""
        there, port = self.socket.getsockname()[:2]
        if there not in EVERYWHERE:
            return
        self._calls.unregister(self.socket)
        # First, as both cannot listen; who calls in between calls again. For children that have the descriptor, too.
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.socket = open_listener(address, port)
        self.socket.setblocking(False)
        self._calls.register(self.socket, select.EPOLLIN)

    def close(self, why: str) -> None:
        for stranger in self._pending.values():
            stranger.channel.close(why)
        self._pending, self._of = {}, {}
        self._calls.close()
        self.socket.close()

    def _let_in(self) -> None:
        # At most as many as one address may open in four turns: a caller that answers at once is not dropped for later
        # ones.
        for _ in range(max(1, self._most // 8)):
            try:
                connection, peer = self.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it has gone again; or there is no descriptor left
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room(self._most // 2)
                return
            host = str(peer[0]).removeprefix("::ffff:")
            network = _network_of(host)
            self._make_room(self._most - 1, network)
            try:
                channel = Channel(connection)
            except OSError:  # it has gone again
                connection.close()
                continue
            stranger = PendingConnection(channel, Handshake(channel, self.secret, calling=False), host, network)
            if channel.lost is None:
                number = channel.fileno()
                self._pending[number] = stranger
                self._of.setdefault(network, {})[number] = None
                self._calls.register(number, select.EPOLLIN)

    def _make_room(self, most: int, network: str | None = None) -> None:
        """Close the oldest of those who have the most, while there are more than `most` in all; and of a `network`
        while it has half of what there may be."""
        while len(self._pending) > most:
            self._close_oldest(max(self._of, key=lambda each: len(self._of[each])))
        while network is not None and len(self._of.get(network, ())) >= self._most // 2:
            self._close_oldest(network)

    def _close_oldest(self, network: str) -> None:
        number = next(iter(self._of[network]))
        self._end(number, self._pending[number], "too many connections had not identified themselves")

    def _end_late(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for number, stranger in list(self._pending.items()):
            if now > stranger.handshake.until:
                self._end(number, stranger, "it did not identify itself in time")

    def _hear(self, number: int, pending: PendingConnection) -> Message | None:
        channel, proof = pending.channel, pending.handshake
        hello = None
        pending.parts += not proof.done
        messages = channel.receive()
        while messages and hello is None:
            message = messages.pop(0)
            if proof.done:
                hello = message
            elif proof.failed is None:
                proof.feed(message)
        channel.push_back(messages)
        if hello is not None:
            self._forget(number, pending)
        elif channel.lost or proof.failed or (pending.parts > PARTS and not proof.done):
            self._end(number, pending, proof.failed or "it did not identify itself")
        return hello

    def _end(self, number: int, pending: PendingConnection, why: str) -> None:
        self._forget(number, pending)
        pending.channel.close(why)
        host, failed = pending.host, pending.handshake.failed
        if failed and host not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(host)
            self.on_refused(host, failed)
        elif not pending.handshake.done and (host in self._unproved or len(self._unproved) < self._most):
            self._unproved[host] = self._unproved.get(host, 0) + 1
            if self._unproved[host] == FLOOD_THRESHOLD:
                self._flooding_host = host

    def _forget(self, number: int, pending: PendingConnection) -> None:
        """Stop watching a connection; its descriptor may be closed already, which unregisters it."""
        with contextlib.suppress(OSError, ValueError):
            self._calls.unregister(number)
        del self._pending[number]
        mine = self._of[pending.network]
        del mine[number]
        if not mine:
            del self._of[pending.network]


def _network_of(host: str) -> str:
    """The unit of the limits per caller: an IPv4 address, or an IPv6 network."""
    if ":" not in host:
        return host
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
