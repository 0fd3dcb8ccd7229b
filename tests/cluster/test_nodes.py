"""Agents of several nodes with real processes and sockets on one machine; the workers are in node_jobs.py."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import ConfigError
from phalanx.core.placement import ExitCode
from phalanx.elastic.membership import channel as channels
from phalanx.elastic.membership import rendezvous, rendezvous_client
from phalanx.elastic.membership.admission import make_hello
from phalanx.elastic.membership.listener import EVERYWHERE, MAX_PENDING, ConnectionListener
from phalanx.elastic.membership.rendezvous_client import RendezvousClient
from phalanx.elastic.supervisor.meeting_host import MeetingHost
from tests.cluster.warm_nodes import Node, WarmNodes
from tests.helpers import free_port, is_alive, wait_until

SECRET = {"PHALANX_SECRET": "a secret of the tests' own"}


class Started:
    """A node's process; of a machine of its own where it has a `network`, a namespace."""

    def __init__(
        self,
        parent: WarmNodes,
        folder: Path,
        worker: str,
        ranks: int,
        environment: dict[str, str],
        network: str | None = None,
        **options: Any,
    ) -> None:
        self.process = Node(parent, [worker, str(ranks), str(folder), json.dumps(options)], environment, network)
        self.pid = self.process.pid

    def finish(self) -> tuple[int, str, list[dict[str, Any]]]:
        """Exit code and last words of the job there, and the events."""
        self.process.wait(180)
        out, err = self.process.said()
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert lines, err
        assert "code" in lines[-1], err
        return lines[-1]["code"], lines[-1].get("words") or "", lines[:-1]

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)
        self.process.wait(60)


class Cluster:
    """Starts nodes that meet in a folder, and ends whatever is left of them."""

    def __init__(self, parent: WarmNodes, folder: Path) -> None:
        self.parent, self.folder, self.started = parent, folder, list[Started]()
        self.meet = f"file://{folder}/meet"

    def start(
        self, worker: str, node: int, ranks: int = 1, environment: dict[str, str] | None = None, **options: Any
    ) -> Started:
        whole: dict[str, Any] = {"nodes": 2, "node": node, "meet": self.meet} | options
        home = {"HOME": str(self.folder)}  # where the secret of a TCP address is kept
        self.started.append(Started(self.parent, self.folder, worker, ranks, home | (environment or {}), **whole))
        return self.started[-1]

    def noted(self, name: str, attempt: int, rank: int) -> Any:
        path = self.folder / f"{name}-{attempt}-{rank}.json"
        wait_until(path.exists, timeout_s=180)
        return json.loads(path.read_text())


@pytest.fixture
def cluster(warm_nodes: WarmNodes, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(warm_nodes, tmp_path)
    yield made
    for each in made.started:
        each.kill()


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in events]


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_ranks_of_nodes_with_different_numbers_find_each_other(cluster: Cluster, scheme: str) -> None:
    if scheme == "tcp":
        cluster.meet = f"tcp://127.0.0.1:{free_port()}"
    others = [cluster.start("tells", 2, 3, nodes=3), cluster.start("tells", 1, 1, nodes=3)]
    code, said, events = cluster.start("tells", 0, 2, nodes=3).finish()
    assert code == 0, said
    assert [other.finish()[0] for other in others] == [0, 0]
    assert cluster.noted("told", 1, 0) == [1, 2, 3, 4, 5]
    places = [cluster.noted("place", 1, rank) for rank in range(6)]
    assert [place[:3] for place in places] == [[0, 0, 2], [0, 1, 2], [1, 0, 1], [2, 0, 3], [2, 1, 3], [2, 2, 3]]
    interfaces = {place[3] for place in places}  # the one that leads to the others
    assert interfaces == {"lo"} if scheme == "tcp" else interfaces <= {name for _, name in socket.if_nameindex()}
    assert len(interfaces) == 1
    assert sorted(event["node"] for event in events if event["kind"] == "node_joined") == [1, 2]
    assert not (cluster.folder / "meet").exists()  # nothing stays behind


