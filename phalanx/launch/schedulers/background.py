"""Runs in the background of this machine: no queue, and a process that is found by the lock that it holds."""

import contextlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.run_paths import RunPaths
from phalanx.launch.schedulers.scheduler import LaunchOptions, Scheduler
from phalanx.storage import lease
from phalanx.system import locks, torchrun_env

STARTS_S = 30.0  # what a process in the background gets to take its lock


class Background(Scheduler):
    """No queue: its one process is found by the lock of the run, as any that trains on this machine is."""

    TITLE = "this machine"
    SECTION: str | None = None
    QUEUES = False

    def check_cluster(self, config: Config, options: LaunchOptions) -> None:
        """Raises ConfigError for more nodes than this one."""
        if options.nodes + options.spares > 1:
            raise ConfigError(
                "--local is this machine alone; leave --nodes and --spares out, or give `phalanx train --nodes ...` "
                "on each node"
            )

    def submit(self, paths: RunPaths, environment: Mapping[str, str]) -> str:
        """Start the run as a process of this machine that outlives this command; returns its number."""
        log = self.find_log(paths, "")
        with open(log, "ab") as out:
            started = subprocess.Popen(
                [sys.executable, "-m", "phalanx", "keep", str(paths.root.resolve())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=torchrun_env.strip_job_variables(environment),
            )
        until = time.monotonic() + STARTS_S
        while started.poll() is None and time.monotonic() < until:
            if find_lock_holder(paths.job_supervisor) is not None:
                return str(started.pid)
            time.sleep(0.02)
        if started.poll() is None:
            return str(started.pid)
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RunError(f"the run has not started: {words[-1] if words else f'exit code {started.returncode}'}")

    def find_log(self, paths: RunPaths, number: str) -> Path:
        return paths.node_log(0).with_name("keeper.log")


# ------------------------------------------------------------------------------------------------ processes and locks


@contextlib.contextmanager
def hold_lock(paths: RunPaths) -> Iterator[None]:
    """Hold the lock that says that this process keeps the run. Raises RunError when another does."""
    descriptor = os.open(paths.job_supervisor, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not locks.try_lock(descriptor):
            raise RunError(
                f"{paths.display_name} is kept already, by process {_read_text(paths.job_supervisor)}; stop that first"
            )
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} on {platform.node()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def find_lock_holder(lock: Path) -> tuple[int, str] | None:
    """Process and machine that hold a lock file of a run, as they have written it there; None where nobody does."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        match = re.match(r"(\d+) on (\S+)", _read_text(lock)) if locks.is_locked(descriptor) else None
        return (int(match[1]), match[2]) if match else None
    finally:
        os.close(descriptor)


def find_local_process(paths: RunPaths) -> tuple[int, str] | None:
    """The process that runs a run without a scheduler, and its machine; None where there is none."""
    if paths.url is not None:
        return lease.read_holder(paths)
    return find_lock_holder(paths.job_supervisor) or find_lock_holder(paths.lock)


def _read_text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip() or "unknown"
    return "unknown"
