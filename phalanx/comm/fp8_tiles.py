"""FP8 (E4M3) tiles of 128 x 128 with power-of-two scales, for ranges of a flattened weight that may cut a tile.

A tile's scale follows from its largest magnitude, which is the largest of those of its pieces: ranks that hold pieces
agree on scales by one all-reduce of maxima, whatever the ranges are.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 128  # rows and columns of a tile
FP8 = torch.float8_e4m3fn
_MANTISSA = 448 / 512  # of 448, the largest number of E4M3: 0.875 * 2 ** 9


def power_of_two_scale(largest: Tensor) -> Tensor:
    """The least power of two s with `largest` / s <= 448, elementwise, in float32 or better; at least 2 ** -100.

    NaN where `largest` is not finite, so that an overflow is found by the step's check of its gradients.
    """
    wide = largest.to(torch.promote_types(largest.dtype, torch.float32))
    mantissa, exponent = torch.frexp(wide)  # exact; a logarithm is not
    exponent = (exponent - 9 + (mantissa > _MANTISSA).to(exponent.dtype)).clamp(-100, 127)
    scale = ((exponent + 127) << 23).view(torch.float32).to(wide.dtype)
    return torch.where(torch.isfinite(wide), scale, torch.nan)


class TileGrid:
    """The tiles of a weight of shape (..., out, in), row by row; the last of a row or column may be smaller."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._out, self._in = shape[-2:]
        self._tile_rows, self.columns = -(-self._out // BLOCK), -(-self._in // BLOCK)
        self.tiles = math.prod(shape[:-2]) * self._tile_rows * self.columns

    def largest(self, values: Tensor, start: int, maxima: Tensor) -> None:
        """Raise `maxima` (tiles,) to the magnitudes of `values`, which are the elements from `start` on."""
        table = maxima.view(-1, self.columns)
        for part, rows, columns in self._areas(values, start):
            found = part.abs().amax(-1).to(table.dtype)
            table[:, columns].scatter_reduce_(0, rows[:, None].expand_as(found), found, "amax")

    def encode(self, values: Tensor, start: int, scales: Tensor, into: Tensor) -> None:
        """Write `values`, the elements from `start` on, over their tiles' `scales` (tiles,) into FP8 `into`."""
        for (part, rows, columns), (target, *_) in zip(
            self._areas(values, start), self._areas(into, start), strict=True
        ):
            target.copy_(part / scales.view(-1, self.columns)[rows, columns, None])

    def decode(self, coded: Tensor, start: int, scales: Tensor, into: Tensor) -> None:
        """Write FP8 `coded`, the elements from `start` on, times their tiles' `scales` (tiles,) into `into`."""
        for (part, rows, columns), (target, *_) in zip(
            self._areas(coded, start), self._areas(into, start), strict=True
        ):
            target.copy_(part.to(scales.dtype) * scales.view(-1, self.columns)[rows, columns, None])

    def _areas(self, flat: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """Views (rows, tiles, up to 128) of the elements from `start` on; the row of tiles of each row, and the columns
        of tiles."""
        for first, last, left, right in self._rows(start, start + flat.numel()):
            begin = first * self._in + left - start
            area = flat[begin : begin + (last - first) * (right - left)].view(last - first, right - left)
            rows = torch.arange(first, last, device=flat.device)
            rows = rows // self._out * self._tile_rows + rows % self._out // BLOCK
            up = min(right, -(-left // BLOCK) * BLOCK)
            down = max(up, right // BLOCK * BLOCK)
            for low, high in ((left, up), (up, down), (down, right)):
                if low < high:
                    part = area[:, low - left : high - left].unflatten(1, (-1, min(BLOCK, high - low)))
                    yield part, rows, slice(low // BLOCK, low // BLOCK + part.shape[1])

    def _rows(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Rows [first, last) and columns [left, right) of elements [start, stop): part of a row, whole rows, part."""
        first, left = divmod(start, self._in)
        last, right = divmod(stop, self._in)
        if first == last:
            yield from [(first, first + 1, left, right)] if left < right else []
            return
        if left:
            yield first, first + 1, left, self._in
            first += 1
        if first < last:
            yield first, last, 0, self._in
        if right:
            yield last, last + 1, 0, right
