"""Reading a state that was saved into one that is there."""

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.checkpoint.utils import _DistWrapper

from phalanx.compat.sagemaker.files import DistributedFileSystemReader, checked
from phalanx.compat.sagemaker.requests import coordinator_in
from phalanx.errors import CheckpointError


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

    Raises CheckpointError where `check_keys_matched` and the ranks ask for unlike keys; ConfigError for a place that is
    no folder.
    """
    if storage_reader is None or checkpoint_id is not None or s3_region is not None or s3client_config is not None:
        checked(checkpoint_id, s3_region, s3client_config)
    reader = storage_reader or DistributedFileSystemReader(checked(checkpoint_id))
    if storage_reader is not None and checkpoint_id is not None:
        reader.reset(checkpoint_id)
    coordinator, together = coordinator_in(process_group, coordinator_rank), dist.is_initialized()
    if check_keys_matched:
        _check_keys(state_dict, _DistWrapper(process_group, together, coordinator))
    wanted = {
        key: each.state_dict() if isinstance(each, Stateful) else each for key, each in sorted(state_dict.items())
    }
    _load_state_dict(
        wanted,
        reader,
        process_group=process_group,
        coordinator_rank=coordinator,
        no_dist=not together,
        planner=planner or _Planner(),
    )
    for key, value in wanted.items():
        each = state_dict[key]
        if isinstance(each, Stateful):
            each.load_state_dict(value)
        else:
            state_dict[key] = value


class _Planner(DefaultLoadPlanner):
    """PyTorch's own takes a checkpoint that has more than is asked for (an optimizer's state, say) for one of an old
    version, if on this rank the names look like it; then it misses what is there."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)


def _check_keys(state_dict: dict[str, Any], ranks: _DistWrapper) -> None:
    everyones = ranks.all_gather_object(sorted(state_dict))
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            unlike = sorted(set(theirs) ^ set(everyones[0]))
            raise CheckpointError(
                f"rank {rank} of its group asks for other keys than rank 0: {', '.join(unlike[:3])}; ask for the same "
                "on all, or pass check_keys_matched=False"
            )
