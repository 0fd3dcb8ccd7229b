"""Processes that may use no more than a part of a core: devices of chosen speeds on one machine.

By a CPU quota of a control group (v1 or v2) where this process may make one, otherwise by a helper of each process that
stops it for the rest of every period once it has had its part. Control groups may limit memory, too. Linux only.
"""

import contextlib
import errno
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.tidy import heeding_signals, is_stale, undisturbed

PERIOD_S = 0.010
LEAST = 0.1  # of a core: the kernel takes no quota below a millisecond a period
ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"), Path("/sys/fs/cgroup"))
MEMORY_ROOT = Path("/sys/fs/cgroup/memory")  # of version 1
GONE_S, LOOK_S = 10.0, 0.02  # until killed processes have left their groups; and between two looks
_PREFIX = "phalanx-"


class Throttle:
    """Limits for `ranks` processes. Each calls `enter` on itself, or who has started it does; anyone may call `limit`
    at any time."""

    kind: str

    def enter(self, rank: int, pid: int | None = None) -> None:
        """Put this process, or the one of that number, under the limit of `rank`."""
        raise AssertionError

    def limit(self, rank: int, cores: float) -> None:
        """Allow the processes of `rank` so much of a core from now on."""
        raise AssertionError

    def limit_memory(self, rank: int, most: int | None) -> None:
        """Have the kernel kill a process of `rank` that would make them hold more than so many bytes; None: no limit.
        Not everywhere: `limits_memory` says."""
        raise AssertionError

    def memory_kills(self, rank: int) -> int:
        """How many processes of `rank` the kernel has killed for its limit of memory."""
        raise AssertionError

    @property
    def limits_memory(self) -> bool:
        """Whether `limit_memory` can be called."""
        return False


