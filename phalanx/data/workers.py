"""Processes that encode chunks side by side; the first error in the order of the chunks is the one that is told.

They are fresh interpreters, not forks, so the parent may have any number of threads; they end with it.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from phalanx.core.errors import ConfigError, DataError, PhalanxError, StorageError
from phalanx.core.json_lines import sync_folder
from phalanx.core.run_paths import redact_url
from phalanx.data.encode import EncodeTask
from phalanx.storage import files as storage
from phalanx.storage import local_copies

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from phalanx.data.encode import main; main()"
TRIES = 2  # of a chunk whose worker dies
ERROR_TYPES: dict[str, type[PhalanxError]] = {error.__name__: error for error in (ConfigError, DataError, StorageError)}


class _Worker:
    """One process and the task that it works on."""

    def __init__(self, number: int, log: Path) -> None:
        self.number = number
        self.log = log
        self.task: int | None = None
        self.rest = b""
        with open(log, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def assign(self, index: int, task: EncodeTask) -> None:
        self.task = index
        with contextlib.suppress(BrokenPipeError):  # it has died: the end of its output will say so
            self.stdin.write((json.dumps(asdict(task)) + "\n").encode())
            self.stdin.flush()

    def read_lines(self) -> list[bytes] | None:
        """What it has said since; None when it has ended."""
        data = os.read(self.stdout.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines

    def kill(self) -> str:
        """Kill it, and say how it had ended by itself."""
        code = self.process.poll()
        self.process.kill()
        self.process.wait()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        if code is None:
            code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"{how}: {last[0]}" if last else how


def encode_in_processes(tasks: Sequence[EncodeTask], count: int, logs: Path, on_bytes: Callable[[int], None]) -> None:
    """Encode all tasks with up to `count` processes; their error output goes to `logs`.

    Raises the error of the first task, in order, that has one: DataError, ConfigError, StorageError, OSError of the
    cache; DataError too for a task whose worker died twice; RuntimeError with a traceback for anything else. No process
    is left when it returns or raises, KeyboardInterrupt included.
    """
    waiting = deque(range(len(tasks)))
    tries = [0] * len(tasks)
    told = [0] * len(tasks)  # bytes counted of each, taken back when it is done again
    failed: dict[int, Exception] = {}
    workers: list[_Worker] = []
    started = 0

    with selectors.DefaultSelector() as selector:

        def start() -> None:
            nonlocal started
            worker = _Worker(started, logs / f"worker-{started}.log")
            started += 1
            workers.append(worker)
            selector.register(worker.stdout, selectors.EVENT_READ, worker)
            assign(worker)

        def assign(worker: _Worker) -> None:
            worker.task = None
            if waiting and not failed:
                index = waiting.popleft()
                tries[index] += 1
                worker.assign(index, tasks[index])

        def hear(worker: _Worker, message: dict[str, Any]) -> None:
            index = worker.task
            assert index is not None, "an answer without a task"
            if "bytes" in message:
                told[index] += message["bytes"]
                on_bytes(message["bytes"])
                return
            if "done" not in message:
                failed[index] = _error(message, tasks[index])
            assign(worker)

        def bury(worker: _Worker) -> None:
            selector.unregister(worker.stdout)
            workers.remove(worker)
            how, index = worker.kill(), worker.task
            if index is None:
                return
            on_bytes(-told[index])
            told[index] = 0
            if tries[index] < TRIES:
                waiting.appendleft(index)
                start()
            else:
                failed[index] = DataError(
                    f"worker process {worker.number} died ({how}) at {_what(tasks[index])}, as one before it had done; "
                    f"if memory ran out, lower data.workers"
                )

        try:
            for _ in range(min(count, len(tasks))):
                start()
            while any(worker.task is not None for worker in workers):
                if failed and all(worker.task is None or worker.task > min(failed) for worker in workers):
                    break
                for key, _ in selector.select():
                    worker = key.data
                    lines = worker.read_lines()
                    if lines is None:
                        bury(worker)
                    for line in lines or ():
                        hear(worker, json.loads(line))
        finally:
            for worker in workers:
                worker.kill()
    if failed:
        raise failed[min(failed)]


def _error(message: dict[str, Any], task: EncodeTask) -> Exception:
    if "errno" in message:
        return OSError(message["errno"], message["message"], message["file"])
    if message["error"] in ERROR_TYPES:
        return ERROR_TYPES[message["error"]](message["message"])
    return RuntimeError(f"at {_what(task)}:\n{message['message']}")


def _what(task: EncodeTask) -> str:
    more = f" and {len(task.chunk.paths) - 1} more" if len(task.chunk.paths) > 1 else ""
    place = f", bytes {task.chunk.start} to {task.chunk.stop}" if task.chunk.stop else ""
    return f"{redact_url(task.chunk.paths[0])}{more}{place}"


# --------------------------------------------------------------------------------------------------------------- cache
# The folder where prepared data lies: one folder a result, there whole or not at all, made by one process at a time.
# Where the cache is a URL, results lie below it as well: fetched from there, and put there once they are made.


ABOUT_FILE = "prepared.json"  # what a result was made of; in a store it comes last and says that all is there
STALE_S = 7 * 24 * 3600.0  # what a killed run left is kept that long, so that it may go on
EXPORT_PREFIX = "export-"  # how names begin of what nobody goes on with: it is removed as soon as nobody holds it
_LEFTOVER = re.compile(r"[a-z-]*[0-9a-f]{32}\.(partial|lock)")


@dataclass(frozen=True)
class Cache:
    """`folder` is local; `url` is where results are kept for others too, if anywhere."""

    folder: Path
    url: str | None
    lock_timeout_s: float = local_copies.LOCK_TIMEOUT_S
    storage_timeout_s: float = storage.TIMEOUT_S

    def has(self, key: str) -> bool:
        """Whether a result is here whole."""
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
                if not is_complete(folder):  # whoever held the lock before may have made it
                    partial = self.folder / f"{key}.partial"
                    partial.mkdir(exist_ok=True)
                    out = partial / "out"
                    _fresh(out)  # a run may have been killed while it made it
                    if not (self.url and self._fetch(key, out)):
                        _fresh(out)
                        make(partial, out)
                    sync_folder(out)
                    if folder.exists():  # somebody deleted a part of it
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
            # Somebody deleted or damaged a part of it: without this file it is put there again.
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
    """Whether a folder holds a whole result: nobody has deleted a part of it."""
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
    """Remove what killed runs left long ago, and killed exports just now, and nobody holds."""
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