def test_a_rank_killed_on_another_node_starts_all_again(cluster: Cluster) -> None:
    other = cluster.start("killed_once", 1)
    code, _, events = cluster.start("killed_once", 0, max_restarts=1).finish()
    assert (code, other.finish()[0]) == (0, 0)
    events = [event for event in events if event["kind"] != "warning"]  # that node 0 waits
    assert kinds(events) == [
        "node_joined", "attempt_started", "worker_died", "restarted", "incident", "attempt_started",
    ]  # fmt: skip
    died = events[2]
    assert (died["rank"], died["signal"], died["host"]) == (1, "SIGKILL", os.uname().nodename)
    killed, running = cluster.noted("killed", 1, 1), cluster.noted("running", 2, 0)
    print(f"from kill -9 on node 1 to the ranks of node 0 running again: {(running - killed) * 1000:.0f} ms")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_takes_the_ranks_of_any_node_whose_agent_is_killed(cluster: Cluster, lost: int) -> None:
    nodes = [cluster.start("second_time", node, 2, nodes=2, spares=1, max_restarts=1) for node in range(3)]
    pids = [cluster.noted("ready", 1, rank) for rank in range(4)]
    nodes[lost].kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    leader = 1 - lost if lost == 0 else 0
    code, _, events = nodes[leader].finish()
    assert (code, nodes[2].finish()[0], nodes[1 - lost].process.wait(90)) == (0, 0, 0)
    expected = ["attempt_started", "node_lost", "restarted", "incident", "attempt_started"]
    assert kinds(events)[-5:] == expected
    assert (events[-4]["node"], events[-4]["host"]) == (lost, os.uname().nodename)
    assert events[-2]["done"] == f"node 2 takes the ranks of node {lost}"
    assert [cluster.noted("place", 2, rank) for rank in range(4)] == [[rank // 2, rank] for rank in range(4)]
    assert not (cluster.folder / "meet").exists() or lost == 0


@pytest.mark.parametrize("mad", [0, 1])
def test_a_node_that_sends_nonsense_is_named_and_a_spare_takes_its_ranks(cluster: Cluster, mad: int) -> None:
    """It is dropped, and one part of the nodes finishes the run. A leader may keep it: if one of two followers
    drops it before the other does, it has a majority, then half of two nodes, and the next epoch's file decides."""
    frame = {"ended": {"attempt": [], "code": "\x1b"}, "held": 7}
    nodes = [
        cluster.start("second_time", node, nodes=2, spares=1, max_restarts=1, **({"mad": frame} if node == mad else {}))
        for node in range(3)
    ]
    ended = [node.finish() for node in nodes]
    codes = [code for code, _, _ in ended]
    assert not any("Traceback" in "".join(node.process.said()) for node in nodes)
    if mad == 0 and codes == [0, ExitCode.FAILED, ExitCode.FAILED]:
        return
    assert codes == [ExitCode.FAILED if node == mad else 0 for node in range(3)], ended
    events = [event for _, _, found in ended for event in found]
    lost = {event["reason"] for event in events if event["kind"] == "node_lost" and event["node"] == mad}
    assert lost == {"it sent an invalid message (ended.attempt: Input should be a valid integer)"}


@pytest.mark.parametrize("lost", [0, 1])
def test_without_a_spare_the_ranks_are_divided_anew(cluster: Cluster, lost: int) -> None:
    """Of one of two the file of the epoch makes the leader."""
    nodes = [cluster.start("second_time", node, 1, max_restarts=1) for node in range(2)]
    for rank in range(2):
        cluster.noted("ready", 1, rank)
    nodes[lost].kill()
    code, _, events = nodes[1 - lost].finish()
    assert code == 0
    assert events[-2]["done"] == f"the work is redistributed over node {1 - lost}: 1 rank"
    assert cluster.noted("place", 2, 0) == [0, 0]


def test_a_node_that_is_lost_when_a_rank_is_done_is_not_waited_for_though_others_had_not_left(cluster: Cluster) -> None:
    nodes = [cluster.start("is_leaving", node, 1 + node, on_lost_node=["wait"]) for node in range(2)]
    pids = [cluster.noted("ready", 1, rank) for rank in range(3)]
    wait_until(lambda: not is_alive(pids[1]))
    nodes[0].kill()
    assert nodes[1].finish()[:2] == (0, "the run is done")


@pytest.mark.parametrize("unfit", [0, 1])
def test_a_node_that_does_not_fit_a_new_division_leaves_and_the_others_go_on(cluster: Cluster, unfit: int) -> None:
    """The leader, too: another one leads then."""
    options = [{"unfit_for": 2} if number == unfit else {} for number in range(3)]
    nodes = [cluster.start("second_time", number, nodes=3, max_restarts=1, **options[number]) for number in range(3)]
    for rank in range(3):
        cluster.noted("ready", 1, rank)
    nodes[2].kill()
    ended = [nodes[number].finish() for number in (0, 1)]
    assert [code for code, _, _ in ended] == [2 if number == unfit else 0 for number in (0, 1)], ended
    assert "there is no room for that here" in ended[unfit][1]
    assert cluster.noted("place", 2, 0) == [0, 0]  # alone
    said = [event.get("message", "") for event in ended[0][2]]
    assert any("node 0 (" in each and "the leader, leaves the run" in each for each in said) is (unfit == 0)


@pytest.mark.parametrize(
    ("unfit", "seats"), [([1], [0, 2]), ([2], [0, 1]), ([1, 2], None), ([0], [1, 2]), ([0, 1], None)]
)
def test_nodes_that_are_not_fit_at_the_start_are_left_out_where_there_are_spares(
    cluster: Cluster, unfit: list[int], seats: list[int] | None
) -> None:
    nodes = [cluster.start("tells", node, spares=1, unhealthy=node in unfit) for node in range(3)]
    finished = [node.finish() for node in nodes]
    ended = [each[:2] for each in finished]
    died = [event for each in finished for event in each[2] if event["kind"] == "worker_died"]
    assert {ended[node][0] for node in unfit} == {ExitCode.UNHEALTHY}
    if seats is None:
        code, said = ended[0]
        assert code == ExitCode.UNHEALTHY
        assert said.startswith("node ") and said.endswith("not fit for training: it smokes")
    else:
        assert [ended[node][0] for node in seats] == [0, 0], "\n".join(map(str, died))
        assert cluster.noted("told", 1, 0) == [1]
        assert [cluster.noted("place", 1, rank)[0] for rank in range(2)] == [0, 1]  # counted by seats
        lost = [event["reason"] for each in finished for event in each[2] if event["kind"] == "node_lost"]
        assert not any("no heartbeat arrived" in reason for reason in lost), (
            lost
        )  # all see a node 0 leave that is not fit


def test_a_node_0_that_is_not_fit_says_why_nobody_takes_its_place(cluster: Cluster) -> None:
    nodes = [cluster.start("tells", node, unhealthy=node == 0) for node in range(2)]
    said = (
        "node 0 is not fit for training: it smokes; this is node 0, which all nodes wait for, and there is no "
        "spare: start its command on another machine, or restart all nodes with --spares 1 and one more node (and "
        "replace in resilience.on_lost_node)"
    )
    assert [node.finish()[:2] for node in nodes] == [(ExitCode.UNHEALTHY, said)] * 2


def test_two_of_four_without_files_are_no_majority(cluster: Cluster) -> None:
    # Both have to be missed together: on a busy machine they may last have been heard a second apart, or two.
    options: dict[str, Any] = {"nodes": 4, "files": False, "max_restarts": 3, "heartbeat_s": 8.0}
    nodes = [cluster.start("second_time", node, 1, **options) for node in range(4)]
    for rank in range(4):
        cluster.noted("ready", 1, rank)
    for node in nodes[2:]:
        node.process.signal(signal.SIGSTOP)
    ended = [node.finish() for node in nodes[:2]]
    assert [code for code, _, _ in ended] == [ExitCode.FAILED] * 2
    assert "of 4 can be reached from here, and the others may continue the run" in ended[0][1]


@pytest.mark.parametrize("way", ["wait", "shrink"])
def test_a_node_that_returns_is_taken_in_again(cluster: Cluster, way: str) -> None:
    options: dict[str, Any] = {"max_restarts": 2, "on_lost_node": [way]}
    first, other = (cluster.start("third_time", node, 1, **options) for node in range(2))
    for rank in range(2):
        cluster.noted("ready", 1, rank)
    other.kill()
    if way == "shrink":
        cluster.noted("ready", 2, 0)
    again = cluster.start("third_time", 1, 1, **options)
    code, _, events = first.finish()
    assert (code, again.finish()[0]) == (0, 0)
    assert "node_joined" in kinds(events)[kinds(events).index("node_lost") :]
    last = 2 if way == "wait" else 3
    assert [cluster.noted("place", last, rank) for rank in range(2)] == [[0, 0], [1, 1]]


def test_node_0_comes_back_to_a_run_that_another_node_leads(cluster: Cluster) -> None:
    options: dict[str, Any] = {"max_restarts": 2, "on_lost_node": ["wait"]}
    first, other = (cluster.start("second_time", node, 1, **options) for node in range(2))
    for rank in range(2):
        cluster.noted("ready", 1, rank)
    first.kill()
    cluster.meet = _published(cluster)
    again = cluster.start("second_time", 0, 1, again=True, **options)
    assert (other.finish()[0], again.finish()[0]) == (0, 0)
    assert [cluster.noted("place", 2, rank) for rank in range(2)] == [[0, 0], [1, 1]]


def test_a_node_that_is_lost_when_all_is_done_is_not_waited_for(cluster: Cluster) -> None:
    options: dict[str, Any] = {"max_restarts": 1, "on_lost_node": ["wait"], "wait_s": 600, "shared": True}
    first, other = (cluster.start("lingers", node, 1, **options) for node in range(2))
    for rank in range(2):
        cluster.noted("ready", 1, rank)
    first.kill()
    code, words, _ = other.finish()
    assert code == ExitCode.DONE, words


def _published(cluster: Cluster) -> str:
    """Where the new leader can be found: its epoch's file says so, and a test has no member to put it in the folder."""
    file = cluster.folder / "run" / "epochs" / "000002.json"
    wait_until(lambda: file.exists() and file.read_text().endswith("}"), timeout_s=180)
    host, port = json.loads(file.read_text())["address"]
    there = json.loads((cluster.folder / "meet" / "phalanx-node-0.json").read_text())
    text = json.dumps(there | {"hosts": [host], "port": port})
    (cluster.folder / "meet" / "phalanx-node-0.json").write_text(text)
    return cluster.meet


def test_a_frozen_agent_ends_its_ranks_when_it_thaws(cluster: Cluster) -> None:
    nodes = [cluster.start("second_time", node, 1, nodes=2, spares=1, max_restarts=1) for node in range(3)]
    pids = [cluster.noted("ready", 1, rank) for rank in range(2)]
    nodes[1].process.signal(signal.SIGSTOP)
    assert [nodes[node].finish()[0] for node in (0, 2)] == [0, 0]
    assert is_alive(pids[1])
    nodes[1].process.signal(signal.SIGCONT)
    begun = time.monotonic()
    code, words, _ = nodes[1].finish()
    print(f"the thawed agent had left after {time.monotonic() - begun:.2f} s")
    assert code == ExitCode.FAILED
    assert words
    assert not is_alive(pids[1])


def test_ranks_of_a_frozen_leader_write_no_more_once_the_others_go_on(cluster: Cluster) -> None:
    nodes = [cluster.start("until_fenced", node, 1, nodes=2, spares=1, max_restarts=1) for node in range(3)]
    pids = [cluster.noted("ready", 1, rank) for rank in range(2)]
    nodes[0].process.signal(signal.SIGSTOP)
    assert [nodes[node].finish()[0] for node in (1, 2)] == [0, 0]
    assert is_alive(pids[0])
    assert cluster.noted("fenced", 1, 0).startswith(
        "this rank belongs to attempt 1, but since epoch 2 the run continues"
    )
    assert [cluster.noted("epoch", 2, rank) for rank in range(2)] == [2, 2]
    nodes[0].process.signal(signal.SIGCONT)
    assert nodes[0].finish()[0] == ExitCode.FAILED
    assert not is_alive(pids[0])


def test_a_node_that_never_arrives_is_named_on_all_nodes(cluster: Cluster) -> None:
    other = cluster.start("fine", 1, nodes=3)
    code, text, _ = cluster.start("fine", 0, nodes=3, timeout_s=1.0).finish()
    assert (code, text) == other.finish()[:2]
    assert code == ExitCode.FAILED
    assert text.startswith("node 2 of 3 did not arrive within 1 s")
    alone = cluster.start("fine", 1, timeout_s=1.0)
    assert alone.finish()[1].startswith(f"node 0 did not arrive at {cluster.meet} within 1 s")


def test_a_node_that_does_not_come_back_ends_the_job(cluster: Cluster) -> None:
    options: dict[str, Any] = {"max_restarts": 1, "on_lost_node": ["wait"], "wait_s": 1.0}
    first, other = cluster.start("second_time", 0, **options), cluster.start("second_time", 1, **options)
    cluster.noted("ready", 1, 1)
    other.kill()
    code, text, events = first.finish()
    assert (code, text) == (1, "nodes were lost, and the remaining nodes cannot continue without them")
    assert kinds(events)[-1] == "gave_up"


def test_a_second_job_in_the_folder_is_refused(cluster: Cluster) -> None:
    first = cluster.start("fine", 0)
    wait_until((cluster.folder / "meet" / "phalanx-node-0.json").exists, timeout_s=180)
    assert (cluster.folder / "meet" / "phalanx-node-0.json").stat().st_mode & 0o777 == 0o600
    code, text, _ = cluster.start("fine", 0).finish()
    assert code == ExitCode.CONFIG
    assert f"(node 0 is process {first.pid} on" in text
    other = cluster.start("fine", 1)
    assert (first.finish()[0], other.finish()[0]) == (0, 0)


def test_a_node_0_whose_file_was_replaced_leaves(cluster: Cluster) -> None:
    """Two that start at the same moment do not see each other at first."""
    first = cluster.start("fine", 0)
    file = cluster.folder / "meet" / "phalanx-node-0.json"
    wait_until(file.exists, timeout_s=180)
    tree = json.loads(file.read_text())
    file.write_text(json.dumps(tree | {"process": "7 on elsewhere"}))
    code, text, _ = first.finish()
    assert code == ExitCode.CONFIG
    assert "is now in use by another job (node 0 is process 7 on elsewhere)" in text
    assert file.exists()  # it is the other's


def test_a_wrong_secret_is_a_sentence_and_disturbs_nobody(cluster: Cluster) -> None:
    cluster.meet = f"tcp://127.0.0.1:{free_port()}"
    first = cluster.start("fine", 0, environment=SECRET)
    code, text, _ = cluster.start("fine", 1, environment={"PHALANX_SECRET": "a secret of somebody else"}).finish()
    assert code == ExitCode.CONFIG
    assert "does not accept this node's secret; set the same PHALANX_SECRET on all nodes" in text
    right = cluster.start("fine", 1, environment=SECRET)
    assert (first.finish()[0], right.finish()[0]) == (0, 0)
    assert SECRET["PHALANX_SECRET"] not in text


def test_a_node_with_another_home_folder_is_told_how_to_join(cluster: Cluster) -> None:
    """Without the variable, the secret is in a file that machines may not share."""
    cluster.meet = f"tcp://127.0.0.1:{free_port()}"
    first = cluster.start("fine", 0)
    code, text, _ = cluster.start("fine", 1, environment={"HOME": str(cluster.folder / "elsewhere")}).finish()
    assert code == ExitCode.CONFIG
    assert f"it is kept in {cluster.folder}/elsewhere/.local/state/phalanx/rendezvous/loopback-" in text
    assert (
        "otherwise use a shared folder (--rendezvous file:///FOLDER), or set the same PHALANX_SECRET on all nodes"
    ) in text
    right = cluster.start("fine", 1)
    assert (first.finish()[0], right.finish()[0]) == (0, 0)


def test_node_0_says_once_per_caller_who_was_refused_and_why() -> None:
    listener, first = listening_first_node()
    said: list[tuple[str, dict[str, Any]]] = []
    first.notice = lambda kind, details: said.append((kind, details))
    for host in ("127.0.0.1", "127.0.0.1", "127.0.0.2"):
        connection = socket.create_connection(listener.getsockname(), source_address=(host, 0), timeout=30)
        caller = channels.Handshake(channels.Channel(connection), "another secret", calling=True)
        until = time.monotonic() + 30
        while caller.failed is None and caller.channel.lost is None and time.monotonic() < until:
            first.poll_once()
            for message in caller.channel.receive():
                caller.feed(message)
        assert caller.failed == "it does not accept this node's secret"
        caller.channel.close("refused")
    sentence = "it does not know the secret; if it is a node of this job, set the same PHALANX_SECRET on all"
    sentence += " nodes"
    assert said == [
        ("warning", {"message": f"refused a connection from {host}: {sentence}"}) for host in ("127.0.0.1", "127.0.0.2")
    ]
    first.finish(0, "over")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"nodes": 4}, "--nodes is 4 on node 1"),
        ({"nodes": 5, "node": 4}, "--nodes is 5 on node 4"),
        ({"torch": "3"}, "torch is 3 on node 1"),
        ({"device": "fast:0"}, f"node 1 ({os.uname().nodename}) trains on fast and node 0 on cpu"),
        ({"recipe": {"a": 1, "optim.lr": 0.5}}, "optim.lr is 0.5 on node 1"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_the_others_go_on(
    cluster: Cluster, options: dict[str, Any], expected: str
) -> None:
    first = cluster.start("fine", 0)
    code, text, _ = cluster.start("fine", 1, **options).finish() if "node" not in options else _claim(cluster, options)
    assert code == ExitCode.CONFIG
    assert text.startswith(expected), text
    right = cluster.start("fine", 1)
    assert (first.finish()[0], right.finish()[0]) == (0, 0)


def _claim(cluster: Cluster, options: dict[str, Any]) -> tuple[int, str, list[dict[str, Any]]]:
    return cluster.start("fine", options["node"], nodes=options["nodes"]).finish()


def test_the_second_of_two_nodes_with_one_number_is_refused(cluster: Cluster) -> None:
    first, other = cluster.start("second_time", 0, max_restarts=1), cluster.start("second_time", 1)
    pids = [cluster.noted("ready", 1, rank) for rank in range(2)]
    code, text, _ = cluster.start("second_time", 1).finish()
    assert code == ExitCode.CONFIG
    assert f"claims to be node 1, but a process on {os.uname().nodename} already is" in text
    os.kill(pids[1], signal.SIGKILL)  # on to the second attempt
    assert (first.finish()[0], other.finish()[0]) == (0, 0)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_signal_on_any_node_stops_all(cluster: Cluster, asked: int) -> None:
    nodes = [cluster.start("stops_when_asked", 0, 2, max_restarts=3), cluster.start("stops_when_asked", 1)]
    for rank in range(3):
        cluster.noted("ready", 1, rank)
    nodes[asked].process.signal(signal.SIGTERM)
    ended = [node.finish() for node in nodes]
    assert [code for code, _, _ in ended] == [ExitCode.STOPPED] * 2
    for _, _, events in ended:
        assert [event["signal"] for event in events if event["kind"] == "stop_requested"] == ["SIGTERM"]
    assert [cluster.noted("received", 1, rank) for rank in range(3)] == ["SIGTERM"] * 3


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_signal_is_heeded_while_nodes_get_ready_for_a_new_division(cluster: Cluster, asked: int) -> None:
    """They may have to make token files anew, for an hour."""
    nodes = [cluster.start("second_time", node, nodes=3, max_restarts=3, slow_for=2) for node in range(3)]
    for rank in range(3):
        cluster.noted("ready", 1, rank)
    nodes[2].kill()
    for node in range(2):
        wait_until((cluster.folder / f"slow-{node}").exists, timeout_s=60)
    begun = time.monotonic()
    nodes[asked].process.signal(signal.SIGTERM)
    assert [node.finish()[0] for node in nodes[:2]] == [ExitCode.STOPPED] * 2
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("asked", [1, 2])
def test_a_stop_that_only_a_lost_leader_was_told_of_is_not_forgotten(cluster: Cluster, asked: int) -> None:
    """By a node with ranks, which stop, and by the spare, which gets some when they are asked to stop."""
    nodes = [cluster.start("stops_when_asked", node, nodes=2, spares=1, max_restarts=3) for node in range(3)]
    for rank in range(2):
        cluster.noted("ready", 1, rank)
    nodes[0].process.signal(signal.SIGSTOP)
    nodes[asked].process.signal(signal.SIGTERM)
    assert [nodes[node].finish()[0] for node in (1, 2)] == [ExitCode.STOPPED] * 2
    nodes[0].process.signal(signal.SIGCONT)
    assert nodes[0].finish()[0] == ExitCode.FAILED


@pytest.mark.parametrize("asked", [0, 1])
def test_a_deaf_rank_does_not_hold_a_second_interrupt_up(cluster: Cluster, asked: int) -> None:
    """Rank 0 stops in peace, rank 1 on the other node never does."""
    nodes = [cluster.start("deaf", 0), cluster.start("deaf", 1)]
    pids = [cluster.noted("ready", 1, rank) for rank in range(2)]
    nodes[asked].process.signal(signal.SIGINT)
    cluster.noted("received", 1, 0)
    nodes[asked].process.signal(signal.SIGINT)
    assert [node.finish()[0] for node in nodes] == [ExitCode.FAILED] * 2
    assert not any(is_alive(pid) for pid in pids)


def test_a_mistake_found_by_any_rank_ends_all_with_its_sentence(cluster: Cluster) -> None:
    other = cluster.start("config_error", 1)
    code, _, events = cluster.start("config_error", 0, max_restarts=3).finish()
    assert (code, other.finish()[0]) == (ExitCode.CONFIG, ExitCode.CONFIG)
    assert events[-1]["reason"] == "optim.lr is 0, so nothing would be learned; set it above 0"


@pytest.mark.parametrize(("lowered", "expected"), [(2, 0), (1, ExitCode.OUT_OF_MEMORY)])
def test_memory_that_runs_out_elsewhere_is_tried_with_less(cluster: Cluster, lowered: int, expected: int) -> None:
    other = cluster.start("more_memory", 1, lowered=lowered)
    code, _, events = cluster.start("more_memory", 0, lowered=lowered).finish()
    assert (code, other.finish()[0]) == (expected, expected)
    assert kinds(events).count("attempt_started") == lowered + 1
    assert all(event["exit_code"] == ExitCode.OUT_OF_MEMORY for event in events if event["kind"] == "worker_died")


STRANGE = (
    b"",
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    b"x" * 5000,
    b'{"nonce": [], "proof": 7}\n',
    b'{"nonce": "n"}\n',
    b'{"nonce": "n", "proof": "\\ud800"}\n',  # half of a character, which no encoding takes
    b'{"nonce": "\\ud800", "proof": "n"}\n',
)


def test_strangers_do_not_disturb(cluster: Cluster) -> None:
    first = cluster.start("second_time", 0, max_restarts=1)
    file = cluster.folder / "meet" / "phalanx-node-0.json"
    wait_until(file.exists, timeout_s=180)
    published = json.loads(file.read_text())
    address = ("127.0.0.1", published["port"])
    with contextlib.ExitStack() as held:
        for number in range(100):  # more than node 0 listens to at a time
            stranger = held.enter_context(socket.create_connection(address, timeout=30))
            stranger.sendall(STRANGE[number % len(STRANGE)])
        other = cluster.start("second_time", 1)
        pids = [cluster.noted("ready", 1, rank) for rank in range(2)]
        epoch = json.loads(next((cluster.folder / "run" / "epochs").iterdir()).read_text())
        assert epoch["epoch"] == 1
        nearest = (published["hosts"][0], published["port"])  # by which the other node has come
        if nearest != address:  # while ranks run it listens there alone
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, timeout=30)
        for said in STRANGE[1:]:  # while ranks run, too
            late = held.enter_context(socket.create_connection(nearest, timeout=30))
            late.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert b"proof" not in late.makefile("rb").read()  # hung up on, and nothing learnt
        os.kill(pids[0], signal.SIGKILL)
        assert (first.finish()[0], other.finish()[0]) == (0, 0)


