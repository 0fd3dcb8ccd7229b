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
from phalanx.core.progress_page import Beat
from phalanx.elastic.membership import channel as channels
from phalanx.elastic.membership import messages
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.heartbeat import Beats
from phalanx.elastic.membership.listener import Door, bind
from phalanx.elastic.membership.member_list import Roster, member_of, roster_to_message
from phalanx.elastic.membership.membership import Circle
from phalanx.elastic.node.job import Job
from phalanx.elastic.node.node_agent import Peer
from phalanx.elastic.node.watchdog import Blame, Patience, Signs, Word
from phalanx.elastic.replicas import server
from phalanx.elastic.replicas.fetch import Fetches
from phalanx.elastic.supervisor import coordinator, hang_detection
from phalanx.elastic.supervisor.coordinator import take_lead
from phalanx.elastic.supervisor.failover import budget_of, division_of
from phalanx.elastic.supervisor.state import Policy, State
from phalanx.recovery import inventory, state_file
from phalanx.recovery.catalog import BARE, Choice, Held, choice_to_message, held_to_message
from phalanx.recovery.replica_client import receive, send
from phalanx.system.exit_causes import End, describe
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
OFFER = division_of(2, [(0, 1), (1, 1), (2, 1)], [DEVICES] * 3, Policy(nodes=3))
START = {
    "attempt": 1, "epoch": 1, "division": 1, "seats": [0, 1, 2], "ranks": [1, 1, 1], "step": 0, "kept": KEPT,
    "budget": BUDGET, "slots": 2,
}  # fmt: skip
PULSES = {
    "attempt": 1, "beats": [[2, 3, "forward", 0, "", 0.5, 3, 0.1, 2, False, [3, "forward", 1]]],
    "signs": {"2": [False, False, True]},
    "patience": [10.0, 20.0, None, 0.5],
}  # fmt: skip
ROSTER = roster_to_message(
    Roster(2, 2, tuple(member_of({"node": node, "host": "h", "token": f"{node:016x}", "address": "127.0.0.1",
                                  "port": 1, "beats": 2, "devices": DEVICES}) for node in range(3)))
)  # fmt: skip
FRAMES: list[Any] = [
    {"roster": ROSTER}, {"follow": 1, "ballot": BALLOT}, {"follow": 1, "ballot": None}, {"offer": OFFER},
    {"start": START}, {"end": 1, "known": True}, {"pause": 1}, {"hung": 1, "ranks": [[2, "Hang", "why", 3]]},
    {"signal": "SIGTERM"}, {"finish": 0, "text": "done"}, {"dropped": "why", "code": 1}, {"gone": 1},
    {"ended": LAST, "held": [HELD]}, {"ready": 1, "held": [HELD]}, {"unfit": "why", "code": 2}, {"pulses": PULSES},
    {"stop": "SIGINT"}, {"stop": "SIGTERM", "again": True}, {"strangers": "127.0.0.9"},
]  # fmt: skip


