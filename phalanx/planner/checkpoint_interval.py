"""Checkpoint intervals and goodput: closed forms for random failures at a constant rate.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", 2006. All times are in seconds. A time between
failures is that of the whole job, so of n devices an n-th of one device's.

Two levels are told apart, as the running system does. A *commit* is in memory, costs little, and outlives processes; a
*checkpoint* is on a disk, costs more, and outlives nodes. Since only certain failures return the job to each level, at
first order each has the best interval that it would have alone (Moody et al., "Design, modeling, and evaluation of a
scalable multi-level checkpointing system", 2010).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx.core.errors import ConfigError

NEVER_S = 1e15  # thirty million years: rarer failures need no checkpoint
MOST_EXPONENT = 700  # whose power a float can hold
HALVINGS = 100  # of an interval in which a root lies: more than a float has bits


@dataclass(frozen=True)
class CheckpointCosts:
    """What saving costs, and what failures take back.

    `step_s` of a step; `commit_s` that a commit adds to a step, `checkpoint_s` for which a checkpoint holds training
    up; `recovery_s` from a failure to the first new step's beginning, detection included; `hard` the share of failures
    that take a node's memory with them.
    """

    step_s: float
    mtbf_s: float
    recovery_s: float
    checkpoint_s: float
    commit_s: float = 0.0
    hard: float = 1.0

    def __post_init__(self) -> None:
        assert self.step_s > 0 and self.mtbf_s > 0 and 0 <= self.hard <= 1, self
        assert min(self.recovery_s, self.checkpoint_s, self.commit_s) >= 0, self


@dataclass(frozen=True)
class CheckpointIntervals:
    """Whole steps between commits and between checkpoints (None: none needed), and the goodput that they lead to."""

    commit_steps: int
    checkpoint_steps: int | None
    goodput: float


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between savings that cost `cost_s`, at first order: sqrt(2 C M) (Young 1974).

    >>> young_s(50, 10_000)
    1000.0
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """The same to higher order (Daly 2006, equation 37); where a saving costs more than 2 M, M itself.

    >>> round(daly_s(50, 10_000), 1)
    966.9
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def useful_share(work_s: float, cost_s: float, mtbf_s: float, recovery_s: float) -> float:
    """Which share of the time goes into work that lasts: of Daly's exact wall time (2006, equation 20).

    `work_s` of work, then a saving of `cost_s`, must both pass without a failure; otherwise it is recovered for
    `recovery_s`, which may fail too, and done again: M exp(R / M) (exp((work + C) / M) - 1) seconds on average.

    >>> round(useful_share(1000, 50, 10_000, 0), 4)
    0.9033
    """
    exponent = (work_s + cost_s + recovery_s) / mtbf_s
    if exponent > MOST_EXPONENT:  # it would never end
        return 0.0
    return work_s / (mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1((work_s + cost_s) / mtbf_s))


def goodput(saving: CheckpointCosts, commit_steps: int, checkpoint_steps: int | None) -> float:
    """Which share of the time a job does work that lasts.

    Failures that only end processes (a share of 1 - `hard`) set it back to the last commit, on average by half the
    distance between two, and cost a recovery. That stretches the time in which the others may come. Exact in what
    these take back (`useful_share`), and to first order in how both kinds meet.
    """
    soft_per_s = (1 - saving.hard if checkpoint_steps is not None else 1.0) / saving.mtbf_s
    if soft_per_s * saving.recovery_s > MOST_EXPONENT:
        return 0.0
    period_s = commit_steps * saving.step_s + saving.commit_s
    stretched = period_s / (commit_steps * saving.step_s)
    stretched *= 1 + math.expm1(soft_per_s * saving.recovery_s) + soft_per_s * period_s / 2
    if checkpoint_steps is None or saving.hard == 0:
        return 1 / stretched
    work_s = checkpoint_steps * saving.step_s * stretched
    return useful_share(work_s, saving.checkpoint_s, saving.mtbf_s / saving.hard, saving.recovery_s) / stretched


def best_intervals(saving: CheckpointCosts) -> CheckpointIntervals:
    """The intervals of Young and Daly, in whole steps, one at least.

    Commits are for the failures that leave memory as it is, checkpoints for the others.
    """
    commit = 1
    if saving.hard < 1 and saving.commit_s > 0:
        commit = _steps(daly_s(saving.commit_s, saving.mtbf_s / (1 - saving.hard)), saving.step_s)
    checkpoint = None
    if saving.hard > 0 and saving.mtbf_s / saving.hard < NEVER_S:
        checkpoint = _steps(daly_s(saving.checkpoint_s, saving.mtbf_s / saving.hard), saving.step_s)
    return CheckpointIntervals(commit, checkpoint, goodput(saving, commit, checkpoint))


def _steps(seconds: float, step_s: float) -> int:
    return max(1, round(seconds / step_s))


def longest_recovery_s(
    aim: float,
    saving: CheckpointCosts,
    goodput_of: Callable[[CheckpointCosts], float] = lambda saving: best_intervals(saving).goodput,
) -> float | None:
    """The longest recovery, in place of that of `saving`, with which a job still has a goodput of `aim`, at the best
    intervals or those of `goodput_of`; None where saving alone costs more than that leaves."""
    if not 0 < aim < 1:
        raise ConfigError(f"a goodput of {aim:g} cannot be aimed at; give a share above 0 and below 1, such as 0.95")

    def reached(recovery_s: float) -> bool:
        return goodput_of(replace(saving, recovery_s=recovery_s)) >= aim

    if not reached(0.0):
        return None
    low, high = 0.0, saving.mtbf_s
    while reached(high):
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) else (low, middle)
    return low
