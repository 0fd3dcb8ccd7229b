"""A pipeline's plan: layers to stages, the orders of schedules, what they take, and what goes from rank to rank."""

import itertools
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ConfigError
from phalanx.layout.pipeline_stages import (
    STAGES_PER_RANK,
    TYPICAL_COST,
    Action,
    Move,
    PipelineStages,
    bubble_fraction,
    divide_layers,
    find_stage_problems,
    ideal_bubble_fraction,
    plan_moves,
    simulate_schedule,
    stages_from_counts,
    step_s,
)
from phalanx.models.families.catalog import PRESETS
from phalanx.parallel import pipeline
from phalanx.parallel.model_part import head_worth

SCHEDULES = list(STAGES_PER_RANK)
schedule_names = st.sampled_from(SCHEDULES)


def evenly(schedule: str, ranks: int) -> PipelineStages:
    return divide_layers(ranks * STAGES_PER_RANK[schedule], ranks, schedule)


def usual(action: Action) -> float:
    return TYPICAL_COST[action.kind]


# ----------------------------------------------------------------------------------------------------- layers to stages


@given(
    layers=st.integers(1, 40),
    schedule=schedule_names,
    speeds=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    head=st.integers(0, 6),
)
def test_every_layer_is_in_one_stage_and_no_other_division_is_faster(
    layers: int, schedule: str, speeds: list[int], head: int
) -> None:
    ranks = len(speeds)
    if layers < ranks * STAGES_PER_RANK[schedule]:
        with pytest.raises(ConfigError):
            divide_layers(layers, ranks, schedule, speeds=speeds, head=head)
        return
    plan = divide_layers(layers, ranks, schedule, speeds=speeds, head=head)
    assert [layer for stage in plan.layers for layer in stage] == list(range(layers))
    assert all(plan.layers) and len(plan.layers) == ranks * STAGES_PER_RANK[schedule]
    assert sorted(stage for rank in range(ranks) for stage in plan.stages_of(rank)) == list(range(len(plan.layers)))

    def slowest(counts: tuple[int, ...]) -> float:
        ends = [head * (plan.owner(plan.last) == rank) for rank in range(ranks)]
        return max((n + end) / speed for n, end, speed in zip(counts, ends, speeds, strict=True))

    found = slowest(tuple(sum(len(plan.layers[stage]) for stage in plan.stages_of(rank)) for rank in range(ranks)))
    if ranks <= 3 and layers <= 20:
        least = range(STAGES_PER_RANK[schedule], layers + 1)
        others = (each for each in itertools.product(least, repeat=ranks) if sum(each) == layers)
        assert found <= min(map(slowest, others)) * (1 + 1e-12)


def test_devices_twice_as_fast_get_twice_the_layers() -> None:
    assert [len(stage) for stage in divide_layers(12, 2, "1f1b", speeds=[2.0, 1.0]).layers] == [8, 4]
    assert [len(stage) for stage in divide_layers(12, 2, "interleaved", speeds=[2.0, 1.0]).layers] == [4, 2, 4, 2]


def test_the_head_counts_as_layers() -> None:
    worth = head_worth(PRESETS["llama-3.2-1b"])
    assert 4.0 < worth < 4.5  # 128,256 x 2,048 of 60.8 million elements a layer
    assert [len(stage) for stage in divide_layers(16, 2, "1f1b", head=worth).layers] == [10, 6]


def test_a_list_is_taken_as_it_is() -> None:
    assert stages_from_counts(6, 2, "1f1b", [5, 1]).layers == (range(5), range(5, 6))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((2, 4, "1f1b"), "parallel.pipeline 4 makes 4 stages, .* the model has 2; set parallel.pipeline=2 at most"),
        ((3, 2, "interleaved"), "with schedule interleaved makes 4 stages, .* set parallel.schedule=1f1b"),
        ((3, 4, "zero_bubble"), "makes 8 stages, .* set parallel.pipeline=1 at most"),
        ((4, 2, "1f1b", [2, 1]), "gives the stages 3 layers together, but the model has 4"),
        ((4, 2, "1f1b", [4, 0]), "give each stage one at least"),
        ((4, 2, "1f1b", [1, 1, 2]), "has 3 numbers, but parallel.pipeline 2 makes 2 stages"),
    ],
)
def test_impossible_divisions_are_refused_in_a_sentence(arguments: tuple[object, ...], said: str) -> None:
    (found,) = find_stage_problems(*arguments)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found)


def test_what_a_schedule_cannot_be_combined_with() -> None:
    assert find_stage_problems(8, 2, "1f1b", activations="full", compiled=True) == []
    recomputed, compiled = find_stage_problems(8, 2, "zero_bubble", activations="selective", compiled=True)
    assert "memory.activations selective" in recomputed and "train.compile=false" in compiled
    (offloaded,) = find_stage_problems(8, 2, "gpipe", activations="offload")
    assert "set memory.activations=full" in offloaded


# --------------------------------------------------------------------------------------------------------------- orders


