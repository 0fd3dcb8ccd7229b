"""Checking what an attempt is to go on from in memory, before anything of it is used: each file by one rank."""

from pathlib import Path

from phalanx.comm.json_objects import JsonGroup
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import DamagedState
from phalanx.core.placement import InMemoryCheckpoint, StateFileLocation
from phalanx.recovery.inventory import describe_skipped_file
from phalanx.recovery.replica_client import ReplicaClient
from phalanx.recovery.state_file import StateFile, invalidate_damaged_step


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
