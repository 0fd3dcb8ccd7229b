"""`phalanx.BatchSplitter` in the example's loop: the same curve on one rank and on several, also when one is slow."""

import contextlib
import io
import os
import runpy
import time

import pytest

import phalanx
from phalanx.core.errors import ConfigError, DataError
from phalanx.core.placement import Placement
from tests.helpers import ROOT, free_port, run_ranks, some

EXAMPLE = ROOT / "examples" / "own_loop.py"


def curve(placement: Placement, port: int, slow: bool = False) -> list[float]:
    """This rank's share of the last step, and the losses, as torchrun would start the example."""
    os.environ |= {"RANK": str(placement.rank), "WORLD_SIZE": str(placement.world), "LOCAL_RANK": str(placement.rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train = runpy.run_path(str(EXAMPLE))["train"]
    shares: list[int] = []
    if slow and placement.rank == 1:
        quick = train.__globals__["compute_loss_sum"]

        def slowed(net: object, samples: list[object]) -> object:
            time.sleep(0.0005 * len(samples))
            shares.append(len(samples))
            return quick(net, samples)

        train.__globals__["compute_loss_sum"] = slowed
    losses: list[float] = train()
    return [shares[-1] if shares else 0, *losses]


def test_one_rank_and_several_walk_the_same_curve() -> None:
    ((_, *alone),) = run_ranks(curve, 1, port=free_port())
    assert alone[-1] < 0.5 * alone[0], "it does learn"
    for ranks, slow in some([(2, True), (3, False), (2, False)], 0, 1):
        found = run_ranks(curve, ranks, port=free_port(), slow=slow)
        for _, *losses in found:
            assert losses == pytest.approx(alone, rel=1e-9)
        assert not slow or found[1][0] < 32, "the slow rank gets less than half"


def script(placement: Placement) -> str:
    """What the example prints without anything around it."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def test_it_is_a_script() -> None:
    (said,) = run_ranks(script, 1)
    assert said.startswith("loss 0.")


def test_it_needs_four_lines() -> None:
    marked = [line for line in EXAMPLE.read_text().splitlines() if "  # [" in line]
    assert [line.rpartition("# ")[2] for line in marked] == [f"[{number}]" for number in range(1, 5)]


def limits(placement: Placement) -> list[int]:
    """Sizes of the micro-batches of a step where no more than three samples fit, and what is refused."""
    import torch

    net = torch.nn.Linear(1, 1)
    with phalanx.BatchSplitter(net, range(40), 8, max_micro_batch=3, completed_steps=2) as splitter:
        with splitter.step() as micro_batches:
            sizes = [len(samples) for samples in micro_batches]
        assert splitter.steps == 3
        with pytest.raises(ConfigError, match="a step ended before its last micro-batch"), splitter.step():
            pass
    with pytest.raises(DataError, match="the data set has 4 samples, fewer than one global batch of 8"):
        phalanx.BatchSplitter(net, range(4), 8)
    return sizes


def test_micro_batches_are_as_large_as_they_may_be() -> None:
    (sizes,) = run_ranks(limits, 1)
    assert sum(sizes) == 8 and max(sizes) <= 3
