"""Tensor parallelism: each rank of an axis holds a slice of every large matrix and computes its part of every product.

Applied to a model from outside, on meta or with its values; its own code computes with as many heads as its tensors
have. Parameters stay plain tensors of the local shape, under their own names, so that engines, recomputation,
compilation and offloading see nothing new. A pair of matrices (queries, keys and values, then the output; gate and up,
then down) is cut by outputs, then by inputs, with one exchange before and one behind (tensor_collectives.py).

With `sequence` what lies between the pairs (norms, residuals, dropout) is cut along the sequence: the exchanges are
then a gathering and a scattering, which carry just as much as the sums do, and activations there take a part of the
memory. Sources: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022.
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
from phalanx.models.layers import Embedding, Linear, RMSNorm
from phalanx.models.llama import Head
from phalanx.models.model import StagedArchitecture
from phalanx.parallel.tensor_collectives import TensorParallelPeers


@dataclass(frozen=True)
class TensorParallelContext:
    """How a model is cut on this rank: among whom, and whether along the sequence between the pairs of matrices.

    `kv_peers` hold the same key and value heads as this rank; None where nobody does.
    """

    peers: TensorParallelPeers
    sequence: bool = False
    kv_peers: TensorParallelPeers | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Before a pair of matrices: x (B, S or its part, D) -> (B, S, D)."""
        return self.peers.exchange(x, *(("gather", "scatter") if self.sequence else ("same", "sum")))

    def leave(self, x: Tensor) -> Tensor:
        """Behind a pair: a part of a sum, (B, S, D) -> the sum, (B, S or its part, D)."""
        return self.peers.exchange(x, *(("scatter", "gather") if self.sequence else ("sum", "same")))

    def partial(self, parameter: Tensor) -> Tensor:
        """A parameter that each rank has, and of whose gradient it computes a part: by its heads, or its positions."""
        return self.peers.exchange(parameter, "same", "sum")


class ColumnParallelLinear(Linear):
    """A linear layer of which a rank computes some of the outputs, of an input that has been entered."""

    shards: dict[str, TensorShard]

    def __init__(self, old: nn.Linear, parts: "LayerShards", sharers: TensorParallelPeers | None) -> None:
        _init_parallel_linear(self, old, parts)
        self.kv_peers = sharers

    def forward(self, input: Tensor, draws: CounterRNG | None = None, place: Tensor | None = None) -> Tensor:
        """input (B, S, in) -> (B, S, its outputs)."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.kv_peers is not None:  # whose queries give a part each of the gradient
            weight = self.kv_peers.exchange(weight, "same", "sum")
            bias = None if bias is None else self.kv_peers.exchange(bias, "same", "sum")
        return F.linear(input, weight, bias)


class RowParallelLinear(Linear):
    """A linear layer that sums over the inputs which a rank has, and then over the ranks."""

    shards: dict[str, TensorShard]

    def __init__(self, old: nn.Linear, parts: "LayerShards", cut: TensorParallelContext) -> None:
        _init_parallel_linear(self, old, parts)
        self.cut = cut

    def forward(self, input: Tensor, draws: CounterRNG | None = None, place: Tensor | None = None) -> Tensor:
        """input (B, S, its inputs) -> (B, S or its part, out)."""
        total = self.cut.leave(F.linear(input, self.weight))
        if self.bias is None:
            return total
        return total + (self.cut.partial(self.bias) if self.cut.sequence else self.bias)


class VocabParallelEmbedding(Embedding):
    """An embedding of which a rank has the rows from `first` on; what others have counts nothing here."""

    def __init__(self, old: nn.Embedding, parts: "LayerShards", cut: TensorParallelContext) -> None:
        super().__init__(parts.weight.shape[0], parts.weight.shape[1], device="meta")
        self.train(old.training)
        self.weight, self.shards = parts.weight, parts.shards
        self.first, self.cut = parts.shards["weight"].start, cut
        self.skipped = old.padding_idx  # a token whose row gets no gradient

    def forward(self, input: Tensor) -> Tensor:
        """tokens (B, S) int64 -> (B, S or its part, width)."""
        at = input - self.first
        here = (at >= 0) & (at < self.weight.shape[0])
        rows = super().forward(torch.where(here, at, 0))
        if self.skipped is not None:
            rows = torch.where((input == self.skipped)[..., None], rows.detach(), rows)
        return self.cut.leave(torch.where(here[..., None], rows, 0.0))


class VocabParallelHead(Linear):
    """A linear layer to the vocabulary, of which a rank computes some logits and then has all of them."""

    shards: dict[str, TensorShard]

    def __init__(self, old: nn.Linear, parts: "LayerShards", cut: TensorParallelContext) -> None:
        _init_parallel_linear(self, old, parts)
        self.cut, self.whole = cut, parts.shards["weight"].shape[0]

    def forward(self, input: Tensor, draws: CounterRNG | None = None, place: Tensor | None = None) -> Tensor:
        """input (B, S, in) -> (B, S, vocabulary)."""
        return gather_logits(F.linear(self.cut.enter(input), self.weight, self.bias), self.cut.peers, self.whole)


class PartialRMSNorm(RMSNorm):
    """A norm of which each rank sees some of the heads, or of the positions."""

    def __init__(self, old: RMSNorm, cut: TensorParallelContext) -> None:
        super().__init__(old.weight.shape[0], old.eps, old.unit_offset)
        self.weight, self.cut = old.weight, cut

    def forward(self, x: Tensor) -> Tensor:
        """As RMSNorm's."""
        return self.normalize(x, self.cut.partial(self.weight))


