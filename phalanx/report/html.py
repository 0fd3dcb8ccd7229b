"""The report of a run: one HTML file made from its records alone, that opens without a network."""

import base64
import functools
import gzip
import html
import importlib.resources
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import RunError
from phalanx.core.json_lines import write_atomic
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.report import devices, event_text, tables, views
from phalanx.report.history import (
    POINTS,
    Record,
    RunHistory,
    count_attempts,
    events_with_steps,
    read_run_history,
    run_status,
    smooth,
    thin,
)
from phalanx.report.incidents import find_incidents

COLUMNS = ("loss", "grad_norm", "lr", "tokens_per_s", "step_s", "wait_s", "data_s", "mfu", "mfu_causal", "memory_bytes")
EVENTS = 1000  # of more, the newest are in the table, and saved checkpoints are not marked on the curves
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


def write_report(paths: RunPaths) -> Path:
    """Write `report.html` into the run folder, atomically, and return its path.

    Any of the records may be missing, empty or torn. Raises RunError where there is neither a metrics nor an events
    file (that is no run folder), and where the folder cannot be written.
    """
    run = read_run_history(paths)
    drawing = report_payload(run)
    text = tables.render_page(
        title=html.escape(run.name),
        header=_header(run),
        tiles=_tiles(run),
        incidents=_incidents(run),
        curves=_curves(drawing["charts"]),
        records=_records(run),
        footer=f"Made {_moment(time.time())} from the records of the run, which can be read without this page.",
        payload=to_script(drawing),
        bokeh=_drawing_code() if drawing["charts"] else "",
    )
    try:  # what is not ASCII is escaped, so that the file means the same under any locale and any server's charset
        write_atomic(paths.report, text.encode("ascii", "xmlcharrefreplace").decode())
    except OSError as error:
        raise RunError(
            f"the report {paths.report} could not be written ({error.strerror or error}), so there is none; "
            "make the folder writable or free some space, then run `phalanx report` again"
        ) from error
    return paths.report


@functools.cache
def _drawing_code() -> str:
    """What draws the curves, BokehJS, compressed, so that a page is half as large; its script unpacks it."""
    code = importlib.resources.files("bokeh") / "server" / "static" / "js" / "bokeh.min.js"
    return base64.b64encode(gzip.compress(code.read_bytes(), mtime=0)).decode()


