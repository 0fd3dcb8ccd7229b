"""Sources to token sets, once: cached by what defines the result, taken up where a killed run left off.

Work goes to `<cache>/<key>.partial/`, in parts of a few megabytes of text; a part is an `.npz` and then, when that is
safe on the disk, a `.json` with the place in the sources where the next part begins. Complete parts are merged into
`out/`, and that folder is renamed to `<cache>/<key>/`.
"""

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.sources import (
    START,
    Cursor,
    SourceFile,
    bytes_before,
    documents,
    is_held_out,
    list_files,
    text_digest,
)
from phalanx.data.tokenizer import (
    Tokenizer,
    check_vocab,
    encode_documents,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from phalanx.data.tokens import FORMAT_VERSION, TokenFile, TokenWriter, sync_folder, write_synced
from phalanx.errors import ConfigError, DataError

TRAIN = "train"  # the value of `tokenizer` that asks for a new one
PART_CHARS = 8 << 20  # text of one part: a kill costs the tokenizing of it, about a second
SAMPLE_BYTES = 8 << 20  # text that a tokenizer is trained on at most; more changes few merges
SAMPLE_CHARS = 1 << 16  # the sample is drawn in chunks of this length, so that one huge document is no exception
LOCK_TIMEOUT_S = 3600.0
LOCK_POLL_S = 0.1

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Prepared:
    """Where prepared data lies. `train` and `held_out` are folders for TokenFile; `held_out` may hold no document."""

    folder: Path
    tokenizer_folder: Path
    train: Path
    held_out: Path
    vocab_size: int
    eos_id: int


@dataclass(frozen=True)
class Job:
    """What defines the result of one preparation."""

    files: list[SourceFile]
    tokenizer: str
    tokenizer_vocab: int
    text_key: str
    held_out_fraction: float

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def prepare(
    sources: list[str],
    tokenizer: str,
    tokenizer_vocab: int,
    text_key: str,
    held_out_fraction: float,
    cache: Path,
    progress: Progress | None = None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> Prepared:
    """Return the token sets of `sources`, preparing them unless the cache has them.

    `tokenizer` is "train" (a byte-level BPE with `tokenizer_vocab` entries, trained on training documents only) or a
    local Hugging Face folder. `progress(phase, done, total)` is called for the phases "tokenizer" and "tokens" (bytes
    of source) and "files" (parts). Any number of processes may ask for the same data at once: one works, the others
    wait up to `lock_timeout_s`.

    Raises DataError for sources that are missing, empty or malformed (file and line named) and for a cache that cannot
    be written; ConfigError for a tokenizer or fraction that cannot be.
    """
    if not 0.0 <= held_out_fraction < 1.0:
        raise ConfigError(
            f"data.held_out is {held_out_fraction}, which leaves nothing to train on; set it to 0 or more and below 1"
        )
    if tokenizer == TRAIN:
        check_vocab(tokenizer_vocab)
    else:
        tokenizer = os.path.abspath(os.path.expanduser(tokenizer))
    job = Job(list_files(sources), tokenizer, tokenizer_vocab, text_key, held_out_fraction)
    key = cache_key(job)
    folder = cache.expanduser().absolute() / key
    if not _complete(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_name(f"{key}.lock"), lock_timeout_s):
                if not _complete(folder):  # whoever held the lock before may have made it
                    _build(job, key, folder, progress or _silent)
        except OSError as error:
            raise DataError(
                f"the data cache {cache} cannot be written ({error.strerror or error}); free space there or name "
                f"another folder"
            ) from error
    return _open(folder, job)


def cache_key(job: Job) -> str:
    """The name of a preparation's result: a hash of everything that could change a token of it.

    Raises ConfigError when the tokenizer's folder holds no tokenizer.
    """
    if job.tokenizer == TRAIN:
        tokenizer = ["train", job.tokenizer_vocab, SAMPLE_BYTES, SAMPLE_CHARS, version("tokenizers")]
    else:
        tokenizer = ["folder", tokenizer_hash(Path(job.tokenizer))]
    files = [[str(file.path), file.size_bytes, file.mtime_ns, file.lenient] for file in job.files]
    parts = [FORMAT_VERSION, files, tokenizer, job.text_key, job.held_out_fraction]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _build(job: Job, key: str, folder: Path, progress: Progress) -> None:
    partial = folder.with_name(f"{key}.partial")
    partial.mkdir(exist_ok=True)
    trained = partial / "tokenizer"
    if job.tokenizer == TRAIN and not trained.exists():
        train_tokenizer(_tokenizer_sample(job, progress), job.tokenizer_vocab, trained)
    tokenizer = load_tokenizer(trained if job.tokenizer == TRAIN else Path(job.tokenizer))
    parts = _write_parts(job, tokenizer, partial, progress)
    out = partial / "out"
    if out.exists():  # a run was killed while it merged
        shutil.rmtree(out)
    out.mkdir()
    if job.tokenizer == TRAIN:
        shutil.copytree(trained, out / "tokenizer")
    _merge(parts, tokenizer, key, out, progress)
    sync_folder(out)
    if folder.exists():  # somebody deleted a part of it
        shutil.rmtree(folder)
    os.rename(out, folder)
    sync_folder(folder.parent)
    shutil.rmtree(partial)


def _tokenizer_sample(job: Job, progress: Progress) -> Iterator[str]:
    """Chunks of training documents, all of them or a sample of about SAMPLE_BYTES chosen by hash."""
    share = min(1.0, SAMPLE_BYTES / job.total_bytes)
    reported = 0
    for document in documents(job.files, job.text_key):
        digest = text_digest(document.text)
        if is_held_out(digest, job.held_out_fraction):
            continue
        for start in range(0, len(document.text), SAMPLE_CHARS):
            chosen = hashlib.sha256(digest + start.to_bytes(8, "big")).digest()
            if is_held_out(chosen, share):
                yield document.text[start : start + SAMPLE_CHARS]
        done = bytes_before(job.files, document.after)
        if done - reported >= PART_CHARS // 8:
            progress("tokenizer", done, job.total_bytes)
            reported = done
    progress("tokenizer", job.total_bytes, job.total_bytes)


def _write_parts(job: Job, tokenizer: Tokenizer, partial: Path, progress: Progress) -> list[Path]:
    """Tokenize what no finished part holds yet; returns the `.npz` files of all parts in order."""
    parts, start = _finished_parts(partial)
    progress("tokens", bytes_before(job.files, start), job.total_bytes)
    for train, held_out, cursor in _batches(job, start):
        tokens, lengths = encode_documents(tokenizer, train + held_out)
        split = int(lengths[: len(train)].sum())
        path = partial / f"part-{len(parts):06d}.npz"
        temporary = path.with_suffix(".writing")
        with open(temporary, "wb") as file:
            np.savez(
                file,
                train=tokens[:split],
                train_lengths=lengths[: len(train)],
                held_out=tokens[split:],
                held_out_lengths=lengths[len(train) :],
            )
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        _write_json(path.with_suffix(".json"), {"after": list(cursor)})
        parts.append(path)
        progress("tokens", bytes_before(job.files, cursor), job.total_bytes)
    progress("tokens", job.total_bytes, job.total_bytes)
    return parts


def _finished_parts(partial: Path) -> tuple[list[Path], Cursor]:
    parts: list[Path] = []
    cursor = START
    for number in itertools.count():
        path = partial / f"part-{number:06d}.npz"
        note = path.with_suffix(".json")
        if not (path.is_file() and note.is_file()):
            return parts, cursor
        parts.append(path)
        cursor = Cursor(*json.loads(note.read_text())["after"])
    raise AssertionError("counting has no end")


def _batches(job: Job, start: Cursor) -> Iterator[tuple[list[str], list[str], Cursor]]:
    """(training texts, held-out texts, cursor behind them) of about PART_CHARS each."""
    train: list[str] = []
    held_out: list[str] = []
    chars = 0
    cursor = start
    for document in documents(job.files, job.text_key, start):
        side = held_out if is_held_out(text_digest(document.text), job.held_out_fraction) else train
        side.append(document.text)
        cursor = document.after
        chars += len(document.text)
        if chars >= PART_CHARS:
            yield train, held_out, cursor
            train, held_out, chars = [], [], 0
    if chars:
        yield train, held_out, cursor


def _merge(parts: list[Path], tokenizer: Tokenizer, key: str, out: Path, progress: Progress) -> None:
    writers = {
        name: TokenWriter(out / name, tokenizer.vocab_size, tokenizer.eos_id, key) for name in ("train", "held_out")
    }
    documents_of = dict.fromkeys(writers, 0)
    for number, path in enumerate(parts):
        try:
            with np.load(path) as arrays:
                for name, writer in writers.items():
                    lengths = arrays[f"{name}_lengths"]
                    writer.extend(arrays[name], lengths)
                    documents_of[name] += len(lengths)
        except (zipfile.BadZipFile, ValueError, KeyError) as error:
            raise DataError(f"{path} is damaged ({error}); delete {path.parent} and prepare the data again") from None
        progress("files", number + 1, len(parts))
    if not documents_of["train"]:
        raise DataError(
            f"data.source leaves no document to train on ({documents_of['held_out']} held out); "
            f"add documents or lower data.held_out"
        )
    for writer in writers.values():
        writer.finish()


def _complete(folder: Path) -> bool:
    return (folder / "train").is_dir() and (folder / "held_out").is_dir()


def _open(folder: Path, job: Job) -> Prepared:
    tokenizer_folder = folder / "tokenizer" if job.tokenizer == TRAIN else Path(job.tokenizer)
    train = TokenFile(folder / "train")  # both are opened here: a damaged cache is named before anything starts
    TokenFile(folder / "held_out")
    return Prepared(folder, tokenizer_folder, folder / "train", folder / "held_out", train.vocab_size, train.eos_id)


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel lets go when its holder dies."""
    deadline = time.monotonic() + timeout_s
    with open(path, "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DataError(
                        f"another process has held {path} for {timeout_s:.0f} s while it prepares the same data; wait "
                        f"for it or end it, then start again"
                    ) from None
            time.sleep(LOCK_POLL_S)
        yield


def _write_json(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    write_synced(temporary, json.dumps(content).encode())
    os.rename(temporary, path)


def _silent(phase: str, done: int, total: int) -> None:
    """Where nobody watches."""
