"""When a step's division no longer fits how fast the ranks are: a pure function of their measured seconds.

Of each rank a line is kept, seconds of a micro-batch and of a sequence. It begins as its `Speed` foretells; a step of
another share tells which of the two was wrong, by least squares. Small differences are averaged away. A large one is
believed when it comes twice in a row, or three times where accidents are frequent, and then at once. A new division
must be worth it: more than the noise of what was measured could pretend.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.layout.balance import Division, Speed, divide, slowest_s

GAIN = 0.015  # share of a step's time that a change must save at least
MEMORY = 16  # steps after which an old measurement counts for a third
LEFT_AFTER_CHANGE = 4  # measurements that older ones count for after a change: a line is only nearly right
SETTLED = 8  # measurements after which a division that was kept has proved right
BENT = 0.04  # how far a rank's seconds may be from any line
DOUBT = 0.75  # how far either of two divisions may be from what it seems, in deviations of the most extreme rank
DOUBT_OF_CHANGE = 0.5  # part of it that is left when a device has just become slower or faster
NOISE = 0.03  # relative standard deviation that is assumed until there is one, for so many measurements:
NOISE_AT_FIRST, NOISE_MEMORY = 4, 64

# What is far off, as the logarithm of a ratio: two measurements 5 % off to either side are nearer than OUTLIER,
# half and twice the speed are farther off than OUTLIER_AT_MOST, whatever the noise.
OUTLIER, OUTLIER_AT_MOST = 0.12, 0.5
# Two in a row that are so many deviations off are believed; of three, all must be off and the middle one far off, and
# they must be within some deviations of each other.
FAR_OF_TWO = 3.0
OFF_OF_THREE, FAR_OF_THREE, FAR_OF_THREE_AT_MOST, SPREAD_OF_THREE = 1.25, 2.2, 0.45, 3.5
OUTLIER_RATE = 1e-3  # part of all measurements that are far off for nothing; assumed for so many steps:
OUTLIER_RATE_PRIOR_STEPS, OUTLIER_RATE_MEMORY = 64, 256
FALSE_CHANGE_RATE = 3e-4  # part of all steps in which two accidents in a row may be believed
# Steps in a row that differ by so much less than the noise that it must be over: four differences of two ranks' steps
# come to a fifth of it once in some hundreds of steps.
CALM, CALM_STEPS = 5.0, 3

# Deviations of the part of a rank's seconds that comes by the micro-batch: as it was foretold, behind a change of the
# device's speed, and behind another division.
SHAPE, SHAPE_AFTER_CHANGE, SHAPE_AFTER_DIVISION = 0.25, 0.1, 0.03
LEAST_SLOPE = 0.02  # part of a rank's seconds that comes by the sequence, at least


@dataclass(frozen=True)
class OutlierLimits:
    """What counts as far off in a step: logarithms of ratios, and how many in a row make a change."""

    noise: float
    needed: int

    @property
    def outlier(self) -> float:
        return min(max(OUTLIER, FAR_OF_TWO * self.noise), OUTLIER_AT_MOST)

    @property
    def threshold(self) -> float:
        """What is not so far off is averaged."""
        return self.outlier if self.needed == 2 else min(max(OUTLIER, OFF_OF_THREE * self.noise), OUTLIER_AT_MOST)

    def believes(self, odd: tuple[float, ...]) -> bool:
        """Whether these ratios in a row, all of them off, are no accident."""
        if len(odd) < self.needed:
            return False
        low, middle, high = sorted(abs(math.log(ratio)) for ratio in odd[-3:]) if self.needed > 2 else (0.0, 1.0, 0.0)
        far = min(max(OUTLIER, FAR_OF_THREE * self.noise), FAR_OF_THREE_AT_MOST)
        return middle >= far and high - low <= max(OUTLIER, SPREAD_OF_THREE * self.noise)


@dataclass(frozen=True)
class RankSpeed:
    """One rank's line, as it is believed after `seen` steps: seconds of a micro-batch and of a sequence.

    `cover` is the covariance of the two; `odd` are the last steps' seconds over what was expected, where they were far
    off to the same side; `changed`: the device has become faster or slower since the last division.
    """

    fixed_s: float
    sequence_s: float
    seen: int = 0
    covariance: tuple[float, float, float] = (0.0, 0.0, 0.0)
    outliers: tuple[float, ...] = ()
    changed: bool = False

    def predict_s(self, parts: int, pieces: int) -> float:
        return parts * self.fixed_s + pieces * self.sequence_s

    def update(self, parts: int, pieces: int, seconds: float, limits: OutlierLimits) -> tuple["RankSpeed", int]:
        """With another step's seconds taken in, and how many more accidents there have been than was thought."""
        if not self.seen:
            return self._first_estimate(parts, pieces, seconds, limits.noise), 0
        away, variance = self.measure_deviation(parts, pieces, seconds)
        if abs(away) <= limits.threshold:
            return self._dismiss_outliers(limits)._kalman_update(parts, pieces, seconds, limits.noise), 0
        pace = self if self.outliers and (self.outliers[-1] > 1) == (away > 0) else self._dismiss_outliers(limits)
        odd = (*pace.outliers, math.exp(away))
        if not limits.believes(odd):
            return replace(pace, outliers=odd), int(abs(away) > limits.outlier)
        taken_back = sum(abs(math.log(ratio)) > limits.outlier for ratio in pace.outliers)
        odd = odd[-limits.needed :]
        if abs(away) > limits.threshold + 2 * math.sqrt(variance):
            return pace._changed(parts, pieces, odd, limits.noise), -taken_back
        # After another division so much may be due to a line that was not known well.
        expected, pace = pace.predict_s(parts, pieces), replace(pace, outliers=())
        for ratio in odd:
            pace = pace._kalman_update(parts, pieces, ratio * expected, limits.noise)
        return pace, -taken_back

    def measure_deviation(self, parts: int, pieces: int, seconds: float) -> tuple[float, float]:
        """Logarithm of the ratio of a step's seconds to what was expected; and the variance of what was."""
        ff, fs, ss = self.covariance
        expected = self.predict_s(parts, pieces)
        variance = parts * parts * ff + 2 * parts * pieces * fs + pieces * pieces * ss
        return math.log(seconds / expected), max(0.0, variance) / expected**2

    def after_division(self, before: Division, rank: int, noise: float) -> "RankSpeed":
        """Behind another division than that of `before`."""
        variance = max(noise * noise / LEFT_AFTER_CHANGE, BENT**2)
        parts, pieces = _work(before, rank)
        return self._scaled(parts, pieces, 1.0, variance, SHAPE_AFTER_DIVISION, min(self.seen, LEFT_AFTER_CHANGE))

    def _scaled(self, parts: int, pieces: int, factor: float, variance: float, shape: float, seen: int) -> "RankSpeed":
        """The line times `factor`, with more doubt: `variance` of the factor, and a deviation of the part of so many
        pieces' seconds that comes by the micro-batch."""
        fixed_s, sequence_s = self.fixed_s * factor, self.sequence_s * factor
        whole = shape * (parts * fixed_s + pieces * sequence_s)
        ff, fs, ss = self.covariance
        squared = factor * factor
        cover = (
            ff * squared + variance * fixed_s * fixed_s + (whole / parts) ** 2,
            fs * squared + variance * fixed_s * sequence_s - whole * whole / (parts * pieces),
            ss * squared + variance * sequence_s * sequence_s + (whole / pieces) ** 2,
        )
        return RankSpeed(fixed_s, sequence_s, seen, cover)

    def _first_estimate(self, parts: int, pieces: int, seconds: float, noise: float) -> "RankSpeed":
        """As the first measurement says; which part comes by the micro-batch is still as it was foretold."""
        factor = seconds / self.predict_s(parts, pieces)
        return self._scaled(parts, pieces, factor, noise * noise, SHAPE, 1)

    def _kalman_update(self, parts: int, pieces: int, seconds: float, noise: float) -> "RankSpeed":
        """With a step's seconds taken in: a step of a Kalman filter whose noise and drift are parts of the whole."""
        seen = min(self.seen + 1, MEMORY)
        drifted = self._scaled(parts, pieces, 1.0, (noise / MEMORY) ** 2, 0.0, seen)
        ff, fs, ss = drifted.covariance
        expected = drifted.predict_s(parts, pieces)
        by_fixed, by_sequence = ff * parts + fs * pieces, fs * parts + ss * pieces
        gain = 1 / (parts * by_fixed + pieces * by_sequence + (noise * expected) ** 2)
        moved = gain * (seconds - expected)
        fixed_s, sequence_s = self.fixed_s + by_fixed * moved, self.sequence_s + by_sequence * moved
        whole = parts * fixed_s + pieces * sequence_s
        if not 0 <= parts * fixed_s <= (1 - LEAST_SLOPE) * whole:  # no line of a device
            fixed_s = min(max(fixed_s, 0.0), (1 - LEAST_SLOPE) * whole / parts)
            sequence_s = (whole - parts * fixed_s) / pieces
        cover = (ff - gain * by_fixed**2, fs - gain * by_fixed * by_sequence, ss - gain * by_sequence**2)
        found = RankSpeed(fixed_s, sequence_s, seen, cover, (), self.changed)
        return found._settled(parts, pieces) if self.seen < SETTLED <= seen else found

    def _settled(self, parts: int, pieces: int) -> "RankSpeed":
        """From here on more steps of the same share say nothing of which part comes by the micro-batch: what changes
        is the device."""
        ff, fs, ss = self.covariance
        whole = self.predict_s(parts, pieces)
        by_fixed = parts * (parts * ff + pieces * fs)
        variance = max(0.0, by_fixed + pieces * (parts * fs + pieces * ss))
        shape = max(0.0, parts * parts * ff - (by_fixed * by_fixed / variance if variance > 0 else 0.0))
        sure = replace(self, covariance=(0.0, 0.0, 0.0))
        cover = sure._scaled(parts, pieces, 1.0, variance / whole**2, math.sqrt(shape) / whole, self.seen).covariance
        return replace(self, covariance=cover)

    def _dismiss_outliers(self, limits: OutlierLimits) -> "RankSpeed":
        """What was odd was an accident. It draws as little as the farthest that is not off: what draws nothing would
        let a pace stay wrong where noise is great."""
        if not self.outliers:
            return self
        factor = math.exp(math.copysign(limits.threshold, self.outliers[-1] - 1) * len(self.outliers) / MEMORY)
        return replace(self, fixed_s=self.fixed_s * factor, sequence_s=self.sequence_s * factor, outliers=())

    def _changed(self, parts: int, pieces: int, odd: tuple[float, ...], noise: float) -> "RankSpeed":
        """The device has become slower or faster."""
        # It may have done so within the first of these steps: of two only the last one is sure, if they do not agree.
        alike = abs(math.log(odd[0] / odd[-1])) <= 2 * noise
        factor = sorted(odd)[1] if len(odd) > 2 else math.sqrt(odd[0] * odd[1]) if alike else odd[-1]
        sure = len(odd) if len(odd) > 2 or alike else 1
        pace = self._scaled(parts, pieces, factor, noise * noise / sure, SHAPE_AFTER_CHANGE, len(odd))
        return replace(pace, changed=True)


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
    recent_steps: tuple[
        tuple[tuple[int, int, float], ...], ...
    ] = ()  # micro-batches, sequences, seconds of the last steps

    @property
    def current_speeds(self) -> list[Speed]:
        """Each rank's speed as it is now."""
        return [
            Speed(pace.sequence_s, pace.fixed_s, speed.most)
            for speed, pace in zip(self.speeds, self.rank_speeds, strict=True)
        ]


