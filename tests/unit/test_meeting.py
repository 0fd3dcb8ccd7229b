"""How nodes come together before the first division: what `decide_meeting` makes of who comes, leaves and is ready."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import Unhealthy
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.elastic.supervisor.failover import describe_division, make_initial_state
from phalanx.elastic.supervisor.meeting import NOTE_S, Meeting, decide_meeting
from phalanx.elastic.supervisor.meeting_host import MeetingHost
from phalanx.elastic.supervisor.state import (
    DivisionPrepared,
    FinishJob,
    JobPhase,
    Node,
    NodeJoined,
    NodeLost,
    NodeReady,
    NodeUnfit,
    RecoveryPolicy,
    SendOffer,
    StopSignalReceived,
    SupervisorAction,
    SupervisorEvent,
    Tick,
    WriteEvent,
)
from tests.helpers import ALL

SICK = int(ExitCode.UNHEALTHY)
LATE_S = 600.0


def node(number: int) -> Node:
    return Node(number, f"host{number}", 1, "any")


def meeting(total: int, spares: int = 0) -> Meeting:
    return Meeting(total, LATE_S, (node(0),), spares)


def walk(state: Meeting, *events: SupervisorEvent) -> tuple[Meeting, list[SupervisorAction]]:
    done: list[SupervisorAction] = []
    for event in events:
        state, actions = decide_meeting(state, event)
        done += actions
    return state, done


def all_here(total: int, spares: int = 0) -> Meeting:
    return walk(meeting(total, spares), *(NodeJoined(0, node(each)) for each in range(1, total)))[0]


def test_who_is_not_ready_is_named_now_and_then() -> None:
    state = walk(all_here(3), DivisionPrepared(1000, 1))[0]
    assert walk(state, Tick(1001))[1] == []
    said = []
    for events in ([], [NodeReady(1061, 1, 1)], [NodeReady(1122, 2, 1)]):
        now = state.note_at + 1
        state, done = walk(state, *events, Tick(now), Tick(now))
        said += [each.details["message"] for each in done if isinstance(each, WriteEvent)]
        assert state.note_at in (now - 1, now + NOTE_S)
    assert [str(message).partition(" to get ready")[0] for message in said] == [
        "waiting for nodes 1, 2", "waiting for node 2"
    ]  # fmt: skip


def test_who_comes_back_hears_the_offer_and_gets_ready_anew() -> None:
    state, done = walk(all_here(2), NodeReady(1, 1, 0), DivisionPrepared(1, 1), NodeReady(2, 1, 1))
    assert done == [SendOffer(1)] and (state.missing, state.unready) == ([], [])
    state, done = walk(state, NodeLost(700, 1, "gone"), Tick(701))
    assert state.missing == [1] and [str(each.kind) for each in done if isinstance(each, WriteEvent)] == [
        "node_lost", "warning"
    ]  # fmt: skip
    state, done = walk(state, NodeJoined(702, node(1)))
    assert done[-1] == SendOffer(1, 1) and (state.missing, state.unready) == ([], [1])


def test_a_job_is_refused_once_and_by_a_sentence() -> None:
    late, done = walk(meeting(3), NodeJoined(1, node(1)), Tick(1), Tick(LATE_S), Tick(LATE_S + 1), Tick(LATE_S + 2))
    assert done[1:] == [
        WriteEvent(EventKind.WARNING, {"message": "waiting for node 2 (up to 600 s)"}),  # once
        FinishJob(
            1,
            "node 2 of 3 did not arrive within 600 s; run the same command there with its --node-rank, or raise "
            "--rendezvous-timeout",
        ),
    ]
    assert late.over and walk(late, NodeJoined(1000, node(2)))[1] == []
    assert walk(all_here(2), NodeUnfit(1, 1, "other data", 1))[1] == [FinishJob(2, "node 1 (host1): other data")]
    assert walk(all_here(2), NodeUnfit(1, 1, "it smokes", SICK))[1] == [FinishJob(SICK, "node 1 (host1): it smokes")]
    assert walk(all_here(2), StopSignalReceived(1, "SIGINT"))[1] == [FinishJob(ExitCode.STOPPED, "SIGINT")]


@pytest.mark.parametrize(
    ("unfit", "before", "total", "spares", "starts"),
    [
        (1, [], 3, 1, True),
        (0, [], 3, 1, True),
        (1, [], 3, 0, False),  # there is no spare
        (2, [1], 4, 1, False),  # the only one has the place of another
        (2, [1], 4, 2, True),
        (1, [], 2, 1, False),  # node 0 would be alone
        (0, [1], 2, 2, False),
    ],
)
def test_a_job_starts_without_a_node_where_a_spare_and_another_node_are_left(
    unfit: int, before: Sequence[int], total: int, spares: int, starts: bool
) -> None:
    state = replace(all_here(total, spares), unfit=dict.fromkeys(before, "it smokes"))
    state, done = walk(state, NodeUnfit(2, unfit, "it smokes", SICK))
    assert [each.code for each in done if isinstance(each, FinishJob)] == [SICK] * (not starts)
    assert state.unfit.get(unfit) == ("it smokes" if starts else None)
    assert unfit not in walk(state, NodeLost(3, unfit, "it has left"))[0].missing or not starts


def test_the_one_node_of_a_job_waits_for_nobody() -> None:
    hello = {"node": 0, "host": "here", "devices": [["cpu", "any", True]] * 2}
    alone = MeetingHost(1, None, "", None, hello, 600.0, lambda kind, details: None)
    alone.offer({})
    alone.poll_once()
    assert alone.have_all_nodes() and alone.are_all_ready() and alone.descriptors() == {}
    assert alone.devices(1) == [hello["devices"]]
    assert alone.describe_nodes(1) == ({"hosts": ["here"], "spares": []}, [])
    with pytest.raises(Unhealthy, match=r"^it smokes$"):
        alone.report_unfit("it smokes")


# ----------------------------------------------------------------------------------------------- any sequence of events


@settings(max_examples=200 if ALL else 60, deadline=None)
@given(data=st.data())
def test_any_order_ends_in_a_start_with_the_right_members_or_in_one_refusal(data: st.DataObject) -> None:
    nodes, spares = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    total = nodes + spares
    state, now = meeting(total, spares), 0.0
    here: dict[int, bool] = {0: True}  # who is there, and whether it has what was offered
    sick: set[int] = set()
    offered, ends = False, list[FinishJob]()

    def take(event: SupervisorEvent) -> list[SupervisorAction]:
        nonlocal state
        state, actions = decide_meeting(state, event)
        ends.extend(each for each in actions if isinstance(each, FinishJob))
        return actions

    for _ in range(40):
        now += data.draw(st.sampled_from([0.0, 0.1, 30.0]))
        kind = data.draw(st.sampled_from(["join", "join", "ready", "ready", "offer", "lose", "unfit", "time"]))
        others = sorted(here.keys() - {0})
        absent = sorted(set(range(1, total)) - here.keys())
        if kind == "join" and absent:
            new = data.draw(st.sampled_from(absent))
            here[new] = False
            sick.discard(new)
            actions = take(NodeJoined(now, node(new)))
            assert (SendOffer(1, new) in actions) is (offered and not state.over)
        elif kind == "lose" and others:
            gone = data.draw(st.sampled_from(others))
            del here[gone]
            take(NodeLost(now, gone, "gone"))
        elif kind == "ready" and others and offered:
            one = data.draw(st.sampled_from(others))
            here[one] = True
            take(NodeReady(now, one, 1))
        elif kind == "unfit" and not data.draw(st.integers(0, 3)):
            one = data.draw(st.sampled_from(sorted(here)))
            take(NodeUnfit(now, one, "it smokes", SICK))
            sick |= set() if state.over else {one}
        elif kind == "offer" and not state.missing and not offered:
            offered = True
            take(DivisionPrepared(now, 1))
        else:
            take(Tick(now))
        if state.over:
            break
        # Nobody is waited for that is there and ready, or is made up for; and everybody else is.
        assert state.missing == [each for each in range(total) if each not in here and each not in sick]
        assert state.unready == [each for each, ready in sorted(here.items()) if each and not (ready and offered)] or (
            not offered
        )
        assert len(state.unfit) <= spares and set(state.unfit) == sick
    # Left alone, with all who are here ready, it begins or says once who is late.
    if not state.missing and not offered:
        take(DivisionPrepared(now, 1))
        offered = True
    for one in sorted(here.keys() - {0}) if offered else ():
        take(NodeReady(now, one, 1))
    for _ in range(3):
        now += LATE_S + 1
        take(Tick(now))
    if ends:
        assert len(ends) == 1 and state.over and ends[0].why
        assert ends[0].code == SICK or "did not arrive within 600 s" in ends[0].why
        return
    assert offered and not state.missing and not state.unready
    devices: list[Any] = [[["cpu", "any", True]]] * nodes
    offer = describe_division(1, [(each, 1) for each in range(nodes)], devices, RecoveryPolicy(nodes))
    job = make_initial_state(offer, state.nodes, 1, 0)
    assert {each.node for each in job.nodes} == here.keys() and all(each.ready == 1 for each in job.nodes)
    assert job.phase == (JobPhase.READYING if set(range(nodes)) <= here.keys() else JobPhase.IDLE)
    assert set(range(total)) - here.keys() <= sick


def test_who_comes_and_goes_is_said() -> None:
    done = walk(meeting(2), NodeJoined(1, node(1)), NodeLost(2, 1, "it closed the connection"))[1]
    assert done == [
        WriteEvent(EventKind.NODE_JOINED, {"node": 1, "host": "host1", "ranks": 1}),
        WriteEvent(EventKind.NODE_LOST, {"node": 1, "host": "host1", "reason": "it closed the connection"}),
    ]