class ControlGroups(Throttle):
    """One group for each rank below `parent`, a folder of the CPU controller of either version; and of version 1 below
    `memory`, one of the memory controller, where there is any."""

    def __init__(self, parent: Path, ranks: int, memory: Path | None = None, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self.second = (parent / "cgroup.controllers").exists()
        self.kind = f"control groups v{2 if self.second else 1}"
        self._groups = [parent / f"rank-{rank}" for rank in range(ranks)]
        for group in self._groups:
            group.mkdir()
        self._memory = self._groups
        if not self.second:
            self._memory = [memory / f"rank-{rank}" for rank in range(ranks)] if memory is not None else []
            for group in self._memory:
                group.mkdir()

    def enter(self, rank: int, pid: int | None = None) -> None:
        for group in {self._groups[rank], *self._memory[rank : rank + 1]}:
            (group / "cgroup.procs").write_text(str(pid or os.getpid()))

    @property
    def limits_memory(self) -> bool:
        return bool(self._memory) and all((group / self._memory_file).exists() for group in self._memory)

    @property
    def _memory_file(self) -> str:
        return "memory.max" if self.second else "memory.limit_in_bytes"

    def limit_memory(self, rank: int, most: int | None) -> None:
        unlimited = "max" if self.second else "-1"
        (self._memory[rank] / self._memory_file).write_text(unlimited if most is None else str(most))

    def limit(self, rank: int, cores: float) -> None:
        assert cores * self._period_s >= LEAST * PERIOD_S, (cores, self._period_s)
        period, quota = round(self._period_s * 1e6), round(cores * self._period_s * 1e6)
        if self.second:
            (self._groups[rank] / "cpu.max").write_text(f"{quota} {period}")
            return
        (self._groups[rank] / "cpu.cfs_quota_us").write_text(
            "-1"
        )  # a shorter period must not make it more than allowed
        (self._groups[rank] / "cpu.cfs_period_us").write_text(str(period))
        (self._groups[rank] / "cpu.cfs_quota_us").write_text(str(quota))

    def memory_kills(self, rank: int) -> int:
        file = self._memory[rank] / ("memory.events" if self.second else "memory.oom_control")
        lines = [line.split() for line in file.read_text().splitlines()]
        return sum(int(words[1]) for words in lines if words[0] == "oom_kill")


class StopAndGo(Throttle):
    """A forked helper stops its process once it has used its part of a period, and lets it go on in the next."""

    kind = "stop and go"

    def __init__(self, folder: Path, ranks: int) -> None:
        self._parts = [folder / f"rank-{rank}" for rank in range(ranks)]

    def enter(self, rank: int, pid: int | None = None) -> None:
        watched, parent = pid or os.getpid(), os.getpid()
        if os.fork() == 0:
            try:
                self._watch(watched, parent, self._parts[rank])
            finally:
                os._exit(0)

    def limit(self, rank: int, cores: float) -> None:
        arriving = self._parts[rank].with_suffix(".new")
        arriving.write_text(str(cores))
        os.replace(arriving, self._parts[rank])

    @staticmethod
    def _watch(watched: int, parent: int, part: Path) -> None:
        clock = (~watched << 3) | 2  # CPUCLOCK_SCHED of another process, as <linux/posix-timers.h> makes it
        credit, seen_at, seen = 0.0, time.monotonic(), time.clock_gettime(clock)
        with contextlib.suppress(ProcessLookupError, OSError):
            while os.getppid() == parent:
                cores = float(part.read_text())
                now, used = time.monotonic(), time.clock_gettime(clock)
                # What it had too much (this helper may come late) is taken from the next periods.
                credit = min(cores * PERIOD_S, credit + cores * (now - seen_at) - (used - seen))
                seen_at, seen = now, used
                if credit > 0:
                    time.sleep(max(credit, 0.0003))
                    continue
                os.kill(watched, signal.SIGSTOP)
                time.sleep(PERIOD_S / 2 - credit / cores)
                os.kill(watched, signal.SIGCONT)


@contextlib.contextmanager
def throttle(ranks: int, by_groups: bool | None = None, period_s: float = PERIOD_S) -> Iterator[Throttle]:
    """Control groups where this process may make them (or if `by_groups` says so), else stop and go. Nothing of it is
    left afterwards, also when the process is told to end meanwhile; nor of one that was killed before it could tidy up.
    The processes in it must have ended by then. `period_s`: of
    the groups' quotas."""
    remove_stale()
    with heeding_signals():
        parent = None if by_groups is False else _made_parent()
        assert parent is not None or not by_groups, "this process may make no control group with a CPU quota"
        if parent is None:
            with tempfile.TemporaryDirectory(prefix="phalanx-throttle-") as folder:
                yield StopAndGo(Path(folder), ranks)
            return
        memory = None
        try:
            memory = _made_memory_parent(parent)
            yield ControlGroups(parent, ranks, memory, period_s)
        finally:
            with undisturbed():
                for made in filter(None, (memory, parent)):
                    _remove(made)


def remove_stale() -> None:
    """Remove groups of processes that no longer live, unless something else is in them."""
    for root in (*ROOTS, MEMORY_ROOT):
        for folder in root.glob(f"{_PREFIX}*"):
            if is_stale(folder.name, rf"{_PREFIX}(\d+)"):
                with contextlib.suppress(OSError):
                    _remove(folder, patience_s=0.0)


def _remove(folder: Path, patience_s: float = GONE_S) -> None:
    """Remove a folder of groups. Who was killed a moment ago may still be in one of them."""
    until = time.monotonic() + patience_s
    for group in (*folder.glob("rank-*"), folder):
        while True:
            try:
                group.rmdir()
                break
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() >= until:
                    raise
            time.sleep(LOOK_S)


def _made_parent() -> Path | None:
    """A new folder of the CPU controller, in which groups with a quota can be made."""
    for root in ROOTS:
        parent = root / f"{_PREFIX}{os.getpid()}"
        try:
            parent.mkdir()
        except OSError:
            continue
        if _has_quota(parent):
            return parent
        parent.rmdir()
    return None


def _made_memory_parent(parent: Path) -> Path | None:
    """A folder of version 1's memory controller like `parent`, or None: there is none, or it is of version 2, whose
    groups limit memory themselves."""
    if (parent / "cgroup.controllers").exists():
        return None
    folder = MEMORY_ROOT / parent.name
    try:
        folder.mkdir()
    except OSError:
        return None
    return folder


def _has_quota(parent: Path) -> bool:
    if (parent / "cpu.cfs_quota_us").exists():
        return True
    try:
        (parent / "cgroup.subtree_control").write_text("+cpu")
    except OSError:
        return False
    with contextlib.suppress(OSError):  # without it there are no limits of memory
        (parent / "cgroup.subtree_control").write_text("+memory")
    return True
