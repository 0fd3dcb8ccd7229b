"""What to do when something happens to a job on several nodes: a pure function from a state and an event to both.

The leader's agent keeps the state, tells of events and carries the actions out (`coordinator.py`). No clock, no files:
an event says when it happened. A spare that takes the seat of a lost node leaves the division, and so every bit, as it
is; with fewer or more nodes the ranks are divided anew, which is prepared and agreed on like a first start.
"""

from dataclasses import replace

from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.elastic.supervisor import assignment
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
from phalanx.recovery.catalog import RestorePoint, choose_restore_point, find_missing_ranks
from phalanx.system.exit_causes import FROM_ELSE

COLLECT_S = 15.0  # what a node gets to end its ranks; its agent kills them in less
READY_S = 3600.0  # what one gets to have what a division needs: token files may have to be made anew
PAUSE_S = (0.0, 0.5, 2.0, 10.0, 30.0)  # before the first, second, ... attempt in a row that follows no progress
NEAR_STEPS = 2  # further than the last time: a mistake that lets so few through each time is still the same
SECONDARY_FAILURE = 2  # causes of that suspicion or more are consequences of others (exit_causes.py)


def decide(state: JobState, event: SupervisorEvent) -> Decision:
    """What an event makes of a state, and what is to be done."""
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
            misfit = _misfit(state, event.node)
            return replace(state, nodes=(*others, event.node)), [*misfit, SendOffer(state.division, event.node.node)]
        case NodeReady():
            return _on_node_ready(state, event)
        case NodeInventoryReported():
            # Who comes while ranks run has state of a time before: if they go back and take another way, it is stale.
            if state.phase == JobPhase.RUNNING and event.node not in state.seats:
                return state, []
            return replace(
                state, nodes=tuple(replace(n, held=event.held) if n.node == event.node else n for n in state.nodes)
            ), []
        case NodeUnfit():
            return state, [DropNode(event.node, event.why, event.code)]
        case DivisionPrepared():
            return _on_division_prepared(state, event)
        case DivisionRejected():
            if state.phase != JobPhase.PREPARING or event.division != state.division + 1:
                return state, []
            said: list[SupervisorAction] = [
                WriteEvent(EventKind.WARNING, {"message": f"the run was not divided anew: {event.why}"})
            ]
            state = replace(state, refused=state.refused | {state.plan}, phase=JobPhase.IDLE, plan=())
            return _and(said, _regroup(state, event.now))
        case StepsCommitted():
            return replace(state, committed=max(state.committed, event.step)), []
        case StopSignalReceived():
            state = replace(state, stop_signal=state.stop_signal or event.signal)
            if state.phase in (JobPhase.RUNNING, JobPhase.ENDING):
                return state, []  # the ranks hear of it too, and end
            return _finish(state, ExitCode.STOPPED, f"stopped by {state.stop_signal}")
        case NodeDrainChanged():
            return _on_drain_changed(state, event)
        case Tick():
            return _on_tick(state, event.now)


def _on_ranks_ended(state: JobState, event: RanksEnded) -> Decision:
    current = state.phase in (JobPhase.RUNNING, JobPhase.ENDING) and event.attempt == state.attempt
    if not current or event.node not in state.seats or event.node in state.codes:
        return state, []
    causes = state.causes if event.cause is None else (*state.causes, event.cause)
    state = replace(state, codes={**state.codes, event.node: event.code}, causes=causes)
    ends: list[SupervisorAction] = []
    if event.code not in (ExitCode.DONE, ExitCode.STOPPED):
        state, ends = _broken(state, event.now)
    elif event.cause is not None:  # asked to save before it could heed that, a rank has died: the others wait for it
        state, ends = replace(state, phase=JobPhase.ENDING, since=event.now), [EndAttempt(state.attempt)]
    return _and(ends, _if_over(state, event.now))


def _broken(state: JobState, now: float) -> Decision:
    """An attempt has failed: have it end everywhere at once, also where it was only asked to save, which nobody can any
    more. Once."""
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


