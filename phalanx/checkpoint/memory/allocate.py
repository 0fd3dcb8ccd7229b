"""Taking the shared memory that a rank's state file needs, on all ranks or on none."""

import os
from pathlib import Path
from typing import Any

from phalanx.comm.mesh import Mesh
from phalanx.recovery import state_file
from phalanx.recovery.budget import SLOTS
from phalanx.recovery.shared_memory import size, too_large
from phalanx.recovery.state_file import StateFile, Who
from phalanx.system import memory as host_memory


def taken(
    folder: Path, mesh: Mesh, who: Who, index: dict[str, Any], slot_bytes: int, slots: int, asked: bool
) -> tuple[StateFile | None, str | None, str]:
    """This rank's file of so many slots; why there is none, on all ranks where it is so on one; and what those of this
    node take. What nobody has `asked` for must leave more room. Collective."""
    found = os.statvfs(folder)
    # Asked before any rank of this node takes some of it.
    shared, host = found.f_bavail * found.f_frsize, host_memory.free()
    needs = mesh.gather(float(state_file.file_bytes(index, slot_bytes, slots)))
    node = mesh.topology.node_of
    need = sum(each for rank, each in enumerate(needs) if node[rank] == node[mesh.rank])
    short, file = too_large("the state of this node's ranks", need, shared, host, asked), None
    if short is None:
        try:
            file = state_file.create(folder, who, index, slot_bytes, slots)
        except OSError as error:
            short = f"{folder} does not take {size(need)} ({error.strerror}), of which {size(shared)} are free"
    third = "" if slots == SLOTS else " and the last that is on a second node"
    takes = f"the two newest steps of this node's ranks{third} take {size(need)} of {size(shared)} in shared memory"
    (made,) = mesh.min([float(file is not None)])
    if made:
        return file, None, takes
    if file is not None:
        file.facts.path.unlink(missing_ok=True)
    return None, short or "another node has no room for it", takes
