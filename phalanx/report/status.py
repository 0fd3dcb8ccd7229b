"""Status of a run from its records: facts as plain data (`read_status`), and one screen of them (`render_status`)."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phalanx.core.errors import RunError
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.report import event_text, formats
from phalanx.report.history import RunHistory, count_attempts, read_run_history, run_status
from phalanx.report.incidents import Incident, find_incidents, find_other_problems

RATE_STEPS = 20  # rate and time left are from the median of these many steps
NODES = 8  # each has a line on the screen; of more nodes, those with a finding or a request
MEANT, WELL = "in the run", ("", "ok", "unknown")  # of a node without a finding or a request
INCIDENTS = 8  # and warnings, on the screen; the JSON has all
STYLES = {"bad": "bold red", "warn": "yellow", "good": "green", "info": "cyan", "quiet": "dim"}

Facts = dict[str, Any]


def read_status(
    paths: RunPaths, now: float, scheduler: Facts | None = None, nodes: Sequence[Mapping[str, str]] = ()
) -> Facts:
    """Status of a run at the time `now`, as plain data from its records. The caller adds `scheduler`, the job or
    process (`by`, `id`, `state`, ...), and `nodes` (each with `node`, `state`, `health` and `why`). Raises RunError if
    there are neither records nor a job.
    """
    if not paths.metrics.exists() and not paths.events.exists():
        if scheduler is None:
            raise RunError(f"no run in {paths.display_name}; give the folder of a run, or start it")
        return _empty(paths, scheduler)
    return describe_run(read_run_history(paths), paths, now, scheduler, nodes)


def describe_trouble(run: RunHistory) -> Facts:
    """Incidents and warnings of a run: a part of its facts that changes with its events and attempts alone."""
    return {
        "incidents": [_incident(each) for each in find_incidents(run)],
        "warnings": [_other(event, after) for event, after in find_other_problems(run)],
    }


def describe_run(
    run: RunHistory,
    paths: RunPaths,
    now: float,
    scheduler: Facts | None,
    nodes: Sequence[Mapping[str, str]],
    trouble: Facts | None = None,
) -> Facts:
    """The facts of `read_status` from a history that was read; `trouble` if it is known already."""
    alive = scheduler is not None and scheduler.get("state") in ("RUNNING", "COMPLETING")
    state, tone = run_status(run, now)
    if alive and state in ("not finished", "died"):
        state, tone = "running", "info"
    if scheduler is not None and scheduler.get("state") in ("PENDING", "CONFIGURING", "REQUEUED"):
        state, tone = "waiting", "warn"
    running = state == "running"
    last = run.counted_steps[-1] if run.counted_steps else {}
    steps = _total_steps(run)
    step = int(last.get("step", 0))
    recent = run.counted_steps[-RATE_STEPS:]
    step_s = _median(recent, "step_s")
    started = [event for event in run.events if event.get("kind") == EventKind.RUN_STARTED]
    return {
        "run": paths.display_name,
        "name": paths.name,
        "state": state,
        "tone": tone,
        "step": step,
        "steps": steps,
        "loss": formats.finite_number(last, "loss"),
        "unit": started[-1].get("unit", "tokens") if started else "tokens",
        "tokens_per_s": _median(recent, "tokens_per_s"),
        "left_s": (steps - step) * step_s if running and steps and step_s is not None else None,
        "attempts": count_attempts(run),
        "ranks": started[-1].get("world") if started else None,
        "device": started[-1].get("device") if started else None,
        "hosts": started[-1].get("hosts") if started else None,
        "nodes": list(nodes),
        "checkpoint": _checkpoint(run),
        "goodput": measure_goodput(run, now if running else None),
        **(describe_trouble(run) if trouble is None else trouble),
        "last_line": run.last_line or None,  # of records that are still empty
        "scheduler": scheduler,
    }


def _empty(paths: RunPaths, scheduler: Facts) -> Facts:
    waits = scheduler.get("state") in ("PENDING", "CONFIGURING", "REQUEUED")
    return {
        "run": paths.display_name, "name": paths.name, "state": "waiting" if waits else "not started",
        "tone": "warn" if waits else "quiet", "step": 0, "steps": None, "loss": None, "unit": "tokens",
        "tokens_per_s": None, "left_s": None, "attempts": 0, "ranks": None, "device": None, "hosts": None, "nodes": [],
        "checkpoint": None, "goodput": None, "incidents": [], "warnings": [], "last_line": None, "scheduler": scheduler,
    }  # fmt: skip


def measure_goodput(run: RunHistory, now: float | None) -> Facts | None:
    """Goodput: the sum of the times of counted steps over the run's time, from each start to its orderly end (a stop,
    the last step), its last line, or `now` while it runs. Time between an orderly end and the next start, such as in a
    queue, does not count. None before the first step.
    """
    counted_s = run.totals.counted_s
    marks = [
        (moment, str(event.get("kind")))
        for event in run.events
        if (moment := formats.finite_number(event, "time")) is not None
        and event.get("kind") in (EventKind.RUN_STARTED, EventKind.RESTARTED, EventKind.STOPPED, EventKind.FINISHED)
    ]
    if not counted_s or not marks:
        return None
    wall_s, began = 0.0, None
    for moment, kind in marks:
        if kind in (
            EventKind.RUN_STARTED,
            EventKind.RESTARTED,
        ):  # the latter alone if ranks only stopped for other nodes
            began = moment if began is None else began
        elif began is not None:
            wall_s, began = wall_s + moment - began, None
    if began is not None:
        wall_s += max(0.0, (run.ended if now is None else now) - began)
    wall_s = max(wall_s, counted_s)
    return {"share": counted_s / wall_s, "counted_s": counted_s, "wall_s": wall_s, "lost_steps": run.totals.lost_steps}


def _incident(each: Incident) -> Facts:
    kind, seconds = str(each.cause.get("kind")), each.seconds
    text = f"{each.what}; {each.recovery}"
    return {
        "time": each.time, "kind": kind, "step": each.after_step, "tone": "bad" if seconds is None else "warn",
        "text": text, "recovery_s": seconds,
    }  # fmt: skip


def _other(event: Facts, step: int | None) -> Facts:
    kind = str(event.get("kind"))
    tone, text = event_text.event_mark(kind).tone, event_text.describe_event(event, step)
    return {"time": formats.finite_number(event, "time"), "kind": kind, "step": step, "tone": tone, "text": text}


def _total_steps(run: RunHistory) -> int | None:
    started = (event.get("steps") for event in reversed(run.events) if event.get("kind") == EventKind.RUN_STARTED)
    if isinstance(steps := next(started, None), int):
        return steps
    train = run.facts.config.get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else None


def _median(records: Sequence[Facts], key: str) -> float | None:
    values = [value for record in records if (value := formats.finite_number(record, key)) is not None]
    return statistics.median(values) if values else None


def _checkpoint(run: RunHistory) -> Facts | None:
    saved = [event for event in run.events if event.get("kind") == EventKind.CHECKPOINT_SAVED]
    if not saved:
        return None
    return {"step": saved[-1].get("step"), "time": formats.finite_number(saved[-1], "time")}


# ---------------------------------------------------------------------------------------------------------- on a screen


def render_status(facts: Facts, now: float) -> RenderableType:
    """Render the facts of `read_status` as one screen."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _rows(facts, now):
        grid.add_row(name, value)
    lines = []
    for name in ("incidents", "warnings"):
        found = facts[name][-INCIDENTS:]
        if found:
            few = "" if len(found) == len(facts[name]) else f", the last {len(found)} of {len(facts[name])}"
            lines.append(Text(f"{name}{few}", style="bold"))
        for each in found:
            line = Text(_clock(each["time"], now), style="dim")
            line.append(" ").append(event_text.event_mark(each["kind"]).symbol, style=STYLES[each["tone"]])
            lines.append(line.append(f" {each['text']}"))
    return Group(Panel.fit(grid, title=facts["name"], title_align="left", padding=(0, 1)), *lines)


