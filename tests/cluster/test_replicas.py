"""On several nodes no committed step is lost with a rank, nor with a node: its replica is on the next one."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.core.records import EventKind
from tests.cluster.lives import RECIPE, curve, events, life, state, train
from tests.dist import command
from tests.helpers import ALL

OFF = "resilience.replicate_every=off"
long = pytest.mark.skipif(not ALL, reason="a life of a cluster more: make test-all")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a recipe that saves at the end alone, and the run of two nodes that nothing happens to."""
    folder = command.write_place(tmp_path_factory.mktemp("replicas"))
    (folder / "recipe.yaml").write_text(RECIPE.replace("every: 6", "every: 0"))
    ended = train(folder, "calm", [[life()], [life()]], 2, "resilience.in_memory_checkpoints=false")
    assert [lives[-1][0] for lives in ended] == [0, 0], ended
    return folder


def resumed(run: Path) -> list[tuple[int, bool]]:
    return [(event["step"], event.get("memory", False)) for event in events(run, EventKind.RESUMED)]


def warnings(run: Path) -> list[str]:
    return [str(event["message"]) for event in events(run, EventKind.WARNING)]


def assert_calm(place: Path, run: str) -> None:
    assert state(place / run) == state(place / "calm")
    assert curve(place / run) == curve(place / "calm")


@pytest.mark.parametrize("replicate", ["off", "auto"] if ALL else ["auto"])
def test_a_rank_is_killed_and_no_committed_step_is_lost(place: Path, replicate: str) -> None:
    run = f"rank-{replicate}"
    options: list[Any] = [f"resilience.replicate_every={replicate}", "--inject", "kill:rank=1,step=10"]
    ended = train(place, run, [[life()], [life()]], 2, *options)
    assert [each[-1][0] for each in ended] == [0, 0], ended
    [(step, memory)] = resumed(place / run)
    assert memory and 8 <= step <= 10  # its lane may not have come to the end of step 9
    assert_calm(place, run)


@pytest.mark.parametrize(("lost", "every"), [(0, 1), (1, 6)] if ALL else [(1, 6)])
def test_a_node_is_lost_and_its_replica_goes_to_the_spare(place: Path, lost: int, every: int) -> None:
    """Node 0 is killed from outside, node 1 as its rank was asked to have it. Where another node has every sixth step,
    all go back to the last of these."""
    run = f"node-{lost}"
    lives = [[life()], [life()], [life()]]
    asked = ["--inject", "node-down:rank=1,step=11"] if lost == 1 else []
    if not asked:
        lives[lost] = [life(end=10)]
    ended = train(place, run, lives, 2, f"resilience.replicate_every={'every_step' if every == 1 else every}", *asked)
    assert [each[-1][0] for each in ended] == [-9 if node == lost else 0 for node in range(3)], ended
    [(step, memory)] = resumed(place / run)
    assert memory and 10 - every <= step and step % every == 0, (step, warnings(place / run))
    assert_calm(place, run)
    (incident,) = events(place / run, EventKind.INCIDENT)
    # Unless it was lost just behind such a step: how many steps that cost.
    again = f"replayed from step {step}, because the state is copied to a second node every {every} steps"
    assert (again in incident["done"]) == ("replayed from" in incident["done"])
    assert every > 1 or again not in incident["done"]
    print(f"from the loss of node {lost} to the next step: {incident['seconds']:.2f} s")


@long
@pytest.mark.parametrize("whose", [0, 1])
def test_a_keeper_is_killed_and_the_run_goes_on_with_another(place: Path, whose: int) -> None:
    run = f"keeper-{whose}"
    ended = train(place, run, [[life(end=10) | {"keeper": whose}], [life()]], 2)
    assert [each[-1][0] for each in ended] == [0, 0], ended
    [(step, memory)] = resumed(place / run)
    assert memory and step >= 9
    [died] = events(place / run, EventKind.WORKER_DIED)
    assert "replica" in died["reason"], died
    assert_calm(place, run)


def test_without_replicas_a_lost_node_takes_the_run_back_and_it_is_said(place: Path) -> None:
    ended = train(place, "off", [[life()], [life(end=10)], [life()]], 2, OFF, "checkpoint.every=6")
    assert [each[-1][0] for each in ended] == [0, -9, 0], ended
    [(step, memory)] = resumed(place / "off")
    assert not memory and step >= 6
    said = [text for text in warnings(place / "off") if "lost with its node" in text]
    assert len(said) == 1
    assert "the state of rank 1 was lost with its node and no other node holds a complete replica" in said[0]
    assert_calm(place, "off")


