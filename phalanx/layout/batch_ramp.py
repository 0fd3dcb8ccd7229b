"""The global batch of each step, where it grows at the start (`train.rampup_batch`, Megatron's --rampup-batch-size).

A batch begins at `start` sequences and grows by `increment` after equal parts of the first `samples` sequences, until
it is the whole `global_batch`. The size follows from the step alone, so any ranks have the same, and a resumed run too.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSchedule:
    """`stages` of equal batches: the first step of each (from 1), its first sequence of the run (from 0), and the
    sequences of a step."""

    stages: tuple[tuple[int, int, int], ...]

    def batch_size(self, step: int) -> int:
        """Sequences of step `step`; the first is 1."""
        return self._stage(step)[2]

    def first_sequence(self, step: int) -> int:
        """How many sequences the steps before `step` have."""
        first, begin, size = self._stage(step)
        return begin + (step - first) * size

    def count_steps(self, sequences: float) -> int:
        """The smallest number of steps with at least that many sequences."""
        first, begin, size = next(stage for stage in reversed(self.stages) if stage[1] <= sequences)
        return first - 1 + max(0, -int(-(sequences - begin - 1e-6) // size))

    def _stage(self, step: int) -> tuple[int, int, int]:
        return self.stages[bisect.bisect(self.stages, step, key=lambda stage: stage[0]) - 1]


def make_batch_schedule(global_batch: int, ramp: Sequence[int] | None = None) -> BatchSchedule:
    """The schedule of a ramp of (start, increment, samples), or of equal batches."""
    if ramp is None:
        return BatchSchedule(((1, 0, global_batch),))
    start, increment, samples = ramp
    increments = (global_batch - start) // increment
    stages: list[tuple[int, int, int]] = []
    step, begun = 1, 0
    while not stages or stages[-1][2] < global_batch:
        done = min(increments, begun * increments // samples)
        size = start + done * increment
        stages.append((step, begun, size))
        if done < increments:
            ends = -(-(done + 1) * samples // increments)  # the sequence at which the batch grows
            steps = -(-(ends - begun) // size)
            step, begun = step + steps, begun + steps * size
    return BatchSchedule(tuple(stages))


def find_ramp_problem(global_batch: int, ramp: Sequence[int] | None) -> str | None:
    """The error of an invalid ramp, as a sentence; None for a valid one."""
    if ramp is None:
        return None
    start, increment, _ = ramp
    if start < global_batch and (global_batch - start) % increment == 0:
        return None
    return (
        f"train.rampup_batch {list(ramp)} does not lead to train.global_batch {global_batch} in whole increments; "
        "choose a smaller start, and an increment that divides the difference"
    )
