"""A rank's state while it trains: in one slot that is updated in place, or in several, from one to another.

Where there is a keeper, every step is committed to memory that outlives the process: the state lives there, or is
copied there. Which of these it is changes no bit.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.engine.interface import InMemoryStore, StepOutcome
from phalanx.layout.buckets import Fragment
from phalanx.optim.state import Allocator, Slot, StatePiece
from phalanx.optim.update import ReadState, StepUpdate, UpdateRule, copy_slot, load_state, state_pieces

MakeSlot = Callable[[Allocator], Slot]


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
    """`make` makes the state of all shards from an allocator, as a run begins with it; `pieces` gives the pieces of a
    slot; `count` slots are taken where the state does not live in the keeper's."""

    def __init__(
        self,
        make: MakeSlot,
        pieces: Callable[[Slot], Iterable[StatePiece]],
        allocate: Allocator,
        count: int = 1,
        keeper: InMemoryStore | None = None,
    ) -> None:
        """Collective where there is a keeper."""
        self._store = keeper if keeper is not None and keeper.open(make(allocate_on_meta), pieces) else None
        self._in_place_store: InMemoryStore | None = None  # the keeper, where the state lives in its slots
        self._all: Sequence[Slot] = ()
        self._current = 0
        if self._store is not None and self._store.in_place:
            self._in_place_store = self._store
            if not self._store.has_state:
                make(_allocate_from(self.source))
            return
        self._all = [make(allocate) for _ in range(count)]
        if self._store is not None and self._store.has_state:
            self._store.wait_until_ready()
            copy_slot(self._store.slots[self._store.current_index], self.source)

    @property
    def has_state(self) -> bool:
        """Whether the state is that which the run goes on from, already."""
        return self._store is not None and self._store.has_state

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
