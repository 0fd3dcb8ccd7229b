"""Where an agent is called: a listening socket, and callers who have not proved yet that they know the job's secret.

Nothing here waits, and nobody who calls can keep others out for long.
"""

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.cluster import wire
from phalanx.cluster.roster import TOKEN_BYTES
from phalanx.cluster.wire import Channel, Message, Proof

MOST_STRANGERS = 64  # connections that have not proved themselves; others wait before they are taken
PRESSED_S = 1.0  # what the oldest of them gets to prove itself while others wait
BUFFER_BYTES = 4 << 20  # for beats that come while this process does something else
EVERYWHERE = ("0.0.0.0", "::")
MOST_TOLD = 20  # hosts whose calls were refused, each of which is said once


@dataclass(frozen=True)
class Stranger:
    """Who has called and has not said who it is."""

    channel: Channel
    proof: Proof
    host: str  # the address it calls from


@dataclass(frozen=True)
class Address:
    """One address of this machine with a TCP and a UDP socket bound to it, both for the other nodes of a job."""

    address: str
    listener: socket.socket
    beats: socket.socket
    token: str  # of this process

    def told(self) -> Message:
        """What others have to know of it."""
        ports = {"port": self.listener.getsockname()[1], "beats": self.beats.getsockname()[1]}
        return {"token": self.token, "address": self.address, **ports}

    def close(self) -> None:
        self.listener.close()
        self.beats.close()


def listening(address: str, port: int) -> socket.socket:
    """A socket that listens at one address; 0 is a port of the system's choice. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
        held.pop_all()
    return listener


def bind(address: str, listener: socket.socket | None = None) -> Address:
    """Listen at an address for the other nodes, or go on with a socket that does. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as held:
        if listener is None:
            listener = held.enter_context(listening(address, 0))
        beats = held.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        beats.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        beats.bind((address, 0))
        held.pop_all()
    return Address(address, listener, beats, secrets.token_hex(TOKEN_BYTES))


class Door:
    """`refused(host, why)` is told once of each address whose call was refused."""

    def __init__(self, listener: socket.socket, secret: str, refused: Callable[[str, str], None]) -> None:
        listener.setblocking(False)
        self.listener, self.secret, self.refused = listener, secret, refused
        self._strangers: list[Stranger] = []
        self._told: set[str] = set()

    def descriptors(self) -> dict[int, int]:
        """What poll() has to look at, and for what."""
        channels = [stranger.channel for stranger in self._strangers]
        found = {channel.fileno(): channel.awaits for channel in channels if channel.lost is None}
        return found if self._is_full() else found | {self.listener.fileno(): select.POLLIN}

    def tend(self) -> list[tuple[Channel, Message]]:
        """Hear who calls; who has proved itself now, with what it says first."""
        found = []
        for stranger in list(self._strangers):
            hello = self._hear(stranger)
            if hello is not None:
                found.append((stranger.channel, hello))
        self._let_in()
        return found

    def narrow(self, address: str) -> None:
        """From now on listen at this address alone, at the same port, where it was at all of this machine's: by which
        of them others come is not known before they have come. Who has called already stays. Raises OSError."""
        there, port = self.listener.getsockname()[:2]
        if there not in EVERYWHERE:
            return
        # First, as both cannot listen; who calls in between calls again. For children that have the descriptor, too.
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.listener = listening(address, port)
        self.listener.setblocking(False)

    def close(self, why: str) -> None:
        for stranger in self._strangers:
            stranger.channel.close(why)
        self._strangers = []
        self.listener.close()

    def _is_full(self) -> bool:
        """Whether who calls now has to wait: many ranks may call at once, and none may push another out."""
        if len(self._strangers) < MOST_STRANGERS:
            return False
        return time.monotonic() < self._strangers[0].proof.until - wire.PROOF_S + PRESSED_S

    def _let_in(self) -> None:
        while not self._is_full():
            try:
                connection, peer = self.listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it has gone again, or there is no descriptor left: the next may do better
                return
            if len(self._strangers) >= MOST_STRANGERS:
                self._strangers.pop(0).channel.close("it kept others waiting")
            channel = Channel(connection)
            host = str(peer[0]).removeprefix("::ffff:")
            self._strangers.append(Stranger(channel, Proof(channel, self.secret, calling=False), host))

    def _hear(self, stranger: Stranger) -> Message | None:
        channel, proof = stranger.channel, stranger.proof
        hello = None
        messages = channel.heard()
        while messages and hello is None:
            message = messages.pop(0)
            if proof.done:
                hello = message
            elif proof.failed is None:
                proof.hear(message)
        channel.give_back(messages)
        if hello is not None:
            self._strangers.remove(stranger)
        elif channel.lost or proof.failed or time.monotonic() > proof.until:
            self._strangers.remove(stranger)
            channel.close(proof.failed or "it did not say who it is in time")
            if proof.failed and stranger.host not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(stranger.host)
                self.refused(stranger.host, proof.failed)
        return hello
