"""Block-wise 8-bit quantization of optimizer state: blocks of a row share a scale, and a code indexes a fixed table.

The table is denser near zero (relative to the block's maximum), and resolves seven orders of magnitude. Source:
Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022. Two changes: the table for signed numbers has -1
as well as 1, and a positive number is never quantized to zero (a second moment of zero would make its update huge).
With the first, quantizing dequantized numbers gives the same codes and scales: a checkpoint holds dequantized numbers,
and a run resumed from it is bitwise the same.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 256  # most elements that share a scale
CHUNK_ELEMENTS = 2**24  # dequantized at a time
SIGNED = frozenset(["exp_avg"])
# Blocks whose maximum is below this count as zero: smaller numbers would be subnormal, inexact in float32.
# The root of such a second moment is 1e-15, far below any eps.
MIN_SCALE = 1e-30


@functools.cache
def make_codebook(signed: bool, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The codebook: the 256 values of the codes, in order, and the 255 thresholds between them."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        # 2^exponent numbers (twice as many where no sign is needed) in the middles of equal parts of [0.1, 1], scaled.
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent if signed else exponent + 1) + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)).tolist()
        numbers += middles + ([-middle for middle in middles] if signed else [])
    values = torch.tensor(sorted(numbers), dtype=torch.float64)
    if signed:
        values[0] = -1.0  # in place of -0.993
    between = (values[1:] + values[:-1]) / 2
    if not signed:
        between[0] = 0.0  # a positive number stays positive
    return values.to(device, dtype), between.to(device, dtype)


def zero_code(kind: str) -> int:
    values, _ = make_codebook(kind in SIGNED, torch.float32, torch.device("cpu"))
    return int((values == 0).nonzero())


def split_row(columns: int) -> tuple[int, int]:
    """(blocks of a row, elements of a block): the fewest equal blocks; the last may be padded."""
    count = -(-columns // BLOCK)
    return count, -(-columns // count)


def quantize(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize values (rows, columns) to codes uint8 (rows, blocks, block) and scales (rows, blocks) in the values'
    dtype."""
    rows, columns = values.shape
    count, length = split_row(columns)
    blocks = F.pad(values, (0, count * length - columns)).view(rows, count, length)
    scales = blocks.abs().amax(dim=-1)
    scales = torch.where(scales < MIN_SCALE, 0.0, scales)
    shares = torch.where(scales[..., None] > 0, blocks / scales[..., None], 0.0)
    fast = values.dtype == torch.float32 and values.device.type == "cpu"
    return (look_up_codes(shares, signed) if fast else search_codes(shares, signed)), scales


def search_codes(normalized: torch.Tensor, signed: bool) -> torch.Tensor:
    """The codes of numbers from -1 to 1: the number of thresholds below each."""
    _, between = make_codebook(signed, normalized.dtype, normalized.device)
    return torch.bucketize(normalized, between, out_int32=True).to(torch.uint8)


def look_up_codes(normalized: torch.Tensor, signed: bool) -> torch.Tensor:
    """`search_codes` by table lookup, for float32: on a CPU ten times as fast as a binary search.

    Numbers with the same upper 16 bits are so close together that at most one threshold lies among them.
    """
    firsts, between = _look_up(signed, normalized.device)
    flat = normalized.flatten()
    first = firsts.index_select(0, (flat.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
    return first.add_(flat > between.index_select(0, first)).to(torch.uint8).view(normalized.shape)


@functools.cache
def _look_up(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The code of the smallest float32 with each upper half (65536,), and the threshold above each code (256,)."""
    upper = torch.arange(1 << 16, dtype=torch.int64, device=device)
    least = (upper << 16) + torch.where(upper < 1 << 15, 0, 0xFFFF)  # of negative numbers the farthest from zero
    _, between = make_codebook(signed, torch.float32, device)
    firsts = torch.bucketize(least.to(torch.int32).view(torch.float32), between, out_int32=True)
    return firsts, torch.cat((between, between.new_full((1,), torch.inf)))


def dequantize(codes: torch.Tensor, scales: torch.Tensor, signed: bool, columns: int) -> torch.Tensor:
    """Dequantize codes and scales to values (rows, columns) in the dtype of the scales."""
    numbers, _ = make_codebook(signed, scales.dtype, scales.device)
    found = numbers.index_select(0, codes.flatten().int()).view(codes.shape).mul_(scales[..., None])
    return found.flatten(1)[:, :columns]


@dataclass(frozen=True)
class QuantizedShard:
    """A quantized shard of one kind of state, in whole rows: codes (rows, blocks, block) and scales (rows, blocks)."""

    codes: torch.Tensor
    scales: torch.Tensor
    elements: int
    signed: bool

    @classmethod
    def from_state(cls, state: Mapping[str, torch.Tensor], kind: str, elements: int) -> "QuantizedShard":
        """A view of the flat tensors "KIND.codes" and "KIND.scales" of a state."""
        codes, scales = state[f"{kind}.codes"], state[f"{kind}.scales"]
        return cls(codes, scales, elements, kind in SIGNED)

    @property
    def dtype(self) -> torch.dtype:
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        return self.scales.device

    @property
    def columns(self) -> int:
        return self.elements // max(1, self.scales.shape[0])

    def row_chunks(self) -> list[tuple[int, int]]:
        """Ranges of rows of at most CHUNK_ELEMENTS elements each."""
        rows, step = self.scales.shape[0], max(1, CHUNK_ELEMENTS // max(1, self.columns))
        return [(first, min(first + step, rows)) for first in range(0, rows, step)]

    def dequantize_rows(self, first: int, last: int) -> torch.Tensor:
        """The dequantized rows [first, last), flat."""
        return dequantize(self.codes[first:last], self.scales[first:last], self.signed, self.columns).reshape(-1)

    def quantize_rows(self, first: int, last: int, values: torch.Tensor) -> None:
        """Quantize flat values into the rows [first, last)."""
        codes, scales = quantize(values.view(last - first, self.columns), self.signed)
        self.codes[first:last] = codes
        self.scales[first:last] = scales

    def dequantize(self) -> torch.Tensor:
        """All elements, dequantized and flat."""
        out = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        for first, last in self.row_chunks():
            out[first * self.columns : last * self.columns] = self.dequantize_rows(first, last)
        return out
