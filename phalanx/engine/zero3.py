"""ZeRO 3: parameters are sharded between uses, and gathered for each forward and backward pass.

Units are used once in a pass and in the declared order. Each pass has its own events: the communication thread sets
those of gathered units, the hooks those of units that are no longer needed.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from phalanx.comm.comm_thread import CommThread, StreamEvent
from phalanx.engine.bucket import BucketGradient, GradientBufferPool, RankBucket
from phalanx.engine.fp8_gather import Fp8Bucket
from phalanx.engine.hooks import OUTSIDE_MICRO_BATCH, ParameterResidency, in_backward
from phalanx.engine.released_bucket import ReleasedBucket
from phalanx.engine.schedule import Unit
from phalanx.engine.sharded_update import ShardedUpdate, StepState
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.layout.buckets import FP8_GATHERED, Bucket
from phalanx.layout.comm_simulation import TransferOp
from phalanx.layout.memory_model import PREFETCH

IN_FLIGHT_ZERO3 = 2  # gradient buffers; the backward pass waits for the link anyway


class PassEvents:
    """The events of one forward pass, and its backward pass if `training`, through resharded units."""

    def __init__(self, units: int, comm_thread: CommThread, training: bool) -> None:
        self.training = training
        self.gathered, self.regathered, self.forward_done, self.backward_done = (
            [StreamEvent(comm_thread) for _ in range(units)] for _ in range(4)
        )
        if training and units:
            # The last unit and the model's own parameters are not resharded between the two passes.
            self.regathered[-1], self.forward_done[-1] = self.gathered[-1], self.backward_done[-1]

    def set_all_done(self) -> None:
        """Set all events: the passes are over."""
        for mark in (*self.forward_done, *self.backward_done):
            mark.record()


@dataclass(frozen=True)
class UnshardedUnit:
    """A gathered unit, with the events of its arrival and of its last use."""

    unit: Unit
    done: StreamEvent
    gathered: StreamEvent


class UnshardedUnits:
    """The units whose whole parameters have memory; all methods run on the communication thread."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], update: ShardedUpdate) -> None:
        self._model, self._update = model, update
        self._first = int(bool(units) and units[0].module is model)  # number of the first but the model's own
        self._units: deque[UnshardedUnit] = deque()
        self._root: UnshardedUnit | None = None  # the model's own parameters, for a whole pass
        self._fp8_buckets = [held for unit in units for held in unit.buckets if isinstance(held, Fp8Bucket)]
        self._without_scales = list(self._fp8_buckets)

    def gather_masters(self, unit: Unit) -> None:
        """Gather a unit from the ranks' masters, for reads between steps."""
        for held in self._fp8_buckets:
            held.exact = True
        self._unshard(unit)
        for held in self._fp8_buckets:
            held.exact = False
        for part in range(unit.parts):
            self._update.queue.gather(unit.buckets, part, lambda: None)

    def masters_changed(self) -> None:
        """Before the next gather ranks agree on new scales of trained FP8 weights; frozen ones keep theirs."""
        self._without_scales = [
            held for held in self._fp8_buckets if held.bucket.trained or held in self._without_scales
        ]

    def gather(self, unit: Unit, op: TransferOp, marks: PassEvents) -> None:
        """Gather a part of a unit for the pass of `op`; before its first part, reshard units that are no longer
        needed."""
        if self._without_scales:
            self._update.agree_on_scales(self._without_scales)
            self._without_scales = []
        again = op.kind == "regather"
        mark = (marks.regathered if again else marks.gathered)[unit.number]
        if op.part == 0:
            while len(self._units) > PREFETCH:
                self._reshard(self._units.popleft())
            self._unshard(unit)
            used = (marks.backward_done if again else marks.forward_done)[unit.number]
            if unit.module is self._model:
                done = marks.backward_done[unit.number] if marks.training else used
                self._root = UnshardedUnit(unit, done, mark)
            else:
                self._units.append(UnshardedUnit(unit, used, mark))
        self._update.queue.gather(unit.buckets, op.part, lambda: mark.record() if op.part == unit.parts - 1 else None)

    def reshard_after_backward(self, unit: Unit, gradient: BucketGradient, marks: PassEvents) -> None:
        """Reshard a unit after its backward pass, before its gradient is reduced."""
        queue = self._update.queue
        queue.wait(gradient.ready)
        if self._units and unit.number > self._first:  # the end of the first has no hook
            queue.wait(marks.backward_done[unit.number])
        while self._units and all(mark.is_recorded for mark in (self._units[0].done, self._units[0].gathered)):
            self._reshard(self._units.popleft())  # an unused unit may still be in flight

    def _unshard(self, unit: Unit) -> None:
        for held in unit.buckets:
            held.unshard()
        self._update.stage_masters(unit)

    def _reshard(self, whole: UnshardedUnit) -> None:
        self._update.queue.wait(whole.done)
        for held in whole.unit.buckets:
            held.reshard()

    def reshard_all(self) -> None:
        """Reshard all units once the passes have finished with them."""
        self._update.queue.flush()  # the last gather may still be in flight, where nothing has used it
        while self._units:
            self._reshard(self._units.popleft())
        if self._root is not None:
            self._reshard(self._root)
            self._root = None


