"""The speed of a rank: a line through its measured seconds, with outliers and changes detected.

Each rank has a line: seconds of a micro-batch and of a sequence. It starts with the measured `Speed`; steps with other
shares correct both numbers by least squares. Small differences are averaged. A large one counts as a change when it
comes twice in a row, or three times where outliers are frequent.
"""

import math
from dataclasses import dataclass, replace

from phalanx.layout.balance import Division

MEMORY = 16  # steps after which an old measurement counts for a third
LEFT_AFTER_CHANGE = 4  # measurements that older ones count for after a change: a line is only nearly right
SETTLED = 8  # measurements after which a division that was kept has proved right
BENT = 0.04  # how far a rank's seconds may be from any line

# What is far off, as the logarithm of a ratio: two measurements 5 % off to either side are nearer than OUTLIER,
# half and twice the speed are farther off than OUTLIER_AT_MOST, whatever the noise.
OUTLIER, OUTLIER_AT_MOST = 0.12, 0.5
# Two in a row that are so many deviations off are believed; of three, all must be off and the middle one far off, and
# they must be within some deviations of each other.
FAR_OF_TWO = 3.0
OFF_OF_THREE, FAR_OF_THREE, FAR_OF_THREE_AT_MOST, SPREAD_OF_THREE = 1.25, 2.2, 0.45, 3.5

# Deviations of the micro-batch's part of a rank's seconds: as predicted, behind a change of the
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

    def predict_s(self, parts: int, pieces: float) -> float:
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
        parts, pieces = count_work(before, rank)
        return self.scale(parts, pieces, 1.0, variance, SHAPE_AFTER_DIVISION, min(self.seen, LEFT_AFTER_CHANGE))

    def scale(self, parts: int, pieces: int, factor: float, variance: float, shape: float, seen: int) -> "RankSpeed":
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
        """Set the line to the first measurement; the part of a micro-batch is still the predicted one."""
        factor = seconds / self.predict_s(parts, pieces)
        return self.scale(parts, pieces, factor, noise * noise, SHAPE, 1)

    def _kalman_update(self, parts: int, pieces: int, seconds: float, noise: float) -> "RankSpeed":
        """With a step's seconds taken in: a step of a Kalman filter whose noise and drift are parts of the whole."""
        seen = min(self.seen + 1, MEMORY)
        drifted = self.scale(parts, pieces, 1.0, (noise / MEMORY) ** 2, 0.0, seen)
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
        cover = sure.scale(parts, pieces, 1.0, variance / whole**2, math.sqrt(shape) / whole, self.seen).covariance
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
        pace = self.scale(parts, pieces, factor, noise * noise / sure, SHAPE_AFTER_CHANGE, len(odd))
        return replace(pace, changed=True)


def count_work(division: Division, rank: int) -> tuple[int, int]:
    """Micro-batches and sequences that a rank computes; one without a sequence costs as much as one of one."""
    parts = division.micro_batches_of(rank)
    return parts, max(division.shares[rank], parts)
