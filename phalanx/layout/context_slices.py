"""Context parallelism: which positions of each row a rank computes, and which keys of other ranks it needs. Pure.

A row of S positions is cut into contiguous pieces, each owned by one rank; all rows of a micro-batch are cut alike.
Slices may be unequal, in proportion to the ranks' speeds, and empty. There are two ways to cut:

- `slice_in_pairs` for rows of one document: positions i and S - 1 - i attend to S + 1 keys together, so with n such
  pairs a rank's tokens, memory and attention are all in proportion to n. Equal n is the usual zigzag (Brandon et al.,
  "Striped Attention", 2023, on the imbalance of contiguous slices).
- `slice_by_work` for rows of several documents: contiguous slices of equal work, so that few documents lie on a border
  and most keys stay where they are.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

Documents = Sequence[Sequence[int]]  # of each row the offsets of its documents, from 0 to the row's length
BAND_MIN = 128  # least queries of one band of a window: fewer make products too small


@dataclass(frozen=True)
class ContextSlices:
    """Slices of rows of `length` positions: `pieces` are (start, stop, rank), not empty, in order, and adjoin."""

    length: int
    ranks: int
    pieces: tuple[tuple[int, int, int], ...]

    def ranges_of(self, rank: int) -> list[range]:
        """The positions of a rank, in order."""
        return [range(start, stop) for start, stop, owner in self.pieces if owner == rank]

    def count_of(self, rank: int) -> int:
        """How many positions a rank has."""
        return sum(map(len, self.ranges_of(rank)))

    @property
    def counts(self) -> list[int]:
        """How many positions each rank has."""
        return [self.count_of(rank) for rank in range(self.ranks)]


def split_in_proportion(total: int, shares: Sequence[float]) -> list[int]:
    """Split `total` in proportion to `shares`, of which some may be 0, by largest remainder; of equals the first gains.

    >>> split_in_proportion(8, [3.0, 1.0, 0.0])
    [6, 2, 0]
    """
    assert total >= 0 and min(shares) >= 0 and sum(shares) > 0, (total, shares)
    exact = [share / sum(shares) * total for share in shares]
    counts = [int(each) for each in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (shares[rank] == 0, counts[rank] - exact[rank]))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return counts


@cache
def slice_in_pairs(length: int, shares: tuple[float, ...], multiple: int = 1) -> ContextSlices:
    """Cut a row of one document into mirrored pairs of positions, in proportion to `shares`; the first rank has the
    outermost, and the last one with a share the middle, of an odd length with the position there. Each has a multiple
    of `multiple` positions, as `length` must be."""
    assert length % multiple == 0, (length, multiple)
    pairs = multiple // math.gcd(2, multiple)
    counts = [pairs * count for count in split_in_proportion(length // 2 // pairs, shares)]
    inner = max(rank for rank, share in enumerate(shares) if share > 0)
    left, right, start = [], [], 0
    for rank, count in enumerate(counts):
        left.append((start, start + count, rank))
        right.append((length - start - count, length - start, rank))
        start += count
    pieces = [*left, (start, length - start, inner), *reversed(right)]
    return ContextSlices(length, len(shares), _join(pieces))


def slice_by_work(
    documents: Documents, token_work: float, shares: Sequence[float], window: int | None, multiple: int = 1
) -> ContextSlices:
    """Cut rows of several documents into contiguous slices whose work is in proportion to `shares`, each of a multiple
    of `multiple` positions.

    A position's work is `token_work`, that of its matrix products, and 1 for each key that it attends to, in all rows;
    with a `window` it attends to so many at most.
    """
    length = documents[0][-1]
    assert length % multiple == 0, (length, multiple)
    spans = [(begin, end - begin) for offsets in documents for begin, end in itertools.pairwise(offsets)]

    def work_before(position: int) -> float:
        inside = (min(max(position - begin, 0), count) for begin, count in spans)
        return len(documents) * token_work * position + sum(_pairs_of_first(count, window) for count in inside)

    def middle(first: int) -> float:  # positions that stay together belong to who reaches their middle
        return (work_before(first) + work_before(first + multiple)) / 2

    whole, begun, cuts = work_before(length), 0.0, [0]
    for share in shares[:-1]:
        begun += share
        aim = begun / sum(shares) * whole
        reached = bisect.bisect_right(range(0, length, multiple), aim, key=middle) * multiple
        cuts.append(cuts[-1] if share == 0 else reached)
    # What rounding leaves over is the last one's that has a share.
    last = max(rank for rank, share in enumerate(shares) if share > 0)
    cuts[last + 1 :] = [length] * (len(shares) - last)
    return ContextSlices(
        length, len(shares), _join([(cuts[rank], cuts[rank + 1], rank) for rank in range(len(shares))])
    )


def _pairs_of_first(count: int, window: int | None) -> int:
    """(Query, key) pairs of the first `count` positions of a document."""
    near = count if window is None else min(count, window)
    return near * (near + 1) // 2 + (count - near) * near


def _join(pieces: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Without empty pieces, and with neighbours of one rank as one."""
    found: list[tuple[int, int, int]] = []
    for start, stop, rank in pieces:
        if start == stop:
            continue
        if found and found[-1][2] == rank:
            found[-1] = (found[-1][0], stop, rank)
        else:
            found.append((start, stop, rank))
    return tuple(found)


