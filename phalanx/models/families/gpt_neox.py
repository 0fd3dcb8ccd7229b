"""GPT-NeoX and Pythia: parallel attention and MLP, LayerNorm, rotary positions on a share of each head's channels, and
an MLP without a gate; queries, keys and values are one matrix, head by head.

Source: Black et al., "GPT-NeoX-20B", 2022; Biderman et al., "Pythia", 2023; shapes from the config.json of the
repository of that name.
"""

from dataclasses import replace
from typing import Any

from phalanx.layout.model_shape import BlockSpec, ModelSpec
from phalanx.models.families.decoder import (
    DECODER_KEYS,
    PLAIN_PLAN,
    find_misfits,
    read_activation,
    resize,
    write_activation,
    write_ids,
)
from phalanx.models.families.family import BlockOptions, HuggingFaceMapping, name_both, read_flag, read_number
from phalanx.models.families.llama import LLAMA
from phalanx.models.families.rotary import HF_ROPE_RULES, read_rope, read_rotary_share, write_rope

_OPTIONS = BlockOptions(
    norm="layer", parallel=True, qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, activation="gelu",
    rotary_share=0.25,
)  # fmt: skip
_LAYER = "gpt_neox.layers.{i}"
_QKV = f"{_LAYER}.attention.query_key_value"
_PYTHIA_1_4B = ModelSpec(
    architecture="gpt_neox", vocab_size=50304, hidden=2048, layers=24, heads=16, kv_heads=16, head_dim=128,
    intermediate=8192, max_seq_len=2048,
)  # fmt: skip
_PYTHIA_6_9B = replace(resize(_PYTHIA_1_4B, 4096, 32, 32), vocab_size=50432)


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    # transformers 4 has separate keys for rotary positions; 5 has them in rope_parameters.
    theta, scaling = read_rope({**config, "rope_theta": config.get("rotary_emb_base")}, where, partial=True)
    share = read_rotary_share(config, "rotary_pct", where, 0.25)
    parallel = read_flag(config, "use_parallel_residual", where, True)
    biases = read_flag(config, "attention_bias", where, True)
    block = BlockSpec(
        activation=read_activation(config, "hidden_act", where, _OPTIONS.activation),
        parallel=None if parallel else False,
        rotary_share=None if share == _OPTIONS.rotary_share else share,
        qkv_bias=None if biases else False,
        o_bias=None if biases else False,
    )
    head_dim = fields["hidden"] // max(1, fields["heads"])
    shape = {"kv_heads": fields["heads"], "head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling}
    return shape | {"block": block}


def _write(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    options, rule = GPT_NEOX.options_of(spec), write_rope(spec.rope_scaling)
    turned = {"rope_theta": spec.rope_theta, "partial_rotary_factor": options.rotary_share}
    return {
        **write_activation("hidden_act", options.activation, original, "gelu"),
        **write_ids(original),
        "use_parallel_residual": options.parallel,
        "attention_bias": options.qkv_bias,
        "rotary_pct": options.rotary_share,
        "rotary_emb_base": spec.rope_theta,
        "rope_scaling": None if spec.rope_scaling is None else rule,
        "rope_parameters": rule | turned,
    }


GPT_NEOX = replace(
    LLAMA,
    name="gpt_neox",
    title="GPT-NeoX",
    options=_OPTIONS,
    tensor_plan=PLAIN_PLAN,
    find_problems=lambda spec: find_misfits(spec, "GPT-NeoX", rules=HF_ROPE_RULES),
    start=lambda spec: replace(spec, intermediate=4 * spec.hidden),
    hf=HuggingFaceMapping(
        model_type="gpt_neox",
        classes={"GPTNeoXForCausalLM": "language"},
        names={"embed.weight": "gpt_neox.embed_in.weight", "head.weight": "embed_out.weight"}
        | name_both(
            {
                "layers.{i}.attention_norm": f"{_LAYER}.input_layernorm",
                **{f"layers.{{i}}.attention.{name}": _QKV for name in "qkv"},
                "layers.{i}.attention.o": f"{_LAYER}.attention.dense",
                "layers.{i}.mlp_norm": f"{_LAYER}.post_attention_layernorm",
                "layers.{i}.mlp.up": f"{_LAYER}.mlp.dense_h_to_4h",
                "layers.{i}.mlp.down": f"{_LAYER}.mlp.dense_4h_to_h",
                "head.norm": "gpt_neox.final_layer_norm",
            }
        ),
        other_names={"embed_out.weight": "lm_head.weight"},  # its name in transformers 5
        ignored=(".attention.bias", ".attention.masked_bias"),  # causal masks
        grouped=True,
        keys=DECODER_KEYS | {"norm_eps": ("layer_norm_eps", read_number, 1e-5)},
        read=_read,
        write=_write,
        accepted={"quantization_config": (None,), "is_decoder": (False, True, None)},
    ),
    presets={
        "pythia-70m": resize(_PYTHIA_1_4B, 512, 6, 8),
        "pythia-160m": resize(_PYTHIA_1_4B, 768, 12, 12),
        "pythia-410m": resize(_PYTHIA_1_4B, 1024, 24, 16),
        "pythia-1b": resize(_PYTHIA_1_4B, 2048, 16, 8),
        "pythia-1.4b": _PYTHIA_1_4B,
        "pythia-2.8b": resize(_PYTHIA_1_4B, 2560, 32, 32),
        "pythia-6.9b": _PYTHIA_6_9B,
        "pythia-12b": replace(resize(_PYTHIA_1_4B, 5120, 36, 40), vocab_size=50688),
        "gpt-neox-20b": replace(resize(_PYTHIA_6_9B, 6144, 44, 64), block=BlockSpec(activation="gelu_tanh")),
    },
)
