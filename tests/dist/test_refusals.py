"""Starts that must not go on: what is there would be lost, or what comes would be worth nothing."""

import json
import re
import shutil
from pathlib import Path

import pytest

from phalanx.config import load, resolve
from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.trainer import run_folder
from tests.dist.command import contents, phalanx, refused, write_place

RUN = ("train", "recipe.yaml", "--run-dir", "run")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return write_place(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_place(tmp_path_factory.mktemp("trained"))
    assert phalanx(folder, *RUN)[0] == 0
    return folder


@pytest.fixture
def begun(trained: Path, tmp_path: Path) -> Path:
    """A folder with a run that has begun."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_checkpoints_that_cannot_be_used_are_not_written_over(here: Path) -> None:
    assert phalanx(here, *RUN, "checkpoint.every=1")[0] == 0
    paths = RunPaths(here / "run")
    for manifest in paths.checkpoints.glob("*/manifest.json"):
        manifest.write_text(manifest.read_text().replace('"version":1', '"version":2'))
    before = contents(paths.checkpoints)
    code, out, _ = phalanx(here, *RUN, "checkpoint.every=1", "train.steps=4")
    assert code == 2
    assert "none of the checkpoints in run/checkpoints can be used" in out
    assert contents(paths.checkpoints) == before
    assert len([e for e in read_lines(paths.events) if e["kind"] == EventKind.CHECKPOINT_REFUSED]) == 2
    assert [step["step"] for step in read_steps(paths.metrics)] == [1, 2]


def test_attempts_go_on_counting_when_the_events_are_lost(begun: Path) -> None:
    paths = RunPaths(begun / "run")
    paths.events.unlink()
    assert run_folder.next_attempt(paths) == 2
    assert phalanx(begun, *RUN, "train.steps=4")[0] == 0
    assert [(step["step"], step["attempt"]) for step in read_steps(paths.metrics)] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_data_that_has_changed_is_refused(begun: Path) -> None:
    source = begun / "text.jsonl"
    source.write_text(source.read_text() + json.dumps({"text": "one more document"}) + "\n")
    before = contents(begun / "run")
    found = refused(begun, *RUN, "train.steps=4")
    assert re.match(r"the data of the run in run has changed since it began \((train|held_out)", found)
    assert contents(begun / "run") == before


def test_token_files_that_rotted_are_refused(here: Path) -> None:
    assert phalanx(here, *RUN)[0] == 0
    (file,) = (here / "cache").glob("*/train/tokens.bin")
    spoiled = bytearray(file.read_bytes())
    spoiled[10] ^= 1
    file.write_bytes(spoiled)
    found = refused(here, "train", "recipe.yaml", "--run-dir", "other")
    assert "tokens.bin cannot be used: its checksum is" in found
    assert "delete" in found


def test_a_run_that_has_run_away_gives_up(here: Path) -> None:
    code, out, _ = phalanx(here, *RUN, "optim.lr=1e300", "train.steps=40", "train.eval_sequences=0")
    assert code == 2
    assert "the gradient has not been finite since step 2" in out
    steps = read_steps(RunPaths(here / "run").metrics)
    assert [step["skipped"] for step in steps] == [False] + [True] * 20
    assert RunPaths(here / "run").report.exists()


def test_other_devices_get_another_micro_batch(here: Path) -> None:
    auto = (*RUN, "train.micro_batch=auto")
    assert phalanx(here, *auto, "--ranks", "2")[0] == 0
    assert phalanx(here, *auto, "train.steps=3")[0] == 0
    assert phalanx(here, *auto, "train.steps=4")[0] == 0
    chosen = [e["value"] for e in read_lines(RunPaths(here / "run").events) if e.get("key") == "train.micro_batch"]
    assert chosen == [2, 4], "half of the batch on each of two ranks, then all of it, then no question any more"


def test_an_accelerator_without_bf16_computes_in_fp16() -> None:
    config = load.build_config({"model": {"preset": "llama-3.2-1b"}}, "here")
    old, reasons = resolve.resolve_autos(config, device="gpu", world=1, bf16=False)
    new, _ = resolve.resolve_autos(config, device="gpu", world=1)
    assert (old.train.dtype, new.train.dtype) == ("fp16", "bf16")
    assert ("train.dtype", "fp16", "a gpu device has no bf16") in reasons
