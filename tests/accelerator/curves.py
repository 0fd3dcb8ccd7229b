"""Tiny runs on the simulated device, and the same on the CPU."""

import functools
import hashlib
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from tests.accelerator.device import run_on_device
from tests.dist.incidents import train_with_signal
from tests.helpers import cover, run_ranks
from tests.numerics import runs
from tests.numerics.runs import Outcome

# `make accelerator` runs all orders; `make test` those two in which a missing wait shows with certainty: in one what
# reads runs too late, in the other too early.
EVERYTHING = "PHALANX_TEST_ACCELERATOR" in os.environ
ORDERS = ("lazy", "main_last", "side_last", "random", "threads") if EVERYTHING else ("lazy", "main_last")
STEPS = 20 if EVERYTHING else 5
paired = itertools.product if EVERYTHING else cover  # in `make test` each value of the factors once
DONE = "reference"  # a file in the folder of a run that others may take for theirs
RECIPE = {
    "train.steps": STEPS, "optim.decay_steps": STEPS, "train.dtype": "fp32", "train.micro_batch": 4,
    "train.eval_sequences": 4, "train.compile": False,
}  # fmt: skip


def train(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> int:
    """One CPU rank, with the one attention kernel that the simulated device has, too."""
    torch.backends.cuda.enable_flash_sdp(False)  # which says so for the CPU, too
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    return runs.train(placement, run, data, changes)


def on_cpu(ranks: int, run: Path, data: Path, **changes: Any) -> Outcome:
    """A run on CPU ranks. `changes` have __ for the dot of a key."""
    return _outcome(run_ranks(train, ranks, timeout_s=240, **_arguments(run, data, changes)), run)


def on_device(ranks: int, run: Path, data: Path, how: dict[str, Any], **changes: Any) -> Outcome:
    """The same on the simulated device; `how` as `run_on_device` has it."""
    return _outcome(run_on_device(runs.train, ranks, **{"timeout_s": 240} | how, **_arguments(run, data, changes)), run)


def killed(ranks: int, run: Path, data: Path, how: dict[str, Any], step: int, **changes: Any) -> Outcome:
    """A run whose rank 0 is killed when it writes the record of a step; all ranks are started again."""
    run.mkdir(exist_ok=True)
    write_event(RunPaths(run).events, EventKind.RUN_STARTED, 1)
    cue = {"step": step, "number": signal.SIGKILL, "ranks": [0]}
    if "shared" in how:
        changes |= {"resilience__in_memory_checkpoints": True}  # every step, whatever that costs here
    arguments = _arguments(run, data, changes) | cue
    return _outcome(run_on_device(train_with_signal, ranks, restarts=1, **{"timeout_s": 240} | how, **arguments), run)


def _arguments(run: Path, data: Path, changes: dict[str, Any]) -> dict[str, Any]:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return {"run": str(run), "data": str(data), "changes": RECIPE | dotted}


def _outcome(codes: list[int], run: Path) -> Outcome:
    assert codes == [0] * len(codes)
    return runs.outcome(run)


class References:
    """Curves of CPU ranks, each made once."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data

    @functools.cache  # noqa: B019  # lives as long as the session
    def of(self, ranks: int, *changes: tuple[str, Any]) -> Outcome:
        run = self.folder / hashlib.sha256(repr((ranks, changes)).encode()).hexdigest()[:16]
        if (run / DONE).exists():
            return runs.outcome(run)
        made = on_cpu(ranks, run, self.data, **dict(changes))
        (run / DONE).touch()
        return made


def assert_same_bits(found: Outcome, wanted: Outcome) -> None:
    assert found.losses == wanted.losses
    assert found.norms == wanted.norms
    assert found.evaluations == wanted.evaluations
    assert runs.same_bits(found.state, wanted.state)


def assert_near(found: Outcome, wanted: Outcome, rel: float) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=rel)
