"""A training loop of one's own that gets its batches, their weights and the division of work from Phalanx.

    python examples/own_loop.py                                          # one rank
    torchrun --nproc-per-node 3 examples/own_loop.py                     # three; the last line is the same

Model, loss, optimizer and the exchange of gradients are plain PyTorch. The lines marked [1] to [8] are all that it
takes for unlike devices to share the work: each takes as many samples of a step as it manages while the others do
theirs, whatever each is slowed by meanwhile, and the result is that of one device.
"""

import os

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.comm.collectives import all_reduce
from phalanx.comm.mesh import Mesh, join
from phalanx.core.placement import Placement
from phalanx.data.loader import Loader
from phalanx.layout.balance import Speed
from phalanx.system.torchrun_env import from_environment
from phalanx.workload.clock import clock_of
from phalanx.workload.work_split import WorkSplit

GLOBAL_BATCH, STEPS = 64, 100
ALONE = Placement(rank=0, world=1, local_rank=0, local_world=1, node=0, device="cpu", store=None)


class Spirals:
    """Points on two arms of a spiral; which arm is to be told. What Phalanx asks of any set of samples."""

    count = 2000

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.arm = generator.integers(0, 2, self.count)
        turn = np.sqrt(generator.random(self.count)) * 1.5 * np.pi
        angle = turn + np.pi * self.arm
        noise = generator.normal(0, 0.05, (self.count, 2))
        self.point = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) / 3 + noise

    def sample(self, number: int, position: int) -> tuple[np.ndarray, int]:
        return self.point[number], int(self.arm[number])

    def describe(self) -> str:
        return f"the spirals have {self.count} points"

    def warnings(self) -> list[str]:
        return []


def loss_sum(net: nn.Module, samples: list[tuple[np.ndarray, int]]) -> Tensor:
    points = torch.tensor(np.stack([point for point, _ in samples]))
    return F.cross_entropy(net(points), torch.tensor([arm for _, arm in samples]), reduction="sum")


def train(placement: Placement) -> list[float]:
    """The mean loss of each step, the same on all ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    with join(placement, timeout_s=60.0) as mesh:
        loader = Loader([(Spirals(), 1.0)], GLOBAL_BATCH, seed=0, rank=mesh.rank)  # [1]
        sharing = WorkSplit("auto", GLOBAL_BATCH, [Speed(1.0)] * mesh.world, mesh)  # [2]
        clock = clock_of(mesh, [])  # [3]
        for step in range(1, STEPS + 1):
            clock.start()  # [4]
            weight, loss = 0, torch.zeros((), dtype=torch.float64)
            for samples in loader.batches(step - 1, sharing.division):  # [5]
                if samples:  # a rank may have none
                    part = loss_sum(net, samples)
                    part.backward()
                    weight, loss = weight + len(samples), loss + part.detach()
            sharing.exchange(step, clock.late, clock.lap())  # [6]
            losses.append(reduce_gradients(net, loss, weight, mesh))
            optimizer.step()
            optimizer.zero_grad()
            sharing.settle()  # [7]
            clock.stop()  # [8]
    return losses


def reduce_gradients(net: nn.Module, loss: Tensor, weight: int, mesh: Mesh) -> float:
    """Sum gradients, losses and weights over ranks and divide by the whole weight, never by the number of ranks."""
    parameters = list(net.parameters())
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    flat = torch.cat([*(grad.reshape(-1) for grad in grads), loss.reshape(1), loss.new_tensor([weight])])
    all_reduce(flat, mesh.shard.get_group(), mesh.traffic).wait()
    summed = (flat / flat[-1]).split([grad.numel() for grad in grads] + [1, 1])
    for parameter, grad in zip(parameters, summed, strict=False):
        parameter.grad = grad.view_as(parameter).clone()
    return float(summed[-2])


def main() -> None:
    torch.set_num_threads(1)
    placement = from_environment(os.environ, []) or ALONE
    losses = train(placement)
    if placement.rank == 0:
        print(f"loss {losses[0]:.6f} at the first step, {losses[-1]:.6f} at step {STEPS}")


if __name__ == "__main__":
    main()
