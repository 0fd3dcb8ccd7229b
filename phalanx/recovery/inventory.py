"""Inventory of a run's folder in shared memory: state files of its ranks, replicas of others, the step to resume from,
and removal. It reads only the first pages of files, so an agent may call it. No torch here.
"""

import fcntl
import os
import re
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from phalanx.core.errors import CheckpointError, RunError
from phalanx.recovery.catalog import HEADER_ONLY, StateFileInfo
from phalanx.recovery.state_file import (
    EMPTY_INDEX,
    UNFINISHED,
    OtherStateFormat,
    StateFileMetadata,
    digest_json,
    open_descriptor,
    read_metadata,
    read_metadata_at,
    state_file_name,
)

RANKS = "ranks"  # a file that every rank keeps locked while it lives
WRITER_TIMEOUT_S, POLL_S = 10.0, 0.01  # time for earlier ranks to exit; poll interval
REPLICAS = "replicas"  # folder of replicas of other nodes' ranks, inside the run's folder in shared memory
_NAME = re.compile(r"state-(\d{6,})-(\d{5,})")


def list_state_files(folder: Path) -> list[Path]:
    """Paths in a folder that are named like a state file."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def list_with_replicas(folder: Path) -> list[Path]:
    """Paths of state files and of replicas in a folder."""
    return [*list_state_files(folder), *list_state_files(folder / REPLICAS)]


def read_state_files(folder: Path, run: bytes) -> list[StateFileMetadata]:
    """Metadata of the complete state files of a run in a folder."""
    found = (read_metadata(path) for path in list_state_files(folder))
    return [facts for facts in found if facts is not None and facts.run == run]


def find_damage(folder: Path) -> list[str]:
    """Describe each state file of a folder, replicas included, whose first page is damaged or of another format
    version. Unfinished files are not included."""
    found = []
    for path in list_with_replicas(folder):
        try:
            descriptor = open_descriptor(path, os.O_RDONLY)
            try:
                problems = [f"has a damaged entry for slot {slot}" for slot in read_metadata_at(path, descriptor).torn]
            finally:
                os.close(descriptor)
        except OtherStateFormat as error:
            found.append(f"{str(error).partition(';')[0]}, so the run resumes from other saved state")
            continue
        except CheckpointError as error:
            problems = [str(error).partition(f"{path} ")[2].partition(";")[0]]
        found += [describe_skipped_file(path, problem) for problem in problems if problem != UNFINISHED]
    return found


def describe_skipped_file(path: Path | str, problem: str) -> str:
    """The warning about a damaged state file."""
    return f"the state file {path} {problem}: it was damaged in memory, so the run resumes from other saved state"


def make_file_info(facts: StateFileMetadata, replica: bool = False) -> StateFileInfo:
    """Build the catalog entry of a file for other nodes."""
    steps = tuple(sorted(facts.steps))
    layout = HEADER_ONLY if facts.layout == digest_json(EMPTY_INDEX) else facts.layout.hex()
    return StateFileInfo(
        facts.generation, facts.way, facts.rank, facts.world, facts.part, facts.parts, steps, layout,
        replica,
    )  # fmt: skip


def read_inventory(folder: Path, run: bytes) -> list[StateFileInfo]:
    """All state files of a run in a folder, replicas included; empty while ranks of an earlier start are alive."""
    if not has_no_writers(folder):
        return []
    own = [make_file_info(facts) for facts in read_state_files(folder, run)]
    return own + [make_file_info(facts, replica=True) for facts in read_state_files(folder / REPLICAS, run)]


def state_file_path(held: StateFileInfo) -> str:
    """Path of a file in its node's folder."""
    name = state_file_name(held.generation, held.rank)
    return f"{REPLICAS}/{name}" if held.replica else name


def hold_liveness_lock(folder: Path) -> int:
    """Lock a folder to show that this process may write to its state files. The lock ends with the process and its
    memory. Returns a descriptor that must stay open; child processes do not inherit it."""
    descriptor = os.open(folder / RANKS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.lockf(descriptor, fcntl.LOCK_SH)
    return descriptor


def wait_for_writers(folder: Path, timeout_s: float = WRITER_TIMEOUT_S) -> None:
    """Wait until no process may write to the state files of a folder: ranks live slightly longer than an agent that was
    killed. Raises RunError after `timeout_s`."""
    descriptor = os.open(folder / RANKS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RunError(
                        f"after {timeout_s:g} s ranks of an earlier start are still alive and hold {folder}, so no "
                        "new ranks were started; check for a stuck device or file system (ps shows state D)"
                    ) from None
            time.sleep(POLL_S)
    finally:
        os.close(descriptor)


def has_no_writers(folder: Path) -> bool:
    """Whether no process may write to the state files of a folder."""
    try:
        wait_for_writers(folder, timeout_s=0.0)
    except RunError:
        return False
    return True


def remove_rolled_back(folder: Path, run: bytes, rolled_back: Iterable[int]) -> list[Path]:
    """Remove the state files of a run in a folder, replicas included, that are older than a rollback and were not
    voided by it; `rolled_back` has the attempt of each rollback. They belong to an abandoned branch of the run. Returns
    their paths."""
    attempts, passed = list(rolled_back), []
    for facts in (*read_state_files(folder, run), *read_state_files(folder / REPLICAS, run)):
        # Ranks that took part in a rollback have voided their slots and recorded the count.
        if facts.way < sum(attempt >= facts.generation for attempt in attempts):
            facts.path.unlink(missing_ok=True)
            passed.append(facts.path)
    return passed


def move_state_files(source: Path, target: Path) -> int:
    """Move the state files of a folder, replicas included, to another folder in shared memory; existing files are kept.
    Returns how many were moved."""
    count = 0
    for path in list_with_replicas(source):
        there = target / path.relative_to(source)
        if not there.exists():
            there.parent.mkdir(mode=0o700, exist_ok=True)
            path.rename(there)
            count += 1
    return count


def remove_unused_files(folder: Path, used: Collection[str]) -> None:
    """Remove the state files of a folder, replicas included, except the given paths."""
    for path in list_with_replicas(folder):
        if str(path) not in used:
            path.unlink(missing_ok=True)
