"""Sources: which files they are, of which kind each is, and what one document of them looks like.

A source is the word `stdlib` (the standard library of the running Python), `stdlib-chat` (conversations made of it), a
file, a folder, a glob, a URL of one of these, or `hub:NAME[:CONFIG[:SPLIT]]`, a dataset of the Hugging Face hub or of a
local folder.
"""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import DataError
from phalanx.core.run_paths import redact_url
from phalanx.data.source_file import HUB, SourceFile
from phalanx.storage import files as storage

STDLIB = "stdlib"
STDLIB_CHAT = "stdlib-chat"
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"})
COMPRESSIONS = (".gz", ".zst")
# Kinds of files: how their bytes become documents.
TEXT = "running text"  # one document
LINES = "JSON lines"  # one document a line
LIST = "a JSON list"  # one document an element
ROWS = "Parquet"  # one document a row
TOKENS = "Megatron tokens"  # token ids already
TALKS = "conversations"  # Python modules, of whose functions and classes conversations are made
SHARDS = "masked shards"  # HDF5 files of sequences that are masked already
KINDS = {
    ".jsonl": LINES, ".ndjson": LINES, ".json": LIST, ".parquet": ROWS, ".idx": TOKENS, ".hdf5": SHARDS, ".h5": SHARDS,
}  # fmt: skip
# Endings of running text that a folder is searched for; a file or a glob may name any other.
TEXT_ENDINGS = frozenset(
    {
        ".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".py", ".pyi", ".c", ".h", ".cc",
        ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".js", ".ts", ".jsx", ".tsx", ".rb", ".php", ".pl", ".sh",
        ".sql", ".lua", ".r", ".jl", ".scala", ".swift", ".hs", ".ml", ".cs", ".yaml", ".yml", ".toml",
        ".conll", ".iob", ".iob2", ".bio",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One document as its source holds it: `text`, or for conversations and prompts the object with their `fields`.

    `where` names the place for a user: "FILE, line 3" or alike.
    """

    text: str | None
    fields: dict[str, Any] | None
    where: str


@dataclass(frozen=True)
class RecordFormat:
    """What is read of a record, by key, and how it is encoded: the keys of `data` with these names."""

    format: str = "text"
    text_key: str = "text"
    messages_key: str = "messages"
    prompt_key: str = "prompt"
    completion_key: str = "completion"
    chat_template: str | None = None
    loss_on: str = "assistant"
    storage_timeout_s: float = storage.TIMEOUT_S  # how long a store is tried for
    # Of labelled records, which task.kind asks for:
    tokens_key: str = "tokens"
    tags_key: str = "ner_tags"
    label_key: str = "label"
    pair_key: str | None = None

    def columns(self) -> list[str]:
        """The keys of a record that matter."""
        return {
            "text": [self.text_key],
            "chat": [self.messages_key],
            "prompt": [self.prompt_key, self.completion_key],
            "tags": [self.tokens_key, self.tags_key],
            "classes": [self.text_key, *([self.pair_key] if self.pair_key else []), self.label_key],
        }[self.format]

    def option_name(self, key: str) -> str:
        """What `data.{what}_key` names this key of a record."""
        named: dict[str, dict[str | None, str]] = {
            "text": {self.text_key: "text"},
            "chat": {self.messages_key: "messages"},
            "prompt": {self.completion_key: "completion", self.prompt_key: "prompt"},
            "tags": {self.tags_key: "tags", self.tokens_key: "tokens"},
            "classes": {self.pair_key: "pair", self.label_key: "label", self.text_key: "text"},
        }
        return named[self.format][key]


def list_files(
    sources: list[str], key: str = "data.source", storage_timeout_s: float = storage.TIMEOUT_S
) -> list[SourceFile]:
    """The files of all sources in order of the sources, each file once; folders, globs and `stdlib` in sorted order.

    `key` is what the sources were set under. Raises DataError for a source that names nothing, a folder of several
    kinds of files, or files that hold no byte.
    """
    if not sources:
        raise DataError(f'{key} is empty, so there is nothing to train on; name files, globs or "stdlib"')
    files: dict[str, SourceFile] = {}
    for source in sources:
        for file in _files(source, key, storage_timeout_s):
            files.setdefault(file.path, file)
    if not sum(file.size_bytes for file in files.values()):
        raise DataError(f"{key} {sources} holds only empty files, so there is nothing to train on; name others")
    return list(files.values())


def check_format(files: Iterable[SourceFile], format: str) -> None:
    """Raise DataError for files that cannot hold documents of the format."""
    for file in files:
        if file.kind == SHARDS:
            raise DataError(
                f"{redact_url(file.path)} is an HDF5 file, which holds sequences that are masked already; set "
                "data.format=masked, or name other files"
            )
        if file.kind == TALKS and format != "chat":
            raise DataError(f'"{STDLIB_CHAT}" holds conversations, but data.format is {format}; set data.format=chat')
        if file.kind in (TEXT, TOKENS) and format != "text":
            what = "running text" if file.kind == TEXT else "token ids"
            raise DataError(
                f"{redact_url(file.path)} is {what}, but data.format is {format}, which needs records (.jsonl, .json, "
                f".parquet); set data.format=text or name files of records"
            )


def file_suffix(path: str) -> str:
    """The ending of a file's name without that of its compression, in lower case."""
    name = path.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return os.path.splitext(name)[1]


def guess_kind(path: str) -> str:
    """What a file holds, told from its name."""
    return KINDS.get(file_suffix(path), TEXT)


def text_digest(text: str) -> bytes:
    """The sha256 of a document: what decides on which side it falls, on any machine and in any order of files."""
    return hashlib.sha256(text.encode()).digest()


def record_digest(record: Record, keys: list[str]) -> bytes:
    """The same for a record, of its text or of the fields under `keys`. Raises DataError for what is no text."""
    text = record.text
    if text is None:
        assert record.fields is not None
        known = {key: record.fields[key] for key in keys if key in record.fields}
        text = json.dumps(known, sort_keys=True, ensure_ascii=False, default=str)
    try:
        return text_digest(text)
    except UnicodeEncodeError:  # JSON can spell what is no character, as in \\ud800
        raise DataError(
            f"{record.where} holds half of a surrogate pair, not text; correct or delete the line"
        ) from None


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether a document is kept for evaluation: its digest, read as a number in [0, 1), is below `fraction`."""
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


# ------------------------------------------------------------------------------------------------------------- finding


def _files(source: str, key: str, timeout_s: float) -> list[SourceFile]:
    if source in (STDLIB, STDLIB_CHAT):
        kind = TEXT if source == STDLIB else TALKS
        return [_local(path, key, lenient=True, kind=kind) for path in _stdlib_paths(source, key)]
    if not source:
        raise DataError(f"{key} has an empty entry; name a file, a folder, a glob or a URL, or remove it")
    if source.startswith(HUB):
        from phalanx.data.hub import resolve_hub_source

        return [resolve_hub_source(source, key)]
    if storage.is_url(source):
        return _remote_files(source, key, timeout_s)
    expanded = os.path.abspath(os.path.expanduser(source))
    if os.path.isdir(expanded):
        return [_local(os.path.join(expanded, name), key) for name in _of_folder(source, _walk(expanded), key)]
    if os.path.isfile(expanded):
        return [_local(expanded, key)]
    if os.path.isfile(f"{expanded}.idx"):  # Megatron's own tools name a pair of files by what they share
        return [_local(f"{expanded}.idx", key)]
    found = sorted(Path(name) for name in glob.glob(expanded, recursive=True) if os.path.isfile(name))
    if not found:
        raise DataError(
            f"{key} names {source}, but there is no such file; correct the path (a relative one starts at "
            f"{os.getcwd()})"
        )
    return [_local(str(path), key) for path in _without_bins(list(map(str, found)))]


def _local(path: str, key: str, lenient: bool = False, kind: str | None = None) -> SourceFile:
    kind = kind or guess_kind(path)
    try:
        status = os.stat(path)
        size, version = status.st_size, str(status.st_mtime_ns)
        if kind == TOKENS:  # the bytes lie in the other file of the pair
            other = os.stat(f"{path.removesuffix('.idx')}.bin")
            size, version = other.st_size, f"{version} {status.st_size} {other.st_mtime_ns}"
    except FileNotFoundError as error:
        raise DataError(f"{key} names {path}, but {error.filename} is missing; restore it") from None
    except OSError as error:
        raise DataError(describe_unreadable(path, error, key)) from None
    return SourceFile(path, kind, size, version, lenient)


def describe_unreadable(path: str, error: OSError, key: str = "data.source") -> str:
    """The sentence for a file that cannot be read."""
    reason = error.strerror or str(error)
    return f"{key} names {redact_url(path)}, which cannot be read ({reason}); correct the path or its permissions"


def _walk(folder: str) -> list[str]:
    """All files below a folder, relative to it, in sorted order."""
    found: list[str] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        here = os.path.realpath(parent) + os.sep  # a link to a folder around it would lead in circles
        paths = {name: os.path.realpath(os.path.join(parent, name)) + os.sep for name in folders if name[0] != "."}
        folders[:] = [name for name, path in paths.items() if not here.startswith(path)]
        found += [os.path.relpath(os.path.join(parent, name), folder) for name in names]
    return sorted(name for name in found if os.path.isfile(os.path.join(folder, name)))


def _of_folder(folder: str, names: list[str], key: str) -> list[str]:
    """Those of the `names` below a folder (which the user calls `folder`) that have a known ending. Raises DataError
    where the kinds differ: a README beside tables would become a document."""
    known = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    known = [name for name in known if file_suffix(name) in KINDS or file_suffix(name) in TEXT_ENDINGS]
    if not known:
        raise DataError(
            f"{key} names the folder {redact_url(folder)}, in which no file has a known ending (.txt, .md, .jsonl, "
            f".parquet and others); name its files with a glob such as {redact_url(folder).rstrip('/')}/**/*.log"
        )
    first: dict[str, str] = {}
    for name in known:
        kind = guess_kind(name)
        first.setdefault("records" if kind in (LINES, LIST, ROWS) else kind, name)
    if len(first) > 1:
        (kind, name), (other_kind, other) = sorted(first.items())[:2]
        raise DataError(
            f"{key} names the folder {redact_url(folder)}, which mixes kinds of files ({name} is {kind}, {other} is "
            f"{other_kind}); name those to train on with a glob such as "
            f"{redact_url(folder).rstrip('/')}/**/*{file_suffix(name)}"
        )
    return known


def _without_bins(paths: list[str]) -> list[str]:
    """Without the token files beside their index, which a glob such as PREFIX* names as well."""
    pairs = {path.removesuffix(".idx") + ".bin" for path in paths if path.endswith(".idx")}
    return [path for path in paths if path not in pairs]


def _remote_files(source: str, key: str, timeout_s: float) -> list[SourceFile]:
    if any(mark in source for mark in "*?["):
        found = storage.glob(source, timeout_s)
        shy = not source.rpartition("/")[2].startswith(".")  # as a local glob passes over hidden files
        entries = {entry.url: entry for entry in found if not (shy and entry.name.startswith("."))}
        paths = _without_bins(list(entries))
    else:
        one = storage.get_entry(source, timeout_s)
        if one is not None and not one.folder:
            entries, paths = {source: one}, [source]
        elif one is None and (index := storage.get_entry(f"{source}.idx", timeout_s)) is not None:
            entries, paths = {index.url: index}, [index.url]
        else:
            entries = {entry.url: entry for entry in storage.list_folder(source, recursive=True, timeout_s=timeout_s)}
            below = source.rstrip("/") + "/"
            names = sorted(url.removeprefix(below) for url in entries)
            paths = [below + name for name in _of_folder(source, names, key)] if names else []
    if not paths:
        raise DataError(f"{key} names {redact_url(source)}, but there is no such file; correct the URL")
    files = []
    for path in paths:
        size, version = entries[path].size, entries[path].version
        if guess_kind(path) == TOKENS:
            other = storage.get_entry(f"{path.removesuffix('.idx')}.bin", timeout_s)
            if other is None:
                raise DataError(f"{key} names {redact_url(path)}, but its .bin file is missing; restore it")
            size, version = other.size, f"{version} {size} {other.version}"
        files.append(SourceFile(path, guess_kind(path), size, version))
    return files


def _stdlib_paths(source: str, key: str) -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files = sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())
    if not files:
        raise DataError(f'{key} names "{source}", but {root} holds no .py files; name files of your own')
    return [str(path) for path in files]
