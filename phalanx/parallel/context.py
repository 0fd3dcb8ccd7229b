"""Context parallelism: the ranks of a group share the positions of each row, and attention exchanges what it needs.

Everything but attention works on one position at a time, so a rank computes its slice of each row as if it were all
there is. In attention one of three exchanges is made, by `parallel.context_by`:

| by | what is exchanged | limits |
|---|---|---|
| `gather` | keys and values, at once; their gradients are returned | all needed keys in memory |
| `ring` | these of one rank after another, while the last are used; in either pass | keys of two ranks in memory |
| `heads` | queries, keys and values of all positions for some heads, then the results | ranks <= key heads |

Slices are unequal where ranks are (layout/context_slices.py). With `heads` the kernels see whole rows, so that every
bit stays; with the others results of several tiles are merged (models/attention_tiles.py). Sources: Liu, Zaharia and
Abbeel, "Ring Attention", 2023; Jacobs et al., "DeepSpeed Ulysses", 2023 (heads).
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm import collectives
from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Axis
from phalanx.comm.p2p import PendingExchange, exchange_around
from phalanx.layout.context_slices import (
    AttentionPlan,
    ContextSlices,
    Documents,
    KeyBlock,
    Tile,
    plan_attention,
    split_in_proportion,
)
from phalanx.models.attention import ScoreDropout, attention
from phalanx.models.attention_tiles import TileOptions, merge, tile_backward, tile_forward
from phalanx.models.llama import Attention
from phalanx.parallel.all_to_all import all_to_all


def positions_of(slices: ContextSlices, rank: int) -> Tensor:
    """The positions of a rank, in order: int64 (count,)."""
    ranges = [torch.arange(each.start, each.stop) for each in slices.ranges_of(rank)]
    return torch.cat([torch.arange(0), *ranges])


@dataclass(frozen=True, eq=False)
class ContextRows:
    """The rows of a micro-batch that a group shares, in the place of `segments` of the model's forward.

    `documents` are the offsets of documents in each row, None where each is one; `segments` the same on the device, in
    whole rows, as `attention` takes them.
    """

    slices: ContextSlices
    rank: int
    rows: int
    documents: Documents | None = None
    segments: Tensor | None = None
    plans: dict[int | None, AttentionPlan] = field(default_factory=dict)

    def plan(self, window: int | None) -> AttentionPlan:
        """What this rank does in a layer with this window."""
        if window not in self.plans:
            self.plans[window] = plan_attention(self.slices, self.rank, self.rows, self.documents, window)
        return self.plans[window]


class ContextParallel:
    """The context-parallel group of a rank, held by a model's attention modules. The reference to the axis is weak: a
    model may outlive its mesh, but must not keep the process group alive.

    `shares`: each rank's part of the key heads with `heads`, in proportion.
    """

    def __init__(self, axis: Axis, traffic: Traffic, by: str, shares: Sequence[float]) -> None:
        assert by in ("gather", "ring", "heads"), by
        self.rank, self.size, self.by, self.shares, self.traffic = axis.rank, axis.size, by, tuple(shares), traffic
        self._axis = weakref.ref(axis)

    @property
    def axis(self) -> Axis:
        """The axis; fails once its mesh is gone."""
        axis = self._axis()
        assert axis is not None, "a model is used whose mesh is gone"
        return axis

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, segments: ContextRows, cap: float = 0.0,
        dropout: ScoreDropout | None = None,
    ) -> Tensor:  # fmt: skip
        """As `attention`, of this rank's positions of the rows `segments`: q (B, heads, s, d) -> the same shape."""
        if window is not None and window >= segments.slices.length:
            window = None
        if self.by == "heads":
            return _attend_by_heads(self, q, k, v, window, segments, cap, dropout)
        out: Tensor = _TiledAttention.apply(q, k, v, _Call(self, segments.plan(window), window, cap, dropout))
        return out


