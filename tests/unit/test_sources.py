"""What sources may be, how each kind is cut and read, and that what is wrong with one is named with its place."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from phalanx.config.load import load_recipe
from phalanx.core.errors import DataError, StorageError
from phalanx.data import read_chunks
from phalanx.data.read_chunks import Chunk, Meter, count_lines_before, plan_chunks, read_records
from phalanx.data.records import Record, RecordFormat, record_digest
from phalanx.data.sources import check_format, list_files
from phalanx.data.stdlib_chat import make_conversations
from phalanx.storage import retry
from tests.helpers import ROOT
from tests.stores import Faults

TEXTS = ["one", "", "two\nlines", "naïve 🙂", "x" * 70, "last"]
CHAT = RecordFormat("chat")


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": one}) + "\n" for one in texts).encode()


def read(sources: list[str], format: RecordFormat = RecordFormat()) -> list[Record]:  # noqa: B008  frozen
    """All records of sources, chunk by chunk."""
    found: list[Record] = []
    for chunk in plan_chunks(list_files(sources), format):
        first = count_lines_before(chunk, format) + 1 if chunk.kind == "JSON lines" and chunk.stop else 1
        found += read_records(chunk, format, Meter(), first)
    return found


def texts(sources: list[str]) -> list[str | None]:
    return [record.text for record in read(sources)]


def write_kinds(folder: Path) -> dict[str, Path]:
    """The same documents in each kind of file."""
    contents = {
        "a.jsonl": lines(TEXTS),
        "a.ndjson": lines(TEXTS),
        "a.json": json.dumps([{"text": one} for one in TEXTS]).encode(),
        "a.jsonl.gz": gzip.compress(lines(TEXTS[:3])) + gzip.compress(lines(TEXTS[3:])),
        # Two frames, as `cat a.zst b.zst` makes them.
        "a.jsonl.zst": b"".join(zstandard.compress(lines(part)) for part in (TEXTS[:3], TEXTS[3:])),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    return {name: folder / name for name in (*contents, "a.parquet")}


@pytest.mark.parametrize("chunk_bytes", [8 << 20, 60])
def test_every_kind_of_file_gives_the_same_documents(
    tmp_path: Path, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_chunks, "CHUNK_BYTES", chunk_bytes)
    for name, path in write_kinds(tmp_path).items():
        chunks = plan_chunks(list_files([str(path)]), RecordFormat())
        assert sum(chunk.size_bytes for chunk in chunks) == path.stat().st_size
        cut = name in ("a.jsonl", "a.ndjson", "a.parquet") and chunk_bytes == 60
        assert (len(chunks) > 1) == cut, name
        found = read([str(path)])
        assert [record.text for record in found] == TEXTS, name
        unit = {"a.json": "record", "a.parquet": "row"}.get(name, "line")
        assert [record.where for record in found] == [f"{path}, {unit} {i}" for i in range(1, len(TEXTS) + 1)]


def test_a_key_that_only_another_row_has_is_not_there(tmp_path: Path) -> None:
    """Parquet gives all rows the keys of any, with nulls where JSON has nothing; a template would write them."""
    calls = [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}, {"function": {"name": "now"}}]
    talks = [
        {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "tool_calls": [call]}]}
        for number, call in enumerate(calls)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    parquet.write_table(pa.Table.from_pylist(talks), tmp_path / "a.parquet")
    found = [[record.fields for record in read([str(tmp_path / name)], CHAT)] for name in ("a.parquet", "a.jsonl")]
    assert found[0] == found[1] == talks


def test_whole_files_are_grouped_and_may_be_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_chunks, "CHUNK_BYTES", 10)
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"file {i}")
    (tmp_path / "z.md.gz").write_bytes(gzip.compress("é".encode()))
    (tmp_path / "z.md.zst").write_bytes(zstandard.compress(b""))
    chunks = plan_chunks(list_files([str(tmp_path)]), RecordFormat())
    assert [len(chunk.paths) for chunk in chunks] == [2, 2, 2, 1]
    assert texts([str(tmp_path)]) == [*(f"file {i}" for i in range(5)), "é", ""]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    chunk_bytes=st.integers(1, 50),
    ends=st.booleans(),
)
def test_each_line_belongs_to_one_chunk(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], chunk_bytes: int, ends: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    content = lines(["y" * n for n in lengths])
    path.write_bytes(content if ends else content[:-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_chunks, "CHUNK_BYTES", chunk_bytes)
        found = read([str(path)])
    assert [len(record.text or "") for record in found] == lengths
    assert [record.where.rpartition(" ")[2] for record in found] == [str(i) for i in range(1, len(lengths) + 1)]


def test_folders_globs_and_urls(tmp_path: Path) -> None:
    (tmp_path / "d" / "sub" / ".hidden").mkdir(parents=True)
    for name in ("d/b.txt", "d/a.md", "d/sub/c.txt", "d/sub/.hidden/e.txt", "d/.f.txt", "d/g.bin", "h.log"):
        (tmp_path / name).write_text(name)
    os.symlink(tmp_path / "d" / "sub", tmp_path / "d" / "linked")
    os.symlink(tmp_path, tmp_path / "d" / "sub" / "around")
    expected = ["d/a.md", "d/b.txt", "d/sub/c.txt", "d/sub/c.txt"]
    assert texts([str(tmp_path / "d")]) == expected
    assert texts([str(tmp_path / "h.log")]) == ["h.log"]
    assert texts([str(tmp_path / "d" / "*.txt"), str(tmp_path / "d" / "b.txt")]) == ["d/b.txt"]
    url = tmp_path.as_uri()
    assert texts([f"{url}/d/b.txt", f"{url}/h.log"]) == ["d/b.txt", "h.log"]
    assert texts([f"{url}/d/*.txt"]) == ["d/b.txt"]
    assert texts([f"{url}/d/sub"]) == ["d/sub/c.txt"]
    kinds = write_kinds(tmp_path)
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet", "a.jsonl.zst"):
        assert texts([kinds[name].as_uri()]) == TEXTS


def test_a_dataset_of_the_hub_is_streamed_by_shards(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"train-{i}.jsonl").write_bytes(lines([f"{i} {k}" for k in range(2)]))
    (tmp_path / "test.jsonl").write_bytes(lines(["t"]))
    source = f"hub:{tmp_path}"
    files = list_files([source])
    assert len(plan_chunks(files, RecordFormat())) == 3
    assert texts([source]) == ["0 0", "0 1", "1 0", "1 1", "2 0", "2 1"]
    assert texts([f"{source}::test"]) == ["t"]
    os.utime(tmp_path / "train-1.jsonl", ns=(1, 1))
    assert list_files([source]) != files
    for wrong, said in ((f"{source}::dev", "has no split dev (it has: "), (f"{source}x", "cannot open (Couldn't find"),
                        (f"{source}:other", "cannot open (")):  # fmt: skip
        with pytest.raises(DataError) as caught:
            list_files([wrong])
        assert said in str(caught.value)
        assert "hub:NAME:CONFIG:SPLIT" in str(caught.value)


def test_public_corpora_are_read_in_their_own_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small folders that lie as FineWeb, SlimPajama and RedPajama do on the hub and at their publishers."""
    fineweb, slim = tmp_path / "fineweb", tmp_path / "slim"
    for folder in (fineweb / "sample/10BT", slim / "train/chunk1", slim / "validation/chunk1"):
        folder.mkdir(parents=True)
    configurations = "- {config_name: sample-10BT, data_files: [{split: train, path: sample/10BT/*}]}"
    (fineweb / "README.md").write_text(f"---\nconfigs:\n{configurations}\n---\n")
    write_parquet(fineweb / "sample/10BT/000_00000.parquet", text=["a page"], url=["u"], token_count=[2])
    assert texts([f"hub:{fineweb}:sample-10BT"]) == ["a page"]
    for split in ("train", "validation"):
        row = {"text": split, "meta": {"redpajama_set_name": "RedPajamaC4"}}
        packed = zstandard.compress((json.dumps(row) + "\n").encode())
        (slim / split / "chunk1/example_0.jsonl.zst").write_bytes(packed)
    assert texts([f"hub:{slim}"]) == ["train"]
    assert texts([f"hub:{slim}::validation"]) == ["validation"]

    monkeypatch.chdir(tmp_path)
    for name in ("common_crawl/2019-30/en_head_0000.json.gz.dedup.classifier.jsonl.zst", "c4/c4-train.00000.jsonl",
                 "github/filtered_00.sampled.jsonl", "wikipedia/wiki.jsonl", "arxiv/arxiv_00.jsonl",
                 "stackexchange/stackexchange.jsonl"):  # fmt: skip
        path, data = tmp_path / "corpus/redpajama" / name, lines([name.partition("/")[0]])
        path.parent.mkdir(parents=True)
        path.write_bytes(zstandard.compress(data) if name.endswith("zst") else data)
    recipe = load_recipe(ROOT / "recipes/llama-7b-redpajama.yaml")
    found = [texts(one.path) for one in recipe.data.source if not isinstance(one, str)]
    assert found == [["common_crawl"], ["c4"], ["github"], ["wikipedia"], ["arxiv"], ["stackexchange"]]


