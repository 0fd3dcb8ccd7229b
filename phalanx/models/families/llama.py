"""Llama, and Mistral, which is a Llama with a sliding window.

Shapes from the config.json of the repository of that name.
"""

from dataclasses import replace
from typing import Any

from phalanx.layout.model_shape import BlockSpec, ModelSpec, RopeScaling
from phalanx.models.families.decoder import (
    ACCEPTED,
    DECODER_KEYS,
    HF_NAMES,
    TENSOR_PLAN,
    decoder_flops,
    decoder_shapes,
    find_width_problems,
    read_decoder,
    read_window,
    read_window_size,
    write_decoder,
)
from phalanx.models.families.family import HuggingFaceMapping, ModelFamily, read_flag

_LLAMA_1_7B = ModelSpec(
    vocab_size=32000, hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128, intermediate=11008, max_seq_len=2048,
    norm_eps=1e-6,
)  # fmt: skip
_LLAMA_1_13B = replace(_LLAMA_1_7B, hidden=5120, layers=40, heads=40, kv_heads=40, intermediate=13824)
_LLAMA_1_30B = replace(_LLAMA_1_7B, hidden=6656, layers=60, heads=52, kv_heads=52, intermediate=17920)
_LLAMA_1_65B = replace(_LLAMA_1_7B, hidden=8192, layers=80, heads=64, kv_heads=64, intermediate=22016)
_LLAMA_2_70B = replace(_LLAMA_1_65B, kv_heads=8, intermediate=28672, max_seq_len=4096, norm_eps=1e-5)
_LLAMA_3_8B = replace(
    _LLAMA_1_7B, vocab_size=128256, kv_heads=8, intermediate=14336, max_seq_len=8192, rope_theta=500000.0,
    norm_eps=1e-5,
)  # fmt: skip
_LLAMA_3_70B = replace(_LLAMA_3_8B, hidden=8192, layers=80, heads=64, intermediate=28672)
_ROPE_3_1 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
_ROPE_3_2 = replace(_ROPE_3_1, factor=32.0)
_LLAMA_3_1_8B = replace(_LLAMA_3_8B, max_seq_len=131072, rope_scaling=_ROPE_3_1)
_LLAMA_3_1_70B = replace(_LLAMA_3_70B, max_seq_len=131072, rope_scaling=_ROPE_3_1)
_LLAMA_3_2_3B = replace(
    _LLAMA_3_1_8B, hidden=3072, layers=28, heads=24, intermediate=8192, rope_scaling=_ROPE_3_2, tie_embeddings=True
)

_MISTRAL_7B = replace(
    _LLAMA_3_8B, architecture="mistral", vocab_size=32000, max_seq_len=32768, rope_theta=10000.0, sliding_window=4096
)


def _find_llama_problems(spec: ModelSpec) -> list[str]:
    found = find_width_problems(spec, "Llama")
    if spec.sliding_window is not None and spec.sliding_window >= 1:
        found.append(
            f"model.sliding_window is {spec.sliding_window}, which model.architecture llama does not support, so it "
            "could not be exported; set model.architecture to mistral, which is the same model with a window."
        )
    return found


def _read_llama(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    attention, mlp = (True if read_flag(config, key, where, False) else None for key in ("attention_bias", "mlp_bias"))
    block = BlockSpec(qkv_bias=attention, o_bias=attention, mlp_bias=mlp)
    return read_decoder(config, fields, where) | {"block": block}


def _write_llama(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    options = LLAMA.options_of(spec)
    return write_decoder(spec, original) | {"attention_bias": options.qkv_bias, "mlp_bias": options.mlp_bias}


def _read_mistral(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    window = read_window_size(config, where)
    return read_decoder(config, fields, where) | read_window(config, fields, where, window, None)


LLAMA = ModelFamily(
    name="llama",
    title="Llama",
    network="phalanx.models.llama:Llama",
    tensor_plan=TENSOR_PLAN,
    shapes=decoder_shapes,
    flops=decoder_flops,
    find_problems=_find_llama_problems,
    hf=HuggingFaceMapping(
        model_type="llama",
        classes={"LlamaForCausalLM": "language"},
        names=HF_NAMES,
        keys=DECODER_KEYS,
        read=_read_llama,
        write=_write_llama,
        accepted={name: values for name, values in ACCEPTED.items() if name not in ("attention_bias", "mlp_bias")},
    ),
    presets={
        "llama-1-7b": _LLAMA_1_7B,
        "llama-1-13b": _LLAMA_1_13B,
        "llama-1-30b": _LLAMA_1_30B,
        "llama-1-65b": _LLAMA_1_65B,
        "llama-2-7b": replace(_LLAMA_1_7B, max_seq_len=4096, norm_eps=1e-5),
        "llama-2-13b": replace(_LLAMA_1_13B, max_seq_len=4096, norm_eps=1e-5),
        "llama-2-70b": _LLAMA_2_70B,
        "llama-3-8b": _LLAMA_3_8B,
        "llama-3-70b": _LLAMA_3_70B,
        "llama-3.1-8b": _LLAMA_3_1_8B,
        "llama-3.1-70b": _LLAMA_3_1_70B,
        "llama-3.1-405b": replace(_LLAMA_3_1_70B, hidden=16384, layers=126, heads=128, intermediate=53248),
        "llama-3.2-1b": replace(_LLAMA_3_2_3B, hidden=2048, layers=16, heads=32, head_dim=64),
        "llama-3.2-3b": _LLAMA_3_2_3B,
        "llama-3.3-70b": _LLAMA_3_1_70B,
    },
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    title="Mistral",
    find_problems=lambda spec: [],
    hf=replace(
        LLAMA.hf,
        model_type="mistral",
        classes={"MistralForCausalLM": "language"},
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        accepted=ACCEPTED,
        read=_read_mistral,
        write=lambda spec, original: write_decoder(spec, original) | {"sliding_window": spec.sliding_window},
    ),
    presets={
        "mistral-7b-v0.1": _MISTRAL_7B,
        "mistral-7b-v0.3": replace(_MISTRAL_7B, vocab_size=32768, rope_theta=1e6, sliding_window=None),
    },
)
