"""Profiling of a run: a torch.profiler trace of some steps, and a memory profile of one step."""

import contextlib
import gzip
import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch.autograd.profiler_util import FunctionEventAvg

from phalanx.comm.mesh import Mesh
from phalanx.core.json_lines import write_atomic
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.system import accelerator
from phalanx.system.trace import PHASES, TRACE_PREFIX
from phalanx.workload.sinks import RecordWriter

if TYPE_CHECKING:
    from phalanx.config.schema import TrainSection

OPERATORS = 10  # number of operators in an event and in the rank's log
OUTSIDE = "between phases"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptureContext:
    """The context of a run for its profilers."""

    paths: RunPaths
    mesh: Mesh
    records: RecordWriter


class StepCapture(Protocol):
    """A profiler of the steps from `first` to `last`."""

    first: int
    last: int

    def start(self, step: int) -> None: ...

    def finish(self, step: int, alone: bool) -> None:
        """Write the profile up to and including `step`; `alone`: other ranks may have exited."""
        ...


class StepProfiler:
    """The profilers of a recipe (`train.profile`, `train.memory_snapshot`); without any, no cost.

    Call `begin_step` when a step begins. Leaving the context writes unfinished profiles, also after an error: the one
    that shows what filled the memory matters most.
    """

    def __init__(self, train: "TrainSection", paths: RunPaths, mesh: Mesh, records: RecordWriter) -> None:
        self._context = where = CaptureContext(paths, mesh, records)
        self._scheduled: list[StepCapture] = []
        if train.profile is not None:
            first, last = (int(part) for part in train.profile.split("-"))
            self._scheduled.append(TraceCapture(first, last, where))
        if train.memory_snapshot:
            make = CpuMemoryCapture if mesh.device.type == "cpu" else AcceleratorMemoryCapture
            self._scheduled.append(make(train.memory_snapshot, train.memory_snapshot, where))
        self._active: StepCapture | None = None
        self._step = 0  # the last step begun

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(alone=error is not None)

    def begin_step(self, step: int) -> bool:
        """Note that `step` begins; returns whether that took time to be excluded from the step's."""
        if self._active is None and not self._scheduled:
            return False
        busy = False
        if self._active is not None and step > self._active.last:
            self.close()
            busy = True
        self._step = step
        self._warn_missed([look for look in self._scheduled if look.last < step])
        due = [look for look in self._scheduled if look.first <= step]
        if due and self._active is None:
            self._active = due[0]
            self._scheduled.remove(due[0])
            due[0].start(step)
            busy = True
        return busy

    def _warn_missed(self, captures: list[StepCapture]) -> None:
        """Warn of steps that can no longer be profiled, unless an earlier attempt profiled them."""
        for look in captures:
            self._scheduled.remove(look)
            if not self._context.paths.profile.exists():
                message = f"steps {look.first} to {look.last} are not profiled: they were done before this start"
                self._context.records.write_event(EventKind.WARNING, {"message": message})

    def close(self, alone: bool = False) -> None:
        """Finish open profiles; the step begun last is their last one."""
        if self._active is not None:
            look, self._active = self._active, None
            look.finish(self._step, alone)


class TraceCapture:
    """Trace of all operators of some steps, with phases named: one file per rank, for Perfetto or chrome://tracing."""

    def __init__(self, first: int, last: int, context: CaptureContext) -> None:
        self.first, self.last, self._context = first, last, context
        self._profiler = _profiler(context.mesh.device)

    def start(self, step: int) -> None:
        self.first = step  # a run that resumes within the window profiles the rest of it
        self._profiler.start()

    def finish(self, step: int, alone: bool) -> None:
        mesh, paths = self._context.mesh, self._context.paths
        accelerator.synchronize(mesh.device)
        self._profiler.stop()
        steps = step - self.first + 1
        averages = self._profiler.key_averages()
        mine = phase_seconds(averages, steps)
        slowest = mine if alone else dict(zip(PHASES, mesh.max(list(mine.values())), strict=True))
        operators = top_operators(averages, steps)
        log.info("%s", _render_table(mine, operators))
        path = paths.trace(mesh.rank, self.first, step)
        with _write_whole_file(path, self._context.records) as temporary:
            self._profiler.export_chrome_trace(str(temporary))
        details = {"first": self.first, "last": step, "folder": f"{paths.display_name}/{paths.profile.name}"}
        both = {name: [_round(mine[name]), _round(slowest[name])] for name in PHASES if slowest[name]}
        self._context.records.write_event(EventKind.PROFILED, {**details, "phases": both, "operators": operators})