def write_parquet(path: Path, **columns: Any) -> None:
    parquet.write_table(pa.table(columns), path)


def damaged_parquet(folder: Path) -> str:
    write_parquet(folder / "a.parquet", text=["word " * 50] * 20)
    content = bytearray((folder / "a.parquet").read_bytes())
    content[10:60] = b"\xff" * 50
    (folder / "a.parquet").write_bytes(content)
    return "a.parquet is damaged near row 1 ("


def cut_parquet(folder: Path) -> str:
    write_parquet(folder / "a.parquet", text=["x"] * 20)
    (folder / "a.parquet").write_bytes((folder / "a.parquet").read_bytes()[:-5])
    return "a.parquet is not a complete Parquet file (Parquet magic bytes not found"


def null_row(folder: Path) -> str:
    write_parquet(folder / "a.parquet", text=["x", None])
    return "a.parquet, row 2 has a NoneType under 'text' instead of text"


def missing_column(folder: Path) -> str:
    write_parquet(folder / "a.parquet", body=["x"])
    return "a.parquet has no key 'text' (it has: body); set data.text_key"


def torn_gzip(folder: Path) -> str:
    content = gzip.compress(lines([f"document {i} {os.urandom(9).hex()}" for i in range(2000)]))
    (folder / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    return "a.jsonl.gz is incomplete after line "


def torn_zstandard(folder: Path) -> str:
    content = zstandard.compress(lines(TEXTS * 9))
    (folder / "a.txt.zst").write_bytes(content[:-3])
    return "a.txt.zst is incomplete (it ends within a Zstandard frame)"


def no_zstandard(folder: Path) -> str:
    (folder / "a.jsonl.zst").write_bytes(b"{}\n" * 9)
    return "a.jsonl.zst is incomplete ("


def no_gzip(folder: Path) -> str:
    (folder / "a.txt.gz").write_bytes(b"not at all")
    return "a.txt.gz is incomplete (Not a gzipped file"


def empty_line_in_gzip(folder: Path) -> str:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(["a", "b"]) + b"\n"))
    return "a.jsonl.gz, line 3 is empty"


