"""What earlier versions have left behind is still of use: run folders, state in memory, token caches, hardware files.

`tests/fixtures/make.py` made them, and says what they are; they stay as they are.
"""

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.data.record_files import TokenFile
from phalanx.layout import hardware
from phalanx.recovery import shared_memory
from tests.dist.command import call
from tests.fixtures import make
from tests.helpers import run_ranks
from tests.numerics.runs import events

FOLDERS = sorted(path for path in make.HERE.iterdir() if (path / "recipe.yaml").exists())
GO_ON = ["train", "recipe.yaml", "--run-dir", "run", "--ranks", "1"]


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def left(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a version has left, in another place than where it was made."""
    return Path(shutil.copytree(request.param, tmp_path / "left"))


@pytest.fixture
def in_memory(left: Path) -> Iterator[Path]:
    """The same with its state files in shared memory, where this version looks for those of the run."""
    with shared_memory.hold_folder(RunPaths(left / "run")) as memory:
        folder = memory.folder
        for packed in (left / make.STATE).iterdir():
            (folder / packed.stem).touch(mode=0o600)
            (folder / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    yield left
    shutil.rmtree(folder, ignore_errors=True)


def run(folder: Path, *commands: list[str]) -> list[str]:
    """What command lines say that all go well."""
    [results] = run_ranks(call, 1, folder=str(folder), commands=list(commands))
    for code, _, err in results:
        assert code == 0, err
    return [out for _, out, _ in results]


def losses(folder: Path) -> dict[int, float]:
    return {step["step"]: step["loss"] for step in read_steps(RunPaths(folder / "run").metrics)}


def test_a_run_is_reported(left: Path) -> None:
    status, logs, _ = run(left, ["status", "run", "--json"], ["logs", "run", "--first-error"], ["report", "run"])
    known = json.loads(status)
    assert known["step"] == max(losses(left)) and known["steps"] == 12
    assert "killed by SIGKILL" in logs
    report = RunPaths(left / "run").report.read_text(encoding="utf-8")
    assert "killed by SIGKILL" in report and "eval_sequences: 4" in report


def test_a_run_goes_on_from_its_checkpoint_and_is_exported(left: Path) -> None:
    before = losses(left)
    assert max(before) > make.SAVED
    run(left, GO_ON, ["export", "run", "exported"])
    assert [event["step"] for event in events(left / "run", EventKind.RESUMED)] == [make.SAVED]
    after = losses(left)
    assert list(after) == list(range(1, 13))
    assert [after[step] for step in before] == pytest.approx(list(before.values()), rel=1e-5)
    assert (left / "exported" / "config.json").exists()


def test_a_run_goes_on_from_its_state_in_memory(in_memory: Path) -> None:
    before = losses(in_memory)
    run(in_memory, GO_ON)
    [resumed] = events(in_memory / "run", EventKind.RESUMED)
    assert resumed["memory"] and resumed["step"] == make.CUT_OFF - 1
    after = losses(in_memory)
    assert list(after) == list(range(1, 13))
    assert [after[step] for step in before] == list(before.values())


def test_a_token_cache_is_read_without_preparing_it_again(left: Path) -> None:
    [made] = (path for path in (left / "cache").iterdir() if path.is_dir())
    kept = made.rename(left / "kept")  # its name, which has the paths of its sources in it, is another here
    run(left, ["data", "prepare", "recipe.yaml"])
    [now] = (path for path in (left / "cache").iterdir() if path.is_dir() and path.name != made.name)
    for name in ("train", "held_out"):
        old, new = TokenFile(kept / name), TokenFile(now / name)
        old.verify()
        assert old.checksum == new.checksum
        assert old.slice(0, old.tokens).tolist() == new.slice(0, new.tokens).tolist()
    shutil.rmtree(now)
    kept.rename(now)
    said = (now / "train" / "manifest.json").read_bytes()
    run(left, GO_ON)
    assert (now / "train" / "manifest.json").read_bytes() == said


def test_a_hardware_file_is_used(left: Path) -> None:
    known = hardware.read_hardware(left / "hardware.json")
    assert [device.most for device in known.devices] == [4, 4]
    asked = ["balance.batch=auto", "balance.hardware=hardware.json", "train.steps=1"]
    run(left, ["train", "recipe.yaml", "--run-dir", "other", "--ranks", "2", *asked])
    assert not events(left / "other", EventKind.MEASURING)
    assert len(events(left / "other", EventKind.WORK_SPLIT)) == 1
