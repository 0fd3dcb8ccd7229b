"""The file in shared memory that holds a rank's state: two slots, and for each a word that says of which step it is.

A step is committed by one aligned store of eight bytes, behind the state and its header; before anything is written to
a slot its word is made void. So whoever is killed, at whatever instruction, leaves slots that are whole and slots that
say that they are not. Nobody but the rank writes to its file, and nobody maps it before the rank is dead and reaped.

A step counts when all ranks have committed it. No rank writes over a slot before all have committed the step after it,
so at any moment all of them hold a step in common. No torch here: an agent decides by the words alone.
"""

import fcntl
import hashlib
import json
import mmap
import os
import re
import stat
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import CheckpointError, RunError
from phalanx.kept import Kept, KeptFile

MAGIC, VERSION = b"phlxmem\0", 1
PAGE = 4096
VOID = -1  # in place of a step: the slot holds nothing
WORDS = (256, 320)  # where the words are, each in a cache line of its own
HEADER_BYTES = 1 << 16  # of a slot's header, with its length
HEADERS = (PAGE, PAGE + HEADER_BYTES)
INDEX = PAGE + 2 * HEADER_BYTES
RANKS = "ranks"  # a file that every rank has locked while it lives
DEATH_S, LOOK_S = 10.0, 0.01  # what ranks of before get to die, and how often that is looked at
ALIGNED = 64  # bytes, of everything in a slot
_FIXED = struct.Struct("<8sIIIIQQQ32s32s")  # magic, version, generation, rank, world, index bytes, data at, slot, ...
_NAME = re.compile(r"state-(\d{6,})-(\d{5,})")


@dataclass(frozen=True)
class Facts:
    """What a state file says of itself: `generation` is the attempt that made it, `run` the run that it belongs to,
    `layout` what its slots look like; both are digests. `steps`: the committed ones, by slot."""

    path: Path
    generation: int
    rank: int
    world: int
    index_bytes: int
    data_at: int
    slot_bytes: int
    layout: bytes
    run: bytes
    words: tuple[int, int]

    @property
    def steps(self) -> dict[int, int]:
        return {step: slot for slot, step in enumerate(self.words) if step != VOID}


@dataclass(frozen=True)
class Who:
    """Whose file it is: of which attempt, rank, number of ranks and run."""

    generation: int
    rank: int
    world: int
    run: bytes


def name_of(generation: int, rank: int) -> str:
    """What the file of a rank is called."""
    return f"state-{generation:06d}-{rank:05d}"


