"""Qwen2, a Llama with biases of queries, keys and values; Qwen3, with norms of each head's queries and keys; and the
first Qwen, a Qwen2 with queries, keys and values in one matrix, for which transformers has no class.

Shapes from the config.json of the repository of that name (Qwen2.5: of the base models).
"""

from dataclasses import replace
from typing import Any

from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.decoder import (
    ACCEPTED,
    DECODER_KEYS,
    find_misfits,
    read_decoder,
    read_window,
    write_decoder,
    write_ids,
    write_layer_types,
)
from phalanx.models.families.family import BlockOptions, name_both, read_count, read_flag, read_number
from phalanx.models.families.llama import LLAMA

_QWEN_2_5_7B = ModelSpec(
    architecture="qwen2", vocab_size=152064, hidden=3584, layers=28, heads=28, kv_heads=4, head_dim=128,
    intermediate=18944, max_seq_len=131072, rope_theta=1e6, norm_eps=1e-6,
)  # fmt: skip
_QWEN_2_5_SMALL = replace(_QWEN_2_5_7B, vocab_size=151936, kv_heads=2, tie_embeddings=True)
_QWEN_2_5_14B = replace(_QWEN_2_5_7B, hidden=5120, layers=48, heads=40, kv_heads=8, intermediate=13824, norm_eps=1e-5)
_QWEN_3_8B = ModelSpec(
    architecture="qwen3", vocab_size=151936, hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128,
    intermediate=12288, max_seq_len=40960, rope_theta=1e6, norm_eps=1e-6,
)  # fmt: skip
_QWEN_3_1_7B = replace(_QWEN_3_8B, hidden=2048, layers=28, heads=16, intermediate=6144, tie_embeddings=True)
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    wanted = config.get("sliding_window") is not None and read_flag(config, "use_sliding_window", where, False)
    window = read_count(config, "sliding_window", where) if wanted else None
    first = read_count(config, "max_window_layers", where) if wanted else 0
    return read_decoder(config, fields, where) | read_window(config, fields, where, window, first)


