"""Node 0 while it waits for the others."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.core.errors import Unhealthy
from phalanx.elastic.membership import rendezvous_host
from phalanx.elastic.membership.admission import can_start_without
from phalanx.elastic.membership.rendezvous_host import ConnectedNode, RendezvousHost


def test_who_is_not_ready_is_named_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = [1000.0], []
    monkeypatch.setattr(rendezvous_host, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def notice(kind: str, details: dict[str, Any]) -> None:
        said.append(details["message"])

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        first = RendezvousHost(3, listener, "a secret of a test", None, {"devices": []}, 600.0, notice)
        for node in (1, 2):
            first._connected[node] = ConnectedNode(SimpleNamespace(send=lambda message: None), {})  # type: ignore[arg-type]
        first.offer({})
        assert not first.are_all_ready() and said == []
        clock[0] += 61
        assert not first.are_all_ready() and not first.are_all_ready()
        first._connected[1].answer = {}
        clock[0] += 61
        assert not first.are_all_ready()
        first._connected[2].answer = {}
        clock[0] += 61
        assert first.are_all_ready()
    assert [message.partition(" to get ready")[0] for message in said] == [
        "waiting for nodes 1, 2", "waiting for node 2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("node", "unfit", "here", "spares", "starts"),
    [
        (1, [], [1, 2], 1, True),
        (0, [], [1, 2], 1, True),
        (1, [], [1, 2], 0, False),  # there is no spare
        (2, [1], [1, 2, 3], 1, False),  # the only one has the place of another
        (2, [1], [1, 2, 3], 2, True),
        (1, [], [1], 1, False),  # node 0 would be alone
        (0, [1], [1], 2, False),
    ],
)
def test_a_job_starts_without_a_node_where_a_spare_and_another_node_are_left(
    node: int, unfit: list[int], here: list[int], spares: int, starts: bool
) -> None:
    assert can_start_without(node, unfit, here, spares) is starts


def test_the_one_node_of_a_job_waits_for_nobody() -> None:
    hello = {"host": "here", "devices": [["cpu", "any", True]] * 2}
    alone = RendezvousHost(1, None, "", None, hello, 600.0, lambda kind, details: None)
    alone.offer({})
    alone.poll_once()
    assert alone.have_all_nodes() and alone.are_all_ready() and alone.descriptors() == {}
    assert (alone.devices(1), alone.answers()) == ([hello["devices"]], {})
    assert alone.describe_nodes(1) == ({"hosts": ["here"], "spares": []}, [])
    with pytest.raises(Unhealthy, match=r"^it smokes$"):
        alone.yield_to_spare("it smokes", alone=False)
