"""Forward and backward hooks of the model's units: they wait for gathered parameters and release them.

What they wait for depends on whether whole parameters stay on every rank (zero1_2.py) or are resharded (zero3.py).
"""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from phalanx.comm.collectives import Traffic
from phalanx.comm.comm_thread import CommThread
from phalanx.engine.bucket import BucketGradient, RankBucket
from phalanx.engine.schedule import Unit
from phalanx.engine.sharded_update import ShardedUpdate, StepState
from phalanx.engine.timing import PassTimer
from phalanx.layout.comm_simulation import TransferOp

OUTSIDE_MICRO_BATCH = (
    "a backward pass has run outside engine.micro_batch() (with phalanx.shard: outside `for batch in step`), or in "
    "another one than its forward pass, so its gradients would be lost; run both passes inside one"
)


class ParameterResidency(abc.ABC):
    """Where whole parameters are between uses: what passes wait for, and what the communication thread gathers."""

    releases: ClassVar[bool] = False  # whether parameters are resharded between uses
    make_bucket: ClassVar[Callable[..., RankBucket]] = RankBucket
    passes_are_free = False  # passes now run without gathering or releasing anything

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], update: ShardedUpdate, comm_thread: CommThread,
        traffic: Traffic, pass_timer: PassTimer,
    ) -> None:  # fmt: skip
        self._units, self._update, self._comm_thread = list(units), update, comm_thread
        self._traffic, self._pass_timer = traffic, pass_timer

    def register_hooks(self, model: nn.Module) -> list[Any]:
        """Further hooks."""
        return []

    @abc.abstractmethod
    def begin_micro_batch(self, last: bool) -> None:
        """Start a micro-batch, the `last` of its step or not."""

    @abc.abstractmethod
    def end_micro_batch(self, last: bool) -> None:
        """End the micro-batch: its backward pass is over."""

    def begin_forward(self) -> None:
        """Before the model's forward pass."""
        return

    @abc.abstractmethod
    def pre_forward(self, unit: Unit) -> None:
        """Before a unit's forward pass: wait for its parameters."""

    def post_forward(self, unit: Unit, output: Any) -> None:
        """After a unit's forward pass."""
        return

    def wait_for_gathers(self) -> None:
        """Wait for all gathers of the previous step, also of units that this micro-batch has not used."""
        return

    @abc.abstractmethod
    def check_state_dict(self, in_micro_batch: bool) -> None:
        """Raise RuntimeError where state_dict() is not possible now."""

    @abc.abstractmethod
    def submit_gather(self, now: StepState, unit: Unit, op: TransferOp) -> None:
        """Submit the all-gather of a part of a unit to the communication thread."""

    def submit_release(self, unit: Unit, gradient: BucketGradient) -> None:
        """A gradient of a unit is about to be reduced."""
        return

    def submit_end_of_pass(self) -> None:
        """The last operation of a micro-batch was submitted."""
        return

    @abc.abstractmethod
    def publish_masters(self, wait: bool = True) -> None:
        """Copy master parameters that the main thread has written into the model, where it keeps whole parameters;
        `wait`: until that is done."""

    def unshard_all(self) -> contextlib.AbstractContextManager[None]:
        """A context in which all parameters are gathered."""
        return contextlib.nullcontext()

    def redo(self, now: StepState) -> None:
        """Undo an optimistic update that was wrong. Runs on the communication thread."""
        return

    def finish_step(self, now: StepState) -> None:
        """Update the units that are not updated yet. Runs on the communication thread."""
        return


class UnitHooks:
    """The hooks of all units, and the micro-batch that they are in."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], parameters: ParameterResidency, comm_thread: CommThread,
        pass_timer: PassTimer,
    ) -> None:  # fmt: skip
        self._parameters, self._comm_thread, self._pass_timer = parameters, comm_thread, pass_timer
        self._root = units[0] if units and units[0].module is model else None
        self._in_micro_batch = False
        self._called_units: set[int] = set()  # units that this micro-batch has used
        self._unit_of = {id(held): unit for unit in units for held in unit.buckets}
        self._hooks = [model.register_forward_pre_hook(self._model_pre_forward, prepend=True)]
        self._hooks += [module.register_state_dict_pre_hook(self._on_state_dict) for module in model.modules()]
        for unit in units:
            if unit.module is not model:
                # First, so that the timer counts from here on as work, not as waiting.
                before = unit.module.register_forward_pre_hook(partial(self._pre_forward, unit), prepend=True)
                self._hooks += [before, unit.module.register_forward_hook(partial(self._post_forward, unit))]
            for held in unit.trained_buckets:
                self._hooks += held.register_grad_hooks(self.accumulate_gradient)
        self._hooks += parameters.register_hooks(model)

    def remove(self) -> None:
        """Remove the hooks, which leaves a plain model; with parameters released (ZeRO 3) it still refuses to run."""
        for hook in () if self._parameters.releases else self._hooks:
            hook.remove()

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self._comm_thread.closed

    def begin_micro_batch(self, last: bool) -> None:
        """Start a micro-batch, the `last` of its step or not."""
        self._in_micro_batch, self._called_units = True, set()
        self._parameters.begin_micro_batch(last)

    def end_micro_batch(self, last: bool) -> None:
        """End the micro-batch: its backward pass is over."""
        self._in_micro_batch = False
        self._parameters.end_micro_batch(last)

    def accumulate_gradient(self, bucket: RankBucket, index: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete."""
        if not self._in_micro_batch:
            raise RuntimeError(OUTSIDE_MICRO_BATCH)
        unit = self._unit_of[id(bucket)]
        if unit.number not in self._called_units:
            raise RuntimeError(
                f"parameter {bucket.names[index]} was used though {unit.name or 'the model'} was not called in this "
                "micro-batch, so that its values may be those of the step before; call the unit itself, not its parts"
            )
        bucket.accumulate_gradient(index, parameter)
        if bucket.gradient.submitted and all(each.gradient.submitted for each in unit.trained_buckets):
            self._pass_timer.end_backward(unit.number)

    def _model_pre_forward(self, model: nn.Module, args: Any) -> None:
        if self._parameters.passes_are_free:
            return
        self._parameters.begin_forward()
        self._pass_timer.start()
        if self._root is not None:
            self._pre_forward(self._root, model, args)
            self._pass_timer.end_forward(0)

    def _on_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._parameters.passes_are_free:
            self._parameters.check_state_dict(self._in_micro_batch)

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if not self._parameters.passes_are_free:
            self._called_units.add(unit.number)
            self._parameters.pre_forward(unit)

    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if not self._parameters.passes_are_free and not in_backward():
            self._pass_timer.end_forward(unit.number)
            self._parameters.post_forward(unit, output)


def find_unit_hooks(model: nn.Module) -> Iterator[UnitHooks]:
    """Yield the hooks that engines have registered on a model or on parts of it."""
    for module in model.modules():
        owners = (getattr(hook, "__self__", None) for hook in module._state_dict_pre_hooks.values())
        yield from (owner for owner in owners if isinstance(owner, UnitHooks))


def in_backward() -> bool:
    """Whether this thread is in a backward pass: a forward pass there computes activations again."""
    return torch._C._current_graph_task_id() != -1
