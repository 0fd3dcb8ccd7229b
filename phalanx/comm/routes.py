"""How the sharded engine's values travel: which transfers, over which groups, and in how many bytes."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.comm.codec import CODECS, NO_COMPRESSION, Codec, wire_bytes_per_element
from phalanx.comm.collectives import Traffic, all_reduce
from phalanx.comm.compression import CHUNK_BYTES, CompressedCollectives
from phalanx.comm.mesh import Mesh
from phalanx.comm.topology import Topology
from phalanx.comm.two_level import TwoLevelCollectives
from phalanx.comm.uneven_collectives import HostStagedCollectives, UnevenCollectives, make_uneven_collectives


@dataclass(frozen=True)
class Routes:
    """How values move between the ranks that hold a copy of the state together, of parameters that are trained and of
    those that are frozen, and how sums go on over the copies (`sum_over_replicas`, in place; None: there is one copy).

    `reduce_bytes`: bytes that an element of the type is sent in, on the slowest part of its way, to be summed;
    `gather_bytes`: to be gathered, if it is trained.
    """

    trained: UnevenCollectives
    frozen: UnevenCollectives
    sum_over_replicas: Callable[[torch.Tensor], None] | None
    reduce_bytes: Callable[[torch.dtype], float]
    gather_bytes: Callable[[torch.dtype], float]


def make_routes(mesh: Mesh, degree: int, traffic: Traffic, compress: str) -> Routes:
    """Those of a mesh where `degree` neighbours hold a copy; what crosses nodes is sent by the codec `compress`, unless
    that is "none". Collective."""
    codec = None if compress == NO_COMPRESSION else CODECS[compress]
    neighbours, copies = mesh.split(degree, through_host=codec is not None)
    first, place = mesh.rank - mesh.rank % degree, mesh.rank % degree
    near = mesh.topology.subset(range(first, first + degree))
    far = mesh.topology.subset(range(place, mesh.world, degree))
    whole, coded = (functools.partial(wire_bytes_per_element, compress=by) for by in (NO_COMPRESSION, compress))
    add = None if copies is None else _make_replica_sum(copies, traffic, far, codec)
    if codec is None:
        moves = make_uneven_collectives(neighbours, traffic, mesh.device, near)
        return Routes(moves, moves, add, whole, whole)
    line = TwoLevelCollectives(neighbours, near, CHUNK_BYTES, traffic, dist.get_process_group_ranks(neighbours))
    trained, frozen = CompressedCollectives(line, codec), line
    on_host = mesh.device.type == "cpu"
    return Routes(
        trained if on_host else HostStagedCollectives(trained, overwrites_own=True),
        frozen if on_host else HostStagedCollectives(frozen),
        add,
        # The same on all ranks, though the neighbours of some may all be on one node.
        coded if any(_groups_span_nodes(mesh, degree)) else whole,
        coded,
    )


def _groups_span_nodes(mesh: Mesh, degree: int) -> Iterator[bool]:
    """Of each group of neighbours, whether it has several nodes."""
    for first in range(0, mesh.world, degree):
        yield len(mesh.topology.subset(range(first, first + degree)).nodes) > 1


def _make_replica_sum(
    group: dist.ProcessGroup, traffic: Traffic, topology: Topology, codec: Codec | None
) -> Callable[[torch.Tensor], None]:
    if codec is None:
        return lambda tensor: all_reduce(tensor, group, traffic).wait()
    names = dist.get_process_group_ranks(group)
    line = CompressedCollectives(TwoLevelCollectives(group, topology, CHUNK_BYTES, traffic, names), codec)

    def add(tensor: torch.Tensor) -> None:
        host = tensor.cpu()  # itself, where it is there
        line.all_reduce(host).wait()
        if host is not tensor:
            tensor.copy_(host)

    return add
