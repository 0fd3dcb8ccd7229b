"""Read the files of a checkpoint: memory-mapped in a local folder, by byte range at a URL; and any range of a parameter
from their pieces."""

import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.core.run_paths import Url
from phalanx.storage import files as storage

CHUNK_BYTES = 8 << 20  # large enough that zlib and the kernel work without the interpreter lock nearly all the time
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class LocalFiles:
    """The files in a local folder. Everything raises OSError, `read_values` also SafetensorError for a damaged file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def read_all(self, file: str) -> bytes:
        """The content of a small file."""
        return (self._folder / file).read_bytes()

    def size(self, file: str) -> int:
        """Bytes of a file."""
        return (self._folder / file).stat().st_size

    def stream(self, file: str) -> Iterator[memoryview]:
        """The chunks of a file from start to end; each is valid until the next is read."""
        with open(self._folder / file, "rb", buffering=0) as source:
            yield from _parts(source, self.size(file))

    def read_values(self, file: str, key: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the 1-D tensor `key` of a safetensors file."""
        if file not in self._open:
            self._open[file] = safe_open(str(self._folder / file), framework="pt")
        found: Tensor = self._open[file].get_slice(key)[start:stop]
        return found

    def close(self) -> None:
        """Close the open files; they are opened again on demand."""
        self._open.clear()


