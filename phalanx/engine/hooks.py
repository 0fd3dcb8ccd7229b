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
from phalanx.comm.comm_thread import Lane, Mark
from phalanx.engine.bucket import Held
from phalanx.engine.timing import Laps
from phalanx.engine.units import Unit

OUTSIDE = (
    "a backward pass has run outside engine.micro_batch() (with phalanx.shard: outside `for batch in step`), or in "
    "another one than its forward pass, so its gradients would be lost; surround forward and backward pass by it"
)


class Marks:
    """Of one pass forward, and backward if it is `training`, through units whose parameters are released."""

    def __init__(self, units: int, lane: Lane, training: bool) -> None:
        self.training = training
        self.gathered, self.regathered, self.used, self.used_again = (
            [Mark(lane) for _ in range(units)] for _ in range(4)
        )
        if training and units:
            # The last unit is not released between the two passes, nor is anything of the model itself.
            self.regathered[-1], self.used[-1] = self.gathered[-1], self.used_again[-1]


class Passes:
    """The hooks, and what they wait for."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        lane: Lane,
        traffic: Traffic,
        released: bool,
        put_evaluation: Callable[[Marks], None],
        laps: Laps,
    ) -> None:
        """`traffic` counts the host's waiting; `put_evaluation` has the lane gather for a forward pass alone."""
        self._units, self._lane, self._traffic, self._released = list(units), lane, traffic, released
        self._put_evaluation, self._laps = put_evaluation, laps
        self._inside = False
        self.whole = False  # released parameters are all there, and stay, whatever passes are run
        self._next = self._returned = len(units)  # unit that the forward pass, or the backward pass, has come to
        self.marks = Marks(len(units), lane, training=False)
        self.fresh = [Mark(lane) for _ in units]  # of the step before, where parameters are kept
        self.next_fresh = self.fresh
        self._entered: set[int] = set()  # units that this micro-batch has used
        self._unit_of = {id(held): unit for unit in units for held in unit.helds}
        self._hooks = [model.register_forward_pre_hook(self._model_begins, prepend=True)]
        for module in model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(self._is_read))
            if released:
                self._hooks.append(module.register_load_state_dict_pre_hook(self._is_written))
        for unit in units:
            if unit.module is not model:
                # First of all: what a clock counts from there on is work, and no waiting.
                before = unit.module.register_forward_pre_hook(partial(self._before, unit), prepend=True)
                self._hooks += [before, unit.module.register_forward_hook(partial(self._after, unit))]
            for held in unit.trained:
                self._hooks += held.watch(self.fold)
        if released:
            self._hooks.append(model.register_forward_hook(self._model_ends, always_call=True))

    def leave(self) -> None:
        """Let go of the model, which is a plain one now; one whose parameters were released goes on saying so."""
        for hook in () if self._released else self._hooks:
            hook.remove()

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self._lane.closed

    def begin(self, last: bool) -> None:
        """A micro-batch begins; `last` of its step."""
        self._inside = True
        self._entered = set()
        self._begin_pass(training=True)
        if last:
            self.next_fresh = [Mark(self._lane) for _ in self._units]

    def end(self, last: bool) -> None:
        """Its backward pass is over."""
        self._inside = False
        self._let_go()
        if last:
            self.fresh = self.next_fresh

    def fold(self, held: Held, index: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete."""
        if not self._inside:
            raise RuntimeError(OUTSIDE)
        unit = self._unit_of[id(held)]
        if unit.number not in self._entered:
            raise RuntimeError(
                f"parameter {held.names[index]} was used though {unit.name or 'the model'} was not called in this "
                "micro-batch, so that its values may be those of the step before; call the unit itself, not its parts"
            )
        held.fold(index, parameter)
        if held.gradient.closed and all(each.gradient.closed for each in unit.trained):
            self._laps.backward(unit.number)

    def catch_up(self) -> None:
        """Wait until the lane is through with the step before, also with units that this micro-batch has not used."""
        for mark in self.fresh:
            mark.wait(self._traffic)

    def _begin_pass(self, training: bool) -> None:
        self._next, self._returned = 0, len(self._units)
        if self._released:
            self.marks = Marks(len(self._units), self._lane, training)

    def _let_go(self) -> None:
        for mark in (*self.marks.used, *self.marks.used_again):
            mark.set()

    # ----------------------------------------------------------------------------------------------------------- hooks

    def _model_begins(self, model: nn.Module, args: Any) -> None:
        if self.whole:
            return
        if self._released and self._lane.closed:
            raise RuntimeError(
                "the model was called after its engine was closed, which has left it without parameters (zero 3); take "
                "them out of full_parameters() before"
            )
        if self._released and not self._inside:
            self._begin_pass(training=False)
            self._put_evaluation(self.marks)
        self._laps.begin()
        if self._units and self._units[0].module is model:
            self._before(self._units[0], model, args)
            self._laps.forward(0)

    def _is_read(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.whole:
            return
        if self._released:
            when = " before the engine is closed" if self._lane.closed else ""
            raise RuntimeError(
                "a state_dict was asked for of a model whose parameters are released between uses (zero 3), so that "
                f"there would be nothing in it; ask within full_parameters(){when}"
            )
        if self._inside:
            raise RuntimeError(
                "a state_dict was asked for within a step, whose end it would have to wait for; ask between steps"
            )
        if not self._lane.closed:
            self._lane.drain()  # some may still be on their way

    @staticmethod
    def _is_written(module: nn.Module, *_: object) -> None:
        raise RuntimeError(
            "load_state_dict was called for a model whose parameters are released between uses (zero 3), so that what "
            "is loaded would be lost; load before the model is sharded, or load what the engine has saved"
        )

    def _model_ends(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._inside and not self.whole:
            self._let_go()

    def _before(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if self.whole:
            return
        self._entered.add(unit.number)
        if not self._released:
            self.fresh[unit.number].wait(self._traffic)
            self._laps.waited()
        elif _in_backward():
            self._compute_again(unit)
        else:
            if unit.number != self._next:
                raise RuntimeError(
                    f"unit {unit.name or 'of the model itself'} was used when it was the turn of "
                    f"{self._units[self._next].name if self._next < len(self._units) else 'none'}; with zero 3 each "
                    "unit must be used once in a pass, in the declared order: declare units so, or set "
                    "parallel.zero=2 (with phalanx.shard: units= and zero=)"
                )
            self._next += 1
            self.marks.gathered[unit.number].wait(self._traffic)
            self._laps.waited()

    def _after(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if self.whole or _in_backward():
            return
        self._laps.forward(unit.number)
        if not self._released:
            return
        marks, tensors = self.marks, [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        if not tensors and unit.trained and torch.is_grad_enabled():
            raise RuntimeError(
                f"unit {unit.name} returned a {type(output).__name__}, in which no tensor was found, so its backward "
                "pass could not be seen; with zero 3 a unit must return a tensor, or a tuple, list or dict of them"
            )
        if tensors := [each for each in tensors if each.requires_grad]:
            register_multi_grad_hook(tensors, lambda grad: self._before_backward(unit, marks), mode="any")
        if not (self._inside and unit is self._units[-1]):
            marks.used[unit.number].set()

    def _before_backward(self, unit: Unit, marks: Marks) -> None:
        """The backward pass comes to a unit; those behind it are through."""
        if not self._inside or marks is not self.marks:
            raise RuntimeError(OUTSIDE)
        self._returned = unit.number
        for later in self._units[unit.number + 1 :]:
            marks.used_again[later.number].set()
            for held in later.trained:  # what no gradient has come for would be waited for in vain
                held.is_over()
        marks.regathered[unit.number].wait(self._traffic)
        self._laps.waited()

    def _compute_again(self, unit: Unit) -> None:
        """A backward pass has come to a unit of which it computes activations again."""
        if unit.number > self._returned:
            raise RuntimeError(
                f"the backward pass computes unit {unit.name} again after {self._units[self._returned].name}, which "
                "was used before it; with zero 3 checkpoint the activations of one unit at a time"
            )
        if unit.number < self._returned:
            self._before_backward(unit, self.marks)


def passes_of(model: nn.Module) -> Iterator[Passes]:
    """Those of engines that a model, or a part of it, is or was on."""
    for module in model.modules():
        owners = (getattr(hook, "__self__", None) for hook in module._state_dict_pre_hooks.values())
        yield from (owner for owner in owners if isinstance(owner, Passes))


def _in_backward() -> bool:
    """Whether this thread is in a backward pass: a forward pass there computes activations again."""
    return torch._C._current_graph_task_id() != -1
