"""Agents as equals, in one process: who may lead after whom, and when."""

import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.cluster import epochs
from phalanx.cluster.beats import Beats
from phalanx.cluster.circle import Circle
from phalanx.cluster.door import Door, bind
from phalanx.cluster.roster import Roster, member_of
from phalanx.cluster.wire import Message
from phalanx.records import Placement, RunPaths
from tests.helpers import run_ranks
from tests.unit.test_herald import Aloud

SECRET = "sixteen characters"
PATIENCE_S = 60.0


class Nodes:
    """Circles of nodes 0, 1, ... that have met; a node whose number is in `busy` still has ranks."""

    def __init__(self, count: int, run: Path) -> None:
        self.paths, self.busy = RunPaths(run), set[int]()
        places = [bind("127.0.0.1") for _ in range(count)]
        told = [{"node": node, "host": "", "devices": [["cpu", "any", True]]} for node in range(count)]
        members = tuple(member_of({**told[node], **place.told()}) for node, place in enumerate(places))
        beats = [Beats(place.beats, SECRET) for place in places]
        claim = functools.partial(epochs.claim, self.paths)
        self.circles = {
            node: Circle(
                members[node], Roster(1, 0, members), Door(place.listener, SECRET, lambda host, why: None), beats[node],
                Aloud(members[node], beats[node]), PATIENCE_S, claim, functools.partial(self.ballot, node), self.about,
            )
            for node, place in enumerate(places)
        }  # fmt: skip
        self.until(lambda: all(self.knows(node) for node in range(count)))

    def ballot(self, node: int) -> Message | None:
        return None if node in self.busy else {"of": node}

    def about(self, following: Roster) -> dict[str, Any]:
        return {"attempt": 2}

    def knows(self, node: int) -> bool:
        return all(link.up for link in self.circles[node]._links.values()) and len(self.circles[node]._links) > 0

    def turn(self) -> None:
        for circle in self.circles.values():
            circle.tend()
        time.sleep(0.005)

    def until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until, {node: circle.fenced for node, circle in self.circles.items()}
            self.turn()

    def lose(self, *lost: int) -> None:
        for node in lost:
            self.circles.pop(node).close()

    def told(self) -> list[list[Any]]:
        """What each thinks: epoch, leader, and whether it has to leave."""
        return [[each.roster.epoch, each.roster.leader, each.fenced is not None] for each in self.circles.values()]

    def decided(self) -> bool:
        return all(each.fenced is not None or each.roster.leader not in each.lost for each in self.circles.values())


@contextmanager
def nodes(count: int, run: str) -> Iterator[Nodes]:
    made = Nodes(count, Path(run))
    made.paths.root.mkdir(exist_ok=True)
    try:
        yield made
    finally:
        made.lose(*made.circles)


def after_a_dead_claimant(placement: Placement, folder: str) -> list[Any]:
    """Of five and of four nodes the first two die, of which the second had claimed the next epoch."""
    found = []
    for count in (5, 4):
        with nodes(count, f"{folder}/{count}") as there:
            assert epochs.claim(there.paths, 2, {"leader": 1}) == epochs.MINE
            there.lose(0, 1)
            there.until(lambda: any(each.lost for each in there.circles.values()))
            there.until(there.decided)
            found.append(there.told())
    return found


def test_a_majority_goes_on_after_one_who_died_with_the_epoch_in_hand(tmp_path: Path) -> None:
    majority, tie = run_ranks(after_a_dead_claimant, 1, folder=str(tmp_path))[0]
    assert majority == [[3, 2, False]] * 3
    assert tie == [[1, 0, True]] * 2  # that one may live, with the other half


def while_ranks_end(placement: Placement, folder: str) -> list[Any]:
    """The leader of four dies; what is there while a node has ranks, and after."""
    with nodes(4, f"{folder}/run") as there:
        there.busy = {1, 3}
        there.lose(0)
        there.until(lambda: there.paths.epoch(2).exists())
        before = there.told()
        there.busy = {3}
        for _ in range(100):
            there.turn()
        between = there.told()
        there.busy = set()
        there.until(lambda: all(each.roster.epoch > 1 for each in there.circles.values()))
        return [before, between, there.told(), sorted(there.circles[1].votes.items())]


def test_an_epoch_is_claimed_while_ranks_end_and_begins_when_all_have(tmp_path: Path) -> None:
    before, between, after, votes = run_ranks(while_ranks_end, 1, folder=str(tmp_path))[0]
    assert before == between == [[1, 0, False]] * 3
    assert after == [[2, 1, False]] * 3
    assert votes == [[node, {"of": node}] for node in (1, 2, 3)]


def with_a_word_for_the_leader(placement: Placement, folder: str) -> list[Any]:
    """A leader hears something and dies: what the next one hears, and the one after it."""
    with nodes(5, f"{folder}/run") as there:
        there.circles[3].insist({"stop": "SIGTERM"})
        heard = []
        for circle in (there.circles[0], there.circles[1]):
            there.until(lambda circle=circle: circle.spoken)  # type: ignore[misc]
            heard.append(circle.heard())
            there.lose(circle.me.node)
        return heard


def test_what_a_lost_leader_was_told_the_next_one_is_told_again(tmp_path: Path) -> None:
    heard = run_ranks(with_a_word_for_the_leader, 1, folder=str(tmp_path))[0]
    assert heard == [[[3, {"stop": "SIGTERM"}]], [[3, {"stop": "SIGTERM", "again": True}]]]


def as_they_die(placement: Placement, folder: str, seeds: list[int]) -> list[Any]:
    """Of seven nodes three die, one after another, the leader among them or not, at any time: before, while or after
    it is agreed on who is left. What the others think then, and who has led which epoch."""
    found = []
    for seed in seeds:
        draw, led = random.Random(seed), set[tuple[int, int]]()
        with nodes(7, f"{folder}/{seed}") as there:
            for _ in range(3):
                there.busy = set(draw.sample(sorted(there.circles), 2))
                there.lose(draw.choice(sorted(there.circles)[:4]))
                for _ in range(draw.choice([0, 2, 10, 40])):
                    there.turn()
                    led |= {(each.roster.epoch, node) for node, each in there.circles.items() if each.leading}
            there.busy = set()
            left = sorted(there.circles)
            there.until(lambda: all(each.roster.nodes == left for each in there.circles.values()))  # noqa: B023
            led |= {(each.roster.epoch, node) for node, each in there.circles.items() if each.leading}
            found.append([there.told(), sorted(led)])
    return found


def test_whoever_dies_when_a_majority_goes_on_and_no_epoch_has_two_leaders(tmp_path: Path) -> None:
    for told, led in run_ranks(as_they_die, 1, folder=str(tmp_path), seeds=list(range(20)))[0]:
        assert len({tuple(each) for each in told}) == 1 and not told[0][2], told
        assert len({epoch for epoch, _ in led}) == len(led), led
