"""Slurm's view of a cluster's nodes, and changes of it, by commands on the node of the controller."""

import shlex
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import RunError
from phalanx.launch.schedulers.slurm import one_line
from phalanx.provision.machines import Machines, run_on
from phalanx.provision.state import NodeRecord

POLL_S = 0.25
SINFO = ("sinfo", "--noheader", "--Node", "--format=%N|%T|%E")
DOWN = ("down", "drained", "draining", "drain", "fail", "failing", "unknown", "reboot")


@dataclass(frozen=True)
class SlurmNodeView:
    """A node as Slurm has it: `state` as sinfo prints it, with * for a silent node; why it is not in use."""

    name: str
    state: str
    reason: str = ""

    @property
    def word(self) -> str:
        """The state without its marks."""
        return self.state.rstrip("*~#!%$@+^-")

    @property
    def silent(self) -> bool:
        """Whether its daemon does not answer."""
        return "*" in self.state

    @property
    def usable(self) -> bool:
        """Whether it takes jobs."""
        return not self.silent and self.word in ("idle", "allocated", "mixed", "completing")

    @property
    def busy(self) -> bool:
        """Whether jobs run on it."""
        return self.word in ("allocated", "mixed", "completing", "draining", "failing")


def parse_sinfo(text: str) -> dict[str, SlurmNodeView]:
    """What `sinfo --format=%N|%T|%E` has printed, by node."""
    found = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 2)
        if len(fields) == 3 and fields[0]:
            reason = "" if fields[2] == "none" else fields[2]
            found[fields[0]] = SlurmNodeView(fields[0], fields[1].lower(), reason)
    return found


class SlurmControl:
    """Slurm's commands, run where slurmctld runs. All raise RunError where Slurm does not answer."""

    def __init__(self, machines: Machines, controller: NodeRecord, log: Path) -> None:
        self._machines, self._controller, self._log = machines, controller, log

    def run(self, command: str, timeout_s: float = 30.0, check: bool = True) -> str:
        """Run a command line there."""
        return run_on(self._machines, self._controller, command, self._log, timeout_s, check=check)

    def query_nodes(self) -> dict[str, SlurmNodeView]:
        """All nodes that Slurm has; none while its controller does not answer."""
        return parse_sinfo(self.run(shlex.join(SINFO), check=False))

    def drain(self, nodes: Collection[str], reason: str) -> None:
        """Give nodes no new jobs."""
        self._update(nodes, f"state=drain reason={shlex.quote(one_line(reason))}")

    def mark_down(self, nodes: Collection[str], reason: str) -> None:
        """End the jobs of nodes that are dead, and requeue them at once."""
        self._update(nodes, f"state=down reason={shlex.quote(one_line(reason))}")

    def resume(self, nodes: Collection[str]) -> None:
        """Give nodes jobs again."""
        self._update(nodes, "state=resume")

    def _update(self, nodes: Collection[str], change: str) -> None:
        if nodes:
            self.run(f"scontrol update nodename={','.join(sorted(nodes))} {change}")

    def wait_ready(self, timeout_s: float) -> None:
        """Wait for slurmctld to answer."""
        until = time.monotonic() + timeout_s
        while "is UP" not in self.run("scontrol ping", check=False):
            if time.monotonic() > until:
                raise RunError(f"slurmctld does not answer on {self._controller.name}; see its /var/log/slurm")
            time.sleep(POLL_S)

    def wait_usable(self, nodes: Collection[str], timeout_s: float, joined: Callable[[str], None]) -> None:
        """Wait until nodes take jobs; those that are down or drained are resumed once their daemon answers."""
        left, until = set(nodes), time.monotonic() + timeout_s
        while left:
            views = self.query_nodes()
            again = [name for name in left if (view := views.get(name)) and view.word in DOWN and not view.silent]
            self.resume(again)
            for name in sorted(left):
                if (view := views.get(name)) is not None and view.usable:
                    left.discard(name)
                    joined(name)
            if left and time.monotonic() > until:
                said = ", ".join(
                    f"{name} ({views[name].state if name in views else 'unknown'})" for name in sorted(left)
                )
                raise RunError(
                    f"Slurm does not take these nodes: {said}; see /var/log/slurm there and on the controller"
                )
            if left:
                time.sleep(POLL_S)

    def wait_drained(self, nodes: Collection[str], timeout_s: float) -> None:
        """Wait until no job runs on nodes. Raises RunError with the jobs that do."""
        until = time.monotonic() + timeout_s
        while busy := [view.name for view in self.query_nodes().values() if view.name in nodes and view.busy]:
            if time.monotonic() > until:
                jobs = self.run(f"squeue --noheader --format=%i --nodelist={','.join(sorted(busy))}").split()
                raise RunError(
                    f"job {', '.join(jobs)} still runs on {', '.join(busy)}; the nodes stay drained: cancel it "
                    "(scancel), or repeat the command with a longer --drain-timeout"
                )
            time.sleep(POLL_S)
