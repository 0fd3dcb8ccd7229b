"""What a later release has written is told from what is damaged, in one sentence that says what to do."""

import gzip
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.disk.load import Checkpoint, step_folder
from phalanx.core import format_versions
from phalanx.core.errors import PhalanxError, RunError
from phalanx.core.run_paths import RunPaths
from phalanx.data.record_files import TokenFile
from phalanx.elastic.membership.channel import PROTOCOL, Channel, Handshake
from phalanx.layout import hardware
from phalanx.recovery import inventory
from phalanx.recovery.state_file import StateFile
from phalanx.report.history import read_run_history
from phalanx.trainer import run_folder
from tests.fixtures import make

LATER = 99
NEWEST = max(path for path in make.HERE.iterdir() if (path / "recipe.yaml").exists())


@pytest.fixture
def left(tmp_path: Path) -> Path:
    return Path(shutil.copytree(NEWEST, tmp_path / "left"))


def change(path: Path, **values: Any) -> Path:
    """Give keys of a JSON file other values; None takes a key away."""
    tree = {key: value for key, value in (json.loads(path.read_text()) | values).items() if value is not None}
    path.write_text(json.dumps(tree))
    return path


def of_checkpoint(left: Path) -> None:
    found = step_folder(left / "run" / "checkpoints", make.SAVED)
    change(found / "manifest.json", version=LATER)
    Checkpoint(found).verify()


def of_tokens(left: Path) -> None:
    [found] = (left / "cache").glob("*/train")
    TokenFile(change(found / "manifest.json", format_version=LATER).parent)


def of_state(left: Path) -> None:
    [packed] = (left / make.STATE).iterdir()
    path = left / packed.stem
    path.touch(mode=0o600)
    raw = gzip.decompress(packed.read_bytes())
    path.write_bytes(raw[:8] + LATER.to_bytes(4, "little") + raw[12:])
    [said] = inventory.find_damage(left)
    assert "a later release" in said and said.endswith("so the run resumes from other saved state")
    StateFile(path)


@pytest.mark.parametrize(
    ("read", "remedy"),
    [
        (of_checkpoint, "resume from another checkpoint"),
        (of_tokens, r"delete \S+ and prepare the data again"),
        (of_state, "remove it; the run then resumes from its newest checkpoint"),
        (
            lambda left: hardware.read_hardware(change(left / "hardware.json", version=LATER)),
            "measure again with `phalanx hardware`, or delete the file",
        ),
    ],
)
def test_a_later_format_is_refused_with_a_remedy(read: Callable[[Path], Any], remedy: str, left: Path) -> None:
    said = r"is of format version 99, which a later release of Phalanx has written \(this one reads [\d and]+\)"
    with pytest.raises(PhalanxError, match=rf"{said}; install that release, or {remedy}$"):
        read(left)


@pytest.mark.parametrize("where", ["versions", "events"])
def test_a_run_folder_of_a_later_format_is_refused_by_all_who_open_it(where: str, left: Path) -> None:
    paths = RunPaths(left / "run")
    if where == "versions":
        change(paths.versions, run_folder=LATER)
    else:
        paths.events.write_text(paths.events.read_text().replace('"run_folder": 1', f'"run_folder": {LATER}'))
    for opens in (read_run_history, run_folder.lock_run_folder, run_folder.read_run_config):
        with pytest.raises(RunError, match=rf"^the run folder {left}/run is of .*99,.*; install that release, or name"):
            opens(paths)
    assert not paths.lock.exists()


def test_a_run_folder_that_says_no_format_is_of_the_first(left: Path) -> None:
    paths = RunPaths(left / "run")
    change(paths.versions, run_folder=None)
    paths.events.write_text(paths.events.read_text().replace('"run_folder": 1, ', ""))
    assert read_run_history(paths).facts.name == "run" and run_folder.read_run_config(paths) is not None
    paths.versions.write_text("{")
    format_versions.check_run_version(paths)


def test_what_is_no_number_is_no_later_release() -> None:
    assert format_versions.describe_version_problem(2, (1, 2), "x") is None
    for found, said in ((0, "0"), (True, "unknown"), ("9", "unknown"), (None, "unknown"), ([9], "unknown")):
        expected = f"is of format version {said}, and this release of Phalanx reads 1 and 2; x"
        assert format_versions.describe_version_problem(found, (2, 1), "x") == expected


def test_nodes_of_other_protocols_name_both() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        proof = Handshake(Channel(here), "secret", calling=True)
        proof.feed({"phalanx": PROTOCOL + 1, "nonce": "00"})
        assert proof.failed is not None and not proof.done
        assert f"uses protocol version {PROTOCOL + 1} but this node uses {PROTOCOL}; install the same" in proof.failed
