"""Megatron's indexed format: read and written as its own package does."""

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest

from phalanx.config.model import DataSection
from phalanx.core.errors import ConfigError, DataError
from phalanx.core.placement import Placement
from phalanx.data import megatron_dataset, read_chunks
from phalanx.data.megatron_dataset import open_indexed_dataset, write_indexed_dataset
from phalanx.data.prepare import prepare
from phalanx.data.record_files import TokenFile
from phalanx.data.tokenizer import train_tokenizer
from tests.helpers import run_ranks
from tests.token_sets import TokenWriter

# Written by megatron.core 0.16.1: four documents of one sequence each, one of them empty, and one of two sequences.
DOCUMENTS = [[5, 6, 7, 0], [9, 0], [], [11, 12], [1, 2, 3, 4, 0]]
INDEX = bytes.fromhex(
    "4d4d4944494458000001000000000000000806000000000000000600000000000000040000000200000000000000020000000300000002000000"
    "000000000000000008000000000000000c000000000000000c0000000000000010000000000000001600000000000000000000000000000001"
    "000000000000000200000000000000030000000000000004000000000000000600000000000000"
)
TOKENS = bytes.fromhex("0500060007000000090000000b000c0001000200030004000000")


def write_example(folder: Path, index: bytes = INDEX, tokens: bytes = TOKENS) -> str:
    (folder / "m.idx").write_bytes(index)
    (folder / "m.bin").write_bytes(tokens)
    return str(folder / "m")


def small_set(folder: Path, vocab_size: int, documents: list[list[int]]) -> TokenFile:
    writer = TokenWriter(folder, vocab_size, 0, "test")
    for document in documents:
        writer.append(np.array(document, np.int64))
    writer.finish()
    return TokenFile(folder)


def test_reads_what_megatron_wrote(tmp_path: Path) -> None:
    write_example(tmp_path)
    for path in (str(tmp_path / "m.idx"), (tmp_path / "m.idx").as_uri()):
        with open_indexed_dataset(path) as pair:
            assert pair.documents == 5
            assert [ids.tolist() for ids in pair.read_documents(0, 5)] == DOCUMENTS
            assert pair.read_documents(3, 4)[0].tolist() == [11, 12]
            assert pair.split_bounds(1 << 20) == [0, 5]
            assert pair.split_bounds(9) == [0, 2, 5]
            assert pair.split_bounds(1) == [0, 1, 2, 4, 5]


def test_writes_what_megatron_would(tmp_path: Path) -> None:
    token_set = small_set(tmp_path / "set", 300, [[5, 6, 7], [9], [1, 2, 3, 4]])
    assert write_indexed_dataset(token_set, tmp_path / "out" / "m") == 3
    assert (tmp_path / "out" / "m.bin").read_bytes() == struct.pack("<11H", 5, 6, 7, 0, 9, 0, 1, 2, 3, 4, 0)
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4) + struct.pack("<3i", 4, 2, 5)
    expected += struct.pack("<3q", 0, 8, 12) + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "out" / "m.idx").read_bytes() == expected
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["m.bin", "m.idx"]
    with pytest.raises(ConfigError, match=r"m\.bin exists; choose another prefix"):
        write_indexed_dataset(token_set, tmp_path / "out" / "m")
    write_indexed_dataset(small_set(tmp_path / "large", 65500, [[65499]]), tmp_path / "large_out")
    assert (tmp_path / "large_out.bin").read_bytes() == struct.pack("<2i", 65499, 0)


def test_a_mask_cannot_be_written(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "set", 9, 0, "test")
    writer.extend(np.array([1, 0]), np.array([2]), np.array([True, False]))
    writer.finish()
    with pytest.raises(ConfigError, match="which Megatron's format cannot store"):
        write_indexed_dataset(TokenFile(tmp_path / "set"), tmp_path / "m")


