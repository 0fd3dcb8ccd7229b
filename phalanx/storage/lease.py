"""Lease of a run folder at a URL: which process may write to it.

It is an object that its holder renews every few seconds; another start takes it over when it was not renewed for
STALE_S. A process that lost the lease commits nothing more.
"""

import json
import os
import platform
import time
import uuid
from pathlib import Path
from typing import Any

from phalanx.core.errors import RunError
from phalanx.core.json_lines import write_atomic
from phalanx.core.run_paths import RunPaths, Url
from phalanx.storage import files as storage

RENEW_S, STALE_S, SETTLE_S, POLL_S = 5.0, 30.0, 0.5, 0.5
STOP_FILE = ".stop"  # exists at the URL while the process that holds the run is asked to stop


def url_of(paths: RunPaths) -> Url:
    """URL of a run that is at a URL."""
    assert paths.url is not None, paths.root
    return paths.url


def acquire_lease(paths: RunPaths, pid: int, stale_s: float = STALE_S) -> None:
    """Acquire the lease of a run for process `pid` of this machine. Raises RunError if another process holds it.

    A lease whose process has ended on this machine is taken over at once, any other after `stale_s` without renewal.
    fsspec has no lock that all stores support: of two starts within SETTLE_S the later wins, and should both have
    started, the one that finds the other's lease at its next renewal stops.
    """
    held = _read_lease(paths)
    until = time.monotonic() + stale_s
    while held is not None and not _has_ended(held) and time.monotonic() < until:
        time.sleep(min(1.0, stale_s / 4))
        before, held = held, _read_lease(paths)
        if held is not None and held != before:
            raise RunError(
                f"the run {paths.display_name} is in use by process {held.get('process')}; wait for it, stop it, or "
                "choose another --run-dir"
            )
    token = uuid.uuid4().hex
    mine = {
        "owner": token,
        "process": f"{pid} on {platform.node()}",
        "pid": pid,
        "machine": _machine(),
        "beat": time.time(),
    }
    write_atomic(_lease(paths), json.dumps(mine))
    push_error_file(paths).unlink(missing_ok=True)  # left by an earlier start
    _write_lease(paths, mine)
    time.sleep(SETTLE_S)
    check_lease(paths)


def renew_lease(paths: RunPaths) -> None:
    """Renew the lease. Raises RunError if another process has taken it over."""
    check_lease(paths)
    _write_lease(paths, {**_read_own_lease(paths), "beat": time.time()})  # any new value would do


def release_lease(paths: RunPaths) -> None:
    """Release the lease."""
    url = url_of(paths)
    held = _read_lease(paths)
    if held is not None and held.get("owner") == _read_own_lease(paths)["owner"]:
        storage.remove([(url / paths.lock.name).text], url.timeout_s)
    _lease(paths).unlink()


def is_in_use(paths: RunPaths) -> bool:
    """Whether a process holds the run, or held it when it was killed."""
    return _read_lease(paths) is not None


def read_holder(paths: RunPaths) -> tuple[int, str] | None:
    """The process that writes to the run, and its machine; None if there is none, or if its lease is stale by the
    clocks of both machines."""
    held = _read_lease(paths)
    if held is None or _has_ended(held) or type(held.get("pid")) is not int:
        return None
    beat = held.get("beat")
    if not isinstance(beat, int | float) or abs(time.time() - beat) > STALE_S:
        return None
    return held["pid"], str(held.get("process")).rpartition(" on ")[2]


def request_stop(paths: RunPaths) -> bool:
    """Request the process that holds the run, on any machine, to save and exit. Returns whether it has noticed: it
    checks every BEAT_S."""
    held, url = _read_lease(paths), url_of(paths)
    asked = (url / STOP_FILE).text
    storage.write_bytes(asked, str((held or {}).get("owner")).encode(), timeout_s=url.timeout_s)
    until = time.monotonic() + STALE_S
    while time.monotonic() < until:
        if not storage.exists(asked, url.timeout_s):
            return True
        time.sleep(POLL_S)
    storage.remove([asked], url.timeout_s)
    return False


def is_stop_requested(paths: RunPaths) -> bool:
    """Whether this process is requested to stop; requests to earlier processes are ignored."""
    url = url_of(paths)
    asked = (url / STOP_FILE).text
    try:
        owner = storage.read_bytes(asked, timeout_s=url.timeout_s).decode(errors="replace")
    except FileNotFoundError:
        return False
    storage.remove([asked], url.timeout_s)
    return owner == _read_own_lease(paths)["owner"]


def push_error_file(paths: RunPaths) -> Path:
    """File in which the copying process reports its error."""
    return paths.root / ".mirror"


def _lease(paths: RunPaths) -> Path:
    return paths.root / ".lease"


def _read_own_lease(paths: RunPaths) -> dict[str, Any]:
    mine: dict[str, Any] = json.loads(_lease(paths).read_text(encoding="utf-8"))
    return mine


def check_lease(paths: RunPaths) -> None:
    """Raises RunError if this process no longer holds the lease."""
    held = _read_lease(paths)
    if held is None:  # a store without atomic replacement briefly shows no file
        time.sleep(SETTLE_S)
        held = _read_lease(paths)
    if held is None:
        raise RunError(
            f"the run {paths.display_name} no longer has its lease ({paths.lock.name} is gone), so another process "
            "may have written to it and this one must stop writing; restart it to resume from what is there"
        )
    if held.get("owner") != _read_own_lease(paths)["owner"]:
        raise RunError(
            f"the run {paths.display_name} was taken over by process {held.get('process')}, so this process must "
            "stop writing to it; let the other process continue, or stop it and restart this one"
        )


def _read_lease(paths: RunPaths) -> dict[str, Any] | None:
    url = url_of(paths)
    try:
        held = json.loads(storage.read_bytes((url / paths.lock.name).text, timeout_s=url.timeout_s))
    except FileNotFoundError:
        return None
    except ValueError:
        return {"process": "unknown"}
    return held if isinstance(held, dict) else {"process": "unknown"}


def _write_lease(paths: RunPaths, lease: dict[str, Any]) -> None:
    url = url_of(paths)
    storage.write_bytes((url / paths.lock.name).text, json.dumps(lease).encode(), timeout_s=url.timeout_s)


def _machine() -> str:
    """The identity of this machine, or of a container with its own process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''} {os.readlink('/proc/self/ns/pid')}"


def _has_ended(held: dict[str, Any]) -> bool:
    if held.get("machine") != _machine() or type(held.get("pid")) is not int:
        return False
    try:
        os.kill(held["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
