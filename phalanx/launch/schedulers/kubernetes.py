"""Kubernetes as a scheduler, without an operator: objects are made, read and deleted by kubectl, with a time limit."""

import contextlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.load import load_recipe
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, PhalanxError, RunError
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.launch.schedulers.kubernetes_manifest import (
    ADDRESS,
    INDEX,
    JOB,
    OFFSET,
    RUN_LABEL,
    SECRET_KEY,
    make_name,
    render_manifest,
)
from phalanx.launch.schedulers.scheduler import Job, JobTask, LaunchOptions, QueuePhase, Scheduler, SchedulerNode
from phalanx.launch.start_outcomes import read_start_outcomes
from phalanx.system.commands import run_program

TIMEOUT_S, DELETE_S = 30.0, 120.0
OBJECTS = "jobsets.jobset.x-k8s.io,jobs,services,secrets"


def run_kubectl(words: Sequence[str], given: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """Run kubectl, with `given` as its input, and return what it prints. Raises ConfigError without kubectl, RunError
    with its own words where it fails or does not answer."""
    missing = "kubectl was not found, so Kubernetes cannot be used; install kubectl"
    return run_program(["kubectl", *words], f"kubectl {words[0]}", timeout_s, missing, given=given)


@dataclass(frozen=True)
class PodTask:
    """The node of a run that a pod is."""

    job: str
    node: int
    address: str | None  # HOST:PORT of node 0
    start_count: int

    @property
    def name(self) -> str:
        return f"{self.job}-{self.start_count}"


class Kubernetes(Scheduler):
    """Jobs are known by the name that is the label of all of a run's objects, after a namespace where it has one."""

    TITLE = "Kubernetes"
    SECTION: str | None = "k8s"
    QUEUES = True

    def make_script(self, config: Config, paths: RunPaths, options: LaunchOptions) -> str | None:
        """The objects as YAML. Raises ConfigError for what could not run."""
        return render_manifest(config, paths, options)

    def submit(self, paths: RunPaths, environment: Mapping[str, str]) -> str:
        """Replace the run's objects, which are over; returns the job's name."""
        namespace = load_recipe(paths.launch_recipe, []).k8s.namespace
        name = make_name(paths.root.resolve())
        words = [] if namespace is None else ["--namespace", namespace]
        number = name if namespace is None else f"{namespace}/{name}"
        _delete(number, wait=True)
        manifest = paths.launch_script.read_text(encoding="utf-8")
        if f"name: {ADDRESS}" in manifest:
            meta = {"name": name, "labels": {RUN_LABEL: name}}
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta,
                      "stringData": {SECRET_KEY: secrets.token_hex(32)}}  # fmt: skip
            run_kubectl([*words, "create", "-f", "-"], json.dumps(secret))
        run_kubectl([*words, "create", "-f", "-"], manifest)
        return number

    def query_job(self, number: str) -> Job | None:
        """The state of a run's jobs and pods."""
        return read_job(number, run_kubectl(_select(number, "get", "jobs,pods", "--output=json")))

    def find_log(self, paths: RunPaths, number: str) -> Path:
        """What the pods have written, fetched now."""
        log = paths.job_log("kubernetes", number.replace("/", "-"))
        with contextlib.suppress(PhalanxError, OSError):  # there is none any more
            log.write_text(run_kubectl(_select(number, "logs", "--prefix", "--tail=1000")), encoding="utf-8")
        return log

    def stop(self, number: str) -> None:
        """Delete the objects: pods save and leave in their grace period, until when the jobs are being deleted."""
        _delete(number, wait=False)

    def cancel(self, number: str) -> None:
        """Delete objects and pods at once."""
        self.stop(number)
        run_kubectl(_select(number, "delete", "pods", "--ignore-not-found", "--wait=false", "--now"))

    def list_nodes(self) -> list[SchedulerNode]:
        found = []
        for item in _items(run_kubectl(["get", "nodes", "--output=json"])):
            ready = {each.get("type"): each for each in item.get("status", {}).get("conditions", [])}.get("Ready", {})
            cordoned = bool(item.get("spec", {}).get("unschedulable"))
            state = "ready" if ready.get("status") == "True" else "not ready"
            why = item["metadata"].get("annotations", {}).get("phalanx/reason", "") if cordoned else ""
            why = why or ("" if state == "ready" else str(ready.get("message", "")))
            found.append(SchedulerNode(item["metadata"]["name"], f"{state}, cordoned" if cordoned else state, why))
        return found

    def set_node_state(self, node: str, wanted: NodeRequestKind, reason: str | None) -> str:
        """Cordon a node, whose pods continue, or uncordon it."""
        if wanted == NodeRequestKind.REPLACE:
            raise ConfigError("Kubernetes replaces no nodes; use `phalanx nodes drain`, and the cloud's own means")
        why = reason or "drained by phalanx"
        run_kubectl(["cordon" if wanted == NodeRequestKind.DRAIN else "uncordon", node])
        note = f"phalanx/reason={why}" if wanted == NodeRequestKind.DRAIN else "phalanx/reason-"
        run_kubectl(["annotate", "--overwrite", "node", node, note])
        return "cordoned" if wanted == NodeRequestKind.DRAIN else "schedulable"

    def read_task(self, environment: Mapping[str, str], paths: RunPaths) -> JobTask | None:
        """The pod's part. Kubernetes counts no starts of a run: its files say how many are over; a node that
        left ended none."""
        if JOB not in environment:
            return None
        index, offset = environment.get(INDEX, ""), environment.get(OFFSET, "")
        if not re.fullmatch(r"[0-9]{1,6}", index) or not re.fullmatch(r"[0-9]{1,6}", offset):
            raise ConfigError(f"{INDEX} is {index!r} and {OFFSET} {offset!r}; start the pod by an Indexed Job")
        over = [each for each in read_start_outcomes(paths) if each.code != ExitCode.UNHEALTHY]
        return PodTask(environment[JOB], int(offset) + int(index), environment.get(ADDRESS), len(over) + 1)

    def exit_code(self, code: int, leaves: bool, ends: bool) -> int:
        """By the rules of the manifest: the pod of a node that leaves is replaced; a run that no start is to follow
        ends as for a mistake."""
        if leaves and code == ExitCode.STOPPED:
            return ExitCode.UNHEALTHY
        return ExitCode.CONFIG if ends else code

    def find_rendezvous(self, paths: RunPaths, task: JobTask | None) -> str:
        """The address of node 0's pod."""
        address = task.address if isinstance(task, PodTask) else None
        return super().find_rendezvous(paths, task) if address is None else f"tcp://{address}"


