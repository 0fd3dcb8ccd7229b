"""Baichuan and Baichuan 2 of 7B: a Llama whose queries, keys and values are one matrix; the head of Baichuan 2 has
normalized rows.

transformers has no class for them: a folder contains the code. Source: Yang et al., "Baichuan 2: Open Large-scale
Language Models", 2023; shapes from the config.json of the repository of that name.
"""

from dataclasses import replace
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.decoder import ACCEPTED, HF_NAMES, find_misfits, read_decoder, write_decoder
from phalanx.models.families.family import BlockOptions
from phalanx.models.families.llama import LLAMA

_BAICHUAN_7B = ModelSpec(
    architecture="baichuan", vocab_size=64000, hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128,
    intermediate=11008, max_seq_len=4096, norm_eps=1e-6,
)  # fmt: skip


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    if config.get("max_position_embeddings") is None:
        raise ConfigError(
            f"{where} does not set max_position_embeddings, as Baichuan of 13B, whose attention uses ALiBi, "
            "which is not supported; use a Baichuan of 7B."
        )
    return read_decoder(config, fields, where)


def _write(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    return write_decoder(spec, original) | {"model_max_length": spec.max_seq_len}


BAICHUAN = replace(
    LLAMA,
    name="baichuan",
    title="Baichuan",
    find_problems=lambda spec: find_misfits(spec, "Baichuan"),
    start=lambda spec: replace(spec, norm_eps=1e-6),
    hf=replace(
        LLAMA.hf,
        model_type="baichuan",
        classes={"BaiChuanForCausalLM": "language"},
        names=HF_NAMES
        | {f"layers.{{i}}.attention.{name}.weight": "model.layers.{i}.self_attn.W_pack.weight" for name in "qkv"},
        read=_read,
        write=_write,
        accepted=ACCEPTED,
        cut_by_transform=False,
    ),
    presets={"baichuan-7b": _BAICHUAN_7B},
)
BAICHUAN2 = replace(
    BAICHUAN,
    name="baichuan2",
    title="Baichuan 2",
    options=BlockOptions(head="normalized"),
    hf=replace(BAICHUAN.hf, classes={"BaichuanForCausalLM": "language"}),
    presets={"baichuan2-7b": replace(_BAICHUAN_7B, architecture="baichuan2", vocab_size=125696)},
)
