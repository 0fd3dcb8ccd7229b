"""How the sharded engine's values travel: which transfers, over which groups, and in how many bytes."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.comm.codec import CODECS, PLAIN, Codec, sent_size
from phalanx.comm.collectives import Traffic, all_reduce
from phalanx.comm.compression import PIECE_BYTES, Compressed
from phalanx.comm.mesh import Mesh
from phalanx.comm.topology import Topology
from phalanx.comm.two_level import TwoLevel
from phalanx.comm.uneven_collectives import Staged, Transfers, transfers


@dataclass(frozen=True)
class Ways:
    """How values move between the ranks that hold a copy of the state together, of parameters that are trained and of
    those that are frozen, and how sums go on over the copies (`add`, in place; None: there is one copy).

    `reduced`: bytes that an element of the type is sent in, on the slowest part of its way, to be summed; `gathered`:
    to be gathered, if it is trained.
    """

    trained: Transfers
    frozen: Transfers
    add: Callable[[torch.Tensor], None] | None
    reduced: Callable[[torch.dtype], float]
    gathered: Callable[[torch.dtype], float]


def ways(mesh: Mesh, degree: int, traffic: Traffic, compress: str) -> Ways:
    """Those of a mesh where `degree` neighbours hold a copy; what crosses nodes is sent by the codec `compress`, unless
    that is "none". Collective."""
    codec = None if compress == PLAIN else CODECS[compress]
    neighbours, copies = mesh.split(degree, through_host=codec is not None)
    first, place = mesh.rank - mesh.rank % degree, mesh.rank % degree
    near = mesh.topology.part(range(first, first + degree))
    far = mesh.topology.part(range(place, mesh.world, degree))
    whole, coded = (functools.partial(sent_size, compress=by) for by in (PLAIN, compress))
    add = None if copies is None else _adding(copies, traffic, far, codec)
    if codec is None:
        moves = transfers(neighbours, traffic, mesh.device, near)
        return Ways(moves, moves, add, whole, whole)
    line = TwoLevel(neighbours, near, PIECE_BYTES, traffic, dist.get_process_group_ranks(neighbours))
    trained, frozen = Compressed(line, codec), line
    on_host = mesh.device.type == "cpu"
    return Ways(
        trained if on_host else Staged(trained, rounds=True),
        frozen if on_host else Staged(frozen),
        add,
        # The same on all ranks, though the neighbours of some may all be on one node.
        coded if any(_crossing(mesh, degree)) else whole,
        coded,
    )


def _crossing(mesh: Mesh, degree: int) -> Iterator[bool]:
    """Of each group of neighbours, whether it has several nodes."""
    for first in range(0, mesh.world, degree):
        yield len(mesh.topology.part(range(first, first + degree)).nodes) > 1


def _adding(
    group: dist.ProcessGroup, traffic: Traffic, topology: Topology, codec: Codec | None
) -> Callable[[torch.Tensor], None]:
    if codec is None:
        return lambda tensor: all_reduce(tensor, group, traffic).wait()
    names = dist.get_process_group_ranks(group)
    line = Compressed(TwoLevel(group, topology, PIECE_BYTES, traffic, names), codec)

    def add(tensor: torch.Tensor) -> None:
        host = tensor.cpu()  # itself, where it is there
        line.all_reduce(host).wait()
        if host is not tensor:
            tensor.copy_(host)

    return add
