"""Straggler detection: ranks that have become slow and stay slow.

Nothing fails, because shares adapt, but the device needs inspection. Plain numbers in, event details out; no torch
here.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

STEPS = 16  # window of the median
SLOW_FACTOR, RECOVERED_FACTOR = 2.0, 1.5  # times the copy's own best: threshold of slow, and of recovered
REPORT_AFTER_S = 300.0  # time above the threshold before it is reported


@dataclass
class _CopySpeed:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    best: float | None = None
    slow_since: float | None = None
    reported: bool = False


class StragglerDetector:
    """Tracks the speed of each of `count` copies of the model, on the rank that decides about shares."""

    def __init__(self, count: int, stays_s: float = REPORT_AFTER_S) -> None:
        self._paces = [_CopySpeed() for _ in range(count)]
        self._stays_s = stays_s

    def observe(self, now_s: float, seconds: Sequence[float]) -> list[tuple[int, float, float]]:
        """Add, for each copy, the seconds of a fixed amount of work. Returns newly detected stragglers, each once
        until it recovers: (copy, times its own best, seconds above the threshold)."""
        found: list[tuple[int, float, float]] = []
        if len(seconds) != len(self._paces):  # no measurement
            return found
        for number, (pace, one) in enumerate(zip(self._paces, seconds, strict=True)):
            pace.recent.append(one)
            if len(pace.recent) < STEPS:
                continue
            middle = statistics.median(pace.recent)
            pace.best = middle if pace.best is None else min(pace.best, middle)
            times = middle / pace.best if pace.best > 0 else 1.0
            if times < RECOVERED_FACTOR:
                pace.slow_since, pace.reported = None, False
            elif times > SLOW_FACTOR and pace.slow_since is None:
                pace.slow_since = now_s
            since = pace.slow_since
            if since is not None and times > SLOW_FACTOR and not pace.reported and now_s - since >= self._stays_s:
                pace.reported = True
                found.append((number, times, now_s - since))
        return found
