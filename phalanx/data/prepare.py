"""Sources to token sets, once: cached by what defines the result, taken up where a killed run left off.

Each source of a mixture and each validation set is a result of its own, so that another one costs only itself. Its
chunks are encoded side by side into pieces in `<cache>/<key>.partial/` and then joined in order.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.core.errors import ConfigError, DataError, StorageError
from phalanx.core.run_paths import HELD_OUT, redact_url
from phalanx.data import stdlib_chat, workers
from phalanx.data.encode import SPLITS, EncodeTask, encode_chunk, make_encoder
from phalanx.data.read_chunks import (
    CHUNK_BYTES,
    MANY_CHUNKS,
    MAX_CHUNK_BYTES,
    Chunk,
    Meter,
    count_lines_before,
    plan_chunks,
    read_records,
)
from phalanx.data.source_file import SourceFile
from phalanx.data.sources import (
    LINES,
    TALKS,
    TOKENS,
    Record,
    RecordFormat,
    check_format,
    is_held_out,
    list_files,
    record_digest,
    text_digest,
)
from phalanx.data.token_files import FORMAT_VERSION, TokenFile, TokenWriter
from phalanx.data.tokenizer import (
    ENCODE_CHARS,
    Tokenizer,
    check_vocab,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from phalanx.data.workers import Cache, prune, write_description
from phalanx.storage import files as storage
from phalanx.storage import local_copies

if TYPE_CHECKING:
    from phalanx.config.model import DataSection

TRAIN = "train"  # the value of `tokenizer` that asks for a new one
READER_VERSION = 2  # raised with every change of how conversations are read
SAMPLE_BYTES = 8 << 20  # text that a tokenizer is trained on at most; more changes few merges
SAMPLE_CHARS = 1 << 16  # the sample is drawn in chunks of this length, so that one huge document is no exception
SAMPLE_READ = 64  # times its size is read of a source to draw the sample
SMALL_BYTES = 2 << 20  # less than that is encoded before other processes have started
JOIN_TOKENS = 8 << 20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PreparedData:
    """Where prepared data lies, all of it made with one tokenizer.

    `train`: folders for TokenFile with their weights in the mixture, one of weight 1.0 where there is none.
    `held_out`: the sets to evaluate on by name; "held_out" is what was kept back of the training documents, and may be
    empty.
    """

    tokenizer_folder: Path
    vocab_size: int
    eos_id: int
    train: list[tuple[Path, float]]
    held_out: dict[str, Path]


@dataclass(frozen=True)
class DatasetRequest:
    """One token set, or the two sides of one: `key` is what its sources were set under."""

    key: str
    files: list[SourceFile]
    held_out: float

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def prepare(
    data: "DataSection",
    progress: Progress | None = None,
    lock_timeout_s: float = local_copies.LOCK_TIMEOUT_S,
    storage_timeout_s: float = storage.TIMEOUT_S,
    pieces: bool = False,
) -> PreparedData:
    """Return the token sets that `data` asks for, preparing those that the cache does not have.

    `data.tokenizer` is "train" (a byte-level BPE of `tokenizer_vocab` entries from training documents only; with
    `pieces` a WordPiece) or a local folder. `progress(phase, done, total)` hears of "tokenizer", "tokens" (bytes of
    source) and "files". Of several processes one works, the others wait up to `lock_timeout_s`.

    Raises DataError for sources that are missing or malformed and for a cache that cannot be written; ConfigError for
    a tokenizer, template or fraction that cannot be; StorageError for a store that fails.
    """
    assert data.tokenizer != "auto"
    if not 0.0 <= data.held_out < 1.0:
        raise ConfigError(
            f"data.held_out is {data.held_out}, which leaves nothing to train on; set it to 0 or more and below 1"
        )
    progress = progress or ignore_progress
    format = make_document_format(data, storage_timeout_s)
    train, validation = list_requests(data, storage_timeout_s)
    everything = [*(wanted for wanted, _ in train), *validation.values()]
    for wanted in everything:
        check_format(wanted.files, data.format)
    cache = open_cache(data, lock_timeout_s, storage_timeout_s)
    count = data.workers if data.workers != "auto" else len(os.sched_getaffinity(0))
    with translate_disk_errors(data):
        prune(cache.folder)
        folder, named_so = _tokenizer(data, train, format, cache, progress, pieces)
        keys = {id(wanted): _key(wanted, tokenizer_hash(folder), format) for wanted in everything}
        told = make_sum_progress("tokens", progress, everything, keys, cache)

        def build(wanted: DatasetRequest, partial: Path, out: Path) -> None:
            _build(TokenSetJob(wanted, keys[id(wanted)], folder, named_so, format, count, told, progress), partial, out)

        joined = functools.partial(_join_held_out, tokenizer_name=named_so, cache=cache)
        sets = obtain_sets(train, validation, keys, cache, build, joined)
    return _open_prepared(folder, *sets)


@contextlib.contextmanager
def translate_disk_errors(data: "DataSection") -> Iterator[None]:
    """Turn what a disk refuses into a DataError that names the cache; a store has its own words."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise DataError(
            f"the data cache {redact_url(data.cache)} cannot be written ({error.strerror or error}); free space there "
            f"or name another folder"
        ) from error


