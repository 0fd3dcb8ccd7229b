"""What the lane does with parts of buckets: sum them to their owners, or gather them from there, two at a time."""

import contextlib
import functools
from collections.abc import Callable, Sequence

from phalanx.comm.comm_thread import StreamEvent
from phalanx.comm.routes import Routes
from phalanx.comm.uneven_collectives import PendingTransfer
from phalanx.engine.bucket import BucketGradient, GradientBufferPool, RankBucket
from phalanx.engine.schedule import TransferSchedule
from phalanx.layout.buckets import BucketPart


class CollectiveQueue:
    """Transfers in the order of the calls; all calls come from the lane."""

    def __init__(self, routes: Routes, schedule: TransferSchedule, pool: GradientBufferPool | None) -> None:
        self.routes, self._schedule, self.pool = routes, schedule, pool
        self._under_way: tuple[PendingTransfer, Callable[[], None]] | None = None
        self._summing = False  # what is under way, if anything is, is a sum

    def reduce(self, bucket: RankBucket, gradient: BucketGradient, number: int, on_done: Callable[[], None]) -> None:
        """Wait for a gradient and begin to sum part `number` of it; `on_done`, when the sum is there."""
        self.wait(gradient.ready)
        buffer, into, summed = bucket.prepare_reduce(gradient, number)

        def arrived() -> None:
            if self.routes.sum_over_replicas is not None and into.numel():
                self.routes.sum_over_replicas(into)
            summed()
            on_done()

        part = bucket.bucket.parts[number]
        start = functools.partial(self.routes.trained.reduce_scatter, buffer, part.cuts, into)
        self._begin(part, self.routes.reduce_bytes(buffer.dtype), start, arrived)
        self._summing = True

    def gather(self, buckets: Sequence[RankBucket], number: int, on_done: Callable[[], None]) -> None:
        """Begin to gather part `number` of some buckets; `on_done`, when the last has arrived."""
        for held in buckets[:-1]:
            self._gather(held, number, lambda: None)
        if buckets:
            self._gather(buckets[-1], number, on_done)
        else:
            on_done()

    def _gather(self, held: RankBucket, number: int, then: Callable[[], None]) -> None:
        tensor, arrived = held.prepare_gather(number)

        def both() -> None:
            arrived()
            then()

        part = held.bucket.parts[number]
        trained = held.bucket.trained
        moves, size = self.routes.trained if trained else self.routes.frozen, self.routes.gather_bytes(tensor.dtype)
        start = functools.partial(moves.all_gather, tensor, part.cuts)
        self._begin(part, size if trained else tensor.element_size(), start, both)
        self._summing = False

    def _begin(
        self, part: BucketPart, item_bytes: float, start: Callable[[], PendingTransfer], then: Callable[[], None]
    ) -> None:
        """Start a transfer, then finish the one before: so the link is busy between the two."""
        if not part.elements:
            self.flush()
            then()
            return
        begun, moving = self._schedule.record_time(), start()
        self.flush()

        def ended() -> None:
            self._schedule.record_transfer(part.link_elements * item_bytes, begun)
            then()

        self._under_way = (moving, ended)

    def flush(self) -> None:
        """Finish what is under way."""
        if self._under_way is not None:
            (moving, then), self._under_way = self._under_way, None
            moving.wait()
            then()

    def flush_reduce(self) -> None:
        """Finish what is under way if it is a sum, as those before it are finished."""
        if self._summing:
            self.flush()

    def wait(self, event: StreamEvent) -> None:
        """Wait for the main thread; it must not wait for the lane meanwhile.

        Also where the main thread has already passed the mark: its device may still have to get there.
        """
        if not event.is_recorded:
            self.flush()
        with contextlib.nullcontext() if self.pool is None else self.pool.report_blocked_thread(event):
            event.wait()