class CpuMemoryCapture:
    """Memory profile of a step on the host, by phase and operator. torch's host allocator keeps no history, so
    torch.profiler records it."""

    def __init__(self, first: int, last: int, context: CaptureContext) -> None:
        self.first, self.last, self._context = first, last, context
        self._profiler = _profiler(context.mesh.device, memory=True)

    def start(self, step: int) -> None:
        self._profiler.start()

    def finish(self, step: int, alone: bool) -> None:
        self._profiler.stop()
        path = self._context.paths.memory(self._context.mesh.rank, step, "json")
        with _write_whole_file(path, self._context.records) as temporary:
            trace = temporary.with_suffix(".json.gz")
            try:
                self._profiler.export_chrome_trace(str(trace))
                with gzip.open(trace, "rt", encoding="utf-8") as file:
                    found = summarize_allocations(json.load(file)["traceEvents"])
            finally:
                trace.unlink(missing_ok=True)
            write_atomic(
                temporary, json.dumps({"step": step, "rank": self._context.mesh.rank, **found}, indent=2) + "\n"
            )
            details = {
                "step": step,
                "file": _display_path(self._context.paths, path),
                "peak_bytes": found["peak_bytes"],
            }
            details["phases"] = found["phases"]
            self._context.records.write_event(EventKind.MEMORY_RECORDED, details)


class AcceleratorMemoryCapture:
    """Memory history of the device's allocator in a step, in the format of pytorch.org/memory_viz."""

    def __init__(self, first: int, last: int, context: CaptureContext) -> None:
        self.first, self.last, self._context = first, last, context

    def start(self, step: int) -> None:
        if not accelerator.start_memory_history(self._context.mesh.device):
            message = f"no memory snapshot: a device of kind {self._context.mesh.device.type} records no memory history"
            self._context.records.write_event(EventKind.WARNING, {"message": message})

    def finish(self, step: int, alone: bool) -> None:
        device = self._context.mesh.device
        path = self._context.paths.memory(self._context.mesh.rank, step, "pickle")
        with _write_whole_file(path, self._context.records) as temporary:
            if accelerator.save_memory_history(device, temporary):
                self._context.records.write_event(
                    EventKind.MEMORY_RECORDED, {"step": step, "file": _display_path(self._context.paths, path)}
                )


def _display_path(paths: RunPaths, path: Path) -> str:
    return f"{paths.display_name}/{path.relative_to(paths.root)}"


def _profiler(device: torch.device, memory: bool = False) -> torch.profiler.profile:
    everything = torch.profiler.supported_activities()
    activities = [torch.profiler.ProfilerActivity.CPU] if device.type == "cpu" else everything
    return torch.profiler.profile(activities=activities, profile_memory=memory)


@contextlib.contextmanager
def _write_whole_file(path: Path, records: RecordWriter) -> Iterator[Path]:
    """Write a file atomically; if the disk is full, only log a warning."""
    temporary = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(exist_ok=True)
        yield temporary
        if temporary.exists():
            os.replace(temporary, path)
    except OSError as error:
        log.warning("%s could not be written: %s", path, error.strerror or error)
        records.write_event(EventKind.WARNING, {"message": f"{path} could not be written ({error.strerror or error})"})
    finally:
        temporary.unlink(missing_ok=True)


