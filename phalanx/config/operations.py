"""Recipe keys of operation: collectives, checkpoints, resilience, callbacks, reports, Slurm. Only comm.compress defines
the loss curve."""

import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from phalanx.config.fields import (
    Auto,
    Count,
    CountOrZero,
    Positive,
    Section,
    Text,
    accept_off,
    as_address,
    as_list,
    as_web_address,
    knob,
    reject_bool,
)


class CommSection(Section):
    """Collectives."""

    timeout_s: Annotated[float, Field(gt=0, le=604800), BeforeValidator(reject_bool)] = knob(
        600.0, "seconds after which a collective that does not end is an error; a week at most"
    )
    compress: Literal["none", "bf16", "int8"] = knob(
        "none",
        "compression of gradients between nodes, and of all weights; changes the loss curve; "
        "int8: blocks of 64 numbers with a scale; bf16: each by itself",
        trajectory=True,
    )


class CheckpointSection(Section):
    """What survives."""

    every: CountOrZero = knob(100, "steps between checkpoints; 0: only at the end and when asked to stop")
    keep: Count = knob(3, "newest checkpoints kept")
    best: bool = knob(False, "also keep the checkpoint with the lowest held-out loss")


class StorageSection(Section):
    """File permissions of a run."""

    private: bool = knob(
        False,
        "true: the run folder gets mode 0700 and its files 0600, as do other files of the run, such as token files "
        "in data.cache; false: by the umask",
    )


class ResilienceSection(Section):
    """Fault tolerance: checkpoints in memory, restarts, lost nodes, anomalies of the loss."""

    in_memory_checkpoints: bool | Literal["auto"] = knob(
        "auto",
        "keep the last two steps in shared memory, which outlives the ranks: after a failure the run resumes from "
        "the last step; auto: if they fit; on accelerators every Nth step if each would cost more than 0.5 % of a step",
    )
    replicate_every: Annotated[
        Annotated[int, Field(ge=2, le=10**9)] | Literal["auto", "every_step", "off"], BeforeValidator(accept_off)
    ] = knob(
        "auto",
        "several nodes; every_step: each step is also kept in the shared memory of a second node, and no step is "
        "lost with a node; a number: every Nth step, to which the run goes back if a node is lost; auto: "
        "every_step if it fits; off: after the loss of a node the run resumes from a checkpoint",
    )
    max_restarts: CountOrZero = knob(
        3, "restarts after consecutive failures without a step between them, before the run ends"
    )
    max_identical_failures: Count = knob(3, "failures allowed in the same step at the same line of code")
    on_lost_node: list[Literal["replace", "shrink", "wait"]] = knob(
        ["replace", "shrink", "wait"],
        "actions after a node is lost, in order; replace: a spare takes its ranks, shrink: the others divide them, "
        "wait: it may return; an empty list: the run ends",
    )
    wait_for_node_s: Annotated[float, Field(gt=0, le=604800), BeforeValidator(reject_bool)] = knob(
        600.0, "seconds that wait in on_lost_node waits"
    )
    rejoin_nodes: bool = knob(True, "a run with fewer nodes admits a node again as soon as it returns")
    heartbeat_timeout_s: Annotated[float, Field(ge=0.5, le=3600), BeforeValidator(reject_bool)] = knob(
        1.0,
        "several nodes: seconds without a heartbeat after which a node is lost; agents send ten a second",
    )
    hang_timeout_s: Annotated[
        Annotated[float, Field(gt=0, le=604800)] | Literal["auto", "off"], BeforeValidator(accept_off)
    ] = knob(
        "auto",
        "seconds without progress within a step after which a rank counts as hung, and all ranks restart; auto: "
        "ten times the longest of the last steps, at least 20; off: no hang detection",
    )
    on_nan: Literal["skip", "stop", "rollback"] = knob(
        "skip",
        "action for a gradient that is not finite; skip: skip the step, 20 in a row end the run; stop: end the "
        "run; rollback: resume from a checkpoint and skip the data",
    )
    on_spike: Annotated[Literal["off", "skip", "stop", "rollback"], BeforeValidator(accept_off)] = knob(
        "off", "action for a loss far above those of the steps before; off: none; else as on_nan"
    )
    spike_factor: Positive = knob(
        10.0, "threshold of a spike: this many median absolute deviations above the median of the last 64 steps"
    )
    rollback_steps: Count = knob(10, "rollback: data of this many steps, up to the bad one, are skipped")
    stop_notice_s: Annotated[float, Field(ge=1, le=86400), BeforeValidator(reject_bool)] = knob(
        30.0,
        "seconds that a machine has left after a stop signal or a notice of its end; ranks that have not begun to save "
        "after a third of it are ended, and the last step in memory is saved",
    )
    preemption_notice: Annotated[Literal["auto", "aws", "gcp", "azure", "off"], BeforeValidator(accept_off)] = knob(
        "auto",
        "cloud whose metadata service is asked whether this machine will be taken away; the node then leaves the run; "
        "auto: the cloud that the firmware names, if any; off: none",
    )
    metadata_url: Annotated[Text | None, BeforeValidator(as_web_address)] = knob(
        None, "base address of that service; null: the cloud's own"
    )
    checksum_every: CountOrZero = knob(
        0, "steps between comparisons of parameters among ranks that have the same; 0: never"
    )
    storage_timeout_s: Annotated[float, Field(gt=0, le=604800), BeforeValidator(reject_bool)] = knob(
        300.0, "seconds of retries for a failing or stalled operation of a remote store"
    )
    health: Annotated[Literal["quick", "off"], BeforeValidator(accept_off)] = knob(
        "quick",
        "quick: health check of each node at the start and after a rank dies; an unhealthy node stops the start; "
        "off: no checks",
    )


