"""The parts of meeting by themselves: what the command line may say, proofs, address files, interfaces."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import ConfigError, RunError
from phalanx.elastic.membership import channel as channels
from phalanx.elastic.membership import rendezvous
from phalanx.elastic.membership.channel import Channel, Handshake, open_channel
from phalanx.elastic.membership.rendezvous import ADDRESS_FILE, PASSING, HostAddress, parse_rendezvous
from phalanx.launch import rendezvous_options

SECRET = "sixteen or more characters"
TWO = {"nodes": 2, "node": 1}
ADDRESS = HostAddress(("10.1.2.3", "127.0.0.1"), 4000, SECRET, "7 on here")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"node": 1}, "--node-rank is for a run on several nodes; add --nodes"),
        ({"where": "file:///x"}, "--rendezvous is for a run on several nodes"),
        ({"spares": 1}, "--spares is for a run on several nodes"),
        ({"nodes": 2, "spares": 1, "where": "file:///x"}, "--nodes 2 --spares 1 needs --node-rank, the number of this"),
        ({"nodes": 2, "spares": 1, "node": 3, "where": "file:///x"}, "--node-rank 3 is not one of 3 nodes"),
        ({"timeout_s": 3.0}, "--rendezvous-timeout is for a run on several nodes"),
        ({"nodes": 1, "node": 0, "where": "file:///x"}, "--nodes 1 is a run on one node"),
        ({"nodes": 2, "where": "file:///x"}, "--nodes 2 needs --node-rank"),
        ({"nodes": 2, "node": 2, "where": "file:///x"}, "--node-rank 2 is not one of 2 nodes"),
        ({"nodes": 2, "node": 0}, "--nodes 2 needs --rendezvous"),
        ({**TWO, "where": "udp://host:1"}, "is neither tcp://host:port nor file:///shared/folder"),
        ({**TWO, "where": "/shared"}, "is neither tcp://host:port nor file:///shared/folder"),
        ({**TWO, "where": "file://shared/meet"}, "names no folder; write file:// and an absolute path"),
        ({**TWO, "where": "tcp://host"}, "is not of the form tcp://host:port"),
        ({**TWO, "where": "tcp://host:0"}, "is not of the form tcp://host:port"),
        ({**TWO, "where": "tcp://host:70000"}, "is not of the form tcp://host:port"),
        ({**TWO, "where": "tcp://host:29500?timeout=5"}, "is not of the form tcp://host:port"),
        ({**TWO, "where": "tcp://[::1:29500"}, "is not a URL (Invalid IPv6 URL)"),
        ({**TWO, "where": "tcp://host:29500", "secret": "short"}, "has 5 characters and could be guessed"),
    ],
)
def test_options_that_do_not_fit_are_sentences(options: dict[str, Any], expected: str) -> None:
    environment = {"PHALANX_SECRET": options.get("secret", SECRET)}
    with pytest.raises(ConfigError) as caught:
        rendezvous_options.parse_rendezvous_options(
            options.get("nodes"), options.get("node"), options.get("where"), options.get("timeout_s"), environment,
            options.get("spares"),
        )  # fmt: skip
    assert expected in str(caught.value)
    assert SECRET not in str(caught.value)


def test_places() -> None:
    assert rendezvous_options.parse_rendezvous_options(None, None, None, None, {}) is None
    assert parse_rendezvous("file:///shared/a%20b", {}).folder == Path("/shared/a b")
    there = parse_rendezvous("tcp://[fd00::7]:29500", {"PHALANX_SECRET": SECRET})
    assert (there.host, there.port, there.secret) == ("fd00::7", 29500, SECRET)
    assert there.secret_file is None and SECRET not in repr(there)
    here = parse_rendezvous("tcp://localhost:29500", {"PHALANX_SECRET": SECRET})
    assert (here.text, here.host) == ("tcp://localhost:29500", "127.0.0.1")


def test_what_was_published_is_read_by_its_owner_alone_and_withdrawn(tmp_path: Path) -> None:
    folder = tmp_path / "meet"
    assert rendezvous.read_address(folder) is None
    made = rendezvous.publish(folder, ADDRESS)
    assert rendezvous.read_address(folder) == ADDRESS
    assert os.listdir(folder) == [ADDRESS_FILE]
    assert (folder / ADDRESS_FILE).stat().st_mode & 0o777 == 0o600
    rendezvous.withdraw(folder, HostAddress((), 1, "another's", ""), made=False)
    assert rendezvous.read_address(folder) == ADDRESS
    rendezvous.withdraw(folder, ADDRESS, made)
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files another user's")
def test_what_another_user_has_put_there_is_not_believed(tmp_path: Path) -> None:
    rendezvous.publish(tmp_path, ADDRESS)
    os.chown(tmp_path / ADDRESS_FILE, 12345, 12345)
    with pytest.raises(RunError, match=r"belongs to another user's job; start all nodes as one user"):
        rendezvous.read_address(tmp_path)
    with pytest.raises(RunError, match=r"belongs to another user's job"):
        rendezvous.publish(tmp_path, ADDRESS)


def test_an_address_file_that_others_can_read_or_that_is_a_link_is_not_believed(tmp_path: Path) -> None:
    rendezvous.publish(tmp_path, ADDRESS)
    os.chmod(tmp_path / ADDRESS_FILE, 0o644)
    with pytest.raises(RunError, match=r"can be read by other users \(mode 644\).*; remove it"):
        rendezvous.read_address(tmp_path)
    os.chmod(tmp_path / ADDRESS_FILE, 0o600)
    (tmp_path / ADDRESS_FILE).rename(tmp_path / "elsewhere")
    (tmp_path / ADDRESS_FILE).symlink_to("elsewhere")
    with pytest.raises(RunError, match="is a link that no node made; remove it"):
        rendezvous.read_address(tmp_path)


def test_what_killed_processes_left_is_swept_away_once_it_is_old(tmp_path: Path) -> None:
    old, new = tmp_path / f"{PASSING}old", tmp_path / f"{PASSING}new"
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    rendezvous.publish(tmp_path, ADDRESS)
    assert sorted(os.listdir(tmp_path)) == sorted([ADDRESS_FILE, new.name])


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "[" * 100_000, '{"hosts": "x", "port": 1, "secret": "s", "process": "p"}',
     '{"hosts": [7], "port": 1, "secret": "s", "process": "p"}', '{"hosts": [], "port": 1, "secret": "s"}',
     '{"hosts": [], "port": 70000, "secret": "s", "process": "p"}', "\x00\xff"],
)  # fmt: skip
def test_an_address_file_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ADDRESS_FILE).write_text(text)
    os.chmod(tmp_path / ADDRESS_FILE, 0o600)
    assert rendezvous.read_address(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        RunError, match=r"rendezvous folder .* cannot be written .*; choose a folder that all nodes share"
    ):
        rendezvous.publish(tmp_path / "file" / "meet", ADDRESS)


def test_a_port_that_is_taken_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = parse_rendezvous(f"tcp://127.0.0.1:{taken.getsockname()[1]}", {"PHALANX_SECRET": SECRET})
        with pytest.raises(RunError, match=r"node 0 cannot listen at .* that no other program or job uses"):
            rendezvous.listen(place)


def test_interfaces_are_those_of_the_machine() -> None:
    assert ("lo", "127.0.0.1") in rendezvous.interfaces()
    assert rendezvous.own_addresses()[-1] in ("127.0.0.1", "::1")  # tried last
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert rendezvous.interface_of(client) == "lo"


# --------------------------------------------------------------------------------------------------------------- proofs


def called(server: socket.socket, secret: str, heard: list[Any]) -> None:
    channel = Channel(server.accept()[0])
    proof = Handshake(channel, secret, calling=False)
    until = time.monotonic() + 30
    while channel.lost is None and time.monotonic() < until:
        for message in channel.receive():
            if proof.done:
                heard.append(message)
            else:
                proof.feed(message)
        time.sleep(0.002)
    heard.append(proof.failed or channel.lost)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [(SECRET, [{"hello": "x" * 5000}, "it closed the connection"]), ("other", ["it does not know the secret"])],
)
def test_only_who_knows_the_secret_is_heard(theirs: str, expected: list[Any]) -> None:
    heard: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=called, args=(server, SECRET, heard))
        thread.start()
        if theirs == SECRET:
            open_channel(server.getsockname(), theirs, 5, 5).send_and_close({"hello": "x" * 5000}, "done")
        else:
            with pytest.raises(ConnectionRefusedError, match="it does not accept this node's secret"):
                open_channel(server.getsockname(), theirs, 5, 5)
        thread.join()
    assert heard == expected


def test_node_0_has_to_prove_itself_too() -> None:
    """Who only repeats what he is told, the caller's own proof included, is not believed."""

    def impostor() -> None:
        with server.accept()[0] as connection:
            connection.sendall(json.dumps({"phalanx": channels.PROTOCOL, "nonce": "n"}).encode() + b"\n")
            connection.sendall(connection.recv(4096))
            connection.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(ConnectionRefusedError, match="does not know this job's secret"):
            open_channel(server.getsockname(), SECRET, 5, 5)
        thread.join()


