"""How fast unlike devices train together: beside each of them alone, and beside equal shares for all.

    python3 benchmarks/mixed_devices.py [--quick] [--json FILE] [--stop-and-go]

Devices of chosen speeds are processes with one thread and a CPU quota on this machine (throttle.py). Each rank alone,
all with an equal split (what DDP does) and all as Phalanx divides the work take turns; every one is a run of its own
under the agent, and its figures are those of its records. Then one device is slowed to half in the middle of a run, and
gets its speed back. At last all are alike, and what balancing itself takes is clocked. docs/benchmarks.md says how to
read the figures; they count on a machine that does nothing else.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result, spread
from benchmarks.throttle import PERIOD_S, Throttle, throttle
from phalanx.core.placement import Placement
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.node import agent

PRELOAD = ("torch", "torch._dynamo", "torch.distributed.fsdp", "phalanx.config.load", "phalanx.trainer.train_rank",
           "phalanx.trainer.resolve", "phalanx.data.record_files")  # fmt: skip
TARGET, STRETCH = 0.97, 0.985
LOAD = 0.8  # of all cores: the rest is the system's, so that a quota is what a process really gets
FASTEST = 0.9  # of a core, for one rank


@dataclass(frozen=True)
class Size:
    """What is trained, and for how long. The first steps of a run do not count: `warm` where Phalanx divides, one
    elsewhere.

    What is compared is `large`, whose step takes seconds: a process that has used up its quota answers no message
    before the next period, which costs some tens of milliseconds for every collective and is no property of a device.
    The other questions are asked of `model`, with steps enough of it to see them change.
    """

    ratios: tuple[tuple[int, ...], ...] = ((3, 1), (1, 1, 2), (1, 2, 3, 4))
    turns: int = 3
    warm: int = 3
    steps: int = 3  # that count where Phalanx divides; elsewhere half as many
    slow_steps: tuple[int, int, int] = (8, 12, 12)  # before a device is slowed, while it is, afterwards
    global_batch: int = 160
    model: dict[str, Any] = field(
        default_factory=lambda: {"hidden": 128, "layers": 2, "heads": 4, "intermediate": 384, "vocab_size": 256}
    )
    large: dict[str, Any] = field(
        default_factory=lambda: {"hidden": 384, "layers": 2, "heads": 4, "intermediate": 1152, "vocab_size": 256}
    )
    seq_len: int = 256


QUICK = Size(ratios=((3, 1),), turns=2, warm=2, steps=4, slow_steps=(4, 7, 7), seq_len=80, large=Size().model)


def quotas(ratio: Sequence[int]) -> list[float]:
    """Cores for each rank, in these ratios, as much as this machine can give at the same time."""
    cores = len(os.sched_getaffinity(0))
    unit = min(LOAD * cores / sum(ratio), FASTEST / max(ratio))
    return [unit * part for part in ratio]


def calibrate(ratio: Sequence[int], alone: Callable[[int, float], float]) -> list[float]:
    """Cores for each rank with which ranks are as fast as `ratio` says; `alone(rank, cores)` measures a rank's rate. A
    small quota gives less than its part of the work: with short periods caches are cold after each stop."""
    cores = quotas(ratio)
    for _ in range(2):
        rates = [alone(rank, part) / speed for rank, (part, speed) in enumerate(zip(cores, ratio, strict=True))]
        # On a busy machine rates are anything; the kernel takes no less than this of periods of 5 ms.
        cores = [max(0.2, min(1.0, part * rates[0] / each)) for part, each in zip(cores, rates, strict=True)]
    return cores


# --------------------------------------------------------------------------------------------------------------- a run


@dataclass(frozen=True)
class Change:
    """Behind which step's record a rank gets another quota."""

    after_step: int
    rank: int
    cores: float


