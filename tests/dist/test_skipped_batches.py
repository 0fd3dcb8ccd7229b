"""Steps that must not be taken: without weight, or with a gradient that is no number. And ranks that never come."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.mesh import join
from phalanx.core.errors import PhalanxError
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.models.counter_rng import CounterRNG
from phalanx.tasks.language import IGNORE_INDEX
from phalanx.tasks.task import Batch, SampleLike, Task
from phalanx.trainer import train_rank
from tests.helpers import cover, run_ranks
from tests.numerics import runs
from tests.numerics.runs import same_bits

SHORT = {"train.steps": 4, "checkpoint.every": 1, "train.micro_batch": 2, "train.eval_sequences": 0}


@dataclass(frozen=True)
class Emptied:
    """A task that ignores every label of one step."""

    task: Task
    step: int
    global_batch: int

    def collate(self, samples: Sequence[SampleLike]) -> Batch:
        batch = self.task.collate(samples)
        if not samples or samples[0].position // self.global_batch != self.step - 1:
            return batch
        labels = torch.full_like(batch.inputs["labels"], IGNORE_INDEX)
        return Batch(batch.inputs | {"labels": labels}, 0, batch.samples)

    def loss_sum(self, model: torch.nn.Module, batch: Batch, draws: CounterRNG | None) -> torch.Tensor:
        return self.task.loss_sum(model, batch, draws)

    def nominal_weight(self, global_batch: int) -> int:
        return self.task.nominal_weight(global_batch)


@dataclass(frozen=True)
class Spoiled:
    """A task whose loss is multiplied by something on one rank in the first micro-batch of one step."""

    task: Task
    step: int
    factor: float
    mine: bool
    done: list[int] = field(default_factory=list)

    def collate(self, samples: Sequence[SampleLike]) -> Batch:
        return self.task.collate(samples)

    def loss_sum(self, model: torch.nn.Module, batch: Batch, draws: CounterRNG | None) -> torch.Tensor:
        loss = self.task.loss_sum(model, batch, draws)
        if draws is None or draws.step != self.step or not self.mine or self.step in self.done:
            return loss
        self.done.append(self.step)
        return loss * self.factor

    def nominal_weight(self, global_batch: int) -> int:
        return self.task.nominal_weight(global_batch)


def train_badly(placement: Placement, run: str, data: str, changes: dict[str, Any], kind: str) -> int:
    """A run whose third step has no weight, or a loss that is no number on the last rank."""
    described = runs.job(run, data, SHORT | changes, placement.world)
    with runs.loop_of(placement, described) as loop:
        parts = loop.setup.components
        if kind == "empty":
            parts.task = Emptied(parts.task, 3, described.config.train.global_batch)
        else:
            parts.task = Spoiled(parts.task, 3, float(kind), mine=placement.rank == placement.world - 1)
        return int(train_rank.run_steps(loop, loop.restore()))


@pytest.mark.parametrize(("kind", "dtype", "ranks"), cover(["empty", "nan", "inf"], ["fp64", "bf16"], [3, 1]))
def test_a_step_that_cannot_be_taken_is_skipped_on_all_ranks(
    kind: str, dtype: str, ranks: int, tokens: Path, tmp_path: Path
) -> None:
    reason = "the batch has no valid token" if kind == "empty" else "is not finite"
    kwargs = {"changes": {"train.dtype": dtype}, "kind": kind}
    assert run_ranks(train_badly, ranks, run=str(tmp_path), data=str(tokens), **kwargs) == [0] * ranks
    skipped = runs.events(tmp_path, EventKind.STEP_SKIPPED)
    assert [event["step"] for event in skipped] == [3]
    assert reason in skipped[0]["reason"]
    records = read_steps(RunPaths(tmp_path).metrics)
    assert [record["skipped"] for record in records] == [False, False, True, False]
    assert records[2]["loss"] is None
    assert [record["tokens"] for record in records] == [128, 128, 0 if kind == "empty" else 128, 128]
    # keep: 3. The state has stayed as it was, and the step after moves it again.
    assert same_bits(runs.state(tmp_path, 3), runs.state(tmp_path, 2))
    after, before = runs.state(tmp_path, 4), runs.state(tmp_path, 3)
    for name, tensor in after.items():
        assert torch.isfinite(tensor).all()
        assert not torch.equal(tensor, before[name]), f"{name} has not moved in the step after"


def train_with_a_spoiled_parameter(placement: Placement, run: str, data: str) -> int:
    """A run in which an element of the last rank's state is no number from step 3 on."""
    described = runs.job(run, data, SHORT, placement.world)
    with runs.loop_of(placement, described) as loop:
        loop.setup = dataclasses.replace(
            loop.setup, job=runs.job(run, data, SHORT | {"train.steps": 2}, placement.world)
        )
        train_rank.run_steps(loop, loop.restore())
        if placement.rank == placement.world - 1:
            piece = next(piece for piece in loop.setup.components.engine.pieces() if piece.name == "head.norm.weight")
            assert piece.kind == "param"
            with torch.no_grad():
                piece.tensor[0] = float("nan")
        loop.setup = dataclasses.replace(loop.setup, job=described)
        return int(train_rank.run_steps(loop, 2))


def test_a_parameter_that_is_no_number_on_one_rank_ends_no_run(tokens: Path, tmp_path: Path) -> None:
    assert run_ranks(train_with_a_spoiled_parameter, 2, run=str(tmp_path), data=str(tokens)) == [0, 0]
    assert [event["step"] for event in runs.events(tmp_path, EventKind.STEP_SKIPPED)] == [3, 4]


def come_late(placement: Placement, absent: list[int]) -> str:
    """Join the others, unless absent; returns what the join said."""
    if placement.rank in absent:
        return "absent"
    try:
        with join(placement, timeout_s=1.0):
            return "joined"
    except PhalanxError as error:
        return str(error)


@pytest.mark.parametrize(
    ("absent", "text"),
    [
        ([2], "rank 2 of 4 did not arrive within 1 s"),
        ([1, 3], "ranks 1, 3 of 4 did not arrive within 1 s"),
    ],
)
def test_missing_ranks_are_named(absent: list[int], text: str) -> None:
    answers = run_ranks(come_late, 4, absent=absent)
    assert text in answers[0]
    # Rank 0 keeps the store: when it leaves first, the others can only say where to look.
    for rank in {1, 2, 3} - {*absent}:
        assert text in answers[rank] or "rank 0 has exited" in answers[rank]


def test_a_missing_store_is_named() -> None:
    answers = run_ranks(come_late, 2, absent=[0])
    assert "rank 1 found no store at 127.0.0.1" in answers[1]


def test_all_present_join() -> None:
    assert run_ranks(come_late, 3, absent=[]) == ["joined"] * 3
