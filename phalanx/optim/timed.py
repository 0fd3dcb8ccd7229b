"""How long updates take on a host that does them itself, whichever thread they are on."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.optim.engine import Engine
from phalanx.optim.update import Allocator, Change, Rule, Slot, State


class Updates:
    """Counts the seconds of an engine's updates. On an accelerator those say only how long they took to be queued."""

    def __init__(self) -> None:
        self._total = self._before = 0.0

    def of(self, make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
        """The same maker of an engine, whose updates are counted here."""

        def make(*args: Any, rule: Rule, **more: Any) -> Engine:
            return make_engine(*args, rule=Timed(rule, self), **more)

        return make

    def count(self, seconds: float) -> None:
        self._total += seconds  # by one thread alone

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self._before = self._before, self._total
        return self._before - before


class Timed:
    """A rule that does as `rule` does, and is counted."""

    def __init__(self, rule: Rule, updates: Updates) -> None:
        self.rule, self._updates = rule, updates

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.rule.kinds

    def make(
        self,
        name: str,
        shape: Sequence[int],
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocator,
    ) -> State:
        return self.rule.make(name, shape, elements, dtype, device, allocate)

    def keeps_rows(self, shape: Sequence[int]) -> bool:
        return self.rule.keeps_rows(shape)

    def state_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        return self.rule.state_bytes(shape, itemsize)

    def apply(self, source: Slot, target: Slot, grads: dict[str, torch.Tensor], change: Change) -> None:
        begun = time.perf_counter()
        self.rule.apply(source, target, grads, change)
        self._updates.count(time.perf_counter() - begun)
