"""Metrics of a cluster and of this host for Prometheus, beside those of runs."""

import contextlib
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
WAIT_S = 2.0  # of a scrape for a newer sample
STALE_S = 120.0  # age of a sample that says nothing about now


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


class ClusterSource:
    """A cluster, read in a separate thread, as many nodes take longer than a scrape may. `read` raises PhalanxError
    while its scheduler does not answer. `name`: of the cluster; empty for the one that this machine belongs to."""

    def __init__(self, name: str, read: Callable[[], ClusterReading]) -> None:
        self.name, self._read, self._lock = name, read, threading.Lock()
        self._thread: threading.Thread | None = None
        self._known: tuple[float, ClusterReading | None] | None = None  # when it was read, and what

    def sample(self) -> ClusterReading | None:
        """The newest sample; None while there is no answer. Only the first one is waited for longer than WAIT_S."""
        with self._lock:
            known, thread = self._known, self._thread
            due = known is None or time.monotonic() >= known[0] + CACHE_S
            if due and (thread is None or not thread.is_alive()):
                thread = self._thread = threading.Thread(target=self._refresh, daemon=True)
                thread.start()
        if due and thread is not None:
            thread.join(None if known is None else WAIT_S)
        found = self._known
        return None if found is None or time.monotonic() > found[0] + STALE_S else found[1]

    def _refresh(self) -> None:
        sample: ClusterReading | None = None
        with contextlib.suppress(PhalanxError, OSError):
            sample = self._read()
        self._known = time.monotonic(), sample


class ClusterCollector:
    """Collector of the metrics of some clusters, and of what the health monitor of this host has written to `file`,
    if there is one. One for all of them: a metric may be described once in a scrape."""

    def __init__(self, clusters: Sequence[ClusterSource], file: Path) -> None:
        self._clusters, self._file = clusters, file

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        families = MetricFamilies()
        for each in self._clusters:
            sample = each.sample()
            text = "1 if the cluster's scheduler answers."
            families.gauge("scheduler_up", text, float(sample is not None), cluster=each.name)
            if sample is not None:
                _add_cluster(families, each.name, sample)
        self._add_host(families)
        yield from families.known.values()

    def _add_host(self, families: MetricFamilies) -> None:
        try:
            tree: Any = json.loads(self._file.read_text(encoding="utf-8"))
            _add_health(families, tree["host"], tree["verdict"], "")
            for each in tree["findings"]:
                labels = {"node": tree["host"], "check": each["check"], "where": each.get("where") or ""}
                text = "What a check of this host found: 0 unknown, 1 ok, 2 watch, 3 reset, 4 reboot, 5 isolate."
                families.gauge("host_finding", text, SEVERITIES.get(each["severity"]), **labels)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return


def _add_cluster(families: MetricFamilies, cluster: str, sample: ClusterReading) -> None:
    for (partition, state), count in sorted(sample.jobs.items()):
        labels = {"cluster": cluster, "partition": partition, "state": state}
        families.gauge("queue_jobs", "Jobs in the scheduler's queue.", count, **labels)
    for node in sample.nodes:
        labels = {"cluster": cluster, "node": node.name}
        families.gauge("cluster_node_usable", "1 for a node that takes jobs.", float(node.usable), **labels)
        families.gauge("cluster_node_state", "1 for the state that a node is in.", 1, **labels, state=node.word)
    for name, health in sample.health.items():
        _add_health(families, name, health, cluster)


def _add_health(families: MetricFamilies, node: str, health: str, cluster: str) -> None:
    text = "Verdict of a node's monitor: 0 unknown, 1 ok, 2 watch, 3 reset, 4 reboot, 5 isolate."
    families.gauge("host_health", text, SEVERITIES.get(health, SEVERITIES["unknown"]), cluster=cluster, node=node)
