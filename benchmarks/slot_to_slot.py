"""What it costs an update to leave the step before whole, so that the next one can be committed by a single store.

    python3 benchmarks/slot_to_slot.py [--quick] [--json FILE]

One process, one thread, AdamW in float32. The state of both steps lies in shared memory, as in a run. In place: memory
is written where it was read, and who is killed meanwhile leaves neither step. From slot to slot: as in a run whose
steps are committed. The copy alone is what the difference is made of. The checksum is what a commit adds to that. What
whole steps of a run cost so is measured by `recovery.py` (with `committed_steps.py`).
"""

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.harness import Check, Row, at_most, machine, options, report, result, spread
from phalanx.optim.update import MOMENTS, AdamW, Slot, StepUpdate, copy_slot
from phalanx.recovery.catalog import PAGE_BYTES, checksum
from phalanx.recovery.shared_memory import SHM_ROOT

RULE = AdamW(0.9, 0.95, 1e-8, 0.1)
KINDS = ("param", *MOMENTS)
MILLION = 1_000_000
TENSOR = 600_000  # elements of each: about what a rank owns of one matrix
IN_PLACE, SLOT_TO_SLOT, COPY, CHECKSUM = "in place", "from slot to slot", "the copy alone", "the checksum"
RATIO = 2.0  # what is asked; in one pass it would be 40 bytes moved instead of 28, 12 of them only to make room


def slots(millions: int) -> tuple[Slot, Slot, dict[str, torch.Tensor], memoryview]:
    """Two slots of that many million parameters in shared memory, gradients, and the memory of the first."""
    elements = millions * MILLION
    with tempfile.TemporaryFile(dir=SHM_ROOT) as file:
        os.posix_fallocate(file.fileno(), 0, 24 * elements)
        memory = mmap.mmap(file.fileno(), 24 * elements)
    first = memoryview(memory)[: 12 * elements // PAGE_BYTES * PAGE_BYTES]
    both: tuple[Slot, Slot] = ({}, {})
    for number, slot in enumerate(both):
        for which, kind in enumerate(KINDS):
            at = 4 * elements * (3 * number + which)
            whole = torch.frombuffer(memory, dtype=torch.float32, count=elements, offset=at)
            whole.fill_(0.01)
            for name, part in enumerate(whole.split(TENSOR)):
                slot.setdefault(f"{name}", {})[kind] = part
    return *both, {name: torch.full_like(state["param"], 0.1) for name, state in both[0].items()}, first


def measure(millions: int, rounds: int) -> Row:
    """All in turns."""
    one, other, gradients, memory = slots(millions)
    change = StepUpdate(1, 1e-4, frozenset(), torch.ones(()), torch.zeros(()))
    ways: dict[str, Callable[[], object]] = {
        IN_PLACE: lambda: RULE.apply(one, one, gradients, change),
        SLOT_TO_SLOT: lambda: RULE.apply(one, other, gradients, change),
        COPY: lambda: copy_slot(one, other),
        CHECKSUM: lambda: checksum(memory),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name in list(ways)[turn % 4 :] + list(ways)[: turn % 4]:
            begun = time.process_time()  # others may use the cores meanwhile
            ways[name]()
            if turn > 1:
                spent[name].append(time.process_time() - begun)
    ratios = [slow / fast for slow, fast in zip(spent[SLOT_TO_SLOT], spent[IN_PLACE], strict=True)]
    low, middle, high = spread(ratios)
    milliseconds = {f"{name}, ms": 1e3 * statistics.median(each) for name, each in spent.items()}
    return {"million parameters": millions, **milliseconds, "slot to slot over in place": middle,
            "lower": low, "upper": high}  # fmt: skip


def main() -> None:
    given = options("What it costs an update to leave the state of the step before whole.").parse_args()
    torch.set_num_threads(1)
    rows = [measure(millions, 11 if given.quick else 41) for millions in ((5,) if given.quick else (1, 5, 10))]
    checks: list[Check] = [
        at_most(f"slot to slot over in place, {row['million parameters']} million parameters",
                row["slot to slot over in place"], RATIO)
        for row in rows
    ]  # fmt: skip
    report(result("slot_to_slot", machine(None, 1), rows, checks), given.json)


if __name__ == "__main__":
    main()
