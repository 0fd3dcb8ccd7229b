"""What a search may choose: degrees of parallelism that come out even, and what is held fixed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.work import StepWork

FEW_STAGES = 8  # stages up to which every number is tried
ROW_PART = 1024  # positions of a rank's part of a row, of which fewer are not tried


@dataclass(frozen=True)
class SearchSpace:
    """What may be chosen: pairs of a tensor and a pipeline degree, degrees of context and of expert parallelism, and a
    field of Choice to one value in `pins`; `shares` and `state` may be "even"."""

    degrees: tuple[tuple[int, int], ...] = ((1, 1),)
    contexts: tuple[int, ...] = (1,)
    experts: tuple[int, ...] = (1,)
    pins: Mapping[str, Any] = field(default_factory=dict)
    use_all_devices: bool = False  # all devices in the order they are in, since they are there already


def list_degrees(work: StepWork, cluster: ClusterSpec, asked: int = 0) -> Iterator[tuple[int, int]]:
    """Pairs of a tensor and a pipeline degree that come out even: slices of all heads and channels on one node, and no
    more stages than layers. Of more than FEW_STAGES, powers of two and three times such, as many as there are layers,
    and the number that is `asked` for: the same for all clusters, as more devices are never to be a loss."""
    for tensor in range(1, max(group.per_node for group in cluster.groups) + 1):
        divides = work.heads % tensor == 0 and (work.ffn % tensor == 0 or tensor <= work.experts)
        heads = work.kv_heads % tensor == 0 or tensor % work.kv_heads == 0
        if divides and heads and any(group.per_node % tensor == 0 for group in cluster.groups):
            for pipeline in range(1, min(work.layers, cluster.devices // tensor) + 1):
                usual = pipeline <= FEW_STAGES or pipeline // (pipeline & -pipeline) in (1, 3)
                if usual or pipeline in (work.layers, asked):
                    yield tensor, pipeline


def list_row_degrees(work: StepWork, cluster: ClusterSpec) -> dict[str, tuple[int, ...]]:
    """Degrees of context and of expert parallelism worth trying: powers of two, as slices of at least ROW_PART
    positions, and no more than there are devices and experts."""
    most = {"context": work.seq_len // ROW_PART, "expert": work.experts}
    most = {axis: max(1, min(cluster.devices, degree)) for axis, degree in most.items()}
    return {axis: tuple(1 << power for power in range(degree.bit_length())) for axis, degree in most.items()}


def limit_degrees(space: SearchSpace, known: Sequence[LayoutChoice]) -> SearchSpace:
    """The space with degrees of the `known` layouts, of which the first is the best, and those below the best one's."""
    seen, best = {(each.tensor, each.pipeline) for each in known}, known[0]
    kept = [
        (tensor, pipeline)
        for tensor, pipeline in space.degrees
        if (tensor, pipeline) in seen or (tensor <= best.tensor and pipeline <= best.pipeline)
    ]
    contexts, experts = max(each.context for each in known), max(each.expert for each in known)
    return replace(
        space,
        degrees=tuple(kept) or space.degrees,
        contexts=tuple(each for each in space.contexts if each <= contexts) or space.contexts,
        experts=tuple(each for each in space.experts if each <= experts) or space.experts,
    )


def only_degrees(space: SearchSpace, choice: LayoutChoice) -> SearchSpace:
    """The space with the degrees of one layout."""
    degrees = (choice.tensor, choice.pipeline)
    return replace(space, degrees=(degrees,), contexts=(choice.context,), experts=(choice.expert,))
