"""An optimizer with a number for each row of a matrix: its record, its class and its line (docs/architecture.md)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from phalanx.config.optimizers import ADAM, OPTIMIZERS, OptimizerInfo
from phalanx.core.placement import Placement
from phalanx.optim.make_rule import OWN_RULES
from phalanx.optim.update import AdamW, Allocator, Slot, State, StepUpdate, copy_slot, count_state_bytes
from tests.dist.test_in_memory_checkpoints import begin, resumed, shared, train_and_die  # noqa: F401
from tests.helpers import run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import Outcome, distance, farthest

NAME = "row_scaled"
STEPS = 6
CHANGES: dict[str, Any] = {
    "optim.name": NAME, "optim.lr": 3e-3, "train.steps": STEPS, "optim.decay_steps": STEPS, "train.eval_sequences": 4,
}  # fmt: skip


@dataclass(frozen=True)
class RowScaled:
    """A gradient divided by the root of its mean square, of which there is one for each row of a matrix."""

    adamw: AdamW
    state_kinds: ClassVar[tuple[str, ...]] = ("row_square", "square")  # of matrices, and of vectors

    def make_state(
        self, name: str, shape: Sequence[int], elements: int, dtype: torch.dtype, device: torch.device,
        allocate: Allocator,
    ) -> State:  # fmt: skip
        kind, count = ("row_square", elements // shape[-1]) if len(shape) > 1 else ("square", elements)
        return {kind: allocate(name, kind, count, dtype, device)}

    def elements_together(self, shape: Sequence[int]) -> int:
        return shape[-1] if len(shape) > 1 else 1

    def apply(self, source: Slot, target: Slot, grads: dict[str, torch.Tensor], change: StepUpdate) -> None:
        copy_slot(source, target)
        for name, grad in grads.items():
            values, (square,) = target[name]["param"], (target[name].keys() & set(self.state_kinds))
            mean = target[name][square]
            if not len(mean):  # a rank may own nothing of a parameter
                continue
            rows = (grad / change.divisor).view(len(mean), -1)
            fresh = mean.lerp(rows.square().mean(1), 1 - self.adamw.beta2)
            step = rows / (fresh.sqrt() + self.adamw.eps)[:, None]
            if name not in change.no_decay:
                step += self.adamw.weight_decay * values.view_as(rows)
            values.copy_(torch.where(change.skip > 0, values, values - change.lr * step.view(-1)))
            mean.copy_(torch.where(change.skip > 0, mean, fresh))


INFO = OptimizerInfo(None, ADAM, numbers=0.0, row_numbers=1.0, granularity="row", weight_decay=0.1)


def train(
    placement: Placement, run: str, data: str, changes: dict[str, Any], deaths: Sequence[Any] = (),
    first_attempt: int = 1,
) -> int:  # fmt: skip
    OPTIMIZERS[NAME] = INFO
    OWN_RULES[NAME] = lambda adamw, options: RowScaled(adamw)
    return train_and_die(placement, run, data, CHANGES | changes, deaths, first_attempt)


def walk(ranks: int, run: Path, data: Path, **changes: Any) -> Outcome:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    assert run_ranks(train, ranks, timeout_s=240, run=str(run), data=str(data), changes=dotted) == [0] * ranks
    return runs.outcome(run)


@pytest.fixture(scope="module")
def alone(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return walk(1, tmp_path_factory.mktemp("alone"), tokens)


def assert_same_curve(found: Outcome, alone: Outcome) -> None:
    apart = {kind: distance(found.state, alone.state, kind) for kind in ("param", "row_square", "square")}
    print(apart)
    assert max(farthest(found.losses, alone.losses), *apart.values()) < 1e-9


def test_the_record_says_what_the_class_keeps() -> None:
    rule = RowScaled(AdamW(0.9, 0.95, 1e-8, 0.1))
    assert (
        INFO.state_bytes({}, 4, 1024) * 64 * 1024
        == count_state_bytes(rule, (64, 1024), 64 * 1024, torch.float32)
        == 4 * 64
    )


def test_one_rank_learns_and_its_checkpoint_has_a_number_for_each_row(alone: Outcome) -> None:
    assert alone.losses[-1] < alone.losses[0] - 0.1
    assert alone.state["param/embed.weight"].numel() == runs.VOCAB * 32
    assert alone.state["row_square/embed.weight"].numel() == runs.VOCAB
    assert alone.state["row_square/embed.weight"].count_nonzero() > runs.VOCAB // 2
    assert "square/embed.weight" not in alone.state


@pytest.mark.parametrize(
    "layout",
    some(
        [
            {"parallel__zero": 1, "balance__optimizer_state": [3, 1]},
            {"parallel__zero": 2, "balance__optimizer_state": [3, 1]},
            {"parallel__zero": 3, "balance__optimizer_state": [1, 4]},
            {"parallel__zero": 3, "balance__optimizer_state": [0, 1]},
            {"parallel__engine": "fsdp2"},
        ],
        1,
        3,
        4,
    ),
)
def test_two_ranks_walk_the_curve_of_one(layout: dict[str, Any], alone: Outcome, tokens: Path, tmp_path: Path) -> None:
    assert_same_curve(walk(2, tmp_path, tokens, **layout), alone)


EXPERTS: dict[str, Any] = {
    "model__architecture": "mixtral", "model__moe": {"experts": 5, "experts_per_token": 2}, "train__steps": 3,
}  # fmt: skip


def test_experts_on_other_ranks_keep_their_numbers(tokens: Path, tmp_path: Path) -> None:
    """Also from one division to another, and on one rank."""
    one = walk(1, tmp_path / "one", tokens, **EXPERTS)
    ways: list[tuple[int, int, dict[str, Any]]] = [
        (4, 1, {"parallel__expert": 2, "balance__experts": [2, 3], "parallel__zero": 3}),
        (2, 2, {"parallel__expert": 2, "balance__experts": [4, 1]}),
        (1, 3, {}),
    ]
    for ranks, steps, more in some(ways, 1, 2):
        found = walk(ranks, tmp_path / "run", tokens, **EXPERTS | more | {"train__steps": steps})
    assert one.state["row_square/layers.0.mlp.experts.gate_up"].numel() == 5 * 2 * 44
    assert_same_curve(found, one)


@pytest.mark.parametrize(("before", "after", "zero"), some([(2, 1, 1), (2, 1, 3), (1, 2, 2)], 1, 2))
def test_a_checkpoint_is_read_by_other_ranks(
    before: int, after: int, zero: int, alone: Outcome, tokens: Path, tmp_path: Path
) -> None:
    for ranks, steps in ((before, STEPS // 2), (after, STEPS)):
        layout = {"parallel__zero": zero, "balance__optimizer_state": [3, 1]} if ranks == 2 else {}
        found = walk(ranks, tmp_path, tokens, train__steps=steps, **layout)
    assert resumed(tmp_path) == [(STEPS // 2, False)]
    assert_same_curve(found, alone)


@pytest.mark.parametrize(("before", "after"), some([(2, 2), (2, 1)], 1))
def test_what_is_left_in_memory_is_gone_on_from(
    before: int, after: int, alone: Outcome, tokens: Path, tmp_path: Path, shared: Path  # noqa: F811
) -> None:  # fmt: skip
    begin(tmp_path)
    arguments: dict[str, Any] = {"run": str(tmp_path), "data": str(tokens)}
    changes = {"balance.optimizer_state": [3, 1]}
    with pytest.raises(AssertionError, match="killed by SIGKILL"):
        run_ranks(train, before, shared=shared, changes=changes, deaths=[("before the commit", 5, 0)], **arguments)
    changes = changes if after == 2 else {}
    codes = run_ranks(train, after, shared=shared, changes=changes, first_attempt=2, **arguments)
    assert codes == [0] * after
    assert resumed(tmp_path) == [(4, True)]
    assert_same_curve(runs.outcome(tmp_path), alone)
