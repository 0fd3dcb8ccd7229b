"""The cluster does not change the result: any number of ranks and any split walk the curve of one process.

The global batch of 8 divides by neither 3 nor 5, dropout is on, key heads are shared, and the gradient is clipped in
some steps and not in others.
"""

from pathlib import Path
from typing import Any

import pytest

from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from tests.helpers import ALL, some
from tests.numerics.runs import RECIPE, STEPS, Outcome, distance, farthest, walk

EXACT = 1e-9  # float64: what is left is the order of additions, and what the steps of Adam make of it
KINDS = ("param", "exp_avg", "exp_avg_sq")


def assert_same(other: Outcome, alone: Outcome, tolerance: float = EXACT) -> None:
    apart = {
        "losses": farthest(other.losses, alone.losses),
        "norms": farthest(other.norms, alone.norms),
        "evaluations": farthest([*other.evaluations.values()], [*alone.evaluations.values()]),
    } | {kind: distance(other.state, alone.state, kind) for kind in KINDS}
    print("farthest apart:", ", ".join(f"{name} {value:.1e}" for name, value in apart.items()))
    assert max(apart.values()) < tolerance, apart


def test_the_curve_learns_and_clips_now_and_then(alone: Outcome) -> None:
    # What the comparisons below would not notice: a run in which nothing happens is the same everywhere.
    assert len(alone.losses) == STEPS
    assert alone.losses[-1] < alone.losses[0] - (0.5 if ALL else 0.2)
    limit = RECIPE["optim"]["clip_norm"]
    assert min(alone.norms) < limit < max(alone.norms)
    assert len(alone.evaluations) == 1


@pytest.mark.parametrize("ranks", some([2, 3, 5], 1))
def test_ranks_in_float64(ranks: int, alone: Outcome, tokens: Path, tmp_path: Path) -> None:
    assert_same(walk(ranks, tmp_path, tokens), alone)


def test_both_engines_on_one_rank(alone: Outcome, tokens: Path, tmp_path: Path) -> None:
    assert_same(walk(1, tmp_path, tokens, parallel__engine="fsdp2"), alone)


def test_ranks_that_have_nothing_to_do(tokens: Path, tmp_path: Path) -> None:
    # One sequence on two ranks: one of them contributes weight 0 to every step, and still takes part in it.
    few: dict[str, Any] = {"train__global_batch": 1, "train__micro_batch": 1, "train__steps": 4}
    assert_same(walk(2, tmp_path / "two", tokens, **few), walk(1, tmp_path / "one", tokens, **few))


@pytest.mark.parametrize("clip", [None, 0.05])
def test_tied_embeddings_and_other_clipping(clip: float | None, tokens: Path, tmp_path: Path) -> None:
    changes = {"model__tie_embeddings": True, "optim__clip_norm": clip, "train__steps": 4}
    one = walk(1, tmp_path / "one", tokens, **changes)
    assert_same(walk(2, tmp_path / "two", tokens, **changes), one)
    assert not any("head.weight" in name for name in one.state)


@pytest.mark.parametrize("micro_batch", some([2, 3], 1))
def test_accumulation(micro_batch: int, alone: Outcome, tokens: Path, tmp_path: Path) -> None:
    # 2: four micro-batches; 3: three, of 3, 3 and 2 sequences.
    assert_same(walk(1, tmp_path, tokens, train__micro_batch=micro_batch), alone)


@pytest.mark.parametrize("shares", some([[5, 2, 1], [0, 0, 8], [0, 8]], 0, 2))
def test_unequal_shares_with_accumulation(shares: list[int], alone: Outcome, tokens: Path, tmp_path: Path) -> None:
    assert_same(walk(len(shares), tmp_path, tokens, shares=shares, train__micro_batch=3), alone)


def test_labels_that_count_for_nothing(tokens: Path, tmp_path: Path) -> None:
    # Steps and ranks then weigh something else each: the mean is one of labels, not of ranks or micro-batches.
    one = walk(1, tmp_path / "one", tokens, masked=True, train__steps=4)
    weights = [record["tokens"] for record in read_steps(RunPaths(tmp_path / "one").metrics)]
    assert min(weights) < max(weights) < 8 * 16
    for name, ranks, shares in some([("even", 3, None), ("three", 3, [5, 2, 1]), ("two", 2, [5, 3])], 2):
        other = walk(ranks, tmp_path / name, tokens, masked=True, shares=shares, train__micro_batch=2, train__steps=4)
        assert_same(other, one)


@pytest.fixture(scope="module")
def alone_in_fp32(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return walk(1, tmp_path_factory.mktemp("alone-fp32"), tokens, train__dtype="fp32")


@pytest.mark.parametrize("ranks", some([2, 3, 5], 0))
def test_the_curve_in_fp32(ranks: int, alone_in_fp32: Outcome, tokens: Path, tmp_path: Path) -> None:
    other = walk(ranks, tmp_path, tokens, train__dtype="fp32")
    apart = farthest(other.losses, alone_in_fp32.losses)
    print(f"losses {apart:.1e}, parameters {distance(other.state, alone_in_fp32.state, 'param'):.1e}")
    assert apart < 1e-4


def test_first_gradients_in_fp32(tokens: Path, tmp_path: Path) -> None:
    # After one step without clipping the first moment is the mean gradient times 1 - beta1, whatever the engine.
    one_step = {"train__steps": 1, "optim__clip_norm": None, "checkpoint__every": 1, "train__eval_sequences": 0}
    exact = walk(1, tmp_path / "exact", tokens, **one_step)
    ways: list[tuple[str, int, dict[str, Any]]] = [
        ("single", 1, {}),
        ("accumulated", 1, {"train__micro_batch": 3}),
        ("fsdp2", 1, {"parallel__engine": "fsdp2"}),
        ("two", 2, {}),
        ("three", 3, {"train__micro_batch": 2}),
        ("five", 5, {}),
    ]
    for name, ranks, changes in some(ways, 0, 2):  # others in test_any_division.py
        other = walk(ranks, tmp_path / name, tokens, **one_step, train__dtype="fp32", **changes)
        apart = distance(other.state, exact.state, "exp_avg")
        print(f"{name}: gradients in fp32 are {apart:.1e} of their norm from those in float64")
        assert apart < 1e-6, name
