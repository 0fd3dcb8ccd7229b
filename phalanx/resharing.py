"""When a step's division no longer fits how fast the ranks are: a pure function of their measured seconds.

A rank's seconds are compared with what its `Speed` foretells for its share, so that they mean the same whatever the
share is. Small differences are averaged away. A large one is believed when it comes twice in a row, and then at once. A
new division must be worth it: more than the noise of what was measured could pretend.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.balance import Division, Speed, divide, slowest_s

GAIN = 0.015  # share of a step's time that a change must save at least
MEMORY = 16  # steps after which an old measurement counts for a third
LEFT_AFTER_CHANGE = 4  # measurements that older ones count for after a change: `Speed` is only nearly right
OUTLIER = 0.12  # logarithm of a ratio: two measurements that are 5 % off to either side are nearer than that
OUTLIER_AT_MOST = 0.5  # whatever the noise: half and twice the speed are farther off
DOUBT = 0.75  # how far either of two divisions may be from what it seems, in deviations of the most extreme rank
NOISE = 0.03  # relative standard deviation that is assumed until there is one, for so many measurements:
NOISE_MEMORY = 64


@dataclass(frozen=True)
class Pace:
    """One rank's seconds over those its `Speed` foretells, averaged over `seen` steps."""

    ratio: float = 1.0
    seen: int = 0
    odd: float | None = None  # the last step's own ratio, if it was far off

    def after(self, ratio: float, outlier: float, alike: float) -> "Pace":
        """With another step's ratio taken in; limits, as logarithms, of what is far off and of what is the same."""
        if not self.seen:
            return Pace(ratio, 1)
        if abs(math.log(ratio / self.ratio)) <= outlier:
            seen = min(self.seen + 1, MEMORY)
            return Pace(self.ratio + (ratio - self.ratio) / seen, seen)
        if self.odd is None or (self.odd > self.ratio) != (ratio > self.ratio):
            return replace(self, odd=ratio)
        # Twice in a row: it has changed. It may have done so within the step before, so only the last one is sure.
        return Pace((self.odd + ratio) / 2 if abs(math.log(self.odd / ratio)) <= alike else ratio, 2)


@dataclass(frozen=True)
class Decision:
    """Another division from the next step on; seconds that a step is expected to take without and with it."""

    division: Division
    why: str
    before_s: float
    after_s: float


@dataclass(frozen=True)
class History:
    """What is known of the ranks since the attempt began; `used` are the ratios that the division was made from."""

    speeds: tuple[Speed, ...]
    division: Division
    part_s: float = 0.0
    paces: tuple[Pace, ...] = ()
    noise: float = NOISE
    warm: bool = False  # the first step of an attempt is no measure of the next
    used: tuple[float, ...] | None = None  # None: nothing was measured yet
    in_vain: tuple[tuple[float, ...], float] | None = None  # ratios, and what a step would take as divided by them

    @property
    def measured(self) -> list[Speed]:
        """Each rank's speed as it is now."""
        return [
            Speed(speed.sequence_s * pace.ratio, speed.fixed_s * pace.ratio, speed.most)
            for speed, pace in zip(self.speeds, self.paces, strict=True)
        ]


def begin(speeds: Sequence[Speed], division: Division, part_s: float = 0.0) -> History:
    """The history of an attempt that has not taken a step."""
    return History(tuple(speeds), division, part_s, paces=(Pace(),) * len(speeds))


def observe(history: History, division: Division, busy_s: Sequence[float]) -> History:
    """With the seconds taken in that each rank has worked, without waiting, on a step so divided."""
    assert len(busy_s) == len(history.speeds), (busy_s, history.speeds)
    if not history.warm:
        return replace(history, warm=True)
    outlier = min(max(OUTLIER, 3 * history.noise), OUTLIER_AT_MOST)
    paces, squares, count = [], 0.0, 0
    for pace, speed, share, busy in zip(history.paces, history.speeds, division.shares, busy_s, strict=True):
        ratio = busy / speed.seconds(share, division.parts)
        if not 0 < ratio < math.inf:  # a clock that gave nothing says nothing
            paces.append(pace)
            continue
        if pace.seen and abs(away := math.log(ratio / pace.ratio)) <= outlier:
            # The average that it is compared with is noisy, too.
            squares, count = squares + away * away * pace.seen / (pace.seen + 1), count + 1
        paces.append(pace.after(ratio, outlier, 2 * history.noise))
    noise = math.sqrt((history.noise**2 * NOISE_MEMORY + squares) / (NOISE_MEMORY + count))
    return replace(history, paces=tuple(paces), noise=noise)


