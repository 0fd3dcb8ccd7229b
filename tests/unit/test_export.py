"""What an export reads beside the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.train.export import _special_ids

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