def one_object(folder: Path) -> str:
    (folder / "a.json").write_text('{"text": "x"}')
    return "a.json is not a list of records"


def lines_named_json(folder: Path) -> str:
    (folder / "a.json").write_bytes(lines(["a", "b"]))
    return "a.json, line 2 is not JSON (Extra data); correct it, or name the file .jsonl"


def deep_line(folder: Path) -> str:
    (folder / "a.jsonl").write_text('{"text": "x"}\n' + "[" * 100_000 + "\n")
    return "a.jsonl, line 2 is nested too deeply"


def deep_list(folder: Path) -> str:
    (folder / "a.json").write_text("[" * 100_000)
    return "a.json is nested too deeply"


def long_number(folder: Path) -> str:
    (folder / "a.jsonl").write_text('{"text": "x", "id": ' + "1" * 5000 + "}\n")
    return "a.jsonl, line 1 has a number with too many digits"


def bad_element(folder: Path) -> str:
    (folder / "a.json").write_text('[{"text": "x"}, {"text": 3}]')
    return "a.json, record 2 has a int under 'text'"


def mixed_kinds(folder: Path) -> str:
    (folder / "README.md").write_text("read me")
    write_parquet(folder / "part.parquet", text=["x"])
    return "which mixes kinds of files (part.parquet is records, README.md is running text); select the files"


def nothing_known(folder: Path) -> str:
    (folder / "a.bin").write_text("x")
    return "in which no file has a known extension (.txt"


def empty_files(folder: Path) -> str:
    (folder / "a.txt").write_text("")
    return "has only empty files"


def no_permission(folder: Path) -> str:
    (folder / "a.jsonl").mkdir()
    (folder / "a.txt").symlink_to(folder / "gone")
    return "in which no file has a known extension"


WRONG: list[Callable[[Path], str]] = [
    damaged_parquet, cut_parquet, null_row, missing_column, torn_gzip, torn_zstandard, no_zstandard, no_gzip,
    empty_line_in_gzip, one_object, lines_named_json, deep_line, deep_list, long_number, bad_element, mixed_kinds,
    nothing_known, empty_files, no_permission,
]  # fmt: skip


@pytest.mark.parametrize("make", WRONG)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, make: Callable[[Path], str]) -> None:
    said = make(tmp_path)
    with pytest.raises(DataError) as caught:
        read([str(tmp_path)])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


