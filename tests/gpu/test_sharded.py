"""The sharded engine where its lane is a stream: alone on a device, several ranks on one, and beside a CPU."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.placement import Placement
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.system import accelerator
from phalanx.trainer import train_rank
from tests.gpu.device import needs_accelerator, needs_compiler
from tests.helpers import run_ranks
from tests.numerics import runs

pytestmark = needs_accelerator
STEPS = 10
SHARDED: list[dict[str, Any]] = [
    {"parallel.zero": 1},
    {"parallel.zero": 1, "optim.double_buffer": True, "optim.clip_norm": None},
    {"parallel.zero": 2, "train.micro_batch": 1},
    {"parallel.zero": 3, "train.micro_batch": 1, "parallel.grad_reduce": "per_step"},
]


def train(placement: Placement, run: str, data: str, changes: dict[str, Any], on_host: list[int]) -> int:
    """Every rank on the same device, but for those `host_fallback`."""
    device = "cpu" if placement.rank in on_host else accelerator.list_devices()[0]
    placed = dataclasses.replace(placement, device=device, threads=1)
    return int(train_rank.run_training(runs.job(run, data, changes, placement.world), placed))


def walk(run: Path, data: Path, ranks: int, changes: dict[str, Any], on_host: list[int] | None = None) -> list[float]:
    asked = {"train.steps": STEPS, "optim.decay_steps": runs.STEPS, "parallel.engine": "sharded"} | changes
    arguments = {"run": str(run), "data": str(data), "changes": asked, "on_host": on_host or []}
    assert run_ranks(train, ranks, timeout_s=280, **arguments) == [0] * ranks
    return [record["loss"] for record in read_steps(RunPaths(run).metrics)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    runs.write_tokens(folder)
    return folder


@pytest.mark.parametrize("sharding", SHARDED)
def test_one_device_walks_the_curve_of_the_plain_engine(sharding: dict[str, Any], data: Path, tmp_path: Path) -> None:
    clip = {"optim.clip_norm": sharding.get("optim.clip_norm", 0.9)}
    plain = walk(tmp_path / "plain", data, 1, {"parallel.engine": "single", **clip})
    assert walk(tmp_path / "sharded", data, 1, sharding) == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize("sharding", SHARDED)
def test_ranks_that_share_a_device_walk_it_too(sharding: dict[str, Any], data: Path, tmp_path: Path) -> None:
    clip = {"optim.clip_norm": sharding.get("optim.clip_norm", 0.9)}
    plain = walk(tmp_path / "plain", data, 1, {"parallel.engine": "single", **clip})
    uneven = walk(tmp_path / "three", data, 3, {"balance.optimizer_state": [3, 0, 1], **sharding})
    assert uneven == pytest.approx(plain, rel=1e-9)


def test_a_device_and_the_host_are_two_unlike_ranks(data: Path, tmp_path: Path) -> None:
    plain = walk(tmp_path / "plain", data, 1, {"parallel.engine": "single"})
    for zero in (1, 3):
        changes = {"parallel.zero": zero, "balance.optimizer_state": [3, 1], "balance.batch": [6, 2]}
        both = walk(tmp_path / f"both-{zero}", data, 2, changes, on_host=[1])
        assert both == pytest.approx(plain, rel=1e-9)


@needs_compiler
@pytest.mark.parametrize("zero", [1, 3])
def test_bf16_and_compilation_stay_near_the_exact_curve(zero: int, data: Path, tmp_path: Path) -> None:
    exact = walk(tmp_path / "exact", data, 1, {"parallel.engine": "single"})
    changes = {"parallel.zero": zero, "train.dtype": "bf16", "train.compile": True}
    assert walk(tmp_path / "near", data, 2, changes) == pytest.approx(exact, rel=2e-2)
