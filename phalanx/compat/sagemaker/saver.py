"""Saving a script's state: at once, or beside it."""

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from phalanx.compat.sagemaker import requests
from phalanx.compat.sagemaker.files import DistributedFileSystemWriter, check_path_exists, path_to_file_system
from phalanx.compat.sagemaker.requests import AsyncCallsQueue, PyTorchDistSaveShardedStrategy


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Write a state to a folder or an `s3://` URL, and return when it is there. Collective over `process_group`, by
    default over all ranks.

    `coordinator_rank` (counted over all ranks) writes the metadata. With `wait_error_handling` off, other ranks do not
    wait for that. With `force_check_all_plans` off, plans are exchanged only where this rank's is another one than the
    last time; then all ranks must have the same reason to. Raises ConfigError where there is no place.
    """
    writer = _writer(checkpoint_id, storage_writer, s3_region, s3client_config)
    strategy = requests.default_queue().strategy
    planned = requests.plan(
        state_dict, writer, planner, process_group, coordinator_rank, wait_error_handling,
        force_check_all_plans, strategy,
    )  # fmt: skip
    planned.write()
    planned.finish()


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    queue: AsyncCallsQueue | None = None,
    sharded_strategy: PyTorchDistSaveShardedStrategy | tuple[str, int] | None = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Begin to write a state as it is now; it is complete once `maybe_finalize_async_calls` has said so.

    Arguments are those of `save`. `queue`: where it waits, by default with all others.
    """
    writer = _writer(checkpoint_id, storage_writer, s3_region, s3client_config)
    chosen = queue if queue is not None else requests.default_queue()
    strategy = sharded_strategy if isinstance(sharded_strategy, PyTorchDistSaveShardedStrategy) else chosen.strategy
    planned = requests.plan(
        state_dict, writer, planner, process_group, coordinator_rank, wait_error_handling,
        force_check_all_plans, strategy,
    )  # fmt: skip
    chosen.schedule(planned)


def maybe_finalize_async_calls(blocking: bool = True, process_group: dist.ProcessGroup | None = None) -> list[int]:
    """Complete the saves that were begun before, with `blocking` all of them; gives their numbers, which count from 1.

    To be called on all ranks of a save's group, before the next save at the latest.
    """
    return requests.default_queue().maybe_finalize_async_calls(blocking, process_group)


def _writer(
    checkpoint_id: str | os.PathLike[str] | None, given: StorageWriter | None, s3_region: str | None, s3client: Any
) -> StorageWriter:
    """The script's own writer, at `checkpoint_id` where there is one; else one for that."""
    if given is None:
        return DistributedFileSystemWriter(
            check_path_exists(checkpoint_id), s3_region=s3_region, s3client_config=s3client
        )
    if checkpoint_id is not None or s3_region is not None or s3client is not None:
        path_to_file_system(check_path_exists(checkpoint_id), s3_region, s3client)
        given.reset(checkpoint_id)
    return given
