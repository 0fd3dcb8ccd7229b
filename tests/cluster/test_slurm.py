"""`phalanx launch` and its kin on a real Slurm with nodes of its own, on this machine; skipped, with the reason, where
there are no rights or no Slurm. What changes a cluster has one to itself.
"""

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.started import ranks_of, strike
from phalanx.core.json_lines import read_last_line, read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.launch.schedulers import slurm
from phalanx.launch.schedulers.scheduler import Job
from tests.cluster import slurm_cluster
from tests.cluster.lives import SLOW, SLOW_MODEL
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.warm_python import WarmPython
from tests.dist import command
from tests.helpers import ALL, run_ranks, wait_until

LONG = ["train.steps=100000", "checkpoint.every=3", SLOW]
long = pytest.mark.skipif(not ALL, reason="a life of a job more: make test-all")


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    if (reason := slurm_cluster.why_not()) is not None:
        pytest.skip(reason)
    with slurm_cluster.running(3) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Data and a recipe in a folder that wants to be quoted."""
    folder = tmp_path / 'it\'s a "place" of $HOME, %j'
    folder.mkdir()
    (folder / "slow.py").write_text(SLOW_MODEL)
    return command.write_place(folder)


def phalanx(cluster: SlurmCluster, warm: WarmPython, place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return cluster.run(str(warm.phalanx), *words, folder=place, check=False, timeout_s=240)


def job(cluster: SlurmCluster, number: str = "1") -> Job:
    found = slurm.read_job(cluster.run("scontrol", "show", "job", "-o", number).stdout)
    assert found is not None
    return found


def until(cluster: SlurmCluster, place: Path, what: Callable[[], bool], timeout_s: float = 120) -> None:
    try:
        wait_until(what, timeout_s)
    except AssertionError as error:
        logs = "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(place.rglob("logs/*.log")))
        raise AssertionError(f"{error}\n{logs}") from None


def step(place: Path) -> int:
    return int((read_last_line(RunPaths(place / "run").metrics) or {"step": 0})["step"])


def kinds(place: Path) -> list[str]:
    return [str(event["kind"]) for event in read_lines(RunPaths(place / "run").events)]


def incidents(place: Path) -> list[tuple[str, str]]:
    """What failed, and what was done about it."""
    found = [event for event in read_lines(RunPaths(place / "run").events) if event["kind"] == EventKind.INCIDENT]
    return [(str(event["what"]), str(event["done"])) for event in found]


def nodes_of(cluster: SlurmCluster) -> list[str]:
    """Those that the job has now."""
    return cluster.run("scontrol", "show", "hostnames", job(cluster).nodes or "none").stdout.split()


# ------------------------------------------------------------------------------------------------ before there is a job


REFUSED = {
    "--partition mian": "partition mian does not exist; this cluster has: main, one, rest, shut",
    "--nodes 4": "the partition main has 3 nodes, but 4 are requested (--nodes and --spares)",
    "--nodes 3 --spares 1": "the partition main has 3 nodes, but 4 are requested",
    "--nodes 2 -p one": "the partition one has 1 node, but 2 are requested",
    "-p shut": "the partition shut does not accept jobs now",
    "-p one --time 2:00:00": "the partition one limits a job to 1:00:00, but --time requests 2:00:00",
    "--time soon": "the time limit soon is not a Slurm time",
    "--time 5 slurm.lead_s=300": "slurm.lead_s 300 is as long as the whole job (300 s)",
    "-p one:1 -p rest:1": "the partitions have 2 nodes in all, but the job has 1",
    "-p one -p rest:1": "the partition one has no number of nodes; with several partitions write each as NAME:NODES",
    "--run-dir s3://bucket/run": "is a URL, but a launched run needs a folder",
    "--run-dir 'two\nlines'": "has a line break in its name, which Slurm does not accept",
    "train.stepz=3": "unknown key train.stepz",
    "-- -C a100": "a100 is not an option of sbatch; write an option and its value as one word",
    "-- --gres=nonesuch:1": "Slurm's sbatch failed: Invalid generic resource",
    "--local --nodes 2": "--local uses this machine only; leave out --nodes and --spares",
    "--local --time 5": "--time has no effect without Slurm; remove it",
}


def in_ctl(
    placement: Placement, holder: int, environment: dict[str, str], folder: str, commands: list[list[str]]
) -> Any:
    """Command lines, with the network, the name and the mounts of the controller."""
    for kind, flag in (("net", 0x40000000), ("uts", 0x04000000), ("mnt", 0x00020000)):
        with open(f"/proc/{holder}/ns/{kind}") as space:
            assert ctypes.CDLL(None, use_errno=True).setns(space.fileno(), flag) == 0, os.strerror(ctypes.get_errno())
    os.environ.update(environment)
    return command.call(placement, folder, commands)


def test_what_cannot_run_is_refused_before_anything_is_submitted(cluster: SlurmCluster, place: Path) -> None:
    lines = [["launch", "recipe.yaml", *shlex.split(words)] for words in REFUSED]
    there = {"holder": cluster.holders["ctl"].pid, "environment": cluster.environment, "folder": str(place)}
    answers = run_ranks(in_ctl, 1, commands=lines, **there)[0]
    for (words, sentence), (code, _, err) in zip(REFUSED.items(), answers, strict=True):
        assert sentence in command.sentence(code, err), words
    assert cluster.run("squeue", "-h").stdout == ""
    # What is served for Prometheus of this Slurm: its nodes, and a job that no node is free for.
    cluster.run("sbatch", "--hold", "--partition=rest", "--wrap=true", folder=place)
    told = "from phalanx.provision.cluster_view import sample_queue as s; print(s().jobs, [vars(n) for n in s().nodes])"
    said = cluster.run(sys.executable, "-c", told, folder=place).stdout
    assert said.startswith("Counter({('rest', 'pending'): 1})") and said.count("'state': 'idle'") == 3


# ------------------------------------------------------------------------------------------------------ what nodes lack


def test_a_run_folder_that_a_node_does_not_see_ends_the_job_at_once(
    cluster: SlurmCluster, warm: WarmPython, place: Path
) -> None:
    (place / "run").mkdir()
    cluster.run("mount", "-t", "tmpfs", "tmpfs", str(place / "run"), name="n2")
    words = [f"slurm.python={warm.python}", "--nodes", "2", "--run-dir", "run", "--wait"]
    done = phalanx(cluster, warm, place, "launch", "recipe.yaml", *words)
    assert done.returncode == ExitCode.CONFIG
    log = (place / "run" / "logs" / "slurm-1.log").read_text()
    assert f"error: node n2 cannot see what `phalanx launch` wrote to {place}/run/launch" in log
    assert "job 1 has ended as FAILED and the run recorded no outcome; its output is in run/logs/" in done.stderr


def test_a_run_folder_that_no_node_sees_is_a_sentence(cluster: SlurmCluster, warm: WarmPython, place: Path) -> None:
    done = phalanx(cluster, warm, place, "launch", "recipe.yaml", "--wait", "--run-dir", f"{cluster.place}/local/run")
    assert "the nodes may not see the run folder" in done.stderr


def test_a_node_without_the_environment_is_named(cluster: SlurmCluster, warm: WarmPython, place: Path) -> None:
    words = ["slurm.python=/no/such/python", "slurm.setup=export GREETING=hello", "--nodes", "2", "--run-dir", "run"]
    phalanx(cluster, warm, place, "launch", "recipe.yaml", *words)
    until(cluster, place, lambda: job(cluster).over, 30)
    log = (place / "run" / "logs" / "slurm-1.log").read_text()
    assert "error: node n1 cannot run Phalanx by /no/such/python; use a file system that all nodes share" in log


# -------------------------------------------------------------------------------------------------------- runs of a job


def test_nodes_of_two_partitions_train_to_the_end(cluster: SlurmCluster, warm: WarmPython, place: Path) -> None:
    words = [
        f"slurm.python={warm.python}",
        "train.steps=6",
        "--nodes",
        "2",
        "-p",
        "one:1",
        "-p",
        "rest:1",
        "--run-dir",
        "run",
        "--wait",
        "--time",
        "10",
    ]
    done = phalanx(cluster, warm, place, "launch", "recipe.yaml", *words)
    assert done.returncode == 0, done.stderr
    assert "run is job 1 of Slurm" in done.stdout
    assert "finished after step 6" in done.stdout
    assert [record["step"] for record in read_steps(RunPaths(place / "run").metrics)] == [1, 2, 3, 4, 5, 6]
    assert job(cluster).state == "COMPLETED"
    started = next(
        event for event in read_lines(RunPaths(place / "run").events) if event["kind"] == EventKind.RUN_STARTED
    )
    assert (started["world"], started["hosts"]) == (2, ["n1", "n2"])
    assert (place / "run" / "launch" / "over-1-1").read_text() == "0 end 6 0\n"
    assert not (place / "run" / "launch" / "meet").exists()
    found = json.loads(phalanx(cluster, warm, place, "status", "run", "--json").stdout)
    assert (found["state"], found["step"], found["steps"], found["checkpoint"]["step"]) == ("finished", 6, 6, 6)
    assert (found["scheduler"]["id"], found["scheduler"]["state"]) == ("1", "COMPLETED")
    assert 0 < found["goodput"]["share"] <= 1
    assert "1 of Slurm, COMPLETED on n1,n2" in phalanx(cluster, warm, place, "status", "run").stdout
    assert "finished after step 6" in phalanx(cluster, warm, place, "logs", "run").stdout
    assert "node 1 of 2: the run is done" in phalanx(cluster, warm, place, "logs", "run", "--node", "1").stdout
    assert "no rank of run has died" in phalanx(cluster, warm, place, "logs", "run", "--first-error").stderr
    assert "is not running, so there is nothing to cancel" in phalanx(cluster, warm, place, "cancel", "run").stderr


@long
def test_a_run_goes_on_after_each_time_limit_until_it_is_cancelled(
    cluster: SlurmCluster, warm: WarmPython, place: Path
) -> None:
    """Slurm sends SIGUSR1 to the steps before a job's time is up; a minute is the shortest limit there is."""
    words = [*LONG, "--until-done", "--run-dir", "run", "-p", "one"]
    assert phalanx(cluster, warm, place, "launch", "recipe.yaml", *words).returncode == 0
    until(cluster, place, lambda: step(place) > 5)
    again = phalanx(cluster, warm, place, "launch", "recipe.yaml", *words)
    assert "is job 1 already (RUNNING); end it with `phalanx cancel run`" in again.stderr
    assert "RUNNING on n1" in phalanx(cluster, warm, place, "status", "run").stdout
    cluster.run("scancel", "--signal=USR1", "1")
    until(cluster, place, lambda: kinds(place).count(EventKind.RESUMED) == 1)
    assert job(cluster).restarts == 1
    stopped = next(
        event["step"] for event in read_lines(RunPaths(place / "run").events) if event["kind"] == EventKind.STOPPED
    )
    until(cluster, place, lambda: step(place) > stopped)
    done = phalanx(cluster, warm, place, "cancel", "run")
    assert "job 1 was asked to stop: it finishes the step, saves and exits" in done.stdout
    until(cluster, place, lambda: job(cluster).over)
    assert (job(cluster).state, job(cluster).code) == ("FAILED", ExitCode.STOPPED)
    assert kinds(place).count(EventKind.STOPPED) == 2
    overs = [(place / "run" / "launch" / name).read_text().split() for name in ("over-1-1", "over-1-2")]
    assert [over[:2] for over in overs] == [["10", "again"], ["10", "end"]]
    assert (place / "run" / "logs" / "node-0.log").read_text().count(" on n1, job 1, start ") == 2


