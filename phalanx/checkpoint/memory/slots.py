"""Slots of the in-memory store: their file, contents and integrity."""

import mmap
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from phalanx.checkpoint.disk.snapshot import DTYPE_NAMES
from phalanx.checkpoint.memory.previous_state import open_state_file
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import ConfigError, DamagedState
from phalanx.core.placement import InMemoryCheckpoint, StateFileLocation
from phalanx.core.records import EventKind
from phalanx.optim.quantized import QuantizedShard
from phalanx.optim.update import Slot, StatePiece
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import SLOTS
from phalanx.recovery.inventory import describe_skipped_file
from phalanx.recovery.replica_client import ReplicaClient
from phalanx.recovery.shared_memory import SHARED_MEMORY_SHARE, describe_shortage, format_bytes
from phalanx.recovery.state_file import ALIGNED, PAGE, StateFile, StateFileOwner, invalidate_damaged_step, round_up
from phalanx.system import memory as host_memory

MEMORY_KEY = "resilience.in_memory_checkpoints"
COPIED_BYTES = 64 << 20  # of a file that is copied, at a time

OnEvent = Callable[[str, dict[str, Any]], None]

# --------------------------------------------------------------------------------------------------- file and take-up


class StateFolder:
    """A run's folder in shared memory, as a rank uses it: the state file that it makes there, or takes up from the
    attempt before (`previous`), and what is removed. `wanted`: as in a recipe; `first_on_node`: whether no rank of this
    node is before this one."""

    def __init__(
        self, path: Path, mesh: Mesh, generation: int, run: bytes, previous: InMemoryCheckpoint | None,
        wanted: bool | Literal["auto"], first_on_node: bool, replicas: ReplicaClient | None, on_event: OnEvent,
    ) -> None:  # fmt: skip
        self.path, self.previous = path, previous
        self._mesh, self._generation, self._run = mesh, generation, run
        self._wanted, self._first_on_node = wanted, first_on_node
        self._replicas, self._on_event = replicas, on_event
        self._lock = inventory.hold_liveness_lock(path)  # stays: buffers of this process's engine may live as long
        self._copy_pending = False  # the file is a copy of one of another node that may not be whole yet
        self.shortage = ""  # why no file could be made

    def owner(self, parts: Sequence[int]) -> StateFileOwner:
        """The rank whose file this one can use, from the identities of each rank's pieces."""
        mesh = self._mesh
        part, count = parts.index(parts[mesh.rank]), len(set(parts))
        return StateFileOwner(self._generation, mesh.rank, mesh.world, self._run, part, count)

    def find_matching(
        self, index: dict[str, Any], slot_bytes: int, who: StateFileOwner, slots: int
    ) -> StateFile | None:
        """A file in that layout with the step to resume from: this rank's own, or a copy of one that is elsewhere, as a
        replica of it is, or that of a rank with the same pieces. One with another number of slots is none: what it
        holds is read by coordinates."""
        layout = state_file.digest_json(index).hex()
        alike = [file for file in self.previous.files if file.layout == layout] if self.previous is not None else []
        if self.previous is None or not alike:
            return None
        chosen = min(alike, key=lambda file: (file.rank != who.rank, file.address is not None))
        path, step, found = Path(chosen.path), self.previous.step, None
        if chosen.address is None and chosen.rank == who.rank and path.parent == self.path:
            found = StateFile(path, writable=True)
        elif chosen.address is not None and chosen.rank == who.rank and self._replicas is not None:
            coming = self._replicas.start_fetch(chosen.address, chosen.path, step, slots)
            if coming is not None:  # while it comes other ranks get on, and this one with what is to be agreed on
                self._copy_pending = True
                found = StateFile(self.path / coming, writable=True)
        if found is not None:
            return found if found.metadata.slots == slots else None
        source, slot = open_state_file(chosen, step, self._replicas)
        facts = source.metadata
        try:
            # As if it had always been here: of the same attempt as those of the other ranks.
            made = state_file.create_state_file(
                self.path, replace(who, generation=facts.generation), index, slot_bytes, slots
            )
        except OSError:  # there is no room beside what lies there; it is read by coordinates, if anything
            return None
        made.invalidate_all(facts.way)
        for at in range(0, facts.slot_bytes, COPIED_BYTES):
            count, target = min(COPIED_BYTES, facts.slot_bytes - at), made.slot_offset(0) + at
            made.map[target : target + count] = source.read_bytes(facts.slot_offset(slot) + at, count)
        made.commit(0, step, source.raw_header(slot))
        made = StateFile(made.metadata.path, writable=True)
        verify_copy(made, step)
        return made

    def first_slot(self, file: StateFile) -> int:
        """The slot of the step to resume from, in a file that `find_matching` has found."""
        assert self.previous is not None
        return 0 if self._copy_pending else file.metadata.steps[self.previous.step]

    def finish_copy(self, file: StateFile) -> None:
        """Wait until a copy that is on its way is whole, and check it."""
        if self._copy_pending and self._replicas is not None:
            self._replicas.wait_for_fetch()
            file.refresh()
            self._copy_pending = False
            if self.previous is not None:
                verify_copy(file, self.previous.step)

    def create_file(self, index: dict[str, Any], slot_bytes: int, who: StateFileOwner, slots: int) -> StateFile | None:
        """This rank's new file; None, on all ranks, where it would not fit on one of them. Collective. Raises
        ConfigError where it was asked for."""
        file, short, takes = self._allocate(index, slot_bytes, who, slots)
        if short is not None and self._free_old_replicas():
            file, short, takes = self._allocate(index, slot_bytes, who, slots)
        self.shortage = short or ""
        if short is not None and self._wanted is True:
            raise ConfigError(
                f"{MEMORY_KEY} is true, but the state of the ranks does not fit into shared memory: {short}; set "
                f"{MEMORY_KEY}=auto or false, or give this machine or container a larger /dev/shm"
            )
        if self.previous is None or short is not None:
            reason = takes if short is None else f"after a failure the run goes back to a checkpoint: {short}"
            self._on_event(EventKind.AUTO_RESOLVED, {"key": MEMORY_KEY, "value": short is None, "reason": reason})
        return file

    def _allocate(
        self, index: dict[str, Any], slot_bytes: int, who: StateFileOwner, slots: int
    ) -> tuple[StateFile | None, str | None, str]:
        """This rank's file of so many slots; why there is none, on all ranks where it is so on one; and what those of
        this node take. A file that was not requested must leave more room. Collective."""
        found, mesh, folder = os.statvfs(self.path), self._mesh, self.path
        # Asked before any rank of this node takes some of it.
        shared, host = found.f_bavail * found.f_frsize, host_memory.free_bytes()
        needs = mesh.gather(float(state_file.state_file_bytes(index, slot_bytes, slots)))
        node = mesh.topology.node_of
        need = sum(each for rank, each in enumerate(needs) if node[rank] == node[mesh.rank])
        short = describe_shortage("the state of this node's ranks", need, shared, host, self._wanted is True)
        file = None
        if short is None:
            try:
                file = state_file.create_state_file(folder, who, index, slot_bytes, slots)
            except OSError as error:
                short = (
                    f"{folder} has no room for {format_bytes(need)} ({error.strerror}); {format_bytes(shared)} are free"
                )
        third = "" if slots == SLOTS else " and the last step that is on a second node"
        takes = (
            f"the two newest steps of this node's ranks{third} take {format_bytes(need)} of {format_bytes(shared)} "
            "in shared memory"
        )
        (made,) = mesh.min([float(file is not None)])
        if made:
            return file, None, takes
        if file is not None:
            file.metadata.path.unlink(missing_ok=True)
        return None, short or "another node has no room for it", takes

    def _free_old_replicas(self) -> bool:
        """Remove replicas that will not be resumed from: the state is read from elsewhere. Collective; whether there
        were any."""
        read = {file.path for file in self.previous.files} if self.previous is not None else set()
        there = inventory.list_state_files(self.path / inventory.REPLICAS)
        replicas = [path for path in there if str(path) not in read]
        for path in replicas if self._first_on_node else ():
            path.unlink(missing_ok=True)
        return self._exist_on_any_node(replicas)

    def _exist_on_any_node(self, paths: Collection[Path]) -> bool:
        """Whether there are such files on any node. Collective."""
        (some,) = self._mesh.max([float(len(paths))])
        return some > 0

    def has_previous_on_any_node(self, file: StateFile) -> bool:
        """Whether files of attempts before lie anywhere still. Collective."""
        return self._exist_on_any_node(self._list_previous(file))

    def _list_previous(self, file: StateFile) -> list[Path]:
        """State files of earlier attempts that are no longer used, without `file`."""
        facts = ((path, state_file.read_metadata(path)) for path in inventory.list_with_replicas(self.path))
        return [path for path, each in facts if each is None or each.generation != file.metadata.generation]

    def remove_previous(self, file: StateFile, hosted: Collection[int]) -> None:
        """Remove those, and replicas of ranks that are not `hosted` here any more, where this rank is the node's
        first."""
        if self._first_on_node:
            remove_stale(self.path, self._mesh.world)
            there = inventory.read_state_files(self.path / inventory.REPLICAS, self._run)
            passed = [facts.path for facts in there if facts.rank not in hosted]
            for path in (*self._list_previous(file), *passed):
                path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------- slot index
