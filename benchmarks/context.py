"""What context parallelism gives: two devices of unlike speed on one long row, how long a row may be, and whether keys
travel while others are used.

    sudo python3 benchmarks/context.py [--quick] [--json FILE]

- `speeds`: two ranks of speed 3 to 1 (processes with CPU quotas that make them so, throttle.py) train rows of 16k, with
  slices of 3 to 1 and with equal ones, beside each rank alone on whole rows.
- `rows`: the longest row of which a forward and backward pass, parameters and gradients stay within 1 GiB a rank, on
  one rank and on four by `ring`: bytes of storages are counted at two lengths, and again at the row that they promise.
- `ring`: attention of one layer on nodes with links of 400 Mbit/s (links.py), over the slower of computing alone (the
  same on links that carry a hundred times as much) and of moving the bytes alone. Needs root.
"""

import functools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import links
from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result
from benchmarks.mixed_devices import PRELOAD, Place, calibrate, placed, rate
from benchmarks.mixed_devices import Size as SpeedSize
from phalanx.core.placement import Placement
from phalanx.elastic.node import agent

GIB = 2**30
PERIOD_S = 0.005  # of quotas: shorter than a block's computing, so that no rank waits for another's next period
FAST = 100.0  # how many times as much the links carry where computing is clocked


@dataclass(frozen=True)
class Size:
    """What is measured."""

    length: int = 16384
    turns: int = 3
    warm: int = 1
    steps: int = 2
    hidden: int = 128
    probes: tuple[int, int] = (4096, 8192)  # positions of a rank's part at which bytes are counted
    row_hidden: int = 1024
    budget_bytes: int = GIB
    ring_ranks: int = 4
    ring_length: int = 16384
    ring_width: int = 64  # of each of two heads
    ring_passes: int = 5
    mbit: float = 400.0


QUICK = Size(length=2048, turns=1, steps=2, hidden=64, probes=(512, 1024), row_hidden=256, budget_bytes=GIB // 16,
             ring_length=4096, ring_passes=2)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ unlike devices


def compare_speeds(size: Size) -> tuple[list[Row], list[Check]]:
    """Ranks of speed 3 to 1: slices by speed and equal ones over the sum of what each does alone."""
    model = {"hidden": size.hidden, "layers": 1, "heads": 2, "intermediate": 3 * size.hidden, "vocab_size": 256}
    few = SpeedSize(ratios=((3, 1),), global_batch=4, seq_len=size.length, model=model)
    count = size.warm + size.steps
    alone: list[float] = []
    ours: list[float] = []
    even: list[float] = []
    with placed(few, period_s=PERIOD_S) as place:

        def run(name: str, cores: Sequence[float], **settings: Any) -> float:
            steps = Place.run(place, name, cores, count, train__global_batch=1, train__micro_batch=1, **settings)
            return rate(steps[size.warm :])

        cores = calibrate((3, 1), lambda rank, part: run(f"first-{rank}-{part:g}", [part], first_rank=rank))
        for turn in range(size.turns):
            each = [run(f"alone-{turn}-{rank}", [part], first_rank=rank) for rank, part in enumerate(cores)]
            alone.append(sum(each))
            shared = {"parallel__context": 2, "parallel__context_by": "ring", "balance__batch": "even"}
            ours.append(run(f"by-speed-{turn}", cores, balance__context=[3, 1], **shared))
            even.append(run(f"even-{turn}", cores, balance__context="even", **shared))
    whole = statistics.median(alone)
    rows = [
        {"slices": name, "tokens/s": statistics.median(rates), "of the ranks alone": statistics.median(rates) / whole}
        for name, rates in (("each alone, their sum", alone), ("3 to 1", ours), ("equal", even))
    ]
    found = statistics.median(one / other for one, other in zip(ours, alone, strict=True))
    return rows, [at_least(f"slices of 3 to 1, rows of {size.length}: over the sum of the ranks alone", found, 0.93)]


# --------------------------------------------------------------------------------------------------------- longest row


def count_bytes(placement: Placement, size: dict[str, Any], length: int) -> int:
    """The most bytes that a rank holds in a pass over one row of `length` positions: parameters, their gradients, and
    all that it makes."""
    import numpy as np
    import torch

    from phalanx.autotune.fake_passes import measure_peak_bytes
    from phalanx.comm.mesh import join
    from phalanx.data.packing import Sample
    from phalanx.layout.mesh_axes import MeshAxes
    from phalanx.layout.model_shape import ModelSpec
    from phalanx.models.llama import Llama
    from phalanx.parallel.context import ContextParallel, apply_context_parallel
    from phalanx.tasks.language import CausalLMTask
    from phalanx.tasks.task import Batch
    from phalanx.workload.context_task import make_context_task

    width = size["row_hidden"]
    spec = ModelSpec(vocab_size=256, hidden=width, layers=1, heads=2, kv_heads=2, head_dim=width // 2,
                     intermediate=3 * width, max_seq_len=length)  # fmt: skip
    torch.manual_seed(0)
    model = Llama(spec)
    task: Any = CausalLMTask(length)
    with join(placement, 600, axes=MeshAxes(context=placement.world)) as mesh:
        if mesh.context is not None:
            even = (1.0,) * placement.world
            apply_context_parallel(model, ContextParallel(mesh.context, mesh.traffic, "ring", even))
            task = make_context_task(task, spec, mesh, even)
        batch: Batch = task.collate([Sample(np.arange(length + 1) % 251)])
        peak = measure_peak_bytes(model, task, batch)
    held = sum(each.numel() * each.element_size() for each in model.parameters())
    return int(peak + held)