class Switch:
    """A sink that changes quotas while the run goes on."""

    def __init__(self, limits: Throttle, changes: Sequence[Change]) -> None:
        self._limits, self._changes = limits, changes

    def on_step(self, record: dict[str, Any]) -> None:
        for change in self._changes:
            if change.after_step == record["step"]:
                self._limits.limit(change.rank, change.cores)

    def on_event(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where runs happen: tokens and a folder for them, and limits on what they may use."""

    folder: Path
    tokens: Path
    limits: Throttle
    size: Size

    def run(
        self, name: str, cores: Sequence[float], steps: int, changes: Sequence[Change] = (), **settings: Any
    ) -> list[dict[str, Any]]:
        """Train with one rank for each of `cores`; returns the records of the steps. `settings` go into the recipe,
        with __ for a dot; `first_rank` says which limit the first rank has."""
        first_rank = settings.pop("first_rank", 0)
        for rank, part in enumerate(cores):
            self.limits.limit(first_rank + rank, part)
        paths = RunPaths(self.folder / name)
        settings = {key.replace("__", "."): value for key, value in settings.items()}
        worker = functools.partial(_worker, self, paths, steps, settings, changes, first_rank)
        causes: list[str] = []

        def note(kind: str, details: dict[str, Any]) -> None:
            if kind == "worker_died":
                causes.append(f"rank {details['rank']}: {details['reason']}")

        code = agent.run_local_job(agent.NodeJob(world=len(cores), worker=worker, paths=paths, on_event=note))
        assert code == 0, f"{name} ended with exit code {code}: {'; '.join(causes)}; see {paths.root / 'logs'}"
        return read_steps(paths.metrics)


def _worker(
    place: Place,
    paths: RunPaths,
    steps: int,
    settings: dict[str, Any],
    changes: Sequence[Change],
    first_rank: int,
    placement: Placement,
) -> int:
    """One rank: what train.trainer.run does, and beside it a note of what balancing took."""
    from phalanx.autotune.rank_speeds import find_rank_speeds
    from phalanx.checkpoint.disk.save import CheckpointSaver
    from phalanx.comm.mesh import join
    from phalanx.comm.rendezvous import JsonGroup
    from phalanx.system import accelerator
    from phalanx.trainer.loop import TrainingLoop
    from phalanx.trainer.setup import TrainingJob, TrainingSetup
    from phalanx.trainer.stop_request import StopRequest
    from phalanx.trainer.train_rank import run_steps
    from phalanx.workload.build import build_components
    from phalanx.workload.sinks import RecordWriter
    from phalanx.workload.workload import make_workload, read_model_shape

    place.limits.enter(first_rank + placement.rank)
    accelerator.set_device(accelerator.torch.device("cpu"), 1)
    config = _config(place.size, steps, settings, placement.world)
    job = TrainingJob(config, read_model_shape(config), paths, [(place.tokens, 1.0)], {})
    with join(placement, config.comm.timeout_s, axes=config.parallel.axes) as mesh:
        records = RecordWriter(paths, 1, [Switch(place.limits, changes)], active=mesh.rank == 0)
        saver = CheckpointSaver(paths.checkpoints, mesh.rank, JsonGroup(mesh.checkpoint), 1, records.write_event)
        speeds, link = find_rank_speeds(config, make_workload(config, job.spec), placement, mesh, paths, records)
        parts = build_components(config, job.spec, mesh, job.train_tokens, {}, paths, speeds, link)
        loop = TrainingLoop(TrainingSetup(job, placement, mesh, parts, records, saver, StopRequest()))
        code = run_steps(loop, loop.restore())
        records.close()
    _balance_file(paths, placement.rank).write_text(json.dumps(parts.work_split.balance_s))
    return int(code)


def _config(size: Size, steps: int, settings: dict[str, Any], world: int) -> Any:
    from phalanx.config import load, resolve

    tree = {
        "model": size.model,
        "data": {"seq_len": size.seq_len},
        "train": {"steps": steps, "global_batch": size.global_batch, "micro_batch": size.global_batch,
                  "eval_sequences": 0, "dtype": "fp32"},
        "optim": {"decay_steps": 1000},
        "checkpoint": {"every": 0},
        "comm": {"timeout_s": 300.0},
        "report": {"tensorboard": False},
    }  # fmt: skip
    wanted = load.update_config(load.build_config(tree, "the benchmark's recipe"), settings)
    config, _ = resolve.resolve_autos(wanted, device="cpu", world=world)
    return config


def _balance_file(paths: RunPaths, rank: int) -> Path:
    return paths.root / f"balance-{rank}.json"


def rate(steps: Sequence[dict[str, Any]]) -> float:
    """Tokens per second over these steps."""
    return sum(step["tokens"] for step in steps) / sum(step["step_s"] for step in steps)


# --------------------------------------------------------------------------------------------------- what is found out


def compare(place: Place, ratio: tuple[int, ...]) -> tuple[list[Row], list[Check]]:
    """Each rank alone, an equal split and Phalanx's, in turns; ratios are medians over the turns.

    A rank alone trains batches of its own share of the global batch, so that a step takes as long as with the others;
    what its update costs more, as it holds the whole state, is for it, not for us, less than 1 in 200 of a step. The
    same runs all at once, which know nothing of each other, show what the machine gives: processes also share caches,
    memory and what the machine does besides, and nobody trains faster together than that.
    """
    size, cores, name = place.size, quotas(ratio), ":".join(map(str, ratio))
    few = 1 + max(1, size.steps // 2)
    share = size.global_batch // sum(ratio)
    assert share * sum(ratio) == size.global_batch, "the ideal shares are whole numbers"
    evens, ours, at_once, alone_rates, even_rates, our_rates, at_once_rates = [], [], [], [], [], [], []
    for turn in range(size.turns):
        own = [
            functools.partial(
                place.run, f"{name}-{turn}-alone-{rank}", [part], few, first_rank=rank,
                train__global_batch=share * ratio[rank], train__micro_batch=share * ratio[rank],
            )
            for rank, part in enumerate(cores)
        ]  # fmt: skip
        alone = [rate(train()[1:]) for train in own]
        together = sum(rate(steps[1:]) for steps in side_by_side(place, own, f"{name}-{turn}"))
        even = rate(place.run(f"{name}-{turn}-even", cores, few, balance__batch="even")[1:])
        mine = rate(place.run(f"{name}-{turn}-phalanx", cores, size.warm + size.steps)[size.warm :])
        alone_rates.append(sum(alone))
        even_rates.append(even)
        our_rates.append(mine)
        at_once_rates.append(together)
        at_once.append(together / sum(alone))
        evens.append(even / sum(alone))
        ours.append(mine / sum(alone))
    theory = len(ratio) * min(ratio) / sum(ratio)
    rows = [
        _row(name, "each alone, their sum", alone_rates, [1.0], 1.0),
        _row(name, "each by itself, all at once", at_once_rates, at_once, 1.0),
        _row(name, "an equal split", even_rates, evens, theory),
        _row(name, "Phalanx", our_rates, ours, 1.0),
    ]
    found = statistics.median(ours)
    checks = [
        at_least(f"{name}: tokens/s over the sum of the ranks alone", found, TARGET),
        at_least(f"{name}: the same, as far as one would like it to be", found, STRETCH),
        at_most(f"{name}: an equal split over that sum, less its theory", statistics.median(evens) - theory, 0.05),
    ]
    return rows, checks


def side_by_side(
    place: Place, runs: Sequence[functools.partial[list[dict[str, Any]]]], name: str
) -> list[list[dict[str, Any]]]:
    """The same runs again, each under an agent of its own, all at the same time; the records of each."""
    folders = [place.folder / f"{name}-at-once-{number}" for number in range(len(runs))]
    children = []
    for run, folder in zip(runs, folders, strict=True):
        child = os.fork()
        if not child:
            try:
                replace(place, folder=folder).run(*run.args, **run.keywords)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(ended), f"a run of {name} beside others ended with {ended}; see {place.folder}"
    return [read_steps(next(folder.iterdir()) / "metrics.jsonl") for folder in folders]


def _row(name: str, trained: str, rates: Sequence[float], ratios: Sequence[float], theory: float) -> Row:
    low, middle, high = spread(ratios)
    return {
        "speeds": name,
        "trained by": trained,
        "tokens/s": statistics.median(rates),
        "of the ranks alone": middle,
        "lower quartile": low,
        "upper quartile": high,
        "theory": theory,
    }


def slowed(place: Place, ratio: tuple[int, ...]) -> tuple[list[Row], list[Check]]:
    """The fastest rank is slowed to half in the middle of a run, and gets its speed back; beside it the same run
    undisturbed, whose loss curve must be the same."""
    size, cores = place.size, quotas(ratio)
    rank = cores.index(max(cores))
    before, while_slow, after = size.slow_steps
    half = cores[rank] / 2
    # A record is written while the next step is under way: that one is slowed somewhere in the middle.
    changes = [Change(before, rank, half), Change(before + while_slow, rank, cores[rank])]
    count = before + while_slow + after
    steps = place.run("slowed", cores, count, changes)
    quiet = place.run("undisturbed", cores, count)
    # What the devices do together is in proportion to what they may use: that of the steps before sets the scale.
    scale = rate(steps[size.warm : before]) / sum(cores)
    rows: list[Row] = []
    checks = []
    for what, first, last, optimum in (
        ("before", size.warm, before, scale * sum(cores)),
        ("slowed", before + 1, before + while_slow, scale * (sum(cores) - half)),
        ("after", before + while_slow + 1, count, scale * sum(cores)),
    ):
        # The step in which it happens, and three to act.
        settled = first if what == "before" else first + 3
        part = [rate([step]) / optimum for step in steps[first:last]]
        found = rate(steps[settled:last]) / optimum
        rows.append({
            "a device": what, "step": first + 1, "tokens/s": rate(steps[first:last]), "of the optimum": found,
            "step by step": " ".join(f"{each:.2f}" for each in part), "shares": _shares(steps[last - 1]),
        })  # fmt: skip
        if what != "before":
            checks.append(at_least(f"{what}: of the new optimum from the third step on", found, 0.95))
    difference = max(abs(one["loss"] - other["loss"]) / other["loss"] for one, other in zip(steps, quiet, strict=True))
    checks.append(at_most("largest relative difference of a loss from the undisturbed run", difference, 1e-4))
    return rows, checks


def alike(place: Place, ranks: int) -> tuple[list[Row], list[Check]]:
    """All devices alike: what measuring, deciding and telling take of a step, on the rank that spends most."""
    cores, count = quotas([1] * ranks), place.size.warm + place.size.steps
    steps = place.run("alike", cores, count)
    paths = RunPaths(place.folder / "alike")
    spent = max(json.loads(_balance_file(paths, rank).read_text()) for rank in range(ranks))
    whole = sum(step["step_s"] for step in steps)
    share = spent / whole
    row = {"devices": ranks, "steps": count, "step, s": whole / count, "balancing, ms a step": 1000 * spent / count,
           "of a step": share, "shares": _shares(steps[-1])}  # fmt: skip
    return [row], [at_most("all alike: balancing of a step", share, 0.005)]


def _shares(step: dict[str, Any]) -> str:
    return "+".join(map(str, step["shares"]))


@contextlib.contextmanager
def placed(size: Size, by_groups: bool | None = None, period_s: float = PERIOD_S) -> Any:
    """A folder with tokens enough for every run, and limits for as many ranks as any has."""
    agent.preload(PRELOAD)
    from benchmarks.peers import write_tokens

    ranks = max(map(len, size.ratios))
    with tempfile.TemporaryDirectory(prefix="phalanx-mixed-") as folder, throttle(ranks, by_groups, period_s) as limits:
        tokens = write_tokens(Path(folder, "tokens"), size.model["vocab_size"], 4 * size.global_batch * size.seq_len)
        yield Place(Path(folder), tokens, limits, size)


def measure(size: Size, by_groups: bool | None = None) -> tuple[str, list[Row], list[Check]]:
    """All of it: (how processes are held back, rows, checks)."""
    rows: list[Row] = []
    checks: list[Check] = []
    with placed(size, by_groups) as place:
        large = replace(place, size=replace(size, model=size.large))
        found = [compare(large, ratio) for ratio in size.ratios]
        found += [slowed(place, size.ratios[0]), alike(place, len(size.ratios[0]))]
        kind = place.limits.kind
    for some_rows, some_checks in found:
        rows += some_rows
        checks += some_checks
    return kind, rows, checks


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--stop-and-go", action="store_true", help="do not use control groups")
    parser.add_argument("--turns", type=int, help="turns of the comparison, instead of the usual number")
    arguments: argparse.Namespace = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    if arguments.turns:
        size = replace(size, turns=arguments.turns)
    kind, rows, checks = measure(size, False if arguments.stop_and_go else None)
    facts = machine(None, 1) | {"held back by": kind}
    report(result("mixed_devices", facts, rows, checks), arguments.json)


if __name__ == "__main__":
    main()
