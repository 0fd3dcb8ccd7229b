"""How long a run that lost a rank takes until it goes on, beside torchrun; and what it costs to be ready for that.

    python3 benchmarks/recovery.py [--quick] [--json FILE] [--ranks N]

A LLaMA of 10 million parameters trains on the CPU by `phalanx train`, tokenizer, loader, checkpoints and all. Its ranks
are killed by SIGKILL from outside, one after the other, at random moments. The same recipe runs under torchrun, which
starts its ranks again too, with a checkpoint every 10 steps. Then what a committed step costs: two runs in the same
ranks take turns step by step, one with its state in shared memory and one without. docs/benchmarks.md says how to read
the figures.
"""

import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phalanx.cluster import agent

if __name__ == "__main__":  # first of all: whoever forks ranks must have no thread of a numerical library
    agent.preload(("numpy", "torch", "torch._dynamo", "phalanx.train.trainer"))

from benchmarks.harness import Check, Row, at_most, machine, options, report, result, spread
from phalanx import shared_memory, state_file
from phalanx.records import Placement, RunPaths, read_lines, read_steps

RECIPE = """
model: {{hidden: 288, layers: 8, heads: 6, intermediate: 768}}
data: {{source: stdlib, tokenizer_vocab: 4096, seq_len: 128, cache: {cache}}}
train: {{steps: {steps}, global_batch: {batch}, micro_batch: {micro}, dtype: fp32, compile: false, eval_sequences: 0}}
balance: {{work: even}}
checkpoint: {{every: {every}, keep: 1}}
resilience: {{max_restarts: 1000, memory: {memory}}}
report: {{tensorboard: false}}
"""
OURS, TORCHRUN = "Phalanx", "torchrun"
LOOK_S = 0.002  # between two looks at the commit words
PATIENCE_S = 120.0
DEAD_S, PART_OF_TORCHRUN, COST = 0.5, 1 / 8, 1.02  # what is asked
STALL_S = 0.05
SAVES = 5
FOUND = "found.json"


@dataclass(frozen=True)
class Size:
    """`kills` of each system, so many steps apart; `pairs` of steps for the cost."""

    kills: int = 10
    apart: int = 6
    pairs: int = 60


QUICK = Size(kills=3, apart=4, pairs=15)


