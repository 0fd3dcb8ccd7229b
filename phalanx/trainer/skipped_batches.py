"""The global batches that a run skips after rollbacks.

Batches are numbered from 0, as in a run without skips. A checkpoint's header keeps all skips, so that a resumed run is
the same run; no torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SkippedBatches:
    """Skipped `stretches` of batches [first, stop), in the order of the rollbacks; they may overlap."""

    stretches: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def from_header(header: Mapping[str, Any]) -> "SkippedBatches":
        """From a checkpoint's header."""
        listed = header.get("skips")
        if listed is not None:
            return SkippedBatches(tuple((int(first), int(stop)) for first, stop in listed))
        step, skipped = int(header["step"]), int(header.get("skipped", 0))
        return SkippedBatches(((step, step + skipped),) if skipped else ())

    def to_header(self, step: int) -> dict[str, Any]:
        """The skipped batches in the header of a checkpoint of `step`: their number before the next step, and the
        stretches."""
        return {"skipped": self.count_before(step + 1), "skips": [list(stretch) for stretch in self.stretches]}

    def count_before(self, step: int) -> int:
        """Number of batches skipped before that of `step` (the first is 1)."""
        passed = 0
        for first, stop in self._disjoint_stretches():
            if step - 1 + passed >= first:
                passed += stop - first
        return passed

    def batch_number(self, step: int) -> int:
        """The number of the batch of `step`."""
        return step - 1 + self.count_before(step)

    def with_steps(self, first: int, last: int) -> "SkippedBatches":
        """Add the batches of steps `first` to `last`, in the current numbering."""
        return SkippedBatches((*self.stretches, (self.batch_number(first), self.batch_number(last) + 1)))

    def count_recent(self, step: int, within: int) -> int:
        """Number of stretches in the last `within` batches before `step`."""
        return sum(stop > self.batch_number(step) - within for _, stop in self.stretches)

    def _disjoint_stretches(self) -> list[tuple[int, int]]:
        """The same batches as disjoint stretches in order."""
        apart: list[tuple[int, int]] = []
        for first, stop in sorted(self.stretches):
            begin = max(first, apart[-1][1]) if apart else first
            if stop > begin:
                apart.append((begin, stop))
        return apart