# ------------------------------------------------------------------------------------------------------ who needs what


@dataclass(frozen=True)
class Tile:
    """A product of queries and keys without a gap: of `rows`, of a rank's own positions [queries], and of a block's
    keys [keys]; `first_query` and `first_key` are their first positions in the row. `kind`: all keys are seen ("full"),
    the first query is the first key ("causal"), or a mask says which ("band")."""

    rows: slice
    queries: slice
    keys: slice
    first_query: int
    first_key: int
    kind: str


@dataclass(frozen=True)
class KeyBlock:
    """Keys of one rank that another needs: `count` of them, which are [parts] of the owner's positions, in order; and
    the products that the other makes with them."""

    owner: int
    count: int
    parts: tuple[slice, ...]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """What a rank does in attention: `own` keys first, then the `others`, of the ranks before it, the nearest first.
    `sends`: by rank, which parts of the own positions it needs, as its block of this rank says."""

    own: KeyBlock
    others: tuple[KeyBlock, ...]
    sends: tuple[tuple[slice, ...], ...]

    @property
    def received(self) -> int:
        """Keys of other ranks."""
        return sum(block.count for block in self.others)


def plan_attention(
    slices: ContextSlices, rank: int, rows: int, documents: Documents | None = None, window: int | None = None
) -> AttentionPlan:
    """What `rank` computes and exchanges in causal attention over `rows` rows, of one document each without
    `documents`. Keys that no query sees are not sent."""
    assert documents is None or len(documents) == rows
    others = [(rank - distance) % slices.ranks for distance in range(1, slices.ranks)]
    return AttentionPlan(
        _plan_block(slices, rank, rank, rows, documents, window),
        tuple(_plan_block(slices, rank, other, rows, documents, window) for other in others),
        tuple(
            () if other == rank else _find_needed(slices, other, rank, documents, window)[1]
            for other in range(slices.ranks)
        ),
    )


def count_keys_received(
    slices: ContextSlices, rank: int, documents: Documents | None = None, window: int | None = None
) -> int:
    """Keys of other ranks that `rank` needs, in each of a micro-batch's rows.

    In a layer's forward pass it receives these keys and values, in `rows` rows, key heads, 2 x the head's width; it
    returns as much in the backward pass, in which `ring` receives them once more.
    """
    others = (other for other in range(slices.ranks) if other != rank)
    return sum(len(each) for other in others for each in _find_needed(slices, rank, other, documents, window)[0])


