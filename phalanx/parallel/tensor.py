"""Tensor parallelism: each rank of an axis holds a slice of every large matrix and computes its part of the product.

Applied to a model from outside, on meta or with values; the model's code takes the number of heads from its tensors.
Parameters stay plain tensors of the local shape with unchanged names, so that engines, checkpointing, compilation and
offloading need no special case. A pair of matrices (queries, keys and values, then the output; gate and up, then down)
is cut by outputs, then by inputs, with one collective before and one after (tensor_collectives.py).

With `sequence` (sequence parallelism) activations between the pairs (norms, residuals, dropout) are cut along the
sequence: an all-gather and a reduce-scatter, of as many bytes as the all-reduce, replace it, and these activations take
less memory. Sources: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from phalanx.comm.mesh import Mesh, split_axis
from phalanx.layout.tensor_shards import TensorShard, find_cut_kind, plan_tensor_shards
from phalanx.models import layers
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.families.catalog import family_of
from phalanx.models.layers import LayerNorm, Linear, RMSNorm
from phalanx.models.llama import Attention, Head
from phalanx.models.model import StagedArchitecture
from phalanx.models.moe import MoELayer
from phalanx.models.router import Router
from phalanx.parallel.experts import TokenPositions
from phalanx.parallel.tensor_collectives import TensorParallelPeers
from phalanx.parallel.tensor_layers import (
    ColumnParallelLinear,
    LayerShards,
    NarrowLinear,
    PartialLayerNorm,
    PartialLinear,
    PartialRMSNorm,
    PartialRouter,
    RowParallelLinear,
    SplitRMSNorm,
    TensorParallelContext,
    VocabParallelEmbedding,
    VocabParallelHead,
    copy_shard,
    gather_logits,
)  # fmt: skip

_OF_HEADS = (".q_norm", ".k_norm", ".q_down_norm", ".kv_down_norm")  # norms


def make_vocab_parallel_cross_entropy(peers: TensorParallelPeers, whole: int) -> Callable[..., Tensor]:
    """Make a vocabulary-parallel `layers.cross_entropy_sum` for a rank's rows of a vocabulary of `whole` rows. The
    gradient of `hidden` is a partial sum over the ranks, that of the weight is complete."""
    shard = layers.VocabShard(whole * peers.rank // peers.size, peers.all_gather)
    widest = -(-whole // peers.size)  # all ranks must use the same chunks

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, cap: float = 0.0) -> Tensor:
        chunk = layers.default_chunk(widest, hidden.device)
        return layers.cross_entropy_sum(
            hidden, weight, labels, bias, cap=cap, chunk=chunk, chunk_fn=functools.partial(layers._chunk, shard=shard)
        )

    return loss


# ----------------------------------------------------------------------------------------------------- to a whole model


def make_tensor_context(mesh: Mesh, kv_heads: int, sequence: bool) -> TensorParallelContext:
    """Make the tensor-parallel context of a model with `kv_heads` key and value heads on `mesh`. Collective."""
    axis = mesh.tensor
    assert axis is not None
    sharers = None
    if kv_heads < axis.size:
        same_head = split_axis(axis, axis.size // kv_heads, mesh.roll_call.timeout_s)
        mesh.extra.made.append(same_head.group)
        sharers = TensorParallelPeers(same_head, mesh.traffic)
    return TensorParallelContext(TensorParallelPeers(axis, mesh.traffic), sequence, sharers)


def apply_tensor_parallel(model: StagedArchitecture, cut: TensorParallelContext) -> dict[str, TensorShard]:
    """Apply tensor parallelism to a model by its family's tensor plan, in place; returns the shards of its parameters.

    The model may be on meta or have values. Call this before anything else is applied to it.
    """
    spec, peers = model.spec, cut.peers
    plan = family_of(spec).tensor_plan
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    held = plan_tensor_shards(shapes, plan, spec.kv_heads, peers.size, peers.rank)
    replace_modules(model, plan, held, cut)
    _split_replicated(model, cut, held)
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            module.first_head = spec.heads * peers.rank // peers.size
            if (part := held.get(f"{name}.sinks")) is not None:
                module.register_parameter("sinks", copy_shard(module.get_parameter("sinks"), part))
        elif isinstance(module, MoELayer):
            assert module.experts.exchange is not None, "ranks that share tokens divide experts"
            module.positions = TokenPositions(cut)
    for head in model.losses():  # some stages of a pipeline have none
        assert isinstance(head, Head)
        if head.weight is not None:
            head.weight = copy_shard(head.weight, held["head.weight"])
        if head.bias is not None:
            head.bias = copy_shard(head.bias, held["head.bias"])
        head.cross_entropy_sum = make_vocab_parallel_cross_entropy(peers, spec.vocab_size)
        # Before the matrix of the vocabulary, so that labels and hidden states have the same positions again.
        head.project.register_forward_hook(lambda module, args, output: cut.enter(output))
        head.register_forward_hook(functools.partial(_whole_logits, peers, spec.vocab_size))
    if cut.sequence:
        model.register_forward_pre_hook(functools.partial(_own_positions, peers), with_kwargs=True)
    return held


def replace_modules(
    model: nn.Module,
    kinds: Mapping[str, str],
    shards: Mapping[str, TensorShard],
    cut: TensorParallelContext,
    head: str | None = None,
    take: Callable[[Tensor, TensorShard], nn.Parameter] | None = None,
    transposed: Collection[str] = (),
    fused_head: Collection[str] = (),
) -> None:
    """Replace the linear layers and embeddings that `kinds` names by tensor-parallel ones.

    `head` is the linear layer to the vocabulary, if any. `take` makes the shard of a whole parameter, by default from
    its local values. A parameter that two layers share stays shared. `transposed` linear layers have matrices
    (in, out); those of `fused_head` are of queries and of one key and value head.
    """
    shared: dict[int, nn.Parameter] = {}

    def parts(name: str, old: nn.Module) -> LayerShards:
        of = {leaf: shards[f"{name}.{leaf}"] for leaf in old._parameters if f"{name}.{leaf}" in shards}
        mine = dict(old._parameters)
        for leaf, part in of.items():
            whole = old.get_parameter(leaf)
            if id(whole) not in shared:
                shared[id(whole)] = (take or copy_shard)(whole, part)
            mine[leaf] = shared[id(whole)]
        weight = mine["weight"]
        assert weight is not None, name
        return LayerShards(weight, mine.get("bias"), of)

    entered: dict[str, list[str]] = {}  # column-parallel layers by the module that they are in
    for name, old in list(model.named_modules()):
        kind = find_cut_kind(name, kinds)
        if kind is None or not (isinstance(old, nn.Linear | nn.Embedding) or name in transposed):
            continue
        if isinstance(old, nn.Embedding):
            new: nn.Module = VocabParallelEmbedding(old, parts(name, old), cut)
        elif kind == "narrow":
            assert isinstance(old, nn.Linear), name
            new = NarrowLinear(old, cut)
        elif name == head:
            new = VocabParallelHead(old, parts(name, old), cut)
        elif kind == "row":
            new = RowParallelLinear(old, parts(name, old), cut)
        else:
            of = parts(name, old)
            # Of one head that shares a matrix with the queries, a rank has some channels.
            one_head = cut.peers if name in fused_head else None
            new = ColumnParallelLinear(old, of, cut.kv_peers if kind == "column_kv" else None, one_head)
            if kind != "column_entered":
                entered.setdefault(name.rpartition(".")[0], []).append(name)
        model.set_submodule(name, new)
    # Several layers of one input share its exchange. One alone enters itself: its module may need the input otherwise.
    for name in sorted(parent if len(inside) > 1 else inside[0] for parent, inside in entered.items()):
        model.get_submodule(name).register_forward_pre_hook(functools.partial(_enter, cut), with_kwargs=True)


def _split_replicated(model: nn.Module, cut: TensorParallelContext, held: Mapping[str, TensorShard]) -> None:
    for name, old in list(model.named_modules()):
        # Norms of queries and keys, or of what these come from, see a rank's heads; the others, with `sequence`, its
        # positions, as routers always do.
        part = held.get(f"{name}.weight")
        if isinstance(old, RMSNorm) and part is not None:
            sharers = cut.kv_peers if part.copies > 1 else None
            split = SplitRMSNorm(old, copy_shard(old.weight, part), part.shape[0], cut, sharers)
            model.set_submodule(name, split)
        elif isinstance(old, RMSNorm) and (cut.sequence or name.endswith(_OF_HEADS)):
            model.set_submodule(name, PartialRMSNorm(old, cut))
        elif isinstance(old, Router):
            model.set_submodule(name, PartialRouter(old, cut))
        elif isinstance(old, LayerNorm) and cut.sequence:
            model.set_submodule(name, PartialLayerNorm(old, cut))
        elif isinstance(old, Linear) and cut.sequence and name in ("embed.project", "head.project"):
            model.set_submodule(name, PartialLinear(old, cut))


def _enter(cut: TensorParallelContext, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Pre-hook of a module whose first layers are column-parallel: enters their input once for all of them."""
    if args:
        return (cut.enter(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": cut.enter(kwargs["hidden_states"])}  # as transformers calls it


def _whole_logits(peers: TensorParallelPeers, whole: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Hook after the head: gathers logits; a loss is already the same on all ranks."""
    return output if output.dim() == 0 else gather_logits(output, peers, whole)


def _own_positions(peers: TensorParallelPeers, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Pre-hook of a model with sequence parallelism: dropout uses the positions of this rank's part."""
    tokens = args[0] if args else kwargs["tokens"]
    count = tokens.shape[1] // peers.size
    first = count * peers.rank

    def moved(value: Any) -> Any:
        if not isinstance(value, CounterRNG):
            return value
        at = value.positions  # those of a part of a row, with context parallelism
        return replace(value, first=first, positions=None if at is None else at[first : first + count])

    return tuple(map(moved, args)), {name: moved(value) for name, value in kwargs.items()}
