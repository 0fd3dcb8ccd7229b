"""The scripts of examples/sagemaker, unedited: on any number of ranks they walk the same curve."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.dist.scripts import EXAMPLES, example, losses
from tests.helpers import ALL, ROOT, cover, run_ranks, some
from tests.warm_shell import run_script as run_in_shell


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The curve of one rank, in plain FSDP."""
    found = losses(example("plain_fsdp", 1))
    assert len(found) == 6
    assert found[-1] < 0.8 * found[0], "it does learn"
    return found


@pytest.mark.parametrize(
    ("name", "world"), cover(["plain_fsdp", "hybrid_shard", "activation_offload"], [2, 4] + [8] * ALL)
)
def test_an_example_walks_the_curve_of_one_rank(name: str, world: int, alone: list[float]) -> None:
    printed = example(name, world)
    assert losses(printed) == pytest.approx(alone, abs=2e-5)
    if name == "hybrid_shard":
        alike = list(range(0, world, 2))
        assert printed.startswith(f"each of {len(alike)} copies on 2 ranks; the same shard: {alike}\n")


def test_a_model_begun_by_delayed_initialisation_learns() -> None:
    four = losses(example("delayed_init", 4))
    assert len(four) == 6
    assert four[-1] < 0.9 * four[0]
    if ALL:  # test_sagemaker_keys.py draws weights on different numbers
        assert losses(example("delayed_init", 8)) == pytest.approx(four, abs=2e-5)


@pytest.mark.parametrize("kind", some(["sharded", "local"], 0))
def test_saved_stopped_and_resumed_is_uninterrupted(kind: str, alone: list[float], tmp_path: Path) -> None:
    """With more copies than before; the whole model then is one that transformers loads."""
    folder = str(tmp_path / "saved")
    first = losses(example("checkpoint_and_resume", 2, folder, kind, "3"))
    assert len(first) == 3
    shutil.copytree(folder, f"{folder}-same")
    for later, resumed in some([(4, folder), (2, f"{folder}-same")], 0):
        rest = losses(example("checkpoint_and_resume", later, resumed, kind))
        assert first + rest == pytest.approx(alone, abs=2e-5)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    sys.path.insert(0, str(EXAMPLES))
    try:
        from small import batch
    finally:
        sys.path.remove(str(EXAMPLES))
    with torch.no_grad():
        ids = batch(6, 0, 1)
        assert float(model(input_ids=ids, labels=ids).loss) < alone[-1] * 1.05


def test_a_command_runs_a_script(alone: list[float], tmp_path: Path) -> None:
    script = f"phalanx run --nproc 2 {EXAMPLES / 'plain_fsdp.py'}"
    code, printed = run_ranks(run_in_shell, 1, script=script, folder=str(tmp_path), settings={})[0]
    assert code == 0, printed
    assert losses(printed) == pytest.approx(alone, abs=2e-5)
    assert printed.count("no accelerator found") == (0 if torch.accelerator.is_available() else 1)


COMMANDS = {
    "run": ["-m", "phalanx", "run", "--nproc", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "phalanx.compat.sagemaker"],
    "module": ["-m", "phalanx.compat.sagemaker", "--nproc", "2"],
}


@pytest.mark.skipif(not ALL, reason="make test-all")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_three_commands_run_a_script(name: str, alone: list[float], tmp_path: Path) -> None:
    users = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, *COMMANDS[name], str(EXAMPLES / "plain_fsdp.py")],
        cwd=tmp_path,
        env=users | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == pytest.approx(alone, abs=2e-5)
    assert done.stderr.count("no accelerator found") == (0 if torch.accelerator.is_available() else 1)
