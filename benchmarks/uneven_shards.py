"""Reduce-scatter and all-gather of even and of uneven shards on slow links, beside the least time they can take.

    python3 benchmarks/uneven_shards.py [--quick] [--json FILE]

Four nodes with one rank each (links.py; needs root) divide a tensor in the ratios 1:1:1:1, 4:2:1:1 and 2:1:1:0. The
operations of all ratios, and gloo's own for even shards, take turns. Then the sharded engine trains a model whose
computation hides communication, with each of these divisions in turns, and the bytes that it holds on each rank are
set against their formula. docs/benchmarks.md says how to read the figures.
"""

import argparse
import contextlib
import ctypes
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bounds
from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result, spread
from benchmarks.links import links, why_not
from phalanx.core.placement import Placement
from phalanx.elastic.node.agent import preload

PRELOAD = ("torch", "torch._dynamo", "phalanx.comm.mesh", "phalanx.comm.uneven_collectives", "benchmarks.sharded_peers")
SPLITS = ((1, 1, 1, 1), (4, 2, 1, 1), (2, 1, 1, 0))
OPERATIONS = REDUCE_SCATTER, ALL_GATHER = ("reduce-scatter", "all-gather")
GLOO = "gloo, 1:1:1:1"
RELEASED = "Phalanx, zero 3"
M_MMAP_THRESHOLD = -3  # of mallopt


@dataclass(frozen=True)
class Size:
    """Rates in Mbit/s with the MiB that take about half a second there; turns that count, after one that does not."""

    rates: tuple[tuple[float, int], ...] = ((200, 16), (1000, 64))
    turns: int = 7
    training: "Training" = field(default_factory=lambda: Training())


@dataclass(frozen=True)
class Training:
    """A model of square blocks, which compute `1 / ratio` times as long as their even shards travel at `mbit`."""

    mbit: float = 400.0
    blocks: int = 8
    side: int = 1024
    ratio: float = 0.6
    turns: int = 3
    steps: int = 3  # that count in a turn, behind one that does not
    peak_side: int = 768  # of the blocks whose most memory is looked at


QUICK = Size(rates=((200, 4), (1000, 16)), turns=3, training=Training(turns=1))


