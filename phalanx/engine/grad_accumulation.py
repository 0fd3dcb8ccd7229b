"""Gradients of several micro-batches whose passes mix, as in a pipeline: kept until a unit's last backward pass."""

from collections.abc import Collection, Sequence

import torch

from phalanx.engine.bucket import Held
from phalanx.engine.timing import Laps


class Several:
    """What one who runs such passes tells the engine within its `micro_batch`."""

    def __init__(self, trained: Sequence[Held], laps: Laps) -> None:
        self._trained, self._laps = list(trained), laps

    def let_go(self, units: Collection[str]) -> None:
        """The next backward pass is the last that gives these units gradients: each is sent when it is complete."""
        self._laps.begin()
        for held in self._trained:
            if held.bucket.unit in units:
                held.let_go()

    def gradient(self, name: str) -> torch.Tensor:
        """What this rank has added up of a parameter's gradient, flat, before it is sent; may be added to."""
        held = next(held for held in self._trained if name in held.names)
        return held.sum_so_far(held.names.index(name))
