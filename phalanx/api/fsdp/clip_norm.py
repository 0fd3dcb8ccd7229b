"""Gradient norm and clipping for FSDP with tensor or expert parallelism: gradients are sharded, and tensors or experts
are split over ranks."""

import functools
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import clean_tensor_name

from phalanx.api.fsdp.session import FsdpSession, current_session
from phalanx.comm.collectives import device_for_group
from phalanx.core.errors import ConfigError
from phalanx.parallel.hf_state import find_tensor_shards


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the gradient norm in place to at most `max_norm`; returns the norm before, the same on all ranks. `model`
    may be wrapped in FSDP, alone or within other modules; its tensors or experts may be split over ranks. Each element
    counts once, wherever it is held, also of what FSDP ignores. The norm is float32, or float64 for a model that has
    it. Collective.
    """
    root = next((each for each in model.modules() if isinstance(each, FullyShardedDataParallel)), None)
    session = current_session()
    if session is None or session.sliced is None:
        if root is None:
            return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        return root.clip_grad_norm_(max_norm, norm_type)
    group = _group(root, session)
    gradients = list(_gradients(model, session.ranks.slices, dist.get_world_size(group)))
    kinds = (each.dtype for each in model.parameters())
    wide = functools.reduce(torch.promote_types, kinds, torch.float32)
    with torch.no_grad():
        norm = _norm(gradients, group, norm_type).to(wide)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient, _ in gradients:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm


def _group(root: FullyShardedDataParallel | None, session: FsdpSession) -> dist.ProcessGroup:
    """All ranks that hold other elements than this one, or the same ones if they are not sharded."""
    whole = root is None or root.sharding_strategy == ShardingStrategy.NO_SHARD
    assert session.sliced is not None
    return session.group(session.sliced if whole else "whole")


def _gradients(model: nn.Module, slices: int, ranks: int) -> Iterator[tuple[Tensor, int]]:
    """This rank's part of each gradient, and how many of the `ranks` of a copy of the model, `slices` for each shard,
    hold the same one."""
    alike = {clean_tensor_name(name): part.copies for name, part in find_tensor_shards(model).items()}
    seen: set[int] = set()
    for parameter, name, gradient in _sharded(model):
        seen.add(id(parameter))
        if gradient is not None and gradient.numel():
            yield gradient, alike.get(name, slices)
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen and parameter.grad is not None and parameter.grad.numel():
            yield parameter.grad, alike.get(clean_tensor_name(name), slices) * (ranks // slices)


def _sharded(model: nn.Module) -> Iterator[tuple[nn.Parameter, str, Tensor | None]]:
    """Each parameter that FSDP manages, or the flat one that it is a part of, its name in the model, and this rank's
    part of its gradient."""
    names = {id(module): name for name, module in model.named_modules()}
    for part in FullyShardedDataParallel.fsdp_modules(model):
        if part._handle is None:
            continue
        flat = part._handle.flat_param
        for number, (info, place) in enumerate(zip(flat._param_infos, flat._shard_param_infos, strict=True)):
            name = clean_tensor_name(f"{names[id(info.module)]}.{info.param_name}".lstrip("."))
            if part._handle._use_orig_params:
                assert flat._params is not None
                yield flat._params[number], name, flat._params[number].grad
            elif place.in_shard and flat.grad is not None:
                assert place.offset_in_shard is not None and place.numel_in_shard is not None
                yield flat, name, flat.grad.narrow(0, place.offset_in_shard, place.numel_in_shard)
            else:
                yield flat, name, None


def _norm(gradients: list[tuple[Tensor, int]], group: dist.ProcessGroup, norm_type: float) -> Tensor:
    device = gradients[0][0].device if gradients else torch.device("cpu")
    if norm_type == math.inf:
        parts = [gradient.abs().max().double() for gradient, _ in gradients]
        total = torch.stack(parts).max() if parts else torch.zeros((), device=device, dtype=torch.float64)
        return _over_ranks(total, dist.ReduceOp.MAX, group)
    if not norm_type > 0:
        raise ConfigError(f"norm_type is {norm_type:g}, which is not a norm; give a number above 0, or infinity")
    total = torch.zeros((), device=device, dtype=torch.float64)
    for gradient, alike in gradients:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total += torch.linalg.vector_norm(gradient, norm_type, dtype=wide).double() ** norm_type / alike
    return _over_ranks(total, dist.ReduceOp.SUM, group) ** (1 / norm_type)


def _over_ranks(total: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    sent = total.to(device_for_group(group, total.device))
    dist.all_reduce(sent, op=operation, group=group)
    return sent.to(total.device)
