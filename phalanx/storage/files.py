"""Files at URLs, through fsspec: each operation is retried until a deadline, and no reader sees a partial file.

Raises FileNotFoundError for a missing file, ConfigError for what a user has to fix (credentials, permissions, a bucket,
a driver), and StorageError for a store that failed or stalled for `timeout_s`; `retry` has the details. Object stores
show a file when it is complete; on others it is written under a temporary name and moved. Operations start threads, so
a process that will fork must not call them.
"""

import contextlib
import errno
import fnmatch
import functools
import io
import itertools
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractBufferedFile

from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import SCHEME, redact_url
from phalanx.storage.retry import RetryAttempt, T, call_with_retry, describe_error

TIMEOUT_S = 300.0
DEFAULT_CACHE = "~/.cache/phalanx"
CHUNK_BYTES = 8 << 20
# Object stores, which show an object only when it is complete; there a rename is a wasteful server-side copy.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "tos", "hf"})
_CHAINED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)::.*://")
_GLOB = re.compile(r"[*?\[]")
_VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "updated", "last_modified")  # names used by drivers


@dataclass(frozen=True)
class Entry:
    """A directory entry: a file, or a folder (`size` 0). `version` changes when the file does; "" if unknown."""

    url: str
    size: int
    version: str
    folder: bool = False

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return self.url.rstrip("/").rpartition("/")[2]


def is_url(text: str | Path) -> bool:
    """Whether a text is a URL (scheme://...) and not a local path. Raises ConfigError for a chain of drivers
    (driver::scheme://...), which would be mistaken for one."""
    if isinstance(text, str) and (chained := _CHAINED.match(text)):
        raise ConfigError(f"{chained[1]}::... chains drivers, which is not supported; give the inner URL only")
    return isinstance(text, str) and SCHEME.match(text) is not None


def join_url(url: str, *names: str) -> str:
    """Join a URL and names below it."""
    return "/".join([url.rstrip("/"), *names])


def local_cache(cache: str) -> Path:
    """The local folder of a `data.cache`; where that is a URL itself, the default one."""
    return Path(DEFAULT_CACHE if is_url(cache) else cache).expanduser()


def get_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path inside it, made once per process.

    Raises ConfigError for a scheme that fsspec does not know or whose driver is not installed.
    """
    parts = urlsplit(url)
    root = f"{parts.scheme}://{parts.netloc}" if parts.netloc else f"{parts.scheme}:///"
    try:
        files, _ = _make_filesystem(os.getpid(), root)
        return files, str(type(files)._strip_protocol(url))
    except ImportError as error:
        raise ConfigError(
            f"{redact_url(url)} needs a driver that is not installed ({describe_error(error, url)}); "
            "install it beside phalanx"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{redact_url(url)} cannot be opened ({describe_error(error, url)}); use a scheme that fsspec supports, "
            "such as s3://"
        ) from error


@functools.lru_cache(maxsize=16)
def _make_filesystem(pid: int, root: str) -> tuple[Any, str]:
    # Not fsspec's own cache, which has a separate instance, with separate connections, for each thread.
    made: tuple[Any, str] = fsspec.core.url_to_fs(root, skip_instance_cache=True)
    return made


def set_region(region: str) -> None:
    """Set S3's region for this process; by default the environment or S3 itself determines it."""
    settings = fsspec.config.conf.setdefault("s3", {})
    settings["client_kwargs"] = {**settings.get("client_kwargs", {}), "region_name": region}
    _make_filesystem.cache_clear()


def _retry(what: str, url: str, action: Callable[[RetryAttempt], T], timeout_s: float) -> T:
    return call_with_retry(what, url, action, timeout_s, _renew)


def _renew(url: str) -> None:
    """Drop drivers with a single connection, which may be broken; the others renew their connections themselves."""
    with contextlib.suppress(Exception):  # if it cannot be created, the next try reports that
        if not isinstance(get_filesystem(url)[0], AsyncFileSystem):
            _make_filesystem.cache_clear()


# ------------------------------------------------------------------------------------------- metadata and listings


def get_entry(url: str, timeout_s: float = TIMEOUT_S) -> Entry | None:
    """Size and version of the file at a URL; None if there is none."""

    def look(attempt: RetryAttempt) -> Entry:
        files, path = get_filesystem(url)
        files.invalidate_cache()
        return _entry(url, files.info(path))

    try:
        return _retry("queried", url, look, timeout_s)
    except FileNotFoundError:
        return None


