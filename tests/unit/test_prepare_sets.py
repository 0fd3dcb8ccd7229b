"""Preparing in several processes, several sets with one tokenizer, and a cache that lies at a URL."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.config.model import DataSection, SourceSection
from phalanx.core.errors import DataError, StorageError
from phalanx.data import cache as cache_module
from phalanx.data import prepare as prepare_module
from phalanx.data import read_chunks, record_files, workers
from phalanx.data import tokenizer as tokenizer_module
from phalanx.data.encode import EncodeTask
from phalanx.data.prepare import PreparedData, prepare
from phalanx.data.record_files import TokenFile
from phalanx.data.records import RecordFormat, is_held_out, text_digest
from phalanx.data.tokenizer import load_tokenizer, train_tokenizer
from phalanx.storage import local_copies
from tests.stores import Faults
from tests.unit.test_prepare import decoded, folder_of, same_files, text, write_jsonl

CHAT_TEMPLATE = "chatml"


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that even these sources are worth processes of their own."""
    monkeypatch.setattr(read_chunks, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(prepare_module, "SMALL_BYTES", 0)


def run(source: Any, cache: Path | str, **changed: Any) -> PreparedData:
    progress = changed.pop("progress", None)
    arguments = {"tokenizer": "train", "tokenizer_vocab": 300, "held_out": 0.2, "workers": 2} | changed
    return prepare(DataSection(source=source, cache=str(cache), **arguments), progress)


def children() -> set[str]:
    """Processes below this one."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {pid for pid in listed if "phalanx.data" in Path(f"/proc/{pid}/cmdline").read_text()}


def test_any_number_of_processes_gives_the_same_bytes(tmp_path: Path, small_chunks: None) -> None:
    """Text, compressed lines, a table's worth of lines and conversations; with progress that ends at its total."""
    texts = [text(i, 40) for i in range(90)]
    lines = write_jsonl(tmp_path / "a.jsonl", texts[:60])
    for i, one in enumerate(texts[60:]):
        (tmp_path / f"{i:02d}.txt").write_text(one)
    train_tokenizer(texts, 300, tmp_path / "tokenizer")
    seen: list[tuple[str, int, int]] = []
    made = [
        run([lines, str(tmp_path / "*.txt")], tmp_path / f"c{count}", tokenizer=str(tmp_path / "tokenizer"),
            workers=count, progress=lambda *facts: seen.append(facts))
        for count in (1, 3)
    ]  # fmt: skip
    assert all(same_files(folder_of(made[0]), folder_of(other)) for other in made[1:])
    assert decoded(made[0].train[0][0], made[0]) == [t for t in texts if not is_held_out(text_digest(t), 0.2)]
    told = [(done, total) for phase, done, total in seen if phase == "tokens"]
    assert all(0 <= done <= total for done, total in told)
    assert told[-1][0] == told[-1][1]
    assert len(told) > 10
    assert not children()


def test_conversations_are_encoded_with_their_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in processes of their own here, which would each import transformers."""
    talks = [[{"role": "user", "content": f"ask {i} {text(i, 9)}"}, {"role": "assistant", "content": f"say {i}"}]
             for i in range(40)]  # fmt: skip
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    made = []
    for size in (1 << 20, 900):
        monkeypatch.setattr(read_chunks, "CHUNK_BYTES", size)
        made.append(run(str(path), tmp_path / str(size), format="chat", chat_template=CHAT_TEMPLATE))
    assert same_files(folder_of(made[0]), folder_of(made[1]))
    file = TokenFile(made[0].train[0][0])
    assert file.masked
    tokenizer = load_tokenizer(made[0].tokenizer_folder)
    ids, learnt = file.document(0), file.mask(0, int(file.index[1]))
    answer = tokenizer.backend.decode(ids[learnt].tolist(), skip_special_tokens=False)
    assert answer.startswith("say ")
    assert "ask" not in answer
    everything = run(str(path), tmp_path / "all", format="chat", chat_template=CHAT_TEMPLATE, loss_on="all")
    assert not TokenFile(everything.train[0][0]).masked


def test_labelled_records_are_encoded_in_processes_too(tmp_path: Path, small_chunks: None) -> None:
    rows = [json.dumps({"text": text(i, 40), "label": f"label {i * 7 % 11}"}) for i in range(90)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows))
    train_tokenizer([text(i, 40) for i in range(90)], 300, tmp_path / "tokenizer", pieces=True)

    def prepare_with(count: int, cache: Path) -> PreparedData:
        data = {"source": str(path), "cache": str(cache), "tokenizer": str(tmp_path / "tokenizer")}
        return prepare(DataSection.model_validate({**data, "held_out": 0.2, "workers": count}), kind="classify")

    one, two = prepare_with(1, tmp_path / "c1"), prepare_with(2, tmp_path / "c2")
    assert same_files(folder_of(one), folder_of(two))
    sides = [record_files.RecordFile(folder) for folder in (one.train[0][0], one.held_out["held_out"])]
    assert [side.count for side in sides] == [90 - sides[1].count, sides[1].count] and sides[1].count > 5
    # Labels have numbers in the order of the records, whichever chunk and side these are in.
    assert all(side.facts["labels"] == [f"label {i * 7 % 11}" for i in range(11)] for side in sides)
    rows[70] = '{"text": "a", "label": null}'
    path.write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"a\.jsonl, line 71 has null under 'label', which is not a label"):
        prepare_with(2, tmp_path / "c2")
    assert not children()


def test_the_first_mistake_in_order_is_told_with_its_line(tmp_path: Path, small_chunks: None) -> None:
    texts = [text(i, 40) for i in range(60)]
    path = Path(write_jsonl(tmp_path / "a.jsonl", texts))
    rows = path.read_text().splitlines()
    train_tokenizer(texts, 300, tmp_path / "tokenizer")
    rows[35] = rows[50] = '{"id": 1}'
    path.write_text("\n".join(rows))
    for count in (1, 2):
        with pytest.raises(DataError, match=r"a\.jsonl, line 36 has no key 'text'"):
            run(str(path), tmp_path / f"c{count}", tokenizer=str(tmp_path / "tokenizer"), workers=count)
    with pytest.raises(DataError, match=r"a\.jsonl, line 36 has no key 'text'"):  # as the tokenizer's sample finds it
        run(str(path), tmp_path / "c")
    assert not children()


def tasks_of(source: str, folder: Path, tokenizer: Path) -> list[EncodeTask]:
    from phalanx.data.sources import list_files

    folder.mkdir()
    chunks = read_chunks.plan_chunks(list_files([source]), RecordFormat())
    return [
        EncodeTask(f"chunk-{i:06d}", str(folder), str(tokenizer), RecordFormat(), 0.0, chunk)
        for i, chunk in enumerate(chunks)
    ]


def test_a_worker_that_dies_is_replaced_and_one_that_dies_again_is_named(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text(i, 40) for i in range(60)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    train_tokenizer(texts, 300, tmp_path / "tokenizer")
    killed: list[str] = []
    told = 0

    def once(count: int) -> None:
        nonlocal told
        told += count
        if not killed:
            killed.extend(children())
            os.kill(int(killed[0]), signal.SIGKILL)

    tasks = tasks_of(source, tmp_path / "once", tmp_path / "tokenizer")
    workers.encode_in_processes(tasks, 2, tmp_path / "once", once)
    assert len(killed) >= 1
    assert told == Path(source).stat().st_size
    assert {task.name for task in tasks} == {path.stem for path in (tmp_path / "once").glob("chunk-??????.json")}

    monkeypatch.setattr(workers, "START", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(DataError, match=r"worker process \d died \(killed by SIGSEGV\) at .*a\.jsonl, bytes 0 to 4000"):
        workers.encode_in_processes(
            tasks_of(source, tmp_path / "again", tmp_path / "tokenizer"), 2, tmp_path / "again", print
        )
    monkeypatch.setattr(workers, "START", "raise SystemExit('no room')")
    with pytest.raises(DataError, match=r"died \(exit code 1: no room\)"):
        workers.encode_in_processes(
            tasks_of(source, tmp_path / "third", tmp_path / "tokenizer"), 1, tmp_path / "third", print
        )
    assert not children()


INTERRUPTED = """
import sys
from phalanx.config.model import (DataSection)
from phalanx.data import prepare, read_chunks
read_chunks.CHUNK_BYTES, prepare.SMALL_BYTES = 4000, 0
def progress(phase, done, total):
    if phase == "tokens" and done:
        print("working", flush=True)
data = DataSection(source=sys.argv[1], cache=sys.argv[2], tokenizer=sys.argv[3], held_out=0.2, workers=2)
prepare.prepare(data, progress)
"""


def test_an_interrupt_or_a_kill_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C comes to the whole group of the terminal; a kill to the parent alone, whose workers then follow."""
    texts = [text(i, 400) for i in range(1500)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    train_tokenizer(texts[:50], 300, tmp_path / "tokenizer")
    for number in (signal.SIGINT, signal.SIGKILL):
        command = [sys.executable, "-c", INTERRUPTED, source, str(tmp_path / "c"), str(tmp_path / "tokenizer")]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        group = os.getpgid(process.pid)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=120)
        assert process.returncode == (-number if number == signal.SIGKILL else 1) or process.returncode == -number
        assert said.count("Traceback") <= 1  # the parent's own
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                break
            time.sleep(0.02)
        else:
            pytest.fail("a worker lives on")
    assert len(list((tmp_path / "c").glob("*.partial/chunk-*.npz"))) > 0


def test_a_mixture_and_validation_sets_share_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {name: write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {text(i, 30)}" for i in range(30)])
               for name in ("one", "two", "check")}  # fmt: skip
    mixture = [SourceSection(path=[sources["one"]], weight=3), sources["two"]]
    calls: list[str] = []

    def progress(phase: str, done: int, total: int) -> None:
        calls.append(phase)

    validation = {"check": [sources["check"]]}
    made = run(mixture, tmp_path / "c", validation=validation, progress=progress)
    assert [weight for _, weight in made.train] == [3.0, 1.0]
    assert list(made.held_out) == ["held_out", "check"]
    folders = {str(number): folder for number, (folder, _) in enumerate(made.train)} | made.held_out
    words = {name: [each.split()[0] for each in decoded(folder, made)] for name, folder in folders.items()}
    assert set(words["0"]) == {"one"}
    assert set(words["1"]) == {"two"}
    assert words["held_out"] == sorted(words["held_out"])  # one before two
    assert set(words["held_out"]) == {"one", "two"}
    assert words["check"] == ["check"] * 30
    assert len(words["0"]) + len(words["1"]) + len(words["held_out"]) == 60
    assert len({TokenFile(folder).eos_id for folder, _ in made.train}) == 1
    # What is there already is not made again: another weight costs the tokenizer that is trained by it, another
    # validation set only itself.
    calls.clear()
    assert run(mixture, tmp_path / "c", validation=validation, progress=progress) == made
    assert calls == []
    more = run(mixture, tmp_path / "c", validation=validation | {"more": [sources["one"]]}, progress=progress)
    assert set(calls) == {"tokens", "files"}
    assert more.train == made.train
    assert more.held_out["check"] == made.held_out["check"]
    mixture[0] = SourceSection(path=[sources["one"]], weight=2)
    assert run(mixture, tmp_path / "c").tokenizer_folder != made.tokenizer_folder
    with_folder = run(mixture, tmp_path / "c", tokenizer=str(made.tokenizer_folder))
    assert [folder for folder, _ in with_folder.train] == [folder for folder, _ in made.train]
    monkeypatch.setattr(record_files, "COPY_RECORDS", 3)
    again = run(mixture, tmp_path / "d", tokenizer=str(made.tokenizer_folder)).held_out["held_out"]
    assert TokenFile(again).checksum == TokenFile(made.held_out["held_out"]).checksum


def test_weights_say_how_much_of_the_tokenizers_sample_a_source_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phalanx.data.sources import list_files

    monkeypatch.setattr(tokenizer_module, "SAMPLE_BYTES", 20_000)
    monkeypatch.setattr(tokenizer_module, "SAMPLE_CHARS", 100)
    files = []
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 100_000)
        files.append(list_files([str(tmp_path / f"{name}.txt")]))
    sources = [(files[0], 3.0), (files[1], 1.0)]
    sample = "".join(tokenizer_module.sample_for_tokenizer(sources, RecordFormat(), 0.0, lambda *_: None))
    assert 13_000 < sample.count("a") < 17_000
    assert 4_000 < sample.count("b") < 6_000


