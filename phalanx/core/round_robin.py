"""Who meets whom, so that each pair meets once and nobody is with two at a time: a round-robin tournament."""


def round_robin_partners(rank: int, world: int) -> list[int | None]:
    """Whom a rank meets, round by round, so that all pairs meet once and nobody two at a time; None: it waits.

    A round-robin tournament by the circle method: the last seat stays, the others move on by one.
    """
    seats = world + world % 2
    met: list[int | None] = []
    for turn in range(seats - 1):
        if rank == seats - 1:
            other = turn * (seats // 2) % (seats - 1)
        else:
            other = (turn - rank) % (seats - 1)
            other = seats - 1 if other == rank else other
        met.append(other if other < world else None)
    return met