def _first_key(query: int, documents: Documents | None, window: int | None) -> int:
    """The first key that a query sees in any row."""
    first = 0
    if documents is not None:
        first = min(offsets[bisect.bisect_right(offsets, query) - 1] for offsets in documents)
    return first if window is None else max(first, query - window + 1)


def _find_needed(
    slices: ContextSlices, rank: int, owner: int, documents: Documents | None, window: int | None
) -> tuple[list[range], tuple[slice, ...]]:
    """The positions of `owner` that `rank` needs, and where they are among those of the owner."""
    seen = [range(_first_key(each.start, documents, window), each.stop) for each in slices.ranges_of(rank)]
    ranges, parts, at = [], [], 0
    for piece in slices.ranges_of(owner):
        both = [range(max(piece.start, each.start), min(piece.stop, each.stop)) for each in seen]
        both = [each for each in both if len(each)]
        if both:  # a piece of another rank lies before a range or behind it, so all that is seen of it ends it
            needed = range(min(each.start for each in both), max(each.stop for each in both))
            ranges.append(needed)
            parts.append(slice(at + needed.start - piece.start, at + needed.stop - piece.start))
        at += len(piece)
    return ranges, tuple(parts)


def _plan_block(
    slices: ContextSlices, rank: int, owner: int, rows: int, documents: Documents | None, window: int | None
) -> KeyBlock:
    ranges, parts = _find_needed(slices, rank, owner, documents, window)
    if rank == owner:
        ranges = slices.ranges_of(rank)
        parts = (slice(0, slices.count_of(rank)),)
    tiles = []
    first_query = 0
    for queries in slices.ranges_of(rank):
        first_key = 0
        for keys in ranges:
            for some, fragment, begin in _fragments(queries, rows, documents):
                for kind, q, k in _rectangles(fragment, range(max(keys.start, begin), keys.stop), window):
                    tiles.append(
                        Tile(
                            some,
                            slice(first_query + q.start - queries.start, first_query + q.stop - queries.start),
                            slice(first_key + k.start - keys.start, first_key + k.stop - keys.start),
                            q.start,
                            k.start,
                            kind,
                        )
                    )
            first_key += len(keys)
        first_query += len(queries)
    return KeyBlock(owner, sum(map(len, ranges)), parts, tuple(tiles))


def _fragments(queries: range, rows: int, documents: Documents | None) -> Iterator[tuple[slice, range, int]]:
    """(rows, positions of one document among `queries`, where that document begins)."""
    if documents is None:
        yield slice(0, rows), queries, 0
        return
    for row, offsets in enumerate(documents):
        for begin, end in itertools.pairwise(offsets):
            if max(begin, queries.start) < min(end, queries.stop):
                yield slice(row, row + 1), range(max(begin, queries.start), min(end, queries.stop)), begin


def _rectangles(queries: range, keys: range, window: int | None) -> Iterator[tuple[str, range, range]]:
    """(kind, queries, keys) of the products of positions of one document; `keys` end before the queries, or contain
    them, or begin behind them."""
    keys = range(keys.start, min(keys.stop, queries.stop))
    before = range(keys.start, min(keys.stop, queries.start))
    if len(before):
        if window is None or queries.stop - before.start <= window:
            yield "full", queries, before
        else:
            for part in _bands(queries, window):
                near = range(max(before.start, part.start - window + 1), before.stop)
                if len(near):
                    yield "full" if part.stop - near.start <= window else "band", part, near
    if keys.stop <= queries.start or not len(keys):
        return
    if window is None or len(queries) <= window:
        yield "causal", queries, queries
        return
    for part in _bands(queries, window):
        near = range(max(queries.start, part.start - window + 1), part.stop)
        yield "band", part, near


def _bands(queries: range, window: int) -> Iterator[range]:
    step = max(window, BAND_MIN)
    for start in range(queries.start, queries.stop, step):
        yield range(start, min(start + step, queries.stop))
