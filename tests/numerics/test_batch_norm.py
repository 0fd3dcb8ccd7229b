"""Batch norm of a custom task on any division of a step's rows: one curve, and one set of running statistics."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint.disk.load import find_newest_valid
from phalanx.core.run_paths import RunPaths
from phalanx.parallel.model_buffers import read_statistics
from tests.helpers import ALL
from tests.numerics import runs
from tests.numerics.test_custom_task_curves import walk

TASK = """
import torch
import torch.nn.functional as F
from torch import nn
import phalanx

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.last = nn.Conv2d(width, width, 1), nn.BatchNorm2d(width, affine=False, momentum=None)
    def forward(self, x, draws):
        x = x + self.last(self.second(F.relu(self.norm(self.first(x)))))
        if draws is not None:
            x = draws.dropout(x.flatten(2).transpose(1, 2), 1, 0.1).transpose(1, 2).view_as(x)
        return x

class Net(phalanx.Model):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.ModuleList(Block(4) for _ in range(2))
        self.tail = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 2)
        self.register_buffer("shift", torch.empty(4, 1, 1))
    def constant(self, name, shape):
        return torch.linspace(-0.5, 0.5, 4).view(shape)
    def forward(self, x, draws):
        x = self.stem(x) + self.shift
        for layer in self.layers:
            x = layer(x, draws)
        for layer in self.tail:
            x = layer(x if x.dim() == 2 else x.mean((2, 3)))
        return self.head(F.relu(x))

class Task(phalanx.Task):
    def model(self):
        return Net()
    def train(self):
        generator = torch.Generator().manual_seed(3)
        labels = torch.randint(0, 2, (40,), generator=generator)
        pictures = torch.randn(40, 1, 4, 4, generator=generator, dtype=torch.float64)
        pictures[:, :, :2] += labels.view(-1, 1, 1, 1)
        return list(zip(pictures, labels.tolist()))
    def held_out(self):
        return self.train()[:11]
    def collate(self, samples):
        pictures, labels = torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])
        return phalanx.Batch({"x": pictures, "y": labels}, len(samples))
    def loss_sum(self, model, batch, draws):
        return F.cross_entropy(model(batch.inputs["x"], draws), batch.inputs["y"], reduction="sum")
"""


def statistics(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = find_newest_valid(RunPaths(run).checkpoints, None, lambda kind, details: None)
    assert checkpoint is not None
    return read_statistics(checkpoint.header)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "three, uneven, recomputed": (
        3,
        {"balance__batch": [6, 2, 1], "memory__activations": "full", "train__micro_batch": 2},
    ),
}
if ALL:
    LAYOUTS |= {
        "two, accumulated": (2, {"train__micro_batch": 2}),
        "three, one without rows": (3, {"balance__batch": [0, 5, 4], "parallel__zero": 3}),
        "two, reduced per micro-batch": (2, {"balance__batch": [8, 1], "parallel__zero": 2, "train__micro_batch": 1}),
        "two, fully_shard": (2, {"balance__batch": [6, 3], "parallel__engine": "fsdp2"}),
        "one, accumulated": (1, {"train__micro_batch": 2}),
    }


def test_any_division_of_a_step_is_one_curve_and_a_killed_run_the_same(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    own = {"task__code": str(tmp_path / "task.py"), "task__options": {}, "train__steps": 6, "checkpoint__every": 2}
    one = walk(1, tmp_path / "one", tmp_path, **own, train__micro_batch=9)
    expected = statistics(tmp_path / "one")
    assert len(expected) == 10
    assert min(one.losses) < 0.9 * one.losses[0]
    for name, (ranks, changes) in LAYOUTS.items():
        run = tmp_path / name.replace(" ", "-")
        other = walk(ranks, run, tmp_path, **own | changes)
        assert runs.farthest(other.losses, one.losses) < 1e-9, name
        assert runs.farthest(other.norms, one.norms) < 1e-9, name
        assert runs.distance(other.state, one.state, "param") < 1e-9, name
        assert other.evaluations == pytest.approx(one.evaluations, rel=1e-9)
        for key, values in statistics(run).items():
            assert (values - expected[key]).abs().max() < 1e-9 * expected[key].abs().max(), (name, key)
    whole = tmp_path / "three,-uneven,-recomputed"
    ranks, changes = LAYOUTS["three, uneven, recomputed"]
    killed = walk(ranks, tmp_path / "killed", tmp_path, dies_in=5, restarts=1, **own | changes)
    assert runs.events(tmp_path / "killed", "resumed")[0]["step"] == 4
    assert killed.losses == runs.outcome(whole).losses
    assert runs.same_bits(killed.state, runs.outcome(whole).state)
    for key, values in statistics(tmp_path / "killed").items():
        assert torch.equal(values, statistics(whole)[key]), key
