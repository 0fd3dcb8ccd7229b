"""Rotary position embeddings (RoPE): frequencies by the scaling rules of transformers, and their application.

Source: Su et al., "RoFormer", 2021.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.layout.model_shape import LONGROPE, ModelSpec, RopeScaling
from phalanx.models.families.catalog import block_options

# Rotary frequencies are computed by the same operations as in transformers, on the CPU and in float32 for every device:
# one unit in the last place of a frequency is an angle error of 5e-4 at position 8192.


def count_turned_channels(spec: ModelSpec) -> int:
    """The number of channels of a head with rotary positions."""
    return int(spec.head_dim * block_options(spec).rotary_share + 1e-6)


def rope_frequencies(spec: ModelSpec, length: int, windowed: bool = False) -> tuple[Tensor, float]:
    """Rotary frequencies: the angle per position of each rotated pair of channels, float32 (rotated channels / 2,), and
    the factor of cosines and sines.

    `length` is that of the sequence, used by the rules `dynamic` and `longrope` only. `windowed`: for a layer with a
    window.
    """
    if windowed and spec.block.window_rope_theta is not None:
        spec = replace(spec, rope_theta=spec.block.window_rope_theta, rope_scaling=None)
    rule = spec.rope_scaling
    spec = replace(spec, head_dim=count_turned_channels(spec))
    exponents = torch.arange(0, spec.head_dim, 2, device="cpu").float() / max(1, spec.head_dim)
    base = spec.rope_theta
    if rule is not None and rule.rule == "dynamic":
        base = _dynamic_base(spec, rule.factor, length)
    periods = base**exponents
    frequencies = 1.0 / periods
    if rule is None or rule.rule == "dynamic":
        return frequencies, 1.0
    if rule.rule == LONGROPE:
        factors = rule.long_factors if length > rule.original_max_seq_len else rule.short_factors
        return 1.0 / (torch.tensor(factors, device="cpu").float() * periods), longrope_attention_factor(rule)
    if rule.rule == "linear":
        return frequencies / rule.factor, 1.0
    if rule.rule == "yarn":
        return _yarn(spec, rule, periods), yarn_attention_factor(rule)
    return _llama3(frequencies, rule), 1.0


def _dynamic_base(spec: ModelSpec, factor: float, length: int) -> float:
    """The "NTK-aware" base for a sequence longer than `max_seq_len`; the model's base for shorter ones."""
    growth = factor * max(length, spec.max_seq_len) / spec.max_seq_len - (factor - 1)
    return spec.rope_theta * growth ** (spec.head_dim / (spec.head_dim - 2))


def _llama3(frequencies: Tensor, rule: RopeScaling) -> Tensor:
    """Llama 3 scaling: low frequencies are scaled, high ones kept, those between blended. Source: the Llama 3.1
    release."""
    wavelengths = 2 * math.pi / frequencies
    turns = rule.original_max_seq_len / wavelengths
    share = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    blended = (1 - share) * frequencies / rule.factor + share * frequencies
    long = wavelengths > rule.original_max_seq_len / rule.low_freq_factor
    short = wavelengths < rule.original_max_seq_len / rule.high_freq_factor
    return torch.where(long, frequencies / rule.factor, torch.where(short, frequencies, blended))


def _yarn(spec: ModelSpec, rule: RopeScaling, periods: Tensor) -> Tensor:
    """YaRN scaling: a ramp from kept to scaled frequencies between two numbers of rotations (Peng et al., "YaRN",
    2023)."""

    def channel(turns: float) -> float:
        """The pair of channels with this number of rotations within the original context."""
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
    """YaRN's factor of cosines and sines, which keeps attention as sharp over more positions."""

    def sharpening(weight: float) -> float:
        return 1.0 if rule.factor <= 1 else 0.1 * weight * math.log(rule.factor) + 1.0

    if rule.attention_factor is not None:
        return rule.attention_factor
    if rule.mscale and rule.mscale_all_dim:
        return sharpening(rule.mscale) / sharpening(rule.mscale_all_dim)
    return sharpening(1.0)


def longrope_attention_factor(rule: RopeScaling) -> float:
    """LongRoPE's factor of cosines and sines (Ding et al., "LongRoPE", 2024)."""
    if rule.attention_factor is not None:
        return rule.attention_factor
    return 1.0 if rule.factor <= 1 else math.sqrt(1 + math.log(rule.factor) / math.log(rule.original_max_seq_len))


def rope_table(
    spec: ModelSpec, positions: Tensor, windowed: bool = False, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rotary tables: (cos, sin) of the angles at `positions` int64 (...), float32 (..., rotated channels / 2) each.

    The last dim of `positions` is a row of tokens, or part of one of `length` tokens, which the rules `dynamic` and
    `longrope` use.
    """
    frequencies, scale = rope_frequencies(spec, positions.shape[-1] if length is None else length, windowed)
    angles = positions[..., None].float() * frequencies.to(positions.device, non_blocking=True)
    return angles.cos() * scale, angles.sin() * scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool = False) -> Tensor:
    """Apply rotary positions to the first channels of x (B, S, heads, head_dim), by tables (S, rotated / 2) or (B, S,
    rotated / 2), in float32 or better. Channel i is rotated with channel i + rotated / 2, or with `pairs` with its
    neighbour.

    Returns the same shape and dtype.
    """
    turned = 2 * cos.shape[-1]
    if turned == 0:
        return x
    if turned < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :turned], cos, sin, pairs), x[..., turned:]), dim=-1)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if pairs:
        even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
    cosines = torch.cat((cos, cos), dim=-1).unsqueeze(-2)
    signed_sines = torch.cat((-sin, sin), dim=-1).unsqueeze(-2)
    return (wide * cosines + wide.roll(x.shape[-1] // 2, -1) * signed_sines).to(x.dtype)
