"""Runs that leave their layout to the planner: what is chosen, kept, shown, compared and learnt from, on two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import load
from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.health.findings import DeviceInfo
from phalanx.launch import started_rank
from phalanx.layout import hardware
from tests.dist import command
from tests.dist.command import call
from tests.helpers import run_ranks

WORDS = ["recipe.yaml", "train.steps=21", "checkpoint.every=12", "balance.batch=even", "--ranks", "2"]
OPEN = ["train.micro_batch=auto", "parallel.layout=auto"]


def events(paths: RunPaths, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(paths.events) if event.get("kind") == kind]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that leaves its micro-batch open, trained in a chosen layout, then in one of its own."""
    folder = command.write_place(tmp_path_factory.mktemp("planned"))
    text = (folder / "recipe.yaml").read_text().replace("micro_batch: 2, ", "")
    (folder / "recipe.yaml").write_text(text)
    commands = [
        ["train", *WORDS, *OPEN, "--run-dir", "chosen"],
        ["train", *WORDS, "train.micro_batch=2", "--run-dir", "given"],
        ["train", *WORDS, *OPEN, "train.steps=23", "--run-dir", "chosen"],
        ["report", "chosen"],
    ]
    results = run_ranks(call, 1, timeout_s=280, folder=str(folder), commands=commands)[0]
    assert [code for code, _, _ in results] == [0, 0, 0, 0], results
    (folder / "said").write_text(results[0][1])
    return folder


def test_the_choice_is_kept_said_and_repeated(place: Path) -> None:
    paths = RunPaths(place / "chosen")
    first, again = events(paths, EventKind.LAYOUT_CHOSEN)
    assert (first["again"], again["again"]) == (False, True)
    assert first["keys"] == again["keys"]
    kept = json.loads(paths.plan.read_text())
    assert kept["keys"] == first["keys"]
    assert [len(node) for node in kept["for"]["nodes"]] == [2]
    said = (place / "said").read_text()
    # Of the set-up the console shows four lines; lines with a time are findings of the health check.
    screen = [line for line in said[: said.index(" step 1/")].splitlines()[:-1] if not line[0].isdigit()]
    assert [line.split()[0] for line in screen] == ["model", "devices", "folder", "split"]
    assert " a step" in screen[3] and screen[3].endswith(f"; layout: {first['layout']}")
    assert " predicted from data-sheets" in " ".join(said.split()) or " predicted from measurements" in " ".join(
        said.split()
    )
    config = paths.config.read_text()
    assert f"micro_batch: {first['keys']['train.micro_batch']}\n" in config
    assert "layout: given\n" in config  # the same again, wherever it is started


def test_the_layout_does_not_change_the_curve(place: Path) -> None:
    chosen, given = (read_steps(RunPaths(place / name).metrics)[:21] for name in ("chosen", "given"))
    assert [step["loss"] for step in chosen] == pytest.approx([step["loss"] for step in given], rel=1e-4)


@pytest.mark.parametrize("name", ["chosen", "given"])
def test_steps_are_compared_with_what_was_foretold(place: Path, name: str) -> None:
    paths = RunPaths(place / name)
    told = events(paths, EventKind.PREDICTION_CHECKED)[0]
    steps = [step for step in read_lines(paths.metrics) if step["attempt"] == 1]
    assert told["step"] == 20
    assert told["steps"] == 15
    middle = sorted(step["step_s"] for step in steps[5:20])[7]
    assert told["measured_s"] == middle
    parts = {tuple(row["terms"]): row for row in told["terms"]}
    assert all(row["measured_s"] >= 0 and row["predicted_s"] >= 0 for row in told["terms"])
    assert parts[("optimizer", "commit")]["measured_s"] > 0
    assert sum(row["predicted_s"] for row in told["terms"]) == pytest.approx(told["predicted_s"])
    assert (told["off"] is not None) == (abs(told["measured_s"] / told["predicted_s"] - 1) > 0.15)
    assert told["measured_bytes"] == max(step["memory_bytes"] for step in steps[5:20])


def test_the_report_shows_both(place: Path) -> None:
    page = (place / "chosen" / "report.html").read_text()
    assert "Predicted and measured" in page
    assert "memory of the fullest rank" in page


def test_the_run_teaches_the_planner(place: Path) -> None:
    asked = ["train.global_batch=4", "--hardware", "learnt.json", "--run", "chosen"]
    commands = [
        ["plan", "--calibrate", "given", "--hardware", "learnt.json"],
        ["plan", "recipe.yaml", *asked, "--out", "plan.json"],
        ["plan", "--calibrate", "nowhere"],
    ]
    learnt, planned, refused = run_ranks(call, 1, timeout_s=120, folder=str(place), commands=commands)[0]
    assert learnt[0] == 0, learnt[2]
    assert "devices: " in learnt[1]
    assert "written to learnt.json; phalanx plan --hardware learnt.json uses it" in learnt[1]
    found = hardware.read_hardware(place / "learnt.json")
    assert found.learnt is not None and found.learnt.run == "given"
    assert planned[0] == 0, planned[2]
    told = json.loads((place / "plan.json").read_text())
    assert told["saving"]["checkpoint_from"] == "chosen"
    assert told["saving"]["recovery_from"] is None
    assert "(assumed)" in planned[1]
    assert "no plan.json with the devices of the run" in command.sentence(refused[0], refused[2])


def test_a_dry_run_takes_the_layout_too(place: Path) -> None:
    code, out, err = command.phalanx(place, "train", *WORDS, *OPEN, "--dry-run", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["planned"]["keys"]["train.micro_batch"] == told["assumed"]["micro_batch"]
    assert told["assumed"]["ranks"] == 2


def test_ranks_that_something_else_started_cannot_choose(tmp_path: Path) -> None:
    config = load.build_config(
        {"model": {"hidden": 16, "layers": 1, "heads": 2}, "parallel": {"layout": "auto"}}, "the test's recipe"
    )
    one = Placement(rank=1, world=2, local_rank=1, local_world=2, node=0, device="cpu", store=None)
    with pytest.raises(ConfigError, match="knows only its own; start the ranks with `phalanx train`"):
        started_rank.run_started_rank(config, RunPaths(tmp_path), one, DeviceInfo("cpu", "cpu", True), (), ())
