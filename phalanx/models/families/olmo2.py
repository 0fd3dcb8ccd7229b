"""OLMo 2: a Llama with norms after attention and MLP instead of before, and norms of queries and keys over all heads
together.

Source: OLMo team, "2 OLMo 2 Furious", 2024; shapes from the config.json of the repository of that name.
"""

from dataclasses import replace

from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.decoder import (
    ACCEPTED,
    HF_NAMES,
    TENSOR_PLAN,
    WHOLE_NORMS,
    find_misfits,
    read_decoder,
    write_decoder,
)
from phalanx.models.families.family import BlockOptions
from phalanx.models.families.llama import LLAMA
from phalanx.models.families.rotary import HF_ROPE_RULES

_LAYER = "model.layers.{i}"
_OLMO_2_7B = ModelSpec(
    architecture="olmo2", vocab_size=100352, hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128,
    intermediate=11008, max_seq_len=4096, rope_theta=500000.0, norm_eps=1e-6,
)  # fmt: skip
_OLMO_2_13B = replace(_OLMO_2_7B, hidden=5120, layers=40, heads=40, kv_heads=40, intermediate=13824)

OLMO2 = replace(
    LLAMA,
    name="olmo2",
    title="OLMo 2",
    options=BlockOptions(pre_norms=False, post_norms=True, qk_norm="whole"),
    tensor_plan=TENSOR_PLAN | WHOLE_NORMS,
    find_problems=lambda spec: find_misfits(spec, "OLMo 2", grouped=True, rules=HF_ROPE_RULES),
    start=lambda spec: replace(spec, norm_eps=1e-6),
    hf=replace(
        LLAMA.hf,
        model_type="olmo2",
        classes={"Olmo2ForCausalLM": "language"},
        names=HF_NAMES
        | {
            "layers.{i}.attention_post_norm.weight": f"{_LAYER}.post_attention_layernorm.weight",
            "layers.{i}.mlp_post_norm.weight": f"{_LAYER}.post_feedforward_layernorm.weight",
        },
        defaults={"rms_norm_eps": 1e-5},
        accepted=ACCEPTED,
        read=read_decoder,
        write=lambda spec, original: (
            write_decoder(spec, original) | {"attention_bias": False, "pad_token_id": original.get("pad_token_id")}
        ),
    ),
    presets={
        "olmo-2-1b": replace(_OLMO_2_7B, hidden=2048, layers=16, heads=16, kv_heads=16, intermediate=8192),
        "olmo-2-7b": _OLMO_2_7B,
        "olmo-2-13b": _OLMO_2_13B,
        "olmo-2-32b": replace(_OLMO_2_13B, layers=64, kv_heads=8, intermediate=27648),
    },
)
