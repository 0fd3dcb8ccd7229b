"""The keys of how a run is operated: collectives, checkpoints, failures, callbacks, reports, Slurm. But for
comm.compress none of them defines the loss curve."""

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
    as_list,
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
        "how gradients that cross nodes, and all weights, are rounded, which makes them shorter and the curve another; "
        "int8: blocks of 64 numbers with a scale; bf16: each by itself",
        trajectory=True,
    )


class CheckpointSection(Section):
    """What survives."""

    every: CountOrZero = knob(100, "steps between checkpoints; 0: only at the end and when asked to stop")
    keep: Count = knob(3, "newest checkpoints kept")
    best: bool = knob(False, "keep the checkpoint of the evaluation with the least held-out loss beside these")


class StorageSection(Section):
    """Who may read what is written."""

    private: bool = knob(
        False,
        "true: the run folder gets mode 0700 and its files 0600, and so does what else the run writes, such as token "
        "files in data.cache; false: as the umask says",
    )


class ResilienceSection(Section):
    """What happens when something breaks."""

    in_memory_checkpoints: bool | Literal["auto"] = knob(
        "auto",
        "keep the last two steps in shared memory, where they outlive the ranks: after a failure the run goes on from "
        "the last step; auto: where there is room, and on accelerators every Nth where each would cost more than half "
        "a percent of it",
    )
    replicate_every: Annotated[
        Annotated[int, Field(ge=2, le=10**9)] | Literal["auto", "every_step", "off"], BeforeValidator(accept_off)
    ] = knob(
        "auto",
        "several nodes: every_step: each step is kept in the shared memory of a second node too, so that none is lost "
        "with a node; a number: every so many steps, and a lost node takes the run back to the last of these; auto: "
        "every_step where there is room; off: a lost node takes the run back to a checkpoint",
    )
    max_restarts: CountOrZero = knob(3, "restarts after failures without a step done in between, before giving up")
    max_identical_failures: Count = knob(3, "times that ranks may fail in the same step at the same line of code")
    on_lost_node: list[Literal["replace", "shrink", "wait"]] = knob(
        ["replace", "shrink", "wait"],
        "what is tried in turn when a node is lost; replace: a spare takes its ranks, shrink: the others divide them, "
        "wait: it may come back; nothing in the list: the run ends",
    )
    wait_for_node_s: Annotated[float, Field(gt=0, le=604800), BeforeValidator(reject_bool)] = knob(
        600.0, "seconds for which wait in on_lost_node waits"
    )
    rejoin_nodes: bool = knob(True, "a run that goes on with fewer nodes takes one back in as soon as it returns")
    heartbeat_timeout_s: Annotated[float, Field(ge=0.5, le=3600), BeforeValidator(reject_bool)] = knob(
        1.0,
        "several nodes: seconds of silence after which a node is lost; agents say ten times a second that they live",
    )
    hang_timeout_s: Annotated[
        Annotated[float, Field(gt=0, le=604800)] | Literal["auto", "off"], BeforeValidator(accept_off)
    ] = knob(
        "auto",
        "seconds without any change in a step after which a rank counts as hung, and all are started again; auto: "
        "ten times the longest of the last steps, and 20 at least; off: nobody looks",
    )
    on_nan: Literal["skip", "stop", "rollback"] = knob(
        "skip",
        "a gradient that is not finite; skip: the step is not taken, and 20 in a row end the run; stop: the first one "
        "does; rollback: back to a checkpoint, and past the data",
    )
    on_spike: Annotated[Literal["off", "skip", "stop", "rollback"], BeforeValidator(accept_off)] = knob(
        "off", "a loss far above those of the steps before; off: nobody looks; else as on_nan"
    )
    spike_factor: Positive = knob(
        10.0, "what is far: so many spreads (by the median deviation) above the median of the last 64 steps"
    )
    rollback_steps: Count = knob(10, "with rollback: so many steps up to the bad one have their data passed over")
    checksum_every: CountOrZero = knob(
        0, "steps after which parameters are compared between ranks that must hold the same; 0: never"
    )
    storage_timeout_s: Annotated[float, Field(gt=0, le=604800), BeforeValidator(reject_bool)] = knob(
        300.0, "seconds for which an operation of a remote store that fails or stalls is tried again"
    )
    health: Annotated[Literal["quick", "off"], BeforeValidator(accept_off)] = knob(
        "quick",
        "quick: each node is looked at before it is trained on, and again after a death; one that is not fit stops the "
        "start. off: none is",
    )


class CallbackSection(Section):
    """Python code that is called while a run trains."""

    code: Text | None = knob(None, "a Python file whose class Callback is told of steps, evaluations and checkpoints")
    options: dict[Text, JsonValue] = knob({}, "arguments of that class")


class ReportSection(Section):
    """What is shown."""

    tensorboard: bool = knob(True, "write TensorBoard event files")
    wandb: Text | None = knob(None, "Weights & Biases project to log to; needs the wandb package")


def one_line(value: str) -> str:
    """Refuse what would be a second line of a job's script."""
    if any(character in value for character in "\n\r"):
        raise ValueError("holds a line break, which a job's script would take for another line; write one line each")
    if any(unicodedata.category(character) == "Cc" for character in value if character != "\t"):
        raise ValueError("holds a control character, which no option of Slurm's and no shell takes; remove it")
    return value


Line = Annotated[Text, AfterValidator(one_line)]
Lines = Annotated[list[Line], BeforeValidator(as_list)]


class SlurmSection(Section):
    """What `phalanx launch` asks Slurm for, and what a node's shell does before training."""

    partition: Lines = knob(
        [],
        "where jobs go; several with numbers of nodes, such as a100:2 and h100:1, are one mixed job; default: Slurm's",
    )
    account: Line | None = knob(None, "whose share of the cluster it counts as")
    qos: Line | None = knob(None, "quality of service")
    time: Line | None = knob(None, "limit of one job, as Slurm writes it, in quotes: minutes, H:MM:SS or D-HH:MM:SS")
    lead_s: Count | Auto = knob(
        "auto", "how long before that limit a run is told to save and leave, s; auto: 300, of a short limit a fifth"
    )
    gpus_per_node: Line | Count | None = knob(None, "accelerators of a node, such as 8 or a100:4")
    cpus_per_task: Count | None = knob(None, "cores of a node; default: all that Slurm gives")
    exclusive: bool = knob(True, "whole nodes, shared with no other job")
    exclude: Line | None = knob(None, "nodes not to be used, such as n[3-4],n7")
    modules: Lines = knob([], "environment modules that each node loads")
    setup: Lines = knob([], "further lines of the shell on each node, such as `source env.sh`")
    python: Line | Auto = knob(
        "auto", "the Python that runs Phalanx on the nodes; auto: the one of `phalanx launch`, in a container python3"
    )
    container: Line | None = knob(None, "an image to train in: a .sif file, or what the container software calls it")
    container_by: Literal["auto", "apptainer", "pyxis"] = knob(
        "auto", "what runs the container; auto: apptainer for a .sif file, else pyxis"
    )
    mounts: Lines = knob([], "folders that the container sees beside the run's and the working folder")
    extra: Lines = knob([], "further options of sbatch, such as --constraint=a100")
