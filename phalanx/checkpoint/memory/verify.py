"""Checking what an attempt is to go on from in memory, before anything of it is used: each file by one rank."""

from pathlib import Path

from phalanx.comm.json_objects import JsonGroup
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import DamagedState
from phalanx.core.placement import Kept, KeptFile
from phalanx.recovery.inventory import passed_over
from phalanx.recovery.replica_client import Replicas
from phalanx.recovery.state_file import StateFile, void_if_damaged


def check_kept(kept: Kept, mesh: Mesh, replicas: Replicas | None) -> None:
    """Compare the files of a step with their checksums, on the nodes where they lie; what is damaged is void from then
    on. Collective. Raises DamagedState, on all ranks, where any is."""
    mine = [file for number, file in enumerate(kept.files) if number % mesh.world == mesh.rank]
    found = [sentence for file in mine if (sentence := _checked(file, kept.step, replicas)) is not None]
    everyones = JsonGroup(mesh.checkpoint).all_objects(found)
    if any(everyones):
        raise DamagedState("; ".join(sentence for each in everyones for sentence in each))


def check_copy(file: StateFile, step: int) -> None:
    """Compare a copy with the checksum that it came with. Raises DamagedState where it is damaged; it is void then."""
    problem = file.damage(step)
    if problem is not None:
        if (slot := file.facts.steps.get(step)) is not None:
            file.void(slot)
        raise DamagedState(passed_over(file.facts.path, problem))


def _checked(file: KeptFile, step: int, replicas: Replicas | None) -> str | None:
    if file.address is not None:
        assert replicas is not None, "files on other nodes are read by way of this one's"
        problem = replicas.check(file.address, file.path, step)
    else:
        problem = void_if_damaged(Path(file.path), step)
    return None if problem is None else passed_over(file.path, problem)
