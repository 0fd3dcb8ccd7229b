"""Rebalancing: when the work split no longer fits the ranks' speeds. A pure function of their measured seconds.

Each rank has a line (`rank_speed.py`). A new work split must gain more than the noise of the measurements.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.layout.balance import Division, Speed, divide, slowest_s
from phalanx.layout.rank_speed import (
    LEFT_AFTER_CHANGE,
    OUTLIER_AT_MOST,
    SETTLED,
    SHAPE_AFTER_CHANGE,
    OutlierLimits,
    RankSpeed,
    count_work,
)

GAIN = 0.015  # share of a step's time that a change must save at least
DOUBT = 0.75  # how far either of two divisions may be from what it seems, in deviations of the most extreme rank
DOUBT_OF_CHANGE = 0.5  # part of it that is left when a device has just become slower or faster
NOISE = 0.03  # relative standard deviation that is assumed until there is one, for so many measurements:
NOISE_AT_FIRST, NOISE_MEMORY = 4, 64

OUTLIER_RATE = 1e-3  # part of all measurements that are far off for nothing; assumed for so many steps:
OUTLIER_RATE_PRIOR_STEPS, OUTLIER_RATE_MEMORY = 64, 256
FALSE_CHANGE_RATE = 3e-4  # part of all steps in which two accidents in a row may be believed
# Steps in a row that differ by so much less than the noise that it must be over: four differences of two ranks' steps
# come to a fifth of it once in some hundreds of steps.
CALM, CALM_STEPS = 5.0, 3
# Devices of one kind are most likely equally fast: a measured difference of at least DIFFERENT is dropped once some
# consecutive steps differ by less than a fraction of that: their mean, and each of them. (Logarithms.)
ALIKE_STEPS, DIFFERENT, ALIKE, ALIKE_LEAST, ALIKE_AT_MOST, OF_EACH_STEP = 2, 0.09, 0.25, 0.03, 0.12, 1.75
ALIKE_WAIT, ALIKE_WAIT_FACTOR = 1, 8  # steps until they may be found equal again, and by what that grows
EQUAL = 1.25  # deviations of noise within which devices of one kind count as equal, without any proof


@dataclass(frozen=True)
class RebalanceDecision:
    """Another division from the next step on; seconds that a step is expected to take without and with it."""

    division: Division
    why: str
    before_s: float
    after_s: float


@dataclass(frozen=True)
class SpeedHistory:
    """What is known of the ranks since the attempt began; `speeds_at_division` are the paces that the division was made
    from."""

    speeds: tuple[Speed, ...]
    division: Division
    part_s: float = 0.0
    lockstep: bool = True  # all ranks run as many micro-batches
    rank_speeds: tuple[RankSpeed, ...] = ()
    noise: float = NOISE
    noise_seen: float = NOISE_AT_FIRST  # measurements that it comes from
    outlier_rate: float = OUTLIER_RATE  # part of the measurements that are far off for nothing
    outlier_rate_steps: float = OUTLIER_RATE_PRIOR_STEPS  # steps
    warm: bool = False  # the first step of an attempt is no measure of the next
    speeds_at_division: tuple[RankSpeed, ...] | None = None  # None: nothing was measured yet
    rejected: tuple[tuple[RankSpeed, ...], float] | None = None  # paces, and what a step would take as divided by them
    equalized: int = 0  # how often ranks of one kind were found to be equally fast, and steps since then
    since_equalized: int = 0
    recent_steps: tuple[
        tuple[tuple[int, int, float], ...], ...
    ] = ()  # micro-batches, sequences, seconds of the last steps

    @property
    def current_speeds(self) -> list[Speed]:
        """Each rank's speed as it is now."""
        return [
            Speed(pace.sequence_s, pace.fixed_s, speed.most, speed.kind)
            for speed, pace in zip(self.speeds, self.rank_speeds, strict=True)
        ]


def begin_history(
    speeds: Sequence[Speed], division: Division, part_s: float = 0.0, lockstep: bool = True
) -> SpeedHistory:
    """The history of an attempt that has not taken a step; `part_s` and `lockstep` as for `balance.divide`."""
    paces = tuple(RankSpeed(speed.fixed_s, speed.sequence_s) for speed in speeds)
    return SpeedHistory(tuple(speeds), division, part_s, lockstep, paces)


