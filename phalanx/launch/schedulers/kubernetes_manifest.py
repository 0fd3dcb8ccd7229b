"""Kubernetes manifests of a run, by pure functions from the options: an Indexed Job, or a JobSet for several pools.

A pod is a node: its index is the node's number, and `phalanx keep` is its first process, which starts a killed agent
again. A failed pod is replaced by a new one, which returns to the run as a node does; the others continue meanwhile.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from phalanx.config.optimizers import find_optimizer
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.launch.schedulers.scheduler import LaunchOptions
from phalanx.launch.schedulers.slurm_script import parse_partition_counts, parse_time_limit
from phalanx.recovery import catalog

RUN_LABEL, QUEUE_LABEL = "phalanx/run", "kueue.x-k8s.io/queue-name"
JOB, OFFSET, ADDRESS, INDEX = "PHALANX_K8S_JOB", "PHALANX_K8S_OFFSET", "PHALANX_K8S_ADDRESS", "JOB_COMPLETION_INDEX"
SECRET_KEY = "secret"
PORT = 29400
NAME_MOST = 40  # characters; pods add theirs, of 63
HEADROOM_BYTES = 1 << 30  # of shared memory beside the state: progress pages, and what NCCL takes
GIB = 1 << 30
# A pod that is deleted hears of it first as a node whose machine will be gone; SIGTERM would stop the whole run.
LEAVE = "kill -PWR 1; while kill -0 1; do sleep 1; done"


@dataclass(frozen=True)
class PodGroup:
    """Pods of one kind of node: the first has the number `offset`; `pool` is the value of the nodes' label."""

    pool: str | None
    count: int
    offset: int


def make_name(run: Path) -> str:
    """The name of a run's objects: that of its folder, as far as Kubernetes takes it, and a digest of the path."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[: NAME_MOST - 16].strip("-")
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:6]
    return "-".join(part for part in ("phalanx", plain, digest) if part)


def render_manifest(config: Config, paths: RunPaths, options: LaunchOptions) -> str:
    """The objects of a run as YAML, without its Secret, whose random value `submit` makes. Raises ConfigError for what
    could not run."""
    root, wanted = paths.root.resolve(), config.k8s
    if wanted.image is None:
        raise ConfigError("k8s.image is not set; name the container image that has Phalanx, such as k8s.image=IMAGE")
    mounts = [_split_mount(text) for text in wanted.volumes]
    if not any(root.is_relative_to(path) for _, path in mounts):
        raise ConfigError(
            f"the run folder {root} is on no volume of the pods; mount a claim at the same path as here, such as "
            f"k8s.volumes=[CLAIM:{root.parent}]"
        )
    name, total = make_name(root), options.nodes + options.spares
    groups = make_groups(wanted.partition, total)
    jobs = [_job_spec(config, options, name, root, mounts, group, groups) for group in groups]
    labels = {RUN_LABEL: name} | ({} if wanted.queue is None else {QUEUE_LABEL: wanted.queue})
    meta: dict[str, Any] = {"name": name, "labels": labels}
    meta |= {} if wanted.namespace is None else {"namespace": wanted.namespace}
    if len(jobs) == 1:
        found = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": jobs[0]}]
        if total > 1:
            found.append(_service(meta, name))
    else:
        template = {"metadata": {"labels": {RUN_LABEL: name}}}
        replicated = [
            {"name": f"pool-{number}", "replicas": 1, "template": template | {"spec": job}}
            for number, job in enumerate(jobs)
        ]
        network = {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True}
        spec = {"network": network, "replicatedJobs": replicated}
        found = [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta, "spec": spec}]
    head = f"# Written by `phalanx launch`, which also makes the Secret {name} with a random value.\n" * (total > 1)
    return head + yaml.safe_dump_all(found, sort_keys=False, width=120)


def make_groups(partition: list[str], nodes: int) -> list[PodGroup]:
    """Pools with their numbers of pods, from names such as `a100:2`. Raises ConfigError."""
    groups, offset = [], 0
    for pool, count in parse_partition_counts(partition, nodes):
        groups.append(PodGroup(pool, count, offset))
        offset += count
    return groups


def _split_mount(text: str) -> tuple[str, Path]:
    claim, _, path = text.partition(":")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim) or not path.startswith("/"):
        raise ConfigError(f"k8s.volumes has {text!r}; write each as CLAIM:/PATH, of a PersistentVolumeClaim")
    return claim, Path(path)


def _service(meta: dict[str, Any], name: str) -> dict[str, Any]:
    """A headless Service, by which the pods of a Job have names."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {RUN_LABEL: name},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}


