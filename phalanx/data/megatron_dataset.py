"""Megatron's indexed datasets: a `.bin` file of token ids and an `.idx` file that says where each document lies.

Layout of the `.idx` (little endian): `MMIDIDX` and two zero bytes, version 1 (uint64), a code for the type of the ids
(uint8), the numbers of sequences and of document bounds (uint64 each), then lengths of sequences in tokens (int32),
their offsets in the `.bin` in bytes (int64), and the bounds of documents in sequences (int64, the first 0).
Source: megatron.core.datasets.indexed_dataset.
"""

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import ConfigError, DataError, StorageError
from phalanx.core.run_paths import redact_url
from phalanx.data.record_files import TokenFile
from phalanx.storage import files as storage

HEADER = b"MMIDIDX\x00\x00"
VERSION = 1
PREAMBLE = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point numbers
SMALL_VOCAB = 65500  # below it Megatron itself writes uint16
COPY_TOKENS = 4 << 20
MAX_BYTES = 1 << 60  # of a .bin


class IndexedDataset:
    """An `.idx` and its `.bin`, opened for reading; ids stay on disk until they are read.

    Raises DataError for an index that is torn or no index, and for a `.bin` that is shorter than it says.
    """

    def __init__(self, index: NDArray[np.uint8], data: "RangeReader", name: str) -> None:
        self._data = data
        self._name = name
        if index.size < PREAMBLE.size:
            raise DataError(self._torn(PREAMBLE.size, index.size))
        header, version, code, sequences, bounds = PREAMBLE.unpack(index[: PREAMBLE.size].tobytes())
        if header != HEADER or version != VERSION or code not in DTYPES:
            raise DataError(f"{name} is not a Megatron index of token ids; choose another file")
        self.dtype = np.dtype(DTYPES[code])
        needed = PREAMBLE.size + 12 * sequences + 8 * bounds
        if index.size < needed:
            raise DataError(self._torn(needed, index.size))
        at = PREAMBLE.size
        self._lengths = np.frombuffer(index[at : at + 4 * sequences].tobytes(), "<i4").astype(np.int64)
        at += 4 * sequences
        self._pointers = np.frombuffer(index[at : at + 8 * sequences].tobytes(), "<i8")
        at += 8 * sequences
        self._bounds = np.frombuffer(index[at : at + 8 * bounds].tobytes(), "<i8")
        self._check()

    def _torn(self, needed: int, found: int) -> str:
        return f"{self._name} is incomplete: it has {found} bytes of at least {needed}; write or download it again"

    def _check(self) -> None:
        if (
            not len(self._bounds)
            or self._bounds[0] != 0
            or (self._bounds < 0).any()
            or (self._bounds > len(self._lengths)).any()
            or (np.diff(self._bounds) < 0).any()
            or (self._lengths < 0).any()
            or (self._pointers < 0).any()
            or (self._pointers > MAX_BYTES).any()  # with what is added to it, no sum wraps around
            or (self._pointers % self.dtype.itemsize).any()
        ):
            raise DataError(f"{self._name} is damaged: its offsets are impossible; write or download it again")
        end = int((self._pointers + self._lengths * self.dtype.itemsize).max(initial=0))
        if self._data.size < end:
            name = f"{self._name.removesuffix('.idx')}.bin"
            raise DataError(f"{name} has {self._data.size} bytes, but its .idx says {end}; write or download it again")

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self._bounds) - 1

    def split_bounds(self, size_bytes: int) -> list[int]:
        """Bounds of runs of documents, each of about `size_bytes`: the first 0, the last the number of documents."""
        ends = np.concatenate([[0], np.cumsum(self._lengths)])[self._bounds] * self.dtype.itemsize
        bounds = [0]
        while bounds[-1] < self.documents:
            stop = int(np.searchsorted(ends, ends[bounds[-1]] + size_bytes))
            bounds.append(min(max(stop, bounds[-1] + 1), self.documents))
        return bounds

    def read_documents(self, start: int, stop: int) -> list[NDArray[Any]]:
        """The ids of documents [start, stop), one array each."""
        found: list[NDArray[Any]] = []
        for number in range(start, stop):
            first, last = int(self._bounds[number]), int(self._bounds[number + 1])
            parts = [self._sequence(i) for i in range(first, last)]
            found.append(np.concatenate(parts) if parts else np.empty(0, self.dtype))
        return found

    def _sequence(self, number: int) -> NDArray[Any]:
        begin = int(self._pointers[number])
        end = begin + int(self._lengths[number]) * self.dtype.itemsize
        return np.frombuffer(self._data.read_range(begin, end), self.dtype)