def observe_step(history: SpeedHistory, division: Division, busy_s: Sequence[float]) -> SpeedHistory:
    """With the seconds taken in that each rank has worked, without waiting, on a step so divided."""
    assert len(busy_s) == len(history.speeds), (busy_s, history.speeds)
    if not history.warm:
        return replace(history, warm=True)
    told = tuple((*count_work(division, number), busy) for number, busy in enumerate(busy_s))
    history = replace(history, recent_steps=(*history.recent_steps, told)[-CALM_STEPS:])
    if (calm := _calm(history)) is not None:
        return calm
    ranks = len(busy_s)
    rows = [
        (number, pace, *count_work(division, number), busy)
        for number, (pace, busy) in enumerate(zip(history.rank_speeds, busy_s, strict=True))
        if 0 < busy < math.inf  # a clock that gave nothing says nothing
    ]
    noise, noise_seen = _noise(history, rows)
    needed = math.ceil(math.log(FALSE_CHANGE_RATE / ranks) / math.log(history.outlier_rate))
    limits = OutlierLimits(noise, min(max(needed, 2), 3))
    paces, accidents = list(history.rank_speeds), history.outlier_rate * history.outlier_rate_steps * ranks
    for number, pace, parts, pieces, busy in rows:
        paces[number], more = pace.update(parts, pieces, busy, limits)
        accidents += more
    steps = history.outlier_rate_steps + len(rows) / ranks
    found = replace(
        history,
        rank_speeds=tuple(paces),
        noise=noise,
        noise_seen=noise_seen,
        outlier_rate=min(max(accidents / (steps * ranks), OUTLIER_RATE), 0.5),
        outlier_rate_steps=min(steps, OUTLIER_RATE_MEMORY),
        since_equalized=history.since_equalized + 1,
    )
    kinds = [speed.kind for speed in history.speeds]
    for kind in sorted({*kinds} - {""}):
        found = _equalize(found, [rank for rank, other in enumerate(kinds) if other == kind])
    return found


def _equalize(history: SpeedHistory, ranks: Sequence[int]) -> SpeedHistory:
    """What is known where most `ranks` of one kind of device look equally fast all at once, and were thought to differ,
    as something else had slowed some of them.

    Where devices of one kind do differ, and noise hides it now and then, this comes less and less often.
    """
    last = history.recent_steps[-ALIKE_STEPS:]
    wait = ALIKE_WAIT * ALIKE_WAIT_FACTOR**history.equalized if history.equalized else 0
    if len(ranks) < 2 or len(last) < ALIKE_STEPS or history.since_equalized < wait:
        return history
    thought = [history.rank_speeds[rank] for rank in ranks]
    line = RankSpeed(_middle([pace.fixed_s for pace in thought]), _middle([pace.sequence_s for pace in thought]))
    near = min(max(ALIKE * _spread(thought), ALIKE_LEAST), ALIKE_AT_MOST) / 2
    away = [[_log(step[rank][2] / line.predict_s(*step[rank][:2])) for step in last] for rank in ranks]
    means, middles = [*map(statistics.fmean, away)], [*map(statistics.median, zip(*away, strict=True))]
    middle = statistics.median(means)
    alike = [
        rank
        for rank, mean, each in zip(ranks, means, away, strict=True)
        if abs(mean - middle) <= near
        and all(abs(one - of_all) <= OF_EACH_STEP * near for one, of_all in zip(each, middles, strict=True))
    ]
    if 2 * len(alike) <= len(ranks) or _spread([history.rank_speeds[rank] for rank in alike]) < DIFFERENT:
        return history
    speeds, factor = list(history.rank_speeds), math.exp(middle)
    for rank in alike:
        parts, pieces, _ = last[-1][rank]
        pace = line.scale(parts, pieces, factor, NOISE**2 / ALIKE_STEPS, SHAPE_AFTER_CHANGE, CALM_STEPS)
        speeds[rank] = replace(pace, changed=True)
    return replace(
        history, rank_speeds=tuple(speeds), noise=min(history.noise, NOISE), noise_seen=NOISE_AT_FIRST, rejected=None,
        equalized=history.equalized + 1, since_equalized=0,
    )  # fmt: skip


def _middle(values: Sequence[float]) -> float:
    """Their geometric mean; 0 where one is."""
    return math.exp(statistics.fmean(map(_log, values)))


def _log(value: float) -> float:
    """Its logarithm; of a clock that gave nothing one that is near to no other."""
    return math.log(value) if 0 < value < math.inf else -math.inf


def _spread(speeds: Sequence[RankSpeed]) -> float:
    each = [pace.sequence_s for pace in speeds]
    return math.log(max(each) / min(each)) if each else 0.0