def listening_first_node() -> tuple[socket.socket, MeetingHost]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setblocking(False)
    hello = make_hello(0, 2, [["cpu", "any", True]], {}, {})
    return listener, MeetingHost(2, listener, "secret", None, hello, 60, print)


def test_who_listens_where_a_leader_was_keeps_no_node_from_coming_back() -> None:
    """Its port is anybody's once it is gone; at the rendezvous itself a stranger ends the search, in a sentence."""
    listener, first = listening_first_node()
    stranger = ConnectionListener(
        socket.create_server(("127.0.0.1", 0)), "a secret of somebody else", lambda host, why: None
    )
    there, gone = listener.getsockname(), stranger.socket.getsockname()
    found: list[RendezvousClient | Exception] = []

    def look(place: tuple[str, int], leader: tuple[str, int]) -> None:
        at = rendezvous.RendezvousPoint("tcp://there", host=place[0], port=place[1], secret="secret")
        hello = make_hello(1, 2, [["cpu", "any", True]], {}, {})
        try:
            found.append(rendezvous_client.connect_to_leader(at, hello, 60, print, lambda: leader))
        except ConfigError as error:
            found.append(error)

    for place, leader in ((there, gone), (gone, gone)):
        looking = threading.Thread(target=look, args=(place, leader))
        looking.start()
        while looking.is_alive():
            first.poll_once()
            stranger.accept()
            looking.join(0.01)
    node, error = found
    assert isinstance(node, RendezvousClient) and node.channel.socket.getpeername() == there
    assert "it does not accept this node's secret; set the same PHALANX_SECRET on all nodes" in str(error)
    node.close()
    stranger.close("over")
    first.finish(0, "over")


