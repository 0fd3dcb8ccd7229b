"""A launched run, read from its run folder: the request, the outcome of each start, and its job now."""

import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError, StorageError
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths, Url
from phalanx.launch.schedulers.registry import DEFAULT, LOCAL, SCHEDULERS, find_scheduler
from phalanx.launch.schedulers.scheduler import Job, Scheduler, find_local_process, find_lock_holder
from phalanx.launch.start_outcomes import StartOutcome
from phalanx.recovery import fencing
from phalanx.report.logs import open_terminal
from phalanx.storage import lease, mirror
from phalanx.system.fork import fork, fork_call

STALLED = 3  # starts in a row without a new checkpoint, after which no further one is made
ASK_S = 2.0  # between two questions to a scheduler
RESTART, END = "again", "end"


@dataclass(frozen=True)
class LaunchSpec:
    """The request of `phalanx launch`; `nodes` train, and `spares` wait."""

    scheduler: str
    nodes: int
    spares: int
    ranks: int | None
    until_done: bool
    max_starts: int
    submitted: float  # seconds since the epoch
    host: str


def write_launch_spec(paths: RunPaths, spec: LaunchSpec) -> None:
    write_atomic(paths.launched, json.dumps(asdict(spec), indent=2) + "\n")


def read_launch_spec(paths: RunPaths) -> LaunchSpec | None:
    """How the run was launched; None where it was not, or by another version."""
    try:
        tree = json.loads(paths.launched.read_text(encoding="utf-8"))
        if "scheduler" not in tree:  # as 0.1 wrote it: one key of a scheduler's name, true or false
            tree["scheduler"] = next((name for name in SCHEDULERS if tree.get(name)), LOCAL)
        return LaunchSpec(**{field.name: tree[field.name] for field in fields(LaunchSpec)})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def decide_restart(
    launched: LaunchSpec, code: int, cancelled: bool, saved: int, before: Sequence[StartOutcome]
) -> tuple[str, str]:
    """Whether another start follows one that ended with `code`, having `saved` that step, and if not, why. None follows
    a finished run, a mistake in the recipe, or running out of memory, which would recur.
    """
    if code in (ExitCode.DONE, ExitCode.CONFIG, ExitCode.OUT_OF_MEMORY) or not launched.until_done:
        return END, ""
    if cancelled:
        return END, "it was cancelled"
    if len(before) + 1 >= launched.max_starts:
        return END, f"it was started {len(before) + 1} times, the limit of --max-jobs"
    reached = [over.step for over in before]
    if len(reached) + 1 >= STALLED and saved <= [0, *reached][-STALLED]:
        return END, f"{STALLED} starts in a row made no progress beyond step {saved}"
    return RESTART, ""


# ------------------------------------------------------------------------------------------------------- the job now


def scheduler_name_of(paths: RunPaths) -> str:
    """The scheduler that has the jobs of a run: as the run folder says, or else the default one."""
    launched = read_launch_spec(paths)
    return DEFAULT if launched is None else launched.scheduler


def scheduler_of(paths: RunPaths) -> Scheduler:
    """Raises ConfigError for an unknown scheduler."""
    return find_scheduler(scheduler_name_of(paths))


def newest_job(paths: RunPaths) -> Job | None:
    """The newest job of a run as reported by its scheduler; None if there is none or it is no longer known."""
    numbers = job_numbers(paths)
    return scheduler_of(paths).query_job(numbers[-1]) if numbers else None


def job_numbers(paths: RunPaths) -> list[str]:
    """Numbers of the jobs that the run was given to, the newest last."""
    with contextlib.suppress(OSError):
        return [
            word for word in paths.jobs.read_text(encoding="utf-8").split() if word[0].isdigit() or "phalanx-" in word
        ]
    return []


