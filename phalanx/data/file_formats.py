"""File formats of sources: compressed text, Parquet, and HDF5 shards of sequences that are masked already.

The shards are as NVIDIA's BERT writes them and HetSeq reads them. Keys: `input_ids`, `input_mask` and `segment_ids`
(sequences, tokens); `masked_lm_positions` and `masked_lm_ids` (sequences, predictions), where a position of 0 ends the
list; `next_sentence_labels` (sequences,), 0 where the second segment follows the first.
"""

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError, StorageError
from phalanx.core.run_paths import redact_url
from phalanx.storage import files as storage

READ_BYTES = 1 << 20

Array = NDArray[np.int64]


def shorten_error(error: Exception) -> str:
    """The first line of another library's error message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# ---------------------------------------------------------------------------------------------------------------- text


def open_raw(path: str, timeout_s: float, offset: int = 0) -> io.BufferedReader:
    """A file's bytes as they lie there, from `offset` on; local or at a URL."""
    if storage.is_url(path):
        return storage.open_read(path, offset, timeout_s)
    stream = open(path, "rb")  # noqa: SIM115  closed by the caller
    stream.seek(offset)
    return stream


def decompress(stream: IO[bytes], path: str) -> IO[bytes]:
    """The stream without its compression."""
    if path.lower().endswith(".gz"):
        return gzip.open(stream)  # type: ignore[return-value]
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_Zstandard(stream), READ_BYTES)
    return stream


def read_whole(stream: IO[bytes], path: str, by_line: bool = True) -> Iterator[bytes]:
    """Lines or blocks of a stream; DataError where its compression is torn."""
    line = 0
    while True:
        try:
            raw = stream.readline() if by_line else stream.read(READ_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile, _TruncatedStream) as error:
            after = f" after line {line}" if by_line and line else ""
            raise DataError(
                f"{redact_url(path)} is incomplete{after} ({error}); write or download the file again"
            ) from None
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
        self._next = b""  # compressed data after the finished frame

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


# ------------------------------------------------------------------------------------------------------------- Parquet


@contextlib.contextmanager
def open_parquet(path: str, timeout_s: float) -> Iterator[Any]:
    """A Parquet file, opened. Raises DataError where it is none."""
    from pyarrow import parquet

    with open_raw(path, timeout_s) as stream:
        try:
            table = parquet.ParquetFile(stream)
        except StorageError:
            raise
        except (ValueError, OSError) as error:
            raise DataError(
                f"{redact_url(path)} is not a complete Parquet file ({shorten_error(error)}); write or download it "
                "again"
            ) from None
        yield table


def read_parquet_rows(
    path: str, groups: range, choose: Callable[[list[str]], list[str]], before: int, timeout_s: float
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, object) of each row of some row groups, `before` which there are so many rows; `choose` says which of
    the columns are read. Raises DataError naming the row."""
    name, row = redact_url(path), before
    with open_parquet(path, timeout_s) as table:
        columns = choose(table.schema_arrow.names)
        batches = table.iter_batches(1024, row_groups=list(groups), columns=columns, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
                found = [] if batch is None else batch.to_pylist()
            except StorageError:
                raise
            except (ValueError, OSError) as error:  # pyarrow's own errors are ValueErrors
                raise DataError(
                    f"{name} is damaged near row {row + 1} ({shorten_error(error)}); write or download it again"
                ) from None
            if batch is None:
                return
            for fields in found:
                row += 1
                yield row, {key: _without_nulls(value) for key, value in fields.items()}


def _without_nulls(value: Any) -> Any:
    """A nested value without the keys that hold null. All rows of a Parquet column have the keys of any of them: that
    of a tool's argument which one conversation has is in all others too, and a template would write it there."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------------------------- HDF5 shards


SHARD_KEYS = {
    "input_ids": 2,
    "input_mask": 2,
    "segment_ids": 2,
    "masked_lm_positions": 2,
    "masked_lm_ids": 2,
    "next_sentence_labels": 1,
}
BLOCK_SEQUENCES = 4096  # sequences read at a time


