"""One rank on the simulated device, its streams in adversarial orders: the curve of the CPU, bit by bit."""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx import shared_memory
from phalanx.records import Kind, RunPaths, write_event
from tests.accelerator import curves
from tests.accelerator.curves import ORDERS, References, assert_near, assert_same_bits, on_device
from tests.accelerator.device import needs_device, run_on_device
from tests.dist.incidents import train_with_signal
from tests.numerics import runs

pytestmark = needs_device
SHARDED = {"parallel__data": "sharded"}
ENGINES: dict[str, dict[str, Any]] = {
    "single": {"parallel__data": "single"},
    "fsdp2": {"parallel__data": "fsdp2"},
    "zero 1": SHARDED | {"parallel__zero": 1},
    "zero 1, two slots": SHARDED | {"parallel__zero": 1, "optim__slots": 2, "optim__clip_norm": None},
    "zero 2": SHARDED | {"parallel__zero": 2, "parallel__reduce": "per_micro_batch"},
    "zero 3": SHARDED | {"parallel__zero": 3},
}
EIGHT_BIT = {"optim__rule": "adamw8bit", "model__hidden": 64, "model__intermediate": 80}
# How far losses may be from those of the CPU in fp32.
NEAR = {"fp16": 2e-5, "bf16": 1e-4}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_computes_what_the_cpu_does(
    engine: str, order: str, references: References, tokens: Path, tmp_path: Path
) -> None:
    changes = ENGINES[engine]
    found = on_device(1, tmp_path, tokens, {"order": order}, **changes)
    assert_same_bits(found, references.of(1, *changes.items()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", NEAR)
def test_narrow_types(dtype: str, order: str, references: References, tokens: Path, tmp_path: Path) -> None:
    changes = SHARDED | {"optim__lr": 1e-3}
    found = on_device(1, tmp_path, tokens, {"order": order}, **changes, train__dtype=dtype)
    assert_near(found, references.of(1, *changes.items()), NEAR[dtype])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("engine", ["single", "zero 3"])
def test_eight_bit_moments(engine: str, order: str, references: References, tokens: Path, tmp_path: Path) -> None:
    changes = ENGINES[engine] | EIGHT_BIT
    found = on_device(1, tmp_path, tokens, {"order": order}, **changes)
    assert_near(found, references.of(1, *changes.items()), 1e-6)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("engine", ["single", "zero 3"])
def test_inputs_that_wait_on_the_host(
    engine: str, order: str, references: References, tokens: Path, tmp_path: Path
) -> None:
    """Offloaded activations: no bit differs from activations that are computed again."""
    changes = ENGINES[engine] | {"model__layers": 4, "memory__activations": "full"}
    offloaded = changes | {"memory__activations": "offload", "memory__horizon": 1}
    found = on_device(1, tmp_path, tokens, {"order": order}, **offloaded)
    assert_same_bits(found, references.of(1, *changes.items()))


# ----------------------------------------------------------------------------------------- checkpoints, kill and resume


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory, as an agent makes it."""
    folder = shared_memory.PLACE / f"phalanx-test-{os.getpid()}-{random.randrange(1 << 30)}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


def killed(run: Path, data: Path, how: dict[str, Any], **changes: Any) -> runs.Outcome:
    """A run whose rank is killed when it writes the record of step 11, and started again."""
    run.mkdir(exist_ok=True)
    write_event(RunPaths(run).events, Kind.RUN_STARTED, 1)
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    if "shared" in how:
        dotted |= {"resilience.memory": True}  # every step, whatever that costs here
    arguments = {"run": str(run), "data": str(data), "changes": curves.RECIPE | dotted}
    cue = {"step": 11, "number": signal.SIGKILL, "ranks": [0]}
    codes = run_on_device(train_with_signal, restarts=1, timeout_s=240, **how, **arguments, **cue)
    assert codes == [0]
    return runs.outcome(run)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("engine", ["single", "fsdp2", "zero 1", "zero 1, two slots", "zero 3"])
def test_killed_and_resumed_from_memory(
    engine: str, order: str, references: References, tokens: Path, tmp_path: Path, shared: Path
) -> None:
    changes = ENGINES[engine]
    found = killed(tmp_path, tokens, {"order": order, "shared": shared}, **changes)
    assert_same_bits(found, references.of(1, *changes.items()))
    (resumed,) = runs.events(tmp_path, Kind.RESUMED)
    assert resumed["memory"]
    assert resumed["step"] in (10, 11)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("engine", ["single", "zero 3"])
def test_killed_and_resumed_from_a_checkpoint(
    engine: str, order: str, references: References, tokens: Path, tmp_path: Path
) -> None:
    changes = ENGINES[engine]
    found = killed(tmp_path, tokens, {"order": order}, **changes, checkpoint__every=4)
    assert_same_bits(found, references.of(1, *changes.items()))
    (resumed,) = runs.events(tmp_path, Kind.RESUMED)
    assert not resumed.get("memory")
    assert resumed["step"] in (4, 8)
