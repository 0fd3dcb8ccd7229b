"""Gemma 2: a sliding window in every second layer, norms before and after attention and MLP, GELU gates, and soft caps
of attention scores and logits.

Source: "Gemma 2: Improving Open Language Models at a Practical Size", 2024; roundings as in Hugging Face's
Gemma2ForCausalLM; shapes from the config.json of the repository of that name.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import BlockSpec, ModelSpec
from phalanx.models.families.decoder import (
    ACCEPTED,
    HF_NAMES,
    find_width_problems,
    read_decoder,
    read_layer_types,
    read_window_size,
    window_fields,
    write_decoder,
    write_layer_types,
)
from phalanx.models.families.family import BlockOptions, TaskChoice, read_number
from phalanx.models.families.llama import LLAMA

_WINDOW = 4096
_CAPS = {"score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
_OPTIONS = BlockOptions(
    post_norms=True, unit_offset=True, scaled_embedding=True, activation="gelu_tanh", score_cap=50.0, logit_cap=30.0
)


def _full_layers(layers: int) -> tuple[int, ...]:
    return tuple(range(1, layers, 2))


_GEMMA_2_2B = ModelSpec(
    architecture="gemma2", vocab_size=256000, hidden=2304, layers=26, heads=8, kv_heads=4, head_dim=256,
    intermediate=9216, max_seq_len=8192, norm_eps=1e-6, tie_embeddings=True, sliding_window=_WINDOW,
    full_attention_layers=_full_layers(26),
)  # fmt: skip


def _start(spec: ModelSpec) -> ModelSpec:
    spec = replace(spec, sliding_window=_WINDOW, full_attention_layers=_full_layers(spec.layers))
    return replace(spec, norm_eps=1e-6, tie_embeddings=True)


def _complete(spec: ModelSpec, given: Mapping[str, Any], task: TaskChoice) -> ModelSpec:
    return replace(spec, full_attention_layers=_full_layers(spec.layers)) if "layers" in given else spec


# Also used by Gemma 3.
GEMMA_DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}  # fmt: skip


def read_query_scalar(config: dict[str, Any], head_dim: int, where: str) -> float | None:
    """Read BlockSpec.query_scalar. Raises ConfigError for one that is not positive."""
    scalar = read_number(config, "query_pre_attn_scalar", where)
    _check_positive(config, "query_pre_attn_scalar", scalar > 0, where)
    return None if scalar == head_dim else float(scalar)


def _check_positive(config: dict[str, Any], key: str, positive: bool, where: str) -> None:
    if not positive:
        raise ConfigError(f"{where} sets {key} to {config[key]}, which no model has; give it a positive one.")


def write_gemma(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    """Write what Gemma 2 and 3 have in common."""
    scalar = spec.block.query_scalar or spec.head_dim
    return write_decoder(spec, original) | {
        "attention_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "sliding_window": spec.sliding_window,
        "layer_types": write_layer_types(spec),
    }


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    found = read_decoder(config, fields, where)
    window = read_window_size(config, where)
    slides = read_layer_types(config, fields["layers"], where)
    if slides is None:
        slides = [layer % 2 == 0 for layer in range(fields["layers"])]
    caps: dict[str, Any] = {}
    for name, key in _CAPS.items():
        cap = 0.0 if config.get(key) is None else read_number(config, key, where)
        _check_positive(config, key, cap > 0.0 or config.get(key) is None, where)
        caps[name] = None if cap == getattr(_OPTIONS, name) else float(cap)
    block = BlockSpec(query_scalar=read_query_scalar(config, found["head_dim"], where), **caps)
    return found | window_fields(window, slides) | {"block": block}


def _write(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    options = GEMMA2.options_of(spec)
    return write_gemma(spec, original) | {key: getattr(options, name) or None for name, key in _CAPS.items()}


GEMMA2 = replace(
    LLAMA,
    name="gemma2",
    title="Gemma 2",
    options=_OPTIONS,
    find_problems=lambda spec: find_width_problems(spec, "Gemma 2"),
    start=_start,
    complete=_complete,
    hf=replace(
        LLAMA.hf,
        model_type="gemma2",
        classes={"Gemma2ForCausalLM": "language"},
        names=HF_NAMES
        | {
            "layers.{i}.attention_post_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
            "layers.{i}.mlp_norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
            "layers.{i}.mlp_post_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
        },
        defaults=GEMMA_DEFAULTS
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        # hidden_activation takes precedence over hidden_act; published folders have both.
        accepted=ACCEPTED
        | {"hidden_act": ("gelu_pytorch_tanh", "gelu", None), "hidden_activation": ("gelu_pytorch_tanh", None)},
        read=_read,
        write=_write,
    ),
    presets={
        "gemma-2-2b": _GEMMA_2_2B,
        "gemma-2-9b": replace(
            _GEMMA_2_2B, hidden=3584, layers=42, heads=16, kv_heads=8, intermediate=14336,
            full_attention_layers=_full_layers(42),
        ),
        "gemma-2-27b": replace(
            _GEMMA_2_2B, hidden=4608, layers=46, heads=32, kv_heads=16, head_dim=128, intermediate=36864,
            full_attention_layers=_full_layers(46), block=BlockSpec(query_scalar=144.0),
        ),
    },
)  # fmt: skip
