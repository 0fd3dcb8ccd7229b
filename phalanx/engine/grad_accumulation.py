"""Gradients of several micro-batches whose passes mix, as in a pipeline: kept until a unit's last backward pass."""

from collections.abc import Collection, Sequence

import torch

from phalanx.engine.bucket import RankBucket
from phalanx.engine.timing import PassTimer


class GradAccumulation:
    """What one who runs such passes tells the engine within its `micro_batch`."""

    def __init__(self, trained: Sequence[RankBucket], pass_timer: PassTimer) -> None:
        self._trained, self._pass_timer = list(trained), pass_timer

    def expect_last_backward(self, units: Collection[str]) -> None:
        """The next backward pass is the last that gives these units gradients: each is sent when it is complete."""
        self._pass_timer.start()
        for held in self._trained:
            if held.bucket.unit in units:
                held.expect_last_backward()

    def gradient_sum(self, name: str) -> torch.Tensor:
        """What this rank has added up of a parameter's gradient, flat, before it is sent; may be added to."""
        held = next(held for held in self._trained if name in held.names)
        return held.gradient_sum(held.names.index(name))
