"""The lease of a run folder at a URL: which process may write to it.

It is an object that its holder renews every few seconds, and that another start takes over when it has not been renewed
for STALE_S. Who lost it commits nothing more.
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
    """Where a run that is at a URL is."""
    assert paths.url is not None, paths.root
    return paths.url


def acquire_lease(paths: RunPaths, pid: int, stale_s: float = STALE_S) -> None:
    """Make process `pid` of this machine the one that writes to the run. Raises RunError when another one does.

    A lease whose process has ended on this machine is taken over at once, any other when `stale_s` pass without its
    being renewed. Stores that fsspec speaks to have no lock in common: of two starts within SETTLE_S the later wins,
    and should that go wrong, the one that finds the other's lease at its next renewal ends.
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
    push_error_file(paths).unlink(missing_ok=True)  # of an earlier start
    _write_lease(paths, mine)
    time.sleep(SETTLE_S)
    check_lease(paths)


def renew_lease(paths: RunPaths) -> None:
    """Say that the process is still there. Raises RunError when another one has taken the run over."""
    check_lease(paths)
    _write_lease(paths, {**_read_own_lease(paths), "beat": time.time()})  # any other value than before would do


def release_lease(paths: RunPaths) -> None:
    """Let others have the run."""
    url = url_of(paths)
    held = _read_lease(paths)
    if held is not None and held.get("owner") == _read_own_lease(paths)["owner"]:
        storage.remove([(url / paths.lock.name).text], url.timeout_s)
    _lease(paths).unlink()


def is_in_use(paths: RunPaths) -> bool:
    """Whether some process holds the run, or held it when it was killed."""
    return _read_lease(paths) is not None


def read_holder(paths: RunPaths) -> tuple[int, str] | None:
    """The process that writes to the run, and its machine; None where there is none, or it has stopped renewing its
    lease, by the clocks of both machines."""
    held = _read_lease(paths)
    if held is None or _has_ended(held) or type(held.get("pid")) is not int:
        return None
    beat = held.get("beat")
    if not isinstance(beat, int | float) or abs(time.time() - beat) > STALE_S:
        return None
    return held["pid"], str(held.get("process")).rpartition(" on ")[2]


def request_stop(paths: RunPaths) -> bool:
    """Ask the process that holds the run, on whatever machine, to save and leave. Returns whether it has heard it: it
    looks every BEAT_S."""
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
    """Whether this process is asked to stop; what is asked of another one is of the past."""
    url = url_of(paths)
    asked = (url / STOP_FILE).text
    try:
        owner = storage.read_bytes(asked, timeout_s=url.timeout_s).decode(errors="replace")
    except FileNotFoundError:
        return False
    storage.remove([asked], url.timeout_s)
    return owner == _read_own_lease(paths)["owner"]


def push_error_file(paths: RunPaths) -> Path:
    """Where the holder's process that copies the records says why it could not."""
    return paths.root / ".mirror"


def _lease(paths: RunPaths) -> Path:
    return paths.root / ".lease"


def _read_own_lease(paths: RunPaths) -> dict[str, Any]:
    mine: dict[str, Any] = json.loads(_lease(paths).read_text(encoding="utf-8"))
    return mine


def check_lease(paths: RunPaths) -> None:
    """Raises RunError when this process is not the one that writes to the run any more."""
    held = _read_lease(paths)
    if held is None:  # a store that does not replace a file at one stroke is without it for a moment
        time.sleep(SETTLE_S)
        held = _read_lease(paths)
    if held is None:
        raise RunError(
            f"the run {paths.display_name} no longer has its lease ({paths.lock.name} is gone), so another process may "
            "have written to it and this one must not any more; start it again, which goes on with what is there"
        )
    if held.get("owner") != _read_own_lease(paths)["owner"]:
        raise RunError(
            f"the run {paths.display_name} has been taken over by process {held.get('process')}, so this one must not "
            "write to it any more; let that one go on, or stop it and start again"
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
    """What tells machines, and containers that count processes anew, apart."""
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
