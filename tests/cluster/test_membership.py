"""Agents as equals, in one process: who may lead after whom, and when."""

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import election
from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.heartbeat import HeartbeatSocket
from phalanx.elastic.membership.listener import ConnectionListener, bind
from phalanx.elastic.membership.member_list import (
    MemberList,
    list_monitored_nodes,
    member_list_to_message,
    parse_member,
)
from phalanx.elastic.membership.membership import Membership
from phalanx.elastic.node.node_agent import NodeAgent
from tests.helpers import ALL, run_ranks
from tests.unit.test_heartbeat_sender import Aloud

SECRET = "sixteen characters"
PATIENCE_S = 60.0


class Nodes:
    """Circles of nodes 0, 1, ... that have met; a node whose number is in `busy` still has ranks."""

    def __init__(self, count: int, run: Path) -> None:
        self.paths, self.busy, self.ready = RunPaths(run), set[int](), 1
        places = [bind("127.0.0.1") for _ in range(count)]
        told = [{"node": node, "host": "", "devices": [["cpu", "any", True]]} for node in range(count)]
        members = tuple(parse_member({**told[node], **place.to_message()}) for node, place in enumerate(places))
        beats = [HeartbeatSocket(place.beats, SECRET) for place in places]
        claim = functools.partial(election.claim, self.paths)
        self.circles = {
            node: Membership(
                members[node],
                MemberList(1, 0, members),
                ConnectionListener(place.listener, SECRET, lambda host, why: None),
                beats[node],
                Aloud(members[node], beats[node]),
                PATIENCE_S,
                claim,
                functools.partial(self.ballot, node),
                self.about,
            )
            for node, place in enumerate(places)
        }  # fmt: skip
        self.until(lambda: all(self.knows(node) for node in range(count)))
        for node, each in self.circles.items():  # long ago: who does not watch another one has never heard of it
            for other in set(each.member_list.nodes) - set(list_monitored_nodes(node, each.member_list)):
                each.detector.heard_at[other] = time.monotonic() - 100 * PATIENCE_S

    def ballot(self, node: int) -> Message | None:
        return None if node in self.busy else vote(node, self.ready)

    def about(self, following: MemberList) -> dict[str, Any]:
        return {"attempt": 2}

    def knows(self, node: int) -> bool:
        return all(link.is_up for link in self.circles[node].links.values()) and len(self.circles[node].links) > 0

    def turn(self, only: Sequence[Membership] = ()) -> None:
        for circle in only or self.circles.values():
            circle.poll_once()
        time.sleep(0.005)

    def until(self, holds: Callable[[], bool], only: Sequence[Membership] = ()) -> None:
        """Have all, or `only` some, take turns. Who was lost, and is in a roster that a leader made before it died, is
        lost again by its silence alone."""
        until = time.monotonic() + 3 * PATIENCE_S
        while not holds():
            assert time.monotonic() < until, {node: circle.fenced for node, circle in self.circles.items()}
            self.turn(only)

    def lose(self, *lost: int) -> None:
        for node in lost:
            self.circles.pop(node).close()

    def told(self) -> list[list[Any]]:
        """What each thinks: epoch, leader, and whether it has to leave."""
        return [
            [each.member_list.epoch, each.member_list.leader, each.fenced is not None] for each in self.circles.values()
        ]

    def at_rest(self) -> bool:
        """Whether nobody who goes on misses anybody, or takes part in what is being agreed on."""
        left = {node: each for node, each in self.circles.items() if each.fenced is None}
        return all(
            each.is_stable and all(other in left and node not in left[other].lost for other in each.member_list.nodes)
            for node, each in left.items()
            if each.is_leader
        ) and all(any(node in each.member_list.nodes for each in left.values() if each.is_leader) for node in left)

    def decided(self) -> bool:
        return all(
            each.fenced is not None or each.member_list.leader not in each.lost for each in self.circles.values()
        )


def vote(node: int, ready: int = 1) -> Message:
    """As a node gives it whose last attempt has its own number."""
    return {"ready": ready, "offered": ready, "last": {}, "held": [], "attempt": node}


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
            assert election.claim(there.paths, 2, {"leader": 1, "from": 1}) is None
            there.lose(0, 1)
            there.until(lambda: any(each.lost for each in there.circles.values()))
            there.until(there.decided)
            found.append(there.told())
    return found


