"""State of this rank alone, as it lies in memory: no collective, and no other number of shards can read it."""

import contextlib
import enum
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.remote_device import _remote_device

from phalanx.compat.sagemaker.loader import numpy_reconstructors
from phalanx.core.errors import CheckpointError, ConfigError

# Where a module keeps what FSDP does around its state_dict() and load_state_dict().
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
# What the tensors of LOCAL_STATE_DICT are made of.
_SHARDED = (ShardedTensor, ShardedTensorMetadata, TensorProperties, Shard, ShardMetadata, ChunkShardingSpec,
            EnumerableShardingSpec, ShardedTensor.ProcessGroupState, _remote_device, MEM_FORMAT_ENCODING)  # fmt: skip


class SMStateDictType(enum.Enum):
    """What `sm_state_dict_type` knows beside PyTorch's kinds."""

    SM_LOCAL_STATE_DICT = enum.auto()


@contextlib.contextmanager
def sm_state_dict_type(
    module: nn.Module,
    state_dict_type: SMStateDictType | StateDictType,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> Iterator[None]:
    """A context in which `module.state_dict()` is of that kind: PyTorch's kinds are left to FSDP, and
    SM_LOCAL_STATE_DICT gives the tensors that this rank holds, which a load then fills in place.

    Raises ConfigError for another kind.
    """
    if isinstance(state_dict_type, StateDictType):
        with FullyShardedDataParallel.state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        ):
            yield
        return
    if state_dict_type is not SMStateDictType.SM_LOCAL_STATE_DICT:
        raise ConfigError(
            f"sm_state_dict_type got {state_dict_type!r}; give SMStateDictType.SM_LOCAL_STATE_DICT or a StateDictType"
        )
    if state_dict_config is not None or optim_state_dict_config is not None:
        raise ConfigError("SM_LOCAL_STATE_DICT takes no configuration; leave state_dict_config out")
    parts = FullyShardedDataParallel.fsdp_modules(module)
    kept = [(part, name, getattr(part, name)) for part in parts for name in _HOOKS]
    for part, name, _ in kept:
        setattr(part, name, OrderedDict())
    try:
        yield
    finally:
        for part, name, hooks in kept:
            setattr(part, name, hooks)


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = True) -> None:
    """Have an optimizer make its state, for a checkpoint to be loaded into, by an update that changes no parameter.

    `skip_empty_param`: none for parameters of which this rank has no element, as in training. An optimizer that has
    state is left alone. Raises ConfigError where gradients wait for an update.
    """
    if optimizer.state:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if any(each.grad is not None for each in parameters):
        raise ConfigError("init_optim_state would lose gradients that are there; call it before backward()")
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for each in parameters:
        if each.requires_grad and (each.numel() or not skip_empty_param):
            each.grad = torch.zeros_like(each)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()


def with_sharded_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's `load_with_process_group`, in which `torch.load` reads what FSDP's LOCAL_STATE_DICT and a script's own
    settings are made of. PyTorch's later versions refuse these, and have no other way to read such a state."""

    @contextlib.contextmanager
    def load_with_process_group(process_group: dist.ProcessGroup) -> Iterator[Any]:
        plain = [*numpy_reconstructors(), *_model_configs(), (_member, "builtins.getattr")]
        with original(process_group), torch.serialization.safe_globals([*_SHARDED, *plain]):
            yield process_group

    return load_with_process_group


def _member(kind: object, name: str) -> Any:
    """A value of an enumeration, or the class of the shards' group, which pickle writes as a call of getattr; no other
    attribute of anything."""
    if kind is MEM_FORMAT_ENCODING:
        return MEM_FORMAT_ENCODING[name]
    if kind is ShardedTensor and name == "ProcessGroupState":
        return ShardedTensor.ProcessGroupState
    raise CheckpointError(f"the state to be loaded asks for {name} of {kind!r}, which is no part of one; load another")


def _model_configs() -> Iterator[type]:
    """The classes of transformers' configurations that the script has imported: plain values, and no code."""
    module = sys.modules.get("transformers.configuration_utils")
    waiting: list[type] = [] if module is None else [module.PreTrainedConfig]
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        yield one
