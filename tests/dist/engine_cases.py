"""Small modules under the sharded engine without a trainer, each beside its plain twin in the same process.

Every rank knows the data of all ranks, so that one can walk the whole trajectory alone with torch.optim.AdamW, too, and
tell the others.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm.mesh import Mesh
from phalanx.engine.interface import Precision
from phalanx.engine.sharded import ShardedEngine
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.optim import gradients
from phalanx.optim.gradients import LossScale
from phalanx.optim.update import AdamW, Shard, UpdateRule

WIDTH = 5
NOMINAL = 8
BETAS, EPS, DECAY = (0.9, 0.95), 1e-6, 0.1
ADAMW = AdamW(*BETAS, EPS, DECAY)
FLOAT64 = Precision(torch.float64, torch.float64)


class Mix(nn.Module):
    """Uses each of its parameters, whatever their shapes, and each element in a way of its own."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([_values(tuple(shape)) for shape in shapes])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            hidden = mix(hidden, weight)
        return hidden


def mix(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Some function of all elements of both."""
    flat = weight.reshape(-1)
    places = torch.arange(1, len(flat) + 1, dtype=flat.dtype)
    return torch.tanh(hidden * (1 + (flat * places.cos()).sum()) + (flat * places.sin()).sum())


def _values(shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=torch.float64) * 0.3)


class Net(nn.Module):
    """Units one after the other, and a matrix of the model's own before them."""

    def __init__(self, units: Sequence[nn.Module], own: bool = True) -> None:
        super().__init__()
        self.has_own = own
        if own:
            self.own = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))
        self.blocks = nn.ModuleList(units)

    def forward(self, hidden: torch.Tensor, *extra: bool) -> torch.Tensor:
        """`extra`: what a batch gives besides its rows."""
        hidden = hidden @ self.own if self.has_own else hidden
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def units(self) -> list[tuple[str, nn.Module]]:
        return [(f"blocks.{number}", block) for number, block in enumerate(self.blocks)]


@dataclass
class Batch:
    """A micro-batch of a rank: rows, and which of them count."""

    rows: torch.Tensor
    counted: torch.Tensor
    extra: tuple[Any, ...] = ()  # further arguments of the model

    @property
    def weight(self) -> int:
        return int(self.counted.sum())

    def loss_sum(self, model: nn.Module) -> torch.Tensor:
        found = model(self.rows.to(next(model.parameters()).dtype), *self.extra)
        errors = (found.to(self.rows) - self.rows.roll(1, -1)).square().sum(-1)
        return (errors * self.counted).sum()


