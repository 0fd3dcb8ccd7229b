"""A training run on several nodes goes on without any of its nodes, and its curve is the one of an undisturbed run."""

import signal
from pathlib import Path

import pytest

from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from tests.cluster.lives import RECIPE, STEPS, curve, events, life, state, train
from tests.dist import command
from tests.helpers import ALL

long = pytest.mark.skipif(not ALL, reason="a life of a cluster more: make test-all")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a recipe, and the run of two nodes that nothing happens to."""
    folder = command.write_place(tmp_path_factory.mktemp("losses"))
    (folder / "recipe.yaml").write_text(RECIPE)
    ended = train(folder, "calm", [[life()], [life()]], 2)
    assert [lives[-1][0] for lives in ended] == [0, 0], ended
    return folder


@pytest.mark.parametrize("lost", [0, 1] if ALL else [0])
def test_a_spare_takes_the_place_of_any_node_and_every_bit_stays(place: Path, lost: int) -> None:
    run = f"spare-{lost}"
    lives = [[life()], [life()], [life()]]
    lives[lost] = [life(end=10)]
    ended = train(place, run, lives, 2)
    codes = [each[-1][0] for each in ended]
    assert codes == [-9 if node == lost else 0 for node in range(3)], ended
    assert state(place / run) == state(place / "calm")
    assert curve(place / run) == curve(place / "calm")
    (told,) = events(place / run, EventKind.NODE_LOST)
    assert told["node"] == lost
    (incident,) = events(place / run, EventKind.INCIDENT)
    assert incident["done"] == f"node 2 takes the ranks of node {lost}"
    assert f"node {lost} (" in incident["what"]
    assert incident["step"] >= 7
    phases = incident["phases"]
    assert 0 <= phases["agreed"] <= phases["ordered"] < phases["restored"] <= incident["seconds"]
    print(f"from the loss of node {lost} to the next step: {incident['seconds']:.2f} s")
    (finished,) = events(place / run, EventKind.FINISHED)
    assert finished["step"] == STEPS
    assert not (place / f"meet-{run}").exists()
    leader = ended[1 if lost == 0 else 0][-1][1]
    assert f"node {lost} (" in leader  # whoever leads shows it
    assert "training resumed with step" in leader


@long
def test_a_node_0_that_is_not_fit_only_brings_the_others_together(place: Path) -> None:
    ended = train(place, "unfit", [[life(files=200)], [life()], [life()]], 2)
    assert [each[-1][0] for each in ended] == [ExitCode.UNHEALTHY, 0, 0], ended
    assert "this process may open 200 files" in ended[0][-1][1]
    assert state(place / "unfit") == state(place / "calm")
    assert curve(place / "unfit") == curve(place / "calm")
    (told,) = events(place / "unfit", EventKind.NODE_LOST)
    assert told["node"] == 0
    assert not events(place / "unfit", EventKind.RESTARTED)


def test_a_node_0_that_is_stopped_as_the_others_become_members_stops_them_too(place: Path) -> None:
    ended = train(place, "entry", [[life() | {"stopped_at_entry": True}], [life()]], 2)
    assert [each[-1][0] for each in ended] == [ExitCode.STOPPED] * 2, ended
    assert not events(place / "entry", EventKind.NODE_LOST)


@pytest.mark.parametrize("lost", [0, 1] if ALL else [1])
def test_a_run_shrinks_and_takes_the_node_back_when_it_returns(place: Path, lost: int) -> None:
    run = f"shrunk-{lost}"
    lives = [[life()], [life()]]
    lives[lost] = [life(end=6), life(begin=20)]  # which the first attempt does not reach before it is ended
    # The node that is left waits between its steps, so that it still trains when the other one is back.
    slow = "slow:rank=0,attempt=2,step=1,steps=60,factor=20"
    ended = train(place, run, lives, 2, "train.steps=60", "--inject", slow)
    assert [each[-1][0] for each in ended] == [0, 0], ended
    worlds = [event["world"] for event in events(place / run, EventKind.RUN_STARTED)]
    assert worlds == [2, 1, 2]
    assert curve(place / run)[: 2 * STEPS] == pytest.approx(curve(place / "calm"), rel=1e-9)
    assert len(curve(place / run)) == 2 * 60
    (joined,) = [event for event in events(place / run, EventKind.NODE_JOINED) if event["attempt"] > 1]
    assert joined["node"] == lost


@long
def test_a_frozen_agent_is_given_up_and_leaves_when_it_thaws(place: Path) -> None:
    lives = [[life()], [life(end=10, number=signal.SIGSTOP, thaw_s=8.0)], [life()]]
    ended = train(place, "frozen", lives, 2)
    codes = [each[-1][0] for each in ended]
    assert codes == [0, ExitCode.FAILED, 0], ended
    assert "this node ended its ranks and exits" in ended[1][-1][1]
    assert state(place / "frozen") == state(place / "calm")
    (told,) = events(place / "frozen", EventKind.NODE_LOST)
    assert told["reason"] == "no heartbeat arrived for 3 s"


@long
def test_a_leader_that_was_frozen_leaves_all_that_the_others_need_and_comes_back(place: Path) -> None:
    lives = [[life(end=10, number=signal.SIGSTOP, thaw_s=6.0), life()], [life()]]
    ended = train(place, "thawed", lives, 2, "train.steps=700")  # it still trains when the node is back
    assert [each[-1][0] for each in ended] == [0, 0], ended
    assert "this node ended its ranks and exits" in ended[0][0][1]
    worlds = [event["world"] for event in events(place / "thawed", EventKind.RUN_STARTED)]
    assert worlds == [2, 1, 2]
    assert curve(place / "thawed")[: 2 * STEPS] == pytest.approx(curve(place / "calm"), rel=1e-9)


@long
def test_a_leader_that_is_started_again_at_once_comes_back(place: Path) -> None:
    """It may be there before the other node has taken the lead."""
    lives = [[life(end=10), life()], [life()]]
    ended = train(place, "again", lives, 2, "resilience.on_lost_node=[wait]")
    assert [each[-1][0] for each in ended] == [0, 0], ended
    assert state(place / "again") == state(place / "calm")
    assert [event["node"] for event in events(place / "again", EventKind.NODE_LOST)] == [0]


@pytest.mark.parametrize("spares", [1, 0] if ALL else [1])
def test_a_node_that_is_to_be_left_is_left_and_no_step_is_lost(place: Path, spares: int) -> None:
    run = f"drained-{spares}"
    watched = life(end=6) | {"asked": ["1", "drain"]}
    slow = "slow:rank=0,step=6,steps=18,factor=10"  # until somebody has read it
    ended = train(place, run, [[watched], [life()], *[[life()]] * spares], 2, "--inject", slow)
    assert [each[-1][0] for each in ended] == [0] * (2 + spares), ended
    warnings = [event["message"] for event in events(place / run, EventKind.WARNING)]
    assert any(said.startswith("node 1 (") and "will be drained (its fan is loud)" in said for said in warnings), (
        warnings
    )
    assert [event["step"] for event in events(place / run, EventKind.RESUMED)][-1] >= 6
    if spares:
        assert state(place / run) == state(place / "calm")
    assert curve(place / run) == pytest.approx(curve(place / "calm"), rel=1e-9)


def test_a_rank_that_hangs_on_another_node_is_named_and_no_node_is_lost(place: Path) -> None:
    """Rank 1 is stopped while rank 0, on node 0, waits for it; then rank 0 sleeps, and rank 1 waits."""
    planned = ["freeze:rank=1,step=10", "hang:rank=0,step=16,attempt=2"]
    ended = train(place, "hung", [[life()], [life()]], 2, "resilience.hang_timeout_s=4", "--inject", "; ".join(planned))
    assert [each[-1][0] for each in ended] == [0, 0], ended
    assert state(place / "hung") == state(place / "calm")
    assert events(place / "hung", EventKind.NODE_LOST) == []
    frozen, hung = events(place / "hung", EventKind.WORKER_DIED)
    assert (frozen["rank"], frozen["type"], frozen["step"]) == (1, "Hang", 10)
    assert "stopped by a signal, while rank 0 waits in" in frozen["reason"]
    assert (hung["rank"], hung["type"], hung["step"]) == (0, "Hang", 16)
    assert "in forward of step 16, while rank 1 waits in" in hung["reason"]
    incidents = events(place / "hung", EventKind.INCIDENT)
    assert [each["done"] for each in incidents] == ["all ranks restart"] * 2
    paths = RunPaths(place / "hung")
    for attempt, rank in ((1, 0), (2, 0), (2, 1)):  # a stopped process writes nothing
        assert "hread 0x" in paths.log(attempt, rank).read_text(), "the stacks of all ranks are in their logs"
