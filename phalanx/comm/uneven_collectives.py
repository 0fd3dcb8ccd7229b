"""Reduce-scatter and all-gather of shards of any sizes, in the form that suits the group and the device.

All forms have the two operations of `RingCollectives`, and mean what `PaddedCollectives` says in a few lines.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from phalanx.comm.chunk_link import remote_bytes
from phalanx.comm.collectives import ALL_GATHER, REDUCE_SCATTER, PendingCollective, Traffic, all_reduce
from phalanx.comm.compression import (
    CHUNK_BYTES,
    CODECS,
    NO_COMPRESSION,
    Codec,
    CompressedCollectives,
    wire_bytes_per_element,
)
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import Topology
from phalanx.comm.ring import RingCollectives
from phalanx.comm.two_level import TwoLevelCollectives
from phalanx.layout.mesh_axes import EXPERT_COPIES
from phalanx.system.trace import phase


class PendingTransfer(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the tensors may be used by work queued after it; the second call does nothing."""


class UnevenCollectives(Protocol):
    """What `RingCollectives` does, whatever does it."""

    def reduce_scatter(self, tensor: torch.Tensor, cuts: Sequence[int], into: torch.Tensor) -> PendingTransfer:
        """Begin to sum `tensor`, which may be overwritten, into the own range of each rank."""

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[int]) -> PendingTransfer:
        """Begin to fill the ranges of the other ranks."""


def make_uneven_collectives(
    group: dist.ProcessGroup, traffic: Traffic, device: torch.device, topology: Topology | None = None
) -> UnevenCollectives:
    """The form for tensors on `device`: on the host the ring, or two levels where nodes have several of the group's
    ranks; on an accelerator its own collectives, or the former staged through the host where the group has only gloo
    for it. `topology` is that of the group; without it each rank counts as a separate node."""
    if device.type != "cpu" and dist.get_backend(group) != "gloo":
        return DeviceCollectives(group, traffic)
    two_level = topology is not None and topology.form == "two-level"
    host: TwoLevelCollectives | RingCollectives = RingCollectives(group, traffic)
    if topology is not None and two_level:
        host = TwoLevelCollectives(group, topology, traffic=traffic, names=dist.get_process_group_ranks(group))
    return host if device.type == "cpu" else HostStagedCollectives(host)


class PaddedCollectives:
    """The twin: slow, and obviously right. Every shard is padded to the largest, and every sum is one of everything."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._group, self._traffic = group, traffic
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)

    def reduce_scatter(self, tensor: torch.Tensor, cuts: Sequence[int], into: torch.Tensor) -> PendingTransfer:
        self._traffic.count(remote_bytes(tensor, cuts, self._rank))
        everything = tensor.clone()
        work = dist.all_reduce(everything, group=self._group, async_op=True)
        pending = PendingCollective([work], self._traffic, "reduce")
        return _CompletedWith(pending, lambda: into.copy_(everything[cuts[self._rank] : cuts[self._rank + 1]]))

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[int]) -> PendingTransfer:
        self._traffic.count(remote_bytes(tensor, cuts, self._rank))
        ranges = _ranges(tensor, cuts)
        longest = max(len(each) for each in ranges)
        own = tensor.new_zeros(longest)
        own[: len(ranges[self._rank])] = ranges[self._rank]
        rows = tensor.new_empty(self._world * longest)
        work = ALL_GATHER(rows, own, group=self._group, async_op=True)
        pending = PendingCollective([work], self._traffic, "gather")

        def fill() -> None:
            for each, row in zip(ranges, rows.view(self._world, longest), strict=True):
                each.copy_(row[: len(each)])

        return _CompletedWith(pending, fill)


class DeviceCollectives:
    """The device's own collectives: for even shards those made for it, else the forms that take a list, which NCCL
    sends as one group of reductions or broadcasts."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._group, self._traffic, self._rank = group, traffic, dist.get_rank(group)

    def reduce_scatter(self, tensor: torch.Tensor, cuts: Sequence[int], into: torch.Tensor) -> PendingTransfer:
        self._traffic.count(remote_bytes(tensor, cuts, self._rank))
        with phase("reduce"):
            if _even(cuts):
                work = REDUCE_SCATTER(into, tensor, group=self._group, async_op=True)
            else:
                work = dist.reduce_scatter(into, _ranges(tensor, cuts), group=self._group, async_op=True)
        return PendingCollective([work], self._traffic, "reduce")

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[int]) -> PendingTransfer:
        self._traffic.count(remote_bytes(tensor, cuts, self._rank))
        ranges = _ranges(tensor, cuts)
        with phase("gather"):
            if _even(cuts):
                work = ALL_GATHER(tensor, ranges[self._rank], group=self._group, async_op=True)
            else:
                work = dist.all_gather(ranges, ranges[self._rank], group=self._group, async_op=True)
        return PendingCollective([work], self._traffic, "gather")