def apply_context_parallel(model: nn.Module, context: ContextParallel) -> None:
    """Have the attention of a decoder exchange with the ranks of a context group."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attention_fn = context.attend


def find_context_attention(module: nn.Module) -> list[Attention]:
    """Attention modules that exchange with the ranks of a context group."""
    return [each for each in module.modules() if isinstance(each, Attention) and each.attention_fn is not attention]


def reference_context_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: ContextRows, window: int | None, cap: float, dropout: ScoreDropout | None
) -> Tensor:
    """Reference of `ContextParallel.attend` in one process: whole q, k and v (B, heads, S, d) -> the part of a rank."""
    out = attention(q, k, v, window=window, segments=rows.segments, cap=cap, dropout=dropout)
    return out[:, :, positions_of(rows.slices, rows.rank).to(q.device)]


# ----------------------------------------------------------------------------------------------- by tiles: gather, ring


@dataclass(frozen=True, eq=False)
class _Call:
    """One layer's attention by tiles."""

    context: ContextParallel
    plan: AttentionPlan
    window: int | None
    cap: float
    dropout: ScoreDropout | None

    def options(self, tile: Tile) -> TileOptions:
        window = self.window if tile.kind == "band" else None
        return TileOptions(
            tile.kind != "full", tile.first_query, tile.first_key, window, self.cap, self.dropout, tile.rows
        )

    def count_for(self, rank: int) -> int:
        """How many of the own keys `rank` needs."""
        return sum(part.stop - part.start for part in self.plan.sends[rank])

    def select(self, kv: Tensor, rank: int) -> Tensor:
        """What `rank` needs of the own kv (s, ...)."""
        return torch.cat([kv[:0], *(kv[part] for part in self.plan.sends[rank])])


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
        kv = torch.cat((k, v), dim=-1).movedim(2, 0).contiguous()  # (s, B, kv_heads, 2 d)
        received, blocks = _start_receiving(call, kv)
        _add_block(call, call.plan.own, kv, q, out, lse)
        for block, theirs in blocks:
            _add_block(call, block, theirs, q, out, lse)
        narrow = out.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, kv, narrow, lse, *received)
        return narrow

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, kv, out, lse, *received = ctx.saved_tensors
        call: _Call = ctx.call
        grad = grads[0].contiguous()
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        blocks = zip(call.plan.others, received, strict=True) if received else _start_receiving(call, kv)[1]
        grad_kv = _backward_block(call, call.plan.own, kv, grad, q, out, lse, grad_q)
        returns = _Returns(call, kv)
        for block, theirs in blocks:
            of_block = _backward_block(call, block, theirs, grad, q, out, lse, grad_q)
            returns.add(block, of_block.to(kv.dtype))
        returns.add_to(grad_kv)
        grad_k, grad_v = grad_kv.to(kv.dtype).movedim(0, 2).chunk(2, dim=-1)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _split_kv(kv: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Keys and values of a tile, (rows, kv_heads, K, d) each, of kv (count, B, kv_heads, 2 d)."""
    k, v = kv[tile.keys, tile.rows].movedim(0, 2).chunk(2, dim=-1)
    return k, v


def _add_block(call: _Call, block: KeyBlock, kv: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
    for tile in block.tiles:
        at = (tile.rows, slice(None), tile.queries)
        merge(out[at], lse[at], *tile_forward(q[at], *_split_kv(kv, tile), call.options(tile)))


def _backward_block(
    call: _Call, block: KeyBlock, kv: Tensor, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, grad_q: Tensor
) -> Tensor:
    """Adds to `grad_q`; returns the gradient of the block's kv, in float32 or better."""
    grad_kv = torch.zeros(kv.shape, dtype=lse.dtype, device=kv.device)
    for tile in block.tiles:
        at = (tile.rows, slice(None), tile.queries)
        found = tile_backward(grad[at], q[at], *_split_kv(kv, tile), out[at], lse[at], call.options(tile))
        grad_q[at] += found[0]
        grad_kv[tile.keys, tile.rows] += torch.cat(found[1:], dim=-1).movedim(2, 0)
    return grad_kv


Blocks = Iterator[tuple[KeyBlock, Tensor]]


def _start_receiving(call: _Call, kv: Tensor) -> tuple[Sequence[Tensor], Blocks]:
    """Start the exchange of keys and values: tensors to keep for the backward pass, if it does not exchange again, and
    the blocks of other ranks, in the order of the plan, each once it is there."""
    if call.context.by == "gather":
        return _start_gather(call, kv)
    return (), _start_ring(call, kv)


def _start_gather(call: _Call, kv: Tensor) -> tuple[Sequence[Tensor], Blocks]:
    context, others = call.context, call.plan.others
    counts = {block.owner: block.count for block in others}
    received = [counts.get(rank, 0) for rank in range(context.size)]
    sent = [call.count_for(rank) for rank in range(context.size)]
    leaving = torch.cat([call.select(kv, rank) for rank in range(context.size)])
    arriving = kv.new_empty((sum(received), *kv.shape[1:]))
    pending = collectives.all_to_all(arriving, leaving, received, sent, context.axis.group, context.traffic)
    by_rank = arriving.split(received)
    held = [by_rank[block.owner] for block in others]

    def blocks() -> Blocks:
        pending.wait()
        yield from zip(others, held, strict=True)

    return held, blocks()


def _start_ring(call: _Call, kv: Tensor) -> Blocks:
    context, others = call.context, call.plan.others

    def start(hop: int) -> tuple[Tensor, PendingExchange]:
        block, to = others[hop], (context.rank + hop + 1) % context.size
        arriving = kv.new_empty((block.count, *kv.shape[1:]))
        group = context.axis.group
        return arriving, exchange_around(call.select(kv, to), to, arriving, block.owner, group, context.traffic)

    first = start(0) if others else None

    def blocks() -> Blocks:
        under_way = first
        for hop, block in enumerate(others):
            assert under_way is not None
            arriving, exchange = under_way
            exchange.wait()
            under_way = start(hop + 1) if hop + 1 < len(others) else None  # travels while this one is used
            yield block, arriving

    return blocks()


class _Returns:
    """Gradients of other ranks' keys and values on their way to them, and those of the own ones on their way here."""

    def __init__(self, call: _Call, kv: Tensor) -> None:
        self._call, self._like = call, kv
        self._given: dict[int, Tensor] = {}
        self._arriving: dict[int, tuple[Tensor, PendingExchange]] = {}

    def _make_buffer(self, rank: int) -> Tensor:
        return self._like.new_empty((self._call.count_for(rank), *self._like.shape[1:]))

    def add(self, block: KeyBlock, grad: Tensor) -> None:
        """Return a block's gradient: at once in a ring, which sends the next one's keys meanwhile."""
        self._given[block.owner] = grad
        context = self._call.context
        if context.by == "ring":
            other = (2 * context.rank - block.owner) % context.size  # as far behind as the owner is before
            buffer = self._make_buffer(other)
            group = context.axis.group
            pending = exchange_around(grad, block.owner, buffer, other, group, context.traffic)
            self._arriving[other] = buffer, pending

    def add_to(self, grad_kv: Tensor) -> None:
        """Add what has arrived of the other ranks, in order of rank, to the gradient of the own kv (s, ...)."""
        context = self._call.context
        ranks = range(context.size)
        if context.by == "ring":
            for _, pending in self._arriving.values():
                pending.wait()
            found = [self._arriving[rank][0] if rank in self._arriving else self._make_buffer(rank) for rank in ranks]
        else:
            none = self._like[:0]
            leaving = [self._given.get(rank, none) for rank in ranks]
            found = [self._make_buffer(rank) for rank in ranks]
            received, sent = [len(each) for each in found], [len(each) for each in leaving]
            arriving = self._like.new_empty((sum(received), *self._like.shape[1:]))
            group = context.axis.group
            collectives.all_to_all(arriving, torch.cat(leaving), received, sent, group, context.traffic).wait()
            found = list(arriving.split(received))
        for rank in ranks:
            at = 0
            for part in self._call.plan.sends[rank]:
                grad_kv[part] += found[rank][at : at + part.stop - part.start]
                at += part.stop - part.start


# ------------------------------------------------------------------------------------------------------------- by heads


def _attend_by_heads(
    context: ContextParallel, q: Tensor, k: Tensor, v: Tensor, window: int | None, rows: ContextRows, cap: float,
    dropout: ScoreDropout | None,
) -> Tensor:  # fmt: skip
    batch, heads, own, width = q.shape
    kv_heads = k.shape[1]
    groups, lengths = heads // kv_heads, rows.slices.counts
    counts = split_in_proportion(kv_heads, context.shares)
    mine, first = counts[context.rank], sum(counts[: context.rank])
    order = torch.cat([positions_of(rows.slices, rank) for rank in range(context.size)]).to(q.device)
    # Of each key head its queries, its key and its value, side by side: one exchange, in both passes.
    by_head = q.unflatten(1, (kv_heads, groups)).permute(1, 0, 3, 2, 4).flatten(3)
    packed = torch.cat((by_head, k.transpose(0, 1), v.transpose(0, 1)), dim=-1)  # (kv_heads, B, s, (groups + 2) d)
    each = batch * (groups + 2) * width
    sent, received = [count * own * each for count in counts], [mine * length * each for length in lengths]
    flat = all_to_all(packed.flatten(), sent, received, context)
    shapes = [(mine, batch, length, (groups + 2) * width) for length in lengths]
    parts = [part.view(shape) for part, shape in zip(flat.split(received), shapes, strict=True)]
    whole = torch.cat(parts, dim=2)[:, :, order.argsort()]
    asked, key, value = whole.split([groups * width, width, width], dim=-1)
    if mine:
        asked = asked.unflatten(3, (groups, width)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        if dropout is not None:
            dropout = replace(dropout, first_head=dropout.first_head + groups * first)
        # Contiguous, as without an exchange: kernels may round by how tensors lie in memory.
        given = (each.contiguous() for each in (asked, key.transpose(0, 1), value.transpose(0, 1)))
        mixed = attention(*given, window=window, segments=rows.segments, cap=cap, dropout=dropout)
        mixed = mixed.unflatten(1, (mine, groups)).permute(1, 0, 3, 2, 4).flatten(3)
    else:
        mixed = asked  # nothing, but its gradient has others wait for this rank
    each = batch * groups * width
    sent, received = [mine * length * each for length in lengths], [count * own * each for count in counts]
    leaving = torch.cat([part.flatten() for part in mixed[:, :, order].split(lengths, dim=2)])
    flat = all_to_all(leaving, sent, received, context)
    shapes = [(count, batch, own, groups * width) for count in counts]
    parts = [part.view(shape) for part, shape in zip(flat.split(received), shapes, strict=True)]
    return torch.cat(parts).unflatten(3, (groups, width)).permute(1, 0, 3, 2, 4).flatten(1, 2)
