"""CPU fallback for scripts that name an accelerator, on machines without one.

Only under `phalanx run`, which prints one notice. Tensors sent to the accelerator stay on the CPU, its control
functions do nothing, events are host times, streams are one, and groups of its collectives use gloo. What has no
meaning on a CPU (graphs, custom kernels) fails as in PyTorch.
"""

import contextlib
import functools
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from phalanx.api.fsdp.patches import replace
from phalanx.system.accelerator import SCRIPT_BACKEND, SCRIPT_DEVICE_TYPE


@contextlib.contextmanager
def host_fallback(rank: int, local_world: int) -> Iterator[None]:
    """Replace the accelerator while a script runs, if there is none; `local_world`: the reported number of devices."""
    if torch.accelerator.is_available():
        yield
        return
    if rank == 0:
        sys.stderr.write(
            f"no accelerator found: {SCRIPT_DEVICE_TYPE} tensors are computed on the CPU, and {SCRIPT_BACKEND} "
            "groups use gloo\n"
        )
    _stand_in(getattr(torch, SCRIPT_DEVICE_TYPE), local_world)
    replace(nn.Module, "to", _with_host_arguments)
    replace(DistributedDataParallel, "__init__", _without_device_ids)
    replace(torch, "set_default_device", _with_host_arguments)
    replace(torch, "load", _to_host)
    for kind in (torch.UntypedStorage, torch.TypedStorage):
        replace(kind, SCRIPT_DEVICE_TYPE, lambda original: passthrough)
    replace(dist, "init_process_group", _with_host_groups)
    replace(dist, "new_group", _with_host_group)
    with _ToHost():
        yield


def _stand_in(module: Any, local_world: int) -> None:
    """Replace the functions and types of the accelerator's own module."""
    silent = (
        (module, SILENT),
        (module.memory, SILENT_OF_MEMORY),
        (module.nvtx, SILENT_MARKS),
        (module.profiler, SILENT_PROFILER),
    )
    for owner, names in silent:
        for name in names:
            replace(owner, name, _nothing)
    for name, value in {**VALUES, "device_count": lambda: local_world}.items():
        replace(module, name, _instead(value))
    for name, value in TYPES.items():
        setattr(module, name, value)


class _ToHost(TorchFunctionMode):
    """Gives every function of torch the CPU where it was given the accelerator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        options.pop("pin_memory", None)  # memory of the host, made ready for an accelerator
        if func is getattr(torch.Tensor, SCRIPT_DEVICE_TYPE) or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_host(each, numbers=place == 1) for place, each in enumerate(args))
        if "device" in options:
            options["device"] = _host(options["device"], numbers=True)
        return func(*args, **options)


def _host(value: Any, numbers: bool) -> Any:
    if numbers and type(value) is int:
        return HOST
    if isinstance(value, torch.device):
        return HOST if value.type == SCRIPT_DEVICE_TYPE else value
    if isinstance(value, str) and value.partition(":")[0] == SCRIPT_DEVICE_TYPE:
        return HOST
    return value


def _nothing(original: Callable[..., Any]) -> Callable[..., None]:
    return lambda *args, **options: None


def _with_host_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of a module, or of torch: what was an accelerator, by name or number, is the CPU."""

    def call(*args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = _host(options["device"], numbers=True)
        return original(*(_host(each, numbers=True) for each in args), **options)

    return call


def _without_device_ids(original: Callable[..., None]) -> Callable[..., None]:
    def init(
        self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **options: Any
    ) -> None:
        original(self, module, None, None, *args, **options)

    return init


def _to_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load`: what was saved on an accelerator, or should go to one, is read into the host's memory."""

    def load(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {key: str(_host(value, numbers=False)) for key, value in map_location.items()}
        elif map_location is None or not callable(map_location):
            map_location = HOST if map_location is None else _host(map_location, numbers=False)
        return original(f, map_location, *args, **options)

    return load


def _instead(value: Callable[..., Any]) -> Callable[..., Any]:
    return lambda original: functools.partial(value)


def _backend(name: Any) -> Any:
    return "gloo" if isinstance(name, str) and SCRIPT_BACKEND in name.lower() else name


def _with_host_groups(original: Callable[..., None]) -> Callable[..., None]:
    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        options.pop("device_id", None)
        original("gloo" if backend is None else _backend(backend), *args, **options)

    return init_process_group


def _with_host_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
        options.pop("device_id", None)
        return original(ranks, timeout, _backend(backend), *args, **options)

    return new_group


# --------------------------------------------------------------------------------------------------- accelerator stubs
# Replacements of an accelerator's functions and types: times, streams, memory. A CPU runs everything in call order, so
# a stream has nothing to wait for, and an event is a time.


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
    return f"no accelerator; this process has used up to {_peak() / 2**20:.0f} MiB of the host's memory"


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
