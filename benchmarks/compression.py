"""Collectives and training with fewer bytes between nodes, beside all of them; and what rounding does to the loss.

    python3 benchmarks/compression.py [--quick] [--json FILE]

Four nodes with one rank each (links.py; needs root) at 100 Mbit/s. Reduce-scatters and all-gathers of one tensor take
turns as they are, in bfloat16 and in 8-bit blocks; then the sharded engine trains a model whose communication takes
eight times as long as its computation, in turns with each. At last `phalanx train`, one command on each node, trains a
small LLaMA on the text of Python's library, once with each. docs/benchmarks.md says how to read the figures.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bounds
from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result, spread
from benchmarks.links import INTERFACE, Links, links, why_not
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import Placement
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.node.agent import preload

PRELOAD = ("torch", "torch._dynamo", "phalanx.comm.mesh", "phalanx.comm.uneven_collectives", "benchmarks.sharded_peers")
WAYS = PLAIN, BF16, INT8 = ("none", "bf16", "int8")
OPERATIONS = REDUCE_SCATTER, ALL_GATHER = ("reduce-scatter", "all-gather")
NODES = 4
TAIL = 50  # training steps whose mean loss is that of the end


@dataclass(frozen=True)
class Size:
    """Mbit/s, MiB of the tensor, and turns that count, after one that does not."""

    mbit: float = 100.0
    mib: int = 16
    turns: int = 5
    training: "Training" = field(default_factory=lambda: Training())
    steps: int = 1000  # of the small LLaMA


@dataclass(frozen=True)
class Training:
    """Square blocks, whose even shards travel `ratio` times as long as they compute at `mbit`, as they are."""

    mbit: float = 100.0
    blocks: int = 8
    side: int = 1024
    ratio: float = 8.0
    turns: int = 3
    steps: int = 2  # that count in a turn, behind one that does not


QUICK = Size(mib=8, turns=3, training=Training(side=512, turns=2), steps=200)

RECIPE = """
model: {hidden: 96, layers: 4, heads: 4, kv_heads: 2, intermediate: 256}
data: {source: stdlib, tokenizer_vocab: 1024, seq_len: 64}
train: {global_batch: 16, micro_batch: 4, dtype: fp32, eval_sequences: 512}
optim: {lr: 1.0e-3, warmup_steps: 50, min_lr_ratio: 0.0}
balance: {batch: even}
checkpoint: {every: 0}
report: {tensorboard: false}
"""


# ----------------------------------------------------------------------------------------------------------- on a rank


def exchange(placement: Placement, mib: int, turns: int, interface: str = INTERFACE) -> list[dict[str, Any]]:
    """All operations in turns, and every result checked. For each: the seconds of the slowest rank at every turn, and
    what has left this rank's node in the last one."""
    import torch

    from benchmarks.sharded_peers import sent_bytes
    from phalanx.comm.collectives import Traffic
    from phalanx.comm.compression import CODECS
    from phalanx.comm.mesh import join
    from phalanx.comm.uneven_collectives import make_routes
    from phalanx.system import accelerator

    accelerator.set_device(torch.device("cpu"), 1)
    length = round(mib * 2**18)
    with join(placement, 120) as mesh:
        moves = {compress: make_routes(mesh, mesh.world, Traffic(), compress).trained for compress in WAYS}
        cuts = [length // mesh.world * rank for rank in range(mesh.world + 1)]
        own = slice(cuts[mesh.rank], cuts[mesh.rank + 1])
        values = torch.randn(length, generator=torch.Generator().manual_seed(0))
        exact = values * sum(range(1, mesh.world + 1))
        rounded = {PLAIN: values} | {name: torch.empty_like(values) for name in CODECS}
        for name, codec in CODECS.items():
            for start, stop in pairwise(cuts):
                coded = torch.empty(codec.byte_size(stop - start), dtype=torch.uint8)
                codec.encode(values[start:stop], coded)
                codec.decode(coded, rounded[name][start:stop])
        found: list[dict[str, Any]] = [
            {"operation": operation, "compress": compress, "seconds": []}
            for operation in OPERATIONS
            for compress in WAYS
        ]
        for turn in range(turns + 1):
            for one in found:
                compress, into = one["compress"], torch.empty(own.stop - own.start)
                tensor = values * (mesh.rank + 1) if one["operation"] == REDUCE_SCATTER else torch.zeros(length)
                if one["operation"] == ALL_GATHER:
                    tensor[own] = values[own]
                mesh.sum([0.0])  # all begin together
                before, begun = sent_bytes(interface), time.perf_counter()
                if one["operation"] == REDUCE_SCATTER:
                    moves[compress].reduce_scatter(tensor, cuts, into).wait()
                else:
                    moves[compress].all_gather(tensor, cuts).wait()
                (seconds,) = mesh.max([time.perf_counter() - begun])
                one["sent"] = sent_bytes(interface) - before
                one["seconds"] += [seconds] if turn else []
                if one["operation"] == ALL_GATHER:
                    assert torch.equal(tensor, rounded[compress]), f"{compress}: wrong values were gathered"
                else:
                    off = float((into - exact[own]).abs().max() / exact.abs().max())
                    assert off < {PLAIN: 1e-6, BF16: 1 / 256, INT8: 1 / 127}[compress], f"{compress}: off by {off}"
        return found


def train(placement: Placement, case: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of the steps that count, by what is compressed."""
    import torch

    from benchmarks.sharded_peers import Model, Ours, seconds
    from benchmarks.uneven_shards import at_work
    from phalanx.comm.mesh import join
    from phalanx.engine.sharding_spec import ShardingSpec
    from phalanx.system import accelerator

    accelerator.set_device(torch.device("cpu"), 1)
    of = Training(**case)
    taken: dict[str, list[float]] = {compress: [] for compress in WAYS}
    with join(placement, 120) as mesh:
        block_s = 2 * bounds.of_shards(4 * of.side**2, of.mbit, [1] * mesh.world) / of.ratio
        waiting = Model(of.blocks, of.side, block_s / 3, 2 * block_s / 3)
        for _ in range(of.turns):
            for compress in WAYS:
                with at_work(Ours(ShardingSpec(compress=compress)), waiting, mesh) as way:
                    taken[compress] += seconds(mesh, way, of.steps)
    return taken


# ------------------------------------------------------------------------------------------------------- a small LLaMA


def learn(made: Links, folder: Path, compress: str, steps: int) -> dict[str, Any]:
    """Train it by one command on each node; the losses at its end."""
    run = folder / compress
    environment = os.environ | {
        "PHALANX_SECRET": "of this benchmark",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [
        sys.executable, "-m", "phalanx", "train", str(folder / "recipe.yaml"), "--run-dir", str(run), "--ranks", "1",
        "--nodes", str(NODES), "--rendezvous", f"file://{folder}/meet-{compress}",
        f"train.steps={steps}", f"comm.compress={compress}", "parallel.engine=sharded", "parallel.zero=2",
    ]  # fmt: skip
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *command, "--node-rank", str(node)],
            env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node, name in enumerate(made.names)
    ]  # fmt: skip
    try:
        said = [process.communicate()[0] for process in started]
    finally:
        for process in started:  # where this process was told to end meanwhile
            process.kill()
    if any(process.returncode for process in started):
        raise RuntimeError(f"training with comm.compress={compress} failed:\n{said[0]}\n{said[-1]}")
    losses = [record["loss"] for record in read_steps(RunPaths(run).metrics)]
    held_out = [event["loss"] for event in read_lines(RunPaths(run).events) if event["kind"] == "evaluated"]
    return {"losses": losses, "held_out": held_out[-1]}


# ----------------------------------------------------------------------------------------------------- what it comes to


def compare(ranks: Sequence[Sequence[dict[str, Any]]], mbit: float, mib: int) -> tuple[list[Row], list[Check]]:
    """Rows and checks of the collectives."""
    whole, world = round(mib * 2**18) * 4, len(ranks)
    bound = bounds.of_shards(whole, mbit, [1] * world)
    medians = {(one["operation"], one["compress"]): statistics.median(one["seconds"]) for one in ranks[0]}
    rows: list[Row] = []
    for number, one in enumerate(ranks[0]):
        low, middle, high = spread(one["seconds"])
        rows.append({
            "operation": one["operation"], "compress": one["compress"], "median, s": middle, "lower quartile": low,
            "upper quartile": high, "fp32's bound over this": bound / middle,
            "fp32 over this": medians[one["operation"], PLAIN] / middle,
            "bytes of the interface, of fp32's": max(rank[number]["sent"] for rank in ranks)
            / max(rank[number - WAYS.index(one["compress"])]["sent"] for rank in ranks),
        })  # fmt: skip
    checks = []
    for operation in OPERATIONS:
        plain, bf16, int8 = (medians[operation, compress] for compress in WAYS)
        checks.append(at_least(f"{operation}: fp32 over int8", plain / int8, 3.6))
        checks.append(at_least(f"{operation}: bf16 over int8", bf16 / int8, 1.8))
    return rows, checks


def compare_training(taken: dict[str, list[float]], case: Training) -> tuple[list[Row], list[Check]]:
    """Steps beside each other."""
    medians = {compress: statistics.median(times) for compress, times in taken.items()}
    rows: list[Row] = [
        {"training with": compress, "step, s": middle, "fp32 over this": medians[PLAIN] / middle}
        for compress, middle in medians.items()
    ]
    name = f"a step, communication {case.ratio:g} times as long as computation:"
    return rows, [
        at_least(f"{name} fp32 over int8", medians[PLAIN] / medians[INT8], 2.6),
        at_least(f"{name} bf16 over int8", medians[BF16] / medians[INT8], 1.5),
    ]


def compare_learning(found: dict[str, dict[str, Any]], steps: int) -> tuple[list[Row], list[Check]]:
    """Losses at the end beside each other."""
    ends = {compress: statistics.fmean(one["losses"][-TAIL:]) for compress, one in found.items()}
    rows: list[Row] = [
        {
            "learnt with": compress, "steps": steps, "first loss": one["losses"][0], "at the end": ends[compress],
            "over fp32's": ends[compress] / ends[PLAIN], "held out": one["held_out"],
            "held out, over fp32's": one["held_out"] / found[PLAIN]["held_out"],
        }
        for compress, one in found.items()
    ]  # fmt: skip
    checks = []
    for compress in (BF16, INT8):
        over = found[compress]["held_out"] / found[PLAIN]["held_out"]
        checks.append(
            at_most(f"loss after {steps} steps, {compress} over fp32: at the end", ends[compress] / ends[PLAIN], 1.003)
        )
        checks.append(at_most(f"loss after {steps} steps, {compress} over fp32: held out", over, 1.003))
    return rows, checks


def measure(size: Size) -> tuple[list[Row], list[Check]]:
    """All of it."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: it warns of nodes without a name
    preload(PRELOAD)
    with links([size.mbit] * NODES) as made:
        rows, checks = compare(made.run(range(NODES), exchange, size.mib, size.turns), size.mbit, size.mib)
    with links([size.training.mbit] * NODES) as made:
        taken = made.run(range(NODES), train, asdict(size.training), timeout_s=600)[0]
    with tempfile.TemporaryDirectory(prefix="phalanx-compression-") as folder, links([10_000] * NODES) as made:
        (Path(folder) / "recipe.yaml").write_text(RECIPE)
        learnt = {compress: learn(made, Path(folder), compress, size.steps) for compress in WAYS}
    for more_rows, more_checks in (compare_training(taken, size.training), compare_learning(learnt, size.steps)):
        rows += more_rows
        checks += more_checks
    return rows, checks


def main() -> None:
    arguments: argparse.Namespace = options(__doc__.splitlines()[0]).parse_args()
    if (reason := why_not()) is not None:
        print(f"compression: not measured; {reason}")
        return
    rows, checks = measure(QUICK if arguments.quick else Size())
    report(result("compression", machine(None, 1), rows, checks), arguments.json)


if __name__ == "__main__":
    main()
