"""The coordinator of the leading agent: it passes events to the supervisor and carries out its decisions.

The next leader reconstructs one from the messages that every node received. Nothing here blocks: a new division is
prepared in a forked child.
"""

import select
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.elastic.membership import messages
from phalanx.elastic.membership.admission import explain_flood, find_mismatch
from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.heartbeat import MEET_S
from phalanx.elastic.membership.member_list import member_list_to_message, parse_member
from phalanx.elastic.membership.rendezvous_host import RendezvousHost
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.node.watchdog import JobHangDetector
from phalanx.elastic.supervisor.assignment import can_continue
from phalanx.elastic.supervisor.decide import SECONDARY_FAILURE, decide
from phalanx.elastic.supervisor.failover import (
    describe_restart_budget,
    make_node_state,
)
from phalanx.elastic.supervisor.leader_tasks import (
    DivisionPreparation,
    OpenIncident,
    Plan,
    find_failure_cause,
    find_first_death,
    list_events,
)
from phalanx.elastic.supervisor.node_requests import BY_HEALTH, NodeRequest, NodeRequestKind, find_newest_request
from phalanx.elastic.supervisor.state import (
    DropNode,
    EndAttempt,
    FinishJob,
    JobPhase,
    JobState,
    NodeDrainChanged,
    NodeInventoryReported,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NodeUnfit,
    PrepareDivision,
    RanksEnded,
    SendOffer,
    StartAttempt,
    StepsCommitted,
    StopSignalReceived,
    SupervisorAction,
    SupervisorEvent,
    Tick,
    WriteEvent,
)
from phalanx.recovery.catalog import inventory_from_message, restore_point_to_message
from phalanx.system.exit_causes import WorkerExit
from phalanx.system.fork import LEAVE_SIGNAL

DEATH_ANSWER_S = 2.0  # heartbeats: the time in which a dead holder of a claimed number is detected


