"""An update that is made again of its gradients is the update itself, to the bit, in whatever order it was noted."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint.memory import replication
from phalanx.checkpoint.memory.previous_state import read_tensor
from phalanx.checkpoint.memory.replication import SharedGradients, make_replayer
from phalanx.optim.update import AdamW, Slot, StepUpdate
from phalanx.recovery import state_file

RULE = AdamW(0.9, 0.95, 1e-8, 0.1)
SIZES = {"a": 500_037, "empty": 0, "norm": 19, "unused": 1000}


def a_file(folder: Path, dtype: str, rank: int) -> tuple[state_file.StateFile, list[Any], Slot, Slot]:
    """A state file with something in slot 0, and views of both."""
    tensors, end, size = [], 0, {"F32": 4, "F64": 8}[dtype]
    for key, count in SIZES.items():
        for kind in ("param", *RULE.state_kinds):
            tensors.append([key, kind, dtype, [count], end])
            end += state_file.round_up(count * size, state_file.ALIGNED)
    who = state_file.StateFileOwner(1, rank, 2, b"r" * 32, rank, 2)
    file = state_file.create_state_file(folder, who, {"tensors": tensors, "pieces": []}, end)
    slots: tuple[Slot, Slot] = ({}, {})
    generator = torch.Generator().manual_seed(0)
    for number, slot in enumerate(slots):
        for key, kind, _, shape, at in tensors:
            view = slot.setdefault(key, {})[kind] = read_tensor(file, number, at, dtype, shape)
            if not number and shape[0]:
                view.copy_(torch.rand(shape, generator=generator, dtype=torch.float64))
    return file, tensors, *slots


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_an_update_made_again_has_the_same_bits(dtype: str, skip: float, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    _, tensors, source, target = a_file(here, dtype, 0)
    other, _, _, again = a_file(there, dtype, 0)
    wide = source["a"]["param"].dtype
    change = StepUpdate(3, 1e-2, frozenset(["norm"]), torch.tensor(0.37, dtype=wide), torch.tensor(skip))
    grads = {key: torch.randn(count, dtype=wide) for key, count in SIZES.items() if key != "unused"}
    gradients = SharedGradients(tensors)
    # Updated early by what was likely, and then again by what all have agreed on.
    gradients.note_updates(SIZES, {key: torch.ones(count, dtype=wide) for key, count in SIZES.items()},
                   dataclasses.replace(change, lr=5.0))  # fmt: skip
    gradients.note_updates(["norm"], {"norm": grads["norm"]}, change)
    gradients.note_updates(["a", "empty", "unused"], {key: grads[key] for key in ("a", "empty")}, change)
    form = {
        "rule": dataclasses.asdict(RULE),
        "kernels": replication.describe_kernels(),
        "index": {"tensors": tensors},
    }
    made = make_replayer(form)
    assert made is not None and made.bytes == gradients.bytes == len(made.gradients)
    made.gradients[:] = os.pread(gradients.descriptor, gradients.bytes, 0)
    made.apply_update(other, 0, gradients.to_message())
    RULE.apply(source, target, grads, change)
    for key, state in target.items():
        for kind, tensor in state.items():
            assert torch.equal(tensor, again[key][kind]), (key, kind)
    assert torch.equal(target["a"]["param"], source["a"]["param"]) is bool(skip)
    assert torch.equal(target["unused"]["param"], source["unused"]["param"])


def test_nothing_is_made_again_by_other_kernels() -> None:
    form = {"rule": dataclasses.asdict(RULE), "kernels": "torch 2, of another processor", "index": {"tensors": []}}
    assert make_replayer(form) is None
    assert make_replayer({**form, "kernels": replication.describe_kernels()}) is not None
