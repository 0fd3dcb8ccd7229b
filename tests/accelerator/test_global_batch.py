"""What is taken over the rows of all ranks within a step: batch norm's statistics, and the loads of experts."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from phalanx.comm.mesh import join
from phalanx.core.placement import Placement
from phalanx.engine.interface import Precision
from phalanx.models.batch_norm import batch_norms, convert_batch_norms
from phalanx.models.families.catalog import PRESETS
from phalanx.models.moe import MoEDecoder
from phalanx.parallel.model_buffers import prepare_buffers
from phalanx.workload.expert_balance import ExpertBalance
from tests.accelerator.curves import assert_near, on_cpu, on_device
from tests.accelerator.device import needs_device, run_on_device
from tests.accelerator.test_many_ranks import SHARDED
from tests.helpers import some

pytestmark = needs_device
ROWS = torch.linspace(-1, 2, 24).reshape(8, 3).sin()
SHARES = (slice(0, 5), slice(5, 8))


def normalize(placement: Placement) -> list[list[list[float]]]:
    """Outputs and gradients of a rank's rows, and the running mean."""
    with join(placement, 20) as mesh:
        model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Tanh(), nn.BatchNorm1d(3, affine=False))
        convert_batch_norms(model)
        prepare_buffers(model, mesh, Precision(torch.float32, torch.float32))
        for layer in batch_norms(model).values():
            layer.reset_statistics(mesh.device)
            layer.begin_pass(True)
        x = ROWS[SHARES[mesh.rank]].to(mesh.device).requires_grad_()
        y = model(x)
        (grad,) = torch.autograd.grad(y.square().sum() + y.exp().sum(), x)
        last = list(batch_norms(model).values())[-1].running_mean
        assert last is not None
        return [y.tolist(), grad.tolist(), [last.tolist()]]


@pytest.mark.parametrize("delay_ms", [0, 20])
def test_batch_norm_reads_the_sums_of_all_ranks_when_they_are_there(delay_ms: int) -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Tanh(), nn.BatchNorm1d(3, affine=False))
    x = ROWS.clone().requires_grad_()
    y = plain(x)
    (grad,) = torch.autograd.grad(y.square().sum() + y.exp().sum(), x)
    first, second = run_on_device(normalize, 2, order="threads", delay_ms=delay_ms)
    assert torch.allclose(torch.tensor(first[0] + second[0]), y, atol=1e-5)
    assert torch.allclose(torch.tensor(first[1] + second[1]), grad, atol=1e-5)
    assert first[2] == second[2]
    assert torch.allclose(torch.tensor(first[2][0]), plain[2].running_mean, atol=1e-6)


@pytest.mark.parametrize("balance", some(["step_before", "step", "bias"], 1, 2))
def test_experts_go_by_the_loads_of_all_ranks(balance: str, tokens: Path, tmp_path: Path) -> None:
    experts = {"experts": 5, "experts_per_token": 2, "balance_weight": 0.5, "balance": balance}
    model = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 44, "vocab_size": 61}
    model |= {"architecture": "mixtral", "moe": experts}
    if balance == "bias":
        model |= {"architecture": "deepseek_v3", "latent": [0, 12, 4, 6], "kv_heads": 4}
        model |= {"moe": experts | {"bias_rate": 0.1}}
    changes = SHARDED | {"model": model, "train__micro_batch": 2, "train__steps": 2}
    how = {"order": "threads", "delay_ms": 2, "seed": 1}
    found = on_device(2, tmp_path / "run", tokens, how, **changes | {"parallel__zero": 3})
    assert_near(found, on_cpu(1, tmp_path / "cpu", tokens, **changes | {"parallel__engine": "single"}), 3e-7)


def count_beside_a_late_rank(placement: Placement) -> list[list[float]]:
    """What the second step goes by, when the other rank's first step ends a second later."""
    mixtral = PRESETS["mixtral-8x7b"]
    assert mixtral.moe is not None
    spec = replace(
        mixtral, layers=1, hidden=8, vocab_size=8, moe=replace(mixtral.moe, experts=4, balance="step_before")
    )
    with torch.device("meta"):
        model = MoEDecoder(spec)
    with join(placement, 20) as mesh:
        balance = ExpertBalance(model, mesh, cast(Any, SimpleNamespace(loss_scale=None)), 1)
        balance.begin(1, [], cast(Any, None), 0)
        balance.load.counts[0, mesh.rank] += 3
        if mesh.rank == 1:
            time.sleep(1)
        balance.end(1)
        balance.note_outcome(cast(Any, SimpleNamespace(get=lambda: (None, False))))
        balance.begin(2, [], cast(Any, None), 0)
        assert balance.load.shares is not None
        return cast(list[list[float]], balance.load.shares.tolist())


def test_the_loads_of_a_late_rank_are_waited_for() -> None:
    assert run_on_device(count_beside_a_late_rank, 2, order="threads") == [[[1.0, 1.0, 0.0, 0.0]]] * 2
