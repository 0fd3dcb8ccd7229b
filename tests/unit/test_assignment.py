"""What one node reads out of an order to start."""

from pathlib import Path
from typing import Any

from phalanx.core.placement import InMemoryCheckpoint
from phalanx.elastic.supervisor.assignment import (
    NodeAssignment,
    find_assignment,
    find_restore_source,
    list_files_to_fetch,
    list_reusable_replicas,
)
from phalanx.recovery.catalog import HEADER_ONLY, RestorePoint, StateFileInfo, restore_point_to_message

SHARED = Path("/memory")


def held(rank: int, layout: str = "alike", world: int = 3, replica: bool = False) -> StateFileInfo:
    return StateFileInfo(4, 0, rank, world, rank, world, (7, 8), layout, replica)


def order(files: dict[int, tuple[int, StateFileInfo]], ranks: tuple[int, ...] = (2, 1)) -> dict[str, Any]:
    """Node 2 has taken the place of node 1."""
    kept = restore_point_to_message(RestorePoint(8, 4, 0, files)) if files else None
    return {"seats": [0, 2], "ranks": list(ranks), "kept": kept}


def of(start: dict[str, Any], node: int) -> InMemoryCheckpoint | None:
    return find_restore_source(start, node, SHARED, lambda other: ("host", other))


def test_a_seat_says_which_ranks_begin_on_a_node() -> None:
    start = order({})
    assert [find_assignment(start, node) for node in (0, 1, 2)] == [
        NodeAssignment(0, 0, 2),
        None,
        NodeAssignment(1, 2, 1),
    ]


def test_a_node_sees_its_own_files_and_calls_others_for_theirs() -> None:
    start = order({0: (0, held(0)), 1: (0, held(1)), 2: (0, held(2, replica=True))})
    here, there = of(start, 0), of(start, 2)
    assert here is not None and there is not None
    assert [file.path for file in here.files] == [
        "/memory/state-000004-00000", "/memory/state-000004-00001", "/memory/replicas/state-000004-00002"
    ]  # fmt: skip
    assert {file.address for file in here.files} == {None}
    assert [(file.path, file.address) for file in there.files][2] == ("replicas/state-000004-00002", ("host", 0))
    assert of(order({}), 0) is None


def test_what_begins_here_and_lies_elsewhere_is_taken_as_it_is_by_the_same_rank_of_as_many() -> None:
    everything = {0: (0, held(0)), 1: (0, held(1)), 2: (0, held(2, replica=True))}

    def taken(start: dict[str, Any], node: int) -> list[int]:
        return [file.rank for file in list_files_to_fetch(start, node, of(start, node))]

    start = order(everything)
    assert [taken(start, node) for node in (0, 1, 2)] == [[], [], [2]]
    assert taken(order(everything, ranks=(1, 1)), 2) == []  # fewer ranks read by coordinates
    assert taken(order(everything | {2: (0, held(2, HEADER_ONLY))}), 2) == []  # another rank has the state of this one
    assert taken(order({}), 2) == []


def test_a_node_goes_on_with_the_replicas_of_the_ranks_before_its_own_as_long_as_these_are_as_many() -> None:
    everything = {0: (0, held(0)), 1: (0, held(1)), 2: (0, held(2, replica=True))}
    start = order(everything)
    names = [f"replicas/state-000004-{rank:05d}" for rank in range(3)]
    assert [list_reusable_replicas(start, node) for node in (0, 1, 2)] == [names[2:], [], names[:2]]
    assert list_reusable_replicas(order(everything, ranks=(1, 1)), 0) == []  # their files will look otherwise
    assert list_reusable_replicas(order({}), 0) == []
    four = order({rank: (0, held(rank, world=4)) for rank in range(4)}, ranks=(1, 2, 1)) | {"seats": [0, 1, 2]}
    names = [f"replicas/state-000004-{rank:05d}" for rank in range(4)]
    assert [list_reusable_replicas(four, node) for node in (0, 1, 2)] == [names[3:], names[:1], names[1:3]]
    alone = {"seats": [0], "ranks": [3], "kept": start["kept"]}
    assert list_reusable_replicas(alone, 0) == []  # there is no other node
