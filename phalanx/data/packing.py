"""Packing of rows: a window of running text, or whole documents that fill it.

A row has `seq_len` inputs and as many labels, cut from `seq_len + 1` tokens. Packing is a pure function of the
documents' lengths and the seed: every rank computes it for itself.
"""

import bisect
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.data.record_files import RecordFile, TokenFile
from phalanx.data.shuffle import shuffle_indices


@dataclass(frozen=True)
class PackingOptions:
    """How documents become rows. `packed`: whole documents, by packing; else windows of the text as it runs.

    `isolated`: no attention across documents in windows, as packed rows always have it. `drop_long`: packed documents
    that are too long for a row are dropped instead of cut. `mask_end`: the first token of a document is not learnt in
    windows, either, which the others always have.
    """

    seq_len: int
    packed: bool = False
    isolated: bool = False
    drop_long: bool = False
    mask_end: bool = False


class SampleSet(Protocol):
    """A set of samples by number, `count` of them, read only when they are asked for."""

    count: int

    def sample(self, number: int, position: int) -> Any:
        """Sample `number` as the task's collate takes it; `position` is its unique place in the run."""
        ...

    def describe(self) -> str:
        """What this is and how many samples it makes, as the beginning of a sentence that says they are too few."""
        ...

    def warnings(self) -> list[str]:
        """Warnings about data that is used differently than expected."""
        return []


@dataclass(frozen=True)
class Sample:
    """A row: `tokens` (seq_len + 1,) int64. `learnt` (seq_len,): which labels count; `lengths` int64: how many of the
    inputs belong to each document, in all seq_len. Both None: all count, and all attend to all before them. `position`:
    its place in the run, which no other has."""

    tokens: NDArray[np.int64]
    learnt: NDArray[np.bool_] | None = None
    lengths: NDArray[np.int64] | None = None
    position: int = 0


def make_rows(file: TokenFile, form: PackingOptions, seed: int) -> "TextWindows | PackedRows":
    """The rows of a token set in the form asked for."""
    return PackedRows(file, form, seed) if form.packed else TextWindows(file, form)