def _select(number: str, verb: str, *words: str) -> list[str]:
    namespace, _, name = number.rpartition("/")
    return [verb, *words, "--selector", f"{RUN_LABEL}={name}", *(["--namespace", namespace] if namespace else [])]


def _delete(number: str, wait: bool) -> None:
    """Delete a run's objects; jobs go after their pods. `wait` until all are gone. A cluster without JobSets has
    none."""
    words = ("--ignore-not-found", f"--wait={str(wait).lower()}", "--cascade=foreground")
    limit_s = DELETE_S if wait else TIMEOUT_S
    try:
        run_kubectl(_select(number, "delete", OBJECTS, *words), timeout_s=limit_s)
    except RunError as error:
        if "the server doesn't have a resource type" not in str(error):
            raise
        run_kubectl(_select(number, "delete", OBJECTS.partition(",")[2], *words), timeout_s=limit_s)


def _items(text: str) -> list[dict[str, Any]]:
    try:
        return list(json.loads(text)["items"])
    except (ValueError, KeyError, TypeError):
        raise RunError("kubectl answered what is no list of objects; check `kubectl version`") from None


def read_job(number: str, text: str) -> Job | None:
    """The state of a run from its jobs and pods, as `kubectl get jobs,pods -o json` prints them; None without a job."""
    items = _items(text)
    jobs = [item for item in items if item["kind"] == "Job"]
    if not jobs:
        return None
    states = [_state(job) for job in jobs]
    pods = [item for item in items if item["kind"] == "Pod"]
    nodes = sorted({pod.get("spec", {}).get("nodeName", "") for pod in pods} - {""})
    order = ("Failed", "Terminating", "Running", "Pending", "Suspended", "Complete")  # of several the first counts
    state = min(states, key=order.index)
    over = state == "Failed" or all(each == "Complete" for each in states)
    waits = state in ("Pending", "Suspended")
    phase = QueuePhase.WAITS if waits else QueuePhase.ENDS if state == "Terminating" else QueuePhase.RUNS
    failed = sum(int(job.get("status", {}).get("failed", 0)) for job in jobs)
    reasons = [each.get("reason", "") for job in jobs for each in job.get("status", {}).get("conditions", [])]
    return Job(number, state, QueuePhase.OVER if over else phase, reason=next(filter(None, reasons), ""),
               nodes=",".join(nodes), restarts=failed)  # fmt: skip


def _state(job: Mapping[str, Any]) -> str:
    status = job.get("status", {})
    true = {each.get("type") for each in status.get("conditions", []) if each.get("status") == "True"}
    for name in ("Failed", "Complete", "Suspended"):
        if name in true:
            return name
    if "deletionTimestamp" in job["metadata"]:
        return "Terminating"
    return "Running" if int(status.get("ready", 0)) else "Pending"
