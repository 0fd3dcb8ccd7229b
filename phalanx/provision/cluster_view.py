"""What the page and the metrics show of a cluster: its status, its nodes and Slurm's queue."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.provision.cluster import Cluster
from phalanx.provision.slurm_control import SINFO, SlurmNodeView, parse_sinfo
from phalanx.system.commands import run_program

COLUMNS = {"job": "%i", "name": "%j", "user": "%u", "state": "%T", "time": "%M", "nodes": "%D", "where or why": "%R"}
SHOW_CONFIG = ("scontrol", "show", "config")
SQUEUE = ("squeue", "--noheader", "--array", "--format=%P|%T")
TIMEOUT_S = 20.0
MOST_JOBS = 200


@dataclass(frozen=True)
class ClusterSample:
    """Numbers of jobs by partition and state, the nodes, and what their monitors found, by node."""

    jobs: Mapping[tuple[str, str], int]
    nodes: Sequence[SlurmNodeView]
    health: Mapping[str, str] = field(default_factory=dict)


def make_cluster_reader(cluster: Cluster) -> Callable[[], dict[str, Any]]:
    """A function that reads the cluster now. Raises PhalanxError where there is none of that name."""
    cluster.describe()
    return lambda: read_cluster(cluster)


def read_cluster(cluster: Cluster) -> dict[str, Any]:
    """Name, status, nodes and queue; `error` where a part of them cannot be read."""
    found: dict[str, Any] = {"name": cluster.name, "status": "", "nodes": [], "queue": [], "error": ""}
    try:
        told = cluster.describe()
        found["status"] = str(told["ClusterStatus"])
        hidden = ("instance",)  # long, and known by its node
        found["nodes"] = [{key: value for key, value in row.items() if key not in hidden} for row in cluster.nodes()]
        command = cluster.command(["squeue", "--noheader", f"--format={'|'.join(COLUMNS.values())}"])
    except ConfigError as error:  # it was deleted; or a service whose controller is reached in another way
        return found | {"error": "" if found["status"] else str(error)}
    except (PhalanxError, OSError) as error:
        return found | {"error": str(error)}
    try:
        found["queue"] = read_queue(_ask(command))
    except PhalanxError as error:
        found["error"] = str(error)
    return found


def read_queue(text: str) -> list[dict[str, str]]:
    """What squeue has printed, a row for each job."""
    rows = [line.strip().split("|", len(COLUMNS) - 1) for line in text.splitlines()]
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows if len(row) == len(COLUMNS)][:MOST_JOBS]


def sample_cluster(cluster: Cluster) -> ClusterSample:
    """Slurm's queue and nodes of a cluster, by its controller, and what its nodes' monitors found. Raises
    PhalanxError where it cannot be read."""
    rows = cluster.nodes()
    nodes = [SlurmNodeView(row["node"], row["slurm"].lower()) for row in rows if row.get("slurm")]
    health = {row["node"]: row["health"] for row in rows if row.get("health")}
    return ClusterSample(count_jobs(_ask(cluster.command(list(SQUEUE)))), nodes, health)


def sample_queue() -> ClusterSample:
    """The same of the Slurm whose commands this machine has. Raises ConfigError without them, RunError where it does
    not answer."""
    return ClusterSample(count_jobs(_ask(SQUEUE)), list(parse_sinfo(_ask(SINFO)).values()))


def is_local(cluster: Cluster) -> bool:
    """Whether the Slurm whose commands this machine has is the cluster's, by its name and its controller. Raises as
    `sample_queue`."""
    pairs = (line.partition("=") for line in _ask(SHOW_CONFIG).splitlines())
    known = {key.strip(): value.strip() for key, _, value in pairs}
    host = known.get("SlurmctldHost[0]", "").partition("(")[0]
    return known.get("ClusterName") == cluster.name and host in {row["node"] for row in cluster.nodes()}


def count_jobs(text: str) -> Counter[tuple[str, str]]:
    """Jobs by partition and state, as squeue has printed them."""
    rows = [line.strip().split("|") for line in text.splitlines()]
    return Counter((row[0], row[1].lower()) for row in rows if len(row) == 2)


def _ask(command: Sequence[str]) -> str:
    name = next((each for each in ("sinfo", "scontrol") if each in command), "squeue")
    missing = f"{name} cannot be run ({command[0]} was not found); run this on a node of the cluster"
    return run_program(command, f"Slurm's {name}", TIMEOUT_S, missing)
