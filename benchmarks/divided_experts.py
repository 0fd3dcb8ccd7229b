"""Experts divided over unequal ranks: two devices of unlike speed, and the exchange of tokens over unlike links.

    sudo python3 benchmarks/divided_experts.py [--quick] [--json FILE] [--only speeds|exchange]

- `speeds`: two ranks of speed 3 to 1 (processes with CPU quotas that make them so, throttle.py) hold experts of 3 to 1,
  and equal numbers, beside each rank alone.
- `exchange`: tokens of two nodes with links of 400 and 100 Mbit/s (links.py), beside the time that the slower link
  takes for its bytes alone. Needs root.
"""

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import links
from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result
from benchmarks.mixed_devices import PRELOAD, Place, calibrate, placed, rate
from benchmarks.mixed_devices import Size as SpeedSize
from phalanx.core.placement import Placement
from phalanx.elastic.node import agent

OF_THE_SUM, OF_THE_BOUND = 0.90, 1.10
PERIOD_S = 0.005  # of quotas: shorter than a block's computing, so that no rank waits for another's next period
SPEEDS, MBIT = (3, 1), (400.0, 100.0)
ROWS = 16  # of a step: with few, experts' loads differ by chance, and waits for a quota's next period count


def compare_speeds(quick: bool) -> tuple[list[Row], list[Check]]:
    """Ranks of speed 3 to 1: experts and rows by speed, and equal numbers, over the sum of what each does alone."""
    width = 64 if quick else 256
    # A router that has not learned to spread its tokens loads ranks at random: corrections alone level it, in the first
    # steps, and a learning rate of nearly 0 keeps it so. Where one token is a quarter of the text, no router could.
    experts = {"experts": 8, "experts_per_token": 2, "intermediate": 3 * width, "balance": "bias", "bias_rate": 0.001}
    model = {"architecture": "deepseek_v3", "hidden": width, "layers": 2, "heads": 4, "intermediate": 3 * width,
             "latent": [0, width // 4, width // 8, width // 8], "vocab_size": 256, "moe": experts}  # fmt: skip
    turns, level, steps = (1, 1, 2) if quick else (3, 8, 4)
    rates: dict[str, list[float]] = {"each alone, their sum": [], "3 to 1": [], "equal": []}
    with placed(SpeedSize(ratios=(SPEEDS,), global_batch=ROWS, seq_len=512, model=model), period_s=PERIOD_S) as place:
        place = replace(place, tokens=write_even_tokens(place.folder / "even"))

        def run(name: str, cores: Any, warm: int, **settings: Any) -> float:
            return rate(Place.run(place, name, cores, warm + steps, optim__lr=1e-9, **settings)[warm:])

        def alone(name: str, rank: int, part: float) -> float:
            rows = ROWS * SPEEDS[rank] // sum(SPEEDS)
            return run(f"{name}-{rank}", [part], 1, first_rank=rank, train__global_batch=rows, train__micro_batch=rows)

        cores = calibrate(SPEEDS, lambda rank, part: alone(f"first-{part:g}", rank, part))
        for turn in range(turns):
            each = [alone(f"alone-{turn}", rank, part) for rank, part in enumerate(cores)]
            rates["each alone, their sum"].append(sum(each))
            shared = {"parallel__expert": 2, "train__micro_batch": ROWS}
            for name, by_rank, held in (("3 to 1", [12, 4], [6, 2]), ("equal", "even", [4, 4])):
                of_experts = {"balance__batch": by_rank, "balance__experts": held}
                rates[name].append(run(f"{name[0]}-{turn}", cores, level, **shared, **of_experts))
    sums = rates["each alone, their sum"]
    parts = {
        name: statistics.median(one / other for one, other in zip(found, sums, strict=True))
        for name, found in rates.items()
    }
    rows: list[Row] = [
        {"what": f"experts and rows: {name}", "tokens/s": statistics.median(found),
         "of the ranks alone": parts[name]}
        for name, found in rates.items()
    ]  # fmt: skip
    return rows, [
        at_least("experts of 3 to 1: over the sum of the ranks alone", rows[1]["of the ranks alone"], OF_THE_SUM)
    ]


def write_even_tokens(folder: Path) -> Path:
    """A token set in which every token is as frequent."""
    import numpy as np  # behind preload, for which numpy may start no thread

    from tests.token_sets import TokenWriter

    writer = TokenWriter(folder, 256, eos_id=0, key="benchmark")
    writer.append(np.random.default_rng(0).integers(1, 256, 1 << 15))
    writer.finish()
    return folder


def exchange(placement: Placement, count: int, width: int, passes: int) -> list[float]:
    """Of a rank: median seconds of sending its `count` rows to the ranks that hold 3 of 4 and 1 of 4 experts, and the
    most bytes that it sends or receives."""
    import torch

    from phalanx.comm.mesh import join
    from phalanx.layout.mesh_axes import MeshAxes
    from phalanx.parallel.all_to_all import all_to_all
    from phalanx.parallel.experts import ExpertParallel

    sent = [count * speed // sum(SPEEDS) for speed in SPEEDS]
    received = [sent[placement.rank]] * placement.world
    with join(placement, 600, axes=MeshAxes(expert=placement.world)) as mesh:
        assert mesh.expert is not None
        ranks = ExpertParallel(mesh.expert, mesh.traffic, SPEEDS)
        rows = torch.randn(count, width)
        taken = []
        for turn in range(1 + passes):
            mesh.max([0.0])  # all begin together
            begun = time.perf_counter()
            all_to_all(rows, sent, received, ranks)
            (slowest,) = mesh.max([time.perf_counter() - begun])
            taken += [slowest] if turn else []
    out, here = (sum(counts) - counts[placement.rank] for counts in (sent, received))
    return [statistics.median(taken), 4.0 * width * max(out, here)]


def compare_exchange(quick: bool) -> tuple[list[Row], list[Check]]:
    """The exchange between unequal nodes over the bound of their links."""
    if (why := links.why_not()) is not None:
        return [{"what": f"exchange left out: {why}"}], []
    with links.links(MBIT) as nodes:
        found = nodes.run([0, 1], exchange, 1024 if quick else 8192, 1024, 2 if quick else 5, timeout_s=600)
    bound = max(8.0 * moved / (1e6 * mbit) for (_, moved), mbit in zip(found, MBIT, strict=True))
    seconds = found[0][0]
    row: Row = {"what": "exchange over links of 400 and 100 Mbit/s", "seconds": seconds, "bound, s": bound}
    return [row], [at_most("exchange over the bound of the links", seconds / bound, OF_THE_BOUND)]


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("speeds", "exchange"), help="one of the two")
    arguments = parser.parse_args()
    agent.preload(PRELOAD)
    rows: list[Row] = []
    checks: list[Check] = []
    for name, measure in (("speeds", compare_speeds), ("exchange", compare_exchange)):
        if arguments.only in (None, name):
            found, held = measure(arguments.quick)
            rows += found
            checks += held
    report(result("divided experts", machine(None, 1), rows, checks), arguments.json)


if __name__ == "__main__":
    main()
