"""Connections between the agents of a job: one to each member that this one exchanges messages with."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.elastic.membership.channel import LINGER_S, Channel, Handshake, Message, start_connecting
from phalanx.elastic.membership.member_list import AgentMember
from phalanx.elastic.membership.messages import MessageRecord, parse_message

AGAIN_S = 0.3  # between two calls to one who does not answer


@dataclass
class MemberLink:
    """The connection to one other member, and what waits for it to be there."""

    channel: Channel | None = None
    handshake: Handshake | None = None  # while it is being made from here
    again_at: float = 0.0
    waiting: list[Message] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        return self.channel is not None and self.handshake is None

    def send(self, message: Message) -> None:
        """Send a message, now or as soon as the connection is up."""
        self.waiting.append(message)
        self.flush()

    def flush(self) -> None:
        while self.is_up and self.channel is not None and self.waiting:
            self.channel.send(self.waiting.pop(0))

    def close(self, why: str) -> None:
        if self.channel is not None:
            self.channel.close(why)


class MemberLinks(dict[int, MemberLink]):
    """The connections of the agent `me`, by node. Of two members the one with the higher number calls. Nothing here
    waits."""

    def __init__(self, me: AgentMember, secret: str) -> None:
        super().__init__()
        self._me, self._secret = me, secret

    def link(self, node: int) -> MemberLink:
        """The connection to a member, which may have to be made yet."""
        return self.setdefault(node, MemberLink())

    def descriptors(self) -> dict[int, int]:
        """What poll() has to look at, and for what."""
        channels = [link.channel for link in self.values() if link.channel is not None]
        return {channel.fileno(): channel.awaits for channel in channels if channel.lost is None}

    def accept(self, node: int, channel: Channel) -> None:
        """Take the call of a member."""
        link = self.link(node)
        if link.is_up:
            channel.close("it is here already")
            return
        link.close("it has called itself")
        link.channel, link.handshake = channel, None
        link.flush()

    def call(self, members: Iterable[AgentMember], now: float) -> None:
        """Call those of these members that are not to call this one."""
        for member in members:
            link = self.link(member.node)
            if member.node > self._me.node or link.channel is not None or now < link.again_at:
                continue
            link.again_at = now + AGAIN_S
            try:
                link.channel = start_connecting((member.address, member.port))
            except OSError:  # there is no way now: it is called again, until it is lost
                continue
            link.handshake = Handshake(link.channel, self._secret, calling=True)

    def receive(self, node: int) -> tuple[list[MessageRecord], str | None]:
        """What a member has said since the last call, and why it is lost, if it is."""
        link = self[node]
        if link.channel is None:
            return [], None
        heard: list[MessageRecord] = []
        for message in link.channel.receive():
            if link.handshake is None:
                try:
                    heard.append(parse_message(message))
                except ValueError as error:
                    return heard, str(error)
            elif link.handshake.failed is None:
                link.handshake.feed(message)
                if link.handshake.done:
                    link.handshake = None
                    link.channel.send({"role": "peer", "node": self._me.node, "token": self._me.token})
                    link.flush()
        if link.handshake is None:
            return heard, link.channel.lost
        now = time.monotonic()
        if link.channel.lost or link.handshake.failed or now > link.handshake.until:
            link.close("it did not answer")
            link.channel = link.handshake = None
            link.again_at = now + AGAIN_S
        return heard, None

    def remove(self, node: int, why: str) -> None:
        """Close the connection to a member, and forget what waits for it."""
        self.pop(node, MemberLink()).close(why)

    def close(self, why: str, linger: bool = False) -> None:
        """Close all; with `linger`, what was said gets a moment to be taken."""
        for link in self.values():
            if link.channel is not None:
                link.channel.linger(why, LINGER_S if linger else 0.0)
        self.clear()
