"""The membership of a job on one node: the same code decides, and this node listens nowhere and sends nothing."""

import math
import platform
import secrets
from collections.abc import Sequence

from phalanx.elastic.membership.channel import Channel, Message
from phalanx.elastic.membership.heartbeat import Address, Heartbeat
from phalanx.elastic.membership.member_list import TOKEN_BYTES, AgentMember, MemberList

LOOPBACK = "127.0.0.1"


class NoNetwork:
    """Stands for a node's listener, for its heartbeats and for who sends them."""

    secret = ""

    def take_flooding_host(self) -> str | None:
        return None

    def descriptors(self) -> dict[int, int]:
        return {}

    def due_s(self) -> float:
        return math.inf

    def accept(self) -> list[tuple[Channel, Message]]:
        return []

    def receive(self) -> list[tuple[Heartbeat, Address]]:
        return []

    def send(self, beat: Heartbeat, to: Address) -> None:
        raise AssertionError("there is no other node")

    def send_to(self, epoch: int, to: Sequence[Address]) -> None:
        assert not to, "there is no other node"

    def next_number(self) -> int:
        return 0

    def close(self, why: str = "") -> None:
        pass


def make_solo_member(devices: Sequence[Sequence[object]], epoch: int = 1) -> tuple[AgentMember, MemberList]:
    """This node as the only member of a job; `devices` has a row (name, model, bf16, ...) for each of its ranks."""
    rows = tuple((str(row[0]), str(row[1]), bool(row[2])) for row in devices)
    me = AgentMember(0, platform.node(), secrets.token_hex(TOKEN_BYTES), LOOPBACK, 0, 0, rows)
    return me, MemberList(epoch, 0, (me,))