def test_a_service_of_another_kind_is_told_from_node_0() -> None:
    def other() -> None:
        with server.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            connection.recv(100)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=other)
        thread.start()
        with pytest.raises(ConnectionError, match="it sent an invalid message"):
            open_channel(server.getsockname(), SECRET, 5, 5)
        thread.join()


def test_a_secret_may_hold_any_bytes() -> None:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    secret = os.fsdecode(b"\xff" * 16)  # as os.environ gives it
    called, calling = (
        Handshake(_unwatched(ours), secret, calling=False),
        Handshake(_unwatched(theirs), secret, calling=True),
    )
    for proof in (calling, called, calling):
        for message in proof.channel.receive():
            proof.feed(message)
    assert (called.done, calling.done) == (True, True)


def test_a_conversation_that_was_overheard_cannot_be_repeated() -> None:
    """The same first answer does not fit the next question."""
    ends = [socket.socketpair() for _ in range(2)]
    questions, proofs = [], []
    for ours, theirs in ends:
        for end in (ours, theirs):
            end.setblocking(False)
        channel = _unwatched(ours)
        proofs.append(Handshake(channel, SECRET, calling=False))
        questions.append(json.loads(theirs.recv(4096)))
    caller = Handshake(_unwatched(ends[0][1]), SECRET, calling=True)
    caller.feed(questions[0])
    answer = json.loads(ends[0][0].recv(4096))
    proofs[0].feed(dict(answer))
    proofs[1].feed(dict(answer))
    assert (proofs[0].done, proofs[1].done, proofs[1].failed) == (True, False, "it does not know the secret")
    assert questions[0] != questions[1]


