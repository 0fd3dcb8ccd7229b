"""Connections of other nodes that belong to an attempt: they wait until it runs here. No torch here."""

import select
import time
from collections.abc import Callable
from typing import Protocol

from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.store_relay import CALL_S
from phalanx.elastic.replicas.own_ranks import ROLE


class RunningAttempt(Protocol):
    """The attempt that runs on this node."""

    number: int

    @property
    def serves_store(self) -> bool: ...

    def join_store(self, channel: Channel) -> None: ...


class AttemptCalls:
    """Connections of other nodes that belong to an attempt, until it has begun."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Channel, Message, float]] = []

    def add(self, channel: Channel, hello: Message) -> None:
        self._waiting.append((channel, hello, time.monotonic() + CALL_S))

    def descriptors(self) -> dict[int, int]:
        """Descriptors for poll(), with their event masks."""
        return {channel.fileno(): select.POLLIN for channel, _, _ in self._waiting}

    def tend(
        self, running: RunningAttempt | None, last_seen_attempt: int, give_to_replicas: Callable[[Channel], None]
    ) -> None:
        """Connect callers to the store or to the replicas of the running attempt; early callers wait, those of an
        older attempt are refused."""
        waiting, self._waiting = self._waiting, []
        for channel, hello, until in waiting:
            of_replicas, attempt = hello["role"] == ROLE, int(hello["attempt"])
            is_early = attempt > last_seen_attempt and time.monotonic() < until
            here = running if running is not None and running.number == attempt else None
            if here is not None and of_replicas:
                give_to_replicas(channel)
            elif here is not None and here.serves_store:
                here.join_store(channel)
            elif is_early and not channel.receive() and not channel.lost:
                self._waiting.append((channel, hello, until))
            else:
                channel.close("it belongs to another attempt")

    def close(self) -> None:
        for channel, _, _ in self._waiting:
            channel.close("this node has left")
        self._waiting = []
