"""PyTorch's `offload_wrapper`, taken over by our prefetching implementation where the session asks for it."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper

from phalanx.api.fsdp.session import FsdpSession, current_session
from phalanx.core.errors import ConfigError
from phalanx.parallel.activations import by_position
from phalanx.parallel.offload import ActivationOffloader, offload

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
            "offload_wrapper is around a model of which no part is checkpointed, so nothing could be offloaded; call "
            "apply_activation_checkpointing(model, check_fn=...) before it, or set sm_activation_offloading to false"
        )
    if inside is units[0]:
        raise ConfigError(
            "offload_wrapper is around single layers, but fetching ahead goes by their order; wrap the whole model "
            "once: model = offload_wrapper(model)"
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
