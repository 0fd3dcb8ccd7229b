"""Nodes hear frames that make no sense: from strangers before the proof of the secret, from a member of the job that
has gone mad behind it, and where replicas are kept. Whoever sends nonsense is lost and named; nobody else fails of it.
"""

import contextlib
import dataclasses
import json
import math
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.core.progress_page import RankProgress
from phalanx.elastic.membership import channel as channels
from phalanx.elastic.membership import messages
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.heartbeat import HeartbeatSocket
from phalanx.elastic.membership.listener import ConnectionListener, bind
from phalanx.elastic.membership.member_list import MemberList, member_list_to_message, parse_member
from phalanx.elastic.membership.membership import Membership
from phalanx.elastic.node import agent, watchdog
from phalanx.elastic.node.node_agent import NodeAgent
from phalanx.elastic.node.watchdog import Blame, HangTimeouts, ProcessStatus, ProgressReport
from phalanx.elastic.node.worker import NodeJob
from phalanx.elastic.replicas import own_ranks, server
from phalanx.elastic.replicas.own_ranks import StateFileFetcher
from phalanx.elastic.supervisor import leader_tasks
from phalanx.elastic.supervisor.coordinator import Coordinator
from phalanx.elastic.supervisor.failover import describe_division, describe_restart_budget
from phalanx.elastic.supervisor.state import JobState, RecoveryPolicy
from phalanx.elastic.supervisor.take_lead import become_coordinator
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import (
    HEADER_ONLY,
    RestorePoint,
    StateFileInfo,
    inventory_to_message,
    restore_point_to_message,
)
from phalanx.recovery.replica_client import receive_frame, send_frame
from phalanx.system.exit_causes import WorkerExit, describe_exception
from tests.hostile import changed, examples
from tests.unit.test_heartbeat_sender import Aloud

SECRET = "sixteen characters"
PATIENCE_S = 60.0
DEVICES = [["cpu", "any", True]]
HELD = {
    "generation": 1, "way": 0, "rank": 1, "world": 3, "part": 1, "parts": 3, "steps": [3, 4], "layout": "ab",
    "replica": False,
}  # fmt: skip
END = {
    "rank": 2, "pid": 7, "signal": None, "exit_code": 1, "host": None,
    "cause": {"exit_code": 1, "type": "ValueError", "message": "m", "reason": "r", "step": 3, "traceback": "t"},
}  # fmt: skip
LAST = {"attempt": 1, "code": 1, "ends": [END], "lowered": False}
BALLOT = {"ready": 1, "offered": 1, "last": LAST, "held": [HELD], "attempt": 1}
KEPT = {"step": 4, "generation": 1, "way": 0, "files": [[1, HELD], [2, {**HELD, "rank": 2, "part": 2}]]}
BUDGET = {"failures": 0, "reached": 0, "committed": 0, "first": 1, "crash": ["", 0]}
OFFER = describe_division(2, [(0, 1), (1, 1), (2, 1)], [DEVICES] * 3, RecoveryPolicy(nodes=3))
START = {
    "attempt": 1, "epoch": 1, "division": 1, "seats": [0, 1, 2], "ranks": [1, 1, 1], "step": 0, "kept": KEPT,
    "budget": BUDGET, "slots": 2,
}  # fmt: skip
PULSES = {
    "attempt": 1, "beats": [[2, 3, "forward", 0, "", 0.5, 3, 0.1, 2, False, [3, "forward", 1]]],
    "signs": {"2": [False, False, True]},
    "patience": [10.0, 20.0, None, 0.5],
}  # fmt: skip
ROSTER = member_list_to_message(
    MemberList(2, 2, tuple(parse_member({"node": node, "host": "h", "token": f"{node:016x}", "address": "127.0.0.1",
                                  "port": 1, "beats": 2, "devices": DEVICES}) for node in range(3)))
)  # fmt: skip
FRAMES: list[Any] = [
    {"roster": ROSTER}, {"follow": 1, "ballot": BALLOT}, {"follow": 1, "ballot": None}, {"offer": OFFER},
    {"start": START}, {"end": 1, "known": True}, {"pause": 1}, {"hung": 1, "ranks": [[2, "Hang", "why", 3]]},
    {"signal": "SIGTERM"}, {"finish": 0, "text": "done"}, {"dropped": "why", "code": 1}, {"gone": 1},
    {"ended": LAST, "held": [HELD]}, {"ready": 1, "held": [HELD]}, {"unfit": "why", "code": 2}, {"pulses": PULSES},
    {"stop": "SIGINT"}, {"stop": "SIGTERM", "again": True}, {"strangers": "127.0.0.9"},
]  # fmt: skip


