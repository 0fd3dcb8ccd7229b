"""Ranks whose pulses say where they are, for test_watchdog.py: each job in a process of its own, without torch.

`python -m tests.unit.watched_jobs WORKER WORLD FOLDER` prints each event as a JSON line and the exit code last.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from phalanx.core import progress_page
from phalanx.core.placement import Placement
from phalanx.core.progress_page import ProgressPage
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.node.agent import NodeJob, run_local_job
from phalanx.elastic.node.watchdog import HangTimeouts

FOLDER = Path(sys.argv[3]) if len(sys.argv) > 3 else Path()
PATIENCE_S = 2.5
PATIENCE = HangTimeouts(floor_s=PATIENCE_S, other_s=30.0)


def stepping(placement: Placement, steps: int = 3) -> ProgressPage:
    """A rank that has done some steps, and begins another one."""
    mine = progress_page.open_progress_page(placement.shared, placement.rank, placement.attempt)
    for step in range(1, steps + 1):
        for phase in progress_page.STEP_PHASES:
            mine.enter_phase(phase, step)
    mine.enter_phase("data", steps + 1)
    return mine


def until_killed(mine: ProgressPage) -> int:
    with mine.waiting_for("reduce"):
        time.sleep(60)
    return 1


def hangs(placement: Placement) -> int:
    mine = stepping(placement)
    if placement.attempt > 1:
        return 0
    if placement.rank == 1:
        mine.enter_phase("forward", 4)
        time.sleep(60)
    mine.enter_phase("exchange", 4)
    return until_killed(mine)


def freezes(placement: Placement) -> int:
    mine = stepping(placement)
    if placement.attempt > 1:
        return 0
    mine.enter_phase("exchange", 4)
    if placement.rank == 0:
        with mine.waiting_for("reduce"):
            os.kill(os.getpid(), signal.SIGSTOP)
    return until_killed(mine)


def deadlock(placement: Placement) -> int:
    mine = stepping(placement)
    if placement.attempt > 1:
        return 0
    mine.enter_phase("exchange", 4)
    return until_killed(mine)


def slow_but_alive(placement: Placement) -> int:
    """One rank works on many micro-batches, for which the other waits longer than it is patient with one."""
    mine = stepping(placement)
    if placement.rank == 1:
        for number in range(10):
            mine.enter_phase("forward", 4, number)
            time.sleep(PATIENCE_S / 6)
        (FOLDER / "done").touch()
        return 0
    mine.enter_phase("exchange", 4)
    with mine.waiting_for("reduce"):
        while not (FOLDER / "done").exists():
            time.sleep(0.05)
    return 0


def beside_steps(placement: Placement) -> int:
    """Long evaluations, checkpoints and first steps are nothing to worry about."""
    mine = progress_page.open_progress_page(placement.shared, placement.rank, placement.attempt)
    mine.enter_phase("forward", 1)
    time.sleep(1.2 * PATIENCE_S)
    mine = stepping(placement)
    for phase in ("evaluate", "checkpoint"):
        mine.enter_phase(phase, 4)
        time.sleep(1.2 * PATIENCE_S)
    return 0


def asks_the_recorder(placement: Placement) -> int:
    """A rank that hangs, whose NCCL would listen at a pipe (`main` holds its end)."""
    mine = stepping(placement)
    if placement.attempt > 1:
        return 0
    told = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    (FOLDER / "records").write_text("\n".join(os.environ[name] for name in told))
    mine.enter_phase("forward", 4)
    time.sleep(60)
    return 1


def main() -> None:
    worker: Any = globals()[sys.argv[1]]
    shared = FOLDER / "shared"
    shared.mkdir(mode=0o700)

    pipe = shared / "flight-0.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # here, as a rank that is about to be killed may not get to it

    def tell(kind: str, details: dict[str, Any]) -> None:
        print(json.dumps({"kind": kind, **details}), flush=True)

    code = run_local_job(
        NodeJob(
            int(sys.argv[2]), worker, RunPaths(FOLDER / "run"), on_event=tell, shared=shared, hang_timeouts=PATIENCE
        ),
        max_restarts=1,
    )
    print(json.dumps({"code": code, "asked": os.read(reader, 10).decode()}), flush=True)


if __name__ == "__main__":
    main()
