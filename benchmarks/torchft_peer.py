"""torchft beside Phalanx: a replica of the model for each rank, in a process that is started again whenever it ends.

torchft has no launcher of its own; its users give each replica a torchrun or a loop in a shell. This one starts a
replica sooner than either. All servers are on the loopback interface.
"""

import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.started import Command, Run, Tail, start
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths

LOOPBACK = "127.0.0.1"
# torchft asks a replica's manager every 100 ms for a heartbeat, and takes five seconds without one for its end.
HEARTBEAT_TIMEOUT_MS = 500
QUORUM_TICK_MS = 20  # 100 by default
JOIN_TIMEOUT_MS = 1000  # for replicas that live and are late; 60,000 by default
SAVED_EVERY = 10  # steps, as torchrun's
JOB, LIGHTHOUSE = "job.json", "lighthouse"
IN_VAIN = 4  # ends of replicas one after the other, none of which anybody has caused, before the first step
SAME = 3  # first steps whose losses are compared


def why_not() -> str | None:
    """Why torchft cannot be measured here; None if it can."""
    if find_spec("torchft") is None:
        return "torchft is not installed (pip install torchft==0.2.0)"
    tried = subprocess.run([sys.executable, "-c", "import torchft"], capture_output=True, text=True, timeout=120)
    reason = tried.stderr.strip().rpartition("\n")[2] or f"exit code {tried.returncode}"
    return f"torchft cannot be imported ({reason})" if tried.returncode else None


@dataclass
class TorchFt(Run):
    """A run of torchft; each replica leaves a line for every step that it has committed."""

    replicas: int = 1
    tails: list[Tail] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tails = [Tail(lines_of(self.paths.root, replica)) for replica in range(self.replicas)]

    def newest(self) -> dict[str, Any]:
        """The line of the last step that any replica has committed."""
        last = [lines[-1] for tail in self.tails if (lines := tail.read())]
        return max(last, key=lambda line: line["step"], default={"step": 0, "participants": 0, "time": 0.0})

    def committed(self) -> int:
        return int(self.newest()["step"])

    def recorded(self) -> tuple[int, int]:
        return 0, self.committed()

    def whole(self) -> bool:
        return bool(self.newest()["participants"] == self.replicas)

    def step_s(self) -> float:
        """Seconds of a step of all replicas, first steps of processes left out; the median."""
        return statistics.median(
            line["step_s"]
            for tail in self.tails
            for line in tail.read()
            if line["step_s"] is not None and line["participants"] == self.replicas
        )

    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """The lines of all replicas by step, those of a process that was started again behind the others."""
        found: dict[int, list[dict[str, Any]]] = {}
        for tail in self.tails:
            for line in tail.read():
                found.setdefault(int(line["step"]), []).append(line)
        return found

    def filled(self, since: float, until: float) -> float:
        there = [max(lines, key=lambda line: line["time"]) for lines in self.steps().values()]
        parts = [line["participants"] / self.replicas for line in there if since <= line["time"] <= until]
        return statistics.fmean(parts) if parts else 0.0

    def partial(self) -> set[int]:
        return {
            step for step, lines in self.steps().items() if any(line["participants"] < self.replicas for line in lines)
        }

    def losses(self) -> dict[int, float]:
        """The mean losses of whole batches by step."""
        return {
            step: statistics.fmean(line["loss"] for line in lines)
            for step, lines in self.steps().items()
            if len(lines) == self.replicas and all(line["participants"] == self.replicas for line in lines)
        }


def lines_of(folder: Path, replica: int) -> Path:
    return folder / f"replica-{replica}.jsonl"


def begin(folder: Path, ranks: int, prepared: RunPaths, cache: Path) -> TorchFt:
    """Start a run that would go on for ever, with the resolved recipe and the tokens of another one that has been."""
    import yaml

    from phalanx.config import load
    from phalanx.data.prepare import TRAIN
    from phalanx.workload.workload import read_model_shape

    run = TorchFt(RunPaths(folder / "run"), replicas=ranks)
    run.paths.root.mkdir(parents=True)
    config = load.build_config(yaml.safe_load(prepared.config.read_text()), str(prepared.config))
    job = {
        "spec": dataclasses.asdict(read_model_shape(config, prepared)),
        "optim": config.optim.model_dump(),
        "seq_len": config.data.seq_len,
        "global_batch": config.train.global_batch,
        "tokens": str(next(cache.rglob(f"{TRAIN}/*.bin")).parent),
        "replicas": ranks,
        "saved_every": SAVED_EVERY,
    }
    (run.paths.root / JOB).write_text(json.dumps(job))
    words = ["-c", "from benchmarks.torchft_peer import supervise; supervise()", str(run.paths.root), str(ranks)]
    run.commands[0] = start(words, folder, folder / "output.txt", warm=False)
    return run


def differ(run: TorchFt, prepared: RunPaths) -> float:
    """The largest relative difference of a loss in the first steps of two runs that nothing has disturbed yet."""
    run.wait(lambda: set(range(1, SAME + 1)) <= set(run.losses()))
    losses, others = run.losses(), {int(line["step"]): line["loss"] for line in read_steps(prepared.metrics)}
    return max(abs(losses[step] / others[step] - 1) for step in range(1, SAME + 1))


def kill(run: TorchFt, draw: random.Random) -> tuple[float, float]:
    """Kill a replica; seconds until the others have committed a step without it, and until all have committed one,
    both without the step itself."""
    begun, step_s = time.time(), run.step_s()
    os.kill(draw.choice(sorted(run.commands[0].ranks().values())), signal.SIGKILL)
    # A step that all had reduced before is committed yet.
    survived = run.wait(lambda: 0 < run.newest()["participants"] < run.replicas)
    return survived - begun - step_s, run.wait(run.whole) - begun - step_s


# -------------------------------------------------------------------------------------------------------- a run's nurse


def supervise() -> None:
    """Start the lighthouse and the replicas, and each of them again whenever it ends, until killed."""
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])

    def launch(name: str, call: str, words: list[str], environment: Mapping[str, str]) -> Command:
        code = f"from benchmarks.torchft_trainer import {call}; {call}()"
        return start(["-c", code, str(folder), *words], folder, folder / name, warm=False, environment=environment)

    address = folder / LIGHTHOUSE
    lighthouse = launch("lighthouse.log", "lighthouse", [], {})
    while not address.exists():
        assert not lighthouse.over(), lighthouse.said()
        time.sleep(0.01)
    own = {"TORCHFT_LIGHTHOUSE": address.read_text(), "GLOO_SOCKET_IFNAME": "lo"}

    def begin_rank(rank: int) -> int:
        # The log's name is what tells a rank from the lighthouse.
        return launch(f"rank-{rank}.log", "train", [str(rank)], own).pid

    rank_of = {begin_rank(rank): rank for rank in range(ranks)}
    in_vain = 0
    while True:
        pid, status = os.wait()
        assert pid != lighthouse.pid, lighthouse.said()
        rank = rank_of.pop(pid)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        in_vain = 0 if killed or lines_of(folder, rank).exists() else in_vain + 1
        assert in_vain < IN_VAIN, (folder / f"rank-{rank}.log").read_text()
        rank_of[begin_rank(rank)] = rank
