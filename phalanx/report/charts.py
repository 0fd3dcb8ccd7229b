"""Charts of a run as plain data: which curves there are, their columns of numbers, and the marks of events.

The report's page and the live page draw them by the same script (`chart_script.py`).
"""

from collections.abc import Sequence
from typing import Any

from phalanx.core.records import EventKind
from phalanx.report import devices, event_text, formats, views
from phalanx.report.history import POINTS, Record, RunHistory, events_with_steps, smooth, thin

COLUMNS = (
    "loss", "grad_norm", "lr", "tokens_per_s", "step_s", "wait_s", "data_s", "mfu", "mfu_causal", "memory_bytes",
    "fp8_clipped",
)  # fmt: skip
EVENTS = 1000  # with more, the table has the newest, and the curves do not mark saved checkpoints
SHAPES = {  # how an event is drawn on the curves: (class, line from top to bottom)
    EventKind.WORKER_DIED: ("died", True),
    EventKind.RESTARTED: ("restarted", False),
    EventKind.RESUMED: ("resumed", False),
    EventKind.STOPPED: ("stopped", True),
    EventKind.CHECKPOINT_SAVED: ("saved", False),
    EventKind.CHECKPOINT_FAILED: ("failed", False),
    EventKind.CHECKPOINT_SKIPPED: ("skipped", False),
    EventKind.CHECKPOINT_REFUSED: ("failed", False),
    EventKind.STEP_SKIPPED: ("skipped", False),
}


