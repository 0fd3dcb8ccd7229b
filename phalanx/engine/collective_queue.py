"""What the lane does with parts of buckets: sum them to their owners, or gather them from there, two at a time."""

import contextlib
import functools
from collections.abc import Callable, Sequence

from phalanx.comm.comm_thread import Mark
from phalanx.comm.routes import Ways
from phalanx.comm.uneven_collectives import Arriving
from phalanx.engine.bucket import Gradient, Held, Pool
from phalanx.engine.schedule import Timetable
from phalanx.layout.buckets import Part


class Carrier:
    """Transfers in the order of the calls; all calls come from the lane."""

    def __init__(self, ways: Ways, timetable: Timetable, pool: Pool | None) -> None:
        self._ways, self._timetable, self._pool = ways, timetable, pool
        self._under_way: tuple[Arriving, Callable[[], None]] | None = None
        self._summing = False  # what is under way, if anything is, is a sum

    def reduce(self, held: Held, gradient: Gradient, number: int, then: Callable[[], None]) -> None:
        """Wait for a gradient and begin to sum part `number` of it; `then`, when the sum is there."""
        self.wait(gradient.ready)
        buffer, into, summed = held.reducing(gradient, number)

        def arrived() -> None:
            if self._ways.add is not None and into.numel():
                self._ways.add(into)
            summed()
            then()

        part = held.bucket.parts[number]
        start = functools.partial(self._ways.trained.reduce_scatter, buffer, part.cuts, into)
        self._begin(part, self._ways.reduced(buffer.dtype), start, arrived)
        self._summing = True

    def gather(self, helds: Sequence[Held], number: int, then: Callable[[], None]) -> None:
        """Begin to gather part `number` of some buckets; `then`, when the last has arrived."""
        for held in helds[:-1]:
            self._gather(held, number, lambda: None)
        if helds:
            self._gather(helds[-1], number, then)
        else:
            then()

    def _gather(self, held: Held, number: int, then: Callable[[], None]) -> None:
        tensor, arrived = held.gathering(number)

        def both() -> None:
            arrived()
            then()

        part = held.bucket.parts[number]
        trained = held.bucket.trained
        moves, size = self._ways.trained if trained else self._ways.frozen, self._ways.gathered(tensor.dtype)
        start = functools.partial(moves.all_gather, tensor, part.cuts)
        self._begin(part, size if trained else tensor.element_size(), start, both)
        self._summing = False

    def _begin(self, part: Part, item_bytes: float, start: Callable[[], Arriving], then: Callable[[], None]) -> None:
        """Start a transfer, then finish the one before: so the link is busy between the two."""
        if not part.elements:
            self.settle()
            then()
            return
        begun, moving = self._timetable.mark(), start()
        self.settle()

        def ended() -> None:
            self._timetable.moved(part.carried * item_bytes, begun)
            then()

        self._under_way = (moving, ended)

    def settle(self) -> None:
        """Finish what is under way."""
        if self._under_way is not None:
            (moving, then), self._under_way = self._under_way, None
            moving.wait()
            then()

    def settle_sums(self) -> None:
        """Finish what is under way if it is a sum, as those before it are finished."""
        if self._summing:
            self.settle()

    def wait(self, mark: Mark) -> None:
        """Wait for the main thread; it must not wait for the lane meanwhile.

        Also where the main thread has already passed the mark: its device may still have to get there.
        """
        if not mark.reached:
            self.settle()
        with contextlib.nullcontext() if self._pool is None else self._pool.starving(mark):
            mark.wait()
