"""One step with any division, masks and lengths has the gradient of one process, to the last digits of its type."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.comm.mesh import join
from phalanx.core.placement import Placement
from phalanx.layout import balance
from phalanx.models.counter_rng import CounterRNG
from phalanx.tasks.language import IGNORE_INDEX
from phalanx.tasks.task import Batch, Task
from phalanx.trainer import train_rank
from tests.helpers import run_ranks, some
from tests.numerics.runs import distance, events, job, loop_among, on_one_thread, state

CASES = 4  # of each number of ranks


@dataclass(frozen=True)
class Speckled(Task):
    """A task that ignores labels by chance: of some samples none, of others nearly all, or all."""

    task: Task
    seed: int

    def collate(self, samples: Sequence[Any]) -> Batch:
        batch = self.task.collate(samples)
        labels = batch.inputs["labels"].clone()
        for row, sample in zip(labels, samples, strict=False):
            rng = np.random.default_rng((self.seed, sample.position))
            row[rng.random(len(row)) < rng.choice([0.0, 0.5, 0.95, 1.0])] = IGNORE_INDEX
        return Batch(batch.inputs | {"labels": labels}, int((labels != IGNORE_INDEX).sum()), batch.samples)

    def loss_sum(self, model: Any, batch: Batch, draws: CounterRNG | None) -> Any:
        return self.task.loss_sum(model, batch, draws)

    def nominal_weight(self, global_batch: int) -> int:
        return self.task.nominal_weight(global_batch)


def drawn(world: int, number: int) -> dict[str, Any]:
    """A case: what is changed in the recipe, the seed of the masks, and the division."""
    rng = random.Random(f"{world} {number}")
    cuts = sorted(rng.randint(0, 8) for _ in range(world - 1))
    shares = [b - a for a, b in zip([0, *cuts], [*cuts, 8], strict=True)]
    changes = {
        "optim.clip_norm": rng.choice([None, 0.05, 0.9]),
        "data.isolate_documents": rng.random() < 0.5,
        "model.dropout": rng.choice([0.1, 0.5]),
        "train.seed": number,
    }
    return {"changes": changes, "masks": rng.randint(0, 99), "shares": shares, "micro_batch": rng.randint(1, 5)}


def one_step(placement: Placement, folder: str, data: str, cases: list[dict[str, Any]]) -> int:
    """The first step of each case, in a run folder of its number; on one rank undivided."""
    fixed = {"train.steps": 1, "checkpoint.every": 1, "train.eval_sequences": 0}
    with join(placement, 30) as mesh:
        for number, case in enumerate(cases):
            described = job(f"{folder}/{number}", data, fixed | case["changes"], placement.world)
            loop = loop_among(mesh, on_one_thread(placement), described)
            loop.setup.components.task = Speckled(loop.setup.components.task, case["masks"])
            if placement.world > 1:
                limits = [case["micro_batch"]] * placement.world
                loop.setup.components.work_split.division = balance.cut_into_micro_batches(case["shares"], limits)
            assert train_rank.run_steps(loop, loop.restore()) == 0
    return 0


@pytest.mark.parametrize("world", some([2, 3, 5], 1))
def test_gradients_of_any_division(world: int, tokens: Path, tmp_path: Path) -> None:
    cases = [drawn(world, number) for number in range(CASES)]
    assert any(0 in case["shares"] for case in cases)
    narrow = [case | {"changes": case["changes"] | {"train.dtype": "fp32"}} for case in cases]
    run_ranks(one_step, 1, timeout_s=240, folder=str(tmp_path / "one"), data=str(tokens), cases=cases)
    run_ranks(one_step, world, timeout_s=240, folder=str(tmp_path / "many"), data=str(tokens), cases=cases + narrow)
    for number, case in enumerate(cases):
        exact = state(tmp_path / "one" / str(number))
        # After one step the first moment is the mean gradient, clipped, times 1 - beta1.
        wide, short = (
            distance(state(tmp_path / "many" / str(index)), exact, "exp_avg") for index in (number, number + CASES)
        )
        print(f"{case['shares']} in micro-batches of {case['micro_batch']}: {wide:.1e}, in fp32 {short:.1e}")
        assert wide < 1e-12
        assert short < 1e-6
        assert events(tmp_path / "many" / str(number), "step_skipped") == []
