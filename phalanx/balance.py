"""Splitting integers over ranks. Pure: no torch, no files, no clocks."""


def even(total: int, ranks: int) -> list[int]:
    """Split `total` into `ranks` whole shares that differ by at most one, the larger ones first.

    >>> even(8, 3)
    [3, 3, 2]
    """
    assert total >= 0 and ranks >= 1, (total, ranks)
    share, rest = divmod(total, ranks)
    return [share + (rank < rest) for rank in range(ranks)]
