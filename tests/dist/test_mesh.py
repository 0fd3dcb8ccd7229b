"""The groups of a mesh with several axes."""

import torch
import torch.distributed as dist

from phalanx.comm.mesh import Mesh, attach_mesh, join
from phalanx.core.placement import Placement
from phalanx.layout.mesh_axes import MeshAxes
from tests.helpers import run_ranks

AXES = MeshAxes(tensor=2, pipeline=2)


def members(mesh: Mesh) -> dict[str, list[int]]:
    """Ranks of each group, as they are told over the group itself."""
    found = {}
    groups = {
        "data": mesh.data.transfers,
        "shard": mesh.data.shard.get_group(),
        "control": mesh.data.control,
        "tensor": mesh.tensor.group if mesh.tensor else None,
        "pipe": mesh.pipe.group if mesh.pipe else None,
        "model": mesh.model.group if mesh.model else None,
    }
    for name, group in groups.items():
        assert group is not None, name
        ranks = [torch.zeros(1) for _ in range(dist.get_world_size(group))]
        dist.all_gather(ranks, torch.tensor([float(mesh.rank)]), group=group)
        found[name] = [int(rank) for rank in ranks]
    return found


def joined(placement: Placement) -> list[object]:
    with join(placement, 20, axes=AXES) as mesh:
        inner, copies = mesh.data.split(1, through_host=False)
        assert copies is not None
        ranks = dist.get_process_group_ranks(copies)
        return [members(mesh), mesh.data.rank, mesh.data.sum([1.0]), mesh.sum([1.0]), dist.get_world_size(inner), ranks]


def test_each_group_has_the_ranks_that_differ_along_its_axis() -> None:
    for rank, (found, place, of_data, of_all, alone, copies) in enumerate(run_ranks(joined, 8)):
        groups = {
            axis: next(g for g in AXES.groups(axis, 8) if rank in g) for axis in ("data", "tensor", "pipe", "model")
        }
        assert {name: tuple(found[name]) for name in groups} == groups
        assert found["shard"] == found["control"] == found["data"] == copies
        assert place == AXES.coordinates(rank, 8).data
        assert (of_data, of_all, alone) == ([2.0], [8.0], 1)


def twice(placement: Placement) -> list[object]:
    with join(placement, 20) as outer, attach_mesh(outer.device, 20, AXES) as mesh:
        return [members(mesh)["tensor"], mesh.data.world, outer.data is outer, outer.tensor is None]


def test_a_mesh_beside_another_has_axes_of_its_own_and_leaves_nothing() -> None:
    for rank, (tensor, copies, same, none) in enumerate(run_ranks(twice, 4)):
        assert tensor == [rank - rank % 2, rank - rank % 2 + 1]
        assert (copies, same, none) == (1, True, True)
