"""Lives of clusters of provider `local`: real Slurm and munge on nodes of namespaces, from HyperPod's JSON to the end;
skipped, with the reason, where there are no rights or no Slurm."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.json_lines import read_last_line, read_lines
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.provision.cluster import Cluster, list_clusters
from phalanx.provision.config import ClusterConfig, HealthPolicy
from phalanx.provision.local import DAEMONS, LocalMachines
from phalanx.provision.namespaces import PATH, find_obstacle
from phalanx.provision.state import ClusterFolder, NodeStatus
from tests.dist import command
from tests.helpers import ALL, ROOT, wait_until
from tests.unit.test_cluster_file import PARAMETERS, group

long = pytest.mark.skipif(not ALL, reason="a whole life of a cluster: make test-all")
ON_CREATE = """#!/bin/bash
set -ex
test -f provisioning_parameters.json
grep CustomerIpAddress "$SAGEMAKER_RESOURCE_CONFIG_PATH" >/opt/created
echo run >>/opt/runs
[ ! -e FAIL_ON ] || [ "$(hostname)" != "$(cat FAIL_ON)" ] || aws s3 ls
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder of clusters and lifecycle scripts, after whose use no process and no control group is left."""
    missing = [tool for tool in DAEMONS if shutil.which(tool, path=PATH) is None]
    if (reason := find_obstacle(tmp_path)) is not None or missing:
        pytest.skip(reason or f"{missing[0]} is not installed (slurm-wlm, munge)")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "on_create.sh").write_text(ON_CREATE)
    (scripts / "provisioning_parameters.json").write_text(json.dumps(PARAMETERS))
    try:
        yield tmp_path
    finally:
        for each in list_clusters(tmp_path / "clusters"):
            Cluster(each["cluster"], tmp_path / "clusters").delete()


def write_request(place: Path, workers: int, name: str = "life") -> Path:
    source = str(place / "scripts")
    request = {
        "ClusterName": name,
        "InstanceGroups": [
            group("head", 1, "ml.m5.xlarge", source),
            group("workers", workers, "ml.p5.48xlarge", source),
        ],
    }
    path = place / f"{name}.json"
    path.write_text(json.dumps(request))
    return path


def make(place: Path, told: list[str] | None = None, **settings: Any) -> Cluster:
    report = (lambda node, text: told.append(f"{node}: {text}")) if told is not None else (lambda node, text: None)
    return Cluster("life", place / "clusters", report, **settings)


def machines(place: Path) -> LocalMachines:
    return LocalMachines(ClusterFolder(place / "clusters", "life").path)


def run(cluster: Cluster, *words: str, node: str | None = None, folder: Path | None = None) -> str:
    there = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder or "/")]
    done = subprocess.run(cluster.command([*there, *words], node), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


def leftovers(place: Path) -> list[str]:
    """Processes in control groups of the clusters of a folder, and their files."""
    labels = {LocalMachines(place / "clusters" / "life").namespaces.label}
    found = []
    for entry in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            text, state = entry.read_text(), entry.with_name("stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state == "Z":  # it has ended, and waits for this machine's process 1
            continue
        found += [f"{entry.parent.name} {label}" for label in labels if f"phalanx-{label}" in text]
    return found + [str(path) for path in (place / "clusters").glob("*")]


def wait_job(cluster: Cluster, number: str) -> str:
    def state() -> str:
        found = re.search(r"JobState=(\w+)", run(cluster, "scontrol", "show", "job", "-o", number))
        return found[1] if found else ""

    wait_until(lambda: state() in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"), 60)
    return state()


def test_a_cluster_from_hyperpods_json_runs_a_job_and_leaves_nothing(place: Path) -> None:
    told: list[str] = []
    cluster = make(place, told)
    cluster.create(write_request(place, 1), heal=False)
    assert "workers-1: in service" in told and ": ExecutionRole is passed over: no IAM role is assumed" in told
    described = cluster.describe()
    assert (described["ClusterStatus"], described["FailureMessage"]) == ("InService", "")
    assert [(each["CurrentCount"], each["TargetCount"]) for each in described["InstanceGroups"]] == [(1, 1), (1, 1)]
    number = run(cluster, "sbatch", "--parsable", "--wrap", "srun hostname > /opt/answer").strip()
    assert wait_job(cluster, number) == "COMPLETED"
    assert run(cluster, "cat", "/opt/answer", node="workers-1") == "workers-1\n"
    quiet = subprocess.run(cluster.command(["sinfo", "-h"]), capture_output=True, text=True, timeout=120)
    assert quiet.stderr == ""
    assert "10.77.0.2" in run(cluster, "cat", "/opt/created", node="workers-1")
    assert not Path("/opt/answer").exists()  # a node's disk is its own
    wait_until(lambda: cluster.nodes()[1]["health"] not in ("", "unknown"), 30)
    before = ClusterFolder(place / "clusters", "life").load().nodes
    told.clear()
    cluster.create(write_request(place, 1), heal=False)  # again: nothing is left to do
    assert [line for line in told if "passed over" not in line] == []
    assert ClusterFolder(place / "clusters", "life").load().nodes == before
    with pytest.raises(ConfigError, match="exists and was made from another description"):
        cluster.create(write_request(place, 2), heal=False)
    with pytest.raises(ConfigError, match="head-1 is the controller, whose state would be lost"):
        cluster.replace(["head-1"])
    cluster.delete()
    assert leftovers(place) == []
    with pytest.raises(ConfigError, match="no cluster life in"):
        cluster.describe()


@long
def test_a_failed_lifecycle_script_keeps_or_removes_its_node_and_spares_the_others(place: Path) -> None:
    (place / "scripts" / "FAIL_ON").write_text("workers-2")
    cluster = make(place)
    with pytest.raises(RunError) as caught:
        cluster.create(write_request(place, 2), heal=False)
    said = str(caught.value)
    assert "on_create.sh ended with code 127 on workers-2 (the node is kept" in said
    assert "it stopped at on_create.sh:6 `" in said and "aws s3 ls`, which needs AWS" in said
    rows = {row["node"]: row for row in cluster.nodes()}
    assert (rows["workers-1"]["slurm"], rows["workers-2"]["status"]) == ("idle", NodeStatus.FAILURE)
    assert cluster.describe()["ClusterStatus"] == "Failed"
    assert "aws: command not found" in cluster.log("workers-2").read_text()
    run(cluster, "rm", "/opt/phalanx/lifecycle/FAIL_ON", node="workers-2")
    (place / "clusters" / "life" / "lifecycle" / "FAIL_ON").unlink()
    cluster.create(write_request(place, 2), heal=False)
    assert {row["slurm"] for row in cluster.nodes()} == {"", "idle"}
    assert run(cluster, "cat", "/opt/runs", node="workers-1") == "run\n"  # once
    cluster.delete()
    cluster = make(place, keep_failed=False)
    with pytest.raises(RunError, match="removed"):
        cluster.create(write_request(place, 2), heal=False)
    assert machines(place).namespaces.first_process("workers-2") is None


@long
@pytest.mark.timeout(1800)
def test_a_create_that_is_killed_at_any_moment_and_repeated_ends_the_same(place: Path) -> None:
    draw, request = random.Random(7), write_request(place, 2)
    words = [sys.executable, "-m", "phalanx", "cluster", "create", str(request), "--no-heal"]
    words += ["--folder", str(place / "clusters")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    cluster, killed = make(place), 0
    for _ in range(20):
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        time.sleep(0.6 + draw.random() * 2.5)
        killed += process.poll() is None
        process.kill()
        process.communicate()
        assert subprocess.run(words, env=environment, capture_output=True, timeout=300).returncode == 0
        rows = cluster.nodes()
        assert [(row["node"], row["slurm"]) for row in rows] == [
            ("head-1", ""), ("workers-1", "idle"), ("workers-2", "idle"),
        ]  # fmt: skip
        # A script that a kill has interrupted on its node ends there, and is not run again.
        assert {run(cluster, "cat", "/opt/runs", node=row["node"]) for row in rows} == {"run\n"}
        cluster.delete()
        assert leftovers(place) == []
    assert killed >= 5


@long
def test_a_whole_life(place: Path) -> None:
    """Create, job, fault, replacement by the healer, scale up and down, update, reboot, a person's request, delete."""
    told: list[str] = []
    cluster = make(place, told)
    cluster.create(write_request(place, 3), heal=False)
    healer = threading.Thread(target=cluster.heal, args=(HealthPolicy.AUTOMATIC,), daemon=True)
    healer.start()

    (place / "work").mkdir()
    folder = command.write_place(place / "work")
    python = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable, "-m", "phalanx"]
    launch = ["launch", "recipe.yaml", "train.steps=100000", "checkpoint.every=1000000", "--ranks", "1"]
    run(cluster, *python, *launch, "--nodes", "2", "--spares", "1", "--run-dir", "run", folder=folder)
    paths = RunPaths(folder / "run")
    wait_until(lambda: int((read_last_line(paths.metrics) or {"step": 0})["step"]) > 20, 120)
    instance = {row["node"]: row["instance"] for row in cluster.nodes()}["workers-2"]
    spaces = machines(place).namespaces
    begun, last = time.monotonic(), int((read_last_line(paths.metrics) or {"step": 0})["step"])
    spaces.cut("10.77.0.3")  # power loss: the cable first
    spaces.kill("workers-2")
    wait_until(lambda: any(e["kind"] == EventKind.INCIDENT for e in read_lines(paths.events)), 60)
    wait_until(lambda: int((read_last_line(paths.metrics) or {"step": 0})["step"]) > last + 5, 60)
    resumed_s = time.monotonic() - begun
    rows: dict[str, dict[str, str]] = {}

    def replaced() -> bool:
        rows.update({row["node"]: row for row in cluster.nodes()})
        return rows["workers-2"]["instance"] != instance and rows["workers-2"]["slurm"] == "idle"

    wait_until(replaced, 120)
    replaced_s = time.monotonic() - begun
    steps = [record["step"] for record in read_steps(paths.metrics)]
    assert steps == list(range(1, steps[-1] + 1))
    resumed = next(event for event in read_lines(paths.events) if event["kind"] == EventKind.RESUMED)
    assert resumed["step"] >= last  # no committed step was lost
    print(f"job resumed {resumed_s:.1f} s after the death, node replaced after {replaced_s:.1f} s", file=sys.stderr)
    run(cluster, *python, "cancel", "run", "--now", folder=folder)
    wait_until(lambda: run(cluster, "squeue", "-h") == "", 60)

    # A person's request, in HyperPod's words.
    instance = rows["workers-1"]["instance"]
    run(cluster, "scontrol", "update", "nodename=workers-1", "state=fail", "reason=Action:Replace")
    wait_until(lambda: cluster.nodes()[1]["instance"] != instance and cluster.nodes()[1]["slurm"] == "idle", 120)

    cluster.scale("workers", 5)
    assert [row["slurm"] for row in cluster.nodes()[1:]] == ["idle"] * 5
    assert run(cluster, "srun", "-N5", "hostname").count("workers-") == 5
    number = run(cluster, "sbatch", "--parsable", "-w", "workers-5", "--wrap", "sleep 3").strip()
    wait_until(lambda: "RUNNING" in run(cluster, "scontrol", "show", "job", number), 30)
    cluster.scale("workers", 2)  # the job may end first
    assert wait_job(cluster, number) == "COMPLETED"
    assert [row["node"] for row in cluster.nodes()] == ["head-1", "workers-1", "workers-2"]

    (place / "scripts" / "on_create.sh").write_text(ON_CREATE + "echo second >>/opt/runs\n")
    cluster.update(str(place / "scripts"))
    assert run(cluster, "cat", "/opt/runs", node="workers-1") == "run\nrun\nsecond\n"
    cluster.reboot(["workers-1"])
    assert run(cluster, "cat", "/opt/runs", node="workers-1") == "run\nrun\nsecond\n"  # its disk stays
    cluster.update(rebuild=True)
    assert run(cluster, "cat", "/opt/runs", node="workers-1") == "run\nsecond\n"
    cluster.delete()
    healer.join(30)
    assert leftovers(place) == []


