"""What the session means for FSDP, whose constructor a script calls itself: over which ranks it shards.

PyTorch's functions are replaced in place by ones that ask the session first, and leave all as it was where there is
none. They are found by name at each call, so it does not matter when a script has imported them.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    _fsdp_extensions,
    _init_utils,
    _optim_utils,
)
from torch.distributed.fsdp._fully_shard import _fully_shard

from phalanx.api.fsdp.clip_norm import clip_grad_norm_
from phalanx.api.fsdp.full_state_dict import (
    gather_state_dict,
    with_empty_shards,
    with_full_optimizer_load,
    with_full_optimizer_state,
)
from phalanx.api.fsdp.session import FsdpSession, check_wrap, current_device, current_session, local_world
from phalanx.core.errors import ConfigError

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
REPLACED = "_phalanx_replaces"


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(what is there)` in the place of a function, once."""
    there = getattr(owner, name)
    if getattr(there, REPLACED, None) is None:
        new = functools.wraps(there)(make(there))
        setattr(new, REPLACED, there)
        bound = inspect.getattr_static(owner, name)
        setattr(owner, name, staticmethod(new) if isinstance(bound, staticmethod) else new)


def patch_fsdp() -> None:
    """Have FSDP, of either kind, ask the session; calling it again changes nothing."""
    replace(FullyShardedDataParallel, "__init__", _wrap_init)
    replace(FullyShardedDataParallel, "clip_grad_norm_", _wrap_clip_grad_norm)
    replace(_init_utils, "_materialize_with_param_init_fn", _wrap_materialize)
    replace(_init_utils, "_check_module_states_for_sync_module_states", _wrap_sync_check)
    replace(_optim_utils, "_unflatten_orig_param_states", _wrap_unflatten_state)
    replace(_fsdp_extensions, "_create_chunk_sharded_tensor", with_empty_shards)
    replace(FullyShardedDataParallel, "_optim_state_dict_impl", with_full_optimizer_state)
    replace(FullyShardedDataParallel, "_optim_state_dict_to_load_impl", with_full_optimizer_load)
    replace(_fully_shard, "_init_default_mesh", _wrap_default_mesh)


class InitThenTie:
    """A function that gives one module its parameters, and one that ties them in a part of the model afterwards."""

    def __init__(self, init: Callable[[nn.Module], None], tie: Callable[[nn.Module], None]) -> None:
        self.init, self.tie = init, tie

    def __call__(self, module: nn.Module) -> None:
        self.init(module)


# ----------------------------------------------------------------------------------------------------------- the first


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    def init(
        self: Any,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        *others: Any,
        post_param_init_fn: Callable[[nn.Module], None] | None = None,
        **options: Any,
    ) -> None:
        session = current_session()
        if session is not None:
            check_wrap(session, options.get("sync_module_states", False))
            process_group, sharding_strategy = choose_fsdp_groups(
                session, process_group, sharding_strategy, options.get("device_mesh")
            )
            session.done.add("wrap")
        if len(others) < 7 and not torch.accelerator.is_available():  # device_id is the seventh of them
            options["device_id"] = torch.device("cpu")
        if post_param_init_fn is not None:
            given = options.get("param_init_fn")
            if given is None:
                post_param_init_fn(module)
            elif not isinstance(given, InitThenTie):
                options["param_init_fn"] = InitThenTie(given, post_param_init_fn)
        original(self, module, process_group, sharding_strategy, *others, **options)
        self._register_state_dict_hook(gather_state_dict)

    return init


