"""A rank that hangs, while another's main thread is inside the device's own wait, where no signal handler runs."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import torch

from phalanx.cluster.fork import fork
from phalanx.records import ExitCode, Kind, Placement
from phalanx.train.trainer import Loop
from tests.accelerator.device import needs_device, phalanx, run_on_device
from tests.dist import command
from tests.dist.command import write_place
from tests.helpers import wait_until
from tests.numerics import runs

pytestmark = needs_device
SHORT = ["train.steps=4", "train.eval_sequences=0", "balance.work=even", "train.compile=false", "comm.timeout_s=6"]
HANGS = ["train", "recipe.yaml", *SHORT, "--run-dir", "run", "--inject", "hang:rank=1,step=3"]


def test_the_rank_that_hangs_is_named_and_not_the_one_that_waited(tmp_path: Path) -> None:
    """Where the accelerator's collectives lose patience first and end the one that waits, by SIGABRT."""
    write_place(tmp_path)
    code, out, err = phalanx(tmp_path, *HANGS, order="threads", devices=2)
    assert code == 0, out + err
    (died,) = runs.events(tmp_path / "run", Kind.WORKER_DIED)
    assert (died["rank"], died["type"], died["step"]) == (1, "Hang", 3)
    assert "in forward of step 3, while rank 0 waits" in died["reason"]
    assert "Watchdog" in (tmp_path / "run/logs/attempt-001/rank-00000.log").read_text()  # it was not our own patience


def stopped_in_a_wait(placement: Placement, folder: str) -> Any:
    """The command line, which gets a SIGTERM when its rank waits for a kernel that does not end."""
    agent, waits = os.getpid(), Path(folder) / "waits"
    library = torch.library.Library("hangs", "DEF")
    library.define("for_ever(Tensor(a!) x) -> ()")
    library.impl("for_ever", lambda x: time.sleep(1e6), "CPU")  # which the simulated device runs in a stream
    train_one = Loop.train_one

    def hung(loop: Loop, step: int) -> Any:
        if step == 2:
            torch.ops.hangs.for_ever(torch.zeros(1, device=loop.mesh.device))
            waits.touch()
            torch.accelerator.synchronize()
        return train_one(loop, step)

    def told() -> int:
        wait_until(waits.exists, timeout_s=90)
        os.kill(agent, signal.SIGTERM)
        return 0

    Loop.train_one = hung  # type: ignore[method-assign]
    watcher, pidfd = fork(told)
    results = command.call(placement, folder, [["train", "recipe.yaml", *SHORT, "--run-dir", "run"]])[0]
    os.close(pidfd)
    os.waitpid(watcher, 0)
    return results


def test_a_stop_ends_a_run_whose_rank_is_in_a_wait_that_does_not_end(tmp_path: Path) -> None:
    """The rank has comm.timeout_s to leave, and its main thread does not even come to hear of it."""
    write_place(tmp_path)
    ((code, out, err),) = run_on_device(stopped_in_a_wait, folder=str(tmp_path), order="threads")[0:1]
    assert code == ExitCode.FAILED, out + err
    (asked,) = runs.events(tmp_path / "run", Kind.SIGNALLED)
    assert asked["signal"] == "SIGTERM"
    (died,) = runs.events(tmp_path / "run", Kind.WORKER_DIED)
    assert died["reason"] == "killed by the agent: still running 6 s after the stop signal"
    assert not runs.events(tmp_path / "run", Kind.RESTARTED)
    log = (tmp_path / "run/logs/attempt-001/rank-00000.log").read_text()
    assert re.search(r"\(most recent call first\):\n  File .* in synchronize\n", log), log
