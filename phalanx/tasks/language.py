"""Causal language modeling (next-token prediction), on running text and on rows of whole documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.core import renamed
from phalanx.models.layers import IGNORE_INDEX
from phalanx.tasks.task import Batch, SampleLike, Task

if TYPE_CHECKING:
    from phalanx.models.counter_rng import CounterRNG


@dataclass(frozen=True)
class CausalLMTask(Task):
    """Causal language modeling: each token is predicted from those before it; the weight of a batch is its number
    of labels. `isolated`: a row has several documents, and none attends to another.
    """

    seq_len: int
    isolated: bool = False

    def collate(self, samples: Sequence[SampleLike]) -> Batch:
        """Batch tokens and labels, both (B, seq_len) int64. Without samples one sequence whose labels are all ignored.

        If `isolated`, also positions (B, seq_len) int64, which start at 0 in each document, and segments int32 (n +
        1,): the offsets of documents in the B * seq_len tokens, followed by that number up to a power of two, to limit
        the number of shapes.
        """
        if not samples:
            tokens = torch.zeros(1, self.seq_len, dtype=torch.int64)
            inputs = {"tokens": tokens, "labels": torch.full_like(tokens, IGNORE_INDEX)}
            return Batch(inputs | self._documents([None]), 0, torch.zeros(1, dtype=torch.int64))
        rows = np.stack([sample.tokens for sample in samples])
        assert rows.shape[1] == self.seq_len + 1, f"samples of {rows.shape[1]} tokens for sequences of {self.seq_len}"
        labels = rows[:, 1:].copy()
        for row, sample in zip(labels, samples, strict=True):
            if sample.learnt is not None:
                row[~sample.learnt] = IGNORE_INDEX
        positions = torch.tensor([sample.position for sample in samples], dtype=torch.int64)
        weight = int(np.count_nonzero(labels != IGNORE_INDEX))
        inputs = {"tokens": torch.from_numpy(rows[:, :-1].copy()), "labels": torch.from_numpy(labels)}
        return Batch(inputs | self._documents([sample.lengths for sample in samples]), weight, positions)

    def _documents(self, lengths: Sequence[NDArray[np.int64] | None]) -> dict[str, Tensor]:
        """Positions and segments of rows whose documents have these lengths; a row without lengths is one document."""
        if not self.isolated:
            assert all(row is None for row in lengths), "rows of several documents for a task that knows of none"
            return {}
        whole = np.array([self.seq_len], np.int64)
        flat = np.concatenate([whole if row is None else row for row in lengths])
        ends = np.cumsum(flat)
        total = len(lengths) * self.seq_len
        assert ends[-1] == total, f"documents of {ends[-1]} tokens in rows of {total}"
        positions = np.arange(total) - np.repeat(ends - flat, flat)
        segments = np.full((1 << (len(flat) - 1).bit_length()) + 1, total, np.int32)
        segments[0], segments[1 : len(ends) + 1] = 0, ends
        return {
            "positions": torch.from_numpy(positions).view(len(lengths), self.seq_len),
            "segments": torch.from_numpy(segments),
        }

    def loss_sum(self, model: nn.Module, batch: Batch, draws: "CounterRNG | None") -> Tensor:
        """The sum of the cross-entropies in nats over the labels that are not ignored."""
        loss: Tensor = model(**batch.inputs, draws=draws)
        return loss

    def nominal_weight(self, global_batch: int) -> int:
        """The number of labels of a global batch of full sequences, ignored ones included."""
        return global_batch * self.seq_len


__getattr__ = renamed.old_names(__name__)