@pytest.mark.parametrize("ended", ["scancel 1", "scontrol requeue 1"] if ALL else ["scontrol requeue 1"])
def test_what_slurm_itself_does_with_a_job_is_not_done_again(
    cluster: SlurmCluster, warm: WarmPython, place: Path, ended: str
) -> None:
    """Who is asked to stop saves within the time that Slurm gives it. A job that its user has cancelled by Slurm's own
    command does not come back, and one that Slurm puts into the queue again comes back once."""
    words = [*LONG, f"slurm.python={warm.python}", "--until-done", "--run-dir", "run", "-p", "one"]
    assert phalanx(cluster, warm, place, "launch", "recipe.yaml", *words).returncode == 0
    until(cluster, place, lambda: step(place) > 2)
    cluster.run(*ended.split())
    until(cluster, place, lambda: kinds(place).count(EventKind.STOPPED) == 1)
    until(cluster, place, lambda: job(cluster).over or job(cluster).restarts == 1, 60)
    assert (job(cluster).state == "CANCELLED") is ended.startswith("scancel")
    assert (place / "run" / "launch" / "jobs").read_text() == "1\n"
    if ended.startswith("scancel"):
        assert cluster.run("squeue", "-h").stdout == ""
    else:
        cluster.run("scancel", "1")


