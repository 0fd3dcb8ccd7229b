"""GPT-OSS: a mixture of experts with biases and a clamped gate; a window in every second layer, attention with sinks.

In Hugging Face folders the experts of a layer are whole stacks, which are read as they are, (E, in, out), or in MXFP4
(models/mxfp4.py). Source: OpenAI, "gpt-oss-120b and gpt-oss-20b Model Card", 2025; shapes from the config.json of the
repository of that name.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec, MoESpec, RopeScaling, Shapes
from phalanx.models.families.decoder import (
    ACCEPTED,
    HF_NAMES,
    TENSOR_PLAN,
    decoder_shapes,
    find_misfits,
    read_decoder,
    read_layer_types,
    window_fields,
    write_decoder,
    write_layer_types,
)
from phalanx.models.families.family import BlockOptions, TaskChoice, read_count
from phalanx.models.families.llama import LLAMA
from phalanx.models.families.moe import MIXTRAL, find_moe_problems, find_uneven, moe_flops, read_moe, write_moe
from phalanx.models.families.rotary import HF_ROPE_RULES

_WINDOW, _THETA = 128, 150000.0
# transformers' rule where config.json has none.
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_ROPE = RopeScaling(rule="yarn", factor=32.0, original_max_seq_len=4096, truncate=False)
_MLP = "model.layers.{i}.mlp"
_QUANTIZED = "quantization_config"


def _full_layers(layers: int) -> tuple[int, ...]:
    return tuple(range(1, layers, 2))


def _shapes(spec: ModelSpec, options: BlockOptions) -> Shapes:
    """As `decoder_shapes`, with experts whose matrices are (in, out)."""
    moe, found = spec.moe, Shapes()
    if moe is None:  # which `find_moe_problems` refuses
        return decoder_shapes(spec, options)
    experts, width, inner = moe.experts, spec.hidden, moe.intermediate
    of_layer = {
        "router.weight": (experts, width),
        "router.bias": (experts,),
        "experts.gate_up": (experts, width, 2 * inner),
        "experts.gate_up_bias": (experts, 2 * inner),
        "experts.down": (experts, inner, width),
        "experts.down_bias": (experts, width),
    }
    for name, shape in decoder_shapes(spec, options).items():
        block, inside, part = name.partition(".mlp.")
        if not inside:
            found[name] = shape
        elif part == "gate.weight":
            found |= {f"{block}.mlp.{each}": of for each, of in of_layer.items()}
    return found


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    quantized = config.get(_QUANTIZED)
    if quantized is not None and (not isinstance(quantized, dict) or quantized.get("quant_method") != "mxfp4"):
        raise ConfigError(
            f"{where} sets {_QUANTIZED}: {json.dumps(quantized)}, but of quantized weights only those in MXFP4 are "
            "read; use a folder without, or in MXFP4."
        )
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config = {**config, "rope_scaling": _YARN}
    window = read_count(config, "sliding_window", where, _WINDOW)
    slides = read_layer_types(config, fields["layers"], where)
    if slides is None:
        slides = [layer % 2 == 0 for layer in range(fields["layers"])]
    found = read_decoder(config, fields, where) | window_fields(window, slides)
    return found | read_moe(config, where, "intermediate_size", renormalize=True)


def _write(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    found = write_decoder(spec, original) | write_moe(spec, "num_local_experts")
    return found | {
        "sliding_window": spec.sliding_window or _WINDOW,
        "layer_types": write_layer_types(spec),
        "attention_bias": True,
        "attention_dropout": 0.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "pad_token_id": original.get("pad_token_id"),
    }


def _start(spec: ModelSpec) -> ModelSpec:
    full = _full_layers(spec.layers)
    spec = replace(spec, rope_theta=_THETA, rope_scaling=_ROPE, sliding_window=_WINDOW, full_attention_layers=full)
    return replace(spec, norm_eps=1e-5)


def _complete(spec: ModelSpec, given: Mapping[str, Any], task: TaskChoice) -> ModelSpec:
    return replace(spec, full_attention_layers=_full_layers(spec.layers)) if "layers" in given else spec


def _find_problems(spec: ModelSpec) -> list[str]:
    found = [*find_moe_problems(spec, "GPT-OSS"), *find_uneven(spec, "GPT-OSS")]
    if spec.moe is not None and not spec.moe.renormalize:
        found.append("model.moe.renormalize is false, which GPT-OSS does not support; remove it.")
    return found + find_misfits(spec, "GPT-OSS", window=True, grouped=True, rules=HF_ROPE_RULES, any_width=True)


_GPT_OSS_20B = ModelSpec(
    architecture="gpt_oss", vocab_size=201088, hidden=2880, layers=24, heads=64, kv_heads=8, head_dim=64,
    intermediate=2880, max_seq_len=131072, rope_theta=_THETA, rope_scaling=_ROPE, sliding_window=_WINDOW,
    full_attention_layers=_full_layers(24),
    moe=MoESpec(experts=32, experts_per_token=4, intermediate=2880, balance_weight=0.001),
)  # fmt: skip
GPT_OSS = replace(
    MIXTRAL,
    name="gpt_oss",
    title="GPT-OSS",
    options=BlockOptions(qkv_bias=True, o_bias=True, sinks=True, experts="clamped"),
    tensor_plan=TENSOR_PLAN | {"attention": "column"},  # the sinks of heads
    shapes=_shapes,
    flops=moe_flops,
    find_problems=_find_problems,
    start=_start,
    complete=_complete,
    hf=replace(
        LLAMA.hf,
        model_type="gpt_oss",
        classes={"GptOssForCausalLM": "language"},
        names=HF_NAMES
        | {
            "layers.{i}.attention.sinks": "model.layers.{i}.self_attn.sinks",
            "layers.{i}.mlp.router.weight": f"{_MLP}.router.weight",
            "layers.{i}.mlp.router.bias": f"{_MLP}.router.bias",
            "layers.{i}.mlp.experts.gate_up": f"{_MLP}.experts.gate_up_proj",
            "layers.{i}.mlp.experts.gate_up_bias": f"{_MLP}.experts.gate_up_proj_bias",
            "layers.{i}.mlp.experts.down": f"{_MLP}.experts.down_proj",
            "layers.{i}.mlp.experts.down_bias": f"{_MLP}.experts.down_proj_bias",
        },
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": _THETA,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4,
            "router_aux_loss_coef": 0.001,
        },
        accepted={name: values for name, values in ACCEPTED.items() if name not in ("attention_bias", _QUANTIZED)}
        | {"attention_bias": (True, None), "swiglu_alpha": (1.702, None), "swiglu_limit": (7.0, 7, None)},
        read=_read,
        write=_write,
        forgotten=("num_experts", _QUANTIZED),
        cut_by_transform=False,
    ),
    presets={
        "gpt-oss-20b": _GPT_OSS_20B,
        "gpt-oss-120b": replace(
            _GPT_OSS_20B, layers=36, full_attention_layers=_full_layers(36),
            moe=MoESpec(experts=128, experts_per_token=4, intermediate=2880, balance_weight=0.001),
        ),
    },
)  # fmt: skip
