"""Resolving sources to files and their kinds; datasets of the Hugging Face hub.

A source is the word `stdlib` (the standard library of the running Python), `stdlib-chat` (conversations made of it), a
file, a folder, a glob, a URL of one of these, or `hub:NAME[:CONFIG[:SPLIT]]`, a dataset of the Hugging Face hub or of a
local folder.
"""

import glob
import json
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import DataError
from phalanx.core.run_paths import redact_url
from phalanx.data.file_formats import shorten_error
from phalanx.data.records import COMPRESSIONS, HUB, KINDS, FileKind, SourceFile
from phalanx.storage import files as storage

if TYPE_CHECKING:
    from phalanx.config.model import DataSection

STDLIB = "stdlib"
STDLIB_CHAT = "stdlib-chat"
DEFAULT_SPLIT = "train"  # of a dataset of the hub
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"})
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
class DatasetRequest:
    """One token set, or the two sides of one: `key` is what its sources were set under."""

    key: str
    files: list[SourceFile]
    held_out: float

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def list_requests(
    data: "DataSection", storage_timeout_s: float
) -> tuple[list[tuple[DatasetRequest, float]], dict[str, DatasetRequest]]:
    """The training sets with their weights, and the validation sets by name; raises DataError, StorageError."""

    def request(key: str, paths: list[str], held_out: float) -> DatasetRequest:
        return DatasetRequest(key, list_files(paths, key, storage_timeout_s), held_out)

    train = [(request("data.source", paths, data.held_out), weight) for paths, weight in split_mixture(data.source)]
    return train, {name: request(f"data.validation.{name}", paths, 1.0) for name, paths in data.validation.items()}


def split_mixture(source: Iterable[Any]) -> list[tuple[list[str], float]]:
    """The separately prepared sources, and their weights: one, unless entries have weights."""
    entries = list(source)
    if all(isinstance(entry, str) for entry in entries):
        return [(entries, 1.0)]
    return [([entry], 1.0) if isinstance(entry, str) else (list(entry.path), entry.weight) for entry in entries]


def list_files(
    sources: list[str], key: str = "data.source", storage_timeout_s: float = storage.TIMEOUT_S
) -> list[SourceFile]:
    """The files of all sources in order of the sources, each file once; folders, globs and `stdlib` in sorted order.

    `key` is what the sources were set under. Raises DataError for a source that names nothing, a folder of several
    kinds of files, or files that hold no byte.
    """
    if not sources:
        raise DataError(f'{key} is empty, so there is nothing to train on; give files, globs or "stdlib"')
    files: dict[str, SourceFile] = {}
    for source in sources:
        for file in _files(source, key, storage_timeout_s):
            files.setdefault(file.path, file)
    if not sum(file.size_bytes for file in files.values()):
        raise DataError(f"{key} {sources} has only empty files, so there is nothing to train on; give others")
    return list(files.values())


def check_format(files: Iterable[SourceFile], format: str) -> None:
    """Raise DataError for files that cannot hold documents of the format."""
    for file in files:
        name = redact_url(file.path)
        if format in ("tags", "classes", "masked"):
            if (file.kind == FileKind.SHARDS) != (format == "masked") or file.kind in (FileKind.TALKS, FileKind.TOKENS):
                need = "shards of masked sequences" if format == "masked" else "labelled records"
                raise DataError(f"{name} is {file.kind}, but {need} are needed; give other files")
            continue
        if file.kind == FileKind.SHARDS:
            raise DataError(
                f"{name} is an HDF5 file, which holds masked sequences; set data.format=masked, or give other files"
            )
        if file.kind == FileKind.TALKS and format != "chat":
            raise DataError(f'"{STDLIB_CHAT}" holds conversations, but data.format is {format}; set data.format=chat')
        if file.kind in (FileKind.TEXT, FileKind.TOKENS) and format != "text":
            what = "running text" if file.kind == FileKind.TEXT else "token ids"
            raise DataError(
                f"{name} is {what}, but data.format is {format}, which needs records (.jsonl, .json, .parquet); set "
                "data.format=text or give files of records"
            )