class CallbackSection(Section):
    """User callbacks during training."""

    code: Text | None = knob(
        None, "a Python file whose class Callback is called after steps, evaluations and checkpoints"
    )
    options: dict[Text, JsonValue] = knob({}, "arguments of that class")


class ReportSection(Section):
    """Reporting."""

    tensorboard: bool = knob(True, "write TensorBoard event files")
    wandb: Text | None = knob(None, "Weights & Biases project to log to; needs the wandb package")
    prometheus: Annotated[int | Text | None, BeforeValidator(as_address)] = knob(
        None, "serve metrics for Prometheus on this port of the leading node's loopback address, or at ADDRESS:PORT"
    )
    webhook: Text | None = knob(
        None,
        "file with the URL that alerts are posted to, in Slack's format; the URL itself is a secret",
    )


def one_line(value: str) -> str:
    """Refuse line breaks and control characters in a job's script."""
    if any(character in value for character in "\n\r"):
        raise ValueError("has a line break; give one entry for each line")
    if any(unicodedata.category(character) == "Cc" for character in value if character != "\t"):
        raise ValueError("has a control character; remove it")
    return value


Line = Annotated[Text, AfterValidator(one_line)]
Lines = Annotated[list[Line], BeforeValidator(as_list)]


class SlurmSection(Section):
    """Slurm job options of `phalanx launch`, and shell lines before training."""

    partition: Lines = knob(
        [],
        "partition; several with node counts, such as a100:2 and h100:1, form one heterogeneous job; default: Slurm's",
    )
    account: Line | None = knob(None, "account to charge")
    qos: Line | None = knob(None, "quality of service")
    time: Line | None = knob(None, "time limit of one job, in quotes: minutes, H:MM:SS or D-HH:MM:SS")
    lead_s: Count | Auto = knob(
        "auto", "seconds before the time limit at which a run saves and stops; auto: 300, or a fifth of a short limit"
    )
    gpus_per_node: Line | Count | None = knob(None, "accelerators per node, such as 8 or a100:4")
    cpus_per_task: Count | None = knob(None, "cores per node; default: all that Slurm gives")
    exclusive: bool = knob(True, "whole nodes, shared with no other job")
    exclude: Line | None = knob(None, "nodes to exclude, such as n[3-4],n7")
    modules: Lines = knob([], "environment modules to load on each node")
    setup: Lines = knob([], "further lines of the shell on each node, such as `source env.sh`")
    python: Line | Auto = knob(
        "auto", "the Python that runs Phalanx on the nodes; auto: the one of `phalanx launch`, in a container python3"
    )
    container: Line | None = knob(None, "container image: a .sif file, or a name of the container runtime")
    container_by: Literal["auto", "apptainer", "pyxis"] = knob(
        "auto", "container runtime; auto: apptainer for a .sif file, else pyxis"
    )
    mounts: Lines = knob([], "folders to mount in the container beside the run's and the working folder")
    extra: Lines = knob([], "further options of sbatch, such as --constraint=a100")


class KubernetesSection(Section):
    """Objects of `phalanx launch --on k8s`."""

    image: Line | None = knob(None, "container image with Phalanx (contrib/docker)")
    namespace: Line | None = knob(None, "namespace; default: that of kubectl's context")
    volumes: Lines = knob([], "volumes as CLAIM:/PATH, mounted at the same path as where `phalanx launch` runs")
    partition: Lines = knob([], "node pool; several with node counts, such as a100:2 and h100:1, form a JobSet")
    pool_label: Line = knob("cloud.google.com/gke-nodepool", "label of nodes whose value is the pool's name")
    gpus_per_node: Count | None = knob(None, "accelerators per pod")
    gpu_resource: Line = knob("nvidia.com/gpu", "resource that counts them")
    cpus: Count | None = knob(None, "cores per pod")
    memory: Line | None = knob(None, "memory per pod, such as 256Gi, of which /dev/shm is a part")
    shared_memory_gib: Count | Auto = knob(
        "auto", "GiB of /dev/shm per pod; auto: what in-memory checkpoints take, and 1"
    )
    queue: Line | None = knob(None, "local queue of Kueue")
    time: Line | None = knob(None, "time limit, in quotes: minutes, H:MM:SS or D-HH:MM:SS")
    python: Line = knob("python3", "the Python that runs Phalanx in the container")
