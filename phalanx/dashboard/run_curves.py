"""Downsampled curves of one run, updated as it grows: the extremes of each stretch of steps.

`history.thin` is the plain twin of the choice of points. For any number of steps at most POINTS are kept, in stretches
of a power of two steps; a new step changes only the last stretch, so the cost of an update is proportional to its new
points.
"""

from array import array
from collections.abc import Sequence

from phalanx.report import devices
from phalanx.report.charts import record_columns
from phalanx.report.history import Record, RunHistory, shift_clock
from phalanx.report.run_index import RunIndex

POINTS = 1000
LOST_POINTS = 500


def choose_points(losses: Sequence[float], times: Sequence[float]) -> set[int]:
    """Positions of the extremes of loss and of step time; NaN are ignored."""
    chosen = set()
    for values in (losses, times):
        known = values if sum(values) == sum(values) else [value for value in values if value == value]
        if known:
            chosen |= {values.index(min(known)), values.index(max(known))}
    return chosen


Block = tuple[int, Sequence[int]]  # of a complete stretch: offset of its last step, and of those that are drawn


class CurvePoints:
    """Which steps of a run are drawn; kept also while no page shows the run, as a long one takes a while to look
    through."""

    def __init__(self, index: RunIndex) -> None:
        self._index, self._stretch, self._blocks = index, 1, list[Block]()
        self._rest: tuple[int, Sequence[int]] = (-1, ())  # version of the index, and the steps after the stretches

    def update(self) -> tuple[list[Block], Sequence[int]]:
        """The complete stretches, the same objects as before where nothing changed, and the offsets that are drawn of
        the steps after them."""
        if self._rest[0] == self._index.version:
            return self._blocks, self._rest[1]
        columns, count, stretch = self._index.columns, len(self._index.columns), 1
        while count * 4 > POINTS * stretch and count > POINTS:
            stretch *= 2
        if stretch != self._stretch:
            self._stretch, self._blocks = stretch, []
        blocks = self._blocks
        while blocks and (len(blocks) * stretch > count or columns.offset[len(blocks) * stretch - 1] != blocks[-1][0]):
            blocks.pop()
        for start in range(len(blocks) * stretch, count - stretch + 1, stretch):
            blocks.append((columns.offset[start + stretch - 1], self._choose(start, start + stretch, count)))
        self._rest = self._index.version, self._choose(len(blocks) * stretch, count, count)
        return blocks, self._rest[1]

    def _choose(self, start: int, stop: int, count: int) -> Sequence[int]:
        """Offsets of the records to draw between two steps."""
        columns = self._index.columns
        if self._stretch <= 4:
            return columns.offset[start:stop]
        chosen = {start + at for at in choose_points(columns.loss[start:stop], columns.step_s[start:stop])}
        chosen |= {0} if start == 0 else set()
        chosen |= {count - 1} if start < stop == count else set()
        return array("q", [columns.offset[place] for place in sorted(chosen)])


class RunCurves:
    """Columns of a run's curves. `update` returns the first row that changed; earlier rows are unchanged, unless
    `base` is another number than before."""

    def __init__(self, index: RunIndex, points: CurvePoints) -> None:
        self.index, self._points = index, points
        self.base = 0  # increases when all rows are recomputed
        self.columns: Record = {}
        self.records: list[Record] = []
        self._lost: tuple[int, list[Record]] = (0, [])
        self._held: list[tuple[Block, int]] = []  # of complete stretches: which, and rows until its end
        self._frame: object = None
        self._world, self._began, self._moves = 1, 0.0, dict[int, float]()
        self._sampled = False

    def update(self) -> tuple[RunHistory, int]:
        """Update the columns; returns a history of the run's newest records, and the first new row."""
        first = self._update_records()
        run = self.index.history()
        self._world = max(self._world, devices.world_size_of(self.records[first:]))
        frame = (self._world, run.began, tuple(run.clock_moves.items()))
        if frame != self._frame:
            self._frame, first = frame, 0
        if not first:
            self.base += 1
        self._began, self._moves = run.began, run.clock_moves
        for name, values in self.make_columns(self.records[first:]).items():
            self.columns[name] = [*self.columns.get(name, [])[:first], *values]
        return run, first

    def history(self) -> RunHistory:
        """A history of the run with the records that are drawn."""
        return self.index.history(self.records, self._read_lost())

    def make_columns(self, records: Sequence[Record]) -> Record:
        """Columns of records, with times since the run began and as many ranks as in all of them."""
        return record_columns([shift_clock(record, self._moves) for record in records], self._began, self._world)

    def list_lost_columns(self) -> Record:
        """Columns of the newest replayed steps."""
        return self.make_columns(self._read_lost())

    def _update_records(self) -> int:
        if not self.index.complete:
            if not self._sampled and not self.records:
                self._sampled = True
                self.records, lost = self.index.sample(POINTS)
                self._lost = (-1, lost[-LOST_POINTS:])
                return 0
            return len(self.records)
        blocks, rest = self._points.update()
        held = self._held
        while held and (len(held) > len(blocks) or blocks[len(held) - 1] is not held[-1][0]):
            held.pop()
        first = held[-1][1] if held else 0
        del self.records[first:]
        for block in blocks[len(held) :]:
            self.records += self.index.read_records(block[1])
            held.append((block, len(self.records)))
        self.records += self.index.read_records(rest)
        return first

    def _read_lost(self) -> list[Record]:
        offsets = self.index.lost_offsets
        if self.index.complete and len(offsets) != self._lost[0]:
            self._lost = len(offsets), self.index.read_records(offsets[-LOST_POINTS:])
        return self._lost[1]