def cuts_of(split: Sequence[int], length: int) -> list[int]:
    """Where the ranges of a tensor begin and end that is divided in these ratios."""
    return [length * part // sum(split) for part in (0, *accumulate(split))]


def name_of(split: Sequence[int]) -> str:
    return ":".join(map(str, split))


# ----------------------------------------------------------------------------------------------------------- on a rank


def exchange(placement: Placement, mib: float, turns: int, splits: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """All operations in turns, and every result checked. For each operation: the seconds of the slowest rank at every
    turn, and of this rank the payload of one call and what left its node's interface meanwhile."""
    import torch

    from phalanx.comm.collectives import Traffic
    from phalanx.comm.mesh import join
    from phalanx.comm.ring import RingCollectives
    from phalanx.comm.uneven_collectives import DeviceCollectives, UnevenCollectives
    from phalanx.system import accelerator

    accelerator.set_device(torch.device("cpu"), 1)
    length = round(mib * 2**18)
    with join(placement, 120) as mesh:
        traffic = Traffic()
        ring, gloo = RingCollectives(mesh.transfers, traffic), DeviceCollectives(mesh.shard.get_group(), traffic)
        forms: list[tuple[str, UnevenCollectives, list[int]]] = [
            *((name_of(split), ring, cuts_of(split, length)) for split in splits),
            (GLOO, gloo, cuts_of([1] * mesh.world, length)),
        ]
        found: list[dict[str, Any]] = [
            {"split": name, "operation": operation, "seconds": []} for name, _, _ in forms for operation in OPERATIONS
        ]
        for turn in range(turns + 1):
            for number, one in enumerate(found):
                _, form, cuts = forms[number // len(OPERATIONS)]
                own = torch.empty(cuts[mesh.rank + 1] - cuts[mesh.rank])
                tensor = torch.full((length,), float(mesh.rank))
                mesh.sum([0.0])  # all begin together
                before, start = sent_bytes(), time.perf_counter()
                if one["operation"] == REDUCE_SCATTER:
                    form.reduce_scatter(tensor, cuts, own).wait()
                else:
                    form.all_gather(tensor, cuts).wait()
                (seconds,) = mesh.max([time.perf_counter() - start])  # by then all that was sent has been received
                one |= {"sent": sent_bytes() - before, "payload": traffic.take().payload_bytes}
                one["seconds"] += [seconds] if turn else []
                if one["operation"] == REDUCE_SCATTER:
                    right = bool((own == sum(range(mesh.world))).all())
                else:
                    right = all(bool((tensor[a:b] == rank).all()) for rank, (a, b) in enumerate(pairwise(cuts)))
                assert right, f"{one['split']}: the {one['operation']} gave a wrong result"
        return found


def sent_bytes() -> int:
    """What has left the interfaces of this process's node, but for the one to itself."""
    lines = [line.replace(":", " ").split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(line[9]) for line in lines if line[0] != "lo")


def train(placement: Placement, case: dict[str, Any], splits: Sequence[Sequence[int]]) -> dict[str, Any]:
    """By split: seconds of the steps that count, and of this rank the bytes held and by the formula, by `zero`."""
    import torch

    from benchmarks.sharded_peers import Model, Ours, seconds
    from phalanx.comm.mesh import join
    from phalanx.engine.sharding_spec import ShardingSpec
    from phalanx.system import accelerator

    accelerator.set_device(torch.device("cpu"), 1)
    of = Training(**case)
    taken: dict[str, list[float]] = {name_of(split): [] for split in splits}
    held: dict[str, dict[str, list[int]]] = {name_of(split): {} for split in splits}
    with join(placement, 120) as mesh:
        model = Model(of.blocks, of.side)
        block_s = 2 * bounds.of_shards(model.block_bytes, of.mbit, [1] * mesh.world) / of.ratio
        waiting = Model(of.blocks, of.side, block_s / 3, 2 * block_s / 3)
        for _ in range(of.turns):
            for split in splits:
                with at_work(Ours(ShardingSpec(slots=2, weights=tuple(map(float, split)))), waiting, mesh) as way:
                    taken[name_of(split)] += seconds(mesh, way, of.steps)
        for zero in (1, 2, 3):
            for split in splits:
                ours = Ours(ShardingSpec(zero, weights=tuple(map(float, split))))
                held[name_of(split)][f"zero {zero}"] = holds(mesh, ours, model)
    return {"seconds": taken, "held": held}


def most_memory(placement: Placement, side: int) -> dict[str, int]:
    """What a step takes at the most, by way; in processes that have done nothing before, whose heap has no holes that a
    later part would fill and keep."""
    import torch

    from phalanx.comm.mesh import join
    from phalanx.system import accelerator

    accelerator.set_device(torch.device("cpu"), 1)
    with join(placement, 120) as mesh:
        ways = released_ways()
        for make in ways.values():  # what is taken at a first use stays
            peak_bytes(mesh, make, side=64)
        return {name: peak_bytes(mesh, make, side) for name, make in ways.items()}


def released_ways() -> dict[str, Any]:
    """Those that keep no whole parameters between uses."""
    from benchmarks.sharded_peers import Fsdp2, Ours
    from phalanx.engine.sharding_spec import ShardingSpec

    ours = Ours(ShardingSpec(3, "per_micro_batch"))
    return {RELEASED: ours, "FSDP2": Fsdp2(False), "FSDP2, gathering ahead": Fsdp2(True)}


def peak_bytes(mesh: Any, make: Any, side: int) -> int:
    """The most memory that this rank's process is seen to take in steps of a way, beyond what it takes before."""
    from benchmarks.sharded_peers import Phalanx, Stacked

    # Memory is given back to the system as soon as it is free, so that what is taken is what is held.
    system = ctypes.CDLL(None)
    system.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    gc.collect()
    system.malloc_trim(0)
    before, seen, over = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not over.wait(0.001):
            seen[0] = max(seen[0], anonymous_bytes())

    with at_work(make, Stacked(8, 4, side), mesh) as way:
        way.step()  # the first makes what stays
        gc.collect()
        mesh.sum([0.0])
        looking = threading.Thread(target=look)
        looking.start()
        for _ in range(2):
            way.step()
        if isinstance(way, Phalanx):
            list(way.engine.pieces())  # waits for what is under way, and gathers nothing
        over.set()
        looking.join()
    return seen[0] - before


def anonymous_bytes() -> int:
    """Resident memory of this process that is of no file."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def at_work(make: Any, model: Any, mesh: Any) -> Iterator[Any]:
    """An engine with a model, closed behind its use."""
    way = make(model, mesh)
    try:
        yield way
        way.settle()
    finally:
        way.close()


def holds(mesh: Any, ours: Any, model: Any) -> list[int]:
    """The most bytes that an engine is seen to hold on this rank as its forward passes come to each block, and those of
    the formula."""
    from benchmarks.sharded_peers import seconds
    from phalanx.autotune.rank_bytes import StateLayout, count_sharded_items

    gc.collect()
    gc.freeze()  # what there is already does not count, and need not be looked through
    seen = []
    with at_work(ours, model, mesh) as way:
        for block in way._model:
            block.register_forward_pre_hook(lambda *_: seen.append(live_bytes()))
        seconds(mesh, way, 1)
        layout = StateLayout(way.engine._precision, mesh.world, way.engine._state.shards.rule, ours.sharding)
        items = count_sharded_items(way.engine.buckets, {"data": mesh.rank}, layout, accumulates=False)
    return [max(seen), int(sum(items.values()))]


def live_bytes() -> int:
    """Bytes of all tensors of this process since the last freeze, each memory once."""
    import torch

    memories = [each.untyped_storage() for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


# ----------------------------------------------------------------------------------------------------- what it comes to


def compare(
    ranks: Sequence[Sequence[dict[str, Any]]], mbit: float, mib: float, splits: Sequence[Sequence[int]]
) -> tuple[list[Row], list[Check]]:
    """Rows and checks of one rate, from what the ranks found."""
    whole, world = round(mib * 2**18) * 4, len(ranks)
    rows: list[Row] = []
    checks: list[Check] = []
    medians: dict[tuple[str, str], float] = {}
    shares_of = {name_of(split): split for split in splits} | {GLOO: [1] * world}
    for number, first in enumerate(ranks[0]):
        split, operation = first["split"], first["operation"]
        cuts = cuts_of(shares_of[split], whole // 4)
        owned = [4 * (stop - start) for start, stop in pairwise(cuts)]
        # A ring sends on to the next rank: in an all-gather all but what that one owns.
        ahead = owned if operation == REDUCE_SCATTER else [*owned[1:], owned[0]]
        bound = bounds.of_shards(whole, mbit, owned)
        low, middle, high = spread(first["seconds"])
        medians[split, operation] = middle
        on_wire = max(found[number]["sent"] / (whole - next_one) for found, next_one in zip(ranks, ahead, strict=True))
        rows.append({
            "Mbit/s": mbit, "MiB": mib, "split": split, "operation": operation, "median, s": middle,
            "lower quartile": low, "upper quartile": high, "bound, s": bound, "over the bound": middle / bound,
            "interface / payload": on_wire,
        })  # fmt: skip
        if split == GLOO:
            continue
        off = max(abs(found[number]["payload"] - (whole - own)) for found, own in zip(ranks, owned, strict=True))
        name = f"{mbit:g} Mbit/s, {split}, {operation}"
        checks += [
            at_most(f"{name}: time over its bound", middle / bound, 1.05),
            at_most(f"{name}: bytes of payload away from (1 - s)B, on any rank", off, 0),
            at_most(f"{name}: bytes of the interface over those of the payload", on_wire, 1.05),
        ]
    gloo = sum(medians[GLOO, operation] for operation in OPERATIONS)
    for split in map(name_of, splits):
        ours = sum(medians[split, operation] for operation in OPERATIONS)
        checks.append(at_least(f"{mbit:g} Mbit/s, {split}: gloo's even pair over ours", gloo / ours, 1.0))
    return rows, checks


def compare_training(found: Sequence[dict[str, Any]], case: Training) -> tuple[list[Row], list[Check]]:
    """Steps beside those of even shards, and bytes held beside their formula, on the rank that is farthest off."""
    medians = {split: statistics.median(taken) for split, taken in found[0]["seconds"].items()}
    even, *_ = medians.values()
    rows: list[Row] = [
        {"training": split, "r of even shards": case.ratio, "step, s": taken, "over even shards": taken / even}
        for split, taken in medians.items()
    ]
    checks = [at_most("4:2:1:1: a step over that of even shards", medians["4:2:1:1"] / even, 1.03)]
    off = 0.0
    for split, by_zero in found[0]["held"].items():
        for zero in by_zero:
            pairs = [rank["held"][split][zero] for rank in found]
            rows.append({
                "bytes held": split, "with": zero, "MiB, by rank": _mib(held for held, _ in pairs),
                "by the formula": _mib(formula for _, formula in pairs),
            })  # fmt: skip
            away = [held / formula - 1 for held, formula in pairs]
            # With zero 3 the formula is what a backward pass holds at the most; "most memory" below is of that.
            off = max(off, *(max(0.0, each) if zero == "zero 3" else abs(each) for each in away))
    checks.append(at_most("bytes held on a rank: largest part away from the formula", off, 0.02))
    return rows, checks


def compare_memory(found: Sequence[dict[str, int]]) -> tuple[list[Row], list[Check]]:
    """The most memory that steps took, beside FSDP2, on the ranks that took most."""
    rows: list[Row] = []
    checks: list[Check] = []
    peaks = {name: [rank[name] for rank in found] for name in found[0]}
    for name, by_rank in peaks.items():
        rows.append({"most memory in steps": name, "MiB, by rank": _mib(by_rank)})
        if name != RELEASED:
            over = max(peaks[RELEASED]) / max(by_rank)
            checks.append(at_most(f"most memory in steps: {RELEASED} over {name}", over, 1.0))
    return rows, checks


def _mib(values: Iterable[int]) -> str:
    return " ".join(f"{value / 2**20:.1f}" for value in values)


def measure(size: Size) -> tuple[list[Row], list[Check]]:
    """All of it, each rate on nodes of its own."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: it warns of nodes without a name
    preload(PRELOAD)
    rows: list[Row] = []
    checks: list[Check] = []
    for mbit, mib in size.rates:
        with links([mbit] * len(SPLITS[0])) as nodes:
            found = nodes.run(range(len(SPLITS[0])), exchange, mib, size.turns, SPLITS)
        some_rows, some_checks = compare(found, mbit, mib, SPLITS)
        rows += some_rows
        checks += some_checks
    with links([size.training.mbit] * len(SPLITS[0])) as nodes:
        trained = nodes.run(range(len(SPLITS[0])), train, asdict(size.training), SPLITS, timeout_s=600)
        taken = nodes.run(range(len(SPLITS[0])), most_memory, size.training.peak_side)
    for some_rows, some_checks in (compare_training(trained, size.training), compare_memory(taken)):
        rows += some_rows
        checks += some_checks
    return rows, checks


def main() -> None:
    arguments: argparse.Namespace = options(__doc__.splitlines()[0]).parse_args()
    if (reason := why_not()) is not None:
        print(f"uneven_shards: not measured; {reason}")
        return
    rows, checks = measure(QUICK if arguments.quick else Size())
    report(result("uneven_shards", machine(None, 1), rows, checks), arguments.json)


if __name__ == "__main__":
    main()
