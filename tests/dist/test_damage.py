"""Damaged checkpoints and full disks: nothing is lost but time, and the events say what happened."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.disk.load import list_steps, step_folder
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from tests.dist.incidents import train_with_full_disk
from tests.helpers import run_ranks, some
from tests.numerics import runs
from tests.numerics.runs import Outcome, same_bits, walk

END = runs.STEPS - 1  # the step behind which there is room again


def flip_a_byte(folder: Path) -> str:
    file = folder / "rank-00001.safetensors"
    with open(file, "r+b", buffering=0) as target:
        target.seek(-100, os.SEEK_END)
        byte = target.read(1)[0]
        target.seek(-1, os.SEEK_CUR)
        target.write(bytes([byte ^ 4]))
    return "rank-00001.safetensors has CRC-32"


def remove_a_file(folder: Path) -> str:
    (folder / "rank-00000.safetensors").unlink()
    return "rank-00000.safetensors is missing"


def tear_the_manifest(folder: Path) -> str:
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-50])
    return "manifest.json is incomplete"


@pytest.mark.parametrize("damage", some([flip_a_byte, remove_a_file, tear_the_manifest], 0))
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(
    damage: Any, undisturbed: Outcome, tokens: Path, tmp_path: Path
) -> None:
    walk(2, tmp_path, tokens, train__steps=3, checkpoint__every=1, train__eval_sequences=0)
    folder = RunPaths(tmp_path).checkpoints
    assert list_steps(folder) == [3, 2, 1]
    reason = damage(step_folder(folder, 3))
    found = walk(2, tmp_path, tokens)
    refused = runs.events(tmp_path, EventKind.CHECKPOINT_REFUSED)
    assert [event["step"] for event in refused] == [3]
    assert reason in refused[0]["reason"]
    assert [event["step"] for event in runs.events(tmp_path, EventKind.RESUMED)] == [2]
    assert found.losses == undisturbed.losses
    assert same_bits(found.state, undisturbed.state)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root ({mounted.stderr.strip()})")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def assert_survived(run: Path, tokens: Path, codes: list[int], undisturbed: Outcome) -> None:
    assert codes == [0, 0]
    failed = runs.events(run, EventKind.CHECKPOINT_FAILED)
    assert [event["step"] for event in failed] == list(range(4, END, 2))
    assert all("cannot be written" in event["reason"] for event in failed)
    saved = [event["step"] for event in runs.events(run, EventKind.CHECKPOINT_SAVED)]
    assert saved == [2, runs.STEPS]
    # Training went on, no record is lost, nothing half-written is left.
    found = runs.outcome(run)
    assert found.losses == undisturbed.losses
    assert same_bits(found.state, undisturbed.state)
    assert runs.events(run)[-1]["kind"] == EventKind.FINISHED
    assert sorted(path.name for path in RunPaths(run).checkpoints.iterdir()) == [
        "step-00000002", f"step-{runs.STEPS:08d}"
    ]  # fmt: skip


@pytest.mark.parametrize("tensorboard", some([False, True], 1))
def test_a_full_disk_stops_no_training(tensorboard: bool, small_disk: Path, undisturbed: Outcome, tokens: Path) -> None:
    changes = {"checkpoint.every": 2, "report.tensorboard": tensorboard}
    codes = run_ranks(
        train_with_full_disk, 2, timeout_s=120, run=str(small_disk), data=str(tokens), changes=changes,
        begin=3, end=END, size_bytes=None,
    )  # fmt: skip
    assert_survived(small_disk, tokens, codes, undisturbed)


def test_a_limit_on_file_sizes_stops_no_training(undisturbed: Outcome, tokens: Path, tmp_path: Path) -> None:
    codes = run_ranks(
        train_with_full_disk, 2, run=str(tmp_path), data=str(tokens), changes={"checkpoint.every": 2},
        begin=3, end=END, size_bytes=50_000,
    )  # fmt: skip
    assert_survived(tmp_path, tokens, codes, undisturbed)


def test_earlier_checkpoints_outlive_a_disk_that_stays_full(
    small_disk: Path, undisturbed: Outcome, tokens: Path
) -> None:
    with pytest.raises(AssertionError, match=r"the last checkpoint, of step 5, was not saved: .* cannot be written"):
        run_ranks(
            train_with_full_disk, 2, run=str(small_disk), data=str(tokens),
            changes={"checkpoint.every": 2, "train.steps": 5}, begin=3, end=99, size_bytes=None,
        )  # fmt: skip
    assert list_steps(RunPaths(small_disk).checkpoints) == [2]
    assert not runs.events(small_disk, EventKind.FINISHED), "a run whose last state is lost is not finished"
    (small_disk / "ballast").unlink()
    found = walk(2, small_disk, tokens)
    assert [event["step"] for event in runs.events(small_disk, EventKind.RESUMED)] == [2]
    assert found.losses == undisturbed.losses
    assert same_bits(found.state, undisturbed.state)
