"""What the first records of a source show, and records in the layouts of other projects."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.core.errors import PhalanxError
from phalanx.data import inspect, read_chunks
from phalanx.data.read_chunks import Meter, plan_chunks, read_records
from phalanx.data.records import RecordFormat
from phalanx.data.sources import list_files
from tests.dist.command import refused

TALK = {"messages": [{"role": "user", "content": "7 x 6?"}, {"role": "assistant", "content": "42"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "7 x 6?"}, {"from": "gpt", "value": "42"}]}
ALPACA = {"instruction": "Multiply.", "input": "7 x 6", "output": "42"}
MESSAGES = [{"role": "user", "content": "Multiply.\n\n7 x 6"}, {"role": "assistant", "content": "42"}]
BERT = {"architecture": "bert", "hidden": 16, "layers": 1, "heads": 2}


def write(path: Path, found: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return path


def asked(path: Path, model: dict[str, Any] | None = None, task: dict[str, Any] | None = None, **data: Any) -> Config:
    tree = {"model": model or {"hidden": 16, "layers": 1, "heads": 2}, "data": {"source": str(path), **data}}
    return load.build_config(tree | ({"task": task} if task else {}), "a recipe")


@pytest.mark.parametrize(
    ("record", "how", "sentence"),
    [
        (TALK, {"format": "chat"}, "a tokenizer to be trained has no chat template"),
        (TALK, {"format": "chat", "tokenizer": "folder"}, "the tokenizer in folder has no chat template"),
        (TALK, {"format": "chat", "chat_template": "none.jinja"}, "data.chat_template none.jinja cannot be read"),
        ({"talk": []}, {"format": "chat", "chat_template": "chatml"}, "line 1 has no key 'messages' (it has: talk)"),
        ({"messages": ["a"]}, {"format": "chat", "chat_template": "chatml"}, 'message 1 has no "role"'),
        (TALK, {"format": "prompt"}, "has no key 'prompt'"),
        ({"prompt": "a", "completion": []}, {"format": "prompt"}, "a prompt and a completion of different types"),
        (TALK, {}, "has no key 'text' (it has: messages); set data.format=chat, or data.text_key to the key that"),
        (
            {"text": "a"},
            {"format": "chat", "chat_template": "chatml"},
            "(it has: text); set data.format=text, or",
        ),
        (ALPACA, {}, "(it has: instruction, input, output); set data.format=prompt, or data.text_key"),
        ({"body": "a"}, {}, "(it has: body); set data.text_key to the key that holds the text"),
        (TALK, {"model": BERT, "task": {"kind": "tag"}}, "has no key 'tokens'"),
    ],
)
def test_mistakes_are_found_in_the_first_records(
    tmp_path: Path, record: Any, how: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(PhalanxError) as caught:
        inspect.check_first_records(asked(write(tmp_path / "a.jsonl", [record]), **how))
    assert sentence in str(caught.value)


def test_no_more_of_a_file_is_read_than_its_first_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the file: what is wrong far behind is found when it is encoded."""
    path = write(tmp_path / "a.jsonl", [{"text": "a"}] * inspect.CHECKED_RECORDS + [{"words": "b"}])
    taken = []
    line = read_chunks._json_line
    monkeypatch.setattr(read_chunks, "_json_line", lambda *args: taken.append(args) or line(*args))
    inspect.check_first_records(asked(path))
    assert len(taken) == inspect.CHECKED_RECORDS


def test_a_template_beside_the_tokenizer_is_enough(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [TALK])
    for name, text in (("chat_template.jinja", "x"), ("tokenizer_config.json", json.dumps({"chat_template": "x"}))):
        (tmp_path / name).write_text(text)
        inspect.check_first_records(asked(path, format="chat", tokenizer=str(tmp_path)))
        (tmp_path / name).unlink()


def test_a_run_is_refused_before_anything_is_imported_or_made(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [TALK])
    text = "model: {hidden: 16, layers: 1, heads: 2}\ndata: {source: a.jsonl, cache: cache, format: chat}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    assert "has no chat template" in refused(tmp_path, "train", "recipe.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "recipe.yaml"]


# -------------------------------------------------------------------------------------------------------- other layouts


def fields_of(path: Path, format: RecordFormat) -> Any:
    (record,) = [
        each for chunk in plan_chunks(list_files([str(path)]), format) for each in read_records(chunk, format, Meter())
    ]
    return record.fields


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_sharegpt_and_alpaca_are_read(tmp_path: Path, ending: str) -> None:
    def stored(record: dict[str, Any]) -> Path:
        path = tmp_path / f"a.{ending}"
        if ending == "parquet":
            parquet.write_table(pa.Table.from_pylist([record]), path)
            return path
        return write(path, [record])

    chat, prompt = RecordFormat("chat"), RecordFormat("prompt")
    assert fields_of(stored(SHAREGPT), chat)["messages"] == SHAREGPT["conversations"]
    inspect.check_first_records(asked(stored(SHAREGPT), format="chat", chat_template="chatml"))
    assert fields_of(stored(ALPACA), chat)["messages"] == MESSAGES
    with_system = fields_of(stored(ALPACA | {"system": "Be brief."}), chat)["messages"]
    assert with_system == [{"role": "system", "content": "Be brief."}, *MESSAGES]
    found = fields_of(stored(ALPACA), prompt)
    assert found["prompt"].endswith("### Instruction:\nMultiply.\n\n### Input:\n7 x 6\n\n### Response:\n")
    assert found["completion"] == "42"
    without = fields_of(stored(ALPACA | {"input": ""}), prompt)["prompt"]
    assert "### Input" not in without and without.endswith("### Instruction:\nMultiply.\n\n### Response:\n")


def test_keys_that_the_recipe_names_come_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [ALPACA | TALK])
    assert fields_of(path, RecordFormat("chat"))["messages"] == TALK["messages"]
