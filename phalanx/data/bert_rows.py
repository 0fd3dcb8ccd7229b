"""Rows for BERT: [CLS] text [SEP], or [CLS] A [SEP] B [SEP], with some tokens masked, or with labels.

All random choices (which tokens are masked, as what, where A ends and what B is) are functions of the seed and of the
sample's place in the run: the same on other ranks, splits and restarts, and different in every epoch. Source: Devlin et
al., "BERT", 2018; windows of running text as in Liu et al., "RoBERTa", 2019 (FULL-SENTENCES).
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import ConfigError, DataError
from phalanx.data.packing import SampleSet, describe_too_long
from phalanx.data.record_files import RecordFile, TokenFile
from phalanx.data.shuffle import random_bits
from phalanx.data.wordpiece import SpecialTokens
from phalanx.layout.model_shape import IGNORE_INDEX


@dataclass(frozen=True)
class MaskingOptions:
    """How text becomes masked rows: `share` of a row's tokens are predicted, at most `max_predicted` of any row.

    `pairs`: two segments, of which half follow one another. `whole_words`: all pieces of a word or none.
    """

    seq_len: int
    share: float
    pairs: bool = False
    whole_words: bool = False

    @property
    def max_predicted(self) -> int:
        return max(1, int(self.seq_len * self.share + 0.5))


class MaskingVocabulary:
    """What masking must know of a tokenizer: its special tokens, its size, and which pieces continue a word."""

    def __init__(self, specials: SpecialTokens, size: int) -> None:
        self.specials, self.size = specials, size
        self.is_continuation = np.zeros(size, np.bool_)
        self.is_continuation[list(specials.continuing)] = True


@dataclass(frozen=True)
class MaskedSample:
    """A row as the model is given it, without padding: `tokens` and `segments` (n,), `places` (p,) that are predicted
    with their `labels` (p,), all int64, and its place in the run. `follows`: 0 if B follows A, 1 if not, IGNORED
    without pairs."""

    tokens: NDArray[np.int64]
    segments: NDArray[np.int64]
    places: NDArray[np.int64]
    labels: NDArray[np.int64]
    follows: int
    position: int


def make_masked_rows(
    file: TokenFile, form: MaskingOptions, seed: int, held_out: bool = False
) -> "MaskedWindows | MaskedPairs":
    """The masked rows of a token set; one that is `held_out` may hold a single document, in which all pairs follow.

    Raises ConfigError where its tokenizer has no [MASK], DataError where no pair could be made of two documents.
    """
    if file.specials is None:
        raise ConfigError(
            f"the tokenizer of {file.folder} lacks one of the tokens [PAD], [UNK], [CLS], [SEP] and [MASK], so "
            "nothing can be masked; set data.tokenizer to a BERT tokenizer, or to train"
        )
    vocabulary = MaskingVocabulary(file.specials, file.vocab_size)
    rows = (MaskedPairs if form.pairs else MaskedWindows)(file, vocabulary, form, seed)
    if isinstance(rows, MaskedPairs) and rows.count and rows.alone and not held_out:
        raise DataError(
            f"{file.folder} has only one document long enough for a sentence pair, so no pair can mix two documents; "
            "add documents, or set task.next_sentence=false"
        )
    return rows


class MaskedWindows(SampleSet):
    """Consecutive windows of running text; each document in them ends with [SEP]."""

    def __init__(self, file: TokenFile, vocabulary: MaskingVocabulary, form: MaskingOptions, seed: int) -> None:
        self.file, self._vocabulary, self._form, self._seed = file, vocabulary, form, seed
        self._max_tokens = form.seq_len - 2
        self.count = file.tokens // self._max_tokens

    def sample(self, number: int, position: int) -> MaskedSample:
        text = self._tokens(number * self._max_tokens, (number + 1) * self._max_tokens)
        specials = self._vocabulary.specials
        tokens = np.concatenate([[specials.cls], text, [specials.sep]])
        places, labels = mask_tokens(tokens, self._vocabulary, self._form, self._seed, position)
        return MaskedSample(tokens, np.zeros_like(tokens), places, labels, IGNORE_INDEX, position)

    def _tokens(self, start: int, stop: int) -> NDArray[np.int64]:
        tokens = self.file.slice(start, stop)
        self.file.check_tokens(tokens, f"near number {start}")
        return tokens

    def describe(self) -> str:
        held = f"{self.file.tokens} tokens in {self.file.documents} documents"
        why = "" if self.count else " (data.seq_len)"
        return f"{self.file.folder} has {held}, enough for {self.count} sequences of {self._form.seq_len}{why}"


class MaskedPairs(MaskedWindows):
    """Pieces of documents, each cut in two at random; for half of them the second part comes from elsewhere."""

    def __init__(self, file: TokenFile, vocabulary: MaskingVocabulary, form: MaskingOptions, seed: int) -> None:
        super().__init__(file, vocabulary, form, seed)
        self._max_tokens = room = form.seq_len - 3
        lengths = np.diff(file.index) - 1  # without its end
        # A rest of one token makes no pair.
        self._first = np.concatenate([[0], np.cumsum(lengths // room + (lengths % room > 1))])
        self.count = int(self._first[-1])
        self.alone = int(np.diff(self._first).max(initial=0)) == self.count

    def sample(self, number: int, position: int) -> MaskedSample:
        document, start, stop = self._bounds(number)
        cut, other, row, offset = random_bits(self._seed, "pair", position, 4).tolist()
        middle = start + 1 + cut % (stop - start - 1)
        first = self._tokens(start, middle)
        elsewhere = other % 2 == 1 and not self.alone
        if elsewhere:
            begun, ended = int(self._first[document]), int(self._first[document + 1])
            chosen = row % (self.count - (ended - begun))
            found, from_, to = self._bounds(chosen + (ended - begun) * (chosen >= begun))
            from_ += offset % (to - from_)
            end = int(self.file.index[found + 1]) - 1
            second = self._tokens(from_, min(from_ + self._max_tokens - len(first), end))
        else:
            second = self._tokens(middle, stop)
        tokens, segments = _join_pair(self._vocabulary.specials, first, second)
        places, labels = mask_tokens(tokens, self._vocabulary, self._form, self._seed, position)
        return MaskedSample(tokens, segments, places, labels, int(elsewhere), position)

    def _bounds(self, number: int) -> tuple[int, int, int]:
        """A row's document, and where it starts and stops in the file."""
        document = int(np.searchsorted(self._first, number, side="right")) - 1
        start = int(self.file.index[document]) + (number - int(self._first[document])) * self._max_tokens
        return document, start, min(start + self._max_tokens, int(self.file.index[document + 1]) - 1)


