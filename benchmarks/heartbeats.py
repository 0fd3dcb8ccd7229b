"""Whether agents on a busy machine take each other for dead: gaps between signs of life under load.

    python3 benchmarks/heartbeats.py [--quick] [--json FILE] [--load N] [--nodes N]

Agents of `phalanx train`, one for each node of a run of several, all on this machine, train a small LLaMA on the CPU
while other processes compute without end. What arrives is measured where it counts, in the agents: how long none came
from another one, how long lay between two that were sent, and how long each agent was away from its loop, which is what
the gap would be if it sent them itself. docs/benchmarks.md says how to read the figures.
"""

import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phalanx.elastic.node import agent

if __name__ == "__main__":  # first of all: whoever forks agents must have no thread of a numerical library
    agent.preload(
        (
            "numpy",
            "torch",
            "torch._dynamo",
            "phalanx.cli.main",
            "phalanx.trainer.train_rank",
            "phalanx.launch.run",
        )
    )

from benchmarks.harness import Check, Row, at_most, machine, options, report, result
from benchmarks.started import command_line
from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.heartbeat import Heartbeat, HeartbeatSocket
from phalanx.elastic.membership.membership import Membership
from phalanx.elastic.node import node_agent
from phalanx.system.fork import fork

RECIPE = """
model: {{hidden: 128, layers: 4, heads: 4, intermediate: 344}}
data: {{source: stdlib, tokenizer_vocab: 1024, seq_len: 64, cache: {cache}}}
train: {{steps: 1000000, global_batch: 4, micro_batch: 2, dtype: fp32, compile: false, eval_sequences: 0}}
balance: {{batch: even}}
checkpoint: {{every: 50, keep: 1}}
resilience: {{heartbeat_timeout_s: 1, in_memory_checkpoints: false}}
report: {{tensorboard: false}}
"""
PATIENCE_S = 240.0
LIMITS = (0.2, 0.3, 0.5, 1.0)
WORST_S = 0.75  # what is asked of the longest gap, of the second after which a node is lost


class Arrivals(HeartbeatSocket):
    """Beats whose arrivals are noted."""

    found: ClassVar[
        list[tuple[int, float, int]]
    ] = []  # node, when it was heard, when it was sent by its sender's clock in ms

    def receive(self) -> Iterator[tuple[Heartbeat, tuple[str, int]]]:
        for beat, address in super().receive():
            self.found.append((beat.node, time.monotonic(), beat.number))
            yield beat, address


class Turns(Membership):
    """A circle that notes when it is tended."""

    found: ClassVar[list[float]] = []

    def poll_once(self) -> None:
        self.found.append(time.monotonic())
        super().poll_once()


def node(folder: Path, number: int, nodes: int) -> int:
    """Be the agent of a node until it is stopped, and leave what was seen."""
    node_agent.HeartbeatSocket, node_agent.Membership = Arrivals, Turns  # type: ignore[misc]
    os.chdir(folder)
    words = ["train", "recipe.yaml", "--run-dir", "run", "--ranks", "1", "--nodes", str(nodes), "--node-rank"]
    words += [str(number), "--rendezvous", f"file://{folder}/meet"]
    code = command_line(words, folder / f"node-{number}.txt")
    seen = {"code": code, "arrivals": Arrivals.found, "turns": Turns.found}
    (folder / f"seen-{number}.json").write_text(json.dumps(seen))
    return 0


def busy() -> int:
    while True:
        sum(range(1000))


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def row(what: str, found: list[float]) -> Row:
    return {
        what: "",
        "gaps": len(found),
        **{f"> {limit:g} s": sum(gap > limit for gap in found) for limit in LIMITS},
        "longest, s": max(found, default=0.0),
    }


def measure(folder: Path, nodes: int, load: int, seconds: float) -> tuple[list[Row], list[Check]]:
    """Have the agents meet, load the machine, and look at what has arrived until then."""
    paths = RunPaths(folder / "run")
    (folder / "recipe.yaml").write_text(RECIPE.format(cache=folder / "cache"))
    agents = [fork(functools.partial(node, folder, number, nodes)) for number in range(nodes)]
    others: list[tuple[int, int]] = []
    try:
        _wait(lambda: len(read_steps(paths.metrics)) >= 3, agents, folder)
        begun, before = time.monotonic(), len(read_steps(paths.metrics))
        others = [fork(busy) for _ in range(load)]
        time.sleep(seconds)
        ended, steps = time.monotonic(), len(read_steps(paths.metrics)) - before
        lost = [event for event in read_lines(paths.events) if event["kind"] == EventKind.NODE_LOST]
        os.kill(agents[0][0], signal.SIGTERM)
        _wait(lambda: all((folder / f"seen-{number}.json").exists() for number in range(nodes)), [], folder)
    finally:
        for pid, pidfd in [*others, *agents]:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so nobody else has the number
            os.waitpid(pid, 0)
            os.close(pidfd)
    heard: list[float] = []
    sent: list[float] = []
    turns: list[float] = []
    for number in range(nodes):
        seen = json.loads((folder / f"seen-{number}.json").read_text())
        turns += gaps([at for at in seen["turns"] if begun <= at <= ended])
        for other in {arrival[0] for arrival in seen["arrivals"]}:
            mine = [arrival for arrival in seen["arrivals"] if arrival[0] == other and begun <= arrival[1] <= ended]
            heard += gaps([at for _, at, _ in mine])
            sent += gaps([number_ms / 1000 for _, _, number_ms in mine])
    assert heard, f"nothing was heard; see {folder}"
    rows = [row("between two that were heard", heard)]
    rows.append(row("between two that were sent", sent))
    rows.append(row("away from the agent's loop", turns))
    shown: list[Row] = [{"signs of life": name, **{key: each[key] for key in list(each)[1:]}}
                        for each in rows for name in [next(iter(each))]]  # fmt: skip
    shown.append({"agents": nodes, "others that compute": load, "seconds": ended - begun, "steps": steps,
                  "nodes taken for lost": len(lost)})  # fmt: skip
    return shown, [
        at_most("nodes taken for lost that were well", float(len(lost)), 0.0),
        at_most("longest gap between two signs of life that were sent, s", max(sent), WORST_S),
    ]


def _wait(condition: Any, agents: list[tuple[int, int]], folder: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        for number, (_, pidfd) in enumerate(agents):
            ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            assert not ended, (folder / f"node-{number}.txt").read_text()
        assert time.monotonic() < until, f"nothing has happened for {PATIENCE_S:g} s; see {folder}"
        time.sleep(0.05)


def main() -> None:
    parser = options("Gaps between the signs of life of agents on a machine that is busy.")
    parser.add_argument("--load", type=int, default=14, help="processes that compute beside the ranks (default 14)")
    parser.add_argument("--nodes", type=int, default=2, help="agents, all on this machine (default 2)")
    given = parser.parse_args()
    if given.nodes < 2:
        parser.error("--nodes is at least 2: nobody watches an agent that is alone")
    with tempfile.TemporaryDirectory(prefix="phalanx-heartbeats-") as name:
        rows, checks = measure(Path(name), given.nodes, given.load, 20.0 if given.quick else 120.0)
    report(result("heartbeats", machine(None, 1), rows, checks), given.json)
    sys.exit(0 if all(check.holds for check in checks) else 1)


if __name__ == "__main__":
    main()
