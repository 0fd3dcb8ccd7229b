"""`srun --auto-resume=1`, and the same given to sbatch: the plug-in of contrib/spank in a real Slurm."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.core.json_lines import read_last_line, read_lines
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from tests.cluster import slurm_cluster
from tests.cluster.lives import SLOW, SLOW_MODEL
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.warm_python import WarmPython
from tests.dist import command
from tests.helpers import ROOT, wait_until

SHOW = "/bin/sh -c 'echo $SLURM_PROCID: resume=$PHALANX_AUTO_RESUME'"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if (reason := slurm_cluster.why_not()) is not None:
        pytest.skip(reason)
    if shutil.which("gcc") is None or not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("a plug-in is built by gcc with Slurm's headers (Debian: libslurm-dev)")
    source = shutil.copytree(ROOT / "contrib" / "spank", tmp_path_factory.mktemp("spank") / "spank")
    built = subprocess.run(["make", "-C", source], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with slurm_cluster.running(2, plugstack=f"required {source}/auto_resume.so\n") as made:
        yield made


def test_the_option_reaches_every_task(cluster: SlurmCluster) -> None:
    assert cluster.run("sh", "-c", f"srun -N2 --auto-resume=1 {SHOW} | sort").stdout == "0: resume=1\n1: resume=1\n"
    assert cluster.run("sh", "-c", f"srun -N1 --auto-resume=0 {SHOW}").stdout == "0: resume=0\n"
    assert cluster.run("sh", "-c", f"srun -N1 {SHOW}").stdout == "0: resume=\n"
    assert "--auto-resume=0|1       let `phalanx train` start its ranks again" in cluster.run("sbatch", "--help").stdout


def test_a_wrong_value_is_a_sentence(cluster: SlurmCluster) -> None:
    done = cluster.run("srun", "-N1", "--auto-resume=7", "true", check=False)
    assert done.returncode != 0
    assert "--auto-resume must be 0 or 1, not 7; with 1 `phalanx train` starts its ranks again" in done.stderr


def test_given_to_sbatch_it_holds_for_every_srun_that_says_nothing_else(cluster: SlurmCluster, tmp_path: Path) -> None:
    lines = ["#!/bin/bash", "#SBATCH --auto-resume=1", f"#SBATCH --output={tmp_path}/out", f"srun -N1 {SHOW}",
             f"srun -N1 --auto-resume=0 {SHOW}", f"srun -N1 --export=NONE {SHOW}"]  # fmt: skip
    (tmp_path / "job.sh").write_text("\n".join(lines) + "\n")
    cluster.run("sbatch", "--wait", str(tmp_path / "job.sh"))
    # A step may have to wait until the nodes are rid of the one before, and srun says so.
    said = [line for line in (tmp_path / "out").read_text().split("\n") if line and not line.startswith("srun:")]
    assert said == ["0: resume=1", "0: resume=0", "0: resume=1"]


def test_a_step_of_one_task_a_node_survives_the_death_of_a_rank(
    cluster: SlurmCluster, warm: WarmPython, tmp_path: Path
) -> None:
    """On HyperPod a software crash ends the step; here its ranks start again, and the step is done."""
    place = command.write_place(tmp_path)
    (place / "slow.py").write_text(SLOW_MODEL)
    words = ["-m", "phalanx", "train", "recipe.yaml", "--run-dir", "run", "train.steps=16", "checkpoint.every=3", SLOW]
    step = cluster.start("srun", "-N2", "--auto-resume=1", str(warm.python), *words, folder=place)
    paths = RunPaths(place / "run")
    try:
        wait_until(lambda: (read_last_line(paths.metrics) or {"step": 0})["step"] > 4, timeout_s=180)
        os.kill(rank_of(place, 1), signal.SIGKILL)
        out, _ = step.communicate(timeout=240)
    finally:
        step.kill()
    assert step.returncode == 0, out
    kinds = [event["kind"] for event in read_lines(paths.events)]
    assert kinds.count(EventKind.WORKER_DIED) == kinds.count(EventKind.RESUMED) == kinds.count(EventKind.FINISHED) == 1
    assert read_steps(paths.metrics)[-1]["step"] == 16


def rank_of(place: Path, rank: int) -> int:
    """The process of a rank on whichever node, known by the log that it writes."""
    log = RunPaths(place / "run").log(1, rank)
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.readlink(entry / "fd" / "1") == str(log):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"nobody writes {log}")
