"""Step records: what `metrics.jsonl` holds of each optimizer step, and which of its lines count."""

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
    """One optimizer step as `metrics.jsonl` holds it. Times in seconds, memory in bytes, loss in nats per token."""

    step: int  # steps done so far: the first step of a run is 1
    attempt: int
    loss: float | None  # None when it is not a finite number
    grad_norm: float | None
    lr: float
    tokens: int  # valid tokens of this step, all ranks
    total_tokens: int  # valid tokens since step 1
    step_s: float
    tokens_per_s: float
    wait_s: float | None  # time this rank waited in collectives; None where the device hides it from the host
    comm_bytes: int  # bytes that rank 0 handed to collectives
    data_s: float  # time spent on making the batches
    mfu: float | None  # model FLOPs over the devices' dense peak; None where no peak is known
    mfu_causal: float | None  # the same with only the causal half of attention counted
    memory_bytes: int  # peak on the worst rank
    skipped: bool = False  # the update was not applied
    shares: list[int] | None = None  # sequences of each rank; None of one rank, and of most steps of very many
    parts: int | list[int] | None = None  # micro-batches of each rank, a list where they differ; None as `shares`
    busy_s: list[float] | None = None  # what each rank worked without waiting; None as `shares`, or where not known
    loss_scale: float | None = None  # what the loss was multiplied by; None where nothing computes in float16
    update_s: float | None = None  # time that rank 0 spent on updates; None on accelerators, which hide it
    time: float = field(default_factory=time.time)  # seconds since the epoch


def split_attempts(
    records: Iterable[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split step records, in the order of the file, into the trajectory that counts and the steps walked in vain.

    A step that comes again takes back itself and all later steps: they were lost and walked again. A line of an older
    attempt than the newest seen comes from a late writer and is lost too.
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
    """The step records of the trajectory that counts, in order of step."""
    return split_attempts(read_lines(path))[0]


# -------------------------------------------------------- events: what happens to a run, a line each in `events.jsonl`


class EventKind(enum.StrEnum):
    """Kinds of lines in `events.jsonl`."""

    RUN_STARTED = "run_started"
    AUTO_RESOLVED = "auto_resolved"  # an `auto` got its value: key, value, reason
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
    EVALUATED = "evaluated"  # step, set, loss, tokens, seconds, scores, unit
    STEP_SKIPPED = "step_skipped"  # step, reason
    ROLLED_BACK = "rolled_back"  # step, from_step, reason, first, last: the steps whose data are passed over
    CORRUPTED = "corrupted"  # step, ranks, parameters, devices, repaired
    STRAGGLER = "straggler"  # rank, host, factor, seconds
    INJECTED = "injected"  # rank, step, fault
    WORKER_DIED = "worker_died"  # rank, pid, signal or exit_code, reason; of a signal also what it was doing
    RESTARTED = "restarted"  # attempt
    GAVE_UP = "gave_up"  # reason: why no other attempt is made
    NODE_JOINED = "node_joined"  # node, host, ranks
    NODE_LOST = "node_lost"  # node, host, reason
    INCIDENT = "incident"  # what, done, seconds, step, phases
    STOP_REQUESTED = "stop_requested"  # signal
    STOPPED = "stopped"  # step
    FINISHED = "finished"  # step, seconds (if rank 0 has said so itself)
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
    """Yield the events of a run, those of an older version by today's names; a torn line is skipped."""
    return map(rename_event, read_lines(path))


# ----------------------------------------------------------------------------------------------------------- incidents
# One line for each thing that broke: what, where, what was done about it, and how long until training went on. The
# parts come one after another: what failed, that the ranks start again, and the first step that is done again. No torch
# here.


Details = dict[str, Any]


class IncidentTracker:
    """Keeps what has failed until a step is done again, and gives it to `write` then: details of an event, with `what`,
    `done`, `step` and `seconds`."""

    def __init__(self, write: Callable[[Details], None]) -> None:
        self._write = write
        self._open: Details | None = None

    def begin(self, details: Details) -> None:
        """Something has failed: `what`, what is `done`, when it `began`, and the `attempt` that follows. What failed
        before and is not overcome yet becomes a part of it."""
        if self._open is not None:
            details = {**details, "what": f"{self._open['what']}; {details['what']}"}
            details["began"] = min(details["began"], self._open["began"])
        self._open = details

    def on_step(self, record: Details) -> None:
        """A step is done."""
        attempt, when = record.get("attempt"), record.get("time")
        if self._open is not None and type(attempt) is int and attempt >= self._open["attempt"]:
            self.end({"step": record.get("step"), "seconds": _since(self._open["began"], when)})

    def on_event(self, event: Details) -> None:
        """Ranks have what they go on from: among the `phases` of what broke, where those are told."""
        attempt, when, open_one = event.get("attempt"), event.get("time"), self._open
        if event.get("kind") != EventKind.RESUMED or open_one is None or "phases" not in open_one:
            return
        if type(attempt) is int and attempt >= open_one["attempt"] and isinstance(when, float):
            restored = round(_since(open_one["began"], when), 3)
            open_one["phases"] = open_one["phases"] | {"restored": restored}

    def end(self, how: Details) -> None:
        """It is over, or never will be."""
        if self._open is not None:
            told = {name: value for name, value in self._open.items() if name != "began"}
            self._open = None
            self._write(told | how)


def _since(began: float, when: Any) -> float:
    """Seconds from when something began, by this node's clock, to when a line was written, by the clock of rank 0's
    node; where the two cannot both be right, to now."""
    now = time.time()
    return (when if isinstance(when, float) and began <= when <= now else now) - began
