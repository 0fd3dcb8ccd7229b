"""Catalog of the state that a run keeps in shared memory on all nodes, and the choice of the step to resume from: plain
data, and one pure function.

Ranks that hold the same pieces of a model, as in hybrid sharding, form one *part* of it: any one of them is enough to
restore it.
"""

import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.recovery.shared_memory import HOST_MEMORY_SHARE

HEADER_ONLY = (
    "bare"  # the layout of what is kept of a rank whose state others hold: what it said of each step, and no state
)


@dataclass(frozen=True)
class StateFileInfo:
    """Catalog entry of a state file: its `rank` of `world` in attempt `generation`, and its committed steps. `way`
    counts the rollbacks before it was written; steps of an earlier `way` belong to an abandoned branch of the run.
    `part` is the lowest rank that holds the same pieces, of `parts` different ones; `layout` is a digest, or
    HEADER_ONLY; `replica`: the file was received from a rank of another node."""

    generation: int
    way: int
    rank: int
    world: int
    part: int
    parts: int
    steps: tuple[int, ...]
    layout: str
    replica: bool = False


@dataclass(frozen=True)
class RestorePoint:
    """A step to resume from, and the copies to use: for each rank of that attempt, the node and its file."""

    step: int
    generation: int
    way: int
    files: Mapping[int, tuple[int, StateFileInfo]]


def find_redundant(parts: Sequence[Hashable], nodes: Sequence[int]) -> list[bool]:
    """For each rank, whether a rank of another node holds the same part. Both arguments are indexed by rank."""
    nodes_of: dict[Hashable, set[int]] = {}
    for part, node in zip(parts, nodes, strict=True):
        nodes_of.setdefault(part, set()).add(node)
    return [len(nodes_of[part]) > 1 for part in parts]


def needs_replicas(parts: Sequence[Hashable], nodes: Sequence[int]) -> bool:
    """Whether nodes keep replicas of each other's state: there are several nodes, and some part is on one node only.
    Both arguments are indexed by rank."""
    return len(set(nodes)) > 1 and not all(find_redundant(parts, nodes))


def choose_restore_point(held: Mapping[int, Iterable[StateFileInfo]]) -> RestorePoint | None:
    """Choose the newest complete step among the files of all nodes, and the newest generation that has it. Headers of
    ranks whose state is missing are returned with it.

    A step is complete if each rank of a generation has it in its own memory or in a replica; if files of some ranks are
    lost, it is enough that each part has one.
    """
    ways: dict[tuple[int, int], dict[int, list[tuple[int, StateFileInfo]]]] = {}
    for node, files in sorted(held.items()):
        for each in files:
            ways.setdefault((each.generation, each.way), {}).setdefault(each.rank, []).append((node, each))
    newest: dict[int, int] = {}
    for generation, way in ways:
        newest[generation] = max(way, newest.get(generation, 0))
    found = [choice for key, by_rank in ways.items() if newest[key[0]] == key[1] and (choice := _of(*key, by_rank))]
    return max(found, key=lambda choice: (choice.step, choice.generation), default=None)


def _of(generation: int, way: int, by_rank: Mapping[int, list[tuple[int, StateFileInfo]]]) -> RestorePoint | None:
    every = by_rank
    by_rank = {
        rank: full for rank, each in every.items() if (full := [copy for copy in each if copy[1].layout != HEADER_ONLY])
    }
    copies = [copy for each in by_rank.values() for copy in each]
    forms = {(each.world, each.parts) for _, each in copies}
    if len(forms) != 1:
        return None
    world, parts = forms.pop()
    steps = {step for _, each in copies for step in each.steps}
    whole = [step for step in steps if len(_holders(step, by_rank)) == world]
    if not whole:
        whole = [step for step in steps if len({each.part for _, each in _holders(step, by_rank).values()}) == parts]
        # The outcome of a step is in the headers of all ranks; without all of them the step does not count.
        whole = [step for step in whole if len(_holders(step, every)) == world] or whole
    if not whole:
        return None
    files = _holders(max(whole), every) | _holders(max(whole), by_rank)
    return RestorePoint(max(whole), generation, way, dict(sorted(files.items())))


