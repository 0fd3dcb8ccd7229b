"""Every way to shard walks the way of plain PyTorch on one process: some steps of a small model, by hand.

What is sharded, in which shares, when it is reduced, and ranks are all combined with each other; steps have one or two
micro-batches in turns. The twin is torch's own optimizer on the data of all ranks, and norms are clipped in some
steps and not in others.
"""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from phalanx.comm.mesh import join
from phalanx.core.placement import Placement
from phalanx.engine.interface import Precision
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.optim.torch_optimizers import make_torch_rule
from tests.dist.engine_cases import ADAMW, DECAY, FLOAT64, WIDTH, Batch, Driven, Net, Twin, batches
from tests.helpers import ALL, cover, run_ranks, some

STEPS = 50 if ALL else 4
CLIP = 55.0  # less than the first norms and more than some of the others
MOMENTUM = 0.9
FLOAT32 = Precision(torch.float32, torch.float32)
SGD = make_torch_rule("sgd", lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY, options={"momentum": MOMENTUM})
MODES = list(itertools.product((1, 2, 3), ("per_step", "per_micro_batch")))


class Block(nn.Module):
    """More elements than a range is cut at for each of five ranks, and a few that are cut by nothing."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(WIDTH, inner, dtype=torch.float64) * 0.3)
        self.out = nn.Parameter(torch.randn(inner, WIDTH, dtype=torch.float64) * 0.3)
        self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * torch.tanh(hidden @ self.into) @ self.out + self.bias


class BySgd(Twin):
    """With momentum instead, in the type of the model."""

    def __post_init__(self) -> None:
        matrices, vectors = ([p for p in self.model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(groups, lr=1.0, momentum=MOMENTUM, foreach=False)
        for p in self.model.parameters():
            self.optimizer.state[p] = {"step": torch.tensor(0.0), "momentum_buffer": torch.zeros_like(p)}


def small() -> Net:
    torch.manual_seed(0)
    return Net([Block(70), Block(50)], own=False)


def shares(ranks: int) -> list[tuple[float, ...] | None]:
    """Even; uneven; and with ranks that have nothing, the first among them."""
    uneven = tuple(float(rank + 1) for rank in range(ranks))
    with_none = tuple(float(rank % 2 * (rank + 1)) for rank in range(ranks))
    return [None, uneven, with_none] if ranks > 1 else [None]


def data(step: int, rank: int) -> list[Batch]:
    return batches(step, rank, 1 + step % 2)


def ways(placement: Placement, exact: bool) -> dict[str, float]:
    """How far each way is from the twin: `exact` with AdamW in float64, else with SGD in float32."""
    kind, rule, precision = (Twin, ADAMW, FLOAT64) if exact else (BySgd, SGD, FLOAT32)
    found: dict[str, float] = {}
    with join(placement, 30) as mesh:
        start = small().to(precision.compute)
        twin = kind(copy.deepcopy(start), CLIP)
        for number in range(1, STEPS + 1) if mesh.rank == 0 else ():
            twin.step(number, [batch for rank in range(mesh.world) for batch in data(number, rank)])
        twin.share(mesh, STEPS)
        assert min(twin.norms) < CLIP < max(twin.norms)
        for (zero, reduce), weights in itertools.product(MODES, shares(mesh.world)):
            # So little travels in one part anyway; the lane would be told of three more that hold nothing.
            model, sharding = copy.deepcopy(start), ShardingSpec(zero, reduce, weights, parts=1)
            driven = Driven(mesh, model, model.units(), sharding, CLIP, rule, precision, twin=twin.model)
            driven.twin = twin
            driven.walk(STEPS, data, twin=False)
            found[f"zero {zero}, {reduce}, {weights}"] = driven.apart() if exact else parameters_apart(driven)
            driven.engine.close()
    return found


def parameters_apart(driven: Driven) -> float:
    """The norm of all differences of parameters, relative to that of the parameters."""
    wanted = dict(driven.twin.model.named_parameters())
    with driven.engine.full_parameters() as whole:
        apart = sum(float((whole[name].double() - other.double()).square().sum()) for name, other in wanted.items())
    return math.sqrt(apart / sum(float(other.double().square().sum()) for other in wanted.values()))


@pytest.mark.parametrize(("ranks", "exact"), some(cover([1, 2, 3, 4, 5], [True, False]), 0, 1, 2))
def test_every_way_is_that_of_one_process(ranks: int, exact: bool) -> None:
    tolerance = 1e-9 if exact else 1e-6
    for found in run_ranks(ways, ranks, timeout_s=280, exact=exact):
        assert len(found) == len(MODES) * len(shares(ranks))
        assert max(found.values()) < tolerance, found
