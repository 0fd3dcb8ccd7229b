"""Splitting integers over ranks and sources by cost or weight. Pure: no torch, no files, no clocks.

`split_by_cost` minimizes the slowest taker's cost. `divide` uses it to split a step's sequences over ranks and
micro-batches. `state_shares` and `shard_cuts` split what is sharded.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import ConfigError

MIXTURE_BLOCK = 4096  # sequences within which each source of a mixture has its exact share
UNBOUND = 2**31  # sequences: no known limit
BETTER = 1 - 1e-9  # what is faster by less than this is so by rounding
ROUNDED = 1 + 1e-12  # what may be lost by it


@dataclass(frozen=True)
class Speed:
    """A micro-batch of n sequences takes `fixed_s + n * sequence_s` seconds, and has `most` sequences at most.

    Only ratios matter to a division, so any unit of time will do that is the same for all ranks.
    """

    sequence_s: float
    fixed_s: float = 0.0
    most: int = UNBOUND
    kind: str = ""  # the model of the rank's device, where it is known

    def seconds(self, share: int, parts: int) -> float:
        """What `share` sequences take in `parts` micro-batches; one without a sequence costs as much as one of one."""
        return parts * self.fixed_s + max(share, parts) * self.sequence_s


@dataclass(frozen=True)
class Division:
    """The work split of a step: the sequences of each rank, and the number of its micro-batches.

    In lockstep all cut them into as many, `parts`, since their collectives pair up; a rank with fewer sequences runs
    some of weight 0. Else each runs its `own` number, which is () where all are alike; `parts` is the greatest. A rank
    without a sequence runs one of weight 0, for the collectives of the step.
    """

    shares: tuple[int, ...]
    parts: int
    own: tuple[int, ...] = ()

    def micro_batches_of(self, rank: int) -> int:
        """Micro-batches that the rank runs."""
        return self.own[rank] if self.own else self.parts

    def largest_micro_batch(self, rank: int) -> int:
        """Sequences of the rank's largest micro-batch."""
        return max(1, -(-self.shares[rank] // self.micro_batches_of(rank)))

    def fits(self, most: Sequence[int]) -> bool:
        """Whether it is one for as many ranks as `most` has, and none gets more than its `most` at a time."""
        return len(self.shares) == len(most) and all(
            self.largest_micro_batch(rank) <= few for rank, few in enumerate(most)
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON form of records, events and checkpoints: `parts` is a list where ranks run different numbers."""
        return {"shares": list(self.shares), "parts": list(self.own) or self.parts}


def parse_division(tree: Any) -> Division | None:
    """The division that a record, an event or a checkpoint's header holds, if it does."""
    shares = tree.get("shares") if isinstance(tree, Mapping) else None
    if not isinstance(shares, list) or not shares or any(type(share) is not int or share < 0 for share in shares):
        return None
    parts = tree.get("parts")
    own = [parts] * len(shares) if type(parts) is int else parts
    if not isinstance(own, list) or len(own) != len(shares) or any(type(each) is not int or each < 1 for each in own):
        return None
    return _cut(shares, own)


def in_lockstep(zero: int, reduce: str) -> bool:
    """Whether all ranks must run the same number of micro-batches, since each has collectives: parameters are gathered
    again (zero 3), or gradients reduced in each. Otherwise parameters are gathered before a step's first forward pass
    and gradients reduced after its last backward pass, and ranks may run different numbers."""
    return zero == 3 or reduce == "per_micro_batch"


@dataclass(frozen=True)
class CostLine:
    """What a rank (or any other taker) needs for n pieces: `base + max(n, least) * each`; it takes `most` at most.

    It has room for `per_round` at a time, no fewer than `least`, and needs `round_cost` more for each round.
    """

    base: float
    each: float
    most: int
    least: int = 0
    per_round: int = UNBOUND
    round_cost: float = 0.0

    def cost(self, pieces: int) -> float:
        return self.base + max(pieces, self.least) * self.each + max(0, pieces - 1) // self.per_round * self.round_cost


def split_by_cost(total: int, lines: Sequence[CostLine]) -> tuple[int, ...]:
    """Split `total` pieces so that the greatest cost of any taker is the least that is possible.

    One piece after the other goes to the taker with the least cost (of equals the first), which is optimal since costs
    rise; all but the last few are assigned at once, at a cost that is too low for all.
    """
    assert total >= 0 and lines and all(line.each > 0 and line.most >= 0 for line in lines), (total, lines)
    assert all(line.least <= line.per_round for line in lines), lines
    assert sum(line.most for line in lines) >= total, "more pieces than room"
    taken = _split_below(total, lines)
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


def _split_below(total: int, lines: Sequence[CostLine]) -> list[int]:
    """What can be had for a cost at which `total` is nearly reached, and not passed."""
    rows = [
        (
            line.cost(0),
            line.base,
            line.each,
            line.least,
            line.most,
            line.per_round,
            line.per_round * line.each + line.round_cost,
        )
        for line in lines
    ]

    def had_for(cost: float) -> Iterator[int]:
        for none, base, each, least, most, few, turn in rows:
            turns = int((cost - base) / turn)
            pieces = turns * few + min(few, int((cost - base - turns * turn) / each))
            yield 0 if cost < none else min(most, max(least, pieces))

    low, high, below, above = 0.0, max(line.cost(min(total, line.most)) for line in lines), 0, total
    taken = [0] * len(lines)
    # What can be had rises with the cost, nearly as a line: aim between two costs by what they buy, then halve.
    for turn in range(100):
        if total - below <= len(lines) // 2:
            break
        aim = (total - len(lines) / 4 - below) / (above - below) if turn % 3 < 2 else 0.5
        cost = low + (high - low) * min(max(aim, 0.01), 0.99)
        had = list(had_for(cost))
        if (count := sum(had)) <= total:
            low, below, taken = cost, count, had
        else:
            high, above = cost, count
    # This divides where `cost` multiplies: one piece less is surely not too many.
    return [max(0, pieces - 1) for pieces in taken]


def divide(total: int, speeds: Sequence[Speed], part_s: float = 0.0, lockstep: bool = True) -> Division:
    """The division of a step of `total` sequences whose slowest rank is the fastest possible within all memories.

    `part_s`: what a micro-batch costs all ranks besides, for its collectives, in lockstep. Of numbers of micro-batches
    that are equally fast the least is taken. Raises ConfigError where a rank's memory holds no sequence at all.
    """
    _check_memory(total, speeds)
    if not lockstep:  # what a rank needs does not depend on the others
        lines = [CostLine(speed.fixed_s, speed.sequence_s, total, 1, speed.most, speed.fixed_s) for speed in speeds]
        return cut_into_micro_batches(split_by_cost(total, lines), [speed.most for speed in speeds], lockstep=False)
    rows = [(part_s + speed.fixed_s, speed.sequence_s, speed.most) for speed in speeds]

    def best_of(parts: int) -> tuple[float, Division]:
        lines = [CostLine(parts * s.fixed_s, s.sequence_s, min(total, parts * s.most), parts) for s in speeds]
        division = Division(split_by_cost(total, lines), parts)
        return slowest_s(division, speeds, part_s), division

    fewest = max(1, -(-total // sum(speed.most for speed in speeds)))
    first = max(fewest, round(_fluid_parts(total, rows)))
    best_s, best = best_of(first)
    parts = first
    while True:
        parts += 1
        whole, pieces, binds = _capacity(rows, parts, best_s * BETTER)
        if whole < total:
            break
        if pieces >= total:
            seconds, division = best_of(parts)
            if seconds < best_s * BETTER:
                best_s, best = seconds, division
        if not binds:  # more of them would only take longer
            break
    for parts in range(first - 1, fewest - 1, -1):
        whole, pieces, _ = _capacity(rows, parts, best_s / BETTER)
        if whole < total:
            break
        if pieces >= total:
            seconds, division = best_of(parts)
            if seconds <= best_s / BETTER:
                best_s, best = min(seconds, best_s), division
    return best


Row = tuple[float, float, int]  # of a rank: seconds of a micro-batch, seconds of a sequence, most sequences in one


def _fluid_parts(total: int, rows: Sequence[Row]) -> float:
    """The number of micro-batches that would be best if it and all shares could be fractions; the least of equals.

    What can be done in a time is proportional to it, if so many more micro-batches are taken: what matters is how many
    of them there are in a second. With more of these a rank whose limit binds does more, and another one less.
    """
    bends = sorted((1 / (fixed + most * each), most, fixed / each) for fixed, each, most in rows)
    bound, lost = sum(most for _, _, most in rows), 0.0
    per_s = min(1 / (fixed + each) for fixed, each, _ in rows)  # no more, or one has no time for one sequence in each
    for bend, most, less in bends:
        bound, lost = bound - most, lost + less
        if bound <= lost or bend >= per_s:
            per_s = min(bend, per_s)
            break
    return per_s * total / sum(min(per_s * most, (1 - per_s * fixed) / each) for fixed, each, most in rows)


def _capacity(rows: Sequence[Row], parts: int, seconds: float) -> tuple[float, int, bool]:
    """(sequences, whole sequences) that can be done in so many seconds and micro-batches, and whether limits bind.

    The former has its greatest value where `_fluid_parts` says and falls to both sides, so that where it is too small
    it is so for all that are farther away.
    """
    whole, pieces, binds = 0.0, 0, False
    for fixed, each, most in rows:
        room = (seconds - parts * fixed) / each
        if room < parts:
            return 0.0, 0, False
        if room >= parts * most:
            binds, whole, pieces = True, whole + parts * most, pieces + parts * most
        else:
            whole, pieces = whole + room, pieces + int(room * ROUNDED)
    return whole * ROUNDED, pieces, binds


def slowest_s(division: Division, speeds: Sequence[Speed], part_s: float = 0.0) -> float:
    """Seconds that a step takes: those of the slowest rank."""
    rows = enumerate(zip(division.shares, speeds, strict=True))
    return division.parts * part_s + max(
        speed.seconds(share, division.micro_batches_of(rank)) for rank, (share, speed) in rows
    )


def cut_into_micro_batches(shares: Sequence[int], most: Sequence[int], lockstep: bool = True) -> Division:
    """These shares in as few micro-batches as no rank's `most` is passed with. Raises ConfigError as `divide` does."""
    _check_memory(sum(shares), [Speed(1.0, most=each) for each in most])
    own = [max(1, -(-share // few)) for share, few in zip(shares, most, strict=True)]
    return Division(tuple(shares), max(own)) if lockstep else _cut(shares, own)


def drop_empty_micro_batches(division: Division) -> Division:
    """The same without micro-batches that have no sequence, but for one of a rank that has none at all."""
    own = [max(1, min(share, division.micro_batches_of(rank))) for rank, share in enumerate(division.shares)]
    return _cut(division.shares, own)


def _cut(shares: Sequence[int], own: Sequence[int]) -> Division:
    """These shares in so many micro-batches each."""
    return Division(tuple(shares), max(own), () if len(set(own)) == 1 else tuple(own))


def scale_division(total: int, division: Division, most: Sequence[int], lockstep: bool = True) -> Division:
    """`total` sequences in the proportions of another division, by largest remainder (of equals the first gains)."""
    whole = sum(division.shares)
    if total == whole and division.fits(most):
        return division
    shares = [share * total // whole for share in division.shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: -(division.shares[rank] * total % whole))
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return cut_into_micro_batches(shares, most, lockstep)


def _check_memory(total: int, speeds: Sequence[Speed]) -> None:
    assert total >= 0 and speeds, (total, speeds)
    assert all(speed.sequence_s > 0 and speed.fixed_s >= 0 for speed in speeds), speeds
    full = [str(rank) for rank, speed in enumerate(speeds) if speed.most < 1]
    if full:
        raise ConfigError(
            f"not even a micro-batch of one sequence fits into the memory of rank{'s' if len(full) > 1 else ''} "
            f"{', '.join(full)}; set memory.activations=full, lower data.seq_len, or leave out that device"
        )


def split_evenly(total: int, ranks: int) -> list[int]:
    """Split `total` into `ranks` whole shares that differ by at most one, the larger ones first.

    >>> split_evenly(8, 3)
    [3, 3, 2]
    """
    assert total >= 0 and ranks >= 1, (total, ranks)
    share, rest = divmod(total, ranks)
    return [share + (rank < rest) for rank in range(ranks)]


def split_by_weights(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` in proportion to `weights`, by largest remainder; of equal remainders the first gains.

    >>> split_by_weights([2.0, 1.0], 10)
    [7, 3]
    """
    assert total >= 0 and min(weights) > 0, (weights, total)
    exact = [weight / sum(weights) * total for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda number: shares[number] - exact[number])
    for number in by_remainder[: total - sum(shares)]:
        shares[number] += 1
    return shares


def state_shares(memory_left_bytes: Sequence[float], needed_bytes: float) -> tuple[float, ...]:
    """Each rank's share (of 1) of a state of `needed_bytes`: equal shares, but for ranks that have room for less.

    Those take what they have room for, and the others equal shares of the rest, so that the largest is the least that
    is possible. Raises ConfigError where all rooms together are too small.
    """
    ranks = len(memory_left_bytes)
    assert ranks and needed_bytes >= 0 and all(math.isfinite(room) for room in memory_left_bytes), memory_left_bytes
    if not needed_bytes or all(room * ranks >= needed_bytes for room in memory_left_bytes):
        return (1 / ranks,) * ranks
    rooms = [max(0.0, room) for room in memory_left_bytes]
    if sum(rooms) < needed_bytes:
        raise ConfigError(
            f"the optimizer state needs {needed_bytes / 2**20:,.1f} MiB and the memories of all ranks together have "
            f"{sum(rooms) / 2**20:,.1f} MiB left; add devices, set memory.activations=full, or lower train.micro_batch"
        )
    left, shares = needed_bytes, [0.0] * ranks
    by_room = sorted(range(ranks), key=lambda rank: rooms[rank])
    for others, rank in zip(range(ranks, 0, -1), by_room, strict=True):
        part = min(rooms[rank], left / others)
        shares[rank], left = part / needed_bytes, left - part
    return tuple(shares)