def find_problem(message: Any) -> str | None:
    """Why a node is lost that says this; None: it may."""
    try:
        messages.parse_message(message if isinstance(message, dict) else {})
    except ValueError as error:
        return str(error)
    return None


def test_what_nodes_really_say_keeps_to_the_schema() -> None:
    """A field that a record gains is to be in the schema, too."""
    held = [StateFileInfo(1, 0, 0, 1, 0, 1, (3,), "ab"), StateFileInfo(1, 0, 1, 2, 1, 2, (), HEADER_ONLY, True)]
    beats = tuple(
        RankProgress(0, 3, "forward", 0, "", 0.5, 3, 0.1, device_behind=behind) for behind in (None, (2, "forward", 0))
    )
    word = ProgressReport(beats, {0: ProcessStatus()}, HangTimeouts(10.0, math.inf))
    ends = [
        dataclasses.asdict(WorkerExit(0, 7, None, 1, describe_exception(ValueError("x")))),
        dataclasses.asdict(WorkerExit(1, 8, 9, None)),
    ]
    said: list[Any] = [
        {"ready": 1, "held": inventory_to_message(held)},
        {"pulses": watchdog.encode_report(1, word)},
        {"ended": {"attempt": 1, "code": 1, "ends": ends, "lowered": False}},
        {"hung": 1, "ranks": [dataclasses.astuple(Blame(0, "Hang", "why", None))]},
        {"offer": describe_division(1, [(0, 1)], [DEVICES], RecoveryPolicy(nodes=1))},
        {"start": {**START, "kept": restore_point_to_message(RestorePoint(3, 1, 0, {0: (0, held[0])})),
                   "budget": describe_restart_budget(JobState(RecoveryPolicy(1)))}},
    ]  # fmt: skip
    for message in said:
        messages.parse_message(json.loads(json.dumps(message)))


