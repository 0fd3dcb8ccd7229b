"""What a leader begins with: the state of a job that starts, or what its successor makes of what every node was told;
and what its epoch's file says of ranks that were started before.

Pure functions. An offer tells all nodes of the division (`slots`, `seats`, `policy`), an order to start of the attempt
and of what is left of the budgets; a vote says what a node is ready for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.member_list import AgentMember, MemberList
from phalanx.elastic.supervisor.state import JobPhase, JobState, Node, NodeSlot, RecoveryPolicy, RestartBudget
from phalanx.recovery.catalog import StateFileInfo


def make_node_state(member: AgentMember, ready: int = 0, held: tuple[StateFileInfo, ...] = ()) -> Node:
    """A member as the supervisor knows it."""
    return Node(member.node, member.host, len(member.devices), member.devices[0][1], ready, held=held)


def describe_division(
    division: int, plan: Sequence[tuple[int, int]], devices: Iterable[Any], policy: RecoveryPolicy
) -> Message:
    """The part of an offer that says how ranks are divided: `plan` has node and ranks, `devices` those of each node."""
    slots = [[ranks, each[0][1]] for (_, ranks), each in zip(plan, devices, strict=True)]
    return {"division": division, "slots": slots, "seats": [node for node, _ in plan], "policy": asdict(policy)}


def parse_policy(offer: Message) -> RecoveryPolicy:
    told = dict(offer["policy"])
    return RecoveryPolicy(**{**told, "on_lost_node": tuple(told["on_lost_node"])})


def describe_restart_budget(state: JobState) -> Message:
    """What a successor has to know of the failures so far."""
    return {**asdict(state.budget), "committed": state.committed, "crash": list(state.budget.crash)}


NOBODY_YET = MappingProxyType({"since": 0, "attempt": 0})  # was said to be over


def find_active_writers(
    start: Message | None,
    before: MemberList,
    following: MemberList,
    votes: Mapping[int, Message],
    last_epoch_file: Mapping[str, int],
) -> dict[str, int]:
    """What the file of an epoch says of the ranks that may still write: the oldest `attempt`, and `since` which epoch
    attempts have been ordered that may. `start` is the last order that the leader of the roster that is `following`
    has heard, `votes` what it knows yet of those who have voted for it, and `last_epoch_file` what its last file said.

    Numbers of attempts alone do not tell: a leader that is cut off may start ranks once more, of which nobody else
    hears, and one that came as a spare may have heard of no attempt at all. So whoever is new in the lead lets nobody
    write whom it has not started itself. And whoever was said to be over stays over: a node that was lost with its
    ranks and comes again has the same number, and is not the same process.
    """
    if before.leader != following.leader:
        heard = [int(vote["attempt"]) for vote in votes.values()] + ([] if start is None else [int(start["attempt"])])
        found = following.epoch, 1 + max(heard, default=0)
    elif start is None:  # what it may order while the file is made
        found = before.epoch, 1
    else:
        goes_on = all(following.member(seat) == before.member(seat) is not None for seat in start["seats"])
        found = int(start["epoch"]), int(start["attempt"]) + (0 if goes_on else 1)
    since, attempt = max(found, (last_epoch_file["since"], last_epoch_file["attempt"]))
    return {"since": since, "attempt": attempt}


def make_initial_state(
    offer: Message, member_list: MemberList, attempt: int, committed: int, held: Mapping[int, tuple[StateFileInfo, ...]]
) -> JobState:
    """The state of a job whose nodes are all ready for what was offered; `attempt` is its first. Of nodes with a seat
    one may not have come so far, which was not fit: as if it were lost. `held`: what nodes have in their memories of a
    job of the same run before."""
    division = int(offer["division"])
    return JobState(
        policy=parse_policy(offer),
        phase=JobPhase.READYING if all(member_list.member(node) for node in offer["seats"]) else JobPhase.IDLE,
        nodes=tuple(make_node_state(member, division, held.get(member.node, ())) for member in member_list.members),
        division=division,
        slots=tuple(NodeSlot(int(ranks), str(model)) for ranks, model in offer["slots"]),
        seats=tuple(offer["seats"]),
        attempt=attempt - 1,
        budget=RestartBudget(reached=committed, first=attempt),
        committed=committed,
    )


def renew_offer(offer: Message, start: Message | None, votes: Mapping[int, Message]) -> Message:
    """What a new leader offers: what it was offered itself, `start` being the last order to start that it has heard. A
    leader that was lost while it offered another division has told that to some alone: then the same once more, under
    a number that nobody has heard, since numbers are what nodes tell divisions by."""
    heard = {int(vote["offered"]) for vote in votes.values()}
    if heard == {int(offer["division"])}:
        return offer
    current = start is not None and start["division"] == offer["division"]
    return offer | {
        "division": max(heard) + 1,
        "seats": start["seats"] if start is not None and current else offer["seats"],
    }


def make_failover_state(
    offer: Message, start: Message | None, before: MemberList, votes: Mapping[int, Message], attempt: int
) -> JobState:
    """The state as a new leader finds it, before it is told who is lost: `before` is the roster of the old one, `start`
    the last order to start (None: there was none), `attempt` the first of the job."""
    ready = {node: int(vote["ready"]) for node, vote in votes.items()}
    last = max([attempt - 1, *(int(vote["attempt"]) for vote in votes.values())])
    current = start is not None and start["division"] == offer["division"]
    budget: Message = {} if start is None else start["budget"]
    seats = start["seats"] if start is not None and current else offer["seats"]
    return JobState(
        policy=parse_policy(offer),
        phase=JobPhase.ENDING if current else JobPhase.IDLE,
        nodes=tuple(make_node_state(member, ready.get(member.node, 0)) for member in before.members),
        division=int(offer["division"]),
        slots=tuple(NodeSlot(int(ranks), str(model)) for ranks, model in offer["slots"]),
        seats=tuple(seats),
        # Lost before, and not replaced by an order yet: nobody will say of them any more how their ranks ended.
        lost_with_ranks=tuple(node for node in seats if before.member(node) is None) if current else (),
        attempt=last,
        budget=RestartBudget(
            int(budget.get("failures", 0)),
            int(budget.get("reached", 0)),
            tuple(budget.get("crash", ("", 0))),
            int(budget.get("first", attempt)),
        ),
        committed=int(budget.get("committed", 0)),
    )
