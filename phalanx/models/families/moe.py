"""Mixture-of-experts families: Mixtral, Qwen3-MoE and OLMoE. In Hugging Face folders each expert has separate tensors.

Shapes from the config.json of the repository of that name.
"""

from dataclasses import replace
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import EXPERT_TARGETS, LATENT_TARGETS, MAX_LAYERS, LoraSpec, ModelSpec, MoESpec, Shapes
from phalanx.models.families.decoder import (
    ACCEPTED,
    HF_NAMES,
    TENSOR_PLAN,
    WHOLE_NORMS,
    decoder_flops,
    decoder_shapes,
    find_misfits,
    read_decoder,
    write_decoder,
)
from phalanx.models.families.family import BlockOptions, active_shapes, read_count, read_flag, read_number, shorten
from phalanx.models.families.llama import LLAMA, MISTRAL
from phalanx.models.families.rotary import HF_ROPE_RULES

_ROUTER, _GATE_UP, _DOWN = "mlp.router.weight", "mlp.experts.gate_up", "mlp.experts.down"
_HF_MLP = "model.layers.{i}.mlp"
HF_EXPERTS = {
    f"layers.{{i}}.{_GATE_UP}": tuple(f"{_HF_MLP}.experts.{{e}}.{name}_proj.weight" for name in ("gate", "up")),
    f"layers.{{i}}.{_DOWN}": (f"{_HF_MLP}.experts.{{e}}.down_proj.weight",),
}
# Of a folder: what would change the mathematics with the division of a batch.
_ACCEPTED = ACCEPTED | {"router_jitter_noise": (0, 0.0, None)}


def moe_shapes(spec: ModelSpec, options: BlockOptions) -> Shapes:
    """As `decoder_shapes`, with experts."""
    moe, found = spec.moe, Shapes()
    if moe is None:  # which `find_moe_problems` refuses
        return decoder_shapes(spec, options)
    experts = {
        _ROUTER: (moe.experts, spec.hidden),
        _GATE_UP: (moe.experts, 2 * moe.intermediate, spec.hidden),
        _DOWN: (moe.experts, spec.hidden, moe.intermediate),
    }
    for name, shape in decoder_shapes(spec, options).items():
        block, inside, part = name.partition(".mlp.")
        if not inside or not spec.has_experts(int(block.rpartition(".")[2])):
            found[name] = shape
        elif part == "gate.weight":
            found |= {f"{block}.{each}": of for each, of in experts.items()}
    return found


def moe_flops(spec: ModelSpec, seq_len: int, shapes: Shapes) -> tuple[int, int]:
    """As `decoder_flops`, of the parameters that a token goes through."""
    return decoder_flops(spec, seq_len, active_shapes(spec, shapes))


def find_moe_problems(spec: ModelSpec, title: str, grouped: bool = False) -> list[str]:
    """Problems of the experts of a shape in the family `title`, which may have them in groups and shared if
    `grouped`."""
    moe, found = spec.moe, list[str]()
    if moe is None:
        return [
            f"a {title} has experts, and model.moe does not say how many; set model.moe.experts and "
            "model.moe.experts_per_token."
        ]
    if not 1 <= moe.experts_per_token <= moe.experts:
        found.append(
            f"model.moe.experts_per_token is {moe.experts_per_token} and model.moe.experts is {moe.experts}, but a "
            "token goes through at least one of them and at most all; change one of the two."
        )
    if not grouped and (moe.scale, moe.shared, moe.groups) != (1.0, 0, 1):
        found.append(
            f"model.moe.scale, shared or groups is set, which {title} does not support; remove it, or set "
            "model.architecture to deepseek_v3."
        )
    if not any(spec.has_experts(layer) for layer in range(spec.layers)):
        found.append("no layer of the model has experts; set fewer model.moe.dense_layers, or an architecture without.")
    if moe.balance == "bias" and moe.scores != "sigmoid":
        found.append(
            f"model.moe.balance is bias, which moves corrections of scores, and {title} has none; set "
            "model.moe.balance to another one, or model.architecture to deepseek_v3."
        )
    if moe.over == "model" and moe.balance not in ("step_before", "step"):
        found.append(
            f"model.moe.over is model, which pools what a step has counted, and model.moe.balance is {moe.balance}; "
            "set model.moe.balance to step_before or step, or model.moe.over to layer."
        )
    if spec.lora is None:
        return found
    attention = "q, k, v, o" if spec.latent is None else ", ".join(("q", "o", *LATENT_TARGETS))
    return found + _find_adapter_problems(moe, spec.lora, attention)


