"""The folder in shared memory that a run has on a node: what lies there outlives the processes that wrote it.

Anybody may make folders in that place, so its name is drawn: what makes it the run's is a file in it, in a folder that
is this user's alone, by which a run that was killed finds it again. One agent at a time holds it, by a lock, and
removes it when the run has come to its end. A run that keeps nothing in memory, or cannot, has a folder for its
agent's own purposes in the place for temporary files instead. No torch here.
"""

import contextlib
import fcntl
import hashlib
import os
import random
import shutil
import stat
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import RunError
from phalanx.core.run_paths import RunPaths

SHM_ROOT = Path("/dev/shm")
PREFIX = "phalanx-"
LOCK, RUN = "lock", "run"  # in a folder; the latter says whose it is
OLD_S = 86400.0  # a folder that nobody has held for so long is swept
TOUCHED_S = 60.0  # how often who holds one says so
PASSING_S = 1.0  # what who holds one only to look at it gets
RETRY_S = 0.02
SHARED_MEMORY_SHARE, HOST_MEMORY_SHARE = 0.9, 0.5  # of what is free, that state may take where nobody has asked for it
_MAKE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class SharedMemoryFolder:
    """`state`: whether state may be kept in the folder; else `reason` says why not, where that was wanted. `persists`:
    whether the folder stays when its holder leaves, as it must where a run is to go on from it."""

    folder: Path
    state: bool = True
    reason: str | None = None
    persists: bool = True
    touched: float = 0.0

    def touch(self) -> None:
        """Note that somebody holds it: what is written by mapping leaves no trace in a file's times."""
        if time.monotonic() - self.touched > TOUCHED_S:
            self.touched = time.monotonic()
            with contextlib.suppress(OSError):  # somebody has taken the folder away, as ranks will find
                os.utime(self.folder / LOCK)


def compute_run_key(paths: RunPaths) -> str:
    """What tells a run from every other one on this machine."""
    name = paths.url.text if paths.url is not None else str(paths.root.resolve())
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def find_folder(paths: RunPaths, node: int = 0, place: Path = SHM_ROOT) -> Path | None:
    """The folder that a run has on a node, if it has one: several nodes may be one machine, in tests and by
    namespaces."""
    return next(iter(_find_folders(f"{compute_run_key(paths)}-{node}", place)), None)


@contextlib.contextmanager
def hold_folder(
    paths: RunPaths, node: int = 0, place: Path = SHM_ROOT, wanted: bool = True
) -> Iterator[SharedMemoryFolder]:
    """Make a run's folder on a node, or find what was left of it, and hold it; what leaves with `persists` false takes
    it away. Where it is not `wanted`, or shared memory cannot be used, the folder lies elsewhere.

    Raises RunError when another agent of this user holds it.
    """
    folder, why = None, None
    try:
        if wanted:
            folder, descriptor = _take_folder(f"{compute_run_key(paths)}-{node}", place)
        else:
            _remove_unheld(f"{compute_run_key(paths)}-{node}", place)
    except OSError as error:
        why = f"shared memory cannot be used ({place}: {error.strerror})"
    if folder is None:
        folder, descriptor = _make_folder(Path(tempfile.gettempdir()))
    memory = SharedMemoryFolder(folder, state=wanted and why is None, reason=why, persists=wanted and why is None)
    memory.touch()
    try:
        yield memory
    finally:
        if not memory.persists:
            _remove(folder)
        os.close(descriptor)


def _own(place: Path) -> Iterator[Path]:
    """Folders of runs that are this user's alone; others can make what is called like one."""
    try:
        with os.scandir(place) as entries:
            named = [entry for entry in entries if entry.name.startswith(PREFIX)]
    except OSError:
        return
    for entry in sorted(named, key=lambda entry: entry.name):
        with contextlib.suppress(OSError):  # it is gone by now
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                yield Path(entry.path)


def _read_owner(folder: Path) -> str:
    """The run and node that a folder says it belongs to; empty where it says nothing."""
    try:
        descriptor = os.open(folder / RUN, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, encoding="ascii", errors="replace") as file:
            return file.read(64)
    except OSError:
        return ""


def _find_folders(name: str, place: Path) -> list[Path]:
    """The folders that belong to a run and node: one, or more where a start was killed while another one began. One
    that holds state comes first."""
    folders = [folder for folder in _own(place) if _read_owner(folder) == name]
    return sorted(folders, key=lambda folder: (not any(folder.glob("state-*")), folder.name))