def _write(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    windowed = [spec.window_of(layer) is not None for layer in range(spec.layers)]
    return write_decoder(spec, original) | {
        "use_sliding_window": any(windowed),
        "sliding_window": spec.sliding_window,
        # transformers 4 before layer_types reads only the first key, which is right if the windowed layers come last.
        "max_window_layers": windowed.index(True) if any(windowed) else spec.layers,
        "layer_types": write_layer_types(spec),
    }


QWEN2 = replace(
    LLAMA,
    name="qwen2",
    title="Qwen2",
    options=BlockOptions(qkv_bias=True),
    find_problems=lambda spec: [],
    hf=replace(
        LLAMA.hf,
        model_type="qwen2",
        classes={"Qwen2ForCausalLM": "language"},
        defaults=_DEFAULTS,
        accepted={name: values for name, values in ACCEPTED.items() if name != "attention_bias"},  # always on
        read=_read,
        write=_write,
    ),
    presets={
        "qwen2.5-0.5b": replace(
            _QWEN_2_5_SMALL, hidden=896, layers=24, heads=14, head_dim=64, intermediate=4864, max_seq_len=32768
        ),
        "qwen2.5-1.5b": replace(_QWEN_2_5_SMALL, hidden=1536, heads=12, intermediate=8960),
        "qwen2.5-3b": replace(_QWEN_2_5_SMALL, hidden=2048, layers=36, heads=16, intermediate=11008, max_seq_len=32768),
        "qwen2.5-7b": _QWEN_2_5_7B,
        "qwen2.5-14b": _QWEN_2_5_14B,
        "qwen2.5-32b": replace(_QWEN_2_5_14B, layers=64, intermediate=27648),
        "qwen2.5-72b": replace(_QWEN_2_5_14B, hidden=8192, layers=80, heads=64, intermediate=29568),
    },
)
_QWEN_7B = ModelSpec(
    architecture="qwen", vocab_size=151936, hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128,
    intermediate=11008, max_seq_len=8192, norm_eps=1e-6,
)  # fmt: skip


def _read_qwen1(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Read the first Qwen's config.json. Up to `seq_length` tokens use_dynamic_ntk and use_logn_attn have no effect."""
    width = read_count(config, "kv_channels", where, fields["hidden"] // max(1, fields["heads"]))
    theta = float(read_number(config, "rotary_emb_base", where, 10000.0))
    inner = fields["intermediate"] // 2  # theirs counts gate and up together
    return {"kv_heads": fields["heads"], "head_dim": width, "intermediate": inner, "rope_theta": theta}


def _write_qwen1(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    return {
        **write_ids(original),
        "intermediate_size": 2 * spec.intermediate,
        "kv_channels": spec.head_dim,
        "max_position_embeddings": max(spec.max_seq_len, original.get("max_position_embeddings") or 0),
        "rotary_emb_base": spec.rope_theta,
        "rotary_pct": 1.0,
        "no_bias": True,
        "scale_attn_weights": True,
        "emb_dropout_prob": spec.dropout,
        "attn_dropout_prob": 0.0,
    }


QWEN1 = replace(
    QWEN2,
    name="qwen",
    title="Qwen",
    find_problems=lambda spec: find_misfits(spec, "Qwen"),
    start=lambda spec: replace(spec, norm_eps=1e-6),
    hf=replace(
        LLAMA.hf,
        model_type="qwen",
        classes={"QWenLMHeadModel": "language"},
        names={
            "embed.weight": "transformer.wte.weight",
            "layers.{i}.attention_norm.weight": "transformer.h.{i}.ln_1.weight",
            "layers.{i}.attention.o.weight": "transformer.h.{i}.attn.c_proj.weight",
            "layers.{i}.mlp_norm.weight": "transformer.h.{i}.ln_2.weight",
            "layers.{i}.mlp.gate.weight": "transformer.h.{i}.mlp.w2.weight",
            "layers.{i}.mlp.up.weight": "transformer.h.{i}.mlp.w1.weight",
            "layers.{i}.mlp.down.weight": "transformer.h.{i}.mlp.c_proj.weight",
            "head.norm.weight": "transformer.ln_f.weight",
            "head.weight": "lm_head.weight",
        }
        | name_both({f"layers.{{i}}.attention.{name}": "transformer.h.{i}.attn.c_attn" for name in "qkv"}),
        keys=DECODER_KEYS
        | {"norm_eps": ("layer_norm_epsilon", read_number, 1e-6), "max_seq_len": ("seq_length", read_count, 8192)},
        read=_read_qwen1,
        write=_write_qwen1,
        accepted={
            "no_bias": (True, None),
            "rotary_pct": (1.0, 1, None),
            "scale_attn_weights": (True, None),
            "quantization_config": (None,),
        },
        cut_by_transform=False,
    ),
    presets={
        "qwen-1.8b": replace(_QWEN_7B, hidden=2048, layers=24, heads=16, kv_heads=16, intermediate=5504),
        "qwen-7b": _QWEN_7B,
        "qwen-14b": replace(
            _QWEN_7B, vocab_size=152064, hidden=5120, layers=40, heads=40, kv_heads=40, intermediate=13696
        ),
    },
)
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    title="Qwen3",
    options=BlockOptions(qk_norm="heads"),
    hf=replace(
        QWEN2.hf,
        model_type="qwen3",
        classes={"Qwen3ForCausalLM": "language"},
        defaults=_DEFAULTS | {"head_dim": 128},
        accepted=ACCEPTED,
        write=lambda spec, original: _write(spec, original) | {"attention_bias": False},
    ),
    presets={
        "qwen3-0.6b": replace(_QWEN_3_1_7B, hidden=1024, intermediate=3072),
        "qwen3-1.7b": _QWEN_3_1_7B,
        "qwen3-4b": replace(_QWEN_3_8B, hidden=2560, intermediate=9728, tie_embeddings=True),
        "qwen3-8b": _QWEN_3_8B,
        "qwen3-14b": replace(_QWEN_3_8B, hidden=5120, layers=40, heads=40, intermediate=17408),
        "qwen3-32b": replace(_QWEN_3_8B, hidden=5120, layers=64, heads=64, intermediate=25600),
    },
)
