"""PyTorch's functions for checkpoints, with the arguments that scripts of that library pass."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.fsdp import _fsdp_extensions

from phalanx.api.fsdp.session import current_device
from phalanx.compat.sagemaker.requests import coordinator_in


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
    """`coordinator_rank` may be a rank counted over all, where it is none of the group's own numbers."""

    def call(*args: Any, **options: Any) -> Any:
        group, coordinator = options.get("process_group"), options.get("coordinator_rank", 0)
        if group is not None and coordinator >= group.size():
            options["coordinator_rank"] = coordinator_in(group, coordinator)
        return original(*args, **options)

    return call
