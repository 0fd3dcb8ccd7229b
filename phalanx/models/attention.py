"""Causal attention, with sliding windows and with several documents packed in one row.

`reference_attention` defines the result, with a mask of every pair of positions. Where no kernel skips masked pairs,
documents and bands of the window are computed one after another, so that distant pairs cost nothing.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.core.errors import is_out_of_memory
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.layers import cap_softly

_WITHOUT_KERNEL = ("cpu", "meta")  # kinds of device without the kernel
_TRIED = (0, 1, 300, 300, 1024)  # document offsets of the kernel's trial: tiles of several sizes
# Queries whose scores are materialized at a time; the random numbers of dropout take more memory.
_SCORES_CHUNK, _DROPOUT_CHUNK = 1024, 256
_CHUNK_MIN = 128  # least queries of one band: with a narrow window fewer make products too small


@dataclass(frozen=True)
class ScoreDropout:
    """Dropout of attention's probabilities with probability `p`, for heads from number `first_head` of the model on."""

    draws: CounterRNG
    site: Tensor
    first_head: int
    p: float

    def apply(self, shares: Tensor, query: int, key: int, rows: slice = slice(None)) -> Tensor:
        """Zero some of `shares` (B, kv_heads, groups, Q, K), of queries and keys from these positions on, and scale the
        others; B are `rows` of the micro-batch."""
        _, kv_heads, groups, queries, keys = shares.shape
        heads = range(self.first_head, self.first_head + kv_heads * groups)
        spans = range(query, query + queries), range(key, key + keys)
        kept = self.draws.keep_scores(self.site, heads, *spans, self.p, rows).unflatten(1, (kv_heads, groups))
        return torch.where(kept, shares * (1.0 / (1.0 - self.p)), 0.0)


@dataclass(frozen=True)
class Alibi:
    """Attention with linear biases, for heads from number `first_head` of the model's `heads` on: a score is lowered by
    the distance of the positions times a slope of the head. `scaled` biases are rounded to bfloat16 and divided by the
    square root of the head's width, as scores are. Source: Press et al., "Train Short, Test Long", 2022."""

    heads: int
    first_head: int
    scaled: bool

    def biases(
        self, queries: Tensor, keys: Tensor, kv_heads: int, groups: int, width: int, dtype: torch.dtype
    ) -> Tensor:
        """The biases of positions `queries` (B or 1, n) and `keys` (B or 1, m): (B or 1, kv_heads, groups, n, m), up to
        a constant for each query."""
        some = self.first_head + torch.arange(kv_heads * groups, device=keys.device)
        slopes = torch.tensor(alibi_slopes(self.heads), device=keys.device)[some].view(kv_heads, groups, 1, 1)
        if self.scaled:  # of a key alone, as such models are trained
            return (slopes.bfloat16() * keys[:, None, None, None]).to(dtype) * width**-0.5
        return slopes.to(dtype) * (keys[:, None, None, None] - queries[:, None, None, :, None])


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of `heads` heads: powers of two in even steps; where the heads are no power of two, those of the next
    lower one, and every other of the next higher one."""
    closest = 2 ** int(math.log2(heads))
    found = [2.0 ** (-8.0 * each / closest) for each in range(1, closest + 1)]
    return found + [2.0 ** (-4.0 * each / closest) for each in range(1, 2 * (heads - closest), 2)]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, segments: Tensor | None = None, cap: float = 0.0,
    dropout: ScoreDropout | None = None, alibi: Alibi | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention: each position attends to itself and earlier ones; q (B, heads, S, head_dim) -> the same shape.

    k and v (B, kv_heads, S, head_dim): each of their heads serves heads / kv_heads neighbouring heads of q. With
    `window` a position attends to itself and the `window - 1` before it, as in Hugging Face's models (Beltagy et al.,
    "Longformer", 2020). `segments` int32 (n + 1,) are the offsets of documents in the B * S tokens, from 0 to B * S;
    each lies within one row, may be empty, and is attended to by its own positions only. `cap` (0: none) is a soft cap
    of the scores, `dropout` that of the probabilities, `sinks` (heads,) are scores of one more key of each head,
    without a value (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024); torch has no kernel
    for these nor for `alibi`, so the scores are materialized.
    """
    if cap or dropout is not None or alibi is not None or sinks is not None:
        return _with_scores(q, k, v, window, segments, cap, dropout, alibi, sinks)
    if window is not None and window >= q.shape[2]:
        window = None
    if window is None and segments is None:
        return _causal(q, k, v)
    if has_kernel(q.device, q.dtype, q.shape[3]):
        return _varlen(q, k, v, window, segments)
    if segments is None:
        assert window is not None
        return _banded(q, k, v, window)
    if torch.compiler.is_compiling() or segments.is_meta:  # offsets are unknown while compiling
        return reference_attention(q, k, v, window, segments)
    return _by_document(q, k, v, window, segments)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attend(q, k, v, repeat=_lacks_grouped_kernel(q))


