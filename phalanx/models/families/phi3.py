"""Phi-3 and Phi-4: a Llama whose queries, keys and values are one matrix, and whose gate and up are another.

Source: "Phi-3 Technical Report" and "Phi-4 Technical Report", 2024; shapes from the config.json of the repository of
that name.
"""

from dataclasses import replace
from typing import Any

from phalanx.layout.model_shape import LONGROPE, BlockSpec, ModelSpec
from phalanx.models.families.decoder import (
    ACCEPTED,
    HF_NAMES,
    find_misfits,
    read_decoder,
    read_window,
    read_window_size,
    write_decoder,
)
from phalanx.models.families.llama import LLAMA
from phalanx.models.families.rotary import read_rotary_share

_LAYER = "model.layers.{i}"
_PHI_3_MINI = ModelSpec(
    architecture="phi3", vocab_size=32064, hidden=3072, layers=32, heads=32, kv_heads=32, head_dim=96,
    intermediate=8192, max_seq_len=4096, sliding_window=2047,
)  # fmt: skip
_PHI_3_MEDIUM = replace(_PHI_3_MINI, hidden=5120, layers=40, heads=40, kv_heads=10, head_dim=128, intermediate=17920)


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    share = read_rotary_share(config, "partial_rotary_factor", where, 1.0)
    window = read_window_size(config, where)
    found = read_decoder(config, fields, where, partial=True, longrope=True)
    found |= read_window(config, fields, where, window, None)
    return found | {"block": BlockSpec(rotary_share=None if share == 1.0 else share)}


def _write(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    share, scaling = PHI3.options_of(spec).rotary_share, spec.rope_scaling
    found = write_decoder(spec, original)
    del found["head_dim"]
    return found | {
        "sliding_window": spec.sliding_window,
        "partial_rotary_factor": share,
        "original_max_position_embeddings": spec.max_seq_len if scaling is None else scaling.original_max_seq_len,
        "pad_token_id": original.get("pad_token_id"),
        "rope_parameters": found["rope_parameters"] | {"partial_rotary_factor": share},
    }


PHI3 = replace(
    LLAMA,
    name="phi3",
    title="Phi-3",
    find_problems=lambda spec: find_misfits(spec, "Phi-3", window=True, grouped=True, rules=(LONGROPE,)),
    hf=replace(
        LLAMA.hf,
        model_type="phi3",
        classes={"Phi3ForCausalLM": "language"},
        names=HF_NAMES
        | {f"layers.{{i}}.attention.{name}.weight": f"{_LAYER}.self_attn.qkv_proj.weight" for name in "qkv"}
        | {f"layers.{{i}}.mlp.{name}.weight": f"{_LAYER}.mlp.gate_up_proj.weight" for name in ("gate", "up")},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        accepted={name: values for name, values in ACCEPTED.items() if name != "partial_rotary_factor"},
        read=_read,
        write=_write,
    ),
    presets={
        "phi-3-mini-4k": _PHI_3_MINI,
        "phi-3-medium-4k": _PHI_3_MEDIUM,
        "phi-4": replace(_PHI_3_MEDIUM, vocab_size=100352, max_seq_len=16384, rope_theta=250000.0, sliding_window=None),
    },
)
