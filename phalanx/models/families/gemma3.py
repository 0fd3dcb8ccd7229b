"""Gemma 3 (text model): a sliding window in five of six layers, different rotary frequencies with and without it, norms
before and after attention and MLP, norms of queries and keys, and GELU gates.

Source: "Gemma 3 Technical Report", 2025; numbers and roundings as in Hugging Face's Gemma3ForCausalLM.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import BlockSpec, ModelSpec, RopeScaling
from phalanx.models.families.decoder import (
    ACCEPTED,
    find_width_problems,
    read_decoder,
    read_layer_types,
    read_window_size,
    window_fields,
)
from phalanx.models.families.family import BlockOptions, TaskChoice, read_count
from phalanx.models.families.gemma2 import GEMMA2, GEMMA_DEFAULTS, read_query_scalar, write_gemma
from phalanx.models.families.rotary import read_rope, write_rope

_PATTERN = 6  # five layers with a window, then one without
_WINDOW, _THETA, _WINDOW_THETA = 1024, 1e6, 1e4


def _full_layers(layers: int, pattern: int = _PATTERN) -> tuple[int, ...]:
    return tuple(range(pattern - 1, layers, pattern))


# Shapes from the config.json of the repository of that name, of the larger ones from its text_config.
_GEMMA_3_1B = ModelSpec(
    architecture="gemma3", vocab_size=262144, hidden=1152, layers=26, heads=4, kv_heads=1, head_dim=256,
    intermediate=6912, max_seq_len=32768, rope_theta=_THETA, norm_eps=1e-6, tie_embeddings=True, sliding_window=512,
    full_attention_layers=_full_layers(26), block=BlockSpec(window_rope_theta=_WINDOW_THETA),
)  # fmt: skip
_GEMMA_3_4B = replace(
    _GEMMA_3_1B, vocab_size=262208, hidden=2560, layers=34, heads=8, kv_heads=4, intermediate=10240, max_seq_len=131072,
    rope_scaling=RopeScaling(rule="linear", factor=8.0), sliding_window=_WINDOW, full_attention_layers=_full_layers(34),
)  # fmt: skip


def _start(spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        norm_eps=1e-6,
        tie_embeddings=True,
        rope_theta=_THETA,
        sliding_window=_WINDOW,
        full_attention_layers=_full_layers(spec.layers),
    )


def _complete(spec: ModelSpec, given: Mapping[str, Any], task: TaskChoice) -> ModelSpec:
    if "layers" in given:
        spec = replace(spec, full_attention_layers=_full_layers(spec.layers))
    if spec.block.window_rope_theta is None:
        spec = replace(spec, block=replace(spec.block, window_rope_theta=_WINDOW_THETA))
    return spec


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    layers = fields["layers"]
    window = read_window_size(config, where)
    slides = read_layer_types(config, layers, where)
    if slides is None:
        pattern = max(1, read_count(config, "sliding_window_pattern", where, _PATTERN))
        slides = [layer not in _full_layers(layers, pattern) for layer in range(layers)]
    # transformers 4 has a key for each base and a rule for layers without a window; 5 has a rule for each kind.
    rules = config.get("rope_parameters")
    rules = rules if isinstance(rules, dict) else {}
    stretched = config.get("rope_scaling")
    full = {"rope_theta": config.get("rope_theta"), **(rules.get("full_attention") or {}), **(stretched or {})}
    near = {"rope_theta": config.get("rope_local_base_freq"), **(rules.get("sliding_attention") or {})}
    plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    found = read_decoder({**plain, "rope_parameters": full, "rope_theta": _THETA}, fields, where)
    near_theta, near_scaling = read_rope({**plain, "rope_parameters": near, "rope_theta": _WINDOW_THETA}, where)
    if near_scaling is not None:
        raise ConfigError(
            f"{where} scales rotary positions of layers with a sliding window, which is not supported and would change "
            "the model's output; use a model that scales those of the other layers alone."
        )
    scalar = read_query_scalar(config, found["head_dim"], where)
    block = BlockSpec(window_rope_theta=near_theta, query_scalar=scalar)
    return found | window_fields(window, slides) | {"block": block}


def _write(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    near = spec.block.window_rope_theta
    rule = write_rope(spec.rope_scaling)
    regular = [
        each for each in range(1, spec.layers + 2) if _full_layers(spec.layers, each) == spec.full_attention_layers
    ]
    return write_gemma(spec, original) | {
        **({"sliding_window_pattern": regular[0]} if regular else {}),  # what transformers 4 before layer_types reads
        "rope_local_base_freq": near,
        "rope_parameters": {
            "full_attention": {**rule, "rope_theta": spec.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    title="Gemma 3",
    options=BlockOptions(
        qk_norm="heads", post_norms=True, unit_offset=True, scaled_embedding=True, activation="gelu_tanh"
    ),
    find_problems=lambda spec: find_width_problems(spec, "Gemma 3"),
    start=_start,
    complete=_complete,
    hf=replace(
        GEMMA2.hf,
        model_type="gemma3_text",
        classes={"Gemma3ForCausalLM": "language"},
        defaults=GEMMA_DEFAULTS | {"max_position_embeddings": 131072},
        accepted=ACCEPTED
        | {
            "hidden_act": ("gelu_pytorch_tanh", None),
            "hidden_activation": ("gelu_pytorch_tanh", None),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
        },
        read=_read,
        write=_write,
        cut_by_transform=False,
    ),
    presets={
        "gemma-3-270m": replace(
            _GEMMA_3_1B, hidden=640, layers=18, intermediate=2048, full_attention_layers=_full_layers(18)
        ),
        "gemma-3-1b": _GEMMA_3_1B,
        "gemma-3-4b": _GEMMA_3_4B,
        "gemma-3-12b": replace(
            _GEMMA_3_4B,
            hidden=3840,
            layers=48,
            heads=16,
            kv_heads=8,
            intermediate=15360,
            full_attention_layers=_full_layers(48),
        ),
        "gemma-3-27b": replace(
            _GEMMA_3_4B,
            hidden=5376,
            layers=62,
            heads=32,
            kv_heads=16,
            head_dim=128,
            intermediate=21504,
            full_attention_layers=_full_layers(62),
            block=BlockSpec(window_rope_theta=_WINDOW_THETA, query_scalar=168.0),
        ),
    },
)
