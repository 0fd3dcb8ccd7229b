"""Alerts of a run: what a user wants to know at once, from its records. Each has a key, by which it is sent once."""

import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.report import event_text, formats
from phalanx.report.history import Record, RunHistory, events_with_steps, run_status

STALL_S, STALL_STEPS = 120.0, 20  # without a record, where no step takes as long as the latter
OLD_S, OLD_TIMES = 300.0, 3.0  # a checkpoint is old if it is later than so many times the usual distance, and this
MEDIAN_STEPS = 20


@dataclass(frozen=True)
class Alert:
    """One alert: a sentence, and the command that shows more."""

    key: str
    text: str
    command: str


def find_alerts(run: RunHistory, folder: str, now: float) -> list[Alert]:
    """Alerts of the newest start of a run, oldest first. `folder` is for commands; `now` in seconds since 1970."""
    return [*_of_events(run, shlex.quote(folder)), *_of_silence(run, shlex.quote(folder), now)]


def _of_events(run: RunHistory, folder: str) -> Iterator[Alert]:
    began, seats = 0, 0
    here, leaving = set[object](), set[object]()  # nodes that will be in the run, and those whose loss was announced
    for place, event in enumerate(run.events):
        if event.get("kind") == EventKind.RUN_STARTED and not event.get("again"):
            began = place
    told = events_with_steps(run)[began:]
    for event, after_step in told:
        kind, sentence = event.get("kind"), event_text.describe_event(event, after_step)
        key, node, spares = _key(run, event), event.get("node"), len(here) - seats
        if kind == EventKind.RUN_STARTED and isinstance(event.get("hosts"), list):
            extra = event.get("spares")
            seats = len(event["hosts"])
            here = set(range(seats + (len(extra) if isinstance(extra, list) else 0)))
        elif kind == EventKind.NODE_JOINED and isinstance(node, int):
            here.add(node)
            leaving.discard(node)
        if kind in (EventKind.STOPPED, EventKind.FINISHED):
            yield Alert(key, sentence, f"phalanx status {folder}")
        elif kind == EventKind.GAVE_UP:
            yield Alert(key, f"the run ended: {sentence}", f"phalanx logs --first-error {folder}")
        elif kind == EventKind.ROLLED_BACK or (
            kind == EventKind.WORKER_DIED and event.get("exit_code") == ExitCode.CONFIG and after_step is not None
        ):  # after a step, only a run that diverged ends with that code
            yield Alert(key, f"training diverged: {sentence}", f"phalanx logs --first-error {folder}")
        elif kind in (EventKind.NODE_LEAVING, EventKind.NODE_LOST) and isinstance(node, int):
            if node not in leaving:
                yield Alert(key, sentence, f"phalanx nodes --run {folder}")
            here.discard(node)
            leaving = leaving | {node} if kind == EventKind.NODE_LEAVING else leaving - {node}
            if seats and spares == 1 and len(here) == seats:
                used = "no spare node is left: a further loss shrinks the run or ends it"
                yield Alert(f"spares {key}", used, f"phalanx nodes --run {folder}")
        elif kind == EventKind.CHECKPOINT_FAILED:
            yield Alert(key, sentence, f"phalanx status {folder}")


def _key(run: RunHistory, event: Record) -> str:
    """What distinguishes an event from all others, whatever its history has shifted its clock by."""
    moment = formats.finite_number(event, "time") or 0.0
    shift_s = run.clock_moves.get(event.get("attempt", 1), 0.0)
    return f"{event.get('kind')} {moment - shift_s:.3f} {event.get('node', '')}".strip()


def _of_silence(run: RunHistory, folder: str, now: float) -> Iterator[Alert]:
    """Alerts of what did not come: records, and checkpoints."""
    last: Record = run.counted_steps[-1] if run.counted_steps else {}
    recent = [
        value
        for record in run.counted_steps[-MEDIAN_STEPS:]
        if (value := formats.finite_number(record, "step_s")) is not None
    ]
    if not recent or run_status(run, run.last_line)[0] != "running":
        return
    resumed = max(
        (i for i, event in enumerate(run.events) if event.get("kind") == EventKind.ATTEMPT_STARTED), default=0
    )
    if run.events and last.get("attempt") != run.events[resumed].get("attempt", last.get("attempt")):
        return  # no step of this attempt yet: it may compile
    step_s, quiet_s = statistics.median(recent), now - run.last_line
    if quiet_s > max(STALL_S, STALL_STEPS * step_s):
        said = f"no record for {formats.format_seconds(quiet_s)}, after step {last['step']}"
        yield Alert(f"stalled {run.last_line}", said, f"phalanx logs {folder}")
    section = run.facts.config.get("checkpoint")
    every = section.get("every") if isinstance(section, dict) else None
    if not isinstance(every, int) or every <= 0:
        return
    saved = [event for event in run.events if event.get("kind") == EventKind.CHECKPOINT_SAVED]
    started = [event for event in run.events if event.get("kind") == EventKind.RUN_STARTED]
    since = max((formats.finite_number(event, "time") or 0.0 for event in [*saved[-1:], *started[-1:]]), default=now)
    if now - since > OLD_S + OLD_TIMES * every * step_s:
        of = f"of step {saved[-1].get('step', '?')}" if saved else "is missing"
        said = f"the newest checkpoint {of}: none was saved for {formats.format_seconds(now - since)}"
        yield Alert(f"checkpoint old {since}", said, f"phalanx status {folder}")
