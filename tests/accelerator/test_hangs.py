"""A rank, or its device, that hangs: it is named, and not the one that waits, whoever loses patience first.

That may be the agent; or the accelerator's own collectives, which end a process by SIGABRT; or the rank itself, where
it has no agent.
"""

from pathlib import Path
from typing import Any

import pytest

from phalanx.records import ExitCode, Kind, Placement
from tests.accelerator.device import needs_device, phalanx, run_on_device
from tests.dist.command import write_place
from tests.numerics import runs

pytestmark = needs_device
SHORT = ["train.eval_sequences=0", "balance.work=even", "train.compile=false"]
KERNELS = 1700  # of 200 or so in a step, and 500 before the first
NCCL, AGENT = "comm.timeout_s=6", "resilience.hang_s=4"


def test_the_rank_that_hangs_is_named_and_not_the_one_that_waited(tmp_path: Path) -> None:
    write_place(tmp_path)
    train = ["train", "recipe.yaml", *SHORT, "train.steps=4", NCCL, "--run-dir", "run"]
    code, out, err = phalanx(tmp_path, *train, "--inject", "hang:rank=1,step=3", order="threads", devices=2)
    assert code == 0, out + err
    (died,) = runs.events(tmp_path / "run", Kind.WORKER_DIED)
    assert (died["rank"], died["type"], died["step"]) == (1, "Hang", 3)
    assert "in forward of step 3, while rank 0 waits" in died["reason"]
    assert "Watchdog" in (tmp_path / "run/logs/attempt-001/rank-00000.log").read_text()  # it was not our own patience


@pytest.mark.parametrize(("ranks", "limit"), [(1, AGENT), (2, AGENT), (2, NCCL)])
def test_the_rank_whose_kernel_hangs_is_named_with_the_place_of_its_device(
    ranks: int, limit: str, tmp_path: Path
) -> None:
    write_place(tmp_path)
    train = ["train", "recipe.yaml", *SHORT, "train.steps=40", limit, "--run-dir", "run", "--ranks", str(ranks)]
    how: dict[str, Any] = {"order": "threads", "devices": ranks, "fail": f"hang/{ranks - 1}:{KERNELS}"}
    code, out, err = phalanx(tmp_path, *train, "resilience.max_restarts=0", **how)
    assert code == ExitCode.FAILED, out + err
    (died,) = runs.events(tmp_path / "run", Kind.WORKER_DIED)
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
