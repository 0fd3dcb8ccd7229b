"""A plain PyTorch loop on heterogeneous devices: Phalanx divides each batch by the speed of the ranks.

    python examples/own_loop.py                                          # one rank
    torchrun --nproc-per-node 3 examples/own_loop.py                     # three; the last line is the same

Model, loss and optimizer are plain PyTorch. The lines marked [1] to [4] are all that it takes: each rank gets as many
samples of a step as it computes in the time of the others, and the result is that of one device.
"""

import os

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx

GLOBAL_BATCH, STEPS = 64, 100


class Spirals:
    """2000 points on two arms of a spiral; which arm is to be learnt."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.arm = generator.integers(0, 2, 2000)
        turn = np.sqrt(generator.random(len(self))) * 1.5 * np.pi
        angle = turn + np.pi * self.arm
        noise = generator.normal(0, 0.05, (len(self), 2))
        self.point = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) / 3 + noise

    def __len__(self) -> int:
        return len(self.arm)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return self.point[number], int(self.arm[number])


def compute_loss_sum(net: nn.Module, samples: list[tuple[np.ndarray, int]]) -> Tensor:
    points = torch.tensor(np.stack([point for point, _ in samples]))
    return F.cross_entropy(net(points), torch.tensor([arm for _, arm in samples]), reduction="sum")


def train() -> list[float]:
    """The mean loss of each step, the same on all ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    with phalanx.BatchSplitter(net, Spirals(), GLOBAL_BATCH, timeout_s=60) as splitter:  # [1]
        while splitter.steps < STEPS:
            with splitter.step() as micro_batches:  # [2]
                weight, loss_sum = 0, torch.zeros((), dtype=torch.float64)
                for samples in micro_batches:  # [3]
                    loss = compute_loss_sum(net, samples)
                    loss.backward()
                    weight, loss_sum = weight + len(samples), loss_sum + loss.detach()
                losses.append(splitter.reduce_gradients(loss_sum, weight))  # [4]
                optimizer.step()
                optimizer.zero_grad()
    return losses


def main() -> None:
    torch.set_num_threads(1)
    losses = train()
    if os.environ.get("RANK", "0") == "0":
        print(f"loss {losses[0]:.6f} at the first step, {losses[-1]:.6f} at step {STEPS}")


if __name__ == "__main__":
    main()
