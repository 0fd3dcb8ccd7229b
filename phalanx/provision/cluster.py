"""`phalanx.Cluster`: create, change, heal and delete a cluster, whatever provides its machines.

cluster = phalanx.Cluster("my")
cluster.create("cluster.json")
cluster.scale("workers", 4)
cluster.delete()
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.provision.cluster_file import read_cluster_file
from phalanx.provision.config import ClusterConfig, HealthPolicy
from phalanx.provision.healing import Heal, Healer
from phalanx.provision.sagemaker import SageMakerCluster, make_client
from phalanx.provision.self_managed import SelfManagedCluster
from phalanx.provision.state import DEFAULT_FOLDER, ClusterFolder, list_names
from phalanx.system.locks import is_locked, try_lock

DRAIN_S, HEAL_EVERY_S = 3600.0, 5.0


def ignore_progress(node: str, sentence: str) -> None:
    """The report of a caller who wants none."""


class Cluster:
    """A cluster by name. `folder`: where clusters' states are; `report(node, sentence)` gets progress.

    `drain_timeout_s`: how long jobs may still run on nodes that are scaled away or updated; `keep_failed`: a node whose
    lifecycle script fails stays as it is, for inspection. All methods raise ConfigError for a mistake, RunError for
    what failed.
    """

    def __init__(
        self,
        name: str,
        folder: str | Path = DEFAULT_FOLDER,
        report: Callable[[str, str], None] = ignore_progress,
        drain_timeout_s: float = DRAIN_S,
        keep_failed: bool = True,
        region: str | None = None,
    ) -> None:
        self._state = ClusterFolder(Path(folder), name)
        self._report, self._drain_timeout_s, self._keep_failed = report, drain_timeout_s, keep_failed
        self._region = region
        self.name = name

    def _operations(self, config: ClusterConfig | None = None) -> SelfManagedCluster | SageMakerCluster:
        config = config or self._state.load().config
        if config.provider == "sagemaker":
            return SageMakerCluster(self._state, self._report, make_client(self._region or config.region))
        return SelfManagedCluster(self._state, self._report, self._drain_timeout_s, self._keep_failed)

    def _self_managed(self, what: str) -> SelfManagedCluster:
        found = self._operations()
        if isinstance(found, SageMakerCluster):
            raise ConfigError(f"{what} is AWS's own with the provider sagemaker")
        return found

    def create(self, config: ClusterConfig | str | Path, heal: bool = True) -> None:
        """Create the cluster of a description or its file, or continue where an earlier call stopped. `heal`: also
        start the healer in the background, where it need not ask."""
        if not isinstance(config, ClusterConfig):
            config, passed = read_cluster_file(Path(config))
            for sentence in passed:
                self._report("", sentence)
        if config.name != self.name:
            raise ConfigError(f"the description is of cluster {config.name}, not {self.name}")
        self._operations(config).create(config)
        if heal and config.provider != "sagemaker" and config.health_policy != HealthPolicy.ASK:
            self.start_healer()

    def describe(self) -> dict[str, Any]:
        """Name, status, failure message and groups, in the words of HyperPod's DescribeCluster."""
        return self._operations().describe()

    def nodes(self) -> list[dict[str, str]]:
        """The nodes: group, HyperPod's status, Slurm's state, health, address, instance, host, and why."""
        return self._operations().list_nodes()

    def scale(self, group: str, count: int, hosts: Sequence[str] = ()) -> None:
        """Change a group's number of nodes; the last ones are drained first. `hosts`: more, of provider ssh."""
        if hosts:
            self._self_managed("a list of hosts").add_hosts(hosts)
        self._operations().scale(group, count)

    def update(self, scripts: str | None = None, rebuild: bool = False) -> None:
        """Run lifecycle scripts again, or others, on each worker after draining it; or `rebuild` it."""
        self._operations().update(scripts, rebuild)

    def reboot(self, nodes: Sequence[str]) -> None:
        """Reboot nodes; their jobs are requeued, or continue on others."""
        self._operations().reboot(nodes)

    def replace(self, nodes: Sequence[str], hosts: Sequence[str] = ()) -> None:
        """Replace nodes by new ones; their jobs are requeued, or continue on others. `hosts`: more, of provider ssh."""
        if hosts:
            self._self_managed("a list of hosts").add_hosts(hosts)
        self._operations().replace(nodes)

    def check(self, nodes: Sequence[str]) -> None:
        """Drain nodes, put all their devices under load and measure the links between them, then return them to Slurm.
        Raises RunError with what is unhealthy; such nodes stay drained."""
        self._self_managed("a deep health check").check(nodes)

    def delete(self) -> None:
        """Delete the cluster, its nodes and all files of them."""
        self._stop_healer()
        self._operations().delete()

    def command(self, command: list[str], node: str | None = None) -> list[str]:
        """The command line that runs a command as root on a node, or on the controller."""
        return self._self_managed("running commands (aws ssm start-session)").command(node, command)

    def log(self, node: str) -> Path:
        """The log of all that was done on a node."""
        return self._state.log(self._state.load().node(node).name)

    # ------------------------------------------------------------------------------------------------------- healing

    @property
    def _healer_lock(self) -> Path:
        return self._state.path / "healer"

    def heal(
        self, policy: HealthPolicy | None = None, approve: Callable[[Heal], bool] | None = None, once: bool = False
    ) -> None:
        """Watch the cluster and heal its nodes, until it is deleted; `once`: one look. The policy is the cluster's
        unless another is given. Raises ConfigError where a healer runs already."""
        operations = self._self_managed("healing")
        descriptor = os.open(self._healer_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not try_lock(descriptor):
                raise ConfigError(f"process {self.healer()} heals cluster {self.name} already; end it first")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            policy = policy or self._state.load().config.health_policy
            healer = Healer(operations, policy, self._report, approve or (lambda heal: False))
            while self._state.exists():
                healer.look(time.monotonic())
                if once:
                    return
                time.sleep(HEAL_EVERY_S)
        finally:
            os.close(descriptor)

    def healer(self) -> int | None:
        """The process that heals the cluster; None where none does."""
        try:
            descriptor = os.open(self._healer_lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            text = os.pread(descriptor, 20, 0).decode()
            return int(text) if is_locked(descriptor) and text.isdigit() else None
        finally:
            os.close(descriptor)

    def start_healer(self) -> None:
        """Start the healer in a separate process, unless one runs."""
        if self.healer() is not None:
            return
        words = [sys.executable, "-m", "phalanx", "cluster", "heal", self.name, "--folder", str(self._state.root)]
        with open(self._state.log("healer"), "ab") as log:
            subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def _stop_healer(self) -> None:
        pid = self.healer()
        if pid is not None and pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            until = time.monotonic() + 10.0
            while self.healer() is not None and time.monotonic() < until:
                time.sleep(0.05)


def list_clusters(folder: str | Path = DEFAULT_FOLDER) -> list[dict[str, str]]:
    """The clusters of a folder, with status and provider as they were left."""
    found = []
    for name in list_names(Path(folder)):
        state = ClusterFolder(Path(folder), name).load()
        found.append({"cluster": name, "status": str(state.status), "provider": state.config.provider,
                      "nodes": str(len(state.nodes))})  # fmt: skip
    return found
