"""What an order to start says to one node: which ranks are its own, and what they go on from. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.placement import HostPort, InMemoryCheckpoint, StateFileLocation
from phalanx.elastic.membership.channel import Message
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import HEADER_ONLY, restore_point_from_message


@dataclass(frozen=True)
class NodeAssignment:
    """The part of an attempt that a node has."""

    slot: int
    first_rank: int
    ranks: int


def find_assignment(start: Message, node: int) -> NodeAssignment | None:
    """A node's seat; None where it waits."""
    seats, ranks = start["seats"], start["ranks"]
    if node not in seats:
        return None
    slot = seats.index(node)
    return NodeAssignment(slot, sum(ranks[:slot]), ranks[slot])


def find_restore_source(
    start: Message, node: int, shared: Path, address_of: Callable[[int], HostPort]
) -> InMemoryCheckpoint | None:
    """What is gone on from, as a node sees it whose folder in shared memory is `shared`; None: nothing in memory."""
    told, files = start["kept"], []
    for rank, (holder, held) in sorted(restore_point_from_message(told).files.items() if told is not None else ()):
        name = inventory.state_file_path(held)
        if holder == node:
            files.append(StateFileLocation(rank, str(shared / name), held.layout))
        else:
            files.append(StateFileLocation(rank, name, held.layout, address_of(holder)))
    return InMemoryCheckpoint(int(told["step"]), tuple(files)) if files else None


def list_files_to_fetch(start: Message, node: int, kept: InMemoryCheckpoint | None) -> Sequence[StateFileLocation]:
    """Those files of other nodes that ranks which begin on this one will take as they are, as far as can be told before
    they begin: ranks of the same number among as many."""
    seat = find_assignment(start, node)
    if seat is None or kept is None:
        return []
    worlds = {rank: held.world for rank, (_, held) in restore_point_from_message(start["kept"]).files.items()}
    mine = range(seat.first_rank, seat.first_rank + seat.ranks)
    return [
        file
        for file in kept.files
        if file.address is not None and file.layout != HEADER_ONLY and file.rank in mine
        and worlds[file.rank] == sum(start["ranks"])
    ]  # fmt: skip


def list_reusable_replicas(start: Message, node: int) -> list[str]:
    """Where a node may have replicas, in its folder, that it goes on with: those of the ranks of the node before it, if
    there are as many ranks in all as there were. What of them is still of use is found out when those ranks ask."""
    seat, told, ranks = find_assignment(start, node), start["kept"], start["ranks"]
    if seat is None or told is None or len(ranks) == 1:
        return []
    choice, before = restore_point_from_message(told), (seat.slot - 1) % len(ranks)
    if {held.world for _, held in choice.files.values()} != {sum(ranks)}:
        return []
    first = sum(ranks[:before])
    return [
        f"{inventory.REPLICAS}/{state_file.state_file_name(choice.generation, rank)}"
        for rank in range(first, first + ranks[before])
    ]
