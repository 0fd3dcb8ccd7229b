"""Saving a script's state, synchronously or asynchronously."""

import dataclasses
import io
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.checkpoint.utils import _DistWrapper

from phalanx.api.fsdp.session import current_session
from phalanx.comm.collectives import device_for_group
from phalanx.compat.sagemaker.files import DistributedFileSystemWriter, check_path_exists, path_to_file_system
from phalanx.core.errors import CheckpointError, ConfigError

# ------------------------------------------------------------------------------------------------------------ requests
# Saving in two halves: what ranks have to agree on is done at once, the writing beside the script, the end later. No
# collective runs beside the script's own, which would meet other ones on the same group: planning is done when a save
# is asked for, and what was written is put together when it is finalised. What is saved is copied when it is asked for.


class PyTorchDistSaveShardedStrategy:
    """PyTorch's own format. Keeps the last plan of each group, for saves that need no new plan."""

    def __init__(self, backend: str = "torch_dist", version: int = 1) -> None:
        self.backend, self.version = backend, version
        self.plans: dict[int, tuple[SavePlan, SavePlan, Metadata | None]] = {}
        self.planned = 0  # times that ranks have exchanged plans


SaveShardedStrategy = PyTorchDistSaveShardedStrategy


@dataclass
class PlannedSave:
    """A save on which the ranks of a group have agreed."""

    ranks: _DistWrapper
    writer: StorageWriter
    planner: SavePlanner
    plan: SavePlan  # this rank's part
    metadata: Metadata | None  # on the coordinator
    wait_error_handling: bool
    written: list[Any] | BaseException | None = None

    def copy_values(self) -> None:
        """Take the values as they are now."""
        self.planner = _Copy({item.index: _copy(self.planner.resolve_data(item)) for item in self.plan.items})

    def write(self) -> None:
        """Write this rank's part; keeps an exception for `finish` to raise."""
        try:
            writing = self.writer.write_data(self.plan, self.planner)
            writing.wait()
            self.written = writing.value()
        except Exception as error:
            self.written = error
        self.planner = _Copy({})

    def finish(self) -> None:
        """Put together what all ranks have written. Collective; raises on all ranks where one could not write, or with
        `wait_error_handling` off on that one and on the coordinator."""

        def mine() -> Any:
            if isinstance(self.written, BaseException):
                raise self.written
            return self.written

        def together(everyones: list[Any]) -> None:
            assert self.metadata is not None
            self.writer.finish(dataclasses.replace(self.metadata), everyones)

        if self.wait_error_handling:
            try:
                self.ranks.all_reduce("write", mine, together)
            except CheckpointException as error:
                rank, (cause, _) = next(iter(error.failures.items()))
                raise CheckpointError(f"rank {rank} of its group could not write ({cause})") from error
            return
        everyones = self.ranks.gather_object(self.written)
        mine()
        if everyones is not None:
            failed = [rank for rank, each in enumerate(everyones) if isinstance(each, BaseException)]
            if failed:
                raise CheckpointError(f"rank {failed[0]} of its group could not write ({everyones[failed[0]]})")
            together(everyones)


class _Copy(DefaultSavePlanner):
    """Values that were resolved before."""

    def __init__(self, values: dict[MetadataIndex, Any]) -> None:
        super().__init__()
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value: torch.Tensor | io.BytesIO = self._values[write_item.index]
        return value


def _copy(value: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def plan(
    state_dict: dict[str, Any],
    writer: StorageWriter,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
    coordinator_rank: int,
    wait_error_handling: bool,
    force_check_all_plans: bool,
    strategy: PyTorchDistSaveShardedStrategy,
) -> PlannedSave:
    """Have the ranks of a group agree on who writes what. `coordinator_rank` counts over all ranks. Collective."""
    state = {key: each.state_dict() if isinstance(each, Stateful) else each for key, each in state_dict.items()}
    planner = planner or DefaultSavePlanner()
    coordinator = coordinator_in(process_group, coordinator_rank)
    ranks = _DistWrapper(process_group, dist.is_initialized(), coordinator)
    made: list[Metadata] = []

    def local() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), ranks.is_coordinator)
        writer.set_up_storage_writer(ranks.is_coordinator)
        return writer.prepare_local_plan(planner.create_local_plan())

    def everyones(plans: list[SavePlan]) -> list[SavePlan]:
        divided, metadata = planner.create_global_plan(plans)
        made.append(metadata)
        return writer.prepare_global_plan(divided)

    mine: list[SavePlan] = []

    def noted() -> SavePlan:
        mine.append(local())
        return mine[0]

    known = strategy.plans.get(id(process_group)) if not force_check_all_plans else None
    if known is not None and _same(noted(), known[0]):
        central, metadata = known[1], known[2]
    else:
        mine.clear()
        central = ranks.reduce_scatter("plan", noted, everyones)
        metadata = made[0] if made else None
        strategy.planned += 1
        strategy.plans[id(process_group)] = (mine[0], central, metadata)
    return PlannedSave(ranks, writer, planner, planner.finish_plan(central), metadata, wait_error_handling)


