"""How an agent becomes the leader: the first one of a job, or the one that follows a lost leader."""

import time
from collections.abc import Callable
from typing import Any

from phalanx.elastic.membership.channel import Message
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.supervisor.coordinator import Coordinator, Plan
from phalanx.elastic.supervisor.failover import make_failover_state, make_initial_state, make_node_state, renew_offer
from phalanx.elastic.supervisor.node_requests import NodeRequest
from phalanx.elastic.supervisor.state import NodeInventoryReported, SendOffer
from phalanx.recovery.catalog import inventory_from_message


def become_coordinator(
    agent: NodeAgent,
    hello: Message,
    attempt: int,
    committed: int,
    prepare: Callable[[int, Plan, list[list[Any]]], Message],
    notice: Callable[[str, dict[str, Any]], None],
    take_committed_steps: Callable[[], list[int]] = list,
    take_node_requests: Callable[[], list[NodeRequest]] = list,
) -> Coordinator:
    """Lead from now on: a job that begins with `attempt` from the step `committed`, or from a newer one that nodes hold
    in their memories since a job before; or what its leader has left."""
    membership, offered = agent.membership, agent.offer
    assert offered is not None, "a node that was offered nothing has not been admitted"
    if membership.previous_member_list is None:
        met, members = agent.met, membership.member_list.members
        state = make_initial_state(
            offered, map(make_node_state, members) if met is None else met.nodes, attempt, committed
        )
        unfit_reason = None if met is None else met.unfit.get(0)
        first = Coordinator(
            agent, state, hello, prepare, notice, take_committed_steps, take_node_requests, unfit_reason
        )
        held = inventory_from_message(agent.list_inventory())
        first.handle_event(NodeInventoryReported(time.monotonic(), membership.me.node, held))
        return first
    votes = membership.election.votes
    agent.offer = renew_offer(offered, agent.start, votes)
    state = make_failover_state(agent.offer, agent.start, membership.previous_member_list, votes, attempt)
    leader = Coordinator(agent, state, hello, prepare, notice, take_committed_steps, take_node_requests)
    if agent.offer is not offered:
        leader.offer(SendOffer(state.division))
    return leader
