"""Tensor parallelism for models of transformers, in place, by the primitives of tensor.py.

A table for each architecture says how its matrices are cut. Its code is unchanged: it takes the number of heads from
the tensors. Logits are whole on every rank, so that any loss, of transformers or custom, is computed as before.
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Axis, split_axis
from phalanx.core.errors import ConfigError
from phalanx.layout.tensor_shards import find_cut_kind, plan_tensor_shards
from phalanx.models.families.catalog import TRANSFORM_PLANS
from phalanx.models.layers import RMSNorm
from phalanx.parallel import activations
from phalanx.parallel.hf_experts import check_router, slice_experts
from phalanx.parallel.hf_state import Rank0Weights, finish_transform
from phalanx.parallel.tensor import replace_modules
from phalanx.parallel.tensor_collectives import TensorParallelPeers
from phalanx.parallel.tensor_layers import (
    PartialRMSNorm,
    SplitRMSNorm,
    TensorParallelContext,
    copy_shard,
)

# Keys of their configurations.
_DROPOUT = ("attention_dropout", "hidden_dropout", "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
_ATTENTION = (".self_attn", ".self_attention", ".attention", ".attn")  # ends of the names of modules with heads
_HEAD_COUNTS = {"num_heads", "num_attention_heads"}  # attributes of those that do not ask their tensors
_TIMEOUT_S = 600.0


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
    slice_experts(model, cut, take)
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
    if any(_config(model).get(key) for key in _DROPOUT):
        activations.sync_dropout(
            model, [each for name, each in model.named_modules() if name.endswith(_ATTENTION)], cut.peers
        )
    return finish_transform(model, device, dtype)


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
    check_router(model, over)
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
