"""One turn of a node among others: whom it lets in, whom it believes, and for how long it waits to hear of them."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.elastic.membership.channel import Channel, Message, start_connecting
from phalanx.elastic.membership.election import VOTES_S
from phalanx.elastic.membership.heartbeat import DECLARED_LOST, LIVES, Heartbeat
from phalanx.elastic.membership.member_list import member_list_to_message
from phalanx.elastic.membership.membership import GIVEN_UP, Membership
from phalanx.elastic.membership.messages import build_message
from tests.cluster.test_membership import PATIENCE_S, Nodes, vote
from tests.helpers import wait_until


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Nodes]:
    """Three nodes that have met."""
    made = Nodes(3, tmp_path)
    yield made
    made.lose(*made.circles)


class Called:
    """A door that somebody has come through who says `hello`."""

    def __init__(self, circle: Membership, there: Nodes, **hello: object) -> None:
        self._open, self._circle = circle.listener.accept, circle
        other = there.circles[0 if circle.me.node else 1]
        self.channel = start_connecting((other.me.address, other.me.port))
        circle.listener.accept = lambda: [(self.channel, dict(hello))]  # type: ignore[method-assign]
        circle._let_in()
        circle.listener.accept = self._open  # type: ignore[method-assign]


def test_who_calls_as_no_member_is_the_owners_to_hear(there: Nodes) -> None:
    called = Called(there.circles[0], there, role="status")
    assert there.circles[0].callers == [(called.channel, {"role": "status"})]
    assert called.channel.lost is None
    called.channel.close("over")
    there.circles[0].callers.clear()


@pytest.mark.parametrize("node", [True, "2", None, 7, 2])
def test_who_calls_as_a_member_has_that_members_token(there: Nodes, node: object) -> None:
    """Anything else is no member; 2 is one, with another token."""
    called = Called(there.circles[0], there, role="peer", node=node, token="00" * 8)
    assert called.channel.lost is not None
    assert there.circles[0].callers == []
    assert there.circles[0].links[2].channel is not called.channel


def test_a_member_that_is_here_already_or_was_given_up_is_not_taken_in_twice(there: Nodes) -> None:
    first, two = there.circles[0], there.circles[2].me
    hello = {"role": "peer", "node": 2, "token": two.token}
    assert Called(first, there, **hello).channel.lost is not None  # it is here
    first._lose(2, "cut")
    assert Called(first, there, **hello).channel.lost is not None
    assert 2 not in first.links


def test_a_member_that_calls_itself_takes_the_place_of_a_call_to_it(there: Nodes) -> None:
    last, zero = there.circles[2], there.circles[0].me
    link = last.links[0]
    before, link.channel = link.channel, start_connecting((zero.address, zero.port))
    half, link.handshake = link.channel, object()  # type: ignore[assignment]
    link.waiting = [{"word": 1}]
    said: list[Message] = []
    Channel.send, inner = (lambda self, message: said.append(message)), Channel.send  # type: ignore[method-assign, assignment]
    called = Called(last, there, role="peer", node=0, token=zero.token)
    Channel.send = inner  # type: ignore[method-assign]
    assert (link.channel, link.handshake, link.waiting, said) == (called.channel, None, [], [{"word": 1}])
    assert half.lost is not None
    assert before is not None
    before.close("over")


def test_only_the_leader_says_that_a_job_is_over(there: Nodes) -> None:
    for node, word, over in ((1, "finish", False), (0, "start", False), (0, "finish", True), (0, "dropped", True)):
        circle = there.circles[2]
        circle.finished = False
        circle._take(node, build_message({word: 0}))
        assert circle.finished is over, (node, word)


def test_a_beat_counts_once_and_only_from_the_very_process_that_is_a_member(there: Nodes) -> None:
    first, one = there.circles[0], there.circles[1].me
    token, number = bytes.fromhex(one.token), 10**6

    def heard(*beats: Heartbeat) -> float:
        """Seconds from when node 1 was heard last, long ago, to when it was with these."""
        first.detector.heard_at[1] = 0.0
        for beat in beats:
            there.circles[2].detector.heartbeats.send(beat, (first.me.address, first.me.beats))
        marker = Heartbeat(LIVES, 1, 2, bytes.fromhex(there.circles[2].me.token), 2 * number + len(sent))
        there.circles[2].detector.heartbeats.send(marker, (first.me.address, first.me.beats))
        sent.append(marker)
        first.detector.heard_at[2] = 0.0
        until = time.monotonic() + PATIENCE_S
        while first.detector.heard_at[2] == 0.0 and time.monotonic() < until:
            assert not first.detector.receive(5.0)
        return first.detector.heard_at[1]

    sent: list[Heartbeat] = []
    first.detector._numbers = {}
    assert heard(Heartbeat(LIVES, 1, 1, b"another!", number)) == 0.0
    assert heard(Heartbeat(LIVES, 1, 1, token, 0)) == 0.0  # beats are counted from 1
    assert heard(Heartbeat(LIVES, 1, 1, token, 1)) == 5.0
    assert heard(Heartbeat(LIVES, 1, 1, token, number)) == 5.0
    assert heard(Heartbeat(LIVES, 1, 1, token, number)) == 0.0  # again, or late
    assert heard(Heartbeat(LIVES, 1, 1, token, number - 1)) == 0.0
    assert heard(Heartbeat(DECLARED_LOST, 1, 0, b"another!", 1)) == 0.0


@pytest.mark.parametrize(("ago_ms", "fenced"), [(9_000, True), (10_500, False), (15_000, False), (-1_000, False)])
def test_who_was_given_up_hears_it_unless_the_answer_is_old(there: Nodes, ago_ms: int, fenced: bool) -> None:
    """Or of a beat that this process has not sent yet: its number was another's."""
    first = there.circles[0]
    first.detector.sender.next_number = lambda: 20_000  # type: ignore[method-assign]
    beat = Heartbeat(DECLARED_LOST, 2, 0, bytes.fromhex(first.me.token), 20_000 - ago_ms)
    there.circles[2].detector.heartbeats.send(beat, (first.me.address, first.me.beats))
    marker = Heartbeat(LIVES, 1, 2, bytes.fromhex(there.circles[2].me.token), 10**6)
    there.circles[2].detector.heartbeats.send(marker, (first.me.address, first.me.beats))
    two = there.circles[2].me.token
    wait_until(lambda: first.poll_once() or first.fenced is not None or first.detector._numbers.get(two) == 10**6)
    assert first.fenced == (GIVEN_UP if fenced else None)


