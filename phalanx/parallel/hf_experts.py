"""Experts of models of transformers, in place: whole ones divided over ranks, by the exchange of parallel/experts.py,
or slices of all of them, as of any feed-forward layer under tensor parallelism.

The model's code is unchanged: it chooses experts as before, and its experts compute by transformers' own registry of
expert functions. Of slices each rank gives a part of the sum for every token; so the gradients of what the tokens are,
and of the weights of their choices, are summed over the ranks.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Axis
from phalanx.core.errors import ConfigError
from phalanx.layout.tensor_shards import TensorShard, plan_expert_shards
from phalanx.models.grouped_mm import multiply_groups
from phalanx.models.moe import feed_chosen
from phalanx.parallel.experts import ExpertParallel, keep_experts
from phalanx.parallel.hf_state import EXPERTS, SLICED_EXPERTS, Rank0Weights, finish_transform
from phalanx.parallel.tensor_layers import TensorParallelContext, copy_shard

# Models whose experts are gated, in stacks gate_up_proj (E, 2 F, D), gate before up, and down_proj (E, D, F).
MODELS = ("MixtralForCausalLM",)
IMPLEMENTATION = "phalanx_experts"  # in transformers' registry


def transform_experts(
    model: nn.Module,
    axis: Axis,
    *,
    load_state_dict_from_rank0: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Divide the experts of a model of transformers over the ranks of `axis`, in place, and return it. Collective.

    Arguments are those of `transform` in hf_transform.py. A gradient of an expert is the sum over the tokens of all
    ranks of the axis, and other gradients are of this rank's. Raises ConfigError for unknown models, for a number of
    experts that does not divide, and for noise in the router, which depends on how rows are divided.
    """
    check_experts(model, axis.size)
    config: Any = cast(Any, model).config
    counts = (config.num_local_experts // axis.size,) * axis.size
    parallel = ExpertParallel(axis, Traffic(), counts)
    held = plan_expert_shards({name: tuple(each.shape) for name, each in model.named_parameters()}, counts, axis.rank)
    if load_state_dict_from_rank0:
        arrive = Rank0Weights(model, device or torch.device("cpu"), dtype)
        keep_experts(model, held, arrive.receive_shard)
    else:
        keep_experts(model, held)
    _mark(model, held, EXPERTS, parallel)
    if load_state_dict_from_rank0:
        arrive.receive_rest(model)
    return finish_transform(model, device, dtype)


def slice_experts(
    model: nn.Module, cut: TensorParallelContext, take: Callable[[Tensor, TensorShard], nn.Parameter] | None
) -> None:
    """Have each rank keep its part of the width of all experts of a model, if it has any, in place. `take` makes a part
    of a whole parameter, by default of its values."""
    if not any(each.__name__ in MODELS for each in type(model).__mro__):
        return
    held, size, rank = {}, cut.peers.size, cut.peers.rank
    for name, each in model.named_parameters():
        if name.endswith((".gate_up_proj", ".down_proj")) and each.dim() == 3:
            shape, dim = tuple(each.shape), 1 if name.endswith(".gate_up_proj") else 2
            length, sections = shape[dim], (shape[1] // 2,) * 2 if dim == 1 else ()
            held[name] = TensorShard(shape, dim, length * rank // size, length * (rank + 1) // size, sections=sections)
    keep_experts(model, held, take or copy_shard)
    _mark(model, held, SLICED_EXPERTS, cut)


def _mark(model: nn.Module, held: dict[str, TensorShard], attribute: str, value: object) -> None:
    """Note at the experts of a model what they hold, and have them compute by `_compute`."""
    from transformers.integrations.moe import ExpertsInterface

    for name, shard in held.items():
        module, _, leaf = name.rpartition(".")
        owner = vars(model.get_submodule(module))
        owner[attribute] = value
        owner.setdefault("shards", {})[leaf] = shard
    ExpertsInterface.register(IMPLEMENTATION, _compute)
    cast(Any, model).config._experts_implementation = IMPLEMENTATION


def check_experts(model: nn.Module, size: int) -> None:
    """Raise ConfigError for a model whose experts cannot be divided over so many ranks."""
    over = f"expert parallelism over {size} ranks"
    if not any(each.__name__ in MODELS for each in type(model).__mro__):
        raise ConfigError(
            f"expert parallelism does not know {type(model).__name__}; it knows transformers' {', '.join(MODELS)}, so "
            "transform one of them, or do not use expert parallelism"
        )
    config: Any = cast(Any, model).config
    if config.num_local_experts % size:
        raise ConfigError(f"{over} must divide the {config.num_local_experts} experts of a layer; choose a divisor")
    check_router(model, over)


def check_router(model: nn.Module, over: str) -> None:
    """Raise ConfigError for noise in a router, which ranks would draw apart; `over` says what divides the model."""
    if noise := getattr(cast(Any, model).config, "router_jitter_noise", None):
        raise ConfigError(
            f"{over} has no noise in the router, and router_jitter_noise is {noise:g}; set it to 0 in the model's "
            "config"
        )


def _compute(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' interface of experts: (T, D), (T, k) each -> (T, D)."""
    module: Any = experts
    device = hidden_states.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else module.down_proj.dtype

    def feed(rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0)
        gate, up = multiply_groups(rows, module.gate_up_proj.to(kind), ends).chunk(2, dim=-1)
        return multiply_groups(module.act_fn(gate) * up, module.down_proj.to(kind), ends)

    def exchange(rows: Tensor, counts: Tensor) -> Tensor:
        parallel: ExpertParallel | None = vars(experts).get(EXPERTS)  # None: a whole model that shares the config
        return feed(rows, counts) if parallel is None else parallel.run(feed, rows, counts)

    cut: TensorParallelContext | None = vars(experts).get(SLICED_EXPERTS)
    if cut is None:
        out = feed_chosen(exchange, hidden_states.to(kind), top_k_index, top_k_weights, module.num_experts)
    else:
        # Gradients of weights are summed in the wider type of both: transformers' are in float32.
        x, weights = hidden_states.to(kind), top_k_weights.to(torch.promote_types(kind, top_k_weights.dtype))
        x, weights = cut.enter(x), cut.enter(weights)
        out = cut.leave(feed_chosen(feed, x, top_k_index, weights, module.num_experts))
    return out.to(hidden_states.dtype)
