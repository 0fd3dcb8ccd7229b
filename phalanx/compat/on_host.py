"""Where there is no accelerator: what a script says to one by its name goes to the CPU.

Only under `phalanx run`, which says so once. A tensor sent to the accelerator stays where it is, functions that only
steer it do nothing, and groups of its own collectives are gloo's. What has no meaning on a CPU (streams, events,
graphs, kernels of the script's own) fails as PyTorch has it.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from phalanx.accelerator import GROUPS_NAMED_IN_SCRIPTS, NAMED_IN_SCRIPTS
from phalanx.scripts.wrapping import replace

HOST = torch.device("cpu")
_SILENT = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated", "init")
_SILENT_MARKS = ("range_push", "range_pop", "mark")


@contextlib.contextmanager
def on_host(rank: int, local_world: int) -> Iterator[None]:
    """Stand in for the accelerator while a script runs, if there is none; `local_world`: how many it may think of."""
    if torch.accelerator.is_available():
        yield
        return
    if rank == 0:
        sys.stderr.write(
            f"no accelerator here: what the script sends to {NAMED_IN_SCRIPTS} is computed on the CPU, and "
            f"{GROUPS_NAMED_IN_SCRIPTS} groups are gloo's\n"
        )
    module = getattr(torch, NAMED_IN_SCRIPTS)
    for name in _SILENT:
        replace(module, name, _nothing)
    for name in _SILENT_MARKS:
        replace(module.nvtx, name, _nothing)
    replace(module, "current_device", lambda original: lambda: 0)
    replace(module, "device_count", lambda original: lambda: local_world)
    replace(dist, "init_process_group", _with_host_groups)
    replace(dist, "new_group", _with_host_group)
    with _ToHost():
        yield


class _ToHost(TorchFunctionMode):
    """Gives every function of torch the CPU where it was given the accelerator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is getattr(torch.Tensor, NAMED_IN_SCRIPTS):
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
        return HOST if value.type == NAMED_IN_SCRIPTS else value
    if isinstance(value, str) and value.partition(":")[0] == NAMED_IN_SCRIPTS:
        return HOST
    return value


def _nothing(original: Callable[..., Any]) -> Callable[..., None]:
    return lambda *args, **options: None


def _backend(name: Any) -> Any:
    return "gloo" if isinstance(name, str) and GROUPS_NAMED_IN_SCRIPTS in name.lower() else name


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
