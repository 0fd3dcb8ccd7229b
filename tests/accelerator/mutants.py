"""Take out each wait on a device in turn, and see that a test notices: `python -m tests.accelerator.mutants`.

A mutant is the package without one wait: of `work().wait()` only `work()` is left, a mark counts as reached, and a copy
that does not hold the host (`non_blocking`) holds it. The tests that belong to its file run on it until one fails: then
it is killed (tests/mutation.py). Survivors are printed, and the exit code is 1; what no test can notice stands in
EQUIVALENT, with the reason.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import ROOT
from tests.mutation import Mutant, judge, nodes, options, replaced

# Calls that hold the host or a stream until a device is somewhere, by their last name. `wait` is also that of many
# things of the host alone: it counts in these files.
WAITS = {
    "wait_event",
    "wait_stream",
    "synchronize",
    "record_stream",
    "synchronize_stream",
    "wait_current_stream",
    "drain",
    "wait",
}
WAITING = (
    "system/accelerator.py", "system/event_times.py", "optim/*.py", "engine/*.py", "parallel/*.py",
    "comm/collectives.py", "comm/p2p.py", "comm/uneven_collectives.py", "comm/backend.py",
    "comm/comm_thread.py", "checkpoint/memory/store.py", "checkpoint/disk/snapshot.py",
    "workload/*.py", "autotune/*.py", "trainer/*.py", "generate/decode.py", "health/burn_in.py", "tasks/*.py",
    "models/*.py", "api/**/*.py", "compat/sagemaker/context.py", "compat/sagemaker/delayed_scaling.py",
    "doctor/*.py",
)  # fmt: skip
# What waits for other hosts' numbers, and for files: no device is in it.
HOSTS = {
    "workload/work_split.py",
    "trainer/checksums.py",
    "trainer/rollback.py",
    "api/sharded_model.py",
    "api/sharded_step.py",
}
# Conditions that ask whether a device, or another thread, is somewhere: without them it is.
ASKS = {"is_recorded": ast.Attribute, "query": ast.Call}

HERE = "tests/accelerator/test_"
ONE, MANY, KINDS, UNITS = f"{HERE}one_rank.py", f"{HERE}many_ranks.py", f"{HERE}kinds.py", f"{HERE}waits.py"
CLOCKS, FREE = f"{HERE}clocks.py", f"{HERE}not_held.py"
ENGINE, LAYOUT = (
    f"{ONE}::test_every_engine_computes_what_the_cpu_does",
    f"{MANY}::test_layouts_compute_what_one_cpu_rank_does",
)
UNIT, BACKGROUND = "tests/unit/test_", "tests/dist/test_in_memory_checkpoints.py::test_copied_in_the_background"
EARLY = "tests/dist/test_sharded.py::test_what_was_updated_early_is_put_back_when_it_is_clipped_or_skipped"
LATE = "tests/dist/test_late_rank.py"
SHARDED = [f"{ENGINE}[{engine}-lazy]" for engine in ("zero 3", "zero 1, two slots", "zero 1", "zero 2")]
EVERY = [UNITS, LATE, *SHARDED, ENGINE, ONE, KINDS, MANY]
# The tests that belong to a file, by how its name begins, the most telling first.
TESTS = {
    "system/accelerator.py": [UNITS, FREE, CLOCKS, ENGINE],
    "comm/backend.py": [f"{HERE}backend_phalanx.py", LATE],
    "comm/uneven_collectives.py": [LATE, KINDS],
    "comm/comm_thread.py": EVERY,
    "comm/": [LATE, UNITS, LAYOUT, MANY, KINDS],
    "checkpoint/memory/store.py": [FREE, f"{ONE}::test_killed_and_resumed_from_memory", BACKGROUND],
    "checkpoint/disk/snapshot.py": [FREE, f"{ONE}::test_killed_and_resumed_from_a_checkpoint"],
    "api/batch_splitter.py": [f"{HERE}scripts.py::test_batches_are_split_in_a_loop_of_ones_own"],
    "compat/sagemaker/context.py": [f"{HERE}context.py"],
    "compat/sagemaker/delayed_scaling.py": [
        f"{HERE}scripts.py::test_histories_of_scripts_have_the_maxima_of_all_ranks"
    ],
    "doctor/": [f"{HERE}doctor.py"],
    "models/layers.py": [ENGINE],
    "models/rotary.py": [ENGINE],
    "engine/schedule.py": [f"{UNIT}timing.py", LATE, f"{UNIT}comm_thread.py", *SHARDED, ENGINE, MANY, KINDS],
    "engine/bucket.py": [f"{UNIT}pool.py", UNITS, *SHARDED],
    "engine/fsdp2.py": [LATE, f"{ENGINE}[fsdp2-lazy]", f"{ENGINE}[fsdp2-main_last]", KINDS, MANY],
    "engine/sharded_update.py": [LATE, UNITS, *SHARDED, EARLY, ONE, KINDS, MANY],
    "engine/fp8_gather.py": [f"{LAYOUT}[zero 3 in FP8-2]"],
    "engine/zero": [UNITS, LATE, *SHARDED, EARLY, f"{LAYOUT}[zero 3-2]", ONE, KINDS, MANY],
    "optim/gradients.py": [LATE],
    "parallel/tensor_collectives.py": [LATE, f"{LAYOUT}[tensor x data-0]"],
    "parallel/all_to_all.py": [f"{HERE}experts.py", f"{HERE}context.py"],
    "parallel/context.py": [f"{HERE}context.py"],
    "parallel/experts.py": [f"{HERE}experts.py"],
    "parallel/model_buffers.py": [f"{HERE}global_batch.py"],
    "parallel/offload.py": [FREE, f"{ONE}::test_inputs_that_wait_on_the_host"],
    "parallel/hf_state.py": [LATE],
    "tasks/task.py": [FREE, ENGINE],
    "workload/expert_balance.py": [f"{HERE}global_batch.py"],
    "workload/step_table.py": [f"{HERE}global_batch.py"],
    "workload/clock.py": [f"{HERE}hang_detection.py"],
    "trainer/": [CLOCKS],
    "workload/": [CLOCKS],
    "autotune/": [CLOCKS],
    "health/": [CLOCKS],
    "engine/timing.py": [f"{HERE}schedule.py"],
    "system/event_times.py": [CLOCKS, f"{HERE}schedule.py"],
    "engine/sharded.py": [UNITS, LATE, *SHARDED, EARLY, f"{LAYOUT}[zero 3-2]", ONE, KINDS, MANY],
    "": EVERY,
}

# "file function: code" -> why no test can notice it. A line that stands there without need is an error.
EQUIVALENT: dict[str, str] = {
    "doctor/collective_checks.py _rate: all_reduce(tensor, group, Traffic()).wait()": "a time that is shown, "
    "and no value",
    "doctor/collective_checks.py _rate: accelerator.synchronize(mesh.device)": "a time that is shown, and no value",
    "doctor/device_checks.py _round_trips: sent.to(device, non_blocking=True)": "the copy that is proved: one that "
    "holds the host carries the same",
    "doctor/device_checks.py _round_trips: back.copy_(there, non_blocking=True)": "the copy that is proved: one that "
    "holds the host carries the same",
    "models/rotary.py rope_table: frequencies.to(positions.device, non_blocking=True)": "memory that is "
    "not page-locked is read before the call returns, either way; CUDA holds the host besides, and this device does "
    "not",
}


def mutants(package: Path) -> Iterator[Mutant]:
    """All mutants of the package, by file and line."""
    files = {path for pattern in WAITING for path in package.glob(pattern)}
    for file in sorted(files - {package / name for name in HOSTS}):
        text, name = file.read_text(), str(file.relative_to(package))
        for function, node in nodes(ast.parse(text)):
            if isinstance(node, ast.expr) and (without := _without(node)) is not None:
                yield Mutant(name, node.lineno, function, ast.unparse(node), replaced(text, node, without))


def _without(node: ast.expr) -> str | None:
    """What stays of a wait without it; None for what is none."""
    asked = node.func if isinstance(node, ast.Call) else node
    if isinstance(asked, ast.Attribute) and ASKS.get(asked.attr) is type(node) and isinstance(asked.ctx, ast.Load):
        return "True"
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
        return ast.unparse(node.func.value)
    if any(keyword.arg == "non_blocking" for keyword in node.keywords):
        return re.sub(r"non_blocking=[\w.]+", "non_blocking=False", ast.unparse(node))
    return None


def tests_of(mutant: Mutant) -> list[str]:
    """Pytest's arguments for a mutant."""
    return next(tests for prefix, tests in TESTS.items() if mutant.file.startswith(prefix))


def main() -> int:
    """Run all mutants, or those of files that are named."""
    asked = options(__doc__).parse_args()
    importlib.import_module("phalanx.compat.sagemaker.context")  # what tests import in their ranks alone
    found = [each for each in mutants(ROOT / "phalanx") if not asked.files or each.file in asked.files]
    unknown = set(EQUIVALENT) - {each.name for each in mutants(ROOT / "phalanx")}
    assert not unknown, f"no such places: {unknown}"
    survivors = judge(found, tests_of, EQUIVALENT, asked)
    return 2 if survivors is None else int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
