"""Causal attention: whole rows, a sliding window, several documents in one row, and both; one function for all.

What is meant is said by `reference_attention`, with a mask of every pair of positions. Where there is no kernel that
skips what the mask hides, the others walk through documents and bands of the window, so that no work is done for pairs
far apart.
"""

import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.core.errors import is_out_of_memory

_WITHOUT_KERNEL = ("cpu", "meta")  # kinds of device on which nothing need be tried
_TRIED = (0, 1, 300, 300, 1024)  # offsets of documents in what a kernel is tried with: tiles of several sizes
_CHUNK_MIN = 128  # queries of one band: fewer make products too thin where the window is narrow


def attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, segments: Tensor | None = None) -> Tensor:
    """Attention of each position to itself and those before it; q (B, heads, S, head_dim) -> the same shape.

    k and v (B, kv_heads, S, head_dim): each of their heads serves heads / kv_heads neighbouring heads of q. With
    `window` a position sees itself and the `window - 1` before it, as in Hugging Face's models (Beltagy et al.,
    "Longformer", 2020). `segments` int32 (n + 1,) are the offsets of documents in the B * S tokens, from 0 to B * S;
    each lies within one row, may be empty, and is attended to by its own positions only.
    """
    if window is not None and window >= q.shape[2]:
        window = None
    if window is None and segments is None:
        return _causal(q, k, v)
    if has_kernel(q.device, q.dtype, q.shape[3]):
        return _varlen(q, k, v, window, segments)
    if segments is None:
        assert window is not None
        return _banded(q, k, v, window)
    if torch.compiler.is_compiling() or segments.is_meta:  # no walk along offsets that are not known yet
        return reference_attention(q, k, v, window, segments)
    return _by_document(q, k, v, window, segments)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attend(q, k, v, repeat=_lacks_grouped_kernel(q))


def _lacks_grouped_kernel(q: Tensor) -> bool:
    # On an accelerator torch's flash kernel takes no float32, and is missing on older devices as the variable-length
    # one is; its memory-efficient one takes no grouped heads. Both together would fall to the plain kernel, which holds
    # S x S scores for each head.
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
    """Whether torch's variable-length kernel runs there, forward and backward: it is asked once, with a few documents
    of real lengths and grouped heads."""
    return _tried(device, dtype, head_dim)


# What torch.compiler.assume_constant_result does, without the import of all of torch._dynamo that it begins with.
has_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    if device.type in _WITHOUT_KERNEL or dtype not in (torch.bfloat16, torch.float16):
        return False
    # In a thread of its own, since hooks and modes are a thread's: where the asking block is recomputed, or compiled,
    # they would take the trial for a part of it.
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
    except (RuntimeError, ValueError, TypeError) as error:  # too old a device or a torch, or too wide a head
        if is_out_of_memory(error):  # says nothing of the kernel; what is raised is not remembered
            raise
        return False
    return True


def varlen_attn(*args: Any, **kwargs: Any) -> Any:
    """torch's variable-length attention. Its module imports all of torch._dynamo, more than a second of processor
    time that a start without it is spared."""
    from torch.nn.attention import varlen

    return varlen.varlen_attn(*args, **kwargs)


def _varlen(q: Tensor, k: Tensor, v: Tensor, window: int | None, segments: Tensor | None) -> Tensor:
    batch, heads, length, _ = q.shape
    if segments is None:
        segments = torch.arange(0, (batch + 1) * length, length, device=q.device, dtype=torch.int32)
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    span = (-1 if window is None else window - 1, 0)
    # The row's length bounds that of any document in it, and never changes: nothing is compiled anew for it.
    out = varlen_attn(q, k, v, segments, segments, length, length, window_size=span, enable_gqa=heads != k.shape[1])
    assert isinstance(out, Tensor)
    return out.unflatten(0, (batch, length)).transpose(1, 2)


def _banded(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Chunk after chunk of queries, each with the keys of its own and the chunk before: S * 2 chunks, not S * S pairs.

    The chunks are a `split`, whose backward pass puts them together in one go; slices would each fill a whole tensor.
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


def _band(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which of the positions `keys` (m,) each of the positions `queries` (n,) sees: bool (n, m)."""
    back = queries[:, None] - keys[None, :]
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _by_document(q: Tensor, k: Tensor, v: Tensor, window: int | None, segments: Tensor) -> Tensor:
    """One document after another; neighbours of equal length together."""
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
    """(how many, length) of neighbouring documents of equal length; empty ones are left out."""
    lengths = (stop - start for start, stop in itertools.pairwise(offsets))
    for size, group in itertools.groupby(length for length in lengths if length):
        yield len(list(group)), size


def reference_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, segments: Tensor | None) -> Tensor:
    """What `attention` means, with a mask of all pairs: bool (B, 1, S, S)."""
    batch, _, length, _ = q.shape
    positions = torch.arange(length, device=q.device)
    mask = _band(positions, positions, window)
    if segments is not None:
        tokens = torch.arange(batch * length, device=q.device, dtype=segments.dtype)
        document = torch.searchsorted(segments, tokens, right=True).view(batch, length)
        mask = mask & (document[:, :, None] == document[:, None, :])[:, None]
    return _attend(q, k, v, _lacks_grouped_kernel(q), mask)
