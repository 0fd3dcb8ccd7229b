"""Which global batches a run has passed over: those of stretches that went wrong and were gone back behind.

Batches are counted from 0 as a run without skips would take them. A checkpoint's header keeps them all, so that going
on from it is the same run; no torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Skips:
    """`stretches` of batches [first, stop), in the order in which they were passed over; they may overlap."""

    stretches: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(header: Mapping[str, Any]) -> "Skips":
        """Those of a checkpoint's header."""
        listed = header.get("skips")
        if listed is not None:
            return Skips(tuple((int(first), int(stop)) for first, stop in listed))
        step, skipped = int(header["step"]), int(header.get("skipped", 0))
        return Skips(((step, step + skipped),) if skipped else ())

    def header(self, step: int) -> dict[str, Any]:
        """What the header of a checkpoint of `step` keeps: how many the step after it has passed over, and which."""
        return {"skipped": self.before(step + 1), "skips": [list(stretch) for stretch in self.stretches]}

    def before(self, step: int) -> int:
        """How many batches are passed over before that of `step` (the first is 1)."""
        passed = 0
        for first, stop in self._apart():
            if step - 1 + passed >= first:
                passed += stop - first
        return passed

    def batch(self, step: int) -> int:
        """The number of the batch of `step`."""
        return step - 1 + self.before(step)

    def with_steps(self, first: int, last: int) -> "Skips":
        """Passing over the batches of steps `first` to `last` as well, as they are now."""
        return Skips((*self.stretches, (self.batch(first), self.batch(last) + 1)))

    def recent(self, step: int, within: int) -> int:
        """How many stretches there were in the last `within` batches before `step`."""
        return sum(stop > self.batch(step) - within for _, stop in self.stretches)

    def _apart(self) -> list[tuple[int, int]]:
        """The same batches in order, each once."""
        apart: list[tuple[int, int]] = []
        for first, stop in sorted(self.stretches):
            begin = max(first, apart[-1][1]) if apart else first
            if stop > begin:
                apart.append((begin, stop))
        return apart
