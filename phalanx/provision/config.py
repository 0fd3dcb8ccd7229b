"""The description of a cluster: groups of nodes, lifecycle scripts, health policy and provider, read from YAML or from
the JSON of SageMaker HyperPod's create-cluster (`hyperpod.py`).

All problems are reported at once, each with the likely intention if there is one.
"""

import difflib
import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from phalanx.config.sentences import format_value, list_problems
from phalanx.core.errors import ConfigError

NAME = r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$"  # of clusters and groups, as HyperPod has it; part of host names
PROVIDERS = ("local", "ssh", "sagemaker")


class NodeRole(StrEnum):
    """What runs on the nodes of a group: Slurm's controller, commands of users, or jobs."""

    CONTROLLER = "controller"
    LOGIN = "login"
    WORKER = "worker"


class HealthPolicy(StrEnum):
    """Health policy for an unhealthy node: reset, reboot or replace it; the same after a person agreed; report only."""

    AUTOMATIC = "automatic"
    ASK = "ask"
    TELL = "tell"


class DeepCheck(StrEnum):
    """A deep health check of a new node: all its devices under load, or its connections to the nodes of its group."""

    STRESS = "InstanceStress"
    CONNECTIVITY = "InstanceConnectivity"


def _whole_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be a whole number, not {str(value).lower()}")
    return value


Count = Annotated[int, BeforeValidator(_whole_number), Field(ge=1, le=6758)]


class ClusterSection(BaseModel):
    """A part of the description; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_enum_values=False)


class GroupConfig(ClusterSection):
    """Nodes of one kind. `cpus` and `gpus`: resources of each that Slurm gives to jobs; None: all."""

    name: str = Field(pattern=NAME)
    count: Count = 1
    role: NodeRole = NodeRole.WORKER
    partition: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")  # None: `dev`
    cpus: Count | None = None
    gpus: Annotated[int, BeforeValidator(_whole_number), Field(ge=0, le=64)] | None = None
    deep_checks: tuple[DeepCheck, ...] = ()


class LifecycleScripts(ClusterSection):
    """A folder of scripts, local or at a URL, and the one that runs on each new node."""

    source: str
    on_create: str = Field("on_create.sh", pattern=r"^[A-Za-z0-9_.-]+$")


class ClusterConfig(ClusterSection):
    """A cluster. `hosts`: of provider `ssh`, the machines as OpenSSH knows them; more than nodes are spares."""

    name: str = Field(pattern=NAME)
    provider: Literal["local", "ssh", "sagemaker"] = "local"
    groups: tuple[GroupConfig, ...] = Field(min_length=1)
    lifecycle: LifecycleScripts | None = None
    provisioning_parameters: dict[str, Any] = {}  # given to lifecycle scripts, in HyperPod's format
    health_policy: HealthPolicy = HealthPolicy.AUTOMATIC
    hosts: tuple[str, ...] = ()
    ssh_config: str | None = None  # of provider ssh: a file of OpenSSH's configuration in place of the user's
    region: str | None = None  # of provider sagemaker
    hyperpod: dict[str, Any] | None = None  # the JSON that this was read from, for provider `sagemaker`

    def group(self, name: str) -> GroupConfig:
        """The group of a name. Raises ConfigError."""
        found = next((group for group in self.groups if group.name == name), None)
        if found is None:
            raise ConfigError(
                f"cluster {self.name} has no group {name}; it has {', '.join(g.name for g in self.groups)}"
            )
        return found

    @property
    def controller(self) -> GroupConfig:
        """The group whose node runs slurmctld."""
        return next(group for group in self.groups if group.role == NodeRole.CONTROLLER)


def build_config(tree: dict[str, Any], problems: list[str], where: str) -> ClusterConfig:
    """A valid configuration of a mapping. Raises ConfigError with `problems` and its own."""
    try:
        config = ClusterConfig.model_validate(tree)
    except ValidationError as error:
        problems = problems + describe_problems(error, ClusterConfig)
        raise ConfigError(list_problems(where, problems)) from None
    problems = problems + _find_contradictions(config)
    if problems:
        raise ConfigError(list_problems(where, problems))
    return config


def _find_contradictions(config: ClusterConfig) -> list[str]:
    problems = []
    names = [group.name for group in config.groups]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"two groups have the name {', '.join(repeated)}; rename one")
    controllers = [group for group in config.groups if group.role == NodeRole.CONTROLLER]
    if config.provider != "sagemaker":
        if len(controllers) != 1 or controllers[0].count != 1:
            said = ", ".join(f"{group.name} ({group.count})" for group in controllers) or "none"
            problems.append(
                f"one group with count 1 must have the role controller, where slurmctld runs (found: {said}); set "
                "`role: controller`, SlurmConfig.NodeType, or controller_group in provisioning_parameters.json"
            )
        if not any(group.role == NodeRole.WORKER for group in config.groups):
            problems.append("no group has the role worker, so no job could run; add one")
    total = sum(group.count for group in config.groups)
    if config.provider == "ssh" and len(set(config.hosts)) < total:
        problems.append(
            f"{total} nodes need as many hosts, and {len(set(config.hosts))} are given; list them under `hosts:` or "
            "with --hosts a,b,c"
        )
    if config.provider != "ssh" and config.hosts:
        problems.append(f"hosts has no effect with the provider {config.provider}; set `provider: ssh`, or remove it")
    if any(host.startswith("-") for host in config.hosts):
        problems.append("a host may not begin with -, which ssh takes for an option")
    if config.provider == "sagemaker" and config.hyperpod is None:
        problems.append("the provider sagemaker needs HyperPod's create-cluster JSON; give that file")
    return problems


# ------------------------------------------------------------------------------------------------- pydantic's errors


def describe_problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """pydantic's errors as sentences; an unknown key with the one that was meant."""
    return list(dict.fromkeys(_describe(each, model) for each in error.errors()))


