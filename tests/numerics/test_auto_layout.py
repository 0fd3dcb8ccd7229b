"""Ranks that hold one model together walk the curve of one process, however it is cut."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ALL, some
from tests.numerics.runs import Outcome, walk
from tests.numerics.test_rank_layout import assert_same
from tests.numerics.test_sharing import forget_behind

# As keys of the recipe, on how many ranks.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {"tensor": 2}),
    "TP2, not cut along the sequence": (2, {"tensor": 2, "sequence_parallel": False}),
    "TP4 with 2 KV heads": (4, {"tensor": 4}),
    "PP2": (2, {"pipeline": 2}),
    "PP2, unequal": (2, {"pipeline": 2, "layers_per_stage": [1, 3]}),
    "PP2, gpipe": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "PP2, interleaved": (2, {"pipeline": 2, "schedule": "interleaved"}),
    "PP4, interleaved": (4, {"pipeline": 4, "schedule": "interleaved"}),
    "PP2, zero bubble": (2, {"pipeline": 2, "schedule": "zero_bubble"}),
    "TP2 x PP2": (4, {"tensor": 2, "pipeline": 2}),
    "TP2 x shard 2": (4, {"tensor": 2, "zero": 2}),
    "TP2 x shard 2, released": (4, {"tensor": 2, "zero": 3}),
    "PP2 x shard 2, zero bubble": (4, {"pipeline": 2, "zero": 2, "schedule": "zero_bubble"}),
    "TP2 x PP2 x shard 2": (8, {"tensor": 2, "pipeline": 2, "zero": 2}),
    "TP2 x shard 2 x replicate 2": (8, {"tensor": 2, "shard_degree": 2}),
}
EIGHT = "TP2 x PP2 x shard 2"  # which the fixture `half` walks
LENGTH = 20 if ALL else 2
STEPS = {"train__steps": LENGTH, "checkpoint__every": 0}
STAGED: dict[str, Any] = {**STEPS, "model__layers": 4, "train__micro_batch": 1}
SHARED: dict[str, Any] = {**STEPS, "model__layers": 2, "train__micro_batch": 2}


def shape(layout: str) -> dict[str, Any]:
    """Only stages need many blocks and micro-batches: two stages on each of four ranks the most, and a copy beside
    another has half of the sequences."""
    ranks, keys = LAYOUTS[layout]
    if "pipeline" not in keys:
        return SHARED
    if layout == "PP4, interleaved":
        return {**STAGED, "model__layers": 8}
    return {**STAGED, "train__micro_batch": 2} if ranks == keys["pipeline"] * keys.get("tensor", 1) else STAGED


Walked = Callable[..., Outcome]


@pytest.fixture(scope="module")
def one(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Walked:
    """What one process walks, of any shape and in whole batches, once for all layouts."""

    @functools.cache
    def walked(masked: bool = False, **changes: Any) -> Outcome:
        return walk(1, tmp_path_factory.mktemp("one"), tokens, masked=masked, **changes)

    return lambda masked=False, **changes: walked(masked, **changes | {"train__micro_batch": 8})


@pytest.mark.parametrize("layout", some([name for name in LAYOUTS if name != EIGHT], 1, 4, 6, 11))
def test_a_model_that_ranks_hold_together(layout: str, one: Walked, tokens: Path, tmp_path: Path) -> None:
    found = walk(LAYOUTS[layout][0], tmp_path, tokens, **shape(layout), **cut(layout))
    assert_same(found, one(**shape(layout)))


def cut(layout: str) -> dict[str, Any]:
    """The changes of the recipe that make a layout."""
    return {f"parallel__{key}": value for key, value in LAYOUTS[layout][1].items()}


@pytest.mark.parametrize("layout", some(["TP2", "PP2", "TP2 x PP2"], 2))
def test_a_tied_embedding(layout: str, one: Walked, tokens: Path, tmp_path: Path) -> None:
    tied = {**SHARED, "model__tie_embeddings": True}
    assert_same(walk(LAYOUTS[layout][0], tmp_path, tokens, **tied, **cut(layout)), one(**tied))


@pytest.mark.parametrize("layout", some(["TP2 x shard 2", "PP2 x shard 2, zero bubble"], 1))
def test_labels_that_do_not_count(layout: str, one: Walked, tokens: Path, tmp_path: Path) -> None:
    """Every step has another weight, and some micro-batches have none."""
    changes = {**STAGED, **cut(layout)}
    assert_same(walk(LAYOUTS[layout][0], tmp_path, tokens, masked=True, **changes), one(masked=True, **STAGED))


@pytest.fixture(scope="module")
def half(one: Walked, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder in which eight ranks walked the curve of one, with the checkpoint of half-way alone."""
    folder = tmp_path_factory.mktemp("half")
    found = walk(8, folder, tokens, **{**shape(EIGHT), **cut(EIGHT), "checkpoint__every": LENGTH // 2})
    assert_same(found, one(**shape(EIGHT)))
    forget_behind(folder, LENGTH // 2)
    return folder


@pytest.mark.parametrize(
    ("ranks", "keys"), some([(1, {}), (3, {"zero": 3}), (4, {"pipeline": 4}), (2, {"tensor": 2})], 0, 3)
)
def test_what_eight_ranks_saved_goes_on_elsewhere(
    ranks: int, keys: dict[str, Any], half: Path, one: Walked, tokens: Path, tmp_path: Path
) -> None:
    shutil.copytree(half, tmp_path / "run")
    layout = {f"parallel__{key}": value for key, value in keys.items()}
    found = walk(ranks, tmp_path / "run", tokens, **STAGED, **layout)
    assert_same(found, one(**STAGED))
