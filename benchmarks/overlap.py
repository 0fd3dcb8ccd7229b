"""How well the sharded engine hides communication: beside the bound of its schedule, DDP, ZeRO and FSDP2.

    sudo python3 benchmarks/overlap.py [--quick] [--blocks 8|16|32] [--mbit RATE] [--ddp-only] [--json FILE]

Four nodes are network namespaces of this machine with links of 400 Mbit/s (links.py) or of --mbit. The blocks of a real
module wait inside their forward and backward passes, so that computation takes a given multiple of communication: r is
communication over computation, both at their best. The ways to train take turns in the same processes, on the same
weights; a figure is the median of steps, each as long as on its slowest rank. Then a gradient's global norm is clipped,
the links lose half of their rate in the middle of training, and blocks multiply matrices for real.
docs/benchmarks.md says how to read the figures.
"""

import ctypes
import gc
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phalanx.elastic.node.agent import preload

if __name__ == "__main__":  # first of all: whoever forks ranks must have no thread of a numerical library
    preload(("numpy", "torch", "torch._dynamo", "torch.distributed.fsdp"))

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import bounds, links
from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result
from benchmarks.sharded_peers import Fsdp2, Make, Model, Ours, ddp, ddp_zero, on_phalanx, seconds, sent_bytes
from phalanx.comm.mesh import Mesh, join
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.layout.comm_schedule import StepTimings, ddp_step_s, late_gather_s, lower_bound_s

OURS, DDP, ZERO, FSDP2, TUNED = "Phalanx", "DDP", "DDP + ZeRO", "FSDP2", "FSDP2 tuned"
ON_OURS, TUNED_ON_OURS = "FSDP2 on phalanx", "FSDP2 tuned on phalanx"
RELEASED, AHEAD, AHEAD_ON_OURS = "Phalanx, zero 3", "FSDP2, gathering ahead", "FSDP2, gathering ahead, on phalanx"
BEST = Ours(ShardingSpec(slots=2))
NEVER, ALWAYS = 1e9, 1e-6  # norms that no gradient of the model reaches, and that every one does
PLAIN, PLAIN_CLIPS = "plain", "plain, clips"
KEPT, KEPT_CLIPS = "with the state before", "with the state before, clips"
CLIPPING: dict[str, Make] = {
    PLAIN: Ours(ShardingSpec(slots=1), NEVER),
    PLAIN_CLIPS: Ours(ShardingSpec(slots=1), ALWAYS),
    KEPT: Ours(ShardingSpec(slots=2), NEVER),
    KEPT_CLIPS: Ours(ShardingSpec(slots=2), ALWAYS),
}
SCHEDULE, REAL, MEASURED = 1.05, 0.98, 1e-5
BEFORE, AFTER, SETTLED = 5, 14, 10  # steps around a change of the rate; after so many the new one must be kept to


@dataclass(frozen=True)
class Size:
    """What is run: blocks and ratios of the engine beside its bound and DDP; (blocks, ratio) of all ways together."""

    blocks: tuple[int, ...] = (8, 16, 32)
    ratios: tuple[float, ...] = (0.5, 0.8, 1.0, 1.25, 2.0)
    together: tuple[tuple[int, float], ...] = ((8, 1.0), (16, 1.0))
    side: int = 1024
    mbit: float = 400.0
    nodes: int = 4
    rounds: int = 2
    steps: int = 3  # of a way in a round
    real: int = 8  # blocks that multiply matrices
    interface: str = links.INTERFACE
    slower: bool = True  # whether the rate can be halved
    clipping: bool = True
    per_node: int = 1  # ranks

    @property
    def places(self) -> list[int]:
        """The node of each rank."""
        return [node for node in range(self.nodes) for _ in range(self.per_node)]


SEVERAL = Size(blocks=(8,), ratios=(1.0,), together=((8, 1.0),), nodes=2, per_node=2, real=0, slower=False,
               clipping=False)  # fmt: skip
QUICK = Size(blocks=(8,), ratios=(1.0,), together=((8, 1.0),), rounds=2, steps=2, real=0, slower=False)
QUICK_SEVERAL = replace(SEVERAL, rounds=1, steps=2)


def block_s(size: Size) -> float:
    """The least seconds of a block's reduce-scatter, or all-gather: each byte leaves a node at most once."""
    return bounds.of_shards(4 * size.side**2, size.mbit, [1] * size.nodes)


def waiting(size: Size, blocks: int, ratio: float) -> Model:
    """Blocks that compute as long as they communicate, over `ratio`: a third of it forward."""
    each = 2 * block_s(size) / ratio
    return Model(blocks, size.side, each / 3, each * 2 / 3)