def test_only_a_part_of_a_huge_source_is_read_for_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [read_chunks.Chunk("JSON lines", ["a"], i, i + 1, 10) for i in range(1000)]
    drawn = tokenizer_module._draw_chunks(chunks, 200)
    assert len(drawn) == 20
    starts = [chunk.start for chunk in drawn]
    assert starts == sorted(starts)
    assert max(starts) > 500 > min(starts)
    assert tokenizer_module._draw_chunks(chunks, 10_000) == chunks


def test_an_empty_validation_set_is_named(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(i, 30) for i in range(20)])
    empty = write_jsonl(tmp_path / "b.jsonl", [""])
    with pytest.raises(DataError, match=r"data\.validation\.dev \(.*b\.jsonl\) leaves no document to evaluate on"):
        run(source, tmp_path / "c", validation={"dev": [empty]})
    with pytest.raises(DataError, match=r"data\.validation\.dev names gone, but no such file exists"):
        run(source, tmp_path / "c", validation={"dev": ["gone"]})


def test_a_cache_at_a_url_is_filled_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(i, 30) for i in range(30)])
    url = (tmp_path / "store").as_uri()
    seen: list[str] = []

    def on_machine(name: str) -> PreparedData:
        monkeypatch.setenv("HOME", str(tmp_path / name))  # where the local cache beside a URL lies
        seen.clear()
        return run(source, url, progress=lambda phase, done, total: seen.append(phase))

    first = on_machine("first")
    assert "tokenizer" in seen
    key = folder_of(first).name
    assert folder_of(first) == tmp_path / "first" / ".cache" / "phalanx" / key
    second = on_machine("second")
    assert set(seen) <= {"tokens"}  # nothing was trained or joined there
    assert same_files(folder_of(first), folder_of(second))
    assert same_files(first.tokenizer_folder, second.tokenizer_folder)
    # Without the file that comes last it counts as not there, and is put there again by whoever has it.
    about = tmp_path / "store" / key / cache_module.ABOUT_FILE
    about.unlink()
    on_machine("third")
    assert "files" in seen
    assert about.is_file()
    # So it is when a part of it has been deleted, or when that file says nothing.
    whole = sorted(path.name for path in about.parent.iterdir())
    for name, damage in (("fourth", about.parent / "train" / "tokens.bin"), ("fifth", about)):
        if damage == about:
            about.write_text("torn")
        else:
            damage.unlink()
        assert same_files(folder_of(first), folder_of(on_machine(name)))
        assert sorted(path.name for path in about.parent.iterdir()) == whole
        assert cache_module.is_complete(about.parent)


