"""Metrics of runs for Prometheus, by its own client: collected from the records when a server scrapes them."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from phalanx.report import devices, formats, views
from phalanx.report.gpu_samples import CURRENT_S, NEWEST_BYTES, read_gpu_samples
from phalanx.report.history import RunHistory
from phalanx.report.incidents import find_incidents
from phalanx.report.run_index import RECENT, RunIndex
from phalanx.report.status import describe_run

RANKS = 64  # with separate series of share and busy time
SEVERITIES = {"unknown": 0, "ok": 1, "watch": 2, "reset": 3, "reboot": 4, "isolate": 5}
# Name, help, key of the newest step record.
STEP_GAUGES = (
    ("loss", "Training loss, nats per token.", "loss"),
    ("grad_norm", "Norm of the gradient before clipping.", "grad_norm"),
    ("learning_rate", "Learning rate.", "lr"),
    ("tokens_per_second", "Tokens per second of the newest step.", "tokens_per_s"),
    ("step_seconds", "Duration of the newest step.", "step_s"),
    ("wait_seconds", "Time of the newest step spent waiting in collectives.", "wait_s"),
    ("mfu_ratio", "Model FLOPs utilization of the newest step.", "mfu"),
    ("fp8_clipped", "Inputs and gradients of FP8 products that were clipped in the newest step.", "fp8_clipped"),
)
FP8_GAUGES = (
    ("fp8_largest_input", "Largest input of FP8 products in the newest evaluation."),
    ("fp8_zero_ratio", "Share of inputs of FP8 products that round to zero there, in the worst block."),
)
NodesOf = Callable[[RunIndex], Iterable[Mapping[str, str]]]
JobOf = Callable[[RunIndex], dict[str, Any] | None]


class RunCollector:
    """Collector of the metrics of some runs. `nodes_of` and `job_of` say what the records alone do not."""

    def __init__(
        self,
        indexes: Callable[[], Iterable[RunIndex]],
        clock: Callable[[], float],
        nodes_of: NodesOf,
        job_of: JobOf,
        lock: threading.Lock,
    ) -> None:
        """`lock` is held while an index is read: several servers may scrape at once."""
        self._indexes, self._clock, self._nodes_of, self._job_of, self._lock = indexes, clock, nodes_of, job_of, lock

    def collect(self) -> Iterator[Metric]:
        """The metrics of all runs, read from their records now."""
        families = MetricFamilies()
        with self._lock:
            indexes = list(self._indexes())
            names = Counter(index.paths.name for index in indexes)
            for index in indexes:
                while index.poll():
                    continue
                name = index.paths.name  # of several runs with one name Prometheus would take only one
                self._add(families, index, name if names[name] == 1 else str(index.paths.root))
        yield from families.known.values()

    def _add(self, add: "MetricFamilies", index: RunIndex, name: str) -> None:
        run, now = index.history(), self._clock()
        job, nodes = self._job_of(index), list(self._nodes_of(index))
        facts = describe_run(run, index.paths, now, job, nodes)
        last = run.counted_steps[-1] if run.counted_steps else {}
        add.gauge("state", "1 for the state that the run is in.", 1, run=name, state=facts["state"])
        add.gauge("step", "Newest optimizer step.", facts["step"], run=name)
        add.gauge("planned_steps", "Steps of the whole run.", facts["steps"], run=name)
        add.gauge("last_record_timestamp_seconds", "Time of the newest record.", facts["last_line"], run=name)
        add.counter("tokens", "Tokens trained on.", formats.finite_number(last, "total_tokens"), run=name)
        for metric, text, key in STEP_GAUGES:
            add.gauge(metric, text, formats.finite_number(last, key), run=name)
        add.gauge("peak_memory_bytes", "Peak memory of the fullest rank.", index.peak_memory_bytes or None, run=name)
        for held_out, evaluations in views.group_by_set(run.events).items():
            loss = formats.finite_number(evaluations[-1], "loss")
            add.gauge("evaluation_loss", "Newest loss on a held-out set.", loss, run=name, set=held_out)
            for (metric, text), values in zip(FP8_GAUGES, formats.fp8_ranges(evaluations[-1]), strict=True):
                add.gauge(metric, text, max(values, default=None), run=name, set=held_out)
        self._add_trouble(add, run, facts, name, now)
        self._add_devices(add, run, name)
        self._add_gpus(add, index, name, now)
        for node in nodes:
            in_run = float(node["state"] == "in the run")
            add.gauge("node_in_run", "1 for a node that takes part.", in_run, run=name, node=node["node"])
            health = SEVERITIES.get(node["health"])
            text = "Last health check: 0 unknown, 1 ok, 2 watch, 3 reset, 4 reboot, 5 isolate."
            add.gauge("node_health", text, health, run=name, node=node["node"])
        if job is not None:
            state = str(job.get("state"))
            add.gauge("job", "1 for the state of the run's job.", 1, run=name, scheduler=str(job["by"]), state=state)

    def _add_trouble(
        self, add: "MetricFamilies", run: RunHistory, facts: Mapping[str, Any], name: str, now: float
    ) -> None:
        good, saved = facts["goodput"], facts["checkpoint"]
        found = find_incidents(run)
        for cause, count in Counter(str(each.cause.get("kind")) for each in found).items():
            add.counter("recoveries", "Incidents, by the kind of their first event.", count, run=name, cause=cause)
        dead_s = sum(each.seconds or 0.0 for each in found)
        add.counter("dead_seconds", "Time between failures and the next step.", dead_s, run=name)
        add.counter("replayed_steps", "Steps that were done again.", run.totals.lost_steps, run=name)
        if good is not None:
            add.gauge("goodput_ratio", "Time of counted steps over the run's time.", good["share"], run=name)
        if saved is not None:
            add.gauge("checkpoint_step", "Step of the newest checkpoint.", saved["step"], run=name)
            if saved["time"] is not None:
                age_s = max(0.0, now - saved["time"])
                add.gauge("checkpoint_age_seconds", "Age of the newest checkpoint.", age_s, run=name)

    def _add_devices(self, add: "MetricFamilies", run: RunHistory, name: str) -> None:
        found = devices.summarize_devices(run.counted_steps[-RECENT:], run.facts.device_names, run.facts.device_lines)
        for device in found.devices[:RANKS] if found is not None else ():
            add.gauge("rank_share_ratio", "Part of the work, by rank.", device.share, run=name, rank=str(device.rank))
            add.gauge("rank_busy_ratio", "Part of its time a rank works.", device.busy, run=name, rank=str(device.rank))

    def _add_gpus(self, add: "MetricFamilies", index: RunIndex, name: str, now: float) -> None:
        """Those that are sampled now: not of a run that is over, nor of a node that was lost."""
        for gpu in read_gpu_samples(index.paths, NEWEST_BYTES):
            if gpu.time[-1] < now - CURRENT_S:
                continue
            labels = {"run": name, "node": gpu.node, "gpu": str(gpu.index)}
            add.gauge("gpu_temperature_celsius", "Temperature of a GPU.", gpu.temperature_c[-1], **labels)
            add.gauge("gpu_power_watts", "Power that a GPU draws.", gpu.power_w[-1], **labels)
            add.gauge("gpu_lost", "1 for a GPU that its driver has lost.", float(gpu.lost), **labels)
            text = "Memory errors of a GPU since its driver was loaded."
            for kind, count in (("corrected", gpu.corrected), ("uncorrected", gpu.uncorrected)):
                add.counter("gpu_memory_errors", text, count, **labels, kind=kind)


class MetricFamilies:
    """Metric families of one scrape, each with the samples of all runs."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def gauge(self, name: str, text: str, value: float | None, **labels: str) -> None:
        self._add(GaugeMetricFamily, name, text, value, labels)

    def counter(self, name: str, text: str, value: float | None, **labels: str) -> None:
        self._add(CounterMetricFamily, name, text, value, labels)

    def _add(self, kind: Any, name: str, text: str, value: float | None, labels: Mapping[str, str]) -> None:
        if value is None:
            return
        family = self.known.setdefault(name, kind(f"phalanx_{name}", text, labels=list(labels)))
        family.add_metric(list(labels.values()), value)
