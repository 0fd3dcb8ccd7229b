"""Splitting integers over ranks and sources. Pure: no torch, no files, no clocks.

`split` is the one that minimises the slowest: of sequences over ranks here, and of anything else that takes longer by
the piece. `divide` builds on it to say how many sequences of a step each rank takes, and in how many micro-batches.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import ConfigError

MIXTURE_BLOCK = 4096  # sequences within which each source of a mixture has its exact share
UNBOUND = 2**31  # sequences: no limit that anybody knows of
BETTER = 1 - 1e-9  # what is faster by less than this is so by rounding


@dataclass(frozen=True)
class Speed:
    """A micro-batch of n sequences takes `fixed_s + n * sequence_s` seconds, and has `most` sequences at most.

    Only ratios matter to a division, so any unit of time will do that is the same for all ranks.
    """

    sequence_s: float
    fixed_s: float = 0.0
    most: int = UNBOUND

    def seconds(self, share: int, parts: int) -> float:
        """What `share` sequences take in `parts` micro-batches; one without a sequence costs as much as one of one."""
        return parts * self.fixed_s + max(share, parts) * self.sequence_s


@dataclass(frozen=True)
class Division:
    """A step's work: how many of its sequences each rank takes, and into how many micro-batches every rank cuts them.

    `parts` is the same on all ranks, since their collectives pair up. A rank with fewer sequences runs some
    micro-batches of weight 0.
    """

    shares: tuple[int, ...]
    parts: int

    def largest(self, rank: int) -> int:
        """Sequences of the rank's largest micro-batch."""
        return max(1, -(-self.shares[rank] // self.parts))

    def fits(self, most: Sequence[int]) -> bool:
        """Whether it is one for as many ranks as `most` has, and none gets more than its `most` at a time."""
        return len(self.shares) == len(most) and all(self.largest(rank) <= few for rank, few in enumerate(most))


@dataclass(frozen=True)
class Line:
    """What a rank (or any other taker) needs for n pieces: `base + max(n, least) * each`; it takes `most` at most."""

    base: float
    each: float
    most: int
    least: int = 0

    def cost(self, pieces: int) -> float:
        return self.base + max(pieces, self.least) * self.each


def split(total: int, lines: Sequence[Line]) -> tuple[int, ...]:
    """Split `total` pieces so that the greatest cost of any taker is the least that is possible.

    One piece after the other goes to whoever then has the least cost (of equals the first), which is optimal since
    costs rise; all but the last few of them are given at once, at a cost that is too low for all.
    """
    assert total >= 0 and lines and all(line.each > 0 and line.most >= 0 for line in lines), (total, lines)
    assert sum(line.most for line in lines) >= total, "more pieces than room"
    taken = _below(total, lines)
    left = total - sum(taken)
    open_lines = ((line, number) for number, line in enumerate(lines) if taken[number] < line.most)
    heap = [(line.cost(taken[number] + 1), number) for line, number in open_lines]
    heapq.heapify(heap)
    while left:
        _, number = heap[0]
        line = lines[number]
        taken[number] += 1
        left -= 1
        if taken[number] < line.most:
            heapq.heapreplace(heap, (line.cost(taken[number] + 1), number))
        else:
            heapq.heappop(heap)
    return tuple(taken)


def _below(total: int, lines: Sequence[Line]) -> list[int]:
    """What can be had for a cost at which `total` is nearly reached, and not passed."""
    rows = [(line.cost(0), line.base, line.each, line.least, line.most) for line in lines]
    low, high, below, above = 0.0, max(line.cost(min(total, line.most)) for line in lines), 0, total
    taken = [0] * len(lines)
    # What can be had rises with the cost, nearly as a line: aim between two costs by what they buy, then halve.
    for turn in range(100):
        if total - below <= len(lines) // 2:
            break
        aim = (total - len(lines) / 4 - below) / (above - below) if turn % 3 < 2 and above > below else 0.5
        cost = low + (high - low) * min(max(aim, 0.01), 0.99)
        had = [
            0 if cost < none else min(most, n if (n := int((cost - base) / each)) > least else least)
            for none, base, each, least, most in rows
        ]
        if (count := sum(had)) <= total:
            low, below, taken = cost, count, had
        else:
            high, above = cost, count
    # This divides where `cost` multiplies: one piece less is surely not too many.
    return [max(0, pieces - 1) for pieces in taken]


def divide(total: int, speeds: Sequence[Speed], part_s: float = 0.0) -> Division:
    """The division of a step of `total` sequences whose slowest rank is the fastest possible within all memories.

    `part_s`: what a micro-batch costs all ranks besides, for its collectives. Of numbers of micro-batches that are
    equally fast the least is taken. Raises ConfigError where a rank's memory holds no sequence at all.
    """
    _check(total, speeds)
    # With memory without end a step of so many micro-batches takes at least as long as each of these says.
    nothing_s = part_s + max(speed.fixed_s + speed.sequence_s for speed in speeds)
    per_s = sum(1 / speed.sequence_s for speed in speeds)
    fixed = sum((part_s + speed.fixed_s) / speed.sequence_s for speed in speeds)
    best, best_s = None, float("inf")
    parts = max(1, -(-total // sum(speed.most for speed in speeds)))
    while True:
        if best is not None and max(parts * nothing_s, (total + parts * fixed) / per_s) >= best_s * BETTER:
            return best
        lines = [Line(parts * s.fixed_s, s.sequence_s, min(total, parts * s.most), parts) for s in speeds]
        division = Division(split(total, lines), parts)
        seconds = slowest_s(division, speeds, part_s)
        if seconds < best_s * BETTER:
            best, best_s = division, seconds
        # Where no limit binds, it takes no less time with more micro-batches.
        if best is not None and all(map(lambda n, line: n < line.most or n == total, division.shares, lines)):
            return best
        parts += 1


def slowest_s(division: Division, speeds: Sequence[Speed], part_s: float = 0.0) -> float:
    """Seconds that a step takes: those of the slowest rank."""
    busy = (speed.seconds(share, division.parts) for share, speed in zip(division.shares, speeds, strict=True))
    return division.parts * part_s + max(busy)


def in_parts(shares: Sequence[int], most: Sequence[int]) -> Division:
    """These shares in as few micro-batches as no rank's `most` is passed with. Raises ConfigError as `divide` does."""
    _check(sum(shares), [Speed(1.0, most=each) for each in most])
    return Division(tuple(shares), max(1, *(-(-share // each) for share, each in zip(shares, most, strict=True))))


def scaled(total: int, division: Division, most: Sequence[int]) -> Division:
    """`total` sequences in the proportions of another division, by largest remainder (of equals the first gains)."""
    whole = sum(division.shares)
    if total == whole and division.fits(most):
        return division
    shares = [share * total // whole for share in division.shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: -(division.shares[rank] * total % whole))
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return in_parts(shares, most)


def _check(total: int, speeds: Sequence[Speed]) -> None:
    assert total >= 0 and speeds, (total, speeds)
    assert all(speed.sequence_s > 0 and speed.fixed_s >= 0 for speed in speeds), speeds
    full = [str(rank) for rank, speed in enumerate(speeds) if speed.most < 1]
    if full:
        raise ConfigError(
            f"not even a micro-batch of one sequence fits into the memory of rank{'s' if len(full) > 1 else ''} "
            f"{', '.join(full)}; set memory.activations=full, lower data.seq_len, or leave out that device"
        )


def even(total: int, ranks: int) -> list[int]:
    """Split `total` into `ranks` whole shares that differ by at most one, the larger ones first.

    >>> even(8, 3)
    [3, 3, 2]
    """
    assert total >= 0 and ranks >= 1, (total, ranks)
    share, rest = divmod(total, ranks)
    return [share + (rank < rest) for rank in range(ranks)]


def quotas(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` in proportion to `weights`, by largest remainder; of equal remainders the first gains.

    >>> quotas([2.0, 1.0], 10)
    [7, 3]
    """
    assert total >= 0 and min(weights) > 0, (weights, total)
    exact = [weight / sum(weights) * total for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda number: shares[number] - exact[number])
    for number in by_remainder[: total - sum(shares)]:
        shares[number] += 1
    return shares
