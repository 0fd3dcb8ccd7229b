"""What is kept of a run in shared memory, on which nodes, and what an attempt begins with of it: plain data, and one
pure choice.

Ranks that hold the same pieces of a model, as in hybrid sharding, are one *part* of it: whichever of them is left will
do.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.recovery.shared_memory import HOST_MEMORY_SHARE

HEADER_ONLY = (
    "bare"  # the layout of what is kept of a rank whose state others hold: what it said of each step, and no state
)


@dataclass(frozen=True)
class StateFileInfo:
    """What a node says of a state file that it has: that of a `rank` of `world` in attempt `generation`, with these
    committed steps. `way`: how often training had gone back since; what was committed before belongs to no run any
    more. `part` is the lowest rank that holds the same pieces, `parts` how many unlike ones there are; `layout`: as
    above, or BARE; `replica`: it was sent here by a rank of another node."""

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
    """A step, and which copies of it are gone on from: by rank of that attempt, the node and what it holds."""

    step: int
    generation: int
    way: int
    files: Mapping[int, tuple[int, StateFileInfo]]


def find_redundant(parts: Sequence[int], nodes: Sequence[int]) -> list[bool]:
    """Of each rank whether ranks of another node have its part anyway; both by rank, its part and its node."""
    nodes_of: dict[int, set[int]] = {}
    for part, node in zip(parts, nodes, strict=True):
        nodes_of.setdefault(part, set()).add(node)
    return [len(nodes_of[part]) > 1 for part in parts]


def choose_restore_point(held: Mapping[int, Iterable[StateFileInfo]]) -> RestorePoint | None:
    """The newest step that is whole in what nodes hold; of generations that hold the same, the newest. With it comes
    what ranks said of the step whose state is not there.

    A step is whole that all ranks of a generation hold, be it in their own memory or in a replica; or, where nothing is
    left of some ranks, that is held for every part.
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
        # Of these one of which all ranks have said what it came to: a step counts when they have.
        whole = [step for step in whole if len(_holders(step, every)) == world] or whole
    if not whole:
        return None
    files = _holders(max(whole), every) | _holders(max(whole), by_rank)
    return RestorePoint(max(whole), generation, way, dict(sorted(files.items())))


def _holders(step: int, by_rank: Mapping[int, list[tuple[int, StateFileInfo]]]) -> dict[int, tuple[int, StateFileInfo]]:
    """For each rank whose state of a step is there, where: its own memory before a replica."""
    found = {}
    for rank, copies in sorted(by_rank.items()):
        here = [copy for copy in copies if step in copy[1].steps]
        if here:
            found[rank] = min(here, key=lambda copy: (copy[1].replica, copy[0]))
    return found


def find_missing_ranks(held: Mapping[int, Iterable[StateFileInfo]]) -> list[int]:
    """The ranks of the newest generation of which no node holds anything; empty where nothing at all is held."""
    every = [each for files in held.values() for each in files if each.layout != HEADER_ONLY]
    generation = max((each.generation for each in every), default=0)
    newest = [each for each in every if each.generation == generation]
    if not newest:
        return []
    return sorted(set(range(newest[0].world)) - {each.rank for each in newest})


def inventory_to_message(held: Iterable[StateFileInfo]) -> list[dict[str, Any]]:
    """As JSON."""
    return [asdict(each) for each in held]


def inventory_from_message(message: Iterable[Mapping[str, Any]]) -> tuple[StateFileInfo, ...]:
    """Read what `inventory_to_message` wrote."""
    return tuple(StateFileInfo(**{**each, "steps": tuple(each["steps"])}) for each in message)


def restore_point_to_message(choice: RestorePoint) -> dict[str, Any]:
    """As JSON."""
    files = [[node, asdict(each)] for node, each in choice.files.values()]
    return {"step": choice.step, "generation": choice.generation, "way": choice.way, "files": files}


def restore_point_from_message(message: Mapping[str, Any]) -> RestorePoint:
    """Read what `restore_point_to_message` wrote."""
    files = {each["rank"]: (int(node), inventory_from_message([each])[0]) for node, each in message["files"]}
    return RestorePoint(int(message["step"]), int(message["generation"]), int(message["way"]), files)


# -------------------------------------------------------------------------------------------------------------- budget
# What it takes to keep steps in memory that outlives the ranks: one rule for a run's shares, a dry run and a plan. It
# is memory of the host. Where ranks compute on CPUs it is that which they compute in, and their state lives there.


