"""The interface by which a trainer knows an engine: gradients, their reduction, the update, and the state.

A step is `begin_step`, then for each micro-batch a backward pass inside `micro_batch`, then `finish_step` and `commit`.
Collectives are paired: every rank makes the same calls, with the same number of micro-batches where anything travels in
each (`balance.in_lockstep`), and with one at least elsewhere.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from phalanx.optim.gradients import LossScale
from phalanx.optim.update import Shard, Slot, StatePiece, StepUpdate
from phalanx.system import accelerator


class InMemoryStore(Protocol):
    """Slots of memory that outlives this process, two or more, into which a rank commits step after step.

    Nothing of the step before the last is written over until `wait_for_commit` has returned on all ranks: whoever
    commits has waited for that, by a collective of all ranks behind their `wait_for_commit`.
    """

    @property
    def in_place(self) -> bool:
        """Whether an engine's state lives in the slots; else it is copied into them."""

    @property
    def commits_async(self) -> bool:
        """Whether a step may be committed, on some rank, only some time after `commit` has returned."""

    @property
    def has_state(self) -> bool:
        """Whether the slots hold, from processes before, the very state that the run goes on from."""

    @property
    def slots(self) -> Sequence[Slot]:
        """All, laid out as `open` was told."""

    @property
    def current_index(self) -> int:
        """The number of the slot with the newest state."""

    @property
    def next_index(self) -> int:
        """That of the slot which the next state is written to."""

    def open(self, like: Slot, pieces: Callable[[Slot], Iterable[StatePiece]]) -> bool:
        """Take memory for slots that look like `like`, which may be on meta and of which `pieces` gives the pieces;
        False where there is none. Collective."""

    def wait_until_ready(self) -> None:
        """Wait until the slots hold what `has_state` says, which may be on its way still when `open` returns."""

    def allocate_working(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for what every process makes anew, with any content, where that is had sooner than new memory."""

    def begin_write(self) -> None:
        """The next slot is about to be written to, where the state lives in the slots."""

    def note_updates(self, keys: Collection[str], grads: Mapping[str, torch.Tensor], change: StepUpdate) -> None:
        """Shards of `keys` are about to be updated where the state lives in the slots: those that have one by their
        gradient, which may be overwritten afterwards. May be repeated, as an update may; the last counts."""

    def commit(self, step: int, outcome: "StepOutcome", state: Slot) -> None:
        """The state of `step`, of which came `outcome`, is complete: in the slot that was the next one, or in `state`,
        which must not change before `wait_for_commit` has returned."""

    def wait_for_commit(self) -> None:
        """Wait until the last step is committed, here and wherever it is kept besides."""

    def adopt_state(self, step: int, state: Slot) -> None:
        """The state was loaded from elsewhere, or is what was found: that of `step`."""


@dataclass(frozen=True)
class Precision:
    """`compute`: the type of this rank's arithmetic. `transport`: the type in which parameters travel between ranks and
    in which frozen ones are kept: the same on all ranks, the compute type where that is."""

    compute: torch.dtype
    transport: torch.dtype

    @property
    def master(self) -> torch.dtype:
        """The type of master weights, moments, sums of gradients and their exchange."""
        return torch.promote_types(self.compute, torch.float32)


class StepOutcome(Protocol):
    """What came of a step: the weight of all ranks, and later what the device must compute first."""

    weight: int
    loss_scale: float | None  # what the losses were scaled by, if they were; after `get`

    def get(self) -> tuple[float, float]:
        """Norm of the mean gradient before clipping, and 1.0 if the update was skipped; waits until they are known."""
        ...


class DeviceStepOutcome:
    """The outcome of a step whose results the device computes in the order of its work."""

    def __init__(
        self, norm: torch.Tensor, skip: torch.Tensor, weight: int, loss_scale: torch.Tensor | None = None
    ) -> None:
        self.weight = weight
        self.loss_scale: float | None = None
        self._copy = accelerator.HostCopy([norm, skip] if loss_scale is None else [norm, skip, loss_scale])

    def get(self) -> tuple[float, float]:
        norm, skip, *scale = self._copy.get()
        self.loss_scale = scale[0] if scale else None
        return norm, skip


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

    def begin_step(self, step: int, weight: int, lr: float, clip: float | None) -> None:
        """Start step number `step` (the first is 1) in which this rank contributes `weight` (tokens or samples).

        Its update is with learning rate `lr`, and clipped to the global norm `clip` if there is one: parts of it may
        begin before the last backward pass has ended.
        """
        ...

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Surrounds one forward and backward pass; `last` is the step's last on this rank."""
        ...

    def grads_ready(self, unit: str) -> None:
        """Say that a unit's gradients of this micro-batch are complete, where autograd cannot tell; may be repeated."""
        ...

    def finish_step(self) -> StepOutcome:
        """Reduce, clip by the global norm, update, or see to it that this is done before anything looks."""
        ...

    def full_parameters(self) -> contextlib.AbstractContextManager[dict[str, torch.Tensor]]:
        """A context in which whole parameters can be read, by name, as the model computes with them."""
        ...

    def pieces(self) -> Iterator[StatePiece]:
        """This rank's state: views, valid until the next `finish_step`."""
        ...

    def load(self, read: Callable[[str, str, int, int, torch.Tensor], None]) -> None:
        """Fill this rank's state by `read(name, kind, start, stop, out)` and put it into the model."""
        ...

    def commit(self, step: int) -> None:
        """Declare the state that of `step`: from here on `pieces` belong to it."""
        ...

    def resume_after(self, step: int) -> None:
        """Declare the state, which was loaded or found, that of `step`, and keep it where steps are kept."""
        ...

    def take_notices(self) -> list[tuple[str, dict[str, Any]]]:
        """Events since the last call that a user may want to know of: kinds and details."""
        ...

    def close(self) -> None:
        """End what works beside the main thread; the engine is of no more use."""
        ...