def work_of(size: Size, model: Model, early: bool = True) -> StepTimings:
    """A step of a model, of nothing but its computation and its links."""
    link, nothing = (block_s(size),) * model.blocks, (0.0,) * model.blocks
    forward, backward = (model.forward_s,) * model.blocks, (model.backward_s,) * model.blocks
    return StepTimings(forward, backward, link, link, nothing, early=early)


# ------------------------------------------------------------------------------------------------------------ on a rank


def all_ways(shards: DeviceMesh) -> dict[str, Make]:
    """Every way to train; `shards` is of the backend "phalanx"."""
    return {
        OURS: BEST, DDP: ddp, ZERO: ddp_zero, FSDP2: Fsdp2(False), TUNED: Fsdp2(True, whole=True),
        ON_OURS: Fsdp2(False, shards), TUNED_ON_OURS: Fsdp2(True, shards, whole=True),
        RELEASED: Ours(ShardingSpec(3, "per_micro_batch")), AHEAD: Fsdp2(True), AHEAD_ON_OURS: Fsdp2(True, shards),
    }  # fmt: skip


def turns(mesh: Mesh, size: Size, model: Model, ways: Mapping[str, Make]) -> dict[str, Any]:
    """Each way's steps, taken in turns; MiB that a step has sent; and how far apart the weights are at the end."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    sent: dict[str, float] = {}
    at_work = {name: make(model, mesh) for name, make in ways.items()}
    try:
        for way in at_work.values():  # what happens only once, such as DDP's buckets
            seconds(mesh, way, 1)
        for _ in range(size.rounds):
            for name, way in at_work.items():
                before = sent_bytes(size.interface)
                taken[name] += seconds(mesh, way, size.steps)
                sent[name] = (sent_bytes(size.interface) - before) / (size.steps + 1) / 2**20
        first, *others = (way.weights() for way in at_work.values())
        pairs = [pair for other in others for pair in zip(first, other, strict=True)]
        apart = max(float((a.flatten() - b.flatten()).abs().max()) for a, b in pairs)
        return {"seconds": taken, "sent_mib": sent, "apart": apart}
    finally:
        for way in at_work.values():
            way.settle()
            way.close()
        at_work.clear()
        give_memory_back()


def give_memory_back() -> None:
    """What the ways before have held: of ten ways it is 3 GiB a rank, and what is measured here comes in many turns."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def on_a_rank(placement: Placement, size: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is measured, of which all ranks know the same."""
    of = Size(**{name: _frozen(value) for name, value in size.items()})
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with join(placement, timeout_s=120) as mesh:
        with on_phalanx() as shards:
            every = all_ways(shards)
            for blocks in of.blocks:
                for ratio in of.ratios:
                    ways = every if (blocks, ratio) in of.together else {name: every[name] for name in (OURS, DDP)}
                    found[f"{blocks} {ratio:g}"] = taken = turns(mesh, of, waiting(of, blocks, ratio), ways)
                    if mesh.rank == 0:  # all of it takes half an hour
                        said = ", ".join(f"{name} {statistics.median(s):.3f} s" for name, s in taken["seconds"].items())
                        print(f"{of.nodes} x {of.per_node}, {blocks} blocks, r = {ratio:g}: {said}", flush=True)
            if of.clipping:
                found["clipping"] = turns(mesh, of, waiting(of, of.blocks[0], 1.0), CLIPPING)
            if of.slower:
                found["slower"] = slowed(mesh, of)
            if of.real:
                found["real"] = multiplied(mesh, of, every)
        mesh.sum([0.0])  # rank 0 keeps the store until all have left that group
    return found


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def slowed(mesh: Mesh, size: Size) -> dict[str, Any]:
    """Seconds of steps, in whose middle every link gets about half of its rate, a little different every step; and how
    often the order of transfers was made anew after that."""
    draws = random.Random(mesh.rank)
    way = BEST(waiting(size, size.blocks[0], 1.0), mesh)

    def before(step: int) -> None:
        if step == BEFORE:
            way.engine.take_notices()
        if step >= BEFORE:
            limit(size.mbit / 2 * draws.uniform(0.97, 1.03))

    try:
        taken = seconds(mesh, way, BEFORE + AFTER, warm=0, before=before)
        orders = [kind for kind, _ in way.engine.take_notices() if kind == EventKind.COMM_SCHEDULE_CHANGED]
    finally:
        limit(size.mbit)
        way.settle()
        way.close()
    return {"seconds": taken, "orders": len(orders)}


