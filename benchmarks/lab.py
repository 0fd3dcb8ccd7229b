"""Unlike nodes on one machine, in which `phalanx` runs as a user starts it: devices with parts of a core, limits of
memory, and cables of a given rate.

A node is a network namespace (links.py), each of its ranks a control group (throttle.py), which a rank enters as soon
as its process is there. Commands are forked from this process, which has imported what they need and has one thread.
Needs root; the machine's own interfaces are not touched.
"""

import contextlib
import ctypes
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import links
from benchmarks.links import Links
from benchmarks.started import children, command_line, ranks_of
from benchmarks.throttle import Throttle, throttle
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.node import agent
from phalanx.system.fork import fork, kill_group

PRELOAD = ("numpy", "torch", "torch._dynamo", "phalanx.cli.main", "phalanx.trainer.train_rank",
           "phalanx.trainer.resolve", "phalanx.autotune.measure", "phalanx.launch.run",
           "phalanx.launch.measure_devices")  # fmt: skip
LOOK_S, WATCH_S = 0.005, 0.05  # between two looks at processes: while ranks are awaited, and later
PATIENCE_S = 900.0
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, RETURNED_BYTES = -1, -3, 64 * 1024  # of mallopt


@dataclass(frozen=True)
class Node:
    """`cores` of each of its devices; `mbit` of its cable, each way."""

    cores: tuple[float, ...]
    mbit: float = 1000.0


@dataclass
class Ended:
    """A command that has ended on all nodes: exit codes by node, what was said, and by rank the most bytes that were
    seen resident in its process."""

    codes: list[int]
    said: list[str]
    peaks: dict[int, int] = field(default_factory=dict)

    @property
    def well(self) -> bool:
        return not any(self.codes)


@dataclass
class Lab:
    """Nodes in `folder`, which all of them see. `memory` limits what the devices' processes may hold, in bytes."""

    nodes: Sequence[Node]
    folder: Path
    limits: Throttle
    places: Links | None
    memory: dict[int, int] = field(default_factory=dict)  # by device, counted through all nodes
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def world(self) -> int:
        return sum(len(node.cores) for node in self.nodes)

    def hardware(self, recipe: str, *words: str) -> Path:
        """The file that `phalanx hardware` writes of these nodes, or of those that `words` say."""
        file = self.folder / f"hardware-{next(self.numbers)}.json"
        ended = self.run("hardware", recipe, *words, "--out", str(file))
        assert ended.well, f"phalanx hardware ended with {ended.codes}:\n{''.join(ended.said)[-3000:]}"
        return file

    def train(
        self, recipe: str, name: str, *words: str, ranks: Sequence[tuple[int, int]] | None = None
    ) -> tuple[RunPaths, Ended]:
        """`phalanx train` into a folder of that name, on all nodes or as `run` says."""
        paths = RunPaths(self.folder / name)
        return paths, self.run("train", recipe, *words, "--run-dir", str(paths.root), ranks=ranks)

    def run(self, command: str, *words: str, ranks: Sequence[tuple[int, int]] | None = None) -> Ended:
        """A command of `phalanx` on all nodes, or with so many `ranks` on each of some: pairs of a node and a number,
        in order of rank. Nodes meet where there are several. It has ended on all of them, after PATIENCE_S by force."""
        started = _Started(self, command, words, ranks or [(n, len(node.cores)) for n, node in enumerate(self.nodes)])
        return _watch([started])[0]

    def train_apart(self, name: str, recipe: str, words: Sequence[Sequence[str]]) -> list[tuple[RunPaths, Ended]]:
        """As `train` on each node by itself, with words of its own, all at the same time."""
        paths = [RunPaths(self.folder / f"{name}-{node}") for node in range(len(self.nodes))]
        started = [
            _Started(self, "train", (recipe, *said, "--run-dir", str(path.root)), [(number, len(node.cores))])
            for number, (node, said, path) in enumerate(zip(self.nodes, words, paths, strict=True))
        ]
        return list(zip(paths, _watch(started), strict=True))


