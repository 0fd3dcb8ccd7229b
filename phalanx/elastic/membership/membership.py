"""The agents of a job as equals: who is there, who leads, and what they tell each other.

Every agent exchanges signs of life and messages with the leader and two deputies, and these with all. Who is silent for
`heartbeat_timeout_s`, or whose connection ends, is lost. The leader then makes a roster without it; where the leader
itself is lost, the lowest of the others takes the votes of the rest. Either needs a majority of the last roster, or the
file of the epoch where it is just half (`epoch_files.py`); whoever gets neither is `fenced`: it must end its ranks and
leave. Who votes has lost whoever led before, and says later what its ranks have come to; so of many nodes the file is
made while they end. Nothing here waits.
"""

import math
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.elastic.membership.channel import LINGER_S, Channel, Handshake, Message, start_connecting
from phalanx.elastic.membership.heartbeat import DECLARED_LOST, Heartbeat, HeartbeatSocket
from phalanx.elastic.membership.heartbeat_sender import HeartbeatSender
from phalanx.elastic.membership.listener import ConnectionListener
from phalanx.elastic.membership.member_list import (
    AgentMember,
    MemberList,
    classify_quorum,
    explain_lost_quorum,
    list_monitored_nodes,
    member_list_to_message,
    parse_member_list,
)
from phalanx.elastic.membership.messages import NONSENSE, find_message_problem
from phalanx.elastic.membership.solo import NoNetwork
from phalanx.system.async_call import AsyncCall

OVERSLEPT_S = 0.3  # between two turns: who was silent meanwhile may have spoken to nobody, and gets that time back
LATE_MS = 10_000  # an answer to a beat older than that says nothing of now
MEET_S = 10.0  # what a new member gets until its first sign of life
SOON_S = 0.001  # the least between two turns that nothing but time asks for
AGAIN_S = 0.3  # between two calls to one who does not answer
VOTES_S = 15.0  # what the others get to end their ranks and vote; those who are lost are not waited for
CLAIM_S = 3.0  # what a shared file system gets to create an epoch's file
TIE_S = 60.0  # the same where nobody may go on without that: the server may be busy with a checkpoint

Claim = Callable[[int, dict[str, Any]], dict[str, Any] | None]  # as epochs.claim, of a run folder


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

    def flush(self) -> None:
        while self.channel is not None and self.waiting:
            self.channel.send(self.waiting.pop(0))


