"""Hooks of a step: for the progress page that the agent reads, and for injected faults."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from phalanx.comm.mesh import Mesh
from phalanx.core.progress_page import ProgressPage
from phalanx.engine.interface import Engine
from phalanx.system import trace
from phalanx.workload.clock import DeviceProgress
from phalanx.workload.injection import FaultInjector

Call = TypeVar("Call", bound=Callable[..., Any])


class StepHooks:
    """The hooks of the training loop; without arguments they do nothing."""

    def __init__(
        self,
        progress_page: ProgressPage | None = None,
        injector: FaultInjector | None = None,
        device_progress: DeviceProgress | None = None,
    ) -> None:
        self.progress_page = progress_page or ProgressPage()
        self._injector, self._device_progress = injector, device_progress

    def watch_collectives(self, mesh: Mesh) -> "StepHooks":
        """The same, told also of the waits of a mesh's collectives."""
        for each in (mesh, mesh.data):
            each.traffic.progress_page = each.bookkeeping.progress_page = self.progress_page
        return self

    def wrap_with_progress_touch(self, function: Call) -> Call:
        """`function`, every call of which says that this rank gets on."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.progress_page.touch()
            return function(*args, **kwargs)

        return cast(Call, call)

    def enter_phase(self, phase: str, step: int | None = None, micro_batch: int = 0) -> None:
        """This rank begins `phase`, one of progress_page.PHASES."""
        self.progress_page.enter_phase(phase, step, micro_batch)
        if self._device_progress is not None and step is not None:
            self._device_progress.enter_phase(phase, step, micro_batch)
        if self._injector is not None and step is not None:
            self._injector.enter_phase(phase, step)

    @contextlib.contextmanager
    def phase(self, name: str, step: int, micro_batch: int = 0) -> Iterator[None]:
        """What runs inside is phase `name` of a step, here and in a profiler's trace."""
        self.enter_phase(name, step, micro_batch)
        with trace.phase(name):
            yield

    def check_faults(self, engine: Engine) -> None:
        """Raise ConfigError for a planned fault that cannot happen on this rank."""
        if self._injector is not None:
            self._injector.check_bit_flips(engine)

    def close(self) -> None:
        """The device is asked nothing any more."""
        if self._device_progress is not None:
            self._device_progress.close()

    def waiting_for(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.progress_page.waiting_for(what)

    def apply_loss_faults(self, loss_sum: torch.Tensor, step: int) -> torch.Tensor:
        """The loss of a micro-batch, as it is but for faults."""
        return loss_sum if self._injector is None else self._injector.apply_loss_faults(loss_sum, step)

    def after_commit(self, engine: Engine, step: int) -> None:
        """The step is done."""
        if self._injector is not None:
            self._injector.after_commit(engine, step)
