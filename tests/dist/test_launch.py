"""`phalanx launch --local`: a run in the background, kept going, looked after and cancelled by the other commands."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.core.json_lines import read_last_line, read_lines
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.launch import launched_run, start_outcomes
from phalanx.launch.schedulers import scheduler
from tests.dist import command
from tests.helpers import ROOT, is_alive, run_ranks, wait_until

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
ENVIRONMENT |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def phalanx(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        cwd=place,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return command.write_place(tmp_path)


@pytest.fixture
def in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell of Slurm's, `srun --ntasks 8 --pty bash`, whose step the run in the background is no part of."""
    for name in ("PROCID", "LOCALID", "NODEID", "STEP_ID"):
        monkeypatch.setitem(ENVIRONMENT, f"SLURM_{name}", "0")
    for name, value in (("NTASKS", "8"), ("STEP_NUM_TASKS", "8"), ("STEP_NUM_NODES", "1"), ("JOB_ID", "7")):
        monkeypatch.setitem(ENVIRONMENT, f"SLURM_{name}", value)
    monkeypatch.setitem(ENVIRONMENT, "SLURM_STEP_NODELIST", "n1")


def test_a_run_in_the_background_is_kept_going_and_cancelled(place: Path, in_a_step: None) -> None:
    paths = RunPaths(place / "run")
    slow = command.write_slow_callback(place)
    words = ["launch", "recipe.yaml", "train.steps=100000", "checkpoint.every=3", slow, "--local", "--run-dir", "run"]
    with open(place / "shown", "wb") as shown:
        watching = subprocess.Popen(
            [sys.executable, "-m", "phalanx", *words, "--wait"], cwd=place, env=ENVIRONMENT, stdout=shown, stderr=shown
        )
    wait_until(lambda: scheduler.find_lock_holder(paths.job_supervisor) is not None, timeout_s=180)
    held = scheduler.find_lock_holder(paths.job_supervisor)
    assert held is not None
    try:
        wait_until(lambda: _step(paths) > 4 and " step " in (place / "shown").read_text(), timeout_s=180)
        assert f"run is running as process {held[0]}\n" in (place / "shown").read_text()
        watching.kill()  # who waits for the run is no part of it
        watching.wait()
        refused = command.refused(place, *words)
        assert refused == (
            f"the run run is already running as process {held[0]} on {held[1]}; end it with `phalanx cancel run`"
        )
        trains = scheduler.find_lock_holder(paths.lock)
        assert trains is not None and trains[0] != held[0]
        os.kill(trains[0], signal.SIGKILL)  # the agent, and with it its ranks
        wait_until(lambda: _count(paths, EventKind.RESUMED) == 1, timeout_s=180)
        log = paths.node_log(0).read_text()
        assert "--- phalanx train was killed here by SIGKILL; restarting it" in log
        reached = _step(paths)
        wait_until(lambda: _step(paths) > reached, timeout_s=180)
        asked = [["status", "run", "--json"], ["logs", "run"], ["logs", "run", "--rank", "0"], ["cancel", "run"]]
        (status, log, of_rank, cancel) = run_ranks(command.call, 1, folder=str(place), commands=asked)[0]
        found = json.loads(status[1])
        assert (status[0], found["state"], found["scheduler"]["by"]) == (0, "running", "process")
        assert (log[0], " step " in log[1], of_rank[0]) == (0, True, 0)
        said = f"process {held[0]} was asked to stop: it finishes the step, saves and exits\n"
        assert cancel[:2] == [0, said]
        wait_until(lambda: not is_alive(held[0]), timeout_s=180)
    finally:
        if is_alive(held[0]):
            os.kill(held[0], signal.SIGKILL)
    assert _count(paths, EventKind.STOPPED) == 1
    over = start_outcomes.read_start_outcomes(paths)[-1]
    assert (over.code, over.next_action) == (ExitCode.STOPPED, launched_run.END)
    assert "is not running, so there is nothing to cancel" in command.refused(place, "cancel", "run")


def _step(paths: RunPaths) -> int:
    return int((read_last_line(paths.metrics) or {"step": 0})["step"])


def _count(paths: RunPaths, kind: str) -> int:
    return sum(event.get("kind") == kind for event in read_lines(paths.events))


def test_a_mistake_is_not_tried_again(place: Path) -> None:
    (place / "text.jsonl").write_text("")
    words = ["launch", "recipe.yaml", "--local", "--wait", "--until-done", "--run-dir", "run"]
    began = time.monotonic()
    done = phalanx(place, *words)
    assert done.returncode == ExitCode.CONFIG, done.stderr
    assert [over.next_action for over in start_outcomes.read_start_outcomes(RunPaths(place / "run"))] == [
        launched_run.END
    ], time.monotonic() - began


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["logs", "nowhere"], "no run folder nowhere; give the folder of a run"),
        (["cancel", "nowhere"], "no run folder nowhere; give the folder of a run"),
        (["status", "nowhere"], "no run in nowhere; give the folder of a run, or start it"),
        (["logs", ".", "--rank", "1", "--node", "1"], "--rank, --node and --first-error cannot be combined"),
        (["logs", ".", "-f", "--first-error"], "--follow has no effect with --first-error"),
        (
            ["launch", "recipe.yaml", "--run-dir", "memory://runs/my"],
            "memory://runs/my is a URL, but a launched run needs a folder",
        ),
        (["status", ".", "--json", "--watch"], "--watch cannot be combined with --json"),
        (["launch", "recipe.yaml", "--max-jobs", "3"], "--max-jobs has no effect without --until-done"),
        (["launch", "recipe.yaml", "--dry-run", "--wait"], "--wait has no effect with --dry-run"),
        (
            ["launch", "recipe.yaml", "--dry-run", "slurm.mounts=[/data]"],
            "slurm.mounts needs a container, but slurm.container is not set; set it, or remove slurm.mounts",
        ),
    ],
)
def test_looking_after_what_is_not_there_is_a_sentence(place: Path, words: list[str], sentence: str) -> None:
    assert sentence in command.refused(place, *words)