def begin_history(
    speeds: Sequence[Speed], division: Division, part_s: float = 0.0, lockstep: bool = True
) -> SpeedHistory:
    """The history of an attempt that has not taken a step; `part_s` and `lockstep` as for `balance.divide`."""
    paces = tuple(RankSpeed(speed.fixed_s, speed.sequence_s) for speed in speeds)
    return SpeedHistory(tuple(speeds), division, part_s, lockstep, paces)


def _work(division: Division, rank: int) -> tuple[int, int]:
    """Micro-batches and sequences that a rank computes; one without a sequence costs as much as one of one."""
    parts = division.micro_batches_of(rank)
    return parts, max(division.shares[rank], parts)


def observe_step(history: SpeedHistory, division: Division, busy_s: Sequence[float]) -> SpeedHistory:
    """With the seconds taken in that each rank has worked, without waiting, on a step so divided."""
    assert len(busy_s) == len(history.speeds), (busy_s, history.speeds)
    if not history.warm:
        return replace(history, warm=True)
    told = tuple((*_work(division, number), busy) for number, busy in enumerate(busy_s))
    history = replace(history, recent_steps=(*history.recent_steps, told)[-CALM_STEPS:])
    if (calm := _calm(history)) is not None:
        return calm
    ranks = len(busy_s)
    rows = [
        (number, pace, *_work(division, number), busy)
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
    return replace(
        history,
        rank_speeds=tuple(paces),
        noise=noise,
        noise_seen=noise_seen,
        outlier_rate=min(max(accidents / (steps * ranks), OUTLIER_RATE), 0.5),
        outlier_rate_steps=min(steps, OUTLIER_RATE_MEMORY),
    )


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
        now = pace._scaled(parts, pieces, statistics.geometric_mean(each), sure, SHAPE_AFTER_CHANGE, CALM_STEPS)
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
    """Whether to divide anew after the last step that was observed, and the history with that noted."""
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
        now.predict_s(*_work(history.division, rank)) / then.predict_s(*_work(history.division, rank))
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
