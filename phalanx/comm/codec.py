"""What a tensor is sent as where that is to be shorter than it is: in bfloat16, or in blocks of 8-bit whole numbers.

Rounding is to the nearest, without memory of what was rounded before, so the same numbers always become the same bytes.
Anything that is not finite stays so. Blocks are counted from the beginning of what is encoded: where ranges begin and
end at multiples of `BLOCK`, what becomes of an element does not depend on who owns it.
"""

from typing import Protocol

import torch

BLOCK = 64  # elements with a scale in common: what shards are cut at multiples of
INT8_MAX = 127


class Codec(Protocol):
    """How numbers are written in fewer bytes. Tensors are flat, and bytes are `torch.uint8`."""

    def byte_size(self, elements: int) -> int:
        """Bytes of so many elements."""
        ...

    def encode(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Write `values` as `byte_size(values.numel())` bytes."""
        ...

    def decode(self, coded: torch.Tensor, into: torch.Tensor) -> None:
        """Write what the bytes stand for, in the type of `into`."""
        ...


class BFloat16Codec:
    """8 bits of each number's mantissa, and its whole range."""

    def byte_size(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: torch.Tensor, into: torch.Tensor) -> None:
        into.view(torch.bfloat16).copy_(values)

    def decode(self, coded: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(coded.view(torch.bfloat16))


class Int8Codec:
    """Blocks of `BLOCK` numbers as multiples of a scale, from -127 to 127 of them; the scales, in bfloat16,
    come first.

    An error is at most half of 1/127 of the greatest number of its block: the greatest may be cut where its scale was
    rounded down, but by no more than a quarter of that.
    """

    def byte_size(self, elements: int) -> int:
        return 2 * -(-elements // BLOCK) + elements + elements % 2  # even, so that scales are never cut

    def encode(self, values: torch.Tensor, into: torch.Tensor) -> None:
        whole = values.numel() // BLOCK * BLOCK
        scales, numbers = self._parts(into, values.numel())
        self._encode(values[:whole].view(-1, BLOCK), scales[: whole // BLOCK], numbers[:whole].view(-1, BLOCK))
        if whole < values.numel():
            self._encode(values[None, whole:], scales[-1:], numbers[None, whole:])

    @staticmethod
    def _encode(blocks: torch.Tensor, scales: torch.Tensor, numbers: torch.Tensor) -> None:
        if not len(blocks):
            return
        blocks = blocks if blocks.dtype == torch.float64 else blocks.float()
        greatest = torch.maximum(blocks.amax(1), -blocks.amin(1))  # much faster than a norm
        scales.copy_(greatest / INT8_MAX)
        scales.masked_fill_(~scales.isfinite(), torch.nan)  # what is not finite makes its whole block NaN
        wide = scales.to(blocks.dtype)[:, None]
        # Nothing but zeros, or what is as good as zero, has the scale 0.
        numbers.copy_((blocks / wide).nan_to_num_(0.0).round_().clamp_(-INT8_MAX, INT8_MAX))

    def decode(self, coded: torch.Tensor, into: torch.Tensor) -> None:
        whole = into.numel() // BLOCK * BLOCK
        scales, numbers = self._parts(coded, into.numel())
        wide = into.dtype if into.dtype == torch.float64 else torch.float32
        scales = scales.to(wide)
        if whole:
            blocks, target = numbers[:whole].view(-1, BLOCK), into[:whole].view(-1, BLOCK)
            if into.dtype == wide:
                target.copy_(blocks).mul_(scales[: whole // BLOCK, None])
            else:
                target.copy_(blocks.to(wide).mul_(scales[: whole // BLOCK, None]))
        if whole < into.numel():
            into[whole:].copy_(numbers[whole:].to(wide).mul_(scales[-1]))

    @staticmethod
    def _parts(coded: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        heads = 2 * -(-elements // BLOCK)
        return coded[:heads].view(torch.bfloat16), coded[heads : heads + elements].view(torch.int8)


NO_COMPRESSION = "none"  # of codecs: numbers travel as they are
CODECS: dict[str, Codec] = {"bf16": BFloat16Codec(), "int8": Int8Codec()}


def wire_bytes_per_element(dtype: torch.dtype, compress: str) -> float:
    """Bytes in which an element of a type is sent by a codec of this name, or as it is."""
    return (
        float(dtype.itemsize)
        if compress == NO_COMPRESSION
        else min(CODECS[compress].byte_size(BLOCK) / BLOCK, dtype.itemsize)
    )