def _calm(history: SpeedHistory) -> SpeedHistory | None:
    """What is known where much noise has just ended: only the last steps count. None where it has not.

    How much they differ from one to the next says so at once, whatever they differed from before.
    """
    if len(history.recent_steps) < CALM_STEPS or not all(
        0 < busy < math.inf for step in history.recent_steps for *_, busy in step
    ):
        return None
    ratios = [
        [busy / pace.predict_s(parts, pieces) for parts, pieces, busy in steps]
        for pace, steps in zip(history.rank_speeds, zip(*history.recent_steps, strict=True), strict=True)
    ]
    changes = [math.log(after / before) for each in ratios for before, after in itertools.pairwise(each)]
    noise = max(NOISE, math.sqrt(sum(change**2 for change in changes) / (2 * len(changes))))
    if noise * CALM > history.noise:
        return None
    paces, sure = [], noise**2 / CALM_STEPS
    for pace, (parts, pieces, _), each in zip(history.rank_speeds, history.recent_steps[-1], ratios, strict=True):
        now = pace.scale(parts, pieces, statistics.geometric_mean(each), sure, SHAPE_AFTER_CHANGE, CALM_STEPS)
        paces.append(replace(now, changed=True))
    return replace(
        history, rank_speeds=tuple(paces), noise=noise, noise_seen=NOISE_AT_FIRST, rejected=None, recent_steps=()
    )


def _noise(history: SpeedHistory, rows: Sequence[tuple[int, RankSpeed, int, int, float]]) -> tuple[float, float]:
    """The noise with a step's measurements taken in, and how many it comes from."""
    # What is farther off than three deviations counts as that far: so the noise grows to what it is, and a device that
    # changes adds little to it. The first steps show what it is about.
    early = history.noise_seen < min(2 * len(history.rank_speeds) + NOISE_AT_FIRST, NOISE_MEMORY)
    at_most = OUTLIER_AT_MOST if early else 3 * history.noise
    squares, count = 0.0, 0
    for _, pace, parts, pieces, busy in rows:
        away, variance = pace.measure_deviation(parts, pieces, busy) if pace.seen else (0.0, math.inf)
        if variance <= 4 * history.noise**2:
            # The line that it is compared with is noisy, too.
            squares += min(abs(away), at_most) ** 2 * pace.seen / (pace.seen + 1)
            count += 1
    seen = history.noise_seen + count
    return math.sqrt((history.noise**2 * history.noise_seen + squares) / seen), min(seen, NOISE_MEMORY)


def with_division(history: SpeedHistory, division: Division) -> SpeedHistory:
    """With a division that was not decided here."""
    return history if division == history.division else _with(history, division)


def decide(history: SpeedHistory) -> tuple[SpeedHistory, RebalanceDecision | None]:
    """Decide whether to split the work again after the last observed step; returns the decision and the updated
    history."""
    if len(history.rank_speeds) == 1 or min(pace.seen for pace in history.rank_speeds) < 2:
        return history, None
    found, decision = _decided(history)
    if (
        decision is None
        and found.speeds_at_division is None
        and min(pace.seen for pace in found.rank_speeds) >= SETTLED
    ):
        found = replace(found, speeds_at_division=found.rank_speeds)
    return found, decision


def _decided(history: SpeedHistory) -> tuple[SpeedHistory, RebalanceDecision | None]:
    if (equal := _divide_equally(history)) is not None:
        return equal
    speeds = history.current_speeds
    # What a step takes at least if the slowest rank only looks as slow as it does by noise.
    sure_s = _slowest_s(history, history.division, speeds, -DOUBT)
    if history.rejected is not None:
        moved = max(
            max(then.sequence_s - now.sequence_s, 0.0) / then.sequence_s
            + max(then.fixed_s - now.fixed_s, 0.0) / (then.fixed_s or 1.0)
            for now, then in zip(history.rank_speeds, history.rejected[0], strict=True)
        )
        if history.rejected[1] * (1 - moved) > sure_s * (1 - GAIN):
            return history, None
    # No division of whole sequences is faster than one of parts of them.
    total = sum(history.division.shares)
    fluid = sum((history.part_s + s.fixed_s) / s.sequence_s for s in speeds)
    if (total + fluid) / sum(1 / s.sequence_s for s in speeds) > sure_s * (1 - GAIN):
        return history, None
    division = divide(total, speeds, history.part_s, history.lockstep)
    after_s = slowest_s(division, speeds, history.part_s)
    # With another division it takes more than it seems, since its ranks may look faster than they are, too.
    if _slowest_s(history, division, speeds, DOUBT) > sure_s * (1 - GAIN):
        return replace(history, rejected=(history.rank_speeds, after_s)), None
    before_s = slowest_s(history.division, speeds, history.part_s)
    decision = RebalanceDecision(division, _why(history), before_s, after_s)
    return replace(_with(history, division), speeds_at_division=history.rank_speeds), decision


