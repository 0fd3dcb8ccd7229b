"""One node's part in a job on several: it prepares what is offered, runs attempts as the leader says, and reports them.

The leader's own node is told like any other. `NodeAgent` is what an attempt knows of the other nodes; `run_agent` is
the agent's loop. When the leader is lost, ranks end at once, since some may be lost with it; the next leader starts
them again.
"""

import contextlib
import dataclasses
import functools
import math
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.events import EventKind
from phalanx.core.placement import ExitCode, InMemoryCheckpoint, StoreAddress
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import rendezvous
from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.heartbeat import HeartbeatSocket
from phalanx.elastic.membership.heartbeat_sender import HeartbeatSenderProcess
from phalanx.elastic.membership.listener import BoundAddress, ConnectionListener
from phalanx.elastic.membership.member_list import AgentMember, MemberList
from phalanx.elastic.membership.membership import Claim, Membership
from phalanx.elastic.membership.messages import NONSENSE
from phalanx.elastic.membership.solo import NoNetwork, make_solo_member
from phalanx.elastic.membership.store_relay import CALL_S, Relay, hand_over, start_client_relay, start_host_relay
from phalanx.elastic.node.attempt import IDLE_S, JobAttempt
from phalanx.elastic.node.job import LeaderRole, NodeJob, NodeRanks
from phalanx.elastic.node.signals import StopSignals
from phalanx.elastic.node.standby import StandbyPool
from phalanx.elastic.node.watchdog import Blame, ProgressReport
from phalanx.elastic.replicas.server import ROLE, MakeReplicaUpdater, ReplicaServer, never_update
from phalanx.elastic.supervisor import failover, hang_detection
from phalanx.elastic.supervisor.assignment import (
    NodeAssignment,
    find_assignment,
    find_restore_source,
    list_files_to_fetch,
    list_reusable_replicas,
)
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import inventory_to_message
from phalanx.system.exit_causes import WorkerExit

LEAVE_S = 5.0  # what the leader gets, after a second SIGINT on another node, to say how the job ended


class OfferChanged(Exception):
    """What a node was preparing is not wanted any more."""


