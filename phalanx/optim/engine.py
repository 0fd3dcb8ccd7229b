"""The interface by which a trainer knows an engine: gradients, their reduction, the update, and the state.

A step is `begin_step`, then for each micro-batch a backward pass inside `micro_batch`, then `finish_step` and `commit`.
Collectives are paired: every rank makes the same calls with the same number of micro-batches.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from phalanx.optim.coded import Coded
from phalanx.optim.gradients import LossScale

# An allocator gives zero-filled buffers for state: (parameter name, kind, elements, dtype, device) -> flat tensor.
Allocator = Callable[[str, str, int, torch.dtype, torch.device], torch.Tensor]


@dataclass
class Shard:
    """Elements [start, stop) of a parameter, flattened in row-major order: what one rank keeps of it."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]  # of the whole parameter
    tensor: torch.Tensor  # its master values, flat; of a frozen parameter the values themselves, in the compute type
    trainable: bool = True  # False: frozen, so no checkpoint holds it


@dataclass(frozen=True)
class Piece:
    """A shard of one kind of state, as checkpoints keep it: elements [start, stop) of the flattened parameter.

    `held` is a 1-D tensor on any device, or a coded one that is decoded whenever `tensor` is asked for.
    """

    name: str
    kind: str  # "param" for the master weights, otherwise a state of the same shape such as "exp_avg"
    start: int
    stop: int
    held: torch.Tensor | Coded

    @property
    def tensor(self) -> torch.Tensor:
        """The elements; ask for it once, since decoding takes time and memory."""
        return self.held if isinstance(self.held, torch.Tensor) else self.held.decoded()

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    @property
    def device(self) -> torch.device:
        return self.held.device


@dataclass(frozen=True)
class Precision:
    """`compute`: the type of this rank's arithmetic. `shared`: the type in which parameters travel between ranks and in
    which frozen ones are kept: the same on all ranks, the compute type where that is."""

    compute: torch.dtype
    shared: torch.dtype

    @property
    def master(self) -> torch.dtype:
        """The type of master weights, moments, sums of gradients and their exchange."""
        return torch.promote_types(self.compute, torch.float32)


class Engine(Protocol):
    """A parameter that needs no gradient when the engine is made is frozen: it is filled and computed with, in the
    compute type, and has no master copy, no optimizer state and no pieces."""

    step: int  # the step that the state belongs to
    loss_scale: LossScale | None  # where any rank computes in float16

    @property
    def trainable(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes, by name, of the parameters that are trained: those that `pieces` of all ranks cover."""
        ...

    def initialise(self, fill: Callable[[Shard], None]) -> None:
        """Take memory for the state, have `fill` write the master values of each shard, and put them into the model."""
        ...

    def begin_step(self, step: int, weight: int) -> None:
        """Start step number `step` (the first is 1) in which this rank contributes `weight` (tokens or samples)."""
        ...

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Surrounds one forward and backward pass; `last` is the step's last on this rank."""
        ...

    def grads_ready(self, unit: str) -> None:
        """Say that a unit's gradients of this micro-batch are complete, where autograd cannot tell; may be repeated."""
        ...

    def finish_step(self, lr: float, clip: float | None) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Reduce, clip by the global norm, update. Returns the norm before clipping and whether the update was skipped
        (both on the device, not yet synchronised), and the step's total weight."""
        ...

    def full_parameters(self) -> contextlib.AbstractContextManager[dict[str, torch.Tensor]]:
        """A context in which whole parameters can be read, by name, as the model computes with them."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """This rank's state: views, valid until the next `finish_step`."""
        ...

    def load(self, read: Callable[[str, str, int, int, torch.Tensor], None]) -> None:
        """Fill this rank's state by `read(name, kind, start, stop, out)` and put it into the model."""
        ...

    def commit(self, step: int) -> None:
        """Declare the state that of `step`: from here on `pieces` belong to it."""
        ...
