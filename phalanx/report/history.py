"""History of a run from its records: counted and lost steps, events by step, and the state of the run."""

import functools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from phalanx.core import format_versions
from phalanx.core.errors import RunError
from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_events, split_attempts
from phalanx.core.run_paths import RunPaths
from phalanx.report import devices, formats

Record = dict[str, Any]

POINTS = 2000  # longer curves are thinned; the extremes of every stretch stay
ALIVE_S = 60.0  # a run with a newer line counts as running
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is there


@dataclass
class RunHistory:
    """Records of a run: `counted_steps` are the steps that count, in order; `lost_steps` were replayed. If the clock
    was set back between two attempts, the times of the later one are shifted to follow those of the earlier one.

    A live display holds some of the records only (`run_index.py`); `totals` are of all.
    """

    facts: "RunFacts"
    counted_steps: list[Record]
    lost_steps: list[Record]
    events: list[Record]
    began: float  # seconds since the epoch, of the first line
    ended: float  # of the last line
    last_line: float  # the same by the clock of that time, not shifted
    totals: "StepTotals"
    clock_moves: dict[int, float]  # seconds that the times of an attempt were shifted by, where they were


@dataclass(frozen=True)
class StepTotals:
    """Totals over all step records: seconds of the steps that count, and the number of replayed steps by attempt."""

    counted_s: float = 0.0
    lost_by_attempt: Mapping[int, int] = field(default_factory=dict)

    @property
    def lost_steps(self) -> int:
        return sum(self.lost_by_attempt.values())


def total_steps(kept: Iterable[Record], lost: Iterable[Record]) -> StepTotals:
    """Totals of records that are all there."""
    counted_s = sum(formats.finite_number(record, "step_s") or 0.0 for record in kept)
    return StepTotals(counted_s, Counter(_attempt(record) for record in lost))


class RunFacts:
    """What a run folder says besides steps and events, read when it is asked for: the configuration, the versions and
    the measured devices; empty where they are missing. Raises RunError if a later release wrote them."""

    def __init__(self, paths: RunPaths) -> None:
        format_versions.check_run_version(paths)
        self._paths = paths

    @property
    def name(self) -> str:
        return self._paths.name

    @functools.cached_property
    def config_text(self) -> str:
        file = self._paths.config
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    @functools.cached_property
    def config(self) -> Record:
        return _parsed(self.config_text)

    @functools.cached_property
    def versions(self) -> Record:
        return next(iter(_json_objects(self._paths.versions)), {})

    @functools.cached_property
    def device_names(self) -> dict[int, str]:
        """By rank, of those that were measured."""
        return devices.read_device_names(self._paths)

    @functools.cached_property
    def device_lines(self) -> dict[int, devices.Line]:
        return devices.read_device_lines(self._paths)


def read_run_history(paths: RunPaths) -> RunHistory:
    """Read the records of a run folder. Raises RunError if it has neither metrics nor events, or if a later release
    wrote it."""
    if not paths.metrics.exists() and not paths.events.exists():
        raise RunError(
            f"{paths.display_name} has neither {paths.metrics.name} nor {paths.events.name}; give the folder of a run"
        )
    facts = RunFacts(paths)
    kept, lost = split_attempts(read_lines(paths.metrics))
    return make_run_history(facts, kept, lost, read_events(paths.events), total_steps(kept, lost))


def make_run_history(
    facts: RunFacts, kept: list[Record], lost: list[Record], events: Iterable[Record], totals: StepTotals
) -> RunHistory:
    """The history of a run from its records, with the clock of each attempt shifted where it was set back."""
    # In order of attempt and line, not of time: a clock may be set back.
    events = sorted(_with_attempts(events), key=lambda event: event["attempt"])
    raw = [
        (_attempt(record), moment)
        for record in [*kept, *lost, *events]
        if (moment := formats.finite_number(record, "time")) is not None
    ]
    late = {attempt: move for attempt, move in _moves(raw).items() if move}
    if late:
        kept, lost, events = ([shift_clock(record, late) for record in records] for records in (kept, lost, events))
    times = [moment for record in [*kept, *lost, *events] if (moment := formats.finite_number(record, "time"))]
    return RunHistory(
        facts=facts,
        counted_steps=kept,
        lost_steps=lost,
        events=events,
        began=min(times, default=0.0),
        ended=max(times, default=0.0),
        last_line=max(raw, default=(0, 0.0))[1],
        totals=totals,
        clock_moves=late,
    )


def _attempt(record: Record) -> int:
    attempt = record.get("attempt")
    return attempt if type(attempt) is int else 1


