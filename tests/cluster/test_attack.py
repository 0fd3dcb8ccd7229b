"""Another user of the machine calls a run that meets on loopback: it learns nothing, leads nobody and runs no code."""

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.config import load
from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import channel as channels
from phalanx.elastic.membership.listener import bind
from phalanx.elastic.membership.member_list import MemberList, member_list_to_message, parse_member_list
from phalanx.elastic.membership.rendezvous import parse_rendezvous
from phalanx.elastic.membership.shared_secret import file_of
from phalanx.health.findings import DeviceInfo
from phalanx.launch import multinode, rendezvous_options
from tests.another_user import as_root, begin, open_path
from tests.dist import command
from tests.helpers import free_port, run_ranks, wait_until

PATIENCE_S = 120.0
RUN = [
    "train",
    "recipe.yaml",
    "--run-dir",
    "run",
    "--ranks",
    "1",
    "resilience.on_lost_node=[wait]",
    "resilience.wait_for_node_s=60",
]
CODE = "import os\nopen({marker!r}, 'w').write(str(os.getuid()))\nclass Model: ...\n"

pytestmark = as_root
__all__ = ["open_path"]


@pytest.fixture
def place(open_path: Path) -> Path:
    """A recipe that everybody can read, beside a folder where everybody can write."""
    (open_path / "home").mkdir(mode=0o755)
    (open_path / "open").mkdir()
    (open_path / "open").chmod(0o777)
    (open_path / "open" / "theirs.py").write_text(CODE.format(marker=str(open_path / "open" / "marker")))
    return command.write_place(open_path)


def attack(place: str, *arguments: Any) -> list[str]:
    """As another user: try to lead, and say in a file that node 1 of the run may come."""
    try:
        return takes_the_lead(place, *arguments)
    finally:
        Path(place, "open", "attacked").touch()


def trains(placement: Placement, folder: str, port: int, after: str) -> Any:
    """A node of the run; node 1 comes when a file is there. Exit code, output and errors."""
    if placement.rank == 1:
        wait_until(Path(after).exists, timeout_s=PATIENCE_S)
    there = ["--nodes", "2", "--node-rank", str(placement.rank), "--rendezvous", f"tcp://127.0.0.1:{port}"]
    names = ("PHALANX_SECRET", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    environment: dict[str, str | None] = {**dict.fromkeys(names), "HOME": f"{folder}/home"}
    return command.call(placement, folder, [[*RUN, *there]], environment=environment)[0]


def run(place: Path, port: int) -> list[Any]:
    kwargs = {"folder": str(place), "port": port, "after": str(place / "open" / "attacked")}
    return run_ranks(trains, 2, timeout_s=240, **kwargs)


def listens(port: int) -> None:
    """Return once node 0 is there."""

    def there() -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", port)) == 0

    wait_until(there, timeout_s=PATIENCE_S)


def unproved(port: int) -> list[str]:
    """All that node 0 says to those who do not know the secret, whatever they send."""
    listens(port)
    heard = []
    for sent in ({"nonce": "n", "proof": "p"}, {"role": "first"}, {"role": "node", "node": 1}, {"roster": {}}, {}):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as caller:
            lines = caller.makefile("r", errors="replace")
            assert sorted(json.loads(lines.readline())) == ["nonce", "phalanx"]
            caller.sendall(json.dumps(sent).encode() + b"\n")
            heard += lines.read().splitlines()
    return heard


def takes_the_lead(place: str, port: int, secrets: Sequence[str], hello: dict[str, Any], file: str) -> list[str]:
    """With each secret: come as node 1, say that one leads, and offer a recipe with code of one's own."""
    listens(port)
    told = []
    for secret in secrets:
        try:
            channel = channels.open_channel(("127.0.0.1", port), secret, 20, 20)
        except OSError as error:
            told.append(str(error))
            continue
        told += _lead(channel, secret, hello, f"{place}/open/theirs.py")
    try:
        told.append(Path(file).read_text())
    except OSError as error:
        told.append(type(error).__name__)
    return told + unproved(port)


def _lead(channel: channels.Channel, secret: str, hello: dict[str, Any], code: str) -> list[str]:
    at = bind("127.0.0.1")
    channel.send(hello | {"at": at.to_message()})
    offer = _heard(channel, "offer")
    channel.send({"ready": 1, "held": []})
    member_list = parse_member_list(_heard(channel, "roster"))
    first = member_list.member(0)
    assert first is not None
    link = channels.open_channel((first.address, first.port), secret, 20, 20)
    link.send({"role": "peer", "node": 1, "token": at.token})
    config = yaml.safe_load(offer["config"])
    config["model"] |= {"code": code}
    more = {"config": yaml.safe_dump(config), "division": offer["division"] + 1}
    link.send(
        {"roster": member_list_to_message(replace(MemberList(0, 1, member_list.members), epoch=member_list.epoch + 1))}
    )
    link.send({"offer": offer | more})
    until = time.monotonic() + 10.0
    while link.lost is None and time.monotonic() < until:
        link.receive()
        time.sleep(0.05)
    return ["proved", link.lost or "still a member"]


def _heard(channel: channels.Channel, key: str) -> Any:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for message in channel.receive():
            assert not {"refused", "finish"} & message.keys(), message
            if key in message:
                return message[key]
        assert channel.lost is None, channel.lost
        time.sleep(0.01)
    raise TimeoutError(key)


def hello_of_node_1(place: Path, port: int, home: dict[str, str]) -> dict[str, Any]:
    """As a node 1 would say it that was started by the same command."""
    wanted = load.load_recipe(place / "recipe.yaml", RUN[-2:])
    meeting = rendezvous_options.RendezvousOptions(2, 1, parse_rendezvous(f"tcp://127.0.0.1:{port}", home), 60.0)
    return multinode.make_training_hello(wanted, [DeviceInfo("cpu", "cpu", True)], meeting)


def holding(folder: Path, text: str) -> list[Path]:
    """Files of a folder with a text in them."""
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_another_user_of_the_machine_gets_nothing(place: Path) -> None:
    """Not with the constant that there was once, nor with the secret of another rendezvous of the same user."""
    port, home = free_port(), {"HOME": str(place / "home")}
    others = parse_rendezvous(f"tcp://127.0.0.1:{port + 1}", home).secret
    secrets = ["anybody on this machine", others, ""]
    file = file_of(None, port, home)
    end = begin(attack, str(place), port, secrets, hello_of_node_1(place, port, home), str(file))
    ended = run(place, port)
    assert end() == ["it does not accept this node's secret"] * 3 + ["PermissionError", '{"unknown": true}']
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert not (place / "open" / "marker").exists()
    assert "refused a connection from 127.0.0.1: it does not know the secret" in ended[0][1]
    held = file.read_text().strip()
    assert held not in json.dumps(ended)
    assert holding(place, held) == [file]


def test_who_knows_the_secret_takes_no_lead_and_runs_no_code(place: Path) -> None:
    """The run waits for the node that the attacker said it was, and ends well with that."""
    port, home = free_port(), {"HOME": str(place / "home")}
    secret = parse_rendezvous(f"tcp://127.0.0.1:{port}", home).secret
    hello = hello_of_node_1(place, port, home)
    end = begin(attack, str(place), port, [secret], hello, str(place / "open" / "none"))
    ended = run(place, port)
    told = end()
    assert told[:2] == ["proved", "it closed the connection"], told
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert not (place / "open" / "marker").exists()
    assert "it claimed to lead without this node's vote" in RunPaths(place / "run").events.read_text()
