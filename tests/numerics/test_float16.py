"""float16 with a scaled loss: near the exact curve, on any ranks, whatever the scale begins with; resumed bitwise."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.errors import Diverged
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.trainer import train_rank
from tests.helpers import ALL, run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import Outcome, same_bits, walk

HALF: dict[str, Any] = {"train__dtype": "fp16", "train__steps": 8, "train__micro_batch": 4}


def scales(run: Path) -> list[float]:
    return [record["loss_scale"] for record in read_steps(RunPaths(run).metrics)]


@pytest.fixture(scope="module")
def exact(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return walk(1, tmp_path_factory.mktemp("exact"), tokens, **HALF | {"train__dtype": "fp64"})


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_close_to_float64(ranks: int, exact: Outcome, tokens: Path, tmp_path: Path) -> None:
    half = walk(ranks, tmp_path, tokens, **HALF, train__loss_scale_growth_interval=3)
    apart = max(abs(a - b) for a, b in zip(half.losses, exact.losses, strict=True))
    print(f"fp16 on {ranks}: losses {apart:.1e} apart")
    assert 0 < apart < 5e-3
    assert half.norms == pytest.approx(exact.norms, rel=2e-2)
    assert {tensor.dtype for tensor in half.state.values()} == {torch.float32}
    assert scales(tmp_path) == [2.0**16] * 3 + [2.0**17] * 3 + [2.0**18] * 2


def test_a_scale_that_is_far_too_high_costs_steps_and_ends_no_run(tokens: Path, tmp_path: Path) -> None:
    high = HALF | {"train__loss_scale": 2.0**50, "train__steps": 40, "model__layers": 1, "train__global_batch": 4}
    walk(2 if ALL else 1, tmp_path, tokens, **high, train__eval_sequences=0)
    found = scales(tmp_path)
    skipped = [record["skipped"] for record in read_steps(RunPaths(tmp_path).metrics)]
    assert skipped.index(False) > 20, "more in a row than end a run whose gradient no scale can save"
    assert not all(skipped[-3:])
    assert found == [2.0 ** (50 - sum(skipped[:step])) for step in range(40)]
    assert len(runs.events(tmp_path, EventKind.STEP_SKIPPED)) == sum(skipped)


@pytest.mark.parametrize("ranks", some([1, 2], 1))
def test_resumed_is_bitwise_the_undisturbed(ranks: int, tokens: Path, tmp_path: Path) -> None:
    changes = HALF | {"train__loss_scale": 2.0**20, "train__loss_scale_growth_interval": 3, "train__steps": 6}
    whole = walk(ranks, tmp_path / "whole", tokens, **changes)
    walk(ranks, tmp_path / "cut", tokens, **changes | {"train__steps": 4})
    cut = walk(ranks, tmp_path / "cut", tokens, **changes)
    found = scales(tmp_path / "whole")
    assert len(found) > len(set(found)) > 1, "steps with an update, and without one"
    assert scales(tmp_path / "cut") == scales(tmp_path / "whole")
    assert cut.losses == whole.losses
    assert same_bits(cut.state, whole.state)


def lose_a_parameter(placement: Placement, run: str, data: str) -> str:
    """A run whose gradient is never finite, from the start."""
    changes = {"train.dtype": "fp16", "train.loss_scale": 8.0, "train.steps": 40, "train.eval_sequences": 0}
    described = runs.job(run, data, changes | {"train.global_batch": 1, "train.micro_batch": 1}, 1)
    with runs.loop_of(placement, described) as loop:
        loop.restore()
        piece = next(piece for piece in loop.setup.components.engine.pieces() if piece.name == "head.norm.weight")
        with torch.no_grad():
            loop.setup.components.model.head.norm.weight[0] = piece.tensor[0] = float("nan")
        try:
            train_rank.run_steps(loop, 0)
        except Diverged as error:
            return str(error)
    return "it went on"


def test_a_gradient_that_no_scale_saves_ends_the_run(tokens: Path, tmp_path: Path) -> None:
    (said,) = run_ranks(lose_a_parameter, 1, run=str(tmp_path), data=str(tokens))
    assert "the gradient has not been finite since step 4" in said, "the scale falls to 1 in three steps"
    assert scales(tmp_path) == [8.0, 4.0, 2.0] + [1.0] * 20
