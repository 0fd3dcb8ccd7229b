"""Patches of FSDP's constructor, so that it shards over the session's ranks.

PyTorch's functions are replaced in place by wrappers that check for a session, and do not change anything without one.
They are looked up at each call, so it does not matter when a script has imported them.
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
from phalanx.api.fsdp.expert_groups import HYBRID, choose_dense_groups, choose_expert_groups, is_divided, wrap_experts
from phalanx.api.fsdp.full_state_dict import (
    gather_state_dict,
    with_empty_shards,
    with_full_optimizer_load,
    with_full_optimizer_state,
)
from phalanx.api.fsdp.session import FsdpSession, check_wrap, current_device, current_session, local_world
from phalanx.core.errors import ConfigError

REPLACED = "_phalanx_replaces"


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by `make(attribute)`, once."""
    there = getattr(owner, name)
    if getattr(there, REPLACED, None) is None:
        new = functools.wraps(there)(make(there))
        setattr(new, REPLACED, there)
        bound = inspect.getattr_static(owner, name)
        setattr(owner, name, staticmethod(new) if isinstance(bound, staticmethod) else new)


def patch_fsdp() -> None:
    """Patch both versions of FSDP to use the session; further calls have no effect."""
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
    """A function that initializes a module's parameters, followed by one that ties them within a part of the model."""

    def __init__(self, init: Callable[[nn.Module], None], tie: Callable[[nn.Module], None]) -> None:
        self.init, self.tie = init, tie

    def __call__(self, module: nn.Module) -> None:
        self.init(module)


# ----------------------------------------------------------------------------------------------------------- FSDP1


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    names = tuple(inspect.signature(original).parameters)[4:]

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
        options |= dict(zip(names, others, strict=False))
        if session is not None:
            check_wrap(session, options.get("sync_module_states", False))
            process_group, sharding_strategy = choose_fsdp_groups(
                session, process_group, sharding_strategy, options.get("device_mesh")
            )
            session.done.add("wrap")
        if not torch.accelerator.is_available():
            options["device_id"] = torch.device("cpu")
        if post_param_init_fn is not None:
            given = options.get("param_init_fn")
            if given is None:
                post_param_init_fn(module)
            elif not isinstance(given, InitThenTie):
                options["param_init_fn"] = InitThenTie(given, post_param_init_fn)
        if session is not None and session.ranks.expert > 1:
            wrap_experts(type(self), module, (process_group, sharding_strategy), options)
            if is_divided(module):
                process_group, sharding_strategy = choose_expert_groups(session, sharding_strategy)
        original(self, module, process_group, sharding_strategy, **options)
        if session is not None and session.ranks.expert > 1:
            if is_divided(module):  # whose gradients are sums over the tokens of all ranks that divide them
                self._gradient_postdivide_factor *= session.ranks.expert
            elif sharding_strategy == ShardingStrategy.NO_SHARD:  # the first with its experts gives its part of a state
                self.rank = session.group("data").rank()
        self._register_state_dict_hook(gather_state_dict)

    return init


def choose_fsdp_groups(
    session: FsdpSession, process_group: Any, strategy: ShardingStrategy | None, device_mesh: DeviceMesh | None
) -> tuple[Any, ShardingStrategy | None]:
    """The process group, or pair of groups, and the strategy that FSDP gets instead of the script's. Raises
    ConfigError if the script passes custom groups, which would contradict the session.
    """
    if session.native:
        return _native(session, process_group, strategy, device_mesh), strategy
    if process_group is not None and _same(process_group, session.groups.get("wrap")):
        return process_group, strategy  # FSDP itself has passed it on to a part of the model
    if process_group is not None or device_mesh is not None:
        what = "process_group" if process_group is not None else "device_mesh"
        raise ConfigError(
            f"FSDP was given a {what}, but {session.display_name('shard_degree')} and "
            f"{session.display_name('tensor')} say which ranks it shards over; leave out one of them"
        )
    if session.ranks.expert > 1:
        chosen, strategy = choose_dense_groups(session, strategy)
    elif session.degree == 1:
        chosen = session.group("data") if session.ranks.tensor > 1 else None
        strategy = ShardingStrategy.NO_SHARD
    elif session.degree is None and strategy not in HYBRID:
        chosen = session.group("data")
    else:
        strategy = strategy if strategy in HYBRID else ShardingStrategy.HYBRID_SHARD
        chosen = session.groups.get("wrap") or (session.group("shard"), session.group("copy"))
    session.groups["wrap"] = chosen
    return chosen, strategy


def _same(one: Any, other: Any) -> bool:
    """Whether two groups, or pairs of groups (which FSDP rebuilds), are the same."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other


def _native(
    session: FsdpSession, process_group: Any, strategy: ShardingStrategy | None, mesh: DeviceMesh | None
) -> Any:
    """FSDP's native hybrid sharding uses the number of accelerators of a node. Without accelerators, use the
    node's ranks."""
    if strategy not in HYBRID or process_group is not None or mesh is not None:
        return process_group
    here = local_world()
    if current_device().type == "cpu" and "wrap" not in session.groups:
        session.shard_natively(here)
        session.groups["wrap"] = (session.group("shard"), session.group("copy"))
    elif current_device().type != "cpu":
        session.shard_natively(here)
    return session.groups.get("wrap")


# ----------------------------------------------------------------------------------------------------------- FSDP2


def _wrap_clip_grad_norm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def clip(self: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        session = current_session()
        if session is None or session.sliced is None:
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
        if torch.accelerator.is_available():  # otherwise there are only host tensors, which can be sent
            original(states)

    return check


def _wrap_unflatten_state(original: Callable[..., None]) -> Callable[..., None]:
    """Patch a bug of FSDP: with state on the host it returns its buffer of an optimizer's state, then refills it
    with the next kind of state, so that Adam's first moments would be saved as its second. Without offloading,
    FSDP copies it."""

    def unflatten(info: Any, states: Any, name: str, shard: bool, to_save: bool, cpu_offload: bool) -> None:
        original(info, states, name, shard, to_save, cpu_offload and torch.accelerator.is_available())

    return unflatten


def _wrap_default_mesh(original: Callable[[], DeviceMesh]) -> Callable[[], DeviceMesh]:
    def default(*args: Any, **options: Any) -> DeviceMesh:
        session = current_session()
        if session is None or session.native:
            return original(*args, **options)
        if session.ranks.expert > 1:
            raise ConfigError(
                f"{session.display_name('expert')} is {session.ranks.expert}, and fully_shard does not know divided "
                "experts; wrap the model in FullyShardedDataParallel"
            )
        check_wrap(session, sync=True)
        session.done.add("wrap")
        if "mesh" not in session.groups:
            session.groups["mesh"] = _mesh(session)
        return session.groups["mesh"]

    return default


def _mesh(session: FsdpSession) -> DeviceMesh:
    """The mesh for `fully_shard`: shards, or copies of shards."""
    kind = current_device().type
    if session.degree is None:
        return DeviceMesh.from_group(session.group("data"), kind, mesh_dim_names=("shard",))
    copies, shards = session.group("copy"), session.group("shard")
    data = dist.get_process_group_ranks(session.group("data"))
    table = torch.tensor(data).view(-1, session.ranks.shard)
    return DeviceMesh.from_group([copies, shards], kind, mesh=table, mesh_dim_names=("replicate", "shard"))