def _lacks_grouped_kernel(q: Tensor) -> bool:
    # On an accelerator torch's flash kernel does not support float32, and is missing on older devices, as the
    # variable-length one is; the memory-efficient kernel does not support grouped heads. With both, torch would use the
    # math kernel, which materializes S x S scores for each head.
    if q.dtype in (torch.float32, torch.float64):
        return q.dtype == torch.float32 and q.device.type != "cpu"
    return q.device.type not in _WITHOUT_KERNEL and not has_kernel(q.device, q.dtype, q.shape[3])


def _attend(q: Tensor, k: Tensor, v: Tensor, repeat: bool, mask: Tensor | None = None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if repeat and groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=shared)


def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's variable-length attention kernel works, forward and backward: tried once, with a few documents
    and grouped heads."""
    return _tried(device, dtype, head_dim)


# As torch.compiler.assume_constant_result, without its import of all of torch._dynamo.
has_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    if device.type in _WITHOUT_KERNEL or dtype not in (torch.bfloat16, torch.float16):
        return False
    # In a separate thread, since hooks and modes belong to a thread: where the calling block is recomputed or compiled,
    # they would record the trial as a part of it.
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(_try, device, dtype, head_dim).result()


def _try(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    try:
        with torch.enable_grad():
            length = _TRIED[-1]
            q = torch.zeros(length, 4, head_dim, device=device, dtype=dtype, requires_grad=True)
            kv = torch.zeros(length, 2, head_dim, device=device, dtype=dtype, requires_grad=True)
            at = torch.tensor(_TRIED, device=device, dtype=torch.int32)
            out = varlen_attn(q, kv, kv, at, at, length, length, window_size=(length // 4, 0), enable_gqa=True)
            assert isinstance(out, Tensor)
            out.sum().backward()
    except (RuntimeError, ValueError, TypeError) as error:  # device or torch too old, or head too wide
        if is_out_of_memory(error):  # not the kernel's fault; an exception is not cached
            raise
        return False
    return True


def varlen_attn(*args: Any, **kwargs: Any) -> Any:
    """torch's variable-length attention, imported on first use: its module imports all of torch._dynamo, more than a
    second of processor time."""
    from torch.nn.attention import varlen

    return varlen.varlen_attn(*args, **kwargs)


def _varlen(q: Tensor, k: Tensor, v: Tensor, window: int | None, segments: Tensor | None) -> Tensor:
    batch, heads, length, _ = q.shape
    if segments is None:
        segments = torch.arange(0, (batch + 1) * length, length, device=q.device, dtype=torch.int32)
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    span = (-1 if window is None else window - 1, 0)
    # The row's length bounds that of any document in it, and is constant, so it causes no recompilation.
    out = varlen_attn(q, k, v, segments, segments, length, length, window_size=span, enable_gqa=heads != k.shape[1])
    assert isinstance(out, Tensor)
    return out.unflatten(0, (batch, length)).transpose(1, 2)


def _banded(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Sliding-window attention by bands: each chunk of queries with the keys of the same and the previous chunk.

    The chunks come from `split`, whose backward pass joins them at once; slices would each allocate a whole tensor.
    """
    chunk = max(window, _CHUNK_MIN)
    repeat = _lacks_grouped_kernel(q)
    queries, keys, values = (part.split(chunk, dim=2) for part in (q, k, v))
    out = []
    for index, part in enumerate(queries):
        both = slice(max(0, index - 1), index + 1)
        near = torch.cat(keys[both], dim=2)
        stop = index * chunk + part.shape[2]
        positions = torch.arange(stop - near.shape[2], stop, device=q.device)
        mask = _band(positions[-part.shape[2] :], positions, window)
        out.append(_attend(part, near, torch.cat(values[both], dim=2), repeat, mask))
    return torch.cat(out, dim=2)


