"""Offload where copies run in a stream of their own: the same bits, less memory on the device, bounded on the host."""

from typing import Any

import pytest
import torch
from torch import nn

from phalanx.core.placement import Placement
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.llama import Llama
from phalanx.parallel import activations
from phalanx.parallel.offload import ActivationOffloader, offload
from phalanx.system import accelerator
from tests.gpu.device import SIMULATED, needs_accelerator
from tests.helpers import run_ranks

pytestmark = needs_accelerator
BLOCKS, HORIZON = 8, 1
HIDDEN, LENGTH = (256, 512) if SIMULATED else (1024, 4096)
# Inputs weigh most here: what a block computes inside is narrow.
SPEC = ModelSpec(
    vocab_size=256, hidden=HIDDEN, layers=BLOCKS, heads=2, kv_heads=1, head_dim=32, intermediate=64, max_seq_len=LENGTH
)


def built(mode: str, device: torch.device) -> tuple[Llama, ActivationOffloader | None]:
    torch.manual_seed(0)
    model = Llama(SPEC).to(device, torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    mover = None
    if mode != "none":
        activations.recompute(list(model.layers), selective=False)
    if mode == "offload":
        mover = offload(list(model.layers), HORIZON)
    return model, mover


def observed(placement: Placement, mode: str) -> dict[str, Any]:
    """Sums of gradients of two steps of two micro-batches, and what was held meanwhile."""
    device = torch.device(accelerator.list_devices()[0])
    accelerator.set_device(device, 1)
    model, mover = built(mode, device)
    tokens = torch.arange(LENGTH, device=device)[None] % 256
    between, host = [], []
    for _ in range(2):
        for _ in range(2):
            accelerator.synchronize(device)
            before = torch.accelerator.memory_allocated(device)
            loss = model(tokens, labels=tokens)
            accelerator.synchronize(device)
            between.append(torch.accelerator.memory_allocated(device) - before)
            loss.backward()
        host.append((mover.pool.allocations, mover.pool.bytes) if mover is not None else (0, 0))
    bits = [p.grad.view(torch.int16).long().sum().item() for p in model.parameters() if p.grad is not None]
    squares = [float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None]
    moved = (mover.out_bytes, mover.back_bytes) if mover is not None else (0, 0)
    return {"bits": bits, "squares": squares, "between": min(between), "host": host, "moved": moved}


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, Any]]:
    return {mode: run_ranks(observed, 1, timeout_s=240, mode=mode)[0] for mode in ("none", "full", "offload")}


def test_gradients_are_the_same_bit_for_bit(seen: dict[str, dict[str, Any]]) -> None:
    for mode in ("none", "full"):
        assert seen["offload"]["bits"] == seen[mode]["bits"]
        assert seen["offload"]["squares"] == seen[mode]["squares"]


def test_the_device_holds_less_than_half(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["full"]["between"] > BLOCKS * HIDDEN * LENGTH * 2
    assert seen["offload"]["between"] < 0.5 * seen["full"]["between"]


def test_the_host_holds_what_has_left_and_no_more_with_time(seen: dict[str, dict[str, Any]]) -> None:
    one_input = LENGTH * HIDDEN * 2
    assert tuple(seen["offload"]["moved"]) == (4 * (BLOCKS - HORIZON) * one_input,) * 2
    assert [tuple(each) for each in seen["offload"]["host"]] == [(BLOCKS - HORIZON, (BLOCKS - HORIZON) * one_input)] * 2
