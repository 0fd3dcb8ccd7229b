"""The sharded engine walks the curve of one process, however its state is cut and whenever its gradients travel.

These are whole runs, in `make test` one of each kind; ways to shard are combined with each other in
test_every_sharding.py, and with slots and copies in tests/dist/test_sharded.py.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.placement import Placement
from phalanx.engine.sharded import ShardedEngine
from phalanx.optim import gradients
from tests.helpers import ALL, cover, run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import Outcome, walk
from tests.numerics.test_rank_layout import assert_same

LENGTH = 50 if ALL else 6  # in both some norms are clipped and some are not
STEPS = {"train__steps": LENGTH, "optim__decay_steps": LENGTH}
Walked = Callable[..., Outcome]


@pytest.fixture(scope="module")
def one(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Walked:
    """What one rank walks, in float64 and the whole batch at once; each curve once."""

    @functools.cache
    def walked(**changes: Any) -> Outcome:
        return walk(1, tmp_path_factory.mktemp("one"), tokens, **changes)

    return walked


@pytest.mark.parametrize(("ranks", "zero"), some(cover([1, 2, 3, 4, 5], [3, 1, 2]), 0, 1))
def test_even_shards_in_float64(ranks: int, zero: int, one: Walked, tokens: Path, tmp_path: Path) -> None:
    assert_same(walk(ranks, tmp_path, tokens, **STEPS, parallel__engine="sharded", parallel__zero=zero), one(**STEPS))


@pytest.mark.parametrize(("state", "zero"), some(cover([[4, 2, 1], [1, 0, 2], [0, 0, 1]], [1, 2, 3]), 1))
def test_uneven_shards(state: list[int], zero: int, one: Walked, tokens: Path, tmp_path: Path) -> None:
    assert_same(walk(3, tmp_path, tokens, **STEPS, balance__optimizer_state=state, parallel__zero=zero), one(**STEPS))


@pytest.mark.parametrize(("zero", "reduce"), some(cover([1, 2, 3], ["per_micro_batch", "per_step"]), 2))
def test_micro_batches(zero: int, reduce: str, one: Walked, tokens: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "parallel__zero": zero,
        "parallel__grad_reduce": reduce,
        "balance__optimizer_state": [3, 1],
    }
    assert_same(walk(2, tmp_path, tokens, **STEPS, **changes, train__micro_batch=1), one(**STEPS))


@pytest.mark.parametrize(("clip", "zero"), some(cover([None, 0.9, 100.0], [1, 2]), 1))
def test_two_slots(zero: int, clip: float | None, one: Walked, tokens: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optim__clip_norm": clip, **STEPS}
    two = walk(2, tmp_path, tokens, **changes, parallel__zero=zero, optim__double_buffer=True, train__micro_batch=2)
    assert_same(two, one(**changes))


@pytest.mark.parametrize(("split", "zero"), some(cover([(4, "auto"), (4, [3, 1]), (6, [2, 1])], [1, 2, 3]), 1))
def test_copies_of_the_state(
    split: tuple[int, list[int] | str], zero: int, one: Walked, tokens: Path, tmp_path: Path
) -> None:
    ranks, state = split
    changes: dict[str, Any] = {"parallel__zero": zero, "balance__optimizer_state": state, "train__micro_batch": 1}
    assert_same(walk(ranks, tmp_path, tokens, **STEPS, parallel__shard_degree=2, **changes), one(**STEPS))


def with_a_slow_lane(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> int:
    """A run in which rank 0's lane learns late what the ranks have agreed on, and rank 1 begins its steps late."""
    fold, begin = gradients.compute_norm_and_divisor, ShardedEngine.begin_step

    def late(engine: ShardedEngine, *arguments: Any) -> None:
        time.sleep(0.03 if placement.rank == 1 else 0.0)
        begin(engine, *arguments)

    def slowly(*arguments: Any, **settings: Any) -> Any:
        time.sleep(0.1 if placement.rank == 0 else 0.0)
        return fold(*arguments, **settings)

    gradients.compute_norm_and_divisor, ShardedEngine.begin_step = slowly, late  # type: ignore[method-assign]
    return runs.train(placement, run, data, changes)


def test_a_lane_that_lags_behind_takes_the_same_way(tokens: Path, tmp_path: Path) -> None:
    # Whether a step may be updated early depends on the norm of the one before, which the lanes write.
    changes = {"optim.double_buffer": True, "optim.clip_norm": 100.0, "train.steps": 6}
    arguments = {"run": str(tmp_path / "two"), "data": str(tokens), "changes": changes}
    assert run_ranks(with_a_slow_lane, 2, timeout_s=240, **arguments) == [0, 0]
    one = walk(1, tmp_path / "one", tokens, optim__clip_norm=100.0, train__steps=6)
    assert_same(runs.outcome(tmp_path / "two"), one)
