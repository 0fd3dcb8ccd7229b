"""Collectives that know which ranks share a node, beside flat ones, on slow links between two nodes.

    python3 benchmarks/hierarchical.py [--quick] [--json FILE]

Two nodes (links.py; needs root) with two or four ranks each, numbered node by node or in turns. A group of the backend
"phalanx", gloo and the flat ring take turns at an all-gather, an all-reduce and a reduce-scatter of one tensor. The
gain is set against what it can be: the bytes that the flat way sends through the busier link over those that must pass.
docs/performance.md#collectives says how to read the figures.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bounds
from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result, spread
from benchmarks.links import links, why_not
from phalanx.core.placement import Placement
from phalanx.elastic.node.agent import preload

PRELOAD = ("torch", "torch._dynamo", "phalanx.comm.backend", "phalanx.comm.mesh", "phalanx.comm.ring")
LAYOUTS = {
    "2 x 2 in order": (0, 0, 1, 1),
    "2 x 2 in turns": (0, 1, 0, 1),
    "2 x 4 in order": (0, 0, 0, 0, 1, 1, 1, 1),
    "2 x 4 in turns": (0, 1, 0, 1, 0, 1, 0, 1),
}
OPERATIONS = GATHER, REDUCE, SCATTER = "all-gather", "all-reduce", "reduce-scatter"
OURS, GLOO, RING = "phalanx", "gloo", "flat ring"
# What is flat, of each operation: gloo's own reduce-scatter sends everything twice, so the ring is the better one.
FLAT = {GATHER: GLOO, REDUCE: GLOO, SCATTER: RING}
LEAST_PART = {GATHER: 0.95, REDUCE: 0.95, SCATTER: 0.85}  # of the gain that the bytes allow


@dataclass(frozen=True)
class Size:
    """Mbit/s of the links, MiB of the tensor, and turns that count, after one that does not."""

    mbit: float = 200.0
    mib: float = 16.0
    turns: int = 5


QUICK = Size(mib=8.0, turns=2)


def parts_through_a_link(nodes: Sequence[int]) -> tuple[float, float]:
    """Of a gather over two nodes, with all shards even: the part of the tensor that leaves the busier node in a flat
    ring of the ranks in their order, and the part that must. A reduce-scatter is the same, an all-reduce twice that."""
    ends = list(pairwise([*nodes, nodes[0]]))
    crossing = max(sum(here == node != there for here, there in ends) for node in set(nodes))
    share = 1 / len(nodes)
    return crossing * (1 - share), max(nodes.count(node) for node in set(nodes)) * share


# ----------------------------------------------------------------------------------------------------------- on a rank


def exchange(placement: Placement, nodes: Sequence[int], mib: float, turns: int) -> list[dict[str, Any]]:
    """All operations of all ways in turns, and every result checked. For each: the seconds of the slowest rank at every
    turn, what this rank's node has sent through its interface meanwhile, and what the backend has counted of that."""
    import torch
    import torch.distributed as dist

    from phalanx.comm.backend import read_counters
    from phalanx.comm.collectives import ALL_GATHER, REDUCE_SCATTER, Traffic
    from phalanx.comm.mesh import join
    from phalanx.comm.ring import RingCollectives
    from phalanx.system import accelerator

    accelerator.set_device(torch.device("cpu"), 1)
    with join(placement, 120) as mesh:
        world, rank = mesh.world, mesh.rank
        length = round(mib * 2**18) // world * world
        cuts = [length // world * number for number in range(world + 1)]
        ours, gloo = dist.new_group(backend="phalanx"), mesh.shard.get_group()
        ring = RingCollectives(mesh.transfers, Traffic())
        tensor, own = torch.empty(length), torch.empty(length // world)
        ways: list[tuple[str, str, Callable[[], object]]] = [
            (GATHER, OURS, lambda: ALL_GATHER(tensor, own, group=ours)),
            (GATHER, GLOO, lambda: ALL_GATHER(tensor, own, group=gloo)),
            (GATHER, RING, lambda: ring.all_gather(tensor, cuts).wait()),
            (REDUCE, OURS, lambda: dist.all_reduce(tensor, group=ours)),
            (REDUCE, GLOO, lambda: dist.all_reduce(tensor, group=gloo)),
            (SCATTER, OURS, lambda: REDUCE_SCATTER(own, tensor, group=ours)),
            (SCATTER, GLOO, lambda: REDUCE_SCATTER(own, tensor, group=gloo)),
            (SCATTER, RING, lambda: ring.reduce_scatter(tensor, cuts, own).wait()),
        ]
        found: list[dict[str, Any]] = [
            {
                "operation": operation,
                "way": way,
                "seconds": [],
                "sent": 0,
                "counted": 0,
                "form": read_counters(ours).form,
            }
            for operation, way, _ in ways
        ]
        for turn in range(turns + 1):
            for one, (operation, _, act) in zip(found, ways, strict=True):
                tensor.fill_(rank)
                own.fill_(rank)
                if operation == GATHER:
                    tensor[cuts[rank] : cuts[rank + 1]] = rank
                mesh.sum([0.0])  # all begin together
                before, counted, start = sent_bytes(), read_counters(ours).between_bytes, time.perf_counter()
                act()
                (seconds,) = mesh.max([time.perf_counter() - start])
                if turn:
                    one["seconds"].append(seconds)
                    one["sent"] += (sent_bytes() - before) / turns
                    one["counted"] += (read_counters(ours).between_bytes - counted) / turns
                total = float(sum(range(world)))
                if operation == GATHER:
                    right = all(bool((tensor[a:b] == other).all()) for other, (a, b) in enumerate(pairwise(cuts)))
                else:
                    right = bool(((tensor if operation == REDUCE else own) == total).all())
                assert right, f"the {operation} of {one['way']} gave a wrong result"
        return found


def sent_bytes() -> int:
    """What has left the interfaces of this process's node, but for the one to itself."""
    lines = [line.replace(":", " ").split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(line[9]) for line in lines if line[0] != "lo")


# ------------------------------------------------------------------------------------------------------------ together


def compare(
    ranks: Sequence[Sequence[dict[str, Any]]], layout: str, nodes: Sequence[int], mbit: float, mib: float
) -> tuple[list[Row], list[Check]]:
    """Rows and checks of one layout; `ranks` is what `exchange` returned by rank."""
    rows: list[Row] = []
    checks: list[Check] = []
    whole = round(mib * 2**18) // len(nodes) * len(nodes) * 4
    flat_part, least_part = parts_through_a_link(nodes)
    medians = {(one["operation"], one["way"]): statistics.median(one["seconds"]) for one in ranks[0]}
    firsts = [nodes.index(node) for node in sorted(set(nodes))]
    for number, one in enumerate(ranks[0]):
        operation, way = one["operation"], one["way"]
        times = 2 if operation == REDUCE else 1
        must = times * least_part * whole
        low, middle, high = spread(one["seconds"])
        sent = max(ranks[first][number]["sent"] for first in firsts)
        flat = medians[operation, FLAT[operation]]
        rows.append({
            "layout": layout, "operation": operation, "by": way, "median, s": middle, "lower quartile": low,
            "upper quartile": high, "over the bound": middle / bounds.seconds(must, mbit),
            "flat over this": flat / middle, "the bytes allow": flat_part / least_part,
            "interface / must pass": sent / must,
        })  # fmt: skip
        if way != OURS:
            continue
        name = f"{layout}, {operation}"
        counted = [sum(ranks[r][number]["counted"] for r, on in enumerate(nodes) if on == nodes[f]) for f in firsts]
        checks += [
            at_least(f"{name}: gain over the flat one, of what the bytes allow",
                     flat / middle / (flat_part / least_part), LEAST_PART[operation]),
            at_most(f"{name}: bytes counted between nodes away from those that must pass",
                    max(abs(each - must) for each in counted), 0),
            at_most(f"{name}: bytes of the interface over those that must pass", sent / must, 1.06),
        ]  # fmt: skip
    return rows, checks


def measure(size: Size) -> tuple[list[Row], list[Check]]:
    """All layouts, each on nodes of its own."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: it warns of nodes without a name
    preload(PRELOAD)
    rows: list[Row] = []
    checks: list[Check] = []
    for layout, nodes in LAYOUTS.items():
        with links([size.mbit] * len(set(nodes))) as made:
            found = made.run(nodes, exchange, nodes, size.mib, size.turns)
        some_rows, some_checks = compare(found, layout, nodes, size.mbit, size.mib)
        rows += some_rows
        checks += some_checks
    return rows, checks


def main() -> None:
    arguments: argparse.Namespace = options(__doc__.splitlines()[0]).parse_args()
    if (reason := why_not()) is not None:
        print(f"hierarchical: not measured; {reason}")
        return
    rows, checks = measure(QUICK if arguments.quick else Size())
    report(result("hierarchical", machine(None, 1), rows, checks), arguments.json)


if __name__ == "__main__":
    main()
