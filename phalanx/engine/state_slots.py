"""A rank's state while it trains: in one slot that is updated in place, or in several, from one to another.

Where there is a keeper, every step is committed to memory that outlives the process: the state lives there, or is
copied there. Which of these it is changes no bit.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.engine.interface import Keeper, Outcome
from phalanx.layout.buckets import Fragment
from phalanx.optim.state import Allocator, Piece, Slot
from phalanx.optim.update import Change, Read, Rule, copy_over, load, pieces

Make = Callable[[Allocator], Slot]


@dataclass(frozen=True)
class Shards:
    """What a rank owns of the parameters that are trained, and what is kept of it by a rule."""

    fragments: tuple[Fragment, ...]
    rule: Rule
    master: torch.dtype
    device: torch.device

    @property
    def no_decay(self) -> frozenset[str]:
        """Names of the shards of parameters that are not decayed."""
        return frozenset(each.key for each in self.fragments if len(each.parameter.shape) < 2)

    def make(self, allocate: Allocator, masters: bool = True) -> Slot:
        """The state as a run begins with it; with `masters`, or without."""
        slot: Slot = {}
        for fragment in self.fragments:
            key, shape, count = fragment.key, fragment.parameter.shape, fragment.stop - fragment.start
            slot[key] = {"param": allocate(key, "param", count, self.master, self.device)} if masters else {}
            slot[key] |= self.rule.make(key, shape, count, self.master, self.device, allocate)
        return slot

    def pieces(self, slot: Slot) -> Iterator[Piece]:
        """The pieces of a slot."""
        for fragment in self.fragments:
            yield from pieces(self.rule, fragment.parameter.name, slot[fragment.key], fragment.start)

    def load(self, slot: Slot, read: Read) -> None:
        """Fill a slot."""
        for fragment in self.fragments:
            load(self.rule, fragment.parameter.name, slot[fragment.key], fragment.start, read)


class Slots:
    """`make` makes the state of all shards from an allocator, as a run begins with it; `pieces` gives the pieces of a
    slot; `count` slots are taken where the state does not live in the keeper's."""

    def __init__(
        self,
        make: Make,
        pieces: Callable[[Slot], Iterable[Piece]],
        allocate: Allocator,
        count: int = 1,
        keeper: Keeper | None = None,
    ) -> None:
        """Collective where there is a keeper."""
        self._keeper = keeper if keeper is not None and keeper.open(make(on_meta), pieces) else None
        self._lives: Keeper | None = None  # the keeper, where the state lives in its slots
        self._all: Sequence[Slot] = ()
        self._current = 0
        if self._keeper is not None and self._keeper.in_place:
            self._lives = self._keeper
            if not self._keeper.attached:
                make(_into(self.source))
            return
        self._all = [make(allocate) for _ in range(count)]
        if self._keeper is not None and self._keeper.attached:
            self._keeper.arrive()
            copy_over(self._keeper.slots[self._keeper.current], self.source)

    @property
    def attached(self) -> bool:
        """Whether the state is that which the run goes on from, already."""
        return self._keeper is not None and self._keeper.attached

    def arrive(self) -> None:
        """Wait until that state is there: nothing of it may be read before."""
        if self._keeper is not None:
            self._keeper.arrive()

    @property
    def late(self) -> bool:
        """Whether a step may be committed only some time after `turn`."""
        return self._keeper is not None and self._keeper.late

    @property
    def source(self) -> Slot:
        """The newest state."""
        return self._all[self._current] if self._lives is None else self._lives.slots[self._lives.current]

    @property
    def target(self) -> Slot:
        """Where the next one is written."""
        if self._lives is not None:
            return self._lives.slots[self._lives.next]
        return self._all[(self._current + 1) % len(self._all)]

    def working(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory that outlives the process, for what is made anew and kept on this host; with any content."""
        return None if self._lives is None else self._lives.working(elements, dtype)

    def begin(self) -> None:
        """The next state is about to be written; may be repeated."""
        if self._keeper is not None:
            self._keeper.begin()

    def updates(self, keys: Collection[str], grads: Mapping[str, torch.Tensor], change: Change) -> None:
        """Shards of `keys` are about to be updated, by `grads` where they have one; may be repeated."""
        if self._keeper is not None:
            self._keeper.updates(keys, grads, change)

    def turn(self, step: int, outcome: Outcome) -> None:
        """The next state, that of `step`, of which came `outcome`, is complete."""
        if self._lives is None:
            self._current = (self._current + 1) % len(self._all)
        if self._keeper is not None:
            self._keeper.commit(step, outcome, self.source)

    def settle(self) -> None:
        """Wait until the last step is committed."""
        if self._keeper is not None:
            self._keeper.settle()

    def loaded(self, step: int) -> None:
        """The newest state is that of `step`, from elsewhere."""
        if self._keeper is not None:
            self._keeper.loaded(step, self.source)


def on_meta(name: str, kind: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An allocator that takes no memory."""
    return torch.empty(elements, dtype=dtype, device="meta")


def _into(slot: Slot) -> Allocator:
    """An allocator that gives what a slot has."""

    def find(name: str, kind: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        found = slot[name][kind].view(-1)
        assert found.numel() == elements, (name, kind)
        return found

    return find
