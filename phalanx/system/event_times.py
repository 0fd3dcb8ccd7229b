"""Timing of device work by events, recorded while the host runs ahead and read later."""

import time
from typing import Any

import torch


def record_time(device: torch.device) -> Any:
    """A time stamp for `seconds_between`, after all work that this thread has queued on the device; on a CPU, now."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(first: Any, last: Any) -> float:
    """Seconds between two stamps, by the device's clock. Blocks until the device has reached the last."""
    if isinstance(first, float):
        return float(last - first)
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


class EventTimes:
    """Stamps of one thread's device that are used again: making a device's event costs more than recording one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unused: list[torch.Event] = []
        self.read_delay_steps = int(
            device.type != "cpu"
        )  # how many steps later they are read, so that nothing waits for them

    def record(self) -> Any:
        """As `record_time`."""
        if not self._unused:
            return record_time(self._device)
        event = self._unused.pop()
        event.record()
        return event

    def recycle(self, *stamps: Any) -> None:
        """Return stamps for reuse."""
        self._unused += (each for each in stamps if not isinstance(each, float))
