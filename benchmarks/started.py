"""Runs for benchmarks: commands of `phalanx` in processes of their own, what they have come to, and what they leave.

A command is forked from this process, which has imported what it needs, or begins as a user's does, with Python itself.
None outlives this process.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.json_lines import read_last_line
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.recovery import inventory, shared_memory, state_file
from phalanx.recovery.catalog import choose_restore_point
from phalanx.system.fork import fork

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 240.0
LOOK_S = 0.005  # between two looks at the commit words: who looks all the time takes from what it measures


@dataclass
class Command:
    """A command, and where its output is."""

    pid: int
    output: Path
    code: int | None = None  # once it is over; minus a signal's number where one has ended it

    def over(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def ranks(self) -> dict[int, int]:
        """The processes that train, by rank: those that write a rank's log."""
        return ranks_of(children(self.pid)) if self.code is None else {}

    def all(self) -> list[int]:
        """Its process, and all that it has started and that live."""
        found = [self.pid] if not self.over() else []
        for pid in found:
            found += children(pid)
        return found

    def end(self) -> None:
        """Kill it, and what it has started."""
        strike(self.all(), signal.SIGKILL)
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def said(self) -> str:
        """The end of what it has said."""
        return f"{self.output.stem} ended with {self.code}:\n{self.output.read_text(errors='replace')[-3000:]}"


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def ranks_of(pids: Sequence[int]) -> dict[int, int]:
    """Those of some processes that are ranks, by rank, as the logs that they write say."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            log = re.search(r"/rank-(\d+)\.log$", os.readlink(f"/proc/{pid}/fd/1"))
            if log is not None:
                found[int(log[1])] = pid
    return found


def strike(pids: Sequence[int], number: int) -> None:
    """Send a signal to processes, as far as they still live."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def command_line(arguments: Sequence[str], output: Path) -> int:
    """In a forked child: be `phalanx` with these arguments; returns the exit code."""
    from phalanx.cli import root

    _speak_into(output)
    sys.argv = ["phalanx", *arguments]
    try:
        root.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def start(
    words: Sequence[str],
    folder: Path,
    output: Path,
    warm: bool = True,
    before: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] | None = None,
) -> Command:
    """Start `phalanx` with such arguments in a folder, forked if `warm`; `before` is called in its process first. What
    is not warm is a command of Python: `-m phalanx` and so on."""

    def child() -> int:
        os.chdir(folder)
        before()
        if warm:
            return command_line(words, output)
        _speak_into(output)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = dict(os.environ, PYTHONPATH=path) | dict(environment or {})
        os.execve(sys.executable, [sys.executable, *words], own)

    # In a session of its own, as a user's would be: Linux serves sessions alike (sched_autogroup).
    pid, pidfd = fork(child, session=True)
    os.close(pidfd)
    return Command(pid, output)


def _speak_into(output: Path) -> None:
    """Have output and errors, also those of processes to come, go into a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for each in (1, 2):
        os.dup2(descriptor, each)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


# -------------------------------------------------------------------------------------------------------- what there is


@dataclass
class Tail:
    """The lines of a file of records so far, each of which is read once."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    at: int = 0

    def read(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            file.seek(self.at)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self.at += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):  # a torn one, of a writer that was killed
                    self.lines.append(json.loads(line))
        return self.lines


@dataclass
class Run:
    """A run's folder and the commands of its nodes, by node; `memory(node)` is where a node's shared memory is."""

    paths: RunPaths
    commands: dict[int, Command] = field(default_factory=dict)
    nodes: int = 1
    memory: Callable[[int], Path] = lambda node: shared_memory.SHM_ROOT
    events_so_far: Tail = field(init=False)
    _told: bytes = b""  # whose memory it is: what is looked at every few milliseconds is not found out each time

    def __post_init__(self) -> None:
        self.events_so_far = Tail(self.paths.events)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events_so_far.read() if event.get("kind") in kinds]

    def attempt(self) -> int:
        """The attempt that was started last."""
        return max((int(event["attempt"]) for event in self.events(EventKind.ATTEMPT_STARTED)), default=0)

    def folders(self) -> list[Path]:
        """In the shared memory of each node; a path that leads nowhere where there is none yet."""
        places = [(node, self.memory(node)) for node in range(self.nodes)]
        return [shared_memory.find_folder(self.paths, node, place) or place / "none" for node, place in places]

    def committed(self) -> int:
        """The newest step that all ranks hold in the memory of their nodes; 0: none."""
        return self._newest("")

    def replicated(self) -> int:
        """The newest step of which the memories of other nodes have a replica of every rank."""
        return self._newest(inventory.REPLICAS)

    def _newest(self, within: str) -> int:
        run, held = self._told or state_file.compute_run_id(self.paths.events), {}
        for node, folder in enumerate(self.folders()):
            with contextlib.suppress(OSError):  # a file has just been removed, or the node is gone
                held[node] = [
                    inventory.make_file_info(facts) for facts in inventory.read_state_files(folder / within, run)
                ]
        choice = choose_restore_point(held)
        self._told = run if choice is not None else b""
        return max(0, choice.step) if choice is not None else 0

    def recorded(self) -> tuple[int, int]:
        """(attempt, step) of the last line of its metrics."""
        line = read_last_line(self.paths.metrics)
        return (int(line["attempt"]), int(line["step"])) if line else (0, 0)

    def step_s(self) -> float:
        """Seconds of a step by the records so far, first steps of attempts left out; the median."""
        steps = read_steps(self.paths.metrics)
        return statistics.median(now["step_s"] for now, before in zip(steps[1:], steps, strict=False)
                                 if now["attempt"] == before["attempt"])  # fmt: skip

    def whole(self) -> bool:
        """Whether all ranks had their part in the last step; of some systems others go on without one that is lost."""
        return True

    def filled(self, since: float, until: float) -> float:
        """Which part of their batches the steps had that were committed between two times (seconds since the epoch)."""
        return 1.0

    def partial(self) -> set[int]:
        """The steps that not all ranks had a part in."""
        return set()

    def wait(self, condition: Callable[[], Any], patience_s: float = PATIENCE_S, look_s: float = LOOK_S) -> float:
        """Seconds since the epoch when a condition came to hold. At least one command has to live until then."""
        until = time.monotonic() + patience_s
        while not condition():
            gone = bool(self.commands) and all(command.over() for command in self.commands.values())
            assert not gone or condition(), "\n".join(command.said() for command in self.commands.values())
            assert time.monotonic() < until, f"nothing has happened for {patience_s:g} s; see {self.paths.root}"
            time.sleep(look_s)
        return time.time()

    def reach(self, step: int) -> None:
        """Wait until a step is recorded."""
        self.wait(lambda: self.recorded()[1] >= step)

    def end(self) -> None:
        """Kill what still runs, and take away what it leaves in shared memory."""
        for command in self.commands.values():
            command.end()
        for node, folder in enumerate(self.folders()):
            if folder.is_dir():
                with shared_memory.hold_folder(self.paths, node, self.memory(node)) as memory:
                    memory.persists = False

    @contextlib.contextmanager
    def ending(self) -> Iterator["Run"]:
        try:
            yield self
        finally:
            self.end()