class GatheredParameters(ParameterResidency):
    """Residency of parameters that are gathered for each pass (ZeRO 3)."""

    releases: ClassVar[bool] = True

    @staticmethod
    def make_bucket(bucket: Bucket, *shared: Any) -> RankBucket:
        return (Fp8Bucket if bucket.dtype == FP8_GATHERED else ReleasedBucket)(bucket, *shared)

    @staticmethod
    def make_pool(sharding: ShardingSpec) -> GradientBufferPool | None:
        return GradientBufferPool(IN_FLIGHT_ZERO3, keeps=False)

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], update: ShardedUpdate, comm_thread: CommThread, *shared: Any
    ) -> None:
        super().__init__(model, units, update, comm_thread, *shared)
        self.passes_are_free = False  # all parameters are gathered and stay so, whatever passes run
        self._in_micro_batch = False
        self._next = self._current_backward = len(units)  # the unit that comes next in the passes
        self.events = PassEvents(len(units), comm_thread, training=False)
        self._unsharded = UnshardedUnits(model, units, update)

    # ------------------------------------------------------------------------------------------- the main thread: waits

    def register_hooks(self, model: nn.Module) -> list[Any]:
        return [
            *(module.register_load_state_dict_pre_hook(self._on_load_state_dict) for module in model.modules()),
            model.register_forward_hook(self._model_post_forward, always_call=True),
        ]

    def begin_micro_batch(self, last: bool) -> None:
        self._in_micro_batch = True
        self._begin_pass(training=True)

    def end_micro_batch(self, last: bool) -> None:
        self._in_micro_batch = False
        self.events.set_all_done()

    def _begin_pass(self, training: bool) -> None:
        self._next, self._current_backward = 0, len(self._units)
        self.events = PassEvents(len(self._units), self._comm_thread, training)

    def begin_forward(self) -> None:
        if self._comm_thread.closed:
            raise RuntimeError(
                "the model was called after its engine was closed, which has left it without parameters (zero 3); take "
                "them out of full_parameters() before"
            )
        if not self._in_micro_batch:  # a forward pass without backward
            self._begin_pass(training=False)
            for op in self._update.schedule.forward_order():
                self._submit_gather(self._units[op.bucket], op)
            self.submit_end_of_pass()

    def pre_forward(self, unit: Unit) -> None:
        if in_backward():
            self._pre_recompute(unit)
            return
        if unit.number != self._next:
            raise RuntimeError(
                f"unit {unit.name or 'of the model itself'} was used when it was the turn of "
                f"{self._units[self._next].name if self._next < len(self._units) else 'none'}; with zero 3 each "
                "unit must be used once in a pass, in the declared order: declare units so, or set "
                "parallel.zero=2 (with phalanx.shard: units= and zero=)"
            )
        self._next += 1
        self.events.gathered[unit.number].wait(self._traffic)
        self._pass_timer.exclude_wait()

    def post_forward(self, unit: Unit, output: Any) -> None:
        marks, tensors = self.events, [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        if not tensors and unit.trained_buckets and torch.is_grad_enabled():
            raise RuntimeError(
                f"unit {unit.name} returned a {type(output).__name__}, in which no tensor was found, so its backward "
                "pass could not be seen; with zero 3 a unit must return a tensor, or a tuple, list or dict of them"
            )
        if tensors := [each for each in tensors if each.requires_grad]:
            register_multi_grad_hook(tensors, lambda grad: self._pre_backward(unit, marks), mode="any")
        if not (self._in_micro_batch and unit is self._units[-1]):
            marks.forward_done[unit.number].record()

    def _model_post_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._in_micro_batch and not self.passes_are_free:
            self.events.set_all_done()

    def _pre_backward(self, unit: Unit, events: PassEvents) -> None:
        """Before a unit's backward pass; later units have finished theirs."""
        if not self._in_micro_batch or events is not self.events:
            raise RuntimeError(OUTSIDE_MICRO_BATCH)
        self._current_backward = unit.number
        for later in self._units[unit.number + 1 :]:
            events.backward_done[later.number].record()
            for held in later.trained_buckets:  # a parameter without gradient would be waited for forever
                held.finish_backward()
        events.regathered[unit.number].wait(self._traffic)
        self._pass_timer.exclude_wait()

    def _pre_recompute(self, unit: Unit) -> None:
        """Before a unit whose activations the backward pass recomputes."""
        if unit.number > self._current_backward:
            raise RuntimeError(
                f"the backward pass computes unit {unit.name} again after {self._units[self._current_backward].name}, "
                "which was used before it; with zero 3 checkpoint the activations of one unit at a time"
            )
        if unit.number < self._current_backward:
            self._pre_backward(unit, self.events)

    def check_state_dict(self, in_micro_batch: bool) -> None:
        when = " before the engine is closed" if self._comm_thread.closed else ""
        raise RuntimeError(
            "a state_dict was asked for of a model whose parameters are released between uses (zero 3), so that "
            f"there would be nothing in it; ask within full_parameters(){when}"
        )

    @staticmethod
    def _on_load_state_dict(module: nn.Module, *_: object) -> None:
        raise RuntimeError(
            "load_state_dict was called for a model whose parameters are released between uses (zero 3), so that what "
            "is loaded would be lost; load before the model is sharded, or load what the engine has saved"
        )

    # ------------------------------------------------------------------------------------- the main thread: submissions

    def submit_gather(self, now: StepState, unit: Unit, op: TransferOp) -> None:
        self._submit_gather(unit, op)

    def _submit_gather(self, unit: Unit, op: TransferOp) -> None:
        self._comm_thread.submit(partial(self._unsharded.gather, unit, op, self.events))

    def submit_release(self, unit: Unit, gradient: BucketGradient) -> None:
        self._comm_thread.submit(partial(self._unsharded.reshard_after_backward, unit, gradient, self.events))

    def submit_end_of_pass(self) -> None:
        self._comm_thread.submit(self._unsharded.reshard_all)

    def publish_masters(self, wait: bool = True) -> None:
        self._comm_thread.wait_current_stream()
        self._comm_thread.submit(self._unsharded.masters_changed)

    @contextlib.contextmanager
    def unshard_all(self) -> Iterator[None]:
        self._update.run_for_units(self._units, self._unsharded.gather_masters)
        self._comm_thread.drain()
        self.passes_are_free = True
        try:
            yield
        finally:
            self.passes_are_free = False
            self._comm_thread.wait_current_stream()  # the memory belongs to it, and it may reuse it at once
            for unit in self._units:
                for held in unit.buckets:
                    held.reshard()

    def finish_step(self, now: StepState) -> None:
        for unit in self._units:
            self._update.update_unit(now, unit, stages=False)
        self._unsharded.masters_changed()
