"""How long updates take on a host that does them itself, whichever thread they are on."""

import time
from collections.abc import Callable
from typing import Any, cast

import torch

from phalanx.engine.interface import Engine
from phalanx.optim.state import Slot
from phalanx.optim.update import StepUpdate, UpdateRule


class UpdateTimer:
    """Counts the seconds of an engine's updates. On an accelerator those say only how long they took to be queued."""

    def __init__(self) -> None:
        self._total = self._before = 0.0

    def wrap_engine(self, make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
        """The same maker of an engine, whose updates are counted here."""

        def make(*args: Any, rule: UpdateRule, **more: Any) -> Engine:
            return make_engine(*args, rule=cast(UpdateRule, TimedRule(rule, self)), **more)

        return make

    def add_seconds(self, seconds: float) -> None:
        self._total += seconds  # by one thread alone

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self._before = self._before, self._total
        return self._before - before


class TimedRule:
    """A rule that does as `rule` does, and is counted."""

    def __init__(self, rule: UpdateRule, updates: UpdateTimer) -> None:
        self.rule, self._updates = rule, updates

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def apply(self, source: Slot, target: Slot, grads: dict[str, torch.Tensor], change: StepUpdate) -> None:
        begun = time.perf_counter()
        self.rule.apply(source, target, grads, change)
        self._updates.add_seconds(time.perf_counter() - begun)