class NodeAgent:
    """`make(offer, poll_once)` makes the job that this node runs of what was offered; it calls `poll_once` all the
    time. `make_replica_updater`: what makes updates of other nodes' ranks again, in their replicas."""

    def __init__(
        self,
        secret: str,
        make: Callable[[Message, Callable[[], None]], NodeJob],
        lead: Callable[["NodeAgent"], LeaderRole],
        make_replica_updater: MakeReplicaUpdater = never_update,
    ) -> None:
        self.membership: Membership  # set by `join_membership`
        self.offer: Message | None = None  # the last
        self.start: Message | None = None  # the last order to start
        self.over: tuple[int, str] | None = None  # how the job ended: exit code and words
        self.secret, self._make, self._lead, self._make_replica_updater = secret, make, lead, make_replica_updater
        self._leading: LeaderRole | None = None
        self._job: NodeJob | None = None
        self._division = 0  # that of the job
        self.has_start_order = False  # to start an attempt
        self._running = 0  # the attempt that runs here
        self._last: Message = {}  # how the last one ended here
        self._last_epoch_file: Mapping[str, int] = failover.NOBODY_YET  # what the last file said that was made here
        self._ordered_to_end = self._knows_cause = self._ready_unheard = False
        self._stops: list[str] = []
        self._hung: list[Blame] = []
        self._relay: tuple[Relay, Any] | None = None
        self._replica_server: ReplicaServer | None = None
        self.standby = StandbyPool()
        self._in_memory_state: InMemoryCheckpoint | None = None  # the attempt that runs here
        self._run = b""  # what the run is known by; asked for when its ranks begin, as later its folder may hang
        self._store_calls: list[tuple[Channel, Message, float]] = []

    def join_membership(
        self,
        me: AgentMember,
        member_list: MemberList,
        listener: ConnectionListener,
        at: BoundAddress,
        heartbeat_s: float,
        claim: Claim | None,
    ) -> None:
        """Be a member from now on; what is open belongs to this one then."""
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
        """Be the one member of a job on this node alone, which has a rank for each row of `devices` (name, model,
        bf16)."""
        me, member_list = make_solo_member(devices)
        network = NoNetwork()
        self.membership = Membership(
            me, member_list, network, network, network, math.inf, None, self.make_vote, self.describe_writers
        )

    @property
    def is_leader(self) -> bool:
        return self._leading is not None

    @property
    def is_running(self) -> bool:
        """Whether ranks run here."""
        return self._running > 0

    def adopt_job(self, offer: Message, job: NodeJob) -> None:
        """What was offered before, and made."""
        self.offer, self._job, self._division = offer, job, int(offer["division"])

    def make_vote(self) -> Message | None:
        """What a new leader has to know of this node; None while ranks run."""
        if self._running:
            return None
        offered = self._division if self.offer is None else int(self.offer["division"])
        return {
            "ready": self._division, "offered": max(offered, self._division), "last": self._last,
            "held": self.list_inventory(),
            "attempt": 0 if self.start is None else int(self.start["attempt"]),
        }  # fmt: skip

    def describe_writers(self, following: MemberList) -> dict[str, Any]:
        """What an epoch's file says of the run: whose ranks may still write."""
        votes, said = self.membership.votes, self._last_epoch_file
        self._last_epoch_file = found = failover.find_active_writers(
            self.start, self.membership.member_list, following, votes, said
        )
        return found

    # ------------------------------------------------------------------------------------------- what an attempt knows

    def descriptors(self) -> Mapping[int, int]:
        """What poll() has to look at, and for what."""
        waiting = {channel.fileno(): select.POLLIN for channel, _, _ in self._store_calls}
        leading = {} if self._leading is None else self._leading.descriptors()
        return {**self.membership.descriptors(), **waiting, **leading}

    def poll_once(self) -> None:
        """Do all that can be done without waiting."""
        self.membership.poll_once()
        callers, self.membership.callers = self.membership.callers, []
        for channel, hello in callers:
            self._greet(channel, hello)
        self._tend_store_calls()
        if (host := self.membership.listener.flooding_host) is not None and not self._alone():
            self.membership.listener.flooding_host = None
            self.membership.send(self.membership.member_list.leader, {"strangers": host})
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

    def begin(self, number: int, port: int | None) -> StoreAddress | None:
        """An attempt begins: with rank 0 here, whose store listens at a loopback port, or elsewhere."""
        assert self.start is not None
        self._running, self._hung = number, []
        self._ordered_to_end = self._knows_cause = False
        self._run = b""
        self._open_replica_server()
        if self._job is not None and self._job.shared is not None:
            self._in_memory_state = self._kept(self._job.shared)  # first of all: it may have to come from another node
        if len(self.start["seats"]) == 1:
            return None
        if port is not None:
            self._relay = start_host_relay(port)
            self._tend_store_calls()
            return None
        hello = {"role": "store", "attempt": number}
        relay, address = start_client_relay(self._address_of(self.start["seats"][0]), self.secret, hello)
        self._relay = relay, None
        return address

    def due_s(self) -> float:
        return self.membership.due_s()

    def must_abort(self) -> bool:
        """Whether the attempt has to end here because of what happened elsewhere."""
        return self._ordered_to_end or self._alone() or self.over is not None

    def knows_cause(self) -> bool:
        """Whether it is known why it has to end: nothing that a rank here might still say would be the cause."""
        return self._knows_cause or self._alone() or self.over is not None

    def _alone(self) -> bool:
        """Whether nobody leads this node any more."""
        return self.membership.fenced is not None or self.membership.member_list.leader in self.membership.lost

    def end(self) -> None:
        """The attempt is over here: its ranks are dead."""
        self._running = 0
        if self._relay is not None:  # both at once, as either takes a while to end
            self._relay[0].kill()
        self._end_replica_server()
        if self._relay is not None:
            (relay, ours), self._relay = self._relay, None
            if ours is not None:
                ours.close()
            relay.stop()

    def report_progress(self, number: int, report: ProgressReport) -> None:
        """Tell the leader what this node sees of its ranks of an attempt."""
        self.membership.send(
            self.membership.member_list.leader, {"pulses": hang_detection.encode_report(number, report)}
        )

    def take_hung_ranks(self) -> list[Blame]:
        """Ranks that the leader has found to hang since the last call."""
        new, self._hung = self._hung, []
        return new

    def take_stop_signals(self) -> list[str]:
        """Names of stop signals that were passed on to this node since the last call."""
        new, self._stops = self._stops, []
        return new

    def report_stop_signal(self, name: str) -> None:
        """Tell the leader that this node was asked to stop."""
        self.membership.send_reliably({"stop": name})

    # -------------------------------------------------------------------------------------------------------- messages

    def _obey(self, message: Message) -> None:
        if "offer" in message:
            self.offer = message["offer"]
        elif "start" in message and self._exceeds(message["start"]):
            self.membership.drop(
                self.membership.member_list.leader, NONSENSE.format("more ranks than this node has devices")
            )
        elif "start" in message:
            self.start, self.has_start_order = message["start"], True
        elif "end" in message:
            if message["end"] == self._running:
                self._ordered_to_end = True
                self._knows_cause |= message["known"] is True
            if self.has_start_order and self.start is not None and message["end"] == self.start["attempt"]:
                self.has_start_order = False
                self.report_end(int(message["end"]), ExitCode.FAILED, [])  # nothing of it has begun here
        elif "pause" in message and message["pause"] == self._running:
            self._stops.append("SIGTERM")
        elif "hung" in message and message["hung"] == self._running:
            self._hung = [Blame(*row) for row in message["ranks"]]
        elif "signal" in message:
            self._stops.append(str(message["signal"]))
        elif "finish" in message:
            self.over = int(message["finish"]), str(message["text"])
        elif "dropped" in message:
            self.over = int(message["code"]), str(message["dropped"])

    def _exceeds(self, start: Message) -> bool:  # more ranks than this node has got ready for
        seat = find_assignment(start, self.membership.me.node) if start["division"] == self._division else None
        return seat is not None and self._job is not None and seat.ranks > len(self._job.devices)

    def _greet(self, channel: Channel, hello: Message) -> None:
        if hello.get("role") in ("store", ROLE) and type(hello.get("attempt")) is int:
            self._store_calls.append((channel, hello, time.monotonic() + CALL_S))
        elif hello.get("role") == ROLE:  # it only reads
            self._hand_to_replica_server(channel, writes=False)
        elif hello.get("role") == "first":
            channel.send_and_close({"ok": True, "goes_on": True}, "it only asked whether there is a job")
        elif self._leading is not None:
            self._leading.greet(channel, hello)
        else:
            channel.close("another node leads")  # who calls looks again where that is

    def _tend_store_calls(self) -> None:
        """Join ranks of other nodes to the store; who is early waits, who belongs to an older attempt is refused."""
        waiting, self._store_calls = self._store_calls, []
        for channel, hello, until in waiting:
            keeps = hello["role"] == ROLE
            here = self._running == hello["attempt"] and (
                keeps or (self._relay is not None and self._relay[1] is not None)
            )
            if here and keeps:
                self._hand_to_replica_server(channel, writes=True)
            elif here:
                assert self._relay is not None
                channel.send({"ok": True})
                with contextlib.suppress(OSError):  # the relay has died: the rank that waits for it fails
                    hand_over(self._relay[1], channel.socket)
                channel.close("the relay has it")
            elif (
                hello["attempt"] > self._seen()
                and time.monotonic() < until
                and not channel.receive()
                and not channel.lost
            ):
                self._store_calls.append((channel, hello, until))
            else:
                channel.close("it belongs to another attempt")

    def _open_replica_server(self) -> ReplicaServer | None:
        """The process for state of other nodes, started again where it has died; None where nothing is kept."""
        job = self._job
        if self.membership.is_solo:
            return None
        if self._replica_server is not None and not self._replica_server.is_alive:
            self._end_replica_server()
        if job is None or job.shared is None or not job.keeps_state or job.paths is None:
            return self._replica_server
        run = self._run_of(job.paths)
        if (
            self._replica_server is not None and self._replica_server.run_id != run
        ):  # the run had no records yet when it was forked
            self._end_replica_server()
        if self._replica_server is None:
            self._replica_server = ReplicaServer(job.shared, run, self.secret, self._make_replica_updater)
        return self._replica_server

    def _hand_to_replica_server(self, channel: Channel, writes: bool) -> None:
        keeper = self._open_replica_server()
        if keeper is not None:
            channel.send({"ok": True})
            with contextlib.suppress(OSError):  # it has died: the rank that waits for it fails
                keeper.hand_over(channel.socket, writes)
        channel.close("the keeper has it")

    def _end_replica_server(self) -> None:
        """Have nothing more written here, before it is told what there is."""
        if self._replica_server is not None:
            self._replica_server.stop()
            self._replica_server = None

    def _run_of(self, paths: RunPaths) -> bytes:
        self._run = self._run or state_file.compute_run_id(paths.events)
        return self._run

    def list_inventory(self) -> list[dict[str, Any]]:
        """What there is of the run's state in this node's memory, for the leader."""
        job = self._job
        if job is None or job.shared is None or job.paths is None:
            return []
        return inventory_to_message(inventory.read_inventory(job.shared, self._run_of(job.paths)))

    def _kept(self, shared: Path) -> InMemoryCheckpoint | None:
        """What an attempt begins with, as the order to start says; whatever else lies here is removed, but for replicas
        of use. What another node has of it, and ranks here will take as it is, is on its way from now on."""
        assert self.start is not None and self._job is not None
        me, attempt = self.membership.me.node, int(self.start["attempt"])
        for message in inventory.find_damage(shared):
            self._job.on_event(EventKind.WARNING, {"attempt": attempt, "message": message})
        kept = find_restore_source(self.start, me, shared, self._address_of)
        own = {file.path for file in (kept.files if kept else ()) if file.address is None}
        inventory.remove_unused_files(
            shared, own | {str(shared / name) for name in list_reusable_replicas(self.start, me)}
        )
        for file in list_files_to_fetch(self.start, me, kept):
            if kept is not None and file.address is not None and self._replica_server is not None:
                self._replica_server.fetch(file.path, file.address, kept.step, int(self.start["slots"]))
        return kept

    def _address_of(self, node: int) -> tuple[str, int]:
        """Where a member is called; who is gone by now is called in vain, and the attempt ends as it must."""
        member = self.membership.member_list.member(node)
        return ("127.0.0.1", 1) if member is None else (member.address, member.port)

    def _seen(self) -> int:
        """The last attempt that has begun, or ended, here."""
        return max(self._running, int(self._last.get("attempt", 0)))

    def report_end(self, number: int, code: int, exits: list[WorkerExit], lowered: bool = False) -> None:
        """Tell the leader how an attempt ended here."""
        ended = [dataclasses.asdict(end) for end in exits]
        self._last = {"attempt": number, "code": int(code), "ends": ended, "lowered": lowered}
        self.membership.send(self.membership.member_list.leader, {"ended": self._last, "held": self.list_inventory()})

    # ------------------------------------------------------------------------------------------------------- the loop

    def prepare_offer(self, must_leave: Callable[[], bool]) -> None:
        """Make the job of a new offer, if there is one, and say that this node is ready. `must_leave` passes stop
        signals on, and says whether this node leaves now whatever becomes of the job."""
        while self.offer is not None and int(self.offer["division"]) != self._division:
            offer = self.offer

            def poll_once(offer: Message = offer) -> None:
                self.poll_once()
                if must_leave() or self._leaves() or self.offer is not offer:
                    raise OfferChanged

            try:
                job = self._make(offer, poll_once)
            except OfferChanged:
                if must_leave() or self._leaves():
                    return
                continue
            except PhalanxError as error:
                self.membership.send(
                    self.membership.member_list.leader, {"unfit": str(error), "code": int(error.exit_code)}
                )
                self.offer = None
                return
            self._job, self._division = job, int(offer["division"])
            self.report_ready()

    def prepare_next_attempt(self) -> None:
        """Have what the next attempt needs, while the others end theirs and it is decided what becomes of the job."""
        if not self._leaves():
            self._open_replica_server()

    def _leaves(self) -> bool:
        """Whether there is nothing more to do here: the job is over, or the others go on without this node."""
        return self.over is not None or self.membership.fenced is not None

    def report_ready(self) -> None:
        self._ready_unheard = self._alone()  # the next leader hears it, whose vote may be older
        self.membership.send(
            self.membership.member_list.leader, {"ready": self._division, "held": self.list_inventory()}
        )

    def take_start_order(self) -> tuple[int, NodeAssignment] | None:
        """The attempt that is to be started, and this node's seat in it, if it has one; once."""
        ordered, self.has_start_order = self.has_start_order, False
        if not ordered or self.membership.member_list.leader in self.membership.lost:
            return None  # or by one who is lost
        assert self.start is not None
        seat = find_assignment(self.start, self.membership.me.node)
        if seat is None or int(self.start["division"]) != self._division:
            if self._job is not None and self._job.shared is not None:
                self._kept(self._job.shared)
            self._run = b""
            self._open_replica_server()  # for the time when this node takes the place of another
            self.standby.close()
            return None
        return int(self.start["attempt"]), seat

    def make_attempt(self, number: int, assignment: NodeAssignment, signals: StopSignals) -> JobAttempt:
        """What this node runs of an attempt."""
        assert self._job is not None and self.start is not None
        seats = self.start["seats"]
        next_one = self.membership.member_list.member(int(seats[(assignment.slot + 1) % len(seats)]))
        partner = None if next_one is None or len(seats) == 1 else (next_one.address, next_one.port)
        world = sum(self.start["ranks"])
        epoch = None if self.membership.is_solo else self.start["epoch"]
        part = NodeRanks(assignment.slot, assignment.first_rank, world, self._interface(), len(seats), partner, epoch)
        job = dataclasses.replace(
            self._job,
            world=assignment.ranks,
            devices=list(self._job.devices)[: assignment.ranks],
            find_in_memory_state=self._job.find_in_memory_state
            if self._job.shared is None
            else lambda: self._in_memory_state,
            on_event=functools.partial(self._note, self._job.on_event),
        )
        return JobAttempt(job, part, number, self, signals, self.standby)

    def _note(self, on_event: Callable[[str, dict[str, Any]], None], kind: str, details: dict[str, Any]) -> None:
        """Pass an event of this node's ranks on; the leader says itself what concerns all."""
        if self._leading is None or kind not in (EventKind.WORKER_DIED, EventKind.STOP_REQUESTED):
            on_event(kind, details)

    def _interface(self) -> str | None:
        """The interface that leads to the other nodes."""
        if rendezvous.is_loopback(self.membership.me.address):
            return "lo"
        return next((name for name, address in rendezvous.interfaces() if address == self.membership.me.address), None)

    def close(self) -> None:
        """Leave; the last words of a leader are still said."""
        self.end()
        self.standby.close()
        for channel, _, _ in self._store_calls:
            channel.close("this node has left")
        self._store_calls = []
        over = None if self._leading is None or self.membership.fenced is not None else self.over
        if self._leading is not None:
            self._leading.close(over)
        self.membership.close(None if over is None else {"finish": over[0], "text": over[1]})


