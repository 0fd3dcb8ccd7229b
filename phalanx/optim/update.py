"""Optimizer update rules, which read one slot of state and write another.

A slot holds the state of every shard, keyed by parameter name. An update reads one slot and writes another, or updates
in place: with two slots the old state remains until the new one is complete. Both give the same bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch

from phalanx.optim.quantized import QuantizedShard

MOMENTS = ("exp_avg", "exp_avg_sq")
NO_REPLICAS: Mapping[str, int] = MappingProxyType({})  # no parameter is replicated within one model

ReadState = Callable[[str, str, int, int, torch.Tensor], None]  # name, kind, start, stop, out

# --------------------------------------------------------------------------------------------------------------- state
# Optimizer state: shards of parameters, and the pieces in which checkpoints store it.


# An allocator gives zero-filled buffers for state: (parameter name, kind, elements, dtype, device) -> flat tensor.
Allocator = Callable[[str, str, int, torch.dtype, torch.device], torch.Tensor]

ROW_KIND = "row_"  # prefix of kinds of state with one number per row

State = dict[str, torch.Tensor]  # of one shard: "param", and the rule's kinds of state
Slot = dict[str, State]  # by name of the shard


def state_shape(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """The shape of a kind of state of a parameter of `shape`: the same, or one number for each row."""
    return (*shape[:-1], 1) if kind.startswith(ROW_KIND) else shape


@dataclass
class Shard:
    """A rank's shard of a parameter: elements [start, stop) of it, flattened in row-major order."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]  # of the whole parameter
    tensor: torch.Tensor  # its master values, flat; of a frozen parameter the values themselves, in the compute type
    trainable: bool = True  # False: frozen, so no checkpoint holds it


@dataclass(frozen=True)
class StatePiece:
    """A shard of one kind of state, as checkpoints store it: elements [start, stop) of the flattened parameter, or
    rows.

    With a `window` [first, last) they are elements of these columns alone, flattened: a part of a matrix that is cut by
    its last dim. `values` is a 1-D tensor on any device, or a quantized one, which each read of `tensor` dequantizes.
    """

    name: str
    kind: str  # "param" for the master weights, otherwise a state such as "exp_avg", of `state_shape`
    start: int
    stop: int
    values: torch.Tensor | QuantizedShard
    window: tuple[int, int] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The elements; read it once, since dequantizing takes time and memory."""
        return self.values if isinstance(self.values, torch.Tensor) else self.values.dequantize()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device


# ---------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class StepUpdate:
    """The inputs of a step's update: the number of the `step` (the first is 1) and its learning rate; the parameters
    without weight decay; the divisor of the gradients; whether the step is skipped (1.0: state is copied unchanged).
    The last two are one-element tensors on the device, so that nothing synchronizes with the host."""

    step: int
    lr: float
    no_decay: frozenset[str]
    divisor: torch.Tensor
    skip: torch.Tensor


class UpdateRule(Protocol):
    """An update rule (optimizer). `state_kinds` are the kinds of state besides the master weights, as checkpoints name
    them; a parameter may lack some. Each has a number per element, or, if its name begins with "row_", per row (all but
    the last dim); `elements_together` then keeps rows whole."""

    @property
    def state_kinds(self) -> tuple[str, ...]: ...

    def make_state(
        self, name: str, shape: Sequence[int], elements: int, dtype: torch.dtype, device: torch.device,
        allocate: Allocator,
    ) -> State:  # fmt: skip
        """Allocate the state, without the master weights, of a shard of `elements` of the parameter of that `shape`."""
        ...

    def elements_together(self, shape: Sequence[int]) -> int:
        """The number of neighbouring elements that no shard of a parameter of that shape may cut: 1, a row (the last
        dim), or all."""
        ...

    def apply(self, source: Slot, target: Slot, grads: dict[str, torch.Tensor], change: StepUpdate) -> None:
        """Write the state after the step into `target`; `grads`, flat and of the shards, may be overwritten."""
        ...


def allocate_zeros(name: str, kind: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The default allocator: new zero-filled memory."""
    return torch.zeros(elements, dtype=dtype, device=device)


