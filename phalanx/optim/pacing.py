"""What a rank measures of its passes and transfers, and the order that follows from what all ranks have measured.

Each step every rank tells the rate of its transfers. When the rate that the order was made for is not the link's any
more (rates.py), all ranks exchange what their units take and make the same order of the same numbers. Only hosts that
compute themselves are measured: an accelerator's passes end later than the host's calls.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence

from phalanx.comm.collectives import Traffic
from phalanx.optim import rates
from phalanx.optim.overlap import Work

KEPT = 5  # micro-batches whose median counts
RESTARTS = 8  # transfers after idling of which the shortest counts: few, for they are of the rate that was then
LEAST_S = 1e-6  # for what has not been seen, or is nothing


class Laps:
    """Seconds that the host has worked on each unit's passes, without its waits."""

    def __init__(self, units: int, traffic: Traffic) -> None:
        self._traffic = traffic
        self._forward = [deque[float](maxlen=KEPT) for _ in range(units)]
        self._backward = [deque[float](maxlen=KEPT) for _ in range(units)]
        self._since = 0.0

    def begin(self) -> None:
        """What comes next belongs to what ends next."""
        self._lap()

    def forward(self, unit: int) -> None:
        """The forward pass of a unit ends."""
        self._forward[unit].append(self._lap())

    def backward(self, unit: int) -> None:
        """The gradients of a unit are complete."""
        self._backward[unit].append(self._lap())

    def table(self) -> list[float]:
        """Seconds of every unit's forward pass, then of every backward pass."""
        return [max(LEAST_S, statistics.median(each or [0.0])) for each in (*self._forward, *self._backward)]

    def _lap(self) -> float:
        now = time.perf_counter() - self._traffic.waited_s
        taken, self._since = now - self._since, now
        return taken


class Pacing:
    """The lane's measurements, and what all ranks know of the link."""

    def __init__(self, units: int) -> None:
        self._moved: list[tuple[float, float]] = []
        self._rates = rates.Rates()
        self._idle_since = 0.0
        self._updates = [deque[float](maxlen=KEPT) for _ in range(units)]
        self._after_idling: deque[tuple[float, float]] = deque(maxlen=RESTARTS)

    def moved(self, size: float, begun: float) -> None:
        """A transfer of `size` bytes that the link could not do with less for has just ended, `begun` at that time."""
        now = time.perf_counter()
        self._moved.append((size, now - max(begun, self._idle_since)))
        if begun > self._idle_since:
            self._after_idling.append((size, now - begun))
        self._idle_since = now

    def updated(self, unit: int, seconds: float) -> None:
        """A unit was updated, which has held up the lane so long."""
        self._updates[unit].append(seconds)

    def updates(self) -> list[float]:
        """Seconds of every unit's update."""
        return [statistics.median(each or [0.0]) for each in self._updates]

    def restart_s(self) -> float:
        """What a transfer takes longer at least whose link was idle when it began, until its pieces are under way."""
        rate = self._rates.now
        return max(0.0, min((seconds - size / rate for size, seconds in self._after_idling), default=0.0))

    def rate(self) -> float:
        """Bytes per second of the transfers since the last call; 0 if there were none."""
        moved, self._moved = self._moved, []
        return rates.step_rate(moved) or 0.0

    def told(self, everyones: Sequence[float]) -> bool:
        """Take in the ranks' rates of a step; whether another order is due. The same on all ranks."""
        # Who came last has waited for nobody.
        self._rates = rates.observe(self._rates, max(everyones))
        return rates.changed(self._rates)

    def work(
        self, passes_s: Sequence[float], updates_s: Sequence[float], restart_s: float,
        sent: Sequence[tuple[float, float]], parts: int,
    ) -> tuple[Work, float]:  # fmt: skip
        """The work that an order is to be made for, and the link's rate in bytes per second; `passes_s` as in
        `Laps.table`, `sent` the bytes that the link must carry to reduce and to gather each unit.

        An order that knows how long a unit's update takes sends something else behind its gradient. Otherwise the link
        would idle, and begin anew (`restart_s`), for every unit: with 8 units of 4 MiB that was 5 % of a step.
        """
        self._rates = rates.remade(self._rates)
        rate = self._rates.in_use
        assert rate is not None
        units = len(sent)
        work = Work(
            forward_s=tuple(passes_s[:units]),
            backward_s=tuple(passes_s[units:]),
            reduce_s=tuple(max(LEAST_S, size / rate) for size, _ in sent),
            gather_s=tuple(max(LEAST_S, size / rate) for _, size in sent),
            update_s=tuple(update + restart_s for update in updates_s),
            parts=parts,
        )
        return work, rate