@given(schedule=schedule_names, ranks=st.integers(2, 5), count=st.integers(1, 13))
def test_each_micro_batch_passes_through_every_stage_once_and_nobody_waits_for_ever(
    schedule: str, ranks: int, count: int
) -> None:
    plan = evenly(schedule, ranks)
    orders = pipeline.build_actions(schedule, plan, count)
    for rank, mine in enumerate(orders):
        assert {action.stage for action in mine} == set(plan.stages_of(rank))
    done = Counter(action for mine in orders for action in mine)
    kinds = ("F", "I", "W") if schedule == "zero_bubble" else ("F", "B")
    wanted = itertools.product(kinds, range(plan.last + 1), range(count))
    assert done == Counter(Action(*each) for each in wanted)  # type: ignore[arg-type]
    simulate_schedule(orders, plan, usual)


@given(schedule=st.sampled_from(["gpipe", "1f1b"]), ranks=st.integers(2, 5), rounds=st.integers(1, 3))
def test_a_schedule_waits_as_long_as_its_formula_says(schedule: str, ranks: int, rounds: int) -> None:
    plan, count = evenly(schedule, ranks), ranks * rounds
    spans = simulate_schedule(pipeline.build_actions(schedule, plan, count), plan, usual)
    assert bubble_fraction(spans) == pytest.approx(ideal_bubble_fraction(ranks, count))


@pytest.mark.parametrize("ranks", [2, 4])
def test_interleaved_stages_wait_for_half_as_long_and_half_passes_hardly(ranks: int) -> None:
    count, found = 4 * ranks, {}
    for schedule in SCHEDULES:
        plan = evenly(schedule, ranks)
        half = (lambda a: usual(a) / 2) if STAGES_PER_RANK[schedule] == 2 else usual  # half as many layers in a stage
        found[schedule] = bubble_fraction(simulate_schedule(pipeline.build_actions(schedule, plan, count), plan, half))
    assert found["interleaved"] == pytest.approx(ideal_bubble_fraction(ranks, count, 2))
    assert found["zero_bubble"] < found["interleaved"] < found["1f1b"]


def test_a_simulation_says_when_ranks_wait_for_each_other() -> None:
    plan = evenly("1f1b", 2)
    crossed = [[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate_schedule(crossed, plan, usual)


def test_results_take_time_from_rank_to_rank_but_not_within_one() -> None:
    plan = evenly("1f1b", 2)
    orders = pipeline.build_actions("1f1b", plan, 1)
    assert step_s(simulate_schedule(orders, plan, usual, hop_s=0.25)) == 6.5
    folded = evenly("zero_bubble", 2)  # F of 4 stages, I of 4 stages, of which the last shares its rank with the first
    spans = simulate_schedule(pipeline.build_actions("zero_bubble", folded, 1), folded, usual, hop_s=0.25)
    ends = {span.action: span.stop for mine in spans for span in mine}
    assert ends[Action("F", 3, 0)] == 4.5


# ---------------------------------------------------------------------------------------------- what goes between ranks


@given(schedule=schedule_names, ranks=st.integers(2, 4), count=st.integers(1, 9), ahead=st.integers(0, 3))
def test_sends_meet_receives_and_none_is_waited_for_in_a_circle(
    schedule: str, ranks: int, count: int, ahead: int
) -> None:
    plan = evenly(schedule, ranks)
    orders = pipeline.build_actions(schedule, plan, count)
    found = plan_moves(orders, plan, ahead)
    for rank, mine in enumerate(found):
        assert [move.action for move in mine if move.kind == "do"] == list(orders[rank])
    _carry_out(found, plan, both_ways=ahead > 0)


def _carry_out(found: list[list[Move]], plan: PipelineStages, both_ways: bool) -> None:
    """Every rank works through its moves. A send and its receive meet at the heads of two ranks' queues for each other,
    one for each direction if `full_duplex`; an action waits for what it needs to have arrived."""
    queues: dict[tuple[int, int, str], deque[Move]] = {}
    arrived: set[tuple[int, Action]] = set()
    left = [deque(mine) for mine in found]
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(left):
            while mine and (mine[0].kind != "do" or _has(mine[0].action, rank, arrived, plan)):
                move, moved = mine.popleft(), True
                if move.kind == "do":
                    continue
                source = plan.owner(move.action.stage)
                target = plan.receiver_of(move.action.result)
                assert target is not None and rank == (source if move.kind == "send" else target)
                other = target if move.kind == "send" else source
                direction = f"{source} to {target}" if both_ways else ""
                queues.setdefault((rank, other, direction), deque()).append(move)
        for (rank, other, direction), queue in queues.items():
            others = queues.get((other, rank, direction), deque())
            while queue and others and queue[0].action == others[0].action:
                assert {queue[0].kind, others[0].kind} == {"send", "receive"}
                receiver = rank if queue[0].kind == "receive" else other
                arrived.add((receiver, queue.popleft().action))
                others.popleft()
                moved = True
    assert not any(left), [mine[0] for mine in left if mine]
    assert not any(queues.values())


def _has(action: Action, rank: int, arrived: set[tuple[int, Action]], plan: PipelineStages) -> bool:
    kind, stage, number = action
    if kind == "F":
        needed = [Action("F", stage - 1, number)] if stage else []
    elif kind == "W" or stage == plan.last:
        needed = []
    else:
        needed = [Action("I" if kind == "I" else "B", stage + 1, number)]
    return all(plan.owner(each.stage) == rank or (rank, each) in arrived for each in needed)
