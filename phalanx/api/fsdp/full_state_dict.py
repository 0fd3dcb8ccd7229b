"""Full state dicts of FSDP models with tensor or expert parallelism: gathered to whole tensors when saved, and split
when loaded. (A hook of `parallel.hf_state` splits the model's own dict.)"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp._common_utils import clean_tensor_name

from phalanx.api.fsdp.session import FsdpSession, current_session
from phalanx.comm.mesh import Axis
from phalanx.core.errors import ConfigError
from phalanx.layout.tensor_shards import TensorShard
from phalanx.parallel.hf_state import find_tensor_shards, full_state_dict, gather_tensor
from phalanx.parallel.tensor_layers import copy_shard


def gather_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """State-dict hook that runs after FSDP's: gathers the slices of all ranks to whole tensors, in place, on the first
    of these ranks, or with `rank0_only=False` on all; the dicts of the others are emptied. With
    `translate_on_save=False` each rank keeps its slices. Collective over these ranks."""
    session = _slicing_session()
    assert isinstance(module, FullyShardedDataParallel)
    if session is None or not module._is_root:
        return
    config: Any = module._state_dict_config
    if module._state_dict_type != StateDictType.FULL_STATE_DICT or not getattr(config, "translate_on_save", True):
        return
    if not state:
        return  # this rank is not the first that holds these slices
    wrapped = {clean_tensor_name(name): name for name in find_tensor_shards(module)}
    own = {wrapped.get(name, name): tensor for full, tensor in state.items() for name in [full.removeprefix(prefix)]}
    found = full_state_dict(module, _axis(session), own, everywhere=not config.rank0_only)
    state.clear()
    state.update({prefix + clean_tensor_name(name): tensor for name, tensor in found.items()})


def with_full_optimizer_state(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap FSDP's optimizer state dict: the full kind has whole tensors on the ranks where the model's has."""

    def state_dict(*, model: nn.Module, **options: Any) -> dict[str, Any]:
        session = _slicing_session()
        if session is None or not options.get("full_state_dict", True):
            return original(model=model, **options)
        everywhere, root = not options.get("rank0_only", True), _root(model)
        # One of the ranks that hold the same slices must get all of them, not rank 0 alone. FSDP supports such groups
        # only with its original parameters; otherwise all ranks get them.
        whole = root.sharding_strategy == ShardingStrategy.NO_SHARD
        group = session.group("data") if whole else root.process_group
        asked = {"group": options.get("group") or group} if root._use_orig_params else {"rank0_only": False}
        found = original(model=model, **options | asked)
        if not everywhere and dist.get_rank(group):
            return {}
        # Without sharding these are the optimizer's own dicts.
        found = found | {"state": {name: dict(values) for name, values in found["state"].items()}}
        for values, kind, part in list(_iterate_sharded_state(model, found)):
            if tuple(values[kind].shape) == part.local_shape:
                values[kind] = gather_tensor(values[kind], part, _axis(session), everywhere)
        return found if everywhere or _axis(session).rank == 0 else {}

    return state_dict


def with_full_optimizer_load(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap FSDP's loading of an optimizer's full state: each rank takes its slices. Raises ConfigError if only
    rank 0 has the state."""

    def to_load(*, model: nn.Module, optim_state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        session = _slicing_session()
        if session is None or not options.get("full_state_dict", True):
            return original(model=model, optim_state_dict=optim_state_dict, **options)
        if options.get("rank0_only", False):
            raise ConfigError(
                f"each rank takes its shard from an optimizer's full state dict, because {session.sliced} parallelism "
                "splits the model; load it on all ranks, with FullOptimStateDictConfig(rank0_only=False)"
            )
        state = {name: dict(values) for name, values in optim_state_dict["state"].items()}
        for values, kind, part in _iterate_sharded_state(model, {"state": state}):
            if tuple(values[kind].shape) == part.shape:
                values[kind] = copy_shard(values[kind], part).detach()
        return original(model=model, optim_state_dict=optim_state_dict | {"state": state}, **options)

    return to_load


def _slicing_session() -> FsdpSession | None:
    """The session, if its ranks hold slices of parameters."""
    session = current_session()
    return session if session is not None and session.sliced is not None else None


def _axis(session: FsdpSession) -> Axis:
    """The ranks that hold slices of the same parameters."""
    assert session.sliced is not None
    return session.axis(session.sliced)


def _root(model: nn.Module) -> Any:
    """The outermost FSDP module."""
    return next(each for each in model.modules() if isinstance(each, FullyShardedDataParallel))


def _iterate_sharded_state(
    model: nn.Module, found: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], str, TensorShard]]:
    """Iterate over an optimizer's state of split parameters: its position, its kind, and the slice of the
    parameter. In the same order on all ranks."""
    parts = {clean_tensor_name(name): part for name, part in find_tensor_shards(model).items()}
    for name, values in sorted(found.get("state", {}).items()):
        for kind in sorted(values) if name in parts else ():
            if isinstance(values[kind], Tensor):
                yield values, kind, parts[name]


# --------------------------- sharded tensors with fewer rows than ranks: ranks without a row may have an empty shard


def with_empty_shards(original: Callable[..., ShardedTensor]) -> Callable[..., ShardedTensor]:
    """Wrap PyTorch's split of a tensor into rows: a rank without a row has no shard, or with the session's
    `empty_shards` an empty one, for code that requests a shard of each rank."""

    def make(
        tensor: torch.Tensor, rank: int, world_size: int, num_devices_per_node: int, pg: dist.ProcessGroup, *others: Any
    ) -> ShardedTensor:
        session = current_session()
        few = len(tensor.chunk(world_size, dim=0)) < world_size
        if session is None or not session.empty_shards or not few:
            if not others and len(pg._device_types) > 1:  # the group has a host backend too, which would be named
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
