"""A table that each step of a run changes by numbers of all its ranks, and that the next step goes by.

The numbers are reduced exactly in any order (sums of whole numbers, maxima), so the table is the same, bit for bit, on
any layout. It is state: it is in the header of a step that is kept or saved, and a skipped step leaves it as it was.
"""

import base64
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import collectives
from phalanx.comm.collectives import PendingCollective
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.engine.interface import StepOutcome

WAIT_S = 60.0  # who commits a step waits so long for its passes to end, which they have


@dataclass
class _StepNumbers:
    """What a step went by, and its own numbers on the host, while they are being reduced over ranks."""

    step: int
    before: Tensor
    numbers: Tensor
    pending: PendingCollective
    outcome: StepOutcome | None = None


class StepTable:
    """The table `before` the step that is being made; `advance(before, numbers)` gives that after it."""

    def __init__(
        self, mesh: Mesh, first: Tensor, advance: Callable[[Tensor, Tensor], Tensor],
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:  # fmt: skip
        self.before = first
        self._mesh, self._first, self._advance, self._op = mesh, first, advance, op
        self._last: _StepNumbers | None = None
        self._previous: _StepNumbers | None = None
        self._changed = threading.Condition()

    def settle(self) -> Tensor:
        """The table after the last step, once it is known what came of that."""
        if self._last is not None:
            self.before = self._after(self._last)
        return self.before

    def end(self, step: int, numbers: Tensor) -> None:
        """After the last pass: start to reduce this rank's `numbers` of a step, on the host, over the ranks."""
        pending = collectives.all_reduce(numbers, self._mesh.control, self._mesh.bookkeeping, self._op)
        with self._changed:
            self._previous, self._last = self._last, _StepNumbers(step, self.before, numbers, pending)
            self._changed.notify_all()

    def note_outcome(self, outcome: StepOutcome) -> None:
        """What came of the step, as soon as it is known."""
        assert self._last is not None
        self._last.outcome = outcome

    def find(self, step: int) -> Tensor | None:
        """The numbers of the step before or the last one over all ranks; None of others."""
        found = self._find(step)
        return None if found is None else self._reduced(found)

    def after(self, step: int, outcome: StepOutcome | None) -> Tensor:
        """The table after `step`, of which came `outcome`; any thread may ask. Without an `outcome` the step is over,
        or was begun with."""
        if outcome is not None:
            with self._changed:
                there = self._changed.wait_for(lambda: self._last is not None and self._last.step >= step, WAIT_S)
            assert there, f"the passes of step {step} have not ended"
        found = self._find(step)
        return self.before if found is None else self._after(found, outcome)

    def restore(self, table: Tensor | None) -> None:
        """Begin with a `table`; with None with the first one."""
        self._last = self._previous = None
        self.before = self._first if table is None else table

    def _find(self, step: int) -> _StepNumbers | None:
        with self._changed:
            found = [each for each in (self._last, self._previous) if each is not None and each.step == step]
        return found[0] if found else None

    def _after(self, of: _StepNumbers, outcome: StepOutcome | None = None) -> Tensor:
        outcome = outcome or of.outcome
        assert outcome is not None
        return of.before if outcome.get()[1] else self._advance(of.before, self._reduced(of))

    def _reduced(self, of: _StepNumbers) -> Tensor:
        with self._changed:  # of two threads that wait one at a time
            of.pending.wait()
        return of.numbers


def encode_table(table: Tensor) -> str:
    """A table of int64 or float32 as text for a header: little-endian, compressed, in base64."""
    plain = table.numpy()
    return base64.b64encode(zlib.compress(plain.astype(plain.dtype.newbyteorder("<")).tobytes(), 1)).decode("ascii")


def decode_table(text: Any, like: Tensor, key: str) -> Tensor:
    """What `encode_table` wrote of a table of the shape and dtype of `like`, under a header's `key`. Raises ConfigError
    for anything else."""
    size = like.numel() * like.element_size()
    try:
        raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except (ValueError, TypeError, zlib.error):
        raw = b""
    if len(raw) != size:
        raise ConfigError(
            f"the checkpoint's {key} does not hold a table of {' x '.join(map(str, like.shape))}, so it is damaged or "
            "of another model; resume from an older checkpoint"
        )
    dtype = like.numpy().dtype
    return torch.from_numpy(np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype).reshape(like.shape))
