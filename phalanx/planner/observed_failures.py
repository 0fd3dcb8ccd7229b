"""What a run's records say of failures and of saving: how long until it stepped again, and for how long a checkpoint
held it up."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.core.events import EventKind, read_events
from phalanx.core.json_lines import read_lines
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.layout.hardware import MOST
from phalanx.planner.failures import RECOVERY_S, FailureModel

DEATHS = (EventKind.WORKER_DIED, EventKind.NODE_LOST)
Record = Mapping[str, Any]


@dataclass(frozen=True)
class ObservedFailures:
    """Medians in seconds, and how many of each; None where the run has had none."""

    run: str
    recovery_s: float | None
    recoveries: int
    checkpoint_s: float | None
    checkpoints: int

    def to_failure_model(self, mtbf_s: float | None) -> FailureModel:
        """As far as they are known from it."""
        recovery_s = RECOVERY_S if self.recovery_s is None else self.recovery_s
        return FailureModel(mtbf_s, recovery_s, self.checkpoint_s)


def read_observed_failures(paths: RunPaths) -> ObservedFailures:
    """Raises ConfigError where there is no run, or it has neither failed nor saved anything while it went on."""
    if not paths.metrics.exists():
        raise ConfigError(
            f"{paths.display_name} holds no {paths.metrics.name}, so it is no run; name the folder of one"
        )
    steps = list(filter(_is_whole, read_steps(paths.metrics)))
    lines = list(filter(_is_whole, read_lines(paths.metrics)))
    events = list(read_events(paths.events))
    recoveries, savings = _recoveries(lines, events), _savings(steps, events)
    if not recoveries and not savings:
        raise ConfigError(
            f"the run in {paths.display_name} has neither gone on after a failure nor after a checkpoint, so nothing "
            "follows from it for either; name one that has, or leave --run out"
        )
    return ObservedFailures(
        paths.name,
        statistics.median(recoveries) if recoveries else None,
        len(recoveries),
        statistics.median(savings) if savings else None,
        len(savings),
    )


def _recoveries(lines: Sequence[Record], events: Sequence[Record]) -> list[float]:
    """Seconds from each failure to the beginning of the first step behind it. A line is written about a step after the
    step that it is of."""
    died: dict[int, float] = {}
    for event in events:
        if event.get("kind") in DEATHS and _is_number(event, "time") and type(event.get("attempt")) is int:
            died.setdefault(event["attempt"], event["time"])
    found = []
    for attempt, when in died.items():
        after = [line for line in lines if line.get("attempt", 0) > attempt and _is_number(line, "time")]
        if not after or any(attempt < other < after[0]["attempt"] for other in died):
            continue  # it failed again before it stepped: counted with that failure
        found.append(max(0.0, after[0]["time"] - when - 2 * after[0]["step_s"]))
    return found


def _savings(steps: Sequence[Record], events: Sequence[Record]) -> list[float]:
    """Seconds for which each checkpoint held training up: of the time from the line of its step, which is written
    before it, to the next one's, what is neither that step's nor the delay of a line, nor an evaluation's."""
    lines = {record["step"]: record for record in steps}
    evaluated: dict[int, float] = {}
    for event in events:
        if event.get("kind") == EventKind.EVALUATED and _is_number(event, "seconds") and type(event.get("step")) is int:
            evaluated[event["step"]] = evaluated.get(event["step"], 0.0) + event["seconds"]
    told = [event.get("step") for event in events if event.get("kind") == EventKind.CHECKPOINT_SAVED]
    found = []
    for step in sorted({step for step in told if type(step) is int}):
        before, at, after = (lines.get(number) for number in (step - 1, step, step + 1))
        if before is None or at is None or after is None:
            continue
        if not before.get("attempt") == at.get("attempt") == after.get("attempt"):
            continue
        late_s = at["step_s"] - (at["time"] - before["time"])
        held_s = after["time"] - at["time"] - after["step_s"] - late_s - evaluated.get(step, 0.0)
        found.append(max(0.0, held_s))
    return found


def _is_whole(record: Record) -> bool:
    """Whether the record of a step says when it was, in which attempt, and how long it took."""
    numbers = all(_is_number(record, key) for key in ("step", "step_s", "time"))
    return numbers and type(record.get("attempt", 1)) is int


def _is_number(record: Record, key: str) -> bool:
    """Whether it is one that a clock can show; NaN is none."""
    value: Any = record.get(key)
    return type(value) in (int, float) and 0 <= value <= MOST
