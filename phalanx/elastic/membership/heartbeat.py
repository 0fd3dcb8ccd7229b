"""Heartbeats between agents: small UDP packets, ten a second, that cannot be forged, replayed or delayed.

A packet carries the sender's epoch, node, token and a number that grows, under an HMAC-SHA256 of the job's secret; all
else is dropped. UDP, sent by a process that does nothing else, was measured to be late by 0.35 s at most on cores with
eight times as many processes as they can run, TCP by 0.44 s and a thread of a training process by 1.7 s.

An agent forks ranks, reads shared files and inspects devices; on a busy machine any of these may take longer than the
heartbeat timeout. So it forks a child that sends heartbeats from the agent's socket. The child sends only while the
agent is not stopped and has not been away from its loop for STUCK_S, and dies with it. A message to the child is its
next list of addresses.
"""

import contextlib
import hashlib
import hmac
import json
import math
import mmap
import os
import platform
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.member_list import TOKEN_BYTES, AgentMember, MemberList, MemberView
from phalanx.system.fork import fork, kill_group

EVERY_S = 0.1
MOST_PACKETS = 1000  # received in one turn: an endless sender must not keep the agent busy
LIVES, DECLARED_LOST = 1, 2  # a heartbeat; the answer to a late heartbeat of a node already declared lost
_FORM = struct.Struct("!4sBIH8sQ")
_MAGIC = b"PHX1"
_PROOF_BYTES = 16


@dataclass(frozen=True)
class Heartbeat:
    """`node`, `token` and `number` are the sender's; of a GIVEN_UP those of the beat that it answers."""

    kind: int
    epoch: int
    node: int
    token: bytes
    number: int


def encode_heartbeat(heartbeat: Heartbeat, secret: bytes) -> bytes:
    text = _FORM.pack(_MAGIC, heartbeat.kind, heartbeat.epoch, heartbeat.node, heartbeat.token, heartbeat.number)
    return text + _proof(text, secret)


def decode_heartbeat(packet: bytes, secret: bytes) -> Heartbeat | None:
    """The heartbeat in a packet; None for a packet from outside this job."""
    if len(packet) != _FORM.size + _PROOF_BYTES:
        return None
    text, proof = packet[: _FORM.size], packet[_FORM.size :]
    if not hmac.compare_digest(proof, _proof(text, secret)):
        return None
    magic, *fields = _FORM.unpack(text)
    return Heartbeat(*fields) if magic == _MAGIC else None


def _proof(text: bytes, secret: bytes) -> bytes:
    return hmac.new(secret, b"beat|" + text, hashlib.sha256).digest()[:_PROOF_BYTES]


class HeartbeatSocket:
    """A UDP socket for heartbeats, bound to one address. Nothing here blocks."""

    def __init__(self, bound: socket.socket, secret: str) -> None:
        bound.setblocking(False)
        self.socket = bound
        self._secret = hashlib.sha256(b"beats|" + secret.encode(errors="surrogateescape")).digest()

    def descriptors(self) -> dict[int, int]:
        """Descriptors for poll(), with their event masks."""
        return {self.socket.fileno(): select.POLLIN}

    def send(self, heartbeat: Heartbeat, address: tuple[str, int]) -> None:
        """Send a heartbeat; one that the network does not accept now is lost, as any packet may be."""
        with contextlib.suppress(OSError):
            self.socket.sendto(encode_heartbeat(heartbeat, self._secret), address)

    def receive(self) -> Iterator[tuple[Heartbeat, tuple[str, int]]]:
        """Receive all pending heartbeats with their source addresses."""
        for _ in range(MOST_PACKETS):
            try:
                packet, address = self.socket.recvfrom(256)
            except BlockingIOError:
                return
            except OSError:  # no process received an earlier packet
                continue
            beat = decode_heartbeat(packet, self._secret)
            if beat is not None:
                yield beat, (address[0], address[1])

    def close(self) -> None:
        self.socket.close()


STUCK_S = 10.0  # an agent whose loop has stalled for so long counts as dead, though its process lives
AGAIN_S = 1.0  # between two tries to start a child, where the machine has no room for one
MESSAGE_BYTES = 1 << 20

Address = tuple[str, int]


class HeartbeatSender(Protocol):
    """The sender of an agent's heartbeats; `next_number` grows with each."""

    def send_to(self, epoch: int, to: Sequence[Address]) -> None:
        """Send heartbeats to these addresses from now on, ten times a second. Call it in each turn of the agent's
        loop."""

    def next_number(self) -> int:
        """The number of a heartbeat sent now."""

    def close(self) -> None:
        """Stop sending."""


