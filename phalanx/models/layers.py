"""Layers: embedding, linear, norms, and a chunked cross-entropy.

No layer has a buffer, so that a model on the meta device can be initialized by its parameters alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core import renamed
from phalanx.layout.memory_model import loss_chunk_tokens
from phalanx.layout.model_shape import IGNORE_INDEX
from phalanx.models.counter_rng import CounterRNG

ChunkFn = Callable[..., tuple[Tensor, Tensor | None]]


class _WideLookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = weight.shape[0]
        return F.embedding(tokens, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        wide = torch.ops.aten.embedding_dense_backward(grads[0].float(), tokens, ctx.rows, -1, False)
        return wide.to(grads[0].dtype), None


class Embedding(nn.Embedding):
    """nn.Embedding, except that on a CPU the gradient of a bfloat16 or float16 weight is summed in float32.

    torch on a CPU adds up the rows of a token in the dtype of the weight: in bfloat16 a token seen 20,000 times stops
    at 256 times its gradient. Its kernels for NVIDIA's devices sum in float32 throughout for more than 3,072 tokens,
    and up to that within each 32 of them, so at most 96 roundings: not worth a copy of a large weight in float32.
    """

    def reset_parameters(self) -> None:
        """As nn.Embedding, but does nothing on meta, where torch would import torch._dynamo for it."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """tokens (...) int64 -> (..., width) in the dtype of the weight."""
        if self.weight.device.type == "cpu" and self.weight.dtype in (torch.bfloat16, torch.float16):
            return _WideLookUp.apply(self.weight, input)
        return super().forward(input)


class Linear(nn.Linear):
    """nn.Linear that accepts dropout's random numbers, as one with an adapter does (lora.py), and ignores them.

    `multiply` is F.linear, or an FP8 product (parallel/fp8.py).
    """

    multiply: Callable[..., Tensor] = staticmethod(F.linear)

    def reset_parameters(self) -> None:
        """As nn.Linear, but does nothing on meta; see `Embedding`."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor, draws: CounterRNG | None = None, site: Tensor | None = None) -> Tensor:
        """input (..., in) -> (..., out)."""
        return self.multiply(input, self.weight, self.bias)


def make_projection(inputs: int, outputs: int) -> nn.Module:
    """A matrix between two widths; none between equal ones."""
    return nn.Identity() if inputs == outputs else Linear(inputs, outputs, bias=False)