def choose_fsdp_groups(
    session: FsdpSession, process_group: Any, strategy: ShardingStrategy | None, device_mesh: DeviceMesh | None
) -> tuple[Any, ShardingStrategy | None]:
    """The process group, or pair of them, and the strategy that FSDP gets in the place of what the script gave.

    Raises ConfigError where the script has given groups of its own, which would contradict the session.
    """
    if session.native:
        return _native(session, process_group, strategy, device_mesh), strategy
    if process_group is not None and _same(process_group, session.groups.get("wrap")):
        return process_group, strategy  # FSDP itself has handed it on to a part of the model
    if process_group is not None or device_mesh is not None:
        what = "process_group" if process_group is not None else "device_mesh"
        raise ConfigError(
            f"FSDP was given a {what}, but {session.display_name('shard_degree')} and {session.display_name('tensor')} "
            "say which ranks it shards over; leave one of the two out"
        )
    if session.degree == 1:
        chosen: Any = session.group("data") if session.ranks.tensor > 1 else None
        strategy = ShardingStrategy.NO_SHARD
    elif session.degree is None and strategy not in HYBRID:
        chosen = session.group("data")
    else:
        strategy = strategy if strategy in HYBRID else ShardingStrategy.HYBRID_SHARD
        chosen = session.groups.get("wrap") or (session.group("shard"), session.group("copy"))
    session.groups["wrap"] = chosen
    return chosen, strategy


def _same(one: Any, other: Any) -> bool:
    """Whether two are the same group, or pair of groups, which FSDP puts together anew."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other


def _native(
    session: FsdpSession, process_group: Any, strategy: ShardingStrategy | None, mesh: DeviceMesh | None
) -> Any:
    """FSDP's own hybrid sharding goes by the accelerators of a node. On a CPU there are none; it goes by its ranks."""
    if strategy not in HYBRID or process_group is not None or mesh is not None:
        return process_group
    here = local_world()
    if current_device().type == "cpu" and "wrap" not in session.groups:
        session.shard_natively(here)
        session.groups["wrap"] = (session.group("shard"), session.group("copy"))
    elif current_device().type != "cpu":
        session.shard_natively(here)
    return session.groups.get("wrap")


# ---------------------------------------------------------------------------------------------------------- the others


def _wrap_clip_grad_norm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def clip(self: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        session = current_session()
        if session is None or session.ranks.tensor == 1:
            return original(self, max_norm, norm_type)
        return clip_grad_norm_(self, max_norm, norm_type)

    return clip


def _wrap_materialize(original: Callable[..., None]) -> Callable[..., None]:
    def materialise(root: nn.Module, param_init_fn: Any, *others: Any) -> None:
        original(root, param_init_fn, *others)
        if isinstance(param_init_fn, InitThenTie):
            param_init_fn.tie(root)

    return materialise


def _wrap_sync_check(original: Callable[..., None]) -> Callable[..., None]:
    def check(states: Sequence[torch.Tensor]) -> None:
        if torch.accelerator.is_available():  # else host tensors are all there is, and can be sent
            original(states)

    return check


def _wrap_unflatten_state(original: Callable[..., None]) -> Callable[..., None]:
    """Of an optimizer's state, FSDP gives out its buffer if that lies on the host already, and then fills it with the
    next kind of state: Adam's first moments would be saved as its second. Not offloaded, it is copied."""

    def unflatten(info: Any, states: Any, name: str, shard: bool, to_save: bool, cpu_offload: bool) -> None:
        original(info, states, name, shard, to_save, cpu_offload and torch.accelerator.is_available())

    return unflatten


def _wrap_default_mesh(original: Callable[[], DeviceMesh]) -> Callable[[], DeviceMesh]:
    def default(*args: Any, **options: Any) -> DeviceMesh:
        session = current_session()
        if session is None or session.native:
            return original(*args, **options)
        check_wrap(session, sync=True)
        session.done.add("wrap")
        if "mesh" not in session.groups:
            session.groups["mesh"] = _mesh(session)
        return session.groups["mesh"]

    return default


def _mesh(session: FsdpSession) -> DeviceMesh:
    """The mesh that `fully_shard` takes: shards, or copies of shards."""
    kind = current_device().type
    if session.degree is None:
        return DeviceMesh.from_group(session.group("data"), kind, mesh_dim_names=("shard",))
    copies, shards = session.group("copy"), session.group("shard")
    data = dist.get_process_group_ranks(session.group("data"))
    table = torch.tensor(data).view(-1, session.ranks.shard)
    return DeviceMesh.from_group([copies, shards], kind, mesh=table, mesh_dim_names=("replicate", "shard"))