def _rows(facts: Facts, now: float) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = [("run", Text(facts["run"]))]
    quiet = (
        ""
        if facts["last_line"] is None
        else f", last record {formats.format_seconds(max(0.0, now - facts['last_line']))} ago"
    )
    rows.append(("state", Text(facts["state"] + quiet, style=STYLES[facts["tone"]])))
    if facts["scheduler"] is not None:
        rows.append(("job", Text(describe_scheduler(facts["scheduler"]))))
    if facts["step"]:
        rows.append(("progress", _progress(facts)))
        figures = [f"loss {facts['loss']:.4f}" if facts["loss"] is not None else "loss is not a finite number"]
        if facts["tokens_per_s"] is not None:
            figures.append(f"{formats.format_count(facts['tokens_per_s'])} {facts['unit']}/s")
        if facts["left_s"] is not None:
            figures.append(f"{formats.format_clock(facts['left_s'])} left")
        rows.append(("", Text("   ".join(figures))))
    if facts["ranks"] is not None:
        ranks = f"{facts['ranks']} rank{'' if facts['ranks'] == 1 else 's'} on {facts['device']}"
        rows.append(("ranks", Text(f"{ranks}, attempt {facts['attempts']}")))
    if facts["nodes"] or facts["hosts"]:
        rows.append(("nodes", _nodes(facts)))
    if facts["checkpoint"] is not None:
        when = facts["checkpoint"]["time"]
        ago = "" if when is None else f", {formats.format_seconds(max(0.0, now - when))} ago"
        rows.append(("checkpoint", Text(f"step {facts['checkpoint']['step']}{ago}")))
    if (good := facts["goodput"]) is not None:
        lost = f"; {good['lost_steps']} steps were replayed" if good["lost_steps"] else ""
        counted, wall = formats.format_seconds(good["counted_s"]), formats.format_seconds(good["wall_s"])
        text = f"{good['share']:.1%}: {counted} of steps in {wall}{lost}"
        rows.append(("goodput", Text(text)))
    return rows


