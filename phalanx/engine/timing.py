"""Timing of passes and transfers on each rank, from which all ranks compute the order of transfers.

Each step all ranks exchange the rate of their transfers. When the link's rate has changed (link_rate.py), they exchange
the times of their units and compute the same order from the same numbers. A CPU's passes are timed by the host; an
accelerator's by events, since its passes end later than the host's calls.
"""

import abc
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from phalanx.comm.collectives import Traffic
from phalanx.engine.interface import Engine
from phalanx.layout import link_rate
from phalanx.layout.comm_schedule import StepTimings
from phalanx.optim.update import Slot, StepUpdate, UpdateRule
from phalanx.system.event_times import EventTimes, record_time, seconds_between

WINDOW = 5  # micro-batches of which the median is taken
SAMPLED = 64  # of this many passes a device times the first few
RESTARTS = 8  # transfers after idling, of which the shortest counts; few, so that old rates drop out
LEAST_S = 1e-6  # for missing or zero measurements


class PassTimer(abc.ABC):
    """A timer of each unit's forward and backward pass in seconds, without waits; all but `median_seconds` is called by
    the thread that runs the passes."""

    def __init__(self, units: int) -> None:
        self._laps = [deque[Any](maxlen=WINDOW) for _ in range(2 * units)]  # forward, then backward

    @abc.abstractmethod
    def start(self) -> None:
        """Start timing the pass that ends next."""

    def exclude_wait(self) -> None:
        """Exclude the time up to here, in which the device waits for communication."""
        return

    def end_forward(self, unit: int) -> None:
        """End the forward pass of a unit."""
        self._lap(self._laps[unit])

    def end_backward(self, unit: int) -> None:
        """End the backward pass of a unit: its gradients are complete."""
        self._lap(self._laps[len(self._laps) // 2 + unit])

    def median_seconds(self) -> list[float]:
        """Median seconds of every unit's forward pass, then of every backward pass."""
        return [max(LEAST_S, self._median(each)) for each in self._laps]

    @abc.abstractmethod
    def _lap(self, laps: deque[Any]) -> None: ...

    @abc.abstractmethod
    def _median(self, laps: deque[Any]) -> float: ...


class HostPassTimer(PassTimer):
    """A timer of passes on a CPU: the host's time minus its waits."""

    def __init__(self, units: int, traffic: Traffic) -> None:
        super().__init__(units)
        self._traffic, self._since = traffic, 0.0

    def start(self) -> None:
        self._since = time.perf_counter() - self._traffic.total_wait_s

    def _lap(self, laps: deque[Any]) -> None:
        before = self._since
        self.start()
        laps.append(self._since - before)

    def _median(self, laps: deque[Any]) -> float:
        return statistics.median(laps or [0.0])


class DevicePassTimer(PassTimer):
    """A timer of passes on an accelerator: events from the end of the wait for a unit's parameters to the end of its
    pass.

    Events are recorded for a few of SAMPLED passes, since the rate of transfers changes more often than the passes'
    times.
    """

    def __init__(self, units: int, device: torch.device) -> None:
        super().__init__(units)
        self._device, self._passes = device, 0
        self._since: Any = None  # None: this pass is not timed

    def start(self) -> None:
        looked_at = self._passes % SAMPLED < WINDOW
        self._passes += 1
        self._since = record_time(self._device) if looked_at else None

    def exclude_wait(self) -> None:
        if self._since is not None:
            self._since = record_time(self._device)

    def _lap(self, laps: deque[Any]) -> None:
        if self._since is not None:
            before, self._since = self._since, record_time(self._device)
            laps.append((before, self._since))

    def _median(self, laps: deque[Any]) -> float:
        """The median of the passes that the device has finished; does not wait for the others."""
        seconds = [seconds_between(first, last) for first, last in laps if last.query()]
        return statistics.median(seconds or [0.0])


class LinkTimer:
    """A timer of the communication thread's transfers and updates, and the link's rate as all ranks know it."""

    def __init__(self, units: int, device: torch.device) -> None:
        self._event_times = EventTimes(device)
        self._moved: list[tuple[float, Any, Any]] = []  # bytes, from when, until when
        self._rates = link_rate.LinkRate()
        self._idle_since: Any = None
        self._updated: list[tuple[int, Any, Any]] = []
        self._updates = [deque[float](maxlen=WINDOW) for _ in range(units)]
        self._after_idling: deque[tuple[float, float]] = deque(maxlen=RESTARTS)

    def record_time(self) -> Any:
        """The current time of the communication thread: a number, or an event of the device."""
        return self._event_times.record()

    def record_transfer(self, size: float, begun: Any) -> None:
        """Record the end of a transfer of `size` bytes through the link, begun at the mark `begun`."""
        self._moved.append((size, begun, self.record_time()))

    def record_update(self, unit: int, begun: Any) -> None:
        """Record the update of a unit, begun at the mark `begun`."""
        self._updated.append((unit, begun, self.record_time()))

    def update_seconds(self) -> list[float]:
        """Seconds of every unit's update."""
        return [statistics.median(each or [0.0]) for each in self._updates]

    def restart_s(self) -> float:
        """Seconds that a transfer takes longer if the link was idle before it: the shortest measured."""
        rate = self._rates.estimate
        return max(0.0, min((seconds - size / rate for size, seconds in self._after_idling), default=0.0))

    def measure_rate(self) -> float:
        """Bytes per second of the transfers since the last call; 0 if there were none. The device must have passed all
        marks."""
        for unit, begun, ended in self._updated:
            self._updates[unit].append(seconds_between(begun, ended))
            self._event_times.recycle(begun, ended)
        timed = []
        for size, begun, ended in self._moved:
            before = self._idle_since
            paused = before is None or seconds_between(before, begun) > 0
            seconds = seconds_between(begun if paused else before, ended)
            timed.append((size, seconds))
            if paused:
                self._after_idling.append((size, seconds))
            self._event_times.recycle(begun, *(() if before is None else (before,)))
            self._idle_since = ended
        self._moved, self._updated = [], []
        return link_rate.step_rate(timed) or 0.0

    def observe_rates(self, rates_by_rank: Sequence[float]) -> bool:
        """Record the ranks' rates of a step; returns whether a new order is due, the same on all ranks."""
        # The last rank to arrive has not waited.
        self._rates = link_rate.observe_rate(self._rates, max(rates_by_rank))
        return link_rate.is_outdated(self._rates)

    def make_timings(
        self, passes_s: Sequence[float], updates_s: Sequence[float], restart_s: float,
        sent: Sequence[tuple[float, float]], parts: int,
    ) -> tuple[StepTimings, float]:  # fmt: skip
        """The timings to compute an order for, and the link's rate in bytes per second; `passes_s` as in
        `PassTimer.median_seconds`, `sent`: the bytes on the link to reduce and to gather each unit.

        An order that knows the time of a unit's update sends something else after its gradient. Otherwise the link
        would idle and restart (`restart_s`) for every unit: with 8 units of 4 MiB that was 5 % of a step.
        """
        self._rates = link_rate.adopt_estimate(self._rates)
        rate = self._rates.in_use
        assert rate is not None
        units = len(sent)
        work = StepTimings(
            forward_s=tuple(passes_s[:units]),
            backward_s=tuple(passes_s[units:]),
            reduce_s=tuple(max(LEAST_S, size / rate) for size, _ in sent),
            gather_s=tuple(max(LEAST_S, size / rate) for _, size in sent),
            update_s=tuple(update + restart_s for update in updates_s),
            parts=parts,
        )
        return work, rate


# ------------------------------------------------------------------------------ time of updates on a CPU, on any thread


class UpdateTimer:
    """A timer of an engine's updates in seconds. On an accelerator it counts only the time to queue them."""

    def __init__(self) -> None:
        self._total = self._before = 0.0

    def wrap_engine(self, make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
        """Wrap an engine's constructor so that its updates are timed here."""

        def make(*args: Any, rule: UpdateRule, **more: Any) -> Engine:
            return make_engine(*args, rule=cast(UpdateRule, TimedRule(rule, self)), **more)

        return make

    def add_seconds(self, seconds: float) -> None:
        self._total += seconds  # from one thread only

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self._before = self._before, self._total
        return self._before - before


class TimedRule:
    """An update rule that delegates to `rule` and is timed."""

    def __init__(self, rule: UpdateRule, updates: UpdateTimer) -> None:
        self.rule, self._updates = rule, updates

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def apply(self, source: Slot, target: Slot, grads: dict[str, torch.Tensor], change: StepUpdate) -> None:
        begun = time.perf_counter()
        self.rule.apply(source, target, grads, change)
        self._updates.add_seconds(time.perf_counter() - begun)
