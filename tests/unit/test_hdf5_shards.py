"""HDF5 shards of masked sequences: converted as they are, or refused in a sentence; and WordPiece tokenizers."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from phalanx.cli.root import app
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, DataError
from phalanx.data.bert_rows import MaskingOptions, PremaskedRows
from phalanx.data.prepare import PreparedData, prepare_for
from phalanx.data.record_files import RecordFile, TokenFile
from phalanx.data.tokenizer import load_tokenizer, train_tokenizer
from tests.shards import write_shard

TEXTS = ["Unbelievable words, words of length.", "def words_of(length): return 17", "A\tb  C"] * 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wordpiece") / "tokenizer"
    train_tokenizer(TEXTS, 300, folder, pieces=True)
    return folder


def config(tmp_path: Path, tokenizer: Path | str, source: Path | str, **data: Any) -> Config:
    keys = {"source": str(source), "tokenizer": str(tokenizer), "cache": str(tmp_path / "cache"), "held_out": 0.0}
    tree = {"model": {"preset": "bert-tiny"}, "task": {"kind": "masked"}, "data": {"format": "masked", **keys, **data}}
    return Config.model_validate(tree)


# ------------------------------------------------------------------------------------------------------------- shards


def test_shards_are_kept_as_they_are(tmp_path: Path, tokenizer: Path) -> None:
    written = [write_shard(tmp_path / "shards" / f"part_{n}.hdf5", rows=20 + n, seed=n) for n in range(3)]
    prepared = prepare_for(config(tmp_path, tokenizer, tmp_path / "shards"))
    columns = RecordFile(prepared.train[0][0])
    rows = PremaskedRows(columns, MaskingOptions(32, 0.15, pairs=True))
    assert rows.count == 63
    number = 0
    for arrays in written:
        for row in range(len(arrays["input_ids"])):
            sample = rows.sample(number, 7 * number)
            length = int(arrays["input_mask"][row].sum())
            asked = int((arrays["masked_lm_positions"][row] > 0).sum())
            assert sample.tokens.tolist() == arrays["input_ids"][row, :length].tolist()
            assert sample.segments.tolist() == arrays["segment_ids"][row, :length].tolist()
            assert sample.places.tolist() == arrays["masked_lm_positions"][row, :asked].tolist()
            assert sample.labels.tolist() == arrays["masked_lm_ids"][row, :asked].tolist()
            assert (sample.follows, sample.position) == (arrays["next_sentence_labels"][row], 7 * number)
            number += 1
    assert PremaskedRows(columns, MaskingOptions(32, 0.15)).sample(0, 0).follows == -100
    with pytest.raises(DataError, match=r"has rows of 32 tokens, but data.seq_len is 16; raise it"):
        PremaskedRows(columns, MaskingOptions(16, 0.15))


def test_a_part_of_the_sequences_is_held_out(tmp_path: Path, tokenizer: Path) -> None:
    write_shard(tmp_path / "a.hdf5", rows=300)
    prepared = prepare_for(config(tmp_path, tokenizer, tmp_path / "a.hdf5", held_out=0.2))
    held_out = RecordFile(prepared.held_out["held_out"]).count
    assert 30 < held_out < 90
    assert RecordFile(prepared.train[0][0]).count == 300 - held_out


def test_the_command_converts_and_shows_them(tmp_path: Path, tokenizer: Path) -> None:
    write_shard(tmp_path / "a.hdf5", rows=9)
    options = ["--tokenizer", str(tokenizer), "--cache", str(tmp_path / "cache"), "--held-out", "0"]
    done = CliRunner().invoke(app, ["data", "prepare", str(tmp_path / "a.hdf5"), *options])
    assert done.exit_code == 0, done.output
    assert "in 9 documents, vocabulary" in done.output.splitlines()[-2]
    folder = done.output.splitlines()[-2].rpartition(" ")[2]
    shown = CliRunner().invoke(app, ["data", "inspect", folder])
    assert shown.exit_code == 0, shown.output
    assert "documents" in shown.output


def _without(key: str) -> Any:
    return lambda arrays: arrays.pop(key)


def _put(key: str, row: int, column: int, value: int) -> Any:
    def change(arrays: dict[str, Any]) -> None:
        arrays[key][(row, column) if arrays[key].ndim == 2 else row] = value

    return change


def _set(key: str, make: Any) -> Any:
    return lambda arrays: arrays.update({key: make(arrays[key])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("segment_ids"), r"a\.hdf5 has no key 'segment_ids' \(it has: "),
        (_set("masked_lm_ids", lambda a: a[:-1]), r"20 sequences under 'input_ids' but 19 under 'masked_lm_ids'"),
        (_set("input_mask", lambda a: a[:, 1:]), r"rows of 31 under 'input_mask' but of 32 under 'input_ids'"),
        (_set("masked_lm_ids", lambda a: a[:, 1:]), r"rows of 4 under 'masked_lm_ids' but of 5 under 'masked_lm_pos"),
        (_set("input_ids", lambda a: a[0]), r"no 2-dimensional integers under 'input_ids'"),
        (_set("input_ids", lambda a: a * 1.5), r"no 2-dimensional integers under 'input_ids'"),
        (_put("input_ids", 3, 1, 300), r"a token beyond the tokenizer's \d+ under 'input_ids' in sequence 3"),
        (_put("masked_lm_ids", 4, 0, -1), r"a token beyond .* under 'masked_lm_ids' in sequence 4"),
        (
            _put("masked_lm_positions", 5, 0, 32),
            r"a position outside the text under 'masked_lm_positions' in sequence 5",
        ),
        (_put("input_mask", 6, 0, 0), r"values other than ones followed by zeros under 'input_mask' in sequence 6"),
        (_set("input_mask", lambda a: a * 0), r"an empty sequence under 'input_mask' in sequence 0"),
        (_put("segment_ids", 7, 0, 2), r"something other than 0 and 1 under 'segment_ids' in sequence 7"),
        (_put("next_sentence_labels", 8, 0, 3), r"other than 0 and 1 under 'next_sentence_labels' in sequence 8"),
    ],
)
def test_a_shard_that_is_none_is_a_sentence(change: Any, message: str, tmp_path: Path, tokenizer: Path) -> None:
    write_shard(tmp_path / "a.hdf5", rows=20, change=change)
    with pytest.raises(DataError, match=message):
        prepare_for(config(tmp_path, tokenizer, tmp_path / "a.hdf5"))


def test_a_torn_or_foreign_file_is_a_sentence(tmp_path: Path, tokenizer: Path) -> None:
    write_shard(tmp_path / "a.hdf5", rows=500)
    whole = (tmp_path / "a.hdf5").read_bytes()
    for content in (b"not HDF5 at all", whole[: len(whole) // 2]):
        (tmp_path / "a.hdf5").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.hdf5 is not a complete HDF5 file"):
            prepare_for(config(tmp_path, tokenizer, tmp_path / "a.hdf5"))
    with h5py.File(tmp_path / "b.hdf5", "w") as file:  # a compressed block that rots is found by its library
        arrays = write_shard(tmp_path / "c.hdf5", rows=500)
        for key, values in arrays.items():
            file.create_dataset(key, data=values, compression="gzip", chunks=(500, *values.shape[1:]))
    rotten = bytearray((tmp_path / "b.hdf5").read_bytes())
    with h5py.File(tmp_path / "b.hdf5") as file:
        offset = file["input_ids"].id.get_chunk_info(0).byte_offset
    rotten[offset + 8 : offset + 200] = b"\xff" * 192
    (tmp_path / "b.hdf5").write_bytes(bytes(rotten))
    with pytest.raises(DataError, match=r"b\.hdf5 is damaged under 'input_ids' near sequence 0"):
        prepare_for(config(tmp_path, tokenizer, tmp_path / "b.hdf5"))


def test_shards_ask_for_what_belongs_to_them(tmp_path: Path, tokenizer: Path) -> None:
    write_shard(tmp_path / "a.hdf5", rows=9)
    with pytest.raises(ConfigError, match=r"holds token ids, so no tokenizer can be trained"):
        prepare_for(config(tmp_path, "train", tmp_path / "a.hdf5"))
    with pytest.raises(DataError, match=r"is an HDF5 file, .* set data.format=masked"):
        prepare_for(config(tmp_path, tokenizer, tmp_path / "a.hdf5", format="text"))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"is running text, but shards of masked sequences are needed"):
        prepare_for(config(tmp_path, tokenizer, tmp_path / "a.txt"))


# --------------------------------------------------------------------------------------------------------- WordPiece


def prepared_text(tmp_path: Path, tokenizer: Path | str) -> PreparedData:
    for number, text in enumerate(TEXTS[:9]):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    return prepare_for(config(tmp_path, tokenizer, tmp_path / "texts", format="text", tokenizer_vocab=300))


def test_a_trained_wordpiece_is_one_that_transformers_knows(tokenizer: Path, tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    found = theirs("words of length", "def")
    tokens = theirs.convert_ids_to_tokens(found["input_ids"])
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and tokens.count("[SEP]") == 2
    assert found["token_type_ids"][0] == 0 and found["token_type_ids"][-1] == 1
    assert theirs.decode(found["input_ids"], skip_special_tokens=True) == "words of length def"
    train_tokenizer(TEXTS, 300, tmp_path / "again", pieces=True)
    for file in sorted(tokenizer.iterdir()):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_token_set_knows_its_special_tokens(tokenizer: Path, tmp_path: Path) -> None:
    opened = load_tokenizer(tokenizer)
    specials = opened.specials
    assert specials is not None
    assert opened.eos_id == specials.sep
    backend = opened.backend
    assert [backend.id_to_token(getattr(specials, name)) for name in ("pad", "unk", "cls", "sep", "mask")] == [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]",
    ]  # fmt: skip
    pieces = {backend.id_to_token(id) for id in range(opened.vocab_size)}
    assert {backend.id_to_token(id) for id in specials.continuing} == {p for p in pieces if p.startswith("##")}
    for named in (tokenizer, "train"):
        prepared = prepared_text(tmp_path, named)
        file = TokenFile(prepared.train[0][0])
        assert file.specials is not None
        assert file.documents == 9
        assert all(file.document(number)[-1] == file.specials.sep for number in range(9))
    manifest = prepared.train[0][0] / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"facts": content["facts"] | {"specials": {"pad": 0}}}))
    with pytest.raises(DataError, match=r"its special tokens are invalid"):
        TokenFile(prepared.train[0][0])


def test_a_bare_vocabulary_of_the_first_bert_is_opened(tokenizer: Path, tmp_path: Path) -> None:
    vocabulary = load_tokenizer(tokenizer).backend.get_vocab()
    ordered = sorted(vocabulary, key=lambda token: vocabulary[token])
    (tmp_path / "vocab.txt").write_text("\n".join(ordered) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    opened = load_tokenizer(tmp_path)
    assert opened.specials is not None
    assert np.array_equal(opened.backend.encode("words", add_special_tokens=False).ids,
                          load_tokenizer(tokenizer).backend.encode("words", add_special_tokens=False).ids)  # fmt: skip
