"""Health checks of a host without its accelerators: disk, shared memory, limits, memory, processors, clock, name.

Each check reads the system and judges it at once; the paths are arguments, for tests. The limits are those below which
training fails or slows down, not recommendations.
"""

import contextlib
import os
import resource
import secrets
import socket
import time
from pathlib import Path

from phalanx.health.findings import Finding, Severity
from phalanx.system import cpus as quotas

MIB, GIB = 2**20, 2**30
ROOM_BYTES = GIB  # free space of the run folder's disk: less is soon filled by a checkpoint
ROOM_TEMPORARY_BYTES = 256 * MIB
SHARED_BYTES = 256 * MIB  # free in /dev/shm, which data loaders, NCCL and gloo use; containers often have 64 MiB
MEMORY_BYTES, MEMORY_SHARE = GIB, 0.05  # host memory that should be free: the smaller of both
FILES, FILES_LEAST = 1024, 256  # descriptors: each rank has sockets to other ranks, token files, workers
PROCESSES = 512  # threads and processes that may still be started
LOCKED_BYTES = 64 * MIB  # locked memory, for network cards that write into it (RDMA)
SKEW_S, SKEW_MOST_S = 2.0, 300.0  # Slurm's munge rejects a skew of 300 s
_UNLIMITED = 1 << 62
PROBE = b"phalanx writes, syncs, reads\n" * 2048  # a few pages


def check_disk(
    folder: Path, room_bytes: int = ROOM_BYTES, what: str = "run folder", failed: Severity = Severity.RESET
) -> list[Finding]:
    """Check free space and inodes of a folder, and whether written data can be read again; `failed` is the
    severity if not. A missing folder is not created."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    where = str(folder)
    found = []
    try:
        known = os.statvfs(place)
        free = known.f_bavail * known.f_frsize
        if known.f_files and known.f_favail < 100:
            text = f"the {what} {folder} has room for {known.f_favail} more files; remove files there"
            found.append(Finding("inodes", failed, text, known.f_favail, 100, where))
        _write(place)
    except OSError as error:
        text = (
            f"the {what} {folder} cannot be written ({error.strerror or error}); free space there or fix its "
            "permissions"
        )
        return [Finding("disk", failed, text, error.strerror, None, where)]
    if free < room_bytes:
        text = f"the {what} {folder} has {_size(free)} left, less than {_size(room_bytes)}; free space there"
        found.append(Finding("disk", Severity.WATCH, text, free, room_bytes, where))
    text = f"the {what} {folder} is writable and has {_size(free)} left"
    return found or [Finding("disk", Severity.OK, text, free, room_bytes, where)]


def _write(place: Path, sync: bool = True) -> float:
    """Write, sync, read and remove a file; returns its modification time, by the file system's clock. Raises
    OSError."""
    path = place / f".phalanx-probe-{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, PROBE) < len(PROBE):
            raise OSError(28, "No space left on device")
        if sync:
            os.fsync(descriptor)
        if os.pread(descriptor, len(PROBE), 0) != PROBE:
            raise OSError(5, "the data read differs from the data written")
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            path.unlink()


def check_shared_memory(place: Path = Path("/dev/shm")) -> list[Finding]:
    """Check size and free space of the folder for shared memory."""
    try:
        known = os.statvfs(place)
        _write(place)
    except OSError as error:
        text = (
            f"{place}, which processes use to share memory, cannot be written ({error.strerror}); mount it or free "
            "space there"
        )
        return [Finding("shared memory", Severity.RESET, text, error.strerror, None, str(place))]
    free = known.f_bavail * known.f_frsize
    if free < SHARED_BYTES:
        text = (
            f"{place} has {_size(free)} left of {_size(known.f_blocks * known.f_frsize)}, less than "
            f"{_size(SHARED_BYTES)}; enlarge it (docker: --shm-size) or free space there"
        )
        return [Finding("shared memory", Severity.WATCH, text, free, SHARED_BYTES, str(place))]
    return [Finding("shared memory", Severity.OK, f"{place} has {_size(free)} left", free, SHARED_BYTES, str(place))]


def check_limits(network_cards: Path = Path("/sys/class/infiniband")) -> list[Finding]:
    """Resource limits of this process (`ulimit`)."""
    found = []
    files = _soft(resource.RLIMIT_NOFILE)
    if files < FILES:
        text = f"this process may open {files} files (ulimit -n), less than {FILES}; raise the limit"
        severity = Severity.RESET if files < FILES_LEAST else Severity.WATCH
        found.append(Finding("open files", severity, text, files, FILES))
    processes = _soft(resource.RLIMIT_NPROC)
    left = processes - _tasks_of_user() if os.getuid() else processes
    if left < PROCESSES:
        text = f"this user may start {max(0, left)} more threads and processes (ulimit -u), less than {PROCESSES}"
        found.append(Finding("processes", Severity.WATCH, f"{text}; raise the limit", left, PROCESSES))
    locked = _soft(resource.RLIMIT_MEMLOCK)
    if locked < LOCKED_BYTES and network_cards.is_dir() and any(network_cards.iterdir()):
        text = (
            f"this process may lock {_size(locked)} of memory (ulimit -l), too little for this node's RDMA network "
            "card; set it to unlimited"
        )
        found.append(Finding("locked memory", Severity.WATCH, text, locked, LOCKED_BYTES))
    may_lock = "any amount" if locked == _UNLIMITED else _size(locked)
    text = f"this process may open {files} files and lock {may_lock} of memory"
    return found or [Finding("limits", Severity.OK, text, files, FILES)]


def _soft(which: int) -> int:
    value = resource.getrlimit(which)[0]
    return _UNLIMITED if value == resource.RLIM_INFINITY else value


def _tasks_of_user() -> int:
    """Number of threads of this user's processes, which RLIMIT_NPROC limits."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def check_memory(
    meminfo: Path = Path("/proc/meminfo"), edac: Path = Path("/sys/devices/system/edac/mc")
) -> list[Finding]:
    """Check host memory: how much is free, and whether the kernel knows of faulty parts."""
    known = {}
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        known[name] = int(value.split()[0]) * 1024
    total, free = known["MemTotal"], known.get("MemAvailable", known["MemFree"])
    wanted = min(MEMORY_BYTES, int(MEMORY_SHARE * total))
    found = []
    if free < wanted:
        text = (
            f"{_size(free)} of this machine's {_size(total)} of memory are free, less than {_size(wanted)}; end "
            "other processes"
        )
        found.append(Finding("memory", Severity.WATCH, text, free, wanted))
    if broken := known.get("HardwareCorrupted", 0):
        text = f"the kernel has retired {_size(broken)} of faulty memory; have this machine's memory tested"
        found.append(Finding("memory errors", Severity.WATCH, text, broken, 0))
    if uncorrected := _sum_edac_counters(edac, "ue_count"):
        text = f"{uncorrected} memory errors of this machine could not be corrected; replace its memory"
        found.append(Finding("memory errors", Severity.ISOLATE, text, uncorrected, 0))
    if corrected := _sum_edac_counters(edac, "ce_count"):
        text = f"{corrected} memory errors of this machine were corrected; watch whether they increase"
        found.append(Finding("memory errors", Severity.WATCH, text, corrected, 0))
    text = f"{_size(free)} of this machine's {_size(total)} of memory are free"
    return found or [Finding("memory", Severity.OK, text, free, wanted)]


