"""Step records: the lines of `metrics.jsonl`, one per optimizer step, and which of them count."""

import enum
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.json_lines import append_line, read_lines
from phalanx.core.renamed import rename_event


@dataclass
class StepRecord:
    """Record of one optimizer step in `metrics.jsonl`. Times in seconds, memory in bytes, loss in nats per token."""

    step: int  # steps done so far: the first step of a run is 1
    attempt: int
    loss: float | None  # None when it is not a finite number
    grad_norm: float | None
    lr: float
    tokens: int  # valid tokens of this step, all ranks
    total_tokens: int  # valid tokens since step 1
    step_s: float
    tokens_per_s: float
    # Time this rank waited in collectives; None if they run on the device, out of the host's sight
    wait_s: float | None
    comm_bytes: int  # bytes that rank 0 handed to collectives
    data_s: float  # time spent on making the batches
    mfu: float | None  # model FLOPs over the devices' dense peak; None if no peak is known
    mfu_causal: float | None  # the same with only the causal half of attention counted
    memory_bytes: int  # peak on the worst rank
    skipped: bool = False  # the update was not applied
    # Sequences of each rank; None with one rank, and in most steps with very many ranks
    shares: list[int] | None = None
    parts: int | list[int] | None = None  # micro-batches of each rank, a list if they differ; None as `shares`
    busy_s: list[float] | None = None  # compute time of each rank, without waiting; None as `shares`, or if unknown
    loss_scale: float | None = None  # loss scale; None without float16
    update_s: float | None = None  # time that rank 0 spent on updates; None on accelerators, where it is asynchronous
    time: float = field(default_factory=time.time)  # seconds since the epoch


@dataclass
class Fp8StepRecord(StepRecord):
    """Record of a step with delayed scaling."""

    fp8_clipped: int | None = None  # inputs and gradients beyond the range of their scales


@dataclass
class ExpertStepRecord(Fp8StepRecord):
    """Record of a step of a model with experts: their load, by layer with experts."""

    expert_entropy: list[float] = field(default_factory=list)  # 1: even, 0: all tokens choose the same
    expert_max_load: list[float] = field(default_factory=list)  # load of the busiest expert, as a multiple of the mean


