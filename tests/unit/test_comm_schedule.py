"""Orders of communication: what may begin when, small ones against sums done by hand, and all against a bound."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.layout.comm_schedule import (
    StepTimings,
    _heads,
    _urgency,
    ddp_step_s,
    late_gather_s,
    lower_bound_s,
    plan_order,
    simulate_order,
)
from phalanx.layout.comm_schedule_zero3 import plan_zero3, simulate_zero3
from phalanx.layout.comm_simulation import Timeline, TimelineSpan, TransferOp
from tests.helpers import ALL

SMALL = 1e-9


def alike(units: int, ratio: float, **others: object) -> StepTimings:
    """Equal units that compute for a second, a third of it forward, and communicate for `ratio` seconds."""
    each = 1 / units
    link = (ratio * each / 2,) * units
    return StepTimings((each / 3,) * units, (each * 2 / 3,) * units, link, link, (0.0,) * units, **others)  # type: ignore[arg-type]


@st.composite
def works(draw: st.DrawFn, units: int = 5, parts: int = 3) -> StepTimings:
    count = draw(st.integers(1, units))
    seconds = st.lists(st.floats(0.01, 3), min_size=count, max_size=count).map(tuple)
    none_or_some = st.one_of(st.just((0.0,) * count), seconds)
    return StepTimings(
        draw(seconds), draw(seconds), draw(seconds), draw(seconds), draw(none_or_some), draw(st.integers(1, 3)),
        draw(st.sampled_from(["per_step", "per_micro_batch"])), draw(st.booleans()), draw(st.integers(1, parts)),
        draw(st.sampled_from([0.0, 0.3])), draw(st.sampled_from([None, 1, 2, 3])),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ sums by hand
# Two units: forward 1 + 1 s, backward 2 + 2 s, each reduced in 3 s and gathered in 1 s, in one part.

TWO = StepTimings((1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (1.0, 1.0), (0.0, 0.0), parts=1)
R0, R1, G0, G1 = (
    TransferOp("reduce", 0, 0),
    TransferOp("reduce", 1, 0),
    TransferOp("gather", 0, 0),
    TransferOp("gather", 1, 0),
)


def waits(timeline: Timeline) -> list[object]:
    return [(wait.why, wait.bucket, pytest.approx(wait.seconds)) for wait in timeline.waits]


def test_a_step_by_hand() -> None:
    # backward 1 until 2, 0 until 4; link: R1 2-5, R0 5-8, G0 8-9, G1 9-10; forward 0 9-10, 1 10-11.
    timeline = simulate_order(TWO, (R1, R0, G0, G1))
    assert timeline.step_s == 11 and waits(timeline) == [("gather", 0, 5)]
    assert late_gather_s(TWO) == 11 and timeline.exposed_s == 5
    # G1 before R0 puts R0 and G0 off by its second: R0 6-9, G0 9-10, forward 10-12.
    assert simulate_order(TWO, (R1, G1, R0, G0)).step_s == 12
    # G1 first: 8-9, G0 9-10, forward 0 waits until 10, and 1 for nothing.
    assert waits(simulate_order(TWO, (R1, R0, G1, G0))) == [("gather", 0, 6)]
    # If they may interrupt each other: R1 2-4, R0 4-7, R1 7-8, then G0 and G1 as above: 11 as well.
    assert lower_bound_s(TWO) == 11 == simulate_order(TWO, plan_order(TWO)).step_s
    # DDP: both moved by 10, and then both forward passes.
    assert ddp_step_s(TWO) == 12


def test_updates_and_the_agreement_by_hand() -> None:
    # Each update takes 2 s. R1 2-5, its update 5-7; R0 5-8, its update 8-10; G1 8-9, G0 10-11; forward 11-13.
    work = replace(TWO, update_s=(2.0, 2.0), agreement_s=0.5)
    assert simulate_order(work, (R1, R0, G1, G0)).step_s == 13
    # DDP: both updates behind all that is moved, instead of beside it.
    assert ddp_step_s(work) == 12 + 4
    # If G0 is first, G1 is not there before 12: forward 0 waits for 7, and 1 for nothing, as it begins at 12.
    assert simulate_order(work, (R1, R0, G0, G1)).step_s == 13
    # All updates behind the agreement at 8.5: 0 until 10.5, 1 until 12.5; G0 10.5-11.5, G1 12.5-13.5, forward to 14.5.
    timeline = simulate_order(replace(work, early=False), (R1, R0, G0, G1))
    assert timeline.step_s == 14.5 and waits(timeline) == [("gather", 0, 7.5), ("gather", 1, 1)]
    # Where gathering takes nothing, the agreement at 8 + 3 is what the first unit waits for.
    timeline = simulate_order(replace(TWO, gather_s=(0.0, 0.0), agreement_s=3.0), (R1, R0, G0, G1))
    assert timeline.step_s == 13 and waits(timeline) == [("agree", 0, 7)]


def test_the_bound_of_a_step_that_gathers_late_by_hand() -> None:
    # R1 2-5, R0 5-8, agreed at 8.5, both updated at 10.5: G0 10.5-11.5, then both forward passes.
    assert lower_bound_s(replace(TWO, update_s=(2.0, 2.0), agreement_s=0.5, early=False)) == 13.5
    # A link that has nothing to do until R0 at 6: R1 2-3, R0 6-7, G0 7-8, forward 8-10.
    assert lower_bound_s(replace(TWO, backward_s=(4.0, 2.0), reduce_s=(1.0, 1.0), early=False)) == 10


def test_what_is_left_of_a_step_by_hand() -> None:
    """Tails: in a second each is reduced, so before the last micro-batch what is computed is what is left."""
    work = replace(TWO, reduce_s=(1.0, 1.0), micro_batches=3, reduce="per_micro_batch")
    assert _urgency(work) == {
        ("gather", 1, 0): 1, ("gather", 0, 0): 2, ("reduce", 1, 2): 2, ("reduce", 0, 2): 1 + 2,
        ("reduce", 0, 1): 2 + 1 + 3, ("reduce", 1, 1): 4 + 2,  # backward, reduce, gather and forward; all backward, ...
        ("reduce", 0, 0): 2 + 6 + 2, ("reduce", 1, 0): 4 + 6 + 2,  # backward, a micro-batch, forward
    }  # fmt: skip
    assert _urgency(replace(work, agreement_s=5.0))["reduce", 1, 2] == 5 + 2
    assert _urgency(replace(work, update_s=(0.5, 5.0)))["reduce", 1, 2] == 5 + 1 + 1


def test_micro_batches_by_hand() -> None:
    # backward 4, forward 2, backward 1 until 8, 0 until 10; R1 8-11, R0 11-14, G0 14-15: forward 15-17.
    twice = replace(TWO, micro_batches=2)
    last = tuple(replace(op, micro_batch=1) for op in (R1, R0))
    assert simulate_order(twice, (*last, G0, G1)).step_s == 17 == lower_bound_s(twice)
    # Reduced twice: R1 2-5, R0 5-8; then backward 1 6-8 finds room, 0 8-10 too (just); R1 8-11 and so on, the same.
    each = replace(twice, reduce="per_micro_batch")
    timeline = simulate_order(each, (R1, R0, *last, G0, G1))
    assert timeline.step_s == 17 and waits(timeline) == [("gather", 0, 5)]
    # Room for one unit's gradients: R1 2-5, backward 0 5-7, R0 7-10; forward 7-9, backward 1 10-12, R1 12-15,
    # backward 0 15-17, R0 17-20, G0 20-21, forward 21-23.
    timeline = simulate_order(replace(each, max_gradients=1), (R1, R0, *last, G0, G1))
    assert timeline.step_s == 23
    assert waits(timeline) == [("room", 0, 3), ("room", 1, 1), ("room", 0, 3), ("gather", 0, 4)]
    # A bucket's gradients have no room for those of the next micro-batch before they are reduced.
    heads = _heads(replace(each, reduce_s=(20.0, 20.0)))
    assert heads["reduce", 1, 1] == heads["reduce", 1, 0] + 20 + each.backward_s[1]


def test_parts_by_hand() -> None:
    # In halves of 1.5 and 0.5 s, R0 gets in after half of R1, if it may: 2-3.5, (R1) 3.5-5, R0 5-8: no gain over 11.
    halves = replace(TWO, parts=2)
    order = tuple(TransferOp(op.kind, op.bucket, part) for op in (R1, R0, G0, G1) for part in (0, 1))
    assert simulate_order(halves, order).step_s == 11
    # Reduced in 1 s and gathered in 2: R1 2-3, half of G1 3-4, R0 4-5, G0 5-7, the rest of G1 7-8; forward 7-9.
    gap = replace(halves, reduce_s=(1.0, 1.0), gather_s=(2.0, 2.0))
    order = (*order[:2], TransferOp("gather", 1, 0), *order[2:6], TransferOp("gather", 1, 1))
    assert simulate_order(gap, order).step_s == 9 == simulate_order(gap, plan_order(gap)).step_s == lower_bound_s(gap)


def test_zero_3_by_hand() -> None:
    # Gathers of 1 s, reduces of 1 s. G0 0-1, forward 0 1-2, G1 1-2, forward 1 2-3 and backward 1 3-5 with what was
    # gathered once; 0 again 2-3; R1 5-6, backward 0 5-7, R0 7-8, and the next step's G0 begins at 8.
    work = replace(TWO, reduce_s=(1.0, 1.0))
    order = plan_zero3(work, 1)
    assert Counter((op.kind, op.bucket) for op in order) == {
        ("gather", 0): 1, ("gather", 1): 1, ("regather", 0): 1, ("reduce", 0): 1, ("reduce", 1): 1,
    }  # fmt: skip
    timeline = simulate_zero3(work, order, 1)
    assert timeline.step_s == 8 and waits(timeline) == [("gather", 0, 2)]
    # One at a time: G0 0-1, forward 0 1-2, G1 2-3, unit 1 3-6, then both R1 and the gather of 0, 8-10, R0 10-11.
    timeline = simulate_zero3(work, plan_zero3(work, 0), 0)
    assert timeline.step_s == 11 and timeline.exposed_s == 5


# -------------------------------------------------------------------------------------------------- what may begin when


def spans(timeline: Timeline, **wanted: object) -> list[TimelineSpan]:
    return [span for span in timeline.spans if all(getattr(span, key) == value for key, value in wanted.items())]


def check_lanes(timeline: Timeline, work: StepTimings) -> None:
    for lane in ("compute", "link", "update"):
        row = sorted(spans(timeline, lane=lane), key=lambda span: (span.begin_s, span.end_s))
        assert all(a.end_s <= b.begin_s + SMALL for a, b in pairwise(row)), lane
    assert timeline.step_s == pytest.approx(work.compute_s + timeline.exposed_s)


@given(works())
@settings(deadline=None, max_examples=150 if ALL else 37)
def test_every_plan_does_everything_once_and_nothing_too_soon(work: StepTimings) -> None:
    order = plan_order(work)
    assert len(set(order)) == len(order) == work.parts * work.buckets * (len(work.reduced_micro_batches) + 1)
    timeline = simulate_order(work, order)
    check_lanes(timeline, work)
    last_reduce = max(span.end_s for span in spans(timeline, kind="reduce"))
    for bucket in range(work.buckets):
        own = {kind: spans(timeline, kind=kind, bucket=bucket) for kind in ("reduce", "gather", "update", "forward")}
        for batch in work.reduced_micro_batches:
            (backward,) = spans(timeline, kind="backward", bucket=bucket, micro_batch=batch)
            assert all(s.begin_s >= backward.end_s for s in own["reduce"] if s.micro_batch == batch)
        (update,) = own["update"]
        ready = max(s.end_s for s in own["reduce"]) if work.early else last_reduce + work.agreement_s
        assert update.begin_s >= ready
        assert all(s.begin_s >= update.end_s for s in own["gather"])
        forward = max(own["forward"], key=lambda span: span.begin_s)
        assert forward.micro_batch == 0 and forward.begin_s >= max(s.end_s for s in own["gather"])
        assert bucket or forward.begin_s >= last_reduce + work.agreement_s
    if work.max_gradients is not None and len(work.reduced_micro_batches) == work.micro_batches:
        moments = [span.begin_s for span in spans(timeline, kind="backward")]
        for moment in moments:
            begun = sum(span.begin_s <= moment for span in spans(timeline, kind="backward"))
            ended = Counter((s.bucket, s.micro_batch) for s in spans(timeline, kind="reduce") if s.end_s <= moment)
            assert begun - sum(count == work.parts for count in ended.values()) <= work.max_gradients


@given(works(units=4), st.integers(0, 3))
@settings(deadline=None, max_examples=100 if ALL else 25)
def test_zero_3_holds_few_units_and_gathers_none_too_soon(work: StepTimings, depth: int) -> None:
    order = plan_zero3(work, depth)
    assert len(set(order)) == len(order)
    timeline = simulate_zero3(work, order, depth)
    check_lanes(timeline, work)
    limited = len(work.reduced_micro_batches) == work.micro_batches
    uses = sorted(spans(timeline, lane="compute"), key=lambda span: span.begin_s)
    held: list[tuple[float, float]] = []  # from the first part's gathering until the last use of it
    for number, use in enumerate(uses):
        kind = "gather" if use.kind == "forward" else "regather"
        gathers = spans(timeline, kind=kind, bucket=use.bucket, micro_batch=use.micro_batch)
        if number and uses[number - 1].bucket == use.bucket:
            assert not gathers
            held[-1] = (held[-1][0], use.end_s)
        else:
            assert len(gathers) == work.parts and max(s.end_s for s in gathers) <= use.begin_s
            held.append((min(s.begin_s for s in gathers), use.end_s))
        if use.kind == "backward" and use.micro_batch in work.reduced_micro_batches:
            reduces = spans(timeline, kind="reduce", bucket=use.bucket, micro_batch=use.micro_batch)
            assert len(reduces) == work.parts and min(s.begin_s for s in reduces) >= use.end_s
            behind = [s for s in spans(timeline, kind="reduce") if s.end_s > use.begin_s + SMALL]
            waiting = {(s.bucket, s.micro_batch) for s in behind} & {
                (other.bucket, other.micro_batch) for other in uses[: number + 1] if other.kind == "backward"
            }
            assert not limited or len(waiting) <= depth + 1
    for begin, _ in held:
        assert sum(first <= begin < last - SMALL for first, last in held) <= depth + 1


def test_an_order_that_leaves_something_out_or_cannot_be_carried_out_is_refused() -> None:
    with pytest.raises(ValueError, match="1 operations are missing"):
        simulate_order(TWO, (R1, R0, G0))
    with pytest.raises(ValueError, match="done before"):
        simulate_order(TWO, (R1, R1, R0, G0, G1))
    with pytest.raises(ValueError, match="comes later"):
        simulate_order(TWO, (R1, G0, R0, G1))


# ----------------------------------------------------------------------------------------------------------- how good


def orders(work: StepTimings) -> list[tuple[TransferOp, ...]]:
    """Every order there is, in whole buckets."""
    ops = plan_order(work)
    found = []
    for order in permutations(ops):
        at = {op: number for number, op in enumerate(order)}
        if all(at[op] > at[TransferOp("reduce", op.bucket, 0)] for op in ops if op.kind == "gather"):
            found.append(order)
    return found


@given(works(units=3, parts=1))
@settings(deadline=None, max_examples=60 if ALL else 15)
def test_near_the_best_of_all_orders_and_none_is_below_the_bound(work: StepTimings) -> None:
    work = replace(work, micro_batches=1, max_gradients=None, early=True, update_s=(0.0,) * work.buckets)
    best = min(simulate_order(work, order).step_s for order in orders(work))
    assert lower_bound_s(work) <= best + SMALL
    assert best - SMALL <= simulate_order(work, plan_order(work)).step_s <= 1.15 * best


@given(works(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150 if ALL else 37)
def test_no_order_is_below_the_bound_and_no_plan_is_worse_than_late(work: StepTimings, random: object) -> None:
    assert lower_bound_s(work) - SMALL <= simulate_order(work, plan_order(work)).step_s <= late_gather_s(work) + SMALL
    # Any order in which gathers stand behind what they need.
    left = list(plan_order(replace(work, early=False)))
    reduces = [op for op in left if op.kind == "reduce"]
    order = list(reduces)
    for op in left:
        if op.kind == "gather":
            own = [at for at, other in enumerate(order) if other.kind == "reduce" and other.bucket == op.bucket]
            first = max(own) + 1 if work.early else len(reduces)
            order.insert(random.randint(first, len(order)), op)  # type: ignore[attr-defined]
    assert simulate_order(work, order).step_s >= lower_bound_s(work) - SMALL


RATIOS = (0.5, 0.8, 1.0, 1.25, 2.0)
# Step over the longer one of computation and communication, for each ratio.
REACHED = {
    8: (1.0625, 1.10, 1.1355, 1.10, 1.0625),
    16: (1.03125, 1.05, 1.0678, 1.05, 1.03125),
    32: (1.0157, 1.025, 1.034, 1.025, 1.0157),
}


@pytest.mark.parametrize("units", REACHED)
def test_equal_units(units: int) -> None:
    for ratio, reached in zip(RATIOS, REACHED[units], strict=True):
        work = alike(units, ratio)
        step = simulate_order(work, plan_order(work)).step_s
        assert step <= max(1, ratio) * (reached + 1e-4)
        assert step <= 1.01 * lower_bound_s(work)
        assert step <= ddp_step_s(work) * (1 + SMALL)
    even = alike(units, 1.0)
    assert ddp_step_s(even) == pytest.approx(4 / 3 + 1 / (1.5 * units))
    assert lower_bound_s(even) == pytest.approx(1 + 1 / units)
    assert late_gather_s(even) > 1.167


def test_a_plan_for_another_ratio_is_as_good() -> None:
    order = plan_order(alike(8, 1.0))
    for ratio in (0.8, 1.25):
        work = alike(8, ratio)
        assert simulate_order(work, order).step_s <= 1.01 * simulate_order(work, plan_order(work)).step_s


def test_many_units_are_planned_to_within_a_thousandth() -> None:
    work = alike(512, 1.0, agreement_s=0.001)
    assert simulate_order(work, plan_order(work)).step_s <= 1.001 * lower_bound_s(work)


def test_more_prefetch_is_never_slower_and_hides_what_can_be_hidden() -> None:
    steps = [simulate_zero3(work := alike(8, 0.5), plan_zero3(work, depth), depth).step_s for depth in range(4)]
    assert steps == sorted(steps, reverse=True)
    # What no prefetch can hide: the last reduce and the first gather of a step.
    assert steps[1] == pytest.approx(1 + 2 * 0.25 / 8)
