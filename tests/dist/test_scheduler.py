"""A scheduler of a user's own, in one class: the ordinary commands submit, watch and cancel its jobs.

What there is for a new scheduler to do is in `ToyScheduler`: its queue is a folder, its jobs are processes here.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import root
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import read_last_line
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.launch import start_outcomes
from phalanx.launch.schedulers.registry import SCHEDULERS
from phalanx.launch.schedulers.scheduler import Job, JobTask, LaunchOptions, QueuePhase, Scheduler, SchedulerNode
from tests.dist import command
from tests.helpers import ALL, ROOT, run_ranks, some, wait_until

START = "import sys; from tests.dist.test_scheduler import run_command; run_command(sys.argv[1:])"
QUEUE = Path(os.environ.get("TOY_QUEUE", "queue"))


@dataclass(frozen=True)
class ToyTask:
    job: str
    node: int = 0
    start_count: int = 1

    @property
    def name(self) -> str:
        return f"{self.job}-{self.start_count}"


class ToyScheduler(Scheduler):
    TITLE = "Toy"
    SECTION: str | None = None
    QUEUES = True

    def make_script(self, config: Config, paths: RunPaths, options: LaunchOptions) -> str | None:
        return f"exec {sys.executable} -c '{START}' keep {paths.root.resolve()}\n"

    def check_cluster(self, config: Config, options: LaunchOptions) -> None:
        if options.nodes > 1:
            raise ConfigError("Toy has one node")

    def submit(self, paths: RunPaths, environment: Mapping[str, str]) -> str:
        number = str(len(list(QUEUE.iterdir())) + 1)
        words = ["setsid", "sh", "-c", f"sh {paths.launch_script.resolve()}; echo $? > {QUEUE}/{number}.over"]
        with open(self.find_log(paths, number), "wb") as out:
            started = subprocess.Popen(words, stdout=out, stderr=out, env={**environment, "TOY_JOB": number})
        (QUEUE / number).write_text(str(started.pid))
        return number

    def query_job(self, number: str) -> Job | None:
        over = (QUEUE / f"{number}.over").exists()
        return Job(number, "ENDED" if over else "GOING", QueuePhase.OVER if over else QueuePhase.RUNS, nodes="here")

    def stop(self, number: str) -> None:
        subprocess.run(["pkill", "-TERM", "-P", (QUEUE / number).read_text()], check=True)

    def cancel(self, number: str) -> None:
        os.killpg(int((QUEUE / number).read_text()), signal.SIGKILL)
        (QUEUE / f"{number}.over").write_text("killed")

    def list_nodes(self) -> list[SchedulerNode]:
        return [SchedulerNode("here", "idle", "")]

    def set_node_state(self, node: str, wanted: NodeRequestKind, reason: str | None) -> str:
        return "asleep"

    def read_task(self, environment: Mapping[str, str], paths: RunPaths) -> JobTask | None:
        return ToyTask(environment["TOY_JOB"]) if "TOY_JOB" in environment else None


def run_command(words: list[str]) -> None:
    """`phalanx`, with one scheduler more."""
    SCHEDULERS["toy"] = ToyScheduler()
    sys.argv = ["phalanx", *words]
    root.main()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "queue").mkdir()
    return command.write_place(tmp_path)


def call(placement: Placement, folder: str, commands: list[list[str]]) -> list[Any]:
    """Command lines with one scheduler more; its jobs begin as they do on a node."""
    global QUEUE
    SCHEDULERS["toy"], QUEUE = ToyScheduler(), Path(folder, "queue")
    environment: dict[str, str | None] = {name: None for name in os.environ if name.startswith("SLURM_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOY_QUEUE": str(QUEUE)}
    return command.call(placement, folder, commands, environment=environment)


def phalanx(place: Path, *commands: list[str]) -> list[str]:
    """What each of the command lines prints."""
    done = run_ranks(call, 1, 240, folder=str(place), commands=list(commands))[0]
    assert [code for code, _, _ in done] == [0] * len(commands), done
    return [out for _, out, _ in done]


@pytest.mark.skipif(not ALL, reason="make test-all")
def test_a_new_scheduler_runs_a_job_to_its_end(place: Path) -> None:
    words = ["launch", "recipe.yaml", "--scheduler", "toy", "--run-dir", "run"]
    out, log, status = phalanx(place, [*words, "--wait"], ["logs", "run"], ["status", "run"])
    assert out.startswith("run is job 1 of Toy\n") and "job 1 is GOING on here" in out
    assert json.loads((place / "run/launch/launched.json").read_text())["scheduler"] == "toy"
    assert "finished after step 2" in log
    assert "1 of Toy, ENDED on here" in status


@pytest.mark.parametrize("now", some([False, True], 0))
def test_a_job_of_a_new_scheduler_is_watched_and_cancelled(place: Path, now: bool) -> None:
    paths = RunPaths(place / "run")
    slow = command.write_slow_callback(place)
    toy = ["--scheduler", "toy"]
    words = ["launch", "recipe.yaml", "train.steps=100000", slow, *toy, "--run-dir", "run"]
    dry, out, nodes, drained = phalanx(
        place, [*words, "--dry-run"], words, ["nodes", *toy, "--json"], ["nodes", "drain", "here", *toy]
    )
    assert "exec " in dry
    assert out.startswith("run is job 1 of Toy; ")
    assert [row["node"] for row in json.loads(nodes)] == ["here"]
    assert drained == "Toy has node here as: asleep\n"
    try:
        wait_until(lambda: int((read_last_line(paths.metrics) or {"step": 0})["step"]) > 2, timeout_s=180)
        status, said = phalanx(place, ["status", "run", "--json"], ["cancel", "run", *(["--now"] if now else [])])
        found = json.loads(status)
        assert (found["scheduler"]["by"], found["scheduler"]["id"], found["scheduler"]["state"]) == (
            "toy",
            "1",
            "GOING",
        )
        assert said.startswith("job 1 was cancelled" if now else "job 1 was asked to stop")
        wait_until(lambda: (place / "queue" / "1.over").exists(), timeout_s=180)
        if not now:
            assert start_outcomes.read_start_outcomes(paths)[-1].code == ExitCode.STOPPED
            log, status = phalanx(place, ["logs", "run"], ["status", "run"])
            assert "stopped" in log
            assert "1 of Toy, ENDED on here" in status
    finally:
        if not (place / "queue" / "1.over").exists():
            os.killpg(int((place / "queue" / "1").read_text()), signal.SIGKILL)
