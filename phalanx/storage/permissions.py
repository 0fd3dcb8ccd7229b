"""Permissions of a run's files: by the user's umask, or private to the user (`storage.private`)."""

import os
import stat
from pathlib import Path

from phalanx.core.errors import RunError

OTHERS = 0o077


def restrict_permissions(folder: Path, private: bool = False) -> None:
    """Restrict file permissions of this process and its children to the user, if `private`, or if the run folder
    is already private. With `private`, existing files of the folder are restricted too. Raises RunError if that
    fails.
    """
    if not private and not _is_private(folder):
        return
    os.umask(current_umask() | OTHERS)
    try:
        if private and folder.is_dir():
            for path in (folder, *folder.rglob("*")):
                found = path.lstat()
                if not stat.S_ISLNK(found.st_mode) and found.st_mode & OTHERS:
                    path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
    except FileNotFoundError:  # removed meanwhile by a process that is exiting
        return
    except OSError as error:
        raise RunError(
            f"storage.private is true, but the permissions of the run folder {folder} cannot be changed "
            f"({error.strerror}); have its owner change them, or choose another with --run-dir"
        ) from None


def _is_private(folder: Path) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & OTHERS


def current_umask() -> int:
    """The umask of this process."""
    taken = os.umask(OTHERS)
    os.umask(taken)
    return taken
