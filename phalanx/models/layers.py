"""The layers that models are made of: norm, rotary positions, and a cross entropy that never holds the full logits.

No layer has a buffer: nothing can be lost or garbled when a model built on the meta device is filled.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.spec import ModelSpec, RopeScaling

IGNORED = -100  # a label that counts for nothing
_CHUNK_BYTES_CPU = 4 << 20  # a chunk's logits stay in the cache: measured fastest of 2 to 64 MiB
_CHUNK_BYTES_ACCELERATOR = 512 << 20  # few large matrix products, since each one also reads and writes all of dW

ChunkFn = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, the root mean square in float32 or better, whatever dtype `x` has.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; rounding as in Hugging Face's Llama.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


def rope_table(spec: ModelSpec, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the rotary angles of positions 0 .. length - 1, float32 (length, head_dim / 2) each.

    Source: Su et al., "RoFormer", 2021; half-split channel order as in Hugging Face's Llama.
    """
    # Always on the CPU and in float32, operation by operation as Hugging Face does it: one unit in the last place of
    # a frequency is an angle error of 5e-4 at position 8192, so frequencies must be the same numbers everywhere.
    exponents = torch.arange(0, spec.head_dim, 2, device="cpu").float() / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    if spec.rope_scaling is not None:
        frequencies = _scale_frequencies(frequencies, spec.rope_scaling)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * frequencies.to(device, non_blocking=True)
    return angles.cos(), angles.sin()


def _scale_frequencies(frequencies: Tensor, rule: RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    turns = rule.original_max_seq_len / wavelengths
    share = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    blended = (1 - share) * frequencies / rule.factor + share * frequencies
    long = wavelengths > rule.original_max_seq_len / rule.low_freq_factor
    short = wavelengths < rule.original_max_seq_len / rule.high_freq_factor
    return torch.where(long, frequencies / rule.factor, torch.where(short, frequencies, blended))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns x (B, S, heads, head_dim) by the angles (S, head_dim / 2), in float32 or better; same shape and dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cosines = torch.cat((cos, cos), dim=-1)[:, None]
    signed_sines = torch.cat((-sin, sin), dim=-1)[:, None]
    return (wide * cosines + wide.roll(x.shape[-1] // 2, -1) * signed_sines).to(x.dtype)


def cross_entropy_sum_plain(hidden: Tensor, head_weight: Tensor, labels: Tensor) -> Tensor:
    """What `cross_entropy_sum` means, in one line of PyTorch that holds all the logits."""
    logits = hidden @ head_weight.T
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")


def default_chunk(vocab_size: int, device: torch.device) -> int:
    """Tokens per chunk of `cross_entropy_sum`."""
    if device.type == "cpu":
        return max(128, _CHUNK_BYTES_CPU // (4 * vocab_size))
    return max(1024, _CHUNK_BYTES_ACCELERATOR // (4 * vocab_size))


def _chunk(hidden: Tensor, head_weight: Tensor, labels: Tensor, with_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Loss sum of a few tokens and, if asked, its gradient to their logits in the dtype of `hidden`.

    A row whose label is ignored adds nothing to the loss; its gradient is meaningless, and the caller masks it where
    that is cheap (in the width of the model instead of the vocabulary).
    """
    valid = labels != IGNORED
    targets = torch.where(valid, labels, 0)[:, None]
    logits = hidden @ head_weight.T
    log_p = torch.log_softmax(logits, -1, dtype=torch.promote_types(hidden.dtype, torch.float32))
    loss = -torch.where(valid, log_p.gather(1, targets)[:, 0], 0.0).sum()
    if not with_grad:
        return loss, None
    if torch.compiler.is_compiling():  # a comparison fuses with the exponential; a scatter would not
        hit = torch.arange(log_p.shape[1], device=log_p.device) == targets
        return loss, (log_p.exp() - hit.to(log_p.dtype)).to(hidden.dtype)
    grad = log_p.exp_().scatter_add_(1, targets, log_p.new_full(targets.shape, -1.0))
    return loss, grad.to(hidden.dtype)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, labels: Tensor, chunk: int, chunk_fn: ChunkFn, with_grad: bool
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        starts = range(0, hidden.shape[0], chunk)
        if not with_grad:
            for start in starts:
                loss += chunk_fn(hidden[start : start + chunk], head_weight, labels[start : start + chunk], False)[0]
            return loss
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(head_weight, dtype=wide)
        for start in starts:
            part, targets = hidden[start : start + chunk], labels[start : start + chunk]
            ignored = (targets == IGNORED)[:, None]
            part = part.masked_fill(ignored, 0.0)  # an ignored token adds exactly nothing to the weight's gradient
            part_loss, grad_logits = chunk_fn(part, head_weight, targets, True)
            assert grad_logits is not None
            loss += part_loss
            torch.mm(grad_logits, head_weight, out=grad_hidden[start : start + chunk]).masked_fill_(ignored, 0.0)
            if wide == hidden.dtype:
                grad_weight.addmm_(grad_logits.T, part)
            else:
                grad_weight += grad_logits.T @ part
        ctx.save_for_backward(grad_hidden, grad_weight.to(head_weight.dtype))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # Not in place, although it would save memory: a second backward through a retained graph must see the same.
        return grad_hidden * grads[0], grad_weight * grads[0], None, None, None, None


def cross_entropy_sum(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, *, chunk: int | None = None, chunk_fn: ChunkFn = _chunk
) -> Tensor:
    """Sum over tokens of -log p(label), a scalar in float32 (float64 if `hidden` is), without ever holding all logits.

    hidden (N, D), head_weight (V, D), labels (N,) int64, -100 ignored. Works through `chunk` tokens at a time (at most;
    chunks are made equal). If gradients are wanted they are computed in the same loop, three matrix products per chunk,
    the weight's accumulated in float32 or better; without, only the loss is. `chunk_fn` is `_chunk` or a compiled
    `_chunk`. Raises ValueError for a chunk below 1. Idea: Hsu et al., "Liger Kernel", 2024.
    """
    chunk = default_chunk(head_weight.shape[0], hidden.device) if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"cross_entropy_sum() needs a chunk of at least 1 token, got {chunk}")
    tokens = max(1, hidden.shape[0])
    equal = math.ceil(tokens / math.ceil(tokens / chunk))
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    return _CrossEntropySum.apply(hidden, head_weight, labels, equal, chunk_fn, with_grad)