def limit(mbit: float) -> None:
    """What this rank's node may send from now on."""
    shape = ["rate", f"{round(mbit * 1000)}kbit", "burst", str(links.BURST_BYTES), "limit", str(links.QUEUE_BYTES)]
    command = ["tc", "qdisc", "replace", "dev", links.INTERFACE, "root", "tbf", *shape]
    subprocess.run(command, check=True, capture_output=True)


def multiplied(mesh: Mesh, size: Size, ways: Mapping[str, Make]) -> dict[str, Any]:
    """All ways with blocks that compute, for about as long as they communicate: `alone_s` with nothing to send."""
    rows = 64
    for _ in range(3):  # the ranks share this machine's cores, so how fast they are shows only when all compute
        model = Model(size.real, size.side, rows=rows)
        alone = statistics.median(alone_s(mesh, model))
        rows = max(1, round(rows * 2 * block_s(size) * size.real / alone))
    model = Model(size.real, size.side, rows=rows)
    alone = statistics.median(alone_s(mesh, model))
    return turns(mesh, size, model, ways) | {"alone_s": alone, "rows": rows}


def alone_s(mesh: Mesh, model: Model) -> list[float]:
    """What computation takes, on the slowest of all ranks that compute at the same time."""
    made_here, x = model.make(mesh.rank), model.sample(mesh.rank)

    class Alone:
        def step(self) -> None:
            made_here.zero_grad()
            made_here(x).sum().backward()

        def settle(self) -> None: ...

    return seconds(mesh, Alone(), 3)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------------- tables


def table(size: Size, found: Mapping[str, Any]) -> tuple[list[Row], list[Check]]:
    """Rows and checks from what a rank has found."""
    rows: list[Row] = []
    checks: list[Check] = []
    apart = 0.0
    for blocks in size.blocks:
        for ratio in size.ratios:
            model, turn = waiting(size, blocks, ratio), found[f"{blocks} {ratio:g}"]
            work = work_of(size, model)
            medians = {name: statistics.median(taken) for name, taken in turn["seconds"].items()}
            apart = max(apart, turn["apart"])
            rows += [_row(size, blocks, ratio, name, medians, work, turn) for name in medians]
            checks += _checks((blocks, ratio), medians, work, size)
    if size.clipping:
        rows += clipping_rows(size, found["clipping"], checks)
    if size.slower:
        slower_checks(size, found["slower"], checks)
    if size.real:
        real = found["real"]
        medians = {name: statistics.median(taken) for name, taken in real["seconds"].items()}
        link = 2 * size.real * block_s(size)
        rows += [
            {
                "matrix products": name, "rows": real["rows"], "r": link / real["alone_s"], "step s": medians[name],
                "over the longer of both": medians[name] / max(link, real["alone_s"]),
                "DDP over this": medians[DDP] / medians[name],
            }
            for name in medians
        ]  # fmt: skip
    checks.append(
        at_most(
            f"{size.nodes} x {size.per_node} ranks: weights of all ways after the same steps: largest difference",
            apart,
            MEASURED,
        )
    )
    return rows, checks


def _row(
    size: Size,
    blocks: int,
    ratio: float,
    name: str,
    medians: Mapping[str, float],
    work: StepTimings,
    turn: Mapping[str, Any],
) -> Row:
    foretold = {OURS: lower_bound_s(work), DDP: ddp_step_s(work) if size.per_node == 1 else None}.get(name)
    return {
        "nodes x ranks": f"{size.nodes} x {size.per_node}", "blocks": blocks, "r": ratio, "way": name,
        "step s": medians[name],
        "over the longer of both": medians[name] / max(work.compute_s, sum(work.reduce_s) + sum(work.gather_s)),
        "bound or theory": foretold, "over that": None if foretold is None else medians[name] / foretold,
        "DDP over this": medians[DDP] / medians[name], "MiB sent a step": turn["sent_mib"][name],
    }  # fmt: skip