class Errand:
    """In the place of a child that prepares another division: it is never done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._ours, self._theirs = socket.socketpair()

    def fileno(self) -> int:
        return self._ours.fileno()

    def result(self) -> None:
        return None

    def cancel(self) -> None:
        self._ours.close()
        self._theirs.close()


class Agents:
    """Agents of three nodes that have met, in this process, without ranks; the first leads."""

    def __init__(self) -> None:
        places = [bind("127.0.0.1") for _ in range(3)]
        hellos = [
            {"node": node, "host": "h", "devices": DEVICES, **place.to_message()} for node, place in enumerate(places)
        ]
        members = tuple(map(parse_member, hellos))
        offer = describe_division(1, [(0, 1), (1, 1), (2, 1)], [DEVICES] * 3, RecoveryPolicy(nodes=3))
        self.said: list[Any] = []
        self.peers = []
        for node, place in enumerate(places):
            peer = NodeAgent(SECRET, self.make, self.lead)
            peer.adopt_job(offer, NodeJob(1, lambda placement: 0))
            beats = HeartbeatSocket(place.beats, SECRET)
            door = ConnectionListener(place.listener, SECRET, lambda host, why: None)
            peer.membership = Membership(
                members[node], MemberList(1, 0, members), door, beats, Aloud(members[node], beats), PATIENCE_S, None,
                peer.make_vote, peer.describe_writers,
            )  # fmt: skip
            self.peers.append(peer)
        self.until(
            lambda: all(peer.membership.is_fully_connected for peer in self.peers) and self.peers[2].start is not None
        )

    def make(self, offer: Message, poll_once: Any) -> NodeJob:
        raise PhalanxError("there is no room for that here")

    def lead(self, peer: NodeAgent) -> Coordinator:
        return become_coordinator(peer, {}, 1, 0, lambda *_: {}, lambda kind, details: self.said.append(details))

    def until(self, holds: Any) -> None:
        until = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until
            self.turn()

    def turn(self) -> None:
        for peer in self.peers:
            peer.poll_once()
            agent.prepare_offer(peer, lambda: False)
            if (order := peer.take_start_order()) is not None:
                agent.make_attempt(peer, *order, Any)  # type: ignore[arg-type]

    def tell(self, mad: int, to: int, text: str) -> None:
        """Have the agent `to` hear a frame of a member, and all whatever comes of it."""
        channel = self.peers[mad].membership.links[to].channel
        assert channel is not None
        channel._out += text.encode(errors="surrogatepass") + b"\n"
        channel.receive()
        there = self.peers[to].membership.links[mad].channel
        assert there is not None
        select.select([there.fileno()], [], [], PATIENCE_S)
        for _ in range(3):
            self.turn()

    def are_well(self) -> bool:
        """Whether no one is lost, or has left."""
        return all(
            peer.over is None and circle.fenced is None and not circle.lost and len(circle.member_list.nodes) == 3
            for peer in self.peers
            for circle in [peer.membership]
        )

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


@contextlib.contextmanager
def agents() -> Iterator[list[Agents]]:
    """One set of agents, made anew by `well` where a frame before has brought one down."""
    there = [Agents()]
    try:
        yield there
    finally:
        there[0].close()


def well(there: list[Agents]) -> Agents:
    if not there[0].are_well():
        there[0].close()
        there[0] = Agents()
    return there[0]


@pytest.mark.parametrize("mad", [2, 0])
def test_a_member_that_has_gone_mad_brings_nobody_down(mad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower and the leader; the others hear each frame and go on, with an exception nowhere."""
    monkeypatch.setattr(leader_tasks, "AsyncCall", Errand)
    with agents() as there:

        @examples(40)
        @given(frame=changed(FRAMES), to=st.sampled_from([1, 2 - mad]))
        def hears(frame: Any, to: int) -> None:
            now = well(there)
            text = json.dumps(frame)
            now.tell(mad, to, text)
            wrong = find_problem(json.loads(text))
            if wrong is not None:
                assert wrong.isprintable() and len(wrong) < 200
                circle = now.peers[to].membership
                assert mad in circle.lost or mad not in circle.member_list.nodes or circle.fenced is not None, frame

        hears()


def test_who_sends_nonsense_is_named_and_the_others_go_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_tasks, "AsyncCall", Errand)
    there = Agents()
    there.tell(2, 0, '{"ended": {"attempt": "one"}}')
    there.until(lambda: there.peers[1].membership.member_list.nodes == [0, 1])
    lost = [each["reason"] for each in there.said if each.get("node") == 2 and "reason" in each]
    assert lost == ["it sent an invalid message (ended.attempt: Input should be a valid integer)"]
    there.close()


def test_a_leader_that_orders_more_ranks_than_there_are_devices_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_tasks, "AsyncCall", Errand)
    there = Agents()
    there.tell(0, 1, json.dumps({"start": {**START, "ranks": [1, 2, 1]}}))
    assert there.peers[1].membership.lost[0] == "it sent an invalid message (more ranks than this node has devices)"
    there.close()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"ready": ' + "9" * 5000 + "}", "\x00\xff", "{}", '{"x": 1}', "null"])
def test_lines_that_hold_no_message_lose_their_sender(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_tasks, "AsyncCall", Errand)
    there = Agents()
    there.tell(2, 0, text)
    there.until(lambda: there.peers[1].membership.member_list.nodes == [0, 1])
    there.close()


def lines() -> st.SearchStrategy[bytes]:
    """What strangers send: bytes, and frames of the proof with parts changed."""
    proof: list[Any] = [
        {"nonce": "ab" * 16, "proof": "cd" * 32}, {"phalanx": 1, "nonce": "ab" * 16}, {"proof": "cd" * 32},
        {"role": "peer", "node": 1, "token": "0" * 16}, {"role": "first"},
    ]  # fmt: skip
    text = changed([*proof, *FRAMES]).map(lambda frame: json.dumps(frame).encode(errors="surrogatepass") + b"\n")
    return st.binary(max_size=3000) | text | st.lists(text, max_size=3).map(b"".join)


