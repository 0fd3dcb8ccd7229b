"""What the leading agent does beside its own part: it tells the supervisor of events, and does what that decides.

Whoever leads next makes one of these from what every node was told. Nothing here waits: a new division is
prepared in a forked child.
"""

import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.events import Kind
from phalanx.core.placement import ExitCode
from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.handshake import crowd, objection, taken
from phalanx.elastic.membership.member_list import member_of, roster_to_message
from phalanx.elastic.membership.membership import MEET_S
from phalanx.elastic.node.node_agent import Peer
from phalanx.elastic.supervisor.decide import AFTERMATH, decide
from phalanx.elastic.supervisor.failover import beginning_state, budget_of, node_of, succeeding_state, taken_up
from phalanx.elastic.supervisor.hang_detection import Gathering
from phalanx.elastic.supervisor.node_requests import BY_HEALTH, Request, Wanted, newest_of
from phalanx.elastic.supervisor.state import (
    Action,
    Asked,
    Cause,
    Drained,
    Drop,
    End,
    Ended,
    Event,
    Finish,
    Holds,
    Joined,
    Lost,
    Note,
    Offer,
    Phase,
    Prepare,
    Prepared,
    Progress,
    Ready,
    Refused,
    Start,
    State,
    Time,
    Unfit,
)
from phalanx.recovery.catalog import Held, choice_to_message, held_of
from phalanx.system.async_call import Errand
from phalanx.system.exit_causes import End as RankEnd
from phalanx.system.exit_causes import first_cause, is_aftermath, is_damage, sameness, suspicion

PREPARE_S = 3600.0  # what resolving another division gets: token files may have to be made anew
DEATH_ANSWER_S = 2.0  # heartbeats: what a holder of a place gets to be found dead when somebody claims it
Plan = Sequence[tuple[int, int]]


