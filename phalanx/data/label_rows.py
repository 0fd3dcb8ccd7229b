"""Sentences with a tag for each word, and texts with a label: how they are read, and the rows that are made of them.

Tagged sentences come as CoNLL files (a word a line, its tag in the last column, an empty line after each sentence) or
as records with a list of words and a list of tags; labelled texts as CSV files with a header, or as records.
"""

import csv
import json
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import ConfigError, DataError
from phalanx.core.run_paths import redact_url
from phalanx.data.read_chunks import Meter, plan_chunks, read_label_names, read_records, read_text_lines
from phalanx.data.record_files import RecordSet
from phalanx.data.source_file import SourceFile
from phalanx.data.sources import LINES, TEXT, RecordFormat, file_suffix
from phalanx.data.wordpiece import SpecialTokens

if TYPE_CHECKING:
    from phalanx.config.model import DataSection

UNTAGGED = -1  # in the column of labels: no word begins with this piece
DOCUMENT = "-DOCSTART-"
SEPARATORS = {".csv": ",", ".tsv": "\t"}
FORMATS = {"tag": "tags", "classify": "classes"}  # task.kind -> how its records are read


@dataclass(frozen=True)
class LabelledRecord:
    """One record: the words of a sentence and their tags, or one or two texts and one label."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    where: str

    def digest_text(self) -> str:
        """What decides on which side it falls."""
        return json.dumps([self.texts, self.labels], ensure_ascii=False)


@dataclass(frozen=True)
class LabelledSample:
    """A row as the model is given it, without padding: `tokens`, `segments` (n,) int64; `labels` int64 (n,) with -100
    where no word begins, or (1,) of the whole; its place in the run."""

    tokens: NDArray[np.int64]
    segments: NDArray[np.int64]
    labels: NDArray[np.int64]
    position: int


# ------------------------------------------------------------------------------------------------------------- reading


def make_labelled_format(data: "DataSection", kind: str, storage_timeout_s: float) -> RecordFormat:
    """How the labelled records of a recipe are read, for the task `kind`."""
    return RecordFormat(
        FORMATS[kind],
        text_key=data.text_key,
        storage_timeout_s=storage_timeout_s,
        tokens_key=data.tokens_key,
        tags_key=data.tags_key,
        label_key=data.label_key,
        pair_key=data.pair_key,
    )


def read_labelled_records(file: SourceFile, format: RecordFormat, meter: Meter) -> Iterator[LabelledRecord]:
    """The records of a file. Raises DataError naming file, place and key."""
    if file.kind == TEXT and format.format == "tags":
        yield from _read_conll(file, format, meter)
        return
    if file.kind == TEXT:
        yield from _read_table(file, format, meter)
        return
    make = _parse_tagged if format.format == "tags" else _parse_classified
    names = read_label_names(file, format.tags_key if format.format == "tags" else format.label_key, format)
    line = 1
    for chunk in plan_chunks([file], format):
        for record in read_records(chunk, format, Meter(), line):
            assert record.fields is not None
            yield _require_text(make(record.fields, names, format, record.where))
            line += file.kind == LINES  # each of them is a record
        meter.bytes += chunk.size_bytes


def _read_conll(file: SourceFile, format: RecordFormat, meter: Meter) -> Iterator[LabelledRecord]:
    name = redact_url(file.path)
    words: list[str] = []
    tags: list[str] = []
    columns, begun = 0, 1
    for number, line in read_text_lines(file.path, format, meter):
        parts = line.split()
        if not parts or parts[0] == DOCUMENT:
            if words:
                yield LabelledRecord(tuple(words), tuple(tags), f"{name}, line {begun}")
            words, tags = [], []
            continue
        if len(parts) < 2:
            raise DataError(
                f"{name}, line {number} has a word and no tag; write a word a line with its tag in the last column, "
                "and an empty line after each sentence"
            )
        columns = columns or len(parts)
        if len(parts) != columns:
            raise DataError(
                f"{name}, line {number} has {len(parts)} columns where the lines before have {columns}; correct it"
            )
        begun = begun if words else number
        words.append(parts[0])
        tags.append(parts[-1])
    if words:
        yield LabelledRecord(tuple(words), tuple(tags), f"{name}, line {begun}")


def _read_table(file: SourceFile, format: RecordFormat, meter: Meter) -> Iterator[LabelledRecord]:
    name = redact_url(file.path)
    separator = SEPARATORS.get(file_suffix(file.path))
    if separator is None:
        raise DataError(
            f"{name} is running text, but task.kind classify needs a label for each text (.csv, .tsv, .jsonl, .json, "
            f".parquet); name files of these"
        )
    table = csv.DictReader(
        (line for _, line in read_text_lines(file.path, format, meter)), delimiter=separator, strict=True
    )
    try:
        header = table.fieldnames or []
        for key in format.columns():
            if key not in header:
                raise DataError(
                    f"{name} has no column {key!r} (it has: {', '.join(header[:8])}); set "
                    f"data.{format.option_name(key)}_key to the column that holds the {format.option_name(key)}"
                )
        for row in table:
            where = f"{name}, line {table.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{where} has not the {len(header)} columns of the first line; correct the line")
            yield _parse_classified(row, None, format, where)
    except csv.Error as error:
        raise DataError(f"{name}, line {table.line_num} is no line of a table ({error}); correct the line") from None


def _parse_tagged(fields: dict[str, Any], names: list[str] | None, format: RecordFormat, where: str) -> LabelledRecord:
    words, tags = fields[format.tokens_key], fields[format.tags_key]
    for key, value in ((format.tokens_key, words), (format.tags_key, tags)):
        if not isinstance(value, list):
            kind = type(value).__name__
            raise DataError(
                f"{where} has a {kind} under {key!r} instead of a list; "
                f"set data.{format.option_name(key)}_key to another"
            )
    if len(words) != len(tags):
        raise DataError(
            f"{where} has {len(words)} words under {format.tokens_key!r} and {len(tags)} tags under "
            f"{format.tags_key!r}; give each word one"
        )
    if not all(isinstance(word, str) for word in words):
        raise DataError(f"{where} has a word under {format.tokens_key!r} that is no text; correct it")
    return LabelledRecord(tuple(words), tuple(_label(tag, names, format.tags_key, where) for tag in tags), where)


def _parse_classified(
    fields: dict[str, Any], names: list[str] | None, format: RecordFormat, where: str
) -> LabelledRecord:
    keys = [format.text_key, *([format.pair_key] if format.pair_key else [])]
    for key in keys:
        if not isinstance(fields[key], str):
            kind = type(fields[key]).__name__
            raise DataError(
                f"{where} has a {kind} under {key!r} instead of text; "
                f"set data.{format.option_name(key)}_key to another key"
            )
    label = _label(fields[format.label_key], names, format.label_key, where)
    return LabelledRecord(tuple(fields[key] for key in keys), (label,), where)


def _require_text(record: LabelledRecord) -> LabelledRecord:
    try:
        record.digest_text().encode()
    except UnicodeEncodeError:  # JSON can spell what is no character
        raise DataError(f"{record.where} holds half of a surrogate pair, not text; correct or delete it") from None
    return record


def _label(value: Any, names: list[str] | None, key: str, where: str) -> str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if names is None:
            return str(value)
        if 0 <= value < len(names):
            return names[value]
        raise DataError(f"{where} has the number {value} under {key!r}, but there are {len(names)} labels; correct it")
    raise DataError(
        f"{where} has {json.dumps(value, default=str)} under {key!r}, which is no label; give a word or a whole number"
    )


# ------------------------------------------------------------------------------------------------------------ encoding


def encode_tags(
    backend: Any, unk: int, batch: Sequence[LabelledRecord], ids: dict[str, int]
) -> list[dict[str, list[int]]]:
    """Columns of tagged sentences: `tokens`, and in `labels` the number of a word's tag at its first piece.

    A word of which the tokenizer leaves nothing becomes [UNK]. New tags get the next number in `ids`.
    """
    encodings = backend.encode_batch([list(one.texts) for one in batch], is_pretokenized=True, add_special_tokens=False)
    found = []
    for one, encoding in zip(batch, encodings, strict=True):
        pieces: list[list[int]] = [[] for _ in one.texts]
        for word, id in zip(encoding.word_ids, encoding.ids, strict=True):
            pieces[word].append(id)
        tokens: list[int] = []
        labels: list[int] = []
        for tag, parts in zip(one.labels, pieces, strict=True):
            parts = parts or [unk]
            tokens += parts
            labels += [ids.setdefault(tag, len(ids))] + [UNTAGGED] * (len(parts) - 1)
        found.append({"tokens": tokens, "labels": labels})
    return found


def encode_classes(
    backend: Any, unk: int, batch: Sequence[LabelledRecord], ids: dict[str, int]
) -> list[dict[str, list[int]]]:
    """Columns of labelled texts: `tokens` of the first, `pair` of the second if any, and one number in `labels`."""
    texts = [text for one in batch for text in one.texts]
    encodings = iter(backend.encode_batch(texts, add_special_tokens=False))
    found = []
    for one in batch:
        parts = [list(next(encodings).ids) for _ in one.texts]
        second = parts[1] if len(parts) > 1 else []
        label = ids.setdefault(one.labels[0], len(ids))
        found.append({"tokens": parts[0], "pair": second, "labels": [label]})
    return found


# ---------------------------------------------------------------------------------------------------------------- rows


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

    def __init__(self, columns: RecordSet, form: LabelRowOptions) -> None:
        self.file, self._form = columns, form
        self._specials = SpecialTokens.from_json(columns.facts["specials"])
        numbers = {label: number for number, label in enumerate(form.labels)}
        unknown = [label for label in columns.facts["labels"] if label not in numbers]
        if unknown:
            raise ConfigError(
                f"the data in {columns.folder} has the label {unknown[0]!r}, which is none of task.labels "
                f"({', '.join(form.labels[:8])}); add it there, or set task.labels=auto"
            )
        # The last entry is what UNTAGGED, as an index, finds.
        self._numbers = np.array([*(numbers[label] for label in columns.facts["labels"]), -100], np.int64)
        self._pairs = "pair" in columns.names
        lengths = columns.lengths("tokens") + 2
        if self._pairs:
            second = columns.lengths("pair")
            lengths = lengths + second + (second > 0)
        fits = lengths <= form.seq_len
        self.too_long = int(len(fits) - fits.sum())
        self._rows = np.flatnonzero(fits) if form.drop_long else np.arange(columns.count)
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
