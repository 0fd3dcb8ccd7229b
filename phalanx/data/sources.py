"""Sources of text: which files they are, and their documents in one fixed order that can be taken up at any document.

A source is the word `stdlib` (the standard library of the running Python), a path or a glob. A `.jsonl` file holds one
document a line; any other file is one document.
"""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from phalanx.errors import DataError

STDLIB = "stdlib"
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"})


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. `lenient`: bytes that are not UTF-8 are replaced (nobody can mend the standard library)."""

    path: Path
    size_bytes: int
    mtime_ns: int
    lenient: bool = False


class Cursor(NamedTuple):
    """Where to go on reading: index of the file, byte within it, number of lines before that byte."""

    file: int
    byte: int
    line: int


START = Cursor(0, 0, 0)


@dataclass(frozen=True)
class Document:
    """The text of one document, and the cursor behind it."""

    text: str
    after: Cursor


def list_files(sources: list[str]) -> list[SourceFile]:
    """The files of all sources in order of the sources, each file once; globs and `stdlib` in sorted order.

    Raises DataError for a source that names nothing, a folder, or files that hold no byte.
    """
    if not sources:
        raise DataError('data.source is empty, so there is nothing to train on; name files, globs or "stdlib"')
    files: dict[Path, SourceFile] = {}
    for source in sources:
        for path in _paths(source):
            try:
                status = path.stat()
            except OSError as error:
                raise DataError(_unreadable(path, error)) from None
            files.setdefault(path, SourceFile(path, status.st_size, status.st_mtime_ns, lenient=source == STDLIB))
    if not sum(file.size_bytes for file in files.values()):
        raise DataError(f"data.source {sources} holds only empty files, so there is nothing to train on; name others")
    return list(files.values())


def documents(files: list[SourceFile], text_key: str, start: Cursor = START) -> Iterator[Document]:
    """All documents from `start` on; empty texts are passed over. Raises DataError naming file and line."""
    for number in range(start.file, len(files)):
        file = files[number]
        try:
            if file.path.suffix == ".jsonl":
                yield from _json_lines(file, number, text_key, start if number == start.file else Cursor(number, 0, 0))
            else:
                text = _decode(file.path.read_bytes(), file, first_line=1)
                if text:
                    yield Document(text, Cursor(number + 1, 0, 0))
        except OSError as error:
            raise DataError(_unreadable(file.path, error)) from None


def bytes_before(files: list[SourceFile], cursor: Cursor) -> int:
    """How many source bytes lie before a cursor: what a progress bar shows."""
    return sum(file.size_bytes for file in files[: cursor.file]) + cursor.byte


def text_digest(text: str) -> bytes:
    """The sha256 of a document: what decides on which side it falls, on any machine and in any order of files."""
    return hashlib.sha256(text.encode()).digest()


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether a document is kept for evaluation: its digest, read as a number in [0, 1), is below `fraction`."""
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def _paths(source: str) -> list[Path]:
    if source == STDLIB:
        return _stdlib_paths()
    expanded = os.path.abspath(os.path.expanduser(source))
    if os.path.isdir(expanded):
        raise DataError(
            f"data.source names the folder {source}, which has no order of its own; write "
            f"{source.rstrip('/')}/**/*.txt or alike"
        )
    if os.path.exists(expanded):
        return [Path(expanded)]
    found = sorted(Path(name) for name in glob.glob(expanded, recursive=True) if os.path.isfile(name))
    if not found:
        raise DataError(
            f"data.source names {source}, but there is no such file; correct the path (a relative one starts at "
            f"{os.getcwd()})"
        )
    return found


def _stdlib_paths() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files = sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())
    if not files:
        raise DataError(f'data.source names "stdlib", but {root} holds no .py files; name text files of your own')
    return files


def _json_lines(file: SourceFile, number: int, text_key: str, start: Cursor) -> Iterator[Document]:
    with open(file.path, "rb") as stream:
        stream.seek(start.byte)
        line_number = start.line
        for raw in stream:
            line_number += 1
            text = _json_text(raw, file, line_number, text_key)
            start = Cursor(number, start.byte + len(raw), line_number)
            if text:
                yield Document(text, start)


def _json_text(raw: bytes, file: SourceFile, line_number: int, text_key: str) -> str:
    where = f"{file.path}, line {line_number}"
    line = _decode(raw, file, line_number).strip()
    if not line:
        raise DataError(f"{where} is empty, but each line of a .jsonl file is one document; delete the line")
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON ({error.msg}, column {error.colno}); correct or delete the line"
        ) from None
    if not isinstance(record, dict) or text_key not in record:
        keys = ", ".join(list(record)[:8]) if isinstance(record, dict) else "no object"
        raise DataError(
            f"{where} has no key {text_key!r} (it has: {keys}); set data.text_key to the key that holds the text"
        )
    text = record[text_key]
    if not isinstance(text, str):
        raise DataError(
            f"{where} has a {type(text).__name__} under {text_key!r} instead of text; set data.text_key to another key"
        )
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell what is no character, as in \\ud800
        raise DataError(f"{where} holds half of a surrogate pair, not text; correct or delete the line") from None
    return text


def _decode(raw: bytes, file: SourceFile, first_line: int) -> str:
    try:
        return raw.decode("utf-8-sig", "replace" if file.lenient else "strict")
    except UnicodeDecodeError as error:
        line = first_line + raw[: error.start].count(b"\n")
        raise DataError(
            f"{file.path}, line {line} is not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start}); convert the "
            f"file, for example with iconv"
        ) from None


def _unreadable(path: Path, error: OSError) -> str:
    return f"data.source names {path}, which cannot be read ({error.strerror}); correct the path or its permissions"
