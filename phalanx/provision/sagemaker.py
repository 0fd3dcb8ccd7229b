"""Provider `sagemaker`: the same JSON to SageMaker HyperPod's API, by boto3, and its states and nodes back.

AWS itself runs lifecycle scripts, Slurm, health checks and replacement there; credentials and region are boto3's.
"""

import importlib
import time
from collections.abc import Sequence
from typing import Any

from phalanx.core.errors import ConfigError, RunError
from phalanx.provision.config import ClusterConfig
from phalanx.provision.converge import Report
from phalanx.provision.state import ClusterFolder, ClusterState, ClusterStatus, NodeStatus

POLL_S, WAIT_S = 10.0, 5400.0
MOST_NODES = 25  # of one request that reboots or replaces
# Fields of a group that DescribeCluster answers and UpdateCluster takes.
_UPDATABLE = (
    "InstanceGroupName", "InstanceType", "LifeCycleConfig", "ExecutionRole", "ThreadsPerCore", "InstanceStorageConfigs",
    "OnStartDeepHealthChecks", "TrainingPlanArn", "OverrideVpcConfig", "ScheduledUpdateConfig", "InstanceRequirements",
    "KubernetesConfig", "CapacityRequirements", "SlurmConfig", "NetworkInterface", "AutoPatchConfig",
)  # fmt: skip


def make_client(region: str | None) -> Any:
    """A client of SageMaker's API. Raises ConfigError without boto3."""
    try:
        boto3: Any = importlib.import_module("boto3")
        config: Any = importlib.import_module("botocore.config")
    except ImportError:
        raise ConfigError("the provider sagemaker needs boto3; install it with `pip install 'phalanx[aws]'`") from None
    try:
        retries = config.Config(retries={"mode": "standard", "max_attempts": 8}, connect_timeout=10, read_timeout=60)
        return boto3.client("sagemaker", region_name=region, config=retries)
    except Exception as error:  # botocore's own classes, such as NoRegionError
        raise ConfigError(f"no client of SageMaker ({error}); set a region (--region) and credentials of AWS") from None


