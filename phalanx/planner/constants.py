"""The few numbers that say how much of what is promised a training step reaches: one set for all devices and files.

Each has a unit, a range within which it is physically plausible, and a default; `fit_constants` moves them within their
ranges to what was measured. What differs between kinds of devices is on their data-sheets, not here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class CostConstants:
    """Shares are of a data-sheet's figure; seconds are of the host or a link; see RANGES for what is plausible."""

    matmul_share: float = 0.91  # of `sustained` that large products of a model's own shapes reach
    matmul_tail: float = 0.11  # waves of tiles that a product is longer by: the last one is half empty on average
    unaligned_share: float = 0.385  # of its speed that a product keeps whose rows do not begin at 16 bytes
    attention_share: float = 0.346  # of `sustained` that products inside attention reach
    memory_share: float = 0.9  # of the memory's bandwidth that a kernel reaches which only moves data
    traffic: float = 1.28  # times the counted passes over activations that element-wise kernels really make
    launch_s: float = 25e-6  # of the host for a kernel, forward or backward
    queueing: float = 1.64  # how sharply a pass takes the longer of the host's and the device's time, as a p-norm
    skew_s: float = 50e-6  # that a collective waits for the last of its ranks, for each doubling of them
    near_share: float = 0.95  # of the bandwidth between devices of a node that a large collective reaches
    far_share: float = 0.58  # of the bandwidth between nodes
    interference: float = 0.6  # of the time of a hidden collective, by which computation is longer
    step_s: float = 6.4e-3  # of the host, once a step
    jitter: float = 0.007  # of a step, for each doubling of the copies: the slowest of many is waited for
    slack: float = 0.025  # of a device's memory that fragmentation and workspaces take


# What a constant may be at all: (least, most). Beyond these it is no physics but a mistake elsewhere.
RANGES: dict[str, tuple[float, float]] = {
    "matmul_share": (0.7, 1.0),
    "matmul_tail": (0.0, 1.0),
    "unaligned_share": (0.2, 1.0),
    "attention_share": (0.2, 0.9),
    "memory_share": (0.5, 0.95),
    "traffic": (0.7, 2.0),
    "launch_s": (2e-6, 60e-6),
    "queueing": (1.5, 8.0),
    "skew_s": (0.0, 1e-3),
    "near_share": (0.3, 0.95),
    "far_share": (0.3, 0.95),
    "interference": (0.0, 0.6),
    "step_s": (1e-4, 5e-2),
    "jitter": (0.0, 0.05),
    "slack": (0.0, 0.15),
}
UNITS: dict[str, str] = {
    "matmul_tail": "waves of tiles",
    "launch_s": "seconds",
    "skew_s": "seconds",
    "step_s": "seconds",
}  # the others are ratios
DEFAULT_CONSTANTS = CostConstants()

# One measurement: seconds of its step, as a set of constants would have it, and as it was measured.
Row = tuple[Callable[[CostConstants], float], float]

SURE = 0.05  # what a good prediction is off by: the relative error that counts as much as ...
LIKELY = 0.05  # ... so much of a constant's range, away from where it was
ROUGH = 0.10  # relative error from which on a row counts by its size, not its square: one bad run must not rule
NUDGE = 1e-3  # of a range, to see which way is down
ROUNDS = 12
ENOUGH = 1e-4  # relative gain below which a round was the last


def fit_constants(rows: Sequence[Row], start: CostConstants = DEFAULT_CONSTANTS) -> CostConstants:
    """The constants within RANGES that explain `rows` best, near `start` where they say nothing. Deterministic.

    Bounded damped least squares (Levenberg 1944; Marquardt 1963) of the logarithms of predicted over measured, with
    errors above ROUGH counted by their size (Huber 1964), and a normal prior of LIKELY around `start`, so that few rows
    move only what they speak of. No row at all leaves `start` as it is.
    """
    names = [name for name in RANGES if name != "slack"]  # of memory, which no row here speaks of

    def at(point: Sequence[float]) -> CostConstants:
        values = {
            name: RANGES[name][0] + part * (RANGES[name][1] - RANGES[name][0])
            for name, part in zip(names, point, strict=True)
        }
        return replace(start, **values)

    def errors(point: Sequence[float]) -> list[float]:
        constants = at(point)
        return [math.log(predict(constants) / measured) for predict, measured in rows]

    origin = [(getattr(start, name) - RANGES[name][0]) / (RANGES[name][1] - RANGES[name][0]) for name in names]
    point, found = list(origin), errors(origin)
    stiff = (SURE / LIKELY) ** 2
    loss = _loss(found, point, origin, stiff)
    damping = 1e-3
    for _ in range(ROUNDS):
        slopes = []
        for index, part in enumerate(point):
            step = NUDGE if part + NUDGE <= 1.0 else -NUDGE
            beside = errors([*point[:index], part + step, *point[index + 1 :]])
            slopes.append([(after - before) / step for after, before in zip(beside, found, strict=True)])
        weights = [1.0 if abs(error) <= ROUGH else ROUGH / abs(error) for error in found]
        normal = [
            [sum(w * a * b for w, a, b in zip(weights, one, other, strict=True)) for other in slopes] for one in slopes
        ]
        downhill = [
            -sum(w * a * e for w, a, e in zip(weights, slope, found, strict=True)) - stiff * (part - begun)
            for slope, part, begun in zip(slopes, point, origin, strict=True)
        ]
        before = loss
        while damping < 1e6:
            tried = _bounded_step(normal, downhill, point, stiff, damping)
            there = errors(tried)
            if (less := _loss(there, tried, origin, stiff)) < loss:
                point, found, loss, damping = tried, there, less, damping / 5
                break
            damping *= 5
        if before - loss <= ENOUGH * before:
            break
    return at(point)


def _loss(errors: Sequence[float], point: Sequence[float], origin: Sequence[float], stiff: float) -> float:
    rough = sum(error**2 if abs(error) <= ROUGH else ROUGH * (2 * abs(error) - ROUGH) for error in errors)
    return rough + stiff * sum((part - begun) ** 2 for part, begun in zip(point, origin, strict=True))


def _bounded_step(
    normal: list[list[float]], downhill: list[float], point: list[float], stiff: float, damping: float
) -> list[float]:
    """One step from `point` within [0, 1]: what would leave it stays at its bound, and the rest is solved anew."""
    free = list(range(len(point)))
    tried = list(point)
    while free:
        matrix = [
            [normal[i][j] + (stiff + damping * (1.0 + normal[i][i]) if i == j else 0.0) for j in free] for i in free
        ]
        moves = _solve(matrix, [downhill[i] for i in free])
        beyond = [i for i, move in zip(free, moves, strict=True) if not 0.0 <= point[i] + move <= 1.0]
        for i, move in zip(free, moves, strict=True):
            tried[i] = min(1.0, max(0.0, point[i] + move))
        if not beyond:
            break
        free = [i for i in free if i not in beyond]
    return tried


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination of a positive definite system."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[below][column] -= factor * rows[pivot][column]
    solution = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][column] * solution[column] for column in range(index + 1, size))
        solution[index] = (rows[index][size] - known) / rows[index][index]
    return solution
