"""The small functions of that library: a module's memory, a group's ranks, times, a logger."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn


def empty_module_params(module: nn.Module, device: torch.device | None = None, recurse: bool = False) -> nn.Module:
    """Give a module's own parameters memory without values, on `device` or where they are; with `recurse` also those of
    its children. Gives the module back."""
    for part in module.modules() if recurse else (module,):
        for name, old in part._parameters.items():
            if old is not None:
                part._parameters[name] = nn.Parameter(
                    torch.empty_like(old, device=device, requires_grad=False), requires_grad=old.requires_grad
                )
    return module


def move_buffers_to_device(module: nn.Module, device: torch.device, recurse: bool = False) -> nn.Module:
    """Move a module's own buffers, with `recurse` also those of its children. One on the meta device has no values to
    move, and gets memory without. Gives the module back."""
    for part in module.modules() if recurse else (module,):
        for name, old in part._buffers.items():
            if old is not None:
                part._buffers[name] = torch.empty_like(old, device=device) if old.is_meta else old.to(device)
    return module


def get_global_ranks(process_group: dist.ProcessGroup | None) -> list[int]:
    """The ranks of a group, counted over all; of all where it is None."""
    return dist.get_process_group_ranks(process_group)


@contextlib.contextmanager
def timeit(cond: bool = True, label: str = "", rank: int = 0) -> Iterator[None]:
    """Log on rank 0, where `cond` holds, how long the block took."""
    start = time.perf_counter()
    yield
    if cond and rank == 0:
        get_logger().info("%s: %.2f s", label, time.perf_counter() - start)


def get_logger() -> logging.Logger:
    """That library's logger, which writes to standard error."""
    logger = logging.getLogger("torch.sagemaker")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
