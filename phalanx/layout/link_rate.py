"""The rate of the link, from the times of its transfers, and whether it has changed. Pure, like `comm_schedule`.

An order of communication stays good while the rate moves a little, and making another one costs a message to all ranks.
So one odd step changes nothing: only what comes twice in a row, and is farther off than steps differ by themselves.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

CHANGE = math.log(1.2)  # a rate that is farther than this from the one in use is another
WINDOW = 32  # steps whose rates tell how much they differ by themselves
NOISE = 0.03  # the deviation of a logarithm of a step's rate that is assumed until a few steps are known
FAR = 3.0  # deviations


@dataclass(frozen=True)
class LinkRate:
    """What is known of the link: bytes per second that the order in use was made for (None: no order was made from a
    measurement yet), and those of the last steps."""

    in_use: float | None = None
    recent: tuple[float, ...] = ()

    @property
    def noise(self) -> float:
        """Deviation of the logarithm of a step's rate, from one step to the next, so that a change counts once."""
        if len(self.recent) < 4:
            return NOISE
        pairs = zip(self.recent, self.recent[1:], strict=False)
        # The median of the distance of two normal draws is 0.954 deviations.
        return max(NOISE, statistics.median(abs(math.log(after / before)) for before, after in pairs) / 0.954)

    @property
    def estimate(self) -> float:
        """The rate to make an order for. At least one step must be known."""
        *_, before, last = (self.recent[-1], *self.recent)
        # The link may have changed within the step before: then only the last one is sure.
        return math.sqrt(before * last) if abs(math.log(before / last)) <= FAR * self.noise else last


def step_rate(moved: Iterable[tuple[float, float]]) -> float | None:
    """Bytes per second of a step, from the (bytes, seconds) of its operations on one rank; None if nothing moved.

    An operation also waits for the rank that comes last, which says nothing of the link: so the upper quartile by
    bytes. The greatest of all ranks is the step's rate, since the last rank to arrive has not waited.
    """
    rates = sorted((size / seconds, size) for size, seconds in moved if size > 0 and seconds > 0)
    left = sum(size for _, size in rates) / 4
    for rate, size in reversed(rates):
        left -= size
        if left <= 0:
            return rate
    return None


def observe_rate(rates: LinkRate, rate: float | None) -> LinkRate:
    """With another step's rate taken in, if it has one."""
    if rate is None or not 0 < rate < math.inf:
        return rates
    return replace(rates, recent=(*rates.recent, rate)[-WINDOW:])


def is_outdated(rates: LinkRate) -> bool:
    """Whether the link is another than the order was made for; then make one for `estimate`, and say so with
    `adopt_estimate`."""
    if len(rates.recent) < 2:
        return False
    if rates.in_use is None:
        return True
    off = [math.log(rate / rates.in_use) for rate in rates.recent[-2:]]
    limit = max(CHANGE, FAR * rates.noise)
    return min(off) > limit or max(off) < -limit


def adopt_estimate(rates: LinkRate) -> LinkRate:
    """With an order in use that was made for `estimate`."""
    return replace(rates, in_use=rates.estimate)