def test_a_format_refuses_files_that_cannot_hold_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"a\.txt is running text, but data\.format is chat, which needs records"):
        check_format(list_files([str(tmp_path / "a.txt")]), "chat")
    with pytest.raises(DataError, match=r'"stdlib-chat" holds conversations, but data\.format is text; set'):
        check_format(list_files(["stdlib-chat"]), "text")
    check_format(list_files(["stdlib-chat"]), "chat")


def test_conversations_and_prompts_come_as_objects(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}]
    rows = [{"id": i, "messages": talk, "tools": None} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = read([str(tmp_path / "a.jsonl")], CHAT)
    assert [record.fields for record in found] == rows
    assert all(record.text is None for record in found)
    from_table = read([str(tmp_path / "a.parquet")], CHAT)
    assert [record.fields for record in from_table] == [{"messages": talk, "tools": None}] * 3
    # The side on which a document falls is not a matter of the file that holds it, nor of what else it says.
    assert len({record_digest(record, ["messages"]) for record in [*found, *from_table]}) == 1
    with pytest.raises(
        DataError, match=r"line 1 has no key 'prompt' .*; set data\.format=chat, or data\.prompt_key to"
    ):
        read([str(tmp_path / "a.jsonl")], RecordFormat("prompt"))
    half = Record(None, {"messages": [{"role": "user", "content": "\ud800"}]}, "a.jsonl, line 1")
    with pytest.raises(DataError, match=r"a\.jsonl, line 1 holds an unpaired surrogate"):
        record_digest(half, ["messages"])


MODULE = '''
"""A module."""

def area(width, height=1.0):
    """Width times height."""
    return width * height

def undocumented():
    pass

class Box:
    """A thing with sides.

    It has a lid.
    """
    def open(self, how="slowly"):
        """Take off the lid."""
'''


def test_conversations_are_made_of_what_a_module_documents() -> None:
    found = make_conversations(MODULE, "shapes")
    assert found == make_conversations(MODULE, "shapes")
    assert len(found) == 3
    questions = [next(m["content"] for m in talk if m["role"] == "user") for talk in found]
    assert ["`shapes.area`" in questions[0], "`shapes.Box`" in questions[1], "`shapes.Box.open`" in questions[2]]
    for talk in found:
        roles = [message["role"] for message in talk]
        assert roles[-2:] == ["user", "assistant"]
        assert "system" not in roles[1:]
    answers = [message["content"] for talk in found for message in talk if message["role"] == "assistant"]
    assert "A thing with sides.\n\nIt has a lid." in answers
    assert make_conversations("def broken(:", "x") == []


def test_the_chat_sample_is_large_and_uneven(tmp_path: Path) -> None:
    files = [file for file in list_files(["stdlib-chat"]) if "/email/" in file.path or "/asyncio/" in file.path]
    found = [
        record.fields["messages"]
        for chunk in plan_chunks(files, CHAT)
        for record in read_records(chunk, CHAT, Meter())
        if record.fields
    ]
    assert len(found) > 300
    sizes = sorted(sum(len(message["content"]) for message in talk) for talk in found)
    assert sizes[-1] > 10 * sizes[len(sizes) // 2] > 20 * 2
    assert {len(talk) for talk in found} >= {2, 3, 4, 5, 6}
    assert any(talk[0]["role"] == "system" for talk in found)


def test_reading_a_file_that_is_gone_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    chunks: list[Chunk] = plan_chunks(list_files([str(tmp_path / "a.jsonl")]), RecordFormat())
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"data\.source names .*a\.jsonl, which cannot be read \(No such file"):
        list(read_records(chunks[0], RecordFormat(), Meter()))


def test_a_store_that_is_away_damages_no_file(faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever operation it goes: told that a file is damaged, a user would look there."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)

    def read_all(source: str, timeout_s: float) -> None:
        format = RecordFormat(storage_timeout_s=timeout_s)
        for chunk in plan_chunks(list_files([source], storage_timeout_s=timeout_s), format):
            list(read_records(chunk, format, Meter()))

    for path in write_kinds(tmp_path).values():
        source = f"faulty://{path}"
        faults.calls.clear()
        read_all(source, 30)  # in which nothing is tried twice
        for number in range(len(faults.calls)):
            faults.calls.clear()
            faults.dies_at = number + 1
            with pytest.raises(StorageError, match="the store is out of order"):
                read_all(source, 0.1)
            faults.dies_at, faults.dead = 0, False
