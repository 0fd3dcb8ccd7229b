"""`tsm.init`: starts a session from the launcher's and the script's settings, and the checks that follow."""

import atexit
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from phalanx.api.fsdp import session as sessions
from phalanx.api.fsdp.init import start_session
from phalanx.api.fsdp.rank_layout import Groups, RankLayout
from phalanx.api.fsdp.session import FsdpSession, current_session
from phalanx.compat.run import PARAMETERS
from phalanx.compat.sagemaker import config
from phalanx.compat.sagemaker.saver import AsyncCallsQueue
from phalanx.core.errors import ConfigError
from phalanx.system import accelerator

NAMES = {
    "tensor": "tensor_parallel_degree",
    "context": "context_parallel_degree",
    "expert": "expert_parallel_degree",
    "shard_degree": "hybrid_shard_degree",
    "transform": "tsm.transform",
}
logger = logging.getLogger("phalanx.sagemaker")


def launcher_settings() -> dict[str, Any]:
    """The parameters that the launcher has left in the environment."""
    text = os.environ.get(PARAMETERS, "").strip()
    return config.parse(text, f"the environment variable {PARAMETERS}") if text else {}


def init(config: Mapping[str, Any] | str | Path | None = None) -> None:
    """Initialise: `config` is a dict, the path of a JSON file, or None for the launcher's parameters alone.

    Where the launcher has set a key, its value takes the place of the script's, and rank 0 says so. Makes the default
    process group where the script has not. Collective. Raises ConfigError for settings that cannot be, all of them at
    once and before any process group is made, and for a second call with other settings.
    """
    settings = resolve_settings(config)
    before = sessions.current_session()
    if before is not None:
        if before.settings == settings:
            return
        raise ConfigError("tsm.init was called before with other settings; call it once")
    rank = sessions.join_default_group()
    session = _session(settings, rank, sessions.world_size())
    start_session(session)
    session.requests = AsyncCallsQueue()
    atexit.register(_warn_of_open_saves, session.requests)
    _watch(session)
    if rank == 0:
        for note in settings.notes:
            logger.warning(note)


def resolve_settings(given: Mapping[str, Any] | str | Path | None) -> config.Settings:
    """What script and launcher ask for together, checked against the number of ranks."""
    both, notes = config.merge_settings(config.read_config(given), launcher_settings())
    checked = config.check_settings(both, sessions.world_size())
    return config.Settings(checked.values, checked.given, (*checked.notes, *notes))


def is_initialized() -> bool:
    """Whether `tsm.init` was called."""
    session = sessions.current_session()
    return session is not None and isinstance(session.settings, config.Settings)