def split_attempts(
    records: Iterable[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split step records, in the order of the file, into the trajectory that counts and the lost steps.

    A record of an earlier or equal step discards that step and all later ones: they were lost and replayed. A line of
    an older attempt than the newest seen comes from a late writer and is lost too.
    """
    kept: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    newest = 0
    for record in records:
        step, attempt = record.get("step"), record.get("attempt", 1)
        if not isinstance(step, int) or not isinstance(attempt, int):
            continue
        if attempt < newest:
            lost.append(record)
            continue
        newest = attempt
        while kept and kept[-1]["step"] >= step:
            lost.append(kept.pop())
        kept.append(record)
    return kept, sorted(lost, key=lambda record: (record.get("attempt", 1), record["step"]))


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Step records of the trajectory that counts, in order of step."""
    return split_attempts(read_lines(path))[0]


# -------------------------------------------------------- events: what happens to a run, a line each in `events.jsonl`


class EventKind(enum.StrEnum):
    """Kinds of events, the lines of `events.jsonl`."""

    RUN_STARTED = "run_started"
    AUTO_RESOLVED = "auto_resolved"  # an `auto` was resolved: key, value, reason
    LAYOUT_CHOSEN = "layout_chosen"  # layout, keys, step_s, why, basis, again
    PREDICTION_CHECKED = "prediction_checked"  # step, steps, basis, predicted_s, measured_s, terms, off, memory
    ATTEMPT_STARTED = "attempt_started"  # pids by rank
    RESUMED = "resumed"  # step, checkpoint or memory
    MEASURING = "measuring"  # ranks, reason
    MEASURED = "measured"  # devices (rank, model, most, sequences_per_s), seconds
    DEVICES_CHANGED = "devices_changed"  # reason
    MEMORY_LIMITED = "memory_limited"  # most, by rank
    CHECKPOINT_SAVED = "checkpoint_saved"  # step, bytes, seconds
    CHECKPOINT_FAILED = "checkpoint_failed"  # step, reason
    CHECKPOINT_SKIPPED = "checkpoint_skipped"  # step, reason
    CHECKPOINT_REFUSED = "checkpoint_refused"  # step, reason
    WORK_SPLIT = "work_split"  # step, shares, parts, why: what an attempt begins with
    COMM_SCHEDULE_CHANGED = (
        "comm_schedule_changed"  # step (the first with this order of transfers), bytes_per_s, compute_s, transfers_s
    )
    WORK_REBALANCED = "work_rebalanced"  # step (the first with these shares), shares, parts, why, before_s, after_s
    EVALUATED = "evaluated"  # step, set, loss, tokens, seconds, scores, unit; with train.fp8: fp8; of experts: experts
    STEP_SKIPPED = "step_skipped"  # step, reason
    ROLLED_BACK = "rolled_back"  # step, from_step, reason, first, last: the steps whose data are skipped
    CORRUPTED = "corrupted"  # step, ranks, parameters, devices, repaired
    STRAGGLER = "straggler"  # rank, host, factor, seconds
    INJECTED = "injected"  # rank, step, fault
    WORKER_DIED = "worker_died"  # rank, pid, signal or exit_code, reason; for a signal also its last phase
    RESTARTED = "restarted"  # attempt
    GAVE_UP = "gave_up"  # reason: why there is no further attempt
    NODE_JOINED = "node_joined"  # node, host, ranks
    NODE_LOST = "node_lost"  # node, host, reason
    NODE_LEAVING = "node_leaving"  # node, host, reason: a notice that its machine will soon be gone
    INCIDENT = "incident"  # what, done, seconds, step, phases
    STOP_REQUESTED = "stop_requested"  # signal
    STOPPED = "stopped"  # step
    FINISHED = "finished"  # step, seconds (if rank 0 reported them)
    EXPORTED = "exported"  # folder
    PROFILED = "profiled"  # first, last, phases, operators, folder
    MEMORY_RECORDED = "memory_recorded"  # step, peak_bytes, phases, folder
    HEALTH = "health"  # host, after, verdict, findings
    WARNING = "warning"  # message


def write_event(path: Path, kind: str, attempt: int, **details: Any) -> dict[str, Any]:
    """Append an event (kind, time, attempt and details) to `events.jsonl` and return it."""
    append_line(path, event := {"kind": str(kind), "time": time.time(), "attempt": attempt, **details})
    return event


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, with events of older versions under their current names; a torn line is skipped."""
    return map(rename_event, read_lines(path))


# ----------------------------------------------------------------------------------------------------------- incidents
# One line for each incident: what failed, where, what was done about it, and how long until training continued. It is
# assembled from three events: the failure, the restart of the ranks, and the first step that completes again. No torch
# here.


Details = dict[str, Any]


class IncidentTracker:
    """Tracks an open incident until a step completes, then passes its event details to `write`, with `what`, `done`,
    `step` and `seconds`."""

    def __init__(self, write: Callable[[Details], None]) -> None:
        self._write = write
        self._open: Details | None = None

    def begin(self, details: Details) -> None:
        """Open an incident: `what` failed, what is `done`, when it `began`, and the `attempt` that follows. An incident
        that is still open becomes part of it."""
        if self._open is not None:
            details = {**details, "what": f"{self._open['what']}; {details['what']}"}
            details["began"] = min(details["began"], self._open["began"])
        self._open = details

    def on_step(self, record: Details) -> None:
        """Close the open incident if the step belongs to its attempt."""
        attempt, when = record.get("attempt"), record.get("time")
        if self._open is not None and type(attempt) is int and attempt >= self._open["attempt"]:
            self.end({"step": record.get("step"), "seconds": _since(self._open["began"], when)})

    def on_event(self, event: Details) -> None:
        """Add the time of restoring state to the `phases` of the open incident, if it has phases."""
        attempt, when, open_one = event.get("attempt"), event.get("time"), self._open
        if event.get("kind") != EventKind.RESUMED or open_one is None or "phases" not in open_one:
            return
        if type(attempt) is int and attempt >= open_one["attempt"] and isinstance(when, float):
            restored = round(_since(open_one["began"], when), 3)
            open_one["phases"] = open_one["phases"] | {"restored": restored}

    def end(self, how: Details) -> None:
        """Close the open incident, recovered or not."""
        if self._open is not None:
            told = {name: value for name, value in self._open.items() if name != "began"}
            self._open = None
            self._write(told | how)


def _since(began: float, when: Any) -> float:
    """Seconds from the begin of an incident, by this node's clock, to a line's time, by the clock of rank 0's node; to
    now if the two clocks contradict each other."""
    now = time.time()
    return (when if isinstance(when, float) and began <= when <= now else now) - began