@long
def test_a_run_shrinks_onto_what_is_left_from_the_last_step(place: Path) -> None:
    """Two ranks read by coordinates what three have left, here, on the other node, and in replicas."""
    ended = train(place, "shrunk", [[life()], [life(end=10)], [life()]], 3, "resilience.on_lost_node=[shrink]")
    assert [each[-1][0] for each in ended] == [0, -9, 0], ended
    [(step, memory)] = resumed(place / "shrunk")
    assert memory and step >= 9, (step, warnings(place / "shrunk"))
    assert curve(place / "shrunk") == pytest.approx(curve(place / "calm"), rel=1e-9)


UNEVEN = ["balance.optimizer_state=[3,2,1]", "checkpoint.every=6"]


@pytest.fixture(scope="module")
def uneven(place: Path) -> Path:
    """The run of three nodes with uneven shards that nothing happens to."""
    ended = train(place, "uneven", [[life()] for _ in range(3)], 3, *UNEVEN, "resilience.in_memory_checkpoints=false")
    assert [lives[-1][0] for lives in ended] == [0, 0, 0], ended
    return place / "uneven"


@long
@pytest.mark.parametrize("lost", [[1], [1, 2]])
def test_two_nodes_that_are_lost_at_once_take_the_run_back_to_the_disk_and_one_does_not(
    place: Path, uneven: Path, lost: list[int]
) -> None:
    """Node 2 holds the replica of node 1."""
    run = f"uneven-{len(lost)}"
    lives = [[life(end=10) if node in lost else life()] for node in range(3 + len(lost))]
    ended = train(place, run, lives, 3, *UNEVEN)
    assert [each[-1][0] for each in ended] == [-9 if node in lost else 0 for node in range(3 + len(lost))], ended
    found = resumed(place / run)
    said = [text for text in warnings(place / run) if "lost with its node" in text]
    if lost == [1]:
        [(step, memory)] = found
        assert memory and step >= 9 and not said
    else:
        step, memory = found[0]
        assert not memory and step >= 6
        assert "the state of rank 1 was lost" in said[0] or "the state of ranks 1, 2 was lost" in said[0]
    assert state(place / run) == state(uneven)
    assert curve(place / run) == curve(uneven)


@long
def test_what_two_nodes_have_anyway_is_not_sent(place: Path) -> None:
    """Each node has a whole copy of the state, over its two ranks; a spare takes it up from the other one."""
    options = ["parallel.shard_degree=2"]
    ended = train(place, "copies", [[life()], [life(end=10)], [life()]], 2, *options, ranks=(2, 2, 2))
    assert [each[-1][0] for each in ended] == [0, -9, 0], ended
    decided = [
        event
        for event in events(place / "copies", EventKind.AUTO_RESOLVED)
        if event["key"] == "resilience.replicate_every"
    ]
    assert [(event["value"], event["reason"]) for event in decided] == [
        ("off", "every part of the state is already on two nodes")
    ]
    [(step, memory)] = resumed(place / "copies")
    assert memory and step >= 9, (step, warnings(place / "copies"))
    assert curve(place / "copies") == pytest.approx(curve(place / "calm"), rel=1e-9)


@pytest.mark.parametrize(("emptied", "had"), [([1], {}), *([([], {0: 7, 1: 8}), ([0, 1], {})] if ALL else [])])
def test_a_run_all_of_whose_agents_were_killed_goes_on_from_the_memory_of_its_nodes(
    place: Path, emptied: list[int], had: dict[int, int]
) -> None:
    """There is no checkpoint at all. A node that was started anew has nothing, and its replica does; one that had
    another number before has what it had as that, which here is the only copy."""
    run = f"all-{len(emptied)}"
    first = [life(end=10) | {"all": True}, life()]
    lives = [[each, life(begin=10) | {"emptied": node in emptied}] for node, each in enumerate(first)]
    for node, number in had.items():
        lives[node][1]["had"] = number
    ended = train(place, run, lives, 2, *([OFF] if had else []))
    assert [[code for code, _ in each] for each in ended] == [[-9, 0], [-9, 0]], ended
    found = resumed(place / run)
    if emptied == [0, 1]:
        assert found == []
    else:
        [(step, memory)] = found
        assert memory and step >= 9, warnings(place / run)
        assert f"resumed from step {step}, kept in memory" in ended[0][1][1]
        assert not warnings(place / run)
        assert ("this machine was node 7 of the run before" in ended[1][1][1] + ended[0][1][1]) == bool(had)
    assert_calm(place, run)
