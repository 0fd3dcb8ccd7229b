"""The rules by which training is judged: bounds of losses, data passed over, checksums, ranks that stay slow."""

import math
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.train.anomalies import LEAST, bound
from phalanx.train.checksums import as_integers, checksum, verdict
from phalanx.train.skips import Skips
from phalanx.train.stragglers import STAYS_S, STEPS, Stragglers

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


# ------------------------------------------------------------------------------------------------------------ the bound


@calm
@given(st.lists(st.floats(0.1, 20), min_size=LEAST, max_size=70), st.floats(1, 50))
def test_a_bound_is_above_most_losses_and_few_of_them_do_not_move_it_far(losses: list[float], factor: float) -> None:
    limit = bound(losses, factor)
    assert limit > sorted(losses)[len(losses) // 2 - 1]
    assert sum(loss <= limit for loss in losses) >= len(losses) / 2
    spoiled = [*losses[: len(losses) // 2 + 1], *[1e9] * (len(losses) // 2 - 1)]
    assert bound(spoiled, factor) < 1e6


def test_the_bound_is_what_the_page_says() -> None:
    losses = [2.0, 2.1, 2.2, 2.3, 2.4] * 4
    assert math.isclose(bound(losses, 10.0), 2.2 + 10 * 1.4826 * 0.1, rel_tol=1e-9)
    assert math.isclose(bound([3.0] * LEAST, 10.0), 3.3)
    assert bound([3.0] * (LEAST - 1), 10.0) == math.inf


# ----------------------------------------------------------------------------------------------------- data passed over


@calm
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=5), st.integers(1, 80))
def test_batches_follow_one_another_but_for_those_that_are_passed_over(
    rollbacks: list[tuple[int, int]], steps: int
) -> None:
    skips, bad = Skips(), set()
    for last, more in rollbacks:
        first = max(1, last - more)
        bad |= {skips.batch(step) for step in range(first, last + 1)}
        skips = skips.with_steps(first, last)
    walked = [skips.batch(step) for step in range(1, steps + 1)]
    expected = [batch for batch in range(steps + 300) if not any(a <= batch < b for a, b in skips.stretches)]
    assert walked == expected[:steps]
    assert not bad & set(walked)
    again = Skips.of({"step": 7, **skips.header(7)})
    assert again == skips
    assert skips.header(7)["skipped"] == skips.before(8)


def test_what_came_before_a_stretch_is_as_it_was() -> None:
    skips = Skips().with_steps(12, 14)
    assert [skips.batch(step) for step in (11, 12, 13)] == [10, 14, 15]
    assert skips.recent(20, 1000) == 1
    assert skips.recent(2000, 1000) == 0


def test_a_header_of_an_older_version_is_understood() -> None:
    old = Skips.of({"step": 10, "skipped": 3})
    assert [old.batch(step) for step in (10, 11)] == [9, 13]
    assert Skips.of({"step": 10, "skipped": 0}) == Skips()


# ------------------------------------------------------------------------------------------------------------ checksums


@calm
@given(st.integers(0, 63), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_any_bit_that_flips_changes_the_sum(bit: int, dtype: torch.dtype) -> None:
    values = torch.linspace(-3, 3, 7).to(dtype)
    before = int(checksum(values))
    bits = as_integers(values)
    bit %= 8 * values.element_size()
    mask = torch.iinfo(bits.dtype).min if bit == 8 * values.element_size() - 1 else 1 << bit
    bits[3] ^= mask
    assert int(checksum(values)) != before


@calm
@given(st.integers(0, 5), st.integers(0, 30), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_a_sum_of_any_part_of_a_buffer_knows_each_of_its_elements(start: int, count: int, dtype: torch.dtype) -> None:
    part = torch.arange(1, 40).to(dtype)[start : start + count]
    before = int(checksum(part))
    for index in range(count):
        part[index] += 1
        assert int(checksum(part)) != before
        part[index] -= 1
    assert int(checksum(part)) == before


def test_the_majority_is_believed() -> None:
    names = ["a", "b"]
    assert verdict([[1, 2]] * 3, names) is None
    found = verdict([[1, 2], [1, 9], [1, 2]], names)
    assert found is not None
    assert (found.ranks, found.parameters, found.healthy) == ((1,), ("b",), {"b": 0})
    two = verdict([[7, 2], [1, 9], [1, 2]], names)
    assert two is not None
    assert (two.ranks, two.healthy) == ((0, 1), {"a": 1, "b": 0})


@calm
@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=2), min_size=2, max_size=6))
def test_without_a_majority_nobody_is(table: list[list[int]]) -> None:
    found = verdict(table, ["a", "b"])
    if found is None:
        assert len({tuple(row) for row in table}) == 1
        return
    for index, name in enumerate(["a", "b"]):
        column = [row[index] for row in table]
        most = max(column.count(value) for value in column)
        if len(set(column)) > 1 and 2 * most <= len(column):
            assert not found.healthy
            assert found.ranks == tuple(range(len(table)))
        elif found.healthy and name in found.healthy:
            healthy = column[found.healthy[name]]
            assert 2 * column.count(healthy) > len(column)
            assert all(rank in found.ranks for rank, value in enumerate(column) if value != healthy)


# ----------------------------------------------------------------------------------------------------------- stragglers


def walked(paces: Any, times: int, stragglers: Stragglers, begin: float = 0.0) -> list[tuple[int, float, float]]:
    found = []
    for number in range(times):
        found += stragglers.observe(begin + 10.0 * number, paces)
    return found


def test_a_rank_that_stays_slow_is_named_once() -> None:
    stragglers = Stragglers(2)
    assert walked([1.0, 2.0], 50, stragglers) == []
    [found] = walked([1.0, 6.0], 80, stragglers, 500.0)
    assert (found[0], found[1]) == (1, 3.0)
    assert found[2] >= STAYS_S


def test_a_rank_that_is_slow_for_a_while_is_not() -> None:
    stragglers = Stragglers(1)
    assert walked([1.0], 50, stragglers) == []
    assert walked([5.0], 20, stragglers, 500.0) == []
    assert walked([1.0], 50, stragglers, 700.0) == []
    assert walked([5.0], 20, stragglers, 1200.0) == []


@calm
@given(st.floats(0.01, 100), st.integers(STEPS, 200))
def test_a_rank_that_is_always_as_slow_is_not_either(pace: float, times: int) -> None:
    assert walked([pace, 1.0], times, Stragglers(2)) == []


def test_a_pace_that_nobody_measures_says_nothing() -> None:
    assert Stragglers(2).observe(0.0, []) == []
