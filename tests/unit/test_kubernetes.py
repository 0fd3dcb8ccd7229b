"""Kubernetes objects of a run against the schemas of its API, and the commands, with a kubectl that keeps files."""

import json
import math
import os
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from phalanx.cli import root
from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import election, rendezvous_client
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.launch import job_supervisor, jobs, launched_run
from phalanx.launch.schedulers import kubernetes_manifest
from phalanx.launch.schedulers.kubernetes import Kubernetes, read_job
from phalanx.launch.schedulers.kubernetes_manifest import make_name, render_manifest
from phalanx.launch.schedulers.scheduler import LaunchOptions, QueuePhase, SchedulerNode
from tests import kubernetes_api
from tests.helpers import ROOT
from tests.kubernetes_api import VERSION, Api

RUNS = Path("/shared/runs")
RECIPE: dict[str, Any] = {
    "model": {"hidden": 1024, "layers": 12, "heads": 16, "intermediate": 4096, "vocab_size": 50000},
    "k8s": {"image": "phalanx:1", "volumes": [f"runs:{RUNS}"], "gpus_per_node": 8, "queue": "team"},
}


def configure(**k8s: Any) -> Config:
    return load.build_config({**RECIPE, "k8s": {**RECIPE["k8s"], **k8s}}, "the test")


def manifest(options: LaunchOptions, run: Path = RUNS / "my run", **k8s: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(render_manifest(configure(**k8s), RunPaths(run), options)))


def validate(found: dict[str, Any]) -> None:
    kubernetes_validate.validate(found, VERSION, strict=True)


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_job_for_one_kind_of_node(nodes: int) -> None:
    job, *services = manifest(LaunchOptions(nodes, 1 if nodes > 1 else 0, until_done=True))
    for each in (job, *services):
        validate(each)
    total = nodes + (nodes > 1)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == total
    assert [service["kind"] for service in services] == ["Service"] * (nodes > 1)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {each["name"]: each for each in container["env"]}
    assert ("PHALANX_SECRET" in environment) == (nodes > 1)
    assert "value" not in environment.get("PHALANX_SECRET", {})
    (memory,) = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
    parameters = 12 * (4 * 1024**2 + 3 * 1024 * 4096) + 2 * 50000 * 1024
    least = 24 * parameters * (2 if nodes > 1 else 1) / nodes / 2**30
    assert memory["medium"] == "Memory" and least < int(memory["sizeLimit"].removesuffix("Gi")) < least + 3
    assert least + 1 <= shared_gib(nodes) == int(memory["sizeLimit"].removesuffix("Gi")) < least + 2
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def shared_gib(nodes: int, **changes: Any) -> int:
    """GiB of shared memory, of pods with eight GPUs unless `changes` of the recipe's sections say otherwise."""
    tree = {**RECIPE, **{name: {**RECIPE.get(name, {}), **keys} for name, keys in changes.items()}}
    text = render_manifest(load.build_config(tree, "the test"), RunPaths(RUNS / "one"), LaunchOptions(nodes))
    pod = next(iter(yaml.safe_load_all(text)))["spec"]["template"]["spec"]
    size = next(each["emptyDir"]["sizeLimit"] for each in pod["volumes"] if "emptyDir" in each)
    return int(size.removesuffix("Gi"))