class TextWindows(SampleSet):
    """Consecutive windows of running text. They overlap by one token: labels are inputs shifted by one."""

    def __init__(self, file: TokenFile, form: PackingOptions) -> None:
        self.file, self._form = file, form
        self.count = max(0, (file.tokens - 1) // form.seq_len)

    def describe(self) -> str:
        return f"{self.file.folder} has {self.file.tokens} tokens, {_describe_rows(self.count, self._form)}"

    def span(self, number: int) -> tuple[int, int]:
        """The tokens [start, stop) of a window: `seq_len` inputs and one more, which is a label only."""
        start = number * self._form.seq_len
        return start, start + self._form.seq_len + 1

    def sample(self, number: int, position: int) -> Sample:
        seq_len = self._form.seq_len
        start, stop = self.span(number)
        tokens = self.file.slice(start, stop)
        self.file.check_tokens(tokens, f"near number {start}")
        if not (self._form.isolated or self._form.mask_end):
            return Sample(tokens, position=position)
        index = self.file.index
        inside = slice(np.searchsorted(index, start, side="right"), np.searchsorted(index, start + seq_len))
        inner = np.array(index[inside] - start, np.int64)
        learnt = np.ones(seq_len, np.bool_)
        learnt[inner - 1] = False  # the end of a document says nothing about the next one
        if index[inside.stop] == start + seq_len:
            learnt[-1] = False
        lengths = np.diff(inner, prepend=0, append=seq_len) if self._form.isolated else None
        return Sample(tokens, learnt, lengths, position)


class PackedRows(SampleSet):
    """Rows of whole documents, each packed as full as possible.

    Attributes: `too_long`, how many documents were longer than a row and so cut (or, with `drop_long`, left out), and
    `filled`, the share of all rows' tokens that are a document's.
    """

    def __init__(self, file: TokenFile, form: PackingOptions, seed: int) -> None:
        self.file, self._form = file, form
        room = form.seq_len + 1
        lengths = np.diff(file.index)
        long = lengths > room
        self.too_long = int(long.sum())
        self._documents, self._first = pack_documents(
            np.where(long, 0 if form.drop_long else room, lengths), room, seed
        )
        self.count = len(self._first) - 1
        kept = np.minimum(lengths[self._documents], room).sum()
        self.filled = float(kept / (self.count * room)) if self.count else 0.0

    def describe(self) -> str:
        held = f"{self.file.tokens} tokens in {self.file.documents} documents"
        return f"{self.file.folder} has {held}, {_describe_rows(self.count, self._form)}"

    def warnings(self) -> list[str]:
        """Warnings about documents longer than a row."""
        return describe_too_long(self.file, "documents", self.too_long, self._form.seq_len, self._form.drop_long, "cut")

    def documents(self, number: int) -> NDArray[np.int64]:
        """The numbers of the documents that lie in a row, in their order."""
        return self._documents[self._first[number] : self._first[number + 1]]

    def sample(self, number: int, position: int) -> Sample:
        room = self._form.seq_len + 1
        documents = self.documents(number)
        starts = self.file.index[documents]
        lengths = np.minimum(self.file.index[documents + 1] - starts, room)
        ends = lengths.cumsum()
        filled = int(ends[-1])
        tokens = np.full(room, self.file.eos_id, np.int64)
        learnt = np.zeros(room, np.bool_)
        places = np.arange(filled) + np.repeat(starts - (ends - lengths), lengths)
        tokens[:filled], learnt[:filled] = self.file.gather(places)
        self.file.check_tokens(tokens, f"near number {int(starts[0])}")
        learnt[ends - lengths] = False  # no earlier token in its document
        if filled == room:
            lengths[-1] -= 1  # the last token is a label only
        elif filled < room - 1:
            lengths = np.concatenate([lengths, [room - 1 - filled]])
        return Sample(tokens, learnt[1:], lengths, position)


def pack_documents(lengths: NDArray[np.int64], capacity: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack documents of these lengths (none above `capacity`; those of length 0 are left out) into rows of `capacity`
    tokens.

    Returns the documents, row by row, and where each row begins among them (one more than there are rows). Best fit
    decreasing: the longest document first, each into the row with the least room that it fits in. Equal lengths
    are handled together, so that time and memory depend on how many different ones there are; `seed` says which of
    equal documents goes where. Source: Johnson et al. 1974 (best fit decreasing); Krell et al. 2021 (on a histogram).
    """
    assert not len(lengths) or lengths.max() <= capacity, "a document longer than a row"
    shuffled = np.lexsort((shuffle_indices(seed, 0, max(1, len(lengths)), np.arange(len(lengths)), "packing"), lengths))
    sizes, first, counts = np.unique(lengths[shuffled], return_index=True, return_counts=True)
    # Rows of one make-up are one group: room left -> [(how many rows, ((size, how many of it), ...)), ...].
    groups: dict[int, list[tuple[int, tuple[tuple[int, int], ...]]]] = {}
    spaces: list[int] = []  # the keys of `groups`, ascending

    def put(space: int, rows: int, made_of: tuple[tuple[int, int], ...]) -> None:
        if space not in groups:
            bisect.insort(spaces, space)
        groups.setdefault(space, []).append((rows, made_of))

    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count if size else 0
        while left:
            place = bisect.bisect_left(spaces, size)
            space = spaces[place] if place < len(spaces) else capacity
            each = space // size  # the row just begun has then the least room for the next of this size
            if place < len(spaces):
                rows, made_of = groups[space].pop()
                if not groups[space]:
                    del groups[space], spaces[place]
            else:
                rows, made_of = -(-left // each), ()
            full = min(rows, left // each)
            rest = left - full * each if full < rows else 0
            if full:
                put(space - each * size, full, (*made_of, (size, each)))
            if rest:
                put(space - rest * size, 1, (*made_of, (size, rest)))
            if made_of and (unused := rows - full - bool(rest)):
                put(space, unused, made_of)
            left -= full * each + rest
    taken = dict(zip(sizes.tolist(), first.tolist(), strict=True))
    documents, row_sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for space in spaces:
        for rows, made_of in groups[space]:
            columns = []
            for size, each in made_of:
                columns.append(shuffled[taken[size] : taken[size] + rows * each].reshape(rows, each))
                taken[size] += rows * each
            documents.append(np.concatenate(columns, axis=1).ravel())
            row_sizes.append(np.full(rows, sum(each for _, each in made_of), np.int64))
    return np.concatenate(documents), np.concatenate([[0], np.cumsum(np.concatenate(row_sizes))])


def _describe_rows(count: int, form: PackingOptions) -> str:
    return f"which make {count} sequences of {form.seq_len}" + ("" if count else " (data.seq_len)")


def describe_too_long(file: RecordFile, noun: str, count: int, seq_len: int, drop: bool, otherwise: str) -> list[str]:
    """What became of records that no row can hold, if there are any."""
    done = "left out" if drop else otherwise
    said = f"{count} of {file.count} {noun} are longer than data.seq_len {seq_len} and are {done} (data.too_long)"
    return [f"{said}, in {file.folder}"] if count else []