def _same(plan: SavePlan, before: SavePlan) -> bool:
    return list(plan.items) == list(before.items)


def coordinator_in(group: dist.ProcessGroup | None, coordinator_rank: int) -> int:
    """A rank counted over all as one of a group; the group's first where it is not in it."""
    if group is None or not dist.is_initialized():
        return coordinator_rank
    ranks = dist.get_process_group_ranks(group)
    return ranks.index(coordinator_rank) if coordinator_rank in ranks else 0


@dataclass
class _Call:
    number: int
    planned: PlannedSave
    thread: threading.Thread


@dataclass
class AsyncCallsQueue:
    """Saves that are being written beside the script, in the order in which they were asked for."""

    strategy: PyTorchDistSaveShardedStrategy = field(default_factory=PyTorchDistSaveShardedStrategy)
    _calls: list[_Call] = field(default_factory=list)
    _number: int = 0

    def schedule(self, planned: PlannedSave) -> int:
        """Begin to write; gives the number by which it will be known when it is finalised."""
        planned.copy_values()
        thread = threading.Thread(target=planned.write, name="checkpoint", daemon=False)
        thread.start()
        self._number += 1
        self._calls.append(_Call(self._number, planned, thread))
        return self._number

    def get_num_unfinalized_calls(self) -> int:
        return len(self._calls)

    def maybe_finalize_async_calls(
        self, blocking: bool = False, process_group: dist.ProcessGroup | None = None, skip_sync: bool = False
    ) -> list[int]:
        """Put together the saves that all their ranks have written, or with `blocking` wait for them all. Gives their
        numbers. To be called on all ranks that take part in a save; each save is agreed on in its own group, and with
        `skip_sync` not asked about beforehand."""
        done: list[int] = []
        while self._calls:
            call = self._calls[0]
            if blocking or skip_sync:
                if not blocking and call.thread.is_alive():
                    break
            elif not all(call.planned.ranks.all_gather_object(not call.thread.is_alive())):
                break
            call.thread.join()
            self._calls.pop(0)
            call.planned.finish()
            done.append(call.number)
        return done

    def close(self) -> None:
        """Wait for what is left, and put it together."""
        self.maybe_finalize_async_calls(blocking=True)


def default_queue() -> AsyncCallsQueue:
    """The session's queue. Raises ConfigError before `tsm.init`."""
    session = current_session()
    if session is None or not isinstance(session.requests, AsyncCallsQueue):
        raise ConfigError("the save queue does not exist before tsm.init(); call that first")
    return session.requests


def __getattr__(name: str) -> Any:
    if name == "DEFAULT_ASYNC_REQUEST_QUEUE":
        return default_queue()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---------------------------------------------------------------------- saving a state, at once or beside the script


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
    strategy = default_queue().strategy
    planned = plan(
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
    chosen = queue if queue is not None else default_queue()
    strategy = sharded_strategy if isinstance(sharded_strategy, PyTorchDistSaveShardedStrategy) else chosen.strategy
    planned = plan(
        state_dict, writer, planner, process_group, coordinator_rank, wait_error_handling,
        force_check_all_plans, strategy,
    )  # fmt: skip
    chosen.schedule(planned)


def maybe_finalize_async_calls(blocking: bool = True, process_group: dist.ProcessGroup | None = None) -> list[int]:
    """Complete the saves that were begun before, with `blocking` all of them; gives their numbers, which count from 1.

    To be called on all ranks of a save's group, before the next save at the latest.
    """
    return default_queue().maybe_finalize_async_calls(blocking, process_group)


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


# -------------------------------------------------- how often to save, from what steps and saves were measured to take


@dataclass
class Interval:
    """Times in seconds, over all ranks. `interval`: steps from one save to the next."""

    interval: int
    step_s: float = 0.0
    step_with_save_s: float = 0.0
    preprocessing_s: float = 0.0
    writing_s: float = 0.0


def compute_auto_checkpoint_interval(
    step_durations: Sequence[float],
    step_ckpt_durations: Sequence[float],
    ckpt_preprocessing_durations: Sequence[float],
    ckpt_io_durations: Sequence[float],
) -> Interval:
    """The least number of steps between saves in which the slowest rank's writing is done, whatever its length, while
    the fastest rank's steps continue. Each argument has one number of seconds a step, the second and those of saves
    from steps with one. Collective over all ranks."""
    fastest = _over_ranks(min(step_durations), dist.ReduceOp.MIN)
    slowest = [_over_ranks(max(each, default=0.0), dist.ReduceOp.MAX) for each in (
        step_ckpt_durations, ckpt_preprocessing_durations, ckpt_io_durations
    )]  # fmt: skip
    steps = max(1, math.ceil((slowest[1] + slowest[2]) / max(fastest, 1e-9)))
    return Interval(steps, fastest, *slowest)


def _over_ranks(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    if not dist.is_initialized():
        return value
    device = device_for_group(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    tensor = torch.tensor([value], dtype=torch.float32, device=device)
    dist.all_reduce(tensor, op=operation)
    return float(tensor)
