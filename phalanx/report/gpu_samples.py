"""Temperature, power and memory errors of a run's GPUs over time, as its nodes record them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.json_lines import read_recent_lines
from phalanx.core.run_paths import RunPaths
from phalanx.report.formats import finite_number

RECENT_BYTES = 1 << 18  # of a node's file: half an hour of 16 GPUs, hours of fewer
NEWEST_BYTES = 1 << 13  # with the newest sample
SAMPLE_S, CURRENT_S = 30.0, 120.0  # between two samples; a GPU whose newest is older is not watched any more


def gpu_samples_path(paths: RunPaths, node: int | str) -> Path:
    """The file with the samples of a node's GPUs."""
    return paths.root / f"gpus-{node}.jsonl"


@dataclass
class GpuSeries:
    """Samples of one GPU, oldest first; None for what its driver does not report. Errors count since the driver was
    loaded."""

    node: str
    index: int
    host: str = ""
    name: str = ""
    lost: bool = False
    time: list[float] = field(default_factory=list)
    temperature_c: list[float | None] = field(default_factory=list)
    power_w: list[float | None] = field(default_factory=list)
    corrected: float | None = None
    uncorrected: float | None = None


def read_gpu_samples(paths: RunPaths, least_bytes: int = RECENT_BYTES) -> list[GpuSeries]:
    """The newest samples of all GPUs of a run, by node and GPU. Lines that are damaged have none."""
    found: dict[tuple[str, int], GpuSeries] = {}
    for path in sorted(paths.root.glob(gpu_samples_path(paths, "*").name)):
        node = path.stem.rpartition("-")[2]
        for line in read_recent_lines(path, least_bytes):
            rows = line.get("gpus")
            for row in rows if isinstance(rows, list) else ():
                moment = finite_number(line, "time")
                if moment is not None and isinstance(row, dict) and type(row.get("index")) is int:
                    _add(found.setdefault((node, row["index"]), GpuSeries(node, row["index"])), moment, line, row)
    return [found[key] for key in sorted(found)]


def _add(series: GpuSeries, moment: float, line: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    series.host, series.name, series.lost = str(line.get("host", "")), str(row.get("name", "")), row.get("lost") is True
    series.time.append(moment)
    series.temperature_c.append(finite_number(row, "temperature_c"))
    series.power_w.append(finite_number(row, "power_w"))
    series.corrected, series.uncorrected = finite_number(row, "corrected"), finite_number(row, "uncorrected")
