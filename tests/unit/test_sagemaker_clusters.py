"""Clusters of SageMaker HyperPod: a life against moto's server, and by botocore's Stubber what moto does not have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import ConfigError, RunError
from phalanx.provision.cluster import Cluster
from phalanx.provision.cluster_file import read_cluster_file
from phalanx.provision.sagemaker import SageMakerCluster, make_client
from phalanx.provision.state import ClusterFolder, ClusterState, ClusterStatus
from tests.stores import S3Server
from tests.unit.test_cluster_file import group

boto3 = pytest.importorskip("boto3")
stub = pytest.importorskip("botocore.stub")
REQUEST = {
    "ClusterName": "amazon",
    "InstanceGroups": [
        group("head", 1, "ml.c5n.large", "s3://sagemaker-x/scripts"),
        group("workers", 2, "ml.p5.48xlarge", "s3://sagemaker-x/scripts"),
    ],
    "VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]},
}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)


def write(tmp_path: Path) -> Path:
    path = tmp_path / "amazon.json"
    path.write_text(json.dumps(REQUEST))
    return path


def test_a_life_at_motos_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = S3Server(tmp_path / "log")
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
        told: list[str] = []
        config, passed = read_cluster_file(write(tmp_path), "sagemaker")
        assert passed == []
        cluster = Cluster("amazon", tmp_path / "clusters", lambda node, text: told.append(f"{node}: {text}"))
        cluster.create(config)
        assert "workers-1: Running: message" in told
        described = cluster.describe()
        assert (described["ClusterStatus"], described["Provider"]) == ("InService", "sagemaker")
        assert [each["TargetCount"] for each in described["InstanceGroups"]] == [1, 2]
        rows = {row["node"]: (row["group"], row["status"], row["host"]) for row in cluster.nodes()}
        assert rows["workers-0"] == ("workers", "Running", "ml.p5.48xlarge")
        told.clear()
        cluster.create(config)  # again
        assert ": requested" not in told
        with pytest.raises(ConfigError, match="healing is AWS's own with the provider sagemaker"):
            cluster.heal(once=True)
        cluster.delete()
        assert not (tmp_path / "clusters" / "amazon").exists()
        with pytest.raises(ConfigError, match="no cluster amazon"):
            cluster.delete()
    finally:
        server.close()


# ------------------------------------------------------------------------------------------------------------ stubbed


@pytest.fixture
def stubbed(tmp_path: Path) -> Iterator[tuple[SageMakerCluster, Any, list[str]]]:
    client, told = make_client("us-east-1"), list[str]()
    folder = ClusterFolder(tmp_path / "clusters", "amazon")
    folder.path.mkdir(parents=True)
    folder.save(ClusterState(read_cluster_file(write(tmp_path), "sagemaker")[0]))
    with stub.Stubber(client) as answers:
        report = lambda node, text: told.append(f"{node}: {text}")  # noqa: E731
        yield SageMakerCluster(folder, report, client, poll_s=0.0), answers, told
        answers.assert_no_pending_responses()


def described(status: str, workers: int = 2, message: str = "") -> dict[str, Any]:
    groups = [
        {"InstanceGroupName": each["InstanceGroupName"], "InstanceType": each["InstanceType"], "CurrentCount": count,
         "TargetCount": count, "LifeCycleConfig": each["LifeCycleConfig"], "ExecutionRole": each["ExecutionRole"],
         "ThreadsPerCore": 1}
        for each, count in zip(REQUEST["InstanceGroups"], (1, workers), strict=True)  # type: ignore[call-overload]
    ]  # fmt: skip
    arn = "arn:aws:sagemaker:us-east-1:111122223333:cluster/abcdefghijkl"
    return {"ClusterArn": arn, "ClusterStatus": status, "InstanceGroups": groups, "FailureMessage": message}


def listed(*statuses: str) -> dict[str, Any]:
    return {
        "ClusterNodeSummaries": [
            {"InstanceGroupName": "workers", "InstanceId": f"i-{number:010x}", "InstanceType": "ml.p5.48xlarge",
             "LaunchTime": 0, "InstanceStatus": {"Status": status}}
            for number, status in enumerate(statuses)
        ]
    }  # fmt: skip


NAMED = {"ClusterName": "amazon"}
LISTING = NAMED | {"MaxResults": 100}


def wait_answers(answers: Any, *statuses: str) -> None:
    for status in statuses:
        answers.add_response("list_cluster_nodes", listed("Running", "Pending"), LISTING)
        answers.add_response("describe_cluster", described(status, message="no capacity"), NAMED)


def test_scale_changes_the_count_of_one_group(stubbed: tuple[SageMakerCluster, Any, list[str]]) -> None:
    cluster, answers, told = stubbed
    answers.add_response("describe_cluster", described("InService"), NAMED)
    groups = [
        {key: value for key, value in each.items() if key != "InstanceStorageConfigs"} | {"InstanceCount": count}
        for each, count in zip(REQUEST["InstanceGroups"], (1, 4), strict=True)  # type: ignore[call-overload]
    ]
    answer = {"ClusterArn": described("Updating")["ClusterArn"]}
    answers.add_response("update_cluster", answer, NAMED | {"InstanceGroups": groups})
    wait_answers(answers, "Updating", "InService")
    cluster.scale("workers", 4)
    assert told == ["i-0000000000: Running", "i-0000000001: Pending"]
    with pytest.raises(ConfigError, match="has no group x"):
        cluster.scale("x", 4)


def test_reboot_and_replace_go_25_at_a_time_and_refusals_are_named(
    stubbed: tuple[SageMakerCluster, Any, list[str]],
) -> None:
    cluster, answers, _ = stubbed
    names = [f"i-{number:010x}" for number in range(30)]
    for part in (names[:25], names[25:]):
        answers.add_response("batch_replace_cluster_nodes", {"Successful": part}, NAMED | {"NodeIds": part})
    wait_answers(answers, "InService")
    cluster.replace(names)
    failed = {"NodeId": names[0], "ErrorCode": "InstanceIdNotFound", "Message": "no such node"}
    answers.add_response("batch_reboot_cluster_nodes", {"Failed": [failed]}, NAMED | {"NodeIds": names[:1]})
    with pytest.raises(RunError, match="SageMaker refused 1 of 1 nodes: i-0000000000: no such node"):
        cluster.reboot(names[:1])


def test_an_update_and_a_failure(stubbed: tuple[SageMakerCluster, Any, list[str]], tmp_path: Path) -> None:
    cluster, answers, _ = stubbed
    answers.add_response("update_cluster_software", {"ClusterArn": described("Updating")["ClusterArn"]}, NAMED)
    wait_answers(answers, "SystemUpdating", "Failed")
    with pytest.raises(RunError, match="cluster amazon failed: no capacity"):
        cluster.update(None, False)
    assert ClusterFolder(tmp_path / "clusters", "amazon").load().status == ClusterStatus.FAILED


def test_a_request_that_the_api_does_not_take_is_a_sentence(tmp_path: Path) -> None:
    config, _ = read_cluster_file(write(tmp_path), "sagemaker")
    assert config.hyperpod is not None
    config.hyperpod["InstanceGroups"][0]["ExecutionRole"] = 3
    client = make_client("us-east-1")
    with stub.Stubber(client) as answers:
        answers.add_client_error("describe_cluster", "ResourceNotFound", "not found")
        answers.add_response("create_cluster", {"ClusterArn": described("Creating")["ClusterArn"]})
        cluster = SageMakerCluster(ClusterFolder(tmp_path / "clusters", "amazon"), lambda node, text: None, client)
        with pytest.raises(ConfigError, match=r"SageMaker does not take this request: .*ExecutionRole"):
            cluster.create(config)
    assert not (tmp_path / "clusters" / "amazon").exists()
