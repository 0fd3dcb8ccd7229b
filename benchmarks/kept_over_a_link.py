"""What it costs a step to keep an accelerator's state in memory, over a link on which that takes longer than a step.

    python3 benchmarks/kept_over_a_link.py [--quick] [--json FILE]

The simulated accelerator of the tests, with streams that run at once and a link between it and the host of a speed of
its own: so slow that the copy of a rank's state takes as many steps as that of a billion parameters (12 GB) takes over
10 GB/s, where a step takes half a second. Runs with `resilience.in_memory_checkpoints=auto` and without take turns.
What is kept costs the steps that begin while it is copied: how much longer they take than the median of their run, over
the steps from one that is kept to the next, is what is asked about. Whole runs are compared as well; on a CPU two that
are the same differ by some per cent.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import at_most, machine, options, report, result
from phalanx.checkpoint.memory.interval import MEASURED, UNMEASURED
from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_steps, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.recovery import inventory, shared_memory, state_file
from tests.accelerator.device import run_on_device
from tests.numerics import runs

COPY_S, STEP_S = 12e9 / 10e9, 0.5  # of a billion parameters
FIRST = UNMEASURED + MEASURED + 5  # the first step that counts
AFTER = 8  # steps from a kept one on that may take longer for it: three times as many as its copy takes
RECIPE = {
    "model.hidden": 128, "model.layers": 4, "model.intermediate": 512, "train.dtype": "fp32", "train.micro_batch": 64,
    "train.global_batch": 64, "train.eval_sequences": 4, "train.compile": False, "parallel.engine": "single",
}  # fmt: skip


def walk(folder: Path, name: str, tokens: Path, memory: bool | str, steps: int, link_mb_s: int) -> dict[str, Any]:
    """Seconds of the steps that count, how often one was kept and what that cost, and the bytes of a slot."""
    run = folder / name
    run.mkdir()
    write_event(RunPaths(run).events, EventKind.RUN_STARTED, 1)
    changes = RECIPE | {"train.steps": steps, "optim.decay_steps": steps, "resilience.in_memory_checkpoints": memory}
    with tempfile.TemporaryDirectory(dir=shared_memory.SHM_ROOT) as shared:
        codes = run_on_device(
            runs.train, order="threads", timeout_s=900, shared=Path(shared), link_mb_s=link_mb_s, run=str(run),
            data=str(tokens), changes=changes,
        )  # fmt: skip
        facts = map(state_file.read_metadata, inventory.list_state_files(Path(shared)))
        slot_bytes = max((each.slot_bytes for each in facts if each is not None), default=0)
    assert codes == [0]
    seconds = {
        record["step"]: record["step_s"] for record in read_steps(RunPaths(run).metrics) if record["step"] >= FIRST
    }
    said = [
        event for event in read_lines(RunPaths(run).events) if event.get("key") == "resilience.in_memory_checkpoints"
    ]
    every = [int(str(event["value"]).split()[1]) for event in said if str(event["value"]).startswith("every")]
    found = {"seconds": list(seconds.values()), "every": (every or [1])[0], "bytes": slot_bytes}
    return found | {"kept": [_longer_s(seconds, step) for step in seconds if step % found["every"] == 0]}


def _longer_s(seconds: dict[int, float], kept: int) -> float:
    """How much longer the steps from one that is kept on took than others, until its copy has long arrived."""
    usual_s = statistics.median(seconds.values())
    return sum(seconds[step] - usual_s for step in range(kept, kept + AFTER) if step in seconds)


def main() -> None:
    given = options("What it costs to keep an accelerator's state in memory over a slow link.").parse_args()
    steps, pairs = (FIRST + 320, 1) if given.quick else (FIRST + 480, 3)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokens").mkdir()
        tokens = folder / "tokens"
        runs.write_tokens(tokens)
        step_s = statistics.median(walk(folder, "alone", tokens, False, FIRST + 40, 0)["seconds"])
        state = walk(folder, "asked", tokens, True, 4, 0)["bytes"]
        link_mb_s = max(1, round(state / (COPY_S / STEP_S * step_s) / 1e6))
        for pair in range(pairs):
            names: list[tuple[str, bool | str]] = [(f"kept {pair}", "auto"), (f"plain {pair}", False)]
            found = {
                memory: walk(folder, name, tokens, memory, steps, link_mb_s)
                for name, memory in (names if pair % 2 else reversed(names))
            }
            kept, without = found["auto"], found[False]
            spent, base = (statistics.median(each["seconds"]) for each in (kept, without))
            longer_s = statistics.mean(kept["kept"])
            rows.append({"link, MB/s": link_mb_s, "a step without, ms": 1e3 * base, "with, ms": 1e3 * spent,
                         "every": kept["every"], "a copy over a step": state / link_mb_s / 1e6 / base,
                         "kept": len(kept["kept"]), "longer for one, ms": 1e3 * longer_s,
                         "a step with over without": 1 + longer_s / kept["every"] / spent})  # fmt: skip
    ratio = statistics.median(row["a step with over without"] for row in rows)
    checks = [at_most("a step with the state kept over one without", ratio, 1.01)]
    report(result("kept_over_a_link", machine(None, 1), rows, checks), given.json)


if __name__ == "__main__":
    main()