def obtain_sets(
    train: list[tuple[DatasetRequest, float]],
    validation: dict[str, DatasetRequest],
    keys: dict[int, str],
    cache: Cache,
    build: Callable[[DatasetRequest, Path, Path], None],
    joined: Callable[[list[Path], list[str]], Path],
) -> tuple[list[tuple[Path, float]], dict[str, Path]]:
    """Obtain every set, by the key that `keys` has for its id; `build(wanted, partial, out)` makes one that is not in
    the cache.

    Returns the folders to train on with their weights, and those to evaluate on by name, of which HELD_OUT is what the
    training sets keep back: `joined` (folders and keys of these) makes one of several.
    """
    everything = [*(wanted for wanted, _ in train), *validation.values()]
    made = {id(wanted): cache.get_or_make(keys[id(wanted)], functools.partial(build, wanted)) for wanted in everything}
    sides = [made[id(wanted)] / HELD_OUT for wanted, _ in train]
    held_out = sides[0] if len(sides) == 1 else joined(sides, [keys[id(wanted)] for wanted, _ in train])
    return (
        [(made[id(wanted)] / TRAIN, weight) for wanted, weight in train],
        {HELD_OUT: held_out} | {name: made[id(wanted)] / HELD_OUT for name, wanted in validation.items()},
    )


def list_requests(
    data: "DataSection", storage_timeout_s: float
) -> tuple[list[tuple[DatasetRequest, float]], dict[str, DatasetRequest]]:
    """The training sets with their weights, and the validation sets by name; raises DataError, StorageError."""
    train = [
        (DatasetRequest("data.source", list_files(paths, "data.source", storage_timeout_s), data.held_out), weight)
        for paths, weight in split_mixture(data.source)
    ]
    validation = {
        name: DatasetRequest(
            f"data.validation.{name}", list_files(paths, f"data.validation.{name}", storage_timeout_s), 1.0
        )
        for name, paths in data.validation.items()
    }
    return train, validation


def open_cache(data: "DataSection", lock_timeout_s: float, storage_timeout_s: float) -> Cache:
    """Where prepared sets go: a folder, of which a URL may hold copies."""
    url = data.cache if storage.is_url(data.cache) else None
    return Cache(storage.local_cache(data.cache).absolute(), url, lock_timeout_s, storage_timeout_s)


def split_mixture(source: Iterable[Any]) -> list[tuple[list[str], float]]:
    """The sources that are prepared each by itself, and their weights: one, unless an entry has a weight of its own."""
    entries = list(source)
    if all(isinstance(entry, str) for entry in entries):
        return [(entries, 1.0)]
    return [([entry], 1.0) if isinstance(entry, str) else (list(entry.path), entry.weight) for entry in entries]


