"""PyTorch's fully_shard (FSDP2) as an engine: a reference for tests and benchmarks of the sharded engine.

Each unit is gathered for its forward and its backward pass and its gradients are reduce-scattered after every
micro-batch. Shards are even: cut along the first dim, the last ranks may hold less.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from phalanx.comm import collectives
from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Mesh
from phalanx.engine.interface import DeviceStepOutcome, InMemoryStore, Precision
from phalanx.engine.state_slots import GlobalNorm, OwnedShards
from phalanx.layout.buckets import Fragment, ParameterSpec
from phalanx.optim import gradients
from phalanx.optim.update import (
    NO_REPLICAS,
    Allocator,
    ReadState,
    Shard,
    Slot,
    StatePiece,
    StepUpdate,
    UpdateRule,
    allocate_zeros,
    copy_slot,
)


class Fsdp2Engine:
    """The FSDP2 engine. Master parameters are the shards that fully_shard keeps, in fp32 (or fp64)."""

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
        keeper: InMemoryStore | None = None,
    ) -> None:
        """`model` is on meta and gets wrapped; `initialise` allocates it. `keeper`: the store of in-memory checkpoints.

        Parameters outside `units` belong to the root: gathered once, they stay whole until the step's end.
        """
        self.model, self.mesh, self.step, self.loss_scale = model, mesh, 0, loss_scale
        self._allocate, self._store, self._units, self._precision = allocate, keeper, dict(units), precision
        self._rule_state: Slot = {}  # optimizer state of each shard
        self._whole = [
            ParameterSpec(name, tuple(parameter.shape), "", str(parameter.dtype), parameter.requires_grad)
            for name, parameter in model.named_parameters()
        ]
        self.trainable = {each.name: each.shape for each in self._whole if each.trained}
        owned = tuple(each for whole in self._whole if whole.trained and (each := self._own(whole)).stop > each.start)
        self._shards = OwnedShards(owned, rule, precision.master, mesh.device)
        zero = torch.zeros((), dtype=precision.master, device=mesh.device)
        self._norm = GlobalNorm(nominal_weight, loss_scale, NO_REPLICAS, zero)
        for parameter in model.parameters():  # on meta: nothing is copied
            parameter.data = parameter.data.to(precision.master if parameter.requires_grad else precision.transport)
        policy = MixedPrecisionPolicy(
            param_dtype=precision.transport if precision.transport != precision.master else None,
            reduce_dtype=precision.master,
            # Positions' cosines and sines are fp32 inputs and stay so; the embedding sets the type of the rest.
            cast_forward_inputs=False,
        )
        for _, unit in units:
            fully_shard(unit, mesh=mesh.shard, mp_policy=policy)
        fully_shard(model, mesh=mesh.shard, mp_policy=policy)
        for module in self._wrapped():
            # Sum, never average: the update divides by the true weight.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(_TimedAllGather(mesh.traffic))
            module.set_custom_reduce_scatter(_TimedReduceScatter(mesh.traffic))

    def _wrapped(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _local(self) -> dict[str, torch.Tensor]:
        """Flat shards by name, trained and frozen.

        Looked up again on each call, since fully_shard moves them on its first run.
        """
        assert isinstance(self.model, FSDPModule)
        self.model.reshard()  # without a backward pass, as in evaluation, the root stays gathered
        with torch.no_grad():
            return {name: _flat(parameter) for name, parameter in self.model.named_parameters()}

    def _own(self, whole: ParameterSpec) -> Fragment:
        """This rank's shard of the flattened parameter: whole rows, ceil(rows / ranks) each."""
        rows = whole.shape[0] if whole.shape else 1
        row_elements = whole.elements // rows if rows else 0
        portion = -(-rows // self.mesh.world)
        first = min(self.mesh.rank * portion, rows)
        last = min(first + portion, rows)
        return Fragment(whole, first * row_elements, last * row_elements, 0, 0)

    def initialise(self, fill: Callable[[Shard], None]) -> None:
        self.model.to_empty(device=self.mesh.device)
        if self._precision.compute != self._precision.transport:
            for module in self._wrapped():
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for sharded in group.fsdp_params:
                        _gather_wide(sharded, self._precision.compute)
        self._rule_state = self._shards.make_slot(self._allocate, masters=False)
        if self._store is not None and not self._store.open(self._slot(), self._shards.pieces):
            self._store = None
        attached = self._store is not None and self._store.has_state
        local = self._local()
        for whole in self._whole:
            own, tensor = self._own(whole), local[whole.name]
            assert own.stop - own.start == tensor.numel(), (whole.name, own.start, own.stop, tensor.numel())
            if not (attached and whole.trained):
                fill(Shard(whole.name, own.start, own.stop, whole.shape, tensor, trainable=whole.trained))
        if self._store is not None and attached:
            self._store.wait_until_ready()
            copy_slot(self._store.slots[self._store.current_index], self._slot())

    def begin_step(self, step: int, weight: int, lr: float, clip: float | None) -> None:
        assert step == self.step + 1, (step, self.step)
        self._lr, self._clip = lr, clip
        self._weight = gradients.TotalWeight(weight, self.mesh.control, self.mesh.traffic)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_is_last_backward(last)
        yield

    def grads_ready(self, unit: str) -> None:
        module = self._units.get(unit, self.model)  # parameters outside units belong to the root
        assert isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups:
            group.post_backward()

    @torch.no_grad()
    def finish_step(self) -> DeviceStepOutcome:
        if self._store is not None:
            # before the all-reduce that confirms the previous step to other ranks
            self._store.wait_for_commit()
        grads = {name: _flat(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        squares = gradients.sum_of_squares(grads.values(), self._precision.master, self.mesh.device)
        collectives.all_reduce(squares, self.mesh.shard.get_group(), self.mesh.traffic).wait()
        total = self._weight.get()
        scale = self.loss_scale.factor.clone() if self.loss_scale is not None else None
        norm, divisor, skip = self._norm.divisor(squares, total, self._clip)
        slot, shards = self._slot(), self._shards
        change = StepUpdate(step=self.step + 1, lr=self._lr, no_decay=shards.no_decay, divisor=divisor, skip=skip)
        owned = {each.key: grads[each.parameter.name] for each in shards.fragments if each.parameter.name in grads}
        shards.rule.apply(slot, slot, owned, change)
        self.model.zero_grad(set_to_none=True)
        outcome = DeviceStepOutcome(norm, skip, total, scale)
        if self._store is not None:
            self._store.commit(self.step + 1, outcome, slot)
        return outcome

    def _slot(self) -> Slot:
        local = self._local()
        owned = self._shards.fragments
        return {each.key: {"param": local[each.parameter.name], **self._rule_state[each.key]} for each in owned}

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        wrapped = self._wrapped()
        for module in wrapped:
            module.unshard()
        try:
            yield {name: parameter.data for name, parameter in self.model.named_parameters()}
        finally:
            for module in wrapped:
                module.reshard()

    def pieces(self) -> Iterator[StatePiece]:
        return self._shards.pieces(self._slot())

    def load(self, read: ReadState) -> None:
        self._shards.load(self._slot(), read)

    def commit(self, step: int) -> None:
        self.step = step

    def resume_after(self, step: int) -> None:
        if self._store is not None:
            self._store.adopt_state(step, self._slot())
        self.step = step

    def take_notices(self) -> list[tuple[str, dict[str, Any]]]:
        return []

    def close(self) -> None: ...


def _gather_wide(parameter: FSDPParam, compute: torch.dtype) -> None:
    """Gather a parameter in the type of its shards, and round it to this rank's compute type on arrival.

    Uses fully_shard's pre- and post-all-gather hooks. Ranks with the same types need none: what is sent is the same.
    """
    parameter.reset_sharded_param()  # the shard becomes the padded one that it would be at first use
    shard = parameter._sharded_local_tensor

    def pre_all_gather(mesh: DeviceMesh) -> tuple[tuple[torch.Tensor], None]:
        return (parameter._sharded_param_data.view(parameter.padded_sharded_param_size),), None

    def post_all_gather(
        gathered: tuple[torch.Tensor], metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor]] | None:
        (wide,) = gathered
        rows = wide[: parameter._orig_size[0]]  # the last ranks' shards are padded
        if out is None:
            narrow = rows.to(compute)
        else:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(rows)
        wide.untyped_storage().resize_(0)  # taken again for the next gathering
        return (narrow, (narrow,)) if out is None else None

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = pre_all_gather, post_all_gather  # type: ignore[attr-defined]
    parameter._init_extensions()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().view(-1)


class _Timed:
    """A collective of fully_shard, counted in `Traffic`."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _TimedAllGather(_Timed, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:  # a Pending, which like a Work has wait()
        pending = collectives.all_gather(output_tensor, input_tensor, group, self._traffic)
        return _as_asked(pending, async_op)


class _TimedReduceScatter(_Timed, ReduceScatter):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: object,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        assert op == dist.ReduceOp.SUM, f"gradients are summed, not reduced by {op}"
        pending = collectives.reduce_scatter(output_tensor, input_tensor, group, self._traffic)
        return _as_asked(pending, async_op)


def _as_asked(pending: collectives.PendingCollective, async_op: bool) -> collectives.PendingCollective | None:
    if async_op:
        return pending
    pending.wait()
    return None