class PremaskedRows(SampleSet):
    """Rows that were masked when they were written, the same in every epoch."""

    def __init__(self, file: RecordFile, form: MaskingOptions) -> None:
        self.file, self._form = file, form
        self.count = file.count
        longest = int(file.lengths("tokens").max(initial=0))
        if longest > form.seq_len:
            raise DataError(
                f"{file.folder} has rows of {longest} tokens, but data.seq_len is {form.seq_len}; raise it to that"
            )

    def sample(self, number: int, position: int) -> MaskedSample:
        record = self.file.record(number)
        for name in ("tokens", "labels"):
            self.file.check_tokens(record[name], f"in record {number}")
        follows = int(record["follows"][0]) if self._form.pairs else IGNORE_INDEX
        return MaskedSample(record["tokens"], record["segments"], record["places"], record["labels"], follows, position)

    def describe(self) -> str:
        return f"{self.file.folder} has {self.count} masked sequences"


def mask_tokens(
    tokens: NDArray[np.int64], vocabulary: MaskingVocabulary, form: MaskingOptions, seed: int, position: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Mask some of `tokens` in place; returns the places (ascending) and what stood there, (p,) int64 each.

    Of the chosen ones 8 of 10 become [MASK], 1 any token, and 1 stays as it is.
    """
    specials = vocabulary.specials
    never = (tokens == specials.cls) | (tokens == specials.sep) | (tokens == specials.pad)
    candidates = np.flatnonzero(~never)
    wanted = min(form.max_predicted, max(1, int(len(tokens) * form.share + 0.5)), len(candidates))
    drawn = random_bits(seed, "mask", position, 3 * len(tokens))
    if form.whole_words:
        places = _words(vocabulary.is_continuation[tokens], candidates, wanted, drawn)
    else:
        places = candidates[np.argsort(drawn[candidates], kind="stable")[:wanted]]
    places = np.sort(places)
    labels = tokens[places]
    kind = drawn[len(tokens) + places] % np.uint64(10)
    any_token = (drawn[2 * len(tokens) + places] % np.uint64(vocabulary.size)).astype(np.int64)
    tokens[places] = np.where(kind < 8, specials.mask, np.where(kind == 8, any_token, labels))
    return places, labels


def _words(
    continues: NDArray[np.bool_], candidates: NDArray[np.int64], wanted: int, drawn: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Places of whole words, in a random order, as many as there is room for. `continues`: of all tokens of a row."""
    starts = np.flatnonzero(~continues[candidates] | (np.diff(candidates, prepend=-2) != 1))
    if not len(starts):
        return candidates[:0]
    bounds = [*starts.tolist(), len(candidates)]
    chosen: list[NDArray[np.int64]] = []
    left = wanted
    for word in np.argsort(drawn[candidates[starts]], kind="stable").tolist():
        size = bounds[word + 1] - bounds[word]
        if size <= left:
            chosen.append(candidates[bounds[word] : bounds[word + 1]])
            left -= size
            if not left:
                break
    return np.concatenate(chosen) if chosen else candidates[:0]


# -------------------------------------------------------------------------------------------------------------- labels


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
    """How records become rows: of at most `seq_len` tokens, the longer ones cut, or dropped with `drop_long`.

    `labels`: the names of all labels, by their numbers in the model.
    """

    seq_len: int
    labels: tuple[str, ...]
    drop_long: bool = False


class LabelledRows(SampleSet):
    """Records as [CLS] A [SEP] or [CLS] A [SEP] B [SEP], by number."""

    def __init__(self, file: RecordFile, form: LabelRowOptions) -> None:
        self.file, self._form = file, form
        self._specials = SpecialTokens.from_json(file.facts["specials"])
        numbers = {label: number for number, label in enumerate(form.labels)}
        unknown = [label for label in file.facts["labels"] if label not in numbers]
        if unknown:
            raise ConfigError(
                f"the data in {file.folder} has the label {unknown[0]!r}, which is not in task.labels "
                f"({', '.join(form.labels[:8])}); add it there, or set task.labels=auto"
            )
        # The last entry is what UNTAGGED, as an index, finds.
        self._numbers = np.array([*(numbers[label] for label in file.facts["labels"]), IGNORE_INDEX], np.int64)
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
        record = self.file.record(int(self._rows[number]))
        first, labels = record["tokens"], self._numbers[record["labels"]]
        second = record["pair"] if self._pairs else first[:0]
        room = self._form.seq_len - 2 - (len(second) > 0)
        if len(second):
            tokens, segments = _join_pair(self._specials, *_cut(first, second, room))
            return LabelledSample(tokens, segments, labels, position)
        tokens = np.concatenate([[self._specials.cls], first[:room], [self._specials.sep]])
        if not self._pairs:
            labels = np.concatenate([[IGNORE_INDEX], labels[:room], [IGNORE_INDEX]])
        return LabelledSample(tokens, np.zeros_like(tokens), labels, position)

    def describe(self) -> str:
        return f"{self.file.folder} has {self.file.count} records, of which {self.count} are used"

    def warnings(self) -> list[str]:
        """What became of records that are longer than a row."""
        done, form = "truncated, and the truncated part is not scored", self._form
        return describe_too_long(self.file, "records", self.too_long, form.seq_len, form.drop_long, done)


def _join_pair(
    specials: SpecialTokens, first: NDArray[np.int64], second: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[CLS] A [SEP] B [SEP], and which segment each token is of."""
    tokens = np.concatenate([[specials.cls], first, [specials.sep], second, [specials.sep]])
    return tokens, np.repeat(np.array([0, 1]), [len(first) + 2, len(second) + 1])


def _cut(first: NDArray[np.int64], second: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Truncate a pair to at most `room` tokens together: the longer one first, then both."""
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
    and words by the alphabet, with O (no entity) before them."""
    if known is not None and set(found) <= set(known):
        return list(known)

    def place(label: str) -> tuple[int, int, str]:
        digits = label.lstrip("-")
        number = int(label) if digits and all(letter in string.digits for letter in digits) else 0
        return (0 if label == "O" else 1, number, label)

    return sorted(set(found), key=place)
