"""How soon like ranks have like shares that began on a machine which others were using.

    python3 benchmarks/loaded_starts.py [--quick] [--json FILE] [--seed S]

Two ranks of one model begin while one to three other processes compute, so that what is measured of them at the start
is an accident of who shared a core with whom. After some steps the others are ended. What counts is how many steps
later the larger share is within 10 % of half, and stays there; the ranks are alike, so half each is best.
"""

import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Row, at_least, machine, options, report, result
from benchmarks.mixed_devices import Place, Size, placed
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths

NEAR, SOON = 1.1, 3  # of half of the batch; steps after the others have gone
LOADED = (2, 8)  # steps with the others, at least and at most
CALM = 8  # steps that are looked at afterwards
RANKS, BATCH = 2, 96


def loaded_start(place: Place, name: str, others: int, steps: int) -> Row:
    """A run that begins beside so many processes, which end with the record of step `steps`."""
    busy = [_fork(_compute) for _ in range(others)]
    watch = _fork(lambda: _end_after(RunPaths(place.folder / name), steps, busy))
    try:
        records = place.run(name, [1.0] * RANKS, steps + 2 + CALM)
    finally:
        for pid in (watch, *busy):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    # A record is written while the next step is under way, so that one is the last that others have lengthened.
    calm = [record["shares"] for record in records[steps + 1 :]]
    near = [max(shares) <= NEAR * BATCH / RANKS for shares in calm]
    late = next((count for count in range(len(near)) if all(near[count:])), len(near))
    return {
        "others": others, "for steps": steps, "first shares": _text(records[0]["shares"]),
        "as they left": _text(records[steps]["shares"]), "at last": _text(calm[-1]), "steps until near": late,
    }  # fmt: skip


def _fork(work: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()  # type: ignore[operator]
        finally:
            os._exit(0)
    return pid


def _compute() -> None:
    while True:
        sum(range(100_000))


def _end_after(paths: RunPaths, steps: int, pids: list[int]) -> None:
    while not paths.metrics.exists() or len(read_steps(paths.metrics)) < steps:
        time.sleep(0.02)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _text(shares: list[int]) -> str:
    return "+".join(map(str, shares))


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of who computes beside the ranks, and for how long")
    given = parser.parse_args()
    drawn = random.Random(given.seed)
    with placed(replace(Size(), ratios=((1, 1),), global_batch=BATCH, seq_len=64)) as place:
        rows = [
            loaded_start(place, f"start-{number}", drawn.randint(1, 3), drawn.randint(*LOADED))
            for number in range(4 if given.quick else 20)
        ]
    soon = sum(row["steps until near"] <= SOON for row in rows) / len(rows)
    checks = [at_least(f"starts with like shares within {SOON} steps after the others have gone", soon, 0.95)]
    report(result("loaded_starts", machine(None, 1), rows, checks), given.json)


if __name__ == "__main__":
    main()
