"""The rendezvous of a job's nodes before its first division, as a pure state machine: state and event to state and
actions.

Node 0 keeps the state, reports events and performs the actions (`meeting_host.py`); events and actions are those of
`decide.py`, which takes over from there. An event says when it happened.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.elastic.supervisor.state import (
    DivisionPrepared,
    FinishJob,
    Node,
    NodeInventoryReported,
    NodeJoined,
    NodeLost,
    NodeReady,
    NodeUnfit,
    SendOffer,
    StopSignalReceived,
    SupervisorAction,
    SupervisorEvent,
    Tick,
    WriteEvent,
)

NOTE_S = 60.0  # between two warnings that name nodes which are not ready


@dataclass(frozen=True)
class Meeting:
    """The state of the rendezvous: those of `total` nodes that have joined, with node 0. Up to `spares` nodes may be
    unfit; a node that is missing for longer than `timeout_s` ends the job."""

    total: int
    timeout_s: float
    nodes: tuple[Node, ...]
    spares: int = 0
    unfit: Mapping[int, str] = field(default_factory=dict)  # nodes that a spare replaces, and why
    division: int = 0  # of the last offer; 0: none yet
    since: float = 0.0  # when the first missing node was missed
    named: Sequence[int] = ()  # missing nodes that a warning has named
    note_at: float = math.inf
    over: bool = False

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined and are awaited."""
        here = {node.node for node in self.nodes}
        return [node for node in range(self.total) if node not in here and node not in self.unfit]

    @property
    def unready(self) -> list[int]:
        """Joined nodes, other than node 0, that are not ready for the last offer."""
        return [node.node for node in self.nodes if node.node and node.ready != self.division]


def decide_meeting(state: Meeting, event: SupervisorEvent) -> tuple[Meeting, list[SupervisorAction]]:
    """Decide on an event at the rendezvous: returns the new state and actions. FinishJob refuses or stops the job; for
    a stop the text is the signal's name. All can begin once no node is `missing` or `unready`."""
    known = next((node for node in state.nodes if node.node == getattr(event, "node", None)), None)
    match event:
        case _ if state.over:
            return state, []
        case NodeJoined(node=joined):
            others = [node for node in state.nodes if node.node != joined.node]
            nodes = tuple(sorted([*others, joined], key=lambda node: node.node))
            unfit = {node: why for node, why in state.unfit.items() if node != joined.node}  # it may have been repaired
            details = {"node": joined.node, "host": joined.host, "ranks": joined.ranks}
            said: list[SupervisorAction] = [WriteEvent(EventKind.NODE_JOINED, details)]
            if state.division:
                said.append(SendOffer(state.division, joined.node))
            return replace(state, nodes=nodes, unfit=unfit), said
        case NodeLost() if known is not None:
            since = state.since if state.missing else event.now
            nodes = tuple(node for node in state.nodes if node is not known)
            details = {"node": known.node, "host": known.host, "reason": event.why}
            return replace(state, nodes=nodes, since=since), [WriteEvent(EventKind.NODE_LOST, details)]
        case NodeReady() if known is not None:
            return _with(state, replace(known, ready=event.division)), []
        case NodeInventoryReported() if known is not None:
            return _with(state, replace(known, held=event.held)), []
        case NodeUnfit() if known is not None:
            return _on_unfit(state, event, known)
        case StopSignalReceived():
            return _end(state, ExitCode.STOPPED, event.signal)
        case DivisionPrepared():
            note_at = event.now + NOTE_S
            return replace(state, division=event.division, note_at=note_at), [SendOffer(event.division)]
        case Tick():
            return _on_tick(state, event.now)
    return state, []


def _with(state: Meeting, changed: Node) -> Meeting:
    return replace(state, nodes=tuple(changed if node.node == changed.node else node for node in state.nodes))


def _on_unfit(state: Meeting, event: NodeUnfit, known: Node) -> tuple[Meeting, list[SupervisorAction]]:
    """Exclude an unhealthy node where a spare, and another node besides node 0, is left."""
    first = known.node == 0
    others = {node.node for node in state.nodes} - set(state.unfit) - {0, known.node}
    if event.code == ExitCode.UNHEALTHY and len(state.unfit) < state.spares and others:
        said: list[SupervisorAction] = []
        if first:
            text = f"{event.why}; this is node 0, which connects all nodes, so a spare replaces it"
            said = [WriteEvent(EventKind.WARNING, {"message": text})]
        return replace(state, unfit={**state.unfit, known.node: event.why}), said
    why = event.why if first else f"node {known.node} ({known.host}): {event.why}"
    if first and state.total > 1:
        why += (
            "; this is node 0, which all nodes wait for, and there is no spare: start its command on "
            "another machine, or restart all nodes with --spares 1 and one more node (and replace in "
            "resilience.on_lost_node)"
        )
    return _end(state, ExitCode.UNHEALTHY if event.code == ExitCode.UNHEALTHY else ExitCode.CONFIG, why)


def _on_tick(state: Meeting, now: float) -> tuple[Meeting, list[SupervisorAction]]:
    if state.missing and now > state.since + state.timeout_s:
        why = (
            f"{name_nodes(state.missing)} of {state.total} did not arrive within {state.timeout_s:g} s; run the same "
            "command there with its --node-rank, or raise --rendezvous-timeout"
        )
        return _end(state, ExitCode.FAILED, why)
    if state.missing and state.missing != state.named:
        text = f"waiting for {name_nodes(state.missing)} (up to {state.timeout_s:g} s)"
        return replace(state, named=state.missing), [WriteEvent(EventKind.WARNING, {"message": text})]
    if state.unready and now > state.note_at:
        text = f"waiting for {name_nodes(state.unready)} to get ready; see their output for what they are doing"
        return replace(state, note_at=now + NOTE_S), [WriteEvent(EventKind.WARNING, {"message": text})]
    return state, []


def _end(state: Meeting, code: ExitCode, why: str) -> tuple[Meeting, list[SupervisorAction]]:
    return replace(state, over=True), [FinishJob(int(code), why)]


def name_nodes(nodes: list[int]) -> str:
    """Nodes in a sentence."""
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
