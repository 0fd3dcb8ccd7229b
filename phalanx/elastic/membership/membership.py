"""Membership of the agents of a job: which are alive, which leads, and messages between them.

Every agent exchanges heartbeats and messages with the leader and two deputies, and these with all. A member that is
silent for `heartbeat_timeout_s` (`heartbeat.py`), or whose connection ends (`MemberLinks`), is lost. The leader then
makes a member list without it; if the leader is lost, the lowest of the others collects votes (`election.py`). Both
need a majority of the last list, or the epoch's file where it is exactly half (`election.py`); an agent that gets
neither is `fenced`: it must end its ranks and leave. A voter gives up the old leader, and sends the state of its ranks
later; so the file is created while ranks end. Nothing here blocks.
"""

import select
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.elastic.membership import messages
from phalanx.elastic.membership.channel import LINGER_S, Channel, Handshake, Message, start_connecting
from phalanx.elastic.membership.election import Claim, Election
from phalanx.elastic.membership.heartbeat import FailureDetector, HeartbeatSender, HeartbeatSocket, NoNetwork
from phalanx.elastic.membership.listener import ConnectionListener
from phalanx.elastic.membership.member_list import (
    AgentMember,
    MemberList,
    MemberView,
    member_list_to_message,
    parse_member_list,
)
from phalanx.elastic.membership.messages import MessageRecord, parse_message

SOON_S = 0.001  # the least between two turns that nothing but time asks for
GIVEN_UP = "the other nodes declared this node lost after its heartbeats stopped"


