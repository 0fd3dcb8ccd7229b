"""The ways to train one model on several ranks that comm_schedule.py compares: Phalanx's sharded engine, DDP, DDP with
ZeroRedundancyOptimizer, and FSDP2 as it is and as it can be tuned, on gloo and on the backend "phalanx".

The model is a row of blocks with one square weight each. A block's computation is a wait of a given length, so that it
takes no processor time from the ranks beside it, or real products of matrices. All update by AdamW, fused.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from phalanx.comm import backend
from phalanx.comm.mesh import Mesh
from phalanx.engine.interface import Precision
from phalanx.engine.sharded import ShardedEngine
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.optim import update
from phalanx.optim.update import Shard

LR, BETAS, EPS, DECAY, SEED = 1e-3, (0.9, 0.95), 1e-8, 0.1, 0


@dataclass(frozen=True)
class Model:
    """`blocks` weights of `side` x `side` in fp32. A block waits so many seconds forward and backward, or multiplies
    `rows` rows."""

    blocks: int
    side: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    rows: int = 0

    @property
    def block_bytes(self) -> int:
        return 4 * self.side**2

    def make(self, rank: int) -> nn.Sequential:
        """The same weights on all ranks, with gradients that differ."""
        generator = torch.Generator().manual_seed(SEED)
        made = []
        for _ in range(self.blocks):
            weight = torch.empty(self.side, self.side).normal_(0, self.side**-0.5, generator=generator)
            made.append(Multiplying(weight) if self.rows else Waiting(weight, self, 1.0 + rank))
        return nn.Sequential(*made)

    def sample(self, rank: int) -> Tensor:
        """A rank's input."""
        if not self.rows:
            return torch.ones(1)
        return torch.randn(self.rows, self.side, generator=torch.Generator().manual_seed(SEED + 1 + rank))


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, model: Model, factor: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.model, ctx.factor = model, factor
        time.sleep(model.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        until = time.perf_counter() + ctx.model.backward_s
        (weight,) = ctx.saved_tensors
        found = torch.add(weight, 1.0).mul_(ctx.factor * grad[0])
        time.sleep(max(0.0, until - time.perf_counter()))
        return grad, found, None, None


class Waiting(nn.Module):
    """A block that waits; its gradient is a number that is the rank's own times (weight + 1)."""

    def __init__(self, weight: Tensor, model: Model, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._model, self._factor = model, factor

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Wait.apply(x, self.weight, self._model, self._factor)
        return found


class Multiplying(nn.Module):
    """A block that computes."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.T)


@dataclass(frozen=True)
class Stacked:
    """`blocks` of `layers` square weights each, which are multiplied: as much in a block as real ones have."""

    blocks: int
    layers: int
    side: int

    def make(self, rank: int) -> nn.Sequential:
        torch.manual_seed(SEED)
        return nn.Sequential(
            *(
                nn.Sequential(*(nn.Linear(self.side, self.side, bias=False) for _ in range(self.layers)))
                for _ in range(self.blocks)
            )
        )

    def sample(self, rank: int) -> Tensor:
        return torch.randn(1, self.side, generator=torch.Generator().manual_seed(SEED + 1 + rank))


class Way(Protocol):
    """One way to train. `step` makes a step, which may go on behind it; `settle` returns when nothing does."""

    def step(self) -> None: ...

    def settle(self) -> None: ...

    def weights(self) -> list[Tensor]:
        """The whole weights, block by block; all ranks must ask."""
        ...

    def close(self) -> None: ...


class _Torch:
    """A model that torch wraps, and one of its optimizers."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        self._model, self._optimizer, self._x = model, optimizer, x

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._x).sum().backward()
        self._optimizer.step()

    def settle(self) -> None: ...

    def weights(self) -> list[Tensor]:
        if isinstance(self._model, FSDPModule):
            return [parameter.full_tensor().detach() for parameter in self._model.parameters()]  # type: ignore[attr-defined]
        return [parameter.detach() for parameter in self._model.parameters()]

    def close(self) -> None: ...


def _adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)


def _wrapped(model: Model, rank: int) -> DistributedDataParallel:
    return DistributedDataParallel(
        model.make(rank), bucket_cap_mb=model.block_bytes / 2**20, gradient_as_bucket_view=True
    )


def ddp(model: Model, mesh: Mesh) -> Way:
    """A bucket for each block."""
    wrapped = _wrapped(model, mesh.rank)
    return _Torch(wrapped, _adamw(wrapped.parameters()), model.sample(mesh.rank))