# What lies where in a slot of a rank's state file: it can be read on any layout, and used as it is on the same.


def build_index(like: Slot, pieces: Iterable[StatePiece], mesh: Mesh) -> tuple[dict[str, Any], int, int]:
    """The layout of a slot, and its bytes, which must be equal for a slot to be used unchanged; and a number that only
    ranks with the same pieces share."""
    tensors: list[list[Any]] = []
    places: dict[int, int] = {}
    end = 0
    for key, state in like.items():
        for kind, tensor in state.items():
            tensors.append([key, kind, DTYPE_NAMES[tensor.dtype], list(tensor.shape), end])
            places[id(tensor)] = end
            end += round_up(tensor.numel() * tensor.dtype.itemsize, ALIGNED)
    rows = [_row(piece, places) for piece in pieces]
    # What no piece speaks of may be like nothing else.
    spoken = {row["at"] for row in rows} | {row["codes"] for row in rows if "codes" in row}
    whole = spoken == set(places.values()) and bool(rows)
    known = state_file.digest_json([tensors, rows, None if whole else mesh.rank])
    who = [mesh.world, mesh.axes.tensor, mesh.axes.pipeline]
    # As many bits as a float64 holds.
    return {"who": who, "tensors": tensors, "pieces": rows}, end, int.from_bytes(known[:6], "little")


