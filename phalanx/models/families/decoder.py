"""Common parts of decoder families: parameter names, shapes, FLOPs, and reading and writing config.json.

The network of all decoders is `models/llama.py`, by the family's BlockOptions. No torch here.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import LONGROPE, MAX_LAYERS, ROPE_RULES, ModelSpec, RopeScaling, Shapes
from phalanx.models.families.family import (
    KEYS,
    POSITIONS,
    BlockOptions,
    count_adapter_elements,
    count_elements,
    read_count,
    read_flag,
    read_number,
)

# Our name -> the name in a Hugging Face folder; {i} is the layer.
HF_NAMES: dict[str, str] = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.q.bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.attention.k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.k.bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.attention.v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.v.bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.attention.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attention.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.attention.o.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.attention.o.bias": "model.layers.{i}.self_attn.o_proj.bias",
    "layers.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.gate.bias": "model.layers.{i}.mlp.gate_proj.bias",
    "layers.{i}.mlp.up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.up.bias": "model.layers.{i}.mlp.up_proj.bias",
    "layers.{i}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.mlp.down.bias": "model.layers.{i}.mlp.down_proj.bias",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
# How the matrix of a module, of a block or outside of them, is cut over ranks (layout/tensor_shards.py).
TENSOR_PLAN: dict[str, str] = {
    "embed": "vocabulary",
    "attention.q": "column",
    "attention.k": "column_kv",
    "attention.v": "column_kv",
    "attention.o": "row",
    "mlp.gate": "column",
    "mlp.up": "column",
    "mlp.down": "row",
    "head": "vocabulary",
}
# As HuggingFaceMapping.accepted, of all decoders.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "attention_dropout": (0, 0.0, None),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, 1.0, None),
}
# Hugging Face's name of an activation -> ours.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}  # transformers' words, and if there is a window
PLAIN_PLAN = {module: kind for module, kind in TENSOR_PLAN.items() if module != "mlp.gate"}  # without a gate
DECODER_KEYS = KEYS | {
    "norm_eps": ("rms_norm_eps", read_number, 1e-6),
    "tie_embeddings": ("tie_word_embeddings", read_flag, False),
}


def decoder_shapes(spec: ModelSpec, options: BlockOptions) -> Shapes:
    """Parameter shapes of a decoder, in order of use in the forward pass; a tied head has no separate entry."""
    queries, keys, inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate

    def linear(name: str, out: int, width: int, bias: bool) -> Shapes:
        return {f"{name}.weight": (out, width)} | ({f"{name}.bias": (out,)} if bias else {})

    def norm(name: str, wanted: bool, width: int = spec.hidden) -> Shapes:
        both = ("weight", "bias") if options.norm == "layer" else ("weight",)
        return {f"{name}.{each}": (width,) for each in both} if wanted else {}

    own = options.pre_norms and not options.shared_norm
    block = norm("norm", options.shared_norm) | norm("attention_norm", own)
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        block |= linear(f"attention.{name}", width, spec.hidden, options.qkv_bias)
    for name, width in (("q", queries), ("k", keys)):
        over = width if options.qk_norm == "whole" else spec.head_dim
        block |= norm(f"attention.{name}_norm", bool(options.qk_norm), over)
    if options.sinks:
        block["attention.sinks"] = (spec.heads,)
    block |= linear("attention.o", spec.hidden, queries, options.o_bias)
    block |= norm("attention_post_norm", options.post_norms) | norm("mlp_norm", own)
    for name in ("gate", "up") if options.gated else ("up",):
        block |= linear(f"mlp.{name}", inner, spec.hidden, options.mlp_bias)
    block |= linear("mlp.down", spec.hidden, inner, options.mlp_bias) | norm("mlp_post_norm", options.post_norms)

    shapes: Shapes = {"embed.weight": (spec.vocab_size, spec.embedding_width)}
    projected = spec.embedding_width != spec.hidden
    if projected:
        shapes["embed.project.weight"] = (spec.hidden, spec.embedding_width)
    if options.position_offset is not None:
        shapes[POSITIONS] = (spec.max_seq_len + options.position_offset, spec.hidden)
    for layer in range(spec.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= norm("head.norm", not options.norm_sums)
    if projected:
        shapes["head.project.weight"] = (spec.embedding_width, spec.hidden)
    if not spec.tie_embeddings:
        shapes["head.weight"] = (spec.vocab_size, spec.embedding_width)
    return shapes | ({"head.bias": (spec.vocab_size,)} if options.head == "bias" else {})


def decoder_flops(spec: ModelSpec, seq_len: int, shapes: Shapes) -> tuple[int, int]:
    """FLOPs per token of a decoder (see `catalog.flops_per_token`), with causal attention and windows."""
    each = 6 if spec.lora is None else 4
    weights = each * count_elements(spec, shapes, embedding=False) + 6 * count_adapter_elements(spec, shapes)
    per_pair = 12 * spec.heads * spec.head_dim
    seen = 0
    for layer in range(spec.layers):
        window = spec.window_of(layer)
        if window is None or window >= seq_len:
            seen += seq_len * seq_len // 2
        else:
            seen += window * window // 2 + (seq_len - window) * window
    return weights + per_pair * spec.layers * seq_len, weights + per_pair * seen // seq_len


def find_width_problems(spec: ModelSpec, title: str) -> list[str]:
    """Problems of a shape whose width the heads do not divide, which transformers refuses for the family `title`."""
    if spec.heads < 1 or spec.hidden % spec.heads == 0:
        return []
    return [
        f"model.hidden is {spec.hidden} and model.heads is {spec.heads}, a shape that Hugging Face's {title} refuses "
        "and no export could be loaded; set model.hidden to a multiple of model.heads."
    ]


# Rules of transformers by which rotary positions are scaled, where a family reads them as Llama does.
_LONGROPE_NAMES = (LONGROPE, "su")  # the second by Phi-3's first files
HF_ROPE_RULES = ("linear", "dynamic", "yarn", "llama3")


def find_misfits(
    spec: ModelSpec, title: str, *, window: bool = False, grouped: bool = False, rules: tuple[str, ...] = (),
    any_width: bool = False, any_theta: bool = True,
) -> list[str]:  # fmt: skip
    """What config.json of the family `title` cannot express: a window, grouped queries, rotary scaling but by `rules`,
    without `any_theta` another rotary base; and without `any_width` heads that do not divide the width."""
    scaling, found = spec.rope_scaling, list[tuple[str, object, str]]()
    if not window and spec.sliding_window is not None and spec.sliding_window >= 1:
        found.append(("sliding_window", spec.sliding_window, "remove it"))
    if not grouped and spec.kv_heads != spec.heads:
        found.append(("kv_heads", spec.kv_heads, f"set it to model.heads, {spec.heads}"))
    if scaling is not None and scaling.rule not in rules:
        found.append(("rope_scaling.rule", scaling.rule, f"use {' or '.join(rules)}" if rules else "remove it"))
    if not any_theta and spec.rope_theta != ModelSpec.rope_theta:
        found.append(("rope_theta", f"{spec.rope_theta:g}", "remove it"))
    if not any_width and spec.heads >= 1 and spec.head_dim * spec.heads != spec.hidden:
        found.append(("head_dim", spec.head_dim, "remove it, and set model.hidden to a multiple of model.heads"))
    return [
        f"model.{key} is {value}, which {title} does not support, so it could not be exported; {remedy}."
        for key, value, remedy in found
    ]


# ------------------------------------------------------------------------------------------------------ config.json, in


def read_decoder(
    config: dict[str, Any], fields: dict[str, Any], where: str, partial: bool = False, longrope: bool = False
) -> dict[str, Any]:
    """Read the fields of a decoder from its config.json (see HuggingFaceMapping.read), without the window (see
    `read_window`). `partial`, `longrope`: see `read_rope`."""
    theta, scaling = read_rope(config, where, partial, longrope)
    return {
        "kv_heads": read_count(config, "num_key_value_heads", where, fields["heads"]),
        "head_dim": read_count(config, "head_dim", where, fields["hidden"] // max(1, fields["heads"])),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def read_layer_types(config: dict[str, Any], layers: int, where: str) -> list[bool] | None:
    """The layers with a window by the key layer_types, None without it. Raises ConfigError for an invalid list."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise ConfigError(
            f"{where} sets layer_types to {shorten(kinds)}; it must be a list of {layers} of "
            f"{', '.join(LAYER_TYPES)}, one for each layer."
        )
    return [LAYER_TYPES[kind] for kind in kinds]


