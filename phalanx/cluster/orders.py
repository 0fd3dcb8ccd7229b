"""What an order to start says to one node: which ranks are its own, and what they go on from. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx import state_file
from phalanx.cluster.wire import Message
from phalanx.kept import BARE, Address, Kept, KeptFile, choice_of


@dataclass(frozen=True)
class Seat:
    """The part of an attempt that a node has."""

    slot: int
    first_rank: int
    ranks: int


def seat_of(start: Message, node: int) -> Seat | None:
    """A node's seat; None where it waits."""
    seats, ranks = start["seats"], start["ranks"]
    if node not in seats:
        return None
    slot = seats.index(node)
    return Seat(slot, sum(ranks[:slot]), ranks[slot])


def kept_of(start: Message, node: int, shared: Path, address_of: Callable[[int], Address]) -> Kept | None:
    """What is gone on from, as a node sees it whose folder in shared memory is `shared`; None: nothing in memory."""
    told, files = start["kept"], []
    for rank, (holder, held) in sorted(choice_of(told).files.items() if told is not None else ()):
        name = state_file.file_of(held)
        if holder == node:
            files.append(KeptFile(rank, str(shared / name), held.layout))
        else:
            files.append(KeptFile(rank, name, held.layout, address_of(holder)))
    return Kept(int(told["step"]), tuple(files)) if files else None


def taken_from_others(start: Message, node: int, kept: Kept | None) -> Sequence[KeptFile]:
    """Those files of other nodes that ranks which begin on this one will take as they are, as far as can be told before
    they begin: ranks of the same number among as many."""
    seat = seat_of(start, node)
    if seat is None or kept is None:
        return []
    worlds = {rank: held.world for rank, (_, held) in choice_of(start["kept"]).files.items()}
    mine = range(seat.first_rank, seat.first_rank + seat.ranks)
    return [
        file
        for file in kept.files
        if file.address is not None and file.layout != BARE and file.rank in mine
        and worlds[file.rank] == sum(start["ranks"])
    ]  # fmt: skip
