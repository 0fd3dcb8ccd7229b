"""A leader that dies between any two of the things it does, or in the midst of one: whoever leads next goes on. One
that is only cut off goes on for a while, too, and nothing that its ranks write counts."""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.member_list import AgentMember, MemberList, classify_quorum
from phalanx.elastic.supervisor.decide import decide
from phalanx.elastic.supervisor.failover import (
    NOBODY_YET,
    describe_division,
    describe_restart_budget,
    find_active_writers,
    make_failover_state,
    make_initial_state,
    make_node_state,
    renew_offer,
)
from phalanx.elastic.supervisor.state import (
    DivisionPrepared,
    DropNode,
    EndAttempt,
    FinishJob,
    JobPhase,
    NodeDrainChanged,
    NodeInventoryReported,
    NodeJoined,
    NodeLost,
    NodeReady,
    PrepareDivision,
    RanksEnded,
    RecoveryPolicy,
    RestartBudget,
    SendOffer,
    StartAttempt,
    SupervisorAction,
    SupervisorEvent,
    Tick,
)
from phalanx.recovery import fencing
from tests.helpers import ALL

DEVICES = (("cpu", "any", True),)


class Dead(Exception):
    """The leader is gone."""


@dataclass
class Agent:
    """What a node was told, and the attempt whose ranks it runs."""

    offer: Message
    made: Message  # what it has prepared: anew for another number alone
    ready: int = 1
    start: Message | None = None
    running: int = 0
    last: Message = field(default_factory=dict)

    def end(self) -> None:
        if self.running:
            self.running, self.last = 0, {"attempt": self.running, "code": 1}


