"""Sharded tensors of fewer rows than ranks: the ranks without a row may hold a shard of none."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata

from phalanx.api.fsdp.session import current_session


def with_empty_shards(original: Callable[..., ShardedTensor]) -> Callable[..., ShardedTensor]:
    """PyTorch's division of a tensor into rows, in which a rank without a row has no shard, or with the session's
    `empty_shards` one without elements: code that asks each rank for its shard then finds one."""

    def make(
        tensor: torch.Tensor, rank: int, world_size: int, num_devices_per_node: int, pg: dist.ProcessGroup, *others: Any
    ) -> ShardedTensor:
        session = current_session()
        few = len(tensor.chunk(world_size, dim=0)) < world_size
        if session is None or not session.empty_shards or not few:
            if not others and len(pg._device_types) > 1:  # it carries the host's too, and would name that
                others = (tensor.device,)
            return original(tensor, rank, world_size, num_devices_per_node, pg, *others)
        return _divided(tensor, rank, world_size, pg)

    return make


def _divided(tensor: torch.Tensor, rank: int, world: int, group: dist.ProcessGroup) -> ShardedTensor:
    total, width = tensor.shape[0], math.ceil(tensor.shape[0] / world)
    starts = [min(place * width, total) for place in range(world + 1)]
    rest = [0] * (tensor.dim() - 1)
    pieces = [
        ShardMetadata(
            [starts[place], *rest],
            [starts[place + 1] - starts[place], *tensor.shape[1:]],
            _place(dist.get_global_rank(group, place), tensor.device),
        )
        for place in range(world)
    ]
    own = tensor[starts[rank] : starts[rank + 1]].clone()
    properties = TensorProperties(
        dtype=tensor.dtype,
        layout=tensor.layout,
        requires_grad=False,
        memory_format=torch.contiguous_format,
        pin_memory=tensor.is_pinned(),
    )
    whole = ShardedTensorMetadata(shards_metadata=pieces, size=tensor.size(), tensor_properties=properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(own, pieces[rank])], sharded_tensor_metadata=whole, process_group=group
    )


def _place(rank: int, device: torch.device) -> str:
    if device.type == "cpu":
        return f"rank:{rank}/cpu"
    return f"rank:{rank}/{device.type}:{rank % torch.accelerator.device_count()}"
