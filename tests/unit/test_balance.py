"""Divisions are the best there are, respect every limit, and are the same for the same measurements."""

import itertools
import json
import time
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.core.errors import ConfigError
from phalanx.layout import balance
from phalanx.layout.balance import (
    CostLine,
    Division,
    Speed,
    _split_below,
    cut_into_micro_batches,
    divide,
    drop_empty_micro_batches,
    in_lockstep,
    parse_division,
    scale_division,
    slowest_s,
    split_by_cost,
    split_by_weights,
    state_shares,
)
from phalanx.layout.buckets import shard_cuts
from tests.helpers import ALL


def compositions(total: int, takers: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `total` pieces to so many takers."""
    for cuts in itertools.combinations_with_replacement(range(total + 1), takers - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def best_of_all(total: int, speeds: list[Speed], part_s: float) -> float:
    """By trying everything; more parts than sequences cannot be faster than as many."""
    return min(
        slowest_s(Division(shares, parts), speeds, part_s)
        for parts in range(1, max(total, 1) + 1)
        for shares in compositions(total, len(speeds))
        if all(share <= parts * speed.most for share, speed in zip(shares, speeds, strict=True))
    )


speeds_strategy = st.lists(
    st.builds(
        Speed,
        sequence_s=st.sampled_from([0.25, 0.3, 1.0, 1.1, 2.0, 3.0, 40.0]),
        fixed_s=st.sampled_from([0.0, 0.1, 0.5, 3.0]),
        most=st.sampled_from([1, 2, 3, 5, balance.UNBOUND]),
    ),
    min_size=1,
    max_size=4,
)


def up_to_eight(fixed_s: float) -> st.SearchStrategy[list[Speed]]:
    """Speeds of up to eight ranks, of which a micro-batch costs `fixed_s` by itself at most."""
    speed = st.builds(
        Speed,
        sequence_s=st.sampled_from([0.1, 1.0, 1.7]) | st.floats(0.1, 4.0),
        fixed_s=st.sampled_from([0.0, 0.2]) | st.floats(0.0, fixed_s),
        most=st.sampled_from([1, 2, 5, 17, balance.UNBOUND]),
    )
    return st.lists(speed, min_size=1, max_size=8)


@settings(max_examples=400 if ALL else 50, deadline=None)
@given(total=st.integers(0, 12), speeds=speeds_strategy, part_s=st.sampled_from([0.0, 0.2, 5.0]))
@example(total=12, speeds=[Speed(1.0, most=1), Speed(1.0), Speed(1.0)], part_s=0.0)
@example(total=12, speeds=[Speed(1.0, 3.0, 1), Speed(0.25, 0.0, 3)], part_s=0.0)
@example(total=1, speeds=[Speed(40.0), Speed(0.25)], part_s=0.0)
def test_no_division_is_faster(total: int, speeds: list[Speed], part_s: float) -> None:
    division = divide(total, speeds, part_s)
    assert sum(division.shares) == total
    assert division.fits([speed.most for speed in speeds])
    found, best = slowest_s(division, speeds, part_s), best_of_all(total, speeds, part_s)
    assert found == pytest.approx(best, rel=1e-8), division


@settings(max_examples=150 if ALL else 20, deadline=None)
@given(
    total=st.integers(0, 60) | st.integers(0, 400),
    speeds=up_to_eight(fixed_s=5.0),
    part_s=st.sampled_from([0.0, 0.3]),
)
def test_no_number_of_micro_batches_that_was_not_tried_is_better(
    total: int, speeds: list[Speed], part_s: float
) -> None:
    """The plain way: try all, and of equals take the least."""
    tried = []
    for parts in range(max(1, -(-total // sum(speed.most for speed in speeds))), total + 2):
        lines = [CostLine(parts * s.fixed_s, s.sequence_s, min(total, parts * s.most), parts) for s in speeds]
        division = Division(split_by_cost(total, lines), parts)
        tried.append((slowest_s(division, speeds, part_s), division))
    found, best = divide(total, speeds, part_s), min(seconds for seconds, _ in tried)
    assert slowest_s(found, speeds, part_s) == pytest.approx(best, rel=1e-8)
    assert found.parts <= next(division.parts for seconds, division in tried if seconds <= best * (1 + 1e-12))


@settings(max_examples=200 if ALL else 50, deadline=None)
@given(
    total=st.integers(0, 10),
    lines=st.lists(
        st.builds(
            CostLine,
            base=st.sampled_from([0.0, 1.5, 7.0]),
            each=st.sampled_from([0.5, 1.0, 3.0]),
            most=st.integers(0, 10),
            least=st.integers(0, 3),
            per_round=st.sampled_from([1, 2, 3, balance.UNBOUND]),
            round_cost=st.sampled_from([0.0, 0.2, 4.0]),
        ).filter(lambda line: line.least <= line.per_round),
        min_size=1,
        max_size=4,
    ).filter(lambda lines: sum(line.most for line in lines) >= 10),
)
def test_no_split_is_better(total: int, lines: list[CostLine]) -> None:
    def worst(shares: tuple[int, ...]) -> float:
        return max(line.cost(pieces) for line, pieces in zip(lines, shares, strict=True))

    found = split_by_cost(total, lines)
    assert sum(found) == total
    assert all(0 <= pieces <= line.most for pieces, line in zip(found, lines, strict=True))
    possible = [
        shares
        for shares in compositions(total, len(lines))
        if all(pieces <= line.most for pieces, line in zip(shares, lines, strict=True))
    ]
    assert worst(found) == pytest.approx(min(map(worst, possible)), rel=1e-12)


@settings(max_examples=100 if ALL else 25, deadline=None)
@given(
    total=st.integers(0, 2000),
    lines=st.lists(
        st.builds(
            CostLine,
            base=st.floats(0, 5),
            each=st.floats(0.1, 5),
            most=st.just(2000),
            per_round=st.sampled_from([1, 7, balance.UNBOUND]),
            round_cost=st.sampled_from([0.0, 2.0]) | st.floats(0, 20),
        ),
        min_size=1,
    ),
)
def test_what_is_given_at_once_is_what_would_be_given_piece_by_piece(total: int, lines: list[CostLine]) -> None:
    taken = [0] * len(lines)
    for _ in range(total):
        costs = [line.cost(pieces + 1) for line, pieces in zip(lines, taken, strict=True)]
        taken[costs.index(min(costs))] += 1
    found = split_by_cost(total, lines)
    worst = max((line.cost(pieces) for line, pieces in zip(lines, taken, strict=True)))
    assert max(line.cost(pieces) for line, pieces in zip(lines, found, strict=True)) == pytest.approx(worst, rel=1e-12)


def best_apart(total: int, speeds: list[Speed]) -> float:
    """By trying everything: each rank in the number of micro-batches that is best for it."""

    def alone_s(share: int, speed: Speed) -> float:
        parts = range(1, max(total, 1) + 1)
        return min(speed.seconds(share, number) for number in parts if share <= number * speed.most)

    return min(
        max(alone_s(share, speed) for share, speed in zip(shares, speeds, strict=True))
        for shares in compositions(total, len(speeds))
    )


@settings(max_examples=400 if ALL else 50, deadline=None)
@given(total=st.integers(0, 12), speeds=speeds_strategy)
@example(total=12, speeds=[Speed(1.0, 3.0, 1), Speed(0.25, 0.0, 3)])
@example(total=9, speeds=[Speed(1.0, 0.5, 2), Speed(1.0, 3.0, 5), Speed(40.0, most=1)])
def test_no_division_is_faster_where_each_rank_runs_its_own_number(total: int, speeds: list[Speed]) -> None:
    division, most = divide(total, speeds, lockstep=False), [speed.most for speed in speeds]
    assert sum(division.shares) == total
    assert division.fits(most)
    # As few as memory allows, and one at least.
    own = [division.micro_batches_of(rank) for rank in range(len(speeds))]
    assert own == [max(1, -(-share // few)) for share, few in zip(division.shares, most, strict=True)]
    assert division.parts == max(own)
    found = slowest_s(division, speeds)
    assert found == pytest.approx(best_apart(total, speeds), rel=1e-9), division
    assert found <= slowest_s(divide(total, speeds), speeds) * (1 + 1e-9)


@settings(max_examples=100 if ALL else 25, deadline=None)
@given(
    total=st.integers(0, 600),
    speeds=up_to_eight(fixed_s=50.0),
)
def test_own_numbers_are_those_of_giving_one_sequence_after_the_other(total: int, speeds: list[Speed]) -> None:
    def seconds(share: int, speed: Speed) -> float:
        return speed.seconds(share, max(1, -(-share // speed.most)))

    taken = [0] * len(speeds)
    for _ in range(total):
        costs = [seconds(share + 1, speed) for share, speed in zip(taken, speeds, strict=True)]
        taken[costs.index(min(costs))] += 1
    worst = max(seconds(share, speed) for share, speed in zip(taken, speeds, strict=True))
    assert slowest_s(divide(total, speeds, lockstep=False), speeds) == pytest.approx(worst, rel=1e-9)


def test_what_a_line_costs_by_hand() -> None:
    line = CostLine(2.0, 3.0, most=9, least=2, per_round=3, round_cost=10.0)  # at least two at once, three at most
    assert [line.cost(pieces) for pieces in range(8)] == [8.0, 8.0, 8.0, 11.0, 24.0, 27.0, 30.0, 43.0]


@given(total=st.integers(0, 3000), each=st.lists(st.floats(0.1, 10), min_size=1, max_size=30))
def test_few_are_left_to_be_given_one_by_one(total: int, each: list[float]) -> None:
    lines = [CostLine(0.0, seconds, total) for seconds in each]
    at_once, all_of_them = _split_below(total, lines), split_by_cost(total, lines)
    assert all(0 <= few <= share for few, share in zip(at_once, all_of_them, strict=True))
    assert total - sum(at_once) <= 2 * len(lines)  # equal ones get one more at the same cost


def test_other_things_than_sequences_can_be_split() -> None:
    # 2^33 elements over memories of which 0, 8 and 24 GiB are in use already, 4 bytes an element: the fullest is the
    # least full that it can be.
    gib = float(2**30)
    taken = split_by_cost(2**33, [CostLine(used * gib, 4.0, 2**33) for used in (0.0, 8.0, 24.0)])
    assert taken == (5 * 2**30, 3 * 2**30, 0)
    # 32 layers over stages of unlike speed, of which the first also has an embedding to do.
    assert split_by_cost(32, [CostLine(2.0, 1.0, 32), CostLine(0.0, 2.0, 32), CostLine(0.0, 1.0, 8)]) == (16, 8, 8)


def test_what_people_expect() -> None:
    assert divide(160, [Speed(1.0), Speed(3.0)]) == Division((120, 40), 1)
    assert divide(160, [Speed(2.0), Speed(2.0), Speed(1.0)]) == Division((40, 40, 80), 1)
    assert divide(7, [Speed(1.0)] * 3) == Division((3, 2, 2), 1)
    # Little memory at one: more micro-batches for all, if that is worth it.
    assert divide(8, [Speed(1.0, most=1), Speed(1.0)]) == Division((4, 4), 4)
    assert divide(8, [Speed(1.0, 3.0, 1), Speed(1.0, 3.0)]) == Division((1, 7), 1)
    # Nothing at all for one that would only hold up the others.
    assert divide(4, [Speed(1.0), Speed(1.0), Speed(2.5, 0.0)]).shares == (2, 2, 0)
    # One sequence at a time, one device at a third of the speed: in lockstep it holds up the other in each.
    unlike = [Speed(1.0, most=1), Speed(3.0, most=1)]
    assert slowest_s(divide(8, unlike), unlike) == 12.0
    assert divide(8, unlike, lockstep=False) == Division((6, 2), 6, (6, 2))
    assert slowest_s(Division((6, 2), 6, (6, 2)), unlike) == 6.0
    assert divide(8, [Speed(1.0, most=2)] * 2, lockstep=False) == Division(
        (4, 4), 2
    )  # all alike is no number of one's own
    assert divide(1, unlike, lockstep=False) == Division((1, 0), 1)


def test_the_fewest_micro_batches_are_tried_where_more_look_better_in_fractions() -> None:
    speeds = [Speed(2.0, 0.5, 2), Speed(3.0, 2.0, 5), Speed(2.0, 1.0, 10), Speed(2.0, 0.0, 10)]
    assert divide(13, speeds) == Division((2, 2, 4, 5), 1)
    assert balance._fluid_parts(13, [(each.fixed_s, each.sequence_s, each.most) for each in speeds]) > 1.5
    # And each number on the way there.
    assert divide(23, [Speed(1.0, 0.5, 4), Speed(0.7, 1.0, 9), Speed(0.7, 0.5, 2)]) == Division((8, 9, 6), 3)


def test_a_device_that_holds_nothing_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"not even a micro-batch of one sequence fits into the memory of ranks 1, 3;"
    ):
        divide(8, [Speed(1.0), Speed(1.0, most=0), Speed(1.0), Speed(1.0, most=0)])
    with pytest.raises(ConfigError, match=r"of rank 0;"):
        cut_into_micro_batches([4, 4], [0, 4])


THOUSAND = [(4, [2, 4, 8, 16], 16384), (1024, [2, 4, 8, 16], 16384), (1024, [1, 2, 3, 4, 5], 65536)]


@pytest.mark.parametrize(("kinds", "limits", "total"), THOUSAND)
def test_a_thousand_devices_with_numbers_of_their_own_are_divided_exactly(
    kinds: int, limits: list[int], total: int
) -> None:
    speeds = [Speed(1.0 + (rank % kinds) / kinds, 0.2, limits[rank % len(limits)]) for rank in range(1024)]
    begun = time.process_time()
    division = divide(total, speeds, lockstep=False)
    print(f"{kinds} kinds: {(time.process_time() - begun) * 1e3:.1f} ms, up to {division.parts} parts")
    assert sum(division.shares) == total
    assert division.fits([speed.most for speed in speeds])
    seconds, had = slowest_s(division, speeds) * (1 - 1e-9), 0
    for speed in speeds:  # in less time than that there would be too few
        share = int(seconds / speed.sequence_s)
        while share and speed.seconds(share, -(-share // speed.most)) > seconds:
            share -= 1
        had += share
    assert had < total
    assert seconds < slowest_s(divide(total, speeds), speeds)


@pytest.mark.parametrize(("kinds", "limits", "total"), THOUSAND)
def test_a_thousand_devices_are_divided_exactly(kinds: int, limits: list[int], total: int) -> None:
    """Of few kinds, or each a little different as measured ones are, with memories that bind."""
    speeds = [Speed(1.0 + (rank % kinds) / kinds, 0.2, limits[rank % len(limits)]) for rank in range(1024)]
    begun = time.process_time()
    division = divide(total, speeds)
    print(f"{kinds} kinds: {(time.process_time() - begun) * 1e3:.1f} ms, {division.parts} parts")
    assert sum(division.shares) == total
    assert division.fits([speed.most for speed in speeds])
    seconds = slowest_s(division, speeds)
    for parts in range(1, 80):  # no number of micro-batches allows less than that: too few pieces would be had for it
        room = [int((seconds * (1 - 1e-9) - parts * s.fixed_s) / s.sequence_s) for s in speeds]
        had = sum(min(parts * s.most, n) if n >= parts else -(10**9) for n, s in zip(room, speeds, strict=True))
        assert had < total, parts
    assert divide(total, speeds) == division


def test_given_shares_are_cut_into_what_fits() -> None:
    assert cut_into_micro_batches([5, 2, 0], [8, 8, 8]) == Division((5, 2, 0), 1)
    assert cut_into_micro_batches([5, 2, 0], [2, 1, 8]) == Division((5, 2, 0), 3)
    assert cut_into_micro_batches([0, 0], [1, 1]) == Division((0, 0), 1)
    assert Division((5, 2, 0), 3).largest_micro_batch(0) == 2
    assert Division((5, 2, 0), 3).largest_micro_batch(2) == 1  # a micro-batch of weight 0 has one sequence
    assert not Division((5, 2), 3).fits([1, 9])
    assert not Division((5, 2), 3).fits([9, 9, 9])
    own = cut_into_micro_batches([5, 2, 0], [2, 1, 8], lockstep=False)
    assert own == Division((5, 2, 0), 3, (3, 2, 1))
    assert [own.largest_micro_batch(rank) for rank in range(3)] == [2, 1, 1]
    assert own.fits([2, 1, 1]) and not own.fits([1, 1, 1])
    assert scale_division(14, own, [2, 1, 8], lockstep=False) == Division((10, 4, 0), 5, (5, 4, 1))
    assert scale_division(7, own, [2, 1, 8], lockstep=False) == own


def test_no_rank_need_run_a_micro_batch_without_a_sequence() -> None:
    assert drop_empty_micro_batches(Division((9, 4, 2, 0), 3)) == Division((9, 4, 2, 0), 3, (3, 3, 2, 1))
    assert drop_empty_micro_batches(Division((4, 4), 2)) == Division((4, 4), 2)
    assert drop_empty_micro_batches(Division((5, 2, 0), 3, (3, 2, 1))) == Division((5, 2, 0), 3, (3, 2, 1))


@pytest.mark.parametrize("division", [Division((5, 2, 0), 3), Division((5, 2, 0), 3, (3, 2, 1)), Division((4,), 2)])
def test_a_division_is_written_and_read(division: Division) -> None:
    assert parse_division(json.loads(json.dumps(division.to_json()))) == division


def test_what_is_no_division_is_not_read() -> None:
    assert parse_division({"shares": [5, 2], "parts": [3, 3]}) == Division((5, 2), 3)
    good = {"shares": [5, 2], "parts": [3, 1]}
    broken = [{"parts": value} for value in (None, 0, "3", True, 2.0, [3], [3, 0], [3, None], [])]
    broken += [{"shares": value} for value in (None, [], [5, -2], [5, "2"], 7, [5, 2.0])]
    for change in broken:
        assert parse_division(good | change) is None, change
    assert parse_division(None) is None and parse_division([5, 2]) is None


@pytest.mark.parametrize(
    ("zero", "reduce", "together"),
    [(1, "per_step", False), (2, "per_step", False), (3, "per_step", True), (1, "per_micro_batch", True)],
)
def test_ranks_are_in_lockstep_where_something_travels_in_each_micro_batch(
    zero: int, reduce: str, together: bool
) -> None:
    assert in_lockstep(zero, reduce) == together


@given(
    shares=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
    most=st.integers(1, 9),
    total=st.integers(1, 60),
)
def test_a_smaller_batch_is_divided_in_proportion(shares: list[int], most: int, total: int) -> None:
    division = cut_into_micro_batches(shares, [most] * len(shares))
    found = scale_division(total, division, [most] * len(shares))
    assert sum(found.shares) == total
    assert found.fits([most] * len(shares))
    for share, mine in zip(shares, found.shares, strict=True):
        assert abs(mine - share * total / sum(shares)) < 1
    if total == sum(shares):
        assert found == division


# ----------------------------------------------------------------------------------------------- what is sharded


weights_strategy = st.lists(st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0, 7.0]), min_size=1, max_size=6).filter(any)


@settings(max_examples=300 if ALL else 75, deadline=None)
@given(elements=st.integers(0, 5000), granule=st.sampled_from([1, 3, 64]), weights=weights_strategy)
def test_a_bucket_is_cut_in_proportion(elements: int, granule: int, weights: list[float]) -> None:
    cuts = shard_cuts(elements, granule, weights)
    assert (cuts[0], len(cuts)) == (0, len(weights) + 1)
    assert elements <= cuts[-1] < elements + granule
    assert all(cut % granule == 0 for cut in cuts)
    for weight, (start, stop) in zip(weights, itertools.pairwise(cuts), strict=True):
        assert abs((stop - start) - cuts[-1] * weight / sum(weights)) < granule * (1 + 1e-9)
        assert stop == start if weight == 0 else stop >= start


@settings(max_examples=200 if ALL else 50, deadline=None)
@given(buckets=st.lists(st.integers(1, 300), min_size=1, max_size=60), weights=weights_strategy)
def test_over_many_buckets_nobody_gains(buckets: list[int], weights: list[float]) -> None:
    taken = [0] * len(weights)
    for elements in buckets:
        cuts = shard_cuts(elements, 64, weights, taken=taken)
        for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
            taken[rank] += stop - start
            assert abs((stop - start) - cuts[-1] * weights[rank] / sum(weights)) < 64 * len(weights)
        for own, weight in zip(taken, weights, strict=True):
            assert abs(own - sum(taken) * weight / sum(weights)) < 64 * 2.5, (taken, weights)


def test_small_buckets_go_round() -> None:
    """A norm's few elements are one granule: without an account of earlier ones rank 0 would own all of them."""
    taken = [0, 0, 0]
    for _ in range(8):
        cuts = shard_cuts(64, 64, [2.0, 1.0, 1.0], taken=taken)
        taken = [own + stop - start for own, (start, stop) in zip(taken, itertools.pairwise(cuts), strict=True)]
    assert taken == [4 * 64, 2 * 64, 2 * 64]
    assert shard_cuts(64, 64, [2.0, 1.0, 1.0]) == (0, 64, 64, 64)


@settings(max_examples=200 if ALL else 50, deadline=None)
@given(
    elements=st.integers(0, 40),
    limits=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.integers(-3, 30)), min_size=1, max_size=5),
)
def test_no_rank_owns_more_than_it_has_room_for(elements: int, limits: list[tuple[float, int]]) -> None:
    weights, room = [weight for weight, _ in limits], [few for _, few in limits]
    if not any(weights):
        return
    could = sum(max(0, few // 4 * 4) for weight, few in limits if weight)
    if could < elements:
        with pytest.raises(ConfigError, match=rf"{elements} elements do not fit where ranks have room for"):
            shard_cuts(elements, 4, weights, room)
        return
    cuts = shard_cuts(elements, 4, weights, room)
    owned = [stop - start for start, stop in itertools.pairwise(cuts)]
    assert elements <= sum(owned) < elements + 4
    assert all(0 <= own <= max(0, few) for own, few in zip(owned, room, strict=True))
    free = [n for n, few in enumerate(room) if weights[n] and owned[n] + 4 <= few]
    for a, b in itertools.permutations(free, 2):  # those that are not full have their proportion
        assert abs(owned[a] * weights[b] - owned[b] * weights[a]) < 4 * (weights[a] + weights[b]) * (1 + 1e-9)


def test_what_people_expect_of_shards() -> None:
    assert shard_cuts(1024, 64, [4.0, 2.0, 1.0, 1.0]) == (0, 512, 768, 896, 1024)
    assert shard_cuts(1000, 64, [2.0, 1.0, 1.0, 0.0]) == (0, 512, 768, 1024, 1024)
    assert shard_cuts(10, 64, [1.0, 1.0]) == (0, 64, 64)
    assert shard_cuts(0, 64, [1.0, 1.0]) == (0, 0, 0)
    assert shard_cuts(512, 64, [1.0, 1.0], room=[128, 1000]) == (0, 128, 512)
    assert state_shares([10.0, 10.0, 10.0], 12.0) == (1 / 3, 1 / 3, 1 / 3)
    assert state_shares([10.0, 1.0, 10.0], 12.0) == pytest.approx((5.5 / 12, 1 / 12, 5.5 / 12))
    assert state_shares([10.0, -2.0], 8.0) == (1.0, 0.0)
    assert state_shares([-1.0, 0.0], 0.0) == (0.5, 0.5)


@settings(max_examples=300 if ALL else 75, deadline=None)
@given(
    rooms=st.lists(st.floats(-5, 100).map(lambda room: round(room, 9)), min_size=1, max_size=6),
    needed=st.floats(0.01, 300),
)
def test_state_is_as_even_as_memories_allow(rooms: list[float], needed: float) -> None:
    could = sum(max(0.0, room) for room in rooms)
    if could < needed and min(rooms) * len(rooms) < needed:
        with pytest.raises(ConfigError, match=r"the optimizer state needs .* MiB left; add devices"):
            state_shares(rooms, needed)
        return
    shares = state_shares(rooms, needed)
    assert sum(shares) == pytest.approx(1)
    assert all(share * needed <= max(0.0, room) * (1 + 1e-9) for share, room in zip(shares, rooms, strict=True))
    # Who has less than the most has all that there is room for.
    for share, room in zip(shares, rooms, strict=True):
        assert share == pytest.approx(max(shares)) or share * needed == pytest.approx(max(0.0, room), abs=1e-9)


def test_the_largest_remainders_gain_and_of_equals_the_first() -> None:
    assert split_by_weights([2.0, 1.0], 10) == [7, 3]
    assert split_by_weights([1.0, 1.0, 1.0], 2) == [1, 1, 0]


def test_a_rank_that_has_time_for_one_sequence_in_each_micro_batch_does_them() -> None:
    whole, pieces, binds = balance._capacity([(0.0, 1.0, 10), (1.0, 1.0, 10)], 3, 6.0)
    assert (pieces, binds) == (9, False) and whole == pytest.approx(9.0)
