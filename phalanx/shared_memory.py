"""The folder in shared memory that a run has on a node: what lies there outlives the processes that wrote it.

It is made by the agent before there are ranks, belongs to its user alone, and is removed when the run has come to its
end; a run that was killed finds it again. One agent at a time holds it, by a lock. No torch here.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import RunError
from phalanx.records import RunPaths

PLACE = Path("/dev/shm")
LOCK = "lock"
OLD_S = 86400.0  # a folder that nobody has held for so long is swept
TOUCHED_S = 60.0  # how often who holds one says so
PASSING_S = 1.0  # what who holds one only to look at it gets
OF_SHARED, OF_HOST = 0.9, 0.5  # of what is free, that state may take where nobody has asked for it


@dataclass
class SharedMemory:
    """`keeps`: whether the folder stays when its holder leaves, as it must where a run is to go on from it."""

    folder: Path
    keeps: bool = True
    touched: float = 0.0

    def touch(self) -> None:
        """Note that somebody holds it: what is written by mapping leaves no trace in a file's times."""
        if time.monotonic() - self.touched > TOUCHED_S:
            self.touched = time.monotonic()
            with contextlib.suppress(OSError):  # somebody has taken the folder away, as ranks will find
                os.utime(self.folder / LOCK)


def folder_of(paths: RunPaths, node: int = 0, place: Path = PLACE) -> Path:
    """The folder of a run on a node: several nodes may be one machine, in tests and by namespaces."""
    name = paths.url.text if paths.url is not None else str(paths.root.resolve())
    return place / f"phalanx-{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:16]}-{node}"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[SharedMemory]:
    """Make the folder, or find what was left of it, and hold it; what leaves with `keeps` false takes it away.

    Raises RunError when another agent holds it, or when it is not this user's alone.
    """
    descriptor, until = _lock_of(folder), time.monotonic() + PASSING_S
    try:
        while not _locked(descriptor) or not _is_at(descriptor, folder / LOCK):
            if time.monotonic() > until:
                raise RunError(
                    f"another process holds {folder}, so this run already goes on on this machine; stop that one first"
                )
            time.sleep(0.02)
            if not _is_at(descriptor, folder / LOCK):  # whoever held it has removed the folder
                another = _lock_of(folder)
                os.close(descriptor)
                descriptor = another
        memory = SharedMemory(folder)
        memory.touch()
        try:
            yield memory
        finally:
            if not memory.keeps:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock_of(folder: Path) -> int:
    """The lock of a folder, which is made if need be, opened. Raises RunError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        # Anybody may make folders there, and links.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise RunError(f"{folder} is not a folder that is this user's alone, so nothing is kept in it; remove it")
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunError(
            f"there is no room in shared memory for {folder} ({error.strerror}); give the machine or container a "
            "larger /dev/shm"
        ) from None


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that a path leads to."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def left_behind(folder: Path) -> Generator[Path, None, None]:
    """The folders that the same run has had on this machine as other nodes and that nobody holds; each is held while it
    is looked at."""
    for other in sorted(folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*")):
        try:
            descriptor = os.open(other / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # none of ours, or gone by now
            continue
        try:
            own = not other.is_symlink() and other.stat().st_uid == os.getuid()
            if other != folder and own and _locked(descriptor):
                yield other
        finally:
            os.close(descriptor)


def sweep(place: Path = PLACE, old_s: float = OLD_S, but: Path | None = None) -> list[Path]:
    """Remove the folders of this user's runs that nobody holds or has held for `old_s` seconds; returns them. Those of
    the same run as `but`, of whichever node, are about to be gone on from."""
    own = None if but is None else but.name.rpartition("-")[0]
    swept = []
    for folder in sorted(place.glob(f"phalanx-{os.getuid()}-*")):
        if folder.name.rpartition("-")[0] == own:
            continue
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # none of ours, or gone by now
            continue
        try:
            old = time.time() - os.fstat(descriptor).st_mtime > old_s
            if old and not folder.is_symlink() and _locked(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder)
        finally:
            os.close(descriptor)
    return swept


def too_large(what: str, need: float, shared: float, host: float, asked: bool) -> str | None:
    """Why `what`, of `need` bytes, does not fit into what is free of shared memory and of the host's; None: it does.
    What nobody has `asked` for must leave more."""
    of_shared, of_host = (1.0, 1.0) if asked else (OF_SHARED, OF_HOST)
    if need > of_shared * shared:
        return f"{what} takes {size(need)}, and shared memory has {size(shared)} free"
    if need > of_host * host:
        return f"{what} takes {size(need)}, and this machine has {size(host)} of memory free"
    return None


def size(count: float) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
