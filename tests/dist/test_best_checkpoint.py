"""Training ends when evaluations get no better, and the best checkpoint stays."""

import math
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.disk.load import list_steps
from phalanx.core.errors import CheckpointError
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.trainer import best_checkpoint, loop
from phalanx.trainer.best_checkpoint import BestEvaluation
from phalanx.trainer.export import _of_step
from phalanx.trainer.setup import TrainingSetup
from tests.helpers import run_ranks
from tests.numerics import runs


def test_the_lowest_mean_over_the_sets_is_the_best() -> None:
    found = BestEvaluation(patience=2)
    assert found.stop_reason is None
    assert found.update(1, {"a": 3.0, "b": 1.0})
    assert found.update(2, {"a": 1.0, "b": 2.9})
    assert not found.update(3, {"a": 0.0, "b": 3.9})
    assert (found.step, found.loss, found.evaluations_since, found.stop_reason) == (2, 1.95, 1, None)
    assert not found.update(4, {"a": math.nan, "b": 0.0})
    assert found.stop_reason == "2 evaluations in a row did not improve: the best is 1.9500, of step 2 (train.patience)"
    assert found.update(5, {"a": 1.0, "b": 1.0}) and found.stop_reason is None
    assert not found.update(6, {}) and found.evaluations_since == 0
    assert BestEvaluation(patience=0, evaluations_since=100).stop_reason is None


def trained(placement: Placement, run: str, data: str, changes: dict[str, Any], losses: list[float]) -> int:
    """A run whose evaluations, every second step, come to these losses."""

    def evaluated(setup: TrainingSetup, step: int, limit: int) -> dict[str, float]:
        loss = losses[math.ceil(step / 2) - 1]
        setup.records.write_event(
            EventKind.EVALUATED, {"step": step, "set": "held_out", "loss": loss, "tokens": 1, "seconds": 0.0}
        )
        return {"held_out": loss}

    loop.evaluate_all = evaluated
    return runs.train(placement, run, data, changes)


def test_a_run_ends_behind_its_best_evaluation_and_keeps_what_it_was_of(tokens: Path, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    changes = {
        "train.steps": 12, "optim.decay_steps": 12, "train.eval_every": 2, "train.patience": 2, "checkpoint.every": 0,
        "checkpoint.keep": 1, "checkpoint.best": True,
    }  # fmt: skip
    arguments = {"run": str(tmp_path / "run"), "data": str(tokens), "losses": [3.0, 1.0, 2.0, 1.5, 0.5, 0.7]}
    for _ in range(2):  # the second has nothing to do
        assert run_ranks(trained, 2, changes=changes, **arguments) == [0, 0]
        assert [record["step"] for record in read_steps(paths.metrics)] == list(range(1, 9))
        assert list_steps(paths.checkpoints) == [8, 4]
    ended = [event for event in read_lines(paths.events) if event["kind"] == EventKind.FINISHED]
    assert [event["step"] for event in ended] == [8, 8]
    assert ended[0]["reason"].endswith("did not improve: the best is 1.0000, of step 4 (train.patience)")
    assert best_checkpoint.find_best_evaluation(paths).step == 4
    assert run_ranks(trained, 2, changes=changes | {"train.patience": 3}, **arguments) == [0, 0]
    assert list_steps(paths.checkpoints) == [12, 10]
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 4 \(it has 10, 12\)"):
        _of_step(paths, 4)
    _of_step(paths, 10).close()
