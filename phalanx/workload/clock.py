"""How long this rank has worked on a step, without what it waited for others.

On a CPU that is wall time less what the host was held up in collectives. On an accelerator the host runs ahead, and the
device itself waits for collectives between the units of a model: there the passes of each unit are timed by events,
which are read a step later, so that nothing waits for them.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Mesh
from phalanx.system.event_times import EventTimes, seconds_between


class Clock(Protocol):
    late: int  # how many steps ago the one was that `lap` tells of

    def start(self) -> None:
        """A step begins."""
        ...

    def lap(self) -> float:
        """Seconds worked from the last lap to this one, or `late` laps before; nan where there were none."""
        ...

    def stop(self) -> None:
        """The step ends: what the host does until the next start is no part of any."""
        ...


def clock_of(mesh: Mesh, units: Sequence[nn.Module]) -> Clock:
    """The clock of this rank's device; `units` are already sharded, so that waiting for their parameters is outside."""
    if mesh.device.type == "cpu" or mesh.world == 1:  # of one rank alone nobody asks
        return HostClock([mesh.traffic, mesh.bookkeeping])
    return UnitClock(units, EventTimes(mesh.device))


class HostClock:
    """Wall time less the waits that were counted in `traffics`."""

    late = 0

    def __init__(self, traffics: Sequence[Traffic]) -> None:
        self._traffics = traffics
        self._worked, self._since = 0.0, self._now()

    def _now(self) -> float:
        return time.perf_counter() - sum(traffic.total_wait_s for traffic in self._traffics)

    def start(self) -> None:
        self._since = self._now()

    def lap(self) -> float:
        now = self._now()
        taken, self._worked, self._since = self._worked + now - self._since, 0.0, now
        return taken

    def stop(self) -> None:
        self._worked += self._now() - self._since


class UnitClock:
    """The forward and backward passes of all units together.

    Its hooks are registered after those that gather a unit's parameters, and run after them: a unit's forward pass is
    timed from where its parameters are there, its backward pass too, up to where its input's gradient is there and
    before its own gradients are reduced. The backward pass of a unit whose inputs need no gradient (an embedding) is
    not timed, nor is the update: both are short.
    """

    def __init__(self, units: Sequence[nn.Module], stamps: EventTimes) -> None:
        self._stamps, self.late = stamps, stamps.read_delay_steps
        self._spans: list[tuple[Any, Any]] = []
        self._begun: dict[tuple[int, str], Any] = {}
        self._laps: list[list[tuple[Any, Any]]] = [[] for _ in range(self.late)]
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(self._make_pre_forward(number), with_kwargs=True)
            unit.register_forward_hook(self._make_post_forward(number))

    def start(self) -> None:
        self._begun.clear()

    def lap(self) -> float:
        self._laps.append(self._spans)
        self._spans = []
        spans = self._laps.pop(0)
        seconds = [seconds_between(first, last) for first, last in spans]  # of a step that is over: returns at once
        for pair in spans:
            self._stamps.recycle(*pair)
        return sum(seconds) if seconds else float("nan")

    def stop(self) -> None:
        self._begun.clear()

    def _begin(self, number: int, which: str) -> None:
        self._begun[number, which] = self._stamps.record()

    def _end(self, number: int, which: str) -> None:
        begun = self._begun.pop((number, which), None)
        if begun is not None:
            self._spans.append((begun, self._stamps.record()))

    def _make_pre_forward(self, number: int) -> Callable[..., None]:
        def hook(unit: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.is_grad_enabled():
                return
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._end(number, "backward"))
                    break
            self._begin(number, "forward")

        return hook

    def _make_post_forward(self, number: int) -> Callable[..., None]:
        def hook(unit: nn.Module, args: Any, output: Any) -> None:
            self._end(number, "forward")
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda _: self._begin(number, "backward"))

        return hook
