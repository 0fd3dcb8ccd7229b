"""GPT-2, GPT-J and OPT: LayerNorm, biases and an MLP without a gate. GPT-2 and OPT have learned positions; GPT-J has
rotary positions on a part of each head's channels, in pairs of neighbours, and parallel attention and MLP. OPT 350M has
its norms after the residual sums, and an embedding of half the width.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; Wang and Komatsuzaki, "GPT-J-6B",
2021; Zhang et al., "OPT: Open Pre-trained Transformer Language Models", 2022; shapes from the config.json of the
repository of that name.
"""

from dataclasses import replace
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import BlockSpec, ModelSpec
from phalanx.models.families.decoder import (
    PLAIN_PLAN,
    decoder_flops,
    decoder_shapes,
    find_misfits,
    read_activation,
    write_activation,
    write_ids,
)
from phalanx.models.families.family import (
    KEYS,
    BlockOptions,
    HuggingFaceMapping,
    ModelFamily,
    name_both,
    read_count,
    read_flag,
    read_number,
)

_LEARNT = BlockOptions(
    norm="layer", qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, activation="gelu_tanh",
    position_offset=0, rotary_share=0.0,
)  # fmt: skip
_OPT_EPS = 1e-5  # not in an OPT's config.json
# KEYS of the two GPTs.
_KEYS = {
    "vocab_size": ("vocab_size", read_count, None),
    "hidden": ("n_embd", read_count, None),
    "layers": ("n_layer", read_count, None),
    "heads": ("n_head", read_count, None),
    "intermediate": ("n_inner", read_count, 0),  # four times the width
    "max_seq_len": ("n_positions", read_count, 2048),
    "init_std": ("initializer_range", read_number, 0.02),
    "norm_eps": ("layer_norm_epsilon", read_number, 1e-5),
}
_GPT2 = ModelSpec(
    architecture="gpt2", vocab_size=50257, hidden=768, layers=12, heads=12, kv_heads=12, head_dim=64, intermediate=3072,
    max_seq_len=1024, tie_embeddings=True,
)  # fmt: skip
_OPT = replace(_GPT2, architecture="opt", vocab_size=50272, max_seq_len=2048)