def test_a_majority_goes_on_after_one_who_died_with_the_epoch_in_hand(tmp_path: Path) -> None:
    majority, tie = run_ranks(after_a_dead_claimant, 1, folder=str(tmp_path))[0]
    assert majority == [[3, 2, False]] * 3
    assert tie == [[1, 0, True]] * 2  # that one may live, with the other half


def all_heads_at_once(placement: Placement, folder: str) -> list[Any]:
    """Of seven nodes the three die at once that all others exchange signs of life with."""
    with nodes(7, f"{folder}/run") as there:
        there.lose(0, 1, 2)
        there.until(there.at_rest)
        there.until(lambda: all(each.member_list.epoch > 1 or each.fenced for each in there.circles.values()))
        return there.told()


def test_those_who_have_never_heard_of_each_other_go_on_when_all_who_watch_them_die(tmp_path: Path) -> None:
    told = run_ranks(all_heads_at_once, 1, folder=str(tmp_path))[0]
    assert told == [[2, 3, False]] * 4


def a_head_falls_silent(placement: Placement, folder: str) -> list[Any]:
    """Of six nodes one of the three that watch all falls silent. Node 3 sees it first, and is one of the three then;
    node 5, of which it has never heard, sees it next, and calls; the leader is last."""
    with nodes(6, f"{folder}/run") as there:
        silent = there.circles.pop(1)
        there.turn()  # what it has sent until now has been read
        three, five = there.circles[3], there.circles[5]
        three.detector.heard_at[1] = time.monotonic() - 2 * PATIENCE_S
        three.poll_once()
        three.poll_once()
        five.detector.heard_at[1] = time.monotonic() - 2 * PATIENCE_S
        five.detector.heard_at[3] = time.monotonic()  # the first that node 3 has sent
        there.until(lambda: 1 in five.lost and (five.fenced is not None or five.links[3].is_up), [three, five])
        for each in there.circles.values():
            each.detector.heard_at[1] = time.monotonic() - 2 * PATIENCE_S
        there.until(lambda: all(each.member_list.epoch > 1 or each.fenced for each in there.circles.values()))
        silent.close()
        return [*there.told(), three.member_list.nodes]


def test_who_comes_to_watch_others_does_not_take_them_for_lost(tmp_path: Path) -> None:
    told = run_ranks(a_head_falls_silent, 1, folder=str(tmp_path))[0]
    assert told == [*[[2, 0, False]] * 5, [0, 2, 3, 4, 5]]


def while_ranks_end(placement: Placement, folder: str) -> list[Any]:
    """The leader of five dies; what is there while a node has ranks, and after."""
    with nodes(5, f"{folder}/run") as there:
        there.busy = {1, 3}
        there.lose(0)
        there.until(lambda: there.paths.epoch(2).exists())
        before = there.told()
        there.busy = {3}
        for _ in range(100):
            there.turn()
        between = there.told()
        there.busy = set()
        there.until(lambda: all(each.member_list.epoch > 1 for each in there.circles.values()))
        return [before, between, there.told(), sorted(there.circles[1].election.votes.items())]


def test_an_epoch_is_claimed_while_ranks_end_and_begins_when_all_have(tmp_path: Path) -> None:
    before, between, after, votes = run_ranks(while_ranks_end, 1, folder=str(tmp_path))[0]
    assert before == between == [[1, 0, False]] * 4
    assert after == [[2, 1, False]] * 4
    assert votes == [[node, vote(node)] for node in (1, 2, 3, 4)]


def while_ranks_of_four_end(placement: Placement, folder: str) -> list[Any]:
    """The leader of four dies, and the next one before its ranks have ended: the other two are half of them. And what
    the next one says of its ranks, which changes while others end theirs."""
    found: list[Any] = []
    for dies in (True, False):
        with nodes(4, f"{folder}/{dies}") as there:
            there.busy = {1, 3}
            there.lose(0)
            there.until(lambda: there.circles[1].election.voters == {1, 2, 3})
            for _ in range(20):
                there.turn()
            found.append(there.paths.epoch(2).exists())
            if dies:
                there.lose(1)
            else:
                there.busy = {3}
                there.until(lambda: 1 in there.circles[1].election.votes)
                there.ready = 2
            there.busy = set()
            there.until(lambda: all(each.member_list.epoch > 1 for each in there.circles.values()))
            found.append([there.told(), next(iter(there.circles.values())).election.votes.get(1)])
    return found


