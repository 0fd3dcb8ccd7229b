"""Encoding one chunk of a source to columns of token ids, in pieces on disk, by a worker process.

A piece is an `.npz` with the columns of training and held-out records, and then, once that is safe on the disk, a
`.json` with the number of records of the chunk before the next piece, and the names of its label numbers. A chunk is
done when its `.json` says so.
"""

import hashlib
import itertools
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError
from phalanx.core.json_lines import write_atomic
from phalanx.core.run_paths import redact_url
from phalanx.data import megatron_dataset
from phalanx.data.file_formats import read_shard_blocks
from phalanx.data.read_chunks import Chunk, Meter, count_lines_before, read_records
from phalanx.data.record_files import MASK_COLUMN, TOKEN_COLUMN, Columns, token_dtype
from phalanx.data.records import FileKind, Record, RecordFormat, is_held_out, record_digest
from phalanx.data.tokenizer import encode_documents, load_tokenizer

PIECE_CHARS = 8 << 20  # text of one piece
GROUP_CHARS = 1 << 20  # text handed to the tokenizer at once where each process has one core: more memory, no speed
GROUP_RECORDS = 1024  # labelled records handed to it at once
PIECE_RECORDS = 1 << 16  # documents of one piece at most
SPLITS = ("train", "held_out")
UNTAGGED = -1  # in the column of labels: no word begins with this piece


@dataclass(frozen=True)
class EncodeTask:
    """One chunk to encode. `name`: of its files in `folder`. `limits`: PIECE_CHARS and PIECE_RECORDS."""

    name: str
    folder: str
    tokenizer: str
    format: RecordFormat
    held_out: float
    chunk: Chunk
    limits: tuple[int, int] = (PIECE_CHARS, PIECE_RECORDS)


@dataclass(frozen=True)
class Piece:
    """Records of a chunk: their columns, the names of their label numbers, which of them are held out, and the number
    of records of the chunk up to their end."""

    columns: Columns
    labels: list[str]
    held_out: NDArray[np.bool_]
    taken: int


# ------------------------------------------------------------------------------------------------------------ encoding


@dataclass(frozen=True)
class RecordEncoder:
    """`encode` makes columns of records, and gives the names of their label numbers."""

    vocab_size: int
    eos_id: int
    encode: Callable[[list[Record]], tuple[Columns, list[str]]]


def column_types(format: str, vocab_size: int) -> dict[str, str]:
    """The columns of a set of records of this format, and the types of their values."""
    wide = token_dtype(vocab_size).str
    more = {
        "tags": {"labels": "<i4"},
        "classes": {"pair": wide, "labels": "<i4"},
        "masked": {"segments": "<u1", "places": "<u2", "labels": wide, "follows": "<u1"},
    }
    return {TOKEN_COLUMN: wide, **more.get(format, {})}


def make_encoder(tokenizer_folder: Path, format: RecordFormat, group_chars: int) -> RecordEncoder:
    """The encoder of a format. Raises ConfigError and DataError for a tokenizer that cannot be used."""
    if format.format in ("chat", "prompt"):
        from phalanx.data.chat import ChatEncoder

        chat = ChatEncoder(tokenizer_folder, format)

        def encode_talks(records: list[Record]) -> tuple[Columns, list[str]]:
            ids, lengths, mask = chat.encode(records)
            return {TOKEN_COLUMN: (ids, lengths)} | ({} if mask is None else {MASK_COLUMN: (mask, lengths)}), []

        return RecordEncoder(chat.vocab_size, chat.eos_id, encode_talks)
    tokenizer = load_tokenizer(tokenizer_folder)

    def encode_texts(records: list[Record]) -> tuple[Columns, list[str]]:
        texts = [record.text for record in records if record.text is not None]
        return {TOKEN_COLUMN: encode_documents(tokenizer, texts, group_chars)}, []

    def encode_labelled(records: list[Record]) -> tuple[Columns, list[str]]:
        assert tokenizer.specials is not None
        types, labels = column_types(format.format, tokenizer.vocab_size), dict[str, int]()
        rows: list[dict[str, list[int]]] = []
        for start in range(0, len(records), GROUP_RECORDS):
            group = records[start : start + GROUP_RECORDS]
            if format.format == "tags":
                rows += _encode_tags(tokenizer.backend, tokenizer.specials.unk, group, labels)
            else:
                rows += _encode_classes(tokenizer.backend, group, labels)
        return {name: _column([row[name] for row in rows], kind) for name, kind in types.items()}, list(labels)

    encode = encode_labelled if format.labelled else encode_texts
    return RecordEncoder(tokenizer.vocab_size, tokenizer.eos_id, encode)