def test_shared_memory_is_that_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 304 million parameters two steps are 6.8 GiB with AdamW; a CPU keeps the gradient as well."""
    monkeypatch.setattr("phalanx.autotune.dry_run.compute_activation_bytes", lambda *_: (0, 0, 0))  # not asked for
    assert shared_gib(1) == math.ceil(6.8 + 1)
    assert shared_gib(2) == math.ceil(6.8 + 1)  # half of that, and as much of a replica
    assert shared_gib(1, optim={"name": "adamw8bit"}) < shared_gib(1)
    assert shared_gib(2, k8s={"gpus_per_node": None}) > shared_gib(2)
    assert shared_gib(2, resilience={"in_memory_checkpoints": False}) == 1


def test_a_job_set_for_several_pools() -> None:
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # which takes a second

    (found,) = manifest(LaunchOptions(3), partition=["a100:2", "h100:1"])
    assert (found["kind"], found["spec"]["network"]["subdomain"]) == ("JobSet", found["metadata"]["name"])
    offsets, pools = [], []
    for each in found["spec"]["replicatedJobs"]:
        template = each["template"]
        validate(
            {"apiVersion": "batch/v1", "kind": "Job", **template, "metadata": {"name": "x", **template["metadata"]}}
        )
        pod = template["spec"]["template"]["spec"]
        environment = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
        offsets.append(environment["PHALANX_K8S_OFFSET"])
        pools.append(list(pod["nodeSelector"].values()))
        name = found["metadata"]["name"]
        assert environment["PHALANX_K8S_ADDRESS"] == f"{name}-pool-0-0-0.{name}:29400"
    assert (offsets, pools) == (["0", "2"], [["a100"], ["h100"]])
    read = JobsetV1alpha2JobSet.from_dict(found)
    assert read is not None and read.to_dict() == found  # what the schema does not have would be missing


def test_what_follows_the_end_of_a_pod() -> None:
    def actions(until_done: bool) -> dict[int | str, str]:
        (job,) = manifest(LaunchOptions(1, until_done=until_done))
        found: dict[int | str, str] = {}
        for rule in job["spec"]["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes", {}).get("values") or [rule["onPodConditions"][0]["type"]]
            found |= dict.fromkeys(codes, rule["action"])
        return found

    fatal: dict[int | str, str] = {
        ExitCode.CONFIG: "FailJob",
        ExitCode.OUT_OF_MEMORY: "FailJob",
        ExitCode.UNHEALTHY: "Count",
    }
    assert actions(False) == {"DisruptionTarget": "Ignore", ExitCode.STOPPED: "FailJob", **fatal}
    assert actions(True) == {"DisruptionTarget": "Ignore", ExitCode.STOPPED: "Count", **fatal}
    limits = [
        manifest(LaunchOptions(3, 1, until_done=until_done, max_jobs=5))[0]["spec"]["backoffLimit"]
        for until_done in (False, True)
    ]
    assert limits == [4, 20]


@pytest.mark.parametrize(
    ("changes", "run", "words"),
    [
        ({"image": None}, RUNS / "a", "k8s.image is not set"),
        ({}, Path("/home/me/run"), "is on no volume of the pods"),
        ({"volumes": ["Claim:/shared"]}, RUNS / "a", "write each as CLAIM:/PATH"),
        ({"volumes": ["claim"]}, RUNS / "a", "write each as CLAIM:/PATH"),
        ({"time": "soon"}, RUNS / "a", "is not a time"),
        ({"partition": ["a", "b"]}, RUNS / "a", "has no number of nodes"),
    ],
)
def test_what_could_not_run_is_refused(changes: dict[str, Any], run: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        manifest(LaunchOptions(1), run, **changes)


def test_names_are_valid_short_and_differ() -> None:
    names = [make_name(RUNS / name) for name in ("My_Run", "my-run", "x" * 200, "..", "é")]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 40 and name.startswith("phalanx-") and name.isascii() for name in names)


# ------------------------------------------------------------------------------------------------------- by commands

KUBECTL = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
import yaml
words, store = sys.argv[1:], Path(os.environ["FAKE_CLUSTER"])
with open(store / "calls", "a") as calls:
    calls.write(" ".join(words) + "\\n")
given = "" if sys.stdin.isatty() else sys.stdin.read()
verb = next(word for word in words if not word.startswith("-") and word != "lab")
objects = {{path.name: json.loads(path.read_text()) for path in store.glob("*.json")}}
if verb == "create":
    for each in yaml.safe_load_all(given):
        name = each["kind"] + "-" + each["metadata"]["name"] + ".json"
        if name in objects:
            sys.exit("Error from server (AlreadyExists): " + name)
        (store / name).write_text(json.dumps(each))
elif verb == "delete" and "jobsets" in words[1]:
    sys.exit("error: the server doesn't have a resource type \\"jobsets\\"")
elif verb == "delete":
    for name in objects:
        (store / name).unlink()
elif verb == "get" and "nodes" in words:
    ready = {{"type": "Ready", "status": "True"}}
    node = {{"metadata": {{"name": "n1"}}, "spec": {{}}, "status": {{"conditions": [ready]}}}}
    print(json.dumps({{"items": [node]}}))
elif verb == "get":
    print(json.dumps({{"items": [each for each in objects.values() if each["kind"] in ("Job", "Pod")]}}))
elif verb == "logs":
    print("step 7")
elif verb not in ("cordon", "uncordon", "annotate"):
    sys.exit("error: unknown command")
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the objects of a cluster, whose kubectl is on the PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").write_text(KUBECTL)
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    store = tmp_path / "cluster"
    store.mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLUSTER", str(store))
    return store


def test_a_run_is_submitted_watched_and_cancelled(cluster: Path, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs" / "one")
    config = configure(volumes=[f"runs:{tmp_path}"], namespace="lab")
    said = jobs.submit_run("k8s", config, paths, LaunchOptions(2), {})
    name = make_name(paths.root)
    assert said == f"job lab/{name} of Kubernetes"
    made = {path.stem: json.loads(path.read_text()) for path in cluster.glob("*.json")}
    assert sorted(made) == [f"{kind}-{name}" for kind in ("Job", "Secret", "Service")]
    secret = made[f"Secret-{name}"]["stringData"]["secret"]
    assert len(secret) == 64 and secret not in paths.launch_script.read_text()
    assert "lab" in (cluster / "calls").read_text()
    state = launched_run.describe_scheduler_state(paths)
    assert state is not None and (state["by"], state["state"]) == ("k8s", "Pending")
    with pytest.raises(ConfigError, match="already"):
        jobs.submit_run("k8s", config, paths, LaunchOptions(2), {})
    found = Kubernetes()
    assert found.find_log(paths, f"lab/{name}").read_text() == "step 7\n"
    pod = {"PHALANX_K8S_JOB": name, "PHALANX_K8S_OFFSET": "2", "JOB_COMPLETION_INDEX": "1",
           "PHALANX_K8S_ADDRESS": "host:1"}  # fmt: skip
    task = found.read_task(pod, paths)
    assert task is not None and (task.node, found.find_rendezvous(paths, task)) == (3, "tcp://host:1")
    jobs.cancel_run(paths, now=False)
    assert not list(cluster.glob("*.json"))
    calls = (cluster / "calls").read_text().splitlines()
    assert any(line.startswith("delete jobs,") and "--wait=false --cascade=foreground" in line for line in calls)


@pytest.mark.parametrize(
    ("codes", "ends"), [([1, 1], True), ([1, 3, 3], False), ([1], False), ([10, 10], True), ([0], False)]
)
def test_starts_of_pods_without_progress_end_the_job(
    codes: list[int], ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After starts that ended with `codes` without a checkpoint, one more fails. Nodes that left do not count, and
    after a run that is done no pod trains."""
    paths, pod = RunPaths(tmp_path), {"PHALANX_K8S_JOB": "run", "PHALANX_K8S_OFFSET": "0", "JOB_COMPLETION_INDEX": "0"}
    paths.launch.mkdir(parents=True)
    launched_run.write_launch_spec(paths, launched_run.LaunchSpec("k8s", 1, 0, None, True, 100, 0.0, "here"))
    started: list[int] = []

    def train(*_: object) -> list[str]:
        started.append(codes[len(started)] if len(started) < len(codes) else 1)
        return [sys.executable, "-c", f"raise SystemExit({started[-1]})"]

    monkeypatch.setattr(job_supervisor, "train_command", train)
    found = [job_supervisor.supervise(tmp_path, pod) for _ in [*codes, 1]]
    assert found == [*codes, ExitCode.CONFIG if ends else 1 if codes[0] else 0]
    assert len(started) == (len(found) if codes[0] else 1)


