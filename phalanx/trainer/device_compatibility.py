"""What ranks must know of each other's devices before they train: who shares one, and whose kernels are others."""

import torch

from phalanx.comm.json_objects import JsonGroup
from phalanx.comm.mesh import Mesh
from phalanx.comm.topology import this_host
from phalanx.layout.model_shape import ModelSpec
from phalanx.models import attention
from phalanx.system import accelerator

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_shared_devices(mesh: Mesh) -> list[str]:
    """A sentence on each accelerator that several ranks are on. Collective."""
    devices, said = JsonGroup(mesh.control).all_gather_objects(accelerator.hardware_id(mesh.device, this_host())), []
    for device in sorted(set(devices) - {""}):
        ranks = [str(rank) for rank, each in enumerate(devices) if each == device]
        if len(ranks) > 1:
            said.append(
                f"ranks {', '.join(ranks)} are on one accelerator, or on parts of one, whose own collectives refuse "
                "that: what ranks exchange goes through host memory, slowly; start one rank per accelerator"
            )
    return said


def find_kernel_differences(mesh: Mesh, dtype: str, spec: ModelSpec | None) -> list[str]:
    """A sentence on ranks whose device has no kernel for attention that others of the same name have. Collective.

    Each rank asks before it holds a model, so that the answer, which it remembers, is not one of a full memory.
    """
    mine = False
    if spec is not None and mesh.device.type != "cpu" and dtype in HALF_DTYPES:
        mine = attention.has_kernel(mesh.device, HALF_DTYPES[dtype], spec.head_dim)
    everyones, said = JsonGroup(mesh.control).all_gather_objects([accelerator.get_device_name(mesh.device), mine]), []
    for name in sorted({name for name, _ in everyones}):
        having = [rank for rank, each in enumerate(everyones) if each == [name, True]]
        lacking = [rank for rank, each in enumerate(everyones) if each == [name, False]]
        if having and lacking:
            said.append(
                f"rank{'s' if len(lacking) > 1 else ''} {', '.join(map(str, lacking))} found no kernel for attention "
                f"of several documents on {name}, as rank {having[0]} did on the same: they compute the same more "
                "slowly, and round otherwise; see that driver and libraries are the same on all nodes"
            )
    return said