def test_a_node_is_lost_once_and_only_a_member_can_be(there: Nodes) -> None:
    circle = there.circles[0]
    circle._lose(7, "never seen")
    circle._lose(2, "the first reason")
    circle._lose(2, "another")
    assert circle.lost == {2: "the first reason"}
    assert [(member.node, why) for member, why in circle.losses] == [(2, "the first reason")]


def test_who_is_fenced_decides_nothing(there: Nodes) -> None:
    circle, elected = there.circles[1], list[float]()
    circle.election._elect = elected.append  # type: ignore[method-assign]
    circle.lost = {circle.member_list.leader: "silent"}
    circle.fenced = "given up"
    circle._agree(1.0)
    assert elected == []
    circle.fenced = None
    circle._agree(2.0)
    assert elected == [2.0]


def test_who_overslept_gives_the_others_that_time_back(there: Nodes) -> None:
    circle = there.circles[0]
    circle.detector._turn, circle.detector.heard_at = 10.0, {1: 9.5, 2: 17.0}
    circle.detector.wake(15.0)
    assert circle.detector.heard_at == {1: 14.5, 2: 17.0}
    circle.detector.heard_at[1] = 12.0
    circle.detector.wake(20.0)
    assert circle.detector.heard_at == {1: 17.0, 2: 17.0 + 3.0}
    circle.detector.wake(20.2)  # in time
    assert circle.detector.heard_at[1] == 17.0


