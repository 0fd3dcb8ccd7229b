"""The knobs of a Slurm job, which `phalanx launch` reads: options of that command come before them."""

import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from phalanx.config.fields import Auto, Count, Section, Text, as_list, knob


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