def _column(rows: list[list[int]], kind: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    values = np.fromiter(itertools.chain.from_iterable(rows), np.dtype(kind))
    return values, np.fromiter(map(len, rows), np.int64, len(rows))


def _encode_tags(backend: Any, unk: int, batch: Sequence[Record], ids: dict[str, int]) -> list[dict[str, list[int]]]:
    """Columns of tagged sentences: `tokens`, and in `labels` the number of a word's tag at its first piece.

    A word of which the tokenizer leaves nothing becomes [UNK]. New tags get the next number in `ids`.
    """
    encodings = backend.encode_batch([list(one.texts) for one in batch], is_pretokenized=True, add_special_tokens=False)
    found = []
    for one, encoding in zip(batch, encodings, strict=True):
        pieces: list[list[int]] = [[] for _ in one.texts]
        for word, id in zip(encoding.word_ids, encoding.ids, strict=True):
            pieces[word].append(id)
        tokens: list[int] = []
        labels: list[int] = []
        for tag, parts in zip(one.labels, pieces, strict=True):
            parts = parts or [unk]
            tokens += parts
            labels += [ids.setdefault(tag, len(ids))] + [UNTAGGED] * (len(parts) - 1)
        found.append({"tokens": tokens, "labels": labels})
    return found


def _encode_classes(backend: Any, batch: Sequence[Record], ids: dict[str, int]) -> list[dict[str, list[int]]]:
    """Columns of labelled texts: `tokens` of the first, `pair` of the second if any, and one number in `labels`."""
    texts = [text for one in batch for text in one.texts]
    encodings = iter(backend.encode_batch(texts, add_special_tokens=False))
    found = []
    for one in batch:
        parts = [list(next(encodings).ids) for _ in one.texts]
        second = parts[1] if len(parts) > 1 else []
        label = ids.setdefault(one.labels[0], len(ids))
        found.append({"tokens": parts[0], "pair": second, "labels": [label]})
    return found


# -------------------------------------------------------------------------------------------------------------- pieces


def encode_chunk(task: EncodeTask, encoder: RecordEncoder, on_bytes: Callable[[int], None]) -> None:
    """Write the pieces of a chunk that are not there yet; `on_bytes(count)` tells how much of the source is done.

    Raises DataError naming file and place.
    """
    folder, meter, told = Path(task.folder), Meter(), 0
    done, skipped = _count_finished_pieces(folder, task.name)
    try:
        for number, piece in enumerate(_pieces(task, encoder, meter, skipped), done):
            types = column_types(task.format.format, encoder.vocab_size)
            _write_piece(folder / f"{task.name}-{number:04d}", piece, types)
            done = number + 1
            on_bytes(min(meter.bytes, task.chunk.size_bytes) - told)
            told = min(meter.bytes, task.chunk.size_bytes)
    except DataError:
        if task.chunk.kind != FileKind.LINES or not task.chunk.start:
            raise
        # How many lines lie before a chunk takes long to count, so it is only counted to name one.
        for _ in _pieces(task, encoder, Meter(), skipped, count_lines_before(task.chunk, task.format) + 1):
            continue
        raise
    write_atomic(folder / f"{task.name}.json", json.dumps({"pieces": done, "chunk": asdict(task.chunk)}))
    on_bytes(task.chunk.size_bytes - told)


def list_pieces(task: EncodeTask) -> list[Path] | None:
    """The pieces of a chunk in order; None unless all exist. Pieces of another division of the sources are removed."""
    folder = Path(task.folder)
    note = folder / f"{task.name}.json"
    if note.is_file():
        content = json.loads(note.read_text())
        if content["chunk"] == asdict(task.chunk):
            return [folder / f"{task.name}-{number:04d}.npz" for number in range(content["pieces"])]
        for stale in folder.glob(f"{task.name}*"):
            stale.unlink()
    return None


def read_piece(path: Path) -> tuple[dict[str, Columns], list[str]]:
    """The columns of a piece by side, and the names of its label numbers. Raises DataError for one that is
    damaged."""
    found: dict[str, Any] = {side: {} for side in SPLITS}
    try:
        labels = json.loads(path.with_suffix(".json").read_text())["labels"]
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                side, column, part = name.split("/")
                if part == "values":
                    found[side][column] = (arrays[name], arrays[f"{side}/{column}/lengths"])
    except (zipfile.BadZipFile, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error}); delete {path.parent} and prepare the data again") from None
    return found, labels