def report_payload(run: RunHistory) -> Record:
    """What the page's script draws: charts, columns of numbers (None for what is not known), evaluations, events."""
    losses = [event_text.finite_number(record, "loss") for record in run.counted_steps]
    drawn = thin(losses, [event_text.finite_number(record, "step_s") for record in run.counted_steps])
    world = devices.world_size_of([*run.counted_steps, *run.lost_steps])
    kept = _columns([run.counted_steps[i] for i in drawn], run.began, world)
    smoothed = smooth(losses)
    kept["smooth"] = [_rounded(smoothed[i]) for i in drawn]
    lost = _columns(run.lost_steps[-POINTS // 2 :], run.began, world)
    lost["smooth"] = [None] * len(lost["step"])
    return {
        "charts": [
            chart for chart in build_charts(run) if not chart["traces"] or _filled(chart, kept) or _filled(chart, lost)
        ],
        "kept": kept,
        "lost": lost,
        "heldOut": [
            {"name": name, **_columns(evaluations, run.began)}
            for name, evaluations in views.group_by_set(run.events).items()
        ],
        "scores": [
            {
                "name": name,
                **_columns(have, run.began),
                "loss": [_rounded(event_text.eval_scores(one)[score]) for one in have],
            }
            for name, have, score in views.score_curves(run.events)
        ],
        "events": _marks(run),
        "duration": run.ended - run.began,
    }


def to_script(value: object) -> str:
    """JSON that is safe inside a script element, in ASCII and without NaN."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def build_charts(run: RunHistory) -> list[Record]:
    """The charts that the records can fill: id, title, unit, traces (name, column, colour, style) and the y axis."""
    norms = [
        value
        for record in run.counted_steps
        if (value := event_text.finite_number(record, "grad_norm")) is not None and value > 0
    ]
    times = sorted(
        value for record in run.counted_steps if (value := event_text.finite_number(record, "step_s")) is not None
    )
    waits = any(event_text.finite_number(record, "wait_s") is not None for record in run.counted_steps)
    usual = times[int(0.98 * (len(times) - 1))] if times else 0.0
    capped = bool(times) and times[-1] > 3 * usual  # a first step that compiles would flatten all others
    wide = bool(norms) and max(norms) > 30 * min(norms)
    note = f"a step of {event_text.format_seconds(times[-1])} reaches out of the picture" if capped else ""
    unit = _unit(run)
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
    if any(event_text.finite_number(record, "mfu") is not None for record in run.counted_steps):
        traces = [_trace("all of attention", "mfu", "blue"), _trace("causal half", "mfu_causal", "teal")]
        found.append(_chart("mfu", "Model FLOPs utilisation", "share of dense peak", traces, zero=True, percent=True))
    if scores := views.score_curves(run.events):  # drawn as held-out losses are
        found.insert(
            1, _chart("scores", "Scores", scores[0][0] if len(scores) == 1 else "", [], legend=len(scores) > 1)
        )
    parts = devices.world_size_of([*run.counted_steps, *run.lost_steps])
    shares, busy = devices.device_traces(parts, of_copies=len(run.device_names) > parts)
    if shares:
        of_work = [_trace(*trace, style="line") for trace in shares]
        found.append(_chart("shares", "Shares", "of the sequences of a step", of_work, zero=True, percent=True))
        of_time = [_trace(*trace, style="line") for trace in busy]
        busy_unit = "part of a step's time, the rest is waiting"
        found.append(_chart("busy", "Busy", busy_unit, of_time, zero=True, percent=True))
    return found


def _chart(id: str, title: str, unit: str, traces: list[Record], **options: Any) -> Record:
    return {"id": id, "title": title, "unit": unit, "traces": traces, **options}


def _filled(chart: Record, columns: Record) -> bool:
    return any(value is not None for trace in chart["traces"] for value in columns[trace["column"]])


def _trace(name: str, column: str, color: str, style: str = "line") -> Record:
    return {"name": name, "column": column, "color": color, "style": style}


def _columns(records: Sequence[Record], began: float, world: int = 1) -> Record:
    """Records as columns: step, attempt, t (seconds since the run began), and numbers of six digits, or None; with
    several ranks also what devices.py draws of each."""
    columns: Record = {"step": [record["step"] for record in records]}
    columns["attempt"] = [record.get("attempt", 1) for record in records]
    moments = [event_text.finite_number(record, "time") for record in records]
    columns["t"] = [None if moment is None else round(moment - began, 3) for moment in moments]
    for name in COLUMNS:
        columns[name] = [_rounded(event_text.finite_number(record, name)) for record in records]
    columns["memory_gib"] = [None if value is None else value / 2**30 for value in columns.pop("memory_bytes")]
    parts = zip(columns["step_s"], columns["wait_s"], columns["data_s"], strict=True)
    columns["compute_s"] = [
        None if whole is None else _rounded(max(0.0, whole - (wait or 0.0) - (data or 0.0)))
        for whole, wait, data in parts
    ]
    return columns | devices.device_columns(records, world)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _marks(run: RunHistory) -> list[Record]:
    """The events that are drawn on the curves: step, t, text, class and whether a line crosses the chart."""
    marks = []
    for event, after_step in events_with_steps(run):
        if event.get("kind") not in SHAPES or (moment := event_text.finite_number(event, "time")) is None:
            continue
        shape, crosses = SHAPES[event["kind"]]
        step = event["step"] if isinstance(event.get("step"), int) else after_step
        text = event_text.describe_event(event, after_step)
        marks.append({"step": step or 0, "t": round(moment - run.began, 3), "text": text, "class": shape})
        marks[-1]["crosses"] = crosses
    if len(marks) > EVENTS:
        marks = [mark for mark in marks if mark["class"] != SHAPES[EventKind.CHECKPOINT_SAVED][0]][-EVENTS:]
    return marks


def _header(run: RunHistory) -> str:
    word, tone = run_status(run, time.time())
    started: Record = next((event for event in reversed(run.events) if event.get("kind") == EventKind.RUN_STARTED), {})
    model = run.config.get("model")
    model = model if isinstance(model, dict) else {}
    facts = [str(model[key]) for key in ("preset", "from_hf") if isinstance(model.get(key), str)][:1]
    if parameters := event_text.describe_parameters(started):
        facts.append(parameters)
    if world := event_text.finite_number(started, "world"):
        facts.append(f"{world:.0f} rank{'s' if world > 1 else ''}")
    parallel = run.config.get("parallel")
    degrees = {key: parallel.get(key) for key in ("tensor", "pipeline")} if isinstance(parallel, dict) else {}
    together = [f"{key} {degree}" for key, degree in degrees.items() if isinstance(degree, int) and degree > 1]
    facts += [" x ".join(together)] if together else []
    facts += [str(started[key]) for key in ("device", "dtype", "engine") if started.get(key)]
    facts += [f"began {_moment(run.began)}"] if run.began else []
    shown = "".join(f"<span>{html.escape(fact)}</span>" for fact in facts)
    heading = f'<h1>{html.escape(run.name)} <span class="pill {tone}">{html.escape(word)}</span></h1>'
    return f'{heading}<p class="facts">{shown}</p>'


def _tiles(run: RunHistory) -> str:
    tiles: list[tuple[str, str, str]] = []
    last: Record = run.counted_steps[-1] if run.counted_steps else {}
    train = run.config.get("train")
    total = train.get("steps") if isinstance(train, dict) else None
    tiles.append(("steps", f"{last.get('step', 0):,}", f"of {total:,}" if isinstance(total, int) else ""))
    smoothed = smooth([event_text.finite_number(record, "loss") for record in run.counted_steps])
    loss = event_text.finite_number(last, "loss")
    near = smoothed[-1] if smoothed else None
    tiles.append(("last loss", _fixed(loss), f"smoothed {near:.4f}" if near is not None else ""))
    for name, evaluations in (views.group_by_set(run.events) or {"held-out": [{}]}).items():
        last_loss = event_text.finite_number(evaluations[-1], "loss")
        note = event_text.describe_scores(evaluations[-1])
        tiles.append((f"{html.escape(name)} loss", _fixed(last_loss), note))
    tokens = event_text.finite_number(last, "total_tokens")
    unit = _unit(run)
    counted = "tokens" if unit == "tokens" else "losses"  # a sample may have several, such as one for each word
    tiles.append((counted, event_text.format_count(tokens) if tokens is not None else "-", "trained on"))
    step_s = _numbers(run.counted_steps, "step_s")
    rates = [
        (rate, s)
        for record in run.counted_steps
        if (rate := event_text.finite_number(record, "tokens_per_s")) is not None
        and (s := event_text.finite_number(record, "step_s"))
    ]
    # all tokens, as in the curve: of a chat only some are learnt
    mean = sum(rate * s for rate, s in rates) / sum(s for _, s in rates) if rates else None
    tiles.append(("mean speed", event_text.format_count(mean) if mean is not None else "-", f"{unit}/s"))
    waits = _numbers(run.counted_steps, "wait_s")
    share = f"{100 * sum(waits) / sum(step_s):.0f} % of it waiting" if waits and sum(step_s) > 0 else ""
    tiles.append(("median step", event_text.format_seconds(statistics.median(step_s)) if step_s else "-", share))
    mfu = _numbers(run.counted_steps, "mfu")
    if mfu:
        causal = _numbers(run.counted_steps, "mfu_causal")
        note = f"{100 * statistics.median(causal):.1f} % with the causal half" if causal else ""
        tiles.append(("median MFU", f"{100 * statistics.median(mfu):.1f} %", note))
    memory = _numbers([*run.counted_steps, *run.lost_steps], "memory_bytes")
    tiles.append(("peak memory", event_text.format_bytes(max(memory)) if memory else "-", "fullest rank"))
    tries = count_attempts(run)
    tiles.append(
        ("total time", event_text.format_seconds(run.ended - run.began), f"{tries} attempt{'s' if tries > 1 else ''}")
    )
    found = len(find_incidents(run))
    tiles.append(("incidents", str(found), f"{len(run.lost_steps)} steps walked again" if found else "none died"))
    return "".join(
        f'<div class="tile"><dt>{name}</dt><dd>{html.escape(value)}</dd><p>{html.escape(note)}</p></div>'
        for name, value, note in tiles
    )


def _unit(run: RunHistory) -> str:
    """What the run's speed counts: tokens, or samples."""
    started = (event.get("unit") for event in reversed(run.events) if event.get("kind") == EventKind.RUN_STARTED)
    return "samples" if next(started, None) == "samples" else "tokens"


def _numbers(records: Iterable[Record], key: str) -> list[float]:
    return [value for record in records if (value := event_text.finite_number(record, key)) is not None]


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _incidents(run: RunHistory) -> str:
    """One line for each incident: what died or was lost, how long to the next step, how many steps came twice."""
    lines = [
        f"<li><b>{html.escape(each.what)}</b><span>{html.escape(each.recovery)}</span></li>"
        for each in find_incidents(run)
    ]
    return f'<ul class="incidents">{"".join(lines)}</ul>' if lines else ""


def _curves(drawn: list[Record]) -> str:
    if not drawn:
        return '<div class="bar"><h2>Curves</h2></div><div class="card empty">No step has been recorded yet.</div>'
    buttons = (
        '<button type="button" data-mode="step" aria-pressed="true">by step</button>'
        '<button type="button" data-mode="time" aria-pressed="false">by time</button>'
    )
    hint = '<div class="hint">drag to zoom, double-click to go back</div>'
    legend = f'<h2>Curves</h2><div class="legend"></div>{hint}'
    bar = f'<div class="bar">{legend}<div class="switch">{buttons}</div></div>'
    return f'{bar}<div class="grid">{"".join(_card(chart) for chart in drawn)}</div>'


def _card(chart: Record) -> str:
    wide = " wide" if chart.get("wide") else ""
    note = f" &middot; {html.escape(chart['note'])}" if chart.get("note") else ""
    unit = f"<span>{html.escape(chart['unit'])}{note}</span>"
    head = f'<div class="head"><h3>{html.escape(chart["title"])}{unit}</h3></div>'
    return f'<section class="card{wide}">{head}<div class="plot" id="plot-{chart["id"]}"></div></section>'


def _records(run: RunHistory) -> str:
    """Events, resolved configuration and versions, below the curves."""
    found = events_with_steps(run)
    happened = [each for each in found if each[0].get("kind") != EventKind.AUTO_RESOLVED]
    resolved = [each for each in found if each[0].get("kind") == EventKind.AUTO_RESOLVED]
    table = _events(run, happened) if happened else "<p>No events were recorded.</p>"
    parts = [f'<section class="card"><h3>Events</h3>{table}</section>']
    parts += devices.render_device_card(
        devices.summarize_devices(run.counted_steps, run.device_names, run.device_lines)
    )
    parts += [
        *views.render_prediction_card(run),
        *views.render_eval_card(run.events),
        *views.render_profile_cards(run),
    ]
    if resolved:
        title = f"<summary>Values of <code>auto</code> <span>{len(resolved)} resolved</span></summary>"
        parts.append(f'<details class="card">{title}{_events(run, resolved)}</details>')
    if run.config_text:
        config = f"<pre>{html.escape(run.config_text)}</pre>"
        parts.append(f'<details class="card"><summary>Resolved configuration</summary>{config}</details>')
    if run.versions:
        pairs = "".join(
            f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(_plain(value))}</td></tr>"
            for key, value in run.versions.items()
        )
        table = f'<div class="scroll"><table class="versions"><tbody>{pairs}</tbody></table></div>'
        parts.append(f'<details class="card"><summary>Versions</summary>{table}</details>')
    return "".join(parts)


def _events(run: RunHistory, events: Sequence[tuple[Record, int | None]]) -> str:
    """A table of events, a row each; every one comes with the step that was the last before it."""
    rows = []
    for event, after_step in events[-EVENTS:]:
        mark = event_text.event_mark(str(event.get("kind")))
        moment = event_text.finite_number(event, "time")
        cells = [event_text.format_clock(moment - run.began), _moment(moment)] if moment is not None else ["", ""]
        cells.append(str(event.get("attempt", "")))
        sentence = html.escape(event_text.describe_event(event, after_step))
        head = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr class="{mark.tone}">{head}<td><i>{mark.symbol}</i>{sentence}</td></tr>')
    titles = "<tr><th>after</th><th>at</th><th>attempt</th><th>what happened</th></tr>"
    body = f"<thead>{titles}</thead><tbody>{''.join(rows)}</tbody>"
    few = f"<p>The newest {EVENTS:,} of {len(events):,}; all are in events.jsonl.</p>" if len(events) > EVENTS else ""
    return f'{few}<div class="scroll"><table class="events timed">{body}</table></div>'


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _moment(value: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
