"""A run folder at a URL, for the process that trains it: taken, fetched, and kept up to date by a child meanwhile."""

import contextlib
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.core.errors import StorageError
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths, Url
from phalanx.report.terminal import open_terminal
from phalanx.storage import mirror
from phalanx.system.fork import fork, fork_call

NOTICE_S = 5.0  # what takes longer at the end is named


@contextlib.contextmanager
def mirror_while_running(paths: RunPaths) -> Iterator[None]:
    """While it lasts, a run folder at a URL is this process's alone, and a child copies the records there.

    Raises RunError when another process uses the run, and StorageError when not all has been copied at the end.
    """
    if paths.url is None:
        yield
        return
    place = (str(paths.root), paths.url.text, paths.url.timeout_s)
    fork_call(_take, *place, os.getpid(), timeout_s=None)
    reader, writer = os.pipe()
    pid, pidfd = fork(lambda: mirror.run_mirror(paths, reader), keep=[reader])
    os.close(reader)

    def end() -> str | None:
        os.close(writer)  # which tells it to come to its end
        if not select.select([pidfd], [], [], NOTICE_S)[0]:
            open_terminal().print(
                f"copying the last records to {paths.display_name}, which is tried for a while if need be"
            )
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(pidfd)
        if code == ExitCode.DONE:
            return None
        mends = "" if code == ExitCode.CONFIG else ", and the same command on this machine copies them"
        why = mirror.read_push_error(paths)
        return f"not all records of the run are at {paths.display_name} ({why}); they are in {paths.root}{mends}"

    try:
        yield
    except BaseException:
        missing = end()
        if missing is not None:
            open_terminal().print(missing, style="yellow")
        raise
    missing = end()
    if missing is not None:
        raise StorageError(missing)


def _take(root: str, url: str, timeout_s: float, pid: int) -> None:
    paths = RunPaths(Path(root), Url(url, timeout_s))
    mirror.acquire_lease(paths, pid)
    try:
        mirror.fetch_records(paths)
    except BaseException:
        mirror.release_lease(paths)
        raise


def fetch_records(paths: RunPaths, meanwhile: Callable[[], None] | None = None) -> None:
    """Bring the records of a run at a URL into this process's working folder; `meanwhile` is called all the time."""
    assert paths.url is not None
    fork_call(_fetch, str(paths.root), paths.url.text, paths.url.timeout_s, timeout_s=None, meanwhile=meanwhile)


def _fetch(root: str, url: str, timeout_s: float) -> None:
    paths = RunPaths(Path(root), Url(url, timeout_s))
    paths.root.mkdir(parents=True, exist_ok=True)
    mirror.fetch_records(paths)