def _sized(like: ModelSpec, hidden: int, layers: int, heads: int) -> ModelSpec:
    heads_of = replace(like, heads=heads, kv_heads=heads, head_dim=hidden // heads)
    return replace(heads_of, hidden=hidden, layers=layers, intermediate=4 * hidden)


def _read_heads(config: dict[str, Any], fields: dict[str, Any], where: str, activation: str) -> dict[str, Any]:
    return {
        "kv_heads": fields["heads"],
        "head_dim": fields["hidden"] // max(1, fields["heads"]),
        "intermediate": fields["intermediate"] or 4 * fields["hidden"],
        "block": BlockSpec(activation=read_activation(config, "activation_function", where, activation)),
    }


def _write_gpt(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    family = GPT2 if spec.architecture == GPT2.name else GPTJ
    return {
        **write_activation("activation_function", family.options_of(spec).activation, original, "gelu_new"),
        **write_ids(original),
        "tie_word_embeddings": spec.tie_embeddings,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "attn_pdrop": 0.0,
    }


def _start(spec: ModelSpec) -> ModelSpec:
    return replace(spec, intermediate=4 * spec.hidden, tie_embeddings=True)


def _find_tied_problems(spec: ModelSpec, title: str, tied: bool) -> list[str]:
    if spec.tie_embeddings == tied:
        return []
    is_, remedy = ("false", "true") if tied else ("true", "false")
    return [f"model.tie_embeddings is {is_}, which {title} does not support; set it to {remedy}."]


GPT2 = ModelFamily(
    name="gpt2",
    title="GPT-2",
    network="phalanx.models.llama:Llama",
    options=_LEARNT,
    tensor_plan=PLAIN_PLAN,
    shapes=decoder_shapes,
    flops=decoder_flops,
    find_problems=lambda spec: find_misfits(spec, "GPT-2") + _find_tied_problems(spec, "GPT-2", tied=True),
    start=_start,
    hf=HuggingFaceMapping(
        model_type="gpt2",
        classes={"GPT2LMHeadModel": "language"},
        names={
            "embed.weight": "transformer.wte.weight",
            "embed.positions.weight": "transformer.wpe.weight",
            "head.weight": "lm_head.weight",
        }
        | name_both(
            {
                "layers.{i}.attention_norm": "transformer.h.{i}.ln_1",
                **{f"layers.{{i}}.attention.{name}": "transformer.h.{i}.attn.c_attn" for name in "qkv"},
                "layers.{i}.attention.o": "transformer.h.{i}.attn.c_proj",
                "layers.{i}.mlp_norm": "transformer.h.{i}.ln_2",
                "layers.{i}.mlp.up": "transformer.h.{i}.mlp.c_fc",
                "layers.{i}.mlp.down": "transformer.h.{i}.mlp.c_proj",
                "head.norm": "transformer.ln_f",
            }
        ),
        prefix="transformer.",
        ignored=(".attn.bias", ".attn.masked_bias"),  # causal masks
        transposed=tuple(f".{name}.weight" for name in ("q", "k", "v", "o", "up", "down")),
        keys=_KEYS,
        defaults={"n_positions": 1024, "tie_word_embeddings": True},
        read=lambda config, fields, where: (
            _read_heads(config, fields, where, "gelu_tanh")
            | {"tie_embeddings": read_flag(config, "tie_word_embeddings", where, True)}
        ),
        write=_write_gpt,
        accepted={
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "add_cross_attention": (False, None),
            "quantization_config": (None,),
        },
    ),
    presets={
        "gpt2": _GPT2,
        "gpt2-medium": _sized(_GPT2, 1024, 24, 16),
        "gpt2-large": _sized(_GPT2, 1280, 36, 20),
        "gpt2-xl": _sized(_GPT2, 1600, 48, 25),
    },
)


def _read_gptj(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    found = _read_heads(config, fields, where, "gelu_tanh")
    turned = read_count(config, "rotary_dim", where, 64)
    if not 0 < turned <= found["head_dim"] or turned % 2:
        raise ConfigError(
            f"{where} sets rotary_dim to {turned}, but pairs of a head's {found['head_dim']} channels are rotated; "
            "give an even number of them."
        )
    share = turned / found["head_dim"]
    block = replace(found["block"], rotary_share=None if share == GPTJ.options.rotary_share else share)
    return found | {"block": block, "tie_embeddings": read_flag(config, "tie_word_embeddings", where, False)}


GPTJ: ModelFamily = replace(
    GPT2,
    name="gptj",
    title="GPT-J",
    options=BlockOptions(
        norm="layer", parallel=True, shared_norm=True, mlp_bias=True, head="bias", gated=False,
        activation="gelu_tanh", rotary_share=0.25, rotary_pairs=True,
    ),
    find_problems=lambda spec: (
        find_misfits(spec, "GPT-J", any_theta=False) + _find_tied_problems(spec, "GPT-J", tied=False)
    ),
    start=lambda spec: replace(spec, intermediate=4 * spec.hidden),
    hf=replace(
        GPT2.hf,
        model_type="gptj",
        classes={"GPTJForCausalLM": "language"},
        names={"embed.weight": "transformer.wte.weight"}
        | {f"layers.{{i}}.attention.{name}.weight": f"transformer.h.{{i}}.attn.{name}_proj.weight" for name in "qkv"}
        | {"layers.{i}.attention.o.weight": "transformer.h.{i}.attn.out_proj.weight"}
        | name_both(
            {
                "layers.{i}.norm": "transformer.h.{i}.ln_1",
                "layers.{i}.mlp.up": "transformer.h.{i}.mlp.fc_in",
                "layers.{i}.mlp.down": "transformer.h.{i}.mlp.fc_out",
                "head.norm": "transformer.ln_f",
                "head": "lm_head",
            }
        ),
        transposed=(),
        defaults={"n_positions": 2048, "tie_word_embeddings": False},
        read=_read_gptj,
        write=lambda spec, original: _write_gpt(spec, original)
        | {"rotary_dim": round(spec.head_dim * GPTJ.options_of(spec).rotary_share)},
        accepted={"quantization_config": (None,)},
    ),
    presets={
        "gpt-j-6b": replace(
            _sized(_GPT2, 4096, 28, 16), architecture="gptj", vocab_size=50400, max_seq_len=2048, tie_embeddings=False
        ),
    },
)  # fmt: skip


def _read_opt(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    width = read_count(config, "word_embed_proj_dim", where, fields["hidden"])
    if width < 1:
        raise ConfigError(f"{where} sets word_embed_proj_dim to {width}; give it the width of the embedding.")
    found = _read_heads(config, fields, where, "relu")
    block = replace(
        found["block"],
        embedding_width=None if width == fields["hidden"] else width,
        norm_sums=None if read_flag(config, "do_layer_norm_before", where, True) else True,
    )
    return found | {"block": block, "tie_embeddings": read_flag(config, "tie_word_embeddings", where, True)}


def _find_opt_problems(spec: ModelSpec) -> list[str]:
    found = find_misfits(spec, "OPT")
    if spec.norm_eps != _OPT_EPS:
        found.append(f"model.norm_eps is {spec.norm_eps:g}, but that of OPT is {_OPT_EPS:g}; remove it.")
    return found


OPT: ModelFamily = replace(
    GPT2,
    name="opt",
    title="OPT",
    options=replace(_LEARNT, activation="relu", position_offset=2),
    find_problems=_find_opt_problems,
    hf=HuggingFaceMapping(
        model_type="opt",
        classes={"OPTForCausalLM": "language"},
        names={
            "embed.weight": "model.decoder.embed_tokens.weight",
            "embed.positions.weight": "model.decoder.embed_positions.weight",
            "embed.project.weight": "model.decoder.project_in.weight",
            "head.project.weight": "model.decoder.project_out.weight",
            "head.weight": "lm_head.weight",
        }
        | name_both(
            {
                "layers.{i}.attention_norm": "model.decoder.layers.{i}.self_attn_layer_norm",
                **{f"layers.{{i}}.attention.{x}": f"model.decoder.layers.{{i}}.self_attn.{x}_proj" for x in "qkv"},
                "layers.{i}.attention.o": "model.decoder.layers.{i}.self_attn.out_proj",
                "layers.{i}.mlp_norm": "model.decoder.layers.{i}.final_layer_norm",
                "layers.{i}.mlp.up": "model.decoder.layers.{i}.fc1",
                "layers.{i}.mlp.down": "model.decoder.layers.{i}.fc2",
                "head.norm": "model.decoder.final_layer_norm",
            }
        ),
        prefix="model.",
        keys=KEYS | {"intermediate": ("ffn_dim", read_count, 3072), "init_std": ("init_std", read_number, 0.02)},
        read=_read_opt,
        write=lambda spec, original: {
            **write_activation("activation_function", OPT.options_of(spec).activation, original, "relu"),
            **write_ids(original),
            "tie_word_embeddings": spec.tie_embeddings,
            "word_embed_proj_dim": spec.embedding_width,
            "do_layer_norm_before": not OPT.options_of(spec).norm_sums,
            "enable_bias": True,
            "pad_token_id": original.get("pad_token_id"),
            "dropout": spec.dropout,
            "attention_dropout": 0.0,
        },
        accepted={
            "_remove_final_layer_norm": (False, None),
            "enable_bias": (True, None),
            "layer_norm_elementwise_affine": (True, None),
            "quantization_config": (None,),
        },
    ),
    presets={
        "opt-125m": _OPT,
        "opt-350m": replace(_sized(_OPT, 1024, 24, 16), block=BlockSpec(embedding_width=512, norm_sums=True)),
        "opt-1.3b": _sized(_OPT, 2048, 24, 32),
        "opt-2.7b": _sized(_OPT, 2560, 32, 32),
        "opt-6.7b": _sized(_OPT, 4096, 32, 32),
        "opt-13b": _sized(_OPT, 5120, 40, 40),
        "opt-30b": _sized(_OPT, 7168, 48, 56),
    },
)
