"""Step records: what `metrics.jsonl` holds of each optimizer step, and which of its lines count."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.json_lines import read_lines


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
