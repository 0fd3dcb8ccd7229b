"""A run's folder in shared memory on a node, whose contents outlive the processes that wrote them.

Any user may create folders in shared memory, so the name is random: a file inside a folder that only this user can
access names the run, and a killed run finds its folder by that file. One agent at a time holds the folder, by a lock,
and removes it at the end of the run. A run without in-memory checkpoints has a folder for its agent in the directory
for temporary files instead. No torch here.
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
LOCK, RUN = "lock", "run"  # files in a folder; the latter names its run
OLD_S = 86400.0  # a folder that was not held for this long is removed
TOUCHED_S = 60.0  # interval at which the holder updates the folder's time
PASSING_S = 1.0  # time limit for a process that locks a folder only to inspect it
RETRY_S = 0.02
# Share of the free memory that state may use unless the user asked for it.
SHARED_MEMORY_SHARE, HOST_MEMORY_SHARE = 0.9, 0.5
_MAKE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class SharedMemoryFolder:
    """A held folder. `state`: whether it may keep state; if not although wanted, `reason` says why. `persists`: whether
    it stays when its holder exits, as a run that resumes from it needs."""

    folder: Path
    state: bool = True
    reason: str | None = None
    persists: bool = True
    touched: float = 0.0

    def touch(self) -> None:
        """Update the folder's time, which shows that it is held: writes to mapped memory do not change it."""
        if time.monotonic() - self.touched > TOUCHED_S:
            self.touched = time.monotonic()
            with contextlib.suppress(OSError):  # the folder was removed, which the ranks will notice
                os.utime(self.folder / LOCK)


def compute_run_key(paths: RunPaths) -> str:
    """Key that identifies a run on this machine."""
    name = paths.url.text if paths.url is not None else str(paths.root.resolve())
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def find_folder(paths: RunPaths, node: int = 0, place: Path = SHM_ROOT) -> Path | None:
    """Find the folder of a run on a node; None without one. Several nodes may share a machine, as in tests."""
    return next(iter(_find_folders(f"{compute_run_key(paths)}-{node}", place)), None)


@contextlib.contextmanager
def hold_folder(
    paths: RunPaths, node: int = 0, place: Path = SHM_ROOT, wanted: bool = True
) -> Iterator[SharedMemoryFolder]:
    """Create or find the folder of a run on a node, and hold it; on exit with `persists` false it is removed. If it is
    not `wanted`, or shared memory cannot be used, the folder is in the directory for temporary files. Raises RunError
    if another agent of this user holds it.
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
    """Folders of runs that only this user can access; other users may create folders of the same names."""
    try:
        with os.scandir(place) as entries:
            named = [entry for entry in entries if entry.name.startswith(PREFIX)]
    except OSError:
        return
    for entry in sorted(named, key=lambda entry: entry.name):
        with contextlib.suppress(OSError):  # removed meanwhile
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                yield Path(entry.path)


def _read_owner(folder: Path) -> str:
    """The run and node that a folder names as its owner; empty without one."""
    try:
        descriptor = os.open(f"{folder}/{RUN}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 64).decode("ascii", errors="replace")
        finally:
            os.close(descriptor)
    except OSError:
        return ""


def _find_folders(name: str, place: Path) -> list[Path]:
    """Folders that belong to a run and node: one, or more if a start was killed while another one began. Those with
    state come first."""
    folders = [folder for folder in _own(place) if _read_owner(folder) == name]
    return sorted(folders, key=lambda folder: (not any(folder.glob("state-*")), folder.name))


def _take_folder(name: str, place: Path) -> tuple[Path, int]:
    """Find or create the folder of that name and lock it. Raises OSError if none can be created, and RunError if
    another process holds it."""
    until = time.monotonic() + PASSING_S
    while True:
        folders = _find_folders(name, place)
        for folder in folders:
            descriptor = _try_lock(folder)
            # A process that removes a folder first removes the file that names its owner.
            if descriptor is not None and _read_owner(folder) == name:
                return folder, descriptor
            if descriptor is not None:
                os.close(descriptor)
        if not folders:
            folder, descriptor = _make_folder(place, name)
            if _find_folders(name, place) == [folder]:
                return folder, descriptor
            _remove(folder)  # another process has created one at the same time; the next to retry gets it
            os.close(descriptor)
            time.sleep(random.uniform(0, RETRY_S))
        elif time.monotonic() > until:
            raise RunError(
                f"another process holds {folders[0]}, so this run is already running on this machine; stop that "
                "process first"
            )
        time.sleep(RETRY_S)


def _make_folder(place: Path, name: str = "") -> tuple[Path, int]:
    """Create a folder with an unpredictable name, and lock it."""
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
    """Lock a folder; None if another process holds it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / LOCK, _MAKE, 0o600)
        if _lock(descriptor) and _is_at(descriptor, folder / LOCK):
            return descriptor
        os.close(descriptor)
    return None


def _remove(folder: Path) -> None:
    """Remove a folder whose lock is held, first the file that identifies it."""
    with contextlib.suppress(OSError):
        os.unlink(folder / RUN)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_unheld(name: str, place: Path) -> None:
    """Remove the folders of a run and node that no process holds."""
    for folder in _find_folders(name, place):
        descriptor = _try_lock(folder)
        if descriptor is not None:
            _remove(folder)
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a descriptor and a path refer to the same file."""
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
    """Hold the unheld folders that the same run used on this machine under other node numbers; yields them with these
    numbers. Each is held while it is inspected."""
    run = compute_run_key(paths)
    for folder in _own(place):
        key, _, number = _read_owner(folder).rpartition("-")
        if key != run or not number.isdecimal() or int(number) == node:
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
    """Remove the folders of this user's runs that no process has held for `old_s` seconds; returns them. Folders of the
    run `but`, of any node, are kept: it resumes from them."""
    swept = []
    key = None if but is None else compute_run_key(but)
    for folder in (folder for place in places for folder in _own(place)):
        try:
            if time.time() - os.lstat(f"{folder}/{LOCK}").st_mtime <= old_s:  # as most are: not even opened
                continue
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # not a run's folder, or removed meanwhile
            continue
        try:
            ours = key is not None and _read_owner(folder).rpartition("-")[0] == key
            old = time.time() - os.fstat(descriptor).st_mtime > old_s
            if old and not ours and _lock(descriptor):
                _remove(folder)
                swept.append(folder)
        finally:
            os.close(descriptor)
    return swept


def describe_shortage(what: str, need: float, shared: float, host: float, requested: bool) -> str | None:
    """Why `what`, of `need` bytes, does not fit into the free shared memory and the free host memory; None if it fits.
    If it was not `requested` by the user, more memory must stay free."""
    of_shared, of_host = (1.0, 1.0) if requested else (SHARED_MEMORY_SHARE, HOST_MEMORY_SHARE)
    if need > of_shared * shared:
        return f"{what} takes {format_bytes(need)}, and shared memory has {format_bytes(shared)} free"
    if need > of_host * host:
        return f"{what} takes {format_bytes(need)}, and this machine has {format_bytes(host)} of memory free"
    return None


def format_bytes(count: float) -> str:
    """Format a number of bytes."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
