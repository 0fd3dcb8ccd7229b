"""Inspecting a token set: counts, lengths, the share of trained tokens, and a few documents as text."""

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
from phalanx.data import chat
from phalanx.data.cache import ABOUT_FILE
from phalanx.data.packing import PackedRows, PackingOptions
from phalanx.data.read_chunks import Meter, plan_chunks, read_records
from phalanx.data.record_files import MANIFEST, RecordFile, TokenFile
from phalanx.data.records import FileKind, Record, RecordFormat, SourceFile, make_format, record_digest
from phalanx.data.sources import check_format, list_requests
from phalanx.data.tokenizer import Tokenizer, load_tokenizer
from phalanx.storage.local_copies import is_remote

BLOCK_TOKENS = 8 << 20
BARS = 12  # of the histogram
SAMPLE_TOKENS = 400  # shown of one document at most

TextRun = tuple[str, bool]  # text, and whether it is learnt


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
    """Inspect a token set. `tokenizer` is needed for samples, `form` for how full its rows are.

    Raises DataError for a set that cannot be read, ConfigError for a tokenizer that cannot be opened.
    """
    file = RecordFile(folder)
    counts = np.zeros(file.facts["vocab_size"], np.int64)
    learnt = 0
    for start in range(0, file.values, BLOCK_TOKENS):
        stop = min(start + BLOCK_TOKENS, file.values)
        found = np.bincount(file.slice(start, stop))
        if len(found) > len(counts):  # damaged: the loader names such a set
            counts = np.pad(counts, (0, len(found) - len(counts)))
        counts[: len(found)] += found
        learnt += int(file.mask(start, stop).sum())
    lengths = np.diff(file.index)
    packed = PackedRows(TokenFile(folder), form, seed=0) if form is not None and form.packed else None
    backend = load_tokenizer(tokenizer) if tokenizer is not None and samples else None
    some: list[int] = (
        np.unique((2 * np.arange(samples) + 1) * file.count // max(1, 2 * samples)).tolist() if file.count else []
    )
    return TokenSetStats(
        name=name,
        folder=str(folder),
        documents=file.count,
        tokens=file.values,
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        median=float(np.median(lengths)) if len(lengths) else 0.0,
        p95=float(np.percentile(lengths, 95)) if len(lengths) else 0.0,
        longest=int(lengths.max(initial=0)),
        lengths=_histogram(lengths),
        vocab_size=file.facts["vocab_size"],
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


def _runs(file: RecordFile, number: int, tokenizer: Tokenizer) -> Iterator[TextRun]:
    """The beginning of a document as text, cut where the loss mask changes."""
    start, stop = int(file.index[number]), int(file.index[number + 1])
    stop = min(stop, start + SAMPLE_TOKENS)
    tokens, mask = file.slice(start, stop), file.mask(start, stop)
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    for a, b in itertools.pairwise(borders):
        yield tokenizer.backend.decode(tokens[a:b].tolist(), skip_special_tokens=False), bool(mask[a])


def find_token_sets(folder: Path) -> tuple[dict[str, Path], Path | None]:
    """Find the token sets in a folder by name, and their tokenizer, if known.

    `folder` is a token set or what `phalanx data prepare` names, which may hold two. Raises ConfigError for any other.
    """
    if (folder / MANIFEST).is_file():
        return {folder.name: folder}, _tokenizer_of(folder.parent)
    found = {name: folder / name for name in ("train", HELD_OUT) if (folder / name / MANIFEST).is_file()}
    if not found:
        raise ConfigError(
            f"{folder} is neither a token set nor a recipe (.yaml); give a folder printed by phalanx data prepare"
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

CHECKED_FILES, CHECKED_RECORDS = 16, 8  # checked: files of each source, and records of each
MOST_LIST_BYTES = 16 << 20  # of a JSON list, which is read as a whole


def check_first_records(config: "Config") -> None:
    """Raises DataError for a source that is not there or whose first records cannot be read as the recipe says, and
    ConfigError where conversations have no chat template. A custom task reads its data itself."""
    if config.task.code is not None or config.data.format == "masked":
        return
    format = make_format(config.data, config.task.kind, config.resilience.storage_timeout_s)
    train, validation = list_requests(config.data, config.resilience.storage_timeout_s)
    for wanted in [*(wanted for wanted, _ in train), *validation.values()]:
        check_format(wanted.files, format.format)
        for file in wanted.files[:CHECKED_FILES]:
            for record in itertools.islice(_first_records(file, format), CHECKED_RECORDS):
                if format.format in ("chat", "prompt"):
                    chat.check_chat_record(record, format)
                else:
                    record_digest(record, format.columns())
    if format.format == "chat":
        _check_template(config)


def _first_records(file: SourceFile, format: RecordFormat) -> Iterator[Record]:
    quick = file.kind in (FileKind.LINES, FileKind.ROWS)
    if quick or format.labelled or (file.kind == FileKind.LIST and file.size_bytes <= MOST_LIST_BYTES):
        for chunk in plan_chunks([file], format)[:1]:
            yield from read_records(chunk, format, Meter())


def _check_template(config: "Config") -> None:
    """Raises ConfigError where there is no chat template: none is named, and the tokenizer is here and has none."""
    if chat.load_template(config.data.chat_template) is not None:
        return
    name = config.data.tokenizer if config.data.tokenizer != "auto" else config.model.from_hf or "train"
    if name == "train":
        raise ConfigError(chat.describe_missing_template("a tokenizer to be trained", "chat"))
    folder = Path(name).expanduser()
    if is_remote(name) or not folder.is_dir():
        return  # checked when it is opened
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    beside = any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json"))
    if not beside and not (isinstance(settings, dict) and settings.get("chat_template")):
        raise ConfigError(chat.describe_missing_template(f"the tokenizer in {folder}", "chat"))
