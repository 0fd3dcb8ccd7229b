"""Temperature, power and memory errors of a node's GPUs over time, recorded by a process beside its agent.

The driver's library may hang on a sick device, so the agent never calls it.
"""

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from phalanx.core.json_lines import append_line
from phalanx.core.run_paths import RunPaths
from phalanx.health import nvml
from phalanx.health.findings import DeviceInfo
from phalanx.health.gpu import GpuReading
from phalanx.report.gpu_samples import SAMPLE_S, gpu_samples_path
from phalanx.system.fork import STOP_SIGNALS, end_child, fork

Read = Callable[[], GpuReading]


class GpuRecorder:
    """A running recorder."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self._pid, self._pidfd = pid, pidfd

    @classmethod
    def start(
        cls, paths: RunPaths, node: int, devices: Sequence[DeviceInfo], read: Read = nvml.read_gpus
    ) -> Self | None:
        """Start one on a node that trains on accelerators; else None. Raises OSError without room for a process."""
        if all(device.name == "cpu" for device in devices):
            return None
        return cls(*fork(lambda: _record(paths, node, read)))

    def close(self) -> None:
        end_child(self._pid, self._pidfd)


def _record(paths: RunPaths, node: int, read: Read) -> int:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the agent ends it
    while True:
        if (sample := make_sample(read())) is not None:
            with contextlib.suppress(OSError):  # a full disk stops no training
                append_line(gpu_samples_path(paths, node), sample)
        time.sleep(SAMPLE_S)


def make_sample(reading: GpuReading) -> dict[str, Any] | None:
    """A record of all GPUs; None where the driver shows none."""
    gpus = [
        {
            "index": gpu.index,
            "name": gpu.name,
            "temperature_c": gpu.temperature_c,
            "power_w": gpu.power_w,
            "corrected": gpu.errors.corrected,
            "uncorrected": gpu.errors.uncorrected,
            "lost": gpu.lost is not None,
        }
        for gpu in reading.gpus
    ]
    return {"time": time.time(), "host": socket.gethostname(), "gpus": gpus} if gpus else None
