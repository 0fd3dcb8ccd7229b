"""The files of one checkpoint as they are read: in a local folder by mapping them, at a URL by byte range."""

import io
import json
import math
from collections.abc import Iterator
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
        """A file from its first byte to its last; each part is valid until the next is asked for."""
        with open(self._folder / file, "rb", buffering=0) as source:
            yield from _parts(source, self.size(file))

    def read_values(self, file: str, key: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the 1-D tensor `key` of a safetensors file."""
        if file not in self._open:
            self._open[file] = safe_open(str(self._folder / file), framework="pt")
        found: Tensor = self._open[file].get_slice(key)[start:stop]
        return found

    def close(self) -> None:
        """Let go of the open files; they are opened again when need be."""
        self._open.clear()


class RemoteFiles:
    """The same at a URL, through a buffer that reads ahead. Everything raises as `storage` does."""

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
        """A file from its first byte to its last; each part is valid until the next is asked for."""
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
                raise SafetensorError(f"its header is no JSON: {error}") from error
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
        """Let go of the open files; they are opened again when need be."""
        self._open.clear()

    def _reader(self, file: str) -> io.BufferedReader:
        return storage.open_read((self._folder / file).text, timeout_s=self._folder.timeout_s)


def _parts(source: Any, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(CHUNK_BYTES, size + 1)))
    while count := source.readinto(buffer):
        yield buffer[:count]
