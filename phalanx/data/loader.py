"""The one global order of samples, and a rank's micro-batches of it.

What step k holds is a function of the data, the seed and k alone. A rank takes a contiguous slice of it; how the slices
are cut may change at every step and changes nothing but who computes what.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.data.tokens import TokenFile
from phalanx.errors import DataError

ROUNDS = 8


def order(seed: int, epoch: int, n: int, index: NDArray[np.integer]) -> NDArray[np.int64]:
    """The shuffled order of `n` things: where each of `index` (any shape, values in [0, n)) goes, as int64.

    A bijection of range(n) for each (seed, epoch), computed element by element, so that no rank ever holds the order.
    Source: a Feistel network on the next power of two (Luby and Rackoff 1988) with cycle walking (Black and Rogaway
    2002); its round function is the finaliser of splitmix64 (Steele et al. 2014).
    """
    assert not index.size or 0 <= index.min() <= index.max() < n, f"an index outside [0, {n})"
    bits = (n - 1).bit_length()
    right_bits = np.uint64((bits + 1) // 2)
    left_mask, right_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << (bits + 1) // 2) - 1)
    digest = hashlib.shake_256(f"phalanx order {seed} {epoch}".encode()).digest(8 * ROUNDS)
    keys = np.frombuffer(digest, "<u8").astype(np.uint64)
    result = index.astype(np.uint64).reshape(-1)
    pending = np.arange(result.size)  # those still outside [0, n): the walk goes on for them alone
    while pending.size:
        value = result[pending]
        left, right = value >> right_bits, value & right_mask
        for number in range(0, ROUNDS, 2):
            left ^= _mix(right + keys[number]) & left_mask
            right ^= _mix(left + keys[number + 1]) & right_mask
        value = (left << right_bits) | right
        result[pending] = value
        pending = pending[value >= n]
    return result.astype(np.int64).reshape(index.shape)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Sample:
    """One sequence: `tokens` of shape (seq_len + 1,), int64, and its place in the run, which no other sample has."""

    tokens: NDArray[np.int64]
    position: int


class Loader:
    """Cuts a token file into windows of `seq_len` and gives a rank its micro-batches of any step.

    Windows overlap by one token, since labels are inputs shifted by one; `sequences` is how many there are in an epoch.
    `held_out`: the file is only evaluated on, so it may hold fewer sequences than a batch. Raises DataError otherwise.
    """

    def __init__(
        self,
        token_file: TokenFile,
        seq_len: int,
        global_batch: int,
        seed: int,
        rank: int,
        micro_batch: int,
        held_out: bool = False,
    ) -> None:
        assert seq_len >= 1
        assert global_batch >= 1
        assert rank >= 0
        assert micro_batch >= 1
        self.token_file = token_file
        self.seq_len = seq_len
        self.global_batch = global_batch
        self.seed = seed
        self.rank = rank
        self.micro_batch = micro_batch
        self.sequences = max(0, (token_file.tokens - 1) // seq_len)
        if self.sequences < global_batch and not held_out:
            raise DataError(
                f"{token_file.folder} has {token_file.tokens} tokens, which make {self.sequences} sequences of "
                f"{seq_len}, fewer than one global "
                f"batch of {global_batch}; add data, or lower train.global_batch or the sequence length"
            )

    def batches(self, step: int, shares: Sequence[int], skipped: int = 0) -> list[list[Sample]]:
        """This rank's micro-batches of step `step` (the first is 0): a pure function of its arguments.

        `shares` is how many sequences of the global batch each rank takes, in order of rank; `skipped` counts global
        batches that the run has passed over. All ranks get the same number of micro-batches, some perhaps empty.
        """
        assert sum(shares) == self.global_batch, f"shares {list(shares)} of a global batch of {self.global_batch}"
        assert self.sequences >= self.global_batch, "fewer sequences than a global batch"
        start, stop = self._slice(shares)
        positions = np.arange(start, stop, dtype=np.int64) + (step + skipped) * self.global_batch
        epochs, indices = np.divmod(positions, self.sequences)
        windows = np.empty_like(indices)
        for epoch in np.unique(epochs):  # a batch may end one epoch and begin the next
            here = epochs == epoch
            windows[here] = order(self.seed, int(epoch), self.sequences, indices[here])
        samples = [
            self._sample(int(window), int(position)) for window, position in zip(windows, positions, strict=True)
        ]
        return self._cut(samples, shares)

    def evaluation(self, shares_of: Callable[[int], Sequence[int]], limit: int) -> Iterator[list[list[Sample]]]:
        """This rank's micro-batches of `limit` windows that are the same at every call and for every seed, in batches.

        They are spread over the whole file, so that a few stand for all of its documents. `shares_of(count)` gives the
        shares of a batch of `count` sequences; only the last batch may be smaller than the global batch. Positions are
        the windows' numbers.
        """
        if self.sequences == 0:
            return
        windows = sorted(order(0, 0, self.sequences, np.arange(min(limit, self.sequences))).tolist())
        for first in range(0, len(windows), self.global_batch):
            count = min(self.global_batch, len(windows) - first)
            shares = shares_of(count)
            assert sum(shares) == count, f"shares {list(shares)} of a batch of {count}"
            start, stop = self._slice(shares)
            mine = windows[first + start : first + stop]
            yield self._cut([self._sample(window, window) for window in mine], shares)

    def _slice(self, shares: Sequence[int]) -> tuple[int, int]:
        assert self.rank < len(shares), f"shares {list(shares)} for rank {self.rank}"
        assert min(shares) >= 0, f"a negative share in {list(shares)}"
        start = sum(shares[: self.rank])
        return start, start + shares[self.rank]

    def _sample(self, window: int, position: int) -> Sample:
        start = window * self.seq_len
        tokens = self.token_file.slice(start, start + self.seq_len + 1)
        if tokens.max() >= self.token_file.vocab_size:
            raise DataError(
                f"{self.token_file.folder} has a token beyond its vocabulary of {self.token_file.vocab_size} near "
                f"number {start}, so the file is damaged; delete that folder and prepare the data again"
            )
        return Sample(tokens, position)

    def _cut(self, samples: list[Sample], shares: Sequence[int]) -> list[list[Sample]]:
        """Nearly equal contiguous micro-batches, the larger ones first; as many as the rank with most work needs."""
        parts = -(-max(shares) // self.micro_batch)
        size, longer = divmod(len(samples), parts)
        bounds = [number * size + min(number, longer) for number in range(parts + 1)]
        return [samples[bounds[number] : bounds[number + 1]] for number in range(parts)]