class Membership(MemberView):
    """One agent's view, which it takes from its `detector`, its `links` and its `election`; for the arguments see
    there."""

    def __init__(
        self,
        me: AgentMember,
        member_list: MemberList,
        listener: ConnectionListener | NoNetwork,
        heartbeats: HeartbeatSocket | NoNetwork,
        heartbeat_sender: HeartbeatSender,
        heartbeat_s: float,
        claim: Claim | None,
        make_vote: Callable[[], Message | None],
        describe_run: Callable[[MemberList], dict[str, Any]],
    ) -> None:
        super().__init__(me, member_list)
        self.listener = listener
        self.fenced: str | None = None  # why this agent has to leave
        self.finished = False  # the leader has announced the end of the job: this node leaves, and is not lost
        self.losses: list[tuple[AgentMember, str]] = []  # for the owner to take
        self.adopted: list[MemberList] = []  # for the owner to take
        self.previous_member_list: MemberList | None = None  # the last roster of another leader
        self.callers: list[tuple[Channel, Message]] = []  # others than members, for the owner to take
        self.links = MemberLinks(me, listener.secret)
        self.detector = FailureDetector(self, heartbeats, heartbeat_sender, heartbeat_s)
        self.election = Election(self, self.send, self.detector.is_silent, claim, make_vote, describe_run)
        self._inbox: list[tuple[int, messages.MessageRecord]] = []
        self._reliable_messages: list[Message] = []

    @property
    def is_solo(self) -> bool:
        """Whether this is the only node of a job that no other node can join."""
        return isinstance(self.listener, NoNetwork)

    @property
    def is_stable(self) -> bool:
        """Whether all members are known to be present, and no other list is in preparation."""
        election = self.election
        return not self.lost and not election.joining and election.claiming is None and self.fenced is None

    @property
    def is_fully_connected(self) -> bool:
        """Whether all members that are not lost can be reached from here."""
        return all(node in self.links and self.links[node].is_up for node in self.live_nodes() if node != self.me.node)

    @property
    def has_messages(self) -> bool:
        """Whether there is something for `heard`."""
        return bool(self._inbox)

    def descriptors(self) -> Mapping[int, int]:
        """Descriptors for poll(), with their event masks."""
        if self.fenced is not None:
            return {}
        claiming = self.election.claiming
        found = {} if claiming is None else {claiming.fileno(): select.POLLIN}
        return found | self.links.descriptors() | self.listener.descriptors() | self.detector.heartbeats.descriptors()

    def send(self, node: int, message: Message) -> None:
        """Send a message to a member once it can be reached; dropped for a lost one."""
        if node == self.me.node:
            self._inbox.append((node, messages.build_message(message)))
        elif node in self.member_list.nodes and node not in self.lost:
            self.links.link(node).send(message)

    def send_reliably(self, message: Message) -> None:
        """Send a message to the leader and, marked `again`, to later leaders, since the first may be lost before acting
        on it."""
        self._reliable_messages.append(message | {"again": True})
        self.send(self.member_list.leader, message)

    def broadcast(self, message: Message, but: int | None = None) -> None:
        for node in self.member_list.nodes:
            if node != but:
                self.send(node, message)

    def receive(self) -> list[tuple[int, messages.MessageRecord]]:
        """Messages from members since the last call."""
        new, self._inbox = self._inbox, []
        return new

    def admit(self, member: AgentMember) -> None:
        """Add a member by a new list, at once. For the leader."""
        self.election.joining[member.node] = member

    def drop(self, node: int, why: str) -> None:
        """Declare a member lost; for the leader only."""
        self._lose(node, why)

    def leave(self, why: str) -> None:
        """Leave the membership; the others elect another leader if this node led."""
        self._fence(why)

    def close(self, farewell: Message | None = None) -> None:
        """Leave after a last message to reachable members, sent to all before waiting for any."""
        if farewell is not None:
            self.broadcast(farewell, but=self.me.node)
        self.links.close("this node has left", linger=farewell is not None)
        self.election.stop()
        for channel, _ in self.callers:
            channel.close("this node has left")
        self.listener.close("this node has left")
        self.detector.close()

    def poll_once(self) -> None:
        """Run one turn without blocking."""
        if self.fenced is not None:
            return
        now = time.monotonic()
        self.detector.wake(now)
        if self.detector.receive(now, [member.token for member in self.election.joining.values()]):
            self._fence(GIVEN_UP)
        self._let_in()
        for node in list(self.links):
            self._hear(node)
        self._judge(now)
        self.detector.send()
        self.links.call(self.list_watched(), now)
        self._agree(now)

    def due_s(self) -> float:
        """Seconds until a watched member is lost without a heartbeat, or until pending callers are due."""
        due_s = self.listener.due_s() if self.fenced else min(self.detector.due_s(), self.listener.due_s())
        return max(SOON_S, due_s)

    def _judge(self, now: float) -> None:
        for node in self.detector.find_lost(now):
            self._lose(node, f"no heartbeat arrived for {self.detector.heartbeat_s:g} s")

    def _lose(self, node: int, why: str) -> None:
        member = self.member_list.member(node)
        if node in self.lost or member is None:
            return
        self.lost[node] = why
        self.losses.append((member, why))
        self.links.remove(node, why)

    # ----------------------------------------------------------------------------------------------------- connections

    def _let_in(self) -> None:
        for channel, hello in self.listener.accept():
            if hello.get("role") != "peer":
                self.callers.append((channel, hello))
                continue
            member = self.member_list.member(hello["node"]) if type(hello.get("node")) is int else None
            if member is None or member.token != hello.get("token"):
                channel.close("it is not a member")  # or not yet, as far as is known here: it calls again
            elif member.node in self.lost:
                channel.send_and_close({"gone": self.member_list.epoch}, "it was declared lost", timeout_s=0)
            else:
                self.links.accept(member.node, channel)

    def _hear(self, node: int) -> None:
        if (link := self.links.get(node)) is None:
            return
        heard, why = self.links.receive(node)
        for message in heard:
            self._take(node, message)
        if why is not None and self.links.get(node) is link:
            self._lose(node, why)

    def _take(self, node: int, message: messages.MessageRecord) -> None:
        match message:
            case messages.GoneMessage():
                self._fence(GIVEN_UP)
            case messages.MemberListMessage():
                self._follow(node, parse_member_list(message.roster))
            # A leader may die when only some nodes have its list: of two nodes of different epochs the older gets the
            # newer list, or neither part would have a majority.
            case messages.FollowMessage() if message.follow == self.member_list.epoch:
                self.election.take_vote(node, message.ballot)
            case messages.FollowMessage() if message.follow < self.member_list.epoch:
                self.election.hand_on(node)
            case messages.FollowMessage():
                self.send(node, {"follow": self.member_list.epoch, "ballot": None})
            case _:
                is_last = isinstance(message, messages.FinishMessage | messages.DroppedMessage)
                self.finished |= is_last and node == self.member_list.leader
                self._inbox.append((node, message))

    # ------------------------------------------------------------------------------------------------------- agreeing

    def _follow(self, node: int, member_list: MemberList) -> None:
        """Adopt the list of the leader, of the candidate that this node has voted for, or of a lost leader, forwarded
        by another member."""
        if member_list.epoch <= self.member_list.epoch:
            return
        leads = member_list.leader == node
        voted = None if self.election.voted is None else self.election.voted[0]
        if leads and node not in (self.member_list.leader, voted):
            self._lose(node, "it claimed to lead without this node's vote")
            return
        if not leads and (
            self.member_list.leader not in self.lost
            or self.election.has_claimed
            or voted not in (None, node, member_list.leader)
        ):
            return  # with this node's vote another one may lead
        mine = member_list.member(self.me.node)
        if mine is None or mine.token != self.me.token:
            self._fence("the other nodes continue without this node")
            return
        if leads:
            self.lost = {}  # the leader's list decides
        behind = self.election.voters - {self.me.node}
        self._adopt(member_list)
        for other in behind:
            self.election.hand_on(other)

    def _agree(self, now: float) -> None:
        outcome = None if self.fenced is not None or self.finished else self.election.decide(now)
        if isinstance(outcome, MemberList):
            self._adopt(outcome)
        elif outcome is not None:
            self._fence(outcome)

    def _adopt(self, member_list: MemberList) -> None:
        before, self.member_list = self.member_list, member_list
        if before.leader != member_list.leader:
            self.previous_member_list = before
        for node in [*self.links]:
            was, member = before.member(node), member_list.member(node)
            if member is None or was is None or was.token != member.token:
                self.links.remove(node, "it is no longer a member")
        self.lost = {node: why for node, why in self.lost.items() if member_list.member(node) == before.member(node)}
        self.detector.reset(before)
        self.election.reset()
        self.adopted.append(member_list)
        if self.is_leader:
            self.broadcast({"roster": member_list_to_message(member_list)}, but=self.me.node)
        for message in self._reliable_messages if before.leader != member_list.leader else ():
            self.send(member_list.leader, message)

    def _fence(self, why: str) -> None:
        self.fenced = self.fenced or why
        self.detector.sender.close()
        self.links.close(why)
        self.election.stop()