class RemoteFiles:
    """The files at a URL, through a read-ahead buffer. Everything raises as `storage` does."""

    def __init__(self, folder: Url) -> None:
        self._folder = folder
        self._open: dict[str, tuple[io.BufferedReader, int, dict[str, Any]]] = {}
        self._sizes: dict[str, int] = {}

    def read_all(self, file: str) -> bytes:
        """The content of a small file."""
        return storage.read_bytes((self._folder / file).text, timeout_s=self._folder.timeout_s)

    def size(self, file: str) -> int:
        """Bytes of a file; the folder is listed once for all of them."""
        if not self._sizes:
            listed = storage.list_folder(self._folder.text, timeout_s=self._folder.timeout_s)
            self._sizes = {entry.name: entry.size for entry in listed}
        if file not in self._sizes:
            raise FileNotFoundError(2, "No such file", file)
        return self._sizes[file]

    def stream(self, file: str) -> Iterator[memoryview]:
        """The chunks of a file from start to end; each is valid until the next is read."""
        with self._reader(file) as source:
            yield from _parts(source, self.size(file))

    def read_values(self, file: str, key: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the 1-D tensor `key` of a safetensors file."""
        if file not in self._open:
            reader = self._reader(file)
            head_bytes = int.from_bytes(reader.read(8), "little")
            if head_bytes > self.size(file) - 8:
                raise SafetensorError("its header is longer than the file")
            try:
                header = json.loads(reader.read(head_bytes))
            except (ValueError, RecursionError) as error:
                raise SafetensorError(f"its header is not JSON: {error}") from error
            self._open[file] = reader, 8 + head_bytes, header
        reader, data, header = self._open[file]
        try:
            dtype, first = DTYPES[header[key]["dtype"]], data + header[key]["data_offsets"][0]
            inside = 0 <= start <= stop <= math.prod(header[key]["shape"])
        except (KeyError, TypeError, IndexError) as error:
            raise SafetensorError(f"its header does not describe {key}") from error
        if not inside:
            raise SafetensorError(f"its tensor {key} is shorter than {stop} elements")
        reader.seek(first + start * dtype.itemsize)
        raw = bytearray((stop - start) * dtype.itemsize)
        if reader.readinto(raw) != len(raw):
            raise SafetensorError(f"it ends within the tensor {key}")
        return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)

    def close(self) -> None:
        """Close the open files; they are opened again on demand."""
        self._open.clear()

    def _reader(self, file: str) -> io.BufferedReader:
        return storage.open_read((self._folder / file).text, timeout_s=self._folder.timeout_s)


def _parts(source: Any, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(CHUNK_BYTES, size + 1)))
    while count := source.readinto(buffer):
        yield buffer[:count]


# ------------------------------------------------------------------------------------------------------------ assemble
# Any range of a parameter from pieces of it, in whatever columns they are and wherever they lie.


# ------------------------------------------------------------------------------------------------------ column windows
# Where the elements of a window of a matrix's columns lie, in which pieces of a cut matrix are compared. Pure. A window
# is [first, last) of the columns, its elements are numbered row by row. Windows that overlap in part are compared band
# by band: a band is columns that no edge of a window divides, so that a run of elements of a window is a run of those
# of the band, too.


Window = tuple[int, int]


def split_bands(windows: Iterable[Window], within: Window) -> list[Window]:
    """The parts of `within` that no edge of any window divides, in order."""
    first, last = within
    edges = {edge for window in windows for edge in window if first < edge < last}
    return list(itertools.pairwise(sorted({first, last, *edges})))


def covers(window: Window, band: Window) -> bool:
    """Whether a band lies within a window."""
    return window[0] <= band[0] and band[1] <= window[1]


def project(at: int, window: Window, band: Window) -> int:
    """The first element of a band that lies at or after element `at` of the window around it."""
    row, column = divmod(at, window[1] - window[0])
    width = band[1] - band[0]
    return row * width + min(max(window[0] + column - band[0], 0), width)


def lift(at: int, band: Window, window: Window) -> int:
    """Element `at` of a band as an element of the window around it."""
    row, column = divmod(at, band[1] - band[0])
    return row * (window[1] - window[0]) + band[0] + column - window[0]


def iter_rectangles(start: int, stop: int, width: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Elements [start, stop) of a band of `width` columns as (first element, rows, columns): at most `most` rows each,
    and a single row where only a part of it is read."""
    while start < stop:
        inside = start % width
        if inside or stop - start < width:
            columns = min(width - inside, stop - start)
            yield start, 1, columns
            start += columns
        else:
            rows = min(most, (stop - start) // width)
            yield start, rows, width
            start += rows * width


# ---------------------------------------------------------------------------------------------------------- assembling


PieceSpan = tuple[int, int, Window, str]  # elements [start, stop) of a window, and what they lie in

_ELEMENTS = 1 << 22  # of columns that are read at a time, with what lies between them


def assemble(
    out: Tensor,
    start: int,
    stop: int,
    columns: Window,
    pieces: Sequence[PieceSpan],
    values: Callable[[PieceSpan, int, int], Tensor],
) -> None:
    """Fill `out` with elements [start, stop) of `columns`, which `pieces` cover; `values` gives elements
    [first, last) of a piece, numbered from its own first."""
    for band in split_bands((w for _, _, w, _ in pieces), columns):
        at, end = project(start, columns, band), project(stop, columns, band)
        here = [piece for piece in pieces if covers(piece[2], band)]
        while at < end:
            # Of all pieces that hold this element the one that reaches farthest, so that replicas are read once.
            begun = (piece for piece in here if project(piece[0], piece[2], band) <= at)
            piece = max(begun, key=lambda piece: project(piece[1], piece[2], band))
            low, high, w, _ = piece
            reach = min(project(high, w, band), end)
            # With the same columns everywhere the range is one run.
            width = stop if band == w == columns else band[1] - band[0]
            for begin, rows, count in iter_rectangles(at, reach, width, _rows(w)):
                source, target = lift(begin, band, w) - low, lift(begin, band, columns) - start
                found = values(piece, source, source + _extent(rows, count, w))
                into = out[target : target + _extent(rows, count, columns)]
                with torch.no_grad():  # `out` may be a view of a parameter that wants gradients
                    _grid(into, rows, count, columns).copy_(_grid(found, rows, count, w))
            at = reach


def _rows(window: Window) -> int:
    """How many rows of a window are read at a time."""
    return max(1, _ELEMENTS // (window[1] - window[0]))


def _extent(rows: int, columns: int, window: Window) -> int:
    """Elements of a window from the first to the last of a rectangle in it."""
    return (rows - 1) * (window[1] - window[0]) + columns


def _grid(flat: Tensor, rows: int, columns: int, window: Window) -> Tensor:
    """That rectangle, as a view of them."""
    step = flat.stride(0)
    return flat.as_strided((rows, columns), ((window[1] - window[0]) * step, step))
