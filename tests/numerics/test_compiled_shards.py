"""Parameters whose storages come and go between uses (zero 3) are the same ones to what is compiled."""

import functools
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.placement import Placement
from phalanx.trainer.loop import TrainingLoop
from tests.helpers import ALL, run_ranks
from tests.numerics import runs

STEPS = 6


def compilations(placement: Placement, run: str, data: str, shares: list[int]) -> list[int]:
    """How often something had been compiled by the end of each step."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, counts = CompileCounterWithBackend("aot_eager"), []
    torch.compile = functools.partial(torch.compile, backend=counter)  # type: ignore[assignment]
    train_step = TrainingLoop.train_step

    def counted(loop: TrainingLoop, step: int) -> str | None:
        asked = train_step(loop, step)
        counts.append(counter.frame_count)
        return asked

    loop_class: Any = TrainingLoop
    loop_class.train_step = counted  # of this forked process alone
    changes = {"parallel.engine": "sharded", "parallel.zero": 3, "train.compile": True, "train.steps": STEPS}
    changes |= {"train.eval_sequences": 0, "train.micro_batch": 2, "optim.decay_steps": 12}
    assert runs.train(placement, run, data, changes, shares) == 0
    return counts


# `make test` counts them in test_context.py, where zero is 3, too.
@pytest.mark.skipif(not ALL, reason="PHALANX_TEST_ALL is not set")
def test_longer_runs_compile_nothing_more(tokens: Path, tmp_path: Path) -> None:
    for counts in run_ranks(compilations, 2, run=str(tmp_path), data=str(tokens), shares=[5, 3]):
        assert len(counts) == STEPS
        assert 0 < counts[1] <= 4
        assert counts[1] == counts[-1]