class Membership:
    """One agent's view; `heartbeat_sender` says that it lives. `claim` creates an epoch's file (None: a run folder at a
    URL has none); `ballot` says what this node's ranks have come to, or None while they run; `describe_run` what an
    epoch's file says of the run."""

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
        self.me, self.member_list, self.listener, self.heartbeat_s = me, member_list, listener, heartbeat_s
        self.lost: dict[int, str] = {}  # members that are lost, and why
        self.fenced: str | None = None  # why this agent has to leave
        self.finished = False  # the leader has said that there is nothing more to do: it leaves, and is not lost
        self.losses: list[tuple[AgentMember, str]] = []  # for the owner to take
        self.adopted: list[MemberList] = []  # for the owner to take
        self.votes: dict[int, Message] = {}  # by which this agent came to lead
        self.previous_member_list: MemberList | None = None  # the last roster of another leader
        self.callers: list[tuple[Channel, Message]] = []  # others than members, for the owner to take
        self._heartbeats, self._heartbeat_sender = heartbeats, heartbeat_sender
        self._claim, self._make_vote, self._describe_run = claim, make_vote, describe_run
        self._links: dict[int, MemberLink] = {}
        self._inbox: list[tuple[int, Message]] = []
        self._reliable_messages: list[Message] = []
        now = time.monotonic()
        self.heard_at, self._watched = dict.fromkeys(member_list.nodes, now + MEET_S), set[int]()
        self._numbers: dict[str, int] = {}  # the last beat of each token
        self._turn = now
        self._joining: dict[int, AgentMember] = {}
        self._claiming: tuple[AsyncCall, MemberList] | None = None
        self._claimed: tuple[MemberList, bool] | None = None  # what may come next, and whether its file is this agent's
        self._voted: tuple[int, bool] | None = None  # for whom, and whether what the ranks have come to was said
        self._voters: set[int] = set()  # for this agent; ranks may still run there
        self._leaderless_since: float | None = None

    @property
    def is_leader(self) -> bool:
        return self.member_list.leader == self.me.node

    @property
    def is_solo(self) -> bool:
        """Whether this is the one node of its job, which nobody can join."""
        return isinstance(self.listener, NoNetwork)

    @property
    def is_stable(self) -> bool:
        """Whether all members are there, as far as known, and no other roster is being made."""
        return not self.lost and not self._joining and self._claiming is None and self.fenced is None

    @property
    def is_fully_connected(self) -> bool:
        """Whether all members that are not lost can be reached from here."""
        return all(
            node in self._links and self._links[node].is_up for node in self.live_nodes() if node != self.me.node
        )

    @property
    def has_messages(self) -> bool:
        """Whether there is something for `heard`."""
        return bool(self._inbox)

    def live_nodes(self) -> list[int]:
        """Members that are not lost, this one included."""
        return [node for node in self.member_list.nodes if node not in self.lost]

    def descriptors(self) -> Mapping[int, int]:
        """What poll() has to look at, and for what."""
        if self.fenced is not None:
            return {}
        channels = [link.channel for link in self._links.values() if link.channel is not None]
        found = {channel.fileno(): channel.awaits for channel in channels if channel.lost is None}
        if self._claiming is not None:
            found[self._claiming[0].fileno()] = select.POLLIN
        return found | self.listener.descriptors() | self._heartbeats.descriptors()

    def send(self, node: int, message: Message) -> None:
        """Tell a member something, as soon as it can be reached; a lost one hears nothing."""
        if node == self.me.node:
            self._inbox.append((node, message))
        elif node in self.member_list.nodes and node not in self.lost:
            link = self._links.setdefault(node, MemberLink())
            if link.is_up:
                assert link.channel is not None
                link.channel.send(message)
            else:
                link.waiting.append(message)

    def send_reliably(self, message: Message) -> None:
        """Tell the leader something, and whoever leads after it, `again`: it may be lost and not have done it."""
        self._reliable_messages.append(message | {"again": True})
        self.send(self.member_list.leader, message)

    def broadcast(self, message: Message, but: int | None = None) -> None:
        for node in self.member_list.nodes:
            if node != but:
                self.send(node, message)

    def receive(self) -> list[tuple[int, Message]]:
        """What members have said since the last call."""
        new, self._inbox = self._inbox, []
        return new

    def admit(self, member: AgentMember) -> None:
        """Have the next roster, which is made at once, hold one more. For the leader."""
        self._joining[member.node] = member

    def drop(self, node: int, why: str) -> None:
        """Give a member up, as the leader may."""
        self._lose(node, why)

    def leave(self, why: str) -> None:
        """Leave the others to themselves, who choose another leader where this one led."""
        self._fence(why)

    def close(self, farewell: Message | None = None) -> None:
        """Leave; members that can be reached hear a last word first, and all before one of them is waited for."""
        if farewell is not None:
            self.broadcast(farewell, but=self.me.node)
        for link in self._links.values():
            if link.channel is not None:
                link.channel.linger("this node has left", 0.0 if farewell is None else LINGER_S)
        self._links = {}
        self._stop_claiming()
        for channel, _ in self.callers:
            channel.close("this node has left")
        self.listener.close("this node has left")
        self._heartbeat_sender.close()
        self._heartbeats.close()

    def poll_once(self) -> None:
        """Do all that can be done without waiting."""
        if self.fenced is not None:
            return
        now = time.monotonic()
        self._wake(now)
        self._receive_heartbeats(now)
        self._let_in()
        for node in list(self._links):
            self._hear(node, now)
        self._judge(now)
        self._send_heartbeats()
        self._call(now)
        if self.fenced is None and not self.finished:
            self._decide(now)

    # -------------------------------------------------------------------------------------------------- signs of life

    def _wake(self, now: float) -> None:
        """Another turn: where it comes late, its socket may have been full, and nobody is to be judged by that."""
        slept_s, self._turn = now - self._turn, now
        if slept_s > OVERSLEPT_S:
            self.heard_at = {node: at if at > now else min(at + slept_s, now) for node, at in self.heard_at.items()}

    def _receive_heartbeats(self, now: float) -> None:
        for beat, address in self._heartbeats.receive():
            token = beat.token.hex()
            member = self.member_list.member(beat.node)
            if beat.kind == DECLARED_LOST:
                number = self._heartbeat_sender.next_number()
                if token == self.me.token and number - LATE_MS <= beat.number <= number:
                    self._fence("the other nodes had given this one up, since nothing was heard of it")
            elif member is not None and member.token == token and beat.node not in self.lost:
                if beat.number > self._numbers.get(token, 0):
                    self._numbers[token] = beat.number
                    self.heard_at[beat.node] = now
            elif beat.epoch < self.member_list.epoch and token not in [each.token for each in self._joining.values()]:
                answer = Heartbeat(DECLARED_LOST, self.member_list.epoch, beat.node, beat.token, beat.number)
                self._heartbeats.send(answer, address)

    def _send_heartbeats(self) -> None:
        members = [
            self.member_list.member(node) for node in list_monitored_nodes(self.me.node, self.member_list, self.lost)
        ]
        to = [(member.address, member.beats) for member in members if member is not None]
        self._heartbeat_sender.send_to(self.member_list.epoch, to)

    def _judge(self, now: float) -> None:
        watched = list_monitored_nodes(self.me.node, self.member_list, self.lost)
        for node in set(watched) - self._watched:  # it may not have seen yet that it has to tell this one
            self.heard_at[node] = max(self.heard_at.get(node, now), now + self.heartbeat_s)
        self._watched = set(watched)
        for node in watched:
            if now > self.heard_at.get(node, now) + self.heartbeat_s:
                self._lose(node, f"nothing was heard of it for {self.heartbeat_s:g} s")

    def due_s(self) -> float:
        """Seconds until one of those that this node watches is lost, if nothing is heard of it before; or until those
        who call are to be looked at."""
        watched = list_monitored_nodes(self.me.node, self.member_list, self.lost) if self.fenced is None else []
        first = min((self.heard_at[node] for node in watched if node in self.heard_at), default=math.inf)
        return max(SOON_S, min(first + self.heartbeat_s - time.monotonic(), self.listener.due_s()))

    def is_silent(self, node: int) -> bool:
        """Whether a member has been silent for half of the time after which it is lost."""
        silent_s = time.monotonic() - self.heard_at.get(node, 0.0)
        return node != self.me.node and silent_s > self.heartbeat_s / 2

    def _lose(self, node: int, why: str) -> None:
        member = self.member_list.member(node)
        if node in self.lost or member is None:
            return
        self.lost[node] = why
        self.losses.append((member, why))
        if (channel := self._links.pop(node, MemberLink()).channel) is not None:
            channel.close(why)

    # ----------------------------------------------------------------------------------------------------- connections

    def _let_in(self) -> None:
        for channel, hello in self.listener.accept():
            if hello.get("role") != "peer":
                self.callers.append((channel, hello))
                continue
            member = self.member_list.member(hello["node"]) if type(hello.get("node")) is int else None
            if member is None or member.token != hello.get("token"):
                channel.close("it is no member")  # or not yet, as far as is known here: it calls again
            elif member.node in self.lost:
                channel.send_and_close({"gone": self.member_list.epoch}, "it was given up", timeout_s=0)
            else:
                link = self._links.setdefault(member.node, MemberLink())
                if link.is_up:
                    channel.close("it is here already")
                else:
                    if link.channel is not None:
                        link.channel.close("it has called itself")
                    link.channel, link.handshake = channel, None
                    link.flush()

    def _call(self, now: float) -> None:
        """Call those that this node has to talk to and that are not to call it: the higher number calls."""
        for node in list_monitored_nodes(self.me.node, self.member_list, self.lost):
            link = self._links.setdefault(node, MemberLink())
            if node > self.me.node or link.channel is not None or now < link.again_at:
                continue
            link.again_at = now + AGAIN_S
            member = self.member_list.member(node)
            assert member is not None
            try:
                link.channel = start_connecting((member.address, member.port))
            except OSError:  # there is no way now: it is called again, until it is lost
                continue
            link.handshake = Handshake(link.channel, self.listener.secret, calling=True)

    def _hear(self, node: int, now: float) -> None:
        link = self._links.get(node)
        if link is None or link.channel is None:
            return
        for message in link.channel.receive():
            if link.handshake is None and (wrong := find_message_problem(message)) is not None:
                return self._lose(node, NONSENSE.format(wrong))
            if link.handshake is None:
                self._take(node, message)
            elif link.handshake.failed is None:
                link.handshake.feed(message)
                if link.handshake.done:
                    link.handshake = None
                    link.channel.send({"role": "peer", "node": self.me.node, "token": self.me.token})
                    link.flush()
        if self._links.get(node) is not link:
            return
        if link.handshake is not None and (link.channel.lost or link.handshake.failed or now > link.handshake.until):
            link.channel.close("it did not answer")
            link.channel = link.handshake = None
            link.again_at = now + AGAIN_S
        elif link.channel is not None and link.channel.lost is not None:
            self._lose(node, link.channel.lost)

    def _take(self, node: int, message: Message) -> None:
        if "gone" in message:
            self._fence("the other nodes had given this one up, since nothing was heard of it")
        elif "roster" in message:
            self._follow(node, parse_member_list(message["roster"]))
        elif "follow" in message:
            if message["follow"] == self.member_list.epoch:
                self._take_vote(node, message["ballot"])
        else:
            self.finished |= node == self.member_list.leader and ("finish" in message or "dropped" in message)
            self._inbox.append((node, message))

    # ------------------------------------------------------------------------------------------------------- agreeing

    def _follow(self, node: int, member_list: MemberList) -> None:
        """Take the roster of the leader, or of the one whom this node has voted for, as that is lost."""
        if member_list.epoch <= self.member_list.epoch or member_list.leader != node:
            return
        if node != self.member_list.leader and (self._voted is None or self._voted[0] != node):
            self._lose(node, "it wanted to lead, and this node had not voted for it")
            return
        mine = member_list.member(self.me.node)
        if mine is None or mine.token != self.me.token:
            self._fence("the other nodes go on without this one")
        else:
            self.lost = {}  # whoever leads knows better
            self._adopt(member_list)

    def _decide(self, now: float) -> None:
        if self._claiming is not None:
            self._see_claim()
        if self._claiming is not None or self.fenced is not None:
            return
        if self.is_leader:
            # Nodes that are cut off together are not lost in the same turn: who may be one of them is waited for.
            if (self._joining or self.lost) and not any(self.is_silent(node) for node in self.live_nodes()):
                self._claim_next(self.live_nodes())
            if self._claimed is not None:
                self._go_on(self._claimed[0])
        elif self.member_list.leader in self.lost:
            self._elect(now)

    def _elect(self, now: float) -> None:
        """The leader is lost: take votes, or give this node's, at once and again when its ranks have ended."""
        self._leaderless_since = since = self._leaderless_since or now
        candidate = self.live_nodes()[0]
        if candidate != self.me.node:
            self._vote_for(candidate)
            return
        self._take_vote(candidate, self._make_vote())  # anew, as it may have got ready for a new division
        voters, late = [node for node in self.live_nodes() if node in self._voters], now > since + VOTES_S
        ended = [node for node in voters if node in self.votes]
        # While ranks end it is claimed only where the others go on without this node, should it die before they hear.
        kept = voters if 2 * (len(voters) - 1) > len(self.member_list.nodes) else ended
        if candidate in kept and (kept == self.live_nodes() or late):
            self._claim_next(kept)
        if self._claimed is not None and candidate in ended and (ended == self.live_nodes() or late):
            members = tuple(member for member in self.member_list.members if member.node in ended)
            self._go_on(replace(self._claimed[0], members=members))

    def _vote_for(self, candidate: int) -> None:
        if self._voted == (candidate, True):
            return
        ballot = self._make_vote()
        said = candidate, ballot is not None
        if self._voted != said:
            self._voted = said
            self.send(candidate, {"follow": self.member_list.epoch, "ballot": ballot})

    def _take_vote(self, node: int, vote: Message | None) -> None:
        """Take a vote for this agent, and what the voter's ranks have come to, once they have ended."""
        self._voters.add(node)
        if vote is not None:
            self.votes[node] = vote

    def _claim_next(self, kept: list[int]) -> None:
        """Claim the next epoch for `kept` and for those who have joined, where that may be; once."""
        if self._claimed is not None or self._claiming is not None:
            return
        here, of = classify_quorum(len(kept), len(self.member_list.nodes)), len(self.member_list.nodes)
        if here == "minority" or (here == "tie" and self._claim is None):
            self._fence(explain_lost_quorum(len(kept), of))
            return
        members = {member.node: member for member in self.member_list.members if member.node in kept}
        joining = {node: member for node, member in self._joining.items() if node not in members}
        self._ask_for(self.member_list.with_members([*members.values(), *joining.values()], self.me.node))

    def _ask_for(self, following: MemberList) -> None:
        """Create the file of an epoch, where there are such files."""
        if self._claim is None:
            self._claimed = following, False
            return
        text = {"leader": self.me.node, "host": self.me.host, "address": [self.me.address, self.me.port]}
        text |= {"from": self.member_list.epoch, **self._describe_run(following)}
        patience_s = TIE_S if classify_quorum(self._left(following), len(self.member_list.nodes)) == "tie" else CLAIM_S
        self._claiming = AsyncCall(self._claim, following.epoch, text, timeout_s=patience_s), following

    def _see_claim(self) -> None:
        assert self._claiming is not None
        errand, following = self._claiming
        try:
            if (result := errand.result()) is None:
                return
            taken, mine = result[0], True
        except (PhalanxError, RuntimeError):  # the file system hangs or refuses: a majority needs none, but to pass one
            taken, mine = None if following.epoch == self.member_list.epoch + 1 else {}, False
        self._claiming = None
        if taken is None:
            self._claimed = following, mine
        elif self._passes(taken, following):
            self._ask_for(replace(following, epoch=following.epoch + 1))
        else:
            self._fence("another part of the nodes has taken the run over")

    def _passes(self, taken: dict[str, Any], following: MemberList) -> bool:
        """Whether this node may take the epoch after one that is `taken`: its claimant may live, and lead it.

        Only one of this very epoch is passed, whom all who have voted here have lost for good: their leader, or one
        lower than whom they vote for. They are a majority, so one of them is in any roster that it makes, and is missed
        there. It needs the file after its own then, the very one asked for now: who comes second finds it made from
        another epoch, and is fenced."""
        if self.is_leader or taken.get("from") != self.member_list.epoch or type(taken.get("leader")) is not int:
            return False
        lost = taken["leader"] == self.member_list.leader or taken["leader"] < self.me.node
        return lost and classify_quorum(self._left(following), len(self.member_list.nodes)) == "majority"

    def _left(self, following: MemberList) -> int:
        """How many of a roster belong to this one and are not lost."""
        return len([node for node in following.nodes if node in self.live_nodes()])

    def _go_on(self, following: MemberList) -> None:
        """Take a roster whose epoch was claimed, where enough of it are left by now."""
        assert self._claimed is not None
        left, of = self._left(following), len(self.member_list.nodes)
        here = classify_quorum(left, of)
        if here == "minority" or (here == "tie" and not self._claimed[1]):
            self._fence(explain_lost_quorum(left, of))
        else:
            self._adopt(following)

    def _adopt(self, member_list: MemberList) -> None:
        before, self.member_list = self.member_list, member_list
        if before.leader != member_list.leader:
            self.previous_member_list = before
        now = time.monotonic()
        for node in [*self._links]:
            was, member = before.member(node), member_list.member(node)
            if member is None or was is None or was.token != member.token:
                channel = self._links.pop(node).channel
                if channel is not None:
                    channel.close("it is no member any more")
        known = [node for node in member_list.nodes if member_list.member(node) == before.member(node)]
        self.lost = {node: why for node, why in self.lost.items() if node in known}
        self.heard_at = {node: now if node in known else now + MEET_S for node in member_list.nodes}
        self._joining = {node: member for node, member in self._joining.items() if member not in member_list.members}
        self._voted = self._leaderless_since = self._claimed = None
        self._voters = set()
        self._stop_claiming()
        self.adopted.append(member_list)
        if self.is_leader:
            self.broadcast({"roster": member_list_to_message(member_list)}, but=self.me.node)
        else:
            self.votes = {}
        for message in self._reliable_messages if before.leader != member_list.leader else ():
            self.send(member_list.leader, message)

    def _fence(self, why: str) -> None:
        self.fenced = self.fenced or why
        self._heartbeat_sender.close()
        for link in self._links.values():
            if link.channel is not None:
                link.channel.close(why)
        self._links = {}
        self._stop_claiming()

    def _stop_claiming(self) -> None:
        if self._claiming is not None:
            self._claiming[0].cancel()
            self._claiming = None