def read_window(
    config: dict[str, Any], fields: dict[str, Any], where: str, window: int | None, first: int | None
) -> dict[str, Any]:
    """Read the fields of a sliding window: in layers from `first` on, or as layer_types says; None: in all layers, and
    layer_types must agree."""
    layers, name = fields["layers"], fields["architecture"]
    slides = [window is not None and layer >= (first or 0) for layer in range(layers if layers <= MAX_LAYERS else 0)]
    told = read_layer_types(config, layers, where)
    if told is not None:
        if told != slides and (first is None or window is None):
            raise ConfigError(
                f"{where} sets layer_types to {shorten(config['layer_types'])}, which its other keys about the sliding "
                f"window contradict for a {name} model; remove layer_types."
            )
        slides = told
    return window_fields(window, slides)


def window_fields(window: int | None, slides: list[bool]) -> dict[str, Any]:
    """The ModelSpec fields of a window in these layers."""
    if window is None or not any(slides):
        return {}
    full = tuple(layer for layer, windowed in enumerate(slides) if not windowed)
    return {"sliding_window": window, "full_attention_layers": full}


def shorten(value: Any) -> str:
    """JSON of a value, shortened for an error message."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


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
    if not partial and rule.get("partial_rotary_factor") not in ACCEPTED["partial_rotary_factor"]:
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


def read_activation(config: Mapping[str, Any], key: str, where: str, usual: str) -> str | None:
    """Read an MLP's activation by our name, None for the family's `usual` one. ConfigError for an unknown one."""
    told = config.get(key)
    found = usual if told is None else ACTIVATIONS.get(told if isinstance(told, str) else "")
    if found is None:
        raise ConfigError(
            f"{where} sets {key}: {json.dumps(told)}, which is not supported; use a model with one of: "
            f"{', '.join(ACTIVATIONS)}."
        )
    return None if found == usual else found


def write_activation(key: str, ours: str, original: dict[str, Any], usual: str) -> dict[str, Any]:
    """Write the key of an activation: as the original config.json names it, if it is the same, else `usual` or any name
    of it."""
    for name in (original.get(key), usual, *ACTIVATIONS):
        if isinstance(name, str) and ACTIVATIONS.get(name) == ours:
            return {key: name}
    raise AssertionError(ours)


# ----------------------------------------------------------------------------------------------------- config.json, out


def write_decoder(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    """Write the config.json keys of all decoders (see HuggingFaceMapping.write)."""
    rule = write_rope(spec.rope_scaling)
    return {
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        # transformers 4 reads the first two keys, 5 the third; both agree.
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if spec.rope_scaling is None else rule,
        "rope_parameters": {**rule, "rope_theta": spec.rope_theta},
        **write_ids(original),
    }


def write_ids(original: dict[str, Any]) -> dict[str, Any]:
    """Write token ids, with explicit nulls: transformers would otherwise use the ids of its default vocabulary."""
    return {name: original.get(name) for name in ("bos_token_id", "eos_token_id")}


def write_layer_types(spec: ModelSpec) -> list[str]:
    """Write the value of layer_types."""
    words = {windows: word for word, windows in LAYER_TYPES.items()}
    return [words[spec.window_of(layer) is not None] for layer in range(spec.layers)]


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
