"""Where forward and backward passes meet the lane: hooks of the model's units that wait for parameters and let them go.

Units are used once in a pass and in the declared order. Where parameters are kept (zero 1 and 2) a forward pass waits
for those of the step before to be gathered. Where they are released (zero 3) each pass has marks of its own: the lane
sets those of what it has gathered, and the hooks those of what is not needed any more.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from phalanx.comm.collectives import Traffic
from phalanx.comm.comm_thread import CommThread, StreamEvent
from phalanx.engine.bucket import RankBucket
from phalanx.engine.timing import PassTimer
from phalanx.engine.units import Unit

OUTSIDE_MICRO_BATCH = (
    "a backward pass has run outside engine.micro_batch() (with phalanx.shard: outside `for batch in step`), or in "
    "another one than its forward pass, so its gradients would be lost; surround forward and backward pass by it"
)


class PassEvents:
    """Of one pass forward, and backward if it is `training`, through units whose parameters are released."""

    def __init__(self, units: int, comm_thread: CommThread, training: bool) -> None:
        self.training = training
        self.gathered, self.regathered, self.forward_done, self.backward_done = (
            [StreamEvent(comm_thread) for _ in range(units)] for _ in range(4)
        )
        if training and units:
            # The last unit is not released between the two passes, nor is anything of the model itself.
            self.regathered[-1], self.forward_done[-1] = self.gathered[-1], self.backward_done[-1]


class UnitHooks:
    """The hooks, and what they wait for."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        comm_thread: CommThread,
        traffic: Traffic,
        resharded: bool,
        submit_evaluation: Callable[[PassEvents], None],
        pass_timer: PassTimer,
    ) -> None:
        """`traffic` counts the host's waiting; `submit_evaluation` has the lane gather for a forward pass alone."""
        self._units, self._comm_thread, self._traffic, self._resharded = list(units), comm_thread, traffic, resharded
        self._submit_evaluation, self._pass_timer = submit_evaluation, pass_timer
        self._in_micro_batch = False
        self.unsharded = False  # released parameters are all there, and stay, whatever passes are run
        self._next = self._current_backward = len(
            units
        )  # unit that the forward pass, or the backward pass, has come to
        self.events = PassEvents(len(units), comm_thread, training=False)
        self.gathered = [StreamEvent(comm_thread) for _ in units]  # of the step before, where parameters are kept
        self.next_gathered = self.gathered
        self._called_units: set[int] = set()  # units that this micro-batch has used
        self._unit_of = {id(held): unit for unit in units for held in unit.buckets}
        self._hooks = [model.register_forward_pre_hook(self._model_pre_forward, prepend=True)]
        for module in model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(self._on_state_dict))
            if resharded:
                self._hooks.append(module.register_load_state_dict_pre_hook(self._on_load_state_dict))
        for unit in units:
            if unit.module is not model:
                # First of all: what a clock counts from there on is work, and no waiting.
                before = unit.module.register_forward_pre_hook(partial(self._pre_forward, unit), prepend=True)
                self._hooks += [before, unit.module.register_forward_hook(partial(self._post_forward, unit))]
            for held in unit.trained_buckets:
                self._hooks += held.register_grad_hooks(self.accumulate_gradient)
        if resharded:
            self._hooks.append(model.register_forward_hook(self._model_post_forward, always_call=True))

    def remove(self) -> None:
        """Let go of the model, which is a plain one now; one whose parameters were released goes on saying so."""
        for hook in () if self._resharded else self._hooks:
            hook.remove()

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self._comm_thread.closed

    def begin_micro_batch(self, last: bool) -> None:
        """A micro-batch begins; `last` of its step."""
        self._in_micro_batch = True
        self._called_units = set()
        self._begin_pass(training=True)
        if last:
            self.next_gathered = [StreamEvent(self._comm_thread) for _ in self._units]

    def end_micro_batch(self, last: bool) -> None:
        """Its backward pass is over."""
        self._in_micro_batch = False
        self._set_all_done()
        if last:
            self.gathered = self.next_gathered

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

    def wait_for_gathers(self) -> None:
        """Wait until the lane is through with the step before, also with units that this micro-batch has not used."""
        for mark in self.gathered:
            mark.wait(self._traffic)

    def _begin_pass(self, training: bool) -> None:
        self._next, self._current_backward = 0, len(self._units)
        if self._resharded:
            self.events = PassEvents(len(self._units), self._comm_thread, training)

    def _set_all_done(self) -> None:
        for mark in (*self.events.forward_done, *self.events.backward_done):
            mark.record()

    # ----------------------------------------------------------------------------------------------------------- hooks

    def _model_pre_forward(self, model: nn.Module, args: Any) -> None:
        if self.unsharded:
            return
        if self._resharded and self._comm_thread.closed:
            raise RuntimeError(
                "the model was called after its engine was closed, which has left it without parameters (zero 3); take "
                "them out of full_parameters() before"
            )
        if self._resharded and not self._in_micro_batch:
            self._begin_pass(training=False)
            self._submit_evaluation(self.events)
        self._pass_timer.start()
        if self._units and self._units[0].module is model:
            self._pre_forward(self._units[0], model, args)
            self._pass_timer.end_forward(0)

    def _on_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.unsharded:
            return
        if self._resharded:
            when = " before the engine is closed" if self._comm_thread.closed else ""
            raise RuntimeError(
                "a state_dict was asked for of a model whose parameters are released between uses (zero 3), so that "
                f"there would be nothing in it; ask within full_parameters(){when}"
            )
        if self._in_micro_batch:
            raise RuntimeError(
                "a state_dict was asked for within a step, whose end it would have to wait for; ask between steps"
            )
        if not self._comm_thread.closed:
            self._comm_thread.drain()  # some may still be on their way

    @staticmethod
    def _on_load_state_dict(module: nn.Module, *_: object) -> None:
        raise RuntimeError(
            "load_state_dict was called for a model whose parameters are released between uses (zero 3), so that what "
            "is loaded would be lost; load before the model is sharded, or load what the engine has saved"
        )

    def _model_post_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._in_micro_batch and not self.unsharded:
            self._set_all_done()

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if self.unsharded:
            return
        self._called_units.add(unit.number)
        if not self._resharded:
            self.gathered[unit.number].wait(self._traffic)
            self._pass_timer.exclude_wait()
        elif _in_backward():
            self._pre_recompute(unit)
        else:
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

    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if self.unsharded or _in_backward():
            return
        self._pass_timer.end_forward(unit.number)
        if not self._resharded:
            return
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

    def _pre_backward(self, unit: Unit, events: PassEvents) -> None:
        """The backward pass comes to a unit; those behind it are through."""
        if not self._in_micro_batch or events is not self.events:
            raise RuntimeError(OUTSIDE_MICRO_BATCH)
        self._current_backward = unit.number
        for later in self._units[unit.number + 1 :]:
            events.backward_done[later.number].record()
            for held in later.trained_buckets:  # what no gradient has come for would be waited for in vain
                held.finish_backward()
        events.regathered[unit.number].wait(self._traffic)
        self._pass_timer.exclude_wait()

    def _pre_recompute(self, unit: Unit) -> None:
        """A backward pass has come to a unit of which it computes activations again."""
        if unit.number > self._current_backward:
            raise RuntimeError(
                f"the backward pass computes unit {unit.name} again after {self._units[self._current_backward].name}, "
                "which was used before it; with zero 3 checkpoint the activations of one unit at a time"
            )
        if unit.number < self._current_backward:
            self._pre_backward(unit, self.events)


def find_unit_hooks(model: nn.Module) -> Iterator[UnitHooks]:
    """Those of engines that a model, or a part of it, is or was on."""
    for module in model.modules():
        owners = (getattr(hook, "__self__", None) for hook in module._state_dict_pre_hooks.values())
        yield from (owner for owner in owners if isinstance(owner, UnitHooks))


def _in_backward() -> bool:
    """Whether this thread is in a backward pass: a forward pass there computes activations again."""
    return torch._C._current_graph_task_id() != -1
