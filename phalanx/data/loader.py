"""The one global order of samples, and a rank's micro-batches of it.

What step k holds is a function of the data, the seed and k alone. A rank takes a contiguous slice of it; how the slices
are cut may change at every step and changes nothing but who computes what.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx import balance
from phalanx.data.order import order
from phalanx.data.packing import Form, Packed, Rows, rows_of
from phalanx.data.tokens import TokenFile
from phalanx.errors import DataError

ORDER_BLOCK = 1024


@dataclass(frozen=True)
class Sample:
    """One sequence: `tokens` of shape (seq_len + 1,), int64, and its place in the run, which no other sample has.

    `learnt` (seq_len,) says which labels count, all if None; `lengths` how many of the inputs belong to each of its
    documents, None where all inputs attend to all before them.
    """

    tokens: NDArray[np.int64]
    position: int
    learnt: NDArray[np.bool_] | None = None
    lengths: NDArray[np.int64] | None = None


class Loader:
    """Cuts token sets into sequences and gives a rank its micro-batches of any step.

    `sources` are token sets with their weights in the mixture; one or several. Of every MIXTURE_BLOCK sequences each
    source has its exact share, and each has its own shuffles and epochs. `form` says how documents become sequences;
    `sequences` is how many there are in one epoch of all sources. `held_out`: the set is only evaluated on, so it may
    hold fewer sequences than a batch. Raises DataError otherwise.
    """

    def __init__(
        self,
        sources: Sequence[tuple[TokenFile, float]],
        form: Form,
        global_batch: int,
        seed: int,
        rank: int,
        micro_batch: int,
        held_out: bool = False,
    ) -> None:
        assert sources
        assert form.seq_len >= 1
        assert global_batch >= 1
        assert rank >= 0
        assert micro_batch >= 1
        self.form = form
        self.global_batch = global_batch
        self.seed = seed
        self.rank = rank
        self.micro_batch = micro_batch
        self.sources = [rows_of(file, form, seed) for file, _ in sources]
        self.sequences = sum(rows.count for rows in self.sources)
        self._quotas = tuple(balance.quotas([weight for _, weight in sources], balance.MIXTURE_BLOCK))
        if held_out:
            return
        advice = "add data, or lower train.global_batch or the sequence length"
        for rows in self.sources:
            made = f"{_size(rows)}, which make {rows.count} sequences of {form.seq_len}"
            if len(self.sources) > 1 and not rows.count:
                raise DataError(f"{made}, so it cannot take its share of the mixture; {advice}")
            if self.sequences < global_batch:
                together = f" and its mixture {self.sequences}" if len(self.sources) > 1 else ""
                raise DataError(f"{made}{together}, fewer than one global batch of {global_batch}; {advice}")

    def warnings(self) -> list[str]:
        """What became of documents that no sequence can hold, a sentence for each source that has such."""
        said = []
        for rows in self.sources:
            if isinstance(rows, Packed) and rows.too_long:
                done = "left out" if self.form.drop_long else "cut"
                said.append(
                    f"{rows.too_long} of {rows.file.documents} documents are longer than data.seq_len "
                    f"{self.form.seq_len} and are {done} (data.too_long), in {rows.file.folder}"
                )
        return said

    def batches(self, step: int, shares: Sequence[int], skipped: int = 0) -> list[list[Sample]]:
        """This rank's micro-batches of step `step` (the first is 0): a pure function of its arguments.

        `shares` is how many sequences of the global batch each rank takes, in order of rank; `skipped` counts global
        batches that the run has passed over. All ranks get the same number of micro-batches, some perhaps empty.
        """
        assert sum(shares) == self.global_batch, f"shares {list(shares)} of a global batch of {self.global_batch}"
        assert self.sequences >= self.global_batch, "fewer sequences than a global batch"
        start, stop = self._slice(shares)
        positions = np.arange(start, stop, dtype=np.int64) + (step + skipped) * self.global_batch
        chosen, numbers = self._places(positions)
        rows = self._rows(chosen, numbers)
        samples = [
            self._sample(self.sources[source], int(row), int(position))
            for source, row, position in zip(chosen, rows, positions, strict=True)
        ]
        return self._cut(samples, shares)

    def evaluation(self, shares_of: Callable[[int], Sequence[int]], limit: int) -> Iterator[list[list[Sample]]]:
        """This rank's micro-batches of `limit` sequences, in batches, the same at every call and for every seed.

        They are spread over the whole set, so that a few stand for all of its documents. `shares_of(count)` gives the
        shares of a batch of `count` sequences; only the last batch may be smaller than the global batch. Positions are
        the sequences' numbers.
        """
        assert len(self.sources) == 1, "a mixture is not evaluated on"
        if self.sequences == 0:
            return
        windows = sorted(order(0, 0, self.sequences, np.arange(min(limit, self.sequences))).tolist())
        for first in range(0, len(windows), self.global_batch):
            count = min(self.global_batch, len(windows) - first)
            shares = shares_of(count)
            assert sum(shares) == count, f"shares {list(shares)} of a batch of {count}"
            start, stop = self._slice(shares)
            mine = windows[first + start : first + stop]
            yield self._cut([self._sample(self.sources[0], window, window) for window in mine], shares)

    def _slice(self, shares: Sequence[int]) -> tuple[int, int]:
        assert self.rank < len(shares), f"shares {list(shares)} for rank {self.rank}"
        assert min(shares) >= 0, f"a negative share in {list(shares)}"
        start = sum(shares[: self.rank])
        return start, start + shares[self.rank]

    def _places(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which source each position of the run takes, and how many that source has given before."""
        if len(self.sources) == 1:
            return np.zeros_like(positions), positions
        blocks, within = np.divmod(positions, balance.MIXTURE_BLOCK)
        chosen: NDArray[np.int64] = np.empty_like(positions)
        before: NDArray[np.int64] = np.empty_like(positions)
        for block in np.unique(blocks):
            here = blocks == block
            takes, nth = mixture_block(self.seed, int(block), self._quotas)
            chosen[here] = takes[within[here]]
            before[here] = nth[within[here]]
        before += blocks * np.array(self._quotas, np.int64)[chosen]
        return chosen, before

    def _rows(self, chosen: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of its source that each of these sequences is."""
        rows = np.empty_like(numbers)
        for source in np.unique(chosen):
            name = f"source {source}" if len(self.sources) > 1 else ""
            count = self.sources[source].count
            epochs, indices = np.divmod(numbers, count)
            for epoch in np.unique(epochs[chosen == source]):  # a batch may end one epoch and begin the next
                here = (chosen == source) & (epochs == epoch)
                rows[here] = shuffled(self.seed, int(epoch), count, indices[here], name)
        return rows

    def _sample(self, rows: Rows, number: int, position: int) -> Sample:
        row = rows.row(number)
        return Sample(row.tokens, position, row.learnt, row.lengths)

    def _cut(self, samples: list[Sample], shares: Sequence[int]) -> list[list[Sample]]:
        """Nearly equal contiguous micro-batches, the larger ones first; as many as the rank with most work needs."""
        parts = -(-max(shares) // self.micro_batch)
        size, longer = divmod(len(samples), parts)
        bounds = [number * size + min(number, longer) for number in range(parts + 1)]
        return [samples[bounds[number] : bounds[number + 1]] for number in range(parts)]


def shuffled(seed: int, epoch: int, n: int, index: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """`order`, remembered in blocks: of a few elements it costs nearly as much as of a thousand."""
    result = np.empty_like(index)
    blocks, within = np.divmod(index, ORDER_BLOCK)
    for block in range(int(blocks.min(initial=0)), int(blocks.max(initial=-1)) + 1):
        here = blocks == block
        result[here] = order_block(seed, epoch, n, block, name)[within[here]]
    return result


@functools.lru_cache(maxsize=64)
def order_block(seed: int, epoch: int, n: int, block: int, name: str) -> NDArray[np.int64]:
    """The order of the elements [block * ORDER_BLOCK, (block + 1) * ORDER_BLOCK) of `n`."""
    start = block * ORDER_BLOCK
    return order(seed, epoch, n, np.arange(start, min(start + ORDER_BLOCK, n)), name)


@functools.lru_cache(maxsize=4)
def mixture_block(seed: int, block: int, quotas: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each sequence of a block of a mixture, its source and how many of the block before it have the same one."""
    slots = order(seed, block, sum(quotas), np.arange(sum(quotas)), "mixture")
    takes = np.searchsorted(np.cumsum(quotas), slots, side="right").astype(np.int64)
    nth = np.empty_like(takes)
    for source, quota in enumerate(quotas):
        nth[takes == source] = np.arange(quota)
    return takes, nth


def _size(rows: Rows) -> str:
    documents = f" in {rows.file.documents} documents" if isinstance(rows, Packed) else ""
    return f"{rows.file.folder} has {rows.file.tokens} tokens{documents}"
