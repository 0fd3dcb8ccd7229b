"""`tsm.state`: what a script asks about ranks, groups and settings once `tsm.init` was called."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from phalanx.api.fsdp.rank_layout import Groups, RankLayout
from phalanx.api.fsdp.session import FsdpSession, current_session
from phalanx.compat.sagemaker import config
from phalanx.core.errors import ConfigError


class Ranker:
    """Who is where. A replication group is made of the ranks that hold the same shard, each of another replica."""

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

    def get_shard_rank(self, rank: int) -> int:
        return self._ranks.shard_rank(rank)

    def get_shard_size(self) -> int:
        return self._ranks.shard

    def get_shard_groups(self) -> Groups:
        return self._ranks.shard_groups()

    def get_ep_rank(self, rank: int) -> int:
        return 0

    def get_ep_groups(self) -> Groups:
        return [[rank] for rank in range(self._ranks.world)]


def _group(kind: str) -> Callable[[FsdpSession], dist.ProcessGroup | None]:
    """A group of the session; None where FSDP is left as the script has it."""
    return lambda session: (
        None if session.native or (session.degree == 1 and session.ranks.tensor == 1) else (session.group(kind))
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
    "ep_size": lambda session: 1,
    "ep_rank": lambda session: 0,
    "ep_process_group": lambda session: None,
    "cp_size": lambda session: 1,
    "cp_rank": lambda session: 0,
    "cp_process_group": lambda session: None,
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


STATE = State()  # holds nothing itself