class Coordinator:
    """The coordinator of a job. `prepare(division, plan, devices)` resolves the recipe for other ranks, in a child, and
    returns the offer; `notice(kind, details)` is for the records and the console; `take_committed_steps()` returns
    newly committed steps, and `take_node_requests()` users' requests to nodes; `hello` is this node's hello message.
    `unfit_reason`: why this node, the first leader, hands over to another one and leaves, as soon as all are connected.
    """

    def __init__(
        self,
        agent: NodeAgent,
        state: JobState,
        hello: Message,
        prepare: Callable[[int, Plan, list[list[Any]]], Message],
        notice: Callable[[str, dict[str, Any]], None],
        take_committed_steps: Callable[[], list[int]],
        take_node_requests: Callable[[], list[NodeRequest]],
        unfit_reason: str | None = None,
    ) -> None:
        self.agent, self.membership, self.state = agent, agent.membership, state
        self._prepare, self.notice = prepare, notice
        self._take_committed_steps, self._take_node_requests = take_committed_steps, take_node_requests
        self._requests: dict[str, NodeRequest] = {}  # by node as it was named; of nodes that are not there, too
        self._preparing: DivisionPreparation | None = None
        self._ends: dict[int, list[WorkerExit]] = {}  # of this attempt, by node
        self._why: dict[str, str] = {}  # why members were lost, by token
        self._hang_detector = JobHangDetector()
        self._interrupts, self._crowded = 0, False
        self._unfit_reason, self._meets_until = unfit_reason, time.monotonic() + MEET_S
        self._incident: OpenIncident | None = None
        # A new leader knows the roster before its own, and learns in its first turn who is gone.
        known = self.membership.previous_member_list or self.membership.member_list
        self._members = {member.node: member for member in known.members}
        if self.membership.previous_member_list is not None:
            self._begin_incident()
            for node, vote in self.membership.election.votes.items():
                # The voter's report of its ranks; one that did not receive the last order to start has none.
                now = time.monotonic()
                self.handle_event(NodeInventoryReported(now, node, inventory_from_message(vote["held"])))
                heard = bool(vote["last"]) and int(vote["last"]["attempt"]) == self.state.attempt
                last = vote["last"] if heard else {"attempt": self.state.attempt, "code": 1, "ends": []}
                self._hear_end(node, last, now)
        self.host = RendezvousHost(  # for joining nodes, until they are members
            lambda theirs: find_mismatch(theirs, hello, to_node_0=False), self._note, 0.05, self._find_holder,
            self._challenge,
        )  # fmt: skip

    def _note(self, kind: str, details: Mapping[str, Any]) -> None:
        """Tell of an event of this attempt."""
        self.notice(kind, {"attempt": max(self.state.attempt, 1), **details})

    def descriptors(self) -> Mapping[int, int]:
        """Descriptors for poll(), with their event masks."""
        found = self.host.descriptors()
        return found if self._preparing is None else found | {self._preparing.call.fileno(): select.POLLIN}

    def poll_once(self) -> None:
        """Run one turn without blocking."""
        if self._unfit_reason is not None:
            # A node without a connection to it would not see it leave, and would wait for its first heartbeat.
            if self.membership.is_fully_connected or time.monotonic() > self._meets_until:
                me, code = self.membership.me.node, int(ExitCode.UNHEALTHY)
                self.handle_event(NodeUnfit(time.monotonic(), me, self._unfit_reason, code))
            return
        for member, why in self.membership.losses:
            self._why[member.token] = why
            self._begin_incident()
            # Its ranks are lost with it: those of the others end while it is agreed on who is left.
            runs = self.state.phase == JobPhase.RUNNING or self.state.pause_reason is not None
            if runs and member.node in self.state.seats and member.node not in self.state.codes:
                self._tell_to_end(self.state.attempt, known=True)
        self.membership.losses.clear()
        if self.membership.adopted:
            self.membership.adopted.clear()
            self._compare()
        self._see_commits()
        self._see_requests()
        self._see_preparation()
        self._let_in()
        self._see_hangs()
        if self.membership.is_stable:
            self.handle_event(Tick(time.monotonic()))

    def _tell_to_end(self, attempt: int, known: bool) -> None:
        """End an attempt everywhere; `known`: the cause is known, so that no node waits for a rank to report it."""
        self.membership.broadcast({"end": attempt, "known": known})

    def close(self, over: tuple[int, str] | None) -> None:
        if self._preparing is not None:
            self._preparing.call.cancel()
            self._preparing = None
        # Or they would wait in vain for the current leader.
        self.host.close(None if over is None else {"finish": over[0], "text": over[1]})

    def _see_commits(self) -> None:
        for step in self._take_committed_steps():
            self.handle_event(StepsCommitted(time.monotonic(), step))

    def _see_requests(self) -> None:
        """Apply drain and return requests, which name a node or its host."""
        self._requests |= {request.node: request for request in self._take_node_requests()}
        for member in list(self._members.values()) if self._requests else ():
            request = find_newest_request(self._requests.values(), member.node, member.host)
            if request is not None:
                drained, gently = request.wanted != NodeRequestKind.RETURN, request.by.startswith(BY_HEALTH)
                done = "will be drained" if drained else "is no longer drained"
                why = f"node {member.node} ({member.host}) {done}" + (f" ({request.reason})" * bool(request.reason))
                self.handle_event(NodeDrainChanged(time.monotonic(), member.node, drained, why, gently))

    def _see_hangs(self) -> None:
        """Say which ranks of the attempt hang; their agents end them, and those of the others see where theirs are."""
        if self.state.phase == JobPhase.RUNNING:
            awaited = [node for node in self.state.seats if node not in self.state.codes]
            if (hang := self._hang_detector.find_hang(self.state.attempt, awaited)) is not None:
                rows = [astuple(blame) for blame in hang.assign_blame()]
                self.membership.broadcast({"hung": self.state.attempt, "ranks": rows})

    # ------------------------------------------------------------------------------------------------------- hearing

    def hear(self, node: int, message: messages.MessageRecord) -> None:
        """Handle a member's message."""
        now = time.monotonic()
        for event in list_events(node, message, now):
            self.handle_event(event)
        match message:
            case messages.EndedMessage():
                self._see_commits()  # steps committed since the last turn count
                self._hear_end(node, message.ended, now)
            case messages.ProgressMessage():
                self._hang_detector.add_report(node, message.pulses)
            case messages.StrangersMessage() if not self._crowded:
                self._crowded = True  # one line says it, wherever else they call
                self._note(EventKind.WARNING, {"message": explain_flood(message.strangers, node)})
            case messages.StopMessage():
                self._hear_stop(node, message, now)

    def _hear_stop(self, node: int, message: messages.StopMessage, now: float) -> None:
        if message.stop == LEAVE_SIGNAL.name:
            details = {"node": node, "host": self._members[node].host, "reason": message.reason or message.stop}
            self._note(EventKind.NODE_LEAVING, details)
            if can_continue(self.state, node):
                self.handle_event(NodeLeaving(now, node, str(details["reason"])))
                return
            message = messages.StopMessage(stop=message.stop, again=True)  # to all nodes, as none passed it on
        again = {"unless_written": True} if message.again else {}
        self._note(EventKind.STOP_REQUESTED, {"signal": message.stop, **again})
        # A node passes a request on to its ranks, but those of a later attempt do not know of it.
        self.membership.broadcast({"signal": message.stop}, but=None if again else node)
        self._interrupts += message.stop == "SIGINT"
        if self._interrupts >= 2:  # a second Ctrl-C
            self._tell_to_end(self.state.attempt, known=True)
        self.handle_event(StopSignalReceived(now, message.stop))

    def _hear_end(self, node: int, told: Message, now: float) -> None:
        if not told or int(told["attempt"]) != self.state.attempt or node in self._ends:
            return
        host = None if node == self.membership.me.node else self._members[node].host
        self._ends[node] = ends = [WorkerExit(**{**end, "host": host}) for end in told["ends"]]
        cause = find_failure_cause(told, ends)
        if cause is not None:
            self._begin_incident()
        interrupted = bool(told.get("interrupted"))
        self.handle_event(RanksEnded(now, node, int(told["attempt"]), int(told["code"]), cause, interrupted))

    def _begin_incident(self) -> None:
        if self._incident is None and self.state.phase in (JobPhase.RUNNING, JobPhase.ENDING):
            self._incident = OpenIncident()

    def handle_event(self, event: SupervisorEvent) -> None:
        """Decide, and carry out the actions."""
        before = self.state
        self.state, actions = decide(self.state, event)
        running = (JobPhase.RUNNING, JobPhase.ENDING)
        if before.phase in running and (self.state.phase not in running or self.state.attempt > before.attempt):
            gone = isinstance(event, NodeLost) and event.node in before.seats and event.node not in before.codes
            self._report_deaths(before, gone)
        for action in actions:
            self._perform(action)

    def _report_deaths(self, before: JobState, gone: bool) -> None:
        """Say which rank's end brought an attempt down, now that all are known; `gone`: with the last of them its
        node."""
        lost = gone or bool(self.state.lost_with_ranks) or bool(before.lost_with_ranks)
        details = find_first_death([end for each in self._ends.values() for end in each], lost)
        if details is None:
            return
        self.notice(EventKind.WORKER_DIED, {"attempt": before.attempt, **details})
        if self._incident is not None:
            where = details.get("host", self.membership.me.host)
            self._incident.what.append(f"rank {details['rank']} on {where}: {details['reason']}")

    # --------------------------------------------------------------------------------------------------------- members

    def _compare(self) -> None:
        """Report lost and new members of the new list to the supervisor."""
        now, member_list = time.monotonic(), self.membership.member_list
        before, self._members = self._members, {member.node: member for member in member_list.members}
        for node, member in before.items():
            if self._members.get(node) != member:
                why = self._why.pop(member.token, "it left")
                self._note(EventKind.NODE_LOST, {"node": node, "host": member.host, "reason": why})
                if self._incident is not None:
                    self._incident.mark("agreed")
                    self._incident.what.append(f"node {node} ({member.host}) was lost: {why}")
                self.handle_event(NodeLost(now, node, why))
        for node, member in self._members.items():
            if before.get(node) != member:
                self._note(EventKind.NODE_JOINED, {"node": node, "host": member.host, "ranks": len(member.devices)})
                self.host.dismiss({"roster": member_list_to_message(member_list)}, "it is a member now", [node])
                self.handle_event(NodeJoined(now, make_node_state(member)))

    def greet(self, channel: Channel, hello: Message) -> None:
        """Take a caller who is no member: a node that comes, or comes again."""
        self.host.greet(channel, hello)

    def _find_holder(self, node: int) -> str | None:
        """The holder of a number: a member, or a node that is about to be one and has lost its connection."""
        holder = self.membership.member_list.member(node) or self.membership.election.joining.get(node)
        return None if holder is None else f"a process on {holder.host}"

    def _challenge(self, node: int) -> float | None:
        """The time by which a dead member is detected; longer for a new one, until its first heartbeat."""
        if self.membership.member_list.member(node) is None:
            return None
        detector = self.membership.detector
        return max(time.monotonic(), detector.heard_at.get(node, 0.0)) + DEATH_ANSWER_S * detector.heartbeat_s

    def _let_in(self) -> None:
        for _, heard in self.host.poll_once():
            if isinstance(heard, dict):
                self.membership.admit(parse_member({**heard, **heard["at"]}))

    # --------------------------------------------------------------------------------------------------------- actions

    def _perform(self, action: SupervisorAction) -> None:
        match action:
            case EndAttempt(save_first=True):
                self.membership.broadcast({"pause": action.attempt})
            case EndAttempt():
                real = any(cause.priority < SECONDARY_FAILURE for cause in self.state.causes)
                self._tell_to_end(action.attempt, known=real or bool(self.state.lost_with_ranks))
            case PrepareDivision():
                if self._preparing is not None:
                    self._preparing.call.cancel()
                rows = [[list(each) for each in self._members[node].devices[:ranks]] for node, ranks in action.plan]
                self._preparing = DivisionPreparation(self._prepare, action, rows)
            case SendOffer():
                self.offer(action)
            case StartAttempt():
                self._start(action)
            case DropNode():
                if action.node == self.membership.me.node:
                    self._leave(action.code, action.why)
                else:
                    self.membership.send(action.node, {"dropped": action.why, "code": action.code})
                    self.membership.drop(action.node, action.why)
            case WriteEvent():
                self._note(action.kind, action.details)
            case FinishJob():
                self.agent.over = action.code, action.why

    def _leave(self, code: int, why: str) -> None:
        """This node can no longer take part: the others continue under another leader, if there are any."""
        self.agent.over = code, why
        if len(self.membership.live_nodes()) == 1:
            self._note(EventKind.GAVE_UP, {"reason": why})
        else:
            who = f"node {self.membership.me.node} ({self.membership.me.host}), the leader, leaves the run"
            self._note(EventKind.WARNING, {"message": f"{who}, because it can no longer take part: {why}"})
            self.membership.leave(why)

    def _see_preparation(self) -> None:
        if self._preparing is None:
            return
        if self.state.phase != JobPhase.PREPARING:  # another offer is in use: this one must not be sent
            self._preparing.call.cancel()
            self._preparing = None
        elif (event := self._preparing.poll_once()) is not None:
            self.agent.offer, self._preparing = self._preparing.offer or self.agent.offer, None
            self.handle_event(event)

    def offer(self, action: SendOffer) -> None:
        """Send the offer of a division to all other members, or to a new one."""
        offer = self.agent.offer
        if offer is None or int(offer["division"]) != action.division:
            return
        for node in self.membership.member_list.nodes if action.node is None else [action.node]:
            if node != self.membership.me.node:
                self.membership.send(node, {"offer": offer})

    def _start(self, action: StartAttempt) -> None:
        self._ends = {}
        order = {
            "attempt": action.attempt, "epoch": self.membership.member_list.epoch,
            "division": action.division, "seats": list(action.seats),
            "ranks": [slot.ranks for slot in self.state.slots],
            "step": action.step, "kept": None if action.kept is None else restore_point_to_message(action.kept),
            "budget": describe_restart_budget(self.state), "slots": 2 if self.state.policy.replicate_every == 1 else 3,
        }  # fmt: skip
        if self._incident is not None:
            incident, self._incident = self._incident, None
            self.notice(EventKind.INCIDENT, incident.details(self.state, action, self.agent.start))
        self.membership.broadcast({"start": order})
        if self.state.stop.signal is not None:  # its ranks only save: they do not know of the signal yet
            self.membership.broadcast({"signal": self.state.stop.signal})
