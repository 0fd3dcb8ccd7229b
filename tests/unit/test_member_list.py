"""Who belongs to a run: what is sent of a member is read again, and why too few may not go on."""

import dataclasses

import pytest

from phalanx.elastic.membership.member_list import (
    TOKEN_BYTES,
    AgentMember,
    explain_lost_quorum,
    parse_member,
)


def test_a_member_is_read_as_it_was_sent() -> None:
    devices = (("cpu", "Xeon", False), ("cuda:0", "H200", True))
    member = AgentMember(3, "host", "ab" * TOKEN_BYTES, "10.0.0.1", 4711, 4712, devices)
    assert parse_member(dataclasses.asdict(member)) == member
    for spoilt in ({"devices": []}, {"token": "ab"}):
        with pytest.raises(ValueError, match="neither a token nor devices"):
            parse_member(dataclasses.asdict(member) | spoilt)


def test_how_many_others_can_be_reached() -> None:
    assert [explain_lost_quorum(count, 9).partition(" of 9")[0] for count in (1, 2, 3, 4)] == [
        "no other node", "only one other node", "only 2 other nodes", "only 3 other nodes"
    ]  # fmt: skip
