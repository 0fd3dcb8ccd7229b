"""The agent of one node in a job: it prepares for offers, runs attempts as the leader orders, and reports them.

The leader's own node receives the same messages as any other, even if it is the only one. When the leader is lost, all
ranks are stopped, since some may be lost with it; the next leader restarts them. The loop is in `agent.py`.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.core.placement import ExitCode, InMemoryCheckpoint, StoreAddress
from phalanx.elastic.membership import messages
from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.election import Claim
from phalanx.elastic.membership.heartbeat import HeartbeatSenderProcess, HeartbeatSocket, NoNetwork, make_solo_member
from phalanx.elastic.membership.listener import BoundAddress, ConnectionListener
from phalanx.elastic.membership.member_list import AgentMember, MemberList
from phalanx.elastic.membership.membership import Membership
from phalanx.elastic.membership.store_relay import Relay, hand_over, start_client_relay, start_host_relay
from phalanx.elastic.node import watchdog
from phalanx.elastic.node.attempt_calls import AttemptCalls
from phalanx.elastic.node.standby import StandbyPool
from phalanx.elastic.node.watchdog import Blame, ProgressReport
from phalanx.elastic.node.worker import LeaderRole, NodeJob
from phalanx.elastic.replicas.own_ranks import ROLE
from phalanx.elastic.replicas.server import MakeReplicaUpdater, ReplicaHost, never_update
from phalanx.elastic.supervisor import failover
from phalanx.elastic.supervisor.assignment import NodeAssignment, find_assignment
from phalanx.elastic.supervisor.meeting import Meeting
from phalanx.system.exit_causes import WorkerExit


class NodeAgent:
    """The agent of a node. `make(offer, poll_once)` makes the node's job from an offer; it must call `poll_once`
    frequently. `make_replica_updater`: makes the object that repeats updates of other nodes' ranks in their
    replicas."""

    def __init__(
        self,
        secret: str,
        make: Callable[[Message, Callable[[], None]], NodeJob],
        lead: Callable[["NodeAgent"], LeaderRole],
        make_replica_updater: MakeReplicaUpdater = never_update,
    ) -> None:
        self.membership: Membership  # set by `join_membership`
        self.offer: Message | None = None  # the last
        self.met: Meeting | None = None  # as whom the members of the first epoch have met, where this is node 0
        self.start: Message | None = None  # the last order to start
        self.over: tuple[int, str] | None = None  # how the job ended: exit code and words
        self.secret, self.make_job, self._lead = secret, make, lead
        self._leading: LeaderRole | None = None
        self.job: NodeJob | None = None
        self.division = 0  # that of the job
        self.has_start_order = False  # to start an attempt
        self.running: AttemptLink | None = None  # the attempt that runs here
        self.stop_signals: list[str] = []  # names of those that were passed on to this node
        self.standby = StandbyPool()
        self.memory = ReplicaHost(secret, make_replica_updater)
        self.calls = AttemptCalls()
        self._last: Message = {}  # how the last attempt ended here
        self._last_epoch_file: Mapping[str, int] = failover.NOBODY_YET  # contents of the last epoch file created here
        self._ready_unheard = False

    def join_membership(
        self,
        me: AgentMember,
        member_list: MemberList,
        listener: ConnectionListener | NoNetwork,
        at: BoundAddress,
        heartbeat_s: float,
        claim: Claim | None,
    ) -> None:
        """Join the membership, which takes over open connections."""
        beats = HeartbeatSocket(at.beats, self.secret)
        self.membership = Membership(
            me,
            member_list,
            listener,
            beats,
            HeartbeatSenderProcess(me, beats),
            heartbeat_s,
            claim,
            self.make_vote,
            self.describe_writers,
        )

    def join_alone(self, devices: Sequence[Sequence[object]]) -> None:
        """Become the only member of a job on this node, with a rank for each row of `devices` (name, model, bf16)."""
        me, member_list = make_solo_member(devices)
        network, self.memory.serves = NoNetwork(), False
        self.membership = Membership(
            me, member_list, network, network, network, math.inf, None, self.make_vote, self.describe_writers
        )

    @property
    def is_leader(self) -> bool:
        return self._leading is not None

    @property
    def is_leaderless(self) -> bool:
        """Whether this node no longer has a leader."""
        return self.membership.fenced is not None or self.membership.member_list.leader in self.membership.lost

    @property
    def must_leave(self) -> bool:
        """Whether there is nothing more to do here: the job is over, or the others continue without this node."""
        return self.over is not None or self.membership.fenced is not None

    @property
    def last_seen_attempt(self) -> int:
        """The last attempt that has begun, or ended, here."""
        return max(0 if self.running is None else self.running.number, int(self._last.get("attempt", 0)))

    def adopt_job(self, offer: Message, job: NodeJob) -> None:
        """Adopt a job and the offer that it was made from."""
        self.offer, self.job, self.division = offer, job, int(offer["division"])

    def make_vote(self) -> Message | None:
        """This node's state for a new leader; None while ranks run."""
        if self.running is not None:
            return None
        offered = self.division if self.offer is None else int(self.offer["division"])
        return {
            "ready": self.division, "offered": max(offered, self.division), "last": self._last,
            "held": self.list_inventory(),
            "attempt": 0 if self.start is None else int(self.start["attempt"]),
        }  # fmt: skip

    def describe_writers(self, following: MemberList) -> dict[str, Any]:
        """Contents of an epoch's file about the run: whose ranks may still write."""
        votes, said = self.membership.election.votes, self._last_epoch_file
        self._last_epoch_file = found = failover.find_active_writers(
            self.start, self.membership.member_list, following, votes, said
        )
        return found

    def descriptors(self) -> Mapping[int, int]:
        """Descriptors for poll(), with their event masks."""
        leading = {} if self._leading is None else self._leading.descriptors()
        return {**self.membership.descriptors(), **self.calls.descriptors(), **leading}

    def poll_once(self) -> None:
        """Run one turn without blocking."""
        self.membership.poll_once()
        callers, self.membership.callers = self.membership.callers, []
        for channel, hello in callers:
            self._greet(channel, hello)
        tend_calls(self)
        if not self.is_leaderless and (host := self.membership.listener.take_flooding_host()) is not None:
            self.tell_leader({"strangers": host})
        if self.membership.is_leader and self._leading is None and self.membership.fenced is None:
            self._leading = self._lead(self)
        self._hear()
        if self._leading is not None and self.membership.fenced is None:
            self._leading.poll_once()
            self._hear()  # what this node tells itself is known at once, as others may be waiting for it
        elif self.membership.adopted and not self.membership.is_leader:
            self.membership.losses.clear()
            self.membership.adopted.clear()
            if self._ready_unheard:
                self.report_ready()

    def _hear(self) -> None:
        while heard := self.membership.receive():
            for node, message in heard:
                if node == self.membership.member_list.leader:
                    self._obey(message)
                if self._leading is not None:
                    self._leading.hear(node, message)

    # -------------------------------------------------------------------------------------------------------- messages

    def _obey(self, message: messages.MessageRecord) -> None:
        running = self.running
        match message:
            case messages.OfferMessage():
                self.offer = message.offer
            case messages.StartMessage() if self._exceeds(message.start):
                why = messages.NONSENSE.format("more ranks than this node has devices")
                self.membership.drop(self.membership.member_list.leader, why)
            case messages.StartMessage():
                self.start, self.has_start_order = message.start, True
            case messages.EndMessage():
                if running is not None and message.end == running.number:
                    running.ordered_to_end = True
                    running.cause_known |= message.known
                if self.has_start_order and self.start is not None and message.end == self.start["attempt"]:
                    self.has_start_order = False
                    self.report_end(message.end, ExitCode.FAILED, [])  # nothing of it has begun here
            case messages.PauseMessage() if running is not None and message.pause == running.number:
                self.stop_signals.append("SIGTERM")
            case messages.HungMessage() if running is not None and message.hung == running.number:
                running.hung = [Blame(*row) for row in message.ranks]
            case messages.SignalMessage():
                self.stop_signals.append(message.signal)
            case messages.FinishMessage():
                self.over = message.finish, message.text
            case messages.DroppedMessage():
                self.over = message.code, message.dropped

    def _exceeds(self, start: Message) -> bool:  # more ranks than this node has got ready for
        seat = find_assignment(start, self.membership.me.node) if start["division"] == self.division else None
        return seat is not None and self.job is not None and seat.ranks > len(self.job.devices)

    def _greet(self, channel: Channel, hello: Message) -> None:
        if hello.get("role") in ("store", ROLE) and type(hello.get("attempt")) is int:
            self.calls.add(channel, hello)
        elif hello.get("role") == ROLE:  # it only reads
            self.memory.hand_over(self.job, channel, writes=False)
        elif hello.get("role") == "first":
            channel.send_and_close({"ok": True, "goes_on": True}, "it was only a check for a job")
        elif self._leading is not None:
            self._leading.greet(channel, hello)
        else:
            channel.close("another node is the leader")  # who calls looks again where that is

    def list_inventory(self) -> list[dict[str, Any]]:
        """The inventory of the run's state in this node's memory, for the leader."""
        return self.memory.list_inventory(self.job)

    def address_of(self, node: int) -> tuple[str, int]:
        """Address of a member; a call to a lost member fails, and the attempt ends."""
        member = self.membership.member_list.member(node)
        return ("127.0.0.1", 1) if member is None else (member.address, member.port)

    def tell_leader(self, message: Message) -> None:
        self.membership.send(self.membership.member_list.leader, message)

    def end_attempt(self) -> None:
        """Note the end of the attempt on this node: its ranks are dead."""
        running, self.running = self.running, None
        if running is not None:
            running.end()
        self.memory.close()

    def report_end(
        self, number: int, code: int, exits: list[WorkerExit], lowered: bool = False, interrupted: bool = False
    ) -> None:
        """Tell the leader how an attempt ended here."""
        ended = [dataclasses.asdict(end) for end in exits]
        self._last = {"attempt": number, "code": int(code), "ends": ended, "lowered": lowered}
        self._last |= {"interrupted": True} if interrupted else {}
        self.tell_leader({"ended": self._last, "held": self.list_inventory()})

    def report_ready(self) -> None:
        self._ready_unheard = self.is_leaderless  # the next leader hears it, whose vote may be older
        self.tell_leader(self.describe_ready())

    def describe_ready(self) -> Message:
        """The message that reports this node as ready, at the start of a job or later."""
        return {"ready": self.division, "held": self.list_inventory()}

    def take_start_order(self) -> tuple[int, NodeAssignment] | None:
        """The attempt to start, and this node's seat in it, if it has one; returned once."""
        ordered, self.has_start_order = self.has_start_order, False
        if not ordered or self.membership.member_list.leader in self.membership.lost:
            return None  # or by one who is lost
        assert self.start is not None
        seat = find_assignment(self.start, self.membership.me.node)
        if seat is None or int(self.start["division"]) != self.division:
            if self.job is not None and self.job.shared is not None:
                self.memory.adopt_restore_source(self.job, self.start, self.membership.me.node, self.address_of)
            self.memory.open(self.job, forget_run=True)  # for the time when this node takes the place of another
            self.standby.close()
            return None
        return int(self.start["attempt"]), seat

    def close(self) -> None:
        """Leave; the last messages of a leader are still sent."""
        self.end_attempt()
        self.standby.close()
        self.calls.close()
        over = None if self._leading is None or self.membership.fenced is not None else self.over
        if self._leading is not None:
            self._leading.close(over)
        self.membership.close(None if over is None else {"finish": over[0], "text": over[1]})


