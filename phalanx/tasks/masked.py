"""Masked language modeling and next-sentence prediction: the pre-training of BERT."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.models.layers import IGNORE_INDEX
from phalanx.tasks.labels import LabelledLike, pad_rows, row_width
from phalanx.tasks.task import Batch, Task

if TYPE_CHECKING:
    from phalanx.models.counter_rng import CounterRNG

PREDICTIONS_MULTIPLE = 8  # predictions of a row are padded to a multiple of it


class MaskedLike(LabelledLike, Protocol):
    """A row without padding: `tokens` and `segments` (n,), `places` (p,) of masked tokens and their original
    values `labels` (p,), all int64; `follows` is 0 if the second segment follows the first, 1 if not, IGNORE_INDEX
    if unknown."""

    @property
    def places(self) -> NDArray[np.int64]: ...

    @property
    def follows(self) -> int: ...


@dataclass(frozen=True)
class MaskedLMTask(Task):
    """Masked language modeling: the weight of a batch is its number of masked tokens, and its loss the sum over them.

    With `pairs` the loss also has `max_predictions` times the sum over samples of the next-sentence loss, where
    `max_predictions` is how many tokens of a full row are masked: divided by the weight, it is nearly the mean over
    samples, as in the BERT paper, and exactly so if all rows are full. The factor is a constant, so that no split of a
    batch changes the sum. `full_rows`: all rows have `seq_len` tokens, so that no padding mask is needed.
    """

    seq_len: int
    max_predictions: int
    pairs: bool = False
    full_rows: bool = False

    def collate(self, samples: Sequence[MaskedLike]) -> Batch:
        """Batch `tokens`, `segments` (B, S), `lengths` (B,), `places` and `labels` (B, P), all int64, and with
        `pairs` `next_labels` (B,). Without samples one row whose labels are all ignored."""
        tokens = [sample.tokens for sample in samples] or [np.zeros(self.seq_len if self.full_rows else 1, np.int64)]
        segments = [sample.segments for sample in samples] or [np.zeros(1, np.int64)]
        places = [sample.places for sample in samples] or [np.zeros(0, np.int64)]
        labels = [sample.labels for sample in samples] or [np.zeros(0, np.int64)]
        width = row_width(tokens, self.seq_len)
        asked = max(self.max_predictions, row_width(places, self.seq_len, PREDICTIONS_MULTIPLE))
        inputs = {
            "tokens": pad_rows(tokens, width, 0),
            "places": pad_rows(places, asked, 0),
            "labels": pad_rows(labels, asked, IGNORE_INDEX),
        }
        if not self.full_rows:
            inputs |= {"segments": pad_rows(segments, width, 0), "lengths": _numbers([len(row) for row in tokens])}
        if self.pairs:
            inputs["next_labels"] = _numbers([sample.follows for sample in samples] or [IGNORE_INDEX])
        positions = [sample.position for sample in samples] or [0]
        return Batch(inputs, sum(len(row) for row in labels), _numbers(positions))

    def loss_sum(self, model: nn.Module, batch: Batch, draws: "CounterRNG | None") -> Tensor:
        """The sum of the losses in nats; see the class."""
        loss, next_loss = model(**batch.inputs, draws=draws)
        return loss if next_loss is None else loss + self.max_predictions * next_loss

    def nominal_weight(self, global_batch: int) -> int:
        """The number of masked tokens of a global batch of full rows."""
        return global_batch * self.max_predictions

    def counts(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Number of masked tokens and pairs, and of correct predictions of each."""
        asked = {name: value for name, value in batch.inputs.items() if name not in ("labels", "next_labels")}
        logits, follows = model(**asked)
        labels = batch.inputs["labels"]
        found = {"masked": (labels != IGNORE_INDEX).sum(), "masked right": (logits.argmax(-1) == labels).sum()}
        if self.pairs:
            truth = batch.inputs["next_labels"]
            found |= {"pairs": (truth != IGNORE_INDEX).sum(), "pairs right": (follows.argmax(-1) == truth).sum()}
        return found

    def scores(self, counts: dict[str, float]) -> dict[str, float]:
        """Accuracy of masked tokens and, with `pairs`, of pairs."""
        found = {"accuracy": counts["masked right"] / max(counts["masked"], 1.0)}
        if self.pairs:
            found["next_accuracy"] = counts["pairs right"] / max(counts["pairs"], 1.0)
        return found


def _numbers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
