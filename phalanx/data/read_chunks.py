"""Chunks of sources, and the documents in a chunk.

Sources are cut into chunks in a way that depends on the files alone, so that any number of processes may work on them
and the result is the same: byte ranges of plain JSON lines, groups of small files, groups of Parquet rows, shards of a
dataset, and each compressed file, table, CoNLL or HDF5 file as a whole.
"""

import csv
import functools
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import DataError, StorageError
from phalanx.core.run_paths import redact_url
from phalanx.data import megatron_dataset, records, sources
from phalanx.data.file_formats import (
    READ_BYTES,
    decode_text,
    decompress,
    open_parquet,
    open_raw,
    read_parquet_rows,
    read_whole,
)
from phalanx.data.records import COMPRESSIONS, FileKind, Record, RecordFormat, SourceFile, parse_record
from phalanx.data.stdlib_chat import make_conversations

# Of source, in one chunk. A kill costs the work on the chunks at hand, some seconds; with many chunks, processes end
# together, but each costs three files until all are joined.
CHUNK_BYTES, MAX_CHUNK_BYTES, MANY_CHUNKS = 1 << 20, 16 << 20, 256
OPTIONAL_KEYS = ("tools",)  # optional keys of a conversation besides its messages
DOCUMENT = "-DOCSTART-"  # of CoNLL
SEPARATORS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class Chunk:
    """A part of the sources. `start` and `stop` count bytes (JSON lines), row groups (Parquet), documents (tokens), or
    are the number of a shard and of all shards (a hub dataset); for whole files they are 0. `before`: rows before."""

    kind: str
    paths: list[str]
    start: int
    stop: int
    size_bytes: int
    lenient: bool = False
    before: int = 0


class Meter:
    """How many bytes of its source a reader has taken."""

    def __init__(self) -> None:
        self.bytes = 0


