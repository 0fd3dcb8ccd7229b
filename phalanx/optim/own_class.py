"""Custom optimizers: a subclass of torch.optim.Optimizer in the user's file (`optim.name: my.py:Class`).

The class declares by its attribute `granularity` what it must see whole: "element", "row" (of the last dim), or
"matrix" (each parameter). Shards are cut accordingly, and each call creates the class again with its shards and their
state. State starts at 0 and has the parameter's shape, or a number for each row; there may also be a step count `step`.
All of this is checked before a run starts.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from phalanx.core.errors import ConfigError
from phalanx.core.user_code import describe_error, load_class
from phalanx.optim.update import ROW_KIND, Allocator, Slot, State, StepUpdate, allocate_zeros, copy_slot

Granularity = Literal["element", "row", "matrix"]
SAMPLES = ((6, 8), (6,))  # shapes on which a class is checked: a matrix and a vector


@dataclass(frozen=True)
class OwnClassRule:
    """The update rule of a custom optimizer class with its `arguments`; `kinds`: the keys of its state by kind, of
    matrices and of others."""

    name: str
    optimizer: type[torch.optim.Optimizer]
    granularity: Granularity
    arguments: Mapping[str, Any]
    weight_decay: float | None  # None: the class has no such argument
    kinds: tuple[Mapping[str, str], Mapping[str, str]]
    step_dtype: torch.dtype | None  # of the step count; None: a Python number, or no count
    counts: bool
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def state_kinds(self) -> tuple[str, ...]:
        return tuple(sorted({*self.kinds[0], *self.kinds[1]}))

    def make_state(
        self, name: str, shape: Sequence[int], elements: int, dtype: torch.dtype, device: torch.device,
        allocate: Allocator,
    ) -> State:  # fmt: skip
        self._shapes[name] = tuple(shape)
        row = shape[-1] if shape else 1
        return {
            kind: allocate(name, kind, elements // row if kind.startswith(ROW_KIND) else elements, dtype, device)
            for kind in self._kinds_of(shape)
        }

    def elements_together(self, shape: Sequence[int]) -> int:
        if self.granularity == "matrix":
            return max(1, torch.Size(shape).numel())
        return max(1, shape[-1]) if self.granularity == "row" and len(shape) > 1 else 1

    def apply(self, source: Slot, target: Slot, grads: dict[str, torch.Tensor], change: StepUpdate) -> None:
        copy_slot(source, target)
        for name, grad in grads.items():
            if not grad.numel():  # a rank's shard of a parameter may be empty
                continue
            state, shape = target[name], self._view(self._shapes[name])
            new = {kind: state[kind].clone() for kind in ("param", *self._kinds_of(self._shapes[name]))}
            decay = 0.0 if name in change.no_decay else self.weight_decay
            self.step(new, grad / change.divisor, shape, self._kinds_of(self._shapes[name]), decay, change)
            for kind, value in new.items():
                state[kind].copy_(torch.where(change.skip > 0, state[kind], value))

    def step(
        self, state: State, grad: torch.Tensor, shape: tuple[int, ...], kinds: Mapping[str, str], decay: float | None,
        change: StepUpdate,
    ) -> None:  # fmt: skip
        """Run the class on a flat parameter and its state, in place; it sees them in `shape`."""
        seen = state["param"].view(shape)
        seen.grad = grad.view(shape)
        group = {"params": [seen]} | ({} if decay is None else {"weight_decay": decay})
        optimizer = self.optimizer([group], lr=change.lr, **self.arguments)  # type: ignore[call-arg]
        kept: dict[str, Any] = {
            key: state[kind].view((*seen.shape[:-1], -1) if kind.startswith(ROW_KIND) else shape)
            for kind, key in kinds.items()
        }
        if self.counts:
            count = change.step - 1
            kept["step"] = count if self.step_dtype is None else torch.tensor(count, dtype=self.step_dtype)
        optimizer.state[seen] = kept
        optimizer.step()
        for kind, key in kinds.items():
            state[kind] = optimizer.state[seen][key].detach().reshape(-1)

    def _kinds_of(self, shape: Sequence[int]) -> Mapping[str, str]:
        return self.kinds[0] if len(shape) > 1 else self.kinds[1]

    def _view(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which the class sees a shard of a parameter of `shape`."""
        if self.granularity == "matrix":
            return shape
        return (-1, shape[-1]) if self.granularity == "row" and len(shape) > 1 else (-1,)


