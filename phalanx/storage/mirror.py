"""Run folder at a URL: the records live in a local working folder and are copied to the URL as they change.

The URL has the authoritative copy: a start downloads its records first, and a checkpoint is committed only when the
records up to its step are there. Only the process that holds the lease (`lease.py`) may write.
"""

import fcntl
import hashlib
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError, RunError
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, read_events, write_event
from phalanx.core.run_paths import MANIFEST, RunPaths, Url
from phalanx.storage import files as storage
from phalanx.storage import lease

PUSH_S = 3.0  # interval between checks for changed records
PUSH_SHARE = 25  # a copy that took t is followed by a pause of at least this times t

FileVersions = dict[str, tuple[int, int]]  # name -> size and time of the copied version


def make_working_paths(url: str, cache: str, timeout_s: float, rank: int = 0) -> RunPaths:
    """Paths of a run at a URL, with its working folder in the cache; each rank of a larger job has a separate one."""
    place = Url(url.rstrip("/"), timeout_s)
    digest = hashlib.sha256(place.text.encode()).hexdigest()[:12]
    name = f"{place.name}-{digest}" + (f"-rank-{rank:05d}" if rank else "")
    return RunPaths(storage.local_cache(cache) / "runs" / name, place)


@contextmanager
def open_records(run: str) -> Iterator[RunPaths]:
    """Read-only access to a run's files, at a path or a URL; those at a URL are downloaded temporarily."""
    if not storage.is_url(run):
        yield RunPaths(Path(run))
        return
    with open_remote_records(run) as paths:
        yield paths


@contextmanager
def open_remote_records(url: str, timeout_s: float = storage.TIMEOUT_S) -> Iterator[RunPaths]:
    """Download a run's records from a URL to a temporary folder, for reading."""
    place = Url(url.rstrip("/"), timeout_s)
    with tempfile.TemporaryDirectory(prefix="phalanx-run-") as folder:
        paths = RunPaths(Path(folder) / place.name, place)
        paths.root.mkdir()
        fetch_records(paths, also=[paths.nodes.name])
        yield paths


# ----------------------------------------------------------------------------------------------------------- records


def fetch_records(paths: RunPaths, also: Sequence[str] = ()) -> None:
    """Download the records that a start reads into the working folder, and the folders in `also`. A local file
    that continues the URL's is kept: the process that wrote it was killed before it copied the rest."""
    url = lease.url_of(paths)
    folders = (paths.tokenizer.name, *also)
    found = [*_files(url), *(f"{folder}/{name}" for folder in folders for name in _files(url / folder))]
    found = [name for name in found if name != paths.report.name]  # it is large, and regenerated
    arrived = {name: paths.root / f".incoming.{name.replace('/', '.')}" for name in found}
    for name, incoming in arrived.items():
        storage.download((url / name).text, incoming, url.timeout_s)
    if paths.config.name not in arrived or _is_another(paths.events, arrived.get(paths.events.name)):
        for path in paths.root.iterdir():
            if not path.name.startswith("."):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, incoming in arrived.items():
        local = paths.root / name
        if local.is_file() and _begins_with(local, incoming):
            incoming.unlink()
        else:
            local.parent.mkdir(exist_ok=True)
            os.replace(incoming, local)
    checkpoints = storage.list_folder((url / paths.has_checkpoints.name).text, recursive=True, timeout_s=url.timeout_s)
    if any(entry.name == MANIFEST for entry in checkpoints):
        paths.has_checkpoints.mkdir(exist_ok=True)
    elif paths.has_checkpoints.exists():
        paths.has_checkpoints.rmdir()


def list_logs(paths: RunPaths) -> None:
    """Create placeholders of a run's logs in the local copy of its records: empty files until `refresh_file`."""
    logs = paths.node_log(0).parent.name
    for entry in storage.list_folder(
        (lease.url_of(paths) / logs).text, recursive=True, timeout_s=lease.url_of(paths).timeout_s
    ):
        name = entry.url.rpartition(f"/{logs}/")[2]
        local = paths.root / logs / name
        if ".." not in name.split("/") and not local.exists():
            local.parent.mkdir(parents=True, exist_ok=True)
            local.touch()


def refresh_file(paths: RunPaths, file: Path) -> None:
    """Download the current version of one record file. No effect if the URL does not have it."""
    url = lease.url_of(paths)
    incoming = paths.root / ".incoming"
    with suppress(FileNotFoundError):
        storage.download((url / str(file.relative_to(paths.root))).text, incoming, url.timeout_s)
        os.replace(incoming, file)


def _files(url: Url) -> list[str]:
    entries = storage.list_folder(url.text, timeout_s=url.timeout_s)
    return [entry.name for entry in entries if not entry.folder and not entry.name.startswith(".")]


def _is_another(events: Path, arrived: Path | None) -> bool:
    """Whether the local events are of another run than those of the URL, which was emptied meanwhile."""
    if arrived is None or not events.is_file():
        return False
    with open(events, "rb") as here, open(arrived, "rb") as there:
        return here.readline() != there.readline()  # the first line has the time of the run's start