def _misfit(state: JobState, node: Node) -> list[SupervisorAction]:
    """What to say of a node that comes back and cannot take its own seat again."""
    pairs = zip(state.seats, state.slots, strict=True)
    slot = next((slot for seat, slot in pairs if seat == node.node and not assignment.fits(node, slot)), None)
    if slot is None:
        return []
    has, had = (f"{each.ranks} rank{'s' if each.ranks != 1 else ''} on {each.model}" for each in (node, slot))
    text = f"node {node.node} ({node.host}) has come back with {has}, and had {had}: it cannot take these again"
    return [WriteEvent(EventKind.WARNING, {"message": text})]


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
        return _pause(state, event.now, f"node {event.node} is there again")
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


def _on_tick(state: JobState, now: float) -> Decision:
    if state.phase == JobPhase.READYING and now > state.since + READY_S and (late := assignment.list_unready(state)):
        why = f"it was not ready within {READY_S:g} s for what the run needs next"
        return replace(state, since=now), [DropNode(node, why, int(ExitCode.FAILED)) for node in late]
    if state.phase == JobPhase.READYING:
        return _start_if_ready(state, now)
    if state.phase == JobPhase.RUNNING and (plan := assignment.plan_growth(state)):
        ready = {node.node for node in state.nodes if node.ready == state.division}
        if all(node in ready for node, _ in plan):  # one came while this attempt was being prepared
            return _pause(state, now, "there are more nodes than have ranks")
    if state.phase == JobPhase.ENDING and not _awaited(state):
        return _if_over(state, now)  # a leader that has just taken over
    if state.phase == JobPhase.ENDING and now > state.since + COLLECT_S and state.pause_reason is None:
        why = f"it did not end its ranks within {COLLECT_S:g} s"
        return replace(state, since=now), [DropNode(node, why, int(ExitCode.FAILED)) for node in _awaited(state)]
    if state.phase == JobPhase.IDLE and (state.wait_until is None or now > state.wait_until):
        return _regroup(state, now)  # it has been waited for long enough, or a new leader has found nothing running
    return state, []


def _pause(state: JobState, now: float, why: str) -> Decision:
    """End an attempt that has not failed, so that the ranks can be divided anew; nothing is lost, as they save."""
    ending = replace(state, phase=JobPhase.ENDING, since=now, pause_reason=why)
    said = WriteEvent(EventKind.WARNING, {"message": f"{why}: the ranks are asked to save, and are divided anew"})
    return ending, [said, EndAttempt(state.attempt, save_first=True)]


def _awaited(state: JobState) -> list[int]:
    """Nodes that have ranks of the attempt and have not said how they ended."""
    return [node for node in state.seats if node not in state.codes and node not in state.lost_with_ranks]


def _if_over(state: JobState, now: float) -> Decision:
    """Go on once the attempt has ended everywhere."""
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
    if state.stop_signal or (peaceful and not planned):
        killed = ExitCode.FAILED if codes - {ExitCode.DONE, ExitCode.STOPPED} else ExitCode.STOPPED
        code = ExitCode.STOPPED if peaceful else killed if first is None else first.code
        return _finish(state, code, f"stopped by {state.stop_signal or 'a signal to a rank'}")
    if planned and (first is None or first.code == ExitCode.STOPPED):
        return _regroup(replace(state, retry_reason=planned), now)
    if not lost and first is not None and first.code == ExitCode.CONFIG:
        return _finish(state, first.code, first.fingerprint)
    if first is not None and first.code == ExitCode.OUT_OF_MEMORY:
        if not first.memory_reduced:
            return _finish(state, first.code, "out of memory, and nothing that could be made smaller")
        return _regroup(replace(state, start_at=now, retry_reason="with smaller micro-batches"), now)
    if first is not None and first.state_damaged and not lost:
        return _regroup(replace(state, start_at=now, retry_reason=FROM_ELSE), now)
    return _failed(state, first, now)


def _failed(state: JobState, first: FailureCause | None, now: float) -> Decision:
    """After a failure that is worth another attempt, while there is a budget for it."""
    kept, before = _find_in_memory_step(state), state.budget
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
        why = f"{crash[1]} attempts have failed in a row with {crash[0]}, so the next one would too; fix that first"
        return _give_up(state, code, why)
    many = f"{failures} attempts in a row" if failures > 1 else "the attempt"
    why = f"{many} made no progress beyond step {budget.reached}"
    if failures > state.policy.max_restarts:
        give_up = _give_up if state.policy.max_restarts else _finish  # where no other is allowed, nobody expects one
        return give_up(state, code, f"{why}; their logs say why")
    said = WriteEvent(EventKind.WARNING, {"message": f"{why}; the next attempt starts in {pause_s:g} s"})
    return _and([said] if pause_s >= 10 else [], _regroup(state, now))


