"""Next-token prediction on packed sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.tasks.task import Batch, SampleLike

if TYPE_CHECKING:
    from phalanx.models.draws import Draws

IGNORED = -100  # a label that no loss is computed for


@dataclass(frozen=True)
class LanguageModel:
    """Each token is predicted from those before it; the weight of a batch is the number of its labels."""

    seq_len: int

    def collate(self, samples: Sequence[SampleLike]) -> Batch:
        """Tokens and labels, both (B, seq_len) int64. No samples give one sequence whose labels are all ignored."""
        if not samples:
            tokens = torch.zeros(1, self.seq_len, dtype=torch.int64)
            inputs = {"tokens": tokens, "labels": torch.full_like(tokens, IGNORED)}
            return Batch(inputs, 0, torch.zeros(1, dtype=torch.int64))
        rows = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
        assert rows.shape[1] == self.seq_len + 1, f"samples of {rows.shape[1]} tokens for sequences of {self.seq_len}"
        labels = rows[:, 1:].contiguous()
        positions = torch.tensor([sample.position for sample in samples], dtype=torch.int64)
        weight = int((labels != IGNORED).sum())  # on the host, before the batch moves: no synchronisation
        return Batch({"tokens": rows[:, :-1].contiguous(), "labels": labels}, weight, positions)

    def loss_sum(self, model: nn.Module, batch: Batch, draws: "Draws | None") -> Tensor:
        """The sum of the cross-entropies in nats over the labels that count."""
        loss: Tensor = model(batch.inputs["tokens"], labels=batch.inputs["labels"], draws=draws)
        return loss

    def nominal_weight(self, global_batch: int) -> int:
        """Every label of a global batch of full sequences."""
        return global_batch * self.seq_len