def _job_spec(
    config: Config, options: LaunchOptions, name: str, root: Path, mounts: list[tuple[str, Path]],
    group: PodGroup, groups: list[PodGroup],
) -> dict[str, Any]:  # fmt: skip
    wanted = config.k8s
    total = options.nodes + options.spares
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": group.count,
        "parallelism": group.count,
        "backoffLimit": total * (options.max_jobs if options.until_done else 1),
        "podFailurePolicy": {"rules": _failure_rules(options.until_done)},
    }
    if wanted.time is not None:
        limit_s = parse_time_limit(wanted.time)
        if not limit_s:
            raise ConfigError(f"k8s.time {wanted.time} is not a time; write minutes, H:MM:SS or D-HH:MM:SS")
        spec["activeDeadlineSeconds"] = limit_s
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(config.resilience.stop_notice_s),
        "containers": [_container(config, options, name, root, mounts, group, groups)],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{_shared_gib(config, options)}Gi"}},
            *(
                {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
                for number, (claim, _) in enumerate(mounts)
            ),
        ],
    }
    if total > 1 and len(groups) == 1:
        pod["subdomain"] = name
    if group.pool is not None:
        pod["nodeSelector"] = {wanted.pool_label: group.pool}
    spec["template"] = {"metadata": {"labels": {RUN_LABEL: name}}, "spec": pod}
    return spec


def _failure_rules(until_done: bool) -> list[dict[str, Any]]:
    """What follows the end of a pod: one that Kubernetes takes away is replaced, whatever it ended with; an unfit node
    counts, and its pod is placed again; a mistake in the recipe, or want of memory, would come again. A stop counts
    where it is resumed: that of `train.stop_after` comes again each time."""
    fatal = [int(ExitCode.CONFIG), int(ExitCode.OUT_OF_MEMORY)]
    asked = {"containerName": "phalanx", "operator": "In", "values": [int(ExitCode.STOPPED)]}
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "phalanx", "operator": "In", "values": fatal}},
        {"action": "Count" if until_done else "FailJob", "onExitCodes": asked},
        {
            "action": "Count",
            "onExitCodes": {"containerName": "phalanx", "operator": "In", "values": [int(ExitCode.UNHEALTHY)]},
        },
    ]


def _container(
    config: Config, options: LaunchOptions, name: str, root: Path, mounts: list[tuple[str, Path]],
    group: PodGroup, groups: list[PodGroup],
) -> dict[str, Any]:  # fmt: skip
    wanted, several = config.k8s, options.nodes + options.spares > 1
    first = f"{name}-0.{name}" if len(groups) == 1 else f"{name}-pool-0-0-0.{name}"
    environment: list[dict[str, Any]] = [{"name": JOB, "value": name}, {"name": OFFSET, "value": str(group.offset)}]
    if several:
        reference = {"secretKeyRef": {"name": name, "key": SECRET_KEY}}
        environment.append({"name": ADDRESS, "value": f"{first}:{PORT}"})
        environment.append({"name": "PHALANX_SECRET", "valueFrom": reference})
    limits: dict[str, Any] = {} if wanted.gpus_per_node is None else {wanted.gpu_resource: str(wanted.gpus_per_node)}
    limits |= {} if wanted.cpus is None else {"cpu": str(wanted.cpus)}
    limits |= {} if wanted.memory is None else {"memory": wanted.memory}
    folder = Path.cwd()
    return {
        "name": "phalanx",
        "image": wanted.image,
        "command": [wanted.python, "-m", "phalanx", "keep", str(root)],
        "workingDir": str(folder if any(folder.is_relative_to(path) for _, path in mounts) else root),
        "env": environment,
        "resources": {"limits": limits, "requests": dict(limits)} if limits else {},
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", LEAVE]}}},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": f"volume-{number}", "mountPath": str(path)} for number, (_, path) in enumerate(mounts)),
        ],
    }


def _shared_gib(config: Config, options: LaunchOptions) -> int:
    """Shared memory of a pod in GiB: what its ranks keep of steps and of a replica, as a dry run has it, and some room.
    Raises ConfigError as a dry run does."""
    if config.k8s.shared_memory_gib != "auto":
        return config.k8s.shared_memory_gib
    memory, replicate = config.resilience.in_memory_checkpoints, config.resilience.replicate_every
    if memory is False:
        return math.ceil(HEADROOM_BYTES / GIB)
    from phalanx.launch import dry_run_estimate  # imports numpy

    here = options.ranks or config.k8s.gpus_per_node or 1
    ranks = here * options.nodes
    found = dry_run_estimate.dry_run(config, ranks)
    state = found["host_memory"][catalog.NEWEST] / catalog.SLOTS
    # Ranks on CPUs repeat updates there, so that a gradient is kept, too; see `planner.memory`.
    repeats = config.k8s.gpus_per_node is None and ranks > 1 and find_optimizer(config.optim.name).replays
    keeps = catalog.list_copy_options(memory, replicate, options.nodes > 1, repeats)[0]
    width = 8 if config.train.dtype == "fp64" else 4
    taken = here * keeps.total_bytes(state, width * found["model"]["trained"] / ranks)
    return math.ceil((taken + HEADROOM_BYTES) / GIB)
