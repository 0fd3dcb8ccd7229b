"""Preparing sources as record files, once: cached by all that defines the result, resumed where a killed run stopped.

Each source of a mixture and each validation set is a separate result, so that adding one prepares only that. Its chunks
are encoded in parallel into pieces in `<cache>/<key>.partial/` and then joined in order; the same for running text,
conversations, labelled records, token ids and masked shards.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.core.errors import ConfigError, DataError, StorageError
from phalanx.core.run_paths import HELD_OUT, redact_url
from phalanx.data import stdlib_chat, workers
from phalanx.data.cache import Cache, prune, write_description
from phalanx.data.encode import (
    SPLITS,
    UNTAGGED,
    EncodeTask,
    column_types,
    encode_chunk,
    list_pieces,
    make_encoder,
    read_piece,
)
from phalanx.data.inspect import check_first_records
from phalanx.data.read_chunks import plan_chunks
from phalanx.data.record_files import RecordFile, RecordFileWriter, copy_records, renumber
from phalanx.data.records import FileKind, RecordFormat, SourceFile, make_format
from phalanx.data.sources import DatasetRequest, check_format, list_requests
from phalanx.data.tokenizer import (
    ENCODE_CHARS,
    check_vocab,
    list_sample_sizes,
    load_tokenizer,
    sample_for_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from phalanx.storage import files as storage
from phalanx.storage import local_copies

if TYPE_CHECKING:
    from phalanx.config.model import DataSection
    from phalanx.config.schema import Config

TRAIN = "train"  # the value of `tokenizer` that asks for a new one, and the side of a set that is trained on
KEY_VERSION = 1  # raised with every change of what a result of the same name holds
READER_VERSION = 2  # raised with every change of how conversations are read
SMALL_BYTES = 2 << 20  # less than that is encoded before other processes have started
RECORD_KINDS = ("tag", "classify", "shards")  # of tasks: those whose sets have more columns than tokens

Progress = Callable[[str, int, int], None]
Mixture = list[tuple[DatasetRequest, float]]


@dataclass(frozen=True)
class PreparedData:
    """Where prepared data lies, all of it made with one tokenizer.

    `train`: folders for RecordFile with their weights in the mixture, one of weight 1.0 where there is none.
    `held_out`: the sets to evaluate on by name; "held_out" are the held-out training documents, and may be empty.
    """

    tokenizer_folder: Path
    vocab_size: int
    eos_id: int
    train: list[tuple[Path, float]]
    held_out: dict[str, Path]


@dataclass(frozen=True)
class SetBuilder:
    """Settings shared by all sets of one preparation. `on_bytes(count)` is told the bytes of source that are done."""

    cache: Cache
    kind: str
    format: RecordFormat
    tokenizer_folder: Path
    tokenizer_name: str
    processes: int
    progress: Progress
    on_bytes: Callable[[int], None]


def prepare_for(config: "Config", progress: Progress | None = None) -> PreparedData:
    """The data that a recipe's task needs, made if need be; `data.tokenizer` is not "auto"."""
    from phalanx.config.model_spec import default_task

    check_first_records(config)
    kind: str = default_task(config)[0] if config.task.kind == "auto" else config.task.kind
    kind = "shards" if config.data.format == "masked" else kind
    return prepare(config.data, progress, storage_timeout_s=config.resilience.storage_timeout_s, kind=kind)


