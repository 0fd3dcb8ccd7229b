"""Rotary frequencies and the rules that stretch them for contexts longer than those of training.

Operation by operation as Hugging Face's transformers does it, on the CPU and in float32 on every device: one unit in
the last place of a frequency is an angle error of 5e-4 at position 8192, so they must be the same numbers everywhere.
"""

import math

import torch
from torch import Tensor

from phalanx.layout.model_shape import ModelSpec, RopeScaling


def rope_frequencies(spec: ModelSpec, length: int) -> tuple[Tensor, float]:
    """Angle per position of each pair of channels, float32 (head_dim / 2), and the factor of cosines and sines.

    `length` is that of the sequence, which only the `dynamic` rule looks at.
    """
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
