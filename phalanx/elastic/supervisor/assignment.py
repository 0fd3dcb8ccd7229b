"""Assignment of ranks to nodes: a node for each slot of a division, and a node's part of a start. Pure functions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.placement import HostPort, InMemoryCheckpoint, StateFileLocation
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.supervisor.state import JobState, Node, NodeSlot
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import HEADER_ONLY, restore_point_from_message


def fits(node: Node, slot: NodeSlot) -> bool:
    return node.ranks >= slot.ranks and node.model == slot.model


def keep_seats(state: JobState, usable: Iterable[Node]) -> tuple[int, ...]:
    """The seats with -1 where a node is missing, or has come back with other devices than its ranks were given."""
    here = {node.node: node for node in usable}
    pairs = zip(state.seats, state.slots, strict=True)
    return tuple(seat if seat in here and fits(here[seat], slot) else -1 for seat, slot in pairs)


def fill_seats(state: JobState, kept: tuple[int, ...], usable: Iterable[Node]) -> tuple[int, ...] | None:
    """The seats with spares where a node is missing; None where there are not enough that fit."""
    seated = set(kept)  # there may be thousands
    spare = [node for node in usable if node.node not in seated]
    seats = list(kept)
    for index, slot in enumerate(state.slots):
        if seats[index] != -1:
            continue
        fitting = [node for node in spare if fits(node, slot)]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda node: (node.ready != state.division, node.node))
        spare.remove(chosen)
        seats[index] = chosen.node
    return tuple(seats)


def plan_division(state: JobState, usable: Iterable[Node]) -> tuple[tuple[int, int], ...]:
    """Node and ranks of a division over what there is: nodes with a seat first, and whole copies of the model; empty
    where that is too little."""
    order = {node: index for index, node in enumerate(state.seats)}
    chosen = sorted(usable, key=lambda node: (order.get(node.node, len(order)), node.node))[: state.policy.nodes]
    if len(chosen) < state.policy.least:
        return ()
    chosen.sort(key=lambda node: node.node)
    left = sum(node.ranks for node in chosen) // state.policy.group * state.policy.group
    plan = []
    for node in chosen:
        ranks = min(node.ranks, left)
        left -= ranks
        if ranks:
            plan.append((node.node, ranks))
    return tuple(plan)


def plan_growth(state: JobState) -> tuple[tuple[int, int], ...]:
    """The plan over more ranks, if fewer nodes have a seat than the run was started for; empty if there is none."""
    if not state.policy.grow or len(state.slots) >= state.policy.nodes:
        return ()
    plan = plan_division(state, [node for node in state.nodes if not node.drained])
    more = sum(ranks for _, ranks in plan) > sum(slot.ranks for slot in state.slots)
    return plan if more and plan not in state.refused else ()


def has_stand_in(state: JobState, without: int) -> bool:
    """Whether spares can take all seats that are free, one node's among them."""
    usable = [node for node in state.nodes if not node.drained and node.node != without]
    kept = keep_seats(state, usable)
    return "replace" in state.policy.on_lost_node and fill_seats(state, kept, usable) is not None


def describe_misfit(state: JobState, node: Node) -> str | None:
    """The warning about a returning node that cannot take its former seat; None where it can, or had none."""
    pairs = zip(state.seats, state.slots, strict=True)
    slot = next((slot for seat, slot in pairs if seat == node.node and not fits(node, slot)), None)
    if slot is None:
        return None
    has, had = (f"{each.ranks} rank{'s' if each.ranks != 1 else ''} on {each.model}" for each in (node, slot))
    return f"node {node.node} ({node.host}) returned with {has} but had {had}: it cannot take its former ranks"


def can_continue(state: JobState, without: int) -> bool:
    """Whether the job can continue at once without a node, if that leaves: no spare is needed for it, one takes its
    seat, or the others divide the work."""
    if without not in state.seats or has_stand_in(state, without):
        return True
    usable = [node for node in state.nodes if not node.drained and node.node != without]
    plan = plan_division(state, usable)
    return "shrink" in state.policy.on_lost_node and bool(plan) and plan not in state.refused


def list_unready(state: JobState) -> list[int]:
    """Nodes with a seat that are not ready for the division yet."""
    seats = set(state.seats)
    return [node.node for node in state.nodes if node.node in seats and node.ready != state.division]


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
    """The state to resume from, as seen by a node whose folder in shared memory is `shared`; None: nothing in
    memory."""
    told, files = start["kept"], []
    for rank, (holder, held) in sorted(restore_point_from_message(told).files.items() if told is not None else ()):
        name = inventory.state_file_path(held)
        if holder == node:
            files.append(StateFileLocation(rank, str(shared / name), held.layout))
        else:
            files.append(StateFileLocation(rank, name, held.layout, address_of(holder)))
    return InMemoryCheckpoint(int(told["step"]), tuple(files)) if files else None


def list_files_to_fetch(start: Message, node: int, kept: InMemoryCheckpoint | None) -> Sequence[StateFileLocation]:
    """State files of other nodes that ranks of this node will load unchanged, as far as known before they begin:
    those of ranks with the same number and world size."""
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
    """Where a node may have replicas, in its folder, that stay in use: those of the previous node's ranks, if the
    number of ranks is unchanged. What of them is still of use is found out when those ranks ask."""
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
