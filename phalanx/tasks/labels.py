"""Token and sequence classification: fine-tuning of a pre-trained BERT, and its scores."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.core import renamed
from phalanx.models.layers import IGNORE_INDEX
from phalanx.tasks.task import Batch, Task

if TYPE_CHECKING:
    from phalanx.models.counter_rng import CounterRNG

_ENTITY = re.compile(r"O|[BIES]-.+")


class LabelledLike(Protocol):
    """A row without padding: `tokens` and `segments` (n,); `labels` (n,) with IGNORE_INDEX except at the first
    piece of each word, or (1,)."""

    @property
    def tokens(self) -> NDArray[np.int64]: ...

    @property
    def segments(self) -> NDArray[np.int64]: ...

    @property
    def labels(self) -> NDArray[np.int64]: ...

    @property
    def position(self) -> int: ...


def _inputs(samples: Sequence[LabelledLike], seq_len: int) -> tuple[dict[str, Tensor], Tensor]:
    """The model's inputs except labels, and the samples' positions; one row if there are no samples."""
    tokens = [sample.tokens for sample in samples] or [np.zeros(1, np.int64)]
    segments = [sample.segments for sample in samples] or [np.zeros(1, np.int64)]
    width = row_width(tokens, seq_len)
    inputs = {
        "tokens": pad_rows(tokens, width, 0),
        "segments": pad_rows(segments, width, 0),
        "lengths": torch.tensor([len(row) for row in tokens], dtype=torch.int64),
    }
    return inputs, torch.tensor([sample.position for sample in samples] or [0], dtype=torch.int64)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(**{name: value for name, value in batch.inputs.items() if name != "labels"})


@dataclass(frozen=True)
class TokenClassificationTask(Task):
    """Token classification: a label for each word, at its first piece; the weight of a batch is its number of words.

    `labels` are the names by number. If all are O or begin with B-, I-, E- or S-, entities are scored as well.
    """

    seq_len: int
    labels: tuple[str, ...]

    @property
    def entities(self) -> bool:
        return all(_ENTITY.fullmatch(label) for label in self.labels)

    def collate(self, samples: Sequence[LabelledLike]) -> Batch:
        """Batch `tokens`, `segments`, `labels` (B, S) and `lengths` (B,), all int64; without samples one row
        without words."""
        inputs, positions = _inputs(samples, self.seq_len)
        labels = [sample.labels for sample in samples] or [np.full(1, IGNORE_INDEX)]
        inputs["labels"] = pad_rows(labels, inputs["tokens"].shape[1], IGNORE_INDEX)
        return Batch(inputs, int((inputs["labels"] != IGNORE_INDEX).sum()), positions)

    def loss_sum(self, model: nn.Module, batch: Batch, draws: "CounterRNG | None") -> Tensor:
        """The sum of the cross-entropies in nats over words."""
        loss: Tensor = model(**batch.inputs, draws=draws)
        return loss

    def nominal_weight(self, global_batch: int) -> int:
        """A quarter of the tokens of full rows, about the number of words of short sentences."""
        return global_batch * max(1, self.seq_len // 4)

    def counts(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Number of words, entities in the data and predicted entities, and of correct words and entities."""
        chosen, truth = _logits(model, batch).argmax(-1), batch.inputs["labels"]
        words = truth != IGNORE_INDEX
        found = {"words": words.sum(), "words right": (words & (chosen == truth)).sum()}
        if not self.entities:
            return found
        there = find_entities(self._names(row, row) for row in truth.cpu())
        claimed = find_entities(self._names(row, told) for row, told in zip(chosen.cpu(), truth.cpu(), strict=True))
        sizes = {"entities": len(there), "entities found": len(claimed), "entities right": len(there & claimed)}
        return found | {name: torch.tensor(size) for name, size in sizes.items()}

    def _names(self, numbers: Tensor, truth: Tensor) -> list[str]:
        return [self.labels[number] for number in numbers[truth != IGNORE_INDEX].tolist()]

    def scores(self, counts: dict[str, float]) -> dict[str, float]:
        """Accuracy of words; precision, recall and F1 of whole entities over all kinds together."""
        found = {"accuracy": counts["words right"] / max(counts["words"], 1.0)}
        if self.entities:
            right = counts["entities right"]
            found["precision"] = right / max(counts["entities found"], 1.0)
            found["recall"] = right / max(counts["entities"], 1.0)
            found["f1"] = 2 * right / max(counts["entities"] + counts["entities found"], 1.0)
        return found


