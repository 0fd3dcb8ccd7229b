"""Sources to token sets: what they hold, that a cache is only ever whole, and that bad input is named."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config.model import DataSection
from phalanx.core.errors import ConfigError, DataError, PhalanxError
from phalanx.data import encode as encode_module
from phalanx.data import read_chunks as reading_module
from phalanx.data import tokenizer as tokenizer_module
from phalanx.data.prepare import PreparedData, prepare
from phalanx.data.record_files import TokenFile
from phalanx.data.records import RecordFormat, is_held_out, text_digest
from phalanx.data.sources import list_files
from phalanx.data.tokenizer import encode_documents, load_tokenizer, split_segments, train_tokenizer
from tests.helpers import some

WORDS = [
    "the",
    "cluster",
    "does",
    "not",
    "change",
    "a",
    "result",
    "naïve",
    "試し",
    "🙂",
    "—",
    "",
    "x",
    "= y + 1\n    return",
]


def text(seed: int, words: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    return str(path)


def run(sources: list[Any], cache: Path, **changed: Any) -> PreparedData:
    """Prepared data, made with a small tokenizer unless `changed`, which are fields of the data section."""
    arguments = {"tokenizer": "train", "tokenizer_vocab": 300, "held_out": 0.2} | changed
    outside = {key: arguments.pop(key) for key in ("progress", "lock_timeout_s") if key in arguments}
    return prepare(DataSection(source=sources, cache=str(cache), **arguments), **outside)


def folder_of(prepared: PreparedData) -> Path:
    """The result that holds both sides of the only source."""
    return prepared.train[0][0].parent


def decoded(folder: Path, prepared: PreparedData) -> list[str]:
    tokenizer = load_tokenizer(prepared.tokenizer_folder)
    file = TokenFile(folder)
    ends = [file.document(i) for i in range(file.documents)]
    assert all(ids[-1] == prepared.eos_id for ids in ends)
    return [tokenizer.backend.decode(ids[:-1].tolist()) for ids in ends]


def same_files(one: Path, other: Path) -> bool:
    names = sorted(path.relative_to(one) for path in one.rglob("*"))
    return names == sorted(path.relative_to(other) for path in other.rglob("*")) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names if (one / name).is_file()
    )


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer([text(i, 200) for i in range(20)], 300, folder)
    return folder


def test_documents_come_back_each_on_its_side_in_order(tmp_path: Path) -> None:
    texts = [text(i, 30 + i) for i in range(40)]
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.md").write_text("\ufeff" + texts[1])  # a byte order mark is no text
    (tmp_path / "empty.txt").write_text("")
    source = write_jsonl(tmp_path / "c.jsonl", [*texts[2:], ""])
    prepared = run([source, str(tmp_path / "*.txt"), str(tmp_path / "?.md"), str(tmp_path / "a.txt")], tmp_path / "c")
    given_order = [*texts[2:], texts[0], texts[1]]
    held_out = [t for t in given_order if int(hashlib.sha256(t.encode()).hexdigest(), 16) / 2**256 < 0.2]
    assert 0 < len(held_out) < 20
    assert decoded(prepared.held_out["held_out"], prepared) == held_out
    assert decoded(prepared.train[0][0], prepared) == [t for t in given_order if t not in held_out]
    assert prepared.vocab_size == TokenFile(prepared.train[0][0]).vocab_size <= 300
    for folder in (prepared.train[0][0], prepared.held_out["held_out"]):
        TokenFile(folder).verify()


def test_chunks_and_pieces_do_not_show_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(i, 50) for i in range(60)])
    whole = run([source], tmp_path / "whole")
    monkeypatch.setattr(reading_module, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(encode_module, "PIECE_CHARS", 700)
    monkeypatch.setattr(tokenizer_module, "ENCODE_CHARS", 300)
    in_parts = run([source], tmp_path / "parts")
    assert same_files(folder_of(whole), folder_of(in_parts))
    assert same_files(whole.tokenizer_folder, in_parts.tokenizer_folder)
    names = [folder_of(in_parts).name, in_parts.tokenizer_folder.name]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == sorted(
        [*names, *(f"{name}.lock" for name in names)]
    )


def test_the_cache_is_used_until_something_changes(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(i, 50) for i in range(20)])
    phases: list[str] = []

    def watch(phase: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        phases.append(phase)

    first = run([source], tmp_path / "c", progress=watch)
    assert list(dict.fromkeys(phases)) == ["tokenizer", "tokens", "files"]
    phases.clear()
    assert run([source], tmp_path / "c", progress=watch) == first
    assert not phases
    folders = {folder_of(first)}
    copied = shutil.copytree(tokenizer_folder, tmp_path / "copied")
    variants: list[Callable[[], PreparedData]] = [
        lambda: run([source], tmp_path / "c", tokenizer_vocab=290),
        lambda: run([source], tmp_path / "c", held_out=0.3),
        lambda: run([source], tmp_path / "c", tokenizer=str(copied)),
    ]
    for variant in variants:
        folders.add(folder_of(variant()))
    config = copied / "tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    folders.add(folder_of(run([source], tmp_path / "c", tokenizer=str(copied))))
    os.utime(source, ns=(1, 1))
    folders.add(folder_of(run([source], tmp_path / "c")))
    assert len(folders) == 6


def test_a_cache_with_a_deleted_half_is_made_anew(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(i, 50) for i in range(20)])
    train = run([source], tmp_path / "c").train[0][0]
    before = TokenFile(train).slice(0, 50).tolist()
    (train / "tokens.bin").write_bytes(b"")
    with pytest.raises(DataError, match=rf"delete {re.escape(str(train))} and prepare the data again"):
        run([source], tmp_path / "c")
    shutil.rmtree(train)
    assert TokenFile(run([source], tmp_path / "c").train[0][0]).slice(0, 50).tolist() == before


PREPARE_SCRIPT = """
import os, signal, sys
from phalanx.config.model import (DataSection)
from phalanx.data import prepare, read_chunks
read_chunks.CHUNK_BYTES, prepare.SMALL_BYTES = 2000, int(sys.argv[5])
source, cache, kill_phase, kill_done = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
def progress(phase, done, total):
    print(phase, done, total, flush=True)
    if phase == kill_phase and done >= kill_done:
        os.kill(os.getpid(), signal.SIGKILL)
