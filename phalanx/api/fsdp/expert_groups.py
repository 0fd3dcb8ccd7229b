"""FSDP of models whose experts are divided over ranks: gradients of experts are summed over other ranks than the rest.

Experts are alike on the ranks of a data group, and the rest on all. The rest has the shards that experts have, and more
copies. So a shard group holds all of a model but the experts of others, which it can save by itself.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import _Policy

from phalanx.api.fsdp.session import FsdpSession
from phalanx.parallel.hf_state import EXPERTS

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def is_divided(module: nn.Module) -> bool:
    """Whether the module is the experts of a layer, of which this rank holds some."""
    return EXPERTS in vars(module)


def choose_dense_groups(session: FsdpSession, strategy: ShardingStrategy | None) -> tuple[Any, ShardingStrategy]:
    """FSDP's groups and strategy for what is not an expert, where experts are divided."""
    own = strategy == ShardingStrategy.NO_SHARD and session.degree is None
    if own or session.ranks.shard == 1:
        return dist.group.WORLD, ShardingStrategy.NO_SHARD
    less = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
    chosen = session.groups.get("wrap") or (session.group("shard"), session.group("dense"))
    return chosen, HYBRID[less]


def choose_expert_groups(session: FsdpSession, strategy: ShardingStrategy | None) -> tuple[Any, ShardingStrategy]:
    """FSDP's groups and strategy for experts, beside that of the rest."""
    if strategy == ShardingStrategy.NO_SHARD:
        return session.group("data"), strategy
    assert strategy in HYBRID, strategy
    if session.ranks.copies > 1:
        return (session.group("shard"), session.group("copy")), strategy
    less = strategy == ShardingStrategy._HYBRID_SHARD_ZERO2
    return session.group("shard"), ShardingStrategy.SHARD_GRAD_OP if less else ShardingStrategy.FULL_SHARD


def wrap_experts(kind: type, module: nn.Module, groups: tuple[Any, Any], options: dict[str, Any]) -> None:
    """Have the experts within `module` be separate FSDP modules. Changes a policy among `options`, or where there is
    none, the module."""
    policy = options.get("auto_wrap_policy")
    if policy is not None:
        options["auto_wrap_policy"] = OrExperts(policy) if isinstance(policy, _Policy) else _or_experts(policy)
        return
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if is_divided(child) and not isinstance(parent, FullyShardedDataParallel):
                setattr(parent, name, kind(child, *groups, **options))


def _or_experts(policy: Callable[..., bool]) -> Callable[..., bool]:
    """A script's function that chooses what is wrapped, which chooses experts besides."""

    def choose(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        here = any(map(is_divided, module.modules())) if recurse else is_divided(module)
        return here or policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)

    return choose


class OrExperts(_Policy):
    """The same of PyTorch's policies that are no functions."""

    def __init__(self, policy: _Policy) -> None:
        self._policy = policy

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        found = self._policy._run_policy(root_module, ignored_modules, root_kwargs)
        return {each: dict(root_kwargs) for each in root_module.modules() if is_divided(each)} | found