def read_shard_blocks(path: str, vocab_size: int) -> Iterator[tuple[Array, dict[str, tuple[Array, Array]], float]]:
    """Some sequences of a shard at a time: their tokens, padded as there; the values of each column behind one another
    and how many each sequence has; and what part of the file is read by then. Raises DataError naming file and key."""
    import h5py

    name = redact_url(path)
    if storage.is_url(path):
        raise DataError(f"{name} is at a URL, but HDF5 files need random access; copy it to a local disk")
    try:
        with h5py.File(path, "r") as file:
            found = {key: _dataset(file, key, dim, name) for key, dim in SHARD_KEYS.items()}
            count = _check_shapes(found, name)
            for start in range(0, count, BLOCK_SEQUENCES):
                stop = min(start + BLOCK_SEQUENCES, count)
                parts = {key: _read(found[key], key, start, stop, name) for key in SHARD_KEYS}
                yield parts["input_ids"], _check_block(parts, start, vocab_size, name), stop / count
    except DataError:
        raise
    except Exception as error:  # whatever a file that is damaged makes of the library
        raise DataError(
            f"{name} is not a complete HDF5 file ({shorten_error(error)}); write or download it again"
        ) from None


def find_row_length(paths: Iterable[str]) -> int:
    """The tokens of the longest rows of shards; 0 where one cannot be read, of which `read_shard_blocks` tells more."""
    import h5py

    widths = [0]
    with contextlib.suppress(OSError, KeyError, AttributeError, IndexError):
        for path in paths:
            with h5py.File(path, "r") as file:
                widths.append(int(file["input_ids"].shape[1]))
    return max(widths)


def _dataset(file: Any, key: str, dim: int, name: str) -> Any:
    import h5py

    if key not in file:
        raise DataError(
            f"{name} has no key {key!r} (it has: {', '.join(list(file)[:8]) or 'none'}), so it is not a shard of "
            "masked sequences; write it again"
        )
    dataset = file[key]
    if not isinstance(dataset, h5py.Dataset) or dataset.ndim != dim or dataset.dtype.kind not in "iu":
        raise DataError(f"{name} has no {dim}-dimensional integers under {key!r}; write it again")
    return dataset


def _check_shapes(found: dict[str, Any], name: str) -> int:
    """The number of sequences. Raises DataError where keys disagree."""
    first, *others = found
    for key in others:
        if len(found[key]) != len(found[first]):
            raise DataError(
                f"{name} has {len(found[first])} sequences under {first!r} but {len(found[key])} under {key!r}; write "
                "it again"
            )
    for key, like in (
        ("input_mask", "input_ids"),
        ("segment_ids", "input_ids"),
        ("masked_lm_ids", "masked_lm_positions"),
    ):
        if found[key].shape != found[like].shape:
            raise DataError(
                f"{name} has rows of {found[key].shape[1]} under {key!r} but of {found[like].shape[1]} under {like!r}; "
                "write it again"
            )
    return len(found[first])


def _read(dataset: Any, key: str, start: int, stop: int, name: str) -> Array:
    try:
        return dataset[start:stop].astype(np.int64)
    except OSError as error:
        raise DataError(
            f"{name} is damaged under {key!r} near sequence {start} ({shorten_error(error)}); write or download it "
            "again"
        ) from None


def _check_block(parts: dict[str, Array], start: int, vocab_size: int, name: str) -> dict[str, tuple[Array, Array]]:
    tokens, mask, places = parts["input_ids"], parts["input_mask"], parts["masked_lm_positions"]
    lengths = mask.sum(1)
    predicted = np.where((places == 0).any(1), (places == 0).argmax(1), places.shape[1])
    asked = _before(predicted, places.shape[1])
    follows = parts["next_sentence_labels"]

    def refuse(wrong: Any, key: str, what: str) -> None:
        if wrong.any():
            row = start + int(np.flatnonzero(wrong)[0])
            raise DataError(f"{name} holds {what} under {key!r} in sequence {row}; write it again")

    refuse((mask != _before(lengths, mask.shape[1])).any(1), "input_mask", "values other than ones followed by zeros")
    refuse(lengths == 0, "input_mask", "an empty sequence")
    for key in ("input_ids", "masked_lm_ids"):
        values = parts[key]
        refuse(((values < 0) | (values >= vocab_size)).any(1), key, f"a token beyond the tokenizer's {vocab_size}")
    refuse(
        ((places < 0) | ((places >= lengths[:, None]) & asked)).any(1),
        "masked_lm_positions",
        "a position outside the text",
    )
    segments = parts["segment_ids"]
    refuse(((segments < 0) | (segments > 1)).any(1), "segment_ids", "something other than 0 and 1")
    refuse((follows < 0) | (follows > 1), "next_sentence_labels", "something other than 0 and 1")
    inside = _before(lengths, tokens.shape[1])
    return {
        "tokens": (tokens[inside], lengths),
        "segments": (segments[inside], lengths),
        "places": (places[asked], predicted),
        "labels": (parts["masked_lm_ids"][asked], predicted),
        "follows": (follows, np.ones_like(follows)),
    }


def _before(counts: Array, width: int) -> NDArray[np.bool_]:
    return np.arange(width) < counts[:, None]
