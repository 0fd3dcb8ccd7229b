"""The loader: the global order of samples, and a rank's micro-batches of each step.

The samples of step k are a function of the data, the seed and k only. A rank takes a contiguous slice; the division may
change at every step without changing the samples.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from phalanx.layout.batch_ramp import BatchSchedule, make_batch_schedule

ALL = slice(None)


class Loader:
    """Gives a rank its micro-batches of any step.

    `sources` are sets of samples with their weights in the mixture; one or several. Of every MIXTURE_BLOCK samples each
    source has its exact share, and each has its own shuffles and epochs. `sequences` is how many samples there are in
    one epoch of all sources. `held_out`: the set is only evaluated on, so it may hold fewer than a batch. Raises
    DataError otherwise. `schedule`: the sequences of each step, where that is not always a global batch. `read_ahead`:
    threads that read this rank's samples of the next step while the caller computes.
    """

    def __init__(
        self,
        sources: Sequence[tuple[SampleSet, float]],
        global_batch: int,
        seed: int,
        rank: int,
        held_out: bool = False,
        schedule: BatchSchedule | None = None,
        read_ahead: int = 0,
    ) -> None:
        assert sources
        assert global_batch >= 1
        assert rank >= 0
        self.global_batch = global_batch
        self._schedule = make_batch_schedule(global_batch) if schedule is None else schedule
        self.seed = seed
        self.rank = rank
        self.sources = [rows for rows, _ in sources]
        self.sequences = sum(rows.count for rows in self.sources)
        self._reader = SampleReader(self.sources, read_ahead)
        self._quotas = tuple(balance.split_by_weights([weight for _, weight in sources], balance.MIXTURE_BLOCK))
        if held_out:
            return
        for rows in self.sources:
            made, advice = rows.describe(), "add data, or lower train.global_batch"
            if not rows.count:  # which no smaller batch would change
                advice = "add data, or shorten its samples"
            if len(self.sources) > 1 and not rows.count:
                raise DataError(f"{made}, so it cannot take its share of the mixture; {advice}")
            if self.sequences < global_batch:
                together = f" and its mixture {self.sequences}" if len(self.sources) > 1 else ""
                raise DataError(f"{made}{together}, fewer than one global batch of {global_batch}; {advice}")

    def warnings(self) -> list[str]:
        """Warnings about data that is used differently than expected, a sentence each."""
        return [sentence for rows in self.sources for sentence in rows.warnings()]

    def batches(self, step: int, division: Division, skipped: int = 0) -> list[list[Any]]:
        """This rank's micro-batches of step `step` (the first is 0): a pure function of its arguments.

        `division` says how many sequences of the global batch each rank takes, in order of rank, and in how many
        micro-batches each, some of them perhaps empty; `skipped` counts global batches that the run has passed over.
        """
        shares = division.shares
        size = self._schedule.batch_size(step + 1)
        assert sum(shares) == size, f"shares {list(shares)} of a batch of {size}"
        assert self.sequences >= self.global_batch, "fewer sequences than a global batch"
        part = slice(*self._slice(shares))
        samples = self._reader.read(self.list_positions(step, skipped, part))
        if self._reader.threads and self._schedule.batch_size(step + 2) == size:  # else its division is not known
            self._reader.start_reading(self.list_positions(step + 1, skipped, part))
        return _cut(samples, division.micro_batches_of(self.rank))

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.close()

    def list_positions(self, step: int, skipped: int = 0, part: slice = ALL) -> list[tuple[int, int, int, int]]:
        """The samples of step `step`, or a `part` of them, in order: (position in the run, source, its epoch, row)."""
        size, first = self._schedule.batch_size(step + 1), self._schedule.first_sequence(step + 1)
        positions = np.arange(size, dtype=np.int64)[part] + (first + skipped * self.global_batch)
        chosen, numbers = self._places(positions)
        epochs, rows = self._rows(chosen, numbers)
        return list(zip(positions.tolist(), chosen.tolist(), epochs.tolist(), rows.tolist(), strict=True))

    def evaluation_batches(self, division_of: Callable[[int], Division], limit: int) -> Iterator[list[list[Any]]]:
        """This rank's micro-batches of `limit` sequences, in batches, the same at every call and for every seed.

        They are spread over the whole set, so that a few represent all of its documents. `division_of(count)` says how
        a batch of `count` sequences is divided; only the last batch may be smaller than the global batch. Positions are
        the sequences' numbers.
        """
        assert len(self.sources) == 1, "a mixture cannot be used for evaluation"
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


class SampleReader:
    """Reads samples by (position, source, epoch, row), some of them ahead of time in `threads`. What was read ahead and
    is not asked for, since the division changed or the run went back to an earlier step, is dropped."""

    def __init__(self, sources: Sequence[SampleSet], threads: int) -> None:
        self.threads, self._sources = threads, sources
        self._executor: ThreadPoolExecutor | None = None  # made on first use: a forked process has no threads
        self._ahead: dict[tuple[int, int, int, int], Future[Any]] = {}

    def start_reading(self, places: Sequence[tuple[int, int, int, int]]) -> None:
        """Begin to read samples that the next call of `read` asks for."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.threads, "read-ahead")
        self._ahead = {place: self._executor.submit(self._read, place) for place in places}

    def read(self, places: Sequence[tuple[int, int, int, int]]) -> list[Any]:
        """The samples in order; waits for those that are being read. Raises what reading a sample raises."""
        ahead, self._ahead = self._ahead, {}
        found = [ahead[place].result() if place in ahead else self._read(place) for place in places]
        for unused in ahead.values():
            unused.cancel()
        return found

    def close(self) -> None:
        """Stop reading ahead, without waiting for what is being read."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _read(self, place: tuple[int, int, int, int]) -> Any:
        position, source, _, row = place
        return self._sources[source].sample(row, position)


def _cut(samples: list[Any], parts: int) -> list[list[Any]]:
    """Nearly equal contiguous micro-batches, the larger ones first."""
    size, longer = divmod(len(samples), parts)
    bounds = [number * size + min(number, longer) for number in range(parts + 1)]
    return [samples[bounds[number] : bounds[number + 1]] for number in range(parts)]


# --------------------------------------------------------------------------------------------------------------- batch
# Contents of a global batch: which samples of which sources, where their tokens are, and how they begin.


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
