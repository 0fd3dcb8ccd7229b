"""Ranks that hold one model together walk the curve of one process, however it is cut."""

from pathlib import Path
from typing import Any

import pytest

from tests.numerics.runs import Outcome, walk
from tests.numerics.test_ranks import assert_same

# As keys of the recipe, on how many ranks.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {"tensor": 2}),
    "TP2, not cut along the sequence": (2, {"tensor": 2, "sequence": False}),
    "TP4 with 2 KV heads": (4, {"tensor": 4}),
    "PP2": (2, {"pipeline": 2}),
    "PP2, unequal": (2, {"pipeline": 2, "stages": [3, 5]}),
    "PP2, gpipe": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "PP4, interleaved": (4, {"pipeline": 4, "schedule": "interleaved"}),
    "PP2, zero bubble": (2, {"pipeline": 2, "schedule": "zero_bubble"}),
    "TP2 x PP2": (4, {"tensor": 2, "pipeline": 2}),
    "TP2 x shard 2": (4, {"tensor": 2, "zero": 2}),
    "TP2 x shard 2, released": (4, {"tensor": 2, "zero": 3}),
    "PP2 x shard 2, zero bubble": (4, {"pipeline": 2, "zero": 2, "schedule": "zero_bubble"}),
    "TP2 x PP2 x shard 2": (8, {"tensor": 2, "pipeline": 2, "zero": 2}),
    "TP2 x shard 2 x replicate 2": (8, {"tensor": 2, "shard_degree": 2}),
}
DEEP = {"model__layers": 8, "train__steps": 20, "train__micro_batch": 1, "checkpoint__every": 0}

SHALLOW = {**DEEP, "model__layers": 2}


@pytest.fixture(scope="module")
def deep(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return walk(1, tmp_path_factory.mktemp("deep"), tokens, **DEEP)


@pytest.fixture(scope="module")
def shallow(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return walk(1, tmp_path_factory.mktemp("shallow"), tokens, **SHALLOW)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_ranks_hold_together(
    layout: str, deep: Outcome, shallow: Outcome, tokens: Path, tmp_path: Path
) -> None:
    ranks, keys = LAYOUTS[layout]
    staged = "pipeline" in keys  # only stages need many blocks
    cut = {f"parallel__{key}": value for key, value in keys.items()}
    assert_same(walk(ranks, tmp_path, tokens, **(DEEP if staged else SHALLOW), **cut), deep if staged else shallow)


@pytest.mark.parametrize("layout", ["TP2", "PP2", "TP2 x PP2"])
def test_a_tied_embedding(layout: str, tokens: Path, tmp_path: Path) -> None:
    ranks, keys = LAYOUTS[layout]
    tied: dict[str, Any] = {**DEEP, "model__tie_embeddings": True, "model__layers": 2}
    one = walk(1, tmp_path / "one", tokens, **tied)
    several = walk(
        ranks, tmp_path / "all", tokens, **tied, **{f"parallel__{key}": value for key, value in keys.items()}
    )
    assert_same(several, one)


@pytest.mark.parametrize("layout", ["TP2 x shard 2", "PP2 x shard 2, zero bubble"])
def test_labels_that_do_not_count(layout: str, tokens: Path, tmp_path: Path) -> None:
    """Every step has another weight, and some micro-batches have none."""
    ranks, keys = LAYOUTS[layout]
    one = walk(1, tmp_path / "one", tokens, masked=True, **DEEP)
    cut = {f"parallel__{key}": value for key, value in keys.items()}
    several = walk(ranks, tmp_path / "all", tokens, masked=True, **DEEP, **cut)
    assert_same(several, one)


@pytest.mark.parametrize(("ranks", "keys"), [(1, {}), (3, {"zero": 3}), (4, {"pipeline": 4}), (2, {"tensor": 2})])
def test_what_eight_ranks_saved_goes_on_elsewhere(
    ranks: int, keys: dict[str, Any], deep: Outcome, tokens: Path, tmp_path: Path
) -> None:
    eight, cut = LAYOUTS["TP2 x PP2 x shard 2"]
    half = {**DEEP, "train__steps": 10, "optim__decay_steps": 30}
    walk(eight, tmp_path, tokens, **half, **{f"parallel__{key}": value for key, value in cut.items()})
    found = walk(ranks, tmp_path, tokens, **DEEP, **{f"parallel__{key}": value for key, value in keys.items()})
    found.evaluations.pop((10, "held_out"))
    assert_same(found, deep)