class Leader:
    """`prepare(division, plan, devices)` resolves the recipe for other ranks, in a child, and returns what is offered;
    `notice(kind, details)` is for the records and the console; `safe()` gives steps that have become safe, and
    `asked()` what users ask of nodes; `hello` is what this node would say of itself. `unfit`: why this one, the first
    to lead, hands the lead to another one and leaves, as soon as all can hear of it."""

    def __init__(
        self,
        peer: Peer,
        state: State,
        hello: Message,
        prepare: Callable[[int, Plan, list[list[Any]]], Message],
        notice: Callable[[str, dict[str, Any]], None],
        safe: Callable[[], list[int]],
        asked: Callable[[], list[Request]],
        unfit: str | None = None,
    ) -> None:
        self.peer, self.circle, self.state, self.hello = peer, peer.circle, state, hello
        self._prepare, self.notice, self._safe, self._asked = prepare, notice, safe, asked
        self._requests: dict[str, Request] = {}  # by node as it was named; of nodes that are not there, too
        self._preparing: tuple[Errand, int] | None = None
        self._ends: dict[int, list[RankEnd]] = {}  # of this attempt, by node
        self._why: dict[str, str] = {}  # why members were lost, by token
        self._pulses = Gathering()
        self._interrupts = 0
        self._crowded = False
        self._unfit, self._meets_until = unfit, time.monotonic() + MEET_S
        self._incident: dict[str, Any] | None = None
        # A new leader knows the roster before its own, and learns in its first turn who is gone.
        known = self.circle.before or self.circle.roster
        self._members = {member.node: member for member in known.members}
        if self.circle.before is not None:
            self._begin_incident()
            for node, vote in self.circle.votes.items():
                self._hear_vote(node, vote)
        self._claimants: list[tuple[Channel, Message, float]] = []
        self._welcome: dict[str, tuple[int, Channel]] = {}  # by token, with their numbers, until they are members

    def descriptors(self) -> Mapping[int, int]:
        """What poll() has to look at, and for what."""
        found = {channel.fileno(): select.POLLIN for channel, _, _ in self._claimants if channel.lost is None}
        return found if self._preparing is None else found | {self._preparing[0].fileno(): select.POLLIN}

    def tend(self) -> None:
        """Do all that can be done without waiting."""
        if self._unfit is not None:
            # Whoever has no connection to it yet would not see it leave, and would wait for its first sign of life.
            if self.circle.met or time.monotonic() > self._meets_until:
                self.event(Unfit(time.monotonic(), self.circle.me.node, self._unfit, int(ExitCode.UNHEALTHY)))
            return
        for member, why in self.circle.losses:
            self._why[member.token] = why
            self._begin_incident()
            self._end_without(member.node)
        self.circle.losses.clear()
        adopted = bool(self.circle.adopted)
        self.circle.adopted.clear()
        if adopted:
            self._compare()
        for step in self._safe():
            self.event(Progress(time.monotonic(), step))
        self._see_requests()
        self._see_preparation()
        self._see_claimants()
        self._see_hangs()
        if self.circle.settled:
            self.event(Time(time.monotonic()))

    def _end_without(self, node: int) -> None:
        """A node is lost, and its ranks with it: those of the others end while it is agreed on who is left. What then
        becomes of the job is decided when that is known."""
        runs = self.state.phase == Phase.RUNNING or self.state.planned is not None
        if runs and node in self.state.seats and node not in self.state.codes:
            self._tell_to_end(self.state.attempt, known=True)

    def _tell_to_end(self, attempt: int, known: bool) -> None:
        """Have an attempt end everywhere; `known`: why, so that nobody waits for a rank that might say it."""
        self.circle.tell_all({"end": attempt, "known": known})

    def close(self, over: tuple[int, str] | None) -> None:
        if self._preparing is not None:
            self._preparing[0].cancel()
            self._preparing = None
        welcome = (channel for _, channel in self._welcome.values())
        for channel in [*(claimant[0] for claimant in self._claimants), *welcome]:
            if over is not None:  # or it would wait in vain for whoever leads now
                channel.farewell({"finish": over[0], "text": over[1]}, "the job is over", patience_s=0.05)
            channel.close("this node has left")

    def _see_requests(self) -> None:
        """Nodes that are not to be used any more, or are to be used again; whoever asks names a node or its host."""
        self._requests |= {request.node: request for request in self._asked()}
        for member in list(self._members.values()) if self._requests else ():
            request = newest_of(self._requests.values(), member.node, member.host)
            if request is not None:
                drained = request.wanted != Wanted.RETURN
                done = "is to be left" if drained else "may be used again"
                why = f"node {member.node} ({member.host}) {done}" + (f" ({request.reason})" * bool(request.reason))
                gently = request.by.startswith(BY_HEALTH)
                self.event(Drained(time.monotonic(), member.node, drained, why, gently))

    def _see_hangs(self) -> None:
        """Say which ranks of the attempt hang; their agents end them, and those of the others see where theirs are."""
        if self.state.phase == Phase.RUNNING:
            awaited = [node for node in self.state.seats if node not in self.state.codes]
            hang = self._pulses.judge(self.state.attempt, awaited)
            if hang is not None:
                rows = [astuple(blame) for blame in hang.blamed()]
                self.circle.tell_all({"hung": self.state.attempt, "ranks": rows})

    # ------------------------------------------------------------------------------------------------------- hearing

    def hear(self, node: int, message: Message) -> None:
        """Take what a member says."""
        now = time.monotonic()
        if "held" in message:
            self.event(Holds(now, node, held_of(message["held"])))
        if "ended" in message:
            self._hear_end(node, message["ended"], now)
        elif "ready" in message:
            self.event(Ready(now, node, int(message["ready"])))
        elif "unfit" in message:
            self.event(Unfit(now, node, str(message["unfit"]), int(message["code"])))
        elif "pulses" in message:
            self._pulses.hear(node, message["pulses"])
        elif "strangers" in message and not self._crowded:
            self._crowded = True  # one line says it, wherever else they call
            said = crowd(str(message["strangers"]), node)
            self.notice(Kind.WARNING, {"attempt": max(self.state.attempt, 1), "message": said})
        elif "stop" in message:
            again = {"again": True} if message.get("again") else {}
            self.notice(Kind.SIGNALLED, {"attempt": max(self.state.attempt, 1), "signal": message["stop"], **again})
            # Who was asked passes it on to its own ranks, but those of an attempt that has begun since know of nothing.
            self.circle.tell_all({"signal": str(message["stop"])}, but=None if again else node)
            self._interrupts += message["stop"] == "SIGINT"
            if self._interrupts >= 2:  # whoever sits there has no patience any more
                self._tell_to_end(self.state.attempt, known=True)
            self.event(Asked(now, str(message["stop"])))

    def _hear_end(self, node: int, told: Message, now: float) -> None:
        if not told or int(told["attempt"]) != self.state.attempt or node in self._ends:
            return
        member = self._members[node]
        host = None if node == self.circle.me.node else member.host
        ends = [_end(end, host) for end in told["ends"]]
        self._ends[node] = ends
        abnormal = [end for end in ends if end.abnormal]
        cause = None
        if abnormal:
            first = first_cause(abnormal)
            code = 1 if first.exit_code is None else first.exit_code
            if told["code"] == ExitCode.STOPPED:  # it was asked to stop, and could not heed that yet
                code = int(ExitCode.STOPPED)
            cause = Cause(suspicion(first), code, sameness(first), bool(told.get("lowered")), is_damage(first))
            self._begin_incident()
        self.event(Ended(now, node, int(told["attempt"]), int(told["code"]), cause))

    def _hear_vote(self, node: int, vote: Message) -> None:
        """Take what a voter said of its ranks; one that the last order to start has not reached has none."""
        self.event(Holds(time.monotonic(), node, held_of(vote["held"])))
        last = vote["last"]
        if not last or int(last["attempt"]) != self.state.attempt:
            last = {"attempt": self.state.attempt, "code": 1, "ends": []}
        self._hear_end(node, last, time.monotonic())

    def _begin_incident(self) -> None:
        if self._incident is None and self.state.phase in (Phase.RUNNING, Phase.ENDING):
            self._incident = {"began": time.time(), "what": [], "phases": {}}

    def _mark(self, phase: str) -> None:
        """Note how long after a failure was seen something is done about it."""
        if self._incident is not None:
            self._incident["phases"][phase] = round(time.time() - self._incident["began"], 3)

    def event(self, event: Event) -> None:
        """Decide, and do what was decided."""
        before = self.state
        self.state, actions = decide(self.state, event)
        running = (Phase.RUNNING, Phase.ENDING)
        if before.phase in running and (self.state.phase not in running or self.state.attempt > before.attempt):
            gone = isinstance(event, Lost) and event.node in before.seats and event.node not in before.codes
            self._report_deaths(before, gone)
        for action in actions:
            self._perform(action)

    def _report_deaths(self, before: State, gone: bool) -> None:
        """Say which rank's end brought an attempt down, now that all are known; `gone`: with the last of them its
        node."""
        ends = [end for each in self._ends.values() for end in each if end.abnormal]
        lost = gone or bool(self.state.gone) or bool(before.gone)
        if not ends or (lost and all(is_aftermath(end) for end in ends)):
            return
        details = first_cause(ends).details()
        self.notice(Kind.WORKER_DIED, {"attempt": before.attempt, **details})
        if self._incident is not None:
            where = details.get("host", self.circle.me.host)
            self._incident["what"].append(f"rank {details['rank']} on {where}: {details['reason']}")

    # --------------------------------------------------------------------------------------------------------- members

    def _compare(self) -> None:
        """Tell the supervisor who has gone and who has come with the new roster."""
        now, roster = time.monotonic(), self.circle.roster
        before, self._members = self._members, {member.node: member for member in roster.members}
        for node, member in before.items():
            if self._members.get(node) != member:
                why = self._why.pop(member.token, "it has left")
                details = {"node": node, "host": member.host, "reason": why}
                self.notice(Kind.NODE_LOST, {"attempt": max(self.state.attempt, 1), **details})
                self._mark("agreed")
                if self._incident is not None:
                    self._incident["what"].append(f"node {node} ({member.host}) was lost: {why}")
                self.event(Lost(now, node, why))
        for node, member in self._members.items():
            if before.get(node) != member:
                details = {"node": node, "host": member.host, "ranks": len(member.devices)}
                self.notice(Kind.NODE_JOINED, {"attempt": max(self.state.attempt, 1), **details})
                _, channel = self._welcome.pop(member.token, (node, None))
                if channel is not None:
                    channel.farewell({"roster": roster_to_message(roster)}, "it is a member now", patience_s=0.05)
                self.event(Joined(now, node_of(member)))

    def greet(self, channel: Channel, hello: Message) -> None:
        """Take a caller who is no member: a node that comes, or comes again."""
        wrong = objection(hello, self.hello, to_node_0=False)
        try:
            member = member_of({**hello, **hello["at"]})
        except (KeyError, TypeError, ValueError):
            wrong, member = wrong or "a node sent a greeting that makes no sense", self.circle.me
        if wrong is not None:
            self.notice(Kind.WARNING, {"attempt": max(self.state.attempt, 1), "message": wrong})
            channel.farewell({"refused": wrong}, wrong, patience_s=0.05)
        elif self.circle.roster.member(member.node) is None and not self._is_welcome(member.node):
            self._welcome[member.token] = member.node, channel
            self.circle.admit(member)
        else:  # it may be that node, started again, and the one that is known may be gone without a word
            # Who has just become a member has longer until its first sign of life, and may have died before that.
            heard_at = max(time.monotonic(), self.circle.heard_at.get(member.node, 0.0))
            until = heard_at + DEATH_ANSWER_S * self.circle.heartbeat_s
            self._claimants.append((channel, hello, until))

    def _is_welcome(self, node: int) -> bool:
        """Whether somebody of that number is about to be a member."""
        return any(number == node for number, _ in self._welcome.values())

    def _see_claimants(self) -> None:
        waiting, self._claimants = self._claimants, []
        for channel, hello, until in waiting:
            holder = self.circle.roster.member(hello["node"])
            if holder is None:
                self.greet(channel, hello)
            elif time.monotonic() < until:
                self._claimants.append((channel, hello, until))
            else:
                why = taken(holder.node, f"a process on {holder.host}", hello)
                self.notice(Kind.WARNING, {"attempt": max(self.state.attempt, 1), "message": why})
                channel.farewell({"refused": why}, "its place is taken", patience_s=0.05)

    # --------------------------------------------------------------------------------------------------------- actions

    def _perform(self, action: Action) -> None:
        match action:
            case End(saving=True):
                self.circle.tell_all({"pause": action.attempt})
            case End():
                real = any(cause.suspicion < AFTERMATH for cause in self.state.causes)
                self._tell_to_end(action.attempt, known=real or bool(self.state.gone))
            case Prepare():
                self._begin_preparing(action)
            case Offer():
                self.offer(action)
            case Start():
                self._start(action)
            case Drop():
                if action.node == self.circle.me.node:
                    self._leave(action.code, action.why)
                else:
                    self.circle.tell(action.node, {"dropped": action.why, "code": action.code})
                    self.circle.drop(action.node, action.why)
            case Note():
                self.notice(action.kind, {"attempt": max(self.state.attempt, 1), **action.details})
            case Finish():
                self._finish(action.code, action.why)

    def _finish(self, code: int, why: str) -> None:
        if code == ExitCode.FAILED:
            self.notice(Kind.GAVE_UP, {"attempt": max(self.state.attempt, 1), "reason": why})
        self.peer.over = code, why

    def _leave(self, code: int, why: str) -> None:
        """This node cannot take part any more: the others go on under another leader, if there are any."""
        if len(self.circle.living()) == 1:
            self._finish(code, why)
        else:
            host, number = self.circle.me.host, self.circle.me.node
            said = f"node {number} ({host}), which led, leaves the others, as it cannot take part any more: {why}"
            self.notice(Kind.WARNING, {"attempt": max(self.state.attempt, 1), "message": said})
            self.peer.over = code, why
            self.circle.leave(why)

    def _begin_preparing(self, action: Prepare) -> None:
        if self._preparing is not None:
            self._preparing[0].cancel()
        devices = [[list(device) for device in self._members[node].devices[:ranks]] for node, ranks in action.plan]
        errand = Errand(self._prepare, action.division, list(action.plan), devices, timeout_s=PREPARE_S)
        self._preparing = errand, action.division

    def _see_preparation(self) -> None:
        if self._preparing is None:
            return
        errand, division = self._preparing
        if self.state.phase != Phase.PREPARING:  # another one is gone on with: nobody may be offered this
            errand.cancel()
            self._preparing = None
            return
        now = time.monotonic()
        try:
            result = errand.result()
        except (PhalanxError, RuntimeError) as error:
            self._preparing = None
            self.event(Refused(now, division, str(error)))
            return
        if result is not None:
            self._preparing = None
            self.peer.offer = result[0]
            self.event(Prepared(now, division))

    def offer(self, action: Offer) -> None:
        """Tell all other members what a division needs, or the one that has come."""
        offer = self.peer.offer
        if offer is None or int(offer["division"]) != action.division:
            return
        for node in self.circle.roster.nodes if action.node is None else [action.node]:
            if node != self.circle.me.node:
                self.circle.tell(node, {"offer": offer})

    def _start(self, action: Start) -> None:
        ranks = [slot.ranks for slot in self.state.slots]
        self._ends = {}
        order = {
            "attempt": action.attempt, "epoch": self.circle.roster.epoch,
            "division": action.division, "seats": list(action.seats), "ranks": ranks,
            "step": action.step, "kept": None if action.kept is None else choice_to_message(action.kept),
            "budget": budget_of(self.state), "slots": 2 if self.state.policy.replicate_every == 1 else 3,
        }  # fmt: skip
        if self._incident is not None:
            self._end_incident(action)
        self.circle.tell_all({"start": order})

    def _end_incident(self, action: Start) -> None:
        assert self._incident is not None
        what = "; ".join(dict.fromkeys(self._incident["what"])) or "the attempt failed"
        before = self.peer.start
        done = "all ranks start again"
        if before is not None and before["division"] != action.division:
            world = sum(slot.ranks for slot in self.state.slots)
            done = f"the ranks are divided anew over {_nodes(action.seats)}: {world} now"
        elif before is not None and list(action.seats) != before["seats"]:
            pairs = [(old, new) for old, new in zip(before["seats"], action.seats, strict=True) if old != new]
            done = ", ".join(f"node {new} takes the ranks of node {old}" for old, new in pairs)
        if action.again:
            steps = "step is" if action.again == 1 else "steps are"
            done += (
                f"; {action.again} committed {steps} walked again, from step {action.step}, as the state is kept on a "
                f"second node every {self.state.policy.replicate_every} steps"
            )
        self._mark("ordered")
        details = {"attempt": action.attempt, "what": what, "done": done}
        details |= {name: self._incident[name] for name in ("began", "phases")}
        self._incident = None
        self.notice(Kind.INCIDENT, details)


