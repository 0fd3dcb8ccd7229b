"""What a run's steps took beside what was expected of them, part by part as far as its records can tell them apart.

On a CPU the host does all work itself, so waiting, updates and the rest are known; an accelerator tells how long its
passes took, and all else is one part. Medians over steps, without the first ones of an attempt, which compile and warm
up.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phalanx.planner.advice import TERM_NAMES

WARM_UP, ENOUGH = 5, 20  # steps of an attempt that are left out, and after which it is told
FAR = 0.15  # relative error from which on the part that is off is named
COMPUTE_TERMS = ("compute", "offload")
WAIT_TERMS = ("communication", "bubble")
UPDATE_TERMS = ("optimizer", "commit")  # an update writes to where its step is kept
ALL = tuple(TERM_NAMES)


def compare_steps(
    expected: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], beside: bool, basis: str
) -> dict[str, Any] | None:
    """Details of the event; None while there are too few of `steps`, the records of one attempt in order.

    `beside`: updates are done beside the thread that computes, which waits for them. `expected` as
    `choose_layout.prediction_with_memory` has it. `off` is the name of the part that explains most of a difference of
    more than FAR.
    """
    taken = list(steps)[WARM_UP:]
    if len(steps) < ENOUGH:
        return None
    step_s = median(record["step_s"] for record in taken)
    terms: Mapping[str, float] = dict.fromkeys(TERM_NAMES, 0.0) | expected["terms"]
    rows: list[dict[str, Any]] = [
        {
            "name": " and ".join(TERM_NAMES[name] for name in names if terms[name] > 0) or TERM_NAMES[names[0]],
            "terms": list(names),
            "predicted_s": sum(terms[name] for name in names),
            "measured_s": seconds,
        }
        for names, seconds in split_measured_step(taken, beside).items()
        if any(terms[name] > 0 for name in names) or seconds > 0
    ]
    off = None
    if abs(step_s / expected["step_s"] - 1) > FAR:
        more = step_s > expected["step_s"]
        off = max(rows, key=lambda row: (row["measured_s"] - row["predicted_s"]) * (1 if more else -1))["name"]
    return {
        "step": taken[-1]["step"],
        "steps": len(taken),
        "basis": basis,
        "predicted_s": expected["step_s"],
        "measured_s": step_s,
        "terms": rows,
        "off": off,
        "predicted_bytes": expected["allocated_bytes"],
        "measured_bytes": max(int(record["memory_bytes"]) for record in taken),
    }


def split_measured_step(taken: Sequence[Mapping[str, Any]], beside: bool) -> dict[tuple[str, ...], float]:
    """Seconds of a step by the terms of a prediction that they belong to; several terms where nothing tells them apart.
    They add up to the step but for medians being taken one by one."""
    step_s = median(record["step_s"] for record in taken)
    busy = [record["busy_s"] for record in taken if record.get("busy_s")]
    data_s = median(record["data_s"] for record in taken)
    updates = [record["update_s"] for record in taken if record.get("update_s") is not None]
    if not updates:  # an accelerator
        if not busy:
            return {ALL: step_s}
        slowest, average = median(map(max, busy)), median(map(mean, busy))
        rest = (*WAIT_TERMS, *UPDATE_TERMS, "other")
        return {COMPUTE_TERMS: average, ("imbalance",): slowest - average, rest: max(0.0, step_s - slowest)}
    update_s = median(updates)
    waits = median(record.get("wait_s") or 0.0 for record in taken)
    slowest = median(map(max, busy)) if busy else step_s - waits
    average = median(map(mean, busy)) if busy else slowest
    return {
        COMPUTE_TERMS: max(0.0, average - data_s - (0.0 if beside else update_s)),
        ("imbalance",): slowest - average,
        WAIT_TERMS: max(0.0, step_s - slowest - (update_s if beside else 0.0)),
        UPDATE_TERMS: update_s,
        ("other",): data_s,
    }


def median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
