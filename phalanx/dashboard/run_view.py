"""The page's data of one run, as JSON: its line in the list of runs, and the sections of its page.

Facts, incidents, charts and sentences are those of `phalanx status` and of the report, as plain data.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.core.records import EventKind
from phalanx.dashboard.run_curves import CurvePoints, RunCurves
from phalanx.report import devices, event_text, formats
from phalanx.report.charts import evaluation_curves, event_marks, list_charts
from phalanx.report.expert_load import find_newest_loads
from phalanx.report.gpu_samples import read_gpu_samples
from phalanx.report.history import Record, RunHistory, events_with_steps
from phalanx.report.run_index import RECENT, RunIndex
from phalanx.report.status import describe_run, describe_scheduler, describe_trouble

SPARK_POINTS = 48  # points of the loss curve in the list of runs
EVENTS = 300  # newest events in the table
SLOW_S = 10.0  # interval between updates from all drawn records, without events
DEVICE_STEPS = 200  # newest steps, whose division the table of devices shows
RANKS = 64  # ranks with a separate row

Facts = dict[str, Any]


def encode(value: object) -> bytes:
    """Encode as ASCII JSON; numbers that are not finite become null."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def spark_line(index: RunIndex) -> list[float | None]:
    """The loss in a few points, each the mean of its stretch."""
    losses = index.columns.loss
    stride = max(1, -(-len(losses) // SPARK_POINTS))
    found: list[float | None] = []
    for start in range(0, len(losses), stride):
        part = losses[start : start + min(stride, 64)]  # only the beginning of a long stretch
        known = [value for value in part if math.isfinite(value)]
        found.append(float(f"{sum(known) / len(known):.4g}") if known else None)
    return found


def _where_it_stands(facts: Facts) -> Facts:
    same = ("name", "state", "tone", "step", "steps")
    return {"folder": facts["run"]} | {key: facts[key] for key in same}


def summarize_run(run_id: str, index: RunIndex, facts: Facts) -> Facts:
    """The line of a run in the list of runs, from its facts."""
    rate, left, good = facts["tokens_per_s"], facts["left_s"], facts["goodput"]
    return {
        "id": run_id,
        **_where_it_stands(facts),
        "loss": facts["loss"],
        "rate": None if rate is None else f"{formats.format_count(rate)} {facts['unit']}/s",
        "left": None if left is None else formats.format_clock(left),
        "ranks": _ranks(facts),
        "goodput": None if good is None else round(good["share"], 4),
        "incidents": len(facts["incidents"]),
        "last_line": facts["last_line"],
        "spark": spark_line(index),
        "read": None if index.complete else round(index.progress, 2),
    }


def _ranks(facts: Facts) -> str:
    if facts["ranks"] is None:
        return ""
    return f"{facts['ranks']} rank{'' if facts['ranks'] == 1 else 's'} on {facts['device'] or 'a device'}"


class RunView:
    """Sections of one run's page, updated when its records have grown."""

    def __init__(self, index: RunIndex, points: CurvePoints) -> None:
        self.index = index
        self.curves = RunCurves(index, points)
        self.facts: Facts = {}  # of the last update
        self._trouble: tuple[object, Facts] = (None, {})  # input of the section, and the section
        self._slow: tuple[object, float] = (None, 0.0)  # input of the slow sections, and when they were made

    def update(self, now: float, scheduler: Facts | None, nodes: Sequence[Mapping[str, str]]) -> tuple[Facts, int]:
        """Sections that may have changed, by name, and the first row of the curves that changed.

        Figures and curves are made each time; sections that depend on all drawn records after an event, else once in
        SLOW_S.
        """
        run, first = self.curves.update()
        columns = self.index.columns
        known = len(self.index.events), len(self.index.lost_offsets), columns.attempt[-1:].tolist(), self.index.complete
        if self._trouble[0] != known:
            self._trouble = known, describe_trouble(run)
        self.facts = facts = describe_run(run, self.index.paths, now, scheduler, nodes, self._trouble[1])
        sections = {"facts": self._facts(run, facts, now)}
        basis = len(self.index.events), len(self.index.lost_offsets), self.index.complete
        if self._slow[0] != basis or now >= self._slow[1] + SLOW_S:
            self._slow = basis, now
            sections |= self._slow_sections(facts)
        return sections, first

    def _slow_sections(self, facts: Facts) -> Facts:
        run = self.curves.history()
        lost = self.curves.list_lost_columns()
        drawn = {**self.curves.columns, "smooth": self.curves.columns["loss"]}
        charts = {
            "charts": list_charts(run, drawn, {**lost, "smooth": lost["loss"]}),
            "lost": lost,
            **evaluation_curves(run),
            "events": event_marks(run),
            "duration": float(f"{run.ended - run.began:.1g}"),  # the chart chooses a unit by it
        }
        return {
            "charts": charts,
            "story": _story(run, facts),
            "devices": self._devices(run),
            "gpus": self._gpus(),
            "experts": find_newest_loads(run.events),
            "config": {
                "text": run.facts.config_text,
                "versions": {key: str(value) for key, value in run.facts.versions.items()},
            },
        }

    def rows(self, first: int) -> Facts:
        """The columns of the curves from a row on."""
        columns = {name: values[first:] for name, values in self.curves.columns.items()}
        return {"base": self.curves.base, "from": first, "columns": columns}

    def range(self, first: int, last: int, most: int) -> Record:
        """Columns of the steps `first` to `last`, evenly spaced if there are more than `most`."""
        return self.curves.make_columns(self.index.read_range(first, last, most))

    def _facts(self, run: RunHistory, facts: Facts, now: float) -> Facts:
        started: Record = next((e for e in reversed(run.events) if e.get("kind") == EventKind.RUN_STARTED), {})
        about = [event_text.describe_parameters(started), _ranks(facts)]
        about += [str(started[key]) for key in ("dtype", "engine") if started.get(key)]
        scheduler = facts["scheduler"]
        return {
            **_where_it_stands(facts),
            "about": [text for text in about if text],
            "job": None if scheduler is None else describe_scheduler(scheduler),
            "began": run.began,
            "last_line": facts["last_line"],
            "running": facts["state"] == "running",
            "tiles": self._tiles(run, facts, now),
            "nodes": facts["nodes"],
            "read": None if self.index.complete else round(self.index.progress, 2),
        }

    def _tiles(self, run: RunHistory, facts: Facts, now: float) -> list[Facts]:
        """Label, value and note of each figure at the top of the page."""
        last: Record = run.counted_steps[-1] if run.counted_steps else {}
        recent = run.counted_steps[-RECENT:]
        tiles = []

        def tile(label: str, value: str, note: str = "", tone: str = "") -> None:
            tiles.append({"label": label, "value": value, "note": note, "tone": tone})

        loss, tokens = facts["loss"], formats.finite_number(last, "total_tokens")
        tile("loss", "-" if loss is None else f"{loss:.4f}", _best_evaluation(run))
        rate = facts["tokens_per_s"]
        counted = "tokens" if facts["unit"] == "tokens" else "losses"
        seen = "" if tokens is None else f"{formats.format_count(tokens)} {counted} seen"
        unit = f"{facts['unit']}/s"
        tile(unit, "-" if rate is None else formats.format_count(rate), seen)
        mfu = _mean(recent, "mfu")
        if mfu is not None:
            causal = _mean(recent, "mfu_causal")
            tile("MFU", f"{100 * mfu:.1f} %", "" if causal is None else f"{100 * causal:.1f} % if causal")
        wait, step_s = _mean(recent, "wait_s"), _mean(recent, "step_s")
        waiting = "" if wait is None or not step_s else f"{100 * wait / step_s:.0f} % of it waiting"
        tile("step time", "-" if step_s is None else formats.format_seconds(step_s), waiting)
        if (good := facts["goodput"]) is not None:
            note = f"{good['lost_steps']} steps replayed" if good["lost_steps"] else "no step replayed"
            tile("goodput", f"{100 * good['share']:.1f} %", note)
        memory = self.index.peak_memory_bytes
        tile("peak memory", formats.format_bytes(memory) if memory else "-", "fullest rank")
        saved = facts["checkpoint"]
        age = None if saved is None or saved["time"] is None else formats.format_seconds(max(0.0, now - saved["time"]))
        if facts["state"] != "running" and saved is not None:
            age = None
        tile("checkpoint", "none" if saved is None else f"step {saved['step']}", "" if age is None else f"{age} ago")
        count = len(facts["incidents"])
        attempts = f"{facts['attempts']} attempt{'' if facts['attempts'] == 1 else 's'}"
        tile("incidents", str(count), attempts, "warn" if count else "")
        return tiles

    def _gpus(self) -> list[Facts]:
        """Temperature, power and memory errors of GPUs over the last samples."""
        rows: list[Facts] = []
        for gpu in read_gpu_samples(self.index.paths)[:RANKS]:
            errors = {"corrected": gpu.corrected, "uncorrected": gpu.uncorrected}
            curves = {"temperature": thin(gpu.temperature_c, SPARK_POINTS), "power": thin(gpu.power_w, SPARK_POINTS)}
            where = f"{gpu.node} {gpu.host}"
            span = {"since": gpu.time[0], "at": gpu.time[-1]}
            rows.append({"node": where, "gpu": gpu.index, "name": gpu.name, "lost": gpu.lost} | errors | curves | span)
        return rows

    def _devices(self, run: RunHistory) -> Facts | None:
        """Work and waiting of each rank, over the newest steps."""
        records = self.index.read_records(self.index.columns.offset[-DEVICE_STEPS:])
        records = records if self.index.complete else run.counted_steps[-RECENT:]
        found = devices.summarize_devices(records, run.facts.device_names, run.facts.device_lines)
        if found is None:
            return None
        rows: list[Facts] = [
            {
                "rank": device.rank,
                "name": device.name,
                "sequences": device.last_share,
                "share": round(device.share, 4),
                "busy": round(device.busy, 4),
                "rate": None if device.sequences_per_s is None else formats.format_count(device.sequences_per_s),
            }
            for device in found.devices
        ]
        rows = rows if len(rows) <= RANKS else sorted(rows, key=lambda row: float(row["busy"]))[:RANKS]
        few = f"; the {RANKS} that waited most of {len(found.devices)}" if len(found.devices) > RANKS else ""
        return {
            "of": "copy" if found.of_copies else "rank",
            "rows": rows,
            "about": found.about + few,
            "verdict": found.verdict,
        }


def thin(values: Sequence[float | None], most: int) -> list[float | None]:
    """At most so many of the values, evenly spaced, the last among them."""
    stride = max(1, -(-len(values) // most))
    return list(values[(len(values) - 1) % stride :: stride])


def _mean(records: Sequence[Record], key: str) -> float | None:
    values = [value for record in records if (value := formats.finite_number(record, key)) is not None]
    return sum(values) / len(values) if values else None


def _best_evaluation(run: RunHistory) -> str:
    last = next((event for event in reversed(run.events) if event.get("kind") == EventKind.EVALUATED), None)
    loss = None if last is None else formats.finite_number(last, "loss")
    return "" if last is None or loss is None else f"{event_text.set_name(last)} {loss:.4f}"


def _story(run: RunHistory, facts: Facts) -> Facts:
    """Incidents with their causes, warnings, and the newest events, each as a sentence."""
    told = [each for each in events_with_steps(run) if each[0].get("kind") != EventKind.AUTO_RESOLVED]
    events = []
    for event, after_step in told[-EVENTS:]:
        mark = event_text.event_mark(str(event.get("kind")))
        events.append(
            {
                "time": formats.finite_number(event, "time"),
                "attempt": event.get("attempt") if isinstance(event.get("attempt"), int) else None,
                "tone": mark.tone,
                "symbol": mark.symbol,
                "text": event_text.describe_event(event, after_step),
            }
        )
    return {
        "began": run.began,
        "ended": run.ended,
        "incidents": facts["incidents"],
        "warnings": facts["warnings"][-EVENTS:],
        "pauses": _pauses(run.events),
        "events": events,
        "more": max(0, len(told) - EVENTS),
    }


def _pauses(events: Sequence[Record]) -> list[tuple[float, float]]:
    """Times between an orderly end and the next start: (end, start)."""
    found, ended = [], None
    for event in events:
        moment = formats.finite_number(event, "time")
        if moment is None:
            continue
        if event.get("kind") in (EventKind.STOPPED, EventKind.FINISHED):
            ended = moment
        elif event.get("kind") in (EventKind.RUN_STARTED, EventKind.RESTARTED) and ended is not None:
            found.append((ended, moment))
            ended = None
    return found
