"""Nodes as Slurm has them: taking one out of use, handing it in for replacement, giving it back, listing them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.elastic.supervisor.node_requests import NodeRequestKind
from phalanx.launch.slurm.commands import run_slurm

STATES = {NodeRequestKind.DRAIN: "drain", NodeRequestKind.REPLACE: "fail", NodeRequestKind.RETURN: "resume"}
# SageMaker HyperPod replaces a node whose state is `fail` with exactly this reason; elsewhere it is for the admin.
REPLACE_REASON = "Action:Replace"
REASON_MOST = 200  # characters
Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class SlurmNode:
    """`reason`: why it was taken out of use, empty where it is not."""

    name: str
    state: str
    reason: str


def set_state(node: str, wanted: NodeRequestKind, reason: str | None, run: Run = run_slurm) -> None:
    """Drain a node (its running jobs go on), hand it in for replacement, or give it back to Slurm.

    Takes an operator's rights. Raises ConfigError without Slurm, RunError with its words where it refuses.
    """
    command = ["scontrol", "update", f"nodename={node}", f"state={STATES[wanted]}"]
    default = {NodeRequestKind.DRAIN: "drained by phalanx", NodeRequestKind.REPLACE: REPLACE_REASON}.get(wanted)
    if (why := reason or default) is not None and wanted != NodeRequestKind.RETURN:
        command.append(f"reason={one_line(why)}")
    run(command)


def one_line(text: str) -> str:
    """A reason as Slurm can keep it."""
    return re.sub(r"\s+", " ", "".join(letter for letter in text if letter.isprintable() or letter.isspace()))[
        :REASON_MOST
    ].strip()


def list_slurm_nodes(run: Run = run_slurm) -> list[SlurmNode]:
    """All nodes that Slurm has, each once. Raises as `run_slurm`."""
    found = {}
    for line in run(["sinfo", "--noheader", "--Node", "--format=%N|%T|%E"]).splitlines():
        name, state, reason = (line.split("|", 2) + ["", ""])[:3]
        if name.strip():
            found[name.strip()] = SlurmNode(
                name.strip(), state.strip(), "" if reason.strip() == "none" else reason.strip()
            )
    return list(found.values())
