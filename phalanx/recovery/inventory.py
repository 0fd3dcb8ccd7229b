"""What lies of a run in a folder in shared memory: state files of its ranks and replicas of others', which step of
them is gone on from, and what of it is removed. By the first pages of files alone: an agent calls this. No torch here.
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

RANKS = "ranks"  # a file that every rank has locked while it lives
WRITER_TIMEOUT_S, POLL_S = 10.0, 0.01  # what ranks of before get to die, and how often that is looked at
REPLICAS = "replicas"  # a folder beside the files of this node's ranks, for those of another node's
_NAME = re.compile(r"state-(\d{6,})-(\d{5,})")


def list_state_files(folder: Path) -> list[Path]:
    """Everything in a folder that has the name of a state file."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def list_with_replicas(folder: Path) -> list[Path]:
    """The same, and in its folder of replicas."""
    return [*list_state_files(folder), *list_state_files(folder / REPLICAS)]


def read_state_files(folder: Path, run: bytes) -> list[StateFileMetadata]:
    """The whole state files of a run in a folder."""
    found = (read_metadata(path) for path in list_state_files(folder))
    return [facts for facts in found if facts is not None and facts.run == run]


def find_damage(folder: Path) -> list[str]:
    """A sentence for each state file of a folder, replicas too, whose first page has been damaged or is of another
    release. One that nobody has finished making is neither."""
    found = []
    for path in list_with_replicas(folder):
        try:
            descriptor = open_descriptor(path, os.O_RDONLY)
            try:
                problems = [f"has a damaged word for slot {slot}" for slot in read_metadata_at(path, descriptor).torn]
            finally:
                os.close(descriptor)
        except OtherStateFormat as error:
            found.append(f"{str(error).partition(';')[0]}, so what else is kept is gone on from")
            continue
        except CheckpointError as error:
            problems = [str(error).partition(f"{path} ")[2].partition(";")[0]]
        found += [describe_skipped_file(path, problem) for problem in problems if problem != UNFINISHED]
    return found


def describe_skipped_file(path: Path | str, problem: str) -> str:
    """What is said of a state file that is damaged."""
    return f"the state file {path} {problem}: it was damaged in memory, so what else is kept is gone on from"


def make_file_info(facts: StateFileMetadata, replica: bool = False) -> StateFileInfo:
    """What other nodes are told of a file."""
    steps = tuple(sorted(facts.steps))
    layout = HEADER_ONLY if facts.layout == digest_json(EMPTY_INDEX) else facts.layout.hex()
    return StateFileInfo(
        facts.generation, facts.way, facts.rank, facts.world, facts.part, facts.parts, steps, layout,
        replica,
    )  # fmt: skip


def read_inventory(folder: Path, run: bytes) -> list[StateFileInfo]:
    """All that a run has in a folder, replicas for other nodes too; nothing while ranks of before still live."""
    if not has_no_writers(folder):
        return []
    own = [make_file_info(facts) for facts in read_state_files(folder, run)]
    return own + [make_file_info(facts, replica=True) for facts in read_state_files(folder / REPLICAS, run)]


def state_file_path(held: StateFileInfo) -> str:
    """The path of a file in its node's folder."""
    name = state_file_name(held.generation, held.rank)
    return f"{REPLICAS}/{name}" if held.replica else name


def hold_liveness_lock(folder: Path) -> int:
    """Say that this process may write to state files of a folder, until it has ended and its memory is gone; returns
    a descriptor that must stay open. Children do not inherit it."""
    descriptor = os.open(folder / RANKS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.lockf(descriptor, fcntl.LOCK_SH)
    return descriptor


def wait_for_writers(folder: Path, timeout_s: float = WRITER_TIMEOUT_S) -> None:
    """Wait until no process may write to state files of a folder any more: ranks outlive an agent that was killed by
    moments. Raises RunError where that takes too long."""
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
                        f"after {timeout_s:g} s ranks of an earlier start still live and hold {folder}, so nothing new "
                        "was started beside them; look for a stuck device or file system (ps shows state D)"
                    ) from None
            time.sleep(POLL_S)
    finally:
        os.close(descriptor)


def has_no_writers(folder: Path) -> bool:
    """Whether no process may write to state files of a folder any more."""
    try:
        wait_for_writers(folder, timeout_s=0.0)
    except RunError:
        return False
    return True


def remove_rolled_back(folder: Path, run: bytes, rolled_back: Iterable[int]) -> list[Path]:
    """Remove the state files of a run in a folder, replicas too, that were not there when training went back:
    `rolled_back` has the attempt of each time. What they hold belongs to a way that was given up; returns
    them."""
    attempts, passed = list(rolled_back), []
    for facts in (*read_state_files(folder, run), *read_state_files(folder / REPLICAS, run)):
        # Who was there has made void what it held, and says how often.
        if facts.way < sum(attempt >= facts.generation for attempt in attempts):
            facts.path.unlink(missing_ok=True)
            passed.append(facts.path)
    return passed


def move_state_files(source: Path, target: Path) -> int:
    """Move the state files of a folder, replicas too, to another one in shared memory; returns how many. What is there
    already stays."""
    count = 0
    for path in list_with_replicas(source):
        there = target / path.relative_to(source)
        if not there.exists():
            there.parent.mkdir(mode=0o700, exist_ok=True)
            path.rename(there)
            count += 1
    return count


def remove_unused_files(folder: Path, used: Collection[str]) -> None:
    """Remove what lies in a folder, replicas too, but for some paths."""
    for path in list_with_replicas(folder):
        if str(path) not in used:
            path.unlink(missing_ok=True)
