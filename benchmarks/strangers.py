"""What strangers cost who open connections to the agents of a job without end, and do not know its secret.

    python3 benchmarks/strangers.py [--quick] [--json FILE] [--times N]

Two nodes, which are network namespaces of this machine, meet and train a small LLaMA, and a rank is killed:
undisturbed, and in turns with that while a third node holds 2,000 silent connections to each agent's port and opens 500
new ones a second, from one address. What is measured: the time that it takes a second node to join the first one, and
the time from the kill to the next step. docs/benchmarks.md says how to read the figures.
"""

import collections
import contextlib
import functools
import os
import resource
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

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

from benchmarks.harness import Row, at_most, machine, options, report, result
from benchmarks.links import Links, enter, links, why_not
from benchmarks.started import Run, start
from phalanx.core.run_paths import RunPaths
from phalanx.system.fork import fork

OPEN, RATE = 2000, 500.0  # silent connections to each port, and new ones a second
TURN_S = 0.01
STEPS = 30  # after which the rank is killed
RECIPE = """
model: {{hidden: 32, layers: 2, heads: 2, intermediate: 64}}
data: {{source: stdlib, tokenizer_vocab: 300, seq_len: 16, cache: {cache}}}
train: {{steps: 1000000, global_batch: 4, micro_batch: 2, dtype: fp32, compile: false, eval_sequences: 0}}
balance: {{batch: even}}
checkpoint: {{every: 1000, keep: 1}}
report: {{tensorboard: false}}
"""


def flood(namespace: str, targets: Sequence[tuple[str, int]]) -> int:
    """Be the strangers: hold so many connections to each target, and open new ones at the rate, without a word."""
    enter(namespace)
    files = 2 * OPEN * len(targets) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, max(files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
    held: collections.deque[socket.socket] = collections.deque()
    begun, opened = time.monotonic(), 0
    while True:
        due = OPEN + int((time.monotonic() - begun) * RATE)
        while opened < due:
            for target in targets:
                one = socket.socket()
                one.setblocking(False)
                with contextlib.suppress(OSError):  # it is on its way; or nobody listens there any more
                    one.connect_ex(target)
                held.append(one)
            opened += 1
        while len(held) > OPEN * len(targets):
            held.popleft().close()
        time.sleep(TURN_S)


@contextlib.contextmanager
def flooded(namespace: str, targets: Sequence[tuple[str, int]]) -> Iterator[None]:
    pid, pidfd = fork(functools.partial(flood, namespace, targets), session=True)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pidfd)


def ports_of(pid: int) -> list[int]:
    """The TCP ports at which a process listens, in its network, for others than its own machine."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return [int(port, 16) for address, port in found if not address.endswith("7F")]


def job(folder: Path, made: Links, disturbed: bool) -> Row:
    """One run: how long it took its second node to join, and its ranks to train again after the death of one."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE.format(cache=folder.parent / "cache"))
    run = Run(RunPaths(folder / "run"), nodes=2)
    words = ["train", "recipe.yaml", "--run-dir", "run", "--ranks", "1", "--nodes", "2", "--rendezvous",
             f"file://{folder}/meet"]  # fmt: skip
    outputs = [folder / f"node-{node}.txt" for node in range(2)]
    for output in outputs:
        output.touch()

    def begin(node: int) -> None:
        inside = functools.partial(enter, made.names[node])
        run.commands[node] = start([*words, "--node-rank", str(node)], folder, outputs[node], before=inside)

    def targets() -> list[tuple[str, int]]:
        return [
            (made.addresses[node], port) for node, command in run.commands.items() for port in ports_of(command.pid)
        ]

    with contextlib.ExitStack() as held:
        held.enter_context(run.ending())
        begin(0)
        run.wait(lambda: "waiting for node 1" in outputs[0].read_text() and targets())
        with flooded(made.names[2], targets()) if disturbed else contextlib.nullcontext():
            time.sleep(2.0)
            begun = time.time()
            begin(1)
            joined = run.wait(lambda: "node 1 (" in outputs[0].read_text()) - begun
            trains = run.wait(lambda: run.recorded()[1] >= 1) - begun
        with flooded(made.names[2], targets()) if disturbed else contextlib.nullcontext():
            time.sleep(2.0)
            before = run.recorded()[1]
            run.reach(before + STEPS)
            attempt, victim = run.attempt(), run.commands[1].ranks()[1]
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            recovered = run.wait(lambda: run.recorded()[0] > attempt) - killed
        said = "\n".join(output.read_text() for output in outputs)
        told = said.count("without the job's secret")
    return {"strangers": "2,000 and 500/s" if disturbed else "none", "joined, s": joined, "first step, s": trains,
            "recovered, s": recovered, "lines said": told}  # fmt: skip


def main() -> None:
    parser = options("What connections without end cost a job, from a stranger who does not know its secret.")
    parser.add_argument("--times", type=int, help="runs of each kind (default 7; 1 with --quick)")
    given = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(f"this machine cannot measure that: {reason}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-strangers-") as name, links([1000.0] * 3) as made:
        job(Path(name) / "first", made, disturbed=False)  # makes the token files
        for turn in range(given.times or (1 if given.quick else 7)):
            for disturbed in (False, True):
                rows.append(job(Path(name) / f"{turn}-{disturbed}", made, disturbed))
                print(rows[-1], flush=True)

    def middle(what: str, disturbed: bool) -> float:
        return statistics.median(row[what] for row in rows if (row["strangers"] != "none") == disturbed)

    checks = [
        at_most("time to join, over an undisturbed one's", middle("joined, s", True) / middle("joined, s", False), 2.0),
        at_most("time to the first step, over an undisturbed one's",
                middle("first step, s", True) / middle("first step, s", False), 2.0),
        at_most("recovery longer by, s", middle("recovered, s", True) - middle("recovered, s", False), 1.0),
    ]  # fmt: skip
    report(result("strangers", machine(None, 1), rows, checks), given.json)
    sys.exit(0 if all(check.holds for check in checks) else 1)


if __name__ == "__main__":
    main()
