"""Which global batches a run has passed over: those of stretches that went wrong and were gone back behind.

Batches are counted from 0 as a run without skips would take them. A checkpoint's header keeps them all, so that going
on from it is the same run; no torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SkippedBatches:
    """`stretches` of batches [first, stop), in the order in which they were passed over; they may overlap."""

    stretches: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def from_header(header: Mapping[str, Any]) -> "SkippedBatches":
        """Those of a checkpoint's header."""
        listed = header.get("skips")
        if listed is not None:
            return SkippedBatches(tuple((int(first), int(stop)) for first, stop in listed))
        step, skipped = int(header["step"]), int(header.get("skipped", 0))
        return SkippedBatches(((step, step + skipped),) if skipped else ())

    def to_header(self, step: int) -> dict[str, Any]:
        """What the header of a checkpoint of `step` keeps: how many the step after it has passed over, and which."""
        return {"skipped": self.count_before(step + 1), "skips": [list(stretch) for stretch in self.stretches]}

    def count_before(self, step: int) -> int:
        """How many batches are passed over before that of `step` (the first is 1)."""
        passed = 0
        for first, stop in self._disjoint_stretches():
            if step - 1 + passed >= first:
                passed += stop - first
        return passed

    def batch_number(self, step: int) -> int:
        """The number of the batch of `step`."""
        return step - 1 + self.count_before(step)

    def with_steps(self, first: int, last: int) -> "SkippedBatches":
        """Passing over the batches of steps `first` to `last` as well, as they are now."""
        return SkippedBatches((*self.stretches, (self.batch_number(first), self.batch_number(last) + 1)))

    def count_recent(self, step: int, within: int) -> int:
        """How many stretches there were in the last `within` batches before `step`."""
        return sum(stop > self.batch_number(step) - within for _, stop in self.stretches)

    def _disjoint_stretches(self) -> list[tuple[int, int]]:
        """The same batches in order, each once."""
        apart: list[tuple[int, int]] = []
        for first, stop in sorted(self.stretches):
            begin = max(first, apart[-1][1]) if apart else first
            if stop > begin:
                apart.append((begin, stop))
        return apart
