"""Memory that a rank works in and that stays when it dies: to give it back, and to take it anew page by page, is a good
part of what is waited for when ranks are started again. What lies in it means nothing.
"""

import mmap
import os
from pathlib import Path

import torch

from phalanx.recovery.shared_memory import SHARED_MEMORY_SHARE
from phalanx.recovery.state_file import PAGE, round_up

NAME = "working-{:05d}"  # by rank


class WorkingMemory:
    """A file in a folder in shared memory, as long as all that is taken of it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / NAME.format(rank)
        self._at = 0

    def allocate(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A flat tensor with any content; None where there is no room for it, or nothing to be had."""
        size = round_up(elements * dtype.itemsize, PAGE)
        if not size:
            return None
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_size < self._at + size:
                    found = os.statvfs(self._path.parent)
                    if size > SHARED_MEMORY_SHARE * found.f_bavail * found.f_frsize:
                        return None
                    os.posix_fallocate(descriptor, self._at, size)
                mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=self._at)
            finally:
                os.close(descriptor)
        except OSError:
            return None
        self._at += size
        return torch.frombuffer(mapped, dtype=dtype, count=elements)


def remove_stale(folder: Path, world: int) -> None:
    """Remove what ranks have left of which there are no such any more."""
    for path in folder.glob(NAME.format(0).replace("00000", "*")):
        digits = path.name.rpartition("-")[2]
        if digits.isdecimal() and int(digits) >= world:
            path.unlink(missing_ok=True)
