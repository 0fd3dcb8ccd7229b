"""Chunks of sources, and the documents in a chunk.

Sources are cut into chunks in a way that depends on the files alone, so that any number of processes may work on them
and the result is the same: byte ranges of plain JSON lines, groups of small files, groups of Parquet rows, shards of a
dataset, and each compressed file as a whole.
"""

import gzip
import io
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from phalanx.core.errors import DataError, StorageError
from phalanx.core.run_paths import redact_url
from phalanx.data import megatron_dataset, record_files
from phalanx.data.source_file import REMOTE, SourceFile
from phalanx.data.sources import (
    COMPRESSIONS,
    LINES,
    LIST,
    ROWS,
    TALKS,
    TEXT,
    TOKENS,
    Record,
    RecordFormat,
    describe_unreadable,
)
from phalanx.data.stdlib_chat import make_conversations
from phalanx.storage import files as storage

# Of source, in one chunk. A kill costs the work on the chunks at hand, some seconds; with many chunks, processes end
# together, but each costs three files until all are joined.
CHUNK_BYTES, MAX_CHUNK_BYTES, MANY_CHUNKS = 1 << 20, 16 << 20, 256
READ_BYTES = 1 << 20
OPTIONAL_KEYS = ("tools",)  # what a conversation may have beside its messages


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
    """The chunks of files, in order. Raises DataError for a file whose own index cannot be read."""
    size_bytes = max(CHUNK_BYTES, min(MAX_CHUNK_BYTES, sum(file.size_bytes for file in files) // MANY_CHUNKS))
    chunks: list[Chunk] = []
    group: list[SourceFile] = []
    for file in files:
        whole = file.kind in (TEXT, LIST, TALKS)
        unlike = group and (file.kind, file.lenient) != (group[0].kind, group[0].lenient)
        if group and (not whole or unlike or sum(one.size_bytes for one in group) >= size_bytes):
            chunks.append(_group(group))
            group = []
        if whole:
            group.append(file)
            continue
        try:
            chunks += _cut(file, format, size_bytes)
        except StorageError:  # it says what to do, and no file is to be mended: so in this whole module
            raise
        except OSError as error:
            raise DataError(describe_unreadable(file.path, error)) from None
    return [*chunks, _group(group)] if group else chunks


def _group(files: list[SourceFile]) -> Chunk:
    size = sum(file.size_bytes for file in files)
    return Chunk(files[0].kind, [file.path for file in files], 0, 0, size, files[0].lenient)


def _cut(file: SourceFile, format: RecordFormat, size_bytes: int) -> list[Chunk]:
    if file.kind == LINES and not file.path.lower().endswith(COMPRESSIONS):
        starts = range(0, file.size_bytes, size_bytes)
        ends = [*starts[1:], file.size_bytes]
        return [Chunk(LINES, [file.path], a, b, b - a) for a, b in zip(starts, ends, strict=True)]
    if file.kind == LINES:
        return [Chunk(LINES, [file.path], 0, 0, file.size_bytes)]
    if file.kind == ROWS:
        return _row_groups(file, format, size_bytes)
    if file.kind == TOKENS:
        with megatron_dataset.open_indexed_dataset(file.path, format.storage_timeout_s) as pair:
            bounds = pair.split_bounds(size_bytes)
            share = file.size_bytes // max(1, len(bounds) - 1)
            return [Chunk(TOKENS, [file.path], a, b, share) for a, b in itertools.pairwise(bounds)]
    assert file.kind == REMOTE
    from phalanx.data.hub import count_shards

    count = count_shards(file.path)
    return [Chunk(REMOTE, [file.path], i, count, file.size_bytes // count) for i in range(count)]


def read_records(chunk: Chunk, format: RecordFormat, meter: Meter, first_line: int = 1) -> Iterator[Record]:
    """The documents of a chunk (not of token ids), in order; empty texts among them.

    `first_line` is the number of the first line that begins in a chunk of JSON lines. Raises DataError naming file and
    place.
    """
    try:
        if chunk.kind == LINES:
            yield from _lines(chunk, format, meter, first_line)
        elif chunk.kind == ROWS:
            yield from _rows(chunk, format, meter)
        elif chunk.kind == REMOTE:
            from phalanx.data.hub import read_shard

            for number, fields in enumerate(read_shard(chunk.paths[0], chunk.start, chunk.stop), 1):
                yield _record(fields, format, f"{chunk.paths[0]}, document {number} of shard {chunk.start + 1}")
            meter.bytes = chunk.size_bytes
        else:
            for path in chunk.paths:
                yield from _whole_file(path, chunk, format, meter)
    except StorageError:
        raise
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else chunk.paths[0]
        raise DataError(describe_unreadable(named, error)) from None


def count_lines_before(chunk: Chunk, format: RecordFormat) -> int:
    """How many lines begin before a chunk of plain JSON lines; it reads them all."""
    count, left = 0, chunk.start - 1  # a line that begins at `start` follows a newline at start - 1
    with _open_raw(chunk.paths[0], format, 0) as stream:
        while left > 0 and (block := stream.read(min(left, READ_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count + 1 if chunk.start else 0


def read_text_lines(path: str, format: RecordFormat, meter: Meter) -> Iterator[tuple[int, str]]:
    """The lines of a text file, compressed or not, with their numbers and ends. Raises DataError naming the place."""
    name = redact_url(path)
    try:
        with _open_raw(path, format, 0) as stream, _plain(stream, path) as content:
            for number, raw in enumerate(_whole(content, path), 1):
                meter.bytes = stream.tell()
                yield number, decode_text(raw, name, number, lenient=False)
    except StorageError:
        raise
    except OSError as error:
        raise DataError(describe_unreadable(path, error)) from None


def read_label_names(file: SourceFile, key: str, format: RecordFormat) -> list[str] | None:
    """What the numbers under a key stand for, where a dataset's own description says so."""
    if file.kind == REMOTE:
        from phalanx.data.hub import read_hub_label_names

        return read_hub_label_names(file.path, key)
    if file.kind != ROWS:
        return None
    with _parquet(file.path, format) as table:
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


def _lines(chunk: Chunk, format: RecordFormat, meter: Meter, first_line: int) -> Iterator[Record]:
    path = chunk.paths[0]
    name = redact_url(path)
    if chunk.stop:
        with _open_raw(path, format, max(0, chunk.start - 1)) as stream:
            position = chunk.start
            if chunk.start:  # the line around `start` belongs to the chunk before
                position += len(stream.readline()) - 1
            for number in itertools.count(first_line):
                if position >= chunk.stop or not (raw := stream.readline()):
                    return
                position += len(raw)
                meter.bytes = position - chunk.start
                yield _json_line(raw, format, name, number)
        return
    with _open_raw(path, format, 0) as stream, _plain(stream, path) as text:
        for number, raw in enumerate(_whole(text, path), first_line):
            meter.bytes = stream.tell()
            yield _json_line(raw, format, name, number)


def _json_line(raw: bytes, format: RecordFormat, name: str, number: int) -> Record:
    where = f"{name}, line {number}"
    line = decode_text(raw, name, number, lenient=False).strip()
    if not line:
        raise DataError(f"{where} is empty, but each line of a .jsonl file is one document; delete the line")
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON ({error.msg}, column {error.colno}); correct or delete the line"
        ) from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where} {_unreadable_json(error)}; correct or delete the line") from None
    return _record(found, format, where)


def _unreadable_json(error: Exception) -> str:
    """Of JSON that is well-formed, and still more than Python takes."""
    return "is nested too deeply to be read" if isinstance(error, RecursionError) else "has a number of too many digits"


def _record(found: Any, format: RecordFormat, where: str) -> Record:
    """What a record holds. Conversations and prompts are looked into where they are encoded."""
    found = record_files.normalise_record(found, format) if isinstance(found, dict) else found
    for key in format.columns():
        if not isinstance(found, dict) or key not in found:
            has = ", ".join(map(str, list(found)[:8])) if isinstance(found, dict) else "no object"
            what = format.option_name(key)
            likely = record_files.guess_format(found, format) if isinstance(found, dict) else None
            remedy = f"set data.format={likely}, or " if likely else "set "
            remedy += f"data.{what}_key to the key that holds the {what}"
            raise DataError(f"{where} has no key {key!r} (it has: {has}); {remedy}")
    if format.format != "text":
        return Record(None, found, where)
    text = found[format.text_key]
    if not isinstance(text, str):
        raise DataError(
            f"{where} has a {type(text).__name__} under {format.text_key!r} instead of text; set data.text_key to "
            f"another key"
        )
    return Record(text, None, where)


def _whole_file(path: str, chunk: Chunk, format: RecordFormat, meter: Meter) -> Iterator[Record]:
    name = redact_url(path)
    with _open_raw(path, format, 0) as stream, _plain(stream, path) as content:
        raw = b"".join(_whole(content, path, by_line=False))
        meter.bytes += stream.tell()
    if chunk.kind == TEXT:
        yield Record(decode_text(raw, name, 1, chunk.lenient), None, name)
    elif chunk.kind == TALKS:
        module = os.path.splitext(os.path.basename(path))[0]
        if module == "__init__":
            module = os.path.basename(os.path.dirname(path))
        for number, messages in enumerate(make_conversations(decode_text(raw, name, 1, lenient=True), module), 1):
            yield Record(None, {format.messages_key: messages}, f"{name}, conversation {number}")
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
            raise DataError(f"{name} is not one list of records; write such a list, or one record a line as .jsonl")
        for number, one in enumerate(found, 1):
            yield _record(one, format, f"{name}, record {number}")


def _row_groups(file: SourceFile, format: RecordFormat, size_bytes: int) -> list[Chunk]:
    """Consecutive row groups of about `size_bytes` in memory; columns are looked up here, before anything is read."""
    chunks: list[Chunk] = []
    name = redact_url(file.path)
    with _parquet(file.path, format) as table:
        columns = table.schema_arrow.names
        _record(dict.fromkeys(columns, ""), format, name)
        metadata = table.metadata
        if not metadata.num_row_groups:
            return []
        start = rows = first_row = size = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            rows += group.num_rows
            size += group.total_byte_size
            if size >= size_bytes or number == metadata.num_row_groups - 1:
                chunks.append(Chunk(ROWS, [file.path], start, number + 1, 0, before=first_row))
                start, first_row, size = number + 1, rows, 0
    share, rest = divmod(file.size_bytes, len(chunks))
    return [
        Chunk(ROWS, chunk.paths, chunk.start, chunk.stop, share + (rest if not number else 0), before=chunk.before)
        for number, chunk in enumerate(chunks)
    ]


def _rows(chunk: Chunk, format: RecordFormat, meter: Meter) -> Iterator[Record]:
    name = redact_url(chunk.paths[0])
    row = chunk.before
    with _parquet(chunk.paths[0], format) as table:
        batches = table.iter_batches(
            1024,
            row_groups=list(range(chunk.start, chunk.stop)),
            columns=_columns_of(table.schema_arrow.names, format),
            use_threads=False,
        )
        while True:
            try:
                batch = next(batches, None)
                found = [] if batch is None else batch.to_pylist()
            except StorageError:
                raise
            except (ValueError, OSError) as error:  # pyarrow's own errors are ValueErrors
                raise DataError(
                    f"{name} is damaged near row {row + 1} ({_first_line(error)}); write or fetch it again"
                ) from None
            if batch is None:
                break
            for fields in found:
                row += 1
                known = {key: _without_nulls(value) for key, value in fields.items()}
                yield _record(known, format, f"{name}, row {row}")
    meter.bytes = chunk.size_bytes


def _columns_of(names: list[str], format: RecordFormat) -> list[str]:
    """The columns of a Parquet file that are read: those that the format names, or those of a layout known besides."""
    named = [key for key in (*format.columns(), *OPTIONAL_KEYS) if key in names]
    if all(key in names for key in format.columns()):
        return named
    return [*named, *(key for key in record_files.KEYS if key in names and key not in named)]


def _without_nulls(value: Any) -> Any:
    """A nested value without the keys that hold null. All rows of a Parquet column have the keys of any of them: that
    of a tool's argument which one conversation has is in all others too, and a template would write it there."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class _parquet:
    """A Parquet file, opened; DataError where it is none."""

    def __init__(self, path: str, format: RecordFormat) -> None:
        self._path, self._format = path, format

    def __enter__(self) -> Any:
        from pyarrow import parquet

        self._stream = _open_raw(self._path, self._format, 0)
        try:
            return parquet.ParquetFile(self._stream)
        except StorageError:
            raise
        except (ValueError, OSError) as error:
            self._stream.close()
            raise DataError(
                f"{redact_url(self._path)} is not a whole Parquet file ({_first_line(error)}); write or fetch it again"
            ) from None

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# --------------------------------------------------------------------------------------------------------------- bytes


def _open_raw(path: str, format: RecordFormat, offset: int) -> io.BufferedReader:
    if storage.is_url(path):
        return storage.open_read(path, offset, format.storage_timeout_s)
    stream = open(path, "rb")  # noqa: SIM115  closed by the caller
    stream.seek(offset)
    return stream


def _plain(stream: IO[bytes], path: str) -> IO[bytes]:
    """The stream without its compression."""
    if path.lower().endswith(".gz"):
        return gzip.open(stream)  # type: ignore[return-value]
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_Zstandard(stream), READ_BYTES)
    return stream


def _whole(stream: IO[bytes], path: str, by_line: bool = True) -> Iterator[bytes]:
    """Lines or blocks of a stream; DataError where its compression is torn."""
    line = 0
    while True:
        try:
            raw = stream.readline() if by_line else stream.read(READ_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile, _TruncatedStream) as error:
            after = f" after line {line}" if by_line and line else ""
            raise DataError(f"{redact_url(path)} is torn{after} ({error}); write or fetch the file again") from None
        if not raw:
            return
        line += 1
        yield raw


class _TruncatedStream(Exception):
    """A compressed stream that ends within a frame, or is none."""


class _Zstandard(io.RawIOBase):
    """Zstandard frames, decompressed. The library's own reader takes a frame that is cut off for its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._frame: Any = None
        self._left = b""  # decompressed and not yet read
        self._next = b""  # compressed, behind the frame that has ended

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._left:
            compressed = self._next or self._stream.read(READ_BYTES // 8)
            self._next = b""
            if not compressed:
                if self._frame is not None:
                    raise _TruncatedStream("it ends within a Zstandard frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                self._left = self._frame.decompress(compressed)
            except zstandard.ZstdError as error:
                raise _TruncatedStream(str(error)) from None
            if self._frame.eof:
                self._next, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def decode_text(raw: bytes, name: str, first_line: int, lenient: bool) -> str:
    """Bytes as text, without a byte order mark; DataError naming the line where they are not UTF-8."""
    try:
        return raw.decode("utf-8-sig", "replace" if lenient else "strict")
    except UnicodeDecodeError as error:
        line = first_line + raw[: error.start].count(b"\n")
        raise DataError(
            f"{name}, line {line} is not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start}); convert the "
            f"file, for example with iconv"
        ) from None
