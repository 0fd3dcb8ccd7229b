"""Torch's cache of compiled code: that nobody else can put code there, and what killed processes have left in it.

torch takes a library that exists for one that is whole. A linker that was killed leaves an empty or torn one, which
every later start would load and die of ("file too short"). While it builds one, torch keeps a folder beside it and
holds a lock; a folder that stays without anybody holding the lock tells of a build that never ended. By default the
cache has a name in the place for temporary files that can be foreseen, and torch runs what it finds there.
"""

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path

from phalanx.core.errors import ConfigError

BUILDING = "_CxxBuild"  # how the names of those folders end
HEADERS = "precompiled_headers"  # the folder in the cache that has locks of its own
RESULTS = (".so", ".o", ".gch")
OWN_LOCK = ("", "main", "h")  # other builds hold a lock of another name, and are left alone


def prepare_caches() -> None:
    """Sweep where torch compiles for this process: the cache, and the place of headers, which cannot be moved. Raises
    ConfigError where that is not this user's."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    check_cache_owner(Path(default_cache_dir()))
    for cache in {cache_dir(), default_cache_dir()}:
        remove_stale_files(Path(cache))


def check_cache_owner(cache: Path) -> None:
    """Make a folder that is this user's alone, or raise ConfigError where there is one of another user."""
    with contextlib.suppress(FileExistsError):
        cache.mkdir(mode=0o700)
    found = cache.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"{cache}, whose code torch would run, is another user's or a link; have it removed, set TMPDIR to a "
            "folder of your own, or train.compile=false"
        )


def remove_stale_files(cache: Path) -> list[str]:
    """Remove from torch's cache what builds that were killed have left; returns the names. Any number of processes may
    do so, also while others compile."""
    removed = []
    for folder in sorted(cache.glob(f"*/*{BUILDING}")):
        name = folder.name.removesuffix(BUILDING)
        if name.partition(".")[2] not in OWN_LOCK:
            continue
        locks = folder.parent / "locks" if folder.parent.name == HEADERS else cache / "locks"
        lock = locks / f"{name.partition('.')[0]}.lock"
        # Somebody is building it, or cannot be asked: then it stays, at worst as it was.
        with contextlib.suppress(OSError), open(lock, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not folder.is_dir() or not os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                continue
            for suffix in RESULTS:
                (folder.parent / f"{name}{suffix}").unlink(missing_ok=True)
            shutil.rmtree(folder)
            removed.append(name)
    return removed
