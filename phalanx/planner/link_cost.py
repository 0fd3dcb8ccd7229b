"""The cost of collectives in seconds, by the place of their ranks: within a node, or across nodes. Pure floats."""

import math
from dataclasses import dataclass

from phalanx.layout.comm_schedule import PART_BYTES, PARTS
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.device_catalog import CostConstants, DeviceKind
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.work import StepWork, find_trained_share

# Memory accesses of a CPU per byte transferred: read and written on its way out, and on its way in; and for a sum read
# with the other operand, and written.
MEMORY_PASSES = 7.0


@dataclass(frozen=True)
class ReplicationCost:
    """Cost of replicas on another node: bytes of each `every`th step, and the average seconds added to a step,
    which are part of `communication`."""

    every: int
    node_bytes: float
    waits_s: float


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
    # A node's devices at one distance from each other form as many rings as the stride has members on a node.
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


def all_to_all_s(sent_bytes: float, ring: RingPlacement, cluster: ClusterSpec, constants: CostConstants) -> float:
    """Seconds of an all-to-all in which each rank of the ring sends `sent_bytes` to the others, as much to each: those
    to its own node at its link's speed, and those of all its node's ranks to other nodes at the network's."""
    if ring.ranks < 2 or not sent_bytes:
        return 0.0
    kind, nodes = ring.kind, ring.nodes
    local, each = ring.ranks / nodes, sent_bytes / (ring.ranks - 1)
    seconds = each * (local - 1.0) / (kind.link_bytes_per_s * constants.near_share)
    hops = (ring.ranks - nodes) * kind.link_latency_s
    if nodes > 1:
        leaving = each * (ring.ranks - local) * local * ring.concurrent_rings * 8.0
        seconds = max(seconds, leaving / (cluster.between_bits_per_s * constants.far_share))
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
    """Compute seconds that a CPU loses by sending and receiving so many bytes: as measured, or COPIES of them at
    the speed of its memory, into and out of system buffers and to add them up."""
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


# ------------------------------------------------------------------------------------------------------- exchange cost
# What parameters, gradients and state cost in a step: how long they travel, how much of it is hidden, and the update.
# Pure floats. For this project's own engine these are the closed forms of `layout.comm_schedule` for equal buckets: a
# test holds them against its bound and its plan.


# Over what an update on a CPU writes to another place, so that the step before stays whole: the old is read, and the
# new place fetched before it is written.
COMMIT_PASSES = 3.0
UNDER_WAY = 2  # parts of transfers at a time


@dataclass(frozen=True)
class CommTime:
    """Seconds of a step: of communication that computation waits for, and of that which it does not."""

    exposed_s: float
    hidden_s: float


def update_s(work: StepWork, kind: DeviceKind, own: float, constants: CostConstants) -> float:
    """Seconds of AdamW on `own` parameters: it only moves data. Gradient, master weight and moments are read, the
    latter two written, the weight to compute with written; and the gradient is read for its norm and cleared."""
    moved = 3.0 * work.reduce_bytes + 2.0 * (work.master_bytes + work.state_bytes) + work.gather_bytes
    return find_trained_share(work) * own * moved / (kind.memory_bytes_per_s * constants.memory_share * kind.update)


def commit_s(kind: DeviceKind, state_bytes: float, window_s: float, constants: CostConstants) -> float:
    """Seconds added to a step by keeping its state in memory that outlives the ranks.

    A CPU's update writes it to another slot (measured in docs/benchmarks.md). An accelerator's is copied to the host
    while the next step computes for `window_s`, and the next update waits for the remaining copy.
    """
    if kind.on_host:
        return COMMIT_PASSES * state_bytes / (kind.memory_bytes_per_s * constants.memory_share * kind.update)
    return max(0.0, state_bytes / kind.host_bytes_per_s - window_s)