def test_a_job_outlives_a_rank_a_frozen_node_and_the_node_that_runs_its_script(
    cluster: SlurmCluster, warm: WarmPython, place: Path
) -> None:
    """One after the other, with a spare for the second. What the script would do at its end, the last node does: here
    it puts the job into the queue again."""
    words = [*LONG, f"slurm.python={warm.python}", "--nodes", "2", "--spares", "1", "--run-dir", "run", "--until-done"]
    assert phalanx(cluster, warm, place, "launch", "recipe.yaml", *words).returncode == 0
    until(cluster, place, lambda: step(place) > 1)
    strike(list(ranks_of(cluster.processes("n2")).values()), signal.SIGKILL)
    until(cluster, place, lambda: len(incidents(place)) == 1)
    cluster.signal_all("n2", signal.SIGSTOP)
    until(cluster, place, lambda: len(incidents(place)) == 2)
    cluster.signal_all("n2", signal.SIGCONT)
    thawed = place / "run" / "logs" / "node-1.log"
    until(cluster, place, lambda: "this node ended its ranks and exits" in thawed.read_text())
    cluster.crash("n1")
    until(cluster, place, lambda: len(incidents(place)) == 3)
    assert [done for _, done in incidents(place)] == [
        "all ranks restart", "node 2 takes the ranks of node 1", "the work is redistributed over node 2: 1 rank",
    ]  # fmt: skip
    causes = ("SIGKILL", "node 1 (n2) was lost", "node 0 (n1) was lost")
    assert [cause in what for cause, (what, _) in zip(causes, incidents(place), strict=True)] == [True] * 3
    until(cluster, place, lambda: "n1" not in nodes_of(cluster), 60)
    assert (job(cluster).state, job(cluster).restarts) == ("RUNNING", 0)
    assert "training resumed" in phalanx(cluster, warm, place, "logs", "run").stdout  # of the node that leads now
    cluster.run("scancel", "--signal=USR1", "1")
    until(cluster, place, lambda: job(cluster).restarts == 1, 60)
    assert (place / "run" / "launch" / "over-1-1").read_text().split()[:2] == ["10", "again"]
    assert phalanx(cluster, warm, place, "cancel", "run").returncode == 0
    until(cluster, place, lambda: job(cluster).state == "CANCELLED", 60)  # else it waits for a third node for ever