def _describe(error: Any, model: type[BaseModel]) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    value, kind = format_value(error["input"]), error["type"]
    if kind == "extra_forbidden":
        known = list(_fields_at(model, error["loc"][:-1]))
        key = str(error["loc"][-1])
        lower = {name.lower(): name for name in known}
        near = difflib.get_close_matches(key.lower(), lower, n=1, cutoff=0.5)
        return f"unknown key {place}; " + (f"did you mean {lower[near[0]]}?" if near else f"it has {', '.join(known)}")
    if kind == "missing":
        return f"{place} is missing"
    if kind in ("greater_than_equal", "less_than_equal"):
        what = " (remove the group if it has no node)" if str(error["loc"][-1]).lower().endswith("count") else ""
        relation, limit = (">=", error["ctx"].get("ge")) if "greater" in kind else ("<=", error["ctx"].get("le"))
        return f"{place} must be {relation} {limit}, not {value}{what}"
    if kind in ("enum", "literal_error"):
        options = re.findall(r"'([^']*)'", str(error["ctx"]["expected"]))
        near = difflib.get_close_matches(str(error["input"]), options, n=1, cutoff=0.4)
        meant = f"; did you mean {near[0]}?" if near else ""
        return f"{place} must be {' or '.join(options)}, not {value}{meant}"
    if kind == "string_pattern_mismatch":
        return f"{place} is {value}, but must match {error['ctx']['pattern']}"
    if kind == "value_error":
        return f"{place} {error['ctx']['error']}"
    return f"{place}: {error['msg'][:1].lower()}{error['msg'][1:]}, not {value}"


def _fields_at(model: type[BaseModel], loc: Sequence[int | str]) -> dict[str, Any]:
    """The fields of the section that a place leads to."""
    for part in loc:
        info = model.model_fields.get(str(part))
        if info is not None:
            model = _section_of(info.annotation) or model
    return model.model_fields


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _section_of(each)) is not None), None)


def dump_config(config: ClusterConfig) -> dict[str, Any]:
    """A configuration as JSON keeps it; `build_config` reads it again."""
    tree: dict[str, Any] = json.loads(config.model_dump_json())
    return tree
