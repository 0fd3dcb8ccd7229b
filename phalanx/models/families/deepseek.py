"""DeepSeek-V3 and models of its kind (Moonlight): latent attention, and experts that are chosen by sigmoid scores with
corrections, within the best groups of them, beside shared ones; the first layers are dense.

The corrections keep the load of experts even without a loss (`model.moe.balance: bias`), or stay as they are. Source:
DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024; shapes from the config.json of the repository of that name.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.layout.model_shape import LatentSpec, ModelSpec, MoESpec, RopeScaling, Shapes
from phalanx.models.families.decoder import (
    ACCEPTED,
    HF_NAMES,
    TENSOR_PLAN,
    decoder_flops,
    find_misfits,
    write_decoder,
)
from phalanx.models.families.family import BlockOptions, TaskChoice, active_shapes, read_count, read_flag, read_number
from phalanx.models.families.llama import LLAMA
from phalanx.models.families.moe import (
    HF_EXPERTS,
    HF_MOE_NAMES,
    MIXTRAL,
    find_moe_problems,
    moe_shapes,
    read_moe,
    write_moe,
)
from phalanx.models.families.rotary import HF_ROPE_RULES, read_rope

_ATTENTION, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"


def _shapes(spec: ModelSpec, options: BlockOptions) -> Shapes:
    """As `moe_shapes`, with latent attention, corrections and shared experts."""
    latent, moe, found = spec.latent, spec.moe, Shapes()
    if latent is None or moe is None:  # which `_find_problems` refuses
        return moe_shapes(spec, options)
    attention = latent.shapes(spec.hidden, spec.heads, spec.head_dim)
    shared = moe.shared * moe.intermediate
    beside = {"gate": (shared, spec.hidden), "up": (shared, spec.hidden), "down": (spec.hidden, shared)}
    for name, shape in moe_shapes(spec, options).items():
        block, inside, part = name.partition(".attention.")
        if not inside:
            found[name] = shape
        elif part == "q.weight":
            found |= {f"{block}.attention.{each}": of for each, of in attention.items()}
        if name.endswith(".mlp.router.weight"):
            layer = name.removesuffix(".router.weight")
            found[f"{layer}.router.correction"] = (moe.experts,)
            found |= {f"{layer}.shared.{each}.weight": of for each, of in beside.items() if moe.shared}
    return found


def _flops(spec: ModelSpec, seq_len: int, shapes: Shapes) -> tuple[int, int]:
    """As `decoder_flops`, of the parameters that a token goes through; keys and values are not of one width."""
    width = spec.head_dim if spec.latent is None else spec.latent.mean_width(spec.head_dim)
    return decoder_flops(replace(spec, head_dim=width), seq_len, active_shapes(spec, shapes))


def _complete(spec: ModelSpec, given: Mapping[str, Any], task: TaskChoice) -> ModelSpec:
    return spec if spec.moe is None else replace(spec, moe=replace(spec.moe, scores="sigmoid"))


def _find_problems(spec: ModelSpec) -> list[str]:
    moe, latent = spec.moe, spec.latent
    found = find_moe_problems(spec, "DeepSeek-V3", grouped=True)
    found += find_misfits(spec, "DeepSeek-V3", rules=HF_ROPE_RULES, any_width=True)
    if latent is None:
        return [*found, "a DeepSeek-V3 has latent attention, and model.latent does not say of which widths; set it."]
    if not (latent.key_rank and 0 < latent.value_dim <= latent.plain_dim + spec.head_dim):
        found.append(
            f"model.latent gives values {latent.value_dim} channels and queries {latent.plain_dim + spec.head_dim}, "
            f"and keys come from {latent.key_rank} numbers, but values have 1 to as many channels as queries, and keys "
            "come from 1 number at least; change it."
        )
    if moe is None:
        return found
    if moe.dense_layers != tuple(range(len(moe.dense_layers))):
        found.append(
            f"model.moe.dense_layers is {list(moe.dense_layers)}, but those of a DeepSeek-V3 are its first; set 0 to n."
        )
    if moe.experts % moe.groups or not 1 <= moe.groups_per_token <= moe.groups or moe.experts < 2 * moe.groups:
        found.append(
            f"model.moe.experts is {moe.experts}, which does not make {moe.groups} groups of two or more, of which a "
            f"token goes to {moe.groups_per_token}; set a multiple."
        )
    elif moe.experts_per_token > moe.groups_per_token * (moe.experts // moe.groups):
        found.append(
            f"model.moe.experts_per_token is {moe.experts_per_token}, more than {moe.groups_per_token} of "
            f"{moe.groups} groups have; lower it."
        )
    return found


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    theta, scaling = read_rope(config, where)
    query_rank = 0 if config.get("q_lora_rank") is None else read_count(config, "q_lora_rank", where)
    latent = LatentSpec(
        query_rank=query_rank,
        key_rank=read_count(config, "kv_lora_rank", where),
        plain_dim=read_count(config, "qk_nope_head_dim", where),
        value_dim=read_count(config, "v_head_dim", where),
    )
    renormalize = read_flag(config, "norm_topk_prob", where, True)
    named = {**config, "num_local_experts": config.get("n_routed_experts")}
    moe: MoESpec = read_moe(named, where, "moe_intermediate_size", renormalize)["moe"]
    moe = replace(
        moe,
        dense_layers=tuple(range(min(read_count(config, "first_k_dense_replace", where), fields["layers"]))),
        scores="sigmoid",
        scale=float(read_number(config, "routed_scaling_factor", where)),
        shared=read_count(config, "n_shared_experts", where),
        groups=max(1, read_count(config, "n_group", where)),
        groups_per_token=read_count(config, "topk_group", where),
    )
    return {
        "kv_heads": read_count(config, "num_key_value_heads", where, fields["heads"]),
        "head_dim": read_count(config, "qk_rope_head_dim", where),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "latent": latent,
        "moe": moe,
    }


def _write(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    moe, latent = spec.moe, spec.latent
    assert moe is not None
    assert latent is not None
    return (
        write_decoder(spec, original)
        | write_moe(spec, "n_routed_experts")
        | {
            "q_lora_rank": latent.query_rank or None,
            "kv_lora_rank": latent.key_rank,
            "qk_nope_head_dim": latent.plain_dim,
            "qk_rope_head_dim": spec.head_dim,
            "v_head_dim": latent.value_dim,
            "moe_intermediate_size": moe.intermediate,
            "first_k_dense_replace": len(moe.dense_layers),
            "n_shared_experts": moe.shared,
            "n_group": moe.groups,
            "topk_group": moe.groups_per_token,
            "norm_topk_prob": moe.renormalize,
            "routed_scaling_factor": moe.scale,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "attention_bias": False,
            "rope_interleave": True,
            "num_nextn_predict_layers": 0,
            "pad_token_id": original.get("pad_token_id"),
        }
    )


_WIDTHS = LatentSpec(query_rank=1536, key_rank=512, plain_dim=128, value_dim=128)
_DEEPSEEK_V3 = ModelSpec(
    architecture="deepseek_v3", vocab_size=129280, hidden=7168, layers=61, heads=128, kv_heads=128, head_dim=64,
    intermediate=18432, max_seq_len=163840, norm_eps=1e-6, latent=_WIDTHS,
    rope_scaling=RopeScaling(rule="yarn", factor=40.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=1.0),
    moe=MoESpec(
        experts=256, experts_per_token=8, intermediate=2048, dense_layers=(0, 1, 2), balance_weight=0.0001,
        scores="sigmoid", scale=2.5, shared=1, groups=8, groups_per_token=4,
    ),
)  # fmt: skip
DEEPSEEK_V3 = replace(
    MIXTRAL,
    name="deepseek_v3",
    title="DeepSeek-V3",
    network="phalanx.models.latent_attention:LatentMoEDecoder",
    options=BlockOptions(),
    tensor_plan=TENSOR_PLAN
    | {f"attention.{narrow}_down": "narrow" for narrow in ("q", "kv")}
    | {f"attention.{narrow}_up": "column_entered" for narrow in ("q", "kv")}
    | {f"mlp.shared.{name}": TENSOR_PLAN[f"mlp.{name}"] for name in ("gate", "up", "down")},
    shapes=_shapes,
    flops=_flops,
    find_problems=_find_problems,
    start=lambda spec: replace(spec, norm_eps=1e-6),
    complete=_complete,
    hf=replace(
        LLAMA.hf,
        model_type="deepseek_v3",
        classes={"DeepseekV3ForCausalLM": "language"},
        names={name: theirs for name, theirs in HF_NAMES.items() if ".attention." not in name}
        | HF_MOE_NAMES
        | {
            f"layers.{{i}}.attention.{ours}.weight": f"{_ATTENTION}.{theirs}.weight"
            for ours, theirs in {
                "q": "q_proj", "q_down": "q_a_proj", "q_down_norm": "q_a_layernorm", "q_up": "q_b_proj",
                "kv_down": "kv_a_proj_with_mqa", "kv_down_norm": "kv_a_layernorm", "kv_up": "kv_b_proj", "o": "o_proj",
            }.items()
        }
        | {"layers.{i}.mlp.router.correction": f"{_MLP}.gate.e_score_correction_bias"}
        | {
            f"layers.{{i}}.mlp.shared.{name}.weight": f"{_MLP}.shared_experts.{name}_proj.weight"
            for name in ("gate", "up", "down")
        },
        stacks=HF_EXPERTS,
        ahead=".eh_proj.weight",
        wide=(".e_score_correction_bias",),
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "router_aux_loss_coef": 0.0001,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "n_shared_experts": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8,
            "topk_group": 4,
        },
        accepted=ACCEPTED
        | {
            "rope_interleave": (True, None),
            "scoring_func": ("sigmoid", None),
            "topk_method": ("noaux_tc", None),
            "moe_layer_freq": (1, None),
        },
        read=_read,
        write=_write,
        forgotten=("num_local_experts", "num_mtp_layers"),
        cut_by_transform=False,
    ),
    presets={
        "deepseek-v3": _DEEPSEEK_V3,
        "moonlight-16b-a3b": replace(
            _DEEPSEEK_V3, vocab_size=163840, hidden=2048, layers=27, heads=16, kv_heads=16, intermediate=11264,
            max_seq_len=8192, rope_theta=50000.0, rope_scaling=None, norm_eps=1e-5,
            latent=replace(_WIDTHS, query_rank=0),
            moe=MoESpec(
                experts=64, experts_per_token=6, intermediate=1408, dense_layers=(0,), balance_weight=0.001,
                scores="sigmoid", scale=2.446, shared=2,
            ),
        ),
    },
)  # fmt: skip
