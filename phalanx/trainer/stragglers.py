"""Ranks that have become slow and stay so: nothing fails, since shares follow, but somebody should look at the device.

Plain numbers in, sentences' details out; no torch here.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

STEPS = 16  # whose median counts
SLOW_FACTOR, RECOVERED_FACTOR = 2.0, 1.5  # times its own best: it is slow; it is well again
REPORT_AFTER_S = 300.0  # for so long, before anything is said


@dataclass
class _CopySpeed:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    best: float | None = None
    slow_since: float | None = None
    reported: bool = False


class StragglerDetector:
    """Knows how fast each of `count` copies of the model has been, on the rank that decides about shares."""

    def __init__(self, count: int, stays_s: float = REPORT_AFTER_S) -> None:
        self._paces = [_CopySpeed() for _ in range(count)]
        self._stays_s = stays_s

    def observe(self, now_s: float, seconds: Sequence[float]) -> list[tuple[int, float, float]]:
        """Take in, by copy, the seconds that a fixed amount of work takes it. Returns those that have been slow for
        long, each once until it is well again: (copy, times its own best, seconds for which it has been slow)."""
        found: list[tuple[int, float, float]] = []
        if len(seconds) != len(self._paces):  # nothing was measured
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