class HeartbeatSenderProcess:
    """The heartbeat sender of `me`, in a child that sends from the socket of `heartbeats`. Nothing here blocks.

    The caller has one thread whenever it calls `send_to`: that forks.
    """

    def __init__(self, me: AgentMember, heartbeats: HeartbeatSocket) -> None:
        self._me, self._heartbeats = me, heartbeats
        self._begun_ns = time.monotonic_ns()
        self._turn = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")  # when the agent came round last, for the child
        self._child: tuple[int, int] | None = None  # pid, pidfd
        self._channel: socket.socket | None = None
        self._said: tuple[int, list[Address]] | None = None  # the last addresses sent to the child
        self._again_at = 0.0
        self._over = False

    def next_number(self) -> int:
        """Milliseconds since this was made, from 1: they grow from beat to beat."""
        return (time.monotonic_ns() - self._begun_ns) // 1_000_000 + 1

    def send_to(self, epoch: int, to: Sequence[Address]) -> None:
        """Let the child send to these addresses; a dead child is replaced."""
        if self._over:
            return
        self._turn[0] = time.monotonic_ns()
        if self._child is not None and _has_ended(self._child[1]):
            self._bury()
        if self._child is None and not self._begin():
            return
        wanted = (epoch, list(to))
        if wanted != self._said:
            assert self._channel is not None
            with contextlib.suppress(OSError):  # it has just died, or its queue is full: the next turn tries again
                self._channel.send(json.dumps({"epoch": epoch, "to": wanted[1]}).encode())
                self._said = wanted

    def _begin(self) -> bool:
        if time.monotonic() < self._again_at:
            return False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        agent = os.getpid()
        try:
            keep = [theirs.fileno(), self._heartbeats.socket.fileno()]
            self._child = fork(lambda: self._child_main(theirs, agent), keep, session=True)
        except OSError:  # no room for another process now
            self._again_at = time.monotonic() + AGAIN_S
            ours.close()
            return False
        finally:
            theirs.close()
        self._channel, self._said = ours, None
        return True

    def close(self) -> None:
        """End the child."""
        self._over = True
        self._bury()

    def _bury(self) -> None:
        if self._child is not None:
            (pid, pidfd), self._child = self._child, None
            kill_group(pid)
            os.waitpid(pid, 0)
            os.close(pidfd)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _child_main(self, channel: socket.socket, agent: int) -> int:
        """Main loop of the child, until it is ended."""
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        epoch, to, due = 0, [], 0.0
        token = bytes.fromhex(self._me.token)
        while True:
            if poll.poll(max(0.0, (due - time.monotonic()) * 1000)):
                text = channel.recv(MESSAGE_BYTES)
                if not text:
                    return 0  # the agent has left
                told = json.loads(text)
                epoch, to, due = int(told["epoch"]), [(str(host), int(port)) for host, port in told["to"]], 0.0
            now = time.monotonic()
            if now < due:
                continue
            due = now + EVERY_S
            if _is_well(agent, self._turn[0]):
                beat = Heartbeat(LIVES, epoch, self._me.node, token, self.next_number())
                for address in to:
                    self._heartbeats.send(beat, address)