class Job:
    """Agents, and the one that leads them: it says `fuse` more messages, and then it is dead (None: it lives)."""

    def __init__(self, nodes: int, spares: int, policy: RecoveryPolicy) -> None:
        plan = [(node, 1) for node in range(nodes)]
        offer = describe_division(1, plan, [DEVICES] * nodes, policy)
        numbers = range(nodes + spares)
        members = tuple(AgentMember(n, f"host{n}", f"{n:016x}", "127.0.0.1", 1, 2, DEVICES) for n in numbers)
        self.policy, self.member_list = policy, MemberList(1, 0, members)
        self.agents = {number: Agent(offer, offer) for number in numbers}
        self.fuse: int | None = None
        self.now, self.over, self.offers, self.early, self.cut_off = 0.0, False, False, False, False
        self.file: Message = {"since": 1, "attempt": 1}  # that of the newest epoch
        self.ordered: list[tuple[int, int]] = []  # epochs and numbers of attempts
        self.heard: list[SupervisorEvent] = []  # by the leader, and not yet taken
        self.state = make_initial_state(offer, map(make_node_state, members), 1, 0)
        self.take(Tick(0.0))

    def take(self, event: SupervisorEvent) -> None:
        """The leader takes an event. Raises Dead."""
        self.state, actions = decide(self.state, event)
        for action in actions:
            self.perform(action)

    def settle(self) -> None:
        """The leader takes all that it has been told."""
        if self.offers:
            self.offers = False
            self.perform(SendOffer(self.state.division))
        while self.heard and not self.over:
            self.take(self.heard.pop(0))

    def perform(self, action: SupervisorAction) -> None:
        match action:
            case EndAttempt():
                self.tell_all({"end": action.attempt})
            case SendOffer():
                self.tell_all({"offer": self.agents[self.member_list.leader].offer})
            case PrepareDivision():
                self.say()
                devices = [DEVICES * ranks for _, ranks in action.plan]
                offer = describe_division(action.division, action.plan, devices, self.policy)
                self.agents[self.member_list.leader].offer = offer
                self.heard.append(DivisionPrepared(self.now, action.division))
            case StartAttempt():
                self.ordered.append((self.member_list.epoch, action.attempt))
                self.tell_all({"start": {
                    "attempt": action.attempt, "epoch": self.member_list.epoch, "division": action.division,
                    "seats": list(action.seats), "budget": describe_restart_budget(self.state),
                }})  # fmt: skip
            case DropNode():
                assert self.cut_off, "nobody is slow here"
                self.over = True  # it is a minority
            case FinishJob():
                self.over = True

    def tell_all(self, message: Message) -> None:
        for node in self.living():
            self.say()
            self.hear(node, self.agents[node], message)

    def say(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Dead

    def hear(self, node: int, agent: Agent, message: Message) -> None:
        """An agent does as it is told."""
        if "end" in message and agent.running == message["end"]:
            agent.end()
            self.heard.append(RanksEnded(self.now, node, message["end"], 1))
        elif "offer" in message:
            agent.offer = message["offer"]
            if agent.ready != agent.offer["division"]:
                agent.made, agent.ready = agent.offer, int(agent.offer["division"])
            self.heard.append(NodeReady(self.now, node, agent.ready))
        elif "start" in message:
            agent.start = order = message["start"]
            if node in order["seats"]:
                assert agent.ready == order["division"], "it has not what it needs for that"
                assert agent.made == self.agents[self.member_list.leader].offer, "it has prepared something else"
                assert not agent.running, "it runs ranks already"
                same = [a.start for a in self.agents.values() if a.start and a.start["attempt"] == order["attempt"]]
                assert all(each == order for each in same), "two attempts of one number"
                agent.running = order["attempt"]
            assert len(self.running()) <= 1, "two attempts at once"

    def living(self) -> list[int]:
        return [number for number in self.member_list.nodes if number in self.agents]

    def running(self) -> set[int]:
        return {agent.running for agent in self.agents.values() if agent.running}

    def lose(self, node: int) -> None:
        del self.agents[node]
        self.heard.append(NodeLost(self.now, node, "gone"))

    def reform(self) -> None:
        """The roster is without those who are gone."""
        members = [member for member in self.member_list.members if member.node in self.agents]
        self.agree(self.member_list.with_members(members, self.member_list.leader), {})

    def agree(self, following: MemberList, votes: Mapping[int, Message]) -> None:
        """The file of the next epoch is made; early, before anybody who votes has said what its ranks came to."""
        start = self.agents[following.leader].start
        self.file = find_active_writers(start, self.member_list, following, {} if self.early else votes, self.file)
        self.member_list = following

    def join(self, node: int) -> None:
        """A node comes, which has heard of no order."""
        self.agents[node] = Agent(offer := self.agents[self.member_list.leader].offer, offer, ready=0)
        member = AgentMember(node, f"host{node}", f"{node:016x}", "127.0.0.1", 1, 2, DEVICES)
        self.agree(self.member_list.with_members([*self.member_list.members, member], self.member_list.leader), {})
        self.heard.append(NodeJoined(self.now, make_node_state(member)))

    def wait(self) -> None:
        """Time passes, until there is nothing left to do."""
        for _ in range(3):
            self.settle()
            if not self.over:
                self.now += 40.0
                self.take(Tick(self.now))

    def cut(self, nodes: Collection[int]) -> "Job":
        """Nodes, the leader among them, hear nothing of the others any more, and have not noticed yet: their part."""
        part = copy.deepcopy(self)
        part.cut_off = True
        for node in self.living():
            del (self if node in nodes else part).agents[node]
        return part

    def succeed(self) -> None:
        """The leader is dead: ranks end everywhere, and the lowest that lives leads on, if it has a majority."""
        self.heard = []
        self.agents.pop(self.member_list.leader, None)
        for agent in self.agents.values():
            agent.end()
        living, before = self.living(), self.member_list
        if classify_quorum(len(living), len(before.members)) != "majority":
            self.over = True
            return
        following = before.with_members([m for m in before.members if m.node in living], living[0])
        votes: dict[int, Message] = {}
        for node, agent in self.agents.items():
            attempt = 0 if agent.start is None else agent.start["attempt"]
            votes[node] = {"ready": agent.ready, "offered": agent.offer["division"], "attempt": attempt}
        self.agree(following, votes)
        mine = self.agents[living[0]]
        before_that, mine.offer = mine.offer, renew_offer(mine.offer, mine.start, votes)
        self.state = make_failover_state(mine.offer, mine.start, before, votes, 1)
        attempt = self.state.attempt
        for node, agent in self.agents.items():
            self.heard.append(NodeInventoryReported(self.now, node, ()))
            code = agent.last["code"] if agent.last.get("attempt") == attempt else 1
            self.heard.append(RanksEnded(self.now, node, attempt, code))
        gone = [node for node in before.nodes if node not in living]
        self.heard += [NodeLost(self.now, node, "gone") for node in gone]
        self.offers = mine.offer is not before_that


def died(job: Job) -> Iterator[None]:
    """Again and again what is left to do, until no leader dies of it."""
    while not job.over:
        try:
            job.settle()
            if not job.over:
                job.take(Tick(job.now))
                job.settle()
            job.reform()
            return
        except Dead:
            job.fuse = None
            yield
            job.succeed()


@settings(max_examples=150 if ALL else 50, deadline=None)
@given(data=st.data())
def test_whoever_leads_next_goes_on_wherever_the_leader_died(data: st.DataObject) -> None:
    nodes, spares = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 2))
    ways = tuple(data.draw(st.permutations(["replace", "shrink"]))[: data.draw(st.integers(0, 2))])
    job = Job(nodes, spares, RecoveryPolicy(nodes=nodes, max_restarts=9, on_lost_node=ways))
    for _ in range(data.draw(st.integers(1, 12))):
        job.now += 40.0
        runs = sorted(node for node, agent in job.agents.items() if agent.running)
        what = data.draw(st.sampled_from(["rank", "node", "leader", "time"]))
        job.fuse = data.draw(st.none() | st.integers(0, 9))
        if what == "rank" and runs:
            node = data.draw(st.sampled_from(runs))
            attempt = job.agents[node].running
            job.agents[node].end()
            job.heard.append(RanksEnded(job.now, node, attempt, 1))
        elif what == "node" and len(job.agents) > 1:
            job.lose(data.draw(st.sampled_from([node for node in job.living() if node != job.member_list.leader])))
        elif what == "leader":
            job.succeed()
        for _ in died(job):
            if data.draw(st.booleans()) and len(job.agents) > 2:  # another one with it
                job.lose(data.draw(st.sampled_from([n for n in job.living() if n != job.member_list.leader])))
        if job.over:
            break
    job.fuse = None
    for _ in range(6):  # left alone, it comes to an end or runs everywhere
        job.now += 40.0
        for _ in died(job):
            raise AssertionError("nobody dies any more")
    if not job.over:
        assert job.state.phase in (JobPhase.RUNNING, JobPhase.IDLE), job.state
        if job.state.phase == JobPhase.RUNNING:
            assert all(job.agents[seat].running == job.state.attempt for seat in job.state.seats)