class SageMakerCluster:
    """A cluster of HyperPod."""

    def __init__(self, folder: ClusterFolder, report: Report, client: Any, poll_s: float = POLL_S) -> None:
        self._folder, self._report, self._client, self._poll_s = folder, report, client, poll_s

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Call the API. Raises ConfigError for a request that it does not take, RunError for all else."""
        try:
            return dict(getattr(self._client, operation)(**arguments))
        except Exception as error:  # botocore makes the classes of its errors at run time
            kind = type(error).__name__
            if kind == "ParamValidationError":
                lines = str(error).splitlines()
                raise ConfigError(f"SageMaker does not take this request: {'; '.join(lines[1:] or lines)}") from None
            raise RunError(f"SageMaker's {operation} failed: {error}") from None

    def create(self, config: ClusterConfig) -> None:
        """Ask for the cluster, or find the one that was asked for, and wait until it is in service."""
        with self._folder.hold():
            if self._find(config.name) is None:
                assert config.hyperpod is not None
                self._folder.save(ClusterState(config))
                try:
                    self._call("create_cluster", **config.hyperpod)
                except ConfigError:  # nothing was made
                    self._folder.remove()
                    raise
                self._report("", "requested")
            elif not self._folder.exists():
                self._folder.save(ClusterState(config))
            self._wait(ClusterStatus.IN_SERVICE)

    def _find(self, name: str) -> dict[str, Any] | None:
        try:
            return self._call("describe_cluster", ClusterName=name)
        except RunError as error:
            if (
                "ResourceNotFound" in str(error)
                or "not found" in str(error).lower()
                or "could not find" in str(error).lower()
            ):
                return None
            raise

    @property
    def _name(self) -> str:
        return self._folder.load().config.name

    def _wait(self, wanted: ClusterStatus) -> None:
        """Wait for a status; tell each change of a node."""
        until, told, name = time.monotonic() + WAIT_S, dict[str, str](), self._name
        while True:
            for row in self.list_nodes():
                if told.get(row["node"]) != row["status"]:
                    told[row["node"]] = row["status"]
                    self._report(row["node"], row["status"] + (f": {row['why']}" if row["why"] else ""))
            found = self._call("describe_cluster", ClusterName=name)
            status = found["ClusterStatus"]
            self._save_status(status, found.get("FailureMessage", ""))
            if status == wanted:
                return
            if status == ClusterStatus.FAILED:
                raise RunError(f"cluster {name} failed: {found.get('FailureMessage') or 'SageMaker gives no reason'}")
            if time.monotonic() > until:
                raise RunError(f"cluster {name} is {status} after {WAIT_S:g} s; repeat the command to wait longer")
            time.sleep(self._poll_s)

    def _save_status(self, status: str, message: str) -> None:
        state = self._folder.load()
        state.status, state.message = ClusterStatus(status), message
        self._folder.save(state)

    def describe(self) -> dict[str, Any]:
        """DescribeCluster's answer, in the same words as other providers'."""
        found = self._call("describe_cluster", ClusterName=self._name)
        return {
            "ClusterName": found.get("ClusterName", self._name),
            "ClusterStatus": found["ClusterStatus"],
            "FailureMessage": found.get("FailureMessage", ""),
            "Provider": "sagemaker",
            "NodeRecovery": found.get("NodeRecovery", ""),
            "InstanceGroups": [
                {
                    "InstanceGroupName": group["InstanceGroupName"],
                    "Role": (group.get("SlurmConfig") or {}).get("NodeType", ""),
                    "CurrentCount": group.get("CurrentCount", 0),
                    "TargetCount": group.get("TargetCount", 0),
                }
                for group in found["InstanceGroups"]
            ],
        }

    def list_nodes(self) -> list[dict[str, str]]:
        """All nodes; their Slurm states are known on the cluster alone."""
        rows: list[dict[str, str]] = []
        arguments: dict[str, Any] = {"ClusterName": self._name, "MaxResults": 100}
        while True:
            answer = self._call("list_cluster_nodes", **arguments)
            for node in answer["ClusterNodeSummaries"]:
                status = node["InstanceStatus"]
                rows.append(
                    {
                        "node": node.get("InstanceId") or node.get("NodeLogicalId", ""),
                        "group": node["InstanceGroupName"],
                        "status": str(NodeStatus(status["Status"])),
                        "slurm": "",
                        "health": "",
                        "address": node.get("PrivateDnsHostname", ""),
                        "instance": node.get("InstanceId", ""),
                        "host": node["InstanceType"],
                        "why": status.get("Message", ""),
                    }
                )
            if not answer.get("NextToken"):
                return rows
            arguments["NextToken"] = answer["NextToken"]

    def _groups(self) -> list[dict[str, Any]]:
        """The groups as UpdateCluster takes them."""
        found = self._call("describe_cluster", ClusterName=self._name)["InstanceGroups"]
        return [
            {key: group[key] for key in _UPDATABLE if group.get(key)} | {"InstanceCount": group["TargetCount"]}
            for group in found
        ]

    def scale(self, group: str, count: int) -> None:
        """Change the count of a group; SageMaker chooses which instances it removes."""
        with self._folder.hold():
            self._folder.load().config.group(group)
            groups = [
                {**each, "InstanceCount": count} if each["InstanceGroupName"] == group else each
                for each in self._groups()
            ]
            self._call("update_cluster", ClusterName=self._name, InstanceGroups=groups)
            self._wait(ClusterStatus.IN_SERVICE)

    def update(self, scripts: str | None, rebuild: bool) -> None:
        """Update the platform's software, which replaces root volumes and runs lifecycle scripts again; `scripts`:
        another s3:// source of them."""
        with self._folder.hold():
            if scripts is not None:
                groups = [
                    {**each, "LifeCycleConfig": {**each.get("LifeCycleConfig", {}), "SourceS3Uri": scripts}}
                    for each in self._groups()
                ]
                self._call("update_cluster", ClusterName=self._name, InstanceGroups=groups)
                self._wait(ClusterStatus.IN_SERVICE)
            self._call("update_cluster_software", ClusterName=self._name)
            self._wait(ClusterStatus.IN_SERVICE)

    def reboot(self, names: Sequence[str], reason: str = "") -> None:
        """Reboot instances."""
        self._batch("batch_reboot_cluster_nodes", names)

    def replace(self, names: Sequence[str], reason: str = "") -> None:
        """Replace instances."""
        self._batch("batch_replace_cluster_nodes", names)

    def _batch(self, operation: str, names: Sequence[str]) -> None:
        with self._folder.hold():
            failed: list[str] = []
            for at in range(0, len(names), MOST_NODES):
                answer = self._call(operation, ClusterName=self._name, NodeIds=list(names[at : at + MOST_NODES]))
                failed += [
                    f"{each.get('NodeId', '?')}: {each.get('Message', each.get('ErrorCode', '?'))}"
                    for each in answer.get("Failed", [])
                ]
                for name in answer.get("Successful", []):
                    self._report(name, "requested")
            if failed:
                raise RunError(f"SageMaker refused {len(failed)} of {len(names)} nodes: {'; '.join(failed)}")
            self._wait(ClusterStatus.IN_SERVICE)

    def delete(self) -> None:
        """Delete the cluster, and wait until it is gone."""
        with self._folder.hold():
            name, until = self._name, time.monotonic() + WAIT_S
            if self._find(name) is not None:
                self._call("delete_cluster", ClusterName=name)
            while self._find(name) is not None:
                if time.monotonic() > until:
                    raise RunError(f"cluster {name} is not gone after {WAIT_S:g} s; repeat the command to wait longer")
                time.sleep(self._poll_s)
            self._folder.remove()
