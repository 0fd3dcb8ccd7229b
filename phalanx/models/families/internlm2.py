"""InternLM2: a Llama whose queries, keys and values are one matrix, key head by key head, with different parameter
names.

transformers has no class for it: a folder contains the code. Source: Cai et al., "InternLM2 Technical Report", 2024;
shapes from the config.json of the repository of that name.
"""

from dataclasses import replace
from typing import Any

from phalanx.layout.model_shape import BlockSpec, ModelSpec
from phalanx.models.families.decoder import ACCEPTED, find_misfits, read_decoder, write_decoder
from phalanx.models.families.family import ModelFamily, name_both, read_flag
from phalanx.models.families.llama import LLAMA

_LAYER = "model.layers.{i}"
_INTERNLM2_7B = ModelSpec(
    architecture="internlm2", vocab_size=92544, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
    intermediate=14336, max_seq_len=32768, rope_theta=1e6,
)  # fmt: skip


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    biases = True if read_flag(config, "bias", where, True) else None
    return read_decoder(config, fields, where) | {"block": BlockSpec(qkv_bias=biases, o_bias=biases)}


INTERNLM2: ModelFamily = replace(
    LLAMA,
    name="internlm2",
    title="InternLM2",
    find_problems=lambda spec: find_misfits(spec, "InternLM2", grouped=True, rules=("linear", "dynamic")),
    hf=replace(
        LLAMA.hf,
        model_type="internlm2",
        classes={"InternLM2ForCausalLM": "language"},
        names={
            "embed.weight": "model.tok_embeddings.weight",
            "layers.{i}.attention_norm.weight": f"{_LAYER}.attention_norm.weight",
            "layers.{i}.mlp_norm.weight": f"{_LAYER}.ffn_norm.weight",
            "layers.{i}.mlp.gate.weight": f"{_LAYER}.feed_forward.w1.weight",
            "layers.{i}.mlp.up.weight": f"{_LAYER}.feed_forward.w3.weight",
            "layers.{i}.mlp.down.weight": f"{_LAYER}.feed_forward.w2.weight",
            "head.norm.weight": "model.norm.weight",
            "head.weight": "output.weight",
        }
        | name_both(
            {
                **{f"layers.{{i}}.attention.{name}": f"{_LAYER}.attention.wqkv" for name in "qkv"},
                "layers.{i}.attention.o": f"{_LAYER}.attention.wo",
            }
        ),
        grouped=True,
        read=_read,
        write=lambda spec, original: write_decoder(spec, original) | {"bias": INTERNLM2.options_of(spec).qkv_bias},
        accepted=ACCEPTED,
        cut_by_transform=False,
    ),
    presets={
        "internlm2-1.8b": replace(_INTERNLM2_7B, hidden=2048, layers=24, heads=16, intermediate=8192),
        "internlm2-7b": _INTERNLM2_7B,
        "internlm2-20b": replace(_INTERNLM2_7B, hidden=6144, layers=48, heads=48, intermediate=16384),
    },
)