def _take_folder(name: str, place: Path) -> tuple[Path, int]:
    """A folder of that name, found or made, and its lock, which is held. Raises OSError where none can be made, and
    RunError when another process holds it."""
    until = time.monotonic() + PASSING_S
    while True:
        folders = _find_folders(name, place)
        for folder in folders:
            descriptor = _try_lock(folder)
            if descriptor is not None and _read_owner(folder) == name:  # who takes one away takes that away first
                return folder, descriptor
            if descriptor is not None:
                os.close(descriptor)
        if not folders:
            folder, descriptor = _make_folder(place, name)
            if _find_folders(name, place) == [folder]:
                return folder, descriptor
            _remove(folder)  # somebody has made one in the same moment: whoever comes again first has it
            os.close(descriptor)
            time.sleep(random.uniform(0, RETRY_S))
        elif time.monotonic() > until:
            raise RunError(
                f"another process holds {folders[0]}, so this run already goes on on this machine; stop that one first"
            )
        time.sleep(RETRY_S)


def _make_folder(place: Path, name: str = "") -> tuple[Path, int]:
    """A new folder that nobody could foresee, and its lock, which is held."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    try:
        descriptor = os.open(folder / LOCK, _MAKE, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with open(os.open(folder / RUN, _MAKE, 0o600), "w", encoding="ascii") as file:
            file.write(name)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, descriptor


def _try_lock(folder: Path) -> int | None:
    """The lock of a folder, if it is to be had."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / LOCK, _MAKE, 0o600)
        if _lock(descriptor) and _is_at(descriptor, folder / LOCK):
            return descriptor
        os.close(descriptor)
    return None


def _remove(folder: Path) -> None:
    """Take away a folder whose lock is held: first of all what it is found by."""
    with contextlib.suppress(OSError):
        os.unlink(folder / RUN)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_unheld(name: str, place: Path) -> None:
    """Remove what a run has left there, unless somebody holds it."""
    for folder in _find_folders(name, place):
        descriptor = _try_lock(folder)
        if descriptor is not None:
            _remove(folder)
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that a path leads to."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold_orphaned_folders(
    paths: RunPaths, node: int, place: Path = SHM_ROOT
) -> Generator[tuple[int, Path], None, None]:
    """The folders that the same run has had on this machine as other nodes, with their numbers, and that nobody holds;
    each is held while it is looked at."""
    for folder in _own(place):
        key, _, number = _read_owner(folder).rpartition("-")
        if key != compute_run_key(paths) or not number.isdecimal() or int(number) == node:
            continue
        descriptor = _try_lock(folder)
        if descriptor is not None:
            try:
                yield int(number), folder
            finally:
                os.close(descriptor)


def remove_stale_folders(
    places: tuple[Path, ...] = (SHM_ROOT, Path(tempfile.gettempdir())),
    old_s: float = OLD_S,
    but: RunPaths | None = None,
) -> list[Path]:
    """Remove the folders of this user's runs that nobody holds or has held for `old_s` seconds; returns them. Those of
    the run `but`, of whichever node, are about to be gone on from."""
    swept = []
    for folder in (folder for place in places for folder in _own(place)):
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # not a run's, or gone by now
            continue
        try:
            ours = but is not None and _read_owner(folder).rpartition("-")[0] == compute_run_key(but)
            old = time.time() - os.fstat(descriptor).st_mtime > old_s
            if old and not ours and _lock(descriptor):
                _remove(folder)
                swept.append(folder)
        finally:
            os.close(descriptor)
    return swept


def describe_shortage(what: str, need: float, shared: float, host: float, requested: bool) -> str | None:
    """Why `what`, of `need` bytes, does not fit into what is free of shared memory and of the host's; None: it does.
    What nobody has asked for (not `requested`) must leave more."""
    of_shared, of_host = (1.0, 1.0) if requested else (SHARED_MEMORY_SHARE, HOST_MEMORY_SHARE)
    if need > of_shared * shared:
        return f"{what} takes {format_bytes(need)}, and shared memory has {format_bytes(shared)} free"
    if need > of_host * host:
        return f"{what} takes {format_bytes(need)}, and this machine has {format_bytes(host)} of memory free"
    return None


def format_bytes(count: float) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
