"""Goodput of a plan under failures: failure rate by number of devices, checkpoint interval, and the share of time in
lasting steps.

What survives a failure depends on the plan (`StepEstimate.recovers_from`), so that a layout without room for in-memory
checkpoints loses against one with room.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_events, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.layout.hardware import MOST
from phalanx.planner import checkpoint_interval
from phalanx.planner.checkpoint_interval import CheckpointCosts
from phalanx.planner.cost import StepEstimate

# Failures of one device, seconds: 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, Dubey et al. 2024,
# table 5), and how many of them may have been of hardware.
DEVICE_MTBF_S = 54 * 86400 * 16384 / 419
HARDWARE_SHARE = 0.78
RECOVERY_S = 60.0  # until a large job steps again: reading a checkpoint, compiling, the first collectives
LEAST_S = 1e-3  # of a checkpoint: nothing is free
LEAST_GOODPUT = 1e-6  # with which a job does not get anywhere


@dataclass(frozen=True)
class FailureModel:
    """Assumptions on failures. `mtbf_s` between those of the whole job, whatever part of the devices it uses; None: as
    Llama 3's, scaled by devices. `recovery_s` to the first new step; `checkpoint_s` by which a checkpoint stalls
    training, None: from the state's size; `checkpoint_steps` between checkpoints, None: the best interval."""

    mtbf_s: float | None = None
    recovery_s: float = RECOVERY_S
    checkpoint_s: float | None = None
    checkpoint_steps: int | None = None

    def checkpoint_costs(self, estimate: StepEstimate, devices: int) -> CheckpointCosts:
        """As the closed forms take it: failures of hardware go back to a checkpoint, and without steps in memory all
        do. A run keeps every step, and what that costs is in the step's seconds."""
        cost_s = self.checkpoint_s
        if cost_s is None:  # until the state has left the device; the rest is written while training continues
            cost_s = max(held.state_bytes / held.kind.host_bytes_per_s for held in estimate.memory)
        mtbf_s = self.mtbf_s if self.mtbf_s is not None else DEVICE_MTBF_S / devices
        hard = 1.0 if estimate.recovers_from == "checkpoints" else HARDWARE_SHARE
        return CheckpointCosts(estimate.step_s, mtbf_s, self.recovery_s, max(LEAST_S, cost_s), hard=hard)

    def checkpoint_interval(self, saving: CheckpointCosts) -> int | None:
        """Steps between checkpoints; None: failures are too rare to need any. If nodes have copies of each other's
        steps, for the simultaneous loss of two."""
        if self.checkpoint_steps is not None:
            return self.checkpoint_steps
        return checkpoint_interval.best_intervals(saving).checkpoint_steps

    def goodput(self, estimate: StepEstimate, devices: int) -> float:
        """Which share of the time goes into steps that last; of less than LEAST_GOODPUT that."""
        return max(LEAST_GOODPUT, self._goodput(estimate, self.checkpoint_costs(estimate, devices)))

    def _goodput(self, estimate: StepEstimate, saving: CheckpointCosts) -> float:
        steps = self.checkpoint_interval(saving)
        if estimate.recovers_from != "copies":
            return checkpoint_interval.goodput(saving, 1, steps)
        # A lost node goes back to the last step that another one has, as to a checkpoint that costs nothing.
        copied = 1 if estimate.replicas is None else estimate.replicas.every
        free = replace(saving, checkpoint_s=0.0, hard=HARDWARE_SHARE if copied > 1 else 0.0)
        held_up_s = saving.checkpoint_s / steps if steps else 0.0
        found = checkpoint_interval.goodput(free, 1, copied if copied > 1 else None)
        return found * saving.step_s / (saving.step_s + held_up_s)


def check_goodput(found: float, saving: CheckpointCosts) -> None:
    """Raises ConfigError for a job that does not get anywhere."""
    if found <= LEAST_GOODPUT:
        raise ConfigError(
            f"with a failure every {saving.mtbf_s:.3g} s, recoveries of {saving.recovery_s:.3g} s and steps of "
            f"{saving.step_s:.3g} s hardly any step would last; give the time between failures of the job as --mtbf"
        )


# --------------------------------------------------------------------------------------------------- observed failures
# Observed failures in a run's records: the time of recoveries, and by how much checkpoints stalled training.


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
    """Read recovery and checkpoint times from a run's records. Raises ConfigError if there is no run, or it has
    neither recovered nor saved."""
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
            f"the run in {paths.display_name} has continued neither after a failure nor after a checkpoint, so nothing "
            "follows from it for either; name one that has, or remove --run"
        )
    return ObservedFailures(
        paths.name,
        statistics.median(recoveries) if recoveries else None,
        len(recoveries),
        statistics.median(savings) if savings else None,
        len(savings),
    )


def _recoveries(lines: Sequence[Record], events: Sequence[Record]) -> list[float]:
    """Seconds from each failure to the beginning of the next step. The line of a step is written a step later."""
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
    """Seconds by which each checkpoint stalled training: the time between the line of its step, which is written
    before it, and the next one, without the step itself, the delay of a line, and evaluations."""
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