def test_of_four_none_claims_an_epoch_while_ranks_end_as_the_others_could_not_pass_it(tmp_path: Path) -> None:
    early, (left, _), early_too, (all_left, given) = run_ranks(while_ranks_of_four_end, 1, folder=str(tmp_path))[0]
    assert not early and not early_too
    assert left == [[2, 2, False]] * 2
    assert all_left == [[2, 1, False]] * 3
    assert given == vote(1, ready=2)


def ready_unheard(placement: Placement, folder: str) -> list[Any]:
    """The leader of three dies; a node gets ready for a new division after its vote, and before another leads."""

    def nothing(*_: Any) -> Any:
        raise AssertionError("it prepares nothing, and does not lead")

    with nodes(3, f"{folder}/run") as there:
        there.busy = {1}
        there.lose(0)
        peer = NodeAgent(SECRET, nothing, nothing)
        peer.membership = there.circles[2]
        there.until(lambda: 2 in there.circles[1].election.votes)
        peer.division = 2
        peer.report_ready()
        there.busy = set()
        there.until(lambda: bool(there.circles[2].adopted), [there.circles[1], there.circles[2]])
        peer.poll_once()
        there.until(lambda: there.circles[1].has_messages)
        return [(node, vars(message)) for node, message in there.circles[1].receive()]


def test_what_a_node_got_ready_for_between_two_leaders_the_next_one_hears(tmp_path: Path) -> None:
    heard = run_ranks(ready_unheard, 1, folder=str(tmp_path))[0]
    assert heard == [[2, {"ready": 2, "held": []}]]


def cut_off_unheard(placement: Placement, folder: str, count: int, lost: list[int], first: int) -> list[Any]:
    """The leader of `count` loses some, and makes a roster without them that node 1, which it keeps, has not heard of
    when it loses the leader; the lost ones vote for that one. `first`: which of both goes on first."""
    with nodes(count, f"{folder}/run") as there:
        leader, others = there.circles[0], [there.circles[1], *(there.circles[node] for node in lost)]
        for node in lost:
            leader._lose(node, "cut")
        there.until(lambda: leader.member_list.epoch == 2, [leader])
        for circle in others:
            circle._lose(0, "cut")
        parts = [[leader, *(there.circles[node] for node in range(2, count) if node not in lost)], others]
        for part in (parts[first], parts[1 - first]):
            if part is parts[0]:
                leader._lose(1, "cut")
            there.until(lambda: part[0].fenced is not None or part[0].member_list.epoch > 2, part)  # noqa: B023
        for _ in range(100):
            there.turn()
        return [
            [each.member_list.epoch, each.member_list.nodes] for each in there.circles.values() if each.fenced is None
        ]


@pytest.mark.parametrize(
    ("count", "lost", "first", "left"),
    [
        (3, [2], 0, [[3, [0]]]),
        (3, [2], 1, [[3, [1, 2]]] * 2),
        (5, [3, 4], 0, [[3, [0, 2]]] * 2),
        (5, [3, 4], 1, [[3, [1, 3, 4]]] * 3),
    ],
)
def test_of_a_leader_and_a_majority_that_has_not_heard_its_last_roster_one_goes_on(
    tmp_path: Path, count: int, lost: list[int], first: int, left: list[list[Any]]
) -> None:
    found = run_ranks(cut_off_unheard, 1, folder=str(tmp_path), count=count, lost=lost, first=first)[0]
    assert found == left


def past_an_epoch(placement: Placement, folder: str, texts: list[dict[str, Any]]) -> list[Any]:
    """Of five the leader dies; the next epoch is taken already, as each of the texts says."""
    found = []
    for number, text in enumerate(texts):
        with nodes(5, f"{folder}/{number}") as there:
            assert election.claim(there.paths, 2, text) is None
            there.lose(0)
            there.until(lambda: all(each.member_list.epoch > 1 or each.fenced for each in there.circles.values()))
            found.append(there.told())
    return found