def prepare(
    data: "DataSection",
    progress: Progress | None = None,
    lock_timeout_s: float = local_copies.LOCK_TIMEOUT_S,
    storage_timeout_s: float = storage.TIMEOUT_S,
    kind: str = "text",
) -> PreparedData:
    """Return the sets that `data` asks for, preparing those that the cache does not have.

    `kind` is that of the task: "masked", one of RECORD_KINDS, or any other for text and conversations. `data.tokenizer`
    is "train" (a byte-level BPE of `tokenizer_vocab` entries from training documents only; for "masked", "tag" and
    "classify" a WordPiece) or a local folder. `progress(phase, done, total)` is called with "tokenizer", "tokens" or
    "records" (bytes of source) and "files". Of several processes one works, the others wait up to `lock_timeout_s`.

    Raises DataError for sources that are missing, empty or malformed (file, place and key named) and for a cache that
    cannot be written; ConfigError for a tokenizer, template or fraction that cannot be; StorageError for a store that
    fails.
    """
    assert data.tokenizer != "auto"
    if not 0.0 <= data.held_out < 1.0:
        raise ConfigError(
            f"data.held_out is {data.held_out}, which leaves nothing to train on; set it to 0 or more and below 1"
        )
    progress = progress or (lambda phase, done, total: None)
    format = make_format(data, kind, storage_timeout_s)
    train, validation = list_requests(data, storage_timeout_s)
    requests = [*(request for request, _ in train), *validation.values()]
    for request in requests:
        check_format(request.files, format.format)
    url = data.cache if storage.is_url(data.cache) else None
    cache = Cache(storage.local_cache(data.cache).absolute(), url, lock_timeout_s, storage_timeout_s)
    processes = data.workers if data.workers != "auto" else len(os.sched_getaffinity(0))
    with _translate_disk_errors(data):
        prune(cache.folder)
        folder, name = _obtain_tokenizer(data, kind, train, format, cache, progress)
        tokenizer = tokenizer_hash(folder)
        keyed = [(request, _key_of(request, kind, tokenizer, format)) for request in requests]
        lacking = sum(request.total_bytes for request, key in keyed if not cache.has(key))
        told = _sum_progress("records" if kind in RECORD_KINDS else "tokens", progress, lacking)
        builder = SetBuilder(cache, kind, format, folder, name, processes, progress, told)
        made = [cache.get_or_make(key, functools.partial(_build, builder, request, key)) for request, key in keyed]
        sides = [folder / HELD_OUT for folder in made]
        kept = sides[: len(train)]
        held_out = kept[0] if len(kept) == 1 else _join_held_out(builder, kept, [key for _, key in keyed[: len(kept)]])
    trained = [(folder / TRAIN, weight) for folder, (_, weight) in zip(made, train, strict=False)]
    evaluated = {HELD_OUT: held_out} | dict(zip(validation, sides[len(train) :], strict=True))
    facts, *_ = [RecordFile(folder).facts for folder in [*(folder for folder, _ in trained), *evaluated.values()]]
    eos_id = facts["eos_id"] if "eos_id" in facts else load_tokenizer(folder).eos_id
    return PreparedData(folder, facts["vocab_size"], eos_id, trained, evaluated)


