"""The command line on the simulated accelerator: it finds the devices, trains on them, and resumes after a death."""

import re
from pathlib import Path

import pytest

from phalanx.core.records import EventKind
from tests.accelerator.device import needs_device, phalanx
from tests.dist import command
from tests.dist.command import write_place
from tests.helpers import some
from tests.numerics import runs

pytestmark = needs_device
SHORT = ["train.steps=4", "checkpoint.every=2", "train.eval_sequences=0"]


@pytest.mark.parametrize(("ranks", "order"), some([(1, "main_last"), (2, "threads")], 1))
def test_a_death_changes_nothing(ranks: int, order: str, tmp_path: Path) -> None:
    write_place(tmp_path)
    train = ["train", "recipe.yaml", *SHORT]
    for name, more in {"undisturbed": [], "killed": ["--inject", "kill:rank=0,step=3", "train.compile=false"]}.items():
        code, out, err = phalanx(tmp_path, *train, *more, "--run-dir", name, order=order, devices=ranks)
        assert code == 0, out + err
        started = runs.events(tmp_path / name, EventKind.RUN_STARTED)[0]
        assert (started["world"], started["device"]) == (ranks, "sim")
    # For which torch's compiler makes no code, as for a GPU without Triton.
    resolved = runs.events(tmp_path / "undisturbed", EventKind.AUTO_RESOLVED)
    (compiled,) = [each for each in resolved if each["key"] == "train.compile"]
    assert compiled["value"] is False
    assert re.match(r"torch\.compile fails on sim:\d: \w+", compiled["reason"])
    died = runs.events(tmp_path / "killed", EventKind.WORKER_DIED)
    assert [(event["rank"], event["reason"]) for event in died] == [(0, "killed by SIGKILL")]
    assert runs.same_bits(runs.state(tmp_path / "killed"), runs.state(tmp_path / "undisturbed"))


def test_what_was_trained_is_exported_and_writes(tmp_path: Path) -> None:
    """The files and the text are those that a machine without an accelerator makes of the same run."""
    write_place(tmp_path)
    code, out, err = phalanx(
        tmp_path, "train", "recipe.yaml", *SHORT, "train.dtype=fp32", "train.compile=false", "--run-dir", "run"
    )
    assert code == 0, out + err
    write = ["generate", "run", "--prompt", "hello", "--max-tokens", "8", "--temperature", "0"]
    for machine in (phalanx, command.phalanx):
        name = machine.__module__
        assert machine(tmp_path, "export", "run", name)[0] == 0
        code, out, err = machine(tmp_path, *write)
        assert code == 0, err
        (tmp_path / name / "written").write_text(out)
    here, there = (command.contents(tmp_path / machine.__module__) for machine in (phalanx, command.phalanx))
    assert "written" in here
    assert here == there