data = DataSection(source=source, cache=cache, tokenizer="train", tokenizer_vocab=300, held_out=0.2, workers=2)
result = prepare.prepare(data, progress)
print(result.train[0][0].parent, flush=True)
"""


def start(
    source: str, cache: Path, kill_phase: str = "never", kill_done: int = 0, small_bytes: int = 1 << 20
) -> "subprocess.Popen[str]":
    """A process that prepares; with `small_bytes` 0 its chunks go to processes of their own."""
    command = [sys.executable, "-c", PREPARE_SCRIPT, source, str(cache), kill_phase, str(kill_done), str(small_bytes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})


@pytest.mark.parametrize("mixed", some([False, True], 0))
def test_a_killed_preparation_goes_on_where_it_was(
    tmp_path: Path, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "CHUNK_BYTES", 2000)
    texts = [text(i, 50) for i in range(60)]
    if mixed:  # one document a file
        (tmp_path / "d").mkdir()
        for i, t in enumerate(texts):
            (tmp_path / "d" / f"{i:02d}.txt").write_text(t)
        source = str(tmp_path / "d" / "*.txt")
    else:
        source = write_jsonl(tmp_path / "a.jsonl", texts)
    undisturbed = run([source], tmp_path / "whole")
    for phase, done in (("tokens", 6000), ("files", 2)):
        process = start(source, tmp_path / "c", phase, done)
        process.communicate(timeout=120)
        assert process.returncode == -9
        assert not (tmp_path / "c" / folder_of(undisturbed).name).exists()
    seen: list[tuple[str, int]] = []
    again = run([source], tmp_path / "c", progress=lambda phase, done, total: seen.append((phase, done)))
    assert [phase for phase, _ in seen if phase == "tokenizer"] == []
    first_done = next(done for phase, done in seen if phase == "tokens")
    assert first_done > 10_000  # the second run had finished all chunks; none was made again
    assert same_files(folder_of(undisturbed), folder_of(again))


def test_two_processes_at_once_do_no_harm(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(i, 50) for i in range(60)])
    processes = [start(source, tmp_path / "c") for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len({lines[-1] for lines in outputs}) == 1
    for phase in ("tokenizer", "tokens", "files"):  # one of them did it, which need not be the same each time
        assert sum(any(line.startswith(f"{phase} ") for line in lines) for lines in outputs) == 1
    assert same_files(Path(outputs[0][-1]), folder_of(run([source], tmp_path / "alone")))


def test_waiting_for_another_process_has_an_end(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(1, 50), text(2, 50)])
    folder = folder_of(run([source], tmp_path / "c"))
    shutil.rmtree(folder)
    with open(f"{folder}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"another process has held .*\.lock"):
            run([source], tmp_path / "c", lock_timeout_s=0.3)
        assert time.monotonic() - began < 30


def test_training_a_tokenizer_is_deterministic_and_loses_nothing(tmp_path: Path, tokenizer_folder: Path) -> None:
    train_tokenizer([text(i, 200) for i in range(20)], 300, tmp_path / "again")
    assert same_files(tokenizer_folder, tmp_path / "again")
    tokenizer = load_tokenizer(tokenizer_folder)
    assert tokenizer.vocab_size == 300
    hard = "\x00 tab\t\r\n  żółw 試 🙂 \u2028 \ufffd"
    assert tokenizer.backend.decode(tokenizer.backend.encode(hard).ids) == hard


def test_auto_tokenizer_loads_what_was_trained(tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    ours = load_tokenizer(tokenizer_folder)
    assert theirs.eos_token == theirs.bos_token == "<|endoftext|>"
    assert theirs.eos_token_id == ours.eos_id
    assert len(theirs) == ours.vocab_size
    sample = text(99, 50)
    tokens, lengths = encode_documents(ours, [sample])
    assert tokens.tolist() == [*theirs(sample)["input_ids"], ours.eos_id]
    assert lengths.tolist() == [len(tokens)]
    assert theirs.decode(tokens, skip_special_tokens=True) == sample


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path, tokenizer_folder: Path) -> None:
    model = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    converted, direct = load_tokenizer(tmp_path), load_tokenizer(tokenizer_folder)
    sample = [text(5, 80), text(6, 3)]
    assert encode_documents(converted, sample)[0].tolist() == encode_documents(direct, sample)[0].tolist()


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text(st.sampled_from("ab \n\t1é試.'")), max_size=12),
    lines=st.lists(st.sampled_from(["x = 1", "    return y", "", "def f(x):", "  ", "été"]), max_size=60),
)
def test_cutting_long_documents_changes_no_token(tokenizer_folder: Path, texts: list[str], lines: list[str]) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    texts = [*texts, "\n".join(lines)]
    whole = encode_documents(tokenizer, texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "SEGMENT_CHARS", 20)
        patch.setattr(tokenizer_module, "ENCODE_CHARS", 50)
        cut = encode_documents(tokenizer, texts)
        assert all("".join(split_segments(tokenizer, t)) == t for t in texts)
    assert [array.tolist() for array in whole] == [array.tolist() for array in cut]


def test_long_documents_are_cut_unless_the_tokenizer_marks_beginnings(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import normalizers

    monkeypatch.setattr(tokenizer_module, "SEGMENT_CHARS", 100)
    long_text = "\n".join(text(i, 10).replace("\n", "") for i in range(100))
    tokenizer = load_tokenizer(tokenizer_folder)
    assert len(split_segments(tokenizer, long_text)) > 20
    tokenizer.backend.normalizer = normalizers.Prepend("x")
    assert len(split_segments(tokenizer, long_text)) == 1


def test_truncation_and_padding_of_a_folder_are_not_applied(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "short")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    sample = [text(3, 40), text(4, 2)]
    expected = encode_documents(load_tokenizer(tokenizer_folder), sample)[0]
    assert encode_documents(load_tokenizer(folder), sample)[0].tolist() == expected.tolist()


def test_the_end_of_text_is_found_where_the_files_name_it(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "t")
    config, special = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    config.write_text(json.dumps({"eos_token": {"content": "<|endoftext|>", "special": True}}))
    assert load_tokenizer(folder).eos_id == 0
    config.unlink()
    assert load_tokenizer(folder).eos_id == 0
    special.unlink()
    with pytest.raises(DataError, match=r"set eos_token in its tokenizer_config\.json"):
        load_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_tokenizer(folder).eos_id == 5
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5000}))
    with pytest.raises(DataError, match="defines no end-of-text token"):
        load_tokenizer(folder)


def test_the_standard_library_is_there_without_tests_and_packages() -> None:
    files = list_files(["stdlib"])
    names = [file.path for file in files]
    assert len(files) > 100
    assert any(name.endswith("/json/decoder.py") for name in names)
    folders = {part for file in files for part in Path(file.path).parts}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}
    assert names == [file.path for file in list_files(["stdlib"])]


@given(st.text(), st.floats(0, 1))
def test_a_larger_fraction_holds_out_more(sample: str, fraction: float) -> None:
    digest = text_digest(sample)
    assert not is_held_out(digest, 0.0)
    assert is_held_out(digest, 1.0)
    assert is_held_out(digest, fraction) <= is_held_out(digest, min(1.0, fraction * 1.5))


def test_a_tokenizer_is_trained_on_training_documents_only(tmp_path: Path, tokenizer_folder: Path) -> None:
    texts = [text(i, 60) for i in range(30)]
    prepared = run([write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "c")
    kept = [t for t in texts if not is_held_out(text_digest(t), 0.2)]
    assert 0 < len(kept) < len(texts)
    found = {"prepared": prepared.tokenizer_folder}
    for name, those in (("kept", kept), ("all", texts)):
        train_tokenizer(those, 300, tmp_path / name)
        found[name] = tmp_path / name
    contents = {name: (folder / "tokenizer.json").read_bytes() for name, folder in found.items()}
    assert contents["prepared"] == contents["kept"] != contents["all"]


def test_a_tokenizer_is_trained_on_a_sample_of_a_large_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.txt").write_text(text(1, 40_000))  # one document: a sample of documents would hold all or none
    monkeypatch.setattr(tokenizer_module, "SAMPLE_BYTES", 40_000)
    monkeypatch.setattr(tokenizer_module, "SAMPLE_CHARS", 1000)
    files = list_files([str(tmp_path / "one.txt")])
    sample = tokenizer_module.sample_for_tokenizer([(files, 1.0)], RecordFormat(), 0.0, lambda *_: None)
    assert 30_000 < sum(len(chunk.encode()) for chunk in sample) < 50_000 < files[0].size_bytes


GOOD = '{"text": "a b c"}\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", GOOD + "\n" + GOOD, "a.jsonl, line 2 is empty"),
        ("a.jsonl", GOOD + GOOD + "{nope}\n", "a.jsonl, line 3 is not JSON"),
        ("a.jsonl", GOOD + '{"body": "x"}', "a.jsonl, line 2 has no key 'text' (it has: body); set data.text_key"),
        ("a.jsonl", "[1]", "a.jsonl, line 1 has no key"),
        ("a.jsonl", '{"text": 3}', "line 1 has a int under 'text'"),
        ("a.jsonl", '{"text": "\\ud800"}', "line 1 holds an unpaired surrogate"),
        ("a.jsonl", GOOD.encode() + b'{"text": "\xff"}', "a.jsonl, line 2 is not UTF-8"),
        ("a.txt", b"one\ntwo\n\xe9t\xe9\n", "a.txt, line 3 is not UTF-8 (byte 0xe9 at 8)"),
        ("a.txt", "", "has only empty files"),
        ("a.jsonl", '{"text": ""}', "no document to train on"),
    ],
)
def test_bad_data_is_named_with_file_line_and_remedy(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        run([str(tmp_path / name)], tmp_path / "c", held_out=0.0)
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
    assert ";" in message or "give others" in message  # the remedy


def test_bad_sources_tokenizers_and_caches_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(1, 50), text(2, 50)])
    (tmp_path / "no_tokenizer").mkdir()
    broken = shutil.copytree(tokenizer_folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    (tmp_path / "file").write_text("x")
    cases: list[tuple[type[PhalanxError], str, Callable[[], PreparedData]]] = [
        (DataError, "missing.txt, but no such file exists", lambda: run([str(tmp_path / "missing.txt")], tmp_path)),
        (DataError, "no such file exists", lambda: run([str(tmp_path / "*.nothing")], tmp_path / "c")),
        (DataError, "lower data.held_out", lambda: run([source], tmp_path / "c", held_out=0.999999)),
        (ConfigError, "does not exist", lambda: run([source], tmp_path / "c", tokenizer=str(tmp_path / "none"))),
        (ConfigError, "no tokenizer", lambda: run([source], tmp_path, tokenizer=str(tmp_path / "no_tokenizer"))),
        (ConfigError, "tokenizer.json cannot be read", lambda: run([source], tmp_path / "c", tokenizer=str(broken))),
        (DataError, "the data cache", lambda: run([source], tmp_path / "file" / "c")),
    ]
    for kind, said, call in cases:
        with pytest.raises(kind) as caught:
            call()
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_importing_data_starts_nothing_and_imports_no_torch() -> None:
    script = (
        "import sys, threading, phalanx.data.prepare, phalanx.data.loader\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "assert threading.active_count() == 1\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)
