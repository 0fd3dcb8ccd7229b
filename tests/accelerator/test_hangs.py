"""A rank that hangs, where the accelerator's own collectives lose patience first and end one that waits, by SIGABRT."""

from pathlib import Path

from phalanx.records import Kind
from tests.accelerator.device import needs_device, phalanx
from tests.dist.command import write_place
from tests.numerics import runs

pytestmark = needs_device
SHORT = ["train.steps=4", "train.eval_sequences=0", "balance.work=even", "train.compile=false", "comm.timeout_s=6"]


def test_the_rank_that_hangs_is_named_and_not_the_one_that_waited(tmp_path: Path) -> None:
    write_place(tmp_path)
    train = ["train", "recipe.yaml", *SHORT, "--run-dir", "run", "--inject", "hang:rank=1,step=3"]
    code, out, err = phalanx(tmp_path, *train, order="threads", devices=2)
    assert code == 0, out + err
    (died,) = runs.events(tmp_path / "run", Kind.WORKER_DIED)
    assert (died["rank"], died["type"], died["step"]) == (1, "Hang", 3)
    assert "in forward of step 3, while rank 0 waits" in died["reason"]
    assert "Watchdog" in (tmp_path / "run/logs/attempt-001/rank-00000.log").read_text()  # it was not our own patience
