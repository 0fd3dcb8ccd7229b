"""The engine of one rank: nothing is sharded and nothing exchanged. It is also the plain twin of the sharded ones."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.comm.mesh import Mesh
from phalanx.engine.interface import DeviceStepOutcome, InMemoryStore, Precision
from phalanx.engine.state_slots import StateSlots
from phalanx.optim import gradients
from phalanx.optim.state import Allocator, Shard, Slot, StatePiece
from phalanx.optim.update import (
    NO_REPLICAS,
    ReadState,
    StepUpdate,
    UpdateRule,
    allocate_zeros,
    load_state,
    state_pieces,
)

# Gradients are widened to the master's type in portions, so that the copies stay small beside the state.
CHUNK_ELEMENTS = 2**26


class SingleEngine:
    """Holds fp32 (or fp64) master parameters and moments; in a narrower type the model computes with a rounded copy."""

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
        """`model` is on meta; it is converted to the compute type and takes memory in `initialise`. `copies`: of
        parameters that several ranks of `mesh.model` hold alike, how many do. `keeper`: what outlives the process."""
        assert mesh.world == 1, "the single engine is for one rank"
        self.model, self.mesh, self.rule, self.nominal_weight = model, mesh, rule, nominal_weight
        self.step, self.loss_scale = 0, loss_scale
        self._allocate, self._replica_counts, self._store = allocate, copies, keeper
        self._master_dtype = precision.master
        self._narrow = precision.compute != self._master_dtype
        model.to(precision.compute)
        self._trainable_names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._units = {name: [full for full, _ in unit.named_parameters(prefix=name)] for name, unit in units}
        inside = {name for names in self._units.values() for name in names}
        self._outside = [name for name, _ in model.named_parameters() if name not in inside]
        self._accumulated: dict[str, torch.Tensor] = {}
        self._fold_grads = False
        self._first_micro_batch = True  # no micro-batch of this step has begun

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    @property
    def trainable(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.model.get_parameter(name).shape) for name in self._trainable_names}

    def initialise(self, fill: Callable[[Shard], None]) -> None:
        self.model.to_empty(device=self.mesh.device)
        parameters = self.parameters
        trained = {*self._trainable_names}
        for name, frozen in parameters.items():  # in order, as they lie in files
            if name in trained:
                continue
            fill(Shard(name, 0, frozen.numel(), tuple(frozen.shape), frozen.data.view(-1), trainable=False))
        parameters = {name: parameters[name] for name in self._trainable_names}
        self._state = StateSlots(self._make, self._pieces, self._allocate, keeper=self._store)
        self._state.wait_until_ready()
        self._no_decay = frozenset(name for name, parameter in parameters.items() if parameter.dim() < 2)
        for name, parameter in parameters.items():
            if not self._state.has_state:
                fill(Shard(name, 0, parameter.numel(), tuple(parameter.shape), self._slot[name]["param"]))
            if not self._narrow:
                # The model computes with the master values themselves.
                parameter.data = self._slot[name]["param"].view(parameter.shape)
            else:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._accumulate(name, p))
        self._round_into_model()

    def _make(self, allocate: Allocator) -> Slot:
        """The state as a run begins with it."""
        slot: Slot = {}
        for name in self._trainable_names:
            shape = self.model.get_parameter(name).shape
            size = (shape.numel(), self._master_dtype, self.mesh.device)
            slot[name] = {"param": allocate(name, "param", *size)} | self.rule.make_state(name, shape, *size, allocate)
        return slot

    @property
    def _slot(self) -> Slot:
        return self._state.source

    def begin_step(self, step: int, weight: int, lr: float, clip: float | None) -> None:
        assert step == self.step + 1, (step, self.step)
        self._lr, self._clip = lr, clip
        self._weight = gradients.TotalWeight(weight, self.mesh.control, self.mesh.traffic)
        self._accumulated, self._first_micro_batch = {}, True

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        # A gradient that is used at once need not be widened; one that others are added to must be.
        self._fold_grads = self._narrow and not (last and self._first_micro_batch)
        self._first_micro_batch = False
        yield

    def grads_ready(self, unit: str) -> None:
        for name in self._units.get(unit, self._outside):
            self._accumulate(name, self.model.get_parameter(name))

    def _accumulate(self, name: str, parameter: torch.Tensor) -> None:
        """Add a narrow gradient to its wide accumulator: sums of micro-batches in bf16 would lose the small ones."""
        if not self._fold_grads or parameter.grad is None:
            return
        if name in self._accumulated:
            self._accumulated[name].add_(parameter.grad)
        else:
            self._accumulated[name] = parameter.grad.to(self._master_dtype)
        parameter.grad = None

    @torch.no_grad()
    def finish_step(self) -> DeviceStepOutcome:
        self._state.wait_for_commit()  # before what tells other ranks that this one is through with the step before
        parameters = self.parameters
        grads = self._accumulated or {name: p.grad for name, p in parameters.items() if p.grad is not None}
        total = self._weight.get()
        counted = ((grad, self._replica_counts.get(name, 1)) for name, grad in grads.items())
        squares = gradients.sum_of_squares_once(counted, self._master_dtype, self.mesh.device)
        squares = gradients.sum_over_model(squares, self.mesh.model, self.mesh.traffic)
        scale = self.loss_scale.factor.clone() if self.loss_scale is not None else None
        norm, divisor, skip = gradients.compute_norm_and_divisor(
            squares, nominal_weight=self.nominal_weight, total_weight=total, clip=self._clip, scale=self.loss_scale
        )
        change = StepUpdate(step=self.step + 1, lr=self._lr, no_decay=self._no_decay, divisor=divisor, skip=skip)
        for names in _portions(grads):
            wide = {name: grads[name].reshape(-1).to(self._master_dtype) for name in names}
            self.rule.apply(self._slot, self._slot, wide, change)
        self._accumulated = {}
        for parameter in parameters.values():
            parameter.grad = None
        self._round_into_model()
        outcome = DeviceStepOutcome(norm, skip, total, scale)
        self._state.advance(self.step + 1, outcome)
        return outcome

    def _round_into_model(self) -> None:
        if self._narrow:
            rounded = {name: self.model.get_parameter(name).data for name in self._trainable_names}
            masters = [self._slot[name]["param"].view(data.shape) for name, data in rounded.items()]
            torch._foreach_copy_(list(rounded.values()), masters)

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        yield {name: parameter.data for name, parameter in self.parameters.items()}

    def pieces(self) -> Iterator[StatePiece]:
        return self._pieces(self._slot)

    def _pieces(self, slot: Slot) -> Iterator[StatePiece]:
        for name, state in slot.items():
            yield from state_pieces(self.rule, name, state, 0)

    def load(self, read: ReadState) -> None:
        for name, state in self._slot.items():
            load_state(self.rule, name, state, 0, read)
        self._round_into_model()

    def commit(self, step: int) -> None:
        self.step = step

    def resume_after(self, step: int) -> None:
        self._state.adopt_state(step)
        self.step = step

    def take_notices(self) -> list[tuple[str, dict[str, Any]]]:
        return []

    def close(self) -> None: ...


def _portions(grads: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    """Cut the names into runs of at most PORTION_ELEMENTS elements (a larger tensor is a run of its own)."""
    names: list[str] = []
    elements = 0
    for name, grad in grads.items():
        if names and elements + grad.numel() > CHUNK_ELEMENTS:
            yield names
            names, elements = [], 0
        names.append(name)
        elements += grad.numel()
    if names:
        yield names
