"""The one global order of samples, and a rank's micro-batches of it.

What step k holds is a function of the data, the seed and k alone. A rank takes a contiguous slice of it; how the slices
are cut may change at every step and changes nothing but who computes what.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError
from phalanx.data.packing import PackedRows, SampleSet, TextWindows
from phalanx.data.shuffle import mixture_block, shuffle_by_blocks, shuffle_indices
from phalanx.data.tokenizer import Tokenizer
from phalanx.layout import balance
from phalanx.layout.balance import Division

ALL = slice(None)


class Loader:
    """Gives a rank its micro-batches of any step.

    `sources` are sets of samples with their weights in the mixture; one or several. Of every MIXTURE_BLOCK samples each
    source has its exact share, and each has its own shuffles and epochs. `sequences` is how many samples there are in
    one epoch of all sources. `held_out`: the set is only evaluated on, so it may hold fewer than a batch. Raises
    DataError otherwise.
    """

    def __init__(
        self,
        sources: Sequence[tuple[SampleSet, float]],
        global_batch: int,
        seed: int,
        rank: int,
        held_out: bool = False,
    ) -> None:
        assert sources
        assert global_batch >= 1
        assert rank >= 0
        self.global_batch = global_batch
        self.seed = seed
        self.rank = rank
        self.sources = [rows for rows, _ in sources]
        self.sequences = sum(rows.count for rows in self.sources)
        self._quotas = tuple(balance.split_by_weights([weight for _, weight in sources], balance.MIXTURE_BLOCK))
        if held_out:
            return
        for rows in self.sources:
            made, advice = rows.describe(), "add data, or lower train.global_batch"
            if not rows.count:  # which no smaller batch would change
                advice = "add data, or make its samples shorter"
            if len(self.sources) > 1 and not rows.count:
                raise DataError(f"{made}, so it cannot take its share of the mixture; {advice}")
            if self.sequences < global_batch:
                together = f" and its mixture {self.sequences}" if len(self.sources) > 1 else ""
                raise DataError(f"{made}{together}, fewer than one global batch of {global_batch}; {advice}")

    def warnings(self) -> list[str]:
        """What of the data is not used as one might expect, a sentence each."""
        return [sentence for rows in self.sources for sentence in rows.warnings()]

    def batches(self, step: int, division: Division, skipped: int = 0) -> list[list[Any]]:
        """This rank's micro-batches of step `step` (the first is 0): a pure function of its arguments.

        `division` says how many sequences of the global batch each rank takes, in order of rank, and in how many
        micro-batches each, some of them perhaps empty; `skipped` counts global batches that the run has passed over.
        """
        shares = division.shares
        assert sum(shares) == self.global_batch, f"shares {list(shares)} of a global batch of {self.global_batch}"
        assert self.sequences >= self.global_batch, "fewer sequences than a global batch"
        start, stop = self._slice(shares)
        samples = [
            self.sources[source].sample(row, position)
            for position, source, _, row in self.list_positions(step, skipped, slice(start, stop))
        ]
        return _cut(samples, division.micro_batches_of(self.rank))

    def list_positions(self, step: int, skipped: int = 0, part: slice = ALL) -> list[tuple[int, int, int, int]]:
        """The samples of step `step`, or a `part` of them, in order: (position in the run, source, its epoch, row)."""
        positions = np.arange(self.global_batch, dtype=np.int64)[part] + (step + skipped) * self.global_batch
        chosen, numbers = self._places(positions)
        epochs, rows = self._rows(chosen, numbers)
        return list(zip(positions.tolist(), chosen.tolist(), epochs.tolist(), rows.tolist(), strict=True))

    def evaluation_batches(self, division_of: Callable[[int], Division], limit: int) -> Iterator[list[list[Any]]]:
        """This rank's micro-batches of `limit` sequences, in batches, the same at every call and for every seed.

        They are spread over the whole set, so that a few stand for all of its documents. `division_of(count)` says how
        a batch of `count` sequences is divided; only the last batch may be smaller than the global batch. Positions are
        the sequences' numbers.
        """
        assert len(self.sources) == 1, "a mixture is not evaluated on"
        if self.sequences == 0:
            return
        windows = sorted(shuffle_indices(0, 0, self.sequences, np.arange(min(limit, self.sequences))).tolist())
        for first in range(0, len(windows), self.global_batch):
            count = min(self.global_batch, len(windows) - first)
            division = division_of(count)
            shares = division.shares
            assert sum(shares) == count, f"shares {list(shares)} of a batch of {count}"
            start, stop = self._slice(shares)
            mine = windows[first + start : first + stop]
            yield _cut(
                [self.sources[0].sample(window, window) for window in mine], division.micro_batches_of(self.rank)
            )

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

    def _rows(
        self, chosen: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epoch of its source and the row there that each of these sequences is."""
        rows, of_each = np.empty_like(numbers), np.empty_like(numbers)
        for source in np.unique(chosen):
            name = f"source {source}" if len(self.sources) > 1 else ""
            count = self.sources[source].count
            epochs, indices = np.divmod(numbers, count)
            of_each[chosen == source] = epochs[chosen == source]
            for epoch in np.unique(epochs[chosen == source]):  # a batch may end one epoch and begin the next
                here = (chosen == source) & (epochs == epoch)
                rows[here] = shuffle_by_blocks(self.seed, int(epoch), count, indices[here], name)
        return of_each, rows


def _cut(samples: list[Any], parts: int) -> list[list[Any]]:
    """Nearly equal contiguous micro-batches, the larger ones first."""
    size, longer = divmod(len(samples), parts)
    bounds = [number * size + min(number, longer) for number in range(parts + 1)]
    return [samples[bounds[number] : bounds[number + 1]] for number in range(parts)]


# --------------------------------------------------------------------------------------------------------------- batch
# What a global batch is made of: which samples of which sources, where their tokens lie, and how they begin.


PREVIEW_TOKENS = 24  # of a sample, as text


@dataclass(frozen=True)
class BatchSample:
    """One sample of a batch: its position in the run, from 0; the number of its source and its row there; the epoch of
    that source, from 0; where the row lies, in words; its token ids."""

    position: int
    source: int
    epoch: int
    row: int
    place: str
    tokens: list[int]


def list_samples(loader: Loader, step: int, skipped: int = 0) -> list[BatchSample]:
    """The samples of step `step` (the first is 0), in order, of which each rank takes a contiguous slice. `skipped` is
    as of `Loader.batches`."""
    found = []
    for position, source, epoch, row in loader.list_positions(step, skipped):
        rows = loader.sources[source]
        sample: Any = rows.sample(row, position)
        found.append(BatchSample(position, source, epoch, row, _place(rows, row), sample.tokens.tolist()))
    return found


def _place(rows: SampleSet, row: int) -> str:
    if isinstance(rows, TextWindows):
        start, stop = rows.span(row)
        return f"tokens {start} to {stop - 1}"
    if isinstance(rows, PackedRows):
        documents = rows.documents(row).tolist()
        return f"document{'s' if len(documents) > 1 else ''} {', '.join(map(str, documents))}"
    return f"record {row}"


def preview_text(member: BatchSample, tokenizer: Tokenizer) -> str:
    """The first tokens of a sample as text on one line."""
    text: str = tokenizer.backend.decode(member.tokens[:PREVIEW_TOKENS], skip_special_tokens=False)
    return " ".join(text.split())