def fail(job: Job, node: int) -> None:
    """A node's ranks fail; what becomes of it."""
    job.now += 40.0
    attempt = job.agents[node].running
    job.agents[node].end()
    job.heard.append(RanksEnded(job.now, node, attempt, 1))
    job.wait()


@settings(max_examples=200 if ALL else 60, deadline=None)
@given(data=st.data())
def test_no_rank_of_a_leader_that_is_cut_off_may_write_and_every_other_may(data: st.DataObject) -> None:
    """Both sides start ranks again, under the same numbers too; the next leader may have heard of no attempt."""
    nodes = data.draw(st.integers(1, 3))
    job = Job(
        nodes, data.draw(st.integers(0, 4)), RecoveryPolicy(nodes=nodes, max_restarts=99, on_lost_node=("replace",))
    )
    parts: list[Job] = []
    for number in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(["rank", "spare", "node", "leader", "cut", "cut"]))
        runs = [node for node in job.living() if job.agents[node].running]
        if what == "rank" and runs:
            fail(job, data.draw(st.sampled_from(runs)))
        elif what == "spare":
            job.join(10 + number)
        elif what == "node" and (others := [node for node in job.living() if node != job.member_list.leader]):
            job.lose(data.draw(st.sampled_from(others)))
            job.reform()
        elif what == "leader" and len(job.agents) > 2:
            job.early = data.draw(st.booleans())
            job.succeed()
        elif what == "cut":
            few = (len(job.living()) - 1) // 2
            others = data.draw(st.permutations([node for node in job.living() if node != job.member_list.leader]))
            if few:
                parts.append(job.cut([job.member_list.leader, *others[: data.draw(st.integers(0, few - 1))]]))
                job.early = data.draw(st.booleans())
                job.succeed()
        job.wait()
        if job.over:
            break
        for part in parts:  # it takes them a while to notice
            runs = [node for node in part.living() if part.agents[node].running]
            if data.draw(st.booleans()) and runs:
                fail(part, data.draw(st.sampled_from(runs)))
            assert all(fencing.is_fenced(job.file, attempt, epoch) for epoch, attempt in part.ordered)
        for agent in job.agents.values():
            if agent.running:
                assert agent.start is not None
                assert not fencing.is_fenced(job.file, agent.running, agent.start["epoch"])


def test_two_attempts_of_one_number_are_told_apart_by_their_epochs() -> None:
    """A leader and the only other node with ranks are cut off from three spares, and start their ranks again."""
    job = Job(2, 3, RecoveryPolicy(nodes=2, max_restarts=9, on_lost_node=("replace",)))
    part = job.cut([0, 1])
    for node in (0, 1, 0):
        fail(part, node)
    job.early = True
    job.succeed()
    job.wait()
    assert part.ordered == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert job.ordered == [(1, 1), (2, 2)]
    assert job.file == {"since": 2, "attempt": 2}
    assert [fencing.is_fenced(job.file, attempt, epoch) for epoch, attempt in part.ordered] == [True] * 4
    assert not fencing.is_fenced(job.file, 2, 2)