def find_leading_node(paths: RunPaths) -> int:
    """The node of a launched run that leads it, and so shows its progress, as the newest file of epochs says: 0 where
    none says otherwise, or where that node has no log."""
    launched = read_launch_spec(paths)
    if launched is None or launched.nodes + launched.spares == 1:
        return 0
    node = (fencing.read_newest_epoch(paths) or {}).get("leader")
    return node if type(node) is int and paths.node_log(node).exists() else 0


def is_running(paths: RunPaths) -> bool:
    """Whether a run may still make progress. Where the scheduler does not answer it counts as running."""
    if paths.url is not None:
        return lease.read_holder(paths) is not None
    try:
        return not has_ended(paths, newest_job(paths)) or find_lock_holder(paths.lock) is not None
    except PhalanxError:
        return True


class RunningPoller:
    """Rate-limited `is_running`: the scheduler serves others as well."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._asked_at, self._answer = paths, -ASK_S, True

    def __call__(self) -> bool:
        if time.monotonic() >= self._asked_at + ASK_S:
            self._answer = is_running(self._paths)
            self._asked_at = time.monotonic()
        return self._answer


def describe_scheduler_state(paths: RunPaths) -> dict[str, Any] | None:
    """State of the run's job or process. Raises nothing: the scheduler may be elsewhere."""
    numbers = job_numbers(paths)
    if not numbers:
        held = find_local_process(paths)
        return None if held is None else {"by": "process", "id": str(held[0]), "state": "RUNNING", "nodes": held[1]}
    known: dict[str, Any] = {"by": scheduler_name_of(paths), "id": numbers[-1], "state": "", "nodes": ""}
    try:
        job = scheduler_of(paths).query_job(numbers[-1])
    except PhalanxError as error:
        return known | {"state": "not known", "reason": str(error)}
    if job is None:
        return known | {"state": f"unknown to {scheduler_of(paths).TITLE}"}
    return known | {
        "state": job.state, "reason": job.reason, "nodes": job.nodes, "restarts": job.restarts,
        "end_time": job.end_time, "time_limit": job.time_limit,
    }  # fmt: skip


def has_ended(paths: RunPaths, job: Job | None) -> bool:
    """Whether the run has no job and no process on this machine."""
    if job is not None:
        return job.over
    return bool(job_numbers(paths)) or find_lock_holder(paths.job_supervisor) is None


# ------------------------------------------------------------------------------------------------------ remote run dir
# A run folder at a URL, for the process that trains it: taken, fetched, and kept up to date by a child meanwhile.


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
        os.close(writer)  # which requests it to finish
        if not select.select([pidfd], [], [], NOTICE_S)[0]:
            open_terminal().print(f"copying the last records to {paths.display_name}; failures are retried for a while")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(pidfd)
        if code == ExitCode.DONE:
            return None
        remedy = "" if code == ExitCode.CONFIG else "; the same command on this machine copies them"
        why = mirror.read_push_error(paths)
        return f"some records of the run are missing at {paths.display_name} ({why}); they are in {paths.root}{remedy}"

    try:
        yield
    except BaseException:
        if (missing := end()) is not None:
            open_terminal().print(missing, style="yellow")
        raise
    if (missing := end()) is not None:
        raise StorageError(missing)


def _take(root: str, url: str, timeout_s: float, pid: int) -> None:
    paths = RunPaths(Path(root), Url(url, timeout_s))
    lease.acquire_lease(paths, pid)
    try:
        mirror.fetch_records(paths)
    except BaseException:
        lease.release_lease(paths)
        raise


def fetch_records(paths: RunPaths, meanwhile: Callable[[], None] | None = None) -> None:
    """Download the records of a run at a URL to this process's working folder; `meanwhile` is called all the time."""
    assert paths.url is not None
    fork_call(_fetch, str(paths.root), paths.url.text, paths.url.timeout_s, timeout_s=None, meanwhile=meanwhile)


def _fetch(root: str, url: str, timeout_s: float) -> None:
    paths = RunPaths(Path(root), Url(url, timeout_s))
    paths.root.mkdir(parents=True, exist_ok=True)
    mirror.fetch_records(paths)
