"""The moments of a step that others have to know of: an agent by this rank's pulse, and faults that are planned."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from phalanx.comm.mesh import Mesh
from phalanx.core.progress_page import Pulse
from phalanx.engine.interface import Engine
from phalanx.workload.device_progress import DeviceMarks
from phalanx.workload.injection import Injector

Call = TypeVar("Call", bound=Callable[..., Any])


class Moments:
    """What the training loop tells of itself. Without arguments nobody listens."""

    def __init__(
        self, pulse: Pulse | None = None, injector: Injector | None = None, marks: DeviceMarks | None = None
    ) -> None:
        self.pulse, self._injector, self._marks = pulse or Pulse(), injector, marks

    def watching(self, mesh: Mesh) -> "Moments":
        """The same, told also of the waits of a mesh's collectives."""
        for each in (mesh, mesh.data):
            each.traffic.pulse = each.bookkeeping.pulse = self.pulse
        return self

    def beating(self, function: Call) -> Call:
        """`function`, every call of which says that this rank gets on."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.pulse.beat()
            return function(*args, **kwargs)

        return cast(Call, call)

    def at(self, phase: str, step: int | None = None, micro_batch: int = 0) -> None:
        """This rank begins `phase`, one of pulse.PHASES."""
        self.pulse.at(phase, step, micro_batch)
        if self._marks is not None and step is not None:
            self._marks.at(phase, step, micro_batch)
        if self._injector is not None and step is not None:
            self._injector.at(phase, step)

    def close(self) -> None:
        """The device is asked nothing any more."""
        if self._marks is not None:
            self._marks.close()

    def waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.pulse.waiting(what)

    def spoiled(self, loss_sum: torch.Tensor, step: int) -> torch.Tensor:
        """The loss of a micro-batch, as it is but for faults."""
        return loss_sum if self._injector is None else self._injector.spoiled(loss_sum, step)

    def committed(self, engine: Engine, step: int) -> None:
        """The step is done."""
        if self._injector is not None:
            self._injector.committed(engine, step)
