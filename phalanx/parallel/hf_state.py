"""State of transformed models of transformers: weights that one rank sends to all, and state dicts of whole tensors."""

import itertools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from phalanx.comm import collectives
from phalanx.comm.collectives import Traffic, device_for_group
from phalanx.comm.mesh import Axis
from phalanx.core.errors import ConfigError
from phalanx.layout.tensor_shards import TensorShard
from phalanx.parallel.tensor_layers import (
    TENSOR_PARALLEL_MODULES,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    copy_shard,
)

# Attributes of modules with stacks of experts: those that are divided over ranks, and those that are sliced.
EXPERTS, SLICED_EXPERTS = "expert_parallel", "tensor_parallel"


class Rank0Weights:
    """The weights that global rank 0 sends to all others, one tensor at a time; no other rank holds all of them."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        self._device, self._dtype = device, dtype
        self._sent_from = device_for_group(dist.group.WORLD, device)  # type: ignore[arg-type]
        self._sends = dist.get_rank() == 0
        described = [
            *((name, tuple(p.shape), dtype or p.dtype) for name, p in model.named_parameters(remove_duplicate=False)),
            *((name, tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers()),
        ]
        if self._sends and any(each.is_meta for each in model.parameters()):
            described = []  # matches no rank's, so that all ranks see the mismatch
        number = float(zlib.crc32(repr(described).encode()))
        seen = torch.tensor([number, -number], dtype=torch.float64, device=self._sent_from)
        collectives.all_reduce(seen, dist.group.WORLD, Traffic(), dist.ReduceOp.MAX).wait()  # type: ignore[arg-type]
        if seen[0] != -seen[1]:
            raise ConfigError(
                "load_state_dict_from_rank0 needs the weights on rank 0, and the same model, in the same types, on all "
                "ranks; load the weights on rank 0, and build the model from the same config on the others"
            )

    def receive_shard(self, whole: Tensor, part: TensorShard) -> nn.Parameter:
        """Receive this rank's shard of a parameter from rank 0."""
        return copy_shard(self._sent(whole, self._dtype).requires_grad_(whole.requires_grad), part)

    def receive_rest(self, model: nn.Module) -> None:
        """Receive all other parameters and buffers, which are whole on all ranks."""
        for module in model.modules():
            known = shards_of(module)
            for leaf, each in list(module._parameters.items()):
                if each is not None and leaf not in known:
                    sent = self._sent(each, self._dtype)
                    module._parameters[leaf] = nn.Parameter(sent, requires_grad=each.requires_grad)
            for leaf, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[leaf] = self._sent(buffer, None)

    def _sent(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        dtype = tensor.dtype if dtype is None else dtype
        if self._sends:
            whole = tensor.detach().to(self._sent_from, dtype).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=dtype, device=self._sent_from)
        dist.broadcast(whole, 0)
        return whole.to(self._device)


def finish_transform(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """Have a transformed model take its parts of whole state dicts, and move it; one on meta stays there."""
    for parameter in model.parameters():  # not buffers: rotary frequencies keep their precision
        parameter.data = parameter.data.to(dtype=dtype)
    model.register_load_state_dict_pre_hook(shard_state_dict)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    return model if on_meta or device is None else model.to(device=device)


# --------------------------------------------------------------------------------------- state dicts of the whole model


def shards_of(module: nn.Module) -> dict[str, TensorShard]:
    """What a module of a transformed model holds of its parameters, by name, where it does not hold them whole."""
    known = isinstance(module, TENSOR_PARALLEL_MODULES) or not vars(module).keys().isdisjoint((EXPERTS, SLICED_EXPERTS))
    found: dict[str, TensorShard] = vars(module)["shards"] if known else {}
    return found


def find_tensor_shards(model: nn.Module) -> dict[str, TensorShard]:
    """The shard of each parameter of a transformed model, by name; others are whole on every rank."""
    return {
        f"{name}.{leaf}": part for name, module in model.named_modules() for leaf, part in shards_of(module).items()
    }


def find_tensor_axis(model: nn.Module) -> Axis | None:
    """The tensor-parallel axis of a transformed model; None for another."""
    cuts = (
        module.cut
        for module in model.modules()
        if isinstance(module, RowParallelLinear | VocabParallelEmbedding | VocabParallelHead)
    )
    found = next(cuts, None)
    return None if found is None else found.peers.axis


def full_state_dict(
    model: nn.Module, axis: Axis, tensors: Mapping[str, Tensor] | None = None, everywhere: bool = False
) -> dict[str, Tensor]:
    """The full state dict of a transformed model, on the host of the first rank of `axis`, or on all with `everywhere`;
    elsewhere {}.

    Gathered tensor by tensor. `tensors`: this rank's parts by name, where the model does not have them because another
    wrapper does. Collective.
    """
    own = dict(model.state_dict()) if tensors is None else tensors
    return dict(_gather_tensors(own, find_tensor_shards(model), axis, everywhere))


def _gather_tensors(
    own: Mapping[str, Tensor], parts: Mapping[str, TensorShard], axis: Axis, everywhere: bool
) -> Iterator[tuple[str, Tensor]]:
    memory: dict[int, Tensor] = {}  # tied weights stay tied
    wanted = everywhere or axis.rank == 0
    for name, tensor in own.items():
        part = parts.get(name)
        if part is None:
            if wanted:
                yield name, tensor.detach().to("cpu", copy=True)
            continue
        key = tensor.data_ptr() if tensor.numel() else id(tensor)
        if key not in memory:
            memory[key] = gather_tensor(tensor.detach(), part, axis, everywhere)
        if wanted:
            yield name, memory[key]


def shard_state_dict(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A pre-hook of load_state_dict of a transformed model: each rank takes its part of whole tensors, and parts
    unchanged."""
    parts = {
        clean_tensor_name(name): part for name, part in find_tensor_shards(model).items()
    }  # its layers may be wrapped by FSDP
    for name, given in list(state.items()):
        part = parts.get(clean_tensor_name(name.removeprefix(prefix)))
        if part is not None and isinstance(given, Tensor) and tuple(given.shape) == part.shape != part.local_shape:
            state[name] = copy_shard(given, part).detach()


def gather_tensor(tensor: Tensor, shard: TensorShard, axis: Axis, everywhere: bool = False) -> Tensor:
    """Gather a tensor from the parts of all ranks, on the host of the first rank, or `everywhere`; None elsewhere.
    Collective over `axis`."""
    length = shard.shape[shard.dim]
    unlike = shard.copies == 1 and length % axis.size != 0
    widest = -(-length // axis.size) if unlike else tensor.shape[shard.dim]
    tensor = tensor.to(device_for_group(axis.group, tensor.device))
    padded = tensor.new_zeros([widest if dim == shard.dim else size for dim, size in enumerate(tensor.shape)])
    padded.narrow(shard.dim, 0, tensor.shape[shard.dim]).copy_(tensor)
    out = tensor.new_empty((axis.size, *padded.shape))
    collectives.all_gather(out.view(-1), padded.view(-1), axis.group, Traffic()).wait()
    if axis.rank and not everywhere:
        return tensor.new_empty(0)
    among = axis.size // shard.copies
    edges = itertools.pairwise(length * place // among for place in range(among + 1))
    found = [out[place * shard.copies].narrow(shard.dim, 0, stop - start) for place, (start, stop) in enumerate(edges)]
    if shard.sections:
        each = zip(*(part.split([n // axis.size for n in shard.sections], shard.dim) for part in found), strict=True)
        found = [part for section in each for part in section]
    return torch.cat(found, shard.dim).cpu()