def test_how_long_a_silent_member_is_waited_for(there: Nodes) -> None:
    circle, now = there.circles[0], time.monotonic()
    for other in (1, 2):
        circle.detector.heard_at[other] = now
    assert not circle.detector.is_silent(1)
    circle.detector.heard_at[2] = now - 0.75 * PATIENCE_S
    assert circle.detector.is_silent(2) and not circle.detector.is_silent(0)
    assert 0.2 * PATIENCE_S < circle.due_s() <= 0.25 * PATIENCE_S
    circle._judge(now)
    assert circle.lost == {}
    circle._judge(now + 0.26 * PATIENCE_S)
    assert list(circle.lost) == [2]
    assert 0.9 * PATIENCE_S < circle.due_s() <= PATIENCE_S  # of the other one
    circle.leave("asked to")
    assert circle.due_s() > 1000 * PATIENCE_S


def test_who_begins_to_watch_another_gives_it_time_to_be_heard(there: Nodes) -> None:
    circle, now = there.circles[0], time.monotonic()
    circle.detector._watched, circle.detector.heard_at[1], circle.detector.heard_at[2] = (
        {2},
        now - 9 * PATIENCE_S,
        now + 9 * PATIENCE_S,
    )
    circle._judge(now)
    assert circle.detector.heard_at[1] == now + PATIENCE_S
    assert circle.detector.heard_at[2] == now + 9 * PATIENCE_S


def test_poll_looks_at_all_that_may_speak_and_at_nothing_when_it_is_over(there: Nodes) -> None:
    circle = there.circles[0]
    channels = [link.channel for link in circle.links.values() if link.channel is not None]
    looked = set(circle.descriptors())
    wanted = {
        *circle.detector.heartbeats.descriptors(),
        *circle.listener.descriptors(),
        *(channel.fileno() for channel in channels),
    }
    assert len(channels) == 2 and len(wanted) == 4 and looked == wanted
    gone = channels[0].fileno()
    there.circles[1 if circle.links[1].channel is channels[0] else 2].close()
    wait_until(lambda: not list(channels[0].receive()) and channels[0].lost is not None)
    assert set(circle.descriptors()) == wanted - {gone}
    circle.leave("asked to")
    assert circle.descriptors() == {}


def test_a_roster_of_somebody_who_was_not_voted_for_is_not_followed(there: Nodes) -> None:
    last = there.circles[2]
    member_list = last.member_list.with_members(last.member_list.members, 1)
    for said in (
        last.member_list,
        member_list,
    ):  # that of this epoch is no news; the other one's leader was not voted for
        last._follow(1, said)
        assert last.member_list.epoch == 1
    assert list(last.lost) == [1]
    last.election.voted, last.lost = (1, True), {}
    last._take(1, build_message({"roster": member_list_to_message(member_list)}))
    assert (
        last.member_list.epoch,
        last.member_list.leader,
        last.previous_member_list.leader if last.previous_member_list else None,
    ) == (2, 1, 0)


