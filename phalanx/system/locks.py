"""File locks that a process holds for its lifetime, and that others can test."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.core.errors import RunError
from phalanx.core.run_paths import RunPaths

PASSING_S = 1.0  # time for processes that hold a lock briefly, to test it
RETRY_S = 0.01


def try_lock(descriptor: int) -> bool:
    """Lock an open file exclusively until it is closed; False where another process holds the lock. Waits for processes
    that only test it (`is_locked`)."""
    until = time.monotonic() + PASSING_S
    while True:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if is_locked(descriptor) or time.monotonic() > until:
            return False
        time.sleep(RETRY_S)


def is_locked(descriptor: int) -> bool:
    """Whether another process holds an open file for itself."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def is_locked_by_other_users(descriptor: int, listed: Path = Path("/proc/locks")) -> bool:
    """Whether none but other users' processes hold an open file, as far as Linux says whose they are. Files held by
    root, or by processes that cannot be seen, do not count as another user's."""
    rows = [line.split() for line in _lines(listed)]
    inode = str(os.fstat(descriptor).st_ino)
    # By the number alone: devices are not called alike there on every file system.
    holders = [row[4] for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5].rpartition(":")[2] == inode]
    users = [_user_of(pid) for pid in holders]
    return bool(users) and all(user not in (None, 0, os.geteuid()) for user in users)


def _user_of(pid: str) -> int | None:
    found = [line.split() for line in _lines(Path("/proc") / pid / "status") if line.startswith("Uid:")]
    return int(found[0][1]) if found else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


# ------------------------------------------------------------------------------------------------------------ symlinks
# Links in a run folder that point outside: users who can write to a run folder must not make its owner write elsewhere.
# No torch here.


MAX_DEPTH = 3  # folders below the run folder: logs/attempt-001/rank-00000.log is checked


def check_symlinks(paths: RunPaths) -> None:
    """Raises RunError for a link in a run folder that points outside. The folder itself may be behind links."""
    root = Path(os.path.realpath(paths.root))  # which takes a link to itself for what it is
    for link in _links(str(root), MAX_DEPTH):
        target = Path(os.path.realpath(link))
        if target != root and root not in target.parents:
            name = Path(link).relative_to(root)
            raise RunError(
                f"the run folder {paths.display_name} has a link, {name}, that points outside to {target}, but a run "
                "writes only into its own folder; remove the link, or set --run-dir to a folder at the target"
            )


def _links(folder: str, deeper: int) -> Iterator[str]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # gone meanwhile, or unreadable: a write there will fail with an error
        return
    for entry in entries:
        if entry.is_symlink():
            yield entry.path
        elif deeper > 1 and entry.is_dir(follow_symlinks=False):
            yield from _links(entry.path, deeper - 1)
