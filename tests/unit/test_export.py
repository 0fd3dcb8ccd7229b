"""What an export reads beside the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import load
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.hf_export import export
from phalanx.models.llama import HF_NAMES, Llama
from phalanx.trainer.export import _natural_dtype, _special_ids

ADDED = {"added_tokens": [{"content": "<début>", "id": 3}, {"content": "</s>", "id": 4}]}


def write(folder: Path, config: Any, tokenizer: Any) -> Path:
    for name, content in (("tokenizer_config", config), ("tokenizer", tokenizer)):
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


def test_special_tokens_are_found_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path, {"bos_token": {"content": "<début>"}, "eos_token": "</s>"}, ADDED)
    assert _special_ids(folder) == {"bos": 3, "eos": 4}


@pytest.mark.parametrize(
    ("config", "tokenizer"),
    [
        ([], ADDED),
        ({"bos_token": ["<début>"], "eos_token": {"content": {}}}, ADDED),
        ({"eos_token": "</s>"}, {"added_tokens": None}),
        ({"eos_token": "</s>"}, {"added_tokens": [{"content": "</s>", "id": None}]}),
        ({"eos_token": "</s>"}, []),
    ],
)
def test_a_tokenizer_of_other_types_names_none(tmp_path: Path, config: Any, tokenizer: Any) -> None:
    assert _special_ids(write(tmp_path, config, tokenizer)) == {}


def test_bytes_that_are_no_text_name_none(tmp_path: Path) -> None:
    (write(tmp_path, {}, ADDED) / "tokenizer.json").write_bytes(b"\xff\xfe")
    assert _special_ids(tmp_path) == {}


class Renamed(Llama):
    """As a class of one's own that calls its embedding something else."""

    hf_names = HF_NAMES | {"embed.weight": "model.table.weight"}


def test_a_model_of_ones_own_goes_out_in_the_type_it_came_in(tmp_path: Path) -> None:
    spec = ModelSpec(vocab_size=8, hidden=4, layers=1, heads=2, kv_heads=2, head_dim=2, intermediate=4, max_seq_len=8)
    shapes = {name: tuple(each.shape) for name, each in Renamed(spec).named_parameters()}
    export(tmp_path / "hf", spec, lambda name: torch.zeros(shapes[name]), torch.float16, model_class=Renamed)
    config = load.build_config({"model": {"from_hf": str(tmp_path / "hf")}}, "here")
    assert _natural_dtype(config, Renamed) == torch.float16