class _Started:
    """A command that runs on nodes."""

    def __init__(self, of: Lab, command: str, words: Sequence[str], ranks: Sequence[tuple[int, int]]) -> None:
        self.lab, self.number = of, next(of.numbers)
        begin = list(itertools.accumulate((len(node.cores) for node in of.nodes), initial=0))
        # Of each rank its node and which of its devices; and the number of that device among all.
        self.places = [(node, device) for node, count in ranks for device in range(count)]
        self.groups = [begin[node] + device for node, device in self.places]
        self.outputs = [of.folder / f"said-{self.number}-{node}.txt" for node, _ in ranks]
        self.codes: dict[int, int] = {}  # by place in `ranks`
        self.running: dict[int, tuple[int, int]] = {}
        self.inside: dict[int, int] = {}  # rank by process
        self.peaks: dict[int, int] = {}
        for place, ((node, count), output) in enumerate(zip(ranks, self.outputs, strict=True)):
            arguments = [command, *words, "--ranks", str(count)]
            if len(ranks) > 1:
                arguments += ["--nodes", str(len(ranks)), "--node-rank", str(place), "--rendezvous-timeout", "120"]
                arguments += ["--rendezvous", f"file://{of.folder}/meet-{self.number}"]
            name = None if of.places is None else of.places.names[node]
            self.running[place] = fork(partial(_phalanx, name, of.folder, arguments, output))

    def look(self) -> None:
        """Put each rank that has appeared under its limits, and note what it holds and which nodes have ended."""
        for place, (pid, pidfd) in list(self.running.items()):
            for rank, child in ranks_of(children(pid)).items():
                if child not in self.inside:
                    self.inside[child] = rank
                    with contextlib.suppress(OSError):  # it has just ended
                        self._hold(rank, child)
            if os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self.codes[place] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(pidfd)
                del self.running[place]
        for child, rank in self.inside.items():
            self.peaks[rank] = max(self.peaks.get(rank, 0), _resident(child))

    @property
    def awaits_ranks(self) -> bool:
        return len(self.inside) < len(self.places)

    def ended(self) -> Ended:
        codes = [code for _, code in sorted(self.codes.items())]
        return Ended(codes, [file.read_text() for file in self.outputs], self.peaks)

    def kill(self) -> None:
        for pid, _ in self.running.values():
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Leave nothing behind."""
        for pid, pidfd in self.running.values():
            kill_group(pid)
            os.waitpid(pid, 0)
            os.close(pidfd)
        self.running = {}

    def _hold(self, rank: int, pid: int) -> None:
        (node, device), group, limits = self.places[rank], self.groups[rank], self.lab.limits
        limits.limit(group, self.lab.nodes[node].cores[device])
        if limits.limits_memory:
            limits.limit_memory(group, self.lab.memory.get(group))
        limits.enter(group, pid)


def _watch(commands: Sequence[_Started]) -> list[Ended]:
    """Until all have ended, after PATIENCE_S by force."""
    until = time.monotonic() + PATIENCE_S
    try:
        while any(each.running for each in commands):
            for each in commands:
                each.look()
                if time.monotonic() > until:
                    each.kill()
            time.sleep(LOOK_S if any(each.running and each.awaits_ranks for each in commands) else WATCH_S)
        return [each.ended() for each in commands]
    finally:
        for each in commands:
            each.end()


@contextlib.contextmanager
def lab(nodes: Sequence[Node], folder: Path) -> Iterator[Lab]:
    """Such nodes; one alone has no cable. Nothing of them is left afterwards."""
    agent.preload(PRELOAD)
    with contextlib.ExitStack() as held:
        limits = held.enter_context(throttle(sum(len(node.cores) for node in nodes)))
        places = held.enter_context(links.links([node.mbit for node in nodes])) if len(nodes) > 1 else None
        yield Lab(nodes, folder, limits, places)


def return_memory() -> None:
    """Have this process, and all that it forks, give memory back to the system as soon as it is free, so that what is
    resident is what is in use. It costs time."""
    system = ctypes.CDLL(None)
    for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        assert system.mallopt(option, RETURNED_BYTES) == 1, "mallopt"


def why_not() -> str | None:
    """Why this machine cannot have such nodes, in a sentence; None where it can."""
    if (reason := links.why_not()) is not None:
        return reason
    with throttle(1) as limits:
        if not limits.limits_memory:
            return "limits of memory are control groups, and this process may make none of the memory controller"
    return None


def steps_s(paths: RunPaths, warm: int) -> list[float]:
    """Seconds of each recorded step of a run but the first ones."""
    return [float(step["step_s"]) for step in read_steps(paths.metrics)][warm:]


def write_text(file: Path, words: int = 120_000) -> None:
    """Something to learn: lines of made-up words, always the same."""
    draw = random.Random(1)
    known = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(400)]
    weights = [1.0 / (number + 1) for number in range(len(known))]
    lines = [json.dumps({"text": " ".join(draw.choices(known, weights, k=100))}) for _ in range(words // 100)]
    file.write_text("\n".join(lines) + "\n")


# ---------------------------------------------------------------------------------------------------------- in a child


def _phalanx(namespace: str | None, folder: Path, arguments: Sequence[str], output: Path) -> int:
    if namespace is not None:
        links.enter(namespace)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # of an interface that is not there
            os.environ.pop(name, None)
    # A device is a part of one core, so two threads of a rank would only take its time from each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(folder)
    return command_line(arguments, output)


def _resident(pid: int) -> int:
    """The most bytes that a process has had resident since it last asked to count anew; 0 of one that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
