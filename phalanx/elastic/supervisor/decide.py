"""The supervisor's decisions for a multi-node job: a pure function from a state and an event to state and actions.

The leader's agent keeps the state, tells of events and carries the actions out (`coordinator.py`). No clock, no files:
an event says when it happened. A spare that takes the seat of a lost node leaves the division, and so every bit, as it
is; with fewer or more nodes the work is redistributed, prepared and agreed on like a first start.
"""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.elastic.supervisor import assignment
from phalanx.elastic.supervisor.saved_steps import (
    count_replayed_steps,
    describe_lost_state,
    find_in_memory_step,
    has_unsaved_step,
)
from phalanx.elastic.supervisor.state import (
    Decision,
    DivisionPrepared,
    DivisionRejected,
    DropNode,
    EndAttempt,
    FailureCause,
    FinishJob,
    JobPhase,
    JobState,
    Node,
    NodeDrainChanged,
    NodeInventoryReported,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NodeReady,
    NodeSlot,
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
from phalanx.system.exit_causes import FROM_ELSE

COLLECT_S = 15.0  # time for a node to end its ranks; its agent kills them in less
READY_S = 3600.0  # limit for a node to prepare a division: it may have to make token files
PAUSE_S = (0.0, 0.5, 2.0, 10.0, 30.0)  # before the first, second, ... attempt in a row that follows no progress
NEAR_STEPS = 2  # further than the last time: a mistake that lets so few through each time is still the same
SECONDARY_FAILURE = 2  # causes of that suspicion or more are consequences of others (exit_causes.py)


def decide(state: JobState, event: SupervisorEvent) -> Decision:
    """Apply an event to a state; returns the new state and the actions."""
    if state.phase == JobPhase.OVER:
        return state, []
    match event:
        case RanksEnded():
            return _on_ranks_ended(state, event)
        case NodeLost():
            return _on_node_lost(state, event)
        case NodeJoined():
            others = tuple(node for node in state.nodes if node.node != event.node.node)
            # At once, also while another division is prepared: it may have to lead before that is there.
            warned = assignment.describe_misfit(state, event.node)
            misfit = [] if warned is None else [WriteEvent(EventKind.WARNING, {"message": warned})]
            return replace(state, nodes=(*others, event.node)), [*misfit, SendOffer(state.division, event.node.node)]
        case NodeReady():
            return _on_node_ready(state, event)
        case NodeInventoryReported():
            # A node that joins while ranks run has older state, which is stale if they return to an earlier step.
            if state.phase == JobPhase.RUNNING and event.node not in state.seats:
                return state, []
            nodes = tuple(replace(n, held=event.held) if n.node == event.node else n for n in state.nodes)
            return replace(state, nodes=nodes), []
        case NodeUnfit():
            return state, [DropNode(event.node, event.why, event.code)]
        case DivisionPrepared():
            return _on_division_prepared(state, event)
        case DivisionRejected():
            if state.phase != JobPhase.PREPARING or event.division != state.division + 1:
                return state, []
            said: list[SupervisorAction] = [
                WriteEvent(EventKind.WARNING, {"message": f"the work was not redistributed: {event.why}"})
            ]
            state = replace(state, refused=state.refused | {state.plan}, phase=JobPhase.IDLE, plan=())
            return _and(said, _regroup(state, event.now))
        case StepsCommitted():
            return replace(state, committed=max(state.committed, event.step)), []
        case StopSignalReceived():
            state = replace(state, stop=replace(state.stop, signal=state.stop.signal or event.signal))
            if state.phase in (JobPhase.RUNNING, JobPhase.ENDING):
                return state, []  # the ranks hear of it too, and end
            if state.phase == JobPhase.READYING and has_unsaved_step(state) and not state.stop.saving:
                # What a failure has left in memory is saved first.
                return replace(state, stop=replace(state.stop, saving=True)), []
            return _finish(state, ExitCode.STOPPED, f"stopped by {state.stop.signal}")
        case NodeLeaving():
            return _on_node_leaving(state, event)
        case NodeDrainChanged():
            return _on_drain_changed(state, event)
        case Tick():
            return _on_tick(state, event.now)


def _on_ranks_ended(state: JobState, event: RanksEnded) -> Decision:
    current = state.phase in (JobPhase.RUNNING, JobPhase.ENDING) and event.attempt == state.attempt
    if not current or event.node not in state.seats or event.node in state.codes:
        return state, []
    causes = state.causes if event.cause is None else (*state.causes, event.cause)
    codes, interrupted = {**state.codes, event.node: event.code}, state.stop.interrupted or event.interrupted
    state = replace(state, codes=codes, causes=causes, stop=replace(state.stop, interrupted=interrupted))
    ends: list[SupervisorAction] = []
    if event.code not in (ExitCode.DONE, ExitCode.STOPPED):
        state, ends = _broken(state, event.now)
    elif event.cause is not None or event.interrupted:  # ranks ended before they could save: others wait for them
        state, ends = replace(state, phase=JobPhase.ENDING, since=event.now), [EndAttempt(state.attempt)]
    return _and(ends, _if_over(state, event.now))


def _broken(state: JobState, now: float) -> Decision:
    """An attempt has failed: end it everywhere at once (once), also where it was asked to save."""
    ends_already = state.pause_reason is None or any(cause.code == ExitCode.STOPPED for cause in state.causes)
    if state.phase == JobPhase.ENDING and ends_already:
        return state, []
    return replace(state, phase=JobPhase.ENDING, since=now, pause_reason=None), [EndAttempt(state.attempt)]


def _on_node_lost(state: JobState, event: NodeLost) -> Decision:
    lost = state.node(event.node)
    if lost is None:
        return state, []
    state = replace(state, nodes=tuple(node for node in state.nodes if node.node != event.node))
    seated = event.node in state.seats
    if state.phase in (JobPhase.RUNNING, JobPhase.ENDING) and seated and event.node not in state.codes:
        state, ends = _broken(replace(state, lost_with_ranks=(*state.lost_with_ranks, event.node)), event.now)
        return _and(ends, _if_over(state, event.now))
    if state.phase in (JobPhase.RUNNING, JobPhase.ENDING):
        return _if_over(state, event.now)
    if (state.phase == JobPhase.READYING and seated) or _is_prepared_for(state, event.node):
        return _regroup(replace(state, phase=JobPhase.IDLE, plan=()), event.now)
    return state, []


def _is_prepared_for(state: JobState, node: int) -> bool:
    """Whether a division is being prepared in which a node has a seat."""
    return state.phase == JobPhase.PREPARING and any(planned == node for planned, _ in state.plan)


def _on_node_ready(state: JobState, event: NodeReady) -> Decision:
    known = state.node(event.node)
    if known is None:
        return state, []
    ready = replace(known, ready=event.division)
    state = replace(state, nodes=tuple(ready if node is known else node for node in state.nodes))
    if state.phase == JobPhase.READYING:
        return _start_if_ready(state, event.now)
    if state.phase == JobPhase.IDLE:
        return _regroup(state, event.now)
    if state.phase == JobPhase.RUNNING and event.division == state.division and assignment.plan_growth(state):
        return _pause(state, event.now, f"node {event.node} is back")
    return state, []


def _on_division_prepared(state: JobState, event: DivisionPrepared) -> Decision:
    if state.phase != JobPhase.PREPARING or event.division != state.division + 1:
        return state, []
    models = {node.node: node.model for node in state.nodes}
    slots = tuple(NodeSlot(ranks, models[node]) for node, ranks in state.plan)
    seats = tuple(node for node, _ in state.plan)
    state = replace(state, division=event.division, slots=slots, seats=seats, plan=())
    return _and([SendOffer(event.division)], _ready_to_start(state, event.now))


def _on_drain_changed(state: JobState, event: NodeDrainChanged) -> Decision:
    known = state.node(event.node)
    if known is None or known.drained == event.drained:
        return state, []
    seated = event.node in state.seats
    if event.drained and event.only_if_spare and seated and not assignment.has_stand_in(state, event.node):
        return state, []
    changed = replace(known, drained=event.drained)
    state = replace(state, nodes=tuple(changed if node is known else node for node in state.nodes))
    if state.phase == JobPhase.RUNNING and (
        (event.drained and seated) or (not event.drained and assignment.plan_growth(state))
    ):
        return _pause(state, event.now, event.why)
    to_be_left = event.drained and (
        (state.phase == JobPhase.READYING and seated) or _is_prepared_for(state, event.node)
    )
    if state.phase == JobPhase.IDLE or to_be_left:
        return _regroup(replace(state, phase=JobPhase.IDLE, plan=()), event.now)
    return state, []


def _on_node_leaving(state: JobState, event: NodeLeaving) -> Decision:
    """A node's machine will soon be gone, and the run continues without it. Ranks there save first."""
    known = state.node(event.node)
    if known is None or known.leaving:
        return state, []
    changed = replace(known, leaving=True, drained=True)
    state = replace(state, nodes=tuple(changed if node is known else node for node in state.nodes))
    if state.phase == JobPhase.RUNNING and event.node in state.seats:
        return _pause(state, event.now, f"node {event.node} ({known.host}) leaves ({event.why})")
    if state.phase in (JobPhase.RUNNING, JobPhase.ENDING) and event.node not in state.seats:
        nodes = tuple(node for node in state.nodes if not node.leaving)
        return replace(state, nodes=nodes), _let_go([changed])
    return (state, []) if state.phase == JobPhase.ENDING else _regroup(state, event.now)


def _let_go(nodes: Sequence[Node]) -> list[SupervisorAction]:
    why = "it left, as its machine will soon be gone"
    return [DropNode(node.node, why, int(ExitCode.UNHEALTHY)) for node in nodes]


def _on_tick(state: JobState, now: float) -> Decision:
    if state.phase == JobPhase.READYING and now > state.since + READY_S and (late := assignment.list_unready(state)):
        why = f"it was not ready within {READY_S:g} s for the next attempt"
        return replace(state, since=now), [DropNode(node, why, int(ExitCode.FAILED)) for node in late]
    if state.phase == JobPhase.READYING:
        return _start_if_ready(state, now)
    if state.phase == JobPhase.RUNNING and (plan := assignment.plan_growth(state)):
        ready = {node.node for node in state.nodes if node.ready == state.division}
        if all(node in ready for node, _ in plan):  # one came while this attempt was being prepared
            return _pause(state, now, "nodes without ranks are available")
    if state.phase == JobPhase.ENDING and not _awaited(state):
        return _if_over(state, now)  # a leader that has just taken over
    if state.phase == JobPhase.ENDING and now > state.since + COLLECT_S and state.pause_reason is None:
        why = f"it did not end its ranks within {COLLECT_S:g} s"
        return replace(state, since=now), [DropNode(node, why, int(ExitCode.FAILED)) for node in _awaited(state)]
    if state.phase == JobPhase.IDLE and (state.wait_until is None or now > state.wait_until):
        return _regroup(state, now)  # it has been waited for long enough, or a new leader has found nothing running
    return state, []


def _pause(state: JobState, now: float, why: str) -> Decision:
    """End an attempt that has not failed, to redistribute the work; nothing is lost because the ranks save."""
    ending = replace(state, phase=JobPhase.ENDING, since=now, pause_reason=why)
    said = WriteEvent(EventKind.WARNING, {"message": f"{why}: the ranks save, then the work is redistributed"})
    return ending, [said, EndAttempt(state.attempt, save_first=True)]


def _awaited(state: JobState) -> list[int]:
    """Nodes that have ranks of the attempt and have not said how they ended."""
    return [node for node in state.seats if node not in state.codes and node not in state.lost_with_ranks]


def _if_over(state: JobState, now: float) -> Decision:
    """Continue once the attempt has ended everywhere."""
    if _awaited(state):
        return state, []
    codes, lost = set(state.codes.values()), bool(state.lost_with_ranks)
    first = min(state.causes, key=lambda cause: cause.priority, default=None)
    if first is not None and lost and first.priority >= SECONDARY_FAILURE:
        first = None
    peaceful = codes <= {ExitCode.DONE, ExitCode.STOPPED} and not lost
    planned, state = state.pause_reason, replace(state, phase=JobPhase.IDLE, pause_reason=None)
    # A rank that is done knows that the last step is saved for all of them: nodes that are lost then are not missed,
    # nor ranks that were ended for it before they had left.
    if ExitCode.DONE in codes and first is None:
        return _finish(state, ExitCode.DONE, "the run is done")
    interrupted = bool(state.stop.signal) and state.stop.interrupted
    if interrupted and not state.stop.saving and not lost and has_unsaved_step(state):
        saving = replace(state.stop, saving=True)
        return _regroup(replace(state, stop=saving, retry_reason="to save the last step in memory"), now)
    if interrupted and first is None:
        said = {"step": state.committed, "reason": state.stop.signal}
        done = _finish(state, ExitCode.STOPPED, f"stopped by {state.stop.signal}")
        return _and([WriteEvent(EventKind.STOPPED, said)], done)
    if state.stop.signal or (peaceful and not planned):
        killed = ExitCode.FAILED if codes - {ExitCode.DONE, ExitCode.STOPPED} else ExitCode.STOPPED
        code = ExitCode.STOPPED if peaceful else killed if first is None else first.code
        return _finish(state, code, f"stopped by {state.stop.signal or 'a signal to a rank'}")
    if planned and (first is None or first.code == ExitCode.STOPPED):
        return _regroup(replace(state, retry_reason=planned), now)
    if not lost and first is not None and first.code == ExitCode.CONFIG:
        return _finish(state, first.code, first.fingerprint)
    if first is not None and first.code == ExitCode.OUT_OF_MEMORY:
        if not first.memory_reduced:
            return _finish(state, first.code, "out of memory, and no setting can be reduced further")
        return _regroup(replace(state, start_at=now, retry_reason="with smaller micro-batches"), now)
    if first is not None and first.state_damaged and not lost:
        return _regroup(replace(state, start_at=now, retry_reason=FROM_ELSE), now)
    return _failed(state, first, now)


def _failed(state: JobState, first: FailureCause | None, now: float) -> Decision:
    """After a failure that is worth another attempt, while there is a budget for it."""
    kept, before = find_in_memory_step(state), state.budget
    safe = state.committed if kept is None else kept.step
    failures = 1 if safe > before.reached else before.failures + 1
    crash = ("", 0)
    if first is not None and not state.lost_with_ranks:
        again = first.fingerprint == before.crash[0] and safe <= before.reached + NEAR_STEPS
        crash = (first.fingerprint, before.crash[1] + 1 if again else 1)
    pause_s = PAUSE_S[min(failures, len(PAUSE_S)) - 1]
    budget = replace(before, failures=failures, reached=max(before.reached, safe), crash=crash)
    state = replace(state, budget=budget, start_at=now + pause_s)
    code = int(ExitCode.FAILED if first is None or first.code == ExitCode.STOPPED else first.code)
    if crash[1] >= state.policy.same_crash and crash[0]:
        why = f"{crash[1]} attempts in a row failed with {crash[0]}, so another would too; fix this first"
        return _give_up(state, code, why)
    many = f"{failures} attempts in a row" if failures > 1 else "the attempt"
    why = f"{many} made no progress beyond step {budget.reached}"
    if failures > state.policy.max_restarts:
        give_up = _give_up if state.policy.max_restarts else _finish  # without restarts none is expected
        return give_up(state, code, f"{why}; see the ranks' logs")
    said = WriteEvent(EventKind.WARNING, {"message": f"{why}; the next attempt starts in {pause_s:g} s"})
    return _and([said] if pause_s >= 10 else [], _regroup(state, now))


def _regroup(state: JobState, now: float) -> Decision:
    """Assign a node to each slot, or make another division; wait or stop where neither is possible. Nodes that leave
    go first; who leads then continues."""
    if leaving := [node for node in state.nodes if node.leaving]:
        nodes = tuple(node for node in state.nodes if not node.leaving)
        return replace(state, phase=JobPhase.IDLE, nodes=nodes, plan=(), wait_until=None), _let_go(leaving)
    usable = [node for node in state.nodes if not node.drained]
    kept = assignment.keep_seats(state, usable)
    if -1 not in kept and not (state.policy.grow and assignment.plan_growth(state)):
        return _ready_to_start(replace(state, seats=kept), now)
    waited = state.wait_until is not None and now > state.wait_until
    for way in state.policy.on_lost_node if -1 in kept else ("shrink",):
        if way == "replace" and -1 in kept and (filled := assignment.fill_seats(state, kept, usable)) is not None:
            return _ready_to_start(replace(state, seats=filled), now)
        if way == "shrink" and (plan := assignment.plan_division(state, usable)) and plan not in state.refused:
            return replace(state, phase=JobPhase.PREPARING, plan=plan, wait_until=None), [
                PrepareDivision(state.division + 1, plan)
            ]
        if way == "wait" and not waited:
            return _wait(state, now)
    if -1 not in kept:
        return _ready_to_start(replace(state, seats=kept), now)
    return _give_up(state, ExitCode.FAILED, "nodes were lost, and the remaining nodes cannot continue without them")


def _ready_to_start(state: JobState, now: float) -> Decision:
    return _start_if_ready(replace(state, phase=JobPhase.READYING, since=now, wait_until=None), now)


def _wait(state: JobState, now: float) -> Decision:
    if state.wait_until is not None:
        return replace(state, phase=JobPhase.IDLE), []
    text = f"waiting up to {state.policy.wait_s:g} s for a lost node to return; run the same command there"
    state = replace(state, phase=JobPhase.IDLE, wait_until=now + state.policy.wait_s)
    return state, [WriteEvent(EventKind.WARNING, {"message": text})]


def _start_if_ready(state: JobState, now: float) -> Decision:
    if assignment.list_unready(state) or now < state.start_at or not state.seats:
        return state, []
    kept = find_in_memory_step(state)
    attempt = state.attempt + 1
    reason = state.retry_reason
    why = {} if reason is None else {"reason": reason}
    said: list[SupervisorAction] = (
        [WriteEvent(EventKind.RESTARTED, {"attempt": attempt, **why})] if attempt > state.budget.first else []
    )
    if kept is None and (lost := describe_lost_state(state)) is not None:
        said.append(WriteEvent(EventKind.WARNING, {"attempt": attempt, "message": lost}))
    again = 0 if kept is None else count_replayed_steps(state, kept)
    # What else nodes have, such as replicas that stay, is reported again when the attempt ends.
    used = set() if kept is None else {each for _, each in kept.files.values()}
    nodes = tuple(replace(node, held=tuple(each for each in node.held if each in used)) for node in state.nodes)
    state = replace(
        state,
        phase=JobPhase.RUNNING,
        attempt=attempt,
        codes={},
        causes=(),
        lost_with_ranks=(),
        retry_reason=None,
        stop=replace(state.stop, interrupted=False),
        nodes=nodes,
    )
    step = state.committed if kept is None else kept.step
    return state, [*said, StartAttempt(attempt, state.division, state.seats, step, kept, again, reason)]


def _give_up(state: JobState, code: int, why: str) -> Decision:
    """Give up: end a job that could have been expected to continue."""
    return _and([WriteEvent(EventKind.GAVE_UP, {"reason": why})], _finish(state, code, why))


def _finish(state: JobState, code: int, why: str) -> Decision:
    return replace(state, phase=JobPhase.OVER), [FinishJob(int(code), why)]


def _and(before: list[SupervisorAction], decision: Decision) -> Decision:
    state, actions = decision
    return state, [*before, *actions]
