"""What an incident is, how long recovering from it took, and what else went wrong: for the screen and the report alike.

An **incident** is an interruption of training that nobody asked for: from the failure of a rank or a node that made the
ranks start again, or that ended the run, to the next step that is done, however many failures lie between. Faults that
a user has injected are no incidents themselves, what they bring down is; nodes that come, are left on request, or are
lost without the ranks having to start again are none.

Its **recovery time** is the time from its first failure to the end of the first step that is done after it: what the
console says when it is over. Where a run's records have no such line, it follows from their times.
"""

from dataclasses import dataclass
from typing import Any

from phalanx.core.records import EventKind
from phalanx.report import event_text
from phalanx.report.history import Record, RunHistory, events_with_steps

# Worth a look, and no incident: warnings, and parts of one.
PARTS = (EventKind.WORKER_DIED, EventKind.RESTARTED, EventKind.NODE_LOST, EventKind.INCIDENT, EventKind.GAVE_UP)
EXPECTED_KINDS = (EventKind.INJECTED, EventKind.STOPPED, EventKind.STOP_REQUESTED, EventKind.WARNING)


@dataclass(frozen=True)
class Incident:
    """One incident: the event of its first failure, the step that was done last before it, and the event by which the
    run says that it is over. `step` is the first one after it and `seconds` the recovery time, None where no step
    followed; `replayed_steps` is how many steps were done a second time."""

    cause: Record
    after_step: int | None
    end_event: Record | None
    step: int | None
    seconds: float | None
    replayed_steps: int
    gave_up: Record | None = None  # why it was not gone on after it

    @property
    def time(self) -> float | None:
        return event_text.finite_number(self.cause, "time")

    @property
    def what(self) -> str:
        """What failed and what was done about it."""
        if self.end_event is not None:
            what = self.end_event.get("what", "something failed")
            return f"{what}; {self.end_event.get('done', 'the ranks start again')}"
        return event_text.describe_event(self.cause, self.after_step)

    @property
    def recovery(self) -> str:
        """How it went on."""
        if self.seconds is None:
            return event_text.describe_event(self.gave_up) if self.gave_up is not None else "no step followed"
        steps = (
            f", {self.replayed_steps} step{'' if self.replayed_steps == 1 else 's'} walked again"
            if self.replayed_steps
            else ""
        )
        return f"training went on with step {self.step} after {event_text.format_seconds(self.seconds)}{steps}"


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
        again = sum(1 for record in run.lost_steps if first <= _attempt(record) <= failures[-1][0])
        step, seconds = _first_step_after(steps, cause, next_attempt)
        if told is not None and event_text.finite_number(told, "seconds") is not None:
            step, seconds = told.get("step"), event_text.finite_number(told, "seconds")
        gave_up = [event for event in run.events if event.get("kind") == EventKind.GAVE_UP and _attempt(event) >= first]
        ended = gave_up[-1] if gave_up and seconds is None else None
        found.append(Incident(cause, after_step, told, step, seconds, again, ended))
    return sorted(found, key=lambda incident: incident.time or 0.0)


def find_other_problems(run: RunHistory) -> list[tuple[Record, int | None]]:
    """What else went wrong or is worth a look, each with the step that was done last before it."""
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
    """The event by which the run itself says that an incident is over."""
    for event in run.events:
        if event.get("kind") == EventKind.INCIDENT and first < _attempt(event):
            return event if next_attempt is None or _attempt(event) <= next_attempt else None
    return None


def _first_step_after(steps: list[Record], cause: Record, next_attempt: int | None) -> tuple[int | None, float | None]:
    """The first step of an attempt, and how long after a failure it was done."""
    failed = event_text.finite_number(cause, "time")
    done = [
        (moment, record["step"])
        for record in steps
        if _attempt(record) == next_attempt and (moment := event_text.finite_number(record, "time")) is not None
    ]
    if failed is None or not done:
        return None, None
    moment, step = min(done)
    return step, max(0.0, moment - failed)


def _attempt_failures(run: RunHistory) -> dict[int, tuple[Record, int | None]]:
    """By attempt, what brought it down, and after which step: the worker that died first (others may follow it down),
    or else a node that was lost."""
    # Where ranks start again for another reason than a failure, that is given.
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
