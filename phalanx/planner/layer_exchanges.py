"""What ranks send each other inside a layer, in bytes and in seconds: tensor, context and expert parallelism.

Exchanges of context parallelism are those of `layout.context_exchange` for even slices of rows of one document; those
of experts assume that each expert is chosen equally often, as balancing has it.
"""

from dataclasses import dataclass
from functools import cache

from phalanx.layout.context_exchange import AttentionShape, count_exchanged_elements
from phalanx.layout.context_slices import count_keys_received, slice_in_pairs
from phalanx.planner import compute_cost, link_cost
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.compute_cost import LayerCost
from phalanx.planner.device_catalog import CostConstants, DeviceKind
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.link_cost import RingPlacement
from phalanx.planner.work import StepWork

COUNT_BYTES = 8  # of how many rows an expert is sent


@dataclass(frozen=True)
class LayerRings:
    """Where the ranks are that a device exchanges with inside a layer; None: it does not."""

    tensor: RingPlacement | None = None
    context: RingPlacement | None = None
    expert: RingPlacement | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What of them a layer's time depends on."""
        rings = (self.tensor, self.context, self.expert)
        return tuple(ring and (ring.nodes, ring.concurrent_rings, ring.kind.name) for ring in rings)


# --------------------------------------------------------------------------------------------------------------- bytes


def context_bytes(work: StepWork, choice: LayoutChoice) -> tuple[float, float, float]:
    """Bytes that the ranks of a context group send each other in a layer for one sequence, in the forward and in the
    backward pass, as a mean over layers; and the part of the rank that receives most."""
    by, tensor = work.find_exchange(choice.tensor, choice.context), choice.tensor
    at = by, work.seq_len, choice.context, work.attention_shape(tensor)
    multiple = tensor if choice.sequence else 1
    whole, share = _count_elements(*at, None, multiple), work.windowed_share
    near = _count_elements(*at, work.window, multiple) if share else whole
    both = zip(near[:2], whole[:2], strict=True)
    forward, backward = (work.width * (share * windowed + (1.0 - share) * full) for windowed, full in both)
    return forward, backward, max(near[2], whole[2])


@cache
def _count_elements(
    by: str, length: int, ranks: int, shape: AttentionShape, window: int | None, multiple: int
) -> tuple[int, int, float]:
    even = (1.0,) * ranks
    slices = slice_in_pairs(length, even, multiple)
    forward, backward = count_exchanged_elements(by, slices, shape, even, window=window)
    keys = [count_keys_received(slices, rank, window=window) for rank in range(ranks)] if by != "heads" else [1] * ranks
    return forward, backward, max(keys) / max(1, sum(keys))


def expert_bytes(work: StepWork, choice: LayoutChoice, rows: float) -> tuple[float, float]:
    """Bytes that a rank sends in a layer for `rows` sequences, in the forward and in the backward pass, as a mean over
    layers: a row to each chosen expert that is elsewhere and one back for it, after how many there are. Tensor ranks
    send those of their part of the tokens."""
    elsewhere = 1.0 - 1.0 / choice.expert_ranks
    tokens = rows * work.seq_len / choice.tensor
    sent = 2.0 * elsewhere * tokens * work.routed * work.hidden * work.gather_bytes
    return sent + elsewhere * work.router_rows * COUNT_BYTES, sent


# ------------------------------------------------------------------------------------------------------------- seconds


def find_layer_cost(
    work: StepWork, kind: DeviceKind, choice: LayoutChoice, rings: LayerRings, rows: float, cluster: ClusterSpec,
    constants: CostConstants,
) -> LayerCost:  # fmt: skip
    """The passes of a block, of the embedding and of the head on a device of `kind`, for `rows` sequences."""
    at = (work, kind, choice, rows, constants)
    block, embedding, head = (
        compute_cost.block_pass(*at),
        compute_cost.embedding_pass(*at),
        compute_cost.head_pass(*at),
    )
    exchange_s = calls_s = 0.0
    if (ring := rings.tensor) is not None:
        moved = rows * work.seq_len * work.hidden * work.width
        # Of attention and the feed-forward part; with `sequence` tokens of experts are a rank's own already.
        pairs = 1.0 + (work.cut_share if choice.sequence else 1.0)
        exchange_s = pairs * link_cost.all_reduce_s(moved, ring, cluster, constants)
        # Hosts are late by chance, and a device sees it where its queue has run dry; a CPU has no queue.
        late_s = pairs * link_cost.skew_s(ring, constants)
        if kind.on_host:
            exchange_s += late_s
        else:
            calls_s = pairs * compute_cost.COLLECTIVE_CALLS * constants.launch_s + late_s
    more_forward = more_backward = 0.0
    if rings.context is not None:
        more_forward, more_backward = _context_s(*at, rings.context, cluster)
    if rings.expert is not None:
        # The host waits for the device before each, to know the sizes, so that its calls are hidden behind nothing.
        call_s = link_cost.skew_s(rings.expert, constants)
        call_s += 0.0 if kind.on_host else compute_cost.COLLECTIVE_CALLS * constants.launch_s
        more_forward, more_backward = (
            more + link_cost.all_to_all_s(sent, rings.expert, cluster, constants) + calls * call_s
            for more, sent, calls in zip(
                (more_forward, more_backward), expert_bytes(work, choice, rows), (3, 2), strict=True
            )
        )
    again = 1.0 if choice.recompute == "full" else 0.0
    alone = compute_cost.overlap_host_s(block.forward_s, block.host_forward_s, constants)
    alone += compute_cost.overlap_host_s(block.backward_s, block.host_backward_s, constants)
    forward = more_forward + compute_cost.overlap_host_s(
        block.forward_s + exchange_s, block.host_forward_s + calls_s, constants
    )
    backward = more_backward + again * more_forward
    backward += compute_cost.overlap_host_s(
        block.backward_s + (1.0 + again) * exchange_s, block.host_backward_s + (1.0 + again) * calls_s, constants
    )
    waits_s = max(0.0, forward + backward - alone)
    return LayerCost(forward, backward, waits_s, exchange_s, calls_s, embedding, head)


def _context_s(
    work: StepWork, kind: DeviceKind, choice: LayoutChoice, rows: float, constants: CostConstants,
    ring: RingPlacement, cluster: ClusterSpec,
) -> tuple[float, float]:  # fmt: skip
    """Seconds that a context group's exchanges make a forward and a backward pass longer: of `ring` what the attention
    to other ranks' keys does not hide, and what carrying them takes from it; of the others all."""
    by, found = work.find_exchange(choice.tensor, choice.context), []
    *both, busiest = context_bytes(work, choice)
    others = 1.0 - 1.0 / ring.ranks
    rings = ring.ranks - 1
    calls = {"gather": (1, 1), "heads": (2, 2), "ring": (rings, 2 * rings)}[by]
    slower = link_cost.compute_slowdown(kind, ring.nodes > 1, cluster, constants)
    attends = compute_cost.attention_s(work, kind, choice, rows, constants)
    for sent, count, attention in zip(both, calls, attends, strict=True):
        # Of all that the group receives, for rows of which `rows` is one rank's part.
        received = busiest * sent * rows * choice.context
        travels = link_cost.all_to_all_s(received, ring, cluster, constants)
        hidden = min(travels, others * attention) if by == "ring" else 0.0
        late = count * link_cost.skew_s(ring, constants)
        late += 0.0 if kind.on_host else count * compute_cost.COLLECTIVE_CALLS * constants.launch_s
        found.append(travels - hidden + slower * hidden + late)
    return found[0], found[1]
