"""Looking inside a run: a trace of some steps by torch.profiler, and what one step did with memory."""

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

OPERATORS = 10  # as many are named in an event and in the rank's log
OUTSIDE = "between phases"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptureContext:
    """What a look needs to know of the run it looks into."""

    paths: RunPaths
    mesh: Mesh
    records: RecordWriter


class StepCapture(Protocol):
    """A look at the steps from `first` to `last`."""

    first: int
    last: int

    def start(self, step: int) -> None: ...

    def finish(self, step: int, alone: bool) -> None:
        """Write what was seen up to and including `step`; `alone`: the other ranks may be gone."""
        ...


class StepProfiler:
    """The looks that a recipe asks for (`train.profile`, `train.memory_snapshot`); free of cost where it asks for none.

    Call `begin_step` when a step begins. Leaving the context writes what is still open, also after an error: what
    filled the memory is worth most then.
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
        self._step = 0  # the last that began

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(alone=error is not None)

    def begin_step(self, step: int) -> bool:
        """Say that `step` begins; whether that took time which is not the step's."""
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
        """Say that steps cannot be looked into any more, unless an attempt before did it."""
        for look in captures:
            self._scheduled.remove(look)
            if not self._context.paths.profile.exists():
                message = f"steps {look.first} to {look.last} are not looked into: they were done before this start"
                self._context.records.write_event(EventKind.WARNING, {"message": message})

    def close(self, alone: bool = False) -> None:
        """Finish what is open, with the step that began last as its last one."""
        if self._active is not None:
            look, self._active = self._active, None
            look.finish(self._step, alone)


class TraceCapture:
    """Every operation of some steps, our phases named: a trace for each rank, to be opened in Perfetto or
    chrome://tracing."""

    def __init__(self, first: int, last: int, context: CaptureContext) -> None:
        self.first, self.last, self._context = first, last, context
        self._profiler = _profiler(context.mesh.device)

    def start(self, step: int) -> None:
        self.first = step  # a run that goes on within the window sees the rest of it
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
    """What a step allocates on the host, by phase and operator. torch's allocator keeps no history there, so it is
    taken from torch.profiler."""

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
    """The history of the device's allocator in a step, as the file that pytorch.org/memory_viz reads."""

    def __init__(self, first: int, last: int, context: CaptureContext) -> None:
        self.first, self.last, self._context = first, last, context

    def start(self, step: int) -> None:
        if not accelerator.start_memory_history(self._context.mesh.device):
            message = f"no memory snapshot: a device of kind {self._context.mesh.device.type} keeps no history"
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
    """A file beside `path` that takes its place if it was written. What a full disk does not take is only missed."""
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
    """Seconds of each phase in a step: of the host, or of the device where that worked longer in it."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for entry in averages:
        name = str(entry.key).removeprefix(TRACE_PREFIX)
        if str(entry.key).startswith(TRACE_PREFIX) and name in seconds:
            # An accelerator has an entry of its own for a phase, beside the host's of the same name.
            seconds[name] = max(
                seconds[name], entry.cpu_time_total / 1e6 / steps, entry.device_time_total / 1e6 / steps
            )
    return seconds


def top_operators(averages: Iterable[FunctionEventAvg], steps: int) -> list[list[Any]]:
    """[name, seconds of a step in itself alone, calls in a step] of the operators that took longest."""

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
    """What a chrome trace with memory events says: the peak above the start, and a table by phase and by operator.

    A phase's row has the bytes it allocated, how many more are held at its ends than at its beginnings, and the highest
    total above the start while it ran. An allocation belongs to the innermost phase and to the innermost operator.
    """
    entries = sorted(
        (event for event in events if event.get("cat") in ("user_annotation", "cpu_op", "cpu_instant_event")),
        key=lambda event: (event["ts"], -event.get("dur", 0)),
    )
    phases: list[tuple[float, str]] = []  # (end, name) of those that are open
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
    lines = ["seconds of a step by phase (gather and reduce lie within the others):"]
    lines += [f"  {value:10.6f}  {name}" for name, value in seconds.items() if value]
    lines += ["seconds of a step by operator, and calls:"]
    lines += [f"  {value:10.6f}  {name}  x{calls:g}" for name, value, calls in operators]
    return "\n".join(lines)


def _round(value: float) -> float:
    return float(f"{value:.6g}")
