"""Collectives of two threads, in groups of their own, start in one order on all ranks.

A device with one connection (CUDA_DEVICE_MAX_CONNECTIONS=1) runs kernels in the order in which they were queued,
whatever their streams: where two ranks queue the collectives of two groups in unlike orders, each waits for the other.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.curves import References, assert_near, on_device
from tests.accelerator.device import needs_device
from tests.helpers import some

pytestmark = needs_device
FEW = {"train__steps": 2, "optim__decay_steps": 3, "comm__timeout_s": 60}
SHARDED = {"parallel__engine": "sharded", "parallel__zero": 1} | FEW
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor x data": SHARDED | {"parallel__tensor": 2, "train__micro_batch": 4},
    "pipeline x data": SHARDED | {"parallel__pipeline": 2, "train__micro_batch": 2},
    "pipeline x data, two slots": SHARDED
    | {"parallel__pipeline": 2, "train__micro_batch": 2, "optim__double_buffer": True},
}


@pytest.mark.parametrize("layout", some(LAYOUTS, 0, 2))
def test_ranks_do_not_wait_for_each_other_in_a_device_that_has_one_queue(
    layout: str, references: References, tokens: Path, tmp_path: Path
) -> None:
    changes = LAYOUTS[layout]
    alone = {key: value for key, value in changes.items() if not key.startswith("parallel")}
    how = {"order": "threads", "delay_ms": 2, "seed": 1, "connections": 1}
    found = on_device(4, tmp_path, tokens, how, **changes)
    assert_near(found, references.of(1, *(alone | {"parallel__engine": "single"}).items()), 2e-7)
