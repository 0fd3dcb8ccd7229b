"""On several nodes no committed step is lost with a rank, nor with a node: its replica is on the next one."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.records import Kind
from tests.cluster.lives import RECIPE, curve, events, life, state, train
from tests.dist import command

OFF = "resilience.replicate=off"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a recipe that saves at the end alone, and the run of two nodes that nothing happens to."""
    folder = command.write_place(tmp_path_factory.mktemp("replicas"))
    (folder / "recipe.yaml").write_text(RECIPE.replace("every: 6", "every: 0"))
    ended = train(folder, "calm", [[life()], [life()]], 2, "resilience.memory=false")
    assert [lives[-1][0] for lives in ended] == [0, 0], ended
    return folder


def resumed(run: Path) -> list[tuple[int, bool]]:
    return [(event["step"], event.get("memory", False)) for event in events(run, Kind.RESUMED)]


def warnings(run: Path) -> list[str]:
    return [str(event["message"]) for event in events(run, Kind.WARNING)]


def assert_calm(place: Path, run: str) -> None:
    assert state(place / run) == state(place / "calm")
    assert curve(place / run) == curve(place / "calm")


@pytest.mark.parametrize("replicate", ["off", "auto"])
def test_a_rank_is_killed_and_no_committed_step_is_lost(place: Path, replicate: str) -> None:
    run = f"rank-{replicate}"
    options: list[Any] = [f"resilience.replicate={replicate}", "--inject", "kill:rank=1,step=20"]
    ended = train(place, run, [[life()], [life()]], 2, *options)
    assert [each[-1][0] for each in ended] == [0, 0], ended
    [(step, memory)] = resumed(place / run)
    assert memory and 18 <= step <= 20  # its lane may not have come to the end of step 19
    assert_calm(place, run)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_is_lost_and_its_replica_goes_to_the_spare(place: Path, lost: int) -> None:
    run = f"node-{lost}"
    lives = [[life()], [life()], [life()]]
    lives[lost] = [life(end=20)]
    ended = train(place, run, lives, 2)
    assert [each[-1][0] for each in ended] == [-9 if node == lost else 0 for node in range(3)], ended
    [(step, memory)] = resumed(place / run)
    assert memory and step >= 19, (step, warnings(place / run))
    assert_calm(place, run)
    (incident,) = events(place / run, Kind.INCIDENT)
    print(f"from the loss of node {lost} to the next step: {incident['seconds']:.2f} s")


def test_without_replicas_a_lost_node_takes_the_run_back_and_it_is_said(place: Path) -> None:
    ended = train(place, "off", [[life()], [life(end=20)], [life()]], 2, OFF, "checkpoint.every=6")
    assert [each[-1][0] for each in ended] == [0, -9, 0], ended
    [(step, memory)] = resumed(place / "off")
    assert not memory and step >= 6
    said = [text for text in warnings(place / "off") if "lost with its node" in text]
    assert len(said) == 1
    assert "the state of rank 1 was lost with its node and no other one holds a whole replica of it" in said[0]
    assert_calm(place, "off")


def test_a_run_shrinks_onto_what_is_left_from_the_last_step(place: Path) -> None:
    """Three ranks of uneven shards become two, which read by coordinates, from replicas too."""
    shares = ["balance.state=[3,2,1]"]
    ended = train(place, "three", [[life()], [life()], [life(end=20)]], 3, *shares, "resilience.on_lost_node=[shrink]")
    print(ended)
