"""The snapshot of a rank's pieces in host memory, laid out as the data section of a safetensors file."""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.disk.files import CHUNK_BYTES, DTYPES
from phalanx.checkpoint.disk.load import tensor_name
from phalanx.optim.update import StatePiece
from phalanx.system import accelerator

SEGMENT_BYTES = 64 << 20
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredPiece:
    """A piece in the snapshot: the fields of `StatePiece` without the tensor."""

    name: str
    kind: str
    start: int
    stop: int
    dtype: torch.dtype
    window: tuple[int, int] | None = None

    @property
    def manifest_row(self) -> list[Any]:
        """As a manifest lists it."""
        listed: list[Any] = [self.name, self.kind, self.start, self.stop, str(self.dtype).removeprefix("torch.")]
        return listed if self.window is None else [*listed, list(self.window)]


class HostBuffer:
    """Host memory that holds a rank's pieces back to back, exactly as the data section of a safetensors file.

    It is made of equal segments that are kept from one snapshot to the next: touching fresh pages costs far more than
    the copy, and a pinned allocation is rounded up to a power of two, which would waste up to half of one large buffer.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        assert segment_bytes % 8 == 0, segment_bytes
        self._segment_bytes = segment_bytes
        self._segments: list[Tensor] = []
        self._pinned = False

    def store(self, pieces: Iterable[StatePiece]) -> list[StoredPiece]:
        """Copy the pieces, widest dtype first (which aligns each one without gaps), and return them in that order.

        When it returns, the tensors may be changed: copies from an accelerator are waited for, once for all of them.
        """
        # A rank may own no element of a parameter; safetensors has no use for an empty tensor here.
        ordered = sorted((piece for piece in pieces if piece.stop > piece.start), key=lambda p: -p.dtype.itemsize)
        devices = {piece.device for piece in ordered if piece.device.type != "cpu"}
        if self._pinned != bool(devices):
            self._segments, self._pinned = [], bool(devices)
        offset_bytes = 0
        with torch.no_grad():
            for piece in ordered:
                tensor = piece.tensor  # read once: a quantized one is dequantized
                assert tensor.shape == (piece.stop - piece.start,), (piece.name, piece.kind, tensor.shape)
                offset_bytes = self._copy(tensor, offset_bytes)
        for device in devices:
            accelerator.synchronize(device)  # the one place of a save where the host waits for the device
        return [StoredPiece(p.name, p.kind, p.start, p.stop, p.dtype, p.window) for p in ordered]

    def chunks(self, total_bytes: int) -> Iterator[memoryview]:
        """The first `total_bytes` of the buffer in order, in chunks of at most CHUNK_BYTES."""
        for segment in self._segments[: -(-total_bytes // self._segment_bytes)]:
            view = memoryview(segment.numpy().data)[:total_bytes]
            total_bytes -= len(view)
            for start in range(0, len(view), CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]

    def clear(self) -> None:
        """Free the memory."""
        self._segments = []

    def _copy(self, source: Tensor, offset_bytes: int) -> int:
        width = source.element_size()
        done = 0
        while done < source.numel():
            index, inside = divmod(offset_bytes, self._segment_bytes)
            if index == len(self._segments):
                self._segments.append(torch.empty(self._segment_bytes, dtype=torch.uint8, pin_memory=self._pinned))
            count = min(source.numel() - done, (self._segment_bytes - inside) // width)
            target = self._segments[index][inside : inside + count * width].view(source.dtype)
            target.copy_(source[done : done + count], non_blocking=self._pinned)
            done += count
            offset_bytes += count * width
        return offset_bytes


class SnapshotFile:
    """A snapshot as the bytes of a safetensors file: `chunks` as often as wanted, then its manifest entry.

    The format (8 bytes of header length, a JSON header, the data) is made directly, because the snapshot already is the
    data and the CRC-32 is then taken on the way instead of by reading the file again.
    """

    def __init__(self, stored: list[StoredPiece], buffer: HostBuffer) -> None:
        self._stored, self._buffer = stored, buffer
        header: dict[str, Any] = {}
        data_bytes = 0
        for piece in stored:
            key = tensor_name(piece.name, piece.kind, piece.start, piece.stop)
            assert key not in header, f"piece {key} was given twice by one rank"
            end = data_bytes + (piece.stop - piece.start) * piece.dtype.itemsize
            shape = [piece.stop - piece.start]
            header[key] = {"dtype": DTYPE_NAMES[piece.dtype], "shape": shape, "data_offsets": [data_bytes, end]}
            data_bytes = end
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)  # readers map the data, which should start aligned
        self._head = len(head).to_bytes(8, "little") + head
        self._data_bytes = data_bytes
        self._crc: int | None = None

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The file from its first byte to its last."""
        crc = zlib.crc32(self._head)
        yield self._head
        for chunk in self._buffer.chunks(self._data_bytes):
            crc = zlib.crc32(chunk, crc)
            yield chunk
        self._crc = crc

    def manifest_entry(self) -> dict[str, Any]:
        """Its manifest entry (bytes, crc32, pieces), once `chunks` has come to its end."""
        assert self._crc is not None
        rows = [piece.manifest_row for piece in self._stored]
        return {"bytes": len(self._head) + self._data_bytes, "crc32": f"{self._crc:08x}", "pieces": rows}