def take_lead(
    peer: Peer,
    hello: Message,
    attempt: int,
    committed: int,
    prepare: Callable[[int, Plan, list[list[Any]]], Message],
    notice: Callable[[str, dict[str, Any]], None],
    safe: Callable[[], list[int]] = list,
    asked: Callable[[], list[Request]] = list,
    held: Mapping[int, tuple[Held, ...]] | None = None,
    unfit: str | None = None,
) -> Leader:
    """Lead from now on: a job that begins with `attempt` from the step `committed`, or from a newer one that nodes have
    `held` in their memories since a job before; or what its leader has left. `unfit`: why this node, the first one,
    only hands the lead to another one and leaves."""
    circle, offered = peer.circle, peer.offer
    assert offered is not None, "who was offered nothing has not been let in"
    if circle.before is None:
        state = beginning_state(offered, circle.roster, attempt, committed, held or {})
        return Leader(peer, state, hello, prepare, notice, safe, asked, unfit)
    peer.offer = taken_up(offered, peer.start, circle.votes)
    state = succeeding_state(peer.offer, peer.start, circle.before, circle.votes, attempt)
    leader = Leader(peer, state, hello, prepare, notice, safe, asked)
    if peer.offer is not offered:
        leader.offer(Offer(state.division))
    return leader


def _nodes(seats: Sequence[int]) -> str:
    return f"node{'s' if len(seats) > 1 else ''} {', '.join(map(str, seats))}"


def _end(tree: Message, host: str | None) -> RankEnd:
    return RankEnd(tree["rank"], tree["pid"], tree["signal"], tree["exit_code"], tree["cause"], host)