TENSOR_PARALLEL_MODULES = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, VocabParallelHead)


@dataclass(frozen=True)
class LayerShards:
    """This rank's parameters of a layer, and which slices they are; one without a slice is whole."""

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
        padded = F.pad(logits, (0, max(widths) - logits.shape[-1]))  # a gathering is of equal parts
        parts = peers.all_gather(padded).unbind(0)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Every rank computes the same with all the logits, so that the gradient is whole already.
        return grads[0][..., slice(*ctx.bounds)].contiguous(), None, None


def gather_logits(logits: Tensor, peers: TensorParallelPeers, whole: int) -> Tensor:
    """The logits of each rank's rows of a vocabulary of `whole` rows -> all of them, (..., whole)."""
    out: Tensor = _AllLogits.apply(logits, peers, whole)
    return out


def make_vocab_parallel_cross_entropy(peers: TensorParallelPeers, whole: int) -> Callable[..., Tensor]:
    """`layers.cross_entropy_sum` for a rank's rows of a vocabulary of `whole` rows. The gradient to `hidden` is a part
    of a sum over the ranks, that to the weight all of it."""
    shard = layers.VocabShard(whole * peers.rank // peers.size, peers.all_gather)
    widest = -(-whole // peers.size)  # all ranks must cut the tokens alike

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
        chunk = layers.default_chunk(widest, hidden.device)
        return layers.cross_entropy_sum(
            hidden, weight, labels, bias, chunk=chunk, chunk_fn=functools.partial(layers._chunk, shard=shard)
        )

    return loss


# ----------------------------------------------------------------------------------------------------- to a whole model


def make_tensor_context(mesh: Mesh, kv_heads: int, sequence: bool) -> TensorParallelContext:
    """How a model with so many key and value heads is cut over the tensor axis of `mesh`. Collective."""
    axis = mesh.tensor
    assert axis is not None
    sharers = None
    if kv_heads < axis.size:
        same_head = split_axis(axis, axis.size // kv_heads, mesh.roll_call.timeout_s)
        mesh.extra.made.append(same_head.group)
        sharers = TensorParallelPeers(same_head, mesh.traffic)
    return TensorParallelContext(TensorParallelPeers(axis, mesh.traffic), sequence, sharers)


def apply_tensor_parallel(model: StagedArchitecture, cut: TensorParallelContext) -> dict[str, TensorShard]:
    """Cut a model by its family's tensor plan, in place; returns which slices it has from now on.

    It may be on meta, or hold the values that it is cut from. To be called before anything else is applied to it.
    """
    spec, peers = model.spec, cut.peers
    plan = family_of(spec).tensor_plan
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    held = plan_tensor_shards(shapes, plan, spec.kv_heads, peers.size, peers.rank)
    replace_modules(model, plan, held, cut)
    _split_norms(model, cut)
    for head in model.losses():  # some stages of a pipeline have none
        assert isinstance(head, Head)
        if head.weight is not None:
            head.weight = copy_shard(head.weight, held["head.weight"])
        head.cross_entropy_sum = make_vocab_parallel_cross_entropy(peers, spec.vocab_size)
        # Behind the norm, so that labels and hidden states are of the same positions again.
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
    """Put what computes with slices in the place of the linear layers and embeddings that `kinds` names.

    `head` is the linear layer to the vocabulary, where there is one. `take` makes a part of a whole parameter, by
    default from its values here. A parameter that two layers share stays one.
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

    entered = set()
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
            entered.add(name.rpartition(".")[0])
        model.set_submodule(name, new)
    for name in sorted(entered):
        model.get_submodule(name).register_forward_pre_hook(functools.partial(_enter, cut), with_kwargs=True)


def copy_shard(parameter: Tensor, shard: TensorShard) -> nn.Parameter:
    """A rank's part of a whole parameter, in memory of its own."""
    part = (
        parameter.detach()
        .narrow(shard.dim, shard.start, shard.stop - shard.start)
        .clone(memory_format=torch.contiguous_format)
    )
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _split_norms(model: nn.Module, cut: TensorParallelContext) -> None:
    for name, old in list(model.named_modules()):
        # Those of queries and keys see a rank's heads; the others, with `sequence`, its positions.
        if isinstance(old, RMSNorm) and (cut.sequence or name.endswith((".q_norm", ".k_norm"))):
            model.set_submodule(name, PartialRMSNorm(old, cut))


def _enter(cut: TensorParallelContext, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Hook before a module whose first layers are cut by outputs: its input, once for all of them."""
    if args:
        return (cut.enter(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": cut.enter(kwargs["hidden_states"])}  # as transformers calls it


def _whole_logits(peers: TensorParallelPeers, whole: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Hook behind the head: a loss is the same on all ranks, logits are gathered."""
    return output if output.dim() == 0 else gather_logits(output, peers, whole)


def _own_positions(peers: TensorParallelPeers, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Hook before a model whose activations are cut along the sequence: dropout is drawn for the own positions."""
    tokens = args[0] if args else kwargs["tokens"]
    first = tokens.shape[1] // peers.size * peers.rank

    def moved(value: Any) -> Any:
        return replace(value, first=first) if isinstance(value, CounterRNG) else value

    return tuple(map(moved, args)), {name: moved(value) for name, value in kwargs.items()}
