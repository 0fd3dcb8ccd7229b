"""The layers that models are made of: embedding, norm, rotary positions, and a chunked cross entropy.

No layer has a buffer: nothing can be lost or garbled when a model built on the meta device is filled.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core import renamed
from phalanx.layout.model_shape import ModelSpec, RopeScaling
from phalanx.models.counter_rng import CounterRNG

IGNORE_INDEX = -100  # a label that counts for nothing
_CHUNK_BYTES_CPU = 4 << 20  # a chunk's logits stay in the cache: measured fastest of 2 to 64 MiB
_CHUNK_TOKENS_CPU = 512  # fewer make products too thin: at a vocabulary of 32,768 a tenth slower with 128
# On an accelerator each chunk also reads and writes all of dW in float32. Per element of dW that is 8 bytes, 2.4 ps at
# 3.3 TB/s, against 6 FLOP for each token of the chunk, 10 ps for 1,000 tokens at 600 TFLOP/s: a quarter more for 1,000
# tokens, 6 % for 4,096. So at least 4,096 tokens, unless their logits outgrow 2 GiB (4,096 x 128,256 x 4 bytes are
# 2.1 GB, just inside). By arithmetic with the figures of an H100, not measured.
_CHUNK_BYTES_ACCELERATOR = 512 << 20
_CHUNK_TOKENS_ACCELERATOR = 4096
_CHUNK_BYTES_MAX = 2 << 30

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
        """As nn.Embedding; on meta, where there are no values, nothing: torch would import torch._dynamo for it."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """tokens (...) int64 -> (..., width) in the dtype of the weight."""
        if self.weight.device.type == "cpu" and self.weight.dtype in (torch.bfloat16, torch.float16):
            return _WideLookUp.apply(self.weight, input)
        return super().forward(input)


class Linear(nn.Linear):
    """nn.Linear that may be handed dropout's draws, as one with an adapter is (lora.py), and has no use for them."""

    def reset_parameters(self) -> None:
        """As nn.Linear; on meta nothing, as of `Embedding`."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor, draws: CounterRNG | None = None, site: Tensor | None = None) -> Tensor:
        """input (..., in) -> (..., out)."""
        return super().forward(input)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, the root mean square in float32 or better, whatever dtype `x` has; with
    `unit_offset` by 1 + weight, and rounded once.

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
        """As `forward`, with another weight."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.unit_offset:
            return (wide * scale * (1.0 + weight.to(wide.dtype))).to(x.dtype)
        return weight * (wide * scale).to(x.dtype)


# Rotary frequencies are computed operation by operation as transformers does it, on the CPU and in float32 on every
# device: one unit in the last place of a frequency is an angle error of 5e-4 at position 8192.


def rope_frequencies(spec: ModelSpec, length: int, windowed: bool = False) -> tuple[Tensor, float]:
    """Angle per position of each pair of channels, float32 (head_dim / 2), and the factor of cosines and sines.

    `length` is that of the sequence, which only the `dynamic` rule looks at. `windowed`: of a layer with a window.
    """
    if windowed and spec.attention.window_rope_theta is not None:
        spec = replace(spec, rope_theta=spec.attention.window_rope_theta, rope_scaling=None)
    rule = spec.rope_scaling
    exponents = torch.arange(0, spec.head_dim, 2, device="cpu").float() / spec.head_dim
    base = spec.rope_theta
    if rule is not None and rule.rule == "dynamic":
        base = _dynamic_base(spec, rule.factor, length)
    periods = base**exponents
    frequencies = 1.0 / periods
    if rule is None or rule.rule == "dynamic":
        return frequencies, 1.0
    if rule.rule == "linear":
        return frequencies / rule.factor, 1.0
    if rule.rule == "yarn":
        return _yarn(spec, rule, periods), yarn_attention_factor(rule)
    return _llama3(frequencies, rule), 1.0


def _dynamic_base(spec: ModelSpec, factor: float, length: int) -> float:
    """The base at which a sequence beyond `max_seq_len` still fits; the model's own up to there ("NTK-aware")."""
    growth = factor * max(length, spec.max_seq_len) / spec.max_seq_len - (factor - 1)
    return spec.rope_theta * growth ** (spec.head_dim / (spec.head_dim - 2))


def _llama3(frequencies: Tensor, rule: RopeScaling) -> Tensor:
    """Long waves are slowed, short ones kept, those between blended. Source: the Llama 3.1 release."""
    wavelengths = 2 * math.pi / frequencies
    turns = rule.original_max_seq_len / wavelengths
    share = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    blended = (1 - share) * frequencies / rule.factor + share * frequencies
    long = wavelengths > rule.original_max_seq_len / rule.low_freq_factor
    short = wavelengths < rule.original_max_seq_len / rule.high_freq_factor
    return torch.where(long, frequencies / rule.factor, torch.where(short, frequencies, blended))


