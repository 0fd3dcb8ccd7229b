"""Attention of some queries to some keys, forward and backward, for parts that are merged afterwards: the log-sum-exp
of the scores goes with the result (Dao et al., "FlashAttention", 2022; Liu et al., "Ring Attention", 2023).

A tile's result is normalized by its own scores; `merge` joins it with what other keys gave. The backward pass takes the
merged result and log-sum-exp, and gives each tile's part of the gradients, so that tiles may come in any order. On a
CPU torch's flash kernel computes a tile; windows, soft caps, dropout and other devices materialize the scores of some
queries at a time.
"""

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.core.errors import is_out_of_memory
from phalanx.layout.context_exchange import TILE_QUERIES
from phalanx.models.attention import ScoreDropout
from phalanx.models.layers import cap_softly


@dataclass(frozen=True)
class TileOptions:
    """What attention is besides products: `causal`, so that a query sees no later key, within a `window` of positions
    if given; `first_query` and `first_key` are positions. `cap` and `dropout` are as of `attention`."""

    causal: bool
    first_query: int
    first_key: int
    window: int | None = None
    cap: float = 0.0
    dropout: ScoreDropout | None = None
    rows: slice = field(default_factory=lambda: slice(None))  # of the micro-batch, for dropout

    @property
    def has_kernel(self) -> bool:
        """Whether torch's kernel has all of it; the first query must be the first key where it is causal."""
        return self.window is None and not self.cap and self.dropout is None


def tile_forward(q: Tensor, k: Tensor, v: Tensor, options: TileOptions) -> tuple[Tensor, Tensor]:
    """q (B, heads, Q, d), k and v (B, kv_heads, K, d) -> the attention (B, heads, Q, d) and the log-sum-exp of the
    scores (B, heads, Q), both in float32 or better. K is at least 1; a query that sees no key has 0 and -inf."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if q.device.type == "cpu" and options.has_kernel:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, options.causal)
        return out.to(wide), lse
    parts = []
    for start in range(0, q.shape[2], TILE_QUERIES):
        seen = _seen_keys(q, k, start, options)
        scores, _ = _scores(q[:, :, start : start + TILE_QUERIES], k[:, :, seen], start, options)
        lse = scores.logsumexp(-1)
        shares = _dropped((scores - _finite(lse)[..., None]).exp(), start, options)
        parts.append((_multiply(shares.to(q.dtype), v[:, :, seen]), lse))
    out, lse = (torch.cat(each, dim=3) for each in zip(*parts, strict=True))
    return out.flatten(1, 2), lse.flatten(1, 2)


def tile_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: TileOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v through one tile, in float32 or better: `out` (B, heads, Q, d) and `lse` (B, heads,
    Q) are the merged ones, and `grad` the gradient of `out`, in the dtype of q."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if q.device.type == "cpu" and options.has_kernel:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out.to(q.dtype), lse, 0.0, options.causal
        )
        return found[0].to(wide), found[1].to(wide), found[2].to(wide)
    groups, scale = (k.shape[1], q.shape[1] // k.shape[1]), q.shape[3] ** -0.5
    grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    grad_q = []
    for start in range(0, q.shape[2], TILE_QUERIES):
        some = slice(start, start + TILE_QUERIES)
        part, given = q[:, :, some], grad[:, :, some].unflatten(1, groups)
        seen = _seen_keys(q, k, start, options)
        scores, slope = _scores(part, k[:, :, seen], start, options)
        shares = (scores - _finite(lse[:, :, some]).unflatten(1, groups)[..., None]).exp()
        kept = _dropped(shares, start, options)
        grad_v[:, :, seen] += _sum_products(kept.to(q.dtype), given)
        of_shares = _dropped(_multiply(given, v[:, :, seen].transpose(-1, -2)), start, options)
        delta = (grad[:, :, some].to(wide) * out[:, :, some]).sum(-1).unflatten(1, groups)
        of_scores = shares * (of_shares - delta[..., None])
        if slope is not None:
            of_scores = of_scores * slope
        of_scores = (of_scores * scale).to(q.dtype)
        grad_q.append(_multiply(of_scores, k[:, :, seen]).flatten(1, 2))
        grad_k[:, :, seen] += _sum_products(of_scores, part.unflatten(1, groups))
    return torch.cat(grad_q, dim=2), grad_k, grad_v


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge a tile's result into that of other keys, in place: (B, heads, Q, d) and (B, heads, Q) each."""
    both = torch.logaddexp(lse, more_lse)
    safe = _finite(both)
    out.mul_((lse - safe).exp()[..., None]).add_(more_out * (more_lse - safe).exp()[..., None])
    lse.copy_(both)


