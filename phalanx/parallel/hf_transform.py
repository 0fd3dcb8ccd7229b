"""Tensor parallelism for models of transformers, in place, by the primitives of tensor.py.

A table for each architecture says how its matrices are cut. Its code is unchanged: it takes the number of heads from
the tensors. Logits are whole on every rank, so that any loss, of transformers or custom, is computed as before.
"""

import copy
import itertools
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from phalanx.comm import collectives
from phalanx.comm.collectives import Traffic, device_for_group
from phalanx.comm.mesh import Axis, split_axis
from phalanx.core.errors import ConfigError
from phalanx.layout.tensor_shards import TensorShard, find_cut_kind, plan_tensor_shards
from phalanx.models.families.catalog import TRANSFORM_PLANS
from phalanx.models.layers import RMSNorm
from phalanx.parallel import activations
from phalanx.parallel.tensor import replace_modules
from phalanx.parallel.tensor_collectives import TensorParallelPeers
from phalanx.parallel.tensor_layers import (
    TENSOR_PARALLEL_MODULES,
    PartialRMSNorm,
    RowParallelLinear,
    SplitRMSNorm,
    TensorParallelContext,
    VocabParallelEmbedding,
    VocabParallelHead,
    copy_shard,
)

# Keys of their configurations.
_DROPOUT = ("attention_dropout", "hidden_dropout", "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
_ATTENTION = (".self_attn", ".self_attention", ".attention", ".attn")  # ends of the names of modules with heads
_HEAD_COUNTS = {"num_heads", "num_attention_heads"}  # attributes of those that do not ask their tensors
_TIMEOUT_S = 600.0
EXPERTS = "expert_parallel"  # attribute of modules whose experts are divided over ranks


@dataclass(frozen=True)
class _Heads:
    heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int


def transform(
    model: nn.Module,
    axis: Axis,
    *,
    load_state_dict_from_rank0: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> nn.Module:
    """Apply tensor parallelism to a model of transformers over the ranks of `axis`, in place, and return it.
    Collective.

    The model has its weights, the same on all ranks, or is on meta and stays there. With `load_state_dict_from_rank0`
    global rank 0 has the weights and sends all other ranks of the default group their parts, tensor by tensor, whether
    their model is on meta or not. `device` and `dtype` are those of the parts; by default they keep their device
    (received ones are on the host) and type. The axis must exist as long as the model is used. Raises ConfigError for
    unknown models, and for sizes that do not divide.
    """
    kinds = find_cut_plan(model)
    numbers = _numbers(model)
    _check(model, kinds, numbers, axis.size)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters(remove_duplicate=False)}
    # transformers' Conv1D is a linear layer with a matrix (in, out).
    transposed = {name for name, each in model.named_modules() if type(each).__name__ == "Conv1D"}
    sections = _find_sections(kinds, shapes, numbers, transposed)
    held = plan_tensor_shards(shapes, kinds, numbers.kv_heads, axis.size, axis.rank, sections, transposed)
    arrive = Rank0Weights(model, device or torch.device("cpu"), dtype) if load_state_dict_from_rank0 else None
    cut = TensorParallelContext(
        TensorParallelPeers(axis, Traffic()), kv_peers=_sharers(axis, numbers.kv_heads, timeout_s)
    )
    (head,) = (name for name in ("lm_head", "embed_out") if name in dict(model.named_children()))
    one_head = [name for name, parts in sections.items() if len(parts) == 3] if numbers.kv_heads == 1 else []
    take = arrive.receive_shard if arrive is not None else None
    replace_modules(model, kinds, held, cut, head, take, transposed, one_head)
    if arrive is not None:
        arrive.receive_rest(model)
    for name, module in list(model.named_modules()):
        if name.endswith((".q_norm", ".k_norm")):  # each rank has its own heads
            ours = RMSNorm(0, float(vars(module)["variance_epsilon"]))
            ours.weight, part = module.get_parameter("weight"), held.get(f"{name}.weight")
            if part is None:
                model.set_submodule(name, PartialRMSNorm(ours, cut))
                continue
            sharers = cut.kv_peers if part.copies > 1 else None  # over all heads, of which a rank has some
            split = SplitRMSNorm(ours, copy_shard(ours.weight, part), part.shape[0], cut, sharers)
            split.shards = {"weight": part}
            model.set_submodule(name, split)
        for number in _HEAD_COUNTS & vars(module).keys() if name.endswith(_ATTENTION) else ():
            vars(module)[number] = numbers.heads // axis.size
        if "num_kv_heads" in vars(module):
            vars(module)["num_kv_heads"] = max(1, numbers.kv_heads // axis.size)
        if "split_size" in vars(module):  # of GPT-2's queries
            vars(module)["split_size"] //= axis.size
        if name.endswith(".self_attn") and f"{name}.qkv_proj" in sections:  # Phi-3 asks its configuration
            own = copy.copy(cast(Any, module).config)
            own.num_attention_heads = numbers.heads // axis.size
            vars(module)["config"] = own
            vars(module)["num_key_value_heads"] = max(1, numbers.kv_heads // axis.size)
        if "num_key_value_groups" in vars(module):
            vars(module)["num_key_value_groups"] = numbers.heads // axis.size // max(1, numbers.kv_heads // axis.size)
    for parameter in model.parameters():  # not buffers: rotary frequencies keep their precision
        parameter.data = parameter.data.to(dtype=dtype)
    model.register_load_state_dict_pre_hook(shard_state_dict)
    if any(_config(model).get(key) for key in _DROPOUT):
        activations.sync_dropout(
            model, [each for name, each in model.named_modules() if name.endswith(_ATTENTION)], cut.peers
        )
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    return model if on_meta or device is None else model.to(device=device)


def find_cut_plan(model: nn.Module) -> Mapping[str, str]:
    """The tensor-parallel plan of a model: how its modules are cut. Raises ConfigError for an unknown architecture."""
    for each in type(model).__mro__:
        if each.__name__ in TRANSFORM_PLANS:
            return TRANSFORM_PLANS[each.__name__]
    raise ConfigError(
        f"tensor parallelism does not know {type(model).__name__}; it knows transformers' "
        f"{', '.join(TRANSFORM_PLANS)}, so transform one of them, or do not use tensor parallelism"
    )


def _config(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = cast(Any, model).config.to_dict()
    return found


def _numbers(model: nn.Module) -> _Heads:
    config = cast(Any, model).config  # whose attributes have the same names in most architectures
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or _count_falcon_keys(config) or heads)
    inner = (getattr(config, key, None) for key in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"))
    width = next((int(each) for each in inner if each), 4 * int(config.hidden_size))
    return _Heads(heads, kv_heads, width, int(config.vocab_size))


def _find_sections(
    kinds: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], numbers: _Heads, transposed: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """The lengths of the matrices that a module holds one after another, by the names of such modules."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        kind, out = find_cut_kind(module, kinds), shape[-1 if module in transposed else 0]
        if kind == "column_pair":
            found[module] = (out // 2, out // 2)
        elif kind == "column_qkv" or (kind == "column_grouped" and numbers.kv_heads == 1):
            head = out // (numbers.heads + 2 * numbers.kv_heads)
            found[module] = (numbers.heads * head, numbers.kv_heads * head, numbers.kv_heads * head)
    return found


def _count_falcon_keys(config: Any) -> int | None:
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    return 1 if getattr(config, "multi_query", False) else None


def _check(model: nn.Module, kinds: Mapping[str, str], numbers: _Heads, size: int) -> None:
    """Raises ConfigError for a model that cannot be cut over so many ranks."""
    over = f"tensor parallelism over {size} ranks"
    if getattr(cast(Any, model).config, "alibi", False):
        raise ConfigError(f"{over} does not divide attention by distance (alibi); use a model with rotary positions")
    fused = not {"column_qkv", "column_grouped"}.isdisjoint(kinds.values())
    width = int(cast(Any, model).config.hidden_size) // numbers.heads
    if fused and (width if numbers.kv_heads == 1 else numbers.kv_heads) % size:
        parts = f"{width} channels of the key head" if numbers.kv_heads == 1 else f"{numbers.kv_heads} key heads"
        raise ConfigError(f"{over} must divide the {parts}, which share a matrix with the queries; choose a divisor")
    if numbers.heads % size or numbers.intermediate % size:
        raise ConfigError(
            f"{over} must divide the {numbers.heads} attention heads and the {numbers.intermediate} channels of the "
            "model's MLP; choose a common divisor of both"
        )
    if numbers.kv_heads % size and size % numbers.kv_heads:
        raise ConfigError(
            f"{over} and {numbers.kv_heads} key and value heads do not divide one another; choose a divisor or a "
            f"multiple of {numbers.kv_heads}"
        )
    if numbers.vocab_size < size:
        raise ConfigError(f"{over} leaves some without a row of the vocabulary of {numbers.vocab_size}; use fewer")


def _sharers(axis: Axis, kv_heads: int, timeout_s: float) -> TensorParallelPeers | None:
    if kv_heads >= axis.size:
        return None
    return TensorParallelPeers(split_axis(axis, axis.size // kv_heads, timeout_s), Traffic())


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


# --------------------------------------------------------------------------------------- state dicts of the whole model


def shards_of(module: nn.Module) -> dict[str, TensorShard]:
    """What a module of a transformed model holds of its parameters, by name, where it does not hold them whole."""
    known = isinstance(module, TENSOR_PARALLEL_MODULES) or EXPERTS in vars(module)
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
