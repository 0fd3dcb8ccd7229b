"""Filling, saving and reading the state of tensor-parallel ranks in coordinates of whole parameters.

An engine knows nothing of slices: its shards and pieces are elements of the parameters that it was given, which may
be parts. Here these become elements of the whole, so that a start is drawn, a folder read and a checkpoint written the
same on any number of ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.layout.tensor_shards import TensorShard
from phalanx.optim.state import Shard, StatePiece
from phalanx.parallel.init_weights import Fill

Read = Callable[[str, str, int, int, Tensor], None]  # name, kind, start, stop, out
# Of a checkpoint: the last two are elements [start, stop) of a window of columns (None: of the whole), and the window.
WindowRead = Callable[[str, str, int, int, Tensor, tuple[int, int] | None], None]

_ELEMENTS = 1 << 22  # of whole rows that are filled at a time to take columns from


def fill_by_runs(fill: Fill, shards: Mapping[str, TensorShard]) -> Fill:
    """Fill parts by a `fill` of whole parameters that may be asked for any run of elements, however short: a file."""

    def fill_part(shard: Shard) -> None:
        part = shards.get(shard.name)
        if part is None:
            fill(shard)
            return
        at = 0
        for start, stop in part.runs(shard.start, shard.stop):
            fill(_of_whole(shard, part, start, stop, shard.tensor[at : at + stop - start]))
            at += stop - start

    return fill_part


def fill_by_rows(fill: Fill, shards: Mapping[str, TensorShard]) -> Fill:
    """Fill parts by a `fill` of whole parameters that is fast for long runs only, as draws are: of columns whole rows
    are filled, a few at a time, and the rest of them is dropped."""

    def fill_part(shard: Shard) -> None:
        part = shards.get(shard.name)
        if part is None:
            fill(shard)
        elif part.window is None:
            start = part.offset + shard.start
            fill(_of_whole(shard, part, start, start + shard.stop - shard.start, shard.tensor))
        else:
            _fill_columns(fill, shard, part)

    return fill_part


def _fill_columns(fill: Fill, shard: Shard, part: TensorShard) -> None:
    width, columns = part.shape[-1], part.stop - part.start
    rows = max(1, _ELEMENTS // width)
    first, last = shard.start // columns, -(-shard.stop // columns)
    for row in range(first, last, rows):
        end = min(row + rows, last)
        whole = torch.empty((end - row) * width, dtype=shard.tensor.dtype, device=shard.tensor.device)
        fill(_of_whole(shard, part, row * width, end * width, whole))
        found = whole.view(-1, width)[:, part.start : part.stop].reshape(-1)
        low, high = max(shard.start, row * columns), min(shard.stop, end * columns)
        shard.tensor[low - shard.start : high - shard.start].copy_(found[low - row * columns : high - row * columns])


def _of_whole(shard: Shard, part: TensorShard, start: int, stop: int, into: Tensor) -> Shard:
    return replace(shard, start=start, stop=stop, shape=part.shape, tensor=into)


def to_whole_pieces(
    pieces: Iterable[StatePiece], shards: Mapping[str, TensorShard], first: bool
) -> Iterator[StatePiece]:
    """An engine's pieces as a checkpoint keeps them, in coordinates of whole parameters; each is given by one rank.

    `first`: this is the first rank of the tensor axis, which gives what all of them have whole.
    """
    for piece in pieces:
        part = shards.get(piece.name)
        if part is None:
            if first:
                yield piece
        elif part.first:
            window, moved = part.window, part.offset if part.window is None else 0
            yield replace(piece, start=piece.start + moved, stop=piece.stop + moved, window=window)


def make_shard_reader(read: WindowRead, shards: Mapping[str, TensorShard]) -> Read:
    """What an engine loads by, from a checkpoint's `read`."""

    def read_part(name: str, kind: str, start: int, stop: int, out: Tensor) -> None:
        part = shards.get(name)
        if part is None:
            read(name, kind, start, stop, out, None)
        else:
            moved = part.offset if part.window is None else 0
            read(name, kind, start + moved, stop + moved, out, part.window)

    return read_part