@long
def test_jobs_that_do_not_end_stop_a_scale_down(place: Path) -> None:
    cluster = make(place, drain_timeout_s=1.0)
    cluster.create(write_request(place, 2))
    wait_until(lambda: cluster.healer() is not None, 60)
    healer = cluster.healer()
    number = run(cluster, "sbatch", "--parsable", "-w", "workers-2", "--wrap", "sleep 600").strip()
    wait_until(lambda: "RUNNING" in run(cluster, "scontrol", "show", "job", number), 30)
    with pytest.raises(RunError, match=f"job {number} still runs on workers-2; the nodes stay drained"):
        cluster.scale("workers", 1)
    assert [row["slurm"] for row in cluster.nodes()] == ["", "idle", "draining"]
    run(cluster, "scancel", number)
    cluster.scale("workers", 1)
    assert [row["node"] for row in cluster.nodes()] == ["head-1", "workers-1"]
    cluster.delete()
    assert not Path(f"/proc/{healer}").exists() or "Z" in Path(f"/proc/{healer}/stat").read_text().rpartition(")")[2]
    assert leftovers(place) == []


@long
def test_the_administrators_settings_stay_and_preempt_jobs(place: Path) -> None:
    """Preemption by partition, as docs/clusters.md has it beside HyperPod's task governance."""
    cluster = make(place)
    cluster.create(write_request(place, 1), heal=False)
    settings = "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\nPartitionName=high Nodes=ALL PriorityTier=10\n"
    script = f"printf '{settings}' >/etc/slurm/site.conf; sh /opt/phalanx/daemons.sh restart slurmctld"
    run(cluster, "sh", "-c", script)
    wait_until(lambda: "idle" in run(cluster, "sh", "-c", "sinfo -h -p high -o %T || true"), 60)
    low = run(cluster, "sbatch", "--parsable", "--exclusive", "--wrap", "sleep 600").strip()
    wait_until(lambda: "RUNNING" in run(cluster, "scontrol", "show", "job", low), 60)
    high = run(cluster, "sbatch", "--parsable", "-p", "high", "--wrap", "sleep 1").strip()
    assert wait_job(cluster, high) == "COMPLETED"
    wait_until(lambda: "Restarts=1" in run(cluster, "scontrol", "show", "job", low), 60)
    cluster.scale("workers", 2)
    assert run(cluster, "cat", "/etc/slurm/site.conf") == settings
    assert run(cluster, "sinfo", "-h", "-p", "high", "-o", "%D").strip() == "2"


