"""What an order to start says to one node: which ranks are its own, and what they go on from. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.placement import Address, Kept, KeptFile
from phalanx.elastic.membership.channel import Message
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import BARE, choice_of


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
        name = inventory.file_of(held)
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


def replicas_of_before(start: Message, node: int) -> list[str]:
    """Where a node may have replicas, in its folder, that it goes on with: those of the ranks of the node before it, if
    there are as many ranks in all as there were. What of them is still of use is found out when those ranks ask."""
    seat, told, ranks = seat_of(start, node), start["kept"], start["ranks"]
    if seat is None or told is None or len(ranks) == 1:
        return []
    choice, before = choice_of(told), (seat.slot - 1) % len(ranks)
    if {held.world for _, held in choice.files.values()} != {sum(ranks)}:
        return []
    first = sum(ranks[:before])
    return [
        f"{inventory.REPLICAS}/{state_file.name_of(choice.generation, rank)}"
        for rank in range(first, first + ranks[before])
    ]
