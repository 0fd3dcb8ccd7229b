"""Buckets and shards: units in order of use -> buckets -> one range of each bucket for every rank. Pure.

A bucket is the parameters of one unit that are alike in type and in whether they are trained, end to end, and padding.
Its ranges follow one another in order of rank and may differ in length or be empty. Parameters with and without weight
decay share a bucket: the update is told by name which is which, and a bucket less is a collective less.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.core.errors import ConfigError
from phalanx.layout.tensor_shards import EXPERTS

FP8_GATHERED = "fp8"  # the dtype of parameters that are gathered in FP8 (engine/fp8_gather.py)
GRANULE = 64  # elements: every range starts at a multiple, so that the fastest kernels and whole cache lines apply
# Bytes of an element on its way between nodes, by comm.compress; int8 has a scale of 2 bytes for each GRANULE.
COMPRESSED_BYTES: dict[str, float | None] = {"none": None, "bf16": 2.0, "int8": 1 + 2 / GRANULE}


@dataclass(frozen=True)
class ParameterSpec:
    """A whole parameter. `unit` uses it (\"\" is the model itself); `dtype` is what it travels in; `together`: so
    many elements in a row, a divisor of all, belong together for the update rule, and no range may cut them; `axis`:
    the ranks that share it, all of the data axis or, of experts, those with the same ones (`MeshAxes.groups`)."""

    name: str
    shape: tuple[int, ...]
    unit: str
    dtype: str
    trained: bool = True
    together: int = 1
    axis: str = "data"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def update_shape(self) -> tuple[int, ...]:
        """The shape by which update rules tell matrices from vectors: a stack of experts' biases is a vector."""
        biases = EXPERTS in self.name and self.name.endswith("_bias")
        return (self.elements,) if biases else self.shape


@dataclass(frozen=True)
class BucketMember:
    """A parameter of a bucket, and at which of the bucket's elements it starts."""

    parameter: ParameterSpec
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.parameter.elements


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of a flattened parameter that one rank owns: from element `offset` of the bucket on, in
    its part number `part`."""

    parameter: ParameterSpec
    start: int
    stop: int
    part: int
    offset: int

    @property
    def key(self) -> str:
        """A name for what is kept of it."""
        return f"{self.parameter.name}:{self.start}"


@dataclass(frozen=True)
class BucketPart:
    """What travels as one: from element `start` of the bucket on, cut into a range for each rank."""

    start: int
    cuts: tuple[int, ...]  # (0, ..., its elements): rank r owns [start + cuts[r], start + cuts[r + 1])

    @property
    def elements(self) -> int:
        return self.cuts[-1]

    @property
    def stop(self) -> int:
        return self.start + self.elements

    @property
    def link_elements(self) -> int:
        """Elements that some link must carry to reduce or to gather the part: all but the smallest range."""
        return self.elements - min(stop - start for start, stop in itertools.pairwise(self.cuts))

    def range(self, rank: int) -> tuple[int, int]:
        """The elements of the bucket that `rank` owns."""
        return self.start + self.cuts[rank], self.start + self.cuts[rank + 1]


@dataclass(frozen=True)
class Bucket:
    """Parameters one behind the other, and the parts in which they travel; the last of a small bucket may be empty."""

    unit: str
    dtype: str
    trained: bool
    members: tuple[BucketMember, ...]
    parts: tuple[BucketPart, ...]

    @property
    def axis(self) -> str:
        """As of its parameters."""
        return self.members[0].parameter.axis

    @property
    def elements(self) -> int:
        """With what it was padded by."""
        return max(part.stop for part in self.parts)

    @property
    def parameter_elements(self) -> int:
        """Elements of parameters; those behind are padding."""
        return self.members[-1].end

    @property
    def link_elements(self) -> int:
        """As of its parts."""
        return sum(part.link_elements for part in self.parts)

    @property
    def gaps(self) -> tuple[slice, ...]:
        """Elements of no parameter, between parameters and behind the last."""
        starts = [*(member.offset for member in self.members[1:]), self.elements]
        ends = (member.end for member in self.members)
        return tuple(slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def count_elements(self, rank: int) -> int:
        """Elements that `rank` owns."""
        return sum(stop - start for start, stop in (part.range(rank) for part in self.parts))

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """What `rank` owns of each parameter, part by part."""
        for number, part in enumerate(self.parts):
            first, last = part.range(rank)
            for member in self.members:
                start, stop = max(first, member.offset), min(last, member.end)
                if start < stop:
                    yield Fragment(member.parameter, start - member.offset, stop - member.offset, number, start)


def make_buckets(
    parameters: Sequence[ParameterSpec],
    weights: Sequence[float],
    parts: int = 1,
    min_part_elements: int = 1,
    isolate_parameters: bool = False,
) -> tuple[Bucket, ...]:
    """Buckets in order of use, cut so that each rank owns its part of `weights` of all of them.

    Each travels in `parts` of the same length, or as many as have `min_part_elements` elements; all in as many, but in
    no more than one of them needs. With equal weights all ranges of a part have the same length, so that collectives
    for equal shards serve, too. `isolate_parameters`: each parameter begins at a multiple of GRANULE, and no two share
    one. Raises ConfigError for weights that make no shares.
    """
    check_weights(weights)
    groups: dict[tuple[str, str, bool], list[ParameterSpec]] = {}
    for parameter in parameters:
        if parameter.elements:
            groups.setdefault((parameter.unit, parameter.dtype, parameter.trained), []).append(parameter)
    taken = [0] * len(weights)
    buckets = []
    for (unit, dtype, trained), of_bucket in groups.items():
        step = GRANULE if isolate_parameters else 1
        starts = itertools.accumulate((-(-p.elements // step) * step for p in of_bucket), initial=0)
        members = tuple(BucketMember(parameter, at) for parameter, at in zip(of_bucket, starts, strict=False))
        cut: list[BucketPart] = []
        for start, stop in _parts(members, len(weights), parts, min_part_elements):
            cuts = _cut(members, start, stop - start, weights, taken)
            if stop < members[-1].end:  # only the end is padded
                cuts = tuple(min(each, stop - start) for each in cuts)
            taken = [had + last - first for had, (first, last) in zip(taken, itertools.pairwise(cuts), strict=True)]
            cut.append(BucketPart(cut[-1].stop if cut else 0, cuts))
        buckets.append(Bucket(unit, dtype, trained, members, tuple(cut)))
    needed = 1 + max((at for bucket in buckets for at, part in enumerate(bucket.parts) if part.elements), default=0)
    return tuple(replace(bucket, parts=bucket.parts[:needed]) for bucket in buckets)


def make_buckets_by_axis(
    parameters: Sequence[ParameterSpec], weights: Mapping[str, Sequence[float]], parts: int, min_part_elements: int
) -> tuple[Bucket, ...]:
    """As `make_buckets`, of parameters of several axes, each with the `weights` of its ranks. All travel in just
    `parts`, some of which are empty, since ranks with different numbers of experts must agree on them."""
    units = list(dict.fromkeys(parameter.unit for parameter in parameters))
    found = []
    for axis, shares in weights.items():
        mine = [parameter for parameter in parameters if parameter.axis == axis]
        for bucket in make_buckets(mine, shares, parts, min_part_elements):
            empty = (BucketPart(bucket.elements, (0,) * (len(shares) + 1)) for _ in range(parts - len(bucket.parts)))
            found.append(replace(bucket, parts=(*bucket.parts, *empty)))
    return tuple(sorted(found, key=lambda bucket: units.index(bucket.unit)))


def _parts(members: Sequence[BucketMember], ranks: int, parts: int, least: int) -> Iterator[tuple[int, int]]:
    """Where the parts of a bucket begin and end; only the last that is not empty may have to be padded."""
    step, end = GRANULE * ranks, members[-1].end
    length = -(-max(-(-end // parts), least) // step) * step
    edges = [min(end, _at_row(members, length * number)) for number in range(parts)]
    yield from itertools.pairwise([*edges, end])


def check_weights(weights: Sequence[float]) -> None:
    """Raise ConfigError unless these are shares: numbers of which none is negative and one is positive."""
    if not all(0 <= weight < math.inf for weight in weights) or not sum(weights) > 0:
        raise ConfigError(
            f"weights {', '.join(f'{weight:g}' for weight in weights)} make no shares of the state; give each rank "
            "a number that is not negative, and at least one of them a positive one"
        )


def check_whole_rows(parameters: Sequence[ParameterSpec]) -> None:
    """Raise ConfigError where ranges between whole rows could cut a GRANULE, of which all is rounded together."""
    for parameter in parameters:
        if parameter.together > 1 and parameter.together % GRANULE:
            raise ConfigError(
                f"compression by int8 rounds {GRANULE} numbers together, but the update rule keeps rows of "
                f"{parameter.name} whole, which have {parameter.together}; compress by bf16, or use the optimizer adamw"
            )


def shard_cuts(
    elements: int,
    granule: int,
    weights: Sequence[float],
    room: Sequence[int] | None = None,
    taken: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Cut a bucket of `elements`, padded to a multiple of `granule`, into one range for each rank: (0, ..., end).

    Rank r owns [cuts[r], cuts[r + 1]), in proportion to `weights` to less than a granule; all cuts are multiples of
    `granule`. With weight 0 it owns nothing. `room`: elements that each may have at most; who has no room for its part
    leaves it to the others. `taken`: elements that each owns of earlier buckets; the granules left over by rounding
    down go to the rank that is farthest below its share, so that rounding averages out over many buckets (without it:
    by largest remainder). Of equals the first gains. Raises ConfigError where the bucket has more than there is room
    for.
    """
    ranks = len(weights)
    assert elements >= 0 and granule >= 1 and min(weights) >= 0 and sum(weights) > 0, (elements, granule, weights)
    pieces = -(-elements // granule)
    most = [0 if weight == 0 else pieces for weight in weights]
    if room is not None:
        most = [max(0, min(few, int(each) // granule)) for few, each in zip(most, room, strict=True)]
    if sum(most) < pieces:
        raise ConfigError(
            f"{elements} elements do not fit where ranks have room for {sum(most) * granule} of them together, in "
            f"multiples of {granule}; add devices or set memory.activations=full"
        )
    parts = _in_proportion(pieces, weights, most)
    counts = [math.floor(part) for part in parts]
    behind = [part - count for part, count in zip(parts, counts, strict=True)]
    if taken is not None:
        due = sum(taken) / granule / sum(weights)
        behind = [each + due * w - own / granule for each, w, own in zip(behind, weights, taken, strict=True)]
    heap = [(-behind[rank], rank) for rank in range(ranks) if counts[rank] < most[rank]]
    heapq.heapify(heap)
    for _ in range(pieces - sum(counts)):
        less, rank = heap[0]
        counts[rank] += 1
        if counts[rank] < most[rank]:
            heapq.heapreplace(heap, (less + 1, rank))
        else:
            heapq.heappop(heap)
    return tuple(granule * end for end in itertools.accumulate(counts, initial=0))


def _in_proportion(total: int, weights: Sequence[float], most: Sequence[int]) -> list[float]:
    """Split `total` in proportion to `weights`, with at most `most` each; the rest goes to the others."""
    full: set[int] = set()
    while True:
        left = total - sum(most[rank] for rank in full)
        whole = sum(weight for rank, weight in enumerate(weights) if rank not in full)
        parts = [
            float(most[rank]) if rank in full or not weight else left * weight / whole
            for rank, weight in enumerate(weights)
        ]
        over = {rank for rank, part in enumerate(parts) if part > most[rank]}
        if not over:
            return parts
        full |= over


def _cut(
    members: Sequence[BucketMember], start: int, elements: int, weights: Sequence[float], taken: Sequence[int]
) -> tuple[int, ...]:
    if not elements:
        return (0,) * (len(weights) + 1)
    if len(set(weights)) == 1:
        each = -(-elements // (GRANULE * len(weights))) * GRANULE
        cuts = tuple(each * rank for rank in range(len(weights) + 1))
    else:
        cuts = shard_cuts(elements, GRANULE, weights, taken=taken)
    if not any(member.parameter.together > 1 for member in members):
        return cuts
    # The ends stay: what is behind the last parameter is padding.
    inner = [min(cuts[-1], max(0, _at_row(members, start + cut) - start)) for cut in cuts[1:-1]]
    return (0, *itertools.accumulate(inner, max), cuts[-1]) if inner else cuts


def _at_row(members: Sequence[BucketMember], cut: int) -> int:
    """The nearest place to `cut` at which nothing is cut that belongs together."""
    for member in members:
        if member.offset < cut < member.end and member.parameter.together > 1:
            row = member.parameter.together
            return member.offset + min(round((cut - member.offset) / row) * row, member.parameter.elements)
    return cut
