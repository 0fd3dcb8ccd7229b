"""Phalanx beside a script's own process group that is bound to its device (`device_id` of init_process_group)."""

import datetime
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.collectives import Traffic, all_reduce
from phalanx.comm.mesh import attach_mesh, single_rank_mesh, split_axis
from phalanx.core.placement import Placement
from phalanx.layout.mesh_axes import MeshAxes
from tests.accelerator.device import needs_device, run_on_device

pytestmark = needs_device


def meshes(placement: Placement) -> list[Any]:
    """Sums over the groups of a mesh of four ranks in two copies of two, over half an axis, and of one rank alone."""
    device, wait, address = torch.device(placement.device), datetime.timedelta(seconds=20), placement.store
    assert address is not None
    torch.accelerator.set_device_index(device.index)
    store = dist.TCPStore(
        address.host, address.port, placement.world, is_master=placement.rank == 0, timeout=wait,
        wait_for_workers=False, master_listen_fd=address.listen_fd,
    )  # fmt: skip
    dist.init_process_group(
        "cpu:gloo,sim:simccl",
        store=store,
        rank=placement.rank,
        world_size=placement.world,
        timeout=wait,
        device_id=device,
    )

    def total(group: dist.ProcessGroup, where: str) -> float:
        tensor = torch.full((), 2.0**placement.rank, device=where)
        all_reduce(tensor, group, Traffic()).wait()
        return tensor.item()

    with attach_mesh(device, 20, MeshAxes(tensor=2)) as mesh:
        assert mesh.tensor is not None
        found = [total(group, placement.device) for group in (mesh.transfers, mesh.tensor.group, mesh.data.transfers)]
        found += [total(group, "cpu") for group in (mesh.control, mesh.agreement)]
        found += mesh.sum([1.0])
        with single_rank_mesh(mesh) as single:
            found += single.sum([1.0])
        half = split_axis(mesh.tensor, 1, 20)
        found += [total(half.group, placement.device)]
        del half
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_all_groups_are_made_below_a_bound_one() -> None:
    found = run_on_device(meshes, 4, order="threads")
    assert found[0] == [15.0, 3.0, 5.0, 15.0, 15.0, 4.0, 1.0, 1.0]
    assert found[3] == [15.0, 12.0, 10.0, 15.0, 15.0, 4.0, 1.0, 8.0]
