"""Context parallelism: ranks that share rows, in unequal parts, have the curve of one process; killed and resumed, too,
and with compiled blocks."""

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.trainer.loop import TrainingLoop
from tests.dist.incidents import train_with_signal
from tests.helpers import ALL, run_ranks
from tests.numerics import runs
from tests.numerics.runs import Outcome, distance, farthest, walk

# The first steps of the same curve. An evaluation would compile all once more.
SHORT = {} if ALL else {"train__steps": 3, "train__eval_sequences": 0}
LENGTH = runs.STEPS if ALL else 4
CONTEXT: dict[str, Any] = {"model__attention_dropout": 0.1, "train__micro_batch": 4, "train__steps": LENGTH}


@pytest.fixture(scope="module")
def alone(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Outcome]:
    """One process with the same data and model: whole rows, or rows of several documents."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def walk_alone(packed: bool, layers: int) -> Outcome:
        run = folder / f"{packed}-{layers}"
        return walk(1, run, tokens, data__isolate_documents=packed, model__layers=layers, **CONTEXT)

    return lambda changes: walk_alone(changes.get("data__isolate_documents", False), changes.get("model__layers", 2))


CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"balance__context": [3, 1], "parallel__context_by": "ring", "parallel__zero": 1}),
    (4, {"parallel__context": 2, "balance__context": [3, 1], "parallel__context_by": "ring", "parallel__pipeline": 2,
         "train__micro_batch": 2, "parallel__zero": 2} | SHORT),
    (4, {"parallel__context": 2, "balance__context": [3, 1], "parallel__context_by": "gather", "parallel__tensor": 2,
         "parallel__sequence_parallel": True, "data__isolate_documents": True, "train__micro_batch": 8} | SHORT),
]  # fmt: skip
KILLED: dict[str, Any] = {
    "parallel__context": 2, "balance__context": [5, 3], "parallel__context_by": "gather", "parallel__zero": 3,
    "data__isolate_documents": True, "train__micro_batch": 8, "checkpoint__every": 1,
}  # fmt: skip
MORE: list[tuple[int, dict[str, Any]]] = [
    (2, {"balance__context": [3, 1], "parallel__context_by": "gather", "data__isolate_documents": True,
         "parallel__zero": 2, "memory__activations": "full"}),
    (3, {"balance__context": [5, 2, 1], "parallel__context_by": "ring", "data__isolate_documents": True,
         "parallel__zero": 3, "memory__activations": "selective"}),
    (2, {"parallel__context_by": "heads", "parallel__zero": 3, "memory__activations": "offload",
         "memory__offload_prefetch_blocks": 1}),
    (4, {"parallel__context": 2, "parallel__context_by": "ring", "parallel__tensor": 2}),
    (4, {"parallel__context": 2, "parallel__context_by": "heads", "parallel__zero": 2}),
    (4, {"parallel__context": 2, "parallel__context_by": "heads", "parallel__pipeline": 2, "model__layers": 4,
         "parallel__schedule": "zero_bubble", "train__micro_batch": 1}),
    (8, {"parallel__context": 2, "balance__context": [3, 1], "parallel__context_by": "ring", "parallel__tensor": 2,
         "parallel__sequence_parallel": True, "parallel__pipeline": 2, "train__micro_batch": 1}),
]  # fmt: skip
EXPERTS: dict[str, Any] = {
    "model__architecture": "mixtral", "model__dropout": 0.0, "train__micro_batch": 4, "parallel__zero": 3,
}  # fmt: skip


@pytest.mark.skipif(not ALL, reason="PHALANX_TEST_ALL is not set")
@pytest.mark.parametrize("balance", ["step", "step_before"])
def test_experts_are_balanced_over_parts_of_rows(balance: str, tokens: Path, tmp_path: Path) -> None:
    balanced = {"experts": 4, "experts_per_token": 2, "balance": balance, "balance_weight": 0.1, "z_loss": 0.01}
    given = {**EXPERTS, "model__moe": balanced}
    parts = {"parallel__context": 2, "parallel__context_by": "ring", "balance__context": [3, 1]}
    one = walk(1, tmp_path / "one", tokens, **given | {"parallel__zero": 1})
    many = walk(2, tmp_path / "many", tokens, **given | parts)
    assert farthest(many.losses, one.losses) < 1e-9
    assert distance(many.state, one.state, "param") < 1e-9


@pytest.mark.parametrize(("ranks", "changes"), CASES + (MORE if ALL else []))
def test_curves_are_those_of_one_process(
    ranks: int,
    changes: dict[str, Any],
    tokens: Path,
    tmp_path: Path,
    alone: Callable[[dict[str, Any]], Outcome],
) -> None:
    many = walk(ranks, tmp_path / "run", tokens, **{"parallel__context": ranks, **CONTEXT, **changes})
    assert_same(many, alone(changes))


def test_a_killed_run_has_the_curve_of_one_process(
    tokens: Path, tmp_path: Path, alone: Callable[[dict[str, Any]], Outcome]
) -> None:
    run = tmp_path
    kill: dict[str, Any] = {"step": 3, "number": signal.SIGKILL, "ranks": [1]}
    dotted = {key.replace("__", "."): value for key, value in (CONTEXT | KILLED).items()}
    codes = run_ranks(train_with_signal, 2, restarts=1, run=str(run), data=str(tokens), changes=dotted, **kill)
    assert codes == [0] * 2
    assert [event["step"] for event in runs.events(run, EventKind.RESUMED)] in ([1], [2])  # whole by then
    assert_same(runs.outcome(run), alone(KILLED))


def compilations(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> list[int]:
    """How often something had been compiled by the end of each step."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, counts = CompileCounterWithBackend("eager"), []  # inductor takes far longer, and sees the same blocks
    torch.compile = functools.partial(torch.compile, backend=counter)
    train_step = TrainingLoop.train_step

    def counted(loop: TrainingLoop, step: int) -> str | None:
        asked = train_step(loop, step)
        counts.append(counter.frame_count)
        return asked

    loop_class: Any = TrainingLoop
    loop_class.train_step = counted  # of this forked process alone
    assert runs.train(placement, run, data, changes) == 0
    return counts