@contextlib.contextmanager
def _translate_disk_errors(data: "DataSection") -> Iterator[None]:
    """Convert disk errors into a DataError that names the cache; a store's error is kept."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise DataError(
            f"the data cache {redact_url(data.cache)} cannot be written ({error.strerror or error}); free space "
            "there or choose another folder"
        ) from error


def _key_of(request: DatasetRequest, kind: str, tokenizer: str, format: RecordFormat) -> str:
    """The name of a result: a hash of everything that could change a token of it."""
    files = _identify_files(request.files)
    if kind in RECORD_KINDS:
        return _name_key(kind, [KEY_VERSION, kind, tokenizer, format.columns(), files, request.held_out])
    return _name_key(kind, [KEY_VERSION, files, tokenizer, _reading(format), request.held_out])


def _name_key(kind: str, parts: list[Any]) -> str:
    prefix = "records-" if kind in RECORD_KINDS else ""
    return prefix + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _identify_files(files: list[SourceFile]) -> list[Any]:
    return [
        [file.path, file.kind, file.size_bytes, file.version, file.lenient]
        + ([stdlib_chat.VERSION] if file.kind == FileKind.TALKS else [])
        for file in files
    ]


def _reading(format: RecordFormat) -> list[Any]:
    if format.format not in ("chat", "prompt"):
        return [format.format, *format.columns()]
    from phalanx.data.chat import load_template

    return [format.format, *format.columns(), format.loss_on, load_template(format.chat_template), READER_VERSION]


def _obtain_tokenizer(
    data: "DataSection", kind: str, train: Mixture, format: RecordFormat, cache: Cache, progress: Progress
) -> tuple[Path, str]:
    """The folder of the tokenizer, and its name as a result beside it would write it."""
    if data.tokenizer != TRAIN:
        folder = os.path.abspath(os.path.expanduser(data.tokenizer))
        return Path(folder), folder
    check_vocab(data.tokenizer_vocab)
    for request, _ in train:
        if ids := next((file for file in request.files if file.kind in (FileKind.TOKENS, FileKind.SHARDS)), None):
            raise ConfigError(
                f"{redact_url(ids.path)} holds token ids, so no tokenizer can be trained on it; set data.tokenizer "
                "to the folder of the tokenizer that made them"
            )
    pieces = kind == "masked" or kind in RECORD_KINDS
    parts = [version("tokenizers"), data.tokenizer_vocab, data.held_out, list_sample_sizes()]
    total = sum(weight for _, weight in train)
    sources = [[_identify_files(request.files), weight / total] for request, weight in train]
    name = f"tokenizer-{_name_key('', [*parts, *(['pieces'] if pieces else []), sources, _reading(format)])}"

    def make(partial: Path, out: Path) -> None:
        trained = partial / "tokenizer"
        if not trained.exists():
            sets = [(request.files, weight) for request, weight in train]
            texts = sample_for_tokenizer(sets, format, data.held_out, progress)
            train_tokenizer(texts, data.tokenizer_vocab, trained, pieces)
        shutil.copytree(trained, out, dirs_exist_ok=True)
        write_description(out, {"trained_on": [_shorten_names(request.files) for request, _ in train]})

    return cache.get_or_make(name, make), f"../{name}"


# -------------------------------------------------------------------------------------------------------------- one set


def _build(builder: SetBuilder, request: DatasetRequest, key: str, partial: Path, out: Path) -> None:
    tokenizer = load_tokenizer(builder.tokenizer_folder)
    facts: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "key": key}
    if builder.kind in RECORD_KINDS:
        facts = {"kind": builder.kind, "vocab_size": tokenizer.vocab_size}
        if tokenizer.specials is None:
            raise ConfigError(
                f"the tokenizer in {builder.tokenizer_folder} lacks one of the tokens [PAD], [UNK], [CLS], [SEP] and "
                "[MASK]; set data.tokenizer to a BERT tokenizer, or to train"
            )
    facts |= {} if tokenizer.specials is None else {"specials": tokenizer.specials.to_json()}
    _merge(builder, request, _encode(builder, request, partial), facts, out)
    about = {"tokenizer": builder.tokenizer_name, "format": asdict(builder.format), "held_out": request.held_out}
    write_description(out, {"sources": _shorten_names(request.files), **about})


def _shorten_names(files: list[SourceFile], most: int = 20) -> list[str]:
    more = [f"and {len(files) - most} more"] if len(files) > most else []
    return [*(redact_url(file.path) for file in files[:most]), *more]


def _encode(builder: SetBuilder, request: DatasetRequest, partial: Path) -> list[Path]:
    """Encode the chunks that are not done yet; returns the pieces of all in order."""
    places = str(partial), str(builder.tokenizer_folder)
    tasks = [
        EncodeTask(f"chunk-{number:06d}", *places, builder.format, request.held_out, chunk)
        for number, chunk in enumerate(plan_chunks(request.files, builder.format))
    ]
    pending = [task for task in tasks if list_pieces(task) is None]
    pending_bytes = sum(task.chunk.size_bytes for task in pending)
    builder.on_bytes(request.total_bytes - pending_bytes)
    if len(pending) > 1 and pending_bytes > SMALL_BYTES:
        workers.encode_in_processes(pending, builder.processes, partial, builder.on_bytes)
    elif pending:  # one core is enough, or the library's threads share the text
        encoder = make_encoder(builder.tokenizer_folder, builder.format, ENCODE_CHARS)
        for task in pending:
            encode_chunk(task, encoder, builder.on_bytes)
    return [piece for task in tasks for piece in list_pieces(task) or []]


def _merge(builder: SetBuilder, request: DatasetRequest, pieces: list[Path], facts: dict[str, Any], out: Path) -> None:
    sides = SPLITS if request.held_out < 1.0 else (HELD_OUT,)
    types = column_types(builder.format.format, facts["vocab_size"])
    writers = {side: RecordFileWriter(out / side, types, facts) for side in sides}
    labels: dict[str, int] = {}
    for number, path in enumerate(pieces, 1):
        columns, names = read_piece(path)
        new = {"labels": _number_labels(names, labels)} if names else {}
        for side, writer in writers.items():
            writer.extend(renumber(columns[side], new))
        builder.progress("files", number, len(pieces))
    if not writers[sides[0]].count:
        noun = "record" if builder.kind in RECORD_KINDS else "document"
        what, remedy = ("train", " or lower data.held_out") if sides[0] == TRAIN else ("evaluate", "")
        raise DataError(
            f"{request.key} ({redact_url(request.files[0].path)}) leaves no {noun} to {what} on "
            f"({writers[HELD_OUT].count} held out); add {noun}s{remedy}"
        )
    for writer in writers.values():
        if builder.format.labelled:
            writer.facts["labels"] = list(labels)
        writer.finish()


def _number_labels(names: list[str], labels: dict[str, int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The numbers in `labels`, where new ones get the next, of the labels that have these names by number; the last
    entry is what UNTAGGED, as an index, finds."""
    return np.array([*(labels.setdefault(name, len(labels)) for name in names), UNTAGGED])


def _join_held_out(builder: SetBuilder, sides: list[Path], keys: list[str]) -> Path:
    """The held-out documents of all sources of a mixture, as one set."""
    key = _name_key(builder.kind, [KEY_VERSION, "joined", keys])

    def make(_: Path, out: Path) -> None:
        files = [RecordFile(side) for side in sides]
        facts, labels = files[0].facts, dict[str, int]()
        writer = RecordFileWriter(out / HELD_OUT, files[0].types, facts | ({"key": key} if "key" in facts else {}))
        for file in files:
            names = file.facts.get("labels", [])
            copy_records(writer, file, {"labels": _number_labels(names, labels)} if names else {})
        if "labels" in facts:
            writer.facts["labels"] = list(labels)
        writer.finish()
        about = {"sources": [side.parent.name for side in sides], "tokenizer": builder.tokenizer_name}
        write_description(out, about)

    return builder.cache.get_or_make(key, make) / HELD_OUT


def _sum_progress(phase: str, progress: Progress, total: int) -> Callable[[int], None]:
    """A function that is told bytes of source that are done, and shows how many of `total`."""
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        progress(phase, done, total)

    return tell
