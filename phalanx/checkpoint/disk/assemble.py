"""Any range of a parameter from pieces of it, in whatever columns they are and wherever they lie."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

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
    """The first element of a band that lies at element `at` of the window around it, or behind."""
    row, column = divmod(at, window[1] - window[0])
    width = band[1] - band[0]
    return row * width + min(max(window[0] + column - band[0], 0), width)


def lift(at: int, band: Window, window: Window) -> int:
    """Element `at` of a band as an element of the window around it."""
    row, column = divmod(at, band[1] - band[0])
    return row * (window[1] - window[0]) + band[0] + column - window[0]


def iter_rectangles(start: int, stop: int, width: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Elements [start, stop) of a band of `width` columns as (first element, rows, columns): at most `most` rows each,
    and a row by itself where only a part of it is asked for."""
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
            # Where all of them are the same columns, what is asked for is one run.
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
