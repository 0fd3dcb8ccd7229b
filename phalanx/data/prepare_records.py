"""Labelled records and masked shards to sets of records, once: cached by what defines the result, as token sets are.

They are small beside running text, so one process makes them, and one that is killed begins its set again.
"""

import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.config.model_spec import default_task
from phalanx.core.errors import ConfigError, DataError
from phalanx.core.run_paths import HELD_OUT, redact_url
from phalanx.data import hdf5_shards, inspect, label_rows
from phalanx.data.prepare import (
    SAMPLE_BYTES,
    TRAIN,
    DatasetRequest,
    PreparedData,
    Progress,
    hash_parts,
    identify_files,
    ignore_progress,
    list_requests,
    make_document_format,
    make_sum_progress,
    obtain_sets,
    open_cache,
    prepare,
    shorten_names,
    translate_disk_errors,
)
from phalanx.data.read_chunks import Meter
from phalanx.data.record_files import RecordSet, RecordSetWriter, copy_records
from phalanx.data.source_file import SourceFile
from phalanx.data.sources import SHARDS, TALKS, TOKENS, RecordFormat, is_held_out, text_digest
from phalanx.data.token_files import token_dtype
from phalanx.data.tokenizer import Tokenizer, check_vocab, load_tokenizer, tokenizer_hash, train_tokenizer
from phalanx.data.workers import Cache, prune, write_description
from phalanx.storage import files as storage
from phalanx.storage import local_copies

if TYPE_CHECKING:
    from phalanx.config.model import DataSection
    from phalanx.config.schema import Config

VERSION = 1
GROUP_RECORDS = 1024  # records handed to the tokenizer at once


@dataclass(frozen=True)
class RecordSetJob:
    """One set to be made. `told(count)` is told the bytes of source that are done."""

    request: DatasetRequest
    kind: str
    format: RecordFormat
    tokenizer: Tokenizer
    tokenizer_name: str
    on_bytes: Callable[[int], None]


def prepare_for(config: "Config", progress: Progress | None = None) -> PreparedData:
    """The data that a recipe's task needs, made if need be; `data.tokenizer` is not "auto"."""
    inspect.check_first_records(config)
    timeout_s = config.resilience.storage_timeout_s
    kind: str = default_task(config)[0] if config.task.kind == "auto" else config.task.kind
    kind = "shards" if config.data.format == "masked" else kind
    if kind in (*label_rows.FORMATS, "shards"):
        return prepare_records(config.data, kind, progress, storage_timeout_s=timeout_s)
    return prepare(config.data, progress, storage_timeout_s=timeout_s, pieces=kind == "masked")


def prepare_records(
    data: "DataSection",
    kind: str,
    progress: Progress | None = None,
    lock_timeout_s: float = local_copies.LOCK_TIMEOUT_S,
    storage_timeout_s: float = storage.TIMEOUT_S,
) -> PreparedData:
    """Return the sets of records that `data` asks for, preparing those that the cache does not have.

    `kind` is "tag", "classify" or "shards". `data.tokenizer` is a folder, or "train" (a WordPiece on the words and
    texts). The rest is as of `prepare`. Raises DataError for sources that are missing, empty or malformed (file, place
    and key named), ConfigError for a tokenizer that cannot be, StorageError for a store that fails.
    """
    assert data.tokenizer != "auto"
    progress = progress or ignore_progress
    format = (
        make_document_format(data, storage_timeout_s)
        if kind == "shards"
        else label_rows.make_labelled_format(data, kind, storage_timeout_s)
    )
    train, validation = list_requests(data, storage_timeout_s)
    everything = [*(wanted for wanted, _ in train), *validation.values()]
    for wanted in everything:
        _check_kinds(wanted, kind)
    cache = open_cache(data, lock_timeout_s, storage_timeout_s)
    with translate_disk_errors(data):
        prune(cache.folder)
        folder, name = _tokenizer(data, kind, train, format, cache, progress)
        tokenizer = load_tokenizer(folder)
        if tokenizer.specials is None:
            raise ConfigError(
                f"the tokenizer in {folder} lacks one of the tokens [PAD], [UNK], [CLS], [SEP] and [MASK]; set "
                "data.tokenizer to that of a BERT, or to train"
            )
        parts = [VERSION, kind, tokenizer_hash(folder), format.columns() if kind != "shards" else []]
        keys = {
            id(one): f"records-{hash_parts([*parts, identify_files(one.files), one.held_out])}" for one in everything
        }
        told = make_sum_progress("records", progress, everything, keys, cache)

        def build(wanted: DatasetRequest, partial: Path, out: Path) -> None:
            _build(RecordSetJob(wanted, kind, format, tokenizer, name, told), out)

        joined = functools.partial(_join_held_out, tokenizer_name=name, cache=cache)
        sets = obtain_sets(train, validation, keys, cache, build, joined)
    return PreparedData(folder, tokenizer.vocab_size, tokenizer.eos_id, *sets)