def _divide_equally(history: SpeedHistory) -> tuple[SpeedHistory, RebalanceDecision] | None:
    """Equal shares for ranks of one kind of device that have unequal ones and differ by no more than noise; None where
    there are no such ranks."""
    speeds, shares = list(history.rank_speeds), history.division.shares
    for kind in {speed.kind for speed in history.speeds} - {""}:
        ranks = [rank for rank, speed in enumerate(history.speeds) if speed.kind == kind]
        alike, each_share = [speeds[rank] for rank in ranks], [shares[rank] for rank in ranks]
        if max(each_share) - min(each_share) < 2:
            continue
        each = [_log(speed.predict_s(history.division.parts, statistics.fmean(each_share))) for speed in alike]
        limits = [EQUAL * history.noise / math.sqrt(speed.seen - 1) for speed in alike]
        middle = statistics.fmean(each)
        if all(abs(one - middle) <= limit for one, limit in zip(each, limits, strict=True)):
            fixed_s = _middle([speed.fixed_s for speed in alike])
            sequence_s = _middle([speed.sequence_s for speed in alike])
            for rank in ranks:
                speeds[rank] = replace(speeds[rank], fixed_s=fixed_s, sequence_s=sequence_s)
    equal = replace(history, rank_speeds=tuple(speeds))
    if equal == history:
        return None
    division = divide(sum(shares), equal.current_speeds, history.part_s, history.lockstep)
    before_s, after_s = (slowest_s(each, equal.current_speeds, history.part_s) for each in (history.division, division))
    if after_s > before_s * (1 - GAIN):
        return None
    decision = RebalanceDecision(division, _why(history), before_s, after_s)
    return replace(_with(equal, division), speeds_at_division=history.rank_speeds), decision


def _with(history: SpeedHistory, division: Division) -> SpeedHistory:
    """With another division from the next step on."""
    paces = tuple(
        pace.after_division(history.division, rank, history.noise) if pace.seen else pace
        for rank, pace in enumerate(history.rank_speeds)
    )
    return replace(history, division=division, rank_speeds=paces, rejected=None)


def _slowest_s(history: SpeedHistory, division: Division, speeds: Sequence[Speed], doubt: float) -> float:
    """Seconds of a step if each rank is slower than it looks by `doubt` times what noise could make of it."""
    # The most extreme of many is farther off: the greatest of n draws lies about sqrt(2 ln n) deviations out.
    if any(pace.changed and pace.seen <= LEFT_AFTER_CHANGE for pace in history.rank_speeds):
        doubt *= DOUBT_OF_CHANGE
    noise = doubt * (1 + math.sqrt(2 * math.log(len(speeds)))) * history.noise
    busy = (
        speed.seconds(share, division.micro_batches_of(rank)) * (1 + noise / math.sqrt(pace.seen - 1))
        for rank, (speed, share, pace) in enumerate(zip(speeds, division.shares, history.rank_speeds, strict=True))
    )
    return division.parts * history.part_s + max(busy)


def _why(history: SpeedHistory) -> str:
    if history.speeds_at_division is None:
        each = [pace.sequence_s for pace in history.rank_speeds]
        fastest, slowest = each.index(min(each)), each.index(max(each))
        return (
            f"as measured while training, a sequence takes {_seconds(each[slowest])} on rank {slowest} and "
            f"{_seconds(each[fastest])} on rank {fastest}"
        )
    changes = [
        now.predict_s(*count_work(history.division, rank)) / then.predict_s(*count_work(history.division, rank))
        for rank, (now, then) in enumerate(zip(history.rank_speeds, history.speeds_at_division, strict=True))
    ]
    by_size = sorted(range(len(changes)), key=lambda rank: -abs(math.log(changes[rank])))
    most = abs(math.log(changes[by_size[0]]))
    named = [rank for rank in by_size if abs(math.log(changes[rank])) > most / 2][:3]
    said = [
        f"rank {rank} takes {changes[rank]:.2f} times as long for its share as "
        f"{'before' if history.rank_speeds[rank].changed else 'expected'}"
        for rank in sorted(named)
    ]
    return ", ".join(said)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
