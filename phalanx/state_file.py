"""The file in shared memory that holds a rank's state: some slots, and for each a word that says of which step it is.

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
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.errors import CheckpointError, RunError
from phalanx.kept import BARE, Held, Kept, KeptFile, choose

MAGIC, VERSION = b"phlxmem\0", 3
PAGE = 4096
VOID = -1  # in place of a step: the slot holds nothing
WORDS = (256, 320, 448)  # where the words are, each in a cache line of its own
WAY = 384
HEADER_BYTES = 1 << 16  # of a slot's header, with its length
HEADERS = tuple(PAGE + slot * HEADER_BYTES for slot in range(len(WORDS)))
INDEX = PAGE + len(WORDS) * HEADER_BYTES
RANKS = "ranks"  # a file that every rank has locked while it lives
DEATH_S, LOOK_S = 10.0, 0.01  # what ranks of before get to die, and how often that is looked at
ALIGNED = 64  # bytes, of everything in a slot
REPLICAS = "replicas"  # a folder beside the files of this node's ranks, for those of another node's
# Magic, version, generation, rank, world, index bytes, data at, slot bytes, layout, run, part, parts, slots.
_FIXED = struct.Struct("<8sIIIIQQQ32s32sIII")
NOTHING: dict[str, Any] = {"tensors": [], "pieces": [], "bare": True}  # the index of a file without state
_NAME = re.compile(r"state-(\d{6,})-(\d{5,})")


@dataclass(frozen=True)
class Facts:
    """What a state file says of itself: `generation` is the attempt that made it, `run` the run that it belongs to,
    `layout` what its slots look like; both are digests. `steps`: the committed ones, by slot; `part`: the lowest rank
    that holds the same pieces, of `parts` unlike ones."""

    path: Path
    generation: int
    rank: int
    world: int
    index_bytes: int
    data_at: int
    slot_bytes: int
    layout: bytes
    run: bytes
    words: tuple[int, ...]
    part: int
    parts: int
    way: int  # how often what the file held was made void, since training went back and takes another way

    @property
    def steps(self) -> dict[int, int]:
        return {step: slot for slot, step in enumerate(self.words) if step != VOID}

    @property
    def slots(self) -> int:
        return len(self.words)

    @property
    def end(self) -> int:
        """How long the file is."""
        return self.at(self.slots)

    def at(self, slot: int) -> int:
        """Where a slot's data begins."""
        return self.data_at + slot * self.slot_bytes


