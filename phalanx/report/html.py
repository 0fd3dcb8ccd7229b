"""HTML report of a run: one file made from the records alone, which opens without a network."""

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

from phalanx.core.errors import RunError
from phalanx.core.json_lines import write_atomic
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.report import devices, event_text, formats, tables, views
from phalanx.report.charts import EVENTS, report_payload, speed_unit
from phalanx.report.expert_load import render_expert_card
from phalanx.report.history import (
    Record,
    RunHistory,
    count_attempts,
    events_with_steps,
    read_run_history,
    run_status,
    smooth,
)
from phalanx.report.incidents import find_incidents


def write_report(paths: RunPaths) -> Path:
    """Write `report.html` into the run folder, atomically, and return its path. Records may be missing, empty or torn.
    Raises RunError if there is neither a metrics nor an events file, or if the folder cannot be written.
    """
    run = read_run_history(paths)
    drawing = report_payload(run)
    text = tables.render_page(
        title=html.escape(run.facts.name),
        header=_header(run),
        tiles=_tiles(run),
        incidents=_incidents(run),
        curves=_curves(drawing["charts"]),
        records=_records(run),
        footer=f"Made {_moment(time.time())} from the records of the run.",
        payload=to_script(drawing),
        bokeh=_drawing_code() if drawing["charts"] else "",
    )
    try:  # escape all but ASCII: the file then reads the same under any locale and any server's charset
        write_atomic(paths.report, text.encode("ascii", "xmlcharrefreplace").decode())
    except OSError as error:
        raise RunError(
            f"cannot write the report {paths.report} ({error.strerror or error}); make the folder writable or free "
            "some space, then run `phalanx report` again"
        ) from error
    return paths.report


@functools.cache
def _drawing_code() -> str:
    """BokehJS, the plotting library, compressed: the page is half as large; its script unpacks it."""
    code = importlib.resources.files("bokeh") / "server" / "static" / "js" / "bokeh.min.js"
    return base64.b64encode(gzip.compress(code.read_bytes(), mtime=0)).decode()