def _check_kinds(wanted: DatasetRequest, kind: str) -> None:
    for file in wanted.files:
        if (file.kind == SHARDS) != (kind == "shards") or file.kind in (TALKS, TOKENS):
            need = "shards of masked sequences" if kind == "shards" else "labelled records"
            raise DataError(f"{redact_url(file.path)} is {file.kind}, but {need} are asked for; name other files")


def _tokenizer(
    data: "DataSection",
    kind: str,
    train: list[tuple[DatasetRequest, float]],
    format: RecordFormat,
    cache: Cache,
    progress: Progress,
) -> tuple[Path, str]:
    """The folder of the tokenizer, and its name as a result beside it would write it."""
    if data.tokenizer != TRAIN:
        folder = os.path.abspath(os.path.expanduser(data.tokenizer))
        return Path(folder), folder
    if kind == "shards":
        raise ConfigError(
            "data.source holds token ids, so no tokenizer can be trained on it; set data.tokenizer to the folder of "
            "the one that made them"
        )
    check_vocab(data.tokenizer_vocab)
    sources = [identify_files(wanted.files) for wanted, _ in train]
    parts = [VERSION, version("tokenizers"), data.tokenizer_vocab, data.held_out, SAMPLE_BYTES, format.columns()]
    name = f"tokenizer-{hash_parts([*parts, sources])}"

    def make(partial: Path, out: Path) -> None:
        trained = partial / "tokenizer"
        if not trained.exists():
            train_tokenizer(_texts([w for w, _ in train], format, progress), data.tokenizer_vocab, trained, pieces=True)
        shutil.copytree(trained, out, dirs_exist_ok=True)
        write_description(out, {"trained_on": [shorten_names(wanted.files) for wanted, _ in train]})

    return cache.get_or_make(name, make), f"../{name}"


def _texts(train: list[DatasetRequest], format: RecordFormat, progress: Progress) -> Iterator[str]:
    """Words and texts of training records without their labels, all of them or a sample chosen by hash."""
    total, done = sum(wanted.total_bytes for wanted in train), 0
    share = min(1.0, SAMPLE_BYTES / max(1, total))
    for wanted in train:
        for file in wanted.files:
            for record in label_rows.read_labelled_records(file, format, Meter()):
                digest = text_digest(record.digest_text())
                chosen = is_held_out(hashlib.sha256(digest).digest(), share)
                if chosen and not is_held_out(digest, wanted.held_out):
                    yield " ".join(record.texts)
            done += file.size_bytes
            progress("tokenizer", done, total)


# ------------------------------------------------------------------------------------------------------------- one set


