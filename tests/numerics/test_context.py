"""Context parallelism: ranks that share rows, in unequal parts, have the curve of one process."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ALL
from tests.numerics.runs import Outcome, distance, farthest, walk

CONTEXT: dict[str, Any] = {"model__attention_dropout": 0.1, "train__micro_batch": 2}
SHORT = {} if ALL else {"train__steps": 4, "optim__decay_steps": 4}


@pytest.fixture(scope="module")
def alone(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Outcome]:
    """One process, on whole rows or on rows of several documents."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def walk_alone(packed: bool) -> Outcome:
        return walk(1, folder / str(packed), tokens, data__isolate_documents=packed, **CONTEXT, **SHORT)

    return walk_alone


CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"balance__context": [3, 1], "parallel__context_by": "ring", "parallel__zero": 1}),
    (3, {"balance__context": [5, 2, 1], "parallel__context_by": "gather", "data__isolate_documents": True,
         "parallel__zero": 3, "memory__activations": "selective"}),
]  # fmt: skip
MORE: list[tuple[int, dict[str, Any]]] = [
    (2, {"balance__context": [3, 1], "parallel__context_by": "gather", "data__isolate_documents": True,
         "parallel__zero": 2, "memory__activations": "full"}),
    (3, {"balance__context": [5, 2, 1], "parallel__context_by": "ring", "data__isolate_documents": True,
         "parallel__zero": 3, "memory__activations": "selective"}),
    (2, {"parallel__context_by": "heads", "parallel__zero": 3, "memory__activations": "offload",
         "memory__offload_prefetch_blocks": 1}),
    (4, {"parallel__context": 2, "parallel__context_by": "ring", "parallel__tensor": 2}),
    (4, {"parallel__context": 2, "parallel__context_by": "heads", "parallel__zero": 2}),
]  # fmt: skip
EXPERTS: dict[str, Any] = {
    "model__architecture": "mixtral", "model__dropout": 0.0, "train__micro_batch": 4, "parallel__zero": 3,
}  # fmt: skip


@pytest.mark.skipif(not ALL, reason="PHALANX_TEST_ALL is not set")
@pytest.mark.parametrize("balance", ["step", "step_before"])
def test_experts_are_balanced_over_parts_of_rows(balance: str, tokens: Path, tmp_path: Path) -> None:
    balanced = {"experts": 4, "experts_per_token": 2, "balance": balance, "balance_weight": 0.1, "z_loss": 0.01}
    given = {**SHORT, **EXPERTS, "model__moe": balanced}
    parts = {"parallel__context": 2, "parallel__context_by": "ring", "balance__context": [3, 1]}
    one = walk(1, tmp_path / "one", tokens, **given | {"parallel__zero": 1})
    many = walk(2, tmp_path / "many", tokens, **given | parts)
    assert farthest(many.losses, one.losses) < 1e-9
    assert distance(many.state, one.state, "param") < 1e-9


@pytest.mark.parametrize(("ranks", "changes"), CASES + (MORE if ALL else []))
def test_curves_are_those_of_one_process(
    ranks: int, changes: dict[str, Any], tokens: Path, tmp_path: Path, alone: Callable[[bool], Outcome]
) -> None:
    one = alone(changes.get("data__isolate_documents", False))
    given = {"parallel__context": ranks, **CONTEXT, **SHORT, **changes}
    many = walk(ranks, tmp_path / "run", tokens, **given)
    assert farthest(many.losses, one.losses) < 1e-9
    assert farthest(many.norms, one.norms) < 1e-9
    assert distance(many.state, one.state, "param") < 1e-9
    for at, loss in one.evaluations.items():
        assert abs(many.evaluations[at] - loss) < 1e-9 * loss