class RangeReader:
    """The contents of a file by range: mapped where it is local, read ahead in blocks where it is at a URL."""

    BLOCK = 8 << 20

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._start = 0
        self._map: Any = None
        self._block: Any = b""
        if storage.is_url(path):
            found = storage.get_entry(path, timeout_s)
            if found is None:
                raise FileNotFoundError(2, "no such file", redact_url(path))
            self.size = found.size
        else:
            self.size = os.stat(path).st_size
            if self.size:
                self._map = np.memmap(path, np.uint8, mode="r")

    def read_range(self, start: int, stop: int) -> Any:
        """Bytes [start, stop)."""
        if self._map is not None:
            return self._map[start:stop]
        if not self._start <= start <= stop <= self._start + len(self._block):
            self._start = start
            self._block = storage.read_bytes(
                self._path, start, min(self.size, max(stop, start + self.BLOCK)), self._timeout_s
            )
        return memoryview(self._block)[start - self._start : stop - self._start]


@contextlib.contextmanager
def open_indexed_dataset(path: str, timeout_s: float = storage.TIMEOUT_S) -> Iterator[IndexedDataset]:
    """The pair of an `.idx` file. Raises DataError for one that cannot be used."""
    name = redact_url(path)
    try:
        index = RangeReader(path, timeout_s)
        whole = np.frombuffer(index.read_range(0, index.size), np.uint8)
        data = RangeReader(f"{path.removesuffix('.idx')}.bin", timeout_s)
    except StorageError:
        raise
    except OSError as error:
        raise DataError(f"{name} and its .bin cannot be read ({error.strerror or error}); restore them") from None
    yield IndexedDataset(whole, data, name)


def write_indexed_dataset(token_file: TokenFile, prefix: Path) -> int:
    """Write a token set as PREFIX.bin and PREFIX.idx, a document with its EOS as one sequence; returns the documents.

    The index comes last, and each file appears complete or not at all. Raises ConfigError for files that exist and for
    a set with a mask, which the format cannot hold; DataError for documents that it cannot count.
    """
    names = [prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx")]
    if existing := next((name for name in names if name.exists()), None):
        raise ConfigError(f"{existing} exists; choose another prefix or remove it")
    if token_file.masked:
        raise ConfigError(
            f"{token_file.folder} has a loss mask, which Megatron's format cannot store; export a text set instead"
        )
    lengths = np.diff(token_file.index)
    if lengths.max(initial=0) > np.iinfo(np.int32).max:
        raise DataError(
            f"{token_file.folder} has a document of more than 2^31 tokens, which Megatron's format does not support"
        )
    dtype = np.dtype("<u2" if token_file.vocab_size < SMALL_VOCAB else "<i4")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with _atomic_file(names[0]) as file:
        for start in range(0, token_file.tokens, COPY_TOKENS):
            tokens = token_file.slice(start, min(start + COPY_TOKENS, token_file.tokens))
            file.write(tokens.astype(dtype).tobytes())
    count = len(lengths)
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    pointers = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])[:-1] * dtype.itemsize
    with _atomic_file(names[1]) as file:
        file.write(PREAMBLE.pack(HEADER, VERSION, code, count, count + 1))
        file.write(lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    return count


@contextlib.contextmanager
def _atomic_file(path: Path) -> Iterator[Any]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