def _finite(lse: Tensor) -> Tensor:
    """A query that sees no key has -inf, of which exp(-inf - -inf) would be no number."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _seen_keys(q: Tensor, k: Tensor, start: int, options: TileOptions) -> slice:
    """The keys that any of the queries from number `start` of the tile on may see."""
    last = options.first_query + min(start + TILE_QUERIES, q.shape[2]) - options.first_key
    return slice(0, min(k.shape[2], max(1, last)) if options.causal else k.shape[2])


def _scores(q: Tensor, k: Tensor, start: int, options: TileOptions) -> tuple[Tensor, Tensor | None]:
    """The scores (B, kv_heads, groups, Q, K) of queries from number `start` of the tile on, -inf where a key is not
    seen, and the slope of the soft cap where there is one."""
    grouped = q.unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
    scores, slope = _multiply(grouped, k.transpose(-1, -2)) * q.shape[3] ** -0.5, None
    if options.cap:
        scores = cap_softly(scores, options.cap)
        slope = 1.0 - (scores / options.cap).square()
    if options.causal or options.window is not None:
        first = options.first_query + start - options.first_key
        back = first + torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
        seen = back >= 0 if options.window is None else (back >= 0) & (back < options.window)
        scores = scores.masked_fill(~seen, -math.inf)
    return scores, slope


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """a (B, kv_heads, groups, M, N) times b (B, kv_heads, N, P) -> (B, kv_heads, groups, M, P), in float32 or better:
    scores of long rows are large, and rounded to 16 bits they would be wrong by a percent."""
    rows = a.flatten(2, 3).flatten(0, 1)  # the queries of a group together: a product for each key head
    return _multiply_matrices(rows, b.flatten(0, 1)).view(*a.shape[:4], b.shape[3])


def _sum_products(a: Tensor, b: Tensor) -> Tensor:
    """The sum over groups of a.T b: a (B, kv_heads, groups, M, N) and b (B, kv_heads, groups, M, P) -> (B, kv_heads, N,
    P), in float32 or better."""
    rows, columns = (each.flatten(2, 3).flatten(0, 1) for each in (a, b))
    return _multiply_matrices(rows.transpose(1, 2), columns).unflatten(0, a.shape[:2])


def _multiply_matrices(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype != wide and _has_wide_product(a.device, a.dtype):
        return torch.bmm(a, b, out_dtype=wide)
    return torch.bmm(a.to(wide), b.to(wide))


@functools.cache
def _has_wide_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of 16-bit matrices there can have a float32 result: tried once, in a separate thread, since
    hooks and modes belong to a thread and would take the trial for a part of the model."""

    def attempt() -> bool:
        a = torch.full((1, 16, 16), 1 + 2**-7, device=device, dtype=dtype)
        found = torch.bmm(a, a, out_dtype=torch.float32)
        return bool((found == 16 * (1 + 2**-7) ** 2).all())

    try:
        with ThreadPoolExecutor(1) as apart:
            return apart.submit(attempt).result()
    except (RuntimeError, TypeError) as error:  # device or torch has none
        if is_out_of_memory(error):  # an exception is not cached
            raise
        return False


def _dropped(shares: Tensor, start: int, options: TileOptions) -> Tensor:
    """Shares, or their gradients, after dropout."""
    if options.dropout is None:
        return shares
    return options.dropout.apply(shares, options.first_query + start, options.first_key, options.rows)
