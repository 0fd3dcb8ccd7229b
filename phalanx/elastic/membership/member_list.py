"""Who belongs to a job: its members, which of them watch the others, and whether enough of them are left to go on.

A roster is what all members have agreed on; each change of it is an epoch, and has a number that only grows. Pure
functions, no clock, no sockets.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

TOKEN_BYTES = 8
HEADS = 3  # the leader and two deputies: all others tell them that they live, and they tell all others
Standing = Literal["majority", "tie", "minority"]


@dataclass(frozen=True)
class Member:
    """One agent: `token` is of this very process, `port` where it takes connections, `beats` its UDP port."""

    node: int
    host: str
    token: str
    address: str
    port: int
    beats: int
    devices: tuple[tuple[str, str, bool], ...]  # name, model, whether it has bf16: one for each rank it can have


@dataclass(frozen=True)
class Roster:
    """The members of an epoch, by node, and which of them leads."""

    epoch: int
    leader: int
    members: tuple[Member, ...]

    @property
    def nodes(self) -> list[int]:
        return [member.node for member in self.members]

    def member(self, node: int) -> Member | None:
        return next((member for member in self.members if member.node == node), None)

    def with_members(self, members: Iterable[Member], leader: int) -> "Roster":
        """The roster of the next epoch."""
        return Roster(self.epoch + 1, leader, tuple(sorted(members, key=lambda member: member.node)))


def heads(roster: Roster, lost: Collection[int] = ()) -> list[int]:
    """The nodes that watch all others: the leader, then the lowest that are not lost."""
    living = [node for node in roster.nodes if node not in lost]
    first = [roster.leader] if roster.leader in living else []
    return (first + [node for node in living if node != roster.leader])[:HEADS]


def watched_by(node: int, roster: Roster, lost: Collection[int] = ()) -> list[int]:
    """The nodes that `node` exchanges signs of life with: all others where it is a head, else the heads."""
    chosen = heads(roster, lost)
    return [
        other for other in roster.nodes if other != node and other not in lost and (node in chosen or other in chosen)
    ]


def standing(left: int, of: int) -> Standing:
    """What `left` members are that were `of` before: two parts of one roster are never both a majority."""
    if 2 * left == of:
        return "tie"
    return "majority" if 2 * left > of else "minority"


def too_few(count: int, of: int) -> str:
    """Why `count` members of so many, of which one is this node, may not go on."""
    few = ["no other node", "only one other node"][count - 1] if count < 3 else f"only {count - 1} other nodes"
    return f"{few} of {of} can be reached from here, and those that cannot may go on with the run"


def member_to_message(member: Member) -> dict[str, Any]:
    return asdict(member)


def member_of(tree: dict[str, Any]) -> Member:
    """Read a member. Raises KeyError, TypeError or ValueError for what is none."""
    devices = tuple((str(row[0]), str(row[1]), bool(row[2])) for row in tree["devices"])
    host, token, address = (str(tree[name]) for name in ("host", "token", "address"))
    if len(bytes.fromhex(token)) != TOKEN_BYTES or not devices:
        raise ValueError("neither a token nor devices")
    return Member(int(tree["node"]), host, token, address, int(tree["port"]), int(tree["beats"]), devices)


def roster_to_message(roster: Roster) -> dict[str, Any]:
    return {
        "epoch": roster.epoch,
        "leader": roster.leader,
        "members": [member_to_message(member) for member in roster.members],
    }


def roster_of(tree: dict[str, Any]) -> Roster:
    """Read a roster. Raises as `member_of`."""
    return Roster(int(tree["epoch"]), int(tree["leader"]), tuple(member_of(each) for each in tree["members"]))
