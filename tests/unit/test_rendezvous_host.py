"""Node 0 while it waits for the others."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.elastic.membership import rendezvous_host
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
        first.offer(lambda node: {})
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
