"""Making an update again on the node that holds a replica: what travels is the reduced gradient, a third of the state.

The same kernel gives the same bits of the same numbers, on processors with the same instructions: that is compared
beforehand, and what came of every step afterwards. Only AdamW's updates are made again, of states that live in shared
memory; of others the state itself is sent.
"""

import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from phalanx.checkpoint.disk.files import DTYPES
from phalanx.checkpoint.memory.previous_state import map_slot
from phalanx.optim.state import Slot
from phalanx.optim.update import AdamW, StepUpdate
from phalanx.recovery.state_file import ALIGNED, StateFile, round_up

Tensors = Sequence[Sequence[Any]]  # of a slot, as a state file's index has them


def describe_kernels() -> str:
    """What has to be alike where the same bits are to come out."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def gradient_bytes(tensors: Tensors) -> int:
    """What the gradients of all of a slot's parameters take."""
    return sum(size for _, _, size in _places(tensors).values())


def describe_updates(rule: Mapping[str, float], tensors: Tensors) -> dict[str, Any]:
    """What another node must know to make the updates of a state of such `tensors` again, by AdamW with the numbers of
    `rule`, and to have room for that."""
    return {"rule": dict(rule), "kernels": describe_kernels(), "gradients": gradient_bytes(tensors)}


def _places(tensors: Tensors) -> dict[str, tuple[str, int, int]]:
    """By key: type, elements, and bytes, one gradient behind the other."""
    found = {}
    for key, kind, dtype, shape, _ in tensors:
        if kind == "param":
            count = torch.Size(shape).numel()
            found[key] = dtype, count, round_up(count * DTYPES[dtype].itemsize, ALIGNED)
    return found


def _views(memory: mmap.mmap, tensors: Tensors) -> dict[str, torch.Tensor]:
    views, at = {}, 0
    for key, (dtype, count, size) in _places(tensors).items():
        empty = torch.empty(0, dtype=DTYPES[dtype])
        views[key] = torch.frombuffer(memory, dtype=DTYPES[dtype], count=count, offset=at) if count else empty
        at += size
    return views


class SharedGradients:
    """A rank's gradients of the step that is being committed, and what its update goes by, for the process that sends
    them; nothing is left of them when both have ended."""

    def __init__(self, tensors: Tensors) -> None:
        """Raises OSError where there is no memory for them."""
        self.bytes = gradient_bytes(tensors)
        self.descriptor = os.memfd_create("phalanx-gradients")
        try:
            os.posix_fallocate(self.descriptor, 0, max(self.bytes, 1))
            self._views = _views(mmap.mmap(self.descriptor, max(self.bytes, 1)), tensors)
        except OSError:
            os.close(self.descriptor)
            raise
        self._without: set[str] = set()
        self._change: StepUpdate | None = None

    def note_updates(self, keys: Collection[str], grads: Mapping[str, torch.Tensor], change: StepUpdate) -> None:
        """Shards are about to be updated, those of `keys` by `grads`, or as what has none; the last call counts."""
        self._without -= grads.keys()
        self._without |= set(keys) - grads.keys()
        self._change = change
        if grads:
            torch._foreach_copy_([self._views[key] for key in grads], list(grads.values()))

    def to_message(self) -> dict[str, Any]:
        """What the other node has to know beside the gradients. Waits for nothing: they are on the host."""
        change = self._change
        assert change is not None
        return {
            "step": change.step,
            "lr": change.lr,
            "divisor": change.divisor.item(),
            "skip": change.skip.item(),
            "no_decay": sorted(change.no_decay),
            "without": sorted(self._without),
        }


class GradientReplayer:
    """A replica whose updates are made again. `form`: what the rank has said of itself, with AdamW's numbers."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._tensors: Tensors = form["index"]["tensors"]
        self._rule = AdamW(**{name: float(value) for name, value in form["rule"].items()})
        self.bytes = gradient_bytes(self._tensors)
        self._memory = mmap.mmap(-1, max(self.bytes, 1))
        self.gradients = memoryview(self._memory)[: self.bytes]  # to be filled, as they lie with the rank
        self._views = _views(self._memory, self._tensors)
        self._slots: tuple[Slot, Slot] | None = None

    def apply_update(self, file: StateFile, old: int, message: Mapping[str, Any]) -> None:
        """Update slot `old` of a replica into the other one."""
        if self._slots is None:
            self._slots = map_slot(file, 0, self._tensors), map_slot(file, 1, self._tensors)
        source, target = self._slots[old], self._slots[1 - old]
        some = next(iter(source.values()), None)
        if some is None:  # a rank may hold nothing
            return
        without = set(message["without"])
        change = StepUpdate(
            step=int(message["step"]),
            lr=float(message["lr"]),
            no_decay=frozenset(message["no_decay"]),
            divisor=torch.tensor(float(message["divisor"]), dtype=some["param"].dtype),
            skip=torch.tensor(float(message["skip"])),
        )
        grads = {key: grad for key, grad in self._views.items() if key not in without}
        with torch.no_grad():
            self._rule.apply(source, target, grads, change)


def make_replayer(form: Mapping[str, Any]) -> GradientReplayer | None:
    """What makes a rank's updates again here; None where the bits might be others."""
    if form.get("kernels") != describe_kernels():
        return None
    torch.set_num_threads(1)
    return GradientReplayer(form)