def test_only_an_epoch_of_an_election_whose_claimant_all_have_lost_is_passed(tmp_path: Path) -> None:
    """Not that of a job that begins, of another epoch, or of a higher node, whom voters may not have lost."""
    texts = [{"leader": 0, "from": 1}, {"leader": 0}, {"leader": 0, "from": 3}, {"leader": 2, "from": 1}]
    passed, *refused = run_ranks(past_an_epoch, 1, folder=str(tmp_path), texts=texts)[0]
    assert passed == [[3, 1, False]] * 4
    assert all(each[0] == [1, 0, True] and not any(leader == 1 for _, leader, _ in each) for each in refused)


def slow_files(placement: Placement, folder: str) -> list[Any]:
    """Of two and of three nodes the first dies, and the file system takes longer than a majority waits for it."""
    election.CLAIM_S, found = 0.1, []

    def claim(paths: RunPaths, epoch: int, text: dict[str, Any]) -> dict[str, Any] | None:
        time.sleep(1.0)
        return election.claim(paths, epoch, text)

    for count in (2, 3):
        with nodes(count, f"{folder}/{count}") as there:
            for each in there.circles.values():
                each.election.claim = functools.partial(claim, there.paths)
            there.lose(0)
            there.until(lambda: any(each.lost for each in there.circles.values()))
            there.until(there.decided)
            found.append([*there.told(), there.paths.epoch(2).exists()])
    return found


def test_half_of_the_nodes_wait_for_a_slow_file_system_and_a_majority_does_not(tmp_path: Path) -> None:
    half, majority = run_ranks(slow_files, 1, folder=str(tmp_path))[0]
    assert half == [[2, 1, False], True]
    assert majority == [[2, 1, False], [2, 1, False], False]


def with_a_word_for_the_leader(placement: Placement, folder: str) -> list[Any]:
    """A leader hears something and dies: what the next one hears, and the one after it."""
    with nodes(5, f"{folder}/run") as there:
        there.circles[3].send_reliably({"stop": "SIGTERM"})
        heard = []
        for circle in (there.circles[0], there.circles[1]):
            there.until(lambda circle=circle: circle.has_messages)  # type: ignore[misc]
            heard.append([(node, vars(message)) for node, message in circle.receive()])
            there.lose(circle.me.node)
        return heard


def test_what_a_lost_leader_was_told_the_next_one_is_told_again(tmp_path: Path) -> None:
    heard = run_ranks(with_a_word_for_the_leader, 1, folder=str(tmp_path))[0]
    said = {"stop": "SIGTERM", "reason": ""}
    assert heard == [[[3, said | {"again": False}]], [[3, said | {"again": True}]]]


def last_words(placement: Placement, folder: str) -> list[Any]:
    """Which others have heard how the job ended when the first of four nodes, which says it, dies while it waits for
    one of them to take it."""

    def dies(channel: Channel, why: str, patience_s: float = 0.0) -> None:
        raise InterruptedError

    with nodes(4, f"{folder}/run") as there:
        linger, Channel.linger = Channel.linger, dies  # type: ignore[method-assign]
        with contextlib.suppress(InterruptedError):
            there.circles[0].close({"finish": 0, "text": "the run is done"})
        Channel.linger = linger  # type: ignore[method-assign]
        others = [there.circles[node] for node in (1, 2, 3)]
        for _ in range(100):
            there.turn(only=others)
        return [each.finished for each in others]


def test_all_hear_how_the_job_ended_before_one_of_them_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(last_words, 1, folder=str(tmp_path))[0] == [True] * 3


def with_a_roster_half_told(placement: Placement, folder: str, told: list[int]) -> list[Any]:
    """The leader of seven dies, and the next one, too, when it has told only some of its roster."""
    election.VOTES_S = 1e9
    with nodes(7, f"{folder}/run") as there:
        there.lose(0)
        second = there.circles[1]
        second.broadcast = lambda message, but=None: [second.send(node, message) for node in told]  # type: ignore
        there.until(lambda: all(there.circles[node].member_list.epoch == 2 for node in (1, *told)))
        there.lose(1)
        there.until(lambda: all(each.member_list.nodes == [2, 3, 4, 5, 6] for each in there.circles.values()))
        return there.told()