def exists(url: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether there is a file or a folder at a URL."""
    return get_entry(url, timeout_s) is not None


def list_folder(url: str, recursive: bool = False, timeout_s: float = TIMEOUT_S) -> list[Entry]:
    """List a folder in order of name; with `recursive`, all files below it and no folders. Empty if the folder
    does not exist. A URL of a file lists that file."""
    if not recursive:
        return _list_with(url, timeout_s, lambda files, path: files.ls(path, detail=True))
    if urlsplit(url).scheme.lower() in OBJECT_STORES:
        # One request lists thousands of objects. Elsewhere `find` descends folder by folder, and treats a folder that
        # fails as empty.
        return _list_with(url, timeout_s, lambda files, path: files.find(path, detail=True).values())
    found = []
    for one in list_folder(url, timeout_s=timeout_s):
        found += list_folder(one.url, recursive=True, timeout_s=timeout_s) if one.folder else [one]
    return sorted(found, key=lambda one: one.url)


def _list_with(url: str, timeout_s: float, ask: Callable[[Any, str], Iterable[dict[str, Any]]]) -> list[Entry]:
    def look(attempt: RetryAttempt) -> list[Entry]:
        files, path = get_filesystem(url)
        files.invalidate_cache()
        entries = [_entry(_url_of(url, path, info["name"]), info) for info in ask(files, path)]
        return [one for one in entries if not (one.url.rstrip("/") == url.rstrip("/") and (one.folder or not one.size))]

    try:
        return sorted(_retry("listed", url, look, timeout_s), key=lambda one: one.url)
    except FileNotFoundError:
        return []


def glob(url: str, timeout_s: float = TIMEOUT_S) -> list[Entry]:
    """Files that match a URL with `*`, `?`, `[...]` or `**`, in order of URL; hidden ones only if the pattern
    names the dot. Without a pattern, the file at the URL or all files below it."""
    found = _GLOB.search(url)
    if found is None:
        whole = get_entry(url, timeout_s)
        return list_folder(url, recursive=True, timeout_s=timeout_s) if whole is None or whole.folder else [whole]
    folder, _, first = url[: found.start()].rpartition("/")
    return sorted(_matching(folder, (first + url[found.start() :]).split("/"), timeout_s), key=lambda one: one.url)


def _matching(folder: str, segments: list[str], timeout_s: float) -> Iterator[Entry]:
    """Files below a folder that match, segment by segment, so that only relevant folders are listed."""
    segment, rest = segments[0], segments[1:]
    if segment == "**":
        below = {join_url(folder, *parts[:n]) for one in list_folder(folder, recursive=True, timeout_s=timeout_s)
                 for parts in [one.url[len(folder.rstrip("/")) + 1 :].split("/")] for n in range(len(parts))
                 if not any(part.startswith(".") for part in parts[:n])}  # fmt: skip
        for inner in below:
            yield from _matching(inner, rest or ["*"], timeout_s)
        return
    if rest and not _GLOB.search(segment):
        yield from _matching(join_url(folder, segment), rest, timeout_s)
        return
    for one in list_folder(folder, timeout_s=timeout_s):
        if not fnmatch.fnmatchcase(one.name, segment) or (one.name.startswith(".") and not segment.startswith(".")):
            continue
        if rest and one.folder:
            yield from _matching(one.url, rest, timeout_s)
        elif not rest and not one.folder:
            yield one


def _url_of(folder: str, path: str, name: str) -> str:
    """URL of a store's file `name`, from the URL and the name of an enclosing folder."""
    base, own = path.rstrip("/"), name.rstrip("/")
    if own == base:
        return folder
    if own.startswith(base + "/"):
        return join_url(folder, own[len(base) + 1 :])
    return own if is_url(own) else join_url(folder, own.rpartition("/")[2])


def _entry(url: str, info: dict[str, Any]) -> Entry:
    folder = info.get("type") == "directory"
    version = next((info[key] for key in _VERSIONS if info.get(key) is not None), "")
    return Entry(url, 0 if folder else int(info.get("size") or 0), str(version).strip('"'), folder)


# ----------------------------------------------------------------------------------------------------------- reading


def read_bytes(url: str, start: int = 0, stop: int | None = None, timeout_s: float = TIMEOUT_S) -> bytes:
    """Read bytes [start, stop) of a file, to its end if `stop` is None. Raises as documented for the module; a
    file shorter than `stop` is a StorageError after the deadline."""
    if stop is not None and stop - start > CHUNK_BYTES:  # in parts, as a long read must not count as a stall
        bounds = [*range(start, stop, CHUNK_BYTES), stop]
        return b"".join(read_bytes(url, a, b, timeout_s) for a, b in itertools.pairwise(bounds))

    def read(attempt: RetryAttempt) -> bytes:
        files, path = get_filesystem(url)
        if stop is not None and stop <= start:
            return b""
        data = bytes(files.cat_file(path, start=start or None, end=stop))
        if stop is not None and len(data) != stop - start:
            raise OSError(f"{len(data)} bytes arrived where {stop - start} were requested")
        return data

    return _retry("read", url, read, timeout_s)


class _Ranges(io.RawIOBase):
    """A file as byte ranges: each read is a separate operation, so after an error only that range is read again."""

    def __init__(self, url: str, position: int, size: int, timeout_s: float) -> None:
        self._url, self._position, self._size, self._timeout_s = url, position, size, timeout_s

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(CHUNK_BYTES) or b"", b""))  # the inherited method reads 8 KiB at a time

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + min(len(buffer), CHUNK_BYTES), self._size)
        if stop <= self._position:
            return 0
        data = read_bytes(self._url, self._position, stop, self._timeout_s)
        buffer[: len(data)] = data
        self._position = stop
        return len(data)


