"""Taking the shared memory that a rank's state file needs, on all ranks or on none."""

import os
from pathlib import Path
from typing import Any

from phalanx.comm.mesh import Mesh
from phalanx.recovery import state_file
from phalanx.recovery.budget import SLOTS
from phalanx.recovery.shared_memory import describe_shortage, format_bytes
from phalanx.recovery.state_file import StateFile, StateFileOwner
from phalanx.system import memory as host_memory


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
