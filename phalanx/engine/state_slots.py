"""A rank's state while it trains: in one slot that is updated in place, or in several, from one to another.

Where there is a keeper, every step is committed to memory that outlives the process: the state lives there, or is
copied there. Which of these it is changes no bit.
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
    """What a rank owns of the parameters that are trained, and what is kept of it by a rule."""

    fragments: tuple[Fragment, ...]
    rule: UpdateRule
    master: torch.dtype
    device: torch.device

    @property
    def no_decay(self) -> frozenset[str]:
        """Names of the shards of parameters that are not decayed."""
        return frozenset(each.key for each in self.fragments if len(each.parameter.shape) < 2)

    def make_slot(self, allocate: Allocator, masters: bool = True) -> Slot:
        """The state as a run begins with it; with `masters`, or without."""
        slot: Slot = {}
        for fragment in self.fragments:
            key, shape, count = fragment.key, fragment.parameter.shape, fragment.stop - fragment.start
            slot[key] = {"param": allocate(key, "param", count, self.master, self.device)} if masters else {}
            slot[key] |= self.rule.make_state(key, shape, count, self.master, self.device, allocate)
        return slot

    def pieces(self, slot: Slot) -> Iterator[StatePiece]:
        """The pieces of a slot."""
        for fragment in self.fragments:
            yield from state_pieces(self.rule, fragment.parameter.name, slot[fragment.key], fragment.start)

    def load(self, slot: Slot, read: ReadState) -> None:
        """Fill a slot."""
        for fragment in self.fragments:
            load_state(self.rule, fragment.parameter.name, slot[fragment.key], fragment.start, read)


class StateSlots:
    """The state of a rank's shards in `count` slots, unless it lives in those of the keeper."""

    def __init__(
        self, shards: OwnedShards, allocate: Allocator, count: int = 1, keeper: InMemoryStore | None = None
    ) -> None:
        self.shards, self.count = shards, count
        self._allocate, self._store = allocate, keeper
        self._in_place_store: InMemoryStore | None = None  # the keeper, where the state lives in its slots
        self._all: Sequence[Slot] = ()
        self._current = 0

    @property
    def is_plain(self) -> bool:
        """Whether there is one slot, in memory that is like any other."""
        return self.count == 1 and self._allocate is allocate_zeros and self._store is None

    def open(self, masters: bool = True) -> None:
        """Take memory, with `masters` or without. Collective where there is a keeper."""
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
        """Whether the state is that which the run goes on from, already."""
        return self._store is not None and self._store.has_state

    def shards_to_fill(self, fragments: Iterable[Fragment]) -> Iterator[Shard]:
        """Masters that a run begins with: of some of the shards, or of none if the state is there."""
        for each in () if self.has_state else fragments:
            values, whole = self.source[each.key]["param"], each.parameter
            yield Shard(whole.name, each.start, each.stop, whole.shape, values)

    def wait_until_ready(self) -> None:
        """Wait until that state is there: nothing of it may be read before."""
        if self._store is not None:
            self._store.wait_until_ready()

    @property
    def commits_async(self) -> bool:
        """Whether a step may be committed only some time after `advance`."""
        return self._store is not None and self._store.commits_async

    @property
    def source(self) -> Slot:
        """The newest state."""
        return (
            self._all[self._current]
            if self._in_place_store is None
            else self._in_place_store.slots[self._in_place_store.current_index]
        )

    @property
    def target(self) -> Slot:
        """Where the next one is written."""
        if self._in_place_store is not None:
            return self._in_place_store.slots[self._in_place_store.next_index]
        return self._all[(self._current + 1) % len(self._all)]

    def allocate_working(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory that outlives the process, for what is made anew and kept on this host; with any content."""
        return None if self._in_place_store is None else self._in_place_store.allocate_working(elements, dtype)

    def begin_write(self) -> None:
        """The next state is about to be written; may be repeated."""
        if self._store is not None:
            self._store.begin_write()

    def note_updates(self, keys: Collection[str], grads: Mapping[str, torch.Tensor], change: StepUpdate) -> None:
        """Shards of `keys` are about to be updated, by `grads` where they have one; may be repeated."""
        if self._store is not None:
            self._store.note_updates(keys, grads, change)

    def advance(self, step: int, outcome: StepOutcome) -> None:
        """The next state, that of `step`, of which came `outcome`, is complete."""
        if self._in_place_store is None:
            self._current = (self._current + 1) % len(self._all)
        if self._store is not None:
            self._store.commit(step, outcome, self.source)

    def wait_for_commit(self) -> None:
        """Wait until the last step is committed."""
        if self._store is not None:
            self._store.wait_for_commit()

    def adopt_state(self, step: int) -> None:
        """The newest state is that of `step`, from elsewhere."""
        if self._store is not None:
            self._store.adopt_state(step, self.source)


@dataclass(frozen=True)
class GlobalNorm:
    """How the norm of the whole gradient, and the divisor of the update, are computed of what each rank holds.

    `replica_counts`: of parameters that several ranks of one model hold alike, how many do; `copies` of the state.
    """

    nominal_weight: int
    loss_scale: gradients.LossScale | None
    replica_counts: Mapping[str, int]
    zero: torch.Tensor  # of the master's type, on the device
    copies: int = 1

    def local_squares(self, grads: Iterable[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """A rank's part of the sum of squares, of gradients with how many ranks of one model hold each."""
        return gradients.sum_of_squares_once(grads, self.zero.dtype, self.zero.device)

    def likely_divisor(self, total_weight: int) -> torch.Tensor:
        """The divisor of a step that is neither clipped nor skipped."""
        return gradients.divisor_without_clipping(self.zero, self.nominal_weight, total_weight, self.loss_scale)

    def divisor(
        self, squares: torch.Tensor, total_weight: int, clip: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `gradients.compute_norm_and_divisor`, of the sum of all ranks."""
        return gradients.compute_norm_and_divisor(
            squares.to(self.zero), nominal_weight=self.nominal_weight, total_weight=total_weight, clip=clip,
            scale=self.loss_scale,
        )  # fmt: skip


def allocate_on_meta(name: str, kind: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An allocator that takes no memory."""
    return torch.empty(elements, dtype=dtype, device="meta")


def _allocate_from(slot: Slot) -> Allocator:
    """An allocator that gives what a slot has."""

    def find(name: str, kind: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        found = slot[name][kind].view(-1)
        assert found.numel() == elements, (name, kind)
        return found

    return find
