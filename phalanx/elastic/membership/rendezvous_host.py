"""The rendezvous host: connections of nodes that are not members yet, at the start of a job and later.

Nothing here blocks: `poll_once` reads what has arrived. Each node number is held once; decisions on arriving nodes are
made elsewhere (`meeting.py`, `decide.py`).
"""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from phalanx.core.records import EventKind
from phalanx.elastic.membership.admission import explain_taken_rank, receive_messages
from phalanx.elastic.membership.channel import SILENT_S, Channel, Message
from phalanx.elastic.membership.messages import MessageRecord, PongMessage


@dataclass
class ConnectedNode:
    """A connected node."""

    channel: Channel
    hello: Message
    pinged_at: float = math.inf  # when it was pinged because another node claims its number


class RendezvousHost:
    """Accepts connections of nodes that ask to join a job, each under its number.

    `find_objection(hello)` is the reason to refuse a node, or None; `find_holder(node)` describes the member that has a
    number already. The claimant may be that node, restarted, while the old process is gone: a connected holder is asked
    whether it is alive, and `challenge(node)` is the time by which a member would be found dead (None: not known yet).
    `notice(kind, details)` reports refusals; a node has `linger_s` to receive a last message."""

    def __init__(
        self,
        find_objection: Callable[[Message], str | None],
        notice: Callable[[str, dict[str, Any]], None],
        linger_s: float,
        find_holder: Callable[[int], str | None] = lambda node: None,
        challenge: Callable[[int], float | None] = lambda node: None,
    ) -> None:
        self._find_objection, self._notice, self._linger_s = find_objection, notice, linger_s
        self._find_holder, self._challenge = find_holder, challenge
        self.connected: dict[int, ConnectedNode] = {}
        self._waiting: list[tuple[Channel, Message, float | None]] = []  # for a number, until its holder is believed
        self._heard: list[tuple[int, Message | MessageRecord | str]] = []

    def descriptors(self) -> dict[int, int]:
        """Descriptors for poll(), with their event masks."""
        channels = [seat.channel for seat in self.connected.values()] + [channel for channel, _, _ in self._waiting]
        return {channel.fileno(): channel.awaits for channel in channels if channel.lost is None}

    def greet(self, channel: Channel, hello: Message, until: float | None = None) -> None:
        """Accept a caller, refuse it, or let it wait: until `until` the holder of its number may be found dead."""
        if (wrong := self._find_objection(hello)) is not None:
            self._refuse(channel, wrong)
            return
        node = hello["node"]
        seat = self.connected.get(node)
        there = None if seat is None else f"process {seat.hello['pid']} on {seat.hello['host']}"
        if (holder := there or self._find_holder(node)) is None:
            self.connected[node] = ConnectedNode(channel, hello)
            self._heard.append((node, hello))
        elif until is not None and time.monotonic() >= until:
            self._refuse(channel, explain_taken_rank(node, holder, hello))
        else:
            if seat is None:
                until = self._challenge(node) if until is None else until
            elif seat.pinged_at == math.inf:
                seat.pinged_at = time.monotonic()
                seat.channel.send({"ping": True})
            self._waiting.append((channel, hello, until))

    def poll_once(self) -> list[tuple[int, Message | MessageRecord | str]]:
        """Run one turn without blocking. Returns, by node, the hello of an accepted one, a message, or the reason
        for a loss."""
        for node, seat in list(self.connected.items()):
            for message in receive_messages(seat.channel):
                if isinstance(message, PongMessage):  # the number is its own for good
                    seat.pinged_at = math.inf
                    self._waiting = [(c, h, 0.0 if h["node"] == node else at) for c, h, at in self._waiting]
                else:
                    self._heard.append((node, message))
            if seat.channel.lost is None and time.monotonic() > seat.pinged_at + SILENT_S:
                seat.channel.close("it does not answer")
            if seat.channel.lost is not None:
                del self.connected[node]
                seat.channel.close(seat.channel.lost)
                self._heard.append((node, seat.channel.lost))
        waiting, self._waiting = self._waiting, []
        for channel, hello, until in waiting:
            self.greet(channel, hello, until)
        heard, self._heard = self._heard, []
        return heard

    def send(self, message: Message, node: int | None = None) -> None:
        """Send a message to all connected nodes, or to one."""
        for number, seat in self.connected.items():
            if node in (None, number):
                seat.channel.send(message)

    def dismiss(self, message: Message, why: str, nodes: Collection[int] | None = None) -> None:
        """Send a last message to these nodes, or to all, then close: there may be thousands, so none is awaited."""
        leaving = [node for node in self.connected if nodes is None or node in nodes]
        for node in leaving:
            self.connected[node].channel.send(message)
        for node in leaving:
            self.connected.pop(node).channel.linger(why, self._linger_s)

    def close(self, last: Message | None = None) -> None:
        """Close all connections, also those that wait for a number, after a last message."""
        if last is not None:
            self.dismiss(last, "the job is over")
        for channel in [*(seat.channel for seat in self.connected.values()), *(each for each, _, _ in self._waiting)]:
            if last is not None:
                channel.send_and_close(last, "the job is over", timeout_s=self._linger_s)
            channel.close("this node has left")
        self.connected, self._waiting = {}, []

    def _refuse(self, channel: Channel, why: str) -> None:
        self._notice(EventKind.WARNING, {"message": why})
        channel.send_and_close({"refused": why}, "the connection was refused", timeout_s=self._linger_s)