def test_before_the_proof_nothing_is_believed() -> None:
    """Whatever strangers send, none gets in, all are hung up on, and who knows the secret gets in among them."""
    door = ConnectionListener(bind("127.0.0.1").listener, SECRET, lambda host, why: None)

    @examples(60)
    @given(sent=lines(), cut=st.booleans())
    def calls(sent: bytes, cut: bool) -> None:
        with socket.create_connection(door.socket.getsockname(), timeout=PATIENCE_S) as stranger:
            greeted = door.accept()
            assert len(door._pending) == 1
            with contextlib.suppress(OSError):  # it was hung up on
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_RDWR if cut else socket.SHUT_WR)
            until = time.monotonic() + PATIENCE_S
            while door._pending:
                greeted += door.accept()
                assert time.monotonic() < until
            assert not greeted

    calls()
    with socket.create_connection(door.socket.getsockname()) as connection:
        caller = channels.Handshake(channels.Channel(connection), SECRET, calling=True)
        found: list[Any] = []
        until = time.monotonic() + PATIENCE_S
        while not found:
            assert time.monotonic() < until
            found = door.accept()
            for message in caller.channel.receive():
                caller.feed(message)
                if caller.done:
                    caller.channel.send({"role": "first"})
        found[0][0].close("over")
    door.close("over")


@pytest.mark.parametrize("proved", [False, True])
def test_who_sends_small_messages_without_end_keeps_nobody_busy(proved: bool) -> None:
    """One look takes no more than a stranger's line, or a part of what a member sends; the rest comes in its turn."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as theirs:
        channel = channels.Channel(listener.accept()[0])
        channel.most_bytes = channels.MAX_MESSAGE_BYTES if proved else channels.MAX_HANDSHAKE_BYTES
        message = b"{}\n"
        most = (channels.PART_BYTES if proved else channels.MAX_HANDSHAKE_BYTES) // len(message) + 1
        theirs.sendall(message * 3 * most)
        for _ in range(2):
            select.select([channel], [], [], PATIENCE_S)
            assert 0 < len(channel.receive()) <= most
        channel.close("over")


HELLO = {
    "role": "node", "node": 1, "nodes": 3, "host": "h", "pid": 7, "devices": [["cpu", "any", True, "", 1, 2]],
    "versions": {"torch": "2"}, "recipe": {"a": 1},
    "at": {"token": "0" * 16, "address": "127.0.0.1", "port": 1, "beats": 2},
}  # fmt: skip


def test_a_greeting_that_makes_no_sense_is_refused_by_a_sentence() -> None:
    from phalanx.elastic.membership.admission import find_mismatch
    from phalanx.elastic.supervisor.meeting_host import MeetingHost

    own = {**HELLO, "node": 0}

    @examples(100)
    @given(hello=changed([HELLO]))
    def calls(hello: Any) -> None:
        if not isinstance(hello, dict) or hello.get("role") != "node":
            return
        read = json.loads(json.dumps(hello))
        said: list[Any] = []
        with socket.socket() as listener:
            first = MeetingHost(3, listener, SECRET, None, own, 60.0, lambda kind, details: said.append(details))
            channel = SimpleNamespace(send_and_close=lambda message, *_, **__: said.append(message), send=said.append)
            first.host.greet(channel, read)  # type: ignore[arg-type]
            first.listener.close("over")
        wrong = find_mismatch(read, own, to_node_0=True)
        assert wrong is None or (wrong.isprintable() and len(wrong) < 20_000)
        assert said or first.host.connected

    calls()


INDEX = {"tensors": [["w", "param", "float32", [4], 0], ["w", "exp_avg", "float32", [4], 64]]}
FORM = {"who": [1, 0, 2, 0, 2], "way": 0, "index": INDEX, "slot_bytes": 4096, "asked": False, "newest": None}
RULE = {"kernels": "set by the test", "rule": {"beta1": 0.9}}
ASKED: list[Any] = [
    {"keep": FORM}, {"keep": FORM | RULE}, {"read": "state-00001-00000", "at": 0, "bytes": 4096}, {"forget": 1},
    {"read": "../outside", "at": 0, "bytes": 1}, {"read": "replicas/../../outside", "at": 0, "bytes": 1},
    {"leave": True},
    {"write": 5, "header": "{}"}, {"sum": 7},
    {"replay": {"step": 1, "lr": 0.1, "divisor": 1.0, "skip": 0.0, "no_decay": [], "without": []}, "header": "{}"},
]  # fmt: skip
RAW = st.binary(max_size=64) | st.just(b"\xff" * 16) | st.just(bytes(4096))


def replay_of(form: Any) -> Any:
    from phalanx.checkpoint.memory.replication import GradientReplayer

    return GradientReplayer(form)


def test_where_replicas_are_kept_nonsense_ends_no_more_than_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no file is made, or read, that is not one of the run's."""
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    (tmp_path / "outside").write_bytes(b"secret")
    shared = tmp_path / "shared"
    (shared / inventory.REPLICAS).mkdir(parents=True)

    @examples(60)
    @given(frames=st.lists(changed(ASKED) | RAW, min_size=1, max_size=4), writes=st.booleans())
    def asks(frames: list[Any], writes: bool) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        serving = threading.Thread(target=server._Node(theirs, shared, b"r" * 32, writes, replay_of).serve)
        serving.start()
        with ours, contextlib.suppress(OSError):
            for frame in frames:
                if isinstance(frame, bytes):
                    ours.sendall(frame)
                else:
                    raw = json.dumps(frame).encode(errors="surrogatepass")
                    ours.sendall(len(raw).to_bytes(4, "little") + raw)
            ours.shutdown(socket.SHUT_WR)
            heard = ours.makefile("rb").read()
            assert b"secret" not in heard
        serving.join(PATIENCE_S)
        assert not serving.is_alive() and not failed, (frames, failed)
        assert {path.name for path in tmp_path.iterdir()} == {"outside", "shared"}
        assert {path.name for path in shared.iterdir()} == {inventory.REPLICAS}

    asks()