def _sum_edac_counters(edac: Path, name: str) -> int:
    total = 0
    for path in sorted(edac.glob(f"mc*/{name}")):
        with contextlib.suppress(OSError, ValueError):
            total += int(path.read_text())
    return total


def check_cpus(
    cores: int | None = None,
    groups: Path = quotas.GROUPS,
    own: Path = quotas.OWN,
    expected: int | None = None,
) -> list[Finding]:
    """Check the processors that this process may use, by affinity and by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    quota = quotas.cpu_quota(groups, own)
    if expected is not None and cores < expected:
        text = (
            f"{cores} processors are present but {expected} are expected; request all of them, or have the node "
            "inspected"
        )
        return [Finding("processors", Severity.WATCH, text, cores, expected)]
    if quota is not None and quota < 0.99 * cores:
        text = (
            f"this process sees {cores} processors but its control group's quota is {quota:.3g}: ranks use at most "
            "that many threads, and all are throttled when other processes use part of it; raise the quota to the "
            "number of processors"
        )
        return [Finding("processors", Severity.WATCH, text, quota, cores)]
    return [Finding("processors", Severity.OK, f"{cores} processors available", cores, expected)]


def check_clock(folder: Path) -> list[Finding]:
    """Compare this machine's clock with that of a folder's file system: the server's, for a shared one."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    begun = time.time()
    try:
        written = _write(place, sync=False)
    except OSError as error:
        text = f"the clock cannot be compared with {folder}'s ({error.strerror})"
        return [Finding("clock", Severity.UNKNOWN, text, where=str(folder))]
    ended = time.time()
    # The clock was read before and after; a file's time may be a tick (10 ms) behind its clock.
    ahead = written - ended if written > ended else min(0.0, written + 0.02 - begun)
    return [judge_clock_skew(ahead, f"the file system of {folder}")]


def judge_clock_skew(skew_s: float, other: str) -> Finding:
    """Judge a difference of clocks; `skew_s` is how far the other one is ahead."""
    if abs(skew_s) < SKEW_S:
        return Finding("clock", Severity.OK, f"the clock agrees with that of {other}", skew_s, SKEW_S)
    behind = f"{abs(skew_s):.1f} s {'behind' if skew_s > 0 else 'ahead of'}"
    text = f"this node's clock is {behind} that of {other}; synchronize both (chrony, ntpd)"
    severity = Severity.RESET if abs(skew_s) >= SKEW_MOST_S else Severity.WATCH
    return Finding("clock", severity, text, skew_s, SKEW_S)


def check_hostname() -> list[Finding]:
    """Check whether this host's own name resolves to an address that others can reach. The resolver may take long."""
    host = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        text = (
            f"this host cannot resolve its own name, {host} ({error.strerror or error}), so libraries may hang or "
            "choose a wrong address; add it to /etc/hosts or DNS"
        )
        return [Finding("name", Severity.WATCH, text, host)]
    if all(address.startswith("127.") or address == "::1" for address in found):
        text = (
            f"this host's own name, {host}, resolves to {', '.join(found)}, where no other node can reach it; for "
            "runs on several nodes, give it its network address in /etc/hosts"
        )
        return [Finding("name", Severity.WATCH, text, ", ".join(found))]
    return [Finding("name", Severity.OK, f"{host} is {', '.join(found)}", ", ".join(found))]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