def count_state_bytes(rule: UpdateRule, shape: Sequence[int], elements: int, dtype: torch.dtype) -> int:
    """Bytes of the state, without the master weights, of a shard of `elements` of a parameter of that `shape`."""
    state = rule.make_state("", shape, elements, dtype, torch.device("meta"), allocate_zeros)
    return sum(tensor.nbytes for tensor in state.values())


def state_pieces(rule: UpdateRule, name: str, state: State, start: int) -> Iterator[StatePiece]:
    """The pieces of a shard's state, kind by kind, for a shard that begins at element `start`; quantized state is
    dequantized when read."""
    elements = state["param"].numel()
    for kind in ("param", *rule.state_kinds):
        if kind in state:
            values = state[kind]
            # A shard without elements has no rows to count.
            row = max(1, elements // max(1, values.numel())) if kind.startswith(ROW_KIND) else 1
            yield StatePiece(name, kind, start // row, start // row + values.numel(), values)
        elif f"{kind}.codes" in state:
            yield StatePiece(name, kind, start, start + elements, QuantizedShard.from_state(state, kind, elements))


def load_state(rule: UpdateRule, name: str, state: State, start: int, read: ReadState) -> None:
    """Load the state of a shard that begins at element `start`."""
    for piece in state_pieces(rule, name, state, start):
        found = piece.values
        if isinstance(found, torch.Tensor):
            read(name, piece.kind, piece.start, piece.stop, found)
        else:
            for first, last in found.row_chunks():
                low, high = start + first * found.columns, start + last * found.columns
                values = torch.empty(high - low, dtype=found.dtype, device=found.device)
                read(name, piece.kind, low, high, values)
                found.quantize_rows(first, last, values)


def copy_slot(source: Slot, target: Slot) -> None:
    """Copy all state, also of shards without a gradient, so that an update can continue in place in `target`."""
    if target is not source:
        for name, state in source.items():
            for key, tensor in state.items():
                target[name][key].copy_(tensor)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), by torch's fused kernel on every device."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    state_kinds: ClassVar[tuple[str, ...]] = MOMENTS

    def make_state(
        self, name: str, shape: Sequence[int], elements: int, dtype: torch.dtype, device: torch.device,
        allocate: Allocator,
    ) -> State:  # fmt: skip
        return {kind: allocate(name, kind, elements, dtype, device) for kind in MOMENTS}

    def elements_together(self, shape: Sequence[int]) -> int:
        return 1

    def apply(self, source: Slot, target: Slot, grads: dict[str, torch.Tensor], change: StepUpdate) -> None:
        copy_slot(source, target)
        self.update_in_place(target, grads, self.divide_grads(grads, change))

    def divide_grads(self, grads: Mapping[str, torch.Tensor], change: StepUpdate) -> StepUpdate:
        """Divide float64 gradients by the divisor, and leave the kernel 1: it reads its divisor in float32."""
        if all(grad.dtype != torch.float64 for grad in grads.values()):
            return replace(change, divisor=change.divisor.float())
        torch._foreach_div_(list(grads.values()), change.divisor)
        return replace(change, divisor=torch.ones_like(change.divisor, dtype=torch.float32))

    def update_in_place(self, slot: Slot, grads: Mapping[str, torch.Tensor], change: StepUpdate) -> None:
        """Update a slot with unquantized moments in place."""
        for decay in (True, False):
            names = [name for name in grads if (name not in change.no_decay) is decay and grads[name].numel()]
            if not names:
                continue
            # One step count per tensor: the kernel reads an entry of the list for each.
            count = torch.full((), float(change.step), dtype=torch.float32, device=grads[names[0]].device)
            torch._fused_adamw_(
                [slot[name]["param"] for name in names],
                [grads[name] for name in names],
                [slot[name]["exp_avg"] for name in names],
                [slot[name]["exp_avg_sq"] for name in names],
                [],
                [count] * len(names),
                lr=change.lr,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=self.weight_decay if decay else 0.0,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=change.divisor,
                found_inf=change.skip,
            )
