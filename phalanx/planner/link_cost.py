"""Seconds of collectives, by where their ranks are: within a node, or over several. Pure floats."""

import math
from dataclasses import dataclass

from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.constants import CostConstants
from phalanx.planner.device_catalog import DeviceKind

# Passes over memory for a byte that a CPU hands on: read and written on its way out, and on its way in; and read with
# what is there, and written, where it is added up.
MEMORY_PASSES = 7.0


@dataclass(frozen=True)
class RingPlacement:
    """`ranks` of a collective on `nodes` nodes, and how many such collectives leave each node at the same time."""

    ranks: int
    nodes: int
    concurrent_rings: int
    kind: DeviceKind  # of the device whose link is slowest


def ring_of(first: int, ranks: int, stride: int, cluster: ClusterSpec) -> RingPlacement:
    """The ring of `ranks` devices from `first` on, every `stride`-th; its neighbours' rings run at the same time."""
    last = first + (ranks - 1) * stride
    slowest, most = cluster.kind_of(first), 1
    for (begin, behind, group), crowd in zip(cluster.spans, cluster.node_sizes, strict=True):
        if begin <= last and first < behind:
            most = max(most, crowd)
            if group.kind.link_bytes_per_s < slowest.link_bytes_per_s:
                slowest = group.kind
    nodes = min(cluster.node_of(last) - cluster.node_of(first) + 1, ranks)
    # A node's devices at one distance from each other: as many rings as there are members of a stride on a node.
    return RingPlacement(ranks, nodes, min(stride, most), slowest)


def reduce_scatter_s(
    moved_bytes: float, ring: RingPlacement, cluster: ClusterSpec, constants: CostConstants, shorter: float = 1.0
) -> float:
    """Seconds of a reduce-scatter, or an all-gather, of a tensor of `moved_bytes` over the ring.

    Each rank passes on all but its own part, (n - 1) / n of the bytes (Thakur et al. 2005), within the node at its
    link's speed and between nodes at the network's, which rings beside it share; both at once, so the slower counts.
    To that comes a link's latency for each step of the ring. `shorter`: what crosses nodes has so much of its bytes.
    """
    if ring.ranks < 2 or not moved_bytes:
        return 0.0
    kind, nodes = ring.kind, ring.nodes
    local = ring.ranks / nodes
    seconds = hops = 0.0
    if local > 1.0:
        passed = moved_bytes * (1.0 - 1.0 / local) if nodes > 1 else moved_bytes * (1.0 - 1.0 / ring.ranks)
        seconds = passed / (kind.link_bytes_per_s * constants.near_share)
        hops = (ring.ranks - nodes) * kind.link_latency_s
    if nodes > 1:
        passed = moved_bytes * (1.0 - 1.0 / nodes) * ring.concurrent_rings * 8.0 * shorter
        seconds = max(seconds, passed / (cluster.between_bits_per_s * constants.far_share))
        hops += (nodes - 1) * cluster.between_latency_s
    return seconds + hops


def all_reduce_s(moved_bytes: float, ring: RingPlacement, cluster: ClusterSpec, constants: CostConstants) -> float:
    """Seconds of an all-reduce: a reduce-scatter and an all-gather (Thakur et al. 2005)."""
    return 2.0 * reduce_scatter_s(moved_bytes, ring, cluster, constants)


def skew_s(ring: RingPlacement, constants: CostConstants) -> float:
    """Seconds that a collective which is waited for waits itself, until the last of its ranks has come: the expected
    maximum of n like delays grows about as the logarithm of n (David and Nagaraja 2003, extremes)."""
    return constants.skew_s * doublings(ring.ranks)


def compute_slowdown(kind: DeviceKind, crosses: bool, cluster: ClusterSpec, constants: CostConstants) -> float:
    """Of the time of a collective that computation hides, by how much computation is longer.

    An accelerator's collectives take multiprocessors and memory from it for as long as they last. A CPU carries each
    byte that it sends and receives itself, however long the bytes are under way. `crosses`: it leaves the node.
    """
    if not kind.on_host:
        return constants.interference
    rate = kind.link_bytes_per_s * constants.near_share
    if crosses:
        rate = min(rate, cluster.between_bits_per_s / 8.0 * constants.far_share)
    return min(1.0, cpu_transfer_s(rate, kind, constants))


def cpu_transfer_s(sent_bytes: float, kind: DeviceKind, constants: CostConstants) -> float:
    """Seconds that a CPU does not compute since it sends so many bytes, and gets as many: as was measured, or COPIES of
    them at the speed of its memory, into and out of the system's buffers and to add them up."""
    if kind.carries_s_per_byte is not None:
        return sent_bytes * kind.carries_s_per_byte
    return MEMORY_PASSES * sent_bytes / (kind.memory_bytes_per_s * constants.memory_share)


def send_s(
    moved_bytes: float, near: bool, kind: DeviceKind, cluster: ClusterSpec, beside: int, constants: CostConstants
) -> float:
    """Seconds of handing `moved_bytes` to one other rank: of the next stage, on the same node or on another."""
    if near:
        return moved_bytes / (kind.link_bytes_per_s * constants.near_share) + kind.link_latency_s
    rate = cluster.between_bits_per_s * constants.far_share / 8.0
    return moved_bytes * beside / rate + cluster.between_latency_s


def doublings(ranks: int) -> float:
    """Doublings from one to `ranks`."""
    return math.log2(ranks) if ranks > 1 else 0.0
