"""Reading a state that was saved into one that is there."""

import argparse
import io
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.checkpoint.utils import _DistWrapper

from phalanx.compat.sagemaker.files import (
    DistributedFileSystemReader,
    check_path_exists,
    path_to_file_system,
    unreadable_error,
)
from phalanx.compat.sagemaker.requests import coordinator_in
from phalanx.core.errors import CheckpointError


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

    Raises CheckpointError where `check_keys_matched` and the ranks ask for unlike keys; ConfigError where there is no
    place.
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


class _Planner(DefaultLoadPlanner):
    """PyTorch's own takes a checkpoint that has more than is asked for (an optimizer's state, say) for one of an old
    version, if on this rank the names look like it; then it misses what is there."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Plain values alone, and NumPy's: PyTorch's own runs whatever code a file asks for."""
        with torch.serialization.safe_globals([argparse.Namespace, *numpy_reconstructors()]):
            found = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)


def numpy_reconstructors() -> list[Any]:
    """What an array or a number of NumPy's is made by, as in the state of its random numbers."""
    made_by = [np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    return [*made_by, np.ndarray, np.dtype, *(getattr(np.dtypes, name) for name in np.dtypes.__all__)]


def _check_keys(state_dict: dict[str, Any], ranks: _DistWrapper) -> None:
    everyones = ranks.all_gather_object(sorted(state_dict))
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            unlike = sorted(set(theirs) ^ set(everyones[0]))
            raise CheckpointError(
                f"rank {rank} of its group asks for other keys than rank 0: {', '.join(unlike[:3])}; ask for the same "
                "on all, or pass check_keys_matched=False"
            )