def _count_finished_pieces(folder: Path, name: str) -> tuple[int, int]:
    """How many pieces of a chunk are there, and how many of its documents they hold."""
    count = skipped = 0
    while (note := folder / f"{name}-{count:04d}.json").is_file() and note.with_suffix(".npz").is_file():
        skipped = json.loads(note.read_text())["documents"]
        count += 1
    return count, skipped


def _pieces(
    task: EncodeTask, encoder: RecordEncoder, meter: Meter, skipped: int, first_line: int = 1
) -> Iterator[Piece]:
    """The pieces of a chunk behind the first `skipped` records; empty ones are passed over."""
    if task.chunk.kind == FileKind.TOKENS:
        if not skipped:  # a chunk of tokens is one piece
            yield from _token_piece(task, encoder, meter)
        return
    if task.chunk.kind == FileKind.SHARDS:
        yield from _shard_pieces(task, encoder, meter, skipped)
        return
    keys = task.format.columns()
    records: list[Record] = []
    held_out: list[bool] = []
    chars, taken = 0, skipped
    for taken, record in enumerate(read_records(task.chunk, task.format, meter, first_line), 1):
        if taken <= skipped or record.empty:
            continue
        records.append(record)
        held_out.append(is_held_out(record_digest(record, keys), task.held_out))
        chars += _chars(record.text or record.fields or list(record.texts))
        if chars >= task.limits[0] or len(records) >= task.limits[1]:
            yield Piece(*encoder.encode(records), np.array(held_out), taken)
            records, held_out, chars = [], [], 0
    if records:
        yield Piece(*encoder.encode(records), np.array(held_out), taken)


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_chars, value.values()))
    return sum(map(_chars, value)) if isinstance(value, list) else 8


def _token_piece(task: EncodeTask, encoder: RecordEncoder, meter: Meter) -> Iterator[Piece]:
    """Documents that are token ids already; those without EOS at their end get it."""
    name, dtype = redact_url(task.chunk.paths[0]), token_dtype(encoder.vocab_size)
    found: list[NDArray[Any]] = []
    held_out: list[bool] = []
    with megatron_dataset.open_indexed_dataset(task.chunk.paths[0], task.format.storage_timeout_s) as pair:
        for number, ids in enumerate(pair.read_documents(task.chunk.start, task.chunk.stop), task.chunk.start):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < encoder.vocab_size:
                wrong = int(ids.max()) if ids.min() >= 0 else int(ids.min())
                raise DataError(
                    f"{name}, document {number} holds the token {wrong}, but the tokenizer {task.tokenizer} has "
                    f"{encoder.vocab_size}; set data.tokenizer to the one that made these tokens"
                )
            body = ids[:-1] if len(ids) and ids[-1] == encoder.eos_id else ids
            if len(body):
                held_out.append(is_held_out(_ids_digest(body), task.held_out))
                found.append(np.append(body, encoder.eos_id).astype(dtype))
    meter.bytes = task.chunk.size_bytes
    if found:
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        taken = task.chunk.stop - task.chunk.start
        yield Piece({TOKEN_COLUMN: (np.concatenate(found), lengths)}, [], np.array(held_out), taken)


def _shard_pieces(task: EncodeTask, encoder: RecordEncoder, meter: Meter, skipped: int) -> Iterator[Piece]:
    """Sequences that are masked already, as they are."""
    taken = 0
    for tokens, columns, part in read_shard_blocks(task.chunk.paths[0], encoder.vocab_size):
        taken += len(tokens)
        meter.bytes = int(task.chunk.size_bytes * part)
        if taken > skipped:
            held_out = [is_held_out(_ids_digest(row), task.held_out) for row in tokens]
            yield Piece(columns, [], np.array(held_out), taken)


def _ids_digest(ids: NDArray[Any]) -> bytes:
    return hashlib.sha256(ids.astype("<i4").tobytes()).digest()


def _write_piece(path: Path, piece: Piece, types: dict[str, str]) -> None:
    arrays = {}
    for side, chosen in zip(SPLITS, (~piece.held_out, piece.held_out), strict=True):
        for name, (values, lengths) in piece.columns.items():
            inside = values if chosen.all() else values[np.repeat(chosen, lengths)]
            arrays[f"{side}/{name}/values"] = inside.astype(types.get(name, "<u1"), copy=False)
            arrays[f"{side}/{name}/lengths"] = lengths[chosen]
    temporary = path.with_suffix(".writing")
    with open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path.with_suffix(".npz"))
    write_atomic(path.with_suffix(".json"), json.dumps({"documents": piece.taken, "labels": piece.labels}))
