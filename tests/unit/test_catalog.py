"""Which step is gone on from, whatever nodes have in their memories: the newest that is whole, and no other."""

import json

from hypothesis import given
from hypothesis import strategies as st

from phalanx.layout.mesh_axes import MeshAxes
from phalanx.planner import memory
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.device_catalog import DEVICE_KINDS
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.recovery.catalog import (
    HEADER_ONLY,
    StateFileInfo,
    choose_restore_point,
    find_missing_ranks,
    find_redundant,
    inventory_from_message,
    inventory_to_message,
    needs_replicas,
    restore_point_from_message,
    restore_point_to_message,
)


def own(rank: int, *steps: int, world: int = 2, generation: int = 1, way: int = 0) -> StateFileInfo:
    return StateFileInfo(generation, way, rank, world, rank, world, steps, f"layout {rank}")


def replica(rank: int, *steps: int, world: int = 2) -> StateFileInfo:
    return StateFileInfo(1, 0, rank, world, rank, world, steps, f"layout {rank}", replica=True)


def test_a_part_is_elsewhere_where_two_nodes_have_it() -> None:
    # Two copies of the state over four ranks, on nodes of two, of three and one, and of one alone.
    assert find_redundant([0, 1, 0, 1], [0, 0, 1, 1]) == [True] * 4
    assert find_redundant([0, 1, 0, 1], [0, 0, 0, 1]) == [False, True, False, True]
    assert find_redundant([0, 1, 2, 3], [0, 0, 1, 1]) == find_redundant([0, 1, 0, 1], [0] * 4) == [False] * 4


def test_replicas_are_needed_where_a_part_is_on_one_of_several_nodes() -> None:
    assert needs_replicas([0, 1, 2, 3], [0, 0, 1, 1]) and needs_replicas([0, 1, 0, 1], [0, 1, 1, 1])
    assert not needs_replicas([0, 1, 2, 3], [0] * 4) and not needs_replicas([0, 1, 0, 1], [0, 0, 1, 1])


@given(st.integers(1, 2), st.integers(1, 3), st.sampled_from([0, 1, 2, 4]), st.lists(st.integers(1, 4), min_size=1))
def test_a_plan_a_dry_run_and_a_run_agree_on_replicas(
    tensor: int, pipeline: int, degree: int, devices: list[int]
) -> None:
    if short := -sum(devices) % (tensor * pipeline * max(1, degree)):
        devices = [*devices, short]
    nodes = [node for node, count in enumerate(devices) for _ in range(count)]
    copies = len(nodes) // (tensor * pipeline)
    cluster = ClusterSpec(tuple(NodeGroup(1, count, DEVICE_KINDS["CPU"]) for count in devices))
    planned = LayoutChoice(tensor=tensor, pipeline=pipeline, shard_degree=degree)
    parts = MeshAxes(tensor, pipeline).state_parts(len(nodes), degree or None)
    assert memory.needs_replicas(planned, copies, cluster) is needs_replicas(parts, nodes)


def test_a_rank_is_held_by_its_node_or_by_a_replica() -> None:
    assert choose_restore_point({}) is None
    assert choose_restore_point({0: [own(0, 6, 7)]}) is None
    choice = choose_restore_point({0: [own(0, 6, 7)], 1: [own(1, 5, 6), replica(0, 6)]})
    assert choice is not None
    assert choice.step == 6
    assert {rank: node for rank, (node, _) in choice.files.items()} == {0: 0, 1: 1}
    choice = choose_restore_point({1: [own(1, 5, 6), replica(0, 5, 6)]})
    assert choice is not None
    assert choice.step == 6
    assert choice.files[0] == (1, replica(0, 5, 6))


def test_a_torn_replica_does_not_count() -> None:
    """It has been voided to be written over: its older step is all that it holds, or nothing."""
    assert choose_restore_point({1: [own(1, 5, 6), replica(0)]}) is None
    choice = choose_restore_point({1: [own(1, 5, 6), replica(0, 5)]})
    assert choice is not None
    assert choice.step == 5