# --------------------------------------------------------------------------------------------------------------- links
# Connections between the agents of a job: one to each member that this one exchanges messages with.


AGAIN_S = 0.3  # between two connection attempts


@dataclass
class MemberLink:
    """The connection to one other member, with messages that wait for it."""

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
    """The connections of the agent `me`, by node. Of two members the one with the higher number connects. Nothing here
    blocks."""

    def __init__(self, me: AgentMember, secret: str) -> None:
        super().__init__()
        self._me, self._secret = me, secret

    def link(self, node: int) -> MemberLink:
        """The connection to a member, which may have to be made yet."""
        return self.setdefault(node, MemberLink())

    def descriptors(self) -> dict[int, int]:
        """Descriptors for poll(), with their event masks."""
        channels = [link.channel for link in self.values() if link.channel is not None]
        return {channel.fileno(): channel.awaits for channel in channels if channel.lost is None}

    def accept(self, node: int, channel: Channel) -> None:
        """Accept the connection of a member."""
        link = self.link(node)
        if link.is_up:
            channel.close("it is already connected")
            return
        link.close("it connected to itself")
        link.channel, link.handshake = channel, None
        link.flush()

    def call(self, members: Iterable[AgentMember], now: float) -> None:
        """Connect to those of these members that do not connect to this one."""
        for member in members:
            link = self.link(member.node)
            if member.node > self._me.node or link.channel is not None or now < link.again_at:
                continue
            link.again_at = now + AGAIN_S
            try:
                link.channel = start_connecting((member.address, member.port))
            except OSError:  # unreachable now: connect again, until it is lost
                continue
            link.handshake = Handshake(link.channel, self._secret, calling=True)

    def receive(self, node: int) -> tuple[list[MessageRecord], str | None]:
        """Messages from a member since the last call, and why it is lost, if it is."""
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
        """Close all connections; with `linger`, pending messages are sent first."""
        for link in self.values():
            if link.channel is not None:
                link.channel.linger(why, LINGER_S if linger else 0.0)
        self.clear()
