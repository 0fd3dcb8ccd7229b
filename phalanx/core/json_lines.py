"""JSON-lines files that processes append to, and files that are replaced whole or not at all."""

import errno
import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line with a single write, so that lines of several writers never mix.

    A number that is not finite (a loss that has run away) is written as null, which is all that JSON can say of it.
    Raises OSError where it does not fit on the disk; the same record may be appended again later.
    """
    known = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    line = (json.dumps(known, allow_nan=False, default=str) + "\n").encode()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # without it, another writer's line in the making looks torn
        if (end := os.fstat(fd).st_size) and os.pread(fd, 1, end - 1) != b"\n":
            line = b"\n" + line  # a writer died, or the disk was full, within the last line: lose that one alone
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(fd)


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or the new one, never a part. Raises OSError."""
    if path.exists() and not path.is_file() and not path.is_dir():  # root would put a file in a device's place
        raise OSError(errno.EINVAL, "it is a device or a pipe")
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")  # processes of two nodes may have one number
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder (creations, renames) survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def parse_object(raw: bytes | str) -> dict[str, Any] | None:
    """The object that a JSON text is; None where it is torn or something else."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; a torn line (a writer died in it) is passed over."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        yield from (record for line in file if (record := parse_object(line)) is not None)


def read_recent_lines(path: Path, least_bytes: int) -> list[dict[str, Any]]:
    """The whole records in the last bytes of a JSON-lines file, at least so many of them if it has them."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - least_bytes)
        file.seek(start)
        lines = file.read().splitlines()[1 if start else 0 :]
    return [record for line in lines if (record := parse_object(line)) is not None]


def read_last_line(path: Path) -> dict[str, Any] | None:
    """The last whole record of a JSON-lines file, without reading all of it; None where there is none near its end."""
    return next(reversed(read_recent_lines(path, 2**20)), None)