def open_read(url: str, offset: int = 0, timeout_s: float = TIMEOUT_S) -> io.BufferedReader:
    """Open a file for reading from byte `offset`; reads continue after an error. Raises FileNotFoundError."""
    found = get_entry(url, timeout_s)
    if found is None or found.folder:
        raise FileNotFoundError(errno.ENOENT, "the file does not exist", redact_url(url))
    return io.BufferedReader(_Ranges(url, offset, found.size, timeout_s), CHUNK_BYTES)


def download(url: str, local: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Copy a file to a local path atomically. Raises OSError of the local disk too."""
    temporary = local.with_name(f".{local.name}.{os.getpid()}.partial")
    local.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open_read(url, timeout_s=timeout_s) as source, open(temporary, "wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
        os.replace(temporary, local)
    finally:
        temporary.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------- writing


def write_chunks(
    url: str, make_chunks: Callable[[], Iterable[bytes | memoryview]], timeout_s: float = TIMEOUT_S
) -> None:
    """Write a file from chunks; `make_chunks` is called again for each try and must return the same chunks."""

    def write(attempt: RetryAttempt) -> None:
        files, path = get_filesystem(url)
        with _target(files, url, path) as target:
            done = 0
            with _open_for_write(files, target) as file:
                for chunk in make_chunks():
                    file.write(chunk)
                    done += len(chunk)
                    attempt.report_progress(done)
            attempt.report_progress(done)
            if target != path and files.size(target) != done:
                raise OSError(f"{files.size(target)} bytes arrived where {done} were written")

    _retry("written", url, write, timeout_s)


def write_bytes(url: str, data: bytes | memoryview, timeout_s: float = TIMEOUT_S) -> None:
    """Write a small file."""
    write_chunks(url, lambda: [data], timeout_s)


def upload(local: Path, url: str, timeout_s: float = TIMEOUT_S) -> int:
    """Copy a local file to a URL and return the number of bytes, which is its size at the start of the copy."""
    size = local.stat().st_size

    def chunks() -> Iterator[bytes]:
        left = size
        with open(local, "rb") as file:
            while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                left -= len(chunk)
                yield chunk

    write_chunks(url, chunks, timeout_s)
    return size


@contextlib.contextmanager
def _target(files: Any, url: str, path: str) -> Iterator[str]:
    """The path to write to: the final one in an object store, else a temporary one that is then moved."""
    if urlsplit(url).scheme.lower() in OBJECT_STORES:
        yield path
        return
    folder, _, name = path.rpartition("/")
    temporary = f"{folder}/.{name}.{random.getrandbits(48):012x}.partial"
    files.makedirs(folder, exist_ok=True)
    try:
        yield temporary
        files.mv(temporary, path)
    except BaseException:
        for _ in range(3):  # best effort: the original error is raised
            with contextlib.suppress(Exception):
                files.rm_file(temporary)
                break
        raise


@contextlib.contextmanager
def _open_for_write(files: Any, path: str) -> Iterator[Any]:
    """A file open for writing that is completed at the end of the block, and discarded if the block raises."""
    file = files.open(path, "wb")
    try:
        yield file
        file.close()
    except BaseException:
        if isinstance(file, AbstractBufferedFile):
            # Closing it, as garbage collection does as well, would complete the file with the bytes so far.
            file.closed = True
            with contextlib.suppress(Exception):
                file.discard()
        else:
            with contextlib.suppress(Exception):
                file.close()
        raise


def remove(urls: Iterable[str], timeout_s: float = TIMEOUT_S) -> None:
    """Remove files; missing ones are not an error."""
    for url in urls:

        def drop(attempt: RetryAttempt, url: str = url) -> None:
            files, path = get_filesystem(url)
            files.rm_file(path)

        with contextlib.suppress(FileNotFoundError):
            _retry("removed", url, drop, timeout_s)
