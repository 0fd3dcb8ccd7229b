"""Incidents of a run and their recovery times, for the console and the report.

An **incident** is an unplanned interruption of training: from the failure of a rank or a node that restarts the ranks
or ends the run, to the next completed step, with all failures in between. An injected fault is not an incident, its
effect is. A node that joins, leaves on request, or is lost without a restart is not an incident.

The **recovery time** is the time from the first failure to the end of the first step completed after it, as the
console prints it. If a run's records lack it, it is computed from their times.
"""

from dataclasses import dataclass
from typing import Any

from phalanx.core.records import EventKind
from phalanx.report import event_text, formats
from phalanx.report.history import Record, RunHistory, events_with_steps

# Notable events that are not incidents: warnings, and parts of an incident.
PARTS = (EventKind.WORKER_DIED, EventKind.RESTARTED, EventKind.NODE_LOST, EventKind.INCIDENT, EventKind.GAVE_UP)
EXPECTED_KINDS = (EventKind.INJECTED, EventKind.STOPPED, EventKind.STOP_REQUESTED, EventKind.WARNING)


@dataclass(frozen=True)
class Incident:
    """One incident: the event of its first failure, the last step before it, and the event that ends it. `step` is the
    first step after it and `seconds` the recovery time, both None if no step followed; `replayed_steps` counts the
    steps that were repeated."""

    cause: Record
    after_step: int | None
    end_event: Record | None
    step: int | None
    seconds: float | None
    replayed_steps: int
    gave_up: Record | None = None  # why the run did not continue

    @property
    def time(self) -> float | None:
        return formats.finite_number(self.cause, "time")

    @property
    def what(self) -> str:
        """What failed, and the action taken."""
        if self.end_event is not None:
            what = self.end_event.get("what", "something failed")
            return f"{what}; {self.end_event.get('done', 'all ranks restart')}"
        return event_text.describe_event(self.cause, self.after_step)

    @property
    def recovery(self) -> str:
        """The outcome of the incident."""
        if self.seconds is None:
            return event_text.describe_event(self.gave_up) if self.gave_up is not None else "no step followed"
        steps = (
            f", {self.replayed_steps} step{'' if self.replayed_steps == 1 else 's'} replayed"
            if self.replayed_steps
            else ""
        )
        return f"training resumed with step {self.step} after {formats.format_seconds(self.seconds)}{steps}"


def find_incidents(run: RunHistory) -> list[Incident]:
    """The incidents of a run, oldest first."""
    steps = [*run.counted_steps, *run.lost_steps]
    found: list[Incident] = []
    part_of: dict[Any, list[tuple[int, Record, int | None]]] = {}
    for attempt, (event, after_step) in sorted(_attempt_failures(run).items()):
        later = [number for record in steps if (number := _attempt(record)) > attempt]
        part_of.setdefault(min(later, default=None), []).append((attempt, event, after_step))
    for next_attempt, failures in part_of.items():
        first, cause, after_step = failures[0]
        told = _find_end_event(run, first, next_attempt)
        lost = run.totals.lost_by_attempt
        again = sum(count for number, count in lost.items() if first <= number <= failures[-1][0])
        step, seconds = _first_step_after(steps, cause, next_attempt)
        if told is not None and formats.finite_number(told, "seconds") is not None:
            step, seconds = told.get("step"), formats.finite_number(told, "seconds")
        gave_up = [event for event in run.events if event.get("kind") == EventKind.GAVE_UP and _attempt(event) >= first]
        ended = gave_up[-1] if gave_up and seconds is None else None
        found.append(Incident(cause, after_step, told, step, seconds, again, ended))
    return sorted(found, key=lambda incident: incident.time or 0.0)


def find_other_problems(run: RunHistory) -> list[tuple[Record, int | None]]:
    """Other notable events, each with the last step before it."""
    return [
        (event, step)
        for event, step in events_with_steps(run)
        if event_text.event_mark(str(event.get("kind"))).tone in ("bad", "warn")
        and event.get("kind") not in (*PARTS, *EXPECTED_KINDS)
    ]


def _attempt(record: Record) -> int:
    attempt = record.get("attempt")
    return attempt if type(attempt) is int else 1


def _find_end_event(run: RunHistory, first: int, next_attempt: int | None) -> Record | None:
    """The event that ends an incident, as the run recorded it."""
    for event in run.events:
        if event.get("kind") == EventKind.INCIDENT and first < _attempt(event):
            return event if next_attempt is None or _attempt(event) <= next_attempt else None
    return None


def _first_step_after(steps: list[Record], cause: Record, next_attempt: int | None) -> tuple[int | None, float | None]:
    """The first step of an attempt, and the time from a failure to its end."""
    failed = formats.finite_number(cause, "time")
    done = [
        (moment, record["step"])
        for record in steps
        if _attempt(record) == next_attempt and (moment := formats.finite_number(record, "time")) is not None
    ]
    if failed is None or not done:
        return None, None
    moment, step = min(done)
    return step, max(0.0, moment - failed)


def _attempt_failures(run: RunHistory) -> dict[int, tuple[Record, int | None]]:
    """First failure of each attempt, and the last step before it: the worker that died first (others may follow), else
    a lost node."""
    # A restart without a failure has a reason.
    failed = {
        event.get("attempt")
        for event in run.events
        if event.get("kind") == EventKind.RESTARTED and "reason" not in event
    }
    deaths: dict[int, tuple[Record, int | None]] = {}
    for event, after_step in events_with_steps(run):
        attempt = event.get("attempt", 1)
        if event.get("kind") == EventKind.WORKER_DIED:
            known = deaths.get(attempt)
            if known is None or known[0].get("kind") == EventKind.NODE_LOST:
                deaths[attempt] = event, after_step
        elif event.get("kind") == EventKind.GAVE_UP or (
            event.get("kind") == EventKind.NODE_LOST and type(attempt) is int and attempt + 1 in failed
        ):
            deaths.setdefault(attempt, (event, after_step))
    return deaths