def _find_adapter_problems(moe: MoESpec, lora: LoraSpec, attention: str) -> list[str]:
    found, experts = list[str](), [target for target in lora.targets if target in EXPERT_TARGETS]
    if adapted := {"gate", "up", "down"} & set(lora.targets):
        found.append(
            f"model.lora.targets names {', '.join(sorted(adapted))}, but experts are stacks; set model.lora.targets to "
            f"some of {attention}, {', '.join(EXPERT_TARGETS)}."
        )
    if experts and moe.dense_layers:
        found.append(
            f"model.lora.targets names {', '.join(experts)}, but layers {', '.join(map(str, moe.dense_layers))} have "
            f"no experts, and adapters are the same in all layers; set model.lora.targets to some of {attention}."
        )
    if experts and lora.dropout:
        found.append(
            f"model.lora.dropout is {lora.dropout}, and PEFT has no dropout of adapters of experts "
            f"({', '.join(experts)}); set it to 0, or model.lora.targets to some of {attention}."
        )
    return found


def find_uneven(spec: ModelSpec, title: str) -> list[str]:
    """Problems of a shape in a family whose layers all have experts of the width `model.intermediate`."""
    if spec.moe is None or (spec.moe.intermediate == spec.intermediate and not spec.moe.dense_layers):
        return []
    return [
        f"all layers of {title} are of experts of the width model.intermediate, {spec.intermediate}, so that no export "
        "could say model.moe.intermediate or model.moe.dense_layers; remove these."
    ]


def read_moe(config: dict[str, Any], where: str, width: str, renormalize: bool) -> dict[str, Any]:
    """Read the field `moe`; `width` is the key of experts' width."""
    experts = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    asked = read_flag(config, "output_router_logits", where, False)
    moe = MoESpec(
        experts=read_count(config, experts, where),
        experts_per_token=read_count(config, "num_experts_per_tok", where),
        intermediate=read_count(config, width, where),
        renormalize=renormalize,
        # Theirs is over each micro-batch; the nearest that no division changes is over the step before.
        balance="step_before" if asked else "none",
        balance_weight=float(read_number(config, "router_aux_loss_coef", where)),
        over="model" if asked else "layer",
    )
    return {"moe": moe}


def write_moe(spec: ModelSpec, experts: str) -> dict[str, Any]:
    """Write the keys of experts; `experts` is that of their number."""
    moe = spec.moe
    assert moe is not None
    return {
        experts: moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
        "router_aux_loss_coef": moe.balance_weight,
        "output_router_logits": moe.balance not in ("bias", "none"),
    }