def test_who_listens_at_another_port_cannot_come_between_two_nodes() -> None:
    """As another user of the machine could at one that a node has left: it knows no secret, and passes on what it
    hears."""
    heard: list[Any] = []

    def relay(gate: socket.socket, address: Any) -> None:
        with gate.accept()[0] as caller, socket.create_connection(address) as other:
            for source, target in ((other, caller), (caller, other), (other, caller)):
                target.sendall(source.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as gate:
        threads = [
            threading.Thread(target=called, args=(server, SECRET, heard)),
            threading.Thread(target=relay, args=(gate, server.getsockname())),
        ]
        for thread in threads:
            thread.start()
        with pytest.raises(ConnectionRefusedError, match="it does not accept this node's secret"):
            open_channel(gate.getsockname(), SECRET, 30, 30)
        for thread in threads:
            thread.join()
    assert heard == ["it does not know the secret"]


def _unwatched(end: socket.socket) -> Channel:
    """A channel over a pair of sockets, which have no TCP options."""
    channel = Channel.__new__(Channel)
    channel.socket, channel.lost, channel.most_bytes = end, None, channels.MAX_HANDSHAKE_BYTES
    channel._in, channel._out = bytearray(), bytearray()
    channel._quiet_since, channel._asked = time.monotonic(), False
    return channel


def test_a_relay_ends_with_its_connections() -> None:
    """Connections that node 0's relay is given reach the store; when it is stopped, they end."""
    script = """
import socket
from phalanx.elastic.membership.store_relay import start_host_relay, hand_over
store = socket.create_server(("127.0.0.1", 0))
relay, giving = start_host_relay(store.getsockname()[1])
gate = socket.create_server(("127.0.0.1", 0))
rank = socket.create_connection(gate.getsockname())
hand_over(giving, gate.accept()[0])
there, _ = store.accept()
rank.sendall(b"question")
print(there.recv(100))
there.sendall(b"answer")
print(rank.recv(100))
relay.stop()
print(rank.recv(100), there.recv(100))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "b'question'\nb'answer'\nb'' b''\n", done.stderr