def _is_well(agent: int, turn_ns: int) -> bool:
    """Whether an agent's loop has run lately, and its process is not stopped by a signal or a debugger."""
    if time.monotonic_ns() - turn_ns > STUCK_S * 1e9:
        return False
    try:
        state = Path(f"/proc/{agent}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):  # it ends just now, and this child with it
        return True
    return state not in (b"T", b"t")


def _has_ended(pidfd: int) -> bool:
    return os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


# ---------------------------------------------------------------------------------------------------------------- solo
# The membership of a job on one node: the same code decides, and this node listens nowhere and sends nothing.


LOOPBACK = "127.0.0.1"


class NoNetwork:
    """Replaces listener, heartbeats and sender on a single node."""

    secret = ""

    def take_flooding_host(self) -> str | None:
        return None

    def descriptors(self) -> dict[int, int]:
        return {}

    def due_s(self) -> float:
        return math.inf

    def accept(self) -> list[tuple[Channel, Message]]:
        return []

    def receive(self) -> list[tuple[Heartbeat, Address]]:
        return []

    def send(self, beat: Heartbeat, to: Address) -> None:
        raise AssertionError("there is no other node")

    def send_to(self, epoch: int, to: Sequence[Address]) -> None:
        assert not to, "there is no other node"

    def next_number(self) -> int:
        return 0

    def close(self, why: str = "") -> None:
        pass


def make_solo_member(devices: Sequence[Sequence[object]], epoch: int = 1) -> tuple[AgentMember, MemberList]:
    """This node as the only member of a job; `devices` has a row (name, model, bf16, ...) for each of its ranks."""
    rows = tuple((str(row[0]), str(row[1]), bool(row[2])) for row in devices)
    me = AgentMember(0, platform.node(), secrets.token_hex(TOKEN_BYTES), LOOPBACK, 0, 0, rows)
    return me, MemberList(epoch, 0, (me,))


# ----------------------------- failure detection: a member without a heartbeat for `heartbeat_s` is declared lost


OVERSLEPT_S = 0.3  # between two turns: after a longer gap silent members get that time back
LATE_MS = 10_000  # an answer to a beat older than that says nothing of now
MEET_S = 10.0  # time limit for a new member's first heartbeat


class FailureDetector:
    """The failure detector of the members that this one exchanges heartbeats with; `sender` sends this one's."""

    def __init__(
        self,
        view: MemberView,
        heartbeats: HeartbeatSocket | NoNetwork,
        sender: HeartbeatSender,
        heartbeat_s: float,
    ) -> None:
        self.heartbeat_s, self.heartbeats, self.sender, self._view = heartbeat_s, heartbeats, sender, view
        now = time.monotonic()
        self.heard_at, self._watched = dict.fromkeys(view.member_list.nodes, now + MEET_S), set[int]()
        self._numbers: dict[str, int] = {}  # the last beat of each token
        self._turn = now

    def wake(self, now: float) -> None:
        """Start another turn; after a late one the socket may have been full, so no member is declared lost for that
        time."""
        slept_s, self._turn = now - self._turn, now
        if slept_s > OVERSLEPT_S:
            self.heard_at = {node: at if at > now else min(at + slept_s, now) for node, at in self.heard_at.items()}

    def receive(self, now: float, joining: Collection[str] = ()) -> bool:
        """Receive heartbeats; returns whether the others have declared this node lost. `joining`: tokens of processes
        that are about to be members."""
        view, gone = self._view, False
        for beat, address in self.heartbeats.receive():
            token = beat.token.hex()
            member = view.member_list.member(beat.node)
            if beat.kind == DECLARED_LOST:
                number = self.sender.next_number()
                gone |= token == view.me.token and number - LATE_MS <= beat.number <= number
            elif member is not None and member.token == token and beat.node not in view.lost:
                if beat.number > self._numbers.get(token, 0):
                    self._numbers[token] = beat.number
                    self.heard_at[beat.node] = now
            elif beat.epoch < view.member_list.epoch and token not in joining:
                answer = Heartbeat(DECLARED_LOST, view.member_list.epoch, beat.node, beat.token, beat.number)
                self.heartbeats.send(answer, address)
        return gone

    def send(self) -> None:
        """Set the members that receive this agent's heartbeats."""
        self.sender.send_to(
            self._view.member_list.epoch, [(member.address, member.beats) for member in self._view.list_watched()]
        )

    def find_lost(self, now: float) -> list[int]:
        """Members whose heartbeats stopped for too long."""
        watched = [member.node for member in self._view.list_watched()]
        for node in set(watched) - self._watched:  # it may not have seen yet that it has to tell this one
            self.heard_at[node] = max(self.heard_at.get(node, now), now + self.heartbeat_s)
        self._watched = set(watched)
        return [node for node in watched if now > self.heard_at.get(node, now) + self.heartbeat_s]

    def due_s(self) -> float:
        """Seconds until one of them is lost without a heartbeat."""
        heard = [self.heard_at.get(member.node, math.inf) for member in self._view.list_watched()]
        return min(heard, default=math.inf) + self.heartbeat_s - time.monotonic()

    def is_silent(self, node: int) -> bool:
        """Whether a member has been silent for half of the time after which it is lost."""
        silent_s = time.monotonic() - self.heard_at.get(node, 0.0)
        return node != self._view.me.node and silent_s > self.heartbeat_s / 2

    def reset(self, before: MemberList) -> None:
        """Watch the members of a new list; those of the list `before` count as heard now."""
        now, after = time.monotonic(), self._view.member_list
        self.heard_at = {
            member.node: now if before.member(member.node) == member else now + MEET_S for member in after.members
        }

    def close(self) -> None:
        self.sender.close()
        self.heartbeats.close()
