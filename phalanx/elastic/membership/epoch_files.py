"""Epoch files in the run folder: of all who would lead an epoch, the one who creates its file does.

A hard link with a name that must not exist is atomic, also on network file systems; so when a network falls into two
halves of the same size, one of them goes on and the other one knows that it may not. The file is written before it gets
its name: who finds it can read who made it, also if that one is dead a moment later. What a file says is for those
who look for the run: who leads, and where; and for its ranks: `attempt` is the oldest whose ranks may still write, and
`since` the epoch in which that was ordered (`failover.find_active_writers`). `from` is the epoch whose members made it;
a job that begins with an epoch of its own says none.
"""

import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any

from phalanx.core.errors import RunError
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.rendezvous import refresh_listing
from phalanx.recovery import fencing

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # how a file system without hard links says so


def claim(paths: RunPaths, epoch: int, text: dict[str, Any]) -> dict[str, Any] | None:
    """Create the file of an epoch; None for the one who has created it, for all others what it says (its number alone
    while it is being written, where the file system has no hard links).

    Raises RunError where the run folder cannot be written.
    """
    path = paths.epoch(epoch)
    passing = path.with_name(f".{path.stem}-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _write(passing, {"epoch": epoch, **text})
        try:
            return None if _link(passing, path) else fencing.read_epoch(paths, epoch)
        finally:
            passing.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}); change the run folder's rights") from None


def _write(path: Path, text: dict[str, Any]) -> None:
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8"
    ) as file:
        json.dump(text, file)
        file.flush()
        os.fsync(file.fileno())


def _link(passing: Path, path: Path) -> bool:
    """Give a written file its name, unless that exists."""
    try:
        os.link(passing, path)
    except FileExistsError:
        return os.stat(passing).st_nlink > 1  # NFS says so of a link that it has made, where its answer was lost
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            _write(path, json.loads(passing.read_text(encoding="utf-8")))
        except FileExistsError:
            return False
    return True


def read_newest_epoch(paths: RunPaths) -> dict[str, Any] | None:
    """What the file of the newest epoch says now, as `fencing.read_newest_epoch`; None for a run folder at a URL."""
    if paths.url is not None:
        return None
    refresh_listing(paths.epoch(1).parent)
    return fencing.read_newest_epoch(paths)


def read_epoch_number(paths: RunPaths) -> int:
    """That of the newest epoch; 0 without any."""
    return int((read_newest_epoch(paths) or {"epoch": 0})["epoch"])


def read_leader_address(paths: RunPaths) -> tuple[str, int] | None:
    """Where the leader of the newest epoch listens, as its file says."""
    told = read_newest_epoch(paths)
    try:
        return None if told is None else (str(told["address"][0]), int(told["address"][1]))
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def claim_next(paths: RunPaths, text: dict[str, Any]) -> int:
    """Claim the epoch after the newest, for a job that begins; returns its number. Raises as `claim`."""
    while True:
        epoch = 1 + read_epoch_number(paths)
        if claim(paths, epoch, {"since": epoch, **text}) is None:
            return epoch