def _with_attempts(events: Iterable[Record]) -> Iterator[Record]:
    """Events in the order of the file; an event without an attempt belongs to the newest attempt before it."""
    newest = 1
    for event in events:
        if type(event.get("attempt")) is int:
            newest = max(newest, event["attempt"])
            yield event
        else:
            yield event | {"attempt": newest}


def _moves(moments: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Clock offsets by attempt: seconds to add to its times, so that it does not begin before earlier attempts
    ended."""
    by_attempt: dict[int, list[float]] = {}
    for attempt, moment in moments:
        by_attempt.setdefault(attempt, []).append(moment)
    moves: dict[int, float] = {}
    end = -math.inf
    for attempt in sorted(by_attempt):
        first, last = min(by_attempt[attempt]), max(by_attempt[attempt])
        moves[attempt] = max(0.0, end - first)
        end = max(end, last + moves[attempt])
    return moves


def shift_clock(record: Record, moves: Mapping[int, float]) -> Record:
    """A record with its time shifted by the offset of its attempt."""
    moment, move = formats.finite_number(record, "time"), moves.get(_attempt(record), 0.0)
    return record if moment is None or not move else record | {"time": moment + move}


def events_with_steps(run: RunHistory) -> list[tuple[Record, int | None]]:
    """Every event with the last step recorded before it (None before the first)."""
    timed = sorted((*_when(record), record["step"]) for record in [*run.counted_steps, *run.lost_steps])
    found: list[tuple[Record, int | None]] = []
    position = 0
    for event in run.events:
        while position < len(timed) and timed[position][:2] <= _when(event):
            position += 1
        found.append((event, timed[position - 1][2] if position else None))
    return found


def _when(record: Record) -> tuple[int, float]:
    return _attempt(record), formats.finite_number(record, "time") or 0.0


def count_attempts(run: RunHistory) -> int:
    numbers = [record.get("attempt") for record in [*run.counted_steps, *run.lost_steps, *run.events]]
    return max((number for number in numbers if isinstance(number, int)), default=1)


def run_status(run: RunHistory, now: float) -> tuple[str, str]:
    """State of the run as (word, tone), from its last state event and the age of its last line."""
    for event in reversed(run.events):
        match event.get("kind"):
            case EventKind.FINISHED:
                return "finished", "good"
            case EventKind.STOPPED:
                return "stopped", "warn"
            case EventKind.WORKER_DIED | EventKind.GAVE_UP:  # and no attempt follows
                return "died", "bad"
            case EventKind.RUN_STARTED | EventKind.ATTEMPT_STARTED | EventKind.RESUMED | EventKind.RESTARTED:
                break
    return ("running", "info") if now - run.last_line < ALIVE_S else ("not finished", "quiet")


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Smoothed curve: exponential weights on both sides (no lag); gaps (None) stay. The width grows with the curve,
    from a few steps to about a hundred.
    """
    decay = 1 - 2 / (1 + min(100.0, max(3.0, len(values) / 50)))

    def sums(ordered: Iterable[float | None]) -> list[tuple[float, float]]:
        total = weight = 0.0
        found = []
        for value in ordered:
            total = decay * total + (value or 0.0)
            weight = decay * weight + (value is not None)
            found.append((total, weight))
        return found

    before, after = sums(values), sums(reversed(values))[::-1]
    return [
        None if value is None else (left[0] + right[0] - value) / (left[1] + right[1] - 1)
        for value, left, right in zip(values, before, after, strict=True)
    ]


def thin(losses: Sequence[float | None], times: Sequence[float | None], points: int = POINTS) -> list[int]:
    """Steps to draw if there are more than `points`: the extremes of loss and of step time in every stretch."""
    count = len(losses)
    if count <= points:
        return list(range(count))
    stretch = -(-count * 4 // points)
    chosen = {0, count - 1}
    for start in range(0, count, stretch):
        for values in (losses, times):
            known = [(value, i) for i in range(start, min(count, start + stretch)) if (value := values[i]) is not None]
            if known:
                chosen |= {min(known)[1], max(known)[1]}
    return sorted(chosen)


def _parsed(text: str) -> Record:
    """The configuration, for facts in the header; empty if it is not a YAML mapping."""
    try:
        value = yaml.load(text, Loader=_LOADER)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}


def _json_objects(path: Path) -> list[Record]:
    """The JSON object of a file; empty if the file is missing or torn."""
    if not path.exists():
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except json.JSONDecodeError:
        return []
    return [value] if isinstance(value, dict) else []