def divided(history: History, division: Division) -> History:
    """With a division that was not decided here."""
    return history if division == history.division else replace(history, division=division, in_vain=None)


def decide(history: History) -> tuple[History, Decision | None]:
    """Whether to divide anew after the last step that was observed, and the history with that noted."""
    if len(history.paces) == 1 or min(pace.seen for pace in history.paces) < 2:
        return history, None
    ratios = tuple(pace.ratio for pace in history.paces)
    speeds = history.measured
    # What a step takes at least if the slowest rank only looks as slow as it does by noise.
    sure_s = _slowest_s(history, history.division, speeds, -DOUBT)
    if history.in_vain is not None:
        moved = max(abs(now / then - 1) for now, then in zip(ratios, history.in_vain[0], strict=True))
        if history.in_vain[1] * (1 - moved) > sure_s * (1 - GAIN):
            return history, None
    # No division of whole sequences is faster than one of parts of them.
    total = sum(history.division.shares)
    fluid = sum((history.part_s + s.fixed_s) / s.sequence_s for s in speeds)
    if (total + fluid) / sum(1 / s.sequence_s for s in speeds) > sure_s * (1 - GAIN):
        return history, None
    division = divide(total, speeds, history.part_s)
    after_s = slowest_s(division, speeds, history.part_s)
    # With another division it takes more than it seems, since its ranks may look faster than they are, too.
    if _slowest_s(history, division, speeds, DOUBT) > sure_s * (1 - GAIN):
        return replace(history, in_vain=(ratios, after_s)), None
    before_s = slowest_s(history.division, speeds, history.part_s)
    paces = tuple(replace(pace, seen=min(pace.seen, LEFT_AFTER_CHANGE)) for pace in history.paces)
    changed = replace(history, division=division, paces=paces, used=ratios, in_vain=None)
    return changed, Decision(division, _why(history, ratios), before_s, after_s)


def _slowest_s(history: History, division: Division, speeds: Sequence[Speed], doubt: float) -> float:
    """Seconds of a step if each rank is slower than it looks by `doubt` times what noise could make of it."""
    # The most extreme of many is farther off: the greatest of n draws lies about sqrt(2 ln n) deviations out.
    noise = doubt * (1 + math.sqrt(2 * math.log(len(speeds)))) * history.noise
    busy = (
        speed.seconds(share, division.parts) * (1 + noise / math.sqrt(pace.seen - 1))
        for speed, share, pace in zip(speeds, division.shares, history.paces, strict=True)
    )
    return division.parts * history.part_s + max(busy)


def _why(history: History, ratios: tuple[float, ...]) -> str:
    if history.used is None:
        each = [speed.sequence_s for speed in history.measured]
        fastest, slowest = each.index(min(each)), each.index(max(each))
        return (
            f"as measured while training, a sequence takes {_seconds(each[slowest])} on rank {slowest} and "
            f"{_seconds(each[fastest])} on rank {fastest}"
        )
    changes = [now / then for now, then in zip(ratios, history.used, strict=True)]
    by_size = sorted(range(len(changes)), key=lambda rank: -abs(math.log(changes[rank])))
    most = abs(math.log(changes[by_size[0]]))
    named = [rank for rank in by_size if abs(math.log(changes[rank])) > most / 2][:3]
    said = [f"rank {rank} takes {changes[rank]:.2f} times as long for a sequence as before" for rank in sorted(named)]
    return ", ".join(said)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
