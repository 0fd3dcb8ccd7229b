"""Descriptions of clusters: HyperPod's JSON and our YAML, with all mistakes at once."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.core.errors import ConfigError
from phalanx.provision import lifecycle
from phalanx.provision.cluster_file import read_cluster_file
from phalanx.provision.config import DeepCheck, HealthPolicy, NodeRole, build_config, dump_config
from phalanx.provision.example_files import render_file
from phalanx.provision.lifecycle import (
    FOLDER,
    TOOL_FILES,
    TOOLS,
    explain_failure,
    find_aws_lines,
    make_run_script,
    read_exit_code,
)

PARAMETERS = {
    "version": "1.0.0",
    "workload_manager": "slurm",
    "controller_group": "head",
    "worker_groups": [{"instance_group_name": "workers", "partition_name": "dev"}],
}
ROLE = "arn:aws:iam::111122223333:role/any"


def group(name: str, count: Any, kind: str, source: str) -> dict[str, Any]:
    return {
        "InstanceGroupName": name,
        "InstanceType": kind,
        "InstanceCount": count,
        "LifeCycleConfig": {"SourceS3Uri": source, "OnCreate": "on_create.sh"},
        "ExecutionRole": ROLE,
        "ThreadsPerCore": 1,
        "InstanceStorageConfigs": [{"EbsVolumeConfig": {"VolumeSizeInGB": 500}}],
    }


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "on_create.sh").write_text("true\n")
    (folder / "provisioning_parameters.json").write_text(json.dumps(PARAMETERS))
    return folder


@pytest.fixture
def request_tree(scripts: Path) -> dict[str, Any]:
    """What CreateCluster takes, every field of it that a Slurm cluster has."""
    groups = [
        group("head", 1, "ml.m5.xlarge", str(scripts)),
        group("workers", 7, "ml.p5.48xlarge", str(scripts)) | {"OnStartDeepHealthChecks": ["InstanceStress"]},
    ]
    return {
        "ClusterName": "demo",
        "InstanceGroups": groups,
        "VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]},
        "NodeRecovery": "Automatic",
        "Tags": [{"Key": "a", "Value": "b"}],
        "Orchestrator": {"Slurm": {"SlurmConfigStrategy": "Managed"}},
    }


def read(tmp_path: Path, text: str, **options: Any) -> Any:
    path = tmp_path / ("c.json" if text.lstrip().startswith("{") else "c.yaml")
    path.write_text(text)
    return read_cluster_file(path, **options)


def test_hyperpods_json_is_read_unchanged(tmp_path: Path, request_tree: dict[str, Any]) -> None:
    config, passed = read(tmp_path, json.dumps(request_tree))
    assert config.name == "demo" and config.provider == "local"
    assert [(each.name, each.count, each.role, each.partition) for each in config.groups] == [
        ("head", 1, NodeRole.CONTROLLER, None),
        ("workers", 7, NodeRole.WORKER, "dev"),
    ]
    assert config.groups[1].deep_checks == (DeepCheck.STRESS,)
    assert config.health_policy == HealthPolicy.AUTOMATIC
    fields = {sentence.split(" is passed over: ")[0] for sentence in passed}
    assert fields == {
        "ExecutionRole", "InstanceStorageConfigs", "ThreadsPerCore", "VpcConfig", "Tags", "InstanceType", "Slurm",
    }  # fmt: skip
    assert build_config(dump_config(config), [], "state") == config  # as the state keeps it
    amazon, passed = read(tmp_path, json.dumps(request_tree), provider="sagemaker")
    assert (amazon.hyperpod, passed) == (request_tree, [])
    head, workers = request_tree["InstanceGroups"]
    head["SlurmConfig"] = {"NodeType": "Controller"}
    workers |= {"MinInstanceCount": 3, "SlurmConfig": {"NodeType": "Compute", "PartitionNames": ["dev", "big"]}}
    for each in (head, workers):
        each["LifeCycleConfig"]["OnInitComplete"] = "later.sh"
    _, passed = read(tmp_path, json.dumps(request_tree))
    for word in ("MinInstanceCount is", "OnInitComplete is", "PartitionNames after the first are"):
        assert sum(sentence.startswith(f"{word} passed over") for sentence in passed) == 1, word


def test_all_mistakes_of_a_json_are_told_at_once_with_what_was_meant(
    tmp_path: Path, request_tree: dict[str, Any]
) -> None:
    head, workers = request_tree["InstanceGroups"]
    head["LifecycleConfig"] = head.pop("LifeCycleConfig")
    head["InstanceType"] = "m5.xlarge"
    workers["InstanceCount"] = 0
    workers["OnStartDeepHealthChecks"] = ["InstanceStres"]
    request_tree["NodeRecovry"] = "Automatic"
    text = json.dumps(request_tree, indent=1).replace('"ThreadsPerCore": 1', '"ThreadsPerCore": True', 1)
    text = text[: text.rindex("}")].rstrip() + ",\n}"
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    said = str(caught.value)
    for sentence in (
        "True is Python's; JSON has true",
        "a comma before a closing bracket; remove it",
        "unknown key InstanceGroups[0].LifecycleConfig; did you mean LifeCycleConfig?",
        "InstanceGroups[0].InstanceType must be an instance type such as ml.p5.48xlarge, not 'm5.xlarge'; did you mean "
        "ml.m5.xlarge?",
        "InstanceGroups[1].InstanceCount must be >= 1, not 0 (remove the group if it has no node)",
        "InstanceGroups[1].OnStartDeepHealthChecks[0] must be InstanceStress or InstanceConnectivity, not",
        "did you mean InstanceStress?",
        "unknown key NodeRecovry; did you mean NodeRecovery?",
    ):
        assert sentence in said, said
    with pytest.raises(ConfigError, match="line 2: not valid JSON"):
        read(tmp_path, '{"ClusterName":\n "a" "b"}')


def test_a_json_whose_scripts_and_groups_disagree(tmp_path: Path, request_tree: dict[str, Any], scripts: Path) -> None:
    request_tree["InstanceGroups"][1]["SlurmConfig"] = {"NodeType": "Login"}
    parameters = PARAMETERS | {"controller_group": "controller-machine"}
    (scripts / "provisioning_parameters.json").write_text(json.dumps(parameters))
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, json.dumps(request_tree))
    said = str(caught.value)
    assert "names the group controller-machine, which is none of head, workers" in said
    assert "group workers is login by SlurmConfig and worker by provisioning_parameters.json" in said
    assert "one group with count 1 must have the role controller, where slurmctld runs (found: none)" in said
    request_tree["Orchestrator"] = {"Eks": {"ClusterArn": "arn"}}
    with pytest.raises(ConfigError, match=r"Orchestrator\.Eks is Kubernetes"):
        read(tmp_path, json.dumps(request_tree))


YAML = """
name: my
groups:
  - {name: controller, role: controller}
  - {name: workers, count: 2}
