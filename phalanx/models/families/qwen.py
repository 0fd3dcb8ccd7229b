"""Qwen2, which adds biases to queries, keys and values, and Qwen3, which normalises each head's queries and keys.

Shapes as the config.json of the repository of that name says them (Qwen2.5: of the base models).
"""

from dataclasses import replace
from typing import Any

from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.decoder import ACCEPTED, read_decoder, read_window, write_decoder, write_layer_types
from phalanx.models.families.family import BlockOptions, read_count, read_flag
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
        # transformers 4 before layer_types reads the first key alone: right where the windowed layers are the last.
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
        accepted={name: values for name, values in ACCEPTED.items() if name != "attention_bias"},  # it has them always
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
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    title="Qwen3",
    options=BlockOptions(qk_norm=True),
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
