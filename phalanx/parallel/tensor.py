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
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm.mesh import Mesh, split_axis
from phalanx.layout.tensor_shards import TensorShard, find_cut_kind, plan_tensor_shards
from phalanx.models import layers
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.families.catalog import family_of
from phalanx.models.layers import Embedding, LayerNorm, Linear, PositionedEmbedding, RMSNorm
from phalanx.models.llama import Attention, Head
from phalanx.models.model import StagedArchitecture
from phalanx.parallel.tensor_collectives import TensorParallelPeers


@dataclass(frozen=True)
class TensorParallelContext:
    """The tensor-parallel context of a model: its peers, and whether sequence parallelism is used.

    `kv_peers` hold the same key and value heads as this rank; None without such ranks.
    """

    peers: TensorParallelPeers
    sequence: bool = False
    kv_peers: TensorParallelPeers | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Before a pair of matrices: x (B, S or its part, D) -> (B, S, D)."""
        return self.peers.exchange(x, *(("gather", "scatter") if self.sequence else ("same", "sum")))

    def leave(self, x: Tensor) -> Tensor:
        """After a pair of matrices: partial sum (B, S, D) -> the sum, (B, S or its part, D)."""
        return self.peers.exchange(x, *(("scatter", "gather") if self.sequence else ("sum", "same")))

    def partial(self, parameter: Tensor) -> Tensor:
        """A replicated parameter whose gradient is summed over the ranks: each computes its part, by heads or
        positions."""
        return self.peers.exchange(parameter, "same", "sum")


class ColumnParallelLinear(Linear):
    """A column-parallel linear layer: a rank computes some of the outputs, of an input after `enter`."""

    shards: dict[str, TensorShard]

    def __init__(self, old: nn.Linear, parts: "LayerShards", sharers: TensorParallelPeers | None) -> None:
        _init_parallel_linear(self, old, parts)
        self.kv_peers = sharers

    def forward(self, input: Tensor, draws: CounterRNG | None = None, place: Tensor | None = None) -> Tensor:
        """input (B, S, in) -> (B, S, its outputs)."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.kv_peers is not None:  # the queries of each contribute to the gradient
            weight = self.kv_peers.exchange(weight, "same", "sum")
            bias = None if bias is None else self.kv_peers.exchange(bias, "same", "sum")
        return self.multiply(input, weight, bias)


class RowParallelLinear(Linear):
    """A row-parallel linear layer: sums over this rank's inputs, then over the ranks."""

    shards: dict[str, TensorShard]

    def __init__(self, old: nn.Linear, parts: "LayerShards", cut: TensorParallelContext) -> None:
        _init_parallel_linear(self, old, parts)
        self.cut = cut

    def forward(self, input: Tensor, draws: CounterRNG | None = None, place: Tensor | None = None) -> Tensor:
        """input (B, S, its inputs) -> (B, S or its part, out)."""
        total = self.cut.leave(self.multiply(input, self.weight))
        if self.bias is None:
            return total
        return total + (self.cut.partial(self.bias) if self.cut.sequence else self.bias)