def report_payload(run: RunHistory) -> Record:
    """Payload of the page's script: charts, columns of numbers (None if unknown), evaluations, events."""
    losses = [formats.finite_number(record, "loss") for record in run.counted_steps]
    drawn = thin(losses, [formats.finite_number(record, "step_s") for record in run.counted_steps])
    world = devices.world_size_of([*run.counted_steps, *run.lost_steps])
    kept = record_columns([run.counted_steps[i] for i in drawn], run.began, world)
    smoothed = smooth(losses)
    kept["smooth"] = [_rounded(smoothed[i]) for i in drawn]
    lost = record_columns(run.lost_steps[-POINTS // 2 :], run.began, world)
    lost["smooth"] = [None] * len(lost["step"])
    return {
        "charts": list_charts(run, kept, lost),
        "kept": kept,
        "lost": lost,
        **evaluation_curves(run),
        "events": event_marks(run),
        "duration": run.ended - run.began,
    }


def list_charts(run: RunHistory, *drawn: Record) -> list[Record]:
    """The charts of `build_charts` for which some of the columns have numbers."""
    return [
        chart for chart in build_charts(run) if not chart["traces"] or any(_filled(chart, columns) for columns in drawn)
    ]


def evaluation_curves(run: RunHistory) -> Record:
    """Curves of evaluations: the loss on each held-out set, and each score."""
    return {
        "heldOut": [
            {"name": name, **record_columns(evaluations, run.began)}
            for name, evaluations in views.group_by_set(run.events).items()
        ],
        "scores": [
            {
                "name": name,
                **record_columns(have, run.began),
                "loss": [_rounded(formats.eval_scores(one)[score]) for one in have],
            }
            for name, have, score in views.score_curves(run.events)
        ],
    }


def build_charts(run: RunHistory) -> list[Record]:
    """Charts for which there are records: id, title, unit, traces (name, column, colour, style) and the y axis."""
    norms = [
        value
        for record in run.counted_steps
        if (value := formats.finite_number(record, "grad_norm")) is not None and value > 0
    ]
    times = sorted(
        value for record in run.counted_steps if (value := formats.finite_number(record, "step_s")) is not None
    )
    waits = any(formats.finite_number(record, "wait_s") is not None for record in run.counted_steps)
    usual = times[int(0.98 * (len(times) - 1))] if times else 0.0
    capped = (
        bool(times) and times[-1] > 3 * usual
    )  # the first step may include compilation, which would flatten the curve
    wide = bool(norms) and max(norms) > 30 * min(norms)
    note = f"a step of {formats.format_seconds(times[-1])} exceeds the axis" if capped else ""
    unit = speed_unit(run)
    found = [
        _chart("loss", "Loss", "nats per token" if unit == "tokens" else "mean over a step", wide=True,
               traces=[_trace("train", "loss", "blue", "faint"), _trace("train, smoothed", "smooth", "blue", "bold")]),
        _chart("speed", "Throughput", f"{unit}/s", [_trace(f"{unit}/s", "tokens_per_s", "teal")], zero=True),
        _chart("time", "Step time", "s", [_trace("compute", "compute_s", "blue", "area"),
               _trace("data", "data_s", "violet", "area"), _trace("wait", "wait_s", "orange", "area")]
               if waits else [_trace("step", "step_s", "blue", "area")],
               zero=True, top=1.1 * max(value for value in times if value <= 3 * usual) if capped else None, note=note),
        _chart("memory", "Memory", "GiB, peak of the fullest rank", [_trace("memory", "memory_gib", "violet", "area")],
               zero=True),
        _chart("lr", "Learning rate", "", [_trace("learning rate", "lr", "orange")], zero=True),
        _chart("norm", "Gradient norm", "before clipping" + (", logarithmic" if wide else ""),
               [_trace("norm", "grad_norm", "teal")], log=wide),
    ]  # fmt: skip
    if any(formats.finite_number(record, "mfu") is not None for record in run.counted_steps):
        traces = [_trace("all of attention", "mfu", "blue"), _trace("causal half", "mfu_causal", "teal")]
        found.append(_chart("mfu", "Model FLOPs utilisation", "share of dense peak", traces, zero=True, percent=True))
    entropy = [_trace("least even layer", "expert_entropy_least", "orange")]
    entropy.append(_trace("mean of layers", "expert_entropy_mean", "blue"))
    found.append(_chart("experts", "Expert load", "entropy, 1 is even", entropy, legend=True))
    busiest = [_trace("busiest expert of any layer", "expert_load_most", "teal")]
    found.append(_chart("busiest", "Busiest expert", "multiple of the mean load", busiest, zero=True))
    clipped = [_trace("inputs and gradients", "fp8_clipped", "orange")]
    found.append(_chart("clipped", "Clipped by FP8", "values beyond their scale", clipped, zero=True))
    if scores := views.score_curves(run.events):  # drawn like held-out losses
        found.insert(
            1, _chart("scores", "Scores", scores[0][0] if len(scores) == 1 else "", [], legend=len(scores) > 1)
        )
    parts = devices.world_size_of([*run.counted_steps, *run.lost_steps])
    shares, busy = devices.device_traces(parts, of_copies=len(run.facts.device_names) > parts)
    if shares:
        of_work = [_trace(*trace, style="line") for trace in shares]
        found.append(_chart("shares", "Shares", "of the sequences of a step", of_work, zero=True, percent=True))
        of_time = [_trace(*trace, style="line") for trace in busy]
        busy_unit = "busy part of a step, the rest is waiting"
        found.append(_chart("busy", "Busy", busy_unit, of_time, zero=True, percent=True))
    return found


def _chart(id: str, title: str, unit: str, traces: list[Record], **options: Any) -> Record:
    return {"id": id, "title": title, "unit": unit, "traces": traces, **options}


def _filled(chart: Record, columns: Record) -> bool:
    return any(value is not None for trace in chart["traces"] for value in columns[trace["column"]])


def _trace(name: str, column: str, color: str, style: str = "line") -> Record:
    return {"name": name, "column": column, "color": color, "style": style}


def record_columns(records: Sequence[Record], began: float, world: int = 1) -> Record:
    """Records as columns: step, attempt, t (seconds since the run began), and numbers of six digits, or None; with
    several ranks also what devices.py draws of each."""
    columns: Record = {"step": [record["step"] for record in records]}
    columns["attempt"] = [record.get("attempt", 1) for record in records]
    moments = [formats.finite_number(record, "time") for record in records]
    columns["t"] = [None if moment is None else round(moment - began, 3) for moment in moments]
    for name in COLUMNS:
        columns[name] = [_rounded(formats.finite_number(record, name)) for record in records]
    columns["memory_gib"] = [None if value is None else value / 2**30 for value in columns.pop("memory_bytes")]
    parts = zip(columns["step_s"], columns["wait_s"], columns["data_s"], strict=True)
    columns["compute_s"] = [
        None if whole is None else _rounded(max(0.0, whole - (wait or 0.0) - (data or 0.0)))
        for whole, wait, data in parts
    ]
    return columns | devices.device_columns(records, world) | expert_columns(records)


def expert_columns(records: Sequence[Record]) -> Record:
    """Columns of the load of experts, over the layers of each record: entropies, least and mean, and the greatest load;
    None where a record has none."""
    columns: Record = {"expert_entropy_least": [], "expert_entropy_mean": [], "expert_load_most": []}
    for record in records:
        entropies, loads = (formats.finite_numbers(record.get(name)) for name in ("expert_entropy", "expert_max_load"))
        columns["expert_entropy_least"].append(min(entropies, default=None))
        columns["expert_entropy_mean"].append(_rounded(sum(entropies) / len(entropies)) if entropies else None)
        columns["expert_load_most"].append(max(loads, default=None))
    return columns


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def event_marks(run: RunHistory) -> list[Record]:
    """Events drawn on the curves: step, t, text, class and whether a line crosses the chart."""
    marks = []
    for event, after_step in events_with_steps(run):
        if event.get("kind") not in SHAPES or (moment := formats.finite_number(event, "time")) is None:
            continue
        shape, crosses = SHAPES[event["kind"]]
        step = event["step"] if isinstance(event.get("step"), int) else after_step
        text = event_text.describe_event(event, after_step)
        marks.append({"step": step or 0, "t": round(moment - run.began, 3), "text": text, "class": shape})
        marks[-1]["crosses"] = crosses
    if len(marks) > EVENTS:
        marks = [mark for mark in marks if mark["class"] != SHAPES[EventKind.CHECKPOINT_SAVED][0]][-EVENTS:]
    return marks


def speed_unit(run: RunHistory) -> str:
    """Unit of the run's speed: tokens or samples."""
    started = (event.get("unit") for event in reversed(run.events) if event.get("kind") == EventKind.RUN_STARTED)
    return "samples" if next(started, None) == "samples" else "tokens"
