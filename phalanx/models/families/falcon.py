"""Falcon: parallel attention and MLP, after one norm with a single key head (7B), or after two with grouped keys in the
new decoder (40B); queries, keys and values are one matrix, key head by key head. Those of the RefinedWeb paper have
ALiBi, and attention before the MLP.

Source: Almazrouei et al., "The Falcon Series of Open Language Models", 2023; Penedo et al., "The RefinedWeb Dataset for
Falcon LLM", 2023; shapes from the config.json of the repository of that name.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.layout.model_shape import BlockSpec, ModelSpec
from phalanx.models.families.decoder import DECODER_KEYS, PLAIN_PLAN, find_misfits, write_ids
from phalanx.models.families.family import (
    BlockOptions,
    HuggingFaceMapping,
    TaskChoice,
    name_both,
    read_count,
    read_flag,
    read_number,
)
from phalanx.models.families.llama import LLAMA
from phalanx.models.families.rotary import HF_ROPE_RULES, read_rope, write_rotary

_LAYER = "transformer.h.{i}"
_QKV = f"{_LAYER}.self_attention.query_key_value"
_FALCON_7B = ModelSpec(
    architecture="falcon", vocab_size=65024, hidden=4544, layers=32, heads=71, kv_heads=1, head_dim=64,
    intermediate=18176, max_seq_len=2048, tie_embeddings=True,
)  # fmt: skip
_TWO_NORMS = BlockSpec(shared_norm=False)


def _complete(spec: ModelSpec, given: Mapping[str, Any], task: TaskChoice) -> ModelSpec:
    """Complete the shape: with several key heads it is the new decoder."""
    if "kv_heads" not in given:
        return spec
    return replace(spec, block=replace(spec.block, shared_norm=None if spec.kv_heads == 1 else False))


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    theta, scaling = read_rope(config, where)
    heads, hidden = fields["heads"], fields["hidden"]
    new = read_flag(config, "new_decoder_architecture", where, False)
    single = not new and read_flag(config, "multi_query", where, True)
    shared = not new or read_count(config, "num_ln_in_parallel_attn", where, 2) == 1
    biases = True if read_flag(config, "bias", where, False) else None
    return {
        "kv_heads": read_count(config, "num_kv_heads", where, heads) if new else 1 if single else heads,
        "head_dim": hidden // max(1, heads),
        "intermediate": fields["intermediate"] or 4 * hidden,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "block": BlockSpec(shared_norm=None if shared else False, qkv_bias=biases, o_bias=biases, mlp_bias=biases),
    }


def _write(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    family = FALCON_RW if spec.architecture == FALCON_RW.name else FALCON
    options = family.options_of(spec)
    new = options.parallel and (not options.shared_norm or spec.kv_heads not in (1, spec.heads))
    return {
        **write_ids(original),
        **write_rotary(spec),
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (1 if options.shared_norm else 2) if new else None,
        "num_kv_heads": spec.kv_heads,
        "multi_query": spec.kv_heads == 1,
        "parallel_attn": options.parallel,
        "alibi": bool(options.alibi),
        "bias": options.qkv_bias,
        "activation": "gelu",
    }


FALCON = replace(
    LLAMA,
    name="falcon",
    title="Falcon",
    options=BlockOptions(norm="layer", parallel=True, shared_norm=True, gated=False, activation="gelu"),
    tensor_plan=PLAIN_PLAN,
    find_problems=lambda spec: find_misfits(spec, "Falcon", grouped=True, rules=HF_ROPE_RULES),
    start=lambda spec: replace(spec, intermediate=4 * spec.hidden, tie_embeddings=True),
    complete=_complete,
    hf=HuggingFaceMapping(
        model_type="falcon",
        classes={"FalconForCausalLM": "language"},
        names={"embed.weight": "transformer.word_embeddings.weight", "head.weight": "lm_head.weight"}
        | name_both(
            {
                "layers.{i}.norm": f"{_LAYER}.input_layernorm",
                "layers.{i}.attention_norm": f"{_LAYER}.ln_attn",
                "layers.{i}.mlp_norm": f"{_LAYER}.ln_mlp",
                **{f"layers.{{i}}.attention.{name}": _QKV for name in "qkv"},
                "layers.{i}.attention.o": f"{_LAYER}.self_attention.dense",
                "layers.{i}.mlp.up": f"{_LAYER}.mlp.dense_h_to_4h",
                "layers.{i}.mlp.down": f"{_LAYER}.mlp.dense_4h_to_h",
                "head.norm": "transformer.ln_f",
            }
        ),
        grouped=True,
        keys=DECODER_KEYS
        | {
            "norm_eps": ("layer_norm_epsilon", read_number, 1e-5),
            "intermediate": ("ffn_hidden_size", read_count, 0),
            "tie_embeddings": ("tie_word_embeddings", read_flag, True),
        },
        read=_read,
        write=_write,
        matches=lambda config: not config.get("alibi"),
        accepted={
            "alibi": (False, None),
            "parallel_attn": (True, None),
            "activation": ("gelu", None),
            "quantization_config": (None,),
        },
    ),
    presets={
        "falcon-7b": _FALCON_7B,
        "falcon-40b": replace(
            _FALCON_7B, hidden=8192, layers=60, heads=128, kv_heads=8, intermediate=32768, block=_TWO_NORMS
        ),
    },
)
_RW = BlockSpec(qkv_bias=True, o_bias=True, mlp_bias=True)
_FALCON_RW_1B = replace(
    _FALCON_7B, architecture="falcon_rw", vocab_size=50304, hidden=2048, layers=24, heads=32, kv_heads=32,
    intermediate=8192, block=_RW,
)  # fmt: skip
FALCON_RW = replace(
    FALCON,
    name="falcon_rw",
    title="Falcon-RW",
    options=BlockOptions(norm="layer", gated=False, activation="gelu", alibi="scaled", rotary_share=0.0),
    find_problems=lambda spec: find_misfits(spec, "Falcon-RW"),
    complete=lambda spec, given, task: spec,
    hf=replace(
        FALCON.hf,
        names={name: theirs for name, theirs in FALCON.hf.names.items() if "norm." not in name or "head." in name}
        | name_both(
            {
                "layers.{i}.attention_norm": f"{_LAYER}.input_layernorm",
                "layers.{i}.mlp_norm": f"{_LAYER}.post_attention_layernorm",
            }
        ),
        matches=lambda config: bool(config.get("alibi")),
        accepted={
            "alibi": (True,),
            "parallel_attn": (False,),
            "multi_query": (False,),
            "new_decoder_architecture": (False, None),
            "activation": ("gelu", None),
            "quantization_config": (None,),
        },
        cut_by_transform=False,
    ),
    presets={
        "falcon-rw-1b": _FALCON_RW_1B,
        "falcon-rw-7b": replace(
            _FALCON_RW_1B, vocab_size=65024, hidden=4096, layers=36, heads=64, kv_heads=64, intermediate=16384
        ),
    },
)
