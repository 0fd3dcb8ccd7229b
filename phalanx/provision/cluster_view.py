"""What the page shows of a cluster that `phalanx cluster` made: its status, its nodes and Slurm's queue."""

import subprocess
from collections.abc import Callable
from typing import Any

from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.provision.cluster import Cluster

QUEUE = {"job": "%i", "name": "%j", "user": "%u", "state": "%T", "time": "%M", "nodes": "%D", "where or why": "%R"}
TIMEOUT_S = 20.0
MOST_JOBS = 200


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
        found["queue"] = read_queue(
            _run(cluster.command(["squeue", "--noheader", f"--format={'|'.join(QUEUE.values())}"]))
        )
    except ConfigError as error:  # it was deleted; or a service whose controller is reached in another way
        found["error"] = "" if found["status"] else str(error)
    except (PhalanxError, OSError) as error:
        found["error"] = str(error)
    return found


def read_queue(text: str) -> list[dict[str, str]]:
    """What squeue has printed, a row for each job."""
    rows = [line.strip().split("|", len(QUEUE) - 1) for line in text.splitlines()]
    return [dict(zip(QUEUE, row, strict=True)) for row in rows if len(row) == len(QUEUE)][:MOST_JOBS]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"squeue did not answer within {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise OSError(f"squeue failed: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout
