"""What the leading agent does beside deciding."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from phalanx.core.records import EventKind
from phalanx.elastic.membership.member_list import AgentMember, MemberList
from phalanx.elastic.membership.rendezvous_host import ConnectedNode
from phalanx.elastic.supervisor import coordinator, leader_tasks
from phalanx.elastic.supervisor.coordinator import Coordinator
from phalanx.elastic.supervisor.state import JobPhase, JobState, Node, NodeLost, NodeSlot, RecoveryPolicy
from phalanx.system.exit_causes import WorkerExit

MEMBERS = tuple(AgentMember(n, f"host{n}", f"{n:016x}", "127.0.0.1", 1, 2, (("cpu", "any", True),)) for n in range(4))


class Errand:
    """A division that is being prepared."""

    made: ClassVar[list["Errand"]] = []

    def __init__(
        self, function: Any, division: int, plan: Sequence[tuple[int, int]], *_: Any, timeout_s: float
    ) -> None:
        self.division, self.nodes = division, [node for node, _ in plan]
        self.over = self.cancelled = False
        Errand.made.append(self)

    def result(self) -> tuple[Any] | None:
        return ({"division": self.division, "seats": self.nodes},) if self.over else None

    def cancel(self) -> None:
        self.cancelled = True


class Caller:
    """The channel of a process that wants to be a node: what it hears, but for being asked whether it is there."""

    lost = None

    def __init__(self, pid: int, heard: list[tuple[int, dict[str, Any]]]) -> None:
        self.pid, self.heard = pid, heard

    def send(self, message: dict[str, Any]) -> None:
        if "ping" not in message:
            self.heard.append((self.pid, message))

    def send_and_close(self, message: dict[str, Any], why: str, timeout_s: float) -> None:
        self.send(message)

    def receive(self) -> list[dict[str, Any]]:
        return []

    def check_alive(self) -> None:
        pass

    def linger(self, why: str, timeout_s: float) -> None:
        pass

    def close(self, why: str) -> None:
        pass


def leading(monkeypatch: pytest.MonkeyPatch) -> tuple[Coordinator, SimpleNamespace, list[tuple[int, Any]], list[Any]]:
    """The leader of three nodes and a spare that has just come, while a division of two is prepared as node 2 was lost
    before; its agent, what it tells other nodes, and what it says."""
    monkeypatch.setattr(leader_tasks, "AsyncCall", Errand)
    Errand.made = []
    told: list[tuple[int, Any]] = []
    said: list[Any] = []
    membership = SimpleNamespace(
        previous_member_list=None, member_list=MemberList(3, 0, MEMBERS), me=MEMBERS[0], losses=[],
        election=SimpleNamespace(votes={}, joining={}),
        adopted=[], is_stable=True,
        live_nodes=lambda: [0, 1, 2, 3], broadcast=lambda message: told.append((-1, message)),
        send=lambda node, message: told.append((node, message)),
    )  # fmt: skip
    agent = SimpleNamespace(membership=membership, offer={"division": 1, "seats": [0, 1, 2]}, start=None, over=None)
    nodes = tuple(Node(number, f"host{number}", 1, "any", ready=1) for number in (0, 1, 2))
    slots = (NodeSlot(1, "any"),) * 3
    state = JobState(RecoveryPolicy(nodes=3), nodes=nodes, slots=slots, seats=(0, 1, 2), division=1, attempt=1)
    made = Coordinator(
        agent,
        state,
        {},
        lambda *_: {},
        lambda kind, details: said.append((kind, details)),
        list,
        list,
    )
    made.handle_event(NodeLost(0.0, 2, "gone"))
    assert made.state.phase == JobPhase.PREPARING and [each.nodes for each in Errand.made] == [[0, 1]]
    return made, agent, told, said


def test_a_division_that_is_not_wanted_any_more_is_offered_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    made, agent, told, _ = leading(monkeypatch)
    spares = tuple(Node(number, f"host{number}", 1, "any", ready=1) for number in (2, 3))
    made.state = JobState(**{**vars(made.state), "nodes": made.state.nodes + spares})
    made.handle_event(NodeLost(1.0, 1, "gone"))  # a spare fits now, so the ranks stay divided as they were
    assert made.state.phase == JobPhase.RUNNING and told[-1][1]["start"]["seats"] == [0, 3, 2]
    Errand.made[0].over = True
    made.poll_once()
    assert Errand.made[0].cancelled and agent.offer["division"] == 1
    assert not any("offer" in message for _, message in told)


def test_of_two_that_come_as_the_same_node_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second calls before the first is a member."""
    made, agent, _, _ = leading(monkeypatch)
    monkeypatch.setattr(coordinator, "find_mismatch", lambda *_, **__: None)
    monkeypatch.setattr(coordinator, "DEATH_ANSWER_S", 0.0)
    admitted: list[AgentMember] = []
    agent.membership.admit = admitted.append
    agent.membership.detector = SimpleNamespace(heartbeat_s=1.0, heard_at={})
    answers: list[tuple[int, dict[str, Any]]] = []

    def comes(pid: int) -> None:
        channel: Any = Caller(pid, answers)
        at = {"token": f"{pid:016x}", "address": "127.0.0.1", "port": 1, "beats": 2}
        made.greet(channel, {"node": 7, "host": "host7", "pid": pid, "devices": [["cpu", "any", True]], "at": at})

    comes(70)
    comes(71)
    made._let_in()
    assert ([member.token for member in admitted], answers) == ([f"{70:016x}"], [])
    agent.membership.member_list = agent.membership.member_list.with_members([*MEMBERS, *admitted], 0)
    made._compare()
    made._let_in()
    made._let_in()
    assert "roster" in answers[0][1] and answers[1][1]["refused"].startswith("process 71 on host7 claims to be node 7")


def test_a_node_that_died_before_its_first_sign_of_life_may_be_started_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is still taken for alive when the next process of that number comes."""
    made, agent, _, _ = leading(monkeypatch)
    monkeypatch.setattr(coordinator, "find_mismatch", lambda *_, **__: None)
    now, admitted, answers = [100.0], list[AgentMember](), list[tuple[int, dict[str, Any]]]()
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: now[0])
    agent.membership.admit = admitted.append
    agent.membership.detector = SimpleNamespace(heartbeat_s=1.0, heard_at={1: 100.0 + coordinator.MEET_S})
    channel: Any = Caller(71, answers)
    at = {"token": f"{71:016x}", "address": "127.0.0.1", "port": 1, "beats": 2}
    made.greet(channel, {"node": 1, "host": "host1", "pid": 71, "devices": [["cpu", "any", True]], "at": at})
    now[0] += coordinator.MEET_S + 1.5  # by then the dead one is lost
    made._let_in()
    assert (admitted, answers) == ([], [])
    agent.membership.member_list = agent.membership.member_list.with_members(
        [each for each in MEMBERS if each.node != 1], 0
    )
    made._let_in()
    assert [member.token for member in admitted] == [f"{71:016x}"] and answers == []


def test_who_comes_when_the_job_has_just_ended_hears_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for a leader for minutes."""
    heard: list[tuple[int, dict[str, Any]]] = []
    channel: Any = Caller(70, heard)
    for over in (None, (0, "the run is done")):
        made, _, _, _ = leading(monkeypatch)
        made.host.connected[7] = ConnectedNode(channel, {})
        made.host._waiting.append((channel, {"node": 0}, 0.0))
        made.close(over)
    assert heard == [(70, {"finish": 0, "text": "the run is done"})] * 2


def test_a_job_that_fails_for_good_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    made, agent, _, said = leading(monkeypatch)
    made.state = JobState(**{**vars(made.state), "policy": RecoveryPolicy(nodes=3, on_lost_node=())})
    made.handle_event(NodeLost(1.0, 1, "gone"))
    assert agent.over is not None and agent.over[0] == 1
    assert (said[-1][0], said[-1][1]["reason"]) == (EventKind.GAVE_UP, agent.over[1])


def test_a_rank_that_fails_since_a_node_is_lost_is_not_said_to_have_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be heard of before the node is missed, and a spare may take its seat in that same moment."""
    made, _, told, said = leading(monkeypatch)
    spares = tuple(Node(number, f"host{number}", 1, "any", ready=1) for number in (2, 3))
    nodes = made.state.nodes + spares
    made.state = JobState(**{**vars(made.state), "nodes": nodes, "phase": JobPhase.ENDING, "codes": {0: 1, 2: 1}})
    cause = {"exit_code": 1, "type": "RuntimeError", "message": "Connection reset by peer", "reason": "", "step": None}
    made._ends = {0: [WorkerExit(0, 10, None, 1, cause)], 2: [WorkerExit(2, 12, None, 1, cause)]}
    made.handle_event(NodeLost(1.0, 1, "gone"))
    assert told[-1][1]["start"]["seats"] == [0, 3, 2]
    assert EventKind.WORKER_DIED not in [kind for kind, _ in said]