def file_suffix(path: str) -> str:
    """The ending of a file's name without that of its compression, in lower case."""
    name = path.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return os.path.splitext(name)[1]


def guess_kind(path: str) -> str:
    """What a file holds, told from its name."""
    return KINDS.get(file_suffix(path), FileKind.TEXT)


# ------------------------------------------------------------------------------------------------------------- finding


def _files(source: str, key: str, timeout_s: float) -> list[SourceFile]:
    if source in (STDLIB, STDLIB_CHAT):
        kind = FileKind.TEXT if source == STDLIB else FileKind.TALKS
        return [_local(path, key, lenient=True, kind=kind) for path in _stdlib_paths(source, key)]
    if not source:
        raise DataError(f"{key} has an empty entry; give a file, a folder, a glob or a URL, or remove it")
    if source.startswith(HUB):
        return [resolve_hub_source(source, key)]
    if storage.is_url(source):
        return _remote_files(source, key, timeout_s)
    expanded = os.path.abspath(os.path.expanduser(source))
    if os.path.isdir(expanded):
        return [_local(os.path.join(expanded, name), key) for name in _of_folder(source, _walk(expanded), key)]
    if os.path.isfile(expanded):
        return [_local(expanded, key)]
    if os.path.isfile(f"{expanded}.idx"):  # Megatron's tools name a pair of files by their common prefix
        return [_local(f"{expanded}.idx", key)]
    found = sorted(Path(name) for name in glob.glob(expanded, recursive=True) if os.path.isfile(name))
    if not found:
        raise DataError(
            f"{key} names {source}, but no such file exists; correct the path (a relative one starts at {os.getcwd()})"
        )
    return [_local(str(path), key) for path in _without_bins(list(map(str, found)))]


def _local(path: str, key: str, lenient: bool = False, kind: str | None = None) -> SourceFile:
    kind = kind or guess_kind(path)
    try:
        status = os.stat(path)
        size, version = status.st_size, str(status.st_mtime_ns)
        if kind == FileKind.TOKENS:  # the bytes lie in the other file of the pair
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
            f"{key} names the folder {redact_url(folder)}, in which no file has a known extension (.txt, .md, "
            ".jsonl, .parquet and others); give its files as a glob such as "
            f"{redact_url(folder).rstrip('/')}/**/*.log"
        )
    first: dict[str, str] = {}
    for name in known:
        kind = guess_kind(name)
        first.setdefault("records" if kind in (FileKind.LINES, FileKind.LIST, FileKind.ROWS) else kind, name)
    if len(first) > 1:
        (kind, name), (other_kind, other) = sorted(first.items())[:2]
        raise DataError(
            f"{key} names the folder {redact_url(folder)}, which mixes kinds of files ({name} is {kind}, {other} is "
            f"{other_kind}); select the files with a glob such as "
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
        raise DataError(f"{key} names {redact_url(source)}, but no such file exists; correct the URL")
    files = []
    for path in paths:
        size, version = entries[path].size, entries[path].version
        if guess_kind(path) == FileKind.TOKENS:
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
        raise DataError(f'{key} names "{source}", but {root} holds no .py files; give your own files')
    return [str(path) for path in files]


# ----------------------------------------------------------------------------------------------------------------- hub
# Datasets of the Hugging Face hub, or of a local folder in its layout, streamed by the `datasets` library.


def resolve_hub_source(source: str, key: str) -> SourceFile:
    """`hub:NAME[:CONFIG[:SPLIT]]` as one file of a source; its version is that of the dataset's files.

    Raises DataError for a dataset, configuration or split that is not there or cannot be reached.
    """
    split = _parts(source)[2]
    if (saved := _saved(source)) is not None:
        return _saved_file(source, saved, key)
    builder = _builder(source, key)
    files = builder.config.data_files
    if files is not None and split not in files:
        raise DataError(
            f"{key} names {source}, but the dataset has no split {split} (it has: {', '.join(map(str, files))}); "
            "give one as hub:NAME:CONFIG:SPLIT"
        )
    facts = [builder.hash, builder.config.name]
    size = 1
    if files is not None:
        origins = zip(files[split], files[split].origin_metadata, strict=True)
        facts += [[str(file), [str(fact) for fact in origin]] for file, origin in origins]
        size = sum(os.path.getsize(file) for file in files[split] if os.path.isfile(file)) or len(files[split])
    return _hub_file(source, size, facts)


def _hub_file(source: str, size: int, facts: list[Any]) -> SourceFile:
    name, config, split = _parts(source)
    path = ":".join([os.path.abspath(name) if os.path.isdir(name) else name, config or "", split])
    return SourceFile(HUB + path, FileKind.REMOTE, size, json.dumps(facts))


def read_hub_label_names(source: str, key: str) -> list[str] | None:
    """The names of a column's numbers, where the dataset has them."""
    _stream(source)  # only then a folder of files has been looked into
    feature = (_stream(source).features or {}).get(key)
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return None if names is None else [str(name) for name in names]


def _saved(source: str) -> str | None:
    """The folder of a local dataset, or of its split, that was written by its save_to_disk."""
    name, _, split = _parts(source)
    if os.path.isfile(os.path.join(name, "dataset_dict.json")):
        return os.path.join(os.path.abspath(name), split)
    return os.path.abspath(name) if os.path.isfile(os.path.join(name, "state.json")) else None


def _saved_file(source: str, folder: str, key: str) -> SourceFile:
    try:
        with open(os.path.join(folder, "state.json"), encoding="utf-8") as file:
            names = [one["filename"] for one in json.load(file)["_data_files"]]
        facts = [[name, os.stat(os.path.join(folder, name)).st_mtime_ns] for name in names]
        size = sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{key} names {source}, but {folder} is not a complete dataset of the datasets library "
            f"({shorten_error(error)}); give another split as hub:FOLDER::SPLIT, or save it again"
        ) from None
    return _hub_file(source, size, facts)


