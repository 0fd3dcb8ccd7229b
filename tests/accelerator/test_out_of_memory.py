"""Memory that runs out, in whichever library: the run goes on with smaller micro-batches as long as there are any."""

from pathlib import Path

import pytest

from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind
from tests.accelerator.device import needs_device, phalanx
from tests.dist.command import write_place
from tests.numerics import runs

pytestmark = needs_device
# The same call fails in each start, and each has half as many sequences, down to one.
SHORT = ["train.steps=3", "train.micro_batch=2", "train.eval_sequences=0", "train.compile=false"]


@pytest.mark.parametrize("fail", ["cublas:40", "pinned:9", "allocator:400"])
def test_the_run_goes_on_with_smaller_micro_batches(fail: str, tmp_path: Path) -> None:
    write_place(tmp_path)
    code, out, err = phalanx(tmp_path, "train", "recipe.yaml", *SHORT, "--run-dir", "run", fail=fail)
    limited = [event["most"] for event in runs.events(tmp_path / "run", EventKind.MEMORY_LIMITED)]
    assert (code, limited) == (ExitCode.OUT_OF_MEMORY, [{"0": 1}]), out + err
    assert "micro-batches of one sequence, and there are none smaller" in out + err