def test_a_node_that_comes_again_lets_nobody_write_who_was_lost() -> None:
    """Neither after its leader was lost with it, nor after it was lost alone."""
    job = Job(3, 0, RecoveryPolicy(nodes=3))
    start, first = job.agents[0].start, job.member_list
    assert start is not None
    for gone, leader in ((0, 1), (2, 0)):
        fewer = first.with_members([member for member in first.members if member.node != gone], leader)
        said = find_active_writers(start, first, fewer, {}, NOBODY_YET)
        again = find_active_writers(start, fewer, fewer.with_members(first.members, leader), {}, said)
        assert again == said
        assert fencing.is_fenced(again, start["attempt"], start["epoch"])


def test_another_process_of_a_seats_number_does_not_go_on_with_it() -> None:
    job = Job(2, 0, RecoveryPolicy(nodes=2))
    start, before = job.agents[0].start, job.member_list
    assert start is not None
    members = [replace(each, token="f" * 16) if each.node == 1 else each for each in before.members]
    for following, over in ((before.with_members(before.members, 0), False), (before.with_members(members, 0), True)):
        said = find_active_writers(start, before, following, {}, NOBODY_YET)
        assert fencing.is_fenced(said, start["attempt"], start["epoch"]) == over


def test_what_a_successor_has_to_know_travels_as_it_is() -> None:
    policy: dict[str, Any] = asdict(RecoveryPolicy(nodes=2))
    job = Job(2, 1, RecoveryPolicy(nodes=2))
    assert job.agents[1].start is not None
    assert job.agents[1].offer["policy"] == policy
    job.succeed()
    job.settle()
    assert (job.state.phase, job.state.attempt, job.state.seats) == (JobPhase.RUNNING, 2, (2, 1))


@pytest.mark.parametrize("told", [0, 1, 2, 3, 4])
def test_a_division_that_some_have_heard_of_is_told_to_all_once_more(told: int) -> None:
    """A leader that is to have no ranks any more tells so many of the four nodes what the others shall do, and is
    lost."""
    job = Job(4, 0, RecoveryPolicy(nodes=4, on_lost_node=("shrink",)))
    job.fuse = 4 + 1 + told  # to end the attempt, to have the division prepared
    job.heard.append(NodeDrainChanged(1.0, 0, True, "asked for"))
    list(died(job))
    assert (job.member_list.leader, job.state.phase) == (1, JobPhase.RUNNING)
    assert [agent.running for agent in job.agents.values()] == [job.state.attempt] * 3


def test_a_number_that_nobody_has_heard_is_higher_than_all_that_were() -> None:
    job = Job(3, 0, RecoveryPolicy(nodes=3))
    offer, start = job.agents[1].offer, job.agents[1].start
    assert start is not None
    votes: dict[int, Message] = {1: {"offered": 1}, 2: {"offered": 3}, 3: {"offered": 2}}
    found = renew_offer(offer, start | {"seats": [2, 1, 0]}, votes)
    assert (found["division"], found["seats"]) == (4, [2, 1, 0])
    assert renew_offer(offer, start | {"seats": [2, 1, 0], "division": 5}, votes)["seats"] == offer["seats"]
    assert renew_offer(offer, None, votes)["seats"] == offer["seats"]
    assert renew_offer(offer, start, {1: {"offered": 1}, 2: {"offered": 1}}) == offer


def test_a_job_begins_at_once_where_all_with_a_seat_are_there_and_else_misses_them() -> None:
    job = Job(2, 1, RecoveryPolicy(nodes=2))
    offer = job.agents[0].offer
    nodes = list(map(make_node_state, job.member_list.members))
    whole = make_initial_state(offer, nodes, 4, 7)
    assert (whole.phase, whole.attempt, whole.budget.first, whole.budget.reached) == (JobPhase.READYING, 3, 4, 7)
    assert decide(whole, Tick(0.0))[0].attempt == 4
    assert make_initial_state(offer, [nodes[0], nodes[2]], 4, 7).phase == JobPhase.IDLE


def test_of_what_no_order_to_start_has_said_nothing_is_spent_yet() -> None:
    job = Job(2, 1, RecoveryPolicy(nodes=2))
    offer = job.agents[0].offer
    found = make_failover_state(offer, None, job.member_list, {1: {"ready": 0, "attempt": 2}}, 4)
    assert (found.attempt, found.committed, found.budget) == (3, 0, RestartBudget(first=4))