def _row(piece: StatePiece, places: Mapping[int, int]) -> dict[str, Any]:
    """A piece in the index, by where in a slot its tensors lie."""
    row: dict[str, Any] = {"name": piece.name, "kind": piece.kind, "start": piece.start, "stop": piece.stop}
    if piece.window is not None:
        row["window"] = list(piece.window)
    row["dtype"] = DTYPE_NAMES[piece.dtype]
    if isinstance(piece.values, QuantizedShard):
        codes, scales = piece.values.codes, piece.values.scales
        row |= {"codes": places[id(codes)], "shape": list(codes.shape), "signed": piece.values.signed}
        return row | {"at": places[id(scales)]}
    return row | {"at": places[id(piece.values)]}


# ------------------------------------------------------------------------------------------------------ working memory
# Working memory of a rank that outlives it: releasing and allocating it again page by page is a large part of the
# restart time. Its contents have no meaning.


NAME = "working-{:05d}"  # by rank


class WorkingMemory:
    """A file in a folder in shared memory, as long as all that is taken of it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / NAME.format(rank)
        self._at = 0

    def allocate(self, elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A flat tensor with any content; None where there is no room for it, or nothing to be had."""
        size = round_up(elements * dtype.itemsize, PAGE)
        if not size:
            return None
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_size < self._at + size:
                    found = os.statvfs(self._path.parent)
                    if size > SHARED_MEMORY_SHARE * found.f_bavail * found.f_frsize:
                        return None
                    os.posix_fallocate(descriptor, self._at, size)
                mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=self._at)
            finally:
                os.close(descriptor)
        except OSError:
            return None
        self._at += size
        return torch.frombuffer(mapped, dtype=dtype, count=elements)


def remove_stale(folder: Path, world: int) -> None:
    """Remove files of ranks that no longer exist."""
    for path in folder.glob(NAME.format(0).replace("00000", "*")):
        digits = path.name.rpartition("-")[2]
        if digits.isdecimal() and int(digits) >= world:
            path.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------------- verify
# Verification of the in-memory state that an attempt resumes from, before use: each file by one rank.


def verify_checkpoint(kept: InMemoryCheckpoint, mesh: Mesh, replicas: ReplicaClient | None) -> None:
    """Compare the files of a step with their checksums, on the nodes where they lie; what is damaged is void from then
    on. Collective. Raises DamagedState, on all ranks, where any is."""
    mine = [file for number, file in enumerate(kept.files) if number % mesh.world == mesh.rank]
    found = [sentence for file in mine if (sentence := _verify_file(file, kept.step, replicas)) is not None]
    everyones = JsonGroup(mesh.checkpoint).all_gather_objects(found)
    if any(everyones):
        raise DamagedState("; ".join(sentence for each in everyones for sentence in each))


def verify_copy(file: StateFile, step: int) -> None:
    """Compare a copy with the checksum that it came with. Raises DamagedState where it is damaged; it is void then."""
    problem = file.find_damage(step)
    if problem is not None:
        if (slot := file.metadata.steps.get(step)) is not None:
            file.invalidate(slot)
        raise DamagedState(describe_skipped_file(file.metadata.path, problem))


def _verify_file(file: StateFileLocation, step: int, replicas: ReplicaClient | None) -> str | None:
    if file.address is not None:
        assert replicas is not None, "files on other nodes are read through this node's"
        problem = replicas.verify_file(file.address, file.path, step)
    else:
        problem = invalidate_damaged_step(Path(file.path), step)
    return None if problem is None else describe_skipped_file(file.path, problem)