class PositionedEmbedding(Embedding):
    """An embedding of tokens, projected from its `width` to that of the model, with learned positions added; the first
    `offset` rows of `positions` are unused."""

    def __init__(self, rows: int, width: int, positions: int, offset: int, hidden: int) -> None:
        super().__init__(rows, width)
        self.project = make_projection(width, hidden)
        self.positions, self.offset = Embedding(positions + offset, hidden), offset

    def forward(self, input: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens (B, S) int64, positions (S,) or (B, S), 0 .. S - 1 if not given -> (B, S, hidden)."""
        positions = torch.arange(input.shape[-1], device=input.device) if positions is None else positions
        found: Tensor = self.project(super().forward(input)) + self.positions(positions + self.offset)
        return found


class RMSNorm(nn.Module):
    """RMSNorm: x / rms(x) * weight over the last dim, with the root mean square in float32 or better for any dtype of
    `x`; with `unit_offset` times 1 + weight, and rounded once.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; rounding as in Hugging Face's Llama, and
    with `unit_offset` as in its Gemma.
    """

    def __init__(self, width: int, eps: float, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if unit_offset else torch.ones(width))
        self.eps, self.unit_offset = eps, unit_offset

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape and dtype."""
        return self.normalize(x, self.weight)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of `x` with the given weight."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.unit_offset:
            return (wide * scale * (1.0 + weight.to(wide.dtype))).to(x.dtype)
        return weight * (wide * scale).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm with sums in float32 or better, rounded once, for any dtype of the input."""

    def forward(self, input: Tensor) -> Tensor:
        """input (..., width) -> the same shape and dtype."""
        return self.normalize(input, self.weight, self.bias)

    def normalize(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """LayerNorm of `x` with the given weight and bias."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.layer_norm(x.to(wide), self.normalized_shape, weight.to(wide), bias.to(wide), self.eps).to(x.dtype)


def reference_cross_entropy_sum(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Reference of `cross_entropy_sum`, with all logits at once."""
    return sum_logit_losses(F.linear(hidden, head_weight, bias), labels)


def cap_softly(x: Tensor, cap: float) -> Tensor:
    """Soft cap: cap * tanh(x / cap). Source: "Gemma 2", 2024."""
    return torch.tanh(x / cap) * cap


def sum_logit_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of cross-entropies of logits (..., C) over labels (...) that are not ignored, in float32 or better; exactly 0
    without any."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def default_chunk(vocab_size: int, device: torch.device) -> int:
    """The default chunk of `cross_entropy_sum`, in tokens."""
    return loss_chunk_tokens(vocab_size, device.type == "cpu")


def chunk_bytes(vocab_size: int, device: torch.device, dtype: torch.dtype) -> int:
    """Peak bytes of one chunk of `cross_entropy_sum`: logits, their logarithms in float32 or better, and the logits'
    gradient."""
    wide = torch.promote_types(dtype, torch.float32)
    return default_chunk(vocab_size, device) * vocab_size * (2 * dtype.itemsize + wide.itemsize)


@dataclass(frozen=True)
class VocabShard:
    """A vocabulary shard of a head: rows from `first` on; other ranks hold the others, and `all_gather` stacks tensors
    of all."""

    first: int
    all_gather: Callable[[Tensor], Tensor]


def _chunk(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    with_grad: bool,
    bias: Tensor | None = None,
    cap: float = 0.0,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy sum of one chunk of tokens, and with `with_grad` its gradient with respect to their logits, in the
    dtype of `hidden`.

    A row with an ignored label adds nothing to the loss; its gradient is undefined, and the caller masks it where that
    is cheap (in the model's width instead of the vocabulary's). With a `shard` of the vocabulary the loss is the same
    on all ranks, and the gradient is that of this rank's logits; three numbers per token and rank are gathered.
    """
    valid = labels != IGNORE_INDEX
    at = labels if shard is None else labels - shard.first
    here = valid if shard is None else valid & (at >= 0) & (at < head_weight.shape[0])
    targets = torch.where(here, at, 0)[:, None]
    logits, wide = F.linear(hidden, head_weight, bias), torch.promote_types(hidden.dtype, torch.float32)
    slope = None
    if cap:
        logits = cap_softly(logits.to(wide), cap)
        slope = 1.0 - (logits / cap).square() if with_grad else None
    if shard is None:
        log_p = torch.log_softmax(logits, -1, dtype=wide)
        loss = -torch.where(valid, log_p.gather(1, targets)[:, 0], 0.0).sum()
        if with_grad and torch.compiler.is_compiling():  # a comparison fuses with the exponential; a scatter does not
            hit = torch.arange(log_p.shape[1], device=log_p.device) == targets
            grad = log_p.exp() - hit.to(log_p.dtype)
            return loss, (grad if slope is None else grad * slope).to(hidden.dtype)
        p = log_p.exp_() if with_grad else None
    else:
        logits = logits.to(wide)
        picked = torch.where(here, logits.gather(1, targets)[:, 0], 0.0)
        greatest = logits.amax(1)
        powers = logits.sub_(greatest[:, None]).exp_()
        told = shard.all_gather(torch.stack((greatest, powers.sum(1), picked)))
        most = told[:, 0].amax(0)
        total = (told[:, 1] * (told[:, 0] - most).exp()).sum(0)
        loss = torch.where(valid, most + total.log() - told[:, 2].sum(0), 0.0).sum()
        p = powers.mul_(((greatest - most).exp() / total)[:, None]) if with_grad else None
    if p is None:
        return loss, None
    grad = p.scatter_add_(1, targets, -here[:, None].to(p.dtype))
    return loss, (grad if slope is None else grad.mul_(slope)).to(hidden.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b for a `total` at least as wide as `a` and `b`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        # The product is summed in float32 and rounded once: an error of 2^-9 of each chunk's part in bfloat16.
        total += a @ b


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        starts: Sequence[int],
        chunk: int,
        chunk_fn: ChunkFn,
        with_grad: bool,
        frozen_weight: bool,
        bias: Tensor | None,
        cap: float,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        more = (bias, cap) if cap else () if bias is None else (bias,)
        if not with_grad:
            for start in starts:
                part, targets = hidden[start : start + chunk], labels[start : start + chunk]
                loss += chunk_fn(part, head_weight, targets, False, *more)[0]
            return loss
        grad_hidden = torch.empty_like(hidden)
        # A frozen head (with adapters) needs no gradient, which would be the largest of all.
        grad_weight = None if frozen_weight else torch.zeros_like(head_weight, dtype=wide)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for start in starts:
            part, targets = hidden[start : start + chunk], labels[start : start + chunk]
            ignored = (targets == IGNORE_INDEX)[:, None]
            part = part.masked_fill(ignored, 0.0)  # an ignored token adds exactly 0 to the weight's gradient
            part_loss, grad_logits = chunk_fn(part, head_weight, targets, True, *more)
            assert grad_logits is not None
            loss += part_loss
            torch.mm(grad_logits, head_weight, out=grad_hidden[start : start + chunk]).masked_fill_(ignored, 0.0)
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, part)
            if grad_bias is not None:
                grad_bias += (~ignored).T.to(grad_logits.dtype).mm(grad_logits)[0]
        ctx.weight_dtype = head_weight.dtype
        if grad_weight is not None and head_weight.dtype != torch.float16:
            # Converted at once, to free the wide one; but in float16 the sum may overflow before the loss is scaled.
            grad_weight = grad_weight.to(head_weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        # Not in place, so that a second backward pass through a retained graph sees the same values.
        weight = None
        if grad_weight is not None:
            weight = torch.mul(grad_weight, grads[0], out=torch.empty_like(grad_weight, dtype=ctx.weight_dtype))
        bias = None if grad_bias is None else (grad_bias * grads[0]).to(ctx.weight_dtype)
        return grad_hidden * grads[0], weight, None, None, None, None, None, None, bias, None


def cross_entropy_sum(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    cap: float = 0.0,
    chunk: int | None = None,
    chunk_fn: ChunkFn = _chunk,
    sizes_only: bool = False,
) -> Tensor:
    """Chunked cross-entropy: the sum over tokens of -log p(label), a scalar in float32 (float64 if `hidden` is),
    without materializing all logits.

    hidden (N, D), head_weight (V, D), labels (N,) int64, -100 ignored, bias (V,) if the head has one; `cap` (0: none)
    is a soft cap of the logits. Processes at most `chunk` tokens at a time, in equal chunks. Gradients, if needed, are
    computed in the same loop, with three matrix products per chunk (two if the weight is frozen); that of the weight is
    accumulated in float32 or better. `chunk_fn` is `_chunk` or a compiled `_chunk`. With `sizes_only`, for tensors that
    have no data, of the chunks in the middle, which all take the same memory, one is computed. Raises ValueError for a
    chunk below 1. Idea: Hsu et al., "Liger Kernel", 2024.
    """
    chunk = default_chunk(head_weight.shape[0], hidden.device) if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"cross_entropy_sum() needs a chunk of at least 1 token, got {chunk}")
    tokens = max(1, hidden.shape[0])
    equal = math.ceil(tokens / math.ceil(tokens / chunk))
    wanted = hidden.requires_grad or head_weight.requires_grad or (bias is not None and bias.requires_grad)
    frozen = not head_weight.requires_grad
    with_grad = torch.is_grad_enabled() and wanted
    starts: Sequence[int] = range(0, hidden.shape[0], equal)
    if sizes_only and len(starts) > 3:
        starts = [*starts[:2], starts[-1]]
    return _CrossEntropySum.apply(hidden, head_weight, labels, starts, equal, chunk_fn, with_grad, frozen, bias, cap)


__getattr__ = renamed.old_names(__name__)