def count_shards(source: str) -> int:
    """The number of shards of a dataset."""
    return max(1, int(_stream(source).num_shards))


def read_shard(source: str, index: int, count: int) -> Iterator[dict[str, Any]]:
    """The records of shard `index` of `count`. Raises DataError when the stream breaks."""
    stream = _stream(source).shard(num_shards=count, index=index)
    rows = iter(stream)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # its readers raise whatever the file format's library raises
            raise DataError(
                f"{source} failed in shard {index + 1} of {count} ({shorten_error(error)}); restart to continue there"
            ) from None
        if row is None:
            return
        yield row


def _parts(source: str) -> tuple[str, str | None, str]:
    name, _, rest = source.removeprefix(HUB).partition(":")
    config, _, split = rest.partition(":")
    return os.path.expanduser(name), config or None, split or DEFAULT_SPLIT


def _builder(source: str, key: str = "data.source") -> Any:
    import datasets

    datasets.disable_progress_bars()
    for library in ("datasets", "huggingface_hub"):  # they tell of each try
        logging.getLogger(library).setLevel(logging.ERROR)
    name, config, _ = _parts(source)
    try:
        return datasets.load_dataset_builder(name, config)
    except Exception as error:  # of the network, the hub, or the dataset's files: one sentence for all
        raise DataError(
            f"{key} names {source}, which the datasets library cannot open ({shorten_error(error)}); correct the "
            "name (hub:NAME:CONFIG:SPLIT), or check the network"
        ) from None


def _stream(source: str) -> Any:
    if (saved := _saved(source)) is not None:
        import datasets

        try:
            return datasets.load_from_disk(saved).to_iterable_dataset()
        except Exception as error:  # of its readers, as below
            raise DataError(f"{source} cannot be read ({shorten_error(error)}); save the dataset again") from None
    builder = _builder(source)
    try:
        return builder.as_streaming_dataset(split=_parts(source)[2])
    except ValueError as error:
        raise DataError(
            f"{source} cannot be streamed ({shorten_error(error)}); give another split or dataset"
        ) from None
