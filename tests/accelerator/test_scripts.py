"""Loops and scripts of a user's own on simulated devices: the curve of plain PyTorch on the CPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import phalanx
from phalanx.api.batch_splitter import BatchSplitter
from phalanx.core.placement import Placement
from tests.accelerator.curves import EVERYTHING
from tests.accelerator.device import needs_device, run_on_device
from tests.dist import scripts, test_shard
from tests.dist.test_shard import CLIP, DECAY, LR, STEPS, Net, by_hand, loss_sum, parts_of, whole
from tests.helpers import process_group

pytestmark = needs_device


def loop(placement: Placement, **asked: Any) -> tuple[list[list[float]], list[float]]:
    """`phalanx.shard` around a model on the device."""
    device = torch.device(placement.device)
    torch.accelerator.set_device_index(device)
    with process_group(placement, backend="cpu:gloo,sim:simccl"):
        net, found = Net(seed=placement.rank).double().to(device), []
        with phalanx.shard(net, lr=LR, weight_decay=DECAY, clip_norm=CLIP, **asked) as sharded:
            while sharded.steps < STEPS:
                number = sharded.steps + 1
                x, y = (tensor.to(device) for tensor in test_shard.data(number))
                batches = parts_of(number, sharded.rank, sharded.world)
                with sharded.step(batches, weight=sum(map(len, batches))) as step:
                    for batch in step:
                        there = batch.to(device)
                        step.backward(loss_sum(net, x[there], y[there]))
                found.append([step.mean_loss(), step.norm, step.weight])
            return found, whole(sharded)


@pytest.mark.parametrize(
    ("ranks", "asked", "how"),
    [
        (1, {"zero": 3}, {"order": "main_last"}),
        (2, {"zero": 1, "weights": [2, 1], "slots": 2}, {"order": "threads", "delay_ms": 2}),
        (2, {"zero": 3, "weights": [1, 2]}, {"order": "threads", "delay_ms": 2}),
    ],
)
def test_a_loop_of_ones_own(ranks: int, asked: dict[str, Any], how: dict[str, Any]) -> None:
    curve, parameters = by_hand()
    for of_rank, theirs in run_on_device(loop, ranks, **how, **asked):
        assert of_rank == [pytest.approx(step, rel=1e-9) for step in curve]
        assert theirs == pytest.approx(parameters, rel=1e-9, abs=1e-12)


def split_batches(placement: Placement) -> list[float]:
    """Mean loss and gradient of a step by `phalanx.BatchSplitter`, three times, with weights that are not changed."""
    device = torch.device(placement.device)
    torch.accelerator.set_device_index(device)
    with process_group(placement, backend="cpu:gloo,sim:simccl"):
        net = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64, device=device)
        torch.nn.init.constant_(net.weight, 2.0)
        found = []
        with BatchSplitter(net, [1.0] * 40, 8, max_micro_batch=1) as splitter:
            for _ in range(3):
                with splitter.step() as micro_batches:
                    loss_sum, weight = torch.zeros((), dtype=torch.float64, device=device), 0
                    for samples in micro_batches:
                        loss = net(torch.tensor(samples, dtype=torch.float64, device=device)[:, None]).square().sum()
                        loss.backward()
                        loss_sum, weight = loss_sum + loss.detach(), weight + len(samples)
                    mean = splitter.reduce_gradients(loss_sum, weight)
                    assert net.weight.grad is not None
                    found += [mean, net.weight.grad.item()]
                    net.zero_grad()
        return found


def test_batches_are_split_in_a_loop_of_ones_own() -> None:
    for found in run_on_device(split_batches, 2, order="threads", delay_ms=20):
        assert found == pytest.approx([4.0] * 6)


def on_device(name: str, folder: Path) -> str:
    """An example for SageMaker's library whose device is this one, where it says CUDA."""
    text = (scripts.EXAMPLES / f"{name}.py").read_text()
    there = {'"nccl"': "", "torch.cuda": "torch.sim", '"cuda"': '"sim"', ".cuda()": ".sim()"}
    there["from_config(llama_config())"] = 'from_config(llama_config()).to("sim")'  # which FSDP does for CUDA's alone
    for said, meant in there.items():
        text = text.replace(said, meant)
    assert "torch.sim" in text
    (folder / "small.py").write_text((scripts.EXAMPLES / "small.py").read_text())
    return scripts.written(folder, text)


@pytest.mark.parametrize(
    "name", ["plain_fsdp", "hybrid_shard", "activation_offload"] if EVERYTHING else ["activation_offload"]
)
def test_a_script_for_sagemaker(name: str, tmp_path: Path) -> None:
    alone = scripts.losses(scripts.example(name, 2))
    script = on_device(name, tmp_path)
    printed, _ = run_on_device(
        scripts.run_script, 2, order="threads", delay_ms=2, timeout_s=200, script=script, arguments=[]
    )
    assert len(alone) == 6
    assert scripts.losses(printed) == pytest.approx(alone, abs=2e-5)


def keep_histories(placement: Placement) -> list[float]:
    """The entries of a layer's input after three steps, of one micro-batch on each rank."""
    from phalanx.compat.sagemaker.delayed_scaling import LayerHistory, end_step
    from phalanx.parallel.fp8_delayed import INPUT

    device = torch.device(placement.device)
    torch.accelerator.set_device_index(device)
    with process_group(placement, backend="simccl"):
        history = LayerHistory(1, SimpleNamespace(amax_history_len=4))
        for step in range(3):
            history.scalings[0].note(INPUT, torch.full((64, 64), 1.0 + step + placement.rank, device=device))
            end_step()
        found: list[float] = history.table[0, INPUT].tolist()
        return found


def test_histories_of_scripts_have_the_maxima_of_all_ranks() -> None:
    assert run_on_device(keep_histories, 2, order="threads", delay_ms=2) == [[0.0, 2.0, 3.0, 4.0]] * 2
