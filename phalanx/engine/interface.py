"""The interface by which a trainer knows an engine: gradients, their reduction, the update, and the state.

A step is `begin_step`, then for each micro-batch a backward pass inside `micro_batch`, then `finish_step` and `commit`.
Collectives are paired: every rank makes the same calls, with the same number of micro-batches where each has
collectives (`balance.in_lockstep`), and with at least one elsewhere.
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
    """The store of in-memory checkpoints: two or more slots that outlive this process; a rank commits each step to one.

    The step before the last is not overwritten until `wait_for_commit` has returned on all ranks: before it commits, a
    rank waits for a collective that all ranks join after their `wait_for_commit`.
    """

    @property
    def in_place(self) -> bool:
        """Whether the engine's state lives in the slots rather than being copied into them."""

    @property
    def commits_async(self) -> bool:
        """Whether a step may be committed, on some rank, only some time after `commit` has returned."""

    @property
    def has_state(self) -> bool:
        """Whether the slots already hold, from earlier processes, the state that the run resumes from."""

    @property
    def slots(self) -> Sequence[Slot]:
        """All slots, in the layout given to `open`."""

    @property
    def current_index(self) -> int:
        """The number of the slot with the newest state."""

    @property
    def next_index(self) -> int:
        """The number of the slot that the next state is written to."""

    def open(self, like: Slot, pieces: Callable[[Slot], Iterable[StatePiece]]) -> bool:
        """Allocate slots in the layout of `like`, which may be on meta, with the pieces that `pieces` gives; returns
        False where memory is missing. Collective."""

    def wait_until_ready(self) -> None:
        """Wait until the state that `has_state` announces has arrived; it may still be in transfer when `open`
        returns."""

    def allocate_working(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Uninitialized working memory of the host, reused from earlier processes; None where there is none."""

    def begin_write(self) -> None:
        """Announce that the next slot is about to be written, where the state lives in the slots."""

    def note_updates(self, keys: Collection[str], grads: Mapping[str, torch.Tensor], change: StepUpdate) -> None:
        """Announce the update of the shards `keys` by their gradients, where the state lives in the slots. Gradients
        may be overwritten afterwards. An update may be repeated; the last one counts."""

    def commit(self, step: int, outcome: "StepOutcome", state: Slot) -> None:
        """Commit the complete state of `step` with its `outcome`: it is in the next slot, or in `state`, which must not
        change before `wait_for_commit` has returned."""

    def wait_for_commit(self) -> None:
        """Wait until the last step is committed, here and in its replicas."""

    def adopt_state(self, step: int, state: Slot) -> None:
        """Keep a state of `step` that was loaded from elsewhere or found in the slots."""


@dataclass(frozen=True)
class Precision:
    """The data types of a run. `compute`: this rank's arithmetic. `transport`: the type in which ranks exchange
    parameters and keep frozen ones, the same on all ranks: the compute type where all ranks have the same one."""

    compute: torch.dtype
    transport: torch.dtype

    @property
    def master(self) -> torch.dtype:
        """The type of master weights, moments, sums of gradients and their exchange."""
        return torch.promote_types(self.compute, torch.float32)


class StepOutcome(Protocol):
    """The outcome of a step: the total weight of all ranks, and the values that the device computes later."""

    weight: int
    loss_scale: float | None  # the factor of the losses, if any; known after `get`

    def get(self) -> tuple[float, float]:
        """Norm of the mean gradient before clipping, and 1.0 if the update was skipped; waits until they are known."""
        ...


class DeviceStepOutcome:
    """The outcome of a step that the device computes in stream order."""

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
    """The interface of an engine. A parameter without requires_grad when the engine is created is frozen: it is kept in
    the compute type, without master copy, optimizer state or pieces."""

    step: int  # the step that the state belongs to
    loss_scale: LossScale | None  # where any rank computes in float16

    @property
    def trainable(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the trained parameters by name; the `pieces` of all ranks together cover them."""
        ...

    def initialise(self, fill: Callable[[Shard], None]) -> None:
        """Allocate the state, let `fill` write the master values of each shard, and copy them into the model."""
        ...

    def begin_step(self, step: int, weight: int, lr: float, clip: float | None) -> None:
        """Start step number `step` (the first is 1) in which this rank contributes `weight` (tokens or samples).

        The update uses the learning rate `lr` and clips to the global norm `clip`, if given; parts of it may begin
        before the last backward pass has ended.
        """
        ...

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """A context around one forward and backward pass; `last`: the step's last on this rank."""
        ...

    def grads_ready(self, unit: str) -> None:
        """Declare a unit's gradients of this micro-batch complete, where autograd cannot tell; may be repeated."""
        ...

    def finish_step(self) -> StepOutcome:
        """Reduce gradients, clip by the global norm and update, or schedule that before the state is read."""
        ...

    def full_parameters(self) -> contextlib.AbstractContextManager[dict[str, torch.Tensor]]:
        """A context in which whole parameters can be read, by name, as the model computes with them."""
        ...

    def pieces(self) -> Iterator[StatePiece]:
        """This rank's state: views, valid until the next `finish_step`."""
        ...

    def load(self, read: Callable[[str, str, int, int, torch.Tensor], None]) -> None:
        """Load this rank's state by `read(name, kind, start, stop, out)` and copy it into the model."""
        ...

    def commit(self, step: int) -> None:
        """Declare the state that of `step`: from here on `pieces` belong to it."""
        ...

    def resume_after(self, step: int) -> None:
        """Declare a loaded or found state that of `step`, and commit it to the in-memory store."""
        ...

    def take_notices(self) -> list[tuple[str, dict[str, Any]]]:
        """Events for the user since the last call: (kind, details)."""
        ...

    def close(self) -> None:
        """Stop the background threads; the engine cannot be used afterwards."""
        ...
