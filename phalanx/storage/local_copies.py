"""Local copies of files at a URL or on the Hugging Face hub: their paths, and the lock during a copy."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.core.errors import ConfigError
from phalanx.storage import files as storage
from phalanx.storage import hub

LOCK_TIMEOUT_S, LOCK_POLL_S = 3600.0, 0.1
_MODEL = re.compile(r"\.(?:json|safetensors|bin|model|jinja|txt)$")  # files of a model's folder that are read


@contextlib.contextmanager
def lock_file(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock on this machine, which the kernel releases when its holder dies. Raises ConfigError
    after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        with open(path, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process has held {path} for {timeout_s:.0f} s to make the same files; wait for it "
                        "or end it, then restart"
                    ) from None
            else:
                if _same(file.fileno(), path):  # else it was removed between opening and locking
                    os.utime(path)
                    yield
                    return
        time.sleep(LOCK_POLL_S)


def _same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def is_remote(folder: str) -> bool:
    """Whether a text names a folder at a URL or a repository of the hub, not a local folder."""
    return storage.is_url(folder) or hub.is_hub_name(folder)


def local_copy_path(folder: str, cache: str) -> Path:
    """Path in the cache of a remote folder's local copy; a local folder is its own copy."""
    if not is_remote(folder):
        return Path(folder).expanduser()
    url = folder.rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return storage.local_cache(cache) / "fetched" / f"{url.rpartition('/')[2]}-{digest}"


def fetch_folder(
    folder: str, cache: str = storage.DEFAULT_CACHE, timeout_s: float = storage.TIMEOUT_S, weights: bool = True
) -> Path:
    """Make a local copy of a model's remote folder atomically, unless there is a current one. Without `weights`, these
    may be missing from it. For a name on the hub, the copy is a link into the cache of huggingface_hub. Several
    processes may call this at once: one downloads, the others wait. Raises ConfigError for an empty folder, and when
    the wait takes too long.
    """
    copy = local_copy_path(folder, cache)
    if not is_remote(folder):
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(copy.with_name(f".{copy.name}.lock"), LOCK_TIMEOUT_S):
        if hub.is_hub_name(folder):
            return hub.fetch_snapshot(folder, copy, weights)
        found = {
            entry.name: entry for entry in storage.list_folder(folder, timeout_s=timeout_s) if _MODEL.search(entry.name)
        }
        if any(name.endswith(".safetensors") for name in found):
            found = {name: entry for name, entry in found.items() if not name.endswith(".bin")}
        if not weights:
            found = {name: entry for name, entry in found.items() if not name.endswith((".bin", ".safetensors"))}
        if not found:
            raise ConfigError(f"{storage.redact_url(folder)} has no model files; correct the URL")
        state = {name: [entry.size, entry.version] for name, entry in found.items()}
        mark = copy / ".source.json"
        there = json.loads(mark.read_text(encoding="utf-8")) if mark.is_file() else {}
        if all(there.get(name) == one for name, one in state.items()):
            return copy
        unfinished = copy.with_name(f".{copy.name}.partial")  # only the lock's holder writes it
        shutil.rmtree(unfinished, ignore_errors=True)
        for name, entry in found.items():
            storage.download(entry.url, unfinished / name, timeout_s)
        (unfinished / mark.name).write_text(json.dumps(state), encoding="utf-8")
        if copy.exists():
            old = copy.with_name(f".{copy.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.rename(copy, old)
            shutil.rmtree(old, ignore_errors=True)
        os.rename(unfinished, copy)
    return copy
