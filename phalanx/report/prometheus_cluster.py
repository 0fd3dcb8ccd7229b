"""Metrics of a cluster and of this host for Prometheus, beside those of runs."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.core import Metric

from phalanx.core.errors import PhalanxError
from phalanx.report.prometheus import SEVERITIES, MetricFamilies

CACHE_S = 5.0  # the scheduler serves others as well, however many scrape


class NodeView(Protocol):
    """A node as the scheduler has it."""

    @property
    def name(self) -> str: ...
    @property
    def word(self) -> str: ...
    @property
    def usable(self) -> bool: ...


class ClusterReading(Protocol):
    """Numbers of jobs by partition and state, the nodes, and what their monitors found, by node."""

    @property
    def jobs(self) -> Mapping[tuple[str, str], int]: ...
    @property
    def nodes(self) -> Sequence[NodeView]: ...
    @property
    def health(self) -> Mapping[str, str]: ...


class ClusterCollector:
    """Collector of a cluster's metrics; `read` raises PhalanxError while it does not answer. `name`: of the cluster;
    empty for the one that this machine belongs to."""

    def __init__(self, name: str, read: Callable[[], ClusterReading]) -> None:
        self._name, self._read, self._lock = name, read, threading.Lock()
        self._read_at = -CACHE_S
        self._sample: ClusterReading | None = None

    def collect(self) -> Iterator[Metric]:
        """The metrics, of a sample that is at most CACHE_S old."""
        with self._lock:
            if time.monotonic() >= self._read_at + CACHE_S:
                try:
                    self._sample = self._read()
                except (PhalanxError, OSError):
                    self._sample = None
                self._read_at = time.monotonic()
            sample = self._sample
        families = MetricFamilies()
        families.gauge(
            "scheduler_up", "1 if the cluster's scheduler answers.", float(sample is not None), cluster=self._name
        )
        if sample is not None:
            self._add(families, sample)
        yield from families.known.values()

    def _add(self, families: MetricFamilies, sample: ClusterReading) -> None:
        cluster = self._name
        for (partition, state), count in sorted(sample.jobs.items()):
            labels = {"cluster": cluster, "partition": partition, "state": state}
            families.gauge("queue_jobs", "Jobs in the scheduler's queue.", count, **labels)
        for node in sample.nodes:
            labels = {"cluster": cluster, "node": node.name}
            families.gauge("cluster_node_usable", "1 for a node that takes jobs.", float(node.usable), **labels)
            families.gauge("cluster_node_state", "1 for the state that a node is in.", 1, **labels, state=node.word)
        for name, health in sample.health.items():
            _add_health(families, name, health, cluster)


class HostCollector:
    """Collector of what the health monitor of this host has written to `file`; nothing where there is none."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def collect(self) -> Iterator[Metric]:
        """The verdict and the findings that the file has now."""
        families = MetricFamilies()
        try:
            tree: Any = json.loads(self._file.read_text(encoding="utf-8"))
            _add_health(families, tree["host"], tree["verdict"], "")
            for each in tree["findings"]:
                labels = {"node": tree["host"], "check": each["check"], "where": each.get("where") or ""}
                text = "What a check of this host found: 0 unknown, 1 ok, 2 watch, 3 reset, 4 reboot, 5 isolate."
                families.gauge("host_finding", text, SEVERITIES.get(each["severity"]), **labels)
        except (OSError, ValueError, KeyError, TypeError):
            return
        yield from families.known.values()


def _add_health(families: MetricFamilies, node: str, health: str, cluster: str) -> None:
    text = "Verdict of a node's monitor: 0 unknown, 1 ok, 2 watch, 3 reset, 4 reboot, 5 isolate."
    families.gauge("host_health", text, SEVERITIES.get(health), cluster=cluster, node=node)
