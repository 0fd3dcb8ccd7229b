"""Rotary positions in a config.json: their base, their scaling, and the share of a head's channels that is rotated. No
torch here."""

import json
import math
from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import LONGROPE, ROPE_RULES, ModelSpec, RopeScaling
from phalanx.models.families.family import read_count, read_flag, read_number, shorten

WHOLE_HEADS = (1, 1.0, None)  # of partial_rotary_factor: all channels are rotated
# Rules of transformers by which rotary positions are scaled, where a family reads them as Llama does.
_LONGROPE_NAMES = (LONGROPE, "su")  # the second by Phi-3's first files
HF_ROPE_RULES = ("linear", "dynamic", "yarn", "llama3")


def read_rope(
    config: Mapping[str, Any], where: str, partial: bool = False, longrope: bool = False
) -> tuple[float, RopeScaling | None]:
    """Read the base of rotary frequencies and their scaling; `partial`: a share of the channels may be rotated (see
    `read_rotary_share`); `longrope`: the family has this rule. Raises ConfigError for unsupported rules."""
    # transformers 4 has rope_theta beside an optional rope_scaling; 5 has both in rope_parameters.
    rule = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rule, dict):
        raise ConfigError(
            f"{where} sets rope_scaling to {json.dumps(rule)}, which is no JSON object; give null or a rule."
        )
    if any(isinstance(value, dict) for value in rule.values()):
        raise ConfigError(
            f"{where} gives each kind of layer different rotary positions, which is not supported and would change "
            "the model's output; use a model with one rule for all."
        )
    if not partial and rule.get("partial_rotary_factor") not in WHOLE_HEADS:
        raise ConfigError(
            f"{where} sets partial_rotary_factor: {json.dumps(rule['partial_rotary_factor'])}, which is not supported "
            "and would change the model's output; use a model that turns all channels."
        )
    theta = read_number(rule, "rope_theta", where, read_number(config, "rope_theta", where, 10000.0))
    kind = str(rule.get("rope_type") or rule.get("type") or "default")
    if kind == "default":
        return theta, None
    if longrope and kind in _LONGROPE_NAMES:
        return theta, _read_longrope(config, rule, where)
    if kind not in ROPE_RULES:
        raise ConfigError(
            f"{where} scales rotary positions by the rule {kind!r}, which is not supported and would change the "
            f"model's output; use a model with one of the supported rules: default, {', '.join(ROPE_RULES)}."
        )
    if kind in ("linear", "dynamic"):
        return theta, RopeScaling(rule=kind, factor=read_number(rule, "factor", where))
    longest = read_count(config, "max_position_embeddings", where, 2048)
    original = read_count(config, "original_max_position_embeddings", where, 0) or read_count(
        rule, "original_max_position_embeddings", where, longest
    )
    if kind == "llama3":
        return theta, RopeScaling(
            factor=read_number(rule, "factor", where),
            low_freq_factor=read_number(rule, "low_freq_factor", where),
            high_freq_factor=read_number(rule, "high_freq_factor", where),
            original_max_seq_len=original,
        )
    names = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if rule.get(name) is not None]
    extras: dict[str, Any] = {name: read_number(rule, name, where) for name in names}
    return theta, RopeScaling(
        rule=kind,
        factor=read_number(rule, "factor", where, longest / max(1, original)),
        original_max_seq_len=original,
        beta_fast=read_number(rule, "beta_fast", where, 32.0) or 32.0,  # transformers treats 0 as not set
        beta_slow=read_number(rule, "beta_slow", where, 1.0) or 1.0,
        truncate=read_flag(rule, "truncate", where, True),
        **extras,
    )


def _read_longrope(config: Mapping[str, Any], rule: Mapping[str, Any], where: str) -> RopeScaling:
    longest = read_count(config, "max_position_embeddings", where, 4096)
    beside = read_count(config, "original_max_position_embeddings", where, longest)
    original = read_count(rule, "original_max_position_embeddings", where, beside)
    factor = longest / max(1, original) if rule.get("factor") is None else read_number(rule, "factor", where)
    return RopeScaling(
        rule=LONGROPE,
        factor=factor,
        original_max_seq_len=original,
        attention_factor=None if rule.get("attention_factor") is None else read_number(rule, "attention_factor", where),
        short_factors=_read_factors(rule, "short_factor", where),
        long_factors=_read_factors(rule, "long_factor", where),
    )


def _read_factors(rule: Mapping[str, Any], name: str, where: str) -> tuple[float, ...]:
    found, numbers = rule.get(name), list[float]()
    for each in found if isinstance(found, list) else [None]:
        if isinstance(each, bool) or not isinstance(each, int | float) or not 0 < each < math.inf:
            raise ConfigError(f"{where} sets {name} to {shorten(found)}, which is no list of numbers above 0; set one.")
        numbers.append(float(each))
    return tuple(numbers)


def read_rotary_share(config: Mapping[str, Any], key: str, where: str, default: float) -> float:
    """Read the share of a head's channels that are rotated, from `key` or in the form of transformers 5. Raises
    ConfigError unless it is within 0 to 1."""
    rule = config.get("rope_parameters") or config.get("rope_scaling")
    told = rule.get("partial_rotary_factor") if isinstance(rule, dict) else None
    share = read_number({key: told}, key, where, read_number(config, key, where, default))
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"{where} sets {key} to {share:g}, which is no share of a head's channels; give 0 to 1.")
    return float(share)


def write_rotary(spec: ModelSpec) -> dict[str, Any]:
    """Write the keys of rotary positions: transformers 4 reads the first two, 5 the third, and they agree."""
    rule = write_rope(spec.rope_scaling)
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if spec.rope_scaling is None else rule,
        "rope_parameters": {**rule, "rope_theta": spec.rope_theta},
    }


def write_rope(scaling: RopeScaling | None) -> dict[str, Any]:
    """Write the rule of rotary scaling, without the base."""
    if scaling is None:
        return {"rope_type": "default"}
    rule: dict[str, Any] = {"rope_type": scaling.rule, "factor": scaling.factor}
    if scaling.rule == "llama3":
        rule |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.rule == "yarn":
        rule |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        extras = {name: getattr(scaling, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        rule |= {name: float(value) for name, value in extras.items() if value is not None}
    if scaling.rule == LONGROPE:
        rule |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
        rule |= {} if scaling.attention_factor is None else {"attention_factor": float(scaling.attention_factor)}
    if scaling.rule in ("llama3", "yarn", LONGROPE):
        rule["original_max_position_embeddings"] = scaling.original_max_seq_len
    return rule