@dataclass(frozen=True)
class SequenceClassificationTask(Task):
    """Sequence classification: one label for each text or pair of texts; the weight of a batch is its number of
    texts."""

    seq_len: int
    labels: tuple[str, ...]

    def collate(self, samples: Sequence[LabelledLike]) -> Batch:
        """Batch `tokens`, `segments` (B, S), `lengths` and `labels` (B,), all int64. Without samples one text
        without a label."""
        inputs, positions = _inputs(samples, self.seq_len)
        inputs["labels"] = torch.tensor(
            [int(sample.labels[0]) for sample in samples] or [IGNORE_INDEX], dtype=torch.int64
        )
        return Batch(inputs, len(samples), positions)

    def loss_sum(self, model: nn.Module, batch: Batch, draws: "CounterRNG | None") -> Tensor:
        """The sum of the cross-entropies in nats over texts."""
        loss: Tensor = model(**batch.inputs, draws=draws)
        return loss

    def nominal_weight(self, global_batch: int) -> int:
        """The number of texts of a global batch."""
        return global_batch

    def counts(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """For each label, how many texts have it, are predicted to have it, and both."""
        truth = batch.inputs["labels"]
        asked = truth != IGNORE_INDEX
        chosen, truth = _logits(model, batch).argmax(-1)[asked], truth[asked]
        size = len(self.labels)
        kinds = {
            "have": torch.bincount(truth, minlength=size),
            "given": torch.bincount(chosen, minlength=size),
            "right": torch.bincount(truth[chosen == truth], minlength=size),
        }
        return {f"{kind} {number}": count for kind, all in kinds.items() for number, count in enumerate(all)}

    def scores(self, counts: dict[str, float]) -> dict[str, float]:
        """Accuracy, and the mean F1 over labels that occur in the data or in predictions."""
        numbers = range(len(self.labels))
        have, given, right = ([counts[f"{kind} {number}"] for number in numbers] for kind in ("have", "given", "right"))
        each = [2 * r / (h + g) for h, g, r in zip(have, given, right, strict=True) if h + g]
        return {"accuracy": sum(right) / max(sum(have), 1.0), "macro_f1": sum(each) / max(len(each), 1)}


# ------------------------------------------------------------------------------------------------------------ entities


def find_entities(sentences: Iterable[Sequence[str]]) -> set[tuple[int, str, int, int]]:
    """The entities of tagged sentences: (sentence, kind, first word, last word).

    Tags are O, or B-, I-, E- or S- and a kind. An entity begins at B- and S-, and after a tag of another kind or O; so
    invalid sequences of tags are scored as by CoNLL's program and by seqeval.

    Source: Tjong Kim Sang and De Meulder, "Introduction to the CoNLL-2003 Shared Task", 2003.
    """
    return {(number, *span) for number, tags in enumerate(sentences) for span in _spans(tags)}


def _spans(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    begun, before, kind = 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        now, here = tag[0], tag[2:]
        if before != "O" and (before in "ES" or now in "BSO" or here != kind):
            yield kind, begun, place - 1
        if now in "BS" or (now in "IE" and (before in "ESO" or here != kind)):
            begun = place
        before, kind = now, here


# ----------------------------------------------------------------------------- rows of different lengths in one tensor


WIDTHS = 64  # multiple to which rows are padded, to limit the number of shapes


def pad_rows(rows: Sequence[NDArray[np.int64]], width: int, filler: int) -> Tensor:
    """Pad `rows` (n_i,) to (B, width) int64."""
    out = np.full((len(rows), width), filler, np.int64)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(out)


def row_width(rows: Sequence[NDArray[np.int64]], max_width: int, step: int = WIDTHS) -> int:
    """The length of the longest row, rounded up to a multiple of `step` but at most `max_width`."""
    longest = max((len(row) for row in rows), default=1)
    return max(longest, min(-(-longest // step) * step, max_width))


__getattr__ = renamed.old_names(__name__)