def _yarn(spec: ModelSpec, rule: RopeScaling, periods: Tensor) -> Tensor:
    """A ramp from kept to slowed frequencies between two numbers of turns (Peng et al., "YaRN", 2023)."""

    def channel(turns: float) -> float:
        """The pair of channels that turns so often within the original context."""
        reach = math.log(rule.original_max_seq_len / (turns * 2 * math.pi))
        return (spec.head_dim * reach) / (2 * math.log(spec.rope_theta))

    low, high = channel(rule.beta_fast), channel(rule.beta_slow)
    if rule.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(spec.head_dim // 2, device="cpu").float() - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rule.factor * periods) * (1 - kept) + 1.0 / periods * kept


def yarn_attention_factor(rule: RopeScaling) -> float:
    """What yarn multiplies cosines and sines by, so that attention stays as sharp over more positions."""

    def sharpening(weight: float) -> float:
        return 1.0 if rule.factor <= 1 else 0.1 * weight * math.log(rule.factor) + 1.0

    if rule.attention_factor is not None:
        return rule.attention_factor
    if rule.mscale and rule.mscale_all_dim:
        return sharpening(rule.mscale) / sharpening(rule.mscale_all_dim)
    return sharpening(1.0)


def rope_table(spec: ModelSpec, positions: Tensor, windowed: bool = False) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the rotary angles at `positions` int64 (...), float32 (..., head_dim / 2) each.

    The last dim of `positions` is a row of tokens: its length is what the `dynamic` rule goes by. Source: Su et al.,
    "RoFormer", 2021; half-split channel order as in Hugging Face's Llama.
    """
    frequencies, scale = rope_frequencies(spec, positions.shape[-1], windowed)
    angles = positions[..., None].float() * frequencies.to(positions.device, non_blocking=True)
    return angles.cos() * scale, angles.sin() * scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns x (B, S, heads, head_dim) by the angles (S, head_dim / 2) or (B, S, head_dim / 2), in float32 or better.

    Returns the same shape and dtype.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cosines = torch.cat((cos, cos), dim=-1).unsqueeze(-2)
    signed_sines = torch.cat((-sin, sin), dim=-1).unsqueeze(-2)
    return (wide * cosines + wide.roll(x.shape[-1] // 2, -1) * signed_sines).to(x.dtype)


def reference_cross_entropy_sum(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, bias: Tensor | None = None
) -> Tensor:
    """What `cross_entropy_sum` means, with all the logits at once."""
    return sum_logit_losses(F.linear(hidden, head_weight, bias), labels)


def sum_logit_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of cross-entropies of logits (..., C) over the labels (...) that count, in float32 or better; exactly 0 where
    none does."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def default_chunk(vocab_size: int, device: torch.device) -> int:
    """Tokens per chunk of `cross_entropy_sum`."""
    if device.type == "cpu":
        return max(_CHUNK_TOKENS_CPU, _CHUNK_BYTES_CPU // (4 * vocab_size))
    enough = min(_CHUNK_TOKENS_ACCELERATOR, _CHUNK_BYTES_MAX // (4 * vocab_size))
    return max(1, enough, _CHUNK_BYTES_ACCELERATOR // (4 * vocab_size))


def chunk_bytes(vocab_size: int, device: torch.device, dtype: torch.dtype) -> int:
    """What `cross_entropy_sum` holds of one chunk at its height: logits, their logarithms in float32 or better, and the
    gradient to the logits."""
    wide = torch.promote_types(dtype, torch.float32)
    return default_chunk(vocab_size, device) * vocab_size * (2 * dtype.itemsize + wide.itemsize)


@dataclass(frozen=True)
class VocabShard:
    """Rows of a head from `first` on, where other ranks hold the others; `all_gather` stacks what all of them have."""

    first: int
    all_gather: Callable[[Tensor], Tensor]


def _chunk(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    with_grad: bool,
    bias: Tensor | None = None,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Loss sum of a few tokens and, if asked, its gradient to their logits in the dtype of `hidden`.

    A row whose label is ignored adds nothing to the loss; its gradient is meaningless, and the caller masks it where
    that is cheap (in the width of the model instead of the vocabulary). Of a `shard` of the vocabulary the loss is the
    same on all ranks, the gradient that to a rank's own logits; three numbers for each token and rank are gathered.
    """
    valid = labels != IGNORE_INDEX
    at = labels if shard is None else labels - shard.first
    here = valid if shard is None else valid & (at >= 0) & (at < head_weight.shape[0])
    targets = torch.where(here, at, 0)[:, None]
    logits, wide = F.linear(hidden, head_weight, bias), torch.promote_types(hidden.dtype, torch.float32)
    if shard is None:
        log_p = torch.log_softmax(logits, -1, dtype=wide)
        loss = -torch.where(valid, log_p.gather(1, targets)[:, 0], 0.0).sum()
        if with_grad and torch.compiler.is_compiling():  # a comparison fuses with the exponential; a scatter would not
            hit = torch.arange(log_p.shape[1], device=log_p.device) == targets
            return loss, (log_p.exp() - hit.to(log_p.dtype)).to(hidden.dtype)
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
    return loss, p.scatter_add_(1, targets, -here[:, None].to(p.dtype)).to(hidden.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b for a `total` at least as wide as `a` and `b`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        # The product is summed in float32 and rounded once: 2^-9 of each chunk's part in bfloat16, however many chunks.
        total += a @ b


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        chunk: int,
        chunk_fn: ChunkFn,
        with_grad: bool,
        frozen_weight: bool,
        bias: Tensor | None,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        starts = range(0, hidden.shape[0], chunk)
        biases = () if bias is None else (bias,)
        if not with_grad:
            for start in starts:
                part, targets = hidden[start : start + chunk], labels[start : start + chunk]
                loss += chunk_fn(part, head_weight, targets, False, *biases)[0]
            return loss
        grad_hidden = torch.empty_like(hidden)
        # A frozen head (under adapters) needs none: the largest of all gradients.
        grad_weight = None if frozen_weight else torch.zeros_like(head_weight, dtype=wide)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for start in starts:
            part, targets = hidden[start : start + chunk], labels[start : start + chunk]
            ignored = (targets == IGNORE_INDEX)[:, None]
            part = part.masked_fill(ignored, 0.0)  # an ignored token adds exactly nothing to the weight's gradient
            part_loss, grad_logits = chunk_fn(part, head_weight, targets, True, *biases)
            assert grad_logits is not None
            loss += part_loss
            torch.mm(grad_logits, head_weight, out=grad_hidden[start : start + chunk]).masked_fill_(ignored, 0.0)
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, part)
            if grad_bias is not None:
                grad_bias += (~ignored).T.to(grad_logits.dtype).mm(grad_logits)[0]
        ctx.weight_dtype = head_weight.dtype
        if grad_weight is not None and head_weight.dtype != torch.float16:
            # Narrowed at once, to free the wide one; but a sum may leave float16's range until the loss is scaled.
            grad_weight = grad_weight.to(head_weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        # Not in place, although it would save memory: a second backward through a retained graph must see the same.
        weight = None
        if grad_weight is not None:
            weight = torch.mul(grad_weight, grads[0], out=torch.empty_like(grad_weight, dtype=ctx.weight_dtype))
        bias = None if grad_bias is None else (grad_bias * grads[0]).to(ctx.weight_dtype)
        return grad_hidden * grads[0], weight, None, None, None, None, None, bias


def cross_entropy_sum(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int | None = None,
    chunk_fn: ChunkFn = _chunk,
) -> Tensor:
    """Sum over tokens of -log p(label), a scalar in float32 (float64 if `hidden` is), without ever holding all logits.

    hidden (N, D), head_weight (V, D), labels (N,) int64, -100 ignored, bias (V,) if the head has one. Works through
    `chunk` tokens at a time (at most; chunks are made equal). If gradients are wanted they are computed in the same
    loop, three matrix products per chunk (two where the weight is frozen), the weight's accumulated in float32 or
    better; without, only the loss is. `chunk_fn` is `_chunk` or a compiled `_chunk`. Raises ValueError for a chunk
    below 1. Idea: Hsu et al., "Liger Kernel", 2024.
    """
    chunk = default_chunk(head_weight.shape[0], hidden.device) if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"cross_entropy_sum() needs a chunk of at least 1 token, got {chunk}")
    tokens = max(1, hidden.shape[0])
    equal = math.ceil(tokens / math.ceil(tokens / chunk))
    wanted = hidden.requires_grad or head_weight.requires_grad or (bias is not None and bias.requires_grad)
    frozen = not head_weight.requires_grad
    with_grad = torch.is_grad_enabled() and wanted
    return _CrossEntropySum.apply(hidden, head_weight, labels, equal, chunk_fn, with_grad, frozen, bias)


__getattr__ = renamed.old_names(__name__)
