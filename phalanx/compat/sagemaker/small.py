"""The small functions of that library: a module's memory, a group's ranks, times, a logger."""

import contextlib
import functools
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper
from torch.distributed.fsdp import FullStateDictConfig

from phalanx.api.fsdp.patches import replace
from phalanx.api.fsdp.session import FsdpSession, current_session
from phalanx.core.errors import ConfigError
from phalanx.parallel.activations import by_position
from phalanx.parallel.offload import ActivationOffloader, offload


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


# ------------------------------------------------------ full state dicts: `FullStateDictConfig(translate_on_save=...)`


def with_translation() -> None:
    """Have `FullStateDictConfig` take `translate_on_save`.

    A transformed model keeps the names and the layout of Hugging Face here, so there is nothing to translate.
    """
    replace(FullStateDictConfig, "__init__", _taking)


def _taking(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, translate_on_save: bool = True, **options: Any) -> None:
        original(self, *args, **options)
        if not torch.accelerator.is_available():
            self.offload_to_cpu = False  # it is there already; FSDP would hand out memory that it then frees
        self.translate_on_save = translate_on_save

    return init


# ---------------------------------------------------------------------------------------------------------- offloading
# PyTorch's `offload_wrapper`, taken over by our prefetching implementation where the session asks for it.


MOVER = "_phalanx_mover"  # where a wrapper keeps what moves the inputs of its layers


def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: OffloadWrapper, mod: nn.Module) -> None:
        original(self, mod)
        session = current_session()
        if session is not None:
            session.done.add("offload")

    return init


def wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """With the session's `offloading`, inputs of checkpointed layers leave and come back beside the computation;
    otherwise PyTorch's own copies at once. Gradients are the same bit for bit."""

    def forward(self: OffloadWrapper, *args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if session is None or not session.offloading:
            return original(self, *args, **kwargs)
        if MOVER not in self.__dict__:
            self.__dict__[MOVER] = _take_over(self, session)
        return self._checkpoint_wrapped_module(*args, **kwargs)

    return forward


def _take_over(wrapper: OffloadWrapper, session: FsdpSession) -> ActivationOffloader:
    units = [module for module in wrapper.modules() if isinstance(module, CheckpointWrapper)]
    inside = wrapper._checkpoint_wrapped_module
    if not units:
        raise ConfigError(
            "offload_wrapper wraps a model without activation checkpointing, so nothing could be offloaded; call "
            "apply_activation_checkpointing(model, check_fn=...) before it, or set sm_activation_offloading to false"
        )
    if inside is units[0]:
        raise ConfigError(
            "offload_wrapper wraps single layers, but prefetching needs their order; wrap the whole model once: "
            "model = offload_wrapper(model)"
        )
    if len(units) <= session.horizon and session.rank == 0:
        warnings.warn(
            f"the model has {len(units)} checkpointed layers and activation_loading_horizon is {session.horizon}, so "
            "all their inputs stay on the device",
            stacklevel=2,
        )
    for unit in units:
        unit.checkpoint_fn = functools.partial(by_position, unit.checkpoint_fn)
    return offload(units, session.horizon)