def _with_scores(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, segments: Tensor | None, cap: float,
    dropout: ScoreDropout | None, alibi: Alibi | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention with materialized scores, one chunk of queries at a time."""
    batch, heads, length, width = q.shape
    # Query heads that share a key head are neighbours.
    q = q.unflatten(1, (k.shape[1], heads // k.shape[1])) * width**-0.5
    positions = torch.arange(length, device=q.device)
    document = None if segments is None else _documents(segments, batch, length)
    wide, groups = torch.promote_types(q.dtype, torch.float32), q.shape[2]
    within = positions[None]  # the document
    if alibi is not None and segments is not None and document is not None:
        rows = torch.arange(0, batch * length, length, device=q.device)
        within = positions - (segments[document - 1] - rows[:, None])
    out, chunk = [], _SCORES_CHUNK if dropout is None else _DROPOUT_CHUNK
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        seen = slice(0 if window is None else max(0, start - window + 1), stop)
        mask = _band(positions[start:stop], positions[seen], window)
        if document is not None:
            mask = mask & (document[:, start:stop, None] == document[:, None, seen])[:, None, None]
        scores = q[..., start:stop, :] @ k[:, :, None, seen].transpose(-1, -2)
        scores = cap_softly(scores, cap) if cap else scores
        if alibi is not None:
            scores = scores + alibi.biases(within[:, start:stop], within[:, seen], k.shape[1], groups, width, wide)
        scores = scores.masked_fill(~mask, -math.inf)
        if sinks is None:
            shares = torch.softmax(scores, -1, wide)
        else:
            sink = sinks.to(wide).view(-1, groups, 1, 1)
            most = torch.maximum(scores.detach().to(wide).amax(-1, keepdim=True), sink.detach())
            powers = (scores.to(wide) - most).exp()
            shares = powers / (powers.sum(-1, keepdim=True) + (sink - most).exp())
        if dropout is not None:
            shares = dropout.apply(shares, start, seen.start)
        out.append(shares.to(q.dtype) @ v[:, :, None, seen])
    return torch.cat(out, dim=3).flatten(1, 2)


def _documents(segments: Tensor, batch: int, length: int) -> Tensor:
    """The document number of each position: (B, S)."""
    tokens = torch.arange(batch * length, device=segments.device, dtype=segments.dtype)
    return torch.searchsorted(segments, tokens, right=True).view(batch, length)


def _band(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """The causal mask, with a window if given, of positions `queries` (n,) and `keys` (m,): bool (n, m)."""
    back = queries[:, None] - keys[None, :]
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _by_document(q: Tensor, k: Tensor, v: Tensor, window: int | None, segments: Tensor) -> Tensor:
    """Attention document by document; neighbours of equal length are batched."""
    batch, _, length, _ = q.shape
    runs = list(_runs(segments.tolist()))
    sizes = [count * size for count, size in runs]
    flat = [part.transpose(1, 2).flatten(0, 1).split(sizes) for part in (q, k, v)]
    out = []
    for (_, size), *parts in zip(runs, *flat, strict=True):
        rows = [part.unflatten(0, (-1, size)).transpose(1, 2) for part in parts]
        out.append(attention(rows[0], rows[1], rows[2], window=window).transpose(1, 2).flatten(0, 1))
    return torch.cat(out).unflatten(0, (batch, length)).transpose(1, 2)


def _runs(offsets: list[int]) -> Iterator[tuple[int, int]]:
    """(count, length) of runs of neighbouring documents of equal length, without empty ones."""
    lengths = (stop - start for start, stop in itertools.pairwise(offsets))
    for size, group in itertools.groupby(length for length in lengths if length):
        yield len(list(group)), size


def reference_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, segments: Tensor | None) -> Tensor:
    """Reference of `attention`, with a mask of all pairs: bool (B, 1, S, S)."""
    batch, _, length, _ = q.shape
    positions = torch.arange(length, device=q.device)
    mask = _band(positions, positions, window)
    if segments is not None:
        document = _documents(segments, batch, length)
        mask = mask & (document[:, :, None] == document[:, None, :])[:, None]
    return _attend(q, k, v, _lacks_grouped_kernel(q), mask)
