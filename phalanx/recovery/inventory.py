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
from phalanx.core.placement import Kept, KeptFile
from phalanx.recovery.catalog import BARE, Held, choose
from phalanx.recovery.state_file import (
    NOTHING,
    UNFINISHED,
    Facts,
    OtherStateFormat,
    digest,
    facts_at,
    facts_of,
    name_of,
    opened,
)

RANKS = "ranks"  # a file that every rank has locked while it lives
DEATH_S, LOOK_S = 10.0, 0.01  # what ranks of before get to die, and how often that is looked at
REPLICAS = "replicas"  # a folder beside the files of this node's ranks, for those of another node's
_NAME = re.compile(r"state-(\d{6,})-(\d{5,})")


def files_in(folder: Path) -> list[Path]:
    """Everything in a folder that has the name of a state file."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def there(folder: Path, run: bytes) -> list[Facts]:
    """The whole state files of a run in a folder."""
    found = (facts_of(path) for path in files_in(folder))
    return [facts for facts in found if facts is not None and facts.run == run]


def damage_in(folder: Path) -> list[str]:
    """A sentence for each state file of a folder, replicas too, whose first page has been damaged or is of another
    release. One that nobody has finished making is neither."""
    found = []
    for path in (*files_in(folder), *files_in(folder / REPLICAS)):
        try:
            descriptor = opened(path, os.O_RDONLY)
            try:
                problems = [f"has a damaged word for slot {slot}" for slot in facts_at(path, descriptor).torn]
            finally:
                os.close(descriptor)
        except OtherStateFormat as error:
            found.append(f"{str(error).partition(';')[0]}, so what else is kept is gone on from")
            continue
        except CheckpointError as error:
            problems = [str(error).partition(f"{path} ")[2].partition(";")[0]]
        found += [passed_over(path, problem) for problem in problems if problem != UNFINISHED]
    return found


def passed_over(path: Path | str, problem: str) -> str:
    """What is said of a state file that is damaged."""
    return f"the state file {path} {problem}: it was damaged in memory, so what else is kept is gone on from"


def newest(found: Iterable[Facts]) -> Kept | None:
    """The newest step that is whole in state files of this node (`phalanx.recovery.catalog.choose`)."""
    facts = list(found)
    choice = choose({0: [held(each) for each in facts]})
    if choice is None:
        return None
    paths = {each.rank: each for each in facts if (each.generation, each.way) == (choice.generation, choice.way)}
    return Kept(
        choice.step, tuple(KeptFile(rank, str(paths[rank].path), paths[rank].layout.hex()) for rank in choice.files)
    )


def held(facts: Facts, replica: bool = False) -> Held:
    """What other nodes are told of a file."""
    steps = tuple(sorted(facts.steps))
    layout = BARE if facts.layout == digest(NOTHING) else facts.layout.hex()
    return Held(
        facts.generation, facts.way, facts.rank, facts.world, facts.part, facts.parts, steps, layout,
        replica,
    )  # fmt: skip


def held_in(folder: Path, run: bytes) -> list[Held]:
    """All that a run has in a folder, replicas for other nodes too; nothing while ranks of before still live."""
    if not are_dead(folder):
        return []
    own = [held(facts) for facts in there(folder, run)]
    return own + [held(facts, replica=True) for facts in there(folder / REPLICAS, run)]


def file_of(held: Held) -> str:
    """The path of a file in its node's folder."""
    name = name_of(held.generation, held.rank)
    return f"{REPLICAS}/{name}" if held.replica else name


def live_in(folder: Path) -> int:
    """Say that this process may write to state files of a folder, until it has ended and its memory is gone; returns
    a descriptor that must stay open. Children do not inherit it."""
    descriptor = os.open(folder / RANKS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.lockf(descriptor, fcntl.LOCK_SH)
    return descriptor


def await_the_dead(folder: Path, timeout_s: float = DEATH_S) -> None:
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
            time.sleep(LOOK_S)
    finally:
        os.close(descriptor)


def are_dead(folder: Path) -> bool:
    """Whether no process may write to state files of a folder any more."""
    try:
        await_the_dead(folder, timeout_s=0.0)
    except RunError:
        return False
    return True


def committed(folder: Path, run: bytes) -> int:
    """The newest step that all ranks of a run hold there; 0: none."""
    kept = newest(there(folder, run))
    return max(0, kept.step) if kept is not None else 0


def to_go_on_from(folder: Path, run: bytes, on_disk: float) -> Kept | None:
    """What a run goes on from, if that is in shared memory: the newest common step, unless the disk has a newer one.
    Whatever else lies there is removed. Raises RunError where ranks of before still live."""
    await_the_dead(folder)
    kept = newest(there(folder, run))
    if kept is not None and (kept.step <= 0 or kept.step < on_disk):
        kept = None
    remove_others(folder, {file.path for file in kept.files} if kept is not None else set())
    return kept


def remove_passed(folder: Path, run: bytes, rolled_back: Iterable[int]) -> list[Path]:
    """Remove the state files of a run in a folder, replicas too, that were not there when training went back:
    `rolled_back` has the attempt of each time. What they hold belongs to a way that was given up; returns them."""
    attempts, passed = list(rolled_back), []
    for facts in (*there(folder, run), *there(folder / REPLICAS, run)):
        # Who was there has made void what it held, and says how often.
        if facts.way < sum(attempt >= facts.generation for attempt in attempts):
            facts.path.unlink(missing_ok=True)
            passed.append(facts.path)
    return passed


def take_over(source: Path, target: Path) -> int:
    """Move the state files of a folder, replicas too, to another one in shared memory; returns how many. What is there
    already stays."""
    count = 0
    for path in [*files_in(source), *files_in(source / REPLICAS)]:
        there = target / path.relative_to(source)
        if not there.exists():
            there.parent.mkdir(mode=0o700, exist_ok=True)
            path.rename(there)
            count += 1
    return count


def remove_others(folder: Path, used: Collection[str]) -> None:
    """Remove what lies in a folder, replicas too, but for some paths."""
    for path in [*files_in(folder), *files_in(folder / REPLICAS)]:
        if str(path) not in used:
            path.unlink(missing_ok=True)
