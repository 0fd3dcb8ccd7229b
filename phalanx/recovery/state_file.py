"""The state file of a rank in shared memory: slots, and for each a word with its step.

A step is committed by one aligned 8-byte store, after the state and its header; before a slot is written its word is
set to VOID. So a process that is killed at any instruction leaves each slot either complete or void. Only the rank
writes to its file, and no process maps it for reading before the rank is dead and reaped. A reader checks slots that it
did not write (`StateFile.find_damage`): the header has the checksum of the data. Words and the first page have separate
checks, so that agents, which read nothing else, also skip damaged ones.

A step counts when all ranks have committed it. No rank overwrites a slot before all have committed the following step,
so at any moment all ranks have a step in common. No torch here: an agent decides from the words alone.
"""

import hashlib
import json
import mmap
import os
import stat
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from phalanx.core import format_versions
from phalanx.core.errors import CheckpointError
from phalanx.core.json_lines import parse_object
from phalanx.recovery.catalog import (
    VOID_WORD,
    checksum,
    decode_word,
    encode_word,
    frame_bytes,
    frame_record,
    unframe_record,
)

MAGIC, VERSION = b"phlxmem\0", 4
PAGE = 4096
VOID = -1  # in place of a step: the slot is empty
WORDS = (256, 320, 448)  # offsets of the words, each in a separate cache line
WAY = 384
HEADER_BYTES = 1 << 16  # space for a slot's header, with its length and check
CHECKSUM = "checksum"  # key of a header: the checksum of the slot's data
HEADERS = tuple(PAGE + slot * HEADER_BYTES for slot in range(len(WORDS)))
INDEX = PAGE + len(WORDS) * HEADER_BYTES
UNFINISHED = "is not a complete state file yet"
ALIGNED = 64  # alignment in bytes of everything in a slot
# Magic, version, generation, rank, world, index bytes, data at, slot bytes, layout, run, part, parts, slots.
_FIXED = struct.Struct("<8sIIIIQQQ32s32sIII")
_REMEDY = "remove it; the run then resumes from its newest checkpoint"
_CHECK = 248  # offset of the CRC-32 of these
EMPTY_INDEX: dict[str, Any] = {"tensors": [], "pieces": [], "bare": True}  # the index of a file without state


class OtherStateFormat(CheckpointError):
    """A state file is of a format version that this release does not read."""


@dataclass(frozen=True)
class StateFileMetadata:
    """Metadata of a state file: `generation` is the attempt that created it, `run` and `layout` are digests of the run
    and of the layout of its slots. `steps`: the committed ones, by slot; `part`: the lowest rank that holds the same
    pieces, of `parts` different ones."""

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
    way: int  # number of rollbacks, each of which voided the slots
    torn: tuple[int, ...] = ()  # slots whose word is damaged, so that their contents are unknown

    @property
    def steps(self) -> dict[int, int]:
        return {step: slot for slot, step in enumerate(self.words) if step != VOID}

    @property
    def slots(self) -> int:
        return len(self.words)

    @property
    def end(self) -> int:
        """Length of the file."""
        return self.slot_offset(self.slots)

    def slot_offset(self, slot: int) -> int:
        """Offset of a slot's data."""
        return self.data_at + slot * self.slot_bytes


@dataclass(frozen=True)
class StateFileOwner:
    """Owner of a state file: attempt, rank, number of ranks and run; the lowest rank that holds the same `part`, and
    the number of different parts."""

    generation: int
    rank: int
    world: int
    run: bytes
    part: int
    parts: int


def state_file_name(generation: int, rank: int) -> str:
    """Name of a rank's state file."""
    return f"state-{generation:06d}-{rank:05d}"


