"""SageMaker HyperPod's create-cluster JSON: its fields, their equivalents here, and those ignored outside AWS.

Field names and values are those of the API reference of CreateCluster. JSON with Python's or JavaScript's spelling
(`True`, `None`, a comma before a bracket) is parsed so that its other problems can be reported, and each place is
named.
"""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from phalanx.config.sentences import list_problems
from phalanx.core.errors import ConfigError
from phalanx.provision.config import (
    NAME,
    ClusterConfig,
    Count,
    DeepCheck,
    NodeRole,
    describe_problems,
)
from phalanx.provision.config import (
    build_config as build_cluster_config,
)
from phalanx.provision.lifecycle import PARAMETERS, fetch_scripts, read_parameters

_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|\b(?:True|False|None)\b|,(?=\s*[}\]])|(?://|#)[^\n]*')
_MEANT = {"True": "true", "False": "false", "None": "null"}
ROLES = {"Controller": NodeRole.CONTROLLER, "Login": NodeRole.LOGIN, "Compute": NodeRole.WORKER}
# Fields without a meaning outside AWS, with the reason.
_PASSED_OVER = {
    "ExecutionRole": "no IAM role is assumed",
    "InstanceStorageConfigs": "nodes keep their disks",
    "ThreadsPerCore": "Slurm uses the processors that it finds",
    "TrainingPlanArn": "no capacity is reserved",
    "OverrideVpcConfig": "nodes have one network",
    "ScheduledUpdateConfig": "run `phalanx cluster update` when it suits",
    "InstanceRequirements": "nodes are what they are",
    "KubernetesConfig": "the scheduler is Slurm",
    "ImageId": "nodes keep their operating system",
    "CapacityRequirements": "no capacity is bought",
    "VpcConfig": "nodes have one network",
    "Tags": "nothing is billed",
    "NodeProvisioningMode": "nodes are always added one by one",
    "ClusterRole": "no IAM role is assumed",
    "TieredStorageConfig": "set resilience.in_memory_checkpoints in the recipe",
    "AutoScaling": "run `phalanx cluster scale`",
    "ImageReleaseVersion": "nodes keep their operating system",
    "AutoPatchConfig": "run `phalanx cluster update` when it suits",
    "NetworkInterface": "nodes have one network",
    "MinInstanceCount": "all nodes of InstanceCount are made, and those that fail are named",
    "OnInitComplete": "only OnCreate runs",
    "Slurm": "slurm.conf is replaced; settings of your own belong in site.conf",
    "RestrictedInstanceGroupsConfig": "it is for Amazon's own models",
    "RestrictedInstanceGroups": "they are for Amazon's own models",
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _instance_type(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9]+", value):
        meant = (
            f"; did you mean ml.{value}?" if isinstance(value, str) and re.fullmatch(r"[a-z0-9-]+\.\w+", value) else ""
        )
        raise ValueError(f"must be an instance type such as ml.p5.48xlarge, not {value!r}{meant}")
    return value


class LifeCycleSection(_Part):
    """Where the lifecycle scripts are, and which runs on each new instance."""

    SourceS3Uri: str | None = None
    OnCreate: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$")
    OnInitComplete: str | None = None


class SlurmGroupConfig(_Part):
    """The role of a group in Slurm."""

    NodeType: Literal["Controller", "Login", "Compute"]
    PartitionNames: list[str] = []


class InstanceGroup(_Part):
    """Instances of one type."""

    InstanceGroupName: str = Field(pattern=NAME)
    InstanceType: Annotated[str, BeforeValidator(_instance_type)] | None = None
    InstanceCount: Count
    MinInstanceCount: int | None = None
    LifeCycleConfig: LifeCycleSection | None = None
    OnStartDeepHealthChecks: list[DeepCheck] = []
    SlurmConfig: SlurmGroupConfig | None = None
    ExecutionRole: str | None = None
    ThreadsPerCore: Literal[1, 2] | None = None
    InstanceStorageConfigs: list[dict[str, Any]] | None = None
    TrainingPlanArn: str | None = None
    OverrideVpcConfig: dict[str, Any] | None = None
    ScheduledUpdateConfig: dict[str, Any] | None = None
    InstanceRequirements: dict[str, Any] | None = None
    KubernetesConfig: dict[str, Any] | None = None
    CapacityRequirements: dict[str, Any] | None = None
    ImageId: str | None = None
    ImageReleaseVersion: str | None = None
    AutoPatchConfig: dict[str, Any] | None = None
    NetworkInterface: dict[str, Any] | None = None


class HyperPodOrchestrator(_Part):
    """Orchestrator; Slurm by default."""

    Eks: dict[str, Any] | None = None
    Slurm: dict[str, Any] | None = None


class HyperPodCluster(_Part):
    """The request of CreateCluster."""

    ClusterName: str = Field(pattern=NAME)
    InstanceGroups: list[InstanceGroup] = Field(min_length=1)
    NodeRecovery: Literal["Automatic", "None"] = "Automatic"
    RestrictedInstanceGroups: list[dict[str, Any]] | None = None
    VpcConfig: dict[str, Any] | None = None
    Tags: list[dict[str, Any]] | None = None
    Orchestrator: HyperPodOrchestrator | None = None
    RestrictedInstanceGroupsConfig: dict[str, Any] | None = None
    NodeProvisioningMode: Literal["Continuous", ""] | None = None
    ClusterRole: str | None = None
    AutoScaling: dict[str, Any] | None = None
    TieredStorageConfig: dict[str, Any] | None = None


def parse_json(text: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """Parse a JSON object; returns it with its spelling mistakes. Raises ConfigError if it is not unambiguous."""
    problems: list[str] = []

    def repair(found: re.Match[str]) -> str:
        word = found[0]
        if word.startswith('"'):
            return word
        line = text.count("\n", 0, found.start()) + 1
        if word == ",":
            problems.append(f"line {line}: a comma before a closing bracket; remove it")
            return ""
        if word in _MEANT:
            problems.append(f"line {line}: {word} is Python's; JSON has {_MEANT[word]}")
            return _MEANT[word]
        problems.append(f"line {line}: JSON has no comments; remove {word[:40]!r}")
        return ""

    repaired = _TOKENS.sub(repair, text)
    try:
        tree = json.loads(repaired)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        at = f", line {line}" if line else ""
        raise ConfigError(f"{where}{at}: not valid JSON ({getattr(error, 'msg', error)}); fix that line") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: a cluster is an object with ClusterName and InstanceGroups")
    return tree, problems


def build_config(
    tree: dict[str, Any],
    problems: list[str],
    where: str,
    provider: str | None = None,
    hosts: Sequence[str] = (),
    scripts: str | None = None,
) -> tuple[ClusterConfig, list[str]]:
    """The cluster of HyperPod's JSON, and sentences on fields that are passed over. Raises ConfigError."""
    provider = provider or "local"
    try:
        request = HyperPodCluster.model_validate(tree)
    except ValidationError as error:
        problems = problems + describe_problems(error, HyperPodCluster)
        raise ConfigError(list_problems(where, problems)) from None
    aws = provider == "sagemaker"
    if request.Orchestrator is not None and request.Orchestrator.Eks is not None and not aws:
        problems.append(
            f"Orchestrator.Eks is Kubernetes, which the provider {provider} does not have; remove it, for Slurm"
        )
    configs = {group.InstanceGroupName: group.LifeCycleConfig for group in request.InstanceGroups}
    sources = {(config.SourceS3Uri, config.OnCreate) for config in configs.values() if config is not None}
    if len(sources) > 1 and not aws:
        problems.append("LifeCycleConfig differs between groups; use one source and one OnCreate for all of them")
    source, on_create = next(iter(sources), (None, None))
    lifecycle, parameters = None, {}
    if (scripts or source) and not aws and not problems:
        lifecycle = {"source": scripts or source, "on_create": on_create or "on_create.sh"}
        parameters = read_parameters(fetch_scripts(str(lifecycle["source"])))
    groups = [_group(group, parameters, problems) for group in request.InstanceGroups]
    known = {group.InstanceGroupName for group in request.InstanceGroups}
    named = [parameters.get("controller_group"), parameters.get("login_group")]
    named += [each.get("instance_group_name") for each in parameters.get("worker_groups", ())]
    problems += [
        f"{PARAMETERS} names the group {name}, which is none of {', '.join(sorted(known))}"
        for name in named
        if name is not None and name not in known
    ]
    passed = [] if aws else _list_passed_over(request)
    config = {
        "name": request.ClusterName,
        "provider": provider,
        "groups": groups,
        "lifecycle": lifecycle,
        "provisioning_parameters": parameters,
        "health_policy": "automatic" if request.NodeRecovery == "Automatic" else "tell",
        "hosts": list(hosts),
        "hyperpod": tree,
    }
    return build_cluster_config(config, problems, where), passed


def _group(group: InstanceGroup, parameters: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    name, role = group.InstanceGroupName, NodeRole.WORKER
    partition: str | None = None
    if name == parameters.get("controller_group"):
        role = NodeRole.CONTROLLER
    elif name == parameters.get("login_group"):
        role = NodeRole.LOGIN
    for worker in parameters.get("worker_groups", ()):
        if worker.get("instance_group_name") == name:
            partition = worker.get("partition_name")
    if group.SlurmConfig is not None:
        said = ROLES[group.SlurmConfig.NodeType]
        if parameters and said != role:
            problems.append(f"group {name} is {said} by SlurmConfig and {role} by {PARAMETERS}; change one")
        role = said
        partition = next(iter(group.SlurmConfig.PartitionNames), partition)
    return {
        "name": name,
        "count": group.InstanceCount,
        "role": role,
        "partition": partition,
        "deep_checks": list(group.OnStartDeepHealthChecks),
    }


def _list_passed_over(request: HyperPodCluster) -> list[str]:
    """Sentences on the fields that are set and have no meaning outside AWS, each field once."""
    parts: list[BaseModel | None] = [request, request.Orchestrator]
    parts += [part for group in request.InstanceGroups for part in (group, group.LifeCycleConfig)]
    fields = {key for part in parts if part is not None for key in part.model_dump(exclude_none=True)}
    said = [f"{field} is passed over: {reason}" for field, reason in _PASSED_OVER.items() if field in fields]
    if any(group.InstanceType for group in request.InstanceGroups):
        said.append("InstanceType is passed over: nodes have the processors and GPUs of the machines that there are")
    if any(len(group.SlurmConfig.PartitionNames) > 1 for group in request.InstanceGroups if group.SlurmConfig):
        said.append(
            "PartitionNames after the first are passed over: a group is in one partition; add others to site.conf"
        )
    return said
