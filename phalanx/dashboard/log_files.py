"""Logs of a run for the page: a list, a part of one, and a search for lines.

A log is identified by the path in `list_logs`; any other name is refused, so no path of a request reaches a file.
"""

import os
import stat
from pathlib import Path
from typing import Any

from phalanx.core.run_paths import RunPaths

PART_BYTES = 64 * 1024  # shown at once
SEARCH_BYTES = 32 << 20  # searched at once, from the end of a log backwards
MATCHES = 500
LINE_CHARACTERS = 4000  # a longer line is truncated
LOGS = 5000  # listed of one run, the newest attempts first

Facts = dict[str, Any]


def list_logs(paths: RunPaths) -> list[Facts]:
    """Logs of the run: of nodes and jobs, then of ranks, the newest attempt first. Links are left out."""
    root = paths.node_log(0).parent
    found: list[Facts] = []
    for folder in (root, *(paths.log(number, 0).parent for number in sorted(paths.list_logged_attempts())[::-1])):
        if folder.is_symlink() or not folder.is_dir():
            continue
        for path in sorted(folder.glob("*.log")):
            try:
                state = path.lstat()
            except OSError:
                continue
            if stat.S_ISREG(state.st_mode) and len(found) < LOGS:
                found.append({"name": path.relative_to(root).as_posix(), "bytes": state.st_size})
    return found


def find_log(paths: RunPaths, name: str) -> Path | None:
    """The file of a listed log; None for any other name."""
    known = {log["name"] for log in list_logs(paths)}
    return paths.node_log(0).parent / name if name in known else None


def read_part(path: Path, before: int | None = None, after: int | None = None) -> Facts:
    """Lines that end at the offset `before` (None: at the end of the file), or that begin at the offset `after`."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if after is not None and after > size:  # the file was truncated
            after = 0
        if after is not None:
            start = after
            data = os.pread(file.fileno(), PART_BYTES, start)
            data = data[: data.rfind(b"\n") + 1] if len(data) == PART_BYTES and b"\n" in data else data
        else:
            end = size if before is None else max(0, min(before, size))
            start = max(0, end - PART_BYTES)
            data = os.pread(file.fileno(), end - start, start)
            if start and b"\n" in data[:-1]:
                cut = data.index(b"\n") + 1
                start, data = start + cut, data[cut:]
    return {"start": start, "end": start + len(data), "bytes": size, "lines": _lines(data, start)}


def search(path: Path, text: str, before: int | None = None) -> Facts:
    """The last MATCHES lines that contain a text, upper or lower case, before an offset. `start` is how far back was
    searched: 0 is the whole log."""
    needle = text.encode().lower()
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        end = size if before is None else max(0, min(before, size))
        least = max(0, end - SEARCH_BYTES)
        found: list[tuple[int, str]] = []
        stop = end
        while stop > least and len(found) < MATCHES:
            start = max(least, stop - (1 << 20))
            data = os.pread(file.fileno(), stop - start, start)
            if start > least and b"\n" in data[:-1]:
                cut = data.index(b"\n") + 1
                start, data = start + cut, data[cut:]
            found = [line for line in _lines(data, start) if needle in line[1].encode().lower()] + found
            stop = start
    if len(found) > MATCHES:
        found = found[-MATCHES:]
        stop = found[0][0]
    return {"start": stop, "end": end, "bytes": size, "lines": found}


def _open(path: Path) -> Any:
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0)


def _lines(data: bytes, start: int) -> list[tuple[int, str]]:
    """Lines with the offset of each; a progress bar's returns end lines as well."""
    found = []
    for line in data.splitlines(keepends=True):
        text = line.rstrip(b"\r\n")[:LINE_CHARACTERS].decode(errors="replace")
        found.append((start, text))
        start += len(line)
    return found
