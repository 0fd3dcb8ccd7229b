"""The scheduler interface that `phalanx launch`, `status`, `logs`, `cancel` and `nodes` use.

A scheduler is a module with these functions, or a subclass of `Scheduler` with those that it has, and a row of
SCHEDULERS in `registry.py`. The run folder says by which of them a run was launched.
`tests/dist/test_scheduler.py` has the smallest one.
"""

import contextlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.storage import lease
from phalanx.system import locks, torchrun_env

MAX_STARTS = 100  # the default of --max-jobs with --until-done


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `phalanx launch` apart from the recipe."""

    nodes: int
    spares: int = 0
    ranks: int | None = None
    until_done: bool = False
    max_jobs: int = MAX_STARTS


class QueuePhase(StrEnum):
    """Phase of a job. `ENDS`: the scheduler is ending the remains of the job, or of its previous start before a
    requeue."""

    WAITS = "waits"
    RUNS = "runs"
    ENDS = "ends"
    OVER = "over"


@dataclass(frozen=True)
class Job:
    """A job of a scheduler: its `state` in the scheduler's own word, and the phase of that state. `restarts` counts how
    often it was requeued."""

    id: str
    state: str
    phase: QueuePhase
    reason: str = ""
    nodes: str = ""  # a list such as n[1-2]
    restarts: int = 0
    time_limit: str = ""
    end_time: str = ""
    code: int | None = None  # what its script left with

    @property
    def waits(self) -> bool:
        return self.phase == QueuePhase.WAITS

    @property
    def ends(self) -> bool:
        return self.phase == QueuePhase.ENDS

    @property
    def over(self) -> bool:
        return self.phase == QueuePhase.OVER


class JobTask(Protocol):
    """The part of a job that runs on one node, as its environment says; `start_count` counts from 1, and `name` is
    JOB-START."""

    @property
    def job(self) -> str: ...
    @property
    def node(self) -> int: ...
    @property
    def start_count(self) -> int: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class SchedulerNode:
    """`reason`: why it is drained, else empty."""

    name: str
    state: str
    reason: str


class Scheduler(Protocol):
    """What runs `phalanx keep RUN_FOLDER` once on each node of a job. Its functions raise ConfigError where the
    scheduler is not there, and RunError, with its own words, where it refuses or does not answer. Functions that a
    subclass does not define are unsupported."""

    TITLE: str
    SECTION: str | None  # of the recipe, with the options of a job; None: it has none
    QUEUES: bool  # its jobs have numbers, which the run folder keeps; else the lock of the run tells of its process

    def make_script(self, config: Config, paths: RunPaths, options: LaunchOptions) -> str | None:
        """The job script, for --dry-run and for `submit`; None if there is none. Submits nothing."""
        return None

    def check_cluster(self, config: Config, options: LaunchOptions) -> None:
        """Raises ConfigError for a job that could never run here."""
        return None

    def submit(self, paths: RunPaths, environment: Mapping[str, str]) -> str:
        """Submit the job, whose script (if any) is `paths.launch_script`; returns its number."""

    def query_job(self, number: str) -> Job | None:
        """The job; None where the scheduler no longer knows it."""
        return None

    def find_log(self, paths: RunPaths, number: str) -> Path:
        """Path of the job's output: `paths.job_log`, beside that of each node, `paths.node_log`."""
        return paths.job_log(self.TITLE.lower(), number)

    def stop(self, number: str) -> None:
        """Send SIGTERM to what runs on the nodes: it saves and exits."""
        raise ConfigError(f"{self.TITLE} cannot stop jobs")

    def cancel(self, number: str) -> None:
        """End a job now, or remove it from the queue."""
        raise ConfigError(f"{self.TITLE} cannot cancel jobs")

    def requeue(self, number: str) -> None:
        """Requeue a job under its number."""
        raise ConfigError(f"{self.TITLE} cannot requeue jobs")

    def list_nodes(self) -> list[SchedulerNode]:
        """All nodes, each once."""
        raise ConfigError(f"{self.TITLE} cannot list nodes")

    def set_node_state(self, node: str, wanted: NodeRequestKind, reason: str | None) -> str:
        """Drain a node, request its replacement, or uncordon it; returns the scheduler's word for that."""
        raise ConfigError(f"{self.TITLE} cannot drain nodes")

    def read_task(self, environment: Mapping[str, str], paths: RunPaths) -> JobTask | None:
        """The part of a job that this process is; None outside of jobs."""
        return None

    def exit_code(self, code: int, leaves: bool, ends: bool) -> int:
        """The exit code by which the scheduler learns that a task is over, whose run ended with `code`. `leaves`: the
        node was asked to leave; `ends`: no other start may follow, though the run is not done."""
        return code

    def find_rendezvous(self, paths: RunPaths, task: JobTask | None) -> str:
        """Where the nodes of a job meet, as --rendezvous takes it: in the run folder."""
        return paths.rendezvous.resolve().as_uri()

    def is_script_alive(self, task: JobTask) -> bool:
        """Whether the script that started this task is alive, and so ends the job itself."""
        return True

    def cancel_task(self, environment: Mapping[str, str]) -> None:
        """Cancel the job step of this process, if it belongs to one; called by a node that cannot take part."""
        return None


# ---------------------------------------------------------------------------------------------------------- background
# Runs in the background of this machine: no queue, and a process that is found by the lock that it holds.


STARTS_S = 30.0  # time for a background process to take its lock


class Background(Scheduler):
    """Runs as a background process without a queue, found by the lock of the run."""

    TITLE = "this machine"
    SECTION: str | None = None
    QUEUES = False

    def check_cluster(self, config: Config, options: LaunchOptions) -> None:
        """Raises ConfigError for more nodes than this one."""
        if options.nodes + options.spares > 1:
            raise ConfigError(
                "--local uses this machine only; leave out --nodes and --spares, or run `phalanx train --nodes ...` "
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
        raise RunError(f"the run did not start: {words[-1] if words else f'exit code {started.returncode}'}")

    def find_log(self, paths: RunPaths, number: str) -> Path:
        return paths.node_log(0).with_name("keeper.log")


# ------------------------------------------------------------------------------------------------ processes and locks


@contextlib.contextmanager
def hold_lock(paths: RunPaths) -> Iterator[None]:
    """Hold the lock of the run's supervisor process. Raises RunError when another process holds it."""
    descriptor = os.open(paths.job_supervisor, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not locks.try_lock(descriptor):
            raise RunError(
                f"{paths.display_name} is already supervised by process {_read_text(paths.job_supervisor)}; stop "
                "that process first"
            )
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} on {platform.node()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def find_lock_holder(lock: Path) -> tuple[int, str] | None:
    """Process and machine that hold a lock file of a run, as written there; None if it is free."""
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
    """The process of a run without a scheduler, and its machine; None if there is none."""
    if paths.url is not None:
        return lease.read_holder(paths)
    return find_lock_holder(paths.job_supervisor) or find_lock_holder(paths.lock)


def _read_text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip() or "unknown"
    return "unknown"