@dataclass
class Started:
    """A run that goes on: its process, its folder."""

    process: "subprocess.Popen[bytes]"
    paths: RunPaths
    _kept: tuple[Path, bytes] | None = None  # what is looked at every few milliseconds is not found out each time

    def committed(self) -> int:
        """The newest step that all ranks hold in shared memory."""
        self._kept = self._kept or (shared_memory.folder_of(self.paths), state_file.run_of(self.paths.events))
        return state_file.committed(*self._kept)

    def recorded(self) -> tuple[int, int]:
        """(attempt, step) of the last line of its metrics."""
        lines = [(int(line["attempt"]), int(line["step"])) for line in read_lines(self.paths.metrics)]
        return lines[-1] if lines else (0, 0)

    def wait(self, condition: Any) -> float:
        """Seconds since the epoch when a condition came to hold."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}; see {self.paths.root}"
            assert time.monotonic() < until, f"nothing has happened for {PATIENCE_S:g} s; see {self.paths.root}"
            time.sleep(LOOK_S)
        return time.time()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def start(system: str, folder: Path, ranks: int, every: int, memory: str = "true") -> Started:
    """Start a run that would go on for ever."""
    paths, recipe = RunPaths(folder / "run"), folder / "recipe.yaml"
    folder.mkdir(parents=True)
    batch = 2 * ranks
    recipe.write_text(
        RECIPE.format(cache=folder.parent / "cache", steps=100_000, batch=batch, micro=2, every=every, memory=memory)
    )
    train = ["train", str(recipe), "--run-dir", str(paths.root)]
    phalanx, environment = (
        [sys.executable, "-m", "phalanx"],
        dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1])),
    )
    command = [*phalanx, *train, "--ranks", str(ranks)]
    if system == TORCHRUN:
        # Without it torchrun's own restart fails where its store is kept.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000"]
        torchrun += ["--monitor-interval", "0.1", "--nproc-per-node", str(ranks), "-m", "phalanx"]
        command = [*torchrun, *train]
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Started(process, paths)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def steady_s(run: Started) -> float:
    """Seconds of a step by the records of the run so far, first steps of attempts left out."""
    steps = read_steps(run.paths.metrics)
    return statistics.median(now["step_s"] for now, before in zip(steps[1:], steps, strict=False)
                             if now["attempt"] == before["attempt"])  # fmt: skip


def kills(system: str, run: Started, size: Size, seed: int) -> Iterator[tuple[float, float]]:
    """Kill a rank again and again; (seconds until a step was committed that was not before, until a run that lost
    steps is as far as it was), both without the steps themselves."""
    draw = random.Random(seed)
    ours = system == OURS
    for _ in range(size.kills):
        attempt, reached = run.recorded()
        far = reached + size.apart
        run.wait(lambda far=far: run.recorded()[1] >= far)
        time.sleep(draw.uniform(0.0, 0.5))
        victim = draw.choice(children(run.process.pid))
        step_s, (attempt, reached), before = steady_s(run), run.recorded(), run.committed()
        begun = time.time()
        os.kill(victim, signal.SIGKILL)
        if ours:
            # What was committed while the signal was on its way has not been lost.
            run.wait(run.paths.log(attempt + 1, 0).exists)  # made when the ranks before are dead
            before = max(before, run.committed())
            took = run.wait(lambda before=before: run.committed() > before) - begun - step_s
            yield took, took
        else:
            # A line is written when the next step has come to its backward pass.
            first = run.wait(lambda attempt=attempt: run.recorded()[0] > attempt) - begun - 2 * step_s
            again = run.recorded()[1]
            caught_up = run.wait(lambda reached=reached: run.recorded()[1] > reached) - begun - 2 * step_s
            yield first, caught_up
            assert again <= reached + 1, (again, reached)


def recovery(folder: Path, ranks: int, size: Size) -> list[Row]:
    """Both systems, one after the other."""
    rows: list[Row] = []
    for system, every in ((OURS, 100), (TORCHRUN, 10)):
        run = start(system, folder / system, ranks, every, "true" if system == OURS else "auto")
        try:
            run.wait(lambda run=run: run.recorded()[1] >= 12)
            found = list(kills(system, run, size, seed=1))
            step_s = steady_s(run)
        finally:
            run.end()
            remove(run)
        low, middle, high = spread([first for first, _ in found])
        rows.append(
            {"after kill -9 of one rank": system, "ranks": ranks, "step, s": step_s, "dead, s": middle, "lower": low,
             "upper": high, "longest": max(first for first, _ in found),
             "until as far as before, s": statistics.median(again for _, again in found)}
        )  # fmt: skip
    return rows


def remove(run: Started) -> None:
    """What a run that was killed leaves in shared memory."""
    folder = shared_memory.folder_of(run.paths)
    if folder.is_dir():
        with shared_memory.held(folder) as memory:
            memory.keeps = False


# ---------------------------------------------------------------------------------------------------------------- cost


def take_turns(placement: Placement, folder: str, tokens: str, config: str, pairs: int) -> int:
    """One rank: two loops in turns, with and without a keeper; rank 0 leaves the seconds of all steps, and how long
    checkpoints of the one with a keeper stall it."""
    import torch
    import yaml

    from phalanx import accelerator, recipe
    from phalanx.checkpoint.disk import Saver
    from phalanx.comm.mesh import join
    from phalanx.comm.objects import JsonGroup
    from phalanx.train.build import build
    from phalanx.train.restore import memory_of
    from phalanx.train.sinks import Records
    from phalanx.train.subject import spec_if_any
    from phalanx.train.trainer import Loop, Run, StopRequest

    settings, spent = recipe.check(yaml.safe_load(config), "the benchmark's recipe"), []
    accelerator.use(torch.device("cpu"), 1)
    with join(placement, 60.0) as mesh:
        loops = []
        for name in ("kept", "plain"):
            paths = RunPaths(Path(folder) / name)
            paths.root.mkdir(exist_ok=True)
            records = Records(paths, 1, [], active=mesh.rank == 0)
            memory = memory_of(settings, placement, mesh, paths, records) if name == "kept" else None
            spec, rows = spec_if_any(settings, paths), [(Path(tokens), 1.0)]
            parts = build(settings, spec, mesh, rows, {}, keeper=memory)
            saver = Saver(paths.checkpoints, mesh.rank, JsonGroup(mesh.checkpoint), 1, records.event)
            run = Run(settings, spec, paths, rows, {})
            loops.append(Loop(run, placement, mesh, parts, records, saver, StopRequest(), memory=memory))
            loops[-1].restore()
        for step in range(1, pairs + 4):
            seconds = []
            for loop in loops if step % 2 else reversed(loops):
                mesh.sum([0.0])
                begun = time.perf_counter()
                loop.train_one(step)
                list(loop.parts.engine.pieces())  # waits until all of the step is done
                mesh.sum([0.0])
                seconds.append(time.perf_counter() - begun)
            if step > 3:
                spent.append(seconds if step % 2 else seconds[::-1])
        saves = []
        for _ in range(SAVES):
            mesh.sum([0.0])
            begun = time.perf_counter()
            loops[0].save(pairs + 3)
            saves.append(mesh.max([time.perf_counter() - begun])[0])
            loops[0].saver.wait()
        for loop in loops:
            loop.parts.close()
    if placement.rank == 0:
        (Path(folder) / FOUND).write_text(json.dumps({"steps": spent, "saves": saves}))
    return 0


def cost(folder: Path, ranks: int, size: Size, prepared: RunPaths) -> list[Row]:
    """What a step takes with every step committed, over what it takes without."""
    tokens = next((folder / "cache").rglob("*.bin"), None)
    assert tokens is not None, "the run before has made its token files"
    shared = folder / "shared"
    shared.mkdir()
    place = shared_memory.PLACE / f"phalanx-benchmark-{os.getpid()}"
    worker = functools.partial(
        take_turns, folder=str(shared), tokens=str(tokens.parent), config=prepared.config.read_text(), pairs=size.pairs
    )
    place.mkdir(mode=0o700)
    try:
        job = agent.Job(world=ranks, worker=worker, paths=RunPaths(shared / "logs"), shared=place)
        assert agent.run(job) == 0, f"see {shared / 'logs'}"
    finally:
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
    found = json.loads((shared / FOUND).read_text())
    spent, saves = found["steps"], found["saves"]
    kept, plain = (statistics.median(each[which] for each in spent) for which in (0, 1))
    low, middle, high = spread([with_it / without for with_it, without in spent])
    return [
        {"every step committed": OURS, "ranks": ranks, "step, s": kept, "without, s": plain, "ratio": middle,
         "lower": low, "upper": high, "a save stalls, s": statistics.median(saves), "the first": saves[0]}
    ]  # fmt: skip


def main() -> None:
    parser = options("Time until a run goes on after a rank was killed, and what it costs to be ready for it.")
    parser.add_argument("--ranks", type=int, default=2, help="local ranks (default 2)")
    given = parser.parse_args()
    size = QUICK if given.quick else Size()
    with tempfile.TemporaryDirectory(prefix="phalanx-recovery-") as name:
        folder = Path(name)
        rows = recovery(folder, given.ranks, size)
        costs = cost(folder, given.ranks, size, RunPaths(folder / OURS / "run"))
    ours, torchrun = rows
    checks: list[Check] = [
        at_most("seconds dead after kill -9 of a rank", ours["dead, s"], DEAD_S),
        at_most("of torchrun's", ours["dead, s"] / torchrun["dead, s"], PART_OF_TORCHRUN),
        at_most("a step with every step committed, over one without", costs[0]["ratio"], COST),
        at_most("seconds that a checkpoint on the disk stalls training", costs[0]["a save stalls, s"], STALL_S),
    ]
    outcome = result("recovery", machine(None, 1), [*rows, *costs], checks)
    report(outcome, given.json)
    sys.exit(0 if all(check.holds for check in checks) else 1)


if __name__ == "__main__":
    main()
