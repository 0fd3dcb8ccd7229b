"""Nodes that come to harm while they train: network namespaces of this machine, or those of a real Slurm on it.

Both have cables of a given rate, and nodes that train beside others that wait as spares.
"""

import contextlib
import functools
import math
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.links import Links, enter, links
from benchmarks.started import Run, ranks_of, start, strike
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.recovery import fencing, shared_memory
from tests.cluster import slurm_cluster
from tests.cluster.slurm_cluster import SlurmCluster

MBIT = 1000.0
RECIPE = "recipe.yaml"
WAYS = "resilience.on_lost_node=[replace, wait]"  # so that the layout stays
TRAINING = 2  # nodes that train


class Place:
    """Nodes with a run on them. `returns`: whether one that was lost can come back, as a spare."""

    name: str
    returns: bool
    run: Run
    total: int

    def ranks(self, node: int) -> dict[int, int]:
        """Processes by rank, of those that train on a node."""
        raise AssertionError

    def crash(self, node: int) -> None:
        """All processes of a node end at once; the network stays."""
        raise AssertionError

    def cut(self, node: int) -> None:
        """Pull a node's cable out."""
        raise AssertionError

    def signal_all(self, node: int, number: signal.Signals) -> None:
        """Send a signal to all processes of a node: it freezes, or thaws."""
        raise AssertionError

    def bring_back(self, node: int) -> None:
        """Have a node that was lost come back, after all that was there has ended."""
        raise AssertionError

    def seated(self) -> list[int]:
        """Nodes that have ranks now."""
        return [node for node in range(self.total) if self.ranks(node)]

    def leader(self) -> int:
        """The node that leads, as the newest epoch's file says."""
        told = fencing.read_newest_epoch(self.run.paths)
        return 0 if told is None else int(told["leader"])

    def whole(self) -> bool:
        """Whether all nodes are members of the job again, as its records say."""
        began = min((event["time"] for event in self.run.events(EventKind.ATTEMPT_STARTED)), default=math.inf)
        since = [
            event for event in self.run.events(EventKind.NODE_JOINED, EventKind.NODE_LOST) if event["time"] > began
        ]
        return began < math.inf and sum(1 if event["kind"] == EventKind.NODE_JOINED else -1 for event in since) >= 0


@dataclass
class Namespaces(Place):
    """Nodes with networks of their own; memory and disks are one."""

    made: Links
    folder: Path
    run: Run
    total: int
    name = "nodes"
    returns = True

    def begin(self, node: int) -> None:
        words = ["train", RECIPE, "--run-dir", "run", "--ranks", "1", "--nodes", str(TRAINING), "--node-rank",
                 str(node), "--spares", str(self.total - TRAINING), "--rendezvous", f"file://{self.folder}/meet",
                 "--rendezvous-timeout", "200", WAYS]  # fmt: skip
        output = self.folder / f"node-{node}.txt"
        inside = functools.partial(enter, self.made.names[node])
        self.run.commands[node] = start(words, self.folder, output, before=inside)

    def ranks(self, node: int) -> dict[int, int]:
        return self.run.commands[node].ranks()

    def crash(self, node: int) -> None:
        strike(self.run.commands[node].all(), signal.SIGKILL)

    def cut(self, node: int) -> None:
        self.made.plug(node, False)

    def signal_all(self, node: int, number: signal.Signals) -> None:
        strike(self.run.commands[node].all(), number)

    def bring_back(self, node: int) -> None:
        self.run.commands[node].end()
        self.made.plug(node, True)
        self.begin(node)


@dataclass
class Slurm(Place):
    """Nodes of a job of a real Slurm; each has a memory of its own. A node that was lost is lost to the job."""

    cluster: SlurmCluster
    run: Run
    total: int
    dead: set[int] = field(default_factory=set)
    name = "slurm"
    returns = False

    def node(self, number: int) -> str:
        return self.cluster.nodes[number]

    def ranks(self, node: int) -> dict[int, int]:
        return {} if node in self.dead else ranks_of(self.cluster.processes(self.node(node)))

    def crash(self, node: int) -> None:
        self.dead.add(node)
        self.cluster.crash(self.node(node))

    def cut(self, node: int) -> None:
        self.cluster.cut(self.node(node))

    def signal_all(self, node: int, number: signal.Signals) -> None:
        self.cluster.signal_all(self.node(node), number)


@contextlib.contextmanager
def namespaces(folder: Path, recipe: str, spares: int = 1, mbit: float = MBIT) -> Iterator[Namespaces]:
    """Nodes that have begun to train; none of it is left afterwards."""
    folder.mkdir(parents=True)
    (folder / RECIPE).write_text(recipe)
    total = TRAINING + spares
    with links([mbit] * total) as made:
        run = Run(RunPaths(folder / "run"), nodes=total)
        with run.ending():
            place = Namespaces(made, folder, run, total)
            for node in range(total):
                place.begin(node)
            yield place


@contextlib.contextmanager
def slurm(folder: Path, recipe: str, spares: int, mbit: float = MBIT) -> Iterator[Slurm]:
    """The same as a job of Slurm, by `phalanx launch`."""
    folder.mkdir(parents=True)
    (folder / RECIPE).write_text(recipe)
    total = TRAINING + spares
    with slurm_cluster.running(total) as cluster:
        for node in cluster.nodes:
            cluster.limit(node, mbit)
        run = Run(RunPaths(folder / "run"), nodes=total)
        place = Slurm(cluster, run, total)
        run.memory = functools.partial(_memory, place)
        words = [
            "launch",
            RECIPE,
            "--run-dir",
            "run",
            "--nodes",
            str(TRAINING),
            "--spares",
            str(spares),
            "--ranks",
            "1",
        ]
        cluster.run(sys.executable, "-m", "phalanx", *words, WAYS, folder=folder, timeout_s=120)
        yield place


def _memory(place: Slurm, node: int) -> Path:
    """Where this machine sees a node's shared memory."""
    if node in place.dead:
        return Path(os.devnull)
    return Path(f"/proc/{place.cluster.first(place.node(node))}/root") / shared_memory.SHM_ROOT.relative_to("/")


def why_not(where: str) -> str | None:
    """Why this machine cannot have such nodes, in a sentence; None where it can."""
    from benchmarks import links as by_namespaces

    return by_namespaces.why_not() if where == Namespaces.name else slurm_cluster.why_not()
