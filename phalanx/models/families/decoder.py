"""Common parts of decoder families: parameter names, shapes, FLOPs, and reading and writing config.json.

The network of all decoders is `models/llama.py`, by the family's BlockOptions. No torch here.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import MAX_LAYERS, ModelSpec, Shapes
from phalanx.models.families.family import (
    KEYS,
    POSITIONS,
    BlockOptions,
    count_adapter_elements,
    count_elements,
    read_count,
    read_flag,
    read_number,
    shorten,
)
from phalanx.models.families.rotary import WHOLE_HEADS, read_rope, write_rotary

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
WHOLE_NORMS = {"attention.q_norm": "column", "attention.k_norm": "column_kv"}  # of all heads together
# As HuggingFaceMapping.accepted, of all decoders.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "attention_dropout": (0, 0.0, None),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": WHOLE_HEADS,
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


def resize(like: ModelSpec, hidden: int, layers: int, heads: int) -> ModelSpec:
    """`like` in another size, with a key head for each query head, and an MLP of four times the width."""
    heads_of = replace(like, heads=heads, kv_heads=heads, head_dim=hidden // heads)
    return replace(heads_of, hidden=hidden, layers=layers, intermediate=4 * hidden)


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


def read_window_size(config: Mapping[str, Any], where: str) -> int | None:
    """Read the key sliding_window; None where it is null or missing."""
    return None if config.get("sliding_window") is None else read_count(config, "sliding_window", where)


def window_fields(window: int | None, slides: list[bool]) -> dict[str, Any]:
    """The ModelSpec fields of a window in these layers."""
    if window is None or not any(slides):
        return {}
    full = tuple(layer for layer, windowed in enumerate(slides) if not windowed)
    return {"sliding_window": window, "full_attention_layers": full}


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
    return {
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        **write_rotary(spec),
        **write_ids(original),
    }


def write_ids(original: dict[str, Any]) -> dict[str, Any]:
    """Write token ids, with explicit nulls: transformers would otherwise use the ids of its default vocabulary."""
    return {name: original.get(name) for name in ("bos_token_id", "eos_token_id")}


def write_layer_types(spec: ModelSpec) -> list[str]:
    """Write the value of layer_types."""
    words = {windows: word for word, windows in LAYER_TYPES.items()}
    return [words[spec.window_of(layer) is not None] for layer in range(spec.layers)]