def make_document_format(data: "DataSection", storage_timeout_s: float = storage.TIMEOUT_S) -> RecordFormat:
    """How the documents of a recipe are read."""
    return RecordFormat(
        data.format,
        data.text_key,
        data.messages_key,
        data.prompt_key,
        data.completion_key,
        data.chat_template,
        data.loss_on,
        storage_timeout_s,
    )


def _key(wanted: DatasetRequest, tokenizer: str, format: RecordFormat) -> str:
    """The name of a result: a hash of everything that could change a token of it."""
    parts = [FORMAT_VERSION, identify_files(wanted.files), tokenizer, _reading(format), wanted.held_out]
    return hash_parts(parts)


def hash_parts(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def identify_files(files: list[SourceFile]) -> list[Any]:
    return [
        [file.path, file.kind, file.size_bytes, file.version, file.lenient]
        + ([stdlib_chat.VERSION] if file.kind == TALKS else [])
        for file in files
    ]


def _reading(format: RecordFormat) -> list[Any]:
    if format.format == "text":
        return [format.format, *format.columns()]
    from phalanx.data.chat import load_template

    return [format.format, *format.columns(), format.loss_on, load_template(format.chat_template), READER_VERSION]


# ----------------------------------------------------------------------------------------------------------- tokenizer


def _tokenizer(
    data: "DataSection",
    train: list[tuple[DatasetRequest, float]],
    format: RecordFormat,
    cache: Cache,
    progress: Progress,
    pieces: bool = False,
) -> tuple[Path, str]:
    """The folder of the tokenizer, and its name as a result beside it would write it; `pieces`: a WordPiece."""
    if data.tokenizer != TRAIN:
        folder = os.path.abspath(os.path.expanduser(data.tokenizer))
        return Path(folder), folder
    check_vocab(data.tokenizer_vocab)
    for wanted, _ in train:
        if ids := next((file for file in wanted.files if file.kind == TOKENS), None):
            raise ConfigError(
                f"{redact_url(ids.path)} holds token ids, so no tokenizer can be trained on it; set data.tokenizer to "
                f"the folder of the one that made them"
            )
    # The size of chunks matters where only some of them are read.
    sample = [SAMPLE_BYTES, SAMPLE_CHARS, SAMPLE_READ, CHUNK_BYTES, MAX_CHUNK_BYTES, MANY_CHUNKS]
    parts = [version("tokenizers"), data.tokenizer_vocab, data.held_out, sample, *(["pieces"] if pieces else [])]
    total = sum(weight for _, weight in train)
    sources = [[identify_files(wanted.files), weight / total] for wanted, weight in train]
    name = f"tokenizer-{hash_parts([*parts, sources, _reading(format)])}"

    def make(partial: Path, out: Path) -> None:
        trained = partial / "tokenizer"
        if not trained.exists():
            texts = sample_for_tokenizer([(w.files, weight) for w, weight in train], format, data.held_out, progress)
            train_tokenizer(texts, data.tokenizer_vocab, trained, pieces)
        shutil.copytree(trained, out, dirs_exist_ok=True)
        write_description(out, {"trained_on": [shorten_names(wanted.files) for wanted, _ in train]})

    return cache.get_or_make(name, make), f"../{name}"


def sample_for_tokenizer(
    sources: list[tuple[list[SourceFile], float]], format: RecordFormat, held_out: float, progress: Progress
) -> Iterator[str]:
    """Text of training documents, all of it or a sample of about SAMPLE_BYTES chosen by hash, to which each source of a
    mixture gives its weight's part."""
    weights = sum(weight for _, weight in sources)
    drawn = []
    for files, weight in sources:
        target = SAMPLE_BYTES * weight / weights
        chunks = _draw_chunks(plan_chunks(files, format), int(SAMPLE_READ * target))
        size = sum(chunk.size_bytes for chunk in chunks)
        drawn.append((chunks, min(1.0, target / max(1, size)), size))
    total, done = sum(size for _, _, size in drawn), 0
    for chunks, share, _ in drawn:
        for chunk in chunks:
            progress("tokenizer", done, total)
            for text in _texts(chunk, format, held_out):
                digest = text_digest(text)
                for start in range(0, len(text), SAMPLE_CHARS):
                    if is_held_out(hashlib.sha256(digest + start.to_bytes(8, "big")).digest(), share):
                        yield text[start : start + SAMPLE_CHARS]
            done += chunk.size_bytes
    progress("tokenizer", total, total)


def _draw_chunks(chunks: list[Chunk], limit_bytes: int) -> list[Chunk]:
    """As many chunks, chosen by hash, as hold that much; in their order."""
    if sum(chunk.size_bytes for chunk in chunks) <= limit_bytes:
        return chunks
    shuffled = sorted(range(len(chunks)), key=lambda number: hashlib.sha256(b"%d" % number).digest())
    sizes = itertools.accumulate(chunks[number].size_bytes for number in shuffled)
    enough = next(count for count, size in enumerate(sizes, 1) if size >= limit_bytes)
    return [chunks[number] for number in sorted(shuffled[:enough])]


def _texts(chunk: Chunk, format: RecordFormat, held_out: float) -> Iterator[str]:
    """The texts of a chunk's training documents; of conversations and prompts, each string under their keys."""
    try:
        for record in read_records(chunk, format, Meter()):
            if not is_held_out(record_digest(record, format.columns()), held_out):
                yield from [record.text] if record.text is not None else _strings(record, format)
    except DataError:
        if chunk.kind == LINES and chunk.start:  # see encode_chunk
            for record in read_records(chunk, format, Meter(), count_lines_before(chunk, format) + 1):
                record_digest(record, format.columns())
        raise


def _strings(record: Record, format: RecordFormat) -> list[str]:
    def inside(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for one in value.values() if isinstance(value, dict) else value:
                yield from inside(one)

    assert record.fields is not None
    return [text for key in format.columns() for text in inside(record.fields[key])]


# -------------------------------------------------------------------------------------------------------------- one set


@dataclass(frozen=True)
class TokenSetJob:
    """What one set needs to be made. `tokens(count)` is told the bytes of source that are done."""

    request: DatasetRequest
    key: str
    tokenizer_folder: Path
    tokenizer_name: str
    format: RecordFormat
    processes: int
    on_bytes: Callable[[int], None]
    progress: Progress


def _build(work: TokenSetJob, partial: Path, out: Path) -> None:
    tokenizer = load_tokenizer(work.tokenizer_folder)
    pieces = _encode(work, partial)
    _merge(work, pieces, tokenizer, out)
    write_description(
        out,
        {
            "sources": shorten_names(work.request.files),
            "tokenizer": work.tokenizer_name,
            "format": asdict(work.format),
            "held_out": work.request.held_out,
        },
    )


def shorten_names(files: list[SourceFile], most: int = 20) -> list[str]:
    more = [f"and {len(files) - most} more"] if len(files) > most else []
    return [*(redact_url(file.path) for file in files[:most]), *more]


def _encode(work: TokenSetJob, partial: Path) -> list[Path]:
    """Encode the chunks that are not done yet; returns the pieces of all in order."""
    chunks = plan_chunks(work.request.files, work.format)
    tasks = [
        EncodeTask(
            f"chunk-{number:06d}", str(partial), str(work.tokenizer_folder), work.format, work.request.held_out, chunk
        )
        for number, chunk in enumerate(chunks)
    ]
    pending = [task for task in tasks if _find_piece_count(partial, task) is None]
    pending_bytes = sum(task.chunk.size_bytes for task in pending)
    work.on_bytes(work.request.total_bytes - pending_bytes)
    if len(pending) > 1 and pending_bytes > SMALL_BYTES:
        workers.encode_in_processes(pending, work.processes, partial, work.on_bytes)
    elif pending:  # one core after another is enough, or the library's own threads share the text
        encoder = make_encoder(work.tokenizer_folder, work.format, ENCODE_CHARS)
        for task in pending:
            encode_chunk(task, encoder, work.on_bytes)
    return [
        partial / f"{task.name}-{piece:04d}.npz"
        for task in tasks
        for piece in range(_find_piece_count(partial, task) or 0)
    ]


def _find_piece_count(partial: Path, task: EncodeTask) -> int | None:
    """The number of pieces of a chunk; None unless all are there. What another cut of the sources left is removed."""
    note = partial / f"{task.name}.json"
    if note.is_file():
        content = json.loads(note.read_text())
        if content["chunk"] == asdict(task.chunk):
            return int(content["pieces"])
        for stale in partial.glob(f"{task.name}*"):
            stale.unlink()
    return None


def _merge(work: TokenSetJob, pieces: list[Path], tokenizer: Tokenizer, out: Path) -> None:
    sides = SPLITS if work.request.held_out < 1.0 else (HELD_OUT,)
    about = (tokenizer.vocab_size, tokenizer.eos_id, work.key, tokenizer.specials)
    writers = {name: TokenWriter(out / name, *about) for name in sides}
    documents_of = dict.fromkeys(SPLITS, 0)
    for number, path in enumerate(pieces):
        try:
            with np.load(path, allow_pickle=False) as arrays:
                for name, writer in writers.items():
                    lengths = arrays[f"{name}_lengths"]
                    mask = arrays[f"{name}_mask"] if f"{name}_mask" in arrays.files else None
                    writer.extend(arrays[name], lengths, mask)
                    documents_of[name] += len(lengths)
        except (zipfile.BadZipFile, ValueError, KeyError) as error:
            raise DataError(f"{path} is damaged ({error}); delete {path.parent} and prepare the data again") from None
        work.progress("files", number + 1, len(pieces))
    if not documents_of[sides[0]]:
        what = "train" if sides[0] == TRAIN else "evaluate"
        remedy = "add documents or lower data.held_out" if sides[0] == TRAIN else "add documents"
        first = redact_url(work.request.files[0].path)
        raise DataError(
            f"{work.request.key} ({first}) leaves no document to {what} on "
            f"({documents_of[HELD_OUT]} held out); {remedy}"
        )
    for writer in writers.values():
        writer.finish()


def _join_held_out(sides: list[Path], keys: list[str], tokenizer_name: str, cache: Cache) -> Path:
    """What all sources of a mixture keep back, as one set."""
    key = hash_parts([FORMAT_VERSION, "joined", keys])

    def make(_: Path, out: Path) -> None:
        first = TokenFile(sides[0])
        writer = TokenWriter(out / HELD_OUT, first.vocab_size, first.eos_id, key, first.specials)
        for side in map(TokenFile, sides):
            start = 0
            while start < side.documents:
                offset = int(side.index[start])
                stop = int(np.searchsorted(side.index, offset + JOIN_TOKENS, side="right")) - 1
                stop = min(max(stop, start + 1), side.documents)
                end = int(side.index[stop])
                mask = side.mask(offset, end) if side.masked else None
                writer.extend(side.slice(offset, end), np.diff(side.index[start : stop + 1]), mask)
                start = stop
        writer.finish()
        write_description(out, {"sources": [side.parent.name for side in sides], "tokenizer": tokenizer_name})

    return cache.get_or_make(key, make) / HELD_OUT


def _open_prepared(tokenizer: Path, train: list[tuple[Path, float]], held_out: dict[str, Path]) -> PreparedData:
    files = [TokenFile(folder) for folder in [*(folder for folder, _ in train), *held_out.values()]]
    return PreparedData(tokenizer, files[0].vocab_size, files[0].eos_id, train, held_out)


def make_sum_progress(
    phase: str, progress: Progress, everything: list[DatasetRequest], keys: dict[int, str], cache: Cache
) -> Callable[[int], None]:
    """A function that is told bytes of source that are done, and shows how many of those that the cache lacks."""
    total = sum(wanted.total_bytes for wanted in everything if not cache.has(keys[id(wanted)]))
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        progress(phase, done, total)

    return tell


def ignore_progress(phase: str, done: int, total: int) -> None:
    """Where nobody watches."""