def ddp_zero(model: Model, mesh: Mesh) -> Way:
    """Each optimizer state on one rank, which sends the updated weights to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # seconds, and of no use to the others

    wrapped = _wrapped(model, mesh.rank)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), AdamW, parameters_as_bucket_view=True, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY,
        fused=True,
    )  # fmt: skip
    return _Torch(wrapped, optimizer, model.sample(mesh.rank))


@contextlib.contextmanager
def on_phalanx() -> Iterator[DeviceMesh]:
    """All ranks, as a group of the backend "phalanx". One for all models: DTensor takes meshes of the same ranks for
    the same mesh."""
    group = dist.new_group(backend=backend.NAME)
    try:
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group(group)


@dataclass(frozen=True)
class Fsdp2:
    """Each block and the whole by fully_shard. `tuned`: gathered two blocks ahead, asynchronously. `whole`: weights
    stay whole between forward and backward pass. On the group of `shards`, or else that of the mesh."""

    tuned: bool
    shards: DeviceMesh | None = None
    whole: bool = False

    def __call__(self, model: Model, mesh: Mesh) -> Way:
        shards = self.shards or mesh.shard
        made = model.make(mesh.rank)
        kept: dict[str, Any] = {"reshard_after_forward": False} if self.whole else {}
        blocks: list[FSDPModule] = [fully_shard(block, mesh=shards, **kept) for block in made]
        fully_shard(made, mesh=shards, **kept)
        for number, block in enumerate(blocks if self.tuned else []):
            block._set_unshard_async_op(True)  # without it a gather is waited for where it begins
            block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, number - 2) : number][::-1])
        return _Torch(made, _adamw(made.parameters()), model.sample(mesh.rank))


@dataclass(frozen=True)
class Ours:
    """Phalanx's engine: `clip` is the limit of the gradient's global norm, if there is one."""

    sharding: ShardingSpec
    clip: float | None = None

    def __call__(self, model: Model, mesh: Mesh) -> "Phalanx":
        return Phalanx(model, mesh, self)


class Phalanx:
    """The engine at work on a model."""

    def __init__(self, model: Model, mesh: Mesh, way: Ours) -> None:
        self._model, self._x, self._clip = model.make(mesh.rank), model.sample(mesh.rank), way.clip
        # Masters of its own for the engine, whose groups are others than the peers'.
        first = {name: parameter.detach().flatten().clone() for name, parameter in self._model.named_parameters()}
        precision = Precision(torch.float32, torch.float32)
        units = list(self._model.named_children())
        rule = update.AdamW(*BETAS, EPS, DECAY)
        self.engine = ShardedEngine(
            self._model, units, mesh=replace(mesh), rule=rule, nominal_weight=mesh.world, precision=precision,
            sharding=way.sharding,
        )  # fmt: skip
        self._world, self._number = mesh.world, 0

        def fill(shard: Shard) -> None:
            shard.tensor.copy_(first[shard.name][shard.start : shard.stop])

        self.engine.initialise(fill)

    def step(self) -> None:
        self._number += 1
        self.engine.begin_step(self._number, 1, LR, self._clip)
        with self.engine.micro_batch(last=True):
            (self._model(self._x).sum() / self._world).backward()
        self.engine.finish_step()
        self.engine.commit(self._number)

    def settle(self) -> None:
        with self.engine.full_parameters():
            pass

    def weights(self) -> list[Tensor]:
        with self.engine.full_parameters() as whole:
            return [tensor.clone() for tensor in whole.values()]

    def close(self) -> None:
        self.engine.close()


Make = Callable[[Model, Mesh], Way]


def seconds(
    mesh: Mesh, way: Way, steps: int, warm: int = 1, before: Callable[[int], object] = lambda step: None
) -> list[float]:
    """Of each of `steps` steps, after `warm` others: from its beginning to the next one's, on the slowest rank.

    `before` is called before each step, the first is 0.
    """
    mesh.sum([0.0])
    marks = []
    for step in range(warm + steps):
        before(step)
        marks.append(time.perf_counter())
        way.step()
    marks.append(time.perf_counter())
    way.settle()
    return mesh.max([after - begin for begin, after in pairwise(marks)][warm:])


def sent_bytes(interface: str) -> int:
    """Bytes that have left this rank's network namespace, with headers, as the interface counts them."""
    with open("/proc/self/net/dev") as table:
        rows = dict(line.split(":", 1) for line in table if ":" in line)
    return int({name.strip(): row for name, row in rows.items()}[interface].split()[8])