def _checks(case: tuple[int, float], medians: Mapping[str, float], work: StepTimings, size: Size) -> list[Check]:
    name, ours = f"{size.nodes} x {size.per_node} ranks, {case[0]} blocks, r = {case[1]:g}", medians[OURS]
    if size.per_node > 1:
        others = {peer: medians[peer] for peer in (DDP, ZERO, FSDP2, TUNED)}
        return [at_least(f"{name}: {peer}'s step over Phalanx's", others[peer] / ours, 1.3) for peer in others]
    against_ddp = {(8, 1.0): 1.15, (16, 1.0): 1.20}.get(case, REAL)
    checks = [
        at_most(f"{name}: a step over the bound of its schedule", ours / lower_bound_s(work), SCHEDULE),
        at_least(f"{name}: DDP's step over Phalanx's", medians[DDP] / ours, against_ddp),
    ]
    if case in size.together:
        for peer, target in ((TUNED, 1.8), (FSDP2, 2.4), (ZERO, 2.0), (ON_OURS, 1.2)):
            checks.append(at_least(f"{name}: {peer}'s step over Phalanx's", medians[peer] / ours, target))
        released = medians[RELEASED]
        for peer in (FSDP2, AHEAD, ON_OURS, AHEAD_ON_OURS):
            checks.append(at_least(f"{name}: {peer}: step over Phalanx's with zero 3", medians[peer] / released, 1.0))
    return checks


def clipping_rows(size: Size, turn: Mapping[str, Any], checks: list[Check]) -> list[Row]:
    """How clipping by the global norm was done, and what it has cost."""
    model = waiting(size, size.blocks[0], 1.0)
    early, behind = lower_bound_s(work_of(size, model)), late_gather_s(work_of(size, model))
    medians = {name: statistics.median(taken) for name, taken in turn["seconds"].items()}
    kept, always, plain = (medians[name] for name in (KEPT, KEPT_CLIPS, PLAIN_CLIPS))
    checks.append(at_most("a norm far below the limit: a step over the bound of its schedule", kept / early, SCHEDULE))
    checks.append(at_most("clipping in every step: a step over that of plain clipping", always / plain, 1.03))
    return [
        {"clipping": name, "step s": taken, "over the bound": taken / early, "over gathering late": taken / behind}
        for name, taken in medians.items()
    ]


def slower_checks(size: Size, found: Mapping[str, Any], checks: list[Check]) -> None:
    """The steps after links have lost half of their rate, beside the new bound."""
    halved = replace(size, mbit=size.mbit / 2)
    foretold = lower_bound_s(work_of(halved, waiting(size, size.blocks[0], 1.0)))  # it computes as before
    settled = statistics.median(found["seconds"][BEFORE + SETTLED :])
    checks.append(at_most(f"half the rate: a step over the new bound, {SETTLED} steps later", settled / foretold, 1.10))
    checks.append(at_least("half the rate: times that the order was made anew", found["orders"], 1))


def measure(*sizes: Size) -> tuple[list[Row], list[Check]]:
    """On nodes with limited links; RuntimeError where one of the ranks fails."""
    rows: list[Row] = []
    checks: list[Check] = []
    for size in sizes:
        with links.links([size.mbit] * size.nodes) as nodes:
            found = nodes.run(size.places, on_a_rank, asdict(size), timeout_s=3600)
        some_rows, some_checks = table(size, found[0])
        rows, checks = rows + some_rows, checks + some_checks
    return rows, checks


def only(blocks: int) -> tuple[Size, ...]:
    """A part of the whole, for half an hour is long: models of so many blocks, and what goes with the smallest."""
    every = Size()
    together = tuple(each for each in every.together if each[0] == blocks)
    first = blocks == every.blocks[0]
    size = replace(every, blocks=(blocks,), together=together, slower=first, clipping=first, real=every.real * first)
    return (size, SEVERAL) if first else (size,)


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, choices=Size.blocks, help="models of so many blocks only (default: all)")
    parser.add_argument("--ratios", type=float, nargs="+", choices=Size.ratios, metavar="R", help="only these ratios")
    parser.add_argument("--mbit", type=float, default=Size.mbit, help="rate of the links (default: %(default)g)")
    parser.add_argument("--ddp-only", action="store_true", help="beside DDP alone, on four nodes, in one round")
    arguments = parser.parse_args()
    if (reason := links.why_not()) is not None:
        print(f"overlap: not measured; {reason}")
        return
    sizes = (Size(), SEVERAL) if arguments.blocks is None else only(arguments.blocks)
    sizes = (QUICK, QUICK_SEVERAL) if arguments.quick else sizes
    first, *others = (replace(each, mbit=arguments.mbit) for each in sizes)
    first = replace(first, ratios=tuple(arguments.ratios or first.ratios))
    if arguments.ddp_only:
        first, others = replace(first, together=(), rounds=1, steps=4, real=0), []
    rows, checks = measure(first, *others)
    report(result("overlap", machine(None, 1), rows, checks), arguments.json)


if __name__ == "__main__":
    main()
