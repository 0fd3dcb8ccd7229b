"""The session of a process: the settings of `phalanx.init`, or of another library's equivalent call.

The state is that of the process, since a script's later calls (FSDP's constructor, an optimizer's step) have no
argument for it. It is kept in the only variable of the package that outlives a call.
"""

import os
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from phalanx.api.fsdp.rank_layout import Groups, RankLayout
from phalanx.comm import mesh
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.system import accelerator
from phalanx.system.torchrun_env import from_environment

TIMEOUT_S = 1800.0  # torch's own default


@dataclass
class FsdpSession:
    """Settings and process groups of a session. `degree` of sharding as requested: None leaves sharding to the script;
    1 disables it. `given` has the names of settings without a default; `done` the later steps: "transform", "wrap" (in
    FSDP) and "offload".
    """

    rank: int
    ranks: RankLayout
    degree: int | None = None
    offloading: bool = False
    horizon: int = 2
    flush_warnings: bool = False
    empty_shards: bool = False
    seed: int | None = None
    given: frozenset[str] = frozenset()
    names: dict[str, str] = field(default_factory=dict)  # names of `tensor` and others in the call that set them
    done: set[str] = field(default_factory=set)
    groups: dict[str, Any] = field(default_factory=dict)  # created groups, by kind
    needs_sync: bool = False  # only the first rank has weights, so FSDP must broadcast them
    layers: frozenset[type] = frozenset()  # classes of a transformed model's layers
    experts: frozenset[type] = frozenset()  # classes of mixture-of-experts modules
    models: list[int] = field(default_factory=list)  # ids of transformed models
    settings: Any = None  # the original settings, to detect a second call with others
    flushes: int = 0
    requests: Any = None  # the queue of asynchronous saves

    def group(self, kind: str) -> dist.ProcessGroup:
        """This rank's `tensor`, `expert`, `context`, `data`, `shard`, `copy`, `dense` or `whole` group; collective on
        first use."""
        if kind not in self.groups:
            self.groups[kind] = mesh.make_subgroup(self._lists(kind))
        return self.groups[kind]

    def _lists(self, kind: str) -> Groups:
        found: Groups = getattr(self.ranks, f"{kind}_groups")()
        return found

    def axis(self, kind: str) -> mesh.Axis:
        """The ranks of this rank's group of kind `tensor`, `expert` or `context`, and its index among them."""
        name = f"{kind} axis"
        if name not in self.groups:  # created once: models refer to it weakly
            ranks = next(each for each in self._lists(kind) if self.rank in each)
            self.groups[name] = mesh.Axis(self.group(kind), tuple(ranks), ranks.index(self.rank))
        return self.groups[name]

    def shard_natively(self, degree: int) -> None:
        """Note that the script itself shards over this many ranks; then groups of ranks follow that degree."""
        if self.ranks.world % degree == 0:
            self.ranks = replace(self.ranks, shard=degree)

    def display_name(self, name: str) -> str:
        """Name of a setting in the call that set it."""
        return self.names.get(name, name)

    @property
    def sliced(self) -> str | None:
        """By what ranks hold slices of parameters: `tensor` or `expert`; None where each holds them whole."""
        return "tensor" if self.ranks.tensor > 1 else "expert" if self.ranks.expert > 1 else None

    @property
    def native(self) -> bool:
        """Whether sharding is left to the script, as without a session."""
        return self.sliced is None and self.degree is None


_CURRENT: ContextVar[FsdpSession | None] = ContextVar("phalanx_session", default=None)


def current_session() -> FsdpSession | None:
    """The session of this process, or None."""
    return _CURRENT.get()


def begin_session(session: FsdpSession) -> None:
    _CURRENT.set(session)


def current_device() -> torch.device:
    """This process's current accelerator, or the CPU."""
    ours = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if ours is None else torch.device(ours.type, torch.accelerator.current_device_index())


def find_placement() -> Placement:
    """Placement of this process as given by torchrun, Slurm or `phalanx run`; otherwise a single rank."""
    devices = accelerator.list_devices()
    found = from_environment(os.environ, devices)
    return found or Placement(0, 1, 0, 1, 0, devices[0] if devices else "cpu", store=None)


def world_size() -> int:
    """Number of ranks, even before the process group exists."""
    return dist.get_world_size() if dist.is_initialized() else find_placement().world


def join_default_group() -> int:
    """Initialize the default process group, unless the script has done so. Returns this rank."""
    if not dist.is_initialized():
        placement = find_placement()
        here = torch.device(placement.device)
        if here.type != "cpu":
            torch.accelerator.set_device_index(here.index or 0)
        mesh.init_default_group(placement, TIMEOUT_S)
    return dist.get_rank()


def check_degrees(world: int, tensor: int, degree: int | None) -> None:
    """Raise ConfigError if the ranks cannot be divided by these degrees."""
    for name, value in (("tensor", tensor), ("shard_degree", 1 if degree is None else degree)):
        if not 1 <= value <= world:
            raise ConfigError(
                f"{name} is {value}, but there {'is 1 rank' if world == 1 else f'are {world} ranks'}; give a number "
                f"from 1 to {world}"
            )
    together = tensor * (degree or 1)
    if world % together:
        what = f"tensor={tensor}" + (f" times shard_degree={degree}" if degree else "")
        raise ConfigError(f"{what} does not divide the {world} ranks; choose a divisor, or another number of ranks")


def check_wrap(session: FsdpSession, sync: bool) -> None:
    """Raise ConfigError if a model is wrapped in FSDP before it was prepared as the session requires."""
    require_transform(session)
    if session.needs_sync and not sync:
        raise ConfigError(
            "only the first rank's weights were loaded (load_state_dict_from_rank0=True), so FSDP would train "
            "random weights on the other ranks; give FSDP sync_module_states=True"
        )


def require_transform(session: FsdpSession) -> None:
    """Raise ConfigError if tensors should be split, experts or rows, but no model was transformed."""
    for kind in ("tensor", "expert", "context"):
        if (degree := getattr(session.ranks, kind)) > 1 and "transform" not in session.done:
            call = session.display_name("transform")
            raise ConfigError(
                f"{session.display_name(kind)} is {degree}, but no model was transformed, so nothing would be split; "
                f"call model = {call}(model) before the model is wrapped or trained, or set it to 1"
            )


def local_world() -> int:
    """Number of ranks of this node; all ranks if unknown."""
    found = from_environment(os.environ, accelerator.list_devices())
    return found.local_world if found is not None else dist.get_world_size()
