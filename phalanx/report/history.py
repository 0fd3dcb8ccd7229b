"""What the records of a run tell: which steps count, what happened after which step, how the run stands."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from phalanx.core import format_versions
from phalanx.core.errors import RunError
from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_events, split_attempts
from phalanx.core.run_paths import RunPaths
from phalanx.report import devices, event_text

Record = dict[str, Any]

POINTS = 2000  # more than these in a curve are thinned; the extremes of every stretch stay
ALIVE_S = 60.0  # a run whose last line is younger than this is taken to be running


@dataclass
class RunHistory:
    """The records of a run, sorted out: `counted_steps` are the steps that count, in order; `lost_steps` were walked
    again.

    Where the clock was set back between two attempts, the times of the later one are moved behind the earlier one's.
    """

    name: str
    counted_steps: list[Record]
    lost_steps: list[Record]
    events: list[Record]
    config_text: str
    config: Record
    versions: Record
    began: float  # seconds since the epoch, of the first line
    ended: float  # of the last line
    last_line: float  # the same by the clock of that time, not moved
    device_names: dict[int, str]  # by rank, of those that were measured
    device_lines: dict[int, devices.Line]


def read_run_history(paths: RunPaths) -> RunHistory:
    """Read the records of a run folder. Raises RunError where it holds neither metrics nor events,
    or a later release has written it."""
    if not paths.metrics.exists() and not paths.events.exists():
        raise RunError(
            f"{paths.display_name} holds neither {paths.metrics.name} nor {paths.events.name}, so there is nothing to "
            "report; name the folder of a run"
        )
    format_versions.check_run_version(paths)
    kept, lost = split_attempts(read_lines(paths.metrics))
    # By attempt and place in the file, not by time: a clock may be set back.
    events = sorted(_with_attempts(read_events(paths.events)), key=lambda event: event["attempt"])
    raw = [
        (_attempt(record), moment)
        for record in [*kept, *lost, *events]
        if (moment := event_text.finite_number(record, "time")) is not None
    ]
    late = _moves(raw)
    kept, lost, events = ([_moved(record, late) for record in records] for records in (kept, lost, events))
    times = [moment for record in [*kept, *lost, *events] if (moment := event_text.finite_number(record, "time"))]
    config_text = paths.config.read_text(encoding="utf-8", errors="replace") if paths.config.exists() else ""
    return RunHistory(
        name=paths.name,
        counted_steps=kept,
        lost_steps=lost,
        events=events,
        config_text=config_text,
        config=_parsed(config_text),
        versions=next(iter(_json_objects(paths.versions)), {}),
        began=min(times, default=0.0),
        ended=max(times, default=0.0),
        last_line=max(raw, default=(0, 0.0))[1],
        device_names=devices.read_device_names(paths),
        device_lines=devices.read_device_lines(paths),
    )


def _attempt(record: Record) -> int:
    attempt = record.get("attempt")
    return attempt if type(attempt) is int else 1


def _with_attempts(events: Iterable[Record]) -> Iterator[Record]:
    """Events in the order of the file; one that names no attempt belongs to the newest before it."""
    newest = 1
    for event in events:
        if type(event.get("attempt")) is int:
            newest = max(newest, event["attempt"])
            yield event
        else:
            yield event | {"attempt": newest}


def _moves(moments: Iterable[tuple[int, float]]) -> dict[int, float]:
    """By attempt, the seconds to add to its times so that it begins no earlier than the ones before it ended."""
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


def _moved(record: Record, moves: dict[int, float]) -> Record:
    moment, move = event_text.finite_number(record, "time"), moves.get(_attempt(record), 0.0)
    return record if moment is None or not move else record | {"time": moment + move}


def events_with_steps(run: RunHistory) -> list[tuple[Record, int | None]]:
    """Every event with the step that had been recorded last when it happened (None before the first)."""
    timed = sorted((*_when(record), record["step"]) for record in [*run.counted_steps, *run.lost_steps])
    found: list[tuple[Record, int | None]] = []
    position = 0
    for event in run.events:
        while position < len(timed) and timed[position][:2] <= _when(event):
            position += 1
        found.append((event, timed[position - 1][2] if position else None))
    return found


def _when(record: Record) -> tuple[int, float]:
    return _attempt(record), event_text.finite_number(record, "time") or 0.0


def count_attempts(run: RunHistory) -> int:
    numbers = [record.get("attempt") for record in [*run.counted_steps, *run.lost_steps, *run.events]]
    return max((number for number in numbers if isinstance(number, int)), default=1)


def run_status(run: RunHistory, now: float) -> tuple[str, str]:
    """How the run stands, as (word, tone): by its last telling event, and by the age of its last line."""
    for event in reversed(run.events):
        match event.get("kind"):
            case EventKind.FINISHED:
                return "finished", "good"
            case EventKind.STOPPED:
                return "stopped", "warn"
            case EventKind.WORKER_DIED | EventKind.GAVE_UP:  # and nothing was started after it
                return "died", "bad"
            case EventKind.RUN_STARTED | EventKind.ATTEMPT_STARTED | EventKind.RESUMED | EventKind.RESTARTED:
                break
    return ("running", "info") if now - run.last_line < ALIVE_S else ("not finished", "quiet")


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """A curve averaged with weights that fall exponentially to both sides (so it does not lag); a gap (None) stays one.

    The reach grows with the curve, from a few steps to about a hundred.
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
    """Which steps to draw when there are more than `points`: the extremes of loss and of step time in every stretch."""
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
    """The configuration, for a few facts in the header; one that is not a YAML mapping is only shown as text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}


def _json_objects(path: Path) -> list[Record]:
    """The one JSON object of a file, or none where the file is missing or torn."""
    if not path.exists():
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except json.JSONDecodeError:
        return []
    return [value] if isinstance(value, dict) else []
