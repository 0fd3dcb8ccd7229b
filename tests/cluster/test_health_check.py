"""Several nodes that look at each other: ways that are there, slow or blocked, clocks, and the command on each."""

import json
import os
import socket
from pathlib import Path
from typing import Any

from phalanx.core.placement import Placement
from phalanx.elastic.membership import channel as channels
from phalanx.elastic.membership.connectivity import ConnectionProbe, EchoServer, probe
from phalanx.health.findings import Severity, verdict
from phalanx.launch import health_check
from tests.helpers import run_ranks

WELL = ConnectionProbe(1e-4, 1e9, 0.0)
HOSTS = ["n0", "n1", "n2"]


def told(changes: dict[tuple[int, int], ConnectionProbe]) -> list[tuple[str, str, str | None]]:
    ways = {one: {other: changes.get((one, other), WELL) for other in range(3) if other != one} for one in range(3)}
    return [(each.check, str(each.severity), each.where) for each in health_check.judge_connections(HOSTS, ways)]


def test_what_the_ways_between_nodes_tell() -> None:
    assert told({}) == [("connection", "ok", None)]
    blocked = health_check.judge_connections(HOSTS, {1: {2: ConnectionProbe(error="No route to host")}})
    assert verdict(blocked) == Severity.RESET
    assert "node 1 (n1) cannot reach node 2 (n2): No route to host" in blocked[0].sentence
    assert told({(1, 2): ConnectionProbe(error="it hangs")}) == [("connection", "reset", "1-2")]
    assert told({(0, 2): ConnectionProbe(1e-4, 4e8, 0.0)}) == [("network speed", "watch", "0-2")]
    assert told({(0, 1): ConnectionProbe(1e-4, 1e9, 400.0)}) == [("clock", "reset", None)]
    assert told({(0, 1): ConnectionProbe(1e-4, 1e9, -3.0)}) == [("clock", "watch", None)]
    assert told({(1, 2): ConnectionProbe(1e-4, 1e9, 400.0)}) == [
        ("connection", "ok", None)
    ]  # node 0's clock is what counts
    assert told({(0, 1): ConnectionProbe(9.0, 1e9, 4.0)}) == [("connection", "ok", None)]  # a slow way tells no time


def test_an_echo_answers_who_knows_the_secret_and_nobody_else() -> None:
    found = run_ranks(_echoes, 1)[0]
    assert found["error"] is None
    assert 0 < found["latency_s"] < 5
    assert found["bytes_per_s"] > 0
    assert abs(found["skew_s"]) < 5
    assert "does not accept this node's secret" in found["wrong secret"]
    assert found["stranger"] == ""
    assert found["closed"] is not None
    assert found["children"] == []


def _echoes(placement: Placement) -> dict[str, Any]:
    secret = "a secret of this test alone"
    echo = EchoServer("127.0.0.1", secret)
    way = probe(echo.address, secret).to_json()
    way["wrong secret"] = probe(echo.address, "another secret, as long").error
    with socket.create_connection(echo.address, timeout=20) as stranger:
        assert b"nonce" in stranger.recv(1 << 16)
        stranger.sendall(b'{"role": "echo"}\n')  # without a proof
        refusal = stranger.recv(1 << 16)
        way["stranger"] = "" if b"ok" not in refusal else refusal.decode()
    with channels.open_channel(
        echo.address, secret, 20, 20
    ).socket:  # one that has proved itself and is silent holds up nobody
        assert probe(echo.address, secret).error is None
    echo.close()
    way["closed"] = probe(echo.address, secret).error
    way["children"] = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return way


def test_the_command_on_each_of_two_nodes(tmp_path: Path) -> None:
    done = run_ranks(_node, 2, folder=str(tmp_path), options=["--json"])
    assert [code for code, _, _ in done] == [0, 0], done
    result = json.loads(done[0][1])
    assert result["verdict"] in ("ok", "watch")
    assert [each["host"] for each in result["nodes"]] == [socket.gethostname()] * 2
    assert {(way["from"], way["to"]) for way in result["ways"]} == {(0, 1), (1, 0)}
    assert all(way["error"] is None and way["bytes_per_s"] > 0 for way in result["ways"])
    assert [each["check"] for each in result["between"]["findings"]] == ["connection"]
    assert not (tmp_path / "meet").exists()


def test_a_node_that_is_not_fit_is_one_too_many(tmp_path: Path) -> None:
    baseline = {"version": 1, "host": "n", "cpus": 1, "gpus": [{"uuid": "GPU-gone", "name": "H100", "bus": "3b:00"}]}
    (tmp_path / "sick.json").write_text(json.dumps(baseline))
    done = run_ranks(_node, 2, folder=str(tmp_path), options=[], of_last=["--expect", "sick.json"])
    assert [code for code, _, _ in done] == [3, 3], done
    assert "reboot" in done[0][1]  # node 0 shows what node 1 has found
    assert "between nodes" in done[0][1]


def _node(placement: Placement, folder: str, options: list[str], of_last: list[str] | None = None) -> Any:
    from tests.dist.command import call

    where = ["--nodes", "2", "--node-rank", str(placement.rank), "--rendezvous", f"file://{folder}/meet"]
    more = (of_last or []) if placement.rank == 1 else []
    return call(placement, folder, [["health", *where, *options, *more]])[0]
