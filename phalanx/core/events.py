"""Events: what happens to a run, a line each in `events.jsonl`."""

import enum
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.core.json_lines import append_line, read_lines
from phalanx.core.renamed import rename_event


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