SLOTS = 2  # steps of a rank, and of a replica
NEWEST, PINNED = "the two newest steps", "a third, on several nodes"
REPLICA = "a replica, on several nodes"


@dataclass(frozen=True)
class StateCopies:
    """How often the state of a rank lies in such memory: `own` times as its own, and `replicas` times that of a rank of
    another node, taken to be as large; `replays`: a gradient of either beside it, by which updates are made again."""

    own: int = 0
    replicas: int = 0
    replays: bool = False

    def own_bytes(self, state: float, gradient: float) -> float:
        """Bytes of a rank's own, of whose state and gradient these are."""
        return self.own * state + self.replays * gradient

    def replica_bytes(self, state: float, gradient: float) -> float:
        """Bytes of the replica that is kept for another rank."""
        return self.replicas * state + self.replays * gradient

    def total_bytes(self, state: float, gradient: float) -> float:
        """Both."""
        return self.own_bytes(state, gradient) + self.replica_bytes(state, gradient)


NO_COPIES = StateCopies()


def list_copy_options(
    memory: bool | str, replicate: int | str, several: bool, replays: bool
) -> tuple[StateCopies, ...]:
    """What `resilience.in_memory_checkpoints` and `resilience.replicate_every` ask for, and what is done in turn where
    there is no room for that. `several`: other nodes are to get what this one has; `replays`: they can make its updates
    again."""
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
    """Which of them a run does that finds so many bytes free; the last one, where none of the others leaves enough."""
    for each in options[:-1]:
        own = each.own_bytes(state, gradient)
        if own <= HOST_MEMORY_SHARE * free and each.replica_bytes(state, gradient) <= HOST_MEMORY_SHARE * (free - own):
            return each
    return options[-1]


def describe_budget(keeps: StateCopies, state: int) -> dict[str, int]:
    """What is counted, in words, for a dry run."""
    found = {NEWEST: SLOTS * state} if keeps.own else {}
    if keeps.replicas:
        found |= {PINNED: state} if keeps.own > SLOTS else {}
        found[REPLICA] = keeps.replicas * state
    return found


# ----------------------------------------------------------------------------------------------------------- integrity
# What tells memory that was damaged from memory that was written: checks of words, of short records, and of slots. They
# are against accidents (a flipped bit, a page that was not written), not against somebody who means it. No torch.


WORD_BITS = 40  # of a value in a checked word; the other 24 are its check
VOID_WORD = (1 << 64) - 1
PAGE_BYTES = 4096  # of which each has a sum of its own
_FRAME_BYTES = 8


def encode_word(value: int, place: int) -> int:
    """A value that is not negative as an unsigned word of eight bytes that carries its own check; the same value at
    another `place` has another one."""
    assert 0 <= value < 1 << WORD_BITS, value
    return value | _check_bits(value, place) << WORD_BITS


def decode_word(word: int, place: int) -> int | None:
    """The value of a word; None where it has been damaged."""
    value = word & ((1 << WORD_BITS) - 1)
    return value if word >> WORD_BITS == _check_bits(value, place) else None


def _check_bits(value: int, place: int) -> int:
    return zlib.crc32(value.to_bytes(8, "little") + place.to_bytes(8, "little")) & 0xFFFFFF


def frame_record(record: bytes) -> bytes:
    """A record behind its length and its CRC-32."""
    return len(record).to_bytes(4, "little") + zlib.crc32(record).to_bytes(4, "little") + record


def unframe_record(memory: bytes | memoryview) -> bytes | None:
    """The record that memory begins with; None where it has been damaged."""
    length = int.from_bytes(memory[:4], "little")
    record = bytes(memory[_FRAME_BYTES : _FRAME_BYTES + length])
    whole = len(record) == length and zlib.crc32(record) == int.from_bytes(memory[4:_FRAME_BYTES], "little")
    return record if whole else None


def frame_bytes(record: bytes) -> int:
    """What `frame_record` takes."""
    return _FRAME_BYTES + len(record)


def checksum(memory: memoryview) -> int:
    """The CRC-32 of the sums of memory's pages, of which it must be whole ones; a sum is that of the page's words of
    eight bytes, modulo 2^64. As fast as memory can be read, which a CRC of all of it is not."""
    import numpy as np  # not at the top: agents import this module, and need no numbers

    if not len(memory):
        return 0
    words = np.frombuffer(memory, dtype=np.int64).reshape(-1, PAGE_BYTES // 8)
    return zlib.crc32(words.sum(axis=1).tobytes())
