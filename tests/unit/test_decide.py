"""What is decided when nodes and ranks fail, by example and for any sequence of events."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.elastic.supervisor.assignment import can_continue, fill_seats
from phalanx.elastic.supervisor.decide import COLLECT_S, READY_S, decide
from phalanx.elastic.supervisor.state import (
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
    RecoveryPolicy,
    RestartBudget,
    SendOffer,
    StartAttempt,
    StepsCommitted,
    StopSignalReceived,
    SupervisorAction,
    SupervisorEvent,
    Tick,
    WriteEvent,
)
from phalanx.recovery.catalog import StateFileInfo
from tests.helpers import ALL

KILLED = FailureCause(0, 1, "")
LOST_PEER = FailureCause(3, 1, "RuntimeError: connection closed by peer in step 7")
BUG = FailureCause(1, 1, "KeyError: 'layer 3' in step 17")


def node(number: int, ranks: int = 1, ready: int = 1, model: str = "any") -> Node:
    return Node(number, f"host{number}", ranks, model, ready)


def begun(nodes: int = 2, spares: int = 0, ranks: int = 1, **policy: Any) -> JobState:
    """A job whose first attempt runs."""
    state = JobState(
        policy=RecoveryPolicy(nodes=nodes, **policy),
        nodes=tuple(node(number, ranks) for number in range(nodes + spares)),
        slots=tuple(NodeSlot(ranks, "any") for _ in range(nodes)),
        seats=tuple(range(nodes)),
    )
    state, actions = decide(state, Tick(0.0))
    assert actions == [StartAttempt(1, 1, tuple(range(nodes)), 0)]
    return state


def walk(state: JobState, *events: SupervisorEvent) -> tuple[JobState, list[SupervisorAction]]:
    done: list[SupervisorAction] = []
    for event in events:
        state, actions = decide(state, event)
        done += actions
    return state, done


def kinds(actions: list[SupervisorAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_all_done() -> None:
    state, done = walk(begun(), RanksEnded(1, 0, 1, 0), RanksEnded(2, 1, 1, 0))
    assert done == [FinishJob(0, "the run is done")]
    assert state.phase == JobPhase.OVER
    assert walk(state, NodeLost(3, 1, ""), Tick(9))[1] == []


@pytest.mark.parametrize("lost_first", [False, True])
def test_a_node_that_is_lost_when_the_others_are_done_is_not_waited_for(lost_first: bool) -> None:
    events = [RanksEnded(1, 1, 1, 0), NodeLost(2, 0, "power")]
    _, done = walk(begun(on_lost_node=("replace", "wait")), *(events[::-1] if lost_first else events))
    assert done[-1] == FinishJob(0, "the run is done")
    _, done = walk(begun(on_lost_node=("replace", "wait")), NodeLost(1, 0, "power"), RanksEnded(2, 1, 1, 1, LOST_PEER))
    assert kinds(done) == ["EndAttempt", "WriteEvent"]  # it is waited for


@pytest.mark.parametrize("last", [None, LOST_PEER])
def test_ranks_that_are_ended_for_a_lost_node_while_others_are_done_do_not_begin_again(
    last: FailureCause | None,
) -> None:
    """They were leaving, and were not quick enough."""
    events = [RanksEnded(1, 0, 1, 0), NodeLost(2, 2, "power"), RanksEnded(3, 1, 1, 1, last)]
    _, done = walk(begun(nodes=3, on_lost_node=("wait",)), *events)
    assert done[-1] == FinishJob(0, "the run is done")
    _, done = walk(begun(nodes=3, on_lost_node=("wait",)), *events[:2], RanksEnded(3, 1, 1, 1, KILLED))
    assert kinds(done)[-1] == "WriteEvent"  # a rank that has failed by itself may have failed to save


def test_a_dead_rank_ends_the_attempt_everywhere_and_the_next_begins_when_all_have() -> None:
    state, done = walk(begun(), RanksEnded(1, 1, 1, 1, KILLED))
    assert done == [EndAttempt(1)]
    state, done = walk(state, RanksEnded(2, 0, 1, 1, LOST_PEER))
    assert kinds(done) == ["WriteEvent", "StartAttempt"]
    assert done[1] == StartAttempt(2, 1, (0, 1), 0)


def test_a_spare_takes_the_seat_and_without_one_the_ranks_are_divided_anew() -> None:
    state, done = walk(begun(spares=1), NodeLost(1, 1, "gone"), RanksEnded(1, 0, 1, 1, LOST_PEER))
    assert kinds(done) == ["EndAttempt", "WriteEvent", "StartAttempt"]
    assert done[2] == StartAttempt(2, 1, (0, 2), 0)
    state, done = walk(state, NodeLost(2, 2, "gone"), RanksEnded(2, 0, 2, 1, LOST_PEER))
    assert done == [EndAttempt(2), PrepareDivision(2, ((0, 1),))]
    state, done = walk(state, DivisionPrepared(3, 2))
    assert done == [SendOffer(2)]
    state, done = walk(state, NodeReady(4, 0, 2), Tick(9))
    assert done[-1] == StartAttempt(3, 2, (0,), 0)


def test_of_spares_one_that_is_ready_takes_the_seat_and_of_these_the_first() -> None:
    state = replace(begun(nodes=2), division=7)
    spares = [node(0), node(4, ready=7), node(3, ready=7), node(2)]
    assert fill_seats(state, (0, -1), spares) == (0, 3)
    assert fill_seats(state, (0, -1), spares[:2]) == (0, 4)
    assert fill_seats(state, (-1, -1), spares[2:]) == (3, 2)
    assert fill_seats(state, (-1, -1), spares[3:]) is None


def test_a_node_that_returns_is_taken_in_by_saving_first() -> None:
    state = replace(begun(), slots=(NodeSlot(1, "any"),), seats=(0,), nodes=(node(0),))
    state, done = walk(state, NodeJoined(1, node(1, ready=0)), NodeReady(2, 1, 1))
    assert done[0] == SendOffer(1, 1)
    assert done[-1] == EndAttempt(1, save_first=True)
    state, done = walk(state, RanksEnded(3, 0, 1, ExitCode.STOPPED))
    assert done == [PrepareDivision(2, ((0, 1), (1, 1)))]
    state, done = walk(state, DivisionPrepared(4, 2), NodeReady(5, 0, 2), NodeReady(5, 1, 2))
    assert done[-1] == StartAttempt(2, 2, (0, 1), 0, reason="node 1 is back")
    assert state.budget.failures == 0


def test_a_node_that_returns_stays_a_spare_where_growing_is_off() -> None:
    state = replace(begun(grow=False), slots=(NodeSlot(1, "any"),), seats=(0,), nodes=(node(0),))
    _, done = walk(state, NodeJoined(1, node(1, ready=0)), NodeReady(2, 1, 1))
    assert done == [SendOffer(1, 1)]


def test_what_cannot_shrink_waits_and_then_stops() -> None:
    state, done = walk(begun(wait_s=5.0), NodeLost(1, 1, "gone"), RanksEnded(1, 0, 1, 1, LOST_PEER))
    assert done[-1] == PrepareDivision(2, ((0, 1),))
    assert state.budget.crash == ("", 0)  # that a node is gone is no crash that could be the same once more
    state, done = walk(state, DivisionRejected(2, 2, "too little memory"), Tick(6.9))
    assert kinds(done) == ["WriteEvent", "WriteEvent"]
    _back, done = walk(state, NodeJoined(6.9, node(1, ready=0)), NodeReady(6.95, 1, 1))
    assert done[-1] == StartAttempt(2, 1, (0, 1), 0)
    _, done = walk(state, Tick(7.1))
    assert kinds(done) == ["WriteEvent", "FinishJob"]
    assert done[1] == FinishJob(1, "nodes were lost, and the remaining nodes cannot continue without them")


def test_fewer_nodes_than_the_least_do_not_go_on() -> None:
    _, done = walk(
        begun(3, least=2), NodeLost(1, 2, "gone"), RanksEnded(1, 0, 1, 1, LOST_PEER), RanksEnded(1, 1, 1, 1, LOST_PEER)
    )
    assert done[-1] == PrepareDivision(2, ((0, 1), (1, 1)))
    _, done = walk(begun(2, least=2), NodeLost(1, 1, "gone"), RanksEnded(1, 0, 1, 1, LOST_PEER))
    assert done[-1].details["message"].startswith("waiting up to 600 s for a lost node to return")  # type: ignore[union-attr]


def test_a_node_that_returns_with_fewer_devices_does_not_get_its_ranks_back() -> None:
    """A GPU has fallen off its bus, say. Half a copy of the model is none, so it is waited for the rest."""
    state, _ = walk(begun(ranks=2, group=4), NodeLost(1, 1, "gone"), RanksEnded(1, 0, 1, 1, LOST_PEER))
    state, done = walk(state, NodeJoined(2, node(1, 1, ready=0)), NodeReady(3, 1, 1))
    assert kinds(done) == ["WriteEvent", "SendOffer"]
    assert done[0].details["message"] == (  # type: ignore[union-attr]
        "node 1 (host1) returned with 1 rank on any but had 2 ranks on any: it cannot take its former ranks"
    )
    other = walk(
        state, NodeLost(4, 1, "gone"), NodeJoined(5, node(1, 2, ready=0, model="another")), NodeReady(6, 1, 1)
    )[1]
    assert other[-1] == PrepareDivision(2, ((0, 2), (1, 2)))  # shares were for other devices
    _, done = walk(state, NodeLost(4, 1, "gone"), NodeJoined(5, node(1, 2, ready=0)), NodeReady(6, 1, 1))
    assert done[-1] == StartAttempt(2, 1, (0, 1), 0)


def test_copies_of_the_model_stay_whole() -> None:
    state, done = walk(begun(nodes=3, ranks=2, group=4), NodeLost(1, 2, "gone"))
    state, done = walk(state, RanksEnded(1, 0, 1, 1, LOST_PEER), RanksEnded(1, 1, 1, 1, LOST_PEER))
    assert done == [PrepareDivision(2, ((0, 2), (1, 2)))]
    state, done = walk(begun(nodes=2, ranks=2, group=4), NodeLost(1, 1, "gone"), RanksEnded(1, 0, 1, 1, LOST_PEER))
    assert kinds(done) == ["EndAttempt", "WriteEvent"]  # it waits: half a copy is none


def test_the_same_crash_is_not_tried_for_ever_though_checkpoints_are_saved_in_between() -> None:
    state, done = begun(max_restarts=50), []
    for attempt in range(1, 4):
        assert state.attempt == attempt
        now = attempt * 100.0
        state, done = walk(
            state, RanksEnded(now, 0, attempt, 1, BUG), RanksEnded(now, 1, attempt, 1, LOST_PEER), Tick(now + 50)
        )
    assert done[-1] == FinishJob(
        1, f"3 attempts in a row failed with {BUG.fingerprint}, so another would too; fix this first"
    )


@pytest.mark.parametrize(("further", "ends"), [(1, True), (2, True), (3, False)])
def test_a_mistake_that_lets_few_steps_through_each_time_is_the_same(further: int, ends: bool) -> None:
    """One that comes again after many steps may be rare, and is tried again."""
    state, done = begun(nodes=1, max_restarts=9), []
    for attempt in range(1, 4):
        now = attempt * 100.0
        committed = StepsCommitted(now, attempt * further)
        state, done = walk(state, committed, RanksEnded(now, 0, attempt, 1, BUG), Tick(now + 60))
    assert isinstance(done[-1], FinishJob) == ends


def test_kills_from_outside_end_by_the_budget_alone_and_progress_renews_it() -> None:
    state, done = begun(nodes=1, max_restarts=2), []
    for attempt in range(1, 5):
        now = attempt * 100.0
        if attempt == 2:
            state, _ = walk(state, StepsCommitted(now, 8))
        state, done = walk(state, RanksEnded(now, 0, attempt, 1, KILLED), Tick(now + 60))
    assert done[-1] == FinishJob(1, "3 attempts in a row made no progress beyond step 8; see the ranks' logs")


def test_later_restarts_are_put_off() -> None:
    state, done = walk(
        begun(nodes=1, max_restarts=9), RanksEnded(1, 0, 1, 1, KILLED), RanksEnded(2, 0, 2, 1, KILLED), Tick(2.4)
    )
    assert kinds(done) == ["EndAttempt", "WriteEvent", "StartAttempt", "EndAttempt"]
    assert kinds(walk(state, Tick(2.6))[1]) == ["WriteEvent", "StartAttempt"]


def test_each_failure_that_follows_no_progress_puts_off_the_next_attempt_for_longer() -> None:
    state, now, pauses = begun(nodes=1, max_restarts=9), 0.0, []
    for attempt in range(1, 8):
        now += 1
        state, done = walk(state, RanksEnded(now, 0, attempt, 1, KILLED))
        pauses.append(state.start_at - now)
        assert [each.details["message"] for each in done if isinstance(each, WriteEvent) and pauses[-1] >= 10] == [
            f"{attempt} attempts in a row made no progress beyond step 0; the next attempt starts in {pauses[-1]:g} s"
        ] * (pauses[-1] >= 10)
        now = state.start_at
        state, _ = walk(state, Tick(now))
        assert (state.phase, state.attempt) == (JobPhase.RUNNING, attempt + 1)
    assert pauses[:2] == [0.0, 0.5]
    assert all(2 * before < after for before, after in itertools.pairwise(pauses[1:5]))
    assert pauses[4:] == [30.0] * 3
    assert walk(state, StepsCommitted(now, 5), RanksEnded(now, 0, 8, 1, KILLED))[0].start_at == now


def test_a_failure_that_others_suffer_from_is_not_taken_for_the_cause_where_a_node_was_lost() -> None:
    """And one that is suspected is: a mistake ends a run at once, also where nodes were lost with it."""
    for suspicion, code in ((1, ExitCode.OUT_OF_MEMORY), (2, None), (3, None)):
        cause = FailureCause(suspicion, ExitCode.OUT_OF_MEMORY, "out of memory")
        _, done = walk(
            begun(2, spares=1), RanksEnded(1.0, 0, 1, ExitCode.OUT_OF_MEMORY, cause), NodeLost(2.0, 1, "cut")
        )
        assert [action.code for action in done if isinstance(action, FinishJob)] == ([] if code is None else [code])


@pytest.mark.parametrize(
    ("code", "lowered", "expected"),
    [
        (ExitCode.CONFIG, False, "FinishJob"),
        (ExitCode.OUT_OF_MEMORY, False, "FinishJob"),
        (ExitCode.OUT_OF_MEMORY, True, "StartAttempt"),
    ],
)
def test_what_is_not_retried(code: ExitCode, lowered: bool, expected: str) -> None:
    cause = FailureCause(1, code, "sentence", lowered)
    _, done = walk(begun(max_restarts=0), RanksEnded(1, 0, 1, code, cause), RanksEnded(1, 1, 1, 1, LOST_PEER))
    assert kinds(done)[-1] == expected


def test_damage_in_memory_is_no_failure_but_where_a_node_was_lost_with_it() -> None:
    damaged = FailureCause(1, 1, "a slot was damaged", state_damaged=True)
    state, done = walk(begun(spares=1), RanksEnded(1, 0, 1, 1, damaged), RanksEnded(1, 1, 1, 1, LOST_PEER))
    assert (kinds(done)[-1], state.budget.failures) == ("StartAttempt", 0)
    state, _ = walk(begun(spares=1), RanksEnded(1, 0, 1, 1, damaged), NodeLost(1, 1, "gone"))
    assert state.budget.failures == 1


def test_a_stop_asked_for_ends_the_job_however_it_ends() -> None:
    stopped = [RanksEnded(2, 0, 1, ExitCode.STOPPED), RanksEnded(2, 1, 1, ExitCode.STOPPED)]
    _, done = walk(begun(), StopSignalReceived(1, "SIGTERM"), *stopped)
    assert done == [FinishJob(ExitCode.STOPPED, "stopped by SIGTERM")]
    _, done = walk(
        begun(), StopSignalReceived(1, "SIGTERM"), NodeLost(2, 1, "gone"), RanksEnded(2, 0, 1, ExitCode.STOPPED)
    )
    assert done[-1] == FinishJob(ExitCode.STOPPED, "stopped by SIGTERM")


def test_a_rank_that_dies_of_being_asked_to_stop_as_it_begins_is_not_waited_for() -> None:
    died = FailureCause(0, ExitCode.STOPPED, "")
    state, done = walk(begun(), StopSignalReceived(1, "SIGTERM"), RanksEnded(2, 1, 1, ExitCode.STOPPED, died))
    assert done == [EndAttempt(1)]
    assert walk(state, RanksEnded(3, 0, 1, 1))[1] == [FinishJob(ExitCode.STOPPED, "stopped by SIGTERM")]
    state, done = walk(
        begun(spares=1), NodeDrainChanged(1, 0, True, "drained"), RanksEnded(2, 1, 1, ExitCode.STOPPED, died)
    )
    assert done[-1] == EndAttempt(1)
    state, done = walk(state, RanksEnded(3, 0, 1, 1, LOST_PEER))
    assert (done[-1], state.budget.failures) == (StartAttempt(2, 1, (2, 1), 0, reason="drained"), 0)
    state, _ = walk(begun(max_restarts=0), RanksEnded(2, 1, 1, ExitCode.STOPPED, died))  # and nobody has asked
    assert walk(state, RanksEnded(3, 0, 1, 1))[1][-1] == FinishJob(
        1, "the attempt made no progress beyond step 0; see the ranks' logs"
    )


def test_a_node_that_does_not_end_its_ranks_is_dropped() -> None:
    state, _ = walk(begun(), RanksEnded(1, 0, 1, 1, KILLED))
    assert walk(state, Tick(1 + COLLECT_S))[1] == []
    assert kinds(walk(state, Tick(1.1 + COLLECT_S))[1]) == ["DropNode"]


def test_a_node_that_never_gets_ready_is_dropped() -> None:
    """Its disk may hang for ever while its agent lives."""
    state, _ = walk(
        begun(nodes=3), NodeLost(1, 2, "gone"), RanksEnded(1, 0, 1, 1, LOST_PEER), RanksEnded(1, 1, 1, 1, LOST_PEER)
    )
    state, _ = walk(state, DivisionPrepared(100, 2), NodeReady(101, 0, 2))
    assert walk(state, Tick(100 + READY_S))[1] == []
    state, done = walk(state, Tick(101 + READY_S))
    assert [action.node for action in done if isinstance(action, DropNode)] == [1]
    assert walk(state, Tick(102 + READY_S))[1] == []
    assert walk(state, NodeLost(103 + READY_S, 1, "it left"))[1] == [PrepareDivision(3, ((0, 1),))]


def test_a_drained_node_gives_its_seat_away_after_saving() -> None:
    state, done = walk(begun(spares=1), NodeDrainChanged(1, 0, True, "node 0 is drained"))
    assert done[-1] == EndAttempt(1, save_first=True)
    _, done = walk(state, RanksEnded(2, 0, 1, ExitCode.STOPPED), RanksEnded(2, 1, 1, ExitCode.STOPPED))
    assert done[-1] == StartAttempt(2, 1, (2, 1), 0, reason="node 0 is drained")


STOPPED = int(ExitCode.STOPPED)


def held(step: int, rank: int = 0, world: int = 1) -> tuple[StateFileInfo, ...]:
    return (StateFileInfo(1, 0, rank, world, rank, world, (step,), "aa"),)


def dropped(actions: list[SupervisorAction]) -> list[int]:
    return [action.node for action in actions if isinstance(action, DropNode)]


def test_a_node_whose_machine_will_be_gone_saves_leaves_and_is_replaced() -> None:
    state, done = walk(begun(spares=1), NodeLeaving(1, 0, "a notice"))
    assert done[-1] == EndAttempt(1, save_first=True)
    state, done = walk(state, RanksEnded(2, 0, 1, STOPPED), RanksEnded(2, 1, 1, STOPPED))
    assert dropped(done) == [0] and "StartAttempt" not in kinds(done)  # who leads then continues
    state, done = walk(state, NodeLost(3, 0, "it left"), Tick(3))
    assert [action.seats for action in done if isinstance(action, StartAttempt)] == [(2, 1)]
    assert state.budget.failures == 0


def test_a_spare_whose_machine_will_be_gone_leaves_at_once() -> None:
    state, done = walk(begun(spares=1), NodeLeaving(1, 2, "a notice"))
    assert (dropped(done), kinds(done), state.phase) == ([2], ["DropNode"], JobPhase.RUNNING)
    assert walk(state, NodeLeaving(2, 2, "a notice"))[1] == []


@pytest.mark.parametrize(
    ("nodes", "spares", "ways", "possible"),
    [(1, 0, ("shrink",), False), (2, 0, ("shrink",), True), (2, 0, ("wait",), False), (2, 1, ("replace",), True)],
)
def test_whether_a_job_continues_without_a_node(nodes: int, spares: int, ways: tuple[str, ...], possible: bool) -> None:
    assert can_continue(begun(nodes, spares, on_lost_node=ways), 0) == possible


def test_ranks_that_could_not_save_in_time_are_followed_by_an_attempt_that_saves() -> None:
    """Once: whatever becomes of that, the job ends."""
    asked, _ = walk(begun(nodes=1), StopSignalReceived(1, "SIGTERM"), StepsCommitted(1, 4))
    state, done = walk(asked, NodeInventoryReported(2, 0, held(7)), RanksEnded(2, 0, 1, STOPPED, interrupted=True))
    (start,) = [action for action in done if isinstance(action, StartAttempt)]
    assert (start.step, start.reason) == (7, "to save the last step in memory")
    again = NodeInventoryReported(3, 0, held(7)), RanksEnded(3, 0, 2, STOPPED, interrupted=True)
    for events in (again, [RanksEnded(3, 0, 2, 1, KILLED)], [RanksEnded(3, 0, 2, STOPPED)]):
        assert kinds(walk(state, *events)[1])[-1] == "FinishJob"
    nothing = [NodeInventoryReported(2, 0, held(4)), RanksEnded(2, 0, 1, STOPPED, interrupted=True)]
    assert kinds(walk(asked, *nothing)[1]) == ["EndAttempt", "WriteEvent", "FinishJob"]  # it is on disk


def test_what_a_failure_has_left_in_memory_is_saved_when_a_stop_comes_before_the_next_attempt() -> None:
    """The first restart waits for no time, the third one does."""
    state = replace(begun(nodes=1), budget=RestartBudget(failures=2))
    state, done = walk(state, NodeInventoryReported(1, 0, held(7)), RanksEnded(1, 0, 1, 1, KILLED))
    state = replace(state, phase=JobPhase.READYING, start_at=9.0) if state.phase == JobPhase.RUNNING else state
    state, done = walk(state, NodeInventoryReported(2, 0, held(7)), StopSignalReceived(2, "SIGTERM"))
    assert done == []
    _, done = walk(state, Tick(99))
    assert kinds(done)[-1] == "StartAttempt"


def test_a_node_whose_health_asks_for_it_leaves_only_where_a_spare_takes_its_place() -> None:
    asks = NodeDrainChanged(1, 0, True, "a GPU is lost", only_if_spare=True)
    assert walk(begun(), asks) == (begun(), [])  # two nodes, none of which waits: it may be a false alarm
    assert walk(begun(spares=1, on_lost_node=("shrink",)), asks)[1] == []
    state, done = walk(begun(spares=1), asks)
    assert done[-1] == EndAttempt(1, save_first=True)
    _, done = walk(
        state, RanksEnded(2, 0, 1, 1, KILLED), RanksEnded(2, 1, 1, 1, LOST_PEER)
    )  # it could not save any more
    assert [action for action in done if isinstance(action, StartAttempt)] == [StartAttempt(2, 1, (2, 1), 0)]


def test_what_is_drained_already_or_is_not_here_is_not_drained() -> None:
    state, _ = walk(begun(2, spares=1), NodeDrainChanged(1.0, 2, True, "asked for"))
    for event in (
        NodeDrainChanged(2.0, 2, True, "asked for"),
        NodeDrainChanged(2.0, 1, False, "asked for"),
        NodeDrainChanged(2.0, 9, True, "no"),
    ):
        assert decide(state, event) == (state, [])


def test_ranks_that_save_are_ended_at_once_when_one_of_them_dies_or_is_lost() -> None:
    """They would wait for it in a collective, as long as they may take to save."""
    saving, _ = walk(begun(nodes=3, spares=1), NodeDrainChanged(1, 1, True, "node 1 is drained"))
    for broken in (NodeLost(2, 1, "gone"), RanksEnded(2, 1, 1, 1, KILLED)):
        state, done = walk(saving, broken)
        assert done == [EndAttempt(1)]
        assert [each.node for each in walk(state, Tick(2.1 + COLLECT_S))[1]] == [0, 2]  # type: ignore[union-attr]
        state, done = walk(state, RanksEnded(3, 0, 1, 1, LOST_PEER), RanksEnded(3, 2, 1, ExitCode.STOPPED))
        assert done[-1] == StartAttempt(2, 1, (0, 3, 2), 0)
        assert state.budget.failures == 1


def test_a_node_that_is_drained_while_a_division_with_it_is_prepared_gets_no_seat_there() -> None:
    state, done = walk(
        begun(nodes=3), NodeLost(1, 2, "gone"), RanksEnded(1, 0, 1, 1, LOST_PEER), RanksEnded(1, 1, 1, 1, LOST_PEER)
    )
    assert done[-1] == PrepareDivision(2, ((0, 1), (1, 1)))
    state, done = walk(state, NodeDrainChanged(2, 1, True, "node 1 is drained"))
    assert done == [PrepareDivision(2, ((0, 1),))]
    _, done = walk(state, DivisionPrepared(3, 2), NodeReady(4, 0, 2))
    assert done[-1] == StartAttempt(2, 2, (0,), 0)


def test_a_node_that_returns_while_a_smaller_division_is_prepared_gets_a_seat_all_the_same() -> None:
    state, _ = walk(
        begun(nodes=3), NodeLost(1, 2, "gone"), RanksEnded(1, 0, 1, 1, LOST_PEER), RanksEnded(1, 1, 1, 1, LOST_PEER)
    )
    state, done = walk(state, NodeJoined(2, node(2, ready=0)))
    assert done == [SendOffer(1, 2)]  # who knows of no offer could not lead, if it came to that
    state, done = walk(state, DivisionPrepared(3, 2), NodeReady(4, 0, 2), NodeReady(5, 1, 2))
    assert done[-1] == StartAttempt(2, 2, (0, 1), 0)
    assert walk(state, Tick(6))[1] == []  # it has not what it needs yet
    # Where it was quicker than the others nothing more is heard of it.
    state, done = walk(replace(state, nodes=(node(0, ready=2), node(1, ready=2), node(2, ready=2))), Tick(6))
    assert done[-1] == EndAttempt(2, save_first=True)
    saved = [RanksEnded(7, number, 2, ExitCode.STOPPED) for number in (0, 1)]
    _, done = walk(state, *saved)
    assert done == [PrepareDivision(3, ((0, 1), (1, 1), (2, 1)))]
    refused, _ = walk(state, *saved, DivisionRejected(8, 3, "too little memory"), Tick(9))
    assert (refused.phase, walk(refused, Tick(10))[1]) == (JobPhase.RUNNING, [])


def has(generation: int, rank: int, *steps: int, replica: bool = False) -> StateFileInfo:
    return StateFileInfo(generation, 0, rank, 2, rank, 2, steps, f"layout {rank}", replica)


def ended_with(
    held: dict[int, tuple[StateFileInfo, ...]], committed: int = 5
) -> tuple[JobState, list[SupervisorAction]]:
    """What follows an attempt that nodes report the end of, and what they hold."""
    state = replace(begun(), committed=committed)
    told = [NodeInventoryReported(1, number, files) for number, files in held.items()]
    return walk(state, *told, RanksEnded(2, 0, 1, 1, KILLED), RanksEnded(2, 1, 1, 1))


def test_it_begins_from_memory_where_all_ranks_are_held_and_that_is_no_older_than_the_disk() -> None:
    state, done = ended_with({0: (has(1, 0, 6, 7),), 1: (has(1, 1, 6),)})
    start = done[-1]
    assert isinstance(start, StartAttempt) and start.kept is not None
    assert (start.step, start.kept.step, {rank: node for rank, (node, _) in start.kept.files.items()}) == (
        6,
        6,
        {0: 0, 1: 1},
    )
    assert (state.budget.reached, state.budget.failures) == (6, 1)  # what is safe in memory is progress
    for committed in (6, 7):
        _, done = ended_with({0: (has(1, 0, 6, 7),), 1: (has(1, 1, 6),)}, committed)
        assert done[-1].kept == (start.kept if committed == 6 else None)  # type: ignore[union-attr]


def test_where_a_rank_is_lost_with_its_node_it_says_so_and_goes_back_to_the_disk() -> None:
    _, done = ended_with({0: (has(1, 0, 6, 7),), 1: ()})
    assert done[-1] == StartAttempt(2, 1, (0, 1), 5)
    said = done[-2]
    assert isinstance(said, WriteEvent) and said.kind == EventKind.WARNING
    assert "the state of rank 1 was lost with its node" in str(said.details["message"])
    assert "the newest checkpoint, of step 5" in str(said.details["message"])
    _, done = ended_with({0: (has(1, 0, 6, 7), has(1, 1, 6, 7, replica=True)), 1: ()})
    assert done[-1].kept is not None  # type: ignore[union-attr]


@pytest.mark.parametrize(("every", "again"), [(1, 0), (4, 3)])
def test_steps_that_are_walked_again_since_a_second_node_has_only_some_are_counted(every: int, again: int) -> None:
    state = begun()
    state = replace(state, committed=3, policy=replace(state.policy, replicate_every=every))
    held = (has(1, 0, 4, 6, 7), has(1, 1, 4, replica=True))  # rank 1 was on node 1
    told = [NodeInventoryReported(1, 0, held), NodeInventoryReported(1, 1, ())]
    _, done = walk(state, *told, RanksEnded(2, 0, 1, 1, KILLED), RanksEnded(2, 1, 1, 1))
    start = done[-1]
    assert isinstance(start, StartAttempt) and (start.step, start.replayed_steps) == (4, again)
    told = [NodeInventoryReported(1, 0, held), NodeInventoryReported(1, 1, (has(1, 1, 4, 6, 7),))]
    _, done = walk(state, *told, RanksEnded(2, 0, 1, 1, KILLED), RanksEnded(2, 1, 1, 1))
    assert isinstance(done[-1], StartAttempt) and (done[-1].step, done[-1].replayed_steps) == (7, 0)


def test_a_job_begins_from_what_nodes_hold_since_the_one_before() -> None:
    files = {0: (has(4, 0, 6, 7),), 1: (has(4, 1, 6), has(4, 0, 6, 7, replica=True))}
    for committed, expected in ((5, 6), (6, 6), (7, None)):
        nodes = tuple(replace(node(number), held=files[number]) for number in (0, 1))
        state = replace(
            begun(), phase=JobPhase.READYING, nodes=nodes, attempt=4, budget=RestartBudget(first=5), committed=committed
        )
        _, done = walk(state, Tick(0))
        assert len(done) == 1, done  # what is older than the disk is no loss to speak of
        (start,) = done
        assert isinstance(start, StartAttempt) and start.attempt == 5
        assert (start.kept.step if start.kept is not None else None) == expected


def test_who_comes_while_ranks_run_brings_nothing_to_go_on_from() -> None:
    """They may go back, and take another way than what it brings."""
    stale = (has(1, 0, 50), has(1, 1, 50, replica=True))
    state, _ = walk(begun(spares=1), NodeInventoryReported(1, 2, stale))
    assert state.node(2).held == ()  # type: ignore[union-attr]
    state, _ = walk(begun(), RanksEnded(1, 0, 1, 1, KILLED), NodeInventoryReported(1, 1, stale))
    assert state.node(1).held == stale  # type: ignore[union-attr]


def test_what_is_not_gone_on_from_is_not_counted_on_again() -> None:
    old = {0: (has(1, 0, 6), has(2, 0, 8)), 1: (has(1, 1, 6), has(2, 1, 8))}
    state, _ = ended_with(old)
    assert {each.generation for member in state.nodes for each in member.held} == {2}


# ----------------------------------------------------------------------------------------------- any sequence of events


@dataclass
class World:
    """Nodes as they really are: what runs where, and what is safe."""

    living: set[int]
    running: dict[int, int] = field(default_factory=dict)  # attempt by node
    safe: int = 0
    ready: dict[int, int] = field(default_factory=dict)


@settings(max_examples=150 if ALL else 50, deadline=None)
@given(data=st.data())
def test_no_events_lead_to_two_attempts_at_once_or_for_ever(data: st.DataObject) -> None:
    nodes, spares = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2))
    group = data.draw(st.integers(1, 2))
    ways = tuple(data.draw(st.permutations(["replace", "shrink", "wait"]))[: data.draw(st.integers(0, 3))])
    policy: dict[str, Any] = {"on_lost_node": ways, "group": group, "max_restarts": 2, "wait_s": 30.0}
    state = begun(nodes, spares, 2, **policy)
    world = World(set(range(nodes + spares)), dict.fromkeys(state.seats, 1))
    now, starts = 0.0, 0
    pending: list[SupervisorAction] = []
    for _ in range(60):
        now += data.draw(st.sampled_from([0.1, 1.0, 40.0]))
        event = _event(data, state, world, now, pending)
        if isinstance(event, StepsCommitted):
            starts = 0
        if isinstance(event, NodeDrainChanged | NodeJoined | NodeLeaving):
            starts -= 1  # what users and returning nodes cause is not counted
        state, actions = decide(state, event)
        for action in actions:
            if isinstance(action, StartAttempt):
                assert not world.running, f"{action} while {world.running} still run"
                assert set(action.seats) <= world.living
                there = {node.node: node.ranks for node in state.nodes}
                seated = zip(action.seats, state.slots, strict=True)
                assert all(there[seat] >= slot.ranks for seat, slot in seated), "more ranks than a node has devices"
                assert all(world.ready.get(seat, 1) == action.division for seat in action.seats)
                assert action.step >= world.safe
                assert len(set(action.seats)) == len(action.seats)
                assert not any(node.drained for node in state.nodes if node.node in action.seats)
                assert sum(slot.ranks for slot in state.slots) % group == 0
                world.running = dict.fromkeys(action.seats, action.attempt)
                starts += 1
                assert starts <= policy["max_restarts"] + 1 + 60 * bool(state.pause_reason), "a loop without progress"
            elif isinstance(action, DropNode):
                world.living.discard(action.node)
                world.running.pop(action.node, None)
                state, more = decide(state, NodeLost(now, action.node, action.why))
                pending += [each for each in more if isinstance(each, PrepareDivision)]
                assert not any(isinstance(each, StartAttempt) for each in more) or not world.running
                for each in more:
                    if isinstance(each, StartAttempt):
                        world.running = dict.fromkeys(each.seats, each.attempt)
            elif isinstance(action, PrepareDivision):
                pending.append(action)
            elif isinstance(action, FinishJob):
                assert not world.running
                return
    if not world.living:
        return
    for _ in range(8):  # left alone, it comes to an end or runs
        now += 100.0
        for seat, attempt in list(world.running.items()):
            if state.phase == JobPhase.ENDING:
                world.running.pop(seat)
                state, actions = decide(state, RanksEnded(now, seat, attempt, 1, KILLED))
                pending += [each for each in actions if isinstance(each, PrepareDivision)]
                for each in actions:
                    if isinstance(each, StartAttempt):
                        world.running = dict.fromkeys(each.seats, each.attempt)
        if state.phase == JobPhase.PREPARING:
            state, _ = decide(state, DivisionPrepared(now, state.division + 1))
        for member in state.nodes:
            state, actions = decide(state, NodeReady(now, member.node, state.division))
            for each in actions:
                if isinstance(each, StartAttempt):
                    world.running = dict.fromkeys(each.seats, each.attempt)
        state, actions = decide(state, Tick(now))
        for each in actions:
            if isinstance(each, StartAttempt):
                world.running = dict.fromkeys(each.seats, each.attempt)
    assert state.phase in (JobPhase.RUNNING, JobPhase.OVER, JobPhase.IDLE), state


def _event(
    data: st.DataObject, state: JobState, world: World, now: float, pending: list[SupervisorAction]
) -> SupervisorEvent:
    kind = data.draw(
        st.sampled_from(["end", "end", "lose", "join", "ready", "prepare", "progress", "time", "drain", "leave", "odd"])
    )
    if kind == "end" and world.running:
        seat = data.draw(st.sampled_from(sorted(world.running)))
        attempt = world.running.pop(seat)
        if state.phase == JobPhase.ENDING and state.pause_reason and data.draw(st.integers(0, 3)):
            return RanksEnded(now, seat, attempt, ExitCode.STOPPED)
        return RanksEnded(now, seat, attempt, 1, data.draw(st.sampled_from([KILLED, LOST_PEER, BUG])))
    if kind == "lose" and len(world.living) > 1:
        lost = data.draw(st.sampled_from(sorted(world.living)))
        world.living.discard(lost)
        world.running.pop(lost, None)
        return NodeLost(now, lost, "gone")
    if kind == "join" and len(world.living) < 6:
        new = min(set(range(6)) - world.living)
        world.living.add(new)
        world.ready[new] = 0
        return NodeJoined(now, Node(new, f"host{new}", data.draw(st.integers(1, 2)), "any"))
    if kind == "ready" and world.living:
        one = data.draw(st.sampled_from(sorted(world.living)))
        world.ready[one] = state.division
        return NodeReady(now, one, state.division)
    if kind == "prepare" and state.phase == JobPhase.PREPARING:
        if data.draw(st.booleans()):
            return DivisionPrepared(now, state.division + 1)
        return DivisionRejected(now, state.division + 1, "no")
    if kind == "progress":
        world.safe += 1
        return StepsCommitted(now, world.safe)
    if kind == "drain" and world.living:
        whose = data.draw(st.sampled_from(sorted(world.living)))
        return NodeDrainChanged(now, whose, data.draw(st.booleans()), "asked", only_if_spare=data.draw(st.booleans()))
    if kind == "leave" and world.living:
        return NodeLeaving(now, data.draw(st.sampled_from(sorted(world.living))), "its machine is taken away")
    if kind == "odd":  # late words of attempts and divisions long gone
        return data.draw(
            st.sampled_from(
                [
                    RanksEnded(now, 0, state.attempt - 1, 1, BUG),
                    NodeReady(now, 99, 1),
                    DivisionPrepared(now, 77),
                    DivisionRejected(now, 1, "no"),
                ]
            )
        )
    return Tick(now)


def test_a_node_that_is_unfit_is_dropped() -> None:
    assert walk(begun(spares=1), NodeUnfit(1, 2, "other data", 2))[1] == [DropNode(2, "other data", 2)]
    sick = int(ExitCode.UNHEALTHY)
    assert walk(begun(spares=1), NodeUnfit(1, 2, "its disk is full", sick))[1] == [
        DropNode(2, "its disk is full", sick)
    ]


def test_waiting_is_said_once() -> None:
    _state, done = walk(
        begun(on_lost_node=("wait",)), NodeLost(1, 1, "gone"), RanksEnded(1, 0, 1, 1, LOST_PEER), Tick(2), Tick(3)
    )
    assert [action for action in done if isinstance(action, WriteEvent)] == [
        WriteEvent(
            EventKind.WARNING,
            {"message": "waiting up to 600 s for a lost node to return; run the same command there"},
        )
    ]