def _nodes(facts: Facts) -> Text:
    """Each node if there are few; of many, their number and those with a finding or a request."""
    if not facts["nodes"]:
        return Text(", ".join(map(str, facts["hosts"] or [])))
    told = [(node, node["state"] != MEANT or node["health"] not in WELL or node["why"]) for node in facts["nodes"]]
    few = len(told) <= NODES
    lines = [] if few else [Text(f"{sum(not worth for _, worth in told)} in the run")]
    for node, worth in told:
        if worth or few:
            parts = [node["state"], f"health: {node['health']}" if node["health"] else "", node["why"]]
            text = f"{node['node']}, {', '.join(part for part in parts if part)}"
            lines.append(Text(text, style=STYLES["warn"] if worth and node["state"] != "the run is over" else ""))
    return Text("\n").join(lines)


def _progress(facts: Facts) -> RenderableType:
    if not facts["steps"]:
        return Text(f"step {facts['step']}")
    grid = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=facts["steps"], completed=min(facts["step"], facts["steps"]), width=30)
    grid.add_row(bar, Text(f"step {facts['step']} of {facts['steps']}, {facts['step'] / facts['steps']:.0%}"))
    return grid


def describe_scheduler(scheduler: Facts) -> str:
    """The job or process on one line."""
    if scheduler["by"] == "process":
        return f"process {scheduler['id']} on {scheduler['nodes']}"
    parts = [f"{scheduler['id']} of {scheduler['by'].capitalize()}, {scheduler['state']}"]
    if scheduler.get("reason") and scheduler["state"] not in ("RUNNING", "COMPLETED"):
        parts.append(f" ({scheduler['reason']})")
    parts.append(f" on {scheduler['nodes']}" if scheduler.get("nodes") else "")
    parts.append(
        f", until {scheduler['end_time']}" if scheduler.get("state") == "RUNNING" and scheduler.get("end_time") else ""
    )
    restarts = scheduler.get("restarts") or 0
    parts.append(f", restarted {restarts} time{'' if restarts == 1 else 's'}" if restarts else "")
    return "".join(parts)


def render_runs_table(found: Sequence[Facts]) -> RenderableType:
    """Several runs, a line each."""
    grid = Table(box=None, pad_edge=False)
    for name in ("run", "state", "step", "loss", "goodput", "incidents"):
        grid.add_column(name, overflow="fold")
    for facts in found:
        steps = f"{facts['step']}/{facts['steps']}" if facts["steps"] else str(facts["step"])
        loss = "" if facts["loss"] is None else f"{facts['loss']:.4f}"
        good = "" if facts["goodput"] is None else f"{facts['goodput']['share']:.0%}"
        state = Text(facts["state"], style=STYLES[facts["tone"]])
        grid.add_row(Text(facts["run"]), state, steps, loss, good, str(len(facts["incidents"])))
    return grid


def _clock(moment: float | None, now: float) -> str:
    if moment is None:
        return "        "
    same_day = now - moment < 12 * 3600
    return time.strftime("%H:%M:%S" if same_day else "%m-%d %H:%M", time.localtime(moment))
