"""Loading a saved state into existing tensors."""

import contextlib
import enum
import io
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import set_element, unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, _fsdp_extensions

from phalanx.api.fsdp.session import current_device
from phalanx.compat.pickles import list_plain_names, list_sharded_names
from phalanx.compat.sagemaker.delayed_scaling import KEY
from phalanx.compat.sagemaker.files import (
    DistributedFileSystemReader,
    check_path_exists,
    path_to_file_system,
    unreadable_error,
)
from phalanx.compat.sagemaker.saver import coordinator_in
from phalanx.core.errors import CheckpointError, ConfigError


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    check_keys_matched: bool = True,
    coordinator_rank: int = 0,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Read a checkpoint into the tensors of `state_dict`, in place; other values in it are replaced. Collective over
    `process_group`, by default over all ranks.

    Raises CheckpointError where `check_keys_matched` and the ranks request different keys; ConfigError without a
    location.
    """
    reader = storage_reader
    if reader is None:
        reader = DistributedFileSystemReader(
            check_path_exists(checkpoint_id), s3_region=s3_region, s3client_config=s3client_config
        )
    elif checkpoint_id is not None or s3_region is not None or s3client_config is not None:
        path_to_file_system(check_path_exists(checkpoint_id), s3_region, s3client_config)
        reader.reset(checkpoint_id)
    coordinator, together = coordinator_in(process_group, coordinator_rank), dist.is_initialized()
    _leave_out_histories(state_dict, reader)
    if check_keys_matched:
        _check_keys(state_dict, _DistWrapper(process_group, together, coordinator))
    wanted = {
        key: each.state_dict() if isinstance(each, Stateful) else each for key, each in sorted(state_dict.items())
    }
    try:
        _load_state_dict(
            wanted,
            reader,
            process_group=process_group,
            coordinator_rank=coordinator,
            no_dist=not together,
            planner=planner or _Planner(),
        )
    except CheckpointException as error:  # the same on all ranks
        first = error.failures[min(error.failures)][0]
        if isinstance(first, AssertionError):  # as PyTorch says that the metadata cannot be read
            reader.read_metadata()
        raise (
            first
            if isinstance(first, CheckpointError)
            else unreadable_error(str(getattr(reader, "checkpoint_id", checkpoint_id)), first)
        ) from error
    for key, value in wanted.items():
        each = state_dict[key]
        if isinstance(each, Stateful):
            each.load_state_dict(value)
        else:
            state_dict[key] = value


def _leave_out_histories(state: dict[str, Any], reader: StorageReader) -> None:
    """Ask for no history of FP8 products that the checkpoint does not have, since it was saved without; they
    start empty."""
    asked = [
        (part, name, f"{key}.{name}")
        for key, part in state.items() if isinstance(part, dict)
        for name in part if isinstance(name, str) and name.rpartition(".")[2] == KEY
    ]  # fmt: skip
    known = reader.read_metadata().state_dict_metadata if asked else {}
    for part, name, full in asked:
        if full not in known:
            del part[name]


class _Planner(DefaultLoadPlanner):
    """PyTorch's own takes a checkpoint that has more than is asked for (an optimizer's state, say) for one of an old
    version, if on this rank the names look like it; then it misses what is there."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Plain values alone, and NumPy's: PyTorch's own runs whatever code a file asks for."""
        with torch.serialization.safe_globals(list_plain_names()):
            found = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for name, wanted in self.state_dict.items():
            saved = getattr(self.metadata.state_dict_metadata.get(name), "size", None)
            if saved is not None and isinstance(wanted, torch.Tensor | ShardedTensor) and saved != wanted.size():
                raise CheckpointError(
                    f"{name} is {tuple(saved)} in the checkpoint and {tuple(wanted.size())} here; read a sharded "
                    "checkpoint with the tensor and expert parallel degrees that it was saved with, a local one on as "
                    "many shards, too, or load a full state dict"
                )
        return create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)


def _check_keys(state_dict: dict[str, Any], ranks: _DistWrapper) -> None:
    everyones = ranks.all_gather_object(sorted(state_dict))
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            unlike = sorted(set(theirs) ^ set(everyones[0]))
            raise CheckpointError(
                f"rank {rank} of its group requests other keys than rank 0: {', '.join(unlike[:3])}; request the "
                "same keys on all ranks, or pass check_keys_matched=False"
            )


# --------------------------------------------------------------------------------------------------------------- local
# State of this rank alone, as it lies in memory: no collective, and no other number of shards can read it.


# Where a module keeps what FSDP does around its state_dict() and load_state_dict().
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


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
        raise ConfigError("SM_LOCAL_STATE_DICT takes no configuration; remove state_dict_config")
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
        raise ConfigError("init_optim_state would discard existing gradients; call it before backward()")
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
        with original(process_group), torch.serialization.safe_globals(list_sharded_names()):
            yield process_group

    return load_with_process_group


# --------------------------- PyTorch's functions for checkpoints, with the arguments that scripts of that library pass


def with_process_group(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`load_sharded_optimizer_state_dict` that shards over a group, not over all ranks, where it is given one."""

    def load_sharded_optimizer_state_dict(
        model_state_dict: dict[str, Any],
        optimizer_key: str,
        storage_reader: StorageReader,
        planner: LoadPlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        if process_group is None:
            return original(model_state_dict, optimizer_key, storage_reader, planner)
        metadata = storage_reader.read_metadata()
        state: dict[str, Any] = {}
        for key, value in metadata.state_dict_metadata.items():
            if metadata.planner_data[key][0] != optimizer_key:
                continue
            if isinstance(value, BytesStorageMetadata):
                state[key] = "<bytes_io>"
                continue
            whole = torch.empty(value.size, dtype=value.properties.dtype, device=current_device())
            state[key] = whole if whole.numel() == 1 else _shard(whole, process_group)
        _load_state_dict(state, storage_reader, process_group=process_group, planner=planner)
        return unflatten_state_dict(state, metadata.planner_data)

    return load_sharded_optimizer_state_dict


def _shard(whole: torch.Tensor, group: dist.ProcessGroup) -> Any:
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    return _fsdp_extensions._create_chunk_sharded_tensor(whole, group.rank(), group.size(), count, group)


def with_global_coordinator(original: Callable[..., Any]) -> Callable[..., Any]:
    """`coordinator_rank` may be a rank counted over all, where it is none of the group's own numbers; and histories of
    FP8 products need not be there to be loaded."""

    def call(*args: Any, **options: Any) -> Any:
        group, coordinator = options.get("process_group"), options.get("coordinator_rank", 0)
        if group is not None and coordinator >= group.size():
            options["coordinator_rank"] = coordinator_in(group, coordinator)
        if isinstance(reader := options.get("storage_reader"), StorageReader):
            _leave_out_histories(options.get("state_dict", args[0] if args else {}), reader)
        return original(*args, **options)

    return call
