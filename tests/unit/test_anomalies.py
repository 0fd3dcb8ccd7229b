"""The rules by which training is judged: bounds of losses, data passed over, checksums, ranks that stay slow."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.config.operations import ResilienceSection
from phalanx.core.errors import Diverged
from phalanx.core.records import StepRecord
from phalanx.core.run_paths import RunPaths
from phalanx.trainer.anomalies import (
    MAX_NOT_FINITE_STEPS,
    MIN_LOSSES,
    WINDOW,
    AnomalyDetector,
    RollbackRequest,
    compute_spike_bound,
    read_losses,
)
from phalanx.trainer.checksums import checksum, find_deviating_ranks
from phalanx.trainer.skipped_batches import SkippedBatches
from phalanx.trainer.stragglers import REPORT_AFTER_S, STEPS, StragglerDetector
from phalanx.workload.master_weights import view_as_integers

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


# ------------------------------------------------------------------------------------------------------------ the bound


@calm
@given(st.lists(st.floats(0.1, 20), min_size=MIN_LOSSES, max_size=70), st.floats(1, 50))
def test_a_bound_is_above_most_losses_and_few_of_them_do_not_move_it_far(losses: list[float], factor: float) -> None:
    limit = compute_spike_bound(losses, factor)
    assert limit > sorted(losses)[len(losses) // 2 - 1]
    assert sum(loss <= limit for loss in losses) >= len(losses) / 2
    spoiled = [*losses[: len(losses) // 2 + 1], *[1e9] * (len(losses) // 2 - 1)]
    assert compute_spike_bound(spoiled, factor) < 1e6


def test_the_bound_is_what_the_page_says() -> None:
    losses = [2.0, 2.1, 2.2, 2.3, 2.4] * 4
    assert math.isclose(compute_spike_bound(losses, 10.0), 2.2 + 10 * 1.4826 * 0.1, rel_tol=1e-9)
    assert math.isclose(compute_spike_bound([3.0] * MIN_LOSSES, 10.0), 3.3)
    assert compute_spike_bound([3.0] * (MIN_LOSSES - 1), 10.0) == math.inf


# ----------------------------------------------------------------------------------------------- what becomes of a step


def step(number: int, loss: float | None = 2.0, **others: Any) -> StepRecord:
    """A step's record; `skipped` and `tokens` as given."""
    fields = dict.fromkeys(("attempt", "total_tokens", "comm_bytes", "memory_bytes"), 0)
    times = dict.fromkeys(("grad_norm", "lr", "step_s", "tokens_per_s", "wait_s", "data_s", "mfu", "mfu_causal"), 0.0)
    return StepRecord(**{**fields, **times, "step": number, "loss": loss, "tokens": 8, **others})


def judge(on_nan: str = "skip", on_spike: str = "off", losses: int = 0) -> AnomalyDetector:
    """Of a run whose losses were 2 so far."""
    wanted = ResilienceSection(on_nan=on_nan, on_spike=on_spike, spike_factor=10.0)  # type: ignore[arg-type]
    return AnomalyDetector(wanted, [(number, 2.0) for number in range(1, losses + 1)])


def test_a_gradient_that_is_not_finite_is_passed_over_twenty_times_in_a_row_at_most() -> None:
    known = judge()
    for number in range(1, MAX_NOT_FINITE_STEPS):
        assert known.check_record(step(number, skipped=True), None) is None
    assert known.check_record(step(MAX_NOT_FINITE_STEPS, None), None) is None  # a step that was taken
    assert (
        known.check_record(step(MAX_NOT_FINITE_STEPS + 1, skipped=True, tokens=0), None) is None
    )  # one without weight
    for number in range(31, 30 + MAX_NOT_FINITE_STEPS):
        assert known.check_record(step(number, skipped=True), None) is None
    with pytest.raises(Diverged, match=r"the gradient has not been finite since step 31; start a new run"):
        known.check_record(step(30 + MAX_NOT_FINITE_STEPS, skipped=True), None)


def test_what_is_done_about_a_gradient_that_is_not_finite() -> None:
    with pytest.raises(Diverged, match=r"in step 7 the gradient is not finite, .*on_nan is stop.*on_nan=rollback"):
        judge(on_nan="stop").check_record(step(7, skipped=True), None)
    back = judge(on_nan="rollback")
    assert back.check_record(step(7, skipped=True), None) == RollbackRequest(7, "the gradient is not finite")
    assert back.check_record(step(7, skipped=True, tokens=0), None) is None
    # As long as a loss scale can be halved, it is to blame.
    assert back.check_record(step(7, skipped=True, loss_scale=2.0), 1.0) is None
    assert back.check_record(step(7, skipped=True, loss_scale=1.0), 1.0) == RollbackRequest(
        7, "the gradient is not finite"
    )
    assert back.check_record(step(7, skipped=True), 1.0) == RollbackRequest(7, "the gradient is not finite")