def _holders(step: int, by_rank: Mapping[int, list[tuple[int, StateFileInfo]]]) -> dict[int, tuple[int, StateFileInfo]]:
    """Location of a step for each rank that has it: the rank's own memory if possible, else a replica."""
    found = {}
    for rank, copies in sorted(by_rank.items()):
        here = [copy for copy in copies if step in copy[1].steps]
        if here:
            found[rank] = min(here, key=lambda copy: (copy[1].replica, copy[0]))
    return found


def find_missing_ranks(held: Mapping[int, Iterable[StateFileInfo]]) -> list[int]:
    """Ranks of the newest generation without a file on any node; empty if there are no files at all."""
    every = [each for files in held.values() for each in files if each.layout != HEADER_ONLY]
    generation = max((each.generation for each in every), default=0)
    newest = [each for each in every if each.generation == generation]
    if not newest:
        return []
    return sorted(set(range(newest[0].world)) - {each.rank for each in newest})


def inventory_to_message(held: Iterable[StateFileInfo]) -> list[dict[str, Any]]:
    """Convert to JSON."""
    return [asdict(each) for each in held]


def inventory_from_message(message: Iterable[Mapping[str, Any]]) -> tuple[StateFileInfo, ...]:
    """Read the output of `inventory_to_message`."""
    return tuple(StateFileInfo(**{**each, "steps": tuple(each["steps"])}) for each in message)


def restore_point_to_message(choice: RestorePoint) -> dict[str, Any]:
    """Convert to JSON."""
    files = [[node, asdict(each)] for node, each in choice.files.values()]
    return {"step": choice.step, "generation": choice.generation, "way": choice.way, "files": files}


def restore_point_from_message(message: Mapping[str, Any]) -> RestorePoint:
    """Read the output of `restore_point_to_message`."""
    files = {each["rank"]: (int(node), inventory_from_message([each])[0]) for node, each in message["files"]}
    return RestorePoint(int(message["step"]), int(message["generation"]), int(message["way"]), files)


# -------------------------------------------------------------------------------------------------------------- budget
# Memory for in-memory checkpoints: one rule for a run's batch split, a dry run and a plan. It is host memory. For ranks
# that compute on CPUs it is also the memory of their training state.


SLOTS = 2  # slots, one step each, of a rank and of a replica
NEWEST, PINNED = "the two newest steps", "a third, on several nodes"
REPLICA = "a replica, on several nodes"


@dataclass(frozen=True)
class StateCopies:
    """Number of copies of a rank's state in shared memory: `own` for itself, and `replicas` for a rank of
    another node, assumed to be of equal size; `replays`: each has a gradient buffer too, from which updates are
    repeated."""

    own: int = 0
    replicas: int = 0
    replays: bool = False

    def own_bytes(self, state: float, gradient: float) -> float:
        """Bytes of a rank's own copies, from the bytes of its state and of its gradient."""
        return self.own * state + self.replays * gradient

    def bytes_beside(self, there: float, state: float, gradient: float) -> float:
        """Bytes of a rank's own copies beyond its training state, of which `there` bytes are in that memory already."""
        return max(0.0, self.own_bytes(state, gradient) - there) if self.own else 0.0

    def replica_bytes(self, state: float, gradient: float) -> float:
        """Bytes of the replica of another rank."""
        return self.replicas * state + self.replays * gradient

    def total_bytes(self, state: float, gradient: float) -> float:
        """Bytes of own copies and replica."""
        return self.own_bytes(state, gradient) + self.replica_bytes(state, gradient)


NO_COPIES = StateCopies()