def _begins_with(longer: Path, shorter: Path) -> bool:
    with open(longer, "rb") as one, open(shorter, "rb") as other:
        while part := other.read(1 << 20):
            if one.read(len(part)) != part:
                return False
    return True


def push_records(paths: RunPaths, pushed: FileVersions) -> None:
    """Copy the records that have changed since `pushed`, which is updated. Raises the errors of `files`."""
    url = lease.url_of(paths)
    with open(paths.root / ".copying", "w") as lock:
        # Two processes copy: an earlier copy must not overwrite newer records. The lock is held at most as long as the
        # store is retried, and released by the kernel if its holder dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in _records(paths):
            path = paths.root / name
            with suppress(FileNotFoundError):  # a temporary file
                now = path.stat()
                stamp = (now.st_size, now.st_mtime_ns)
                if pushed.get(name) != stamp:
                    storage.upload(path, (url / name).text, url.timeout_s)
                    pushed[name] = stamp


def _records(paths: RunPaths) -> list[str]:
    """Names of all files of the working folder except hidden ones, the configuration last: its presence marks a run."""
    names = []
    for folder, folders, files in os.walk(paths.root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [os.path.relpath(os.path.join(folder, name), paths.root) for name in files if name[0] != "."]
    return sorted(names, key=lambda name: (name == paths.config.name, name))


def check_before_commit(paths: RunPaths, pushed: FileVersions) -> None:
    """Check before a checkpoint is committed that this run still has the lease, and that its records are at the
    URL. Raises RunError if another process has taken the run over, and the errors of `files`.
    """
    lease.check_lease(paths)
    push_records(paths, pushed)
    lease.check_lease(paths)  # again, as copying may have taken long


def publish_file(paths: RunPaths, file: Path) -> None:
    """Copy one file of the records to the URL."""
    url = lease.url_of(paths)
    storage.upload(file, (url / str(file.relative_to(paths.root))).text, url.timeout_s)


def append_event(paths: RunPaths, kind: EventKind, **details: Any) -> None:
    """Add an event to the records at the URL, unless a run is active there: only its process writes them."""
    if not lease.is_in_use(paths):
        events = lease.url_of(paths) / paths.events.name
        with suppress(FileNotFoundError):  # a run may have continued since the records were downloaded
            storage.download(events.text, paths.events, events.timeout_s)
        write_event(paths.events, kind, _attempt(paths), **details)
        publish_file(paths, paths.events)


# ---------------------------------------------------------------------------------------------- the copying process


def run_mirror(paths: RunPaths, control: int) -> int:
    """Main loop of the process beside a run, which renews the lease and copies records until descriptor `control`
    signals the end, then once more. Returns an exit code, CONFIG if the run now belongs to another process;
    `read_push_error` has the message."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPWR):
        signal.signal(number, signal.SIG_IGN)  # the run ends first and writes its last records
    seen: FileVersions = {}
    ending = threading.Event()
    lost: list[str] = []
    beating = threading.Thread(target=_keep_lease, args=(paths, ending, lost), daemon=True)
    beating.start()
    failing = False
    while True:
        began = time.monotonic()
        try:
            if not lost:
                lease.check_lease(paths)  # not only at renewals: this machine may have been suspended
                push_records(paths, seen)
            failing = False
        except (OSError, PhalanxError) as error:
            if not failing:
                _warn(
                    paths,
                    f"the run's records cannot be copied to {paths.display_name} now and are kept locally: {error}",
                )
            failing = True
        pause = max(PUSH_S, PUSH_SHARE * (time.monotonic() - began))
        if select.select([control], [], [], pause)[0]:
            break
    ending.set()
    try:
        beating.join()
        if lost:
            raise RunError(lost[0])
        lease.check_lease(paths)
        push_records(paths, seen)
        lease.release_lease(paths)
    except (OSError, PhalanxError) as error:
        write_atomic(lease.push_error_file(paths), str(error))
        return ExitCode.CONFIG if isinstance(error, RunError) else ExitCode.FAILED
    return ExitCode.DONE


def read_push_error(paths: RunPaths) -> str:
    """Why the records at the URL are incomplete."""
    try:
        return lease.push_error_file(paths).read_text(encoding="utf-8")
    except OSError:
        return "the copying process died"


def _keep_lease(paths: RunPaths, ending: threading.Event, lost: list[str]) -> None:
    """Renew the lease until the end. If it is lost, request the run to stop."""
    while not ending.wait(lease.RENEW_S):
        try:
            lease.renew_lease(paths)
            if lease.is_stop_requested(paths):
                os.kill(os.getppid(), signal.SIGTERM)
        except RunError as error:
            lost.append(str(error))
            _warn(paths, str(error))
            os.kill(os.getppid(), signal.SIGTERM)
            return
        except (OSError, PhalanxError):
            continue  # the copying loop reports it


def _warn(paths: RunPaths, message: str) -> None:
    with suppress(OSError):  # the disk is full as well; reported at the end
        write_event(paths.events, EventKind.WARNING, _attempt(paths), message=message)


def _attempt(paths: RunPaths) -> int:
    attempts = (event.get("attempt") for event in read_events(paths.events))
    return max((number for number in attempts if type(number) is int), default=1)
