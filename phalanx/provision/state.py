"""A cluster's state on disk: its nodes and how far each has come, in one file that is replaced whole.

A command that is interrupted leaves a state from which the same command continues. Statuses are HyperPod's.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.format_versions import describe_version_problem
from phalanx.core.json_lines import write_atomic
from phalanx.provision.config import NAME, ClusterConfig, build_config, dump_config
from phalanx.system.locks import is_locked, try_lock

VERSION = 1
DEFAULT_FOLDER = Path("~/.local/state/phalanx/clusters")


class ClusterStatus(StrEnum):
    """HyperPod's statuses of a cluster."""

    CREATING = "Creating"
    IN_SERVICE = "InService"
    UPDATING = "Updating"
    SYSTEM_UPDATING = "SystemUpdating"
    ROLLING_BACK = "RollingBack"
    FAILED = "Failed"
    DELETING = "Deleting"


class NodeStatus(StrEnum):
    """HyperPod's statuses of an instance."""

    PENDING = "Pending"
    RUNNING = "Running"
    FAILURE = "Failure"
    SHUTTING_DOWN = "ShuttingDown"
    SYSTEM_UPDATING = "SystemUpdating"
    DEEP_HEALTH_CHECK = "DeepHealthCheckInProgress"
    NOT_FOUND = "NotFound"


class Stage(StrEnum):
    """How far a node has come, in this order."""

    ABSENT = "absent"
    LAUNCHED = "launched"  # the machine answers
    CONFIGURED = "configured"  # it has the files and daemons of Slurm that it needs for its lifecycle script
    PROVISIONED = "provisioned"  # its lifecycle script and deep checks have passed
    JOINED = "joined"  # Slurm has it


@dataclass
class NodeRecord:
    """A node. `instance`: its identity, another one after it was replaced; `host`: of provider `ssh`, the machine."""

    name: str
    group: str
    stage: Stage = Stage.ABSENT
    status: NodeStatus = NodeStatus.PENDING
    instance: str = ""
    address: str = ""
    hostname: str = ""  # as the node itself has it
    host: str = ""
    reason: str = ""
    launched_at: float = 0.0
    config_digest: str = ""  # of the files that it was configured with
    facts: dict[str, int] = field(default_factory=dict)  # measured: cpus, memory_mib, gpus


@dataclass
class ClusterState:
    """A cluster as the last command left it."""

    config: ClusterConfig
    status: ClusterStatus = ClusterStatus.CREATING
    message: str = ""  # why it failed
    nodes: list[NodeRecord] = field(default_factory=list)
    software: str = ""  # changed by each update, so that every node runs its lifecycle script again
    bad_hosts: list[str] = field(default_factory=list)  # of provider ssh: taken out by a replacement
    links: dict[str, int] = field(default_factory=dict)  # measured: bytes per second of "NODE NODE"

    def node(self, name: str) -> NodeRecord:
        """The node of a name or an instance. Raises ConfigError."""
        found = next((node for node in self.nodes if name in (node.name, node.instance)), None)
        if found is None:
            known = ", ".join(node.name for node in self.nodes) or "none"
            raise ConfigError(f"cluster {self.config.name} has no node {name}; its nodes: {known}")
        return found

    @property
    def controller(self) -> NodeRecord:
        """The node that runs slurmctld."""
        return next(node for node in self.nodes if node.group == self.config.controller.name)


class ClusterFolder:
    """The folder of a cluster: `cluster.json`, `lock`, the scripts of its nodes, and `log/NODE.log`."""

    def __init__(self, root: Path, name: str) -> None:
        if not re.match(NAME, name):
            raise ConfigError(f"{name!r} is not a name of a cluster: letters, digits and -, at most 63")
        self.root = root.expanduser().absolute()
        self.path = self.root / name
        self.name = name

    @property
    def _file(self) -> Path:
        return self.path / "cluster.json"

    @property
    def lifecycle(self) -> Path:
        """The lifecycle scripts as they were when the cluster was made or updated."""
        return self.path / "lifecycle"

    def log(self, node: str) -> Path:
        """The log of all that was done on a node."""
        return self.path / "log" / f"{node}.log"

    def exists(self) -> bool:
        """Whether there is such a cluster, perhaps in the making."""
        return self._file.exists()

    def load(self) -> ClusterState:
        """Load the state. Raises ConfigError for an unknown cluster, RunError if its file cannot be read."""
        try:
            tree = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            known = ", ".join(list_names(self.root)) or "none"
            raise ConfigError(f"no cluster {self.name} in {self.root}; there are: {known}") from None
        except (OSError, ValueError) as error:
            raise RunError(f"the state of cluster {self.name} cannot be read ({error}); see {self._file}") from None
        remedy = "delete that folder by hand after ending its nodes"
        if wrong := describe_version_problem(tree.get("version"), (VERSION,), remedy):
            raise RunError(f"{self._file} {wrong}")
        nodes = [
            NodeRecord(**{**each, "stage": Stage(each["stage"]), "status": NodeStatus(each["status"])})
            for each in tree["nodes"]
        ]
        config = build_config(tree["config"], [], str(self._file))
        return ClusterState(
            config, ClusterStatus(tree["status"]), tree["message"], nodes, tree["software"], tree["bad_hosts"],
            tree.get("links", {}),
        )  # fmt: skip

    def save(self, state: ClusterState) -> None:
        """Write the state, whole or not at all. Raises OSError."""
        tree: dict[str, Any] = {
            "version": VERSION,
            "config": dump_config(state.config),
            "status": state.status,
            "message": state.message,
            "software": state.software,
            "bad_hosts": state.bad_hosts,
            "links": state.links,
            "nodes": [dataclasses.asdict(node) for node in state.nodes],
        }
        write_atomic(self._file, json.dumps(tree, indent=1) + "\n")

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Work on the cluster alone. Raises RunError where another process does."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True, mode=0o700)
        (self.path / "log").mkdir(exist_ok=True)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not try_lock(descriptor):
                holder = os.pread(descriptor, 20, 0).decode().strip()
                raise RunError(f"process {holder} is at work on cluster {self.name}; wait for it, or end it")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def is_held(self) -> bool:
        """Whether a process works on the cluster."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return is_locked(descriptor)
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the folder, the state last, so that an interrupted removal can be repeated."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != self._file:
                path.unlink()
        self._file.unlink(missing_ok=True)
        self.path.rmdir()


def list_names(root: Path) -> list[str]:
    """The clusters of a folder."""
    return sorted(path.parent.name for path in root.expanduser().glob("*/cluster.json"))