@dataclass(frozen=True)
class Who:
    """Whose file it is: of which attempt, rank, number of ranks and run; the lowest rank that holds the same `part`,
    and how many unlike ones there are."""

    generation: int
    rank: int
    world: int
    run: bytes
    part: int
    parts: int


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
    """A state file, mapped: for who writes to it, or (`writable` false) to be read, when changes stay in this process.
    `at_once`: all of it now, and not page by page as it is touched."""

    def __init__(self, path: Path, writable: bool = False, at_once: bool = True) -> None:
        """Raises CheckpointError where it is none, or not this user's alone."""
        descriptor = _open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            self.facts = _facts(path, descriptor)
            # Its memory was taken when it was made. To have all of it mapped at once costs a fraction of what it costs
            # page by page, at a moment when a rank that was killed is waited for.
            writes = mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0)
            # Read privately: a buffer that cannot be written to is of no use to torch.
            self.map = mmap.mmap(descriptor, 0, flags=writes if writable else mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
        facts = self.facts
        if len(self.map) < facts.end or facts.data_at < INDEX + facts.index_bytes:
            raise _refused(path, "is shorter than it says")
        self._words = memoryview(self.map).cast("q")

    def index(self) -> dict[str, Any]:
        """What lies where in a slot."""
        return index_from(self.facts, self.read(INDEX, self.facts.index_bytes))

    def read(self, at: int, count: int) -> memoryview:
        """So many bytes of the file, as they are."""
        return memoryview(self.map)[at : at + count]

    def at(self, slot: int) -> int:
        """Where a slot's data begins."""
        return self.facts.at(slot)

    def word(self, slot: int) -> int:
        """The step that a slot holds, or VOID."""
        return self._words[WORDS[slot] // 8]

    def look(self) -> None:
        """See which steps it holds now that another process has written to it."""
        self.facts = replace(self.facts, words=tuple(self.word(slot) for slot in range(self.facts.slots)))

    def void(self, slot: int) -> None:
        """From here on the slot may be written to."""
        self._words[WORDS[slot] // 8] = VOID

    def forget(self, way: int | None = None) -> None:
        """Make all slots void: steps that come now are of another `way` (None: the next)."""
        for slot in range(self.facts.slots):
            self.void(slot)
        self._words[WAY // 8] = self._words[WAY // 8] + 1 if way is None else way
        self.facts = replace(self.facts, words=(VOID,) * self.facts.slots, way=self._words[WAY // 8])

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
        return header_from(self.facts.path, self.raw_header(slot))

    def raw_header(self, slot: int) -> bytes:
        """The same, as it lies there."""
        return raw_header(self.read(HEADERS[slot], HEADER_BYTES))


def raw_header(page: bytes | memoryview) -> bytes:
    """A header, out of what is kept for one in a file."""
    length = int.from_bytes(page[:4], "little")
    return bytes(page[4 : 4 + min(length, HEADER_BYTES - 4)])


def header_from(path: Path, raw: bytes) -> dict[str, Any]:
    """Read a header. Raises CheckpointError where it is none."""
    header = _object(raw)
    if header is None:
        raise _refused(path, "has a header that is not whole")
    return header


def index_from(facts: Facts, raw: bytes | memoryview) -> dict[str, Any]:
    """Read an index. Raises CheckpointError where it is not the one of that layout."""
    index = _object(bytes(raw))
    if index is None or digest(index) != facts.layout:
        raise _refused(facts.path, "has an index that does not match its digest")
    return index


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def create(
    folder: Path, who: Who, index: dict[str, Any], slot_bytes: int, slots: int = 2, at_once: bool = True
) -> StateFile:
    """Make a rank's file, filled with zeros, with all slots void. Raises OSError where there is no room for it: its
    memory is taken here and now, so that no later write can fail; whether it is mapped `at_once` is another thing."""
    path = folder / name_of(who.generation, who.rank)
    folder.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    raw = json.dumps(index).encode()
    data_at, slot_bytes = up(INDEX + len(raw), PAGE), up(slot_bytes, PAGE)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, data_at + slots * slot_bytes)
        for at in WORDS:
            os.pwrite(descriptor, VOID.to_bytes(8, "little", signed=True), at)
        os.pwrite(descriptor, raw, INDEX)
        fixed = (VERSION, who.generation, who.rank, who.world, len(raw), data_at, slot_bytes, digest(index), who.run)
        os.pwrite(descriptor, _FIXED.pack(bytes(8), *fixed, who.part, who.parts, slots), 0)
        os.pwrite(descriptor, MAGIC, 0)  # last of all: before, it is no state file
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return StateFile(path, writable=True, at_once=at_once)


def file_bytes(index: dict[str, Any], slot_bytes: int, slots: int = 2) -> int:
    """What `create` takes."""
    return up(INDEX + len(json.dumps(index).encode()), PAGE) + slots * up(slot_bytes, PAGE)


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
    """The newest step that is whole in state files of this node (`phalanx.kept.choose`)."""
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
    return facts_from(path, os.pread(descriptor, PAGE, 0))


def facts_from(path: Path, raw: bytes) -> Facts:
    """What the first page of a state file says. Raises CheckpointError where it is none."""
    if len(raw) < PAGE or raw[:8] != MAGIC:
        raise _refused(path, "is not a whole state file")
    _, version, generation, rank, world, index_bytes, data_at, slot_bytes, layout, run, *rest = _FIXED.unpack_from(raw)
    part, parts, slots = rest
    if version != VERSION:
        raise _refused(path, f"is of version {version}, not {VERSION}")
    if not 1 <= slots <= len(WORDS):
        raise _refused(path, f"says that it has {slots} slots")
    words = tuple(int.from_bytes(raw[at : at + 8], "little", signed=True) for at in WORDS[:slots])
    shape = generation, rank, world, index_bytes, data_at, slot_bytes, layout, run
    return Facts(path, *shape, words, part, parts, int.from_bytes(raw[WAY : WAY + 8], "little"))


def _refused(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"the state file {path} {problem}; remove it, and the run goes on from its newest checkpoint"
    )
