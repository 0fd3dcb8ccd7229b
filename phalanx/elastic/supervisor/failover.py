"""Leader failover: the initial state of a job, its reconstruction by a successor from the messages that every node
received, and the epoch file's entry about earlier ranks. Pure functions.

An offer informs all nodes of the division (`slots`, `seats`, `policy`), an order to start of the attempt and the
remaining budgets; a vote of what a node is ready for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.member_list import AgentMember, MemberList
from phalanx.elastic.supervisor.state import JobPhase, JobState, Node, NodeSlot, RecoveryPolicy, RestartBudget


def make_node_state(member: AgentMember, ready: int = 0) -> Node:
    """A member as the supervisor knows it."""
    return Node(member.node, member.host, len(member.devices), member.devices[0][1], ready)


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
    """The failure budget for a successor."""
    return {**asdict(state.budget), "committed": state.committed, "crash": list(state.budget.crash)}


NOBODY_YET = MappingProxyType({"since": 0, "attempt": 0})  # was said to be over


def find_active_writers(
    start: Message | None,
    before: MemberList,
    following: MemberList,
    votes: Mapping[int, Message],
    last_epoch_file: Mapping[str, int],
) -> dict[str, int]:
    """The ranks that may still write, for an epoch file: the oldest `attempt`, and the epoch `since` which such
    attempts have been ordered.

    `start` is the last order that the leader of `following` has received, `votes` those received so far, and
    `last_epoch_file` the contents of its last file. Attempt numbers alone are not enough: a leader that is cut off may
    start ranks once more, unknown to the others, and a former spare may know of no attempt at all. So a new leader
    permits writes only of ranks that it has started itself. Ended ranks stay ended: a node that was lost with its ranks
    and returns has the same number, but is another process.
    """
    if before.leader != following.leader:
        heard = [int(vote["attempt"]) for vote in votes.values()] + ([] if start is None else [int(start["attempt"])])
        found = following.epoch, 1 + max(heard, default=0)
    elif start is None:  # orders that it may give while the file is created
        found = before.epoch, 1
    else:
        goes_on = all(following.member(seat) == before.member(seat) is not None for seat in start["seats"])
        found = int(start["epoch"]), int(start["attempt"]) + (0 if goes_on else 1)
    since, attempt = max(found, (last_epoch_file["since"], last_epoch_file["attempt"]))
    return {"since": since, "attempt": attempt}


def make_initial_state(offer: Message, nodes: Iterable[Node], attempt: int, committed: int) -> JobState:
    """The initial state of a job whose `nodes` are all ready for the offer; `attempt` is its first. A node with a
    seat may be missing because it was unfit: it counts as lost."""
    division = int(offer["division"])
    here = {node.node: replace(node, ready=division) for node in nodes}
    return JobState(
        policy=parse_policy(offer),
        phase=JobPhase.READYING if here.keys() >= set(offer["seats"]) else JobPhase.IDLE,
        nodes=tuple(here.values()),
        division=division,
        slots=tuple(NodeSlot(int(ranks), str(model)) for ranks, model in offer["slots"]),
        seats=tuple(offer["seats"]),
        attempt=attempt - 1,
        budget=RestartBudget(reached=committed, first=attempt),
        committed=committed,
    )


def renew_offer(offer: Message, start: Message | None, votes: Mapping[int, Message]) -> Message:
    """The offer of a new leader, from the offer that it received; `start` is the last order to start that it received.
    A leader that was lost while it offered another division has sent it to some nodes only: it is offered again, under
    a new number, since nodes distinguish divisions by number."""
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
    """The state of a job at the start of a new leader, before it learns who is lost: `before` is the old member
    list, `start` the last order to start (None: there was none), `attempt` the first of the job."""
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
        # Lost before, and not replaced by an order yet: no report on their ranks will come.
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
