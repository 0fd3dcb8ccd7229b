"""Several ranks on simulated devices with collectives of their own, whose streams come late at random."""

from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.curves import EVERYTHING, References, assert_near, on_device
from tests.accelerator.device import needs_device

pytestmark = needs_device
FEW = {"train__steps": 6, "optim__decay_steps": 6}
SHARDED = {"parallel__data": "sharded"} | FEW
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 3": (2, SHARDED | {"parallel__zero": 3, "train__micro_batch": 2}),
    "tensor x data": (4, SHARDED | {"parallel__zero": 1, "parallel__tensor": 2, "train__micro_batch": 4}),
    "tied pipeline": (
        2,
        SHARDED | {"parallel__pipeline": 2, "model__tie_embeddings": True, "train__micro_batch": 2},
    ),
}
SEEDS = (1, 2, 3)


@pytest.mark.parametrize("delay_ms", [0, 2, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_compute_what_one_cpu_rank_does(
    layout: str, delay_ms: int, references: References, tokens: Path, tmp_path: Path
) -> None:
    ranks, changes = LAYOUTS[layout]
    alone = {key: value for key, value in changes.items() if not key.startswith("parallel")}
    alone |= {"parallel__data": "single"}
    for seed in SEEDS if EVERYTHING else SEEDS[:1]:
        how = {"order": "threads", "delay_ms": delay_ms, "seed": seed}
        found = on_device(ranks, tmp_path / str(seed), tokens, how, **changes)
        assert_near(found, references.of(1, *alone.items()), 2e-7)