def to_script(value: object) -> str:
    """JSON that is safe inside a script element, in ASCII and without NaN."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _header(run: RunHistory) -> str:
    word, tone = run_status(run, time.time())
    started: Record = next((event for event in reversed(run.events) if event.get("kind") == EventKind.RUN_STARTED), {})
    model = run.facts.config.get("model")
    model = model if isinstance(model, dict) else {}
    facts = [str(model[key]) for key in ("preset", "from_hf") if isinstance(model.get(key), str)][:1]
    if parameters := event_text.describe_parameters(started):
        facts.append(parameters)
    if world := formats.finite_number(started, "world"):
        facts.append(f"{world:.0f} rank{'s' if world > 1 else ''}")
    parallel = run.facts.config.get("parallel")
    axes = ("tensor", "pipeline", "context", "expert")
    degrees = {key: parallel.get(key) for key in axes} if isinstance(parallel, dict) else {}
    together = [f"{key} {degree}" for key, degree in degrees.items() if isinstance(degree, int) and degree > 1]
    facts += [" x ".join(together)] if together else []
    facts += [str(started[key]) for key in ("device", "dtype", "engine") if started.get(key)]
    facts += [f"began {_moment(run.began)}"] if run.began else []
    shown = "".join(f"<span>{html.escape(fact)}</span>" for fact in facts)
    heading = f'<h1>{html.escape(run.facts.name)} <span class="pill {tone}">{html.escape(word)}</span></h1>'
    return f'{heading}<p class="facts">{shown}</p>'


def _tiles(run: RunHistory) -> str:
    tiles: list[tuple[str, str, str]] = []
    last: Record = run.counted_steps[-1] if run.counted_steps else {}
    train = run.facts.config.get("train")
    total = train.get("steps") if isinstance(train, dict) else None
    tiles.append(("steps", f"{last.get('step', 0):,}", f"of {total:,}" if isinstance(total, int) else ""))
    smoothed = smooth([formats.finite_number(record, "loss") for record in run.counted_steps])
    loss = formats.finite_number(last, "loss")
    near = smoothed[-1] if smoothed else None
    tiles.append(("last loss", _fixed(loss), f"smoothed {near:.4f}" if near is not None else ""))
    for name, evaluations in (views.group_by_set(run.events) or {"held-out": [{}]}).items():
        last_loss = formats.finite_number(evaluations[-1], "loss")
        note = formats.describe_scores(evaluations[-1])
        tiles.append((f"{html.escape(name)} loss", _fixed(last_loss), note))
    tokens = formats.finite_number(last, "total_tokens")
    unit = speed_unit(run)
    counted = "tokens" if unit == "tokens" else "losses"  # a sample may have several targets, such as one for each word
    tiles.append((counted, formats.format_count(tokens) if tokens is not None else "-", "trained on"))
    step_s = _numbers(run.counted_steps, "step_s")
    rates = [
        (rate, s)
        for record in run.counted_steps
        if (rate := formats.finite_number(record, "tokens_per_s")) is not None
        and (s := formats.finite_number(record, "step_s"))
    ]
    # all tokens, as in the curve: in a chat only some are targets
    mean = sum(rate * s for rate, s in rates) / sum(s for _, s in rates) if rates else None
    tiles.append(("mean speed", formats.format_count(mean) if mean is not None else "-", f"{unit}/s"))
    waits = _numbers(run.counted_steps, "wait_s")
    share = f"{100 * sum(waits) / sum(step_s):.0f} % of it waiting" if waits and sum(step_s) > 0 else ""
    tiles.append(("median step", formats.format_seconds(statistics.median(step_s)) if step_s else "-", share))
    mfu = _numbers(run.counted_steps, "mfu")
    if mfu:
        causal = _numbers(run.counted_steps, "mfu_causal")
        note = f"{100 * statistics.median(causal):.1f} % with the causal half" if causal else ""
        tiles.append(("median MFU", f"{100 * statistics.median(mfu):.1f} %", note))
    memory = _numbers([*run.counted_steps, *run.lost_steps], "memory_bytes")
    tiles.append(("peak memory", formats.format_bytes(max(memory)) if memory else "-", "fullest rank"))
    tries = count_attempts(run)
    tiles.append(
        ("total time", formats.format_seconds(run.ended - run.began), f"{tries} attempt{'s' if tries > 1 else ''}")
    )
    found = len(find_incidents(run))
    tiles.append(("incidents", str(found), f"{run.totals.lost_steps} steps replayed" if found else "none died"))
    return "".join(
        f'<div class="tile"><dt>{name}</dt><dd>{html.escape(value)}</dd><p>{html.escape(note)}</p></div>'
        for name, value, note in tiles
    )


def _numbers(records: Iterable[Record], key: str) -> list[float]:
    return [value for record in records if (value := formats.finite_number(record, key)) is not None]


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _incidents(run: RunHistory) -> str:
    """Incident lines: what failed, the recovery time, and how many steps were replayed."""
    lines = [
        f"<li><b>{html.escape(each.what)}</b><span>{html.escape(each.recovery)}</span></li>"
        for each in find_incidents(run)
    ]
    return f'<ul class="incidents">{"".join(lines)}</ul>' if lines else ""


def _curves(drawn: list[Record]) -> str:
    if not drawn:
        return '<div class="bar"><h2>Curves</h2></div><div class="card empty">No steps recorded yet.</div>'
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
    """Cards below the curves: events, resolved configuration and versions."""
    found = events_with_steps(run)
    happened = [each for each in found if each[0].get("kind") != EventKind.AUTO_RESOLVED]
    resolved = [each for each in found if each[0].get("kind") == EventKind.AUTO_RESOLVED]
    table = _events(run, happened) if happened else "<p>No events recorded.</p>"
    parts = [f'<section class="card"><h3>Events</h3>{table}</section>']
    parts += devices.render_device_card(
        devices.summarize_devices(run.counted_steps, run.facts.device_names, run.facts.device_lines)
    )
    parts += [
        *views.render_prediction_card(run),
        *views.render_eval_card(run.events),
        *views.render_fp8_card(run.events),
        *render_expert_card(run.events),
        *views.render_profile_cards(run),
    ]
    if resolved:
        title = f"<summary>Values of <code>auto</code> <span>{len(resolved)} resolved</span></summary>"
        parts.append(f'<details class="card">{title}{_events(run, resolved)}</details>')
    if run.facts.config_text:
        config = f"<pre>{html.escape(run.facts.config_text)}</pre>"
        parts.append(f'<details class="card"><summary>Resolved configuration</summary>{config}</details>')
    if run.facts.versions:
        pairs = "".join(
            f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(_plain(value))}</td></tr>"
            for key, value in run.facts.versions.items()
        )
        table = f'<div class="scroll"><table class="versions"><tbody>{pairs}</tbody></table></div>'
        parts.append(f'<details class="card"><summary>Versions</summary>{table}</details>')
    return "".join(parts)


def _events(run: RunHistory, events: Sequence[tuple[Record, int | None]]) -> str:
    """Table of events, a row each, with the last step before each."""
    rows = []
    for event, after_step in events[-EVENTS:]:
        mark = event_text.event_mark(str(event.get("kind")))
        moment = formats.finite_number(event, "time")
        cells = [formats.format_clock(moment - run.began), _moment(moment)] if moment is not None else ["", ""]
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