"""


def test_yaml(tmp_path: Path) -> None:
    config, _ = read(tmp_path, YAML)
    assert (config.controller.name, config.group("workers").count) == ("controller", 2)
    hosts = ["a", "b", "c", "d"]
    assert read(tmp_path, YAML, provider="ssh", hosts=hosts, scripts="x")[0].hosts == tuple(hosts)
    with pytest.raises(ConfigError, match="cluster my has no group worker; it has controller, workers"):
        config.group("worker")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("count: 2", "count: true"), "count must be a whole number, not true"),
        (("count: 2", "cont: 2"), r"unknown key groups\[1\].cont; did you mean count\?"),
        (("role: controller", "role: controler"), r"did you mean controller\?"),
        (("name: my", "name: my\nprovider: slurm"), "provider must be local or ssh or sagemaker, not"),
        (("name: my", "name: my\nprovider: ssh\nhosts: [a]"), "3 nodes need as many hosts, and 1 are given"),
        (("name: my", "name: my\nprovider: ssh\nhosts: [-oProxy, b, c]"), "a host may not begin with -"),
        (("name: my", "name: my\nhosts: [a]"), "hosts has no effect with the provider local"),
        (("name: my", "name: ../x"), "name is .*, but must match"),
        (("name: my", "name: my\nprovider: sagemaker"), "needs HyperPod's create-cluster JSON"),
        (("name: workers", "name: controller"), "two groups have the name controller"),
    ],
)
def test_mistakes_of_a_yaml(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(tmp_path, YAML.replace(*change))


@pytest.mark.parametrize("provider", ["local", "ssh", "sagemaker"])
def test_what_init_writes_can_be_read(tmp_path: Path, provider: str) -> None:
    hosts = ["a", "b", "c"] if provider == "ssh" else []
    text, _ = render_file("my", provider, 2, hosts)
    config, _ = read(tmp_path, text, provider="sagemaker" if provider == "sagemaker" else None)
    assert (config.name, config.provider, config.hosts) == ("my", provider, tuple(hosts))


def test_scripts_at_a_url_stay_in_their_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(url="s3://bucket/scripts/../../.ssh/authorized_keys", folder=False)
    monkeypatch.setattr(lifecycle.storage, "list_folder", lambda source, recursive: [entry])
    monkeypatch.setattr(lifecycle.storage, "read_bytes", lambda url: b"key")
    with pytest.raises(ConfigError, match="outside of its folder"):
        lifecycle.fetch_scripts("s3://bucket/scripts/")


def test_the_line_of_a_script_that_needs_aws_is_named() -> None:
    scripts = {"on_create.sh": b"set -ex\naws s3 cp s3://a b\n", "x.sh": b"# aws s3\ncurl http://169.254.169.254/\n"}
    assert find_aws_lines(scripts) == ["on_create.sh:2 `aws s3 cp s3://a b`", "x.sh:2 `curl http://169.254.169.254/`"]
    output = "+ aws s3 cp s3://a b\nbash: aws: not found\n"
    said = explain_failure(output, scripts, ["on_create.sh:2"])
    assert "it stopped at on_create.sh:2 `aws s3 cp s3://a b`, which needs AWS" in said
    said = explain_failure("CalledProcessError: Command '['sudo', 'bash', './x.sh']' returned 1\n", scripts)
    assert "AWS, or the image of its machines, is needed by x.sh:2 `curl http://169.254.169.254/`" in said
    assert explain_failure("boom\n", scripts).strip() == "boom"  # nothing is blamed that did not fail


def test_the_line_where_nested_scripts_stopped_is_found(tmp_path: Path) -> None:
    """The files of a node as bash runs them, in a folder of this machine; the shape is that of HyperPod's base scripts:
    on_create.sh, a Python script that calls `sudo bash`, and a script within that."""
    scripts = {
        "on_create.sh": b"#!/bin/bash\nset -ex\n: $SAGEMAKER_RESOURCE_CONFIG_PATH\n"
        b"python3 main.py > >(sleep 0.2; cat) 2>&1\n",
        "main.py": b"import subprocess\nsubprocess.run(['sudo', '-E', 'bash', './harmless.sh'])\n"
        b"subprocess.run(['sudo', 'bash', './outer.sh'], check=True)\n",
        "harmless.sh": b"set -e\nfalse || true\nset +e\nfalse\n",
        "outer.sh": b"set -e\nmain() {\n  bash -x utils/inner.sh\n}\nmain\n",
        "utils/inner.sh": b"set -exuo pipefail\nVERSION=$(modinfo -F version nosuchmodule)\n",
    }
    files = {**scripts, **{f"tools/{Path(path).name}": text.encode() for path, text in TOOL_FILES.items()}}
    for name, data in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data.replace(b"/run/phalanx", str(tmp_path).encode()))
        path.chmod(0o755)

    def run() -> tuple[int, str, list[str]]:
        script = make_run_script("on_create.sh", "digest")
        for there in ("/run/phalanx", "/var/lib/phalanx", FOLDER):
            script = script.replace(there, str(tmp_path))
        script = script.replace(TOOLS, str(tmp_path / "tools"))
        done = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return read_exit_code(done.stdout)

    code, output, places = run()
    assert (code, places) == (1, ["utils/inner.sh:2", "outer.sh:3", "on_create.sh:4"])
    assert "phalanx" not in output
    said = explain_failure(output, scripts, places)
    assert "it stopped at utils/inner.sh:2 `VERSION=$(modinfo -F version nosuchmodule)`" in said
    (tmp_path / "outer.sh").write_text("echo well\n")
    code, output, places = run()  # what a script has left running writes after it has ended
    assert (code, places) == (0, []) and output.rstrip().endswith("well")
    assert run()[:2] == (0, "")  # once
