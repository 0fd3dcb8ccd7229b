"""Layers of tensor parallelism: each holds this rank's slice of a matrix or table and computes its part of the result;
tensor.py puts them into a model.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.layout.tensor_shards import TensorShard
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.layers import Embedding, LayerNorm, Linear, PositionedEmbedding, RMSNorm
from phalanx.models.router import Router
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
    """A column-parallel linear layer: a rank computes some of the outputs, of an input after `enter`.

    With `one_head`, the peers of one key and value head, its outputs are queries and then this rank's channels of that
    head, which are gathered.
    """

    shards: dict[str, TensorShard]
    transposed: bool

    def __init__(
        self, old: nn.Module, parts: "LayerShards", sharers: TensorParallelPeers | None,
        one_head: TensorParallelPeers | None = None,
    ) -> None:  # fmt: skip
        _init_parallel_linear(self, old, parts)
        self.kv_peers, self.one_head = sharers, one_head

    def forward(self, input: Tensor, draws: CounterRNG | None = None, place: Tensor | None = None) -> Tensor:
        """input (B, S, in) -> (B, S, its outputs)."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.kv_peers is not None:  # the queries of each contribute to the gradient
            weight = self.kv_peers.exchange(weight, "same", "sum")
            bias = None if bias is None else self.kv_peers.exchange(bias, "same", "sum")
        found = self.multiply(input, weight.T if self.transposed else weight, bias)
        if self.one_head is None:
            return found
        first, last = self.shards["weight"].ranges[-1]
        queries, own = found.split((found.shape[-1] - 2 * (last - first), 2 * (last - first)), dim=-1)
        head = self.one_head.exchange(own.reshape(-1, last - first), "gather", "scatter")
        return torch.cat((queries, head.reshape(*found.shape[:-1], -1)), dim=-1)


class RowParallelLinear(Linear):
    """A row-parallel linear layer: sums over this rank's inputs, then over the ranks."""

    shards: dict[str, TensorShard]
    transposed: bool

    def __init__(self, old: nn.Module, parts: "LayerShards", cut: TensorParallelContext) -> None:
        _init_parallel_linear(self, old, parts)
        self.cut = cut

    def forward(self, input: Tensor, draws: CounterRNG | None = None, place: Tensor | None = None) -> Tensor:
        """input (B, S, its inputs) -> (B, S or its part, out)."""
        total = self.cut.leave(self.multiply(input, self.weight.T if self.transposed else self.weight))
        if self.bias is None:
            return total
        return total + (self.cut.partial(self.bias) if self.cut.sequence else self.bias)


class VocabParallelEmbedding(Embedding):
    """A vocabulary-parallel embedding: a rank has the rows from `first` on; other tokens give zero here."""

    positions: Embedding
    project: nn.Module

    def __init__(self, old: nn.Embedding, parts: "LayerShards", cut: TensorParallelContext) -> None:
        super().__init__(parts.weight.shape[0], parts.weight.shape[1], device="meta")
        self.train(old.training)
        self.weight, self.shards = parts.weight, parts.shards
        self.first, self.cut = parts.shards["weight"].start, cut
        self.skipped = old.padding_idx  # the padding token, whose row gets no gradient
        # A factor of transformers' Gemma.
        self.register_buffer("embed_scale", old._buffers.get("embed_scale"), persistent=False)
        if isinstance(old, PositionedEmbedding):
            self.offset = old.offset
            for name, module in old.named_children():  # a stage with the head of a tied table has none of them
                self.add_module(name, module)

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
        placed: Tensor = self.project(found) + F.embedding(positions + self.offset, table)
        return placed


class VocabParallelHead(Linear):
    """A vocabulary-parallel head: a rank computes some of the logits, which are then gathered."""

    shards: dict[str, TensorShard]
    transposed: bool

    def __init__(self, old: nn.Module, parts: "LayerShards", cut: TensorParallelContext) -> None:
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


class PartialLinear(Linear):
    """As PartialRMSNorm, without a bias."""

    def __init__(self, old: Linear, cut: TensorParallelContext) -> None:
        super().__init__(old.in_features, old.out_features, bias=False, device="meta")
        self.weight, self.cut = old.weight, cut

    def forward(self, input: Tensor, draws: CounterRNG | None = None, place: Tensor | None = None) -> Tensor:
        """As Linear's."""
        return self.multiply(input, self.cut.partial(self.weight), None)


class PartialRouter(Router):
    """A router of some of the positions; its gradient is summed over the ranks, which route the others."""

    def __init__(self, old: Router, cut: TensorParallelContext) -> None:
        nn.Module.__init__(self)
        self.moe, self.cut = old.moe, cut
        for name, parameter in old._parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As Router's."""
        bias = None if self.bias is None else self.cut.partial(self.bias)
        return self.route(x, self.cut.partial(self.weight), bias, correction)


class NarrowLinear(Linear):
    """A linear layer to a narrow vector that each rank holds whole, of which it takes what its heads need. With
    `sequence` a rank computes its positions."""

    def __init__(self, old: nn.Linear, cut: TensorParallelContext) -> None:
        super().__init__(old.in_features, old.out_features, bias=False, device="meta")
        self.train(old.training)
        self.weight, self.cut = old.weight, cut

    def forward(self, input: Tensor, draws: CounterRNG | None = None, place: Tensor | None = None) -> Tensor:
        """input (B, S or its part, in) -> (B, S, out)."""
        weight = self.cut.partial(self.weight) if self.cut.sequence else self.weight
        return self.cut.enter(self.multiply(input, weight, None))


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
    layer: "ColumnParallelLinear | RowParallelLinear | VocabParallelHead", old: nn.Module, parts: LayerShards
) -> None:
    layer.transposed = not isinstance(old, nn.Linear)  # transformers' Conv1D
    out, in_ = parts.weight.shape[::-1] if layer.transposed else parts.weight.shape
    nn.Linear.__init__(layer, in_, out, bias=False, device="meta")
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


def copy_shard(parameter: Tensor, shard: TensorShard) -> nn.Parameter:
    """Copy a rank's shard of a whole parameter."""
    parts = [parameter.detach().narrow(shard.dim, start, stop - start) for start, stop in shard.ranges]
    return nn.Parameter(torch.cat(parts, shard.dim), requires_grad=parameter.requires_grad)