def batches(step: int, rank: int, count: int = 1, size: float = 1.0, none: bool = False) -> list[Batch]:
    """What a rank has in a step: of every micro-batch some rows, of one rank in three nothing in the second; a step in
    which nobody has anything if `none`."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank)
    found = []
    for number in range(count):
        rows = size * torch.randn(2 + (rank + number) % 3, WIDTH, generator=generator, dtype=torch.float64)
        counted = (torch.rand(len(rows), generator=generator) < 0.8).double()
        counted[0] = 1.0
        if none or (number == 1 and (rank + step) % 3 == 0):
            counted.zero_()
        found.append(Batch(rows, counted))
    return found


def rate(step: int) -> float:
    """A learning rate that is another in every step."""
    return 1e-2 / (1 + step % 4)


def fill_from(values: dict[str, torch.Tensor]) -> Callable[[Shard], None]:
    def fill(shard: Shard) -> None:
        shard.tensor.copy_(values[shard.name].flatten()[shard.start : shard.stop])

    return fill


@dataclass
class Twin:
    """The same by torch's own AdamW, on all ranks' data."""

    model: nn.Module
    clip: float | None = None
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": DECAY},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS, foreach=False)
        for p in trained:
            self.optimizer.state[p] = {
                "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)
            }  # fmt: skip

    def step(self, number: int, everything: Sequence[Batch]) -> None:
        """One step; its number counts for all parameters, also for those that are not used in every step."""
        self.optimizer.zero_grad(set_to_none=True)
        weight = sum(batch.weight for batch in everything)
        alike: dict[tuple[Any, ...], list[Batch]] = {}
        for batch in everything:
            alike.setdefault(batch.extra, []).append(batch)
        for extra, some in alike.items():
            rows, counted = torch.cat([each.rows for each in some]), torch.cat([each.counted for each in some])
            (Batch(rows, counted, extra).loss_sum(self.model) / max(weight, 1)).backward()
        used = [p for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(used, torch.inf if self.clip is None else self.clip)
        self.norms.append(norm.item())
        if not weight or not norm.isfinite():
            return
        for group in self.optimizer.param_groups:
            group["lr"] = rate(number)
        for state in self.optimizer.state.values():
            state["step"].fill_(number - 1)
        self.optimizer.step()

    def share(self, mesh: Mesh, steps: int) -> None:
        """Rank 0 has walked so many steps more than the others, who come to where it is. Collective."""
        if mesh.world == 1:
            return
        norms = torch.tensor(self.norms[-steps:] if mesh.rank == 0 else [0.0] * steps, dtype=torch.float64)
        moments = [moment for state in self.optimizer.state.values() for key, moment in state.items() if key != "step"]
        for tensor in (norms, *(p.data for p in self.model.parameters()), *moments):
            if tensor.numel():
                dist.broadcast(tensor, group_src=0, group=mesh.control)
        if mesh.rank != 0:
            self.norms += norms.tolist()

    def kept(self, name: str, kind: str) -> torch.Tensor:
        """A state by the names of pieces, flat."""
        parameter = self.model.get_parameter(name)
        return (parameter if kind == "param" else self.optimizer.state[parameter][kind]).detach().flatten()


class Driven:
    """A model under the engine, which starts with the values that the model has."""

    def __init__(
        self,
        mesh: Mesh,
        model: nn.Module,
        units: Sequence[tuple[str, nn.Module]],
        sharding: ShardingSpec,
        clip: float | None = None,
        rule: UpdateRule = ADAMW,
        precision: Precision = FLOAT64,
        loss_scale: LossScale | None = None,
        meta: bool = False,
        twin: nn.Module | None = None,
    ) -> None:
        """`twin`: what the twin computes with, of the same values, where it is no copy of the model."""
        self.mesh, self.model, self.clip = mesh, model, clip
        self.twin = Twin(copy.deepcopy(model) if twin is None else twin, clip)
        values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        if meta:
            model.to("meta")
        self.engine = ShardedEngine(
            model, units, mesh=mesh, rule=rule, nominal_weight=NOMINAL, precision=precision, loss_scale=loss_scale,
            sharding=sharding,
        )  # fmt: skip
        with torch.no_grad():
            self.engine.initialise(fill_from(values))
        self.norms: list[float] = []
        self.skipped: list[float] = []

    def step(self, number: int, mine: Sequence[Batch]) -> Any:
        """One step of this rank."""
        engine = self.engine
        engine.begin_step(number, sum(batch.weight for batch in mine), rate(number), self.clip)
        for index, batch in enumerate(mine):
            with engine.micro_batch(last=index == len(mine) - 1):
                gradients.backward(batch.loss_sum(self.model), NOMINAL, engine.loss_scale)
        outcome = engine.finish_step()
        engine.commit(number)
        return outcome

    def walk(self, steps: int, of: Callable[[int, int], list[Batch]] = batches, twin: bool = True) -> None:
        """Some steps, of which nobody waits for the end, and the twin's, which is one rank's work."""
        outcomes = []
        for number in range(self.engine.step + 1, self.engine.step + 1 + steps):
            outcomes.append(self.step(number, of(number, self.mesh.rank)))
            if twin and self.mesh.rank == 0:
                self.twin.step(number, [batch for rank in range(self.mesh.world) for batch in of(number, rank)])
        found = [outcome.get() for outcome in outcomes]
        if twin:
            self.twin.share(self.mesh, steps)
        self.norms += [norm for norm, _ in found]
        self.skipped += [skipped for _, skipped in found]

    def apart(self) -> float:
        """The greatest difference from the twin, of norms, of whole parameters and of this rank's state."""
        found = [abs(one - other) / max(1.0, other) for one, other in zip(self.norms, self.twin.norms, strict=True)]
        with self.engine.full_parameters() as whole:
            found += [_greatest(whole[name] - other) for name, other in self.twin.model.named_parameters()]
        for piece in self.engine.pieces():
            found.append(_greatest(piece.tensor - self.twin.kept(piece.name, piece.kind)[piece.start : piece.stop]))
        return max(found)

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's pieces, copied."""
        return {f"{piece.kind}/{piece.name}": piece.tensor.clone() for piece in self.engine.pieces()}


def _greatest(difference: torch.Tensor) -> float:
    return float(difference.detach().abs().max()) if difference.numel() else 0.0