@pytest.mark.parametrize("by", ["gather", "heads"] if ALL else ["gather"])
def test_blocks_are_compiled_around_the_exchange(
    by: str, tokens: Path, tmp_path: Path, alone: Callable[[dict[str, Any]], Outcome]
) -> None:
    """Once for all blocks, whose parameters have memory only while they are used (zero 3)."""
    changes = KILLED | SHORT | {"parallel__context_by": by, "train__compile": True, "memory__activations": "full"}
    dotted = {key.replace("__", "."): value for key, value in (CONTEXT | changes).items()}
    for counts in run_ranks(compilations, 2, 240, run=str(tmp_path), data=str(tokens), changes=dotted):
        assert 1 < counts[0] <= 6  # the loss's chunk is one, and both blocks share theirs
        assert counts[-1] == counts[1]
    assert_same(runs.outcome(tmp_path), alone(changes))


@pytest.mark.skipif(not ALL, reason="PHALANX_TEST_ALL is not set")
@pytest.mark.parametrize("by", ["gather", "heads", "ring"])
def test_compiled_blocks_have_the_curve_of_one_process(
    by: str, tokens: Path, tmp_path: Path, alone: Callable[[dict[str, Any]], Outcome]
) -> None:
    """By the compiler of a run, unlike above."""
    changes = {"parallel__context": 2, "balance__context": [3, 1], "parallel__context_by": by, "train__compile": True}
    changes |= {"memory__activations": "full", "train__steps": 6}
    assert_same(walk(2, tmp_path / "run", tokens, **{**CONTEXT, **changes}), alone({}))


def assert_same(many: Outcome, one: Outcome) -> None:
    """`many`, or its first steps, and what came of it."""
    steps = len(many.losses)
    assert len(one.losses) == LENGTH and steps >= 3
    assert farthest(many.losses, one.losses[:steps]) < 1e-9
    assert farthest(many.norms, one.norms[:steps]) < 1e-9
    if steps == LENGTH:
        assert distance(many.state, one.state, "param") < 1e-9
        for at, loss in one.evaluations.items():
            assert abs(many.evaluations[at] - loss) < 1e-9 * loss