@pytest.mark.parametrize("of", ["partner", "copy"])
def test_a_partner_that_answers_nonsense_fails_the_rank_by_a_sentence(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    who = state_file.StateFileOwner(1, 0, 2, b"r" * 32, 0, 2)
    there = state_file.create_state_file(tmp_path / "there", who, INDEX, 4096).metadata.path.read_bytes()

    @examples(30)
    @given(answer=changed([{"steps": [1], "replays": True}, {"bytes": 4096}, {"error": "no"}, {"kept": 1}]),
           at=st.integers(0, 300), value=st.binary(max_size=9))  # fmt: skip
    def answers(answer: Any, at: int, value: bytes) -> None:
        ours, theirs = socket.socketpair()
        raw = json.dumps(answer).encode(errors="surrogatepass")
        theirs.sendall(len(raw).to_bytes(4, "little") + raw)
        page = bytearray(there)
        page[at : at + len(value)] = value
        theirs.sendall(page[: len(there)])
        theirs.shutdown(socket.SHUT_WR)
        if of == "copy":
            fetches = StateFileFetcher(tmp_path / "here", lambda address: ours)
            copy = fetches.fetch("state-00001-00000", ("127.0.0.1", 1), 1, 2)
            assert copy.finished.wait(PATIENCE_S) and not copy.whole
        else:
            (tmp_path / "here").mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(
                    tmp_path / "there" / state_file.state_file_name(1, 0),
                    tmp_path / "here" / state_file.state_file_name(1, 0),
                )
            monkeypatch.setattr(own_ranks, "connect_and_greet", lambda *_: ours)
            mine, its = socket.socketpair()
            mine.settimeout(PATIENCE_S)
            rank = own_ranks.RankRequests(
                its, tmp_path / "here", SECRET, StateFileFetcher(tmp_path / "here", lambda address: ours)
            )
            serving = threading.Thread(target=rank.serve)
            serving.start()
            with mine:
                request = {
                    "replicate": state_file.state_file_name(1, 0), "to": ["127.0.0.1", 1], "attempt": 1, "asked": False,
                    "bare": False, "rule": None, "newest": None,
                }  # fmt: skip
                send_frame(mine, request)
                assert isinstance(receive_frame(mine), dict)
            serving.join(PATIENCE_S)
            assert not serving.is_alive()
        assert not failed
        ours.close()
        theirs.close()

    answers()