@long
def test_measured_links_decide_which_nodes_slurm_puts_together(place: Path) -> None:
    """Two switches, of which each carries much more than the link between them; a check on request measures them."""
    groups = [{"name": "head", "role": "controller"}, {"name": "workers", "count": 4, "cpus": 1}]
    told: list[str] = []
    cluster = make(place, told)
    cluster.create(ClusterConfig.model_validate({"name": "life", "groups": groups}), heal=False)
    for number in (1, 2, 3, 4):  # 1 and 3 hang on one switch, 2 and 4 on the other
        far = [f"10.77.0.{other + 1}" for other in (1, 2, 3, 4) if other % 2 != number % 2]
        shape = "tc qdisc add dev eth0 root handle 1: htb default 10; tc class add dev eth0 parent 1: classid 1:10 htb "
        shape += "rate 20gbit quantum 200000; tc class add dev eth0 parent 1: classid 1:20 htb rate 80mbit; "
        for address in far:
            shape += f"tc filter add dev eth0 parent 1: protocol ip u32 match ip dst {address} flowid 1:20; "
        run(cluster, "sh", "-ec", shape, node=f"workers-{number}")
    names = [f"workers-{number}" for number in (1, 2, 3, 4)]
    begun = time.monotonic()
    cluster.check([cluster.nodes()[1]["instance"], *names[1:]])
    print(f"four nodes checked and their links measured in {time.monotonic() - begun:.1f} s", file=sys.stderr)
    assert [row["slurm"] for row in cluster.nodes()[1:]] == ["idle"] * 4
    topology = run(cluster, "scontrol", "show", "topology")
    assert "SwitchName=switch1 Level=0" in topology and "Nodes=workers-1,workers-3" in topology
    pairs = {tuple(sorted(run(cluster, "srun", "-N2", "--switches=1", "hostname").split())) for _ in range(3)}
    assert pairs <= {("workers-1", "workers-3"), ("workers-2", "workers-4")}
    with pytest.raises(ConfigError, match="head-1 runs no jobs, so it has nothing to check; name workers"):
        cluster.check(["head-1"])
    cluster.replace(["workers-3"])  # another machine, whose links are not known
    assert "Nodes=workers-1,workers-3" not in run(cluster, "scontrol", "show", "topology")


