"""Slots of the in-memory store: their memory, what they hold, and whether it is intact."""

import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.disk.snapshot import DTYPE_NAMES
from phalanx.checkpoint.memory.previous_state import read_tensor
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import DamagedState
from phalanx.core.placement import InMemoryCheckpoint, StateFileLocation
from phalanx.optim.quantized import QuantizedShard
from phalanx.optim.state import Slot, StatePiece
from phalanx.recovery import state_file
from phalanx.recovery.catalog import SLOTS
from phalanx.recovery.inventory import describe_skipped_file
from phalanx.recovery.replica_client import ReplicaClient
from phalanx.recovery.shared_memory import SHARED_MEMORY_SHARE, describe_shortage, format_bytes
from phalanx.recovery.state_file import ALIGNED, PAGE, StateFile, StateFileOwner, invalidate_damaged_step, round_up
from phalanx.system import memory as host_memory

# ------------------------------------ taking the shared memory that a rank's state file needs, on all ranks or on none


def allocate_state_file(
    folder: Path, mesh: Mesh, who: StateFileOwner, index: dict[str, Any], slot_bytes: int, slots: int, requested: bool
) -> tuple[StateFile | None, str | None, str]:
    """This rank's file of so many slots; why there is none, on all ranks where it is so on one; and what those of this
    node take. What nobody has asked for (not `requested`) must leave more room. Collective."""
    found = os.statvfs(folder)
    # Asked before any rank of this node takes some of it.
    shared, host = found.f_bavail * found.f_frsize, host_memory.free_bytes()
    needs = mesh.gather(float(state_file.state_file_bytes(index, slot_bytes, slots)))
    node = mesh.topology.node_of
    need = sum(each for rank, each in enumerate(needs) if node[rank] == node[mesh.rank])
    short, file = describe_shortage("the state of this node's ranks", need, shared, host, requested), None
    if short is None:
        try:
            file = state_file.create_state_file(folder, who, index, slot_bytes, slots)
        except OSError as error:
            short = (
                f"{folder} does not take {format_bytes(need)} ({error.strerror}), of which "
                f"{format_bytes(shared)} are free"
            )
    third = "" if slots == SLOTS else " and the last that is on a second node"
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


# ---------------------------------------------------------------------------------------------------------- slot index
# What lies where in a slot of a rank's state file: it can be read on any layout, and used as it is on the same.


def build_index(like: Slot, pieces: Iterable[StatePiece], mesh: Mesh) -> tuple[dict[str, Any], int, int]:
    """What lies where in a slot, and its bytes; all that must be alike for a slot to be used as it is. Besides, a
    number that ranks with the same pieces have in common, and no others."""
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


def map_slot(file: StateFile, slot: int, index: Mapping[str, Any]) -> Slot:
    """The tensors of a slot."""
    found: Slot = {}
    for key, kind, dtype, shape, at in index["tensors"]:
        found.setdefault(key, {})[kind] = read_tensor(file, slot, at, dtype, shape)
    return found


# ------------------------------------------------------------------------------------------------------ working memory
# Memory that a rank works in and that stays when it dies: to give it back, and to take it anew page by page, is a good
# part of what is waited for when ranks are started again. What lies in it means nothing.


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
    """Remove what ranks have left of which there are no such any more."""
    for path in folder.glob(NAME.format(0).replace("00000", "*")):
        digits = path.name.rpartition("-")[2]
        if digits.isdecimal() and int(digits) >= world:
            path.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------------- verify
# Checking what an attempt is to go on from in memory, before anything of it is used: each file by one rank.


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
        assert replicas is not None, "files on other nodes are read by way of this one's"
        problem = replicas.verify_file(file.address, file.path, step)
    else:
        problem = invalidate_damaged_step(Path(file.path), step)
    return None if problem is None else describe_skipped_file(file.path, problem)