def theirs(placement: Placement, prefix: str, documents: list[list[int]], ours: str) -> list[list[int]]:
    """What Megatron's own package reads in `ours`; it also writes documents."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=DType.optimal_dtype(300))
    for document in documents:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(prefix + ".idx")
    found = IndexedDataset(ours)
    return [found[i].tolist() for i in range(len(found))]


def test_megatron_itself_reads_and_writes_the_same_bytes(tmp_path: Path) -> None:
    """With the real package, where it is installed (`pip install --no-deps megatron-core`)."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    bodies = [np.random.default_rng(i).integers(1, 300, 7 * i + 1).tolist() for i in range(6)]
    documents = [[*body, 0] for body in bodies]
    write_indexed_dataset(small_set(tmp_path / "set", 300, bodies), tmp_path / "ours")
    prefix, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    assert run_ranks(theirs, 1, prefix=prefix, documents=documents, ours=ours) == [documents]
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()
    with open_indexed_dataset(str(tmp_path / "theirs.idx")) as pair:
        assert [ids.tolist() for ids in pair.read_documents(0, pair.documents)] == documents


def test_becomes_a_token_set_by_the_tokenizer_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EOS is added where it lacks, an empty document is passed over, and chunks change nothing."""
    train_tokenizer(["some text"], 257, tmp_path / "tokenizer")
    source = write_example(tmp_path)

    def prepared(cache: str) -> TokenFile:
        data = DataSection(
            source=source, tokenizer=str(tmp_path / "tokenizer"), held_out=0.0, cache=str(tmp_path / cache)
        )
        return TokenFile(prepare(data).train[0][0])

    file = prepared("c")
    assert [file.document(i).tolist() for i in range(file.documents)] == [
        [*document[: -1 if document[-1] == 0 else None], 0] for document in DOCUMENTS if document
    ]
    monkeypatch.setattr(read_chunks, "CHUNK_BYTES", 9)
    assert prepared("d").checksum == file.checksum
    write_example(tmp_path, tokens=TOKENS[:-2] + struct.pack("<H", 400))
    with pytest.raises(DataError, match=r"m\.idx, document 4 holds the token 400, but the tokenizer .* has 257; set"):
        prepared("e")
    with pytest.raises(ConfigError, match=r"m\.idx holds token ids, so no tokenizer can be trained on it"):
        prepare(DataSection(source=source, tokenizer="train", cache=str(tmp_path / "f")))


@pytest.mark.parametrize(
    ("index", "tokens", "said"),
    [
        (INDEX[:20], TOKENS, "m.idx is incomplete: it has 20 bytes of at least 34"),
        (INDEX[:-1], TOKENS, "m.idx is incomplete: it has 153 bytes of at least 154"),
        (INDEX, TOKENS[:-2], "m.bin has 24 bytes, but its .idx says 26"),
        (b"x" + INDEX[1:], TOKENS, "m.idx is not a Megatron index"),
        (INDEX[:17] + b"\x06" + INDEX[18:], TOKENS, "m.idx is not a Megatron index of token ids"),
        (INDEX[:34] + b"\xff" * 4 + INDEX[38:], TOKENS, "m.idx is damaged: its offsets are impossible"),
        (INDEX[:-8] + struct.pack("<q", 7), TOKENS, "m.idx is damaged: its offsets are impossible"),
    ],
)
def test_torn_and_damaged_files_are_named(tmp_path: Path, index: bytes, tokens: bytes, said: str) -> None:
    write_example(tmp_path, index, tokens)
    with pytest.raises(DataError) as caught, megatron_dataset.open_indexed_dataset(str(tmp_path / "m.idx")):
        pytest.fail("it was opened")
    assert said in str(caught.value)


def test_a_missing_bin_is_named(tmp_path: Path) -> None:
    source = write_example(tmp_path)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(DataError, match=r"m\.bin is missing; restore it"):
        prepare(DataSection(source=source, tokenizer="train", cache=str(tmp_path / "c")))
