"""Weights & Biases as a sink: the package itself writes a run without a network, and a server that is away is borne."""

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import load
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.workload.sinks import SCALARS
from phalanx.workload.wandb_sink import WandbSink
from tests.dist import command

RECIPE = """
model: {hidden: 16, layers: 1, heads: 2, intermediate: 32}
data: {source: text.jsonl}
report: {tensorboard: false, wandb: a-project}
"""


def logged(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run's log as wandb's own package reads them back (LevelDB's log format around its protobufs)."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("*.wandb")
    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # a block's end too short for a header
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            record = wandb_internal_pb2.Record.FromString(parts)  # type: ignore[attr-defined]
            parts = b""
            if record.HasField("history"):
                yield {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.teardown()


def sink_of(folder: Path, attempt: int) -> WandbSink:
    config = load.build_config({"model": {"hidden": 16, "layers": 1, "heads": 2}, "report": {"wandb": "p"}}, "a recipe")
    return WandbSink(RunPaths(folder), config, attempt)


def record(step: int) -> dict[str, Any]:
    return {"step": step, **dict.fromkeys(SCALARS, step / 8), "wait_s": None}


@pytest.mark.usefixtures("offline")
def test_a_run_and_its_continuation_are_one_run_there(tmp_path: Path) -> None:
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):  # the third is walked again
        sink = sink_of(tmp_path, attempt)
        for step in steps:
            sink.on_step(record(step))
        sink.on_event({"kind": EventKind.EVALUATED, "step": steps[-1], "set": "mine", "loss": attempt / 4})
        sink.on_event({"kind": EventKind.FINISHED, "step": steps[-1]})
        sink.close()
        time.sleep(1.1)  # its folders are named by the second
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    name = json.loads(RunPaths(tmp_path).wandb.read_text())["id"]
    assert [folder.name.rpartition("-")[2] for folder in folders] == [name, name]
    rows = [row for folder in folders for row in logged(folder)]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 3, 4]
    assert all(row["train/loss"] == row["step"] / 8 for row in rows if "train/loss" in row)
    assert not any("train/wait_s" in row for row in rows)  # it was not known
    assert [(row["step"], row["eval/mine"]) for row in rows if "eval/mine" in row] == [(3, 0.25), (4, 0.5)]
    assert not RunPaths(tmp_path).events.exists()


def test_nobody_logged_in_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n')
    clean: dict[str, str | None] = {key: None for key in os.environ if key.startswith("WANDB_")}
    clean |= {"HOME": str(tmp_path)}  # nobody's home
    words = ["train", "recipe.yaml", "--run-dir", "run", "--ranks", "1"]
    code, _, said = command.phalanx(tmp_path, *words, environment=clean)
    assert code == ExitCode.CONFIG
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert "report.wandb a-project cannot be used" in line
    assert "wandb login" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("when", ["at the start", "later"])
def test_what_fails_there_ends_the_logging_and_not_the_run(when: str, tmp_path: Path) -> None:
    if when == "at the start":
        (tmp_path / "wandb").write_text("a file lies where its folder should be")
    sink = sink_of(tmp_path, attempt=3)
    if when == "later":
        sink.on_step(record(1))
        sink._run.finish()  # a run that has ended takes nothing more
    sink.on_step(record(2))
    sink.on_step(record(3))
    sink.close()
    (warning,) = read_lines(RunPaths(tmp_path).events)
    assert (warning["kind"], warning["attempt"]) == (EventKind.WARNING, 3)
    assert "so the run continues without it" in warning["message"]


@pytest.mark.usefixtures("offline")
def test_no_room_for_its_warning_ends_no_run(tmp_path: Path) -> None:
    sink = sink_of(tmp_path, attempt=1)
    sink._run.finish()
    RunPaths(tmp_path).events.symlink_to("/dev/full")
    sink.on_step(record(1))
    assert sink._run is None