def test_of_ranks_that_hold_the_same_one_is_enough() -> None:
    """Four ranks with two unlike parts, of which a node has both."""
    files = [StateFileInfo(1, 0, rank, 4, rank % 2, 2, (6, 7), "") for rank in range(4)]
    choice = choose_restore_point({0: files[:2]})
    assert choice is not None
    assert (choice.step, sorted(choice.files)) == (7, [0, 1])
    assert choose_restore_point({0: files[:1], 1: files[2:3]}) is None
    # A step that not all ranks have that are there is not taken where an older one will do.
    ahead = StateFileInfo(1, 0, 0, 4, 0, 2, (7, 8), "")
    also = StateFileInfo(1, 0, 1, 4, 1, 2, (7, 8), "")
    choice = choose_restore_point({0: [ahead, also], 1: files[2:]})
    assert choice is not None
    assert (choice.step, len(choice.files)) == (7, 4)


def test_of_whom_others_hold_the_state_what_it_said_is_kept() -> None:
    files = [StateFileInfo(1, 0, rank, 2, 0, 1, (6, 7), "alike") for rank in (0, 1)]
    said = StateFileInfo(1, 0, 1, 2, 0, 1, (6, 7), HEADER_ONLY, replica=True)
    choice = choose_restore_point({0: [files[0], said]})
    assert choice is not None
    assert (choice.step, choice.files) == (7, {0: (0, files[0]), 1: (0, said)})
    ahead = StateFileInfo(1, 0, 0, 2, 0, 1, (7, 8), "alike")
    assert choose_restore_point({0: [ahead, said]}).step == 7  # type: ignore[union-attr]
    assert choose_restore_point({0: [ahead]}).step == 8  # type: ignore[union-attr]
    assert choose_restore_point({0: [said]}) is None
    assert choose_restore_point({0: [files[0], said], 1: [files[1]]}).files[1] == (1, files[1])  # type: ignore[union-attr]
    assert find_missing_ranks({0: [said]}) == []


def test_what_was_made_void_on_one_rank_is_void_on_all() -> None:
    """Training was going back: some had got as far as to forget, and others had not."""
    assert choose_restore_point({0: [own(0, 6, way=1)], 1: [own(1, 6)]}) is None
    choice = choose_restore_point({0: [own(0, 3, way=1)], 1: [own(1, 3, way=1)], 2: [own(1, 6)]})
    assert choice is not None
    assert (choice.step, choice.way) == (3, 1)


def test_who_is_missing_is_named() -> None:
    assert find_missing_ranks({0: [own(0, 6, world=4)], 1: [own(2, 6, world=4)]}) == [1, 3]
    assert find_missing_ranks({0: [own(0, 6, world=1, generation=3), own(0, 6)]}) == []
    assert find_missing_ranks({0: []}) == []


def test_it_travels_as_json() -> None:
    held = (own(0, 6, 7), replica(1, 6))
    assert inventory_from_message(json.loads(json.dumps(inventory_to_message(held)))) == held
    choice = choose_restore_point({3: held})
    assert choice is not None
    assert restore_point_from_message(json.loads(json.dumps(restore_point_to_message(choice)))) == choice


@given(st.integers(2, 4), st.data())
def test_a_step_that_counts_survives_the_loss_of_any_node(nodes: int, data: st.DataObject) -> None:
    """Each node has a rank, and the replica of the one before. Ranks commit a step when all have had the step before
    acknowledged, and may be killed anywhere in it; then a node is lost."""
    done = data.draw(st.integers(1, 5), label="the step that all have had acknowledged")
    held: dict[int, list[StateFileInfo]] = {}
    for node in range(nodes):
        # Void while it is written, whole, or as it was: of this rank, and then of its replica.
        own_phase = data.draw(st.sampled_from(["as it was", "void", "whole"]))
        its_phase = data.draw(st.sampled_from(["as it was", "void", "whole"])) if own_phase == "whole" else "as it was"
        for holder, phase, make in ((node, own_phase, own), ((node + 1) % nodes, its_phase, replica)):
            steps = {"as it was": [done - 1, done], "void": [done], "whole": [done, done + 1]}[phase]
            held.setdefault(holder, []).append(make(node, *steps, world=nodes))
    lost = data.draw(st.integers(-1, nodes - 1), label="the node that is lost")
    held.pop(lost, None)
    choice = choose_restore_point(held)
    assert choice is not None
    assert done <= choice.step <= done + 1
    assert len(choice.files) == nodes