def test_what_nodes_really_say_keeps_to_the_schema() -> None:
    """A field that a record gains is to be in the schema, too."""
    held = [Held(1, 0, 0, 1, 0, 1, (3,), "ab"), Held(1, 0, 1, 2, 1, 2, (), BARE, True)]
    beats = tuple(Beat(0, 3, "forward", 0, "", 0.5, 3, 0.1, behind=behind) for behind in (None, (2, "forward", 0)))
    word = Word(beats, {0: Signs()}, Patience(10.0, math.inf))
    ends = [dataclasses.asdict(End(0, 7, None, 1, describe(ValueError("x")))), dataclasses.asdict(End(1, 8, 9, None))]
    said: list[Any] = [
        {"ready": 1, "held": held_to_message(held)},
        {"pulses": hang_detection.to_message(1, word)},
        {"ended": {"attempt": 1, "code": 1, "ends": ends, "lowered": False}},
        {"hung": 1, "ranks": [dataclasses.astuple(Blame(0, "Hang", "why", None))]},
        {"offer": division_of(1, [(0, 1)], [DEVICES], Policy(nodes=1))},
        {"start": {**START, "kept": choice_to_message(Choice(3, 1, 0, {0: (0, held[0])})),
                   "budget": budget_of(State(Policy(1)))}},
    ]  # fmt: skip
    for message in said:
        assert messages.problem(json.loads(json.dumps(message))) is None, message


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
        hellos = [{"node": node, "host": "h", "devices": DEVICES, **place.told()} for node, place in enumerate(places)]
        members = tuple(map(member_of, hellos))
        offer = division_of(1, [(0, 1), (1, 1), (2, 1)], [DEVICES] * 3, Policy(nodes=3))
        self.said: list[Any] = []
        self.peers = []
        for node, place in enumerate(places):
            peer = Peer(SECRET, self.make, self.lead)
            peer.prepared(offer, Job(1, lambda placement: 0))
            beats = Beats(place.beats, SECRET)
            door = Door(place.listener, SECRET, lambda host, why: None)
            peer.circle = Circle(
                members[node], Roster(1, 0, members), door, beats, Aloud(members[node], beats), PATIENCE_S, None,
                peer.ballot, peer.about,
            )  # fmt: skip
            self.peers.append(peer)
        self.until(lambda: all(peer.circle.met for peer in self.peers) and self.peers[2].start is not None)

    def make(self, offer: Message, tend: Any) -> Job:
        raise PhalanxError("there is no room for that here")

    def lead(self, peer: Peer) -> coordinator.Leader:
        return take_lead(peer, {}, 1, 0, lambda *_: {}, lambda kind, details: self.said.append(details))

    def until(self, holds: Any) -> None:
        until = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until
            self.turn()

    def turn(self) -> None:
        for peer in self.peers:
            peer.tend()
            peer.prepare(lambda: False)
            if (order := peer.starting()) is not None:
                peer.job(order[1])

    def tell(self, mad: int, to: int, text: str) -> None:
        """Have the agent `to` hear a frame of a member, and all whatever comes of it."""
        channel = self.peers[mad].circle._links[to].channel
        assert channel is not None
        channel._out += text.encode(errors="surrogatepass") + b"\n"
        channel.heard()
        there = self.peers[to].circle._links[mad].channel
        assert there is not None
        select.select([there.fileno()], [], [], PATIENCE_S)
        for _ in range(3):
            self.turn()

    def are_well(self) -> bool:
        """Whether no one is lost, or has left."""
        return all(
            peer.over is None and circle.fenced is None and not circle.lost and len(circle.roster.nodes) == 3
            for peer in self.peers
            for circle in [peer.circle]
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
    monkeypatch.setattr(coordinator, "Errand", Errand)
    with agents() as there:

        @examples(40)
        @given(frame=changed(FRAMES), to=st.sampled_from([1, 2 - mad]))
        def hears(frame: Any, to: int) -> None:
            now = well(there)
            text = json.dumps(frame)
            now.tell(mad, to, text)
            wrong = messages.problem(json.loads(text)) if isinstance(json.loads(text), dict) else "no message"
            if wrong is not None:
                assert wrong.isprintable() and len(wrong) < 200
                circle = now.peers[to].circle
                assert mad in circle.lost or mad not in circle.roster.nodes or circle.fenced is not None, frame

        hears()


def test_who_sends_nonsense_is_named_and_the_others_go_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "Errand", Errand)
    there = Agents()
    there.tell(2, 0, '{"ended": {"attempt": "one"}}')
    there.until(lambda: there.peers[1].circle.roster.nodes == [0, 1])
    lost = [each["reason"] for each in there.said if each.get("node") == 2 and "reason" in each]
    assert lost == ["it sent what makes no sense (ended.attempt: Input should be a valid integer)"]
    there.close()


def test_a_leader_that_orders_more_ranks_than_there_are_devices_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "Errand", Errand)
    there = Agents()
    there.tell(0, 1, json.dumps({"start": {**START, "ranks": [1, 2, 1]}}))
    assert there.peers[1].circle.lost[0] == "it sent what makes no sense (more ranks than this node has devices)"
    there.close()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"ready": ' + "9" * 5000 + "}", "\x00\xff", "{}", '{"x": 1}', "null"])