def plan_chunks(files: list[SourceFile], format: RecordFormat) -> list[Chunk]:
    """The chunks of files, in order. Raises DataError for a file whose index cannot be read."""
    size_bytes = max(CHUNK_BYTES, min(MAX_CHUNK_BYTES, sum(file.size_bytes for file in files) // MANY_CHUNKS))
    chunks: list[Chunk] = []
    group: list[SourceFile] = []
    for file in files:
        text = file.kind == FileKind.TEXT and not format.labelled
        whole = text or file.kind in (FileKind.LIST, FileKind.TALKS)
        unlike = group and (file.kind, file.lenient) != (group[0].kind, group[0].lenient)
        if group and (not whole or unlike or sum(one.size_bytes for one in group) >= size_bytes):
            chunks.append(_group(group))
            group = []
        if whole:
            group.append(file)
            continue
        try:
            chunks += _cut(file, format, size_bytes)
        except StorageError:  # not the file's fault, and the message has the remedy (as in all of this module)
            raise
        except OSError as error:
            raise DataError(sources.describe_unreadable(file.path, error)) from None
    return [*chunks, _group(group)] if group else chunks


def _group(files: list[SourceFile]) -> Chunk:
    size = sum(file.size_bytes for file in files)
    return Chunk(files[0].kind, [file.path for file in files], 0, 0, size, files[0].lenient)


def _cut(file: SourceFile, format: RecordFormat, size_bytes: int) -> list[Chunk]:
    if file.kind == FileKind.LINES and not file.path.lower().endswith(COMPRESSIONS):
        starts = range(0, file.size_bytes, size_bytes)
        ends = [*starts[1:], file.size_bytes]
        return [Chunk(FileKind.LINES, [file.path], a, b, b - a) for a, b in zip(starts, ends, strict=True)]
    if file.kind in (FileKind.LINES, FileKind.TEXT, FileKind.SHARDS):
        return [Chunk(file.kind, [file.path], 0, 0, file.size_bytes)]
    if file.kind == FileKind.ROWS:
        return _row_groups(file, format, size_bytes)
    if file.kind == FileKind.TOKENS:
        with megatron_dataset.open_indexed_dataset(file.path, format.storage_timeout_s) as pair:
            bounds = pair.split_bounds(size_bytes)
            share = file.size_bytes // max(1, len(bounds) - 1)
            return [Chunk(FileKind.TOKENS, [file.path], a, b, share) for a, b in itertools.pairwise(bounds)]
    assert file.kind == FileKind.REMOTE
    count = sources.count_shards(file.path)
    return [Chunk(FileKind.REMOTE, [file.path], i, count, file.size_bytes // count) for i in range(count)]


def read_records(chunk: Chunk, format: RecordFormat, meter: Meter, first_line: int = 1) -> Iterator[Record]:
    """The documents of a chunk of text or records (not of token ids or masked sequences), in order; empty ones among
    them.

    `first_line` is the number of the first line that begins in a chunk of JSON lines. Raises DataError naming file and
    place.
    """
    text = chunk.kind == FileKind.TEXT and not format.labelled
    try:
        names = read_label_names(chunk, format)
        for found, where in _read(chunk, format, meter, first_line):
            yield Record(found, None, where) if text else parse_record(found, format, where, names)
    except StorageError:
        raise
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else chunk.paths[0]
        raise DataError(sources.describe_unreadable(named, error)) from None


def _read(chunk: Chunk, format: RecordFormat, meter: Meter, first_line: int) -> Iterator[tuple[Any, str]]:
    """What each record of a chunk is in its file: a text or an object; and its place."""
    path = chunk.paths[0]
    if chunk.kind == FileKind.LINES:
        yield from _lines(chunk, format, meter, first_line)
    elif chunk.kind == FileKind.ROWS:
        choose = functools.partial(_choose_columns, format=format)
        groups = range(chunk.start, chunk.stop)
        for row, fields in read_parquet_rows(path, groups, choose, chunk.before, format.storage_timeout_s):
            yield fields, f"{redact_url(path)}, row {row}"
        meter.bytes = chunk.size_bytes
    elif chunk.kind == FileKind.REMOTE:
        for number, fields in enumerate(sources.read_shard(path, chunk.start, chunk.stop), 1):
            yield fields, f"{path}, document {number} of shard {chunk.start + 1}"
        meter.bytes = chunk.size_bytes
    elif chunk.kind == FileKind.TEXT and format.format == "tags":
        yield from _conll(path, format, meter)
    elif chunk.kind == FileKind.TEXT and format.format == "classes":
        yield from _table(path, format, meter)
    else:
        for path in chunk.paths:
            yield from _whole_file(path, chunk, format, meter)


def count_lines_before(chunk: Chunk, format: RecordFormat) -> int:
    """How many lines begin before a chunk of plain JSON lines; it reads them all."""
    count, left = 0, chunk.start - 1  # a line that begins at `start` follows a newline at start - 1
    with open_raw(chunk.paths[0], format.storage_timeout_s) as stream:
        while left > 0 and (block := stream.read(min(left, READ_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count + 1 if chunk.start else 0


def read_label_names(chunk: Chunk, format: RecordFormat) -> list[str] | None:
    """The names of label numbers, where the dataset's description has them."""
    if not format.labelled or chunk.kind not in (FileKind.ROWS, FileKind.REMOTE):
        return None
    key = format.columns()[-1]
    if chunk.kind == FileKind.REMOTE:
        return sources.read_hub_label_names(chunk.paths[0], key)
    with open_parquet(chunk.paths[0], format.storage_timeout_s) as table:
        described = (table.schema_arrow.metadata or {}).get(b"huggingface")
    try:
        feature = json.loads(described)["info"]["features"][key] if described else {}
        while "names" not in feature and isinstance(feature.get("feature"), dict):
            feature = feature["feature"]
        names = feature.get("names")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


# ------------------------------------------------------------------------------------------------------------ by kinds


def _lines(chunk: Chunk, format: RecordFormat, meter: Meter, first_line: int) -> Iterator[tuple[Any, str]]:
    path, timeout_s = chunk.paths[0], format.storage_timeout_s
    name = redact_url(path)
    if chunk.stop:
        with open_raw(path, timeout_s, max(0, chunk.start - 1)) as stream:
            position = chunk.start
            if chunk.start:  # the line around `start` belongs to the chunk before
                position += len(stream.readline()) - 1
            for number in itertools.count(first_line):
                if position >= chunk.stop or not (raw := stream.readline()):
                    return
                position += len(raw)
                meter.bytes = position - chunk.start
                yield _json_line(raw, name, number)
        return
    with open_raw(path, timeout_s) as stream, decompress(stream, path) as text:
        for number, raw in enumerate(read_whole(text, path), first_line):
            meter.bytes = stream.tell()
            yield _json_line(raw, name, number)


def _json_line(raw: bytes, name: str, number: int) -> tuple[Any, str]:
    where = f"{name}, line {number}"
    line = decode_text(raw, name, number, lenient=False).strip()
    if not line:
        raise DataError(f"{where} is empty, but each line of a .jsonl file is one document; delete the line")
    try:
        return json.loads(line), where
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON ({error.msg}, column {error.colno}); correct or delete the line"
        ) from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where} {_unreadable_json(error)}; correct or delete the line") from None


def _unreadable_json(error: Exception) -> str:
    """The problem of valid JSON beyond Python's limits."""
    return "is nested too deeply" if isinstance(error, RecursionError) else ("has a number with too many digits")


def _whole_file(path: str, chunk: Chunk, format: RecordFormat, meter: Meter) -> Iterator[tuple[Any, str]]:
    name = redact_url(path)
    with open_raw(path, format.storage_timeout_s) as stream, decompress(stream, path) as content:
        raw = b"".join(read_whole(content, path, by_line=False))
        meter.bytes += stream.tell()
    if chunk.kind == FileKind.TEXT:
        yield decode_text(raw, name, 1, chunk.lenient), name
    elif chunk.kind == FileKind.TALKS:
        module = os.path.splitext(os.path.basename(path))[0]
        if module == "__init__":
            module = os.path.basename(os.path.dirname(path))
        for number, messages in enumerate(make_conversations(decode_text(raw, name, 1, lenient=True), module), 1):
            yield {format.messages_key: messages}, f"{name}, conversation {number}"
    else:
        try:
            found = json.loads(decode_text(raw, name, 1, lenient=False)) if raw else []
        except json.JSONDecodeError as error:
            raise DataError(
                f"{name}, line {error.lineno} is not JSON ({error.msg}); correct it, or name the file .jsonl if each "
                f"of its lines is a record"
            ) from None
        except (RecursionError, ValueError) as error:
            raise DataError(f"{name} {_unreadable_json(error)}; correct it") from None
        if not isinstance(found, list):
            raise DataError(f"{name} is not a list of records; write such a list, or one record per line as .jsonl")
        for number, one in enumerate(found, 1):
            yield one, f"{name}, record {number}"


def _row_groups(file: SourceFile, format: RecordFormat, size_bytes: int) -> list[Chunk]:
    """Consecutive row groups of about `size_bytes` in memory; columns are looked up here, before anything is read."""
    chunks: list[Chunk] = []
    with open_parquet(file.path, format.storage_timeout_s) as table:
        records.check_keys(dict.fromkeys(table.schema_arrow.names, ""), format, redact_url(file.path))
        metadata = table.metadata
        if not metadata.num_row_groups:
            return []
        start = rows = first_row = size = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            rows += group.num_rows
            size += group.total_byte_size
            if size >= size_bytes or number == metadata.num_row_groups - 1:
                chunks.append(Chunk(FileKind.ROWS, [file.path], start, number + 1, 0, before=first_row))
                start, first_row, size = number + 1, rows, 0
    share, rest = divmod(file.size_bytes, len(chunks))
    return [replace(chunk, size_bytes=share + (0 if number else rest)) for number, chunk in enumerate(chunks)]


def _choose_columns(names: list[str], format: RecordFormat) -> list[str]:
    """The columns of a Parquet file that are read: those that the format names, or those of a layout known besides."""
    named = [key for key in (*format.columns(), *OPTIONAL_KEYS) if key in names]
    if all(key in names for key in format.columns()):
        return named
    return [*named, *(key for key in records.KEYS if key in names and key not in named)]


def _text_lines(path: str, format: RecordFormat, meter: Meter) -> Iterator[tuple[int, str]]:
    """The lines of a text file, compressed or not, with their numbers and ends."""
    name = redact_url(path)
    with open_raw(path, format.storage_timeout_s) as stream, decompress(stream, path) as content:
        for number, raw in enumerate(read_whole(content, path), 1):
            meter.bytes = stream.tell()
            yield number, decode_text(raw, name, number, lenient=False)


def _conll(path: str, format: RecordFormat, meter: Meter) -> Iterator[tuple[Any, str]]:
    name = redact_url(path)
    words: list[str] = []
    tags: list[str] = []
    columns, begun = 0, 1
    for number, line in _text_lines(path, format, meter):
        parts = line.split()
        if not parts or parts[0] == DOCUMENT:
            if words:
                yield {format.tokens_key: words, format.tags_key: tags}, f"{name}, line {begun}"
            words, tags = [], []
            continue
        if len(parts) < 2:
            raise DataError(
                f"{name}, line {number} has a word without a tag; write one word per line with its tag in the last "
                "column, and an empty line after each sentence"
            )
        columns = columns or len(parts)
        if len(parts) != columns:
            raise DataError(
                f"{name}, line {number} has {len(parts)} columns but the lines before have {columns}; correct it"
            )
        begun = begun if words else number
        words.append(parts[0])
        tags.append(parts[-1])
    if words:
        yield {format.tokens_key: words, format.tags_key: tags}, f"{name}, line {begun}"


def _table(path: str, format: RecordFormat, meter: Meter) -> Iterator[tuple[Any, str]]:
    name = redact_url(path)
    separator = SEPARATORS.get(sources.file_suffix(path))
    if separator is None:
        raise DataError(
            f"{name} is running text, but task.kind classify needs a label for each text; use .csv, .tsv, .jsonl, "
            ".json or .parquet files"
        )
    lines = (line for _, line in _text_lines(path, format, meter))
    table = csv.DictReader(lines, delimiter=separator, strict=True)
    try:
        header = table.fieldnames or []
        for key in format.columns():
            if key not in header:
                raise DataError(
                    f"{name} has no column {key!r} (it has: {', '.join(header[:8])}); set "
                    f"data.{format.option_name(key)}_key to the column that holds the {format.option_name(key)}"
                )
        for row in table:
            where = f"{name}, line {table.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{where} does not have the {len(header)} columns of the first line; correct the line")
            yield row, where
    except csv.Error as error:
        raise DataError(f"{name}, line {table.line_num} is not a table row ({error}); correct the line") from None
