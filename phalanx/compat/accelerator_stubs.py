"""What stands in for an accelerator's own functions and types where there is none: times, streams, memory.

On a CPU all is done in the order in which it is asked for, so a stream has nothing to wait for, and an event is a time.
"""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

HOST = torch.device("cpu")
# Those that only steer an accelerator.
SILENT = (
    "set_device", "synchronize", "empty_cache", "ipc_collect", "init",
    "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_accumulated_memory_stats", "set_per_process_memory_fraction", "set_rng_state", "set_rng_state_all",
    "set_stream",
)  # fmt: skip
SILENT_OF_MEMORY = (*(name for name in SILENT if "memory" in name), "empty_cache", "_record_memory_history")
SILENT_MARKS = ("range_push", "range_pop", "mark")
SILENT_PROFILER = ("start", "stop")


class Event:
    """A moment of the host's clock."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        return (end._at - self._at) * 1000

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Stream:
    """An order of work; here there is one for all."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Current:
    """The device of a block, of which there is one."""

    def __init__(self, device: Any = None) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def stream(chosen: Any) -> Iterator[None]:
    yield


def _memory() -> tuple[int, int]:
    """Bytes that are free, and all, of the machine."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        found = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return found["MemAvailable"], found["MemTotal"]


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_summary(*args: Any, **options: Any) -> str:
    return f"there is no accelerator; this process has used up to {_peak() / 2**20:.0f} MiB of the host's memory"


# Of what has a value: name -> what is there instead. A generator's state on an accelerator is that of no generator.
VALUES: dict[str, Callable[..., Any]] = {
    "current_device": lambda: 0,
    "mem_get_info": lambda device=None: _memory(),
    "memory_summary": _memory_summary,
    "get_device_name": lambda device=None: "CPU",
    "get_device_capability": lambda device=None: (0, 0),
    "get_rng_state": lambda device=None: torch.empty(0, dtype=torch.uint8),
    "get_rng_state_all": list,
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "stream": stream,
}
TYPES: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "device": Current,
    **{
        name: getattr(torch, name)
        for name in ("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor",
                     "BoolTensor", "ByteTensor")
    },
}  # fmt: skip


def passthrough(one: Any, *args: Any, **options: Any) -> Any:
    """What is on the host already."""
    return one
