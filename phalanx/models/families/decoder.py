"""What families of decoders share: names, shapes and operations of Llama's kind of blocks, and their config.json.

A decoder's network is `models/llama.py`, which computes what the family's BlockOptions say. No torch here.
"""

import json
from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import MAX_LAYERS, ROPE_RULES, ModelSpec, RopeScaling, Shapes
from phalanx.models.families.family import (
    KEYS,
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
    "layers.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
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
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}  # transformers' words, and if there is a window
DECODER_KEYS = KEYS | {
    "norm_eps": ("rms_norm_eps", read_number, 1e-6),
    "tie_embeddings": ("tie_word_embeddings", read_flag, False),
}


def decoder_shapes(spec: ModelSpec, options: BlockOptions) -> Shapes:
    """Shape of every parameter, in order of use in the forward pass; a tied head has no entry of its own."""
    shapes: Shapes = {"embed.weight": (spec.vocab_size, spec.hidden)}
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    block: Shapes = {"attention_norm.weight": (spec.hidden,)}
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        block[f"attention.{name}.weight"] = (width, spec.hidden)
        if options.qkv_bias:
            block[f"attention.{name}.bias"] = (width,)
    if options.qk_norm:
        block |= {f"attention.{name}_norm.weight": (spec.head_dim,) for name in "qk"}
    block |= {"attention.o.weight": (spec.hidden, queries)}
    block |= {"attention_post_norm.weight": (spec.hidden,)} if options.post_norms else {}
    block |= {
        "mlp_norm.weight": (spec.hidden,),
        "mlp.gate.weight": (spec.intermediate, spec.hidden),
        "mlp.up.weight": (spec.intermediate, spec.hidden),
        "mlp.down.weight": (spec.hidden, spec.intermediate),
    }
    block |= {"mlp_post_norm.weight": (spec.hidden,)} if options.post_norms else {}
    for layer in range(spec.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes["head.norm.weight"] = (spec.hidden,)
    if not spec.tie_embeddings:
        shapes["head.weight"] = (spec.vocab_size, spec.hidden)
    return shapes


def decoder_flops(spec: ModelSpec, seq_len: int, shapes: Shapes) -> tuple[int, int]:
    """As `flops_per_token` (catalog.py), of causal attention with or without windows."""
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
    """What transformers refuses in some families, `title` among them."""
    if spec.heads < 1 or spec.hidden % spec.heads == 0:
        return []
    return [
        f"model.hidden is {spec.hidden} and model.heads is {spec.heads}, a shape that Hugging Face's {title} refuses "
        "and no export could be loaded; set model.hidden to a multiple of model.heads."
    ]


# ------------------------------------------------------------------------------------------------------ config.json, in


def read_decoder(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    """As HuggingFaceMapping.read, what all decoders have; but for the window, of which `read_window` tells."""
    theta, scaling = read_rope(config, where)
    return {
        "kv_heads": read_count(config, "num_key_value_heads", where, fields["heads"]),
        "head_dim": read_count(config, "head_dim", where, fields["hidden"] // max(1, fields["heads"])),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def read_layer_types(config: dict[str, Any], layers: int, where: str) -> list[bool] | None:
    """Which layers have a window by the key layer_types, None without it. Raises ConfigError for what is no such
    list."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise ConfigError(
            f"{where} sets layer_types to {shorten(kinds)}, which is no list of {layers} of "
            f"{', '.join(LAYER_TYPES)}; give each layer one of them."
        )
    return [LAYER_TYPES[kind] for kind in kinds]


def read_window(
    config: dict[str, Any], fields: dict[str, Any], where: str, window: int | None, first: int | None
) -> dict[str, Any]:
    """Fields of a window of a family where layers have one from `first` on, or as layer_types says; None: all of them,
    and layer_types may only agree."""
    layers, name = fields["layers"], fields["architecture"]
    slides = [window is not None and layer >= (first or 0) for layer in range(layers if layers <= MAX_LAYERS else 0)]
    told = read_layer_types(config, layers, where)
    if told is not None:
        if told != slides and (first is None or window is None):
            raise ConfigError(
                f"{where} sets layer_types to {shorten(config['layer_types'])}, which its other keys about the sliding "
                f"window contradict for a {name} model; take layer_types out."
            )
        slides = told
    return window_fields(window, slides)


def window_fields(window: int | None, slides: list[bool]) -> dict[str, Any]:
    """Fields of a ModelSpec in which these layers have the window."""
    if window is None or not any(slides):
        return {}
    full = tuple(layer for layer, windowed in enumerate(slides) if not windowed)
    return {"sliding_window": window, "full_attention_layers": full}


def shorten(value: Any) -> str:
    """JSON of a value, as much as a sentence bears."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """The base of rotary frequencies and how they are stretched. Raises ConfigError for what is not built here."""
    # transformers 4 has rope_theta beside an optional rope_scaling; 5 has both in rope_parameters.
    rule = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rule, dict):
        raise ConfigError(
            f"{where} sets rope_scaling to {json.dumps(rule)}, which is no JSON object; give null or a rule."
        )
    if any(isinstance(value, dict) for value in rule.values()):
        raise ConfigError(
            f"{where} gives each kind of layer rotary positions of its own, which is not supported and would change "
            "the model's output; use a model with one rule for all."
        )
    if rule.get("partial_rotary_factor") not in ACCEPTED["partial_rotary_factor"]:
        raise ConfigError(
            f"{where} sets partial_rotary_factor: {json.dumps(rule['partial_rotary_factor'])}, which is not supported "
            "and would change the model's output; use a model that turns all channels."
        )
    theta = read_number(rule, "rope_theta", where, read_number(config, "rope_theta", where, 10000.0))
    kind = str(rule.get("rope_type") or rule.get("type") or "default")
    if kind == "default":
        return theta, None
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
    extras = ("attention_factor", "mscale", "mscale_all_dim")
    return theta, RopeScaling(
        rule=kind,
        factor=read_number(rule, "factor", where, longest / max(1, original)),
        original_max_seq_len=original,
        beta_fast=read_number(rule, "beta_fast", where, 32.0) or 32.0,  # transformers takes 0 for nothing
        beta_slow=read_number(rule, "beta_slow", where, 1.0) or 1.0,
        truncate=read_flag(rule, "truncate", where, True),
        **{name: read_number(rule, name, where) for name in extras if rule.get(name) is not None},
    )


# ----------------------------------------------------------------------------------------------------- config.json, out


def write_decoder(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    """As HuggingFaceMapping.write, what all decoders have."""
    rule = write_rope(spec.rope_scaling)
    return {
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        # transformers 4 reads the first two keys, 5 the third; both agree.
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if spec.rope_scaling is None else rule,
        "rope_parameters": {**rule, "rope_theta": spec.rope_theta},
        # Explicit nulls: transformers would otherwise put in the ids of its own default vocabulary.
        "bos_token_id": original.get("bos_token_id"),
        "eos_token_id": original.get("eos_token_id"),
    }


def write_layer_types(spec: ModelSpec) -> list[str]:
    """The value of layer_types."""
    words = {windows: word for word, windows in LAYER_TYPES.items()}
    return [words[spec.window_of(layer) is not None] for layer in range(spec.layers)]


def write_rope(scaling: RopeScaling | None) -> dict[str, Any]:
    """The rule of rotary positions, without their base."""
    if scaling is None:
        return {"rope_type": "default"}
    rule: dict[str, Any] = {"rope_type": scaling.rule, "factor": scaling.factor}
    if scaling.rule == "llama3":
        rule |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.rule == "yarn":
        rule |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        extras = {name: getattr(scaling, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        rule |= {name: float(value) for name, value in extras.items() if value is not None}
    if scaling.rule in ("llama3", "yarn"):
        rule["original_max_position_embeddings"] = scaling.original_max_seq_len
    return rule
