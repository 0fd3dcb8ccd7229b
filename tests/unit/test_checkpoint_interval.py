"""How often to save, against hand-worked cases, other closed forms and the best that trying finds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ConfigError
from phalanx.planner import checkpoint_interval
from phalanx.planner.checkpoint_interval import CheckpointCosts

LLAMA_3_S = 54 * 86400 / 419  # between unexpected interruptions, on 16,384 GPUs (Dubey et al. 2024)


def test_young_by_hand() -> None:
    assert checkpoint_interval.young_s(50, 10_000) == math.sqrt(2 * 50 * 10_000) == 1000


def test_daly_by_hand() -> None:
    # Daly 2006, equation 37, with C / 2M = 50 / 20000 = 0.0025: 1000 (1 + 0.05 / 3 + 0.0025 / 9) - 50.
    assert checkpoint_interval.daly_s(50, 10_000) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    assert checkpoint_interval.daly_s(30_000, 10_000) == 10_000  # a saving that costs more than 2 M: M


def test_the_wall_time_by_hand() -> None:
    # Work of 1000 s and a saving of 50 s, failures every 10,000 s, recovery of 100 s:
    # 10000 exp(0.01) (exp(0.105) - 1) = 1118.2 s for 1000 s of work.
    wall_s = 10_000 * math.exp(0.01) * (math.exp(0.105) - 1)
    assert wall_s == pytest.approx(1118.2, abs=0.1)
    assert checkpoint_interval.useful_share(1000, 50, 10_000, 100) == pytest.approx(1000 / wall_s)


def test_a_recovery_longer_than_failures_are_apart_comes_to_nothing() -> None:
    assert checkpoint_interval.useful_share(1000, 50, 1, 10_000) == 0


@given(st.floats(0.1, 1000), st.floats(600, 1e7), st.floats(0, 300))
def test_no_interval_is_much_better_than_dalys(cost_s: float, mtbf_s: float, recovery_s: float) -> None:
    ours = checkpoint_interval.useful_share(checkpoint_interval.daly_s(cost_s, mtbf_s), cost_s, mtbf_s, recovery_s)
    trying = max(
        checkpoint_interval.useful_share(cost_s * 1.1**power, cost_s, mtbf_s, recovery_s) for power in range(-40, 160)
    )
    assert ours >= trying * 0.995


def test_without_failures_to_speak_of_all_the_time_is_work() -> None:
    assert checkpoint_interval.best_intervals(CheckpointCosts(5, 1e12, 60, 10)).goodput > 0.999


def test_commits_are_for_processes_and_checkpoints_for_nodes() -> None:
    both = checkpoint_interval.best_intervals(CheckpointCosts(5, 10_000, 60, 10, commit_s=0.5, hard=0.5))
    assert both.commit_steps == round(checkpoint_interval.daly_s(0.5, 20_000) / 5)
    assert both.checkpoint_steps == round(checkpoint_interval.daly_s(10, 20_000) / 5)
    soft = checkpoint_interval.best_intervals(CheckpointCosts(5, 10_000, 60, 10, hard=0.0))
    assert (soft.commit_steps, soft.checkpoint_steps) == (1, None)
    # Each failure costs a recovery of M (exp(R / M) - 1) and half a step: by hand.
    assert soft.goodput == pytest.approx(1 / (1 + math.expm1(60 / 10_000) + 2.5 / 10_000))


@given(st.floats(0, 1), st.floats(0, 1), st.floats(1, 600))
def test_fewer_failures_that_take_nodes_are_never_worse(one: float, other: float, recovery_s: float) -> None:
    few, many = sorted((one, other))
    kept, lost = (
        checkpoint_interval.best_intervals(CheckpointCosts(5, 20_000, recovery_s, 20, hard=hard)).goodput
        for hard in (few, many)
    )
    assert kept >= lost * 0.999  # steps are whole


@pytest.mark.parametrize("aim", [0.90, 0.95])
def test_the_longest_recovery_for_a_goodput(aim: float) -> None:
    saving = CheckpointCosts(5, LLAMA_3_S, 0, 10)
    found = checkpoint_interval.longest_recovery_s(aim, saving)
    assert found is not None
    reached = checkpoint_interval.best_intervals(CheckpointCosts(5, LLAMA_3_S, found, 10)).goodput
    assert reached == pytest.approx(aim, abs=1e-6)


def test_what_checkpoints_alone_cost_too_much_for() -> None:
    assert checkpoint_interval.longest_recovery_s(0.99, CheckpointCosts(5, LLAMA_3_S, 0, 10)) is None
    with_copies = checkpoint_interval.longest_recovery_s(0.99, CheckpointCosts(5, LLAMA_3_S, 0, 10, hard=0.0))
    assert with_copies is not None
    # By hand: 1 / 0.99 - 1 = exp(R / M) - 1 + 2.5 / M.
    assert with_copies == pytest.approx(LLAMA_3_S * math.log(1 / 0.99 - 2.5 / LLAMA_3_S), rel=1e-6)


@pytest.mark.parametrize("aim", [0.0, 1.0, 95, -1, math.nan])
def test_no_goodput_to_aim_at(aim: float) -> None:
    with pytest.raises(ConfigError, match=r"0\.95"):
        checkpoint_interval.longest_recovery_s(aim, CheckpointCosts(5, 10_000, 60, 10))