def _read_mixtral(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    return MISTRAL.hf.read(config, fields, where) | read_moe(config, where, "intermediate_size", True)


def _read_olmoe(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    renormalize = read_flag(config, "norm_topk_prob", where, False)
    return read_decoder(config, fields, where) | read_moe(config, where, "intermediate_size", renormalize)


def _read_qwen3(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    layers, every = fields["layers"], read_count(config, "decoder_sparse_step", where, 1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(each) is int and 0 <= each < layers for each in named) or not every:
        raise ConfigError(
            f"{where} sets mlp_only_layers to {shorten(named)} and decoder_sparse_step to {every}, but these are "
            f"numbers of some of its {layers} layers and one of at least 1; correct them."
        )
    dense = tuple(each for each in range(min(layers, MAX_LAYERS)) if each in named or (each + 1) % every)
    found = read_moe(config, where, "moe_intermediate_size", read_flag(config, "norm_topk_prob", where, False))
    return read_decoder(config, fields, where) | {"moe": replace(found["moe"], dense_layers=dense)}


def _write_qwen3(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    moe = spec.moe
    assert moe is not None
    return (
        write_decoder(spec, original)
        | write_moe(spec, "num_experts")
        | {
            "moe_intermediate_size": moe.intermediate,
            "norm_topk_prob": moe.renormalize,
            "mlp_only_layers": list(moe.dense_layers),
            "decoder_sparse_step": 1,
            "attention_bias": False,
            "use_sliding_window": False,
        }
    )


def _write_olmoe(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    moe = spec.moe
    assert moe is not None
    more = {"norm_topk_prob": moe.renormalize, "attention_bias": False, "pad_token_id": original.get("pad_token_id")}
    return write_decoder(spec, original) | write_moe(spec, "num_experts") | more


def _renormalizing(spec: ModelSpec) -> list[str]:
    if spec.moe is None or spec.moe.renormalize:
        return []
    return ["model.moe.renormalize is false, which Mixtral does not support; remove it."]


HF_MOE_NAMES = {f"layers.{{i}}.{_ROUTER}": f"{_HF_MLP}.gate.weight"}
_HF_MIXTRAL = "model.layers.{i}.block_sparse_moe"
_MIXTRAL_8X7B = ModelSpec(
    architecture="mixtral", vocab_size=32000, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
    intermediate=14336, max_seq_len=32768, rope_theta=1e6,
    moe=MoESpec(experts=8, experts_per_token=2, intermediate=14336),
)  # fmt: skip
_QWEN_3_30B = ModelSpec(
    architecture="qwen3_moe", vocab_size=151936, hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128,
    intermediate=6144, max_seq_len=40960, rope_theta=1e6, norm_eps=1e-6,
    moe=MoESpec(experts=128, experts_per_token=8, intermediate=768, balance_weight=0.001),
)  # fmt: skip
_OLMOE_7B = ModelSpec(
    architecture="olmoe", vocab_size=50304, hidden=2048, layers=16, heads=16, kv_heads=16, head_dim=128,
    intermediate=1024, max_seq_len=4096,
    moe=MoESpec(experts=64, experts_per_token=8, intermediate=1024, renormalize=False),
)  # fmt: skip

MIXTRAL = replace(
    LLAMA,
    name="mixtral",
    title="Mixtral",
    network="phalanx.models.moe:MoEDecoder",
    shapes=moe_shapes,
    flops=moe_flops,
    find_problems=lambda spec: [
        *find_moe_problems(spec, "Mixtral"),
        *find_uneven(spec, "Mixtral"),
        *_renormalizing(spec),
    ],
    hf=replace(
        MISTRAL.hf,
        model_type="mixtral",
        classes={"MixtralForCausalLM": "language"},
        names=HF_NAMES | {f"layers.{{i}}.{_ROUTER}": f"{_HF_MIXTRAL}.gate.weight"},
        stacks={
            f"layers.{{i}}.{_GATE_UP}": tuple(f"{_HF_MIXTRAL}.experts.{{e}}.{name}.weight" for name in ("w1", "w3")),
            f"layers.{{i}}.{_DOWN}": (f"{_HF_MIXTRAL}.experts.{{e}}.w2.weight",),
        },
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        accepted=_ACCEPTED,
        read=_read_mixtral,
        write=lambda spec, original: MISTRAL.hf.write(spec, original) | write_moe(spec, "num_local_experts"),
    ),
    presets={
        "mixtral-8x7b": _MIXTRAL_8X7B,
        "mixtral-8x22b": replace(
            _MIXTRAL_8X7B, hidden=6144, layers=56, heads=48, intermediate=16384, max_seq_len=65536,
            moe=MoESpec(experts=8, experts_per_token=2, intermediate=16384),
        ),
    },
)  # fmt: skip
QWEN3_MOE = replace(
    MIXTRAL,
    name="qwen3_moe",
    title="Qwen3 MoE",
    options=BlockOptions(qk_norm="heads"),
    find_problems=lambda spec: [
        *find_moe_problems(spec, "Qwen3 MoE"),
        *find_misfits(spec, "Qwen3 MoE", grouped=True, rules=HF_ROPE_RULES, any_width=True),
    ],
    start=lambda spec: replace(spec, norm_eps=1e-6),
    hf=replace(
        LLAMA.hf,
        model_type="qwen3_moe",
        classes={"Qwen3MoeForCausalLM": "language"},
        names=HF_NAMES | HF_MOE_NAMES,
        stacks=HF_EXPERTS,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "router_aux_loss_coef": 0.001,
        },
        accepted=_ACCEPTED | {"use_sliding_window": (False, None)},
        read=_read_qwen3,
        write=_write_qwen3,
        forgotten=("num_local_experts", "sliding_window", "max_window_layers"),
        cut_by_transform=False,
    ),
    presets={
        "qwen3-30b-a3b": _QWEN_3_30B,
        "qwen3-235b-a22b": replace(
            _QWEN_3_30B, hidden=4096, layers=94, heads=64, intermediate=12288,
            moe=MoESpec(experts=128, experts_per_token=8, intermediate=1536, balance_weight=0.001),
        ),
    },
)  # fmt: skip
OLMOE = replace(
    MIXTRAL,
    name="olmoe",
    title="OLMoE",
    options=BlockOptions(qk_norm="whole"),
    tensor_plan=TENSOR_PLAN | WHOLE_NORMS,
    find_problems=lambda spec: [
        *find_moe_problems(spec, "OLMoE"),
        *find_uneven(spec, "OLMoE"),
        *find_misfits(spec, "OLMoE", grouped=True, rules=HF_ROPE_RULES),
    ],
    hf=replace(
        QWEN3_MOE.hf,
        model_type="olmoe",
        classes={"OlmoeForCausalLM": "language"},
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "router_aux_loss_coef": 0.01,
        },
        accepted=_ACCEPTED | {"clip_qkv": (None,)},
        read=_read_olmoe,
        write=_write_olmoe,
        forgotten=("num_local_experts",),
    ),
    presets={"olmoe-1b-7b": _OLMOE_7B},
)