def digest_json(tree: Any) -> bytes:
    """Digest of a JSON value."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).digest()


def compute_run_id(events: Path) -> bytes:
    """Identity of a run: a digest of the start of its records. A folder that was emptied and reused is a
    different run."""
    try:
        with open(events, "rb") as file:
            return hashlib.sha256(file.readline()).digest()
    except OSError:
        return hashlib.sha256(b"").digest()


def round_up(count: int, to: int) -> int:
    """Round `count` up to a multiple of `to`."""
    return -(-count // to) * to


class StateFileReader(Protocol):
    """Read access to a state file, on this node or another."""

    metadata: StateFileMetadata

    def read_bytes(self, at: int, count: int) -> memoryview:
        """Read raw bytes of the file."""
        ...

    def index(self) -> dict[str, Any]:
        """Index of a slot: the positions of its tensors. Raises CheckpointError if it does not match the file's
        layout."""
        index = parse_object(bytes(self.read_bytes(INDEX, self.metadata.index_bytes)))
        if index is None or digest_json(index) != self.metadata.layout:
            raise _refuse(self.metadata.path, "has an index that does not match its digest")
        return index

    def raw_header(self, slot: int) -> bytes:
        """Raw header of a slot that holds a step; empty if it is damaged."""
        return unframe_record(self.read_bytes(HEADERS[slot], HEADER_BYTES)) or b""

    def header(self, slot: int) -> dict[str, Any]:
        """Header of a slot that holds a step. Raises CheckpointError if it is invalid."""
        header = parse_object(self.raw_header(slot))
        if header is None:
            raise _refuse(self.metadata.path, "has a header that does not match its checksum")
        return header


class StateFile(StateFileReader):
    """A mapped state file: for its writer, or (`writable` false) for reading, with changes private to this process.
    `at_once`: map all pages now, not each on first access."""

    def __init__(self, path: Path, writable: bool = False, at_once: bool = True) -> None:
        """Raises CheckpointError if it is not a state file, or accessible to other users."""
        descriptor = open_descriptor(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            self.metadata = read_metadata_at(path, descriptor)
            # Its memory was allocated when the file was created. Mapping all of it at once takes a fraction of the time
            # that page faults would, while the recovery of a killed rank waits.
            writes = mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0)
            # A private mapping: torch requires a writable buffer.
            self.map = mmap.mmap(descriptor, 0, flags=writes if writable else mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
        facts = self.metadata
        if len(self.map) < facts.end or facts.data_at < INDEX + facts.index_bytes:
            raise _refuse(path, "is shorter than it says")
        self._words = memoryview(self.map).cast("Q")

    def read_bytes(self, at: int, count: int) -> memoryview:
        return memoryview(self.map)[at : at + count]

    def slot_offset(self, slot: int) -> int:
        """Offset of a slot's data."""
        return self.metadata.slot_offset(slot)

    def slot_step(self, slot: int) -> int:
        """The step that a slot holds, or VOID."""
        return _step(self._words[WORDS[slot] // 8], slot)

    def refresh(self) -> None:
        """Reread the steps of the slots after another process has written to the file."""
        self.metadata = replace(self.metadata, words=tuple(self.slot_step(slot) for slot in range(self.metadata.slots)))

    def invalidate(self, slot: int) -> None:
        """Set a slot's word to VOID, so that the slot may be written."""
        self._words[WORDS[slot] // 8] = VOID_WORD

    def invalidate_all(self, way: int | None = None) -> None:
        """Void all slots; later steps belong to branch `way` of the run (None: the next)."""
        for slot in range(self.metadata.slots):
            self.invalidate(slot)
        way = self.metadata.way + 1 if way is None else way
        self._words[WAY // 8] = encode_word(way, WAY)
        self.metadata = replace(self.metadata, words=(VOID,) * self.metadata.slots, way=way, torn=())

    def make_header(self, slot: int, header: dict[str, Any]) -> bytes:
        """Make a header, with the checksum of the slot's current data."""
        return json.dumps(header | {CHECKSUM: checksum(self.data(slot))}).encode()

    def data(self, slot: int) -> memoryview:
        """Data of a slot."""
        return self.read_bytes(self.slot_offset(slot), self.metadata.slot_bytes)

    def commit(self, slot: int, step: int, header: bytes) -> None:
        """Commit a step to a void slot. `header` is JSON, made by `make_header` by the process that wrote the data
        first: copies keep it, so damage stays detectable."""
        assert self.slot_step(slot) == VOID, (slot, self.slot_step(slot))
        if frame_bytes(header) > HEADER_BYTES:
            raise CheckpointError(
                f"the header of step {step} has {len(header)} bytes, more than a state file has room for; set "
                "resilience.in_memory_checkpoints=false"
            )
        begin = HEADERS[slot]
        self.map[begin : begin + frame_bytes(header)] = frame_record(header)
        self._words[WORDS[slot] // 8] = encode_word(step, slot)  # the commit

    def find_damage(self, step: int) -> str | None:
        """Find damage of a step in the file; None if it is intact. Readers call it before use; it reads the whole
        slot."""
        slot = self.metadata.steps.get(step)
        if slot is None:
            return f"no longer holds step {step}"
        try:
            self.index()
            header = self.header(slot)
        except CheckpointError:
            return "has an index or a header that does not match its checksum"
        if header.get("step") != step:
            return f"has the header of step {header.get('step')} with step {step}"
        if self.metadata.slot_bytes and header.get(CHECKSUM) != checksum(self.data(slot)):
            return f"no longer has the checksum of step {step}"
        return None


def invalidate_damaged_step(path: Path, step: int) -> str | None:
    """Find damage of a step in a file and void the step; None if it is intact. A file that cannot be mapped is
    removed."""
    try:
        file = StateFile(path, writable=True)
    except CheckpointError as error:
        path.unlink(missing_ok=True)
        return str(error).partition(f"{path} ")[2].partition(";")[0]
    problem = file.find_damage(step)
    if problem is not None and (slot := file.metadata.steps.get(step)) is not None:
        file.invalidate(slot)
    return problem


def _step(word: int, slot: int) -> int:
    """Decode a slot's word; VOID if it is damaged."""
    step = None if word == VOID_WORD else decode_word(word, slot)
    return VOID if step is None else step


def create_state_file(
    folder: Path, who: StateFileOwner, index: dict[str, Any], slot_bytes: int, slots: int = 2, at_once: bool = True
) -> StateFile:
    """Create a rank's state file, filled with zeros and with all slots void. Raises OSError if there is no room: the
    memory is allocated now, so that no later write can fail; `at_once` only controls when it is mapped."""
    path = folder / state_file_name(who.generation, who.rank)
    folder.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    raw = json.dumps(index).encode()
    data_at, slot_bytes = round_up(INDEX + len(raw), PAGE), round_up(slot_bytes, PAGE)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, data_at + slots * slot_bytes)
        for at in WORDS:
            os.pwrite(descriptor, VOID_WORD.to_bytes(8, "little"), at)
        os.pwrite(descriptor, encode_word(0, WAY).to_bytes(8, "little"), WAY)
        os.pwrite(descriptor, raw, INDEX)
        numbers = (
            VERSION,
            who.generation,
            who.rank,
            who.world,
            len(raw),
            data_at,
            slot_bytes,
            digest_json(index),
            who.run,
        )
        fixed = _FIXED.pack(bytes(8), *numbers, who.part, who.parts, slots)
        os.pwrite(descriptor, fixed, 0)
        os.pwrite(descriptor, zlib.crc32(fixed[8:]).to_bytes(4, "little"), _CHECK)
        os.pwrite(descriptor, MAGIC, 0)  # last: without it, this is not a state file
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return StateFile(path, writable=True, at_once=at_once)


def state_file_bytes(index: dict[str, Any], slot_bytes: int, slots: int = 2) -> int:
    """Length of a file that `create_state_file` makes."""
    return round_up(INDEX + len(json.dumps(index).encode()), PAGE) + slots * round_up(slot_bytes, PAGE)


def read_metadata(path: Path) -> StateFileMetadata | None:
    """Metadata of a state file; None if it is not one, or incomplete."""
    try:
        descriptor = open_descriptor(path, os.O_RDONLY)
    except CheckpointError:
        return None
    try:
        return read_metadata_at(path, descriptor)
    except CheckpointError:
        return None
    finally:
        os.close(descriptor)


def open_descriptor(path: Path, how: int) -> int:
    try:
        descriptor = os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refuse(path, f"cannot be opened ({error.strerror})") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        raise _refuse(path, "is not a regular file that only this user can access")
    return descriptor


def read_metadata_at(path: Path, descriptor: int) -> StateFileMetadata:
    return parse_metadata(path, os.pread(descriptor, PAGE, 0))


def parse_metadata(path: Path, raw: bytes) -> StateFileMetadata:
    """Metadata from the first page of a state file. Raises CheckpointError if it is invalid."""
    if len(raw) < PAGE or raw[:8] != MAGIC:
        raise _refuse(path, UNFINISHED if raw[:8] == bytes(8) else "is not a complete state file")
    _, version, generation, rank, world, index_bytes, data_at, slot_bytes, layout, run, *rest = _FIXED.unpack_from(raw)
    part, parts, slots = rest
    if (wrong := format_versions.describe_version_problem(version, (VERSION,), _REMEDY)) is not None:
        raise OtherStateFormat(f"the state file {path} {wrong}")
    if not 1 <= slots <= len(WORDS):
        raise _refuse(path, f"says that it has {slots} slots")
    raw_words = [int.from_bytes(raw[at : at + 8], "little") for at in WORDS[:slots]]
    words = tuple(_step(word, slot) for slot, word in enumerate(raw_words))
    torn = tuple(slot for slot, word in enumerate(raw_words) if word != VOID_WORD and words[slot] == VOID)
    way = decode_word(int.from_bytes(raw[WAY : WAY + 8], "little"), WAY)
    whole = zlib.crc32(raw[8 : _FIXED.size]).to_bytes(4, "little") == raw[_CHECK : _CHECK + 4]
    if not whole or way is None:
        raise _refuse(path, "has a first page that does not match its checksum")
    shape = generation, rank, world, index_bytes, data_at, slot_bytes, layout, run
    return StateFileMetadata(path, *shape, words, part, parts, way, torn)


def _refuse(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"the state file {path} {problem}; {_REMEDY}")
