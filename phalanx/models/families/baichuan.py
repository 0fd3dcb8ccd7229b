"""Baichuan and Baichuan 2: a Llama whose queries, keys and values are one matrix; the head of Baichuan 2 has normalized
rows, and those of 13B have ALiBi in the place of rotary positions.

transformers has no class for them: a folder contains the code. Of the classes of the two 13B, which have one name, only
that of Baichuan 2 knows z_loss_weight. Source: Yang et al., "Baichuan 2: Open Large-scale
Language Models", 2023; shapes from the config.json of the repository of that name.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.layout.model_shape import BlockSpec, ModelSpec
from phalanx.models.families.decoder import ACCEPTED, HF_NAMES, find_misfits, read_decoder, write_decoder
from phalanx.models.families.family import BlockOptions, read_count
from phalanx.models.families.llama import LLAMA

_ALIBI = BlockSpec(alibi="plain", rotary_share=0.0)
_BAICHUAN_7B = ModelSpec(
    architecture="baichuan", vocab_size=64000, hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128,
    intermediate=11008, max_seq_len=4096, norm_eps=1e-6,
)  # fmt: skip
_BAICHUAN_13B = replace(_BAICHUAN_7B, hidden=5120, layers=40, heads=40, kv_heads=40, intermediate=13696, block=_ALIBI)


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    found = read_decoder(config, fields, where)
    if _has_alibi(config):
        found |= {"max_seq_len": read_count(config, "model_max_length", where, 4096), "block": _ALIBI}
    return found


def _write(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    found = write_decoder(spec, original) | {"model_max_length": spec.max_seq_len}
    second, alibi = spec.architecture == BAICHUAN2.name, bool(BAICHUAN.options_of(spec).alibi)
    if second:
        found["z_loss_weight"] = original.get("z_loss_weight", 0)
    if alibi:
        found["max_position_embeddings"] = None
    return found | {"architectures": ["BaichuanForCausalLM" if second or alibi else "BaiChuanForCausalLM"]}


def _has_alibi(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a Baichuan of 13B, which has no bound of its positions."""
    return config.get("max_position_embeddings") is None


def _is_first(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures") or ["BaiChuanForCausalLM"]
    return named[0] == "BaiChuanForCausalLM" or (_has_alibi(config) and "z_loss_weight" not in config)


BAICHUAN = replace(
    LLAMA,
    name="baichuan",
    title="Baichuan",
    find_problems=lambda spec: find_misfits(spec, "Baichuan"),
    start=lambda spec: replace(spec, norm_eps=1e-6),
    hf=replace(
        LLAMA.hf,
        model_type="baichuan",
        classes={"BaiChuanForCausalLM": "language", "BaichuanForCausalLM": "language"},
        matches=_is_first,
        names=HF_NAMES
        | {f"layers.{{i}}.attention.{name}.weight": "model.layers.{i}.self_attn.W_pack.weight" for name in "qkv"},
        read=_read,
        write=_write,
        accepted=ACCEPTED,
        cut_by_transform=False,
    ),
    presets={"baichuan-7b": _BAICHUAN_7B, "baichuan-13b": _BAICHUAN_13B},
)
BAICHUAN2 = replace(
    BAICHUAN,
    name="baichuan2",
    title="Baichuan 2",
    options=BlockOptions(head="normalized"),
    hf=replace(BAICHUAN.hf, classes={"BaichuanForCausalLM": "language"}, matches=lambda config: not _is_first(config)),
    presets={
        "baichuan2-7b": replace(_BAICHUAN_7B, architecture="baichuan2", vocab_size=125696),
        "baichuan2-13b": replace(_BAICHUAN_13B, architecture="baichuan2", vocab_size=125696),
    },
)
