"""Sentences with a tag for each word, and texts with a label: the rows that are made of them."""

import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import ConfigError
from phalanx.data.record_files import RecordFile
from phalanx.data.wordpiece import SpecialTokens


@dataclass(frozen=True)
class LabelledSample:
    """A row as the model is given it, without padding: `tokens`, `segments` (n,) int64; `labels` int64 (n,) with -100
    where no word begins, or (1,) of the whole; its place in the run."""

    tokens: NDArray[np.int64]
    segments: NDArray[np.int64]
    labels: NDArray[np.int64]
    position: int


@dataclass(frozen=True)
class LabelRowOptions:
    """How records become rows: of at most `seq_len` tokens, the longer ones cut, or left out with `drop_long`.

    `labels`: the names of all labels, by their numbers in the model.
    """

    seq_len: int
    labels: tuple[str, ...]
    drop_long: bool = False


class LabelledRows:
    """Records as [CLS] A [SEP] or [CLS] A [SEP] B [SEP], by number."""

    def __init__(self, file: RecordFile, form: LabelRowOptions) -> None:
        self.file, self._form = file, form
        self._specials = SpecialTokens.from_json(file.facts["specials"])
        numbers = {label: number for number, label in enumerate(form.labels)}
        unknown = [label for label in file.facts["labels"] if label not in numbers]
        if unknown:
            raise ConfigError(
                f"the data in {file.folder} has the label {unknown[0]!r}, which is none of task.labels "
                f"({', '.join(form.labels[:8])}); add it there, or set task.labels=auto"
            )
        # The last entry is what UNTAGGED, as an index, finds.
        self._numbers = np.array([*(numbers[label] for label in file.facts["labels"]), -100], np.int64)
        self._pairs = "pair" in file.types
        lengths = file.lengths("tokens") + 2
        if self._pairs:
            second = file.lengths("pair")
            lengths = lengths + second + (second > 0)
        fits = lengths <= form.seq_len
        self.too_long = int(len(fits) - fits.sum())
        self._rows = np.flatnonzero(fits) if form.drop_long else np.arange(file.count)
        self.count = len(self._rows)

    def sample(self, number: int, position: int) -> LabelledSample:
        """As the loader's Rows."""
        record = self.file.record(int(self._rows[number]))
        first, labels = record["tokens"], self._numbers[record["labels"]]
        second = record["pair"] if self._pairs else first[:0]
        cls, sep = [self._specials.cls], [self._specials.sep]
        room = self._form.seq_len - 2 - (len(second) > 0)
        if len(second):
            first, second = _cut(first, second, room)
            tokens = np.concatenate([cls, first, sep, second, sep])
            segments = np.repeat(np.array([0, 1]), [len(first) + 2, len(second) + 1])
            return LabelledSample(tokens, segments, labels, position)
        tokens = np.concatenate([cls, first[:room], sep])
        if not self._pairs:
            labels = np.concatenate([[-100], labels[:room], [-100]])
        return LabelledSample(tokens, np.zeros_like(tokens), labels, position)

    def describe(self) -> str:
        """As the loader's Rows."""
        return f"{self.file.folder} has {self.file.count} records, of which {self.count} are used"

    def warnings(self) -> list[str]:
        """What became of records that are longer than a row."""
        if not self.too_long:
            return []
        done = "left out" if self._form.drop_long else "cut, and what is cut off is not scored"
        return [
            f"{self.too_long} of {self.file.count} records are longer than data.seq_len {self._form.seq_len} and are "
            f"{done} (data.too_long), in {self.file.folder}"
        ]


def _cut(first: NDArray[np.int64], second: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Both together at most `room` tokens: the longer one loses its end, then both do."""
    over = len(first) + len(second) - room
    if over <= 0:
        return first, second
    shorter = min(len(first), len(second))
    if shorter <= room // 2:
        keep = room - shorter
        return (first[:keep], second) if len(first) > len(second) else (first, second[:keep])
    return first[: room - room // 2], second[: room // 2]


def order_labels(found: Sequence[str], known: Sequence[str] | None = None) -> list[str]:
    """The names of labels in their order in the model: as `known` has them where these are all, else numbers by size
    and words by the alphabet, with O, which stands for no entity, before them."""
    if known is not None and set(found) <= set(known):
        return list(known)

    def place(label: str) -> tuple[int, int, str]:
        digits = label.lstrip("-")
        number = int(label) if digits and all(letter in string.digits for letter in digits) else 0
        return (0 if label == "O" else 1, number, label)

    return sorted(set(found), key=place)
