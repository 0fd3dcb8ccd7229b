"""Where the elements of a window of a matrix's columns lie, in which pieces of a cut matrix are compared. Pure.

A window is [first, last) of the columns, its elements are numbered row by row. Windows that overlap in part are
compared band by band: a band is columns that no edge of a window divides, so that a run of elements of a window is a
run of those of the band, too.
"""

import itertools
from collections.abc import Iterable, Iterator

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