@pytest.mark.parametrize(
    ("code", "led", "seen"),
    [(1, False, ExitCode.CONFIG), (1, True, 1), (3, False, ExitCode.UNHEALTHY), (11, False, ExitCode.OUT_OF_MEMORY)],
)
def test_a_pod_alone_does_not_end_a_run_that_others_continue(
    code: int, led: bool, seen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two starts without a checkpoint: a pod that was cut off, or is unfit, is replaced and joins the others."""
    paths = RunPaths(tmp_path)
    paths.launch.mkdir(parents=True)
    launched_run.write_launch_spec(paths, launched_run.LaunchSpec("k8s", 2, 0, None, True, 100, 0.0, "here"))
    for number in (1, 2):
        paths.start_outcome(f"run-{number}").write_text("1 again 0 0\n")
    election.claim(paths, 1, {"leader": 0, "address": ["10.0.0.7", 29400]})
    monkeypatch.setattr(
        rendezvous_client, "is_run_active", lambda *there: led and there == (("10.0.0.7",), 29400, "s" * 16)
    )
    monkeypatch.setattr(job_supervisor, "train_command", lambda *_: [sys.executable, "-c", f"raise SystemExit({code})"])
    monkeypatch.setattr(job_supervisor, "NODE0_OUTCOME_WAIT_S", 0.0)
    pod = {"PHALANX_K8S_JOB": "run", "PHALANX_K8S_OFFSET": "0", "JOB_COMPLETION_INDEX": "1", "PHALANX_SECRET": "s" * 16}
    assert job_supervisor.supervise(tmp_path, pod) == seen


def test_a_pod_that_is_deleted_alone_is_replaced() -> None:
    k8s = Kubernetes()
    assert k8s.exit_code(ExitCode.STOPPED, leaves=True, ends=False) == ExitCode.UNHEALTHY
    assert k8s.exit_code(ExitCode.STOPPED, leaves=False, ends=False) == ExitCode.STOPPED


def test_nodes_are_listed_and_cordoned(cluster: Path) -> None:
    found = Kubernetes()
    assert [(node.name, node.state) for node in found.list_nodes()] == [("n1", "ready")]
    assert found.set_node_state("n1", NodeRequestKind.DRAIN, "a fan is loud") == "cordoned"
    assert found.set_node_state("n1", NodeRequestKind.RETURN, None) == "schedulable"
    calls = (cluster / "calls").read_text()
    assert "cordon n1\nannotate --overwrite node n1 phalanx/reason=a fan is loud\nuncordon n1\n" in calls
    with pytest.raises(ConfigError, match="replaces no nodes"):
        found.set_node_state("n1", NodeRequestKind.REPLACE, None)


def test_a_kubectl_that_fails_or_is_not_there_says_why(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cluster.parent / "bin" / "kubectl").write_text("#!/bin/sh\necho 'error: no configuration' >&2; exit 1\n")
    with pytest.raises(RunError, match="kubectl get failed: no configuration"):
        Kubernetes().list_nodes()
    (cluster.parent / "bin" / "kubectl").write_text("#!/bin/sh\necho nonsense\n")
    with pytest.raises(RunError, match="no list of objects"):
        Kubernetes().list_nodes()
    monkeypatch.setenv("PATH", str(cluster))
    with pytest.raises(ConfigError, match="kubectl was not found"):
        Kubernetes().list_nodes()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """A cluster for the real kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (kubernetes-client)")
    with kubernetes_api.serving(tmp_path) as (made, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        monkeypatch.setenv("HOME", str(tmp_path))  # where it caches what a cluster has
        yield made


@pytest.mark.parametrize(
    ("partition", "kinds"), [([], ["jobs", "secrets", "services"]), (["a:1", "b:1"], ["jobsets", "secrets"])]
)
def test_real_kubectl_makes_finds_and_deletes_the_objects(
    api: Api, tmp_path: Path, partition: list[str], kinds: list[str]
) -> None:
    """Objects as kubectl sends them, against their schemas; a cluster without JobSets where none is needed."""
    if not partition:
        del api.groups["/apis/jobset.x-k8s.io/v1alpha2"]
    api.add("pods", "of-another-run", metadata={"labels": {"phalanx/run": "another"}})
    paths = RunPaths(tmp_path / "run")
    config = configure(volumes=[f"runs:{tmp_path}"], partition=partition, namespace="default")
    jobs.submit_run("k8s", config, paths, LaunchOptions(2), {})
    name = make_name(paths.root)
    number = f"default/{name}"
    made = {path: each for path, each in api.objects.items() if path.endswith(f"/{name}")}
    assert sorted(path.split("/")[-2] for path in made) == kinds
    sent = [each for path, each in made.items() if "/secrets/" not in path]
    assert sent == list(yaml.safe_load_all(paths.launch_script.read_text()))
    api.add("pods", "one", metadata={"labels": {"phalanx/run": name}}, spec={"nodeName": "n1", "containers": []})
    if not partition:  # of a JobSet its controller makes jobs
        found = Kubernetes().query_job(number)
        assert found is not None and (found.state, found.nodes) == ("Pending", "n1")
    jobs.cancel_run(paths, now=True) if not partition else Kubernetes().cancel(number)
    assert list(api.objects) == ["/api/v1/namespaces/default/pods/of-another-run"]


def test_real_kubectl_lists_cordons_and_uncordons_nodes(api: Api) -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    api.add("nodes", "n1", spec={}, status=ready)
    k8s = Kubernetes()
    k8s.set_node_state("n1", NodeRequestKind.DRAIN, "a fan is loud")
    assert k8s.list_nodes() == [SchedulerNode("n1", "ready, cordoned", "a fan is loud")]
    k8s.set_node_state("n1", NodeRequestKind.RETURN, None)
    assert k8s.list_nodes() == [SchedulerNode("n1", "ready", "")]


def job(*true: str, **status: Any) -> dict[str, Any]:
    conditions = [{"type": name, "status": "True", "reason": f"{name}Reason"} for name in true]
    return {"kind": "Job", "metadata": {}, "status": {"conditions": conditions, **status}}


@pytest.mark.parametrize(
    ("items", "state", "phase"),
    [
        ([job(active=2)], "Pending", QueuePhase.WAITS),
        ([job(active=2, ready=1)], "Running", QueuePhase.RUNS),
        ([job("Complete")], "Complete", QueuePhase.OVER),
        ([job("Complete"), job(active=1, ready=1)], "Running", QueuePhase.RUNS),
        ([job("Failed"), job(active=1, ready=1)], "Failed", QueuePhase.OVER),
        ([job("Suspended")], "Suspended", QueuePhase.WAITS),
        ([{**job(active=1), "metadata": {"deletionTimestamp": "now"}}], "Terminating", QueuePhase.ENDS),
    ],
)
def test_the_state_of_a_run_is_read_from_its_jobs(items: list[dict[str, Any]], state: str, phase: QueuePhase) -> None:
    pod = {"kind": "Pod", "metadata": {}, "spec": {"nodeName": "n1"}}
    found = read_job("name", json.dumps({"items": [*items, pod]}))
    assert found is not None and (found.state, found.phase, found.nodes) == (state, phase, "n1")
    assert read_job("name", json.dumps({"items": [pod]})) is None


# ------------------------------------------------------------------------------------------------------ what is there


def test_the_runtime_for_kubeflow_holds_a_valid_job_that_reads_its_variables() -> None:
    runtime = yaml.safe_load((ROOT / "contrib/kubernetes/kubeflow-runtime.yaml").read_text())
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    spec["template"]["spec"].setdefault("restartPolicy", "Never")  # Trainer's own default
    validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec})
    (container,) = spec["template"]["spec"]["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"][-1] == kubernetes_manifest.LEAVE
    (arguments,) = container["args"]
    words = shlex.split(arguments.replace("$PET_NNODES", "3").replace("$PET_NODE_RANK", "2"))
    named = dict(zip(words[6::2], words[7::2], strict=True))
    assert (named["--nodes"], named["--node-rank"]) == ("3", "2")
    assert named["--rendezvous"] == "tcp://$PET_MASTER_ADDR:$PET_MASTER_PORT"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_dockerfiles_use_the_pins_and_name_what_is_there(kind: str) -> None:
    text = (ROOT / f"contrib/docker/Dockerfile.{kind}").read_text()
    assert "grep '^torch==' /src/constraints.txt" in text and "--constraint /src/constraints.txt" in text
    extra = text.partition('"/src[')[2].partition("]")[0]
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "procps" in text  # `kill`, by which a pod's node leaves, is the shell's; `ps` is for its user


def test_the_command_line_prints_the_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    words = ["launch", str(recipe), "--on", "k8s", "--dry-run", "--run-dir", str(RUNS / "one"), "--gpus-per-node", "4"]
    with pytest.raises(SystemExit) as left:
        run_command(words)
    assert left.value.code == 0
    (job,) = yaml.safe_load_all(capsys.readouterr().out)
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "4"}
    with pytest.raises(SystemExit):
        run_command([*words, "--account", "lab"])
    assert "--account has no effect with Kubernetes" in capsys.readouterr().err


def run_command(words: list[str]) -> None:
    sys.argv = ["phalanx", *words]
    root.main()
