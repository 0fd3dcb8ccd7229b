"""Timing of a rank's work in a step, without its waits for others.

On a CPU that is wall time less what the host was held up in collectives. On an accelerator the host runs ahead, and the
device itself waits for collectives between the units of a model: there the passes of each unit are timed by events,
which are read a step later, so that nothing waits for them.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Mesh
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.progress_page import ProgressPage
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
    if mesh.device.type == "cpu" or mesh.world == 1:  # a single rank needs no clock comparison
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


# ---------------------------- how far the device of a rank is, told to its pulse while the rank itself does not get on
# The host runs ahead: where it waits in the end says nothing of where a kernel hangs. So each phase leaves an event in
# the stream, and a thread asks which of them the device has passed. It asks only when the pulse has stood still for a
# while, and never waits for the device itself.


if TYPE_CHECKING:
    from phalanx.config.schema import Config

MAX_EVENTS = 256  # phases, of the last of which an event is kept
POLL_S = 1.0
IDLE_S = 5.0  # before the first query: a running step is not disturbed

Place = tuple[str, int, int]  # phase, step, micro-batch


class DeviceProgress:
    """Progress events of one device, recorded by the main thread. `limit_s`: without an agent that watches the rank, it
    ends when its device has made no progress for so long; None: an agent does."""

    def __init__(
        self, progress_page: ProgressPage, device: torch.device, limit_s: float | None, idle_s: float = IDLE_S
    ) -> None:
        self._progress_page, self._device, self._limit_s, self._idle_s = progress_page, device, limit_s, idle_s
        self._unused: deque[Any] = deque()
        self._events: deque[tuple[Any, Place]] = deque()
        self._last_passed: Place | None = None  # the last one that was found to be passed
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def enter_phase(self, phase: str, step: int, micro_batch: int) -> None:
        """The main thread begins this, and queues from here on what belongs to it."""
        with self._lock:
            if len(self._events) == MAX_EVENTS:
                self._unused.append(self._events.popleft()[0])
            event = self._unused.popleft() if self._unused else torch.Event(self._device)
            event.record(torch.accelerator.current_stream(self._device))
            self._events.append((event, (phase, step, micro_batch)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="phalanx-device", daemon=True)
            self._thread.start()

    def report_progress(self) -> None:
        """Tell the pulse where the device is."""
        with self._lock:
            while self._events and self._events[0][0].query():
                event, self._last_passed = self._events.popleft()
                self._unused.append(event)
        if self._last_passed is not None:
            phase, step, micro_batch = self._last_passed
            self._progress_page.enter_device_phase(phase, step, micro_batch)

    def close(self) -> None:
        """The end; nothing is asked any more when it returns."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _poll(self) -> None:
        while not self._closed.wait(min(POLL_S, self._idle_s)):
            if self._progress_page.idle_s() < self._idle_s:
                continue
            try:
                self.report_progress()
            except RuntimeError:  # the device has failed, which the main thread is told, too
                return
            if self._limit_s is not None and self._events and self._progress_page.idle_s() > self._limit_s:
                self._exit_process()

    def _exit_process(self) -> None:
        phase, step, _ = self._last_passed or ("starting", 0, 0)
        sys.stderr.write(
            f"this rank ends: its device has done nothing for {self._progress_page.idle_s():.0f} s in {phase} of step "
            f"{step}, and no agent watches it (comm.timeout_s); a kernel hangs, or waits for a rank that is gone\n"
        )
        sys.stderr.flush()
        os._exit(int(ExitCode.FAILED))  # an orderly end would wait for the device


def make_device_progress(
    device: torch.device, progress_page: ProgressPage, placement: Placement, config: "Config"
) -> DeviceProgress | None:
    """The progress events of a rank's device; None on a CPU, or where no agent watches."""
    if device.type == "cpu" or config.resilience.hang_timeout_s == "off":
        return None
    # An agent looks at what is told, and by its own patience.
    limit_s = config.comm.timeout_s if placement.shared is None else None
    wanted = config.resilience.hang_timeout_s
    still_s = IDLE_S if isinstance(wanted, str) else min(IDLE_S, wanted / 4)
    return DeviceProgress(progress_page, device, limit_s, still_s)
