"""Which part of the state each rank holds where memories are unlike: less where there is little, and the same curve."""

from pathlib import Path
from typing import Any

import pytest

from phalanx import accelerator
from phalanx.comm.mesh import join
from phalanx.errors import ConfigError
from phalanx.optim.sharded import Sharded
from phalanx.records import Kind, Placement
from phalanx.train import trainer
from phalanx.train.state_shares import FOR_STATE, state_weights
from phalanx.train.subject import subject_of
from tests.helpers import run_ranks
from tests.numerics import runs
from tests.numerics.runs import farthest, outcome, walk

ROOMY = 2**40


def asked(placement: Placement, data: str, free: list[int], changes: dict[str, Any]) -> list[float] | str | None:
    """What the ranks agree on if each has so many bytes free."""
    accelerator.memory_free = lambda device, local_world: free[placement.rank]
    described = runs.job("nowhere", data, changes, placement.world)
    with join(placement, 30) as mesh:
        try:
            found = state_weights(described.config, subject_of(described.config, described.spec), mesh, 1)
        except ConfigError as error:
            return str(error)
    return None if found is None else list(found)


def train(placement: Placement, run: str, data: str, free: list[int]) -> list[int]:
    """A run with so little free; the elements of the state that this rank holds."""
    accelerator.memory_free = lambda device, local_world: free[placement.rank]
    held = []
    make = Sharded.initialise

    def noting(engine: Sharded, fill: Any) -> None:
        make(engine, fill)
        held.append(sum(bucket.share(placement.rank) for bucket in engine.buckets))

    Sharded.initialise = noting  # type: ignore[method-assign]
    described = runs.job(run, data, {}, placement.world)
    assert trainer.run(described, runs.on_one_thread(placement)) == 0
    return held


def bytes_of(tokens: Path, ranks: int) -> tuple[int, int]:
    """Of the tests' model in float64: bytes of parameters and gradients on each rank, and of the state of all."""
    elements = 0
    for shape in run_ranks(shapes, 1, data=str(tokens))[0]:
        count = 1
        for size in shape:
            count *= size
        elements += count
    return 16 * elements, 16 * elements  # parameters, which are the masters, and sums; two moments


def shapes(placement: Placement, data: str) -> list[list[int]]:
    described = runs.job("nowhere", data, {}, 1)
    model = subject_of(described.config, described.spec).model()
    return [list(parameter.shape) for parameter in model.parameters()]


def test_ranks_with_little_memory_hold_less_of_the_state(tokens: Path) -> None:
    whole, state = bytes_of(tokens, 3)
    tight = int((whole + state / 10) / FOR_STATE) + 20_000  # room for a tenth, and the padding
    found = run_ranks(asked, 3, data=str(tokens), free=[ROOMY, tight, ROOMY], changes={})
    assert found[0] == found[1] == found[2]
    assert sum(found[0]) == pytest.approx(1.0)
    assert 0.05 < found[0][1] < 0.2
    assert found[0][0] == pytest.approx(found[0][2])
    none = run_ranks(asked, 3, data=str(tokens), free=[ROOMY, whole // 2, ROOMY], changes={})
    assert none[0] == pytest.approx([0.5, 0.0, 0.5])
    assert run_ranks(asked, 2, data=str(tokens), free=[ROOMY] * 2, changes={}) == [None] * 2
    even = {"balance.state": "even"}
    assert run_ranks(asked, 2, data=str(tokens), free=[ROOMY, tight], changes=even) == [None] * 2
    (said, *_) = run_ranks(asked, 2, data=str(tokens), free=[tight] * 2, changes={})
    assert "the optimizer state needs" in said


def test_a_run_cuts_its_state_so_and_walks_the_same_curve(tokens: Path, tmp_path: Path) -> None:
    whole, state = bytes_of(tokens, 2)
    tight = int((whole + state / 10) / FOR_STATE) + 20_000
    held = run_ranks(train, 2, run=str(tmp_path / "tight"), data=str(tokens), free=[ROOMY, tight], timeout_s=120)
    assert 4 * held[1][0] < held[0][0]
    (said,) = [each for each in runs.events(tmp_path / "tight", Kind.RESOLVED) if each["key"] == "balance.state"]
    assert said["value"][1] < 0.2
    assert farthest(outcome(tmp_path / "tight").losses, walk(1, tmp_path / "one", tokens).losses) < 1e-9