def find_longest(size: Size, ranks: int, run: Any) -> tuple[int, int]:
    """The longest row in the budget of a rank, by bytes at two lengths, and the bytes that it takes."""
    short, long = (ranks * part for part in size.probes)
    count = functools.partial(run, ranks, count_bytes, asdict(size))
    least, most = (max(count(length)) for length in (short, long))
    longest = int(short + (size.budget_bytes - least) / ((most - least) / (long - short)))
    longest -= longest % (2 * ranks)
    return longest, max(count(longest))


def compare_rows(size: Size) -> tuple[list[Row], list[Check]]:
    """The longest row of one rank and of four."""
    with links.links([10_000.0]) as nodes:

        def run(ranks: int, function: Any, *args: Any) -> list[Any]:
            return nodes.run([0] * ranks, function, *args, timeout_s=3600)

        found = {ranks: find_longest(size, ranks, run) for ranks in (1, 4)}
    rows: list[Row] = [
        {"ranks": ranks, "longest row": longest, "of the budget": held / size.budget_bytes}
        for ranks, (longest, held) in found.items()
    ]
    checks = [
        at_least(
            f"longest row in {size.budget_bytes / GIB:g} GiB a rank, ring: 4 ranks over 1",
            found[4][0] / found[1][0],
            3.5,
        )
    ]
    checks += [
        at_most(f"bytes of that row on {ranks} rank{'s' * (ranks > 1)}, of the budget", held / size.budget_bytes, 1.03)
        for ranks, (_, held) in found.items()
    ]
    return rows, checks


# ---------------------------------------------------------------------------------------------------------------- ring


def attend(placement: Placement, size: dict[str, Any], moves_only: bool) -> float:
    """Median seconds of a forward and backward pass of attention by `ring`, of the slowest rank; or of moving alone
    what it moves."""
    import torch

    from phalanx.comm.mesh import join
    from phalanx.comm.p2p import connect, exchange_around
    from phalanx.layout.context_slices import slice_in_pairs
    from phalanx.layout.mesh_axes import MeshAxes
    from phalanx.parallel.context import ContextParallel, ContextRows

    even = (1.0,) * placement.world
    slices = slice_in_pairs(size["ring_length"], even)
    shape = (1, 2, slices.count_of(placement.rank), size["ring_width"])
    torch.manual_seed(placement.rank)
    q, k, v, grad = (torch.randn(shape) for _ in range(4))
    with join(placement, 600, axes=MeshAxes(context=placement.world)) as mesh:
        assert mesh.context is not None
        axis, context = mesh.context, ContextParallel(mesh.context, mesh.traffic, "ring", even)
        connect(axis.group, mesh.device)
        rows = ContextRows(slices, placement.rank, 1)
        plan = rows.plan(None)

        def compute() -> None:
            parts = [each.requires_grad_() for each in (q, k, v)]
            torch.autograd.grad(context.attend(parts[0], parts[1], parts[2], segments=rows), parts, grad)

        def move() -> None:
            for sends_back in (False, False, True):  # keys in either pass, and their gradients
                for hop, block in enumerate(plan.others):
                    to = (placement.rank + hop + 1) % placement.world
                    there = sum(part.stop - part.start for part in plan.sends[to])
                    theirs, own = (torch.zeros(n, 1, 2, 2 * size["ring_width"]) for n in (block.count, there))
                    leaving, arriving = (theirs, own) if sends_back else (own, theirs)
                    ends = (block.owner, to) if sends_back else (to, block.owner)
                    exchange_around(leaving, ends[0], arriving, ends[1], axis.group, mesh.traffic).wait()

        taken = []
        for turn in range(1 + size["ring_passes"]):
            mesh.max([0.0])  # all begin together
            begun = time.perf_counter()
            (move if moves_only else compute)()
            (slowest,) = mesh.max([time.perf_counter() - begun])
            taken += [slowest] if turn else []
        return statistics.median(taken)


def compare_ring(size: Size) -> tuple[list[Row], list[Check]]:
    """A ring step over the slower of its two parts."""
    places = list(range(size.ring_ranks))
    with links.links([size.mbit] * size.ring_ranks) as nodes:
        both, moving = (nodes.run(places, attend, asdict(size), only, timeout_s=3600)[0] for only in (False, True))
        for node in places:
            nodes.limit(node, FAST * size.mbit)
        computing = nodes.run(places, attend, asdict(size), False, timeout_s=3600)[0]
    row: Row = {
        "ranks": size.ring_ranks, "row": size.ring_length, "computing, s": computing, "moving, s": moving,
        "together, s": both, "over the slower": both / max(computing, moving),
    }  # fmt: skip
    name = f"ring on links of {size.mbit:g} Mbit/s: a pass over the slower of computing and moving"
    return [row], [at_most(name, both / max(computing, moving), 1.10)]


def main() -> None:
    parser = options(" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--only", choices=("speeds", "rows", "ring"), help="one of the three")
    parser.add_argument("--mbit", type=float, default=Size.mbit, help="rate of the links (default: %(default)g)")
    arguments = parser.parse_args()
    size = replace(QUICK if arguments.quick else Size(), mbit=arguments.mbit)
    parts = {"speeds": compare_speeds, "rows": compare_rows, "ring": compare_ring}
    rows: list[Row] = []
    checks: list[Check] = []
    facts = {}
    why = links.why_not()
    agent.preload(PRELOAD)
    for name, measure in parts.items():
        if arguments.only not in (None, name):
            continue
        if name != "speeds" and why is not None:
            facts["left out"] = why
            continue
        some_rows, some_checks = measure(size)
        rows, checks = rows + some_rows, checks + some_checks
    report(result("context", machine(None, 1) | facts, rows, checks), arguments.json)


if __name__ == "__main__":
    main()
