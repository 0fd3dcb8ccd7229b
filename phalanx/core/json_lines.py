"""JSON-lines files that several processes append to, and atomic replacement of files."""

import errno
import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line with a single write, so that lines of several writers never mix. A number that is not finite
    (a loss that has diverged) is written as null, since JSON has no other value for it. Raises OSError if the disk is
    full; the same record may be appended again later.
    """
    known = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    line = (json.dumps(known, allow_nan=False, default=str) + "\n").encode()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # without the lock, an unfinished line of another writer looks torn
        if (end := os.fstat(fd).st_size) and os.pread(fd, 1, end - 1) != b"\n":
            line = b"\n" + line  # the last line is torn (its writer died, or the disk was full); only that line is lost
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(fd)


def write_atomic(path: Path, text: str) -> None:
    """Write a text file atomically: a reader sees the old or the new content, never a part. Raises OSError."""
    if path.exists() and not path.is_file() and not path.is_dir():  # root could replace a device file
        raise OSError(errno.EINVAL, "it is a device or a pipe")
    # Not the process id, which processes of two nodes may share
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that creations and renames in it survive a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def parse_object(raw: bytes | str) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is torn or has another type."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; a torn line (its writer died) is skipped."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        yield from (record for line in file if (record := parse_object(line)) is not None)


def read_recent_lines(path: Path, least_bytes: int) -> list[dict[str, Any]]:
    """Complete records in the last `least_bytes` of a JSON-lines file, and in more of it if they are fewer."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - least_bytes)
        file.seek(start)
        lines = file.read().splitlines()[1 if start else 0 :]
    return [record for line in lines if (record := parse_object(line)) is not None]


def read_last_line(path: Path) -> dict[str, Any] | None:
    """The last complete record of a JSON-lines file, read from its end; None without one near the end."""
    return next(reversed(read_recent_lines(path, 2**20)), None)
