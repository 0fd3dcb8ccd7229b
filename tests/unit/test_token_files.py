"""Indexed token files: what is written is read back, and what is damaged is named."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import DataError
from phalanx.data.record_files import MANIFEST, RecordFile, TokenFile
from tests.token_sets import TokenWriter

EOS = 7
TOKENS, INDEX, MASK = "tokens.bin", "tokens.index.bin", "tokens.mask.bin"


def write(folder: Path, documents: list[list[int]], vocab_size: int = 100) -> TokenFile:
    writer = TokenWriter(folder, vocab_size, EOS, "key")
    for document in documents:
        writer.append(np.array(document, np.int64))
    writer.finish()
    return TokenFile(folder)


def documents_up_to(vocab_size: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, vocab_size - 1), max_size=20), max_size=20)


@settings(max_examples=40, deadline=None)
@given(
    vocab_and_documents=st.sampled_from([100, 1 << 16, (1 << 16) + 1]).flatmap(
        lambda v: st.tuples(st.just(v), documents_up_to(v))
    )
)
def test_what_is_written_is_read_back(vocab_and_documents: tuple[int, list[list[int]]]) -> None:
    vocab_size, documents = vocab_and_documents
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder) / "set", documents, vocab_size)
        file.verify()
        flat = [token for document in documents for token in [*document, EOS]]
        assert (file.tokens, file.documents, file.vocab_size) == (len(flat), len(documents), vocab_size)
        assert file.slice(0, file.tokens).tolist() == flat
        assert file.slice(0, 0).dtype == np.int64
        for number, document in enumerate(documents):
            assert file.document(number).tolist() == [*document, EOS]
        width = 2 if vocab_size <= 1 << 16 else 4
        assert (Path(folder) / "set" / TOKENS).stat().st_size == width * len(flat)


def test_extend_equals_append(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [[1, 2], [], [3]])
    writer = TokenWriter(tmp_path / "two", 100, EOS, "key")
    writer.extend(np.array([1, 2, EOS], np.uint16), np.array([3]))
    writer.extend(np.array([], np.uint16), np.array([], np.int64))
    writer.extend(np.array([EOS, 3, EOS], np.uint16), np.array([1, 2]))
    writer.finish()
    for name in (TOKENS, INDEX, MANIFEST):
        assert (one.folder / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_nothing_is_visible_before_finish_and_leftovers_do_no_harm(tmp_path: Path) -> None:
    abandoned = TokenWriter(tmp_path / "set", 100, EOS, "key")
    abandoned.append(np.array([9, 9, 9]))
    assert not (tmp_path / "set").exists()
    file = write(tmp_path / "set", [[1]])
    assert file.slice(0, 2).tolist() == [1, EOS]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_tokens_outside_the_vocabulary_are_a_programming_error(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "set", 100, EOS, "key")
    with pytest.raises(AssertionError, match="vocabulary"):
        writer.append(np.array([100]))
    with pytest.raises(AssertionError, match="without EOS"):
        writer.extend(np.array([1, 2]), np.array([2]))


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_manifest(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_column(path: Path, **fields: object) -> None:
    columns = json.loads(path.read_text())["columns"]
    change_manifest(path, columns=columns | {"tokens": columns["tokens"] | fields})


def move_offsets(path: Path) -> None:
    path.write_bytes((np.frombuffer(path.read_bytes(), "<i8") + 1).tobytes())


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (TOKENS, Path.unlink, "missing"),
        (TOKENS, shorten, "9 bytes, its manifest says 10"),
        (INDEX, shorten, "bytes"),
        (INDEX, move_offsets, "offsets"),
        (MANIFEST, Path.unlink, "prepare the data again"),
        (MANIFEST, shorten, "not a manifest"),
        (MANIFEST, lambda path: path.write_text("[]"), "not a manifest"),
        (MANIFEST, lambda path: path.write_bytes(b"\xff"), "not a manifest"),
        (MANIFEST, lambda path: change_manifest(path, format_version=99), "is of format version 99"),
        (MANIFEST, lambda path: change_column(path, values="5"), "fields"),
        (MANIFEST, lambda path: change_column(path, dtype="<f4"), "fields"),
        (MANIFEST, lambda path: change_manifest(path, facts={}), "fields"),
        (MANIFEST, lambda path: change_column(path, values=6), "its manifest says 12"),
    ],
)
def test_damage_is_named_with_the_file_and_a_remedy(tmp_path: Path, name: str, damage, said: str) -> None:
    write(tmp_path / "set", [[1, 2], [3]])
    damage(tmp_path / "set" / name)
    with pytest.raises(DataError, match="prepare the data again") as caught:
        TokenFile(tmp_path / "set")
    assert said in str(caught.value)
    assert str(tmp_path / "set") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_flipped_byte_is_found_by_verify(tmp_path: Path) -> None:
    for name in (TOKENS, INDEX):
        file = write(tmp_path / "set", [[1, 2], [3], [4]])
        content = bytearray((tmp_path / "set" / name).read_bytes())
        content[2 if name == TOKENS else 8] ^= 1
        (tmp_path / "set" / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}.*checksum"):
            file.verify()
        shutil.rmtree(tmp_path / "set")


def test_contents_are_verified_once(tmp_path: Path) -> None:
    file = write(tmp_path / "set", [[1, 2], [3]])
    file.verify_once()
    tokens = tmp_path / "set" / "tokens.bin"
    status = tokens.stat()
    spoiled = bytearray(tokens.read_bytes())
    spoiled[0] ^= 1
    tokens.write_bytes(spoiled)
    os.utime(tokens, ns=(status.st_atime_ns, status.st_mtime_ns))
    TokenFile(tmp_path / "set").verify_once()  # by size and time the file that was found whole
    os.utime(tokens, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(DataError, match="checksum"):
        TokenFile(tmp_path / "set").verify_once()


def write_masked(folder: Path) -> TokenFile:
    writer = TokenWriter(folder, 100, EOS, "key")
    writer.extend(np.empty(0, np.uint16), np.empty(0, np.int64), np.empty(0, np.bool_))
    writer.extend(np.array([1, 2, EOS]), np.array([3]), np.array([False, True, True]))
    writer.extend(np.array([EOS, 3, EOS]), np.array([1, 2]), np.array([True, False, True]))
    writer.finish()
    return TokenFile(folder)


def test_a_mask_is_kept_beside_the_tokens(tmp_path: Path) -> None:
    file, plain = write_masked(tmp_path / "masked"), write(tmp_path / "plain", [[1, 2], [], [3]])
    assert file.masked
    assert not plain.masked
    assert file.slice(0, 6).tolist() == plain.slice(0, 6).tolist()
    assert file.mask(0, 6).tolist() == [False, True, True, True, False, True]
    assert file.mask(3, 5).tolist() == [True, False]
    assert plain.mask(1, 4).tolist() == [True, True, True]
    assert file.mask(0, 6).dtype == np.bool_
    assert file.checksum != plain.checksum
    assert file.checksum.startswith(plain.checksum)
    file.verify()
    assert not (tmp_path / "plain" / MASK).exists()


def test_a_set_has_a_mask_for_all_documents_or_for_none(tmp_path: Path) -> None:
    for number, masks in enumerate([(None, np.array([True])), (np.array([True]), None)]):
        writer = TokenWriter(tmp_path / str(number), 100, EOS, "key")
        writer.extend(np.array([EOS]), np.array([1]), masks[0])
        with pytest.raises(AssertionError, match="a column for some records"):
            writer.extend(np.array([EOS]), np.array([1]), masks[1])
    empty = TokenWriter(tmp_path / "empty", 100, EOS, "key")
    empty.finish()
    assert not TokenFile(tmp_path / "empty").masked


def test_a_damaged_mask_is_named(tmp_path: Path) -> None:
    file = write_masked(tmp_path / "set")
    path = tmp_path / "set" / MASK
    content = bytearray(path.read_bytes())
    content[1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokens\.mask\.bin.*checksum"):
        file.verify()
    shorten(path)
    with pytest.raises(DataError, match="5 bytes, its manifest says 6"):
        TokenFile(tmp_path / "set")
    path.unlink()
    with pytest.raises(DataError, match=r"tokens\.mask\.bin.*missing"):
        TokenFile(tmp_path / "set")


def make_old(folder: Path) -> None:
    """A token set as version 1 has it."""
    manifest = json.loads((folder / MANIFEST).read_text())
    names = {TOKENS: TOKENS, INDEX: "index.bin", MASK: "mask.bin"}
    for new, old in names.items():
        if (folder / new).exists():
            (folder / new).rename(folder / old)
    column, crc32 = manifest["columns"]["tokens"], {names[name]: each for name, each in manifest["crc32"].items()}
    old = {"format_version": 1, "dtype": column["dtype"], "tokens": column["values"], "documents": manifest["records"]}
    (folder / MANIFEST).write_text(json.dumps(old | manifest["facts"] | {"crc32": crc32}))


@pytest.mark.parametrize("masked", [False, True])
def test_token_sets_of_version_1_are_read(tmp_path: Path, masked: bool) -> None:
    new = write_masked(tmp_path / "set") if masked else write(tmp_path / "set", [[1, 2], [], [3]])
    make_old(tmp_path / "set")
    old = TokenFile(tmp_path / "set")
    old.verify()
    assert old.facts == new.facts and old.masked == masked
    assert old.checksum == new.checksum  # what a run that goes on compares
    assert [old.document(i).tolist() for i in range(3)] == [new.document(i).tolist() for i in range(3)]
    assert old.mask(0, 6).tolist() == new.mask(0, 6).tolist()
    change_manifest(tmp_path / "set" / MANIFEST, tokens=5)
    with pytest.raises(DataError, match="12 bytes, its manifest says 10"):
        TokenFile(tmp_path / "set")
    (tmp_path / "set" / "index.bin").unlink()
    change_manifest(tmp_path / "set" / MANIFEST, tokens=6)
    with pytest.raises(DataError, match=r"/index\.bin cannot be used: it is missing"):
        RecordFile(tmp_path / "set")