@pytest.mark.parametrize(
    ("voted", "state", "follows"),
    [
        (None, "leaderless", True),
        ((2, True), "leaderless", True),
        ((0, True), "leaderless", True),  # whose roster it is
        ((1, True), "leaderless", False),
        (None, "led", False),
        (None, "claiming", False),
        (None, "claimed", False),
    ],
)
def test_a_lost_leaders_roster_is_taken_from_another_unless_a_vote_may_have_gone_elsewhere(
    there: Nodes, voted: tuple[int, bool] | None, state: str, follows: bool
) -> None:
    circle = there.circles[1]
    following = replace(circle.member_list, epoch=2)
    circle.election.voted, circle.election.voters = voted, {1, 2}
    if state != "led":
        circle._lose(0, "cut")
    if state == "claiming":
        claiming = SimpleNamespace(result=lambda: None, cancel=lambda: None)
        circle.election.claiming = claiming  # type: ignore[assignment]
    circle.election._claimed = (following, True) if state == "claimed" else None
    circle._take(2, build_message({"roster": member_list_to_message(following)}))
    assert circle.member_list.epoch == (2 if follows else 1)
    if follows:
        assert list(circle.lost) == [0]  # who hands it on does not know better
        there.circles[2]._lose(0, "cut")
        there.until(lambda: there.circles[2].member_list.epoch == 2, [there.circles[2]])  # so it is to who had voted


def test_of_two_nodes_of_different_epochs_the_one_that_is_behind_gets_the_roster_and_votes_again(there: Nodes) -> None:
    ahead, behind = there.circles[2], there.circles[1]
    ahead._adopt(replace(ahead.member_list, epoch=2))
    behind.election.claim = None  # there are no files
    for circle in (ahead, behind):
        circle._lose(0, "cut")
    ahead._agree(0.0)
    assert ahead.election.voted == (1, True)
    ahead._take(1, build_message({"follow": 1, "ballot": None}))
    assert ahead.election.voted is None and ahead.election.voters == set()
    ahead._agree(0.0)
    there.until(lambda: behind.member_list.epoch == 3, [behind])
    assert behind.member_list.nodes == [1, 2] and behind.election.votes.keys() == {1, 2}


def test_a_call_that_was_not_answered_is_made_again(there: Nodes) -> None:
    last = there.circles[2]
    link = last.links[0]
    for reason in ("lost", "failed", "late"):
        link.close("for the test")
        last.links.call([there.circles[0].me], link.again_at)
        link.channel = None
        last.links.call([there.circles[0].me], link.again_at + 1)
        assert link.channel is not None and link.handshake is not None
        if reason == "lost":
            link.channel.close("cut")
        elif reason == "failed":
            link.handshake.failed = "it has another secret"
        else:
            link.handshake.until = 0.0
        assert last.links.receive(0) == ([], None)
        assert link.channel is None and link.handshake is None and link.again_at > time.monotonic(), reason


def test_a_candidate_waits_for_votes_though_another_one_was_to_lead_before(tmp_path: Path) -> None:
    made = Nodes(5, tmp_path)
    two, now = made.circles[2], time.monotonic()
    two._lose(0, "cut")
    assert two.election.decide(now) is None and two.election.voted == (1, True)
    two._lose(1, "silent")
    later = now + 10 * VOTES_S
    assert two.election.decide(later) is None
    assert two.election.claiming is None and two.election.decide(later + 0.9 * VOTES_S) is None
    assert "no other node of 5 can be reached" in str(two.election.decide(later + 1.1 * VOTES_S))
    made.lose(*made.circles)


def test_all_can_be_reached_once_every_link_to_another_is_up(there: Nodes) -> None:
    circle = there.circles[0]
    assert circle.is_fully_connected  # there is none to oneself
    circle.links.remove(2, "cut")
    assert not circle.is_fully_connected
    circle._lose(2, "cut")
    assert circle.is_fully_connected


def test_without_files_half_of_the_nodes_go_on_no_more_though_they_were_a_majority_before(tmp_path: Path) -> None:
    made = Nodes(6, tmp_path)
    one = made.circles[1]
    one.election.claim = None
    one._lose(0, "cut")
    for node in (2, 3, 4, 5):
        one.election.take_vote(node, None)
    assert one.election.decide(0.0) is None and one.election.has_claimed
    for node in (4, 5):
        one._lose(node, "cut")
    for node in (2, 3):
        one.election.take_vote(node, vote(node))
    assert "only 2 other nodes of 6" in str(one.election.decide(1.0))
    made.lose(*made.circles)