@long
def test_findings_of_a_simulated_gpu_drain_and_heal_a_node(place: Path) -> None:
    """A node's own monitor finds a fault within 10 s and drains it; a look of the healer cures it by a reboot, which a
    GPU that cannot be reset gets as well. A daemon that has died is started again. Users work on a login node."""
    tree = {
        "name": "life",
        "groups": [
            {"name": "head", "role": "controller"},
            {"name": "login", "role": "login"},
            {"name": "workers", "count": 3, "gpus": 8, "cpus": 8},
        ],
    }
    told: list[str] = []
    cluster = make(place, told)
    cluster.create(ClusterConfig.model_validate(tree), heal=False)
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in run(cluster, "srun", "--gres=gpu:4", "env", node="login-1")

    def row() -> dict[str, str]:
        return next(each for each in cluster.nodes() if each["node"] == "workers-1")

    def break_gpu(**changes: Any) -> None:
        file = "/run/phalanx/simulated.json"
        known = json.loads(run(cluster, "cat", file, node="workers-1"))
        known["kernel"] += changes.pop("kernel", [])
        known["gpus"][3] |= changes
        text = json.dumps(known)
        run(cluster, "sh", "-c", f"echo '{text}' >{file}.new && mv {file}.new {file}", node="workers-1")

    wait_until(lambda: row()["health"] == "ok", 60)
    begun = time.monotonic()
    break_gpu(kernel=["NVRM: Xid (PCI:0000:03:00): 79, pid=1, name=python, GPU has fallen off the bus."])
    wait_until(lambda: row()["slurm"] == "drained", 60)
    print(f"drained {time.monotonic() - begun:.1f} s after the fault", file=sys.stderr)
    assert row()["health"] == "reboot" and row()["why"].startswith("phalanx reboot: the driver reported Xid 79")
    cluster.heal(HealthPolicy.TELL, once=True)
    assert row()["slurm"] == "drained" and "should: reboot it" in told[-1]
    cluster.heal(once=True)
    wait_until(lambda: (row()["slurm"], row()["health"]) == ("idle", "ok"), 60)

    break_gpu(errors={"uncorrected": 1}, recovery=1)
    wait_until(lambda: row()["slurm"] == "drained", 60)
    cluster.heal(once=True)  # there is no nvidia-smi that could reset it
    assert "workers-1: rebooted" in told
    wait_until(lambda: (row()["slurm"], row()["health"]) == ("idle", "ok"), 60)

    run(cluster, "sh", "-c", "kill -9 $(cat /run/slurmd.pid)", node="workers-1")
    wait_until(lambda: row()["slurm"] == "down*", 90)
    cluster.heal(once=True)
    wait_until(lambda: row()["slurm"] == "idle", 60)
