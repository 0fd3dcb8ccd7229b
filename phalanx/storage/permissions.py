"""Who may read what a run writes: what the user's umask says, or the user alone (`storage.private`)."""

import os
import stat
from pathlib import Path

from phalanx.core.errors import RunError

OTHERS = 0o077


def restrict_permissions(folder: Path, private: bool = False) -> None:
    """Have this process, and those that it starts, write for its user alone from now on, if that is asked for
    (`private`) or the run folder is its user's alone already. What is asked for holds for what lies in the folder, too.

    Raises RunError where that cannot be changed.
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
    except FileNotFoundError:  # a process that still ends has taken something away
        return
    except OSError as error:
        raise RunError(
            f"storage.private is true, but the rights of the run folder {folder} cannot be changed ({error.strerror}); "
            "have its owner do that, or choose another with --run-dir"
        ) from None


def _is_private(folder: Path) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & OTHERS


def current_umask() -> int:
    """What this process takes from the rights of what it makes."""
    taken = os.umask(OTHERS)
    os.umask(taken)
    return taken
