"""Stacks of matrices in MXFP4, as GPT-OSS stores its experts, read as bfloat16.

A block of 32 neighbouring numbers of a row has one scale, a power of two; a number has 4 bits (a sign, two of exponent
and one of mantissa), the first of two in the lower half of a byte. Source: Open Compute Project, "OCP Microscaling
Formats (MX) Specification", 2023.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of a stack's two tensors
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of a scale's exponent


class _Bytes(Protocol):
    """A file with tensors of bytes."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read_into(self, name: str, start: int, out: Tensor) -> None: ...


class PackedStack:
    """A stack of matrices (E, out, in), as a file with one tensor, the matrices transposed: (E, in, out).

    `blocks` is a file with a tensor (E, out, in / 32, 16) of bytes of that name, and `scales` one with (E, out,
    in / 32). A whole matrix is decoded at a time; the last one is kept.
    """

    def __init__(self, name: str, blocks: _Bytes, scales: _Bytes) -> None:
        self._name, self._blocks, self._scales = name, blocks, scales
        self._last: tuple[int, Tensor] | None = None

    def keys(self) -> list[str]:
        """The name of the stack."""
        return [self._name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the stack as it is read."""
        matrices, out, groups, width = self._blocks.shape(self._name + BLOCKS)
        return matrices, groups * width * 2, out

    def dtype(self, name: str) -> str:
        """Of the stack as it is read."""
        return "BF16"

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Read elements of the flattened stack from `start` on into `out`."""
        each, stop = math.prod(self.shape(name)[1:]), start + out.numel()
        for matrix in range(start // each, -(-stop // each)):
            first, last = max(start, matrix * each), min(stop, (matrix + 1) * each)
            flat = self._decoded(matrix)
            out[first - start : last - start].copy_(flat[first - matrix * each : last - matrix * each])

    def _decoded(self, matrix: int) -> Tensor:
        if self._last is None or self._last[0] != matrix:
            found = []
            for file, end in ((self._blocks, BLOCKS), (self._scales, SCALES)):
                part = torch.empty(file.shape(self._name + end)[1:], dtype=torch.uint8)
                file.read_into(self._name + end, matrix * part.numel(), part.view(-1))
                found.append(part)
            self._last = matrix, decode(*found).T.reshape(-1)
        return self._last[1]


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks (rows, groups, 16) and scales (rows, groups), bytes -> the matrix (rows, 32 groups) in bfloat16."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1).flatten(2)
    return torch.ldexp(pairs, (scales.int() - _BIAS)[..., None]).flatten(1).bfloat16()
