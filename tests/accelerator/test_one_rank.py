"""One rank on the simulated device, its streams in adversarial orders: the curve of the CPU, bit by bit."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.core.records import EventKind
from tests.accelerator.curves import (
    EVERYTHING,
    ORDERS,
    References,
    assert_near,
    assert_same_bits,
    killed,
    on_device,
    paired,
)
from tests.accelerator.device import needs_device
from tests.numerics import runs

pytestmark = needs_device
SHARDED = {"parallel__engine": "sharded"}
ENGINES: dict[str, dict[str, Any]] = {
    "single": {"parallel__engine": "single"},
    "fsdp2": {"parallel__engine": "fsdp2"},
    "zero 1": SHARDED | {"parallel__zero": 1},
    "zero 1, two slots": SHARDED | {"parallel__zero": 1, "optim__double_buffer": True, "optim__clip_norm": None},
    "zero 2": SHARDED | {"parallel__zero": 2, "parallel__grad_reduce": "per_micro_batch"},
    "zero 3": SHARDED | {"parallel__zero": 3},
}
KILLED = 7 if EVERYTHING else 4  # the step at whose record the rank is killed
EIGHT_BIT = {"optim__name": "adamw8bit", "model__hidden": 64, "model__intermediate": 80}
# How far losses may be from those of the CPU in fp32.
NEAR = {"fp16": 2e-5, "bf16": 1e-4}


@pytest.mark.parametrize(("engine", "order"), paired(ENGINES, ORDERS))
def test_every_engine_computes_what_the_cpu_does(
    engine: str, order: str, references: References, tokens: Path, tmp_path: Path
) -> None:
    changes = ENGINES[engine]
    found = on_device(1, tmp_path, tokens, {"order": order}, **changes)
    assert_same_bits(found, references.of(1, *changes.items()))


@pytest.mark.parametrize(("dtype", "order"), paired(NEAR, ORDERS))
def test_narrow_types(dtype: str, order: str, references: References, tokens: Path, tmp_path: Path) -> None:
    changes = SHARDED | {"optim__lr": 1e-3}
    found = on_device(1, tmp_path, tokens, {"order": order}, **changes, train__dtype=dtype)
    assert_near(found, references.of(1, *changes.items()), NEAR[dtype])


@pytest.mark.parametrize(("engine", "order"), paired(["single", "zero 3"], ORDERS))
def test_eight_bit_moments(engine: str, order: str, references: References, tokens: Path, tmp_path: Path) -> None:
    changes = ENGINES[engine] | EIGHT_BIT
    found = on_device(1, tmp_path, tokens, {"order": order}, **changes)
    assert_near(found, references.of(1, *changes.items()), 1e-6)


@pytest.mark.parametrize(("engine", "order"), paired(["single", "zero 3"], ORDERS))
def test_inputs_that_wait_on_the_host(
    engine: str, order: str, references: References, tokens: Path, tmp_path: Path
) -> None:
    """Offloaded activations: no bit differs from activations that are computed again."""
    changes = ENGINES[engine] | {"model__layers": 4, "memory__activations": "full"}
    offloaded = changes | {"memory__activations": "offload", "memory__offload_prefetch_blocks": 1}
    found = on_device(1, tmp_path, tokens, {"order": order}, **offloaded)
    assert_same_bits(found, references.of(1, *changes.items()))


# ----------------------------------------------------------------------------------------- checkpoints, kill and resume


@pytest.mark.parametrize(
    ("engine", "order"), paired(["single", "fsdp2", "zero 1", "zero 1, two slots", "zero 3"], ORDERS)
)
def test_killed_and_resumed_from_memory(
    engine: str, order: str, references: References, tokens: Path, tmp_path: Path, shared: Path
) -> None:
    changes = ENGINES[engine]
    found = killed(1, tmp_path, tokens, {"order": order, "shared": shared}, KILLED, **changes)
    assert_same_bits(found, references.of(1, *changes.items()))
    (resumed,) = runs.events(tmp_path, EventKind.RESUMED)
    assert resumed["memory"]
    assert resumed["step"] in (KILLED - 1, KILLED)


@pytest.mark.parametrize(("engine", "order"), paired(["single", "zero 3"], ORDERS))
def test_killed_and_resumed_from_a_checkpoint(
    engine: str, order: str, references: References, tokens: Path, tmp_path: Path
) -> None:
    changes = ENGINES[engine]
    found = killed(1, tmp_path, tokens, {"order": order}, KILLED, **changes, checkpoint__every=KILLED // 2)
    assert_same_bits(found, references.of(1, *changes.items()))
    (resumed,) = runs.events(tmp_path, EventKind.RESUMED)
    assert not resumed.get("memory")
    assert resumed["step"] in (KILLED // 2, KILLED // 2 * 2)