def test_a_loss_far_above_those_before_is_a_spike() -> None:
    known = judge(on_spike="rollback", losses=MIN_LOSSES)
    assert known.loss_bound(MIN_LOSSES + 1) == pytest.approx(2.2)
    assert known.check_record(step(MIN_LOSSES + 1, 2.19), None) is None
    wrong = known.check_record(step(MIN_LOSSES + 2, 2.3), None)
    assert wrong == RollbackRequest(MIN_LOSSES + 2, "the loss is 2.3, above 2.2, the limit from the steps before")
    assert known.check_record(step(MIN_LOSSES + 2, None), None) is None
    with pytest.raises(Diverged, match="on_spike is stop"):
        judge(on_spike="stop", losses=MIN_LOSSES).check_record(step(MIN_LOSSES + 1, 2.3), None)
    assert judge(on_spike="off", losses=MIN_LOSSES).check_record(step(MIN_LOSSES + 1, 9.0), None) is None
    assert (
        judge(on_spike="rollback", losses=MIN_LOSSES - 1).check_record(step(MIN_LOSSES, 9.0), None) is None
    )  # too few to know


def test_a_bound_is_of_the_last_losses_before_a_step() -> None:
    known = judge(on_spike="rollback")
    for number in range(1, 66):  # one more than count
        assert known.check_record(step(number, 1000.0 if number == 1 else 2.0 + 0.001 * number), None) is None
    losses = [2.0 + 0.001 * number for number in range(2, 66)]
    assert known.loss_bound(66) == compute_spike_bound(losses, 10.0)
    assert known.loss_bound(66, late=2) == compute_spike_bound([1000.0, *losses[:-1]], 10.0)
    assert known.loss_bound(21) == compute_spike_bound([1000.0, *losses[:19]], 10.0)  # no step after it counts


class Two:
    """A mesh of two ranks of which the other one has a loss sum of 30, of 10 labels."""

    def sum(self, mine: list[float]) -> list[float]:
        self.given = mine
        return [mine[0] + 30.0, mine[1] + 10.0]


class Nobody:
    def sum(self, mine: list[float]) -> list[float]:
        return mine


def test_a_spike_is_seen_over_all_ranks_before_a_step_is_taken() -> None:
    known, two, nobody = judge(on_spike="skip", losses=MIN_LOSSES + 1), Two(), Nobody()
    assert judge(on_spike="rollback", losses=MIN_LOSSES + 1).make_spike_veto(30, 10, two, True) is None  # type: ignore[arg-type]
    assert judge(on_spike="skip", losses=MIN_LOSSES).make_spike_veto(MIN_LOSSES + 1, 10, two, True) is None  # type: ignore[arg-type]
    asked = known.make_spike_veto(MIN_LOSSES + 2, 10, two, True)  # type: ignore[arg-type]
    assert asked is not None
    assert not asked(torch.tensor(13.0))  # 43 / 20
    assert known.skip_reason(step(MIN_LOSSES + 2)) is None
    assert asked(torch.tensor(15.0))  # 45 / 20 is above 2.2
    assert known.skip_reason(step(MIN_LOSSES + 2)) == "its loss is a spike (resilience.on_spike)"
    assert known.check_record(step(MIN_LOSSES + 2, 2.25, skipped=True), None) is None  # which on_nan does not ask about
    silent = known.make_spike_veto(MIN_LOSSES + 3, 10, two, False)  # type: ignore[arg-type]
    assert silent is not None
    assert silent(torch.tensor(0.0))  # 30 / 10, whatever this rank has
    assert two.given == [0.0, 0.0]
    nothing = known.make_spike_veto(MIN_LOSSES + 3, 0, nobody, True)  # type: ignore[arg-type]
    assert nothing is not None
    assert not nothing(torch.tensor(math.inf))  # a step without weight has no loss


def test_spikes_one_after_the_other_end_a_run() -> None:
    known = judge(on_spike="skip", on_nan="stop", losses=MIN_LOSSES)
    for number in range(MIN_LOSSES + 2, MIN_LOSSES + 1 + MAX_NOT_FINITE_STEPS):
        known._vetoed.add(number)
        assert known.check_record(step(number, skipped=True), None) is None
    known._vetoed.add(last := MIN_LOSSES + 1 + MAX_NOT_FINITE_STEPS)
    with pytest.raises(Diverged, match=f"the loss has been a spike since step {MIN_LOSSES + 2}"):
        known.check_record(step(last, skipped=True), None)


