"""The cache of prepared data: one folder per result, complete or absent, made by one process at a time.

Where the cache is a URL, results lie below it as well: fetched from there, and put there once they are made.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.json_lines import sync_folder
from phalanx.storage import files as storage
from phalanx.storage import local_copies

ABOUT_FILE = "prepared.json"  # inputs of a result; in a store it comes last and marks the result complete
STALE_S = 7 * 24 * 3600.0  # the leftovers of a killed run are kept that long, so that it can resume
EXPORT_PREFIX = "export-"  # prefix of folders that are never resumed: removed as soon as no process holds them
_LEFTOVER = re.compile(r"[a-z-]*[0-9a-f]{32}\.(partial|lock)")


@dataclass(frozen=True)
class Cache:
    """`folder` is local; `url` is where results are kept for others too, if anywhere."""

    folder: Path
    url: str | None
    lock_timeout_s: float = local_copies.LOCK_TIMEOUT_S
    storage_timeout_s: float = storage.TIMEOUT_S

    def has(self, key: str) -> bool:
        """Whether a result is complete here."""
        return is_complete(self.folder / key)

    def get_or_make(self, key: str, make: Callable[[Path, Path], None]) -> Path:
        """The folder of a result: from here, from the store, or made by `make(partial, out)`.

        `partial` is kept when `make` is interrupted and given to it again; what it writes to `out`, a fresh folder, is
        the result. Raises ConfigError when another process holds it for too long.
        """
        folder = self.folder / key
        if not is_complete(folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with local_copies.lock_file(self.folder / f"{key}.lock", self.lock_timeout_s):
                if not is_complete(folder):  # the previous holder of the lock may have made it
                    partial = self.folder / f"{key}.partial"
                    partial.mkdir(exist_ok=True)
                    out = partial / "out"
                    _fresh(out)  # a run may have been killed while it made it
                    if not (self.url and self._fetch(key, out)):
                        _fresh(out)
                        make(partial, out)
                    sync_folder(out)
                    if folder.exists():  # a part of it was deleted
                        shutil.rmtree(folder)
                    os.rename(out, folder)
                    sync_folder(folder.parent)
                    shutil.rmtree(partial)
        if self.url and not storage.exists(storage.join_url(self.url, key, ABOUT_FILE), self.storage_timeout_s):
            self._put(key, folder)
        return folder

    def _fetch(self, key: str, out: Path) -> bool:
        assert self.url is not None
        base = storage.join_url(self.url, key)
        try:
            about = storage.read_bytes(storage.join_url(base, ABOUT_FILE), timeout_s=self.storage_timeout_s)
        except FileNotFoundError:
            return False
        try:
            for name in json.loads(about)["files"]:
                storage.download(storage.join_url(base, name), out / name, self.storage_timeout_s)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            # A part of it was deleted or damaged: without this file it is uploaded again.
            storage.remove([storage.join_url(base, ABOUT_FILE)], self.storage_timeout_s)
            return False
        (out / ABOUT_FILE).write_bytes(about)
        return True

    def _put(self, key: str, folder: Path) -> None:
        assert self.url is not None
        for name in [*json.loads((folder / ABOUT_FILE).read_text())["files"], ABOUT_FILE]:
            storage.upload(folder / name, storage.join_url(self.url, key, name), self.storage_timeout_s)


def _fresh(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a complete result."""
    try:
        files = json.loads((folder / ABOUT_FILE).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return False
    return all((folder / name).is_file() for name in files)


def write_description(out: Path, content: dict[str, Any]) -> None:
    """Write what a result was made of, and its files, into its folder."""
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    (out / ABOUT_FILE).write_text(json.dumps({"files": files, **content}, indent=1))


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A new folder in the cache, for as long as the block lasts; one whose process was killed is removed by the next
    `prune`."""
    folder.mkdir(parents=True, exist_ok=True)
    prune(folder)
    path = folder / f"{EXPORT_PREFIX}{secrets.token_hex(16)}.partial"
    lock = path.with_suffix(".lock")
    with local_copies.lock_file(lock, local_copies.LOCK_TIMEOUT_S):
        try:
            path.mkdir()
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            lock.unlink(missing_ok=True)


def prune(folder: Path) -> None:
    """Remove old leftovers of killed runs, and any of killed exports, that no process holds."""
    for path in sorted(folder.glob("*")):
        if not _LEFTOVER.fullmatch(path.name) or not (path.name.startswith(EXPORT_PREFIX) or _is_stale(path)):
            continue
        lock = path.with_suffix(".lock")
        with contextlib.suppress(OSError), open(lock, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.suffix == ".partial":
                shutil.rmtree(path)
            lock.unlink(missing_ok=True)


def _is_stale(path: Path) -> bool:
    try:
        newest = max(one.lstat().st_mtime for one in (path, *path.glob("*")))
    except OSError:  # its owner has just finished
        return False
    return time.time() - newest > STALE_S