def phase_seconds(averages: Iterable[FunctionEventAvg], steps: int) -> dict[str, float]:
    """Seconds of each phase in a step, on the host or on the device, whichever is longer."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for entry in averages:
        name = str(entry.key).removeprefix(TRACE_PREFIX)
        if str(entry.key).startswith(TRACE_PREFIX) and name in seconds:
            # An accelerator has an additional entry for a phase, of the same name as the host's.
            seconds[name] = max(
                seconds[name], entry.cpu_time_total / 1e6 / steps, entry.device_time_total / 1e6 / steps
            )
    return seconds


def top_operators(averages: Iterable[FunctionEventAvg], steps: int) -> list[list[Any]]:
    """[name, self seconds per step, calls per step] of the slowest operators."""

    def own(entry: FunctionEventAvg) -> float:
        return float(entry.self_device_time_total or entry.self_cpu_time_total)

    some = list(averages)
    on_device = any(entry.self_device_time_total for entry in some)
    operators = [
        entry
        for entry in some
        if not entry.is_user_annotation and (entry.self_device_time_total or not on_device) and own(entry) > 0
    ]
    longest = sorted(operators, key=own, reverse=True)[:OPERATORS]
    return [[str(entry.key)[:80], _round(own(entry) / 1e6 / steps), round(entry.count / steps, 2)] for entry in longest]


def summarize_allocations(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Summarize a chrome trace with memory events: the peak above the start, and a table by phase and by operator.

    A phase's row has the bytes allocated, how many more are held at its end than at its beginning, and the highest
    total above the start while it ran. An allocation belongs to the innermost phase and the innermost operator.
    """
    entries = sorted(
        (event for event in events if event.get("cat") in ("user_annotation", "cpu_op", "cpu_instant_event")),
        key=lambda event: (event["ts"], -event.get("dur", 0)),
    )
    phases: list[tuple[float, str]] = []  # (end, name) of open phases
    operators: dict[Any, list[tuple[float, str]]] = {}
    by_phase: dict[str, dict[str, int]] = {}
    by_operator: dict[str, dict[str, int]] = {}
    held = peak = 0
    for event in entries:
        now, name = event["ts"], event["name"]
        if event["cat"] == "user_annotation":
            if name.startswith(TRACE_PREFIX):
                phases.append((now + event["dur"], name.removeprefix(TRACE_PREFIX)))
        elif event["cat"] == "cpu_op":
            operators.setdefault(event["tid"], []).append((now + event["dur"], name))
        elif name == "[memory]":
            amount = int(event["args"]["Bytes"])
            held += amount
            peak = max(peak, held)
            row = by_phase.setdefault(
                _innermost(phases, now) or OUTSIDE, {"allocated_bytes": 0, "kept_bytes": 0, "peak_bytes": 0}
            )
            row["allocated_bytes"] += max(amount, 0)
            row["kept_bytes"] += amount
            row["peak_bytes"] = max(row["peak_bytes"], held)
            if amount > 0:
                by = _innermost(operators.get(event["tid"], []), now) or "no operator"
                counts = by_operator.setdefault(by, {"allocated_bytes": 0, "allocations": 0})
                counts["allocated_bytes"] += amount
                counts["allocations"] += 1
    most = sorted(by_operator.items(), key=lambda item: -item[1]["allocated_bytes"])
    return {"peak_bytes": peak, "kept_bytes": held, "phases": by_phase, "operators": dict(most)}


def _innermost(spans: list[tuple[float, str]], now: float) -> str | None:
    while spans and spans[-1][0] < now:
        spans.pop()
    return spans[-1][1] if spans else None


def _render_table(seconds: dict[str, float], operators: list[list[Any]]) -> str:
    lines = ["seconds of a step by phase (gather and reduce are included in the others):"]
    lines += [f"  {value:10.6f}  {name}" for name, value in seconds.items() if value]
    lines += ["seconds of a step by operator, and calls:"]
    lines += [f"  {value:10.6f}  {name}  x{calls:g}" for name, value, calls in operators]
    return "\n".join(lines)


def _round(value: float) -> float:
    return float(f"{value:.6g}")
