"""What is in a token set: counts, lengths, the share that is learnt, and a few documents as text."""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import HELD_OUT
from phalanx.data import chat, label_rows
from phalanx.data.packing import PackedRows, PackingOptions
from phalanx.data.prepare import list_requests, make_document_format
from phalanx.data.read_chunks import Meter, plan_chunks, read_records
from phalanx.data.record_files import RecordSet, is_record_set
from phalanx.data.source_file import SourceFile
from phalanx.data.sources import LINES, LIST, ROWS, Record, RecordFormat, check_format
from phalanx.data.token_files import MANIFEST, TokenFile
from phalanx.data.tokenizer import Tokenizer, load_tokenizer
from phalanx.data.workers import ABOUT_FILE
from phalanx.storage import files as storage

BLOCK_TOKENS = 8 << 20
BARS = 12  # of the histogram
SAMPLE_TOKENS = 400  # shown of one document at most

TextRun = tuple[str, bool]  # text, and whether it is learnt


class RecordTokens:
    """The tokens of a set of records, as those of a token set; a record is a document."""

    masked = False

    def __init__(self, folder: Path) -> None:
        self._columns = RecordSet(folder)
        self.tokens, self.documents = self._columns.values, self._columns.count
        self.vocab_size = int(self._columns.facts["vocab_size"])
        self.index = self._columns.index["tokens"]

    def slice(self, start: int, stop: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """See TokenFile."""
        return self._columns.slice("tokens", start, stop)

    def mask(self, start: int, stop: int) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """See TokenFile."""
        return np.ones(stop - start, np.bool_)


def open_token_set(folder: Path) -> TokenFile | RecordTokens:
    """A token set or a set of records. Raises DataError for what is neither."""
    return RecordTokens(folder) if is_record_set(folder) else TokenFile(folder)


@dataclass(frozen=True)
class TokenSetStats:
    """One token set. Lengths are of documents in tokens, EOS included; `lengths` has (from, to, documents) for each bar
    of a histogram, `to` included. `used`: how many different ids occur. `filled`: the share of the rows' tokens that
    are a document's, for sets that are packed. `samples`: (number of a document, its runs of text)."""

    name: str
    folder: str
    documents: int
    tokens: int
    mean: float
    median: float
    p95: float
    longest: int
    lengths: list[tuple[int, int, int]]
    vocab_size: int
    used: int
    learnt: int | None
    rows: int | None
    filled: float | None
    too_long: int | None
    samples: list[tuple[int, list[TextRun]]]


def compute_stats(
    name: str, folder: Path, tokenizer: Path | None, form: PackingOptions | None, samples: int
) -> TokenSetStats:
    """Look into a token set. `tokenizer` is needed for samples, `form` for how full its rows are.

    Raises DataError for a set that cannot be read, ConfigError for a tokenizer that cannot be opened.
    """
    file = open_token_set(folder)
    counts = np.zeros(file.vocab_size, np.int64)
    learnt = 0
    for start in range(0, file.tokens, BLOCK_TOKENS):
        stop = min(start + BLOCK_TOKENS, file.tokens)
        found = np.bincount(file.slice(start, stop))
        if len(found) > len(counts):  # damaged: the loader names such a set
            counts = np.pad(counts, (0, len(found) - len(counts)))
        counts[: len(found)] += found
        learnt += int(file.mask(start, stop).sum())
    lengths = np.diff(file.index)
    packs = form is not None and form.packed and isinstance(file, TokenFile)
    packed = PackedRows(file, form, seed=0) if packs else None  # type: ignore[arg-type]
    backend = load_tokenizer(tokenizer) if tokenizer is not None and samples else None
    some: list[int] = (
        np.unique((2 * np.arange(samples) + 1) * file.documents // max(1, 2 * samples)).tolist()
        if file.documents
        else []
    )
    return TokenSetStats(
        name=name,
        folder=str(folder),
        documents=file.documents,
        tokens=file.tokens,
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        median=float(np.median(lengths)) if len(lengths) else 0.0,
        p95=float(np.percentile(lengths, 95)) if len(lengths) else 0.0,
        longest=int(lengths.max(initial=0)),
        lengths=_histogram(lengths),
        vocab_size=file.vocab_size,
        used=int((counts > 0).sum()),
        learnt=learnt if file.masked else None,
        rows=packed.count if packed else None,
        filled=packed.filled if packed else None,
        too_long=packed.too_long if packed else None,
        samples=[(number, list(_runs(file, number, backend))) for number in some] if backend else [],
    )


def _histogram(lengths: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> list[tuple[int, int, int]]:
    """Bars whose widths grow by a factor: lengths of documents lie orders of magnitude apart."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    edges = np.unique(np.geomspace(low, high + 1, BARS + 1).round().astype(np.int64))
    found, _ = np.histogram(lengths, edges)
    bounds = itertools.pairwise(edges.tolist())
    return [(a, b - 1, int(count)) for (a, b), count in zip(bounds, found, strict=True)]


def _runs(file: TokenFile | RecordTokens, number: int, tokenizer: Tokenizer) -> Iterator[TextRun]:
    """A document's beginning as text, cut where learning begins or ends."""
    start, stop = int(file.index[number]), int(file.index[number + 1])
    stop = min(stop, start + SAMPLE_TOKENS)
    tokens, mask = file.slice(start, stop), file.mask(start, stop)
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    for a, b in itertools.pairwise(borders):
        yield tokenizer.backend.decode(tokens[a:b].tolist(), skip_special_tokens=False), bool(mask[a])


def find_token_sets(folder: Path) -> tuple[dict[str, Path], Path | None]:
    """The token sets in a folder by name, and the tokenizer they were made with, where that is known.

    `folder` is a token set or what `phalanx data prepare` names, which may hold two. Raises ConfigError for any other.
    """
    if (folder / MANIFEST).is_file():
        return {folder.name: folder}, _tokenizer_of(folder.parent)
    found = {name: folder / name for name in ("train", HELD_OUT) if (folder / name / MANIFEST).is_file()}
    if not found:
        raise ConfigError(
            f"{folder} is neither a token set nor a recipe (.yaml); name a folder that phalanx data prepare printed"
        )
    return found, _tokenizer_of(folder)


def _tokenizer_of(folder: Path) -> Path | None:
    about = folder / ABOUT_FILE
    if not about.is_file():
        return None
    named = Path(os.path.normpath(folder / json.loads(about.read_text())["tokenizer"]))
    return named if named.is_dir() else None


# --------------------------------------------------------------------------------------------------------- quick check
# Mistakes in data that its first records show, found before a model is made or a text tokenised. It reads the first
# records of the first files, whatever their size, and no tokenizer: seconds matter here, and what these records do not
# show is found when they are encoded.


if TYPE_CHECKING:
    from phalanx.config.schema import Config

CHECKED_FILES, CHECKED_RECORDS = 16, 8  # looked at: files of each source, and records of each
MOST_LIST_BYTES = 16 << 20  # of a JSON list, which is read as a whole


def check_first_records(config: "Config") -> None:
    """Raises DataError for a source that is not there or whose first records cannot be read as the recipe says, and
    ConfigError where conversations have no chat template. A task of the user's own reads its data itself."""
    if config.task.code is not None or config.data.format == "masked":
        return
    timeout_s = config.resilience.storage_timeout_s
    kind = config.task.kind if config.task.kind in label_rows.FORMATS else None
    format = (
        label_rows.make_labelled_format(config.data, kind, timeout_s)
        if kind
        else make_document_format(config.data, timeout_s)
    )
    train, validation = list_requests(config.data, timeout_s)
    for wanted in [*(wanted for wanted, _ in train), *validation.values()]:
        if kind is None:
            check_format(wanted.files, config.data.format)
        for file in wanted.files[:CHECKED_FILES]:
            for record in itertools.islice(_first(file, format, kind), CHECKED_RECORDS):
                if record is not None and format.format in ("chat", "prompt"):
                    chat.check_chat_record(record, format)
    if format.format == "chat":
        _check_template(config)


def _first(file: SourceFile, format: RecordFormat, kind: str | None) -> Iterator[Record | None]:
    """Its first records, or None for each that was read and has nothing else to be looked at."""
    if kind is not None:
        yield from (None for _ in label_rows.read_labelled_records(file, format, Meter()))
    elif file.kind in (LINES, ROWS) or (file.kind == LIST and file.size_bytes <= MOST_LIST_BYTES):
        for chunk in plan_chunks([file], format)[:1]:
            yield from read_records(chunk, format, Meter())


def _check_template(config: "Config") -> None:
    """Raises ConfigError where there is no chat template: none is named, and the tokenizer is here and has none."""
    if chat.load_template(config.data.chat_template) is not None:
        return
    name = config.data.tokenizer if config.data.tokenizer != "auto" else config.model.from_hf or "train"
    if name == "train":
        raise ConfigError(chat.describe_missing_template("a tokenizer that is trained", "chat"))
    folder = Path(name).expanduser()
    if storage.is_url(name) or not folder.is_dir():
        return  # looked at when it is opened
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    beside = any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json"))
    if not beside and not (isinstance(settings, dict) and settings.get("chat_template")):
        raise ConfigError(chat.describe_missing_template(f"the tokenizer in {folder}", "chat"))