def test_ranks_that_call_all_at_once_do_not_push_each_other_out() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    door = ConnectionListener(listener, "secret", lambda host, why: pytest.fail(why))
    connections = [socket.create_connection(listener.getsockname()) for _ in range(MAX_PENDING * 2)]
    callers = [channels.Handshake(channels.Channel(connection), "secret", calling=True) for connection in connections]
    until = time.monotonic() + 30
    greeted: list[channels.Channel] = []
    while len(greeted) < len(callers) and time.monotonic() < until:
        greeted += [channel for channel, _ in door.accept()]
        for caller in callers:
            for message in caller.channel.receive():
                caller.feed(message)
                if caller.done:
                    caller.channel.send({"role": "store"})
        assert all(caller.channel.lost is None for caller in callers)
    assert len(greeted) == len(callers)
    door.close("over")
    for channel in [*greeted, *(caller.channel for caller in callers)]:
        channel.close("over")


@contextlib.contextmanager
def crowded_door(crowd: str) -> Iterator[ConnectionListener]:
    """A door where more connections have come in from an address than it takes, all of which are silent."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    door = ConnectionListener(listener, "secret", lambda host, why: pytest.fail(why))
    with contextlib.ExitStack() as held, pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.elastic.membership.listener.TOGETHER_S", 0.0)  # turns, and no time that has to pass
        for _ in range(5):
            for _ in range(door._most // 4):
                one = held.enter_context(socket.socket())
                one.bind((crowd, 0))
                one.connect(listener.getsockname())
            for _ in range(door._most):
                door.accept()
        yield door
        door.close("over")


@pytest.mark.parametrize("crowd", ["127.0.0.1", "127.0.0.2"])
def test_silent_connections_keep_nobody_out(crowd: str) -> None:
    """Be it that they come from another address or from the same one as the node that knows the secret."""
    with crowded_door(crowd) as door:
        assert len(door._pending) <= door._most // 2
        with socket.create_connection(door.socket.getsockname()) as connection:
            caller = channels.Handshake(channels.Channel(connection), "secret", calling=True)
            greeted: list[channels.Channel] = []
            for _ in range(20):
                greeted += [channel for channel, _ in door.accept()]
                for message in caller.channel.receive():
                    caller.feed(message)
                    if caller.done:
                        caller.channel.send({"role": "store"})
            assert len(greeted) == 1
            greeted[0].close("over")
        assert door.take_flooding_host() == crowd
        door.accept()
        assert door.take_flooding_host() is None  # it is said once


def test_who_is_hung_up_on_before_the_proof_calls_again() -> None:
    """As a rank's connection may be, where strangers crowd a door."""
    listener = socket.create_server(("127.0.0.1", 0))
    greeted: list[tuple[channels.Channel, Any]] = []

    def answers() -> None:
        listener.accept()[0].close()
        door = ConnectionListener(listener, "secret", lambda host, why: None)
        while not greeted:
            greeted.extend(door.accept())
            time.sleep(0.01)
        greeted[0][0].send({"ok": True})

    answering = threading.Thread(target=answers)
    answering.start()
    with channels.connect_and_greet(listener.getsockname(), "secret", {"role": "store"}, 60.0):
        answering.join(60)
    assert not answering.is_alive()
    listener.close()