def test_losses_are_read_again_as_far_as_a_bound_needs_them(tmp_path: Path) -> None:
    paths, many = RunPaths(tmp_path), WINDOW + 10
    with open(paths.metrics, "w") as file:
        for number in range(1, many + 3):
            record = step(number, None if number == many - 1 else float(number), skipped=number == many)
            file.write(json.dumps(asdict(record)) + "\n")
    found = read_losses(paths, many + 1)
    assert found[-2:] == [(many - 2, many - 2.0), (many + 1, many + 1.0)]
    assert len(found) == WINDOW + 1


# ----------------------------------------------------------------------------------------------------- data passed over


@calm
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=5), st.integers(1, 80))
def test_batches_follow_one_another_but_for_those_that_are_passed_over(
    rollbacks: list[tuple[int, int]], steps: int
) -> None:
    skips, bad = SkippedBatches(), set()
    for last, more in rollbacks:
        first = max(1, last - more)
        bad |= {skips.batch_number(step) for step in range(first, last + 1)}
        skips = skips.with_steps(first, last)
    walked = [skips.batch_number(step) for step in range(1, steps + 1)]
    expected = [batch for batch in range(steps + 300) if not any(a <= batch < b for a, b in skips.stretches)]
    assert walked == expected[:steps]
    assert not bad & set(walked)
    again = SkippedBatches.from_header({"step": 7, **skips.to_header(7)})
    assert again == skips
    assert skips.to_header(7)["skipped"] == skips.count_before(8)


def test_what_came_before_a_stretch_is_as_it_was() -> None:
    skips = SkippedBatches().with_steps(12, 14)
    assert [skips.batch_number(step) for step in (11, 12, 13)] == [10, 14, 15]
    assert skips.count_recent(20, 1000) == 1
    assert skips.count_recent(2000, 1000) == 0


def test_stretches_count_as_recent_by_where_they_end() -> None:
    skips = SkippedBatches(((0, 4), (10, 12)))
    assert [skips.count_recent(10, within) for within in (4, 5, 13, 14)] == [1, 1, 2, 2]  # step 10 has batch 15
    assert skips.batch_number(10) == 15
    assert skips._disjoint_stretches() == [(0, 4), (10, 12)]
    assert SkippedBatches(((3, 6), (4, 6), (6, 6)))._disjoint_stretches() == [(3, 6)]


def test_a_header_of_an_older_version_is_understood() -> None:
    old = SkippedBatches.from_header({"step": 10, "skipped": 3})
    assert [old.batch_number(step) for step in (10, 11)] == [9, 13]
    assert SkippedBatches.from_header({"step": 10, "skipped": 0}) == SkippedBatches()


# ------------------------------------------------------------------------------------------------------------ checksums


@calm
@given(st.integers(0, 63), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_any_bit_that_flips_changes_the_sum(bit: int, dtype: torch.dtype) -> None:
    values = torch.linspace(-3, 3, 7).to(dtype)
    before = int(checksum(values))
    bits = view_as_integers(values)
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
    assert find_deviating_ranks([[1, 2]] * 3, names) is None
    found = find_deviating_ranks([[1, 2], [1, 9], [1, 2]], names)
    assert found is not None
    assert (found.ranks, found.parameters, found.healthy) == ((1,), ("b",), {"b": 0})
    two = find_deviating_ranks([[7, 2], [1, 9], [1, 2]], names)
    assert two is not None
    assert (two.ranks, two.healthy) == ((0, 1), {"a": 1, "b": 0})


@calm
@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=2), min_size=2, max_size=6))
def test_without_a_majority_nobody_is(table: list[list[int]]) -> None:
    found = find_deviating_ranks(table, ["a", "b"])
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


def walked(paces: Any, times: int, stragglers: StragglerDetector, begin: float = 0.0) -> list[tuple[int, float, float]]:
    found = []
    for number in range(times):
        found += stragglers.observe(begin + 10.0 * number, paces)
    return found


def test_a_rank_that_stays_slow_is_named_once() -> None:
    stragglers = StragglerDetector(2)
    assert walked([1.0, 2.0], 50, stragglers) == []
    [found] = walked([1.0, 6.0], 80, stragglers, 500.0)
    assert (found[0], found[1]) == (1, 3.0)
    assert found[2] >= REPORT_AFTER_S


def test_a_rank_that_is_slow_for_a_while_is_not() -> None:
    stragglers = StragglerDetector(1)
    assert walked([1.0], 50, stragglers) == []
    assert walked([5.0], 20, stragglers, 500.0) == []
    assert walked([1.0], 50, stragglers, 700.0) == []
    assert walked([5.0], 20, stragglers, 1200.0) == []


@calm
@given(st.floats(0.01, 100), st.integers(STEPS, 200))
def test_a_rank_that_is_always_as_slow_is_not_either(pace: float, times: int) -> None:
    assert walked([pace, 1.0], times, StragglerDetector(2)) == []


def test_a_pace_that_nobody_measures_says_nothing() -> None:
    assert StragglerDetector(2).observe(0.0, []) == []