def digest(tree: Any) -> bytes:
    """What something that JSON can say is known by."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).digest()


def run_of(events: Path) -> bytes:
    """What a run is known by: how its records begin. A folder that was emptied and used again is another run."""
    try:
        with open(events, "rb") as file:
            return hashlib.sha256(file.readline()).digest()
    except OSError:
        return hashlib.sha256(b"").digest()


def up(count: int, to: int) -> int:
    """The least multiple of `to` that is not below `count`."""
    return -(-count // to) * to


class StateFile:
    """A state file, mapped: for its rank, or (`writable` false) to be read, when changes stay in this process."""

    def __init__(self, path: Path, writable: bool = False) -> None:
        """Raises CheckpointError where it is none, or not this user's alone."""
        descriptor = _open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            self.facts = _facts(path, descriptor)
            # Read privately: a buffer that cannot be written to is of no use to torch.
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
            self.map = mmap.mmap(descriptor, 0, access=access)
        finally:
            os.close(descriptor)
        facts = self.facts
        if len(self.map) < facts.data_at + 2 * facts.slot_bytes or facts.data_at < INDEX + facts.index_bytes:
            raise _refused(path, "is shorter than it says")
        self._words = memoryview(self.map).cast("q")

    def index(self) -> dict[str, Any]:
        """What lies where in a slot."""
        raw = self.map[INDEX : INDEX + self.facts.index_bytes]
        try:
            index = json.loads(raw)
        except (ValueError, RecursionError):
            index = None
        if not isinstance(index, dict) or digest(index) != self.facts.layout:
            raise _refused(self.facts.path, "has an index that does not match its digest")
        return index

    def at(self, slot: int) -> int:
        """Where a slot's data begins."""
        return self.facts.data_at + slot * self.facts.slot_bytes

    def word(self, slot: int) -> int:
        """The step that a slot holds, or VOID."""
        return self._words[WORDS[slot] // 8]

    def void(self, slot: int) -> None:
        """From here on the slot may be written to."""
        self._words[WORDS[slot] // 8] = VOID

    def commit(self, slot: int, step: int, header: bytes) -> None:
        """Declare a void slot's data that of a step; `header` is JSON."""
        assert self.word(slot) == VOID, (slot, self.word(slot))
        if len(header) > HEADER_BYTES - 4:
            raise CheckpointError(
                f"the header of step {step} has {len(header)} bytes, more than a state file has room for; set "
                "resilience.memory=false"
            )
        begin = HEADERS[slot]
        self.map[begin : begin + 4 + len(header)] = len(header).to_bytes(4, "little") + header
        self._words[WORDS[slot] // 8] = step  # the commit

    def header(self, slot: int) -> dict[str, Any]:
        """The header of a slot that holds a step."""
        begin = HEADERS[slot]
        length = int.from_bytes(self.map[begin : begin + 4], "little")
        try:
            header = json.loads(self.map[begin + 4 : begin + 4 + min(length, HEADER_BYTES - 4)])
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise _refused(self.facts.path, "has a header that is not whole")
        return header


def create(folder: Path, who: Who, index: dict[str, Any], slot_bytes: int) -> StateFile:
    """Make a rank's file, filled with zeros, with both slots void. Raises OSError where there is no room for it: its
    memory is taken here and now, so that no later write can fail."""
    path = folder / name_of(who.generation, who.rank)
    path.unlink(missing_ok=True)
    raw = json.dumps(index).encode()
    data_at, slot_bytes = up(INDEX + len(raw), PAGE), up(slot_bytes, PAGE)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, data_at + 2 * slot_bytes)
        for at in WORDS:
            os.pwrite(descriptor, VOID.to_bytes(8, "little", signed=True), at)
        os.pwrite(descriptor, raw, INDEX)
        fixed = (VERSION, who.generation, who.rank, who.world, len(raw), data_at, slot_bytes, digest(index), who.run)
        os.pwrite(descriptor, _FIXED.pack(bytes(8), *fixed), 0)
        os.pwrite(descriptor, MAGIC, 0)  # last of all: before, it is no state file
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return StateFile(path, writable=True)


def file_bytes(index: dict[str, Any], slot_bytes: int) -> int:
    """What `create` takes."""
    return up(INDEX + len(json.dumps(index).encode()), PAGE) + 2 * up(slot_bytes, PAGE)


# ------------------------------------------------------------------------------------------------------- what is there


def facts_of(path: Path) -> Facts | None:
    """What a state file says; None where it is none, or not whole."""
    try:
        descriptor = _open(path, os.O_RDONLY)
    except CheckpointError:
        return None
    try:
        return _facts(path, descriptor)
    except CheckpointError:
        return None
    finally:
        os.close(descriptor)


def files_in(folder: Path) -> list[Path]:
    """Everything in a folder that has the name of a state file."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def there(folder: Path, run: bytes) -> list[Facts]:
    """The whole state files of a run in a folder."""
    found = (facts_of(path) for path in files_in(folder))
    return [facts for facts in found if facts is not None and facts.run == run]


def newest(found: Iterable[Facts]) -> Kept | None:
    """The newest step that all ranks of one generation hold; of generations that hold the same, the newest."""
    generations: dict[int, dict[int, Facts]] = {}
    for facts in found:
        generations.setdefault(facts.generation, {})[facts.rank] = facts
    best: tuple[int, int] | None = None
    for generation, by_rank in generations.items():
        step = common(by_rank)
        if step is not None and (best is None or (step, generation) > best):
            best = step, generation
    if best is None:
        return None
    chosen = sorted(generations[best[1]].items())
    return Kept(best[0], tuple(KeptFile(rank, str(facts.path)) for rank, facts in chosen))


def common(by_rank: Mapping[int, Facts]) -> int | None:
    """The newest step that every rank of a generation holds; None where there is none, or where a rank is missing."""
    worlds = {facts.world for facts in by_rank.values()}
    if len(worlds) != 1 or set(by_rank) != set(range(worlds.pop())):
        return None
    steps = set.intersection(*(set(facts.steps) for facts in by_rank.values()))
    return max(steps, default=None)


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
    used = {file.path for file in kept.files} if kept is not None else set()
    for path in files_in(folder):
        if str(path) not in used:
            path.unlink(missing_ok=True)
    return kept


def _open(path: Path, how: int) -> int:
    try:
        descriptor = os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(path, f"cannot be opened ({error.strerror})") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        raise _refused(path, "is not a file that is this user's alone")
    return descriptor


def _facts(path: Path, descriptor: int) -> Facts:
    raw = os.pread(descriptor, PAGE, 0)
    if len(raw) < PAGE or raw[:8] != MAGIC:
        raise _refused(path, "is not a whole state file")
    _, version, generation, rank, world, index_bytes, data_at, slot_bytes, layout, run = _FIXED.unpack_from(raw)
    if version != VERSION:
        raise _refused(path, f"is of version {version}, not {VERSION}")
    first, second = (int.from_bytes(raw[at : at + 8], "little", signed=True) for at in WORDS)
    return Facts(path, generation, rank, world, index_bytes, data_at, slot_bytes, layout, run, (first, second))


def _refused(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"the state file {path} {problem}; remove it, and the run goes on from its newest checkpoint"
    )
