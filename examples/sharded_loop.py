"""A plain PyTorch loop whose model, gradients and AdamW's state are sharded by Phalanx, in unequal parts.

    python examples/sharded_loop.py                                      # one rank
    torchrun --nproc-per-node 3 examples/sharded_loop.py                 # three; the last line is the same

The lines marked [1] to [8] are all that differs from a loop on one device. Each rank computes on its part of a step's
samples, whatever its size: losses are sums, weights are counts, and the result is that of one rank.
"""

import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx  # [1]

SAMPLES, GLOBAL_BATCH, MICRO_BATCH, STEPS = 1536, 64, 16, 40
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Net(nn.Module):
    """Tells which of two arms of a spiral a point lies on."""

    def __init__(self, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.last = nn.Linear(width, 2)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.last(hidden)


def spirals() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    arm = torch.randint(0, 2, (SAMPLES,), generator=draws)
    turn = torch.rand(SAMPLES, generator=draws, dtype=torch.float64).sqrt() * 1.5 * math.pi
    points = torch.stack([turn * torch.cos(turn + math.pi * arm), turn * torch.sin(turn + math.pi * arm)], 1) / 3
    return points + 0.05 * torch.randn(SAMPLES, 2, generator=draws, dtype=torch.float64), arm


def samples_of(step: int, rank: int) -> list[Tensor]:
    """Numbers of this rank's samples of a step, by micro-batch: rank 0 takes half of what each of the others takes."""
    everyones = torch.arange(GLOBAL_BATCH * (step - 1), GLOBAL_BATCH * step) % SAMPLES
    unit = GLOBAL_BATCH // (2 * RANKS - 1)
    sizes = [unit] + [2 * unit] * (RANKS - 1)
    sizes[-1] += GLOBAL_BATCH - sum(sizes)
    return list(everyones.split(sizes)[rank].split(MICRO_BATCH))


def rate(step: int) -> float:
    return 1e-2 * min(1.0, step / 10)


def train(zero: int = 3, folder: Path | None = None) -> list[float]:
    """The mean loss of each step and then of all samples, the same on all ranks; goes on from what is in `folder`."""
    torch.manual_seed(0)
    points, arms = spirals()
    net = Net().double()
    # Rank 0 keeps twice as much of the state as each of the others.
    keeps = [2.0] + [1.0] * (RANKS - 1)
    losses: list[float] = []
    with phalanx.shard(net, lr=rate, zero=zero, weights=keeps, clip_norm=1.0) as sharded:  # [2]
        if folder is not None:
            sharded.load(folder)  # [3]
        while sharded.steps < STEPS:
            batches = samples_of(sharded.steps + 1, sharded.rank)
            with sharded.step(batches, weight=sum(map(len, batches))) as step:  # [4]
                for batch in step:  # [5]
                    step.backward(F.cross_entropy(net(points[batch]), arms[batch], reduction="sum"))  # [6]
            losses.append(step.mean_loss())  # [7]
            if folder is not None and sharded.steps % 20 == 0:
                sharded.save(folder)  # [8]
        with torch.no_grad():
            losses.append(float(F.cross_entropy(net(points), arms)))
    return losses


def main() -> None:
    torch.set_num_threads(1)
    losses = train()
    if os.environ.get("RANK", "0") == "0":
        print(f"loss {losses[0]:.6f} at the first step, {losses[-1]:.6f} on all samples after {STEPS}")


if __name__ == "__main__":
    main()
