"""One node's part in a job on several: it prepares what is offered, runs attempts as the leader says, and reports them.

The leader's own node is told like any other. `Peer` is what an attempt knows of the other nodes; `run` is the agent's
loop. When the leader is lost, ranks end at once, since some may be lost with it; the next leader starts them again.
"""

import contextlib
import dataclasses
import functools
import math
import select
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.events import Kind
from phalanx.core.placement import ExitCode, Kept, StoreAddress
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import rendezvous
from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.heartbeat import Beats
from phalanx.elastic.membership.heartbeat_sender import Herald
from phalanx.elastic.membership.listener import Address, Door
from phalanx.elastic.membership.member_list import Member, Roster
from phalanx.elastic.membership.membership import Circle, Claim
from phalanx.elastic.membership.messages import NONSENSE
from phalanx.elastic.membership.store_relay import CALL_S, Relay, beside_the_store, hand_over, to_node_0
from phalanx.elastic.node.attempt import IDLE_S, Attempt
from phalanx.elastic.node.job import Job, Leading, Part
from phalanx.elastic.node.signals import Signals
from phalanx.elastic.node.standby import Early
from phalanx.elastic.node.watchdog import Blame, Word
from phalanx.elastic.replicas.server import ROLE, ReplayOf, ReplicaKeeper, never
from phalanx.elastic.supervisor import failover, hang_detection
from phalanx.elastic.supervisor.assignment import Seat, kept_of, replicas_of_before, seat_of, taken_from_others
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import held_to_message
from phalanx.system.exit_causes import End

LEAVE_S = 5.0  # what the leader gets, after a second SIGINT on another node, to say how the job ended


class Changed(Exception):
    """What a node was preparing is not wanted any more."""


