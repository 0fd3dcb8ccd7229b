"""A run goes to Megatron with Adam's state, and comes back as a run folder, bit for bit."""

from pathlib import Path

import torch

from phalanx.checkpoint.disk.load import Checkpoint, find_newest_valid
from tests.dist.command import phalanx, refused, write_place


def newest(run: Path) -> Checkpoint:
    found = find_newest_valid(run / "checkpoints", None, lambda kind, details: None)
    assert found is not None
    return found


def test_a_run_goes_to_megatron_and_back(tmp_path: Path) -> None:
    folder = write_place(tmp_path)
    done, _, err = phalanx(folder, "train", "recipe.yaml", "--run-dir", "run", "--ranks", "1", "model.layers=2")
    assert done == 0, err
    done, out, err = phalanx(folder, "convert", "run", "core", "--to", "megatron", "--layers-per-stage", "1,1")
    assert done == 0 and "of 1 tensor and 2 pipeline ranks, with Adam's state of step 2" in " ".join(out.split()), err
    done, _, err = phalanx(folder, "convert", "core", "again", "--to", "run")
    assert done == 0, err
    first, second = newest(folder / "run"), newest(folder / "again")
    assert second.header["step"] == 2 and first.parameters == second.parameters
    for name, (shape, _) in first.parameters.items():
        for kind in first.kinds(name):
            one, other = (torch.empty(torch.Size(shape).numel()) for _ in range(2))
            first.read_into(name, kind, 0, one.numel(), one)
            second.read_into(name, kind, 0, other.numel(), other)
            assert torch.equal(one, other) and one.std() >= 0, (name, kind)
    assert "is no list of numbers" in refused(
        folder, "convert", "run", "x", "--to", "megatron", "--layers-per-stage", "a"
    )
    assert "is of 2 stages, not 3" in refused(
        folder, "convert", "run", "x", "--to", "megatron", "--layers-per-stage", "1,1", "--pipeline", "3"
    )