def _build(work: RecordSetJob, out: Path) -> None:
    specials = work.tokenizer.specials
    assert specials is not None
    wide = token_dtype(work.tokenizer.vocab_size).str
    columns = {
        "tag": {"tokens": wide, "labels": "<i4"},
        "classify": {"tokens": wide, **({"pair": wide} if work.kind == "classify" else {}), "labels": "<i4"},
        "shards": {"tokens": wide, "segments": "<u1", "places": "<u2", "labels": wide, "follows": "<u1"},
    }[work.kind]
    facts = {"kind": work.kind, "vocab_size": work.tokenizer.vocab_size, "specials": specials.to_json()}
    sides = (TRAIN, HELD_OUT) if work.request.held_out < 1.0 else (HELD_OUT,)
    writers = {side: RecordSetWriter(out / side, columns, facts) for side in sides}
    if work.kind == "shards":
        for file in work.request.files:
            _convert(file, work, writers)
    else:
        labels: dict[str, int] = {}
        for file in work.request.files:
            _encode(file, work, writers, labels)
        for writer in writers.values():
            writer.facts["labels"] = list(labels)
    if not writers[sides[0]].count:
        what = "train" if sides[0] == TRAIN else "evaluate"
        first, kept = redact_url(work.request.files[0].path), writers[HELD_OUT].count
        raise DataError(
            f"{work.request.key} ({first}) leaves no record to {what} on ({kept} held out); add records"
            f"{' or lower data.held_out' if sides[0] == TRAIN else ''}"
        )
    for writer in writers.values():
        writer.finish()
    write_description(
        out,
        {
            "sources": shorten_names(work.request.files),
            "tokenizer": work.tokenizer_name,
            "kind": work.kind,
            "held_out": work.request.held_out,
        },
    )


def _encode(file: SourceFile, work: RecordSetJob, writers: dict[str, RecordSetWriter], labels: dict[str, int]) -> None:
    encode = label_rows.encode_tags if work.kind == "tag" else label_rows.encode_classes
    specials = work.tokenizer.specials
    assert specials is not None
    meter, told = Meter(), 0
    group: list[label_rows.LabelledRecord] = []

    def write() -> None:
        nonlocal told
        for one, record in zip(group, encode(work.tokenizer.backend, specials.unk, group, labels), strict=True):
            digest = text_digest(one.digest_text())
            side = HELD_OUT if TRAIN not in writers or is_held_out(digest, work.request.held_out) else TRAIN
            writers[side].append(record)
        work.on_bytes(max(0, min(meter.bytes, file.size_bytes) - told))
        told = max(told, min(meter.bytes, file.size_bytes))
        group.clear()

    for record in label_rows.read_labelled_records(file, work.format, meter):
        if any(record.texts):
            group.append(record)
        if len(group) == GROUP_RECORDS:
            write()
    write()
    work.on_bytes(file.size_bytes - told)


def _convert(file: SourceFile, work: RecordSetJob, writers: dict[str, RecordSetWriter]) -> None:
    told = 0
    for block, part in hdf5_shards.read_blocks(file.path, work.tokenizer.vocab_size):
        digests = (hashlib.sha256(row.astype("<i4").tobytes()).digest() for row in block.tokens)
        if TRAIN in writers:
            out = np.fromiter((is_held_out(digest, work.request.held_out) for digest in digests), np.bool_)
            writers[TRAIN].extend(block.columns(~out))
        else:
            out = np.ones(len(block.tokens), np.bool_)
        writers[HELD_OUT].extend(block.columns(out))
        work.on_bytes(int(file.size_bytes * part) - told)
        told = int(file.size_bytes * part)


def _join_held_out(sides: list[Path], keys: list[str], tokenizer_name: str, cache: Cache) -> Path:
    """What all sources of a mixture keep back, as one set."""

    def make(_: Path, out: Path) -> None:
        opened = [RecordSet(side) for side in sides]
        first = opened[0]
        names: dict[str, int] = {}
        facts: dict[str, Any] = dict(first.facts)
        writer = RecordSetWriter(out / HELD_OUT, first.types, facts)
        for side in opened:
            numbers = [names.setdefault(label, len(names)) for label in side.facts.get("labels", [])]
            copy_records(writer, side, {"labels": np.array([*numbers, label_rows.UNTAGGED])} if numbers else {})
        if names:
            writer.facts["labels"] = list(names)
        writer.finish()
        write_description(out, {"sources": [side.parent.name for side in sides], "tokenizer": tokenizer_name})

    return cache.get_or_make(f"records-{hash_parts([VERSION, 'joined', keys])}", make) / HELD_OUT
