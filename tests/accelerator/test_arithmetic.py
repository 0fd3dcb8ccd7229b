"""What a run does to the arithmetic of its ranks on an accelerator."""

import os
from pathlib import Path
from typing import Any

from phalanx.core.placement import Placement
from tests.accelerator.curves import RECIPE
from tests.accelerator.device import needs_device, run_on_device
from tests.numerics import runs

pytestmark = needs_device
FEW = RECIPE | {"train.steps": 1, "train.eval_sequences": 0}


def arithmetic(placement: Placement, run: str, data: str, changes: dict[str, Any]) -> list[Any]:
    import torch

    torch.set_float32_matmul_precision("medium")  # as code of a user's own may have done
    assert runs.train(placement, run, data, FEW | changes) == 0
    return [
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    ]


def test_fp32_is_fp32_unless_asked_for_tf32(tokens: Path, tmp_path: Path) -> None:
    how = {"data": str(tokens), "run": str(tmp_path / "plain"), "changes": {}}
    assert run_on_device(arithmetic, **how) == [["highest", False, False, None]]
    how |= {"run": str(tmp_path / "changed"), "changes": {"train.tf32": True, "train.deterministic": True}}
    assert run_on_device(arithmetic, **how) == [["high", True, True, ":4096:8"]]
