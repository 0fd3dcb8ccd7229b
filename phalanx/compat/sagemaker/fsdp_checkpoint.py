"""`torch.sagemaker.distributed.fsdp.checkpoint`: a model in FSDP, its optimizer and its scheduler, in one call each."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import optimizer as dcp_optimizer
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from phalanx.api.fsdp.session import current_session
from phalanx.compat.sagemaker import loader, saver
from phalanx.compat.sagemaker.files import DistributedFileSystemReader
from phalanx.compat.sagemaker.small import get_global_ranks, get_logger
from phalanx.core.errors import ConfigError

EXPORT_KEY_MODEL = "model"
EXPORT_KEY_OPTIMIZER = "optimizer"
EXPORT_KEY_SCHEDULER = "scheduler"
EXPORT_KEY_IDENTITY = "identity"


def save_model_checkpoint(
    model: nn.Module,
    model_type: StateDictType,
    save_dir: str | os.PathLike[str],
    sharding_strategy: Any = None,
    checkpointing_pg_metadata: tuple[Any, ...] | None = None,
    log: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra_exports: Mapping[str, Any] | None = None,
) -> None:
    """Save model, optimizer, scheduler and custom values, sharded. The first copy alone is written.

    `checkpointing_pg_metadata`: the model's process group and the rank that coordinates; found out where it is None.
    Collective over all ranks. Raises ConfigError for a kind of state that is not sharded.
    """
    _check(model_type)
    group, coordinator = _group(model, checkpointing_pg_metadata)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state: dict[str, Any] = {EXPORT_KEY_MODEL: model.state_dict()}
        if optimizer is not None:
            state[EXPORT_KEY_OPTIMIZER] = FSDP.optim_state_dict(model, optimizer)
    if scheduler is not None:
        state[EXPORT_KEY_SCHEDULER] = scheduler.state_dict()
    if extra_exports is not None:
        state[EXPORT_KEY_IDENTITY] = dict(extra_exports)
    session = current_session()
    if session is None or session.ranks.copy(dist.get_rank()) == 0:
        saver.save(state, checkpoint_id=_place(save_dir), process_group=group, coordinator_rank=coordinator)
    if log:
        get_logger().info("saved %s", save_dir)
    dist.barrier()


def load_model_checkpoint(
    model: nn.Module,
    model_type: StateDictType,
    checkpoint_dir: str | os.PathLike[str],
    sharding_strategy: Any = None,
    checkpointing_pg_metadata: tuple[Any, ...] | None = None,
    log: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra_imports: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Load what `save_model_checkpoint` has saved, also on other numbers of shards and copies. Gives model, optimizer,
    scheduler and the values named by `extra_imports`, under the EXPORT_KEYs. Collective over all ranks."""
    _check(model_type)
    group, coordinator = _group(model, checkpointing_pg_metadata)
    reader = DistributedFileSystemReader(_place(checkpoint_dir))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state: dict[str, Any] = {EXPORT_KEY_MODEL: model.state_dict()}
        if scheduler is not None:
            state[EXPORT_KEY_SCHEDULER] = scheduler.state_dict()
        if extra_imports is not None:
            state[EXPORT_KEY_IDENTITY] = dict(extra_imports)
        loader.load(state, storage_reader=reader, process_group=group, coordinator_rank=coordinator)
        model.load_state_dict(state[EXPORT_KEY_MODEL])
        if optimizer is not None:
            found: Any = dcp_optimizer.load_sharded_optimizer_state_dict
            loaded = found(state[EXPORT_KEY_MODEL], EXPORT_KEY_OPTIMIZER, reader, process_group=group)
            known = {"state": {}, **loaded[EXPORT_KEY_OPTIMIZER]}  # nothing is written of an empty state
            flat = FSDP.optim_state_dict_to_load(model, optimizer, known, group=group)
            optimizer.load_state_dict(flat)
    if scheduler is not None:
        scheduler.load_state_dict(state[EXPORT_KEY_SCHEDULER])
    if log:
        get_logger().info("loaded %s", checkpoint_dir)
    return {
        EXPORT_KEY_MODEL: model,
        EXPORT_KEY_OPTIMIZER: optimizer,
        EXPORT_KEY_SCHEDULER: scheduler,
        EXPORT_KEY_IDENTITY: state.get(EXPORT_KEY_IDENTITY, {}),
    }


def _check(kind: StateDictType) -> None:
    if kind != StateDictType.SHARDED_STATE_DICT:
        raise ConfigError(
            f"checkpoints of this kind are sharded, not {kind.name}; give StateDictType.SHARDED_STATE_DICT"
        )


def _group(model: Any, given: tuple[Any, ...] | None) -> tuple[dist.ProcessGroup, int]:
    if given is not None:
        return given[0], given[1]
    return model.process_group, min(get_global_ranks(model.process_group))


def _place(folder: str | os.PathLike[str]) -> str:
    """Slices of tensors, and of experts, have separate folders."""
    session = current_session()
    if session is None:
        return os.path.join(folder, "tp0_ep0")
    ranks, rank = session.ranks, session.rank
    return os.path.join(folder, f"tp{ranks.tensor_rank(rank)}_ep{ranks.expert_rank(rank)}")