def estimate_comm_time(
    work: StepWork, choice: LayoutChoice, parameters: float, layers: int,
    rings: tuple[RingPlacement, RingPlacement, float], owns: float, passes_s: tuple[float, float], micro_batches: int,
    cluster: ClusterSpec, constants: CostConstants,
) -> CommTime:  # fmt: skip
    """Of a rank that holds a stage's `parameters`, whose pass takes `passes_s` forward and backward.

    `rings`: over which a copy of the state is sharded, over which its copies are kept alike, and the least share of the
    first. A ring moves all but the least share (Thakur et al. 2005 for even ones).
    """
    shard, spread, least = rings
    _, backward = passes_s
    units = layers + 1  # blocks, and the edges as one
    fewer = (1.0 - least) / (1.0 - 1.0 / shard.ranks) if shard.ranks > 1 else 1.0
    moving = 1.0  # the part of experts that travels: all but an own part of what each of their copies has
    if choice.expert > 1:
        moving = (1.0 - choice.expert / shard.ranks) / (1.0 - 1.0 / shard.ranks) / choice.expert
        parameters -= layers * work.expert_parameters / choice.tensor * (1.0 - moving)
    trained = parameters * find_trained_share(work)

    def sharded(elements: float, each_bytes: float, ring: RingPlacement, operations: int) -> float:
        """Seconds of a tensor that is sent in so many operations."""
        shorter = 1.0 if work.far_bytes is None else min(1.0, work.far_bytes / each_bytes)
        alone_s = reduce_scatter_s(elements * each_bytes / operations, ring, cluster, constants, shorter)
        return operations * (alone_s + skew_s(ring, constants))

    if choice.engine == "megatron" or choice.zero == 0 or choice.engine == "ddp":
        operations = units if choice.engine == "ddp" else 1
        reduce = sharded(trained, work.reduce_bytes, shard, operations)
        gather = sharded(trained, work.gather_bytes if choice.zero else work.reduce_bytes, shard, operations)
        moves = reduce + gather
        if choice.engine == "megatron":
            return CommTime(moves, 0.0)
        exposed = max(moves / units, moves - backward * (1.0 - 1.0 / units))
        return CommTime(exposed, moves - exposed)
    reduce = fewer * sharded(trained, work.reduce_bytes, shard, units)
    if spread.ranks > 1:
        reduce += 2.0 * sharded(trained * owns, work.reduce_bytes, spread, units)
    zero3 = choice.zero == 3 and choice.engine != "fsdp"
    each_bytes = work.zero3_gather_bytes(moving) if zero3 else work.gather_bytes
    gather = fewer * sharded(trained if choice.zero < 3 else parameters, each_bytes, shard, units)
    reduces = micro_batches if choice.reduce == "per_micro_batch" or choice.engine == "fsdp" else 1
    parts = min(PARTS, max(1.0, trained * work.reduce_bytes / units / PART_BYTES)) * units / UNDER_WAY
    later = parts * cluster.busy_hop_s * _hops(shard), parts * cluster.busy_hop_s * (_hops(shard) + 2 * _hops(spread))
    if choice.engine == "fsdp" or choice.zero == 3:
        regathered, again = (gather, later[0]) if choice.zero == 3 else (0.0, 0.0)
        passes = 2 if work.counts_ahead else 1  # of forward ones
        gather, ahead = passes * gather, passes * later[0]
        sent = _fetched(passes_s, gather, regathered + reduce, reduce, units, (ahead, again + later[1]))
        silent = _fetched(passes_s, gather, regathered, 0.0, units, (ahead, again))
        alone = micro_batches - reduces
        return CommTime(reduces * sent[0] + alone * silent[0], reduces * sent[1] + alone * silent[1])
    return _planned(choice.slots > 1, passes_s, reduce, gather, units, reduces, later)


def _hops(ring: RingPlacement) -> int:
    """How often a part goes from one rank to another: round the nodes, and once within them."""
    return ring.nodes - 1 + (ring.ranks > ring.nodes)


def _left(travels_s: float, room_s: float, later_s: float) -> float:
    """The exposed rest of a transfer of `travels_s` (`later_s` longer beside computation) when computation ends after
    `room_s`; it then continues alone."""
    beside_s = travels_s + later_s
    return travels_s - room_s * (travels_s / beside_s) if beside_s > room_s else 0.0


def _fetched(
    passes_s: tuple[float, float], ahead: float, behind: float, last: float, units: int,
    later_s: tuple[float, float],
) -> tuple[float, float]:  # fmt: skip
    """(exposed, hidden) seconds of a micro-batch whose blocks are fetched one ahead in each pass, and whose gradients
    leave behind each (Zhao et al. 2023).

    A block takes its computation or its communication, whichever is longer: `ahead` in the forward pass, `behind` in
    the backward pass, each by so much longer beside computation as `later_s` says. The first fetch is waited for, and
    of what leaves `last` the end.
    """
    forward, backward = passes_s
    room = 1.0 - 1.0 / units
    exposed = (ahead + last) / units + _left(ahead * room, forward, later_s[0] * room)
    exposed += _left(behind - last / units, backward, later_s[1])
    return exposed, max(0.0, ahead + behind - exposed)


def _planned(
    early: bool, passes_s: tuple[float, float], reduce: float, gather: float, units: int, reduces: int,
    later_s: tuple[float, float],
) -> CommTime:  # fmt: skip
    """This project's own order with zero 1 and 2, of equal units: what `layout.comm_schedule` is bound by.

    The link is idle in the last unit's forward and backward pass, and the first unit's reduce and gather are waited
    for. `early` may gather a bucket before the last one is reduced, so only the sum has to fit behind both passes; else
    each has to fit behind its own. `reduces`: micro-batches whose gradients are sent. `later_s`: by how much longer all
    gathers of a step, and the reduces of a micro-batch, take beside computation.
    """
    forward, backward = passes_s
    room = 1.0 - 1.0 / units
    behind = reduces * backward * room + (reduces - 1) * forward
    ahead = forward * room
    first_reduce, first_gather = reduce / units, gather / units
    gathers_later, reduces_later = later_s[0], reduces * later_s[1]
    if early:
        left = _left(reduces * reduce + gather, behind + ahead, gathers_later + reduces_later)
        exposed = max(first_reduce + first_gather, left)
    else:
        exposed = max(first_reduce, _left(reduces * reduce, behind, reduces_later))
        exposed += max(first_gather, _left(gather, ahead, gathers_later))
    return CommTime(exposed, max(0.0, reduces * reduce + gather - exposed))