class Peer:
    """`make(offer, tend)` makes the job that this node runs of what was offered; it calls `tend` all the time.
    `replay_of`: what makes updates of other nodes' ranks again, in their replicas."""

    def __init__(
        self,
        secret: str,
        make: Callable[[Message, Callable[[], None]], Job],
        lead: Callable[["Peer"], Leading],
        replay_of: ReplayOf = never,
    ) -> None:
        self.circle: Circle  # set by `enter`
        self.offer: Message | None = None  # the last
        self.start: Message | None = None  # the last order to start
        self.over: tuple[int, str] | None = None  # how the job ended: exit code and words
        self.secret, self._make, self._lead, self._replay_of = secret, make, lead, replay_of
        self._leading: Leading | None = None
        self._job: Job | None = None
        self._division = 0  # that of the job
        self.ordered = False  # to start an attempt
        self._running = 0  # the attempt that runs here
        self._last: Message = {}  # how the last one ended here
        self._said: Mapping[str, int] = failover.NOBODY_YET  # what the last file said that was made here
        self._ordered_to_end = self._explained = self._ready_unheard = False
        self._stops: list[str] = []
        self._hung: list[Blame] = []
        self._relay: tuple[Relay, Any] | None = None
        self._keeper: ReplicaKeeper | None = None
        self.early = Early()
        self._begins_with: Kept | None = None  # the attempt that runs here
        self._run = b""  # what the run is known by; asked for when its ranks begin, as later its folder may hang
        self._store_calls: list[tuple[Channel, Message, float]] = []

    def enter(
        self, me: Member, roster: Roster, door: Door, at: Address, heartbeat_s: float, claim: Claim | None
    ) -> None:
        """Be a member from now on; what is open belongs to this one then."""
        beats = Beats(at.beats, self.secret)
        self.circle = Circle(me, roster, door, beats, Herald(me, beats), heartbeat_s, claim, self.ballot, self.about)

    @property
    def leads(self) -> bool:
        return self._leading is not None

    def prepared(self, offer: Message, job: Job) -> None:
        """What was offered before, and made."""
        self.offer, self._job, self._division = offer, job, int(offer["division"])

    def ballot(self) -> Message | None:
        """What a new leader has to know of this node; None while ranks run."""
        if self._running:
            return None
        offered = self._division if self.offer is None else int(self.offer["division"])
        return {
            "ready": self._division, "offered": max(offered, self._division), "last": self._last, "held": self.held(),
            "attempt": 0 if self.start is None else int(self.start["attempt"]),
        }  # fmt: skip

    def about(self, following: Roster) -> dict[str, Any]:
        """What an epoch's file says of the run: whose ranks may still write."""
        votes, said = self.circle.votes, self._said
        self._said = found = failover.still_writing(self.start, self.circle.roster, following, votes, said)
        return found

    # ------------------------------------------------------------------------------------------- what an attempt knows

    def descriptors(self) -> Mapping[int, int]:
        """What poll() has to look at, and for what."""
        waiting = {channel.fileno(): select.POLLIN for channel, _, _ in self._store_calls}
        leading = {} if self._leading is None else self._leading.descriptors()
        return {**self.circle.descriptors(), **waiting, **leading}

    def tend(self) -> None:
        """Do all that can be done without waiting."""
        self.circle.tend()
        callers, self.circle.callers = self.circle.callers, []
        for channel, hello in callers:
            self._greet(channel, hello)
        self._tend_store_calls()
        if (host := self.circle.door.crowd) is not None and not self._alone():
            self.circle.door.crowd = None
            self.circle.tell(self.circle.roster.leader, {"strangers": host})
        if self.circle.leading and self._leading is None and self.circle.fenced is None:
            self._leading = self._lead(self)
        self._hear()
        if self._leading is not None and self.circle.fenced is None:
            self._leading.tend()
            self._hear()  # what this node tells itself is known at once, as others may be waiting for it
        elif self.circle.adopted and not self.circle.leading:
            self.circle.losses.clear()
            self.circle.adopted.clear()
            if self._ready_unheard:
                self.say_ready()

    def _hear(self) -> None:
        while heard := self.circle.heard():
            for node, message in heard:
                if node == self.circle.roster.leader:
                    self._obey(message)
                if self._leading is not None:
                    self._leading.hear(node, message)

    def begin(self, number: int, port: int | None) -> StoreAddress | None:
        """An attempt begins: with rank 0 here, whose store listens at a loopback port, or elsewhere."""
        assert self.start is not None
        self._running, self._hung = number, []
        self._ordered_to_end = self._explained = False
        self._run = b""
        self._open_keeper()
        if self._job is not None and self._job.shared is not None:
            self._begins_with = self._kept(self._job.shared)  # first of all: it may have to come from another node
        if port is not None:
            self._relay = beside_the_store(port)
            self._tend_store_calls()
            return None
        hello = {"role": "store", "attempt": number}
        relay, address = to_node_0(self._address_of(self.start["seats"][0]), self.secret, hello)
        self._relay = relay, None
        return address

    def due_s(self) -> float:
        return self.circle.due_s()

    def broken(self) -> bool:
        """Whether the attempt has to end here because of what happened elsewhere."""
        return self._ordered_to_end or self._alone() or self.over is not None

    def explained(self) -> bool:
        """Whether it is known why it has to end: nothing that a rank here might still say would be the cause."""
        return self._explained or self._alone() or self.over is not None

    def _alone(self) -> bool:
        """Whether nobody leads this node any more."""
        return self.circle.fenced is not None or self.circle.roster.leader in self.circle.lost

    def end(self) -> None:
        """The attempt is over here: its ranks are dead."""
        self._running = 0
        if self._relay is not None:  # both at once, as either takes a while to end
            self._relay[0].kill()
        self._end_keeper()
        if self._relay is not None:
            (relay, ours), self._relay = self._relay, None
            if ours is not None:
                ours.close()
            relay.stop()

    def tell(self, number: int, word: Word) -> None:
        """Tell the leader what this node sees of its ranks of an attempt."""
        self.circle.tell(self.circle.roster.leader, {"pulses": hang_detection.to_message(number, word)})

    def hung(self) -> list[Blame]:
        """Ranks that the leader has found to hang since the last call."""
        new, self._hung = self._hung, []
        return new

    def stops(self) -> list[str]:
        """Names of stop signals that were passed on to this node since the last call."""
        new, self._stops = self._stops, []
        return new

    def tell_stop(self, name: str) -> None:
        """Tell the leader that this node was asked to stop."""
        self.circle.insist({"stop": name})

    # -------------------------------------------------------------------------------------------------------- messages

    def _obey(self, message: Message) -> None:
        if "offer" in message:
            self.offer = message["offer"]
        elif "start" in message and self._exceeds(message["start"]):
            self.circle.drop(self.circle.roster.leader, NONSENSE.format("more ranks than this node has devices"))
        elif "start" in message:
            self.start, self.ordered = message["start"], True
        elif "end" in message:
            if message["end"] == self._running:
                self._ordered_to_end = True
                self._explained |= message["known"] is True
            if self.ordered and self.start is not None and message["end"] == self.start["attempt"]:
                self.ordered = False
                self.report(int(message["end"]), ExitCode.FAILED, [])  # nothing of it has begun here
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
        seat = seat_of(start, self.circle.me.node) if start["division"] == self._division else None
        return seat is not None and self._job is not None and seat.ranks > len(self._job.devices)

    def _greet(self, channel: Channel, hello: Message) -> None:
        if hello.get("role") in ("store", ROLE) and type(hello.get("attempt")) is int:
            self._store_calls.append((channel, hello, time.monotonic() + CALL_S))
        elif hello.get("role") == ROLE:  # it only reads
            self._give_to_keeper(channel, writes=False)
        elif hello.get("role") == "first":
            channel.farewell({"ok": True, "goes_on": True}, "it only asked whether there is a job")
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
                self._give_to_keeper(channel, writes=True)
            elif here:
                assert self._relay is not None
                channel.say({"ok": True})
                with contextlib.suppress(OSError):  # the relay has died: the rank that waits for it fails
                    hand_over(self._relay[1], channel.socket)
                channel.close("the relay has it")
            elif (
                hello["attempt"] > self._seen()
                and time.monotonic() < until
                and not channel.heard()
                and not channel.lost
            ):
                self._store_calls.append((channel, hello, until))
            else:
                channel.close("it belongs to another attempt")

    def _open_keeper(self) -> ReplicaKeeper | None:
        """The process for state of other nodes, started again where it has died; None where nothing is kept."""
        job = self._job
        if self._keeper is not None and not self._keeper.alive:
            self._end_keeper()
        if job is None or job.shared is None or not job.keeps or job.paths is None:
            return self._keeper
        run = self._run_of(job.paths)
        if self._keeper is not None and self._keeper.run != run:  # the run had no records yet when it was forked
            self._end_keeper()
        if self._keeper is None:
            self._keeper = ReplicaKeeper(job.shared, run, self.secret, self._replay_of)
        return self._keeper

    def _give_to_keeper(self, channel: Channel, writes: bool) -> None:
        keeper = self._open_keeper()
        if keeper is not None:
            channel.say({"ok": True})
            with contextlib.suppress(OSError):  # it has died: the rank that waits for it fails
                keeper.take(channel.socket, writes)
        channel.close("the keeper has it")

    def _end_keeper(self) -> None:
        """Have nothing more written here, before it is told what there is."""
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper = None

    def _run_of(self, paths: RunPaths) -> bytes:
        self._run = self._run or state_file.run_of(paths.events)
        return self._run

    def held(self) -> list[dict[str, Any]]:
        """What there is of the run's state in this node's memory, for the leader."""
        job = self._job
        if job is None or job.shared is None or job.paths is None:
            return []
        return held_to_message(inventory.held_in(job.shared, self._run_of(job.paths)))

    def _kept(self, shared: Path) -> Kept | None:
        """What an attempt begins with, as the order to start says; whatever else lies here is removed, but for replicas
        of use. What another node has of it, and ranks here will take as it is, is on its way from now on."""
        assert self.start is not None and self._job is not None
        me, attempt = self.circle.me.node, int(self.start["attempt"])
        for message in inventory.damage_in(shared):
            self._job.on_event(Kind.WARNING, {"attempt": attempt, "message": message})
        kept = kept_of(self.start, me, shared, self._address_of)
        own = {file.path for file in (kept.files if kept else ()) if file.address is None}
        inventory.remove_others(shared, own | {str(shared / name) for name in replicas_of_before(self.start, me)})
        for file in taken_from_others(self.start, me, kept):
            if kept is not None and file.address is not None and self._keeper is not None:
                self._keeper.fetch(file.path, file.address, kept.step, int(self.start["slots"]))
        return kept

    def _address_of(self, node: int) -> tuple[str, int]:
        """Where a member is called; who is gone by now is called in vain, and the attempt ends as it must."""
        member = self.circle.roster.member(node)
        return ("127.0.0.1", 1) if member is None else (member.address, member.port)

    def _seen(self) -> int:
        """The last attempt that has begun, or ended, here."""
        return max(self._running, int(self._last.get("attempt", 0)))

    def report(self, number: int, code: int, ends: list[End], lowered: bool = False) -> None:
        """Tell the leader how an attempt ended here."""
        ended = [dataclasses.asdict(end) for end in ends]
        self._last = {"attempt": number, "code": int(code), "ends": ended, "lowered": lowered}
        self.circle.tell(self.circle.roster.leader, {"ended": self._last, "held": self.held()})

    # ------------------------------------------------------------------------------------------------------- the loop

    def prepare(self, enough: Callable[[], bool]) -> None:
        """Make the job of a new offer, if there is one, and say that this node is ready. `enough` passes stop signals
        on, and says whether this node leaves now whatever becomes of the job."""
        while self.offer is not None and int(self.offer["division"]) != self._division:
            offer = self.offer

            def tend(offer: Message = offer) -> None:
                self.tend()
                if enough() or self._leaves() or self.offer is not offer:
                    raise Changed

            try:
                job = self._make(offer, tend)
            except Changed:
                if enough() or self._leaves():
                    return
                continue
            except PhalanxError as error:
                self.circle.tell(self.circle.roster.leader, {"unfit": str(error), "code": int(error.exit_code)})
                self.offer = None
                return
            self._job, self._division = job, int(offer["division"])
            self.say_ready()

    def expect_another(self) -> None:
        """Have what the next attempt needs, while the others end theirs and it is decided what becomes of the job."""
        if not self._leaves():
            self._open_keeper()

    def _leaves(self) -> bool:
        """Whether there is nothing more to do here: the job is over, or the others go on without this node."""
        return self.over is not None or self.circle.fenced is not None

    def say_ready(self) -> None:
        self._ready_unheard = self._alone()  # the next leader hears it, whose vote may be older
        self.circle.tell(self.circle.roster.leader, {"ready": self._division, "held": self.held()})

    def starting(self) -> tuple[int, Seat] | None:
        """The attempt that is to be started, and this node's seat in it, if it has one; once."""
        ordered, self.ordered = self.ordered, False
        if not ordered or self.circle.roster.leader in self.circle.lost:
            return None  # or by one who is lost
        assert self.start is not None
        seat = seat_of(self.start, self.circle.me.node)
        if seat is None or int(self.start["division"]) != self._division:
            if self._job is not None and self._job.shared is not None:
                self._kept(self._job.shared)
            self._run = b""
            self._open_keeper()  # for the time when this node takes the place of another
            self.early.close()
            return None
        return int(self.start["attempt"]), seat

    def job(self, seat: Seat) -> Job:
        """What this node runs in an attempt."""
        assert self._job is not None and self.start is not None
        seats = self.start["seats"]
        next_one = self.circle.roster.member(int(seats[(seat.slot + 1) % len(seats)]))
        partner = None if next_one is None or len(seats) == 1 else (next_one.address, next_one.port)
        world = sum(self.start["ranks"])
        part = Part(seat.slot, seat.first_rank, world, self._interface(), len(seats), partner, self.start["epoch"])
        return dataclasses.replace(
            self._job,
            world=seat.ranks,
            devices=list(self._job.devices)[: seat.ranks],
            part=part,
            others=self,
            kept=self._job.kept if self._job.shared is None else lambda: self._begins_with,
            on_event=functools.partial(self._note, self._job.on_event),
        )

    def _note(self, on_event: Callable[[str, dict[str, Any]], None], kind: str, details: dict[str, Any]) -> None:
        """Pass an event of this node's ranks on; the leader says itself what concerns all."""
        if self._leading is None or kind not in (Kind.WORKER_DIED, Kind.SIGNALLED):
            on_event(kind, details)

    def _interface(self) -> str | None:
        """The interface that leads to the other nodes."""
        if rendezvous.is_loopback(self.circle.me.address):
            return "lo"
        return next((name for name, address in rendezvous.interfaces() if address == self.circle.me.address), None)

    def close(self) -> None:
        """Leave; the last words of a leader are still said."""
        self.end()
        self.early.close()
        for channel, _, _ in self._store_calls:
            channel.close("this node has left")
        self._store_calls = []
        over = None if self._leading is None or self.circle.fenced is not None else self.over
        if self._leading is not None:
            self._leading.close(over)
        self.circle.close(None if over is None else {"finish": over[0], "text": over[1]})