def test_a_crowd_does_not_wake_the_owner_with_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with crowded_door("127.0.0.2") as door:
        assert door.descriptors() and door.due_s() == math.inf
        monkeypatch.setattr("phalanx.elastic.membership.listener.TOGETHER_S", 60.0)
        door.accept()
        with socket.create_connection(door.socket.getsockname()):
            assert not door.descriptors() and 0 < door.due_s() <= 60 and door.accept() == []
        monkeypatch.setattr("phalanx.elastic.membership.listener.TOGETHER_S", 0.0)
        assert door.descriptors() and door.due_s() == math.inf


def test_who_sends_its_proof_in_crumbs_is_closed() -> None:
    with crowded_door("127.0.0.2") as door, socket.create_connection(door.socket.getsockname(), timeout=60) as crumbs:
        crumbs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(5):
            door.accept()
        with contextlib.suppress(OSError):
            for _ in range(60):
                crumbs.sendall(b"{")
                time.sleep(0.001)
                door.accept()
        with contextlib.suppress(ConnectionResetError):
            assert b"unknown" not in crumbs.makefile("rb").read()
        assert all(stranger.host == "127.0.0.2" for stranger in door._pending.values())


def test_who_listens_at_all_addresses_comes_to_listen_at_one() -> None:
    """Every address 127.x.y.z is this machine's."""
    listener = rendezvous.listen(rendezvous.RendezvousPoint("file:///anywhere", folder=Path("/anywhere")))
    assert listener.getsockname()[0] in EVERYWHERE
    door, port = ConnectionListener(listener, "secret", lambda host, why: pytest.fail(why)), listener.getsockname()[1]
    with socket.create_connection(("127.0.0.2", port), timeout=30) as before:
        door.accept()
        assert b"nonce" in before.recv(1000)
        child = subprocess.Popen(["sleep", "60"], pass_fds=[listener.fileno()])  # as one that has not dropped it yet
        door.restrict_to("127.0.0.1")
        child.kill()
        child.wait()
        assert door.socket.getsockname() == ("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=30)
        with socket.create_connection(("127.0.0.1", port), timeout=30):
            pass
        before.setblocking(False)
        with pytest.raises(BlockingIOError):  # who had called before was not hung up on
            before.recv(1)
    at_one = door.socket
    door.restrict_to("127.0.0.2")  # it listens at one already
    assert door.socket is at_one
    door.close("over")


def test_a_silent_stranger_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_TIMEOUT_S", 0.2)
    listener, first = listening_first_node()
    stranger = socket.create_connection(listener.getsockname(), timeout=30)
    heard = b""
    until = time.monotonic() + 30
    stranger.setblocking(False)
    while time.monotonic() < until:
        first.poll_once()
        try:
            part = stranger.recv(1000)
        except BlockingIOError:
            continue
        if not part:
            break
        heard += part
    assert set(json.loads(heard)) == {"phalanx", "nonce"}
    assert len(first.descriptors()) == 1  # the listener's
    first.finish(0, "over")
    stranger.close()