def test_lines_that_hold_no_message_lose_their_sender(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "Errand", Errand)
    there = Agents()
    there.tell(2, 0, text)
    there.until(lambda: there.peers[1].circle.roster.nodes == [0, 1])
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
    door = Door(bind("127.0.0.1").listener, SECRET, lambda host, why: None)

    @examples(60)
    @given(sent=lines(), cut=st.booleans())
    def calls(sent: bytes, cut: bool) -> None:
        with socket.create_connection(door.listener.getsockname(), timeout=PATIENCE_S) as stranger:
            greeted = door.tend()
            assert len(door._strangers) == 1
            with contextlib.suppress(OSError):  # it was hung up on
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_RDWR if cut else socket.SHUT_WR)
            until = time.monotonic() + PATIENCE_S
            while door._strangers:
                greeted += door.tend()
                assert time.monotonic() < until
            assert not greeted

    calls()
    with socket.create_connection(door.listener.getsockname()) as connection:
        caller = channels.Proof(channels.Channel(connection), SECRET, calling=True)
        found: list[Any] = []
        until = time.monotonic() + PATIENCE_S
        while not found:
            assert time.monotonic() < until
            found = door.tend()
            for message in caller.channel.heard():
                caller.hear(message)
                if caller.done:
                    caller.channel.say({"role": "first"})
        found[0][0].close("over")
    door.close("over")


@pytest.mark.parametrize("proved", [False, True])
def test_who_sends_small_messages_without_end_keeps_nobody_busy(proved: bool) -> None:
    """One look takes no more than a stranger's line, or a part of what a member sends; the rest comes in its turn."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as theirs:
        channel = channels.Channel(listener.accept()[0])
        channel.most_bytes = channels.FRIEND_BYTES if proved else channels.STRANGER_BYTES
        message = b"{}\n"
        most = (channels.PART_BYTES if proved else channels.STRANGER_BYTES) // len(message) + 1
        theirs.sendall(message * 3 * most)
        for _ in range(2):
            select.select([channel], [], [], PATIENCE_S)
            assert 0 < len(channel.heard()) <= most
        channel.close("over")


HELLO = {
    "role": "node", "node": 1, "nodes": 3, "host": "h", "pid": 7, "devices": [["cpu", "any", True, "", 1, 2]],
    "versions": {"torch": "2"}, "recipe": {"a": 1},
    "at": {"token": "0" * 16, "address": "127.0.0.1", "port": 1, "beats": 2},
}  # fmt: skip


def test_a_greeting_that_makes_no_sense_is_refused_by_a_sentence() -> None:
    from phalanx.elastic.membership.handshake import objection
    from phalanx.elastic.membership.rendezvous_host import FirstNode

    own = {**HELLO, "node": 0}

    @examples(100)
    @given(hello=changed([HELLO]))
    def calls(hello: Any) -> None:
        if not isinstance(hello, dict) or hello.get("role") != "node":
            return
        read = json.loads(json.dumps(hello))
        said: list[Any] = []
        with socket.socket() as listener:
            first = FirstNode(3, listener, SECRET, None, own, 60.0, lambda kind, details: said.append(details))
            channel = SimpleNamespace(farewell=lambda message, why: said.append(message), say=said.append)
            first._greet(channel, read)  # type: ignore[arg-type]
            first.door.close("over")
        wrong = objection(read, own, to_node_0=True)
        assert wrong is None or (wrong.isprintable() and len(wrong) < 20_000)
        assert said

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
    from phalanx.checkpoint.memory.replica_update import Replay

    return Replay(form)


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
    who = state_file.Who(1, 0, 2, b"r" * 32, 0, 2)
    there = state_file.create(tmp_path / "there", who, INDEX, 4096).facts.path.read_bytes()

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
            fetches = Fetches(tmp_path / "here", lambda address: ours)
            copy = fetches.of("state-00001-00000", ("127.0.0.1", 1), 1, 2)
            assert copy.over.wait(PATIENCE_S) and not copy.whole
        else:
            (tmp_path / "here").mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(tmp_path / "there" / state_file.name_of(1, 0), tmp_path / "here" / state_file.name_of(1, 0))
            monkeypatch.setattr(server, "call", lambda *_: ours)
            mine, its = socket.socketpair()
            mine.settimeout(PATIENCE_S)
            rank = server._Rank(its, tmp_path / "here", SECRET, Fetches(tmp_path / "here", lambda address: ours))
            serving = threading.Thread(target=rank.serve)
            serving.start()
            with mine:
                send(mine, {"replicate": state_file.name_of(1, 0), "to": ["127.0.0.1", 1], "attempt": 1, "asked": False,
                            "bare": False, "rule": None, "newest": None})  # fmt: skip
                assert isinstance(receive(mine), dict)
            serving.join(PATIENCE_S)
            assert not serving.is_alive()
        assert not failed
        ours.close()
        theirs.close()

    answers()
