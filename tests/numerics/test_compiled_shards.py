"""Parameters whose storages come and go between uses (zero 3) are the same ones to what is compiled."""

import functools
from pathlib import Path

from phalanx.core.placement import Placement
from tests.helpers import run_ranks
from tests.numerics import runs


def compilations(placement: Placement, run: str, data: str, steps: int, shares: list[int]) -> int:
    """How often something was compiled in a run, that must not be for as long as it is."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch.compile = functools.partial(torch.compile, backend=counter)  # type: ignore[assignment]
    changes = {"parallel.engine": "sharded", "parallel.zero": 3, "train.compile": True, "train.steps": steps}
    changes |= {"train.eval_sequences": 0, "train.micro_batch": 2, "optim.decay_steps": 12}
    assert runs.train(placement, run, data, changes, shares) == 0
    return counter.frame_count


def test_longer_runs_compile_nothing_more(tokens: Path, tmp_path: Path) -> None:
    few, many = (
        run_ranks(compilations, 2, run=str(tmp_path / str(steps)), data=str(tokens), steps=steps, shares=[5, 3])
        for steps in (2, 6)
    )
    assert few == many
    assert all(0 < count <= 4 for count in few)
