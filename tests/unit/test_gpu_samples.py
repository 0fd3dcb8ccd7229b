"""GPUs over time: recorded by a process of a node, read for the page and for Prometheus."""

import threading
import time
from pathlib import Path
from typing import Any

from phalanx.core.json_lines import read_lines
from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.dashboard.run_curves import CurvePoints
from phalanx.dashboard.run_view import RunView, thin
from phalanx.health.findings import DeviceInfo
from phalanx.health.gpu import Gpu, GpuMemoryErrors, GpuReading
from phalanx.launch import gpu_recorder
from phalanx.launch.gpu_recorder import GpuRecorder, make_sample
from phalanx.report.gpu_samples import gpu_samples_path, read_gpu_samples
from phalanx.report.prometheus import RunCollector
from phalanx.report.run_index import RunIndex
from tests.helpers import run_ranks, wait_until
from tests.unit.test_run_index import append, write_life


def simulate(temperature: int, power: float | None = 400.5, corrected: int = 0, lost: bool = False) -> GpuReading:
    errors = GpuMemoryErrors(corrected=corrected, uncorrected=0)
    first = Gpu(0, name="H100", temperature_c=temperature, power_w=power, errors=errors)
    return GpuReading((first, Gpu(1, lost="it has fallen off the bus") if lost else Gpu(1, name="H100")))


def record(placement: Placement, folder: str) -> list[Any]:
    """Lines that a recorder of a node has written, of GPUs and without any."""
    gpu_recorder.SAMPLE_S = 0.05
    paths, times = RunPaths(Path(folder)), iter(range(50, 90))
    running = GpuRecorder.start(paths, 3, [DeviceInfo("cuda:0", "H100", True)], lambda: simulate(next(times)))
    assert running is not None
    wait_until(lambda: len(list(read_lines(gpu_samples_path(paths, 3)))) >= 3)
    running.close()
    lines = list(read_lines(gpu_samples_path(paths, 3)))
    time.sleep(0.2)
    idle = GpuRecorder.start(paths, 0, [DeviceInfo("cpu", "EPYC", True)])
    return [
        [line["gpus"][0]["temperature_c"] for line in lines],
        len(list(read_lines(gpu_samples_path(paths, 3)))),
        idle,
    ]


def test_a_node_records_its_gpus_until_its_agent_leaves(tmp_path: Path) -> None:
    seen, later, idle = run_ranks(record, 1, folder=str(tmp_path))[0]
    assert seen[:3] == [50, 51, 52] and later == len(seen) and idle is None


def test_a_node_without_a_driver_records_nothing() -> None:
    assert make_sample(GpuReading(problem="no driver")) is None


def write_run(folder: Path) -> RunPaths:
    paths = RunPaths(folder)
    for path, line in write_life(paths, 1, steps=20):
        append(path, line)
    for at in range(120):
        for node in (0, 10):
            sample = make_sample(simulate(40 + at % 20, corrected=at, lost=at > 100))
            assert sample is not None
            append(gpu_samples_path(paths, node), {**sample, "time": 1000.0 + 30 * at})
    append(gpu_samples_path(paths, 0), {"time": "?", "gpus": [{"index": 0}, {"index": 7}]})
    append(gpu_samples_path(paths, 0), {"time": 9e9, "gpus": "<b>"})
    return paths


def test_samples_are_read_by_node_and_gpu(tmp_path: Path) -> None:
    found = read_gpu_samples(write_run(tmp_path))
    assert [(gpu.node, gpu.index, gpu.lost) for gpu in found] == [
        ("0", 0, False), ("0", 1, True), ("10", 0, False), ("10", 1, True)
    ]  # fmt: skip
    assert found[0].temperature_c[-1] == 59 and found[0].power_w[-1] == 400.5 and found[0].corrected == 119
    assert found[1].temperature_c[-1] is None and found[0].time[-1] == 1000.0 + 30 * 119
    assert len(read_gpu_samples(RunPaths(tmp_path), least_bytes=4096)[0].time) < 120
    assert read_gpu_samples(RunPaths(tmp_path / "none")) == []


def test_the_page_gets_a_few_points_the_newest_among_them(tmp_path: Path) -> None:
    index = RunIndex(write_run(tmp_path))
    while index.poll():
        continue
    sections, _ = RunView(index, CurvePoints(index)).update(2000.0, None, [])
    first, second, *_ = sections["gpus"]
    assert first["temperature"][-1] == 59 and len(first["temperature"]) <= 48 and first["corrected"] == 119
    assert second["lost"] and second["power"][-1] is None
    assert [len(thin(list(range(count)), 48)) for count in (0, 1, 48, 49, 480)] == [0, 1, 48, 25, 48]


def test_prometheus_gets_the_newest_sample(tmp_path: Path) -> None:
    index = RunIndex(write_run(tmp_path))
    now = [4600.0]
    collector = RunCollector(lambda: [index], lambda: now[0], lambda one: [], lambda one: None, threading.Lock())
    found = collector.collect()
    values = {
        (sample.name, sample.labels["node"], sample.labels["gpu"], sample.labels.get("kind", "")): sample.value
        for family in found
        for sample in family.samples
        if "gpu" in sample.labels
    }
    assert values["phalanx_gpu_temperature_celsius", "10", "0", ""] == 59
    assert values["phalanx_gpu_power_watts", "0", "0", ""] == 400.5
    assert values["phalanx_gpu_memory_errors_total", "0", "0", "corrected"] == 119
    assert values["phalanx_gpu_lost", "0", "1", ""] == 1
    assert ("phalanx_gpu_temperature_celsius", "0", "1", "") not in values
    now[0] += 3600.0  # the run is over
    assert not [family.name for family in collector.collect() if "gpu" in family.name]
