"""The GPU halves of the benchmarks in miniature on the simulated device: so they still run when there is a GPU."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import lora, offload, packing, peers, single_device
from benchmarks.peers import Case
from phalanx.config.model import DataSection
from phalanx.core.placement import Placement
from phalanx.data.prepare import prepare
from phalanx.data.record_files import TokenFile
from phalanx.layout.model_shape import ModelSpec
from phalanx.system import accelerator
from tests.accelerator.curves import EVERYTHING
from tests.accelerator.device import needs_device, run_on_device

pytestmark = needs_device
SPEC = ModelSpec(
    vocab_size=128, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=64, max_seq_len=64,
    tie_embeddings=True,
)  # fmt: skip


def device_of(placement: Placement) -> torch.device:
    device = torch.device(accelerator.list_devices()[0])
    accelerator.set_device(device, 1)
    assert str(device) == placement.device
    return device


def drive_plainly(
    case: Case, batches: Any, folder: Path, block: int, turn: Callable[[], bool], model: nn.Module | None = None
) -> list[float]:
    """In the place of transformers' Trainer, which knows kinds of devices by name: the same turns, and its losses."""
    if model is None:
        model = peers.transformers_model(case.spec, case.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=peers.LR, betas=peers.BETAS, eps=peers.EPS, weight_decay=peers.DECAY)
    losses = []
    for number, step in enumerate(batches, 1):
        micro_batches = [tuple(part.split(case.micro_batch)) for part in step]
        for tokens, labels in zip(*micro_batches, strict=True):
            there = labels.to(case.device)
            out = model(input_ids=tokens.to(case.device), labels=there, shift_labels=there)
            loss = out.loss * case.micro_batch / case.global_batch
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained, peers.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if number % block == 0 and not turn():
            break
    return losses


def adapters(placement: Placement) -> list[Any]:
    device = device_of(placement)
    lora.drive_trainer = drive_plainly
    spec = replace(SPEC, tie_embeddings=False, lora=lora.LORA)
    case = Case(spec, 16, 1, 2, "bf16", False, device, "full")
    rows, checks = lora.compare(case, cycles=2, block=1)
    return [[[row["trained by"], row["peak memory, GiB"]] for row in rows], [check.name for check in checks]]


def inputs_of_blocks(placement: Placement) -> list[Any]:
    """The rows and claims of lengths, and the longest row that is found to fit."""
    model = offload.built(
        replace(SPEC, layers=4, heads=1, kv_heads=1, head_dim=32), device_of(placement), torch.bfloat16
    )
    rows, checks = offload.compare(model, (16, 32), turns=1)
    same = [row["same gradients"] for row in rows]
    return [same, [check.name for check in checks], offload.longest(model, offload.OURS, 4096)]


def chip(placement: Placement) -> list[Any]:
    """What `on_accelerator` does with the chip, and then with all peers."""
    device = device_of(placement)
    single_device.drive_trainer = drive_plainly
    _, total_bytes = torch.accelerator.get_memory_info(device)
    small = single_device.Chip({"tiny": SPEC}, (16,), 32, 64, total_bytes, compile=False)
    rows, _ = single_device.against_the_chip(device, small, single_device.Effort(cycles=2, block=1))
    single_device.forget(device)
    all_peers, checks = single_device.compare(
        Case(SPEC, 16, 2, 2, "fp32", False, device), single_device.Effort(cycles=2, block=1)
    )
    return [rows[1]["tokens a step"], [row["trained by"] for row in all_peers], checks[0].holds]


def packed(placement: Placement) -> list[Any]:
    packing.LARGE = replace(packing.SMALL, hidden=32, layers=1, heads=2, kv_heads=2, head_dim=16, intermediate=48)
    packing.ROWS, packing.MICRO_ROWS = 4, 2
    with tempfile.TemporaryDirectory() as folder:
        data = DataSection(
            source=["stdlib-chat"], format="chat", chat_template="chatml", tokenizer="train", seq_len=packing.SEQ_LEN,
            cache=folder,
        )  # fmt: skip
        [(train_set, _)] = prepare(data).train
        rows, apart = packing.compare(TokenFile(train_set), 1, device_of(placement))
    return [[row["peer"] for row in rows], apart]


def test_adapters() -> None:
    ((rows, checks),) = run_on_device(adapters, order="threads")
    assert [name for name, _ in rows] == ["PEFT + Trainer", "Phalanx"]
    assert all(peak > 0 for _, peak in rows)
    assert checks[-1] == "peak memory, GiB: fits a card of 24 GB"


@pytest.mark.skipif(not EVERYTHING, reason="make accelerator")
def test_offload() -> None:
    ((same, checks, longest),) = run_on_device(inputs_of_blocks, order="threads", memory_mb=400)
    assert same == [True] * len(same)
    assert "16 tokens: peak over kept" in checks
    assert longest >= 4096


@pytest.mark.skipif(not EVERYTHING, reason="make accelerator")
def test_single_device() -> None:
    ((tokens, names, same),) = run_on_device(chip, order="threads", timeout_s=280)
    assert tokens == 32
    assert sorted(names) == ["Phalanx", "Trainer", "plain loop, our model", "plain loop, transformers' model"]
    assert same


@pytest.mark.skipif(not EVERYTHING, reason="make accelerator")
def test_packing() -> None:
    ((names, apart),) = run_on_device(packed, order="threads", timeout_s=280)
    assert names == ["padded", "packed"]
    assert apart < 2e-2