def run(peer: Peer, grace_s: float, signals: Signals) -> int:
    """Run this node's part to the job's end and return its exit code; the words are in `peer.over`, or in
    `peer.circle.fenced` where this node had to leave the others.

    Ends workers and passes signals on as `agent.run` does. Raises as that does where this node is to blame.
    """
    deadline = math.inf

    def enough() -> bool:
        nonlocal deadline
        for asked in signals.take():
            peer.tell_stop(asked.name)
        if signals.asked:
            patience_s = LEAVE_S if signals.asked.count(signal.SIGINT) >= 2 else grace_s
            deadline = min(deadline, time.monotonic() + patience_s)
        return time.monotonic() > deadline

    while True:
        _wait(peer, signals)
        late = enough()
        if peer.over is not None:
            return peer.over[0]
        if peer.circle.fenced is not None or late:  # whom the others do without knows no better
            return int(ExitCode.STOPPED if peer.circle.fenced is None else ExitCode.FAILED)
        peer.prepare(enough)
        if (order := peer.starting()) is not None:
            _attempt(peer, *order, signals)


def _attempt(peer: Peer, number: int, seat: Seat, signals: Signals) -> None:
    job = peer.job(seat)
    attempt = Attempt(job, number, signals, peer.early)
    code, ends, lowered = int(ExitCode.FAILED), attempt.ends, False
    try:
        attempt.start()
        code = attempt.watch()
        lowered = code == ExitCode.OUT_OF_MEMORY and job.after_out_of_memory()
    finally:
        attempt.kill()
        peer.end()
        peer.report(number, code, ends, lowered)
    peer.tend()  # before anything else is done: the others may be waiting for what comes of it
    if code not in (ExitCode.DONE, ExitCode.STOPPED):
        peer.expect_another()


def _wait(peer: Peer, signals: Signals) -> None:
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    for descriptor, events in peer.descriptors().items():
        poll.register(descriptor, events)
    poll.poll(0 if peer.ordered or peer.circle.spoken else min(IDLE_S, peer.due_s()) * 1000)
    peer.tend()
