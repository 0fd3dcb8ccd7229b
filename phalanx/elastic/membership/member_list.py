"""The member list of a job: which members watch the others, and whether enough are left to continue.

All members agree on the list; each change is an epoch with a growing number. Pure functions, no clock, no sockets.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

TOKEN_BYTES = 8
HEADS = 3  # the leader and two deputies: all others tell them that they live, and they tell all others
Quorum = Literal["majority", "tie", "minority"]


@dataclass(frozen=True)
class AgentMember:
    """One agent: `token` is of this very process, `port` where it takes connections, `beats` its UDP port."""

    node: int
    host: str
    token: str
    address: str
    port: int
    beats: int
    devices: tuple[tuple[str, str, bool], ...]  # name, model, whether it has bf16: one for each rank it can have


@dataclass(frozen=True)
class MemberList:
    """The members of an epoch, by node, and which of them leads."""

    epoch: int
    leader: int
    members: tuple[AgentMember, ...]

    @property
    def nodes(self) -> list[int]:
        return [member.node for member in self.members]

    def member(self, node: int) -> AgentMember | None:
        return next((member for member in self.members if member.node == node), None)

    def with_members(self, members: Iterable[AgentMember], leader: int) -> "MemberList":
        """The member list of the next epoch."""
        return MemberList(self.epoch + 1, leader, tuple(sorted(members, key=lambda member: member.node)))


def heads(member_list: MemberList, lost: Collection[int] = ()) -> list[int]:
    """The nodes that watch all others: the leader, then the lowest that are not lost."""
    living = [node for node in member_list.nodes if node not in lost]
    first = [member_list.leader] if member_list.leader in living else []
    return (first + [node for node in living if node != member_list.leader])[:HEADS]


def list_monitored_nodes(node: int, member_list: MemberList, lost: Collection[int] = ()) -> list[int]:
    """The nodes that `node` exchanges heartbeats with: all others where it is a watcher, else the watchers."""
    chosen = heads(member_list, lost)
    return [
        other
        for other in member_list.nodes
        if other != node and other not in lost and (node in chosen or other in chosen)
    ]


class MemberView:
    """An agent's view of its job: itself (`me`), the members, and which of them are lost, and why."""

    def __init__(self, me: AgentMember, member_list: MemberList) -> None:
        self.me, self.member_list = me, member_list
        self.lost: dict[int, str] = {}

    @property
    def is_leader(self) -> bool:
        return self.member_list.leader == self.me.node

    def live_nodes(self) -> list[int]:
        """Members that are not lost, this one included."""
        return [node for node in self.member_list.nodes if node not in self.lost]

    def list_watched(self) -> list[AgentMember]:
        """The members that this one exchanges heartbeats with."""
        watched = set(list_monitored_nodes(self.me.node, self.member_list, self.lost))
        return [member for member in self.member_list.members if member.node in watched]


def classify_quorum(left: int, of: int) -> Quorum:
    """Classify `left` of `of` members as a quorum: two parts of one list are never both a majority."""
    if 2 * left == of:
        return "tie"
    return "majority" if 2 * left > of else "minority"


def explain_lost_quorum(count: int, of: int) -> str:
    """Why `count` reachable members, this node included, may not continue."""
    few = ["no other node", "only one other node"][count - 1] if count < 3 else f"only {count - 1} other nodes"
    return f"{few} of {of} can be reached from here, and the others may continue the run"


def parse_member(tree: dict[str, Any]) -> AgentMember:
    """Parse a member. Raises KeyError, TypeError or ValueError for an invalid one."""
    devices = tuple((str(row[0]), str(row[1]), bool(row[2])) for row in tree["devices"])
    host, token, address = (str(tree[name]) for name in ("host", "token", "address"))
    if len(bytes.fromhex(token)) != TOKEN_BYTES or not devices:
        raise ValueError("neither a token nor devices")
    return AgentMember(int(tree["node"]), host, token, address, int(tree["port"]), int(tree["beats"]), devices)


def member_list_to_message(member_list: MemberList) -> dict[str, Any]:
    return asdict(member_list)


def parse_member_list(tree: dict[str, Any]) -> MemberList:
    """Parse a member list. Raises as `parse_member`."""
    return MemberList(int(tree["epoch"]), int(tree["leader"]), tuple(parse_member(each) for each in tree["members"]))
