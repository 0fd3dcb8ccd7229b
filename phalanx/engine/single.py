"""The engine of a single rank: no sharding and no communication. Sharded engines are tested against it."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.comm.mesh import Mesh
from phalanx.engine.interface import DeviceStepOutcome, InMemoryStore, Precision
from phalanx.engine.state_slots import GlobalNorm, OwnedShards, StateSlots
from phalanx.layout.buckets import Fragment, ParameterSpec
from phalanx.optim import gradients
from phalanx.optim.update import (
    NO_REPLICAS,
    Allocator,
    ReadState,
    Shard,
    StatePiece,
    StepUpdate,
    UpdateRule,
    allocate_zeros,
)

# Gradients are converted to the master's type in chunks, so that the copies stay small.
CHUNK_ELEMENTS = 2**26


class SingleEngine:
    """The single-rank engine, with fp32 (or fp64) master parameters and moments; the model computes in a narrower type
    with a rounded copy."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[tuple[str, nn.Module]],
        *,
        mesh: Mesh,
        rule: UpdateRule,
        nominal_weight: int,
        precision: Precision,
        loss_scale: gradients.LossScale | None = None,
        allocate: Allocator = allocate_zeros,
        copies: Mapping[str, int] = NO_REPLICAS,
        keeper: InMemoryStore | None = None,
    ) -> None:
        """`model` is on meta; it is converted to the compute type, and `initialise` allocates it. `copies`: the number
        of ranks of `mesh.model` that replicate a parameter, by name. `keeper`: the store of in-memory checkpoints."""
        assert mesh.world == 1, "the single engine is for one rank"
        self.model, self.mesh, self.step, self.loss_scale = model, mesh, 0, loss_scale
        self._narrow = precision.compute != precision.master
        model.to(precision.compute)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.trainable = {name: tuple(parameter.shape) for name, parameter in trained.items()}
        whole = [ParameterSpec(name, shape, "", str(precision.compute)) for name, shape in self.trainable.items()]
        owned = tuple(Fragment(each, 0, each.elements, 0, 0) for each in whole)
        self._state = StateSlots(OwnedShards(owned, rule, precision.master, mesh.device), allocate, keeper=keeper)
        zero = torch.zeros((), dtype=precision.master, device=mesh.device)
        self._norm = GlobalNorm(nominal_weight, loss_scale, copies, zero)
        self._units = {name: [full for full, _ in unit.named_parameters(prefix=name)] for name, unit in units}
        inside = {name for names in self._units.values() for name in names}
        self._outside = [name for name, _ in model.named_parameters() if name not in inside]
        self._accumulated: dict[str, torch.Tensor] = {}
        self._fold_grads = False
        self._first_micro_batch = True  # no micro-batch of this step has begun

    def initialise(self, fill: Callable[[Shard], None]) -> None:
        self.model.to_empty(device=self.mesh.device)
        for name, frozen in self.model.named_parameters():  # in the order of files
            if name not in self.trainable:
                fill(Shard(name, 0, frozen.numel(), tuple(frozen.shape), frozen.data.view(-1), trainable=False))
        self._state.open()
        self._state.wait_until_ready()
        for shard in self._state.shards_to_fill(self._state.shards.fragments):
            fill(shard)
        for name, master in self._masters().items():
            parameter = self.model.get_parameter(name)
            if not self._narrow:
                # The parameters are the master values themselves.
                parameter.data = master
            else:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._accumulate(name, p))
        self._round_into_model()

    def _masters(self) -> dict[str, torch.Tensor]:
        """Master values by name, of the parameter's shape."""
        slot, owned = self._state.source, self._state.shards.fragments
        return {each.parameter.name: slot[each.key]["param"].view(each.parameter.shape) for each in owned}

    def begin_step(self, step: int, weight: int, lr: float, clip: float | None) -> None:
        assert step == self.step + 1, (step, self.step)
        self._lr, self._clip = lr, clip
        self._weight = gradients.TotalWeight(weight, self.mesh.control, self.mesh.traffic)
        self._accumulated, self._first_micro_batch = {}, True

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        # A gradient that is used at once needs no conversion; one that is accumulated does.
        self._fold_grads = self._narrow and not (last and self._first_micro_batch)
        self._first_micro_batch = False
        yield

    def grads_ready(self, unit: str) -> None:
        for name in self._units.get(unit, self._outside):
            self._accumulate(name, self.model.get_parameter(name))

    def _accumulate(self, name: str, parameter: torch.Tensor) -> None:
        """Accumulate a gradient in the master's type: sums of micro-batches in bf16 would lose small values."""
        if not self._fold_grads or parameter.grad is None:
            return
        if name in self._accumulated:
            self._accumulated[name].add_(parameter.grad)
        else:
            self._accumulated[name] = parameter.grad.to(self._norm.zero.dtype)
        parameter.grad = None

    @torch.no_grad()
    def finish_step(self) -> DeviceStepOutcome:
        self._state.wait_for_commit()  # before other ranks see that this rank has finished the previous step
        parameters = dict(self.model.named_parameters())
        grads = self._accumulated or {name: p.grad for name, p in parameters.items() if p.grad is not None}
        total, slot, shards = self._weight.get(), self._state.source, self._state.shards
        squares = self._norm.local_squares(
            (grad, self._norm.replica_counts.get(name, 1)) for name, grad in grads.items()
        )
        squares = gradients.sum_over_model(squares, self.mesh.model, self.mesh.traffic)
        scale = self.loss_scale.factor.clone() if self.loss_scale is not None else None
        norm, divisor, skip = self._norm.divisor(squares, total, self._clip)
        change = StepUpdate(step=self.step + 1, lr=self._lr, no_decay=shards.no_decay, divisor=divisor, skip=skip)
        for some in _portions(each for each in shards.fragments if each.parameter.name in grads):
            wide = {each.key: grads[each.parameter.name].reshape(-1).to(shards.master) for each in some}
            shards.rule.apply(slot, slot, wide, change)
        self._accumulated = {}
        for parameter in parameters.values():
            parameter.grad = None
        self._round_into_model()
        outcome = DeviceStepOutcome(norm, skip, total, scale)
        self._state.advance(self.step + 1, outcome)
        return outcome

    def _round_into_model(self) -> None:
        if self._narrow:
            masters = self._masters()
            torch._foreach_copy_([self.model.get_parameter(name).data for name in masters], list(masters.values()))

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        yield {name: parameter.data for name, parameter in self.model.named_parameters()}

    def pieces(self) -> Iterator[StatePiece]:
        return self._state.shards.pieces(self._state.source)

    def load(self, read: ReadState) -> None:
        self._state.shards.load(self._state.source, read)
        self._round_into_model()

    def commit(self, step: int) -> None:
        self.step = step

    def resume_after(self, step: int) -> None:
        self._state.adopt_state(step)
        self.step = step

    def take_notices(self) -> list[tuple[str, dict[str, Any]]]:
        return []

    def close(self) -> None: ...


def _portions(owned: Iterable[Fragment]) -> Iterator[list[Fragment]]:
    """Split into chunks of at most CHUNK_ELEMENTS elements (a larger tensor is a chunk by itself)."""
    some: list[Fragment] = []
    elements = 0
    for each in owned:
        if some and elements + each.stop > CHUNK_ELEMENTS:
            yield some
            some, elements = [], 0
        some.append(each)
        elements += each.stop
    if some:
        yield some
