"""Where there is no accelerator: what a script says to one by its name goes to the CPU.

Only under `phalanx run`, which says so once. A tensor sent to the accelerator stays where it is, functions that only
steer it do nothing, its events are times and its streams all one, and groups of its own collectives are gloo's. What
has no meaning on a CPU (graphs, kernels of the script's own) fails as PyTorch has it.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from phalanx.api.fsdp.patches import replace
from phalanx.compat import accelerator_stubs
from phalanx.compat.accelerator_stubs import HOST
from phalanx.system.accelerator import SCRIPT_BACKEND, SCRIPT_DEVICE_TYPE


@contextlib.contextmanager
def host_fallback(rank: int, local_world: int) -> Iterator[None]:
    """Stand in for the accelerator while a script runs, if there is none; `local_world`: how many it may think of."""
    if torch.accelerator.is_available():
        yield
        return
    if rank == 0:
        sys.stderr.write(
            f"no accelerator here: what the script sends to {SCRIPT_DEVICE_TYPE} is computed on the CPU, and "
            f"{SCRIPT_BACKEND} groups are gloo's\n"
        )
    _stand_in(getattr(torch, SCRIPT_DEVICE_TYPE), local_world)
    replace(nn.Module, "to", _with_host_arguments)
    replace(DistributedDataParallel, "__init__", _without_device_ids)
    replace(torch, "set_default_device", _with_host_arguments)
    replace(torch, "load", _to_host)
    for kind in (torch.UntypedStorage, torch.TypedStorage):
        replace(kind, SCRIPT_DEVICE_TYPE, lambda original: accelerator_stubs.passthrough)
    replace(dist, "init_process_group", _with_host_groups)
    replace(dist, "new_group", _with_host_group)
    with _ToHost():
        yield


def _stand_in(module: Any, local_world: int) -> None:
    """Replace the functions and types of the accelerator's own module."""
    silent = (
        (module, accelerator_stubs.SILENT),
        (module.memory, accelerator_stubs.SILENT_OF_MEMORY),
        (module.nvtx, accelerator_stubs.SILENT_MARKS),
        (module.profiler, accelerator_stubs.SILENT_PROFILER),
    )
    for owner, names in silent:
        for name in names:
            replace(owner, name, _nothing)
    for name, value in {**accelerator_stubs.VALUES, "device_count": lambda: local_world}.items():
        replace(module, name, _instead(value))
    for name, value in accelerator_stubs.TYPES.items():
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
