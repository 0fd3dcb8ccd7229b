"""Index of a run whose records grow: follows `metrics.jsonl` and `events.jsonl`, and knows where each step's line is.

Of each step it keeps 28 bytes: its number, attempt, duration, loss, and the offset of its line. Records themselves are
read from the file when they are shown, so a run of a million steps takes 28 MB and any range of it can be read at once.
`split_attempts` (core/records.py) is the plain twin of the division into steps that count and replayed ones.
"""

import math
import os
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import parse_object
from phalanx.core.records import split_attempts
from phalanx.core.renamed import rename_event
from phalanx.core.run_paths import RunPaths
from phalanx.report import formats
from phalanx.report.history import Record, RunFacts, RunHistory, StepTotals, make_run_history

CHUNK_BYTES = 1 << 20
RECENT = 20  # the newest records, held whole
LONGEST_LINE = 1 << 16  # read at once for one record; a longer line is read to its end


class LineTail:
    """Reader of the complete lines that are appended to a file, a part at a time. The file may be missing, and may be
    replaced by another one, which is then read from its start."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self._inode = path, 0, 0
        self.at_end = False  # of the file, when it was read last

    def read(self, most_bytes: int = CHUNK_BYTES) -> tuple[list[tuple[int, bytes]], bool]:
        """New lines with their offsets, and whether the file is another one than before."""
        try:
            there = os.stat(self.path)
            if (there.st_ino, there.st_size) == (self._inode, self.offset):
                self.at_end = True
                return [], False
            with open(self.path, "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                replaced = found.st_size < self.offset or (self._inode not in (0, found.st_ino))
                self._inode = found.st_ino
                if replaced:
                    self.offset = 0
                data = os.pread(file.fileno(), most_bytes, self.offset) if found.st_size > self.offset else b""
        except OSError:
            return [], False
        self.at_end = len(data) < most_bytes
        end = data.rfind(b"\n") + 1
        if not end and len(data) == most_bytes:  # one line as long as that is no record
            self.offset += len(data)
        lines, at = [], self.offset
        for line in data[:end].splitlines(keepends=True):
            lines.append((at, line))
            at += len(line)
        self.offset += end
        return lines, replaced

    @property
    def size(self) -> int:
        """Size of the file in bytes; 0 if it is missing."""
        try:
            return os.stat(self.path).st_size
        except OSError:
            return 0


class StepColumns:
    """Columns of the steps that count, one number each; `truncate` takes steps back."""

    def __init__(self) -> None:
        self.step, self.attempt = array("i"), array("i")
        self.loss, self.step_s = array("f"), array("d")  # not a number where the record has none
        self.offset = array("q")

    def __len__(self) -> int:
        return len(self.step)

    def append(self, step: int, attempt: int, loss: float, step_s: float, offset: int) -> None:
        self.step.append(step)
        self.attempt.append(attempt)
        self.loss.append(loss)
        self.step_s.append(step_s)
        self.offset.append(offset)

    def truncate(self, count: int) -> None:
        for column in (self.step, self.attempt, self.loss, self.step_s, self.offset):
            del column[count:]


class RunIndex:
    """Index of one run folder. `poll` reads what was appended; `history` makes a RunHistory of some records, exact in
    its totals, its incidents and its last steps."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.version = 0  # grows with each change
        self.events: list[Record] = []
        self._metrics, self._event_lines = LineTail(paths.metrics), LineTail(paths.events)
        self._facts: tuple[object, RunFacts] | None = None
        self._clear_steps()

    def _clear_steps(self) -> None:
        self.columns = StepColumns()
        self.recent: deque[Record] = deque(maxlen=RECENT)
        self.lost_offsets = array("q")
        self.peak_memory_bytes = 0.0
        self._lost: Counter[int] = Counter()
        self._counted_s, self._newest = 0.0, 0
        self._pins: dict[int, Record] = {}  # by offset: first and last records of attempts, and before each event
        self._last: tuple[int, Record] | None = None
        self._pinned_events = 0

    @property
    def complete(self) -> bool:
        """Whether all steps that are in the file were read."""
        return self._metrics.at_end or not self._metrics.size

    @property
    def progress(self) -> float:
        """The part of the steps' file that was read, 0 to 1."""
        return min(1.0, self._metrics.offset / max(1, self._metrics.size))

    def poll(self, most_bytes: int = CHUNK_BYTES) -> bool:
        """Read appended lines, at most so many bytes of the steps; returns whether there were any."""
        before, offset = self.version, self._metrics.offset
        lines, replaced = self._event_lines.read(64 * CHUNK_BYTES)
        if replaced:
            self.events, self._pinned_events = [], 0
        for _, line in lines:
            if (event := parse_object(line)) is not None:
                self.events.append(rename_event(event))
        steps, new_file = self._metrics.read(most_bytes)
        if new_file:
            self._clear_steps()
        for at, line in steps:
            if (record := parse_object(line)) is not None:
                self._add(at, record)
        self.version += bool(lines or replaced or new_file or self._metrics.offset != offset)
        return self.version != before

    def _add(self, offset: int, record: Record) -> None:
        step, attempt = record.get("step"), record.get("attempt", 1)
        if not isinstance(step, int) or not isinstance(attempt, int) or not 0 <= step < 1 << 31:
            return
        self._pin_neighbours(offset, record, attempt)
        memory = formats.finite_number(record, "memory_bytes")
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory or 0.0)
        columns = self.columns
        if attempt < self._newest:
            self._lost[attempt] += 1
            self.lost_offsets.append(offset)
            return
        self._newest = attempt
        if len(columns) and columns.step[-1] >= step:
            first = bisect_left(columns.step, step)
            self._lost.update(columns.attempt[first:])
            self._counted_s -= sum(value for value in columns.step_s[first:] if value == value)
            self.lost_offsets.extend(columns.offset[first:])
            columns.truncate(first)
            self.recent = deque((old for old in self.recent if old["step"] < step), maxlen=RECENT)
        loss, step_s = formats.finite_number(record, "loss"), formats.finite_number(record, "step_s")
        self._counted_s += step_s or 0.0
        columns.append(
            step, attempt, math.nan if loss is None else loss, math.nan if step_s is None else step_s, offset
        )
        self.recent.append(record)

    def _pin_neighbours(self, offset: int, record: Record, attempt: int) -> None:
        """Keep the numbers of records that incidents are told by."""
        last, self._last = self._last, (offset, record)
        changed = last is None or last[1].get("attempt", 1) != attempt
        moment = formats.finite_number(record, "time") or 0.0
        passed = False
        while self._pinned_events < len(self.events):
            event = self.events[self._pinned_events]
            number = event.get("attempt")
            if type(number) is int and (number, formats.finite_number(event, "time") or 0.0) > (attempt, moment):
                break
            self._pinned_events, passed = self._pinned_events + 1, True
        if last is not None and (changed or passed):
            self._pin(*last)
        if changed:
            self._pin(offset, record)

    def _pin(self, offset: int, record: Record) -> None:
        self._pins[offset] = {key: record[key] for key in ("step", "attempt", "time") if key in record}

    # -------------------------------------------------------------------------------------------------------- reading

    def read_records(self, offsets: Sequence[int]) -> list[Record]:
        """The records at these offsets; one that has gone is left out."""
        found = []
        try:
            with open(self.paths.metrics, "rb", buffering=0) as file:
                for offset in offsets:
                    line = os.pread(file.fileno(), 2048, offset)
                    if b"\n" not in line:
                        line = os.pread(file.fileno(), LONGEST_LINE, offset)
                    if (record := parse_object(line.partition(b"\n")[0])) is not None and "step" in record:
                        found.append(record)
        except OSError:
            return found
        return found

    def read_range(self, first: int, last: int, most: int) -> list[Record]:
        """Records of steps `first` to `last`, evenly spaced where there are more than `most` of them."""
        start, stop = bisect_left(self.columns.step, first), bisect_left(self.columns.step, last + 1)
        stride = max(1, -(-(stop - start) // most))
        return self.read_records(self.columns.offset[start:stop:stride])

    def sample(self, most: int) -> tuple[list[Record], list[Record]]:
        """Records evenly spaced in a file that was not read yet, and its last ones, as steps that count and lost."""
        size, found = self._metrics.size, []
        try:
            with open(self.paths.metrics, "rb", buffering=0) as file:
                for place in range(most):
                    part = os.pread(file.fileno(), 4096, size * place // most)
                    line = part.split(b"\n", 2)[0 if place == 0 else 1 :][:1]
                    if line and (record := parse_object(line[0])) is not None:
                        found.append(record)
        except OSError:
            found = []
        recent = self._read_last()
        last = {(record.get("attempt"), record.get("step")) for record in recent}
        return split_attempts(
            [record for record in found if (record.get("attempt"), record.get("step")) not in last] + recent
        )

    def _read_last(self) -> list[Record]:
        """The last records of the file, whatever was read of it."""
        try:
            with open(self.paths.metrics, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                lines = os.pread(file.fileno(), LONGEST_LINE, max(0, size - LONGEST_LINE)).splitlines()
        except OSError:
            return []
        return [record for line in lines[-RECENT:] if (record := parse_object(line)) is not None]

    def facts(self) -> RunFacts:
        """The run's configuration and devices, read again when they or the starts of the run change."""
        stamps = tuple(_stamp(path) for path in (self.paths.config, self.paths.versions, self.paths.hardware))
        starts = sum(event.get("kind") == "run_started" for event in self.events)
        if self._facts is None or self._facts[0] != (stamps, starts):
            self._facts = (stamps, starts), RunFacts(self.paths)
        return self._facts[1]

    def history(self, counted: Iterable[Record] = (), lost: Iterable[Record] = ()) -> RunHistory:
        """History of the run with these records, the newest ones, and those that its events and incidents refer to.

        `counted_steps` and `lost_steps` are a part of the run's; totals and incidents are exact once `complete`.
        """
        if not self.complete:
            recent = self._read_last()
            kept, gone = split_attempts([*counted, *recent])
            return make_run_history(self.facts(), kept, [*lost, *gone], self.events, StepTotals())
        columns, gone = self.columns, list(lost)
        known = {record["step"]: record for record in [*counted, *self.recent]}
        gone_keys = {(record.get("attempt"), record["step"]) for record in gone}
        for offset, pin in [*self._pins.items(), *([self._last] if self._last else [])]:
            place = bisect_left(columns.step, pin["step"])
            if place < len(columns) and columns.offset[place] == offset:
                known.setdefault(pin["step"], pin)
            elif (pin.get("attempt"), pin["step"]) not in gone_keys:
                gone.append(pin)
        kept = [known[step] for step in sorted(known)]
        gone.sort(key=lambda record: (record.get("attempt", 1), record["step"]))
        totals = StepTotals(max(0.0, self._counted_s), dict(self._lost))
        return make_run_history(self.facts(), kept, gone, self.events, totals)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def find_runs(places: Iterable[Path]) -> list[Path]:
    """Run folders among these folders and their children. Raises ConfigError for a folder that is missing."""
    found: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise ConfigError(f"no folder {place}; give a run folder, or a folder of runs")
        if _is_run(place):
            found[place.resolve()] = None
            continue
        for child in sorted(place.iterdir()):
            if _is_run(child):
                found[child.resolve()] = None
    return list(found)


def _is_run(folder: Path) -> bool:
    paths = RunPaths(folder)
    try:
        return paths.events.is_file() or paths.metrics.is_file() or paths.launched.is_file()
    except OSError:
        return False