def test_a_cache_at_a_url_that_is_away_is_no_full_disk(faults: Faults, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(i, 30) for i in range(20)])
    faults.dead = True
    with pytest.raises(StorageError, match="check the store"):
        prepare(
            DataSection(source=source, cache=f"faulty://{tmp_path}/store", tokenizer="train"), storage_timeout_s=0.02
        )


def test_leftovers_of_killed_runs_go_after_a_week(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(i, 30) for i in range(20)])
    cache = tmp_path / "c"
    old = time.time() - 8 * 24 * 3600
    for key, age in (("0" * 32, old), ("1" * 32, time.time()), (f"tokenizer-{'2' * 32}", old), ("mine", old)):
        (cache / f"{key}.partial").mkdir(parents=True)
        (cache / f"{key}.partial" / "chunk-000000-0000.npz").write_text("x")
        for path in (cache / f"{key}.partial" / "chunk-000000-0000.npz", cache / f"{key}.partial"):
            os.utime(path, (age, age))
    held = cache / f"{'3' * 32}.partial"
    held.mkdir()
    os.utime(held, (old, old))
    with local_copies.lock_file(held.with_suffix(".lock"), 1.0):
        run(source, cache)
    assert sorted(path.name for path in cache.glob("*.partial")) == [f"{'1' * 32}.partial", held.name, "mine.partial"]


def test_a_damaged_piece_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(i, 30) for i in range(20)])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_merge", killed)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "c")
    (piece,) = (tmp_path / "c").glob("*.partial/*.npz")
    content = bytearray(piece.read_bytes())
    content[len(content) // 2] ^= 1
    piece.write_bytes(content)
    with pytest.raises(DataError, match=r"chunk-000000-0000\.npz is damaged \(.*\); delete .*\.partial and prepare"):
        run(source, tmp_path / "c")


def test_pieces_of_another_cut_are_not_taken_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text(i, 30) for i in range(40)])
    expected = run(source, tmp_path / "whole")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_merge", killed)
        patch.setattr(read_chunks, "CHUNK_BYTES", 2000)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "c")
    assert same_files(folder_of(run(source, tmp_path / "c")), folder_of(expected))


def test_ids_of_a_large_vocabulary_fit() -> None:
    assert record_files.token_dtype(1 << 17).itemsize == 4
    assert np.iinfo(record_files.token_dtype(1 << 16)).max == (1 << 16) - 1
