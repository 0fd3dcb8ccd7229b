"""Slots of a rank's optimizer state: one that is updated in place, or several, each step into the next.

With an in-memory store every step is committed to memory that outlives the process: the state lives there, or is copied
there. Both give the same bits.
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.engine.interface import InMemoryStore, StepOutcome
from phalanx.layout.buckets import Fragment
from phalanx.optim import gradients
from phalanx.optim.update import (
    Allocator,
    ReadState,
    Shard,
    Slot,
    StatePiece,
    StepUpdate,
    UpdateRule,
    allocate_zeros,
    copy_slot,
    load_state,
    state_pieces,
)


@dataclass(frozen=True)
class OwnedShards:
    """The shards of trained parameters that a rank owns, with their optimizer state."""

    fragments: tuple[Fragment, ...]
    rule: UpdateRule
    master: torch.dtype
    device: torch.device

    @property
    def no_decay(self) -> frozenset[str]:
        """Names of the shards without weight decay: of vectors, and of biases in stacks (of experts)."""
        return frozenset(each.key for each in self.fragments if len(each.parameter.update_shape) <= 1)

    def make_slot(self, allocate: Allocator, masters: bool = True) -> Slot:
        """Allocate the initial state, with `masters` or without."""
        slot: Slot = {}
        for fragment in self.fragments:
            key, shape, count = fragment.key, fragment.parameter.update_shape, fragment.stop - fragment.start
            slot[key] = {"param": allocate(key, "param", count, self.master, self.device)} if masters else {}
            slot[key] |= self.rule.make_state(key, shape, count, self.master, self.device, allocate)
        return slot

    def pieces(self, slot: Slot) -> Iterator[StatePiece]:
        """The pieces of a slot."""
        for fragment in self.fragments:
            yield from state_pieces(self.rule, fragment.parameter.name, slot[fragment.key], fragment.start)

    def load(self, slot: Slot, read: ReadState) -> None:
        """Load a slot by `read`."""
        for fragment in self.fragments:
            load_state(self.rule, fragment.parameter.name, slot[fragment.key], fragment.start, read)


class StateSlots:
    """The state of a rank's shards in `count` slots, or in the slots of the in-memory store."""

    def __init__(
        self, shards: OwnedShards, allocate: Allocator, count: int = 1, keeper: InMemoryStore | None = None
    ) -> None:
        self.shards, self.count = shards, count
        self._allocate, self._store = allocate, keeper
        self._in_place_store: InMemoryStore | None = None  # the store, where the state lives in its slots
        self._all: Sequence[Slot] = ()
        self._current = 0

    @property
    def is_plain(self) -> bool:
        """Whether there is one slot, in ordinary memory."""
        return self.count == 1 and self._allocate is allocate_zeros and self._store is None

    def open(self, masters: bool = True) -> None:
        """Allocate the slots, with `masters` or without. Collective where there is an in-memory store."""
        make = functools.partial(self.shards.make_slot, masters=masters)
        if self._store is not None and not self._store.open(make(allocate_on_meta), self.shards.pieces):
            self._store = None
        if self._store is not None and self._store.in_place:
            self._in_place_store = self._store
            if not self._store.has_state:
                make(_allocate_from(self.source))
            return
        self._all = [make(self._allocate) for _ in range(self.count)]
        if self._store is not None and self._store.has_state:
            self._store.wait_until_ready()
            copy_slot(self._store.slots[self._store.current_index], self.source)

    @property
    def has_state(self) -> bool:
        """Whether the slots already hold the state that the run resumes from."""
        return self._store is not None and self._store.has_state

    def shards_to_fill(self, fragments: Iterable[Fragment]) -> Iterator[Shard]:
        """The master shards to initialize: of `fragments`, or none if the slots already hold the state."""
        for each in () if self.has_state else fragments:
            values, whole = self.source[each.key]["param"], each.parameter
            yield Shard(whole.name, each.start, each.stop, whole.shape, values)

    def wait_until_ready(self) -> None:
        """Wait until that state has arrived; nothing of it may be read before."""
        if self._store is not None:
            self._store.wait_until_ready()

    @property
    def commits_async(self) -> bool:
        """Whether a commit may finish some time after `advance` has returned."""
        return self._store is not None and self._store.commits_async

    @property
    def source(self) -> Slot:
        """The slot with the newest state."""
        return (
            self._all[self._current]
            if self._in_place_store is None
            else self._in_place_store.slots[self._in_place_store.current_index]
        )

    @property
    def target(self) -> Slot:
        """The slot that the next state is written to."""
        if self._in_place_store is not None:
            return self._in_place_store.slots[self._in_place_store.next_index]
        return self._all[(self._current + 1) % len(self._all)]

    def allocate_working(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Uninitialized working memory of the host that outlives the process; None where there is none."""
        return None if self._in_place_store is None else self._in_place_store.allocate_working(elements, dtype)

    def begin_write(self) -> None:
        """Announce that the next state is about to be written; may be repeated."""
        if self._store is not None:
            self._store.begin_write()

    def note_updates(self, keys: Collection[str], grads: Mapping[str, torch.Tensor], change: StepUpdate) -> None:
        """Announce the update of the shards `keys` by `grads`; may be repeated."""
        if self._store is not None:
            self._store.note_updates(keys, grads, change)

    def advance(self, step: int, outcome: StepOutcome) -> None:
        """Make the next state, that of `step` with its `outcome`, the newest, and commit it."""
        if self._in_place_store is None:
            self._current = (self._current + 1) % len(self._all)
        if self._store is not None:
            self._store.commit(step, outcome, self.source)

    def wait_for_commit(self) -> None:
        """Wait until the last step is committed."""
        if self._store is not None:
            self._store.wait_for_commit()

    def adopt_state(self, step: int) -> None:
        """Declare the newest state that of `step`, after a load."""
        if self._store is not None:
            self._store.adopt_state(step, self.source)


@dataclass(frozen=True)
class GlobalNorm:
    """The global gradient norm and the divisor of the update, computed from each rank's shards.

    `replica_counts`: the number of ranks that replicate a parameter within one model, by name; `copies` of the state.
    """

    nominal_weight: int
    loss_scale: gradients.LossScale | None
    replica_counts: Mapping[str, int]
    zero: torch.Tensor  # of the master's type, on the device
    copies: int = 1

    def local_squares(self, grads: Iterable[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """This rank's part of the sum of squares, of gradients with their numbers of replicas."""
        return gradients.sum_of_squares_once(grads, self.zero.dtype, self.zero.device)

    def likely_divisor(self, total_weight: int) -> torch.Tensor:
        """The divisor of a step that is neither clipped nor skipped."""
        return gradients.divisor_without_clipping(self.zero, self.nominal_weight, total_weight, self.loss_scale)

    def divisor(
        self, squares: torch.Tensor, total_weight: int, clip: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`gradients.compute_norm_and_divisor` of the sum over all ranks."""
        return gradients.compute_norm_and_divisor(
            squares.to(self.zero), nominal_weight=self.nominal_weight, total_weight=total_weight, clip=clip,
            scale=self.loss_scale,
        )  # fmt: skip


def allocate_on_meta(name: str, kind: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An allocator of meta tensors."""
    return torch.empty(elements, dtype=dtype, device="meta")


def _allocate_from(slot: Slot) -> Allocator:
    """An allocator that returns the tensors of a slot."""

    def find(name: str, kind: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        found = slot[name][kind].view(-1)
        assert found.numel() == elements, (name, kind)
        return found

    return find