def _session(settings: config.Settings, rank: int, world: int) -> FsdpSession:
    tensor, context, experts = (settings[f"{kind}_parallel_degree"] for kind in ("tensor", "context", "expert"))
    asked = settings["hybrid_shard_degree"]
    return FsdpSession(
        rank=rank,
        ranks=RankLayout(world, tensor, asked or world // (tensor * experts), context, experts),
        degree=asked or None,
        offloading=bool(settings["sm_activation_offloading"]),
        horizon=settings["activation_loading_horizon"],
        flush_warnings=bool(settings["fsdp_cache_flush_warnings"]),
        empty_shards=bool(settings["allow_empty_shards"]),
        seed=settings["random_seed"] if "random_seed" in settings.given else None,
        given=settings.given,
        names=NAMES,
        settings=settings,
    )


# ------------------------------------------------------------------------------------------------------ what is watched


def _watch(session: FsdpSession) -> None:
    """Before the first update: what was asked for is in effect. After each: the allocator had no need to flush."""

    def before(*_: Any) -> None:
        if sessions.current_session() is session:
            check_in_effect(session)
        first.remove()

    first = register_optimizer_step_pre_hook(before)
    if session.flush_warnings:
        session.flushes = accelerator.cache_flushes(sessions.current_device())
        register_optimizer_step_post_hook(lambda *_: _warn_of_flushes(session))


def check_in_effect(session: FsdpSession) -> None:
    """Raise ConfigError for a setting that was written out, and that nothing of the script has put into effect."""
    sessions.require_transform(session)
    if session.degree is not None and "wrap" not in session.done:
        raise ConfigError(
            f"hybrid_shard_degree is {session.degree}, but no model is wrapped in FSDP, so nothing is sharded; wrap "
            "it, or set hybrid_shard_degree to 0"
        )
    if session.ranks.expert > 1 and "wrap" not in session.done:
        raise ConfigError(
            f"expert_parallel_degree is {session.ranks.expert}, but no model is wrapped in FSDP, so gradients of "
            "experts and of the rest are not summed over their ranks; wrap it"
        )
    if session.offloading and "offload" not in session.done:
        if "sm_activation_offloading" in session.given:
            raise ConfigError(
                "sm_activation_offloading is true, but nothing is offloaded: the script does not call offload_wrapper; "
                "call model = offload_wrapper(model) after apply_activation_checkpointing, or set it to false"
            )
        if "activation_loading_horizon" in session.given and session.rank == 0:
            warnings.warn(
                "activation_loading_horizon is set, but the script does not call offload_wrapper, so it has no effect",
                stacklevel=2,
            )


def _warn_of_flushes(session: FsdpSession) -> None:
    if sessions.current_session() is not session:
        return
    flushes = accelerator.cache_flushes(sessions.current_device())
    if flushes > session.flushes:
        warnings.warn(
            f"rank {session.rank}: {flushes - session.flushes} cache flushes of the memory allocator since the last "
            "step, which slow all ranks down; memory is nearly full: raise hybrid_shard_degree, checkpoint or offload "
            "activations, make batches smaller, or have all ranks empty their caches at the same time",
            stacklevel=2,
        )
    session.flushes = flushes


def _warn_of_open_saves(queue: AsyncCallsQueue) -> None:
    if (count := queue.get_num_unfinalized_calls()) > 0:
        sys.stderr.write(
            f"{count} checkpoints are incomplete: call maybe_finalize_async_calls(blocking=True) before the end\n"
        )


# --------------------------------------------------------------------------------------------------------------- state
# `tsm.state`: what a script asks about ranks, groups and settings once `tsm.init` was called.


class Ranker:
    """The rank layout. A replication group has the ranks that hold the same shard, each of another replica."""

    def __init__(self, session: FsdpSession) -> None:
        self._session = session

    @property
    def _ranks(self) -> RankLayout:
        return self._session.ranks

    def get_rep_rank(self, rank: int) -> int:
        """The replica that a rank holds a part of."""
        return self._ranks.copy(rank)

    def get_rep_size(self) -> int:
        return self._ranks.copies

    def get_rep_groups(self) -> Groups:
        return self._ranks.copy_groups()

    def get_tp_rank(self, rank: int) -> int:
        return self._ranks.tensor_rank(rank)

    def get_tp_size(self) -> int:
        return self._ranks.tensor

    def get_tp_groups(self) -> Groups:
        return self._ranks.tensor_groups()

    def get_cp_rank(self, rank: int) -> int:
        return self._ranks.context_rank(rank)

    def get_cp_size(self) -> int:
        return self._ranks.context

    def get_cp_groups(self) -> Groups:
        return self._ranks.context_groups()

    def get_shard_rank(self, rank: int) -> int:
        return self._ranks.shard_rank(rank)

    def get_shard_size(self) -> int:
        return self._ranks.shard

    def get_shard_groups(self) -> Groups:
        return self._ranks.shard_groups()

    def get_ep_rank(self, rank: int) -> int:
        return self._ranks.expert_rank(rank)

    def get_ep_size(self) -> int:
        return self._ranks.expert

    def get_ep_groups(self) -> Groups:
        return self._ranks.expert_groups()


def _group(kind: str) -> Callable[[FsdpSession], dist.ProcessGroup | None]:
    """A group of the session; None where FSDP is left as the script has it."""
    return lambda session: (
        None if session.native or (session.degree == 1 and session.sliced is None) else (session.group(kind))
    )


def _setting(key: str) -> Callable[[FsdpSession], Any]:
    return lambda session: session.settings[key]


_READ: dict[str, Callable[[FsdpSession], Any]] = {
    **{key: _setting(key) for key in config.DEFAULTS},
    "rank": lambda session: session.rank,
    "world_size": lambda session: session.ranks.world,
    "world_process_group": lambda session: dist.group.WORLD,
    "tp_size": lambda session: session.ranks.tensor,
    "tp_rank": lambda session: session.ranks.tensor_rank(session.rank),
    "tp_process_group": _group("tensor"),
    "rep_rank_process_group": _group("whole"),
    "ep_size": lambda session: session.ranks.expert,
    "ep_rank": lambda session: session.ranks.expert_rank(session.rank),
    "ep_process_group": lambda session: session.group("expert") if session.ranks.expert > 1 else None,
    "cp_size": lambda session: session.ranks.context,
    "cp_rank": lambda session: session.ranks.context_rank(session.rank),
    "cp_process_group": lambda session: session.group("context") if session.ranks.context > 1 else None,
    "ranker": Ranker,
}


class State:
    """Reads the session at each access, so that it may be imported before `tsm.init`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _READ:
            raise AttributeError(
                f"torch.sagemaker.state.{name} is not provided by Phalanx; it has {', '.join(sorted(_READ))}"
            )
        session = current_session()
        if session is None or not isinstance(session.settings, config.Settings):
            raise ConfigError(f"tsm.state.{name} is not known before tsm.init(); call that first")
        return _READ[name](session)

    def __dir__(self) -> list[str]:
        return sorted(_READ)


STATE = State()  # without state