class VocabParallelEmbedding(Embedding):
    """A vocabulary-parallel embedding: a rank has the rows from `first` on; other tokens give zero here."""

    def __init__(self, old: nn.Embedding, parts: "LayerShards", cut: TensorParallelContext) -> None:
        super().__init__(parts.weight.shape[0], parts.weight.shape[1], device="meta")
        self.train(old.training)
        self.weight, self.shards = parts.weight, parts.shards
        self.first, self.cut = parts.shards["weight"].start, cut
        self.skipped = old.padding_idx  # the padding token, whose row gets no gradient
        # A factor of transformers' Gemma.
        self.register_buffer("embed_scale", old._buffers.get("embed_scale"), persistent=False)
        if isinstance(old, PositionedEmbedding):
            self.positions, self.offset = old.positions, old.offset

    def forward(self, input: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens (B, S) int64, and positions where they are learned -> (B, S or its part, width)."""
        at = input - self.first
        here = (at >= 0) & (at < self.weight.shape[0])
        rows = super().forward(torch.where(here, at, 0))
        if self.skipped is not None:
            rows = torch.where((input == self.skipped)[..., None], rows.detach(), rows)
        found = self.cut.leave(torch.where(here[..., None], rows, 0.0))
        scale = self._buffers["embed_scale"]
        if scale is not None:
            found = found * scale.to(found.dtype)
        if positions is None:
            return found
        table: Tensor = self.positions.weight
        if self.cut.sequence:
            table = self.cut.partial(table)
            positions = positions.unflatten(-1, (self.cut.peers.size, -1))[..., self.cut.peers.rank, :]
        return found + F.embedding(positions + self.offset, table)


class VocabParallelHead(Linear):
    """A vocabulary-parallel head: a rank computes some of the logits, which are then gathered."""

    shards: dict[str, TensorShard]

    def __init__(self, old: nn.Linear, parts: "LayerShards", cut: TensorParallelContext) -> None:
        _init_parallel_linear(self, old, parts)
        self.cut, self.whole = cut, parts.shards["weight"].shape[0]

    def forward(self, input: Tensor, draws: CounterRNG | None = None, place: Tensor | None = None) -> Tensor:
        """input (B, S, in) -> (B, S, vocabulary)."""
        return gather_logits(F.linear(self.cut.enter(input), self.weight, self.bias), self.cut.peers, self.whole)


class PartialRMSNorm(RMSNorm):
    """An RMSNorm of which each rank sees some of the heads or positions; its gradient is summed over the ranks."""

    def __init__(self, old: RMSNorm, cut: TensorParallelContext) -> None:
        super().__init__(old.weight.shape[0], old.eps, old.unit_offset)
        self.weight, self.cut = old.weight, cut

    def forward(self, x: Tensor) -> Tensor:
        """As RMSNorm's."""
        return self.normalize(x, self.cut.partial(self.weight))


class PartialLayerNorm(LayerNorm):
    """As PartialRMSNorm."""

    def __init__(self, old: LayerNorm, cut: TensorParallelContext) -> None:
        super().__init__(old.normalized_shape, old.eps, device="meta")
        self.weight, self.bias, self.cut = old.weight, old.bias, cut

    def forward(self, input: Tensor) -> Tensor:
        """As LayerNorm's."""
        return self.normalize(input, self.cut.partial(self.weight), self.cut.partial(self.bias))


class SplitRMSNorm(RMSNorm):
    """An RMSNorm over all heads, of which each rank has some with their part of the weight; `sharers` have the same
    ones."""

    def __init__(
        self, old: RMSNorm, weight: nn.Parameter, whole: int, cut: TensorParallelContext,
        sharers: TensorParallelPeers | None,
    ) -> None:  # fmt: skip
        super().__init__(weight.shape[0], old.eps)
        self.weight, self.whole, self.cut, self.kv_peers = weight, whole, cut, sharers
        self.shards: dict[str, TensorShard] = {}  # set by who needs them

    def forward(self, x: Tensor) -> Tensor:
        """x (..., the heads of a rank) -> the same shape and dtype."""
        weight: Tensor = self.weight
        copies = 1
        if self.kv_peers is not None:
            weight, copies = self.kv_peers.exchange(weight, "same", "sum"), self.kv_peers.size
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        own = wide.pow(2).sum(-1, keepdim=True)
        # Each rank's outputs depend on the sum over all, so its gradient is summed, too.
        mean = self.cut.peers.exchange(own, "sum", "sum") / (copies * self.whole)
        return weight * (wide * torch.rsqrt(mean + self.eps)).to(x.dtype)


TENSOR_PARALLEL_MODULES = (
    ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, VocabParallelHead, SplitRMSNorm,
)  # fmt: skip


@dataclass(frozen=True)
class LayerShards:
    """This rank's parameters of a layer with their tensor shards; one without a shard is whole."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    shards: dict[str, TensorShard]


def _init_parallel_linear(
    layer: "ColumnParallelLinear | RowParallelLinear | VocabParallelHead", old: nn.Linear, parts: LayerShards
) -> None:
    nn.Linear.__init__(layer, parts.weight.shape[1], parts.weight.shape[0], bias=False, device="meta")
    layer.train(old.training)
    layer.weight, layer.shards = parts.weight, parts.shards
    layer.register_parameter("bias", parts.bias)


class _AllLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, peers: TensorParallelPeers, whole: int) -> Tensor:
        bounds = [whole * rank // peers.size for rank in range(peers.size + 1)]
        widths = [stop - start for start, stop in itertools.pairwise(bounds)]
        ctx.bounds = bounds[peers.rank], bounds[peers.rank + 1]
        padded = F.pad(logits, (0, max(widths) - logits.shape[-1]))  # an all-gather needs equal parts
        parts = peers.all_gather(padded).unbind(0)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Every rank computes the same with all logits, so the gradient is already complete.
        return grads[0][..., slice(*ctx.bounds)].contiguous(), None, None


def gather_logits(logits: Tensor, peers: TensorParallelPeers, whole: int) -> Tensor:
    """Gather logits: those of each rank's rows of the vocabulary -> all, (..., whole)."""
    out: Tensor = _AllLogits.apply(logits, peers, whole)
    return out


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
    _split_norms(model, cut, held)
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            module.first_head = held[f"{name}.q.weight"].start // module.head_dim
    for head in model.losses():  # some stages of a pipeline have none
        assert isinstance(head, Head)
        if head.weight is not None:
            head.weight = copy_shard(head.weight, held["head.weight"])
        if head.bias is not None:
            head.bias = copy_shard(head.bias, held["head.bias"])
        head.cross_entropy_sum = make_vocab_parallel_cross_entropy(peers, spec.vocab_size)
        # After the norm, so that labels and hidden states have the same positions again.
        head.norm.register_forward_hook(lambda module, args, output: cut.enter(output))
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
) -> None:
    """Replace the linear layers and embeddings that `kinds` names by tensor-parallel ones.

    `head` is the linear layer to the vocabulary, if any. `take` makes the shard of a whole parameter, by default from
    its local values. A parameter that two layers share stays shared.
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
        if not isinstance(old, nn.Linear | nn.Embedding) or kind is None:
            continue
        if isinstance(old, nn.Embedding):
            new: nn.Module = VocabParallelEmbedding(old, parts(name, old), cut)
        elif name == head:
            new = VocabParallelHead(old, parts(name, old), cut)
        elif kind == "row":
            new = RowParallelLinear(old, parts(name, old), cut)
        else:
            new = ColumnParallelLinear(old, parts(name, old), cut.kv_peers if kind == "column_kv" else None)
            entered.setdefault(name.rpartition(".")[0], []).append(name)
        model.set_submodule(name, new)
    # Several layers of one input share its exchange. One alone enters itself: its module may need the input otherwise.
    for name in sorted(parent if len(inside) > 1 else inside[0] for parent, inside in entered.items()):
        model.get_submodule(name).register_forward_pre_hook(functools.partial(_enter, cut), with_kwargs=True)


def copy_shard(parameter: Tensor, shard: TensorShard) -> nn.Parameter:
    """Copy a rank's shard of a whole parameter."""
    part = (
        parameter.detach()
        .narrow(shard.dim, shard.start, shard.stop - shard.start)
        .clone(memory_format=torch.contiguous_format)
    )
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _split_norms(model: nn.Module, cut: TensorParallelContext, held: Mapping[str, TensorShard]) -> None:
    for name, old in list(model.named_modules()):
        # Norms of queries and keys see a rank's heads; the others, with `sequence`, its positions.
        part = held.get(f"{name}.weight")
        if isinstance(old, RMSNorm) and part is not None:
            sharers = cut.kv_peers if part.copies > 1 else None
            split = SplitRMSNorm(old, copy_shard(old.weight, part), part.shape[0], cut, sharers)
            model.set_submodule(name, split)
        elif isinstance(old, RMSNorm) and (cut.sequence or name.endswith((".q_norm", ".k_norm"))):
            model.set_submodule(name, PartialRMSNorm(old, cut))
        elif isinstance(old, LayerNorm) and cut.sequence:
            model.set_submodule(name, PartialLayerNorm(old, cut))


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
