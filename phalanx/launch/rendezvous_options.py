"""Rendezvous options of a multi-node job, from the command line or Slurm: the number of nodes and their rendezvous."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rich.text import Text

from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership import rendezvous
from phalanx.elastic.membership.rendezvous import RendezvousPoint
from phalanx.report.logs import open_terminal
from phalanx.system.slurm_env import read_auto_resume_step

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class RendezvousOptions:
    """Rendezvous options from the command line: `nodes` train, and `spares` more wait."""

    nodes: int
    node: int
    point: RendezvousPoint
    timeout_s: float
    quiet: bool = False  # whether progress messages are off
    to_stderr: bool = False  # whether that goes to standard error, as the output is a script's
    spares: int = 0

    @property
    def total(self) -> int:
        return self.nodes + self.spares

    def notify_user(self, text: str) -> None:
        """Print a message for the user of this node."""
        if not self.quiet:
            terminal = open_terminal(sys.stderr if self.to_stderr else None)
            named = f"node {self.node} of {self.total}: " if self.total > 1 else ""
            terminal.print(Text(f"{named}{text}"), soft_wrap=True)


ONE_NODE = RendezvousOptions(1, 0, RendezvousPoint("this node"), TIMEOUT_S)


def parse_rendezvous_options(
    nodes: int | None,
    node: int | None,
    where: str | None,
    timeout_s: float | None,
    environment: Mapping[str, str],
    spares: int | None = None,
) -> RendezvousOptions | None:
    """Check the options that belong together; None for a run on one node. Raises ConfigError."""
    if nodes is None:
        if read_auto_resume_step(environment) is not None:
            spares = None  # they belong to the meeting of a Slurm step
        given = {"--node-rank": node, "--rendezvous": where, "--rendezvous-timeout": timeout_s, "--spares": spares}
        alone = [name for name, value in given.items() if value is not None]
        if alone:
            raise ConfigError(f"{alone[0]} is for a run on several nodes; add --nodes, or remove it")
        return None
    total = nodes + (spares or 0)
    if total == 1:
        raise ConfigError("--nodes 1 is a run on one node, which needs no rendezvous; remove --nodes")
    named = f"--nodes {nodes}" + (f" --spares {spares}" if spares else "")
    if node is None:
        raise ConfigError(f"{named} needs --node-rank, the number of this node: 0 to {total - 1}")
    if node >= total:
        raise ConfigError(f"--node-rank {node} is not one of {total} nodes; give a number from 0 to {total - 1}")
    if where is None:
        raise ConfigError(
            f"{named} needs --rendezvous, where the nodes meet: tcp://HOST:PORT of node 0, or file:///FOLDER that all "
            "nodes share"
        )
    place = rendezvous.parse_rendezvous(where, environment)
    return RendezvousOptions(nodes, node, place, timeout_s or TIMEOUT_S, spares=spares or 0)


def rendezvous_from_allocation(
    paths: RunPaths, environment: Mapping[str, str], spares: int | None = None
) -> RendezvousOptions | None:
    """The meeting of a Slurm step that has one task on each of several nodes and was started with --auto-resume=1:
    each task is then a node's agent instead of a rank, and of these nodes `spares` wait. None for any other start.
    Raises ConfigError."""
    step = read_auto_resume_step(environment)
    if step is None:
        return None
    spares = spares or 0
    if spares >= step.nodes:
        raise ConfigError(f"--spares {spares} of the {step.nodes} nodes of this Slurm step leaves no node to train; "
                          "request more nodes or fewer spares")  # fmt: skip
    if paths.url is not None:
        raise ConfigError(
            f"srun --auto-resume=1 needs a run folder that all nodes share, by which they meet, but "
            f"{paths.display_name} is a URL; name a folder, or give --nodes, --node-rank and --rendezvous"
        )
    place = RendezvousPoint(str(paths.rendezvous), folder=paths.rendezvous.absolute())
    return RendezvousOptions(step.nodes - spares, step.node, place, TIMEOUT_S, spares=spares)