@pytest.mark.parametrize("told", [[2], [3], [4, 6], [2, 3, 4, 5]])
def test_what_a_lost_leader_has_told_only_some_they_hand_on(tmp_path: Path, told: list[int]) -> None:
    found = run_ranks(with_a_roster_half_told, 1, folder=str(tmp_path), told=told)[0]
    assert found == [[3, 2, False]] * 5


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
                    led |= {(each.member_list.epoch, node) for node, each in there.circles.items() if each.is_leader}
            there.busy = set()
            left = sorted(there.circles)
            there.until(lambda: all(each.member_list.nodes == left for each in there.circles.values()))  # noqa: B023
            led |= {(each.member_list.epoch, node) for node, each in there.circles.items() if each.is_leader}
            found.append([there.told(), sorted(led)])
    return found


def test_whoever_dies_when_a_majority_goes_on_and_no_epoch_has_two_leaders(tmp_path: Path) -> None:
    for told, led in run_ranks(as_they_die, 1, folder=str(tmp_path), seeds=list(range(20 if ALL else 10)))[0]:
        assert len({tuple(each) for each in told}) == 1 and not told[0][2], told
        assert len({epoch for epoch, _ in led}) == len(led), led


def as_they_are_cut(placement: Placement, folder: str, seeds: list[int]) -> list[Any]:
    """Of three to five nodes some lose others, in one direction or both, at any time, and only some take turns; then
    all do, until nothing is left to be agreed on. Who leads then, and with whom."""
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        count = draw.randint(3, 5)
        with nodes(count, f"{folder}/{seed}") as there:
            for _ in range(draw.randint(2, 5)):
                one, other = draw.choice([draw.sample(range(count), 2), draw.sample(range(2), 2), [0, count - 1]])
                there.circles[one]._lose(other, "cut")
                if draw.random() < 0.3:
                    there.circles[other]._lose(one, "cut")
                awake = [there.circles[node] for node in {one, *draw.sample(range(count), draw.choice([0, 0, 2]))}]
                for _ in range(draw.choice([1, 20, 60])):
                    there.turn(awake)
            there.until(there.at_rest)
            found.append(
                [
                    [node, each.member_list.epoch, each.member_list.nodes]
                    for node, each in there.circles.items()
                    if each.is_leader and each.fenced is None
                ]
            )
    return found


def test_whoever_is_cut_off_from_whom_not_two_lead_for_good(tmp_path: Path) -> None:
    for leading in run_ranks(as_they_are_cut, 1, folder=str(tmp_path), seeds=list(range(30 if ALL else 10)))[0]:
        assert len(leading) <= 1, leading


def after_a_member_wants_to_lead(placement: Placement, folder: str, mad: int) -> list[Any]:
    """One of four says that it leads, with all others or without some, though the leader lives."""
    found = []
    for without in ((), (0,)):
        with nodes(4, f"{folder}/{len(without)}") as there:
            it = there.circles.pop(mad)
            members = tuple(member for member in it.member_list.members if member.node not in without)
            member_list = member_list_to_message(MemberList(2, mad, members))
            for link in it.links.values():
                assert link.channel is not None
                link.channel.send({"roster": member_list})
                link.channel.send({"offer": {"division": 7}})
            obeyed: list[Any] = []
            others = list(there.circles.values())

            def heard(circles: list[Membership] = others, obeyed: list[Any] = obeyed) -> bool:
                obeyed += [node for each in circles for node, _ in each.receive() if node == each.member_list.leader]
                return all(each.member_list.epoch > 1 and each.fenced is None for each in circles)

            there.until(heard)
            found.append([there.told(), sorted({tuple(each.member_list.nodes) for each in others}), obeyed])
            it.close()
    return found


@pytest.mark.parametrize("mad", [1, 3])
def test_one_message_takes_the_lead_from_nobody_who_lives(tmp_path: Path, mad: int) -> None:
    """Who wants that is given up by the leader; be it the one who would be next."""
    left = [[node for node in range(4) if node != mad]]
    assert (
        run_ranks(after_a_member_wants_to_lead, 1, folder=str(tmp_path), mad=mad)[0]
        == [[[[2, 0, False]] * 3, left, []]] * 2
    )