class HostStagedCollectives:
    """The ring for tensors of an accelerator: copied to memory of the host, moved, and copied back.

    Beginning and waiting hold the calling thread until the device has copied; they use the thread's current stream.
    """

    def __init__(
        self, ring: RingCollectives | TwoLevelCollectives | CompressedCollectives, overwrites_own: bool = False
    ) -> None:
        """`overwrites_own`: what is gathered replaces the own range, too."""
        self._ring, self._overwrites_own = ring, overwrites_own

    def reduce_scatter(self, tensor: torch.Tensor, cuts: Sequence[int], into: torch.Tensor) -> PendingTransfer:
        host, own = _host_like(tensor), _host_like(into)
        host.copy_(tensor)
        return _CompletedWith(self._ring.reduce_scatter(host, cuts, own), lambda: into.copy_(own))

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[int]) -> PendingTransfer:
        host, rank = _host_like(tensor), self._ring.rank
        host[cuts[rank] : cuts[rank + 1]].copy_(tensor[cuts[rank] : cuts[rank + 1]])
        moving = self._ring.all_gather(host, cuts)

        def fill() -> None:
            others = (slice(0, cuts[rank]), slice(cuts[rank + 1], cuts[-1]))
            for part in (slice(0, cuts[-1]),) if self._overwrites_own else others:
                tensor[part].copy_(host[part])

        return _CompletedWith(moving, fill)


class _CompletedWith:
    """A transfer, and what is done once with its result."""

    def __init__(self, arriving: PendingTransfer, after: Callable[[], object]) -> None:
        self._arriving: PendingTransfer | None = arriving
        self._after = after

    def wait(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
            self._after()
            self._arriving = None


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    # Locked in memory the device copies it at its full speed; torch keeps such memory for the next of the same size.
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")


def _ranges(tensor: torch.Tensor, cuts: Sequence[int]) -> list[torch.Tensor]:
    return [tensor[start:stop] for start, stop in pairwise(cuts)]


def _even(cuts: Sequence[int]) -> bool:
    return len({stop - start for start, stop in pairwise(cuts)}) == 1


# -------------------------------------------------------------------------------------------------------------- routes
# How the sharded engine's values travel: which transfers, over which groups, and in how many bytes.


@dataclass(frozen=True)
class Routes:
    """How values move between the ranks that hold a copy of the state together, of parameters that are trained and of
    those that are frozen, and how sums continue over the copies (`sum_over_replicas`, in place; None: there is one
    copy).

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


def make_expert_routes(mesh: Mesh, traffic: Traffic) -> Routes:
    """Those of experts, among the ranks of a mesh that hold the same ones."""
    copies = mesh.extra.axes[EXPERT_COPIES]
    places = mesh.topology.subset(mesh.axes.copies_with_experts_of(mesh.rank, mesh.world))
    moves = make_uneven_collectives(copies.group, traffic, mesh.device, places)
    whole = functools.partial(wire_bytes_per_element, compress=NO_COMPRESSION)
    return Routes(moves, moves, None, whole, whole)


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