def run_agent(agent: NodeAgent, grace_s: float, signals: StopSignals) -> int:
    """Run this node's part to the job's end and return its exit code; the words are in `agent.over`, or in
    `agent.membership.fenced` where this node had to leave the others.

    Ends workers and passes signals on as `run_local_job` says, and raises as that does where this node is to blame.
    """
    deadline = math.inf

    def enough() -> bool:
        nonlocal deadline
        for asked in signals.take():
            agent.report_stop_signal(asked.name)
        if signals.all_signals:
            patience_s = LEAVE_S if signals.all_signals.count(signal.SIGINT) >= 2 else grace_s
            deadline = min(deadline, time.monotonic() + patience_s)
        return time.monotonic() > deadline

    while True:
        _wait(agent, signals)
        late = enough()
        if agent.over is not None:
            return agent.over[0]
        if agent.membership.fenced is not None or late:  # whom the others do without knows no better
            return int(ExitCode.STOPPED if agent.membership.fenced is None else ExitCode.FAILED)
        agent.prepare_offer(enough)
        if (order := agent.take_start_order()) is not None:
            _attempt(agent, *order, signals)


def _attempt(agent: NodeAgent, number: int, assignment: NodeAssignment, signals: StopSignals) -> None:
    attempt = agent.make_attempt(number, assignment, signals)
    code, ends, lowered = int(ExitCode.FAILED), attempt.exits, False
    try:
        attempt.start()
        code = attempt.watch()
        lowered = code == ExitCode.OUT_OF_MEMORY and attempt.job.after_out_of_memory()
    finally:
        attempt.kill()
        agent.end()
        agent.report_end(number, code, ends, lowered)
    agent.poll_once()  # before anything else is done: the others may be waiting for what comes of it
    if code not in (ExitCode.DONE, ExitCode.STOPPED):
        agent.prepare_next_attempt()


def _wait(agent: NodeAgent, signals: StopSignals) -> None:
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    for descriptor, events in agent.descriptors().items():
        poll.register(descriptor, events)
    poll.poll(0 if agent.has_start_order or agent.membership.has_messages else min(IDLE_S, agent.due_s()) * 1000)
    agent.poll_once()