def tend_calls(agent: NodeAgent) -> None:
    """Serve connections of other nodes that belong to the attempt that runs."""
    agent.calls.tend(
        agent.running, agent.last_seen_attempt, lambda channel: agent.memory.hand_over(agent.job, channel, writes=True)
    )


class AttemptLink:
    """The other nodes of a job, for the attempt `number` of `agent`; nothing here waits."""

    def __init__(self, agent: NodeAgent, number: int) -> None:
        self._agent, self.number = agent, number
        self.ordered_to_end = False
        self.cause_known = False  # why it has to end
        self.hung: list[Blame] = []
        self.in_memory_state: InMemoryCheckpoint | None = None  # what its ranks begin with
        self._relay: Relay | None = None
        self._to_relay: Any = None  # where rank 0 is: by which connections reach its store

    @property
    def serves_store(self) -> bool:
        return self._to_relay is not None

    def begin(self, number: int, port: int | None) -> StoreAddress | None:
        """Begin an attempt; if the store is on another node, return its address."""
        agent, start, job = self._agent, self._agent.start, self._agent.job
        assert start is not None and number == self.number
        agent.running = self
        agent.memory.open(job, forget_run=True)
        if job is not None and job.shared is not None:  # first of all: it may have to come from another node
            me = agent.membership.me.node
            self.in_memory_state = agent.memory.adopt_restore_source(job, start, me, agent.address_of)
        if len(start["seats"]) == 1:
            return None
        if port is not None:
            self._relay, self._to_relay = start_host_relay(port)
            tend_calls(agent)
            return None
        hello = {"role": "store", "attempt": number}
        self._relay, address = start_client_relay(agent.address_of(start["seats"][0]), agent.secret, hello)
        return address

    def join_store(self, channel: Channel) -> None:
        """Relay ranks of another node to the store, by a connection of that node."""
        channel.send({"ok": True})
        with contextlib.suppress(OSError):  # the relay has died: the rank that waits for it fails
            hand_over(self._to_relay, channel.socket)
        channel.close("handed over to the relay")

    def end(self) -> None:
        """Note the end of the attempt on this node: its ranks are dead."""
        if self._relay is not None:  # both at once, as either takes a while to end
            self._relay.kill()
        self._agent.memory.close()
        if self._to_relay is not None:
            self._to_relay.close()
            self._to_relay = None
        if self._relay is not None:
            self._relay.stop()
            self._relay = None

    def descriptors(self) -> Mapping[int, int]:
        return self._agent.descriptors()

    def poll_once(self) -> None:
        self._agent.poll_once()

    def due_s(self) -> float:
        return self._agent.membership.due_s()

    def must_abort(self) -> bool:
        """Whether this attempt must end here because of an event elsewhere."""
        return self.ordered_to_end or self._agent.is_leaderless or self._agent.over is not None

    def knows_cause(self) -> bool:
        """Whether the cause is known, so that no rank of this node is awaited for it."""
        return self.cause_known or self._agent.is_leaderless or self._agent.over is not None

    def report_progress(self, number: int, report: ProgressReport) -> None:
        """Report the progress of this node's ranks to the leader."""
        self._agent.tell_leader({"pulses": watchdog.encode_report(number, report)})

    def take_hung_ranks(self) -> list[Blame]:
        new, self.hung = self.hung, []
        return new

    def has_committed(self, steps: Mapping[int, int]) -> bool:
        """Whether ranks of this node have committed these steps, by rank, in this node's memory."""
        return self._agent.memory.has_committed(self._agent.job, steps)

    def take_stop_signals(self) -> list[str]:
        new, self._agent.stop_signals = self._agent.stop_signals, []
        return new

    def report_stop_signal(self, described: Message) -> None:
        self._agent.membership.send_reliably(described)
