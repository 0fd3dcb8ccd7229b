"""Rows of different lengths in one tensor."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.core import renamed

WIDTHS = 64  # rows are padded to a multiple of it, so that shapes stay few


def pad_rows(rows: Sequence[NDArray[np.int64]], width: int, filler: int) -> Tensor:
    """`rows` (n_i,) -> (B, width) int64, filled up behind each."""
    out = np.full((len(rows), width), filler, np.int64)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(out)


def row_width(rows: Sequence[NDArray[np.int64]], max_width: int, step: int = WIDTHS) -> int:
    """The length of the longest row, up to a multiple of `step` but no more than `max_width`."""
    longest = max((len(row) for row in rows), default=1)
    return max(longest, min(-(-longest // step) * step, max_width))


__getattr__ = renamed.old_names(__name__)