def _regroup(state: JobState, now: float) -> Decision:
    """Find a node for each slot, or other slots; wait or stop where there is neither."""
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
    return _give_up(state, ExitCode.FAILED, "nodes were lost, and those that are left cannot go on without them")


def _ready_to_start(state: JobState, now: float) -> Decision:
    return _start_if_ready(replace(state, phase=JobPhase.READYING, since=now, wait_until=None), now)


def _wait(state: JobState, now: float) -> Decision:
    if state.wait_until is not None:
        return replace(state, phase=JobPhase.IDLE), []
    text = f"waiting for a lost node to come back, for {state.policy.wait_s:g} s at most; start the same command there"
    state = replace(state, phase=JobPhase.IDLE, wait_until=now + state.policy.wait_s)
    return state, [WriteEvent(EventKind.WARNING, {"message": text})]


def _start_if_ready(state: JobState, now: float) -> Decision:
    if assignment.list_unready(state) or now < state.start_at or not state.seats:
        return state, []
    kept = _find_in_memory_step(state)
    attempt = state.attempt + 1
    reason = state.retry_reason
    why = {} if reason is None else {"reason": reason}
    said: list[SupervisorAction] = (
        [WriteEvent(EventKind.RESTARTED, {"attempt": attempt, **why})] if attempt > state.budget.first else []
    )
    if kept is None and (lost := _lost_state(state)) is not None:
        said.append(WriteEvent(EventKind.WARNING, {"attempt": attempt, "message": lost}))
    again = 0 if kept is None else _count_replayed_steps(state, kept)
    # What else nodes have, such as replicas that stay, is told anew when the attempt ends.
    used = () if kept is None else [each for _, each in kept.files.values()]
    nodes = tuple(replace(node, held=tuple(each for each in node.held if each in used)) for node in state.nodes)
    state = replace(
        state,
        phase=JobPhase.RUNNING,
        attempt=attempt,
        codes={},
        causes=(),
        lost_with_ranks=(),
        retry_reason=None,
        nodes=nodes,
    )
    step = state.committed if kept is None else kept.step
    return state, [*said, StartAttempt(attempt, state.division, state.seats, step, kept, again, reason)]


def _find_in_memory_step(state: JobState) -> RestorePoint | None:
    """What is in memory and no older than what is on the disk: an attempt begins from that."""
    choice = choose_restore_point({node.node: node.held for node in state.nodes})
    return choice if choice is not None and choice.step > 0 and choice.step >= state.committed else None


def _count_replayed_steps(state: JobState, kept: RestorePoint) -> int:
    """How many steps behind `kept` all ranks had committed whose own memory is there, where a second node does not have
    each; of a rank that is lost with its node nobody knows whether it had the last of them."""
    if state.policy.replicate_every == 1:
        return 0
    own = [
        max(each.steps)
        for node in state.nodes
        for each in node.held
        if (each.generation, each.way) == (kept.generation, kept.way) and each.steps and not each.replica
    ]
    # The next step that a second node gets is none before that has it.
    return max(0, min(min(own, default=0) - kept.step, state.policy.replicate_every - 1))


def _lost_state(state: JobState) -> str | None:
    """Why an attempt cannot begin from memory, where something is left there that is newer than the disk."""
    held = {node.node: node.held for node in state.nodes}
    if not any(step > state.committed for files in held.values() for each in files for step in each.steps):
        return None
    where = f"the newest checkpoint, of step {state.committed}" if state.committed else "the start"
    ranks = find_missing_ranks(held)
    if not ranks:
        return f"no step is whole in the nodes' memories, so the run goes back to {where}"
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return (
        f"the state of {which} was lost with its node and no other one holds a whole replica of it, so the run goes "
        f"back to {where}"
    )


def _give_up(state: JobState, code: int, why: str) -> Decision:
    """End a job that somebody may have expected to go on."""
    return _and([WriteEvent(EventKind.GAVE_UP, {"reason": why})], _finish(state, code, why))


def _finish(state: JobState, code: int, why: str) -> Decision:
    return replace(state, phase=JobPhase.OVER), [FinishJob(int(code), why)]


def _and(before: list[SupervisorAction], decision: Decision) -> Decision:
    state, actions = decision
    return state, [*before, *actions]
