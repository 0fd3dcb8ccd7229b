"""Expert parallelism on the simulated accelerator: rows of other ranks and what comes back for the own ones are used
when they are there; with collectives of the device, and through the host."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator.curves import assert_near, on_cpu, on_device
from tests.accelerator.device import needs_device, run_on_device
from tests.accelerator.test_many_ranks import SHARDED
from tests.dist.test_experts import assert_divided, run_divided
from tests.helpers import some

pytestmark = needs_device


@pytest.mark.parametrize(("delay_ms", "collectives"), some([(0, True), (2, True), (2, False)], 1, 2))
def test_experts_wait_for_what_other_ranks_send(delay_ms: float, collectives: bool) -> None:
    everyones = run_on_device(
        run_divided, 3, order="threads", delay_ms=delay_ms, collectives=collectives, dtype="float32"
    )
    assert_divided(everyones, torch.float32, 1e-5)


@pytest.mark.parametrize(
    ("ranks", "zero", "tensor", "fp8"),
    some([(2, 3, 1, "none"), (4, 1, 1, "none"), (4, 2, 2, "none"), (2, 1, 2, "none"), (4, 3, 1, "block")], 0),
)
def test_divided_experts_train_as_one_cpu_rank_does(
    ranks: int, zero: int, tensor: int, fp8: str, tokens: Path, tmp_path: Path
) -> None:
    model: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 44, "vocab_size": 61}
    model |= {"architecture": "mixtral", "moe": {"experts": 5, "experts_per_token": 2, "balance": "sequence"}}
    changes = SHARDED | {"model": model, "train__micro_batch": 1, "train__fp8": fp8}
    changes |= {"train__steps": 2 if fp8 != "none" else 3}  # many kernels
    experts = [4, 1] if tensor == 1 or ranks == 2 else [2, 1, 0, 2]
    more = {"parallel__expert": len(experts) // tensor, "balance__experts": experts, "parallel__zero": zero}
    more["parallel__tensor"] = tensor
    found = on_device(ranks, tmp_path / "run", tokens, {"order": "threads", "delay_ms": 2, "seed": 1}, **changes | more)
    assert_near(found, on_cpu(1, tmp_path / "cpu", tokens, **changes | {"parallel__engine": "single"}), 3e-7)
