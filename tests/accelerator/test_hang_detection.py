"""A rank, or its device, that hangs: it is named, and not the one that waits, whoever loses patience first.

That may be the agent; or the accelerator's own collectives, which end a process by SIGABRT; or the rank itself, where
it has no agent.
"""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind
from phalanx.system.fork import fork
from phalanx.trainer.loop import TrainingLoop
from tests.accelerator.device import needs_device, phalanx, run_on_device
from tests.dist import command
from tests.dist.command import write_place
from tests.helpers import some, wait_until
from tests.numerics import runs

pytestmark = needs_device
SHORT = ["train.eval_sequences=0", "train.compile=false"]
KERNELS = 1700  # of 200 or so in a step, and 500 before the first
NCCL, AGENT = "comm.timeout_s=6", "resilience.hang_timeout_s=4"


def test_the_rank_that_hangs_is_named_and_not_the_one_that_waited(tmp_path: Path) -> None:
    """Where the accelerator's collectives lose patience first and end the one that waits, by SIGABRT."""
    write_place(tmp_path)
    train = ["train", "recipe.yaml", *SHORT, "train.steps=4", NCCL, "--run-dir", "run"]
    code, out, err = phalanx(tmp_path, *train, "--inject", "hang:rank=1,step=3", order="threads", devices=2)
    assert code == 0, out + err
    (died,) = runs.events(tmp_path / "run", EventKind.WORKER_DIED)
    assert (died["rank"], died["type"], died["step"]) == (1, "Hang", 3)
    assert "in forward of step 3, while rank 0 waits" in died["reason"]
    assert "Watchdog" in (tmp_path / "run/logs/attempt-001/rank-00000.log").read_text()  # it was not our own patience


@pytest.mark.parametrize(("ranks", "limit"), some([(1, AGENT), (2, AGENT), (2, NCCL)], 1, 2))
def test_the_rank_whose_kernel_hangs_is_named_with_the_place_of_its_device(
    ranks: int, limit: str, tmp_path: Path
) -> None:
    write_place(tmp_path)
    train = ["train", "recipe.yaml", *SHORT, "train.steps=40", limit, "--run-dir", "run", "--ranks", str(ranks)]
    how: dict[str, Any] = {"order": "threads", "devices": ranks, "fail": f"hang/{ranks - 1}:{KERNELS}"}
    code, out, err = phalanx(tmp_path, *train, "resilience.max_restarts=0", **how)
    assert code == ExitCode.FAILED, out + err
    (died,) = runs.events(tmp_path / "run", EventKind.WORKER_DIED)
    assert (died["rank"], died["type"]) == (ranks - 1, "Hang"), died
    assert f"ward of step {died['step']} on its device" in died["reason"]
    assert ("while rank 0 waits" in died["reason"]) == (ranks == 2)
    log = (tmp_path / "run/logs/attempt-001/rank-00000.log").read_text()
    assert ("Watchdog" in log) == (limit == NCCL)


def unwatched(placement: Placement, run: str, data: str) -> int:
    """A rank as torchrun starts it."""
    return runs.train(placement, run, data, {"train.steps": 40, "comm.timeout_s": 6.0, "train.compile": False})


def test_a_rank_without_an_agent_ends_itself(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"its device has done nothing for . s in (for|back)ward of step"):
        run_on_device(unwatched, order="threads", fail=f"hang/0:{KERNELS}", run=str(tmp_path), data=str(tokens))


def stopped_in_a_wait(placement: Placement, folder: str) -> Any:
    """The command line, which gets a SIGTERM when its rank waits for a kernel that does not end."""
    agent, waits = os.getpid(), Path(folder) / "waits"
    library = torch.library.Library("hangs", "DEF")
    library.define("for_ever(Tensor(a!) x) -> ()")
    library.impl("for_ever", lambda x: time.sleep(1e6), "CPU")  # which the simulated device runs in a stream
    train_one = TrainingLoop.train_step

    def hung(loop: TrainingLoop, step: int) -> Any:
        if step == 2:
            torch.ops.hangs.for_ever(torch.zeros(1, device=loop.setup.mesh.device))
            waits.touch()
            torch.accelerator.synchronize()
        return train_one(loop, step)

    def told() -> int:
        wait_until(waits.exists, timeout_s=90)
        os.kill(agent, signal.SIGTERM)
        return 0

    TrainingLoop.train_step = hung  # type: ignore[method-assign]
    watcher, pidfd = fork(told)
    results = command.call(
        placement, folder, [["train", "recipe.yaml", *SHORT, "train.steps=4", NCCL, "--run-dir", "run"]]
    )[0]
    os.close(pidfd)
    os.waitpid(watcher, 0)
    return results


def test_a_stop_ends_a_run_whose_rank_is_in_a_wait_that_does_not_end(tmp_path: Path) -> None:
    """The rank has comm.timeout_s to leave, and its main thread does not even come to hear of it."""
    write_place(tmp_path)
    ((code, out, err),) = run_on_device(stopped_in_a_wait, folder=str(tmp_path), order="threads")[0:1]
    assert code == ExitCode.FAILED, out + err
    (asked,) = runs.events(tmp_path / "run", EventKind.STOP_REQUESTED)
    assert asked["signal"] == "SIGTERM"
    (died,) = runs.events(tmp_path / "run", EventKind.WORKER_DIED)
    assert died["reason"] == "killed by the agent: still running 6 s after the stop signal"
    assert not runs.events(tmp_path / "run", EventKind.RESTARTED)
    log = (tmp_path / "run/logs/attempt-001/rank-00000.log").read_text()
    assert re.search(r"\(most recent call first\):\n  File .* in synchronize\n", log), log