def make_own_class_rule(
    name: str, file: str, class_name: str, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
    options: Mapping[str, bool | int | float],
) -> OwnClassRule:  # fmt: skip
    """Create the rule of a custom optimizer class, checked on small parameters.

    Raises ConfigError where the class refuses a value, keeps state that a checkpoint cannot hold, or gives other
    results when its parameters are cut as its granularity allows.
    """
    found: type[torch.optim.Optimizer] = load_class("optim.name", file, class_name, torch.optim.Optimizer)
    granularity: Any = getattr(found, "granularity", None)
    if granularity not in get_args(Granularity):
        raise ConfigError(
            f"optim.name {name}: the class has no attribute granularity; add it, with the part of a parameter that "
            "it must see whole: 'element', 'row' or 'matrix'"
        )
    takes = inspect.signature(found).parameters
    given: dict[str, Any] = {key: value for key, value in (("betas", betas), ("eps", eps)) if key in takes}
    decay = weight_decay if "weight_decay" in takes else None
    if decay is None and weight_decay:
        raise ConfigError(f"optim.name {name} takes no weight_decay; remove optim.weight_decay")
    arguments = given | dict(options)
    rule = OwnClassRule(name, found, granularity, arguments, decay, ({}, {}), None, False)
    try:
        seen = [_observe(rule, shape, lr) for shape in SAMPLES]
        count = next((value for _, value in seen if value is not None), None)
        dtype = count.dtype if isinstance(count, torch.Tensor) else None
        rule = OwnClassRule(
            name, found, granularity, arguments, decay, (seen[0][0], seen[1][0]), dtype, count is not None
        )
        _check_cuts(rule, lr)
    except ConfigError:
        raise
    except Exception as error:
        told = describe_error(error, Path(file).expanduser().resolve())
        raise ConfigError(f"optim.name {name} fails: {told}; correct the class or optim.options") from error
    return rule


def _observe(rule: OwnClassRule, shape: tuple[int, ...], lr: float) -> tuple[dict[str, str], Any]:
    """The state keys of the class for a parameter of `shape`, by kind, and its step count."""
    sample = _sample(shape)[0]
    sample.grad = _sample(shape)[1]
    optimizer = rule.optimizer([sample], lr=lr, **rule.arguments)  # type: ignore[call-arg]
    optimizer.step()
    kinds, count = {}, None
    for key, value in optimizer.state[sample].items():
        if isinstance(value, torch.Tensor) and value.shape == shape and key != "param" and "." not in key:
            kinds[key] = key
        elif isinstance(value, torch.Tensor) and value.shape in (shape[:-1], (*shape[:-1], 1)) and len(shape) > 1:
            kinds[f"{ROW_KIND}{key.removeprefix(ROW_KIND)}"] = key
        elif key == "step" and isinstance(value, int | float | torch.Tensor) and float(value) == 1:
            count = value
        else:
            kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "no tensor"
            raise ConfigError(
                f"optim.name {rule.name} keeps {key!r}, {kind}, of a parameter of shape {shape}; a checkpoint holds "
                "tensors of the parameter's shape, or with a number for each row, and the count 'step'"
            )
    if rule.granularity == "element" and any(kind.startswith(ROW_KIND) for kind in kinds):
        raise ConfigError(f"optim.name {rule.name} keeps a number for each row; set its granularity to 'row'")
    return kinds, count


def _check_cuts(rule: OwnClassRule, lr: float) -> None:
    """Check that three steps of the class on whole parameters equal those of the rule on shards."""
    for shape in SAMPLES:
        whole, grad = _sample(shape)
        together, elements = rule.elements_together(shape), whole.numel()
        cut = together * (elements // together // 3)
        reference = whole.clone()
        optimizer = rule.optimizer([reference], lr=lr, **rule.arguments)  # type: ignore[call-arg]
        if rule.weight_decay is not None:
            optimizer.param_groups[0]["weight_decay"] = rule.weight_decay
        slot: Slot = {}
        for name, part in (("first", slice(0, cut)), ("last", slice(cut, elements))):
            size = len(range(*part.indices(elements)))
            made = rule.make_state(name, shape, size, whole.dtype, whole.device, allocate_zeros)
            slot[name] = {"param": whole.view(-1)[part].clone()} | made
        one, none = torch.ones((), dtype=whole.dtype), torch.zeros((), dtype=whole.dtype)
        for step in (1, 2, 3):
            reference.grad = grad * step
            optimizer.step()
            parts = {"first": grad.view(-1)[:cut] * step, "last": grad.view(-1)[cut:] * step}
            rule.apply(slot, slot, parts, StepUpdate(step, lr, frozenset(), one, none))
            found = torch.cat([slot["first"]["param"], slot["last"]["param"]])
            if not torch.allclose(found, reference.detach().view(-1), rtol=1e-9, atol=1e-12):
                raise ConfigError(
                    f"optim.name {rule.name} gives other values in step {step} for a parameter of shape {shape} that "
                    f"is cut as granularity '{rule.granularity}' allows, or whose state starts at 0; see what it needs "
                    "whole, keep all else in its state, and start that at 0"
                )
        rule._shapes.clear()


def _sample(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A random parameter and its gradient."""
    values = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).view(shape)
    return torch.sin(values), torch.cos(values * 3) / 4
