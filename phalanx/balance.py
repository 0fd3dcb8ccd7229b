"""Splitting integers over ranks and sources. Pure: no torch, no files, no clocks."""

from collections.abc import Sequence

MIXTURE_BLOCK = 4096  # sequences within which each source of a mixture has its exact share


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