def list_copy_options(
    memory: bool | str, replicate: int | str, several: bool, replays: bool
) -> tuple[StateCopies, ...]:
    """Options of `resilience.in_memory_checkpoints` and `resilience.replicate_every`, most memory first. `several`:
    nodes exchange replicas; `replays`: a replica can repeat the rank's updates."""
    if memory is False:
        return (NO_COPIES,)
    if not several or replicate == "off":
        found = [StateCopies(SLOTS)]
    elif isinstance(replicate, int):
        return (StateCopies(SLOTS + 1, SLOTS),)
    else:
        found = [StateCopies(SLOTS, SLOTS, replays)]
        if replicate == "every_step":
            return tuple(found)
        found.append(StateCopies(SLOTS))
    return tuple(found) if memory is True else (*found, NO_COPIES)


def choose_copies(options: Sequence[StateCopies], state: float, gradient: float, free: float) -> StateCopies:
    """Choose the first option that fits into the free bytes, or the last if none does."""
    for each in options[:-1]:
        own = each.own_bytes(state, gradient)
        if own <= HOST_MEMORY_SHARE * free and each.replica_bytes(state, gradient) <= HOST_MEMORY_SHARE * (free - own):
            return each
    return options[-1]


def describe_budget(keeps: StateCopies, state: int) -> dict[str, int]:
    """Memory by purpose, for the output of a dry run."""
    found = {NEWEST: SLOTS * state} if keeps.own else {}
    if keeps.replicas:
        found |= {PINNED: state} if keeps.own > SLOTS else {}
        found[REPLICA] = keeps.replicas * state
    return found


# ----------------------------------------------------------------------------------------------------------- integrity
# Integrity checks for shared memory: of words, of short records, and of slots. They detect accidents (a flipped bit, an
# unwritten page), not attacks. No torch.


WORD_BITS = 40  # bits of the value in a checked word; the other 24 are its check
VOID_WORD = (1 << 64) - 1
PAGE_BYTES = 4096  # unit of the checksum: each page has its own sum
_FRAME_BYTES = 8


def encode_word(value: int, place: int) -> int:
    """Encode a value >= 0 as an unsigned 8-byte word with a check; the check depends on `place`."""
    assert 0 <= value < 1 << WORD_BITS, value
    return value | _check_bits(value, place) << WORD_BITS


def decode_word(word: int, place: int) -> int | None:
    """Decode a checked word; None if it is damaged."""
    value = word & ((1 << WORD_BITS) - 1)
    return value if word >> WORD_BITS == _check_bits(value, place) else None


def _check_bits(value: int, place: int) -> int:
    return zlib.crc32(value.to_bytes(8, "little") + place.to_bytes(8, "little")) & 0xFFFFFF


def frame_record(record: bytes) -> bytes:
    """Prepend its length and its CRC-32 to a record."""
    return len(record).to_bytes(4, "little") + zlib.crc32(record).to_bytes(4, "little") + record


def unframe_record(memory: bytes | memoryview) -> bytes | None:
    """The record at the start of memory; None if it is damaged."""
    length = int.from_bytes(memory[:4], "little")
    record = bytes(memory[_FRAME_BYTES : _FRAME_BYTES + length])
    whole = len(record) == length and zlib.crc32(record) == int.from_bytes(memory[4:_FRAME_BYTES], "little")
    return record if whole else None


def frame_bytes(record: bytes) -> int:
    """Length of the output of `frame_record`."""
    return _FRAME_BYTES + len(record)


def checksum(memory: memoryview) -> int:
    """Checksum of memory, whose length is a multiple of PAGE_BYTES: the CRC-32 of the sums of its pages, each the sum
    of the page's 8-byte words modulo 2^64. It runs at the speed of memory, which a CRC of all bytes does not."""
    import numpy as np  # not at the top: agents import this module and do not use numpy

    if not len(memory):
        return 0
    words = np.frombuffer(memory, dtype=np.int64).reshape(-1, PAGE_BYTES // 8)
    return zlib.crc32(words.sum(axis=1).tobytes())
