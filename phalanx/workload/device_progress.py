"""How far the device of a rank is, told to its pulse while the rank itself does not get on.

The host runs ahead: where it waits in the end says nothing of where a kernel hangs. So each phase leaves an event in
the stream, and a thread asks which of them the device has passed. It asks only when the pulse has stood still for a
while, and never waits for the device itself.
"""

import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from phalanx.core.placement import ExitCode, Placement
from phalanx.core.progress_page import ProgressPage

if TYPE_CHECKING:
    from phalanx.config.schema import Config

MAX_EVENTS = 256  # phases, of the last of which an event is kept
POLL_S = 1.0
IDLE_S = 5.0  # before anything is asked: a step that goes on is not disturbed

Place = tuple[str, int, int]  # phase, step, micro-batch


class DeviceProgress:
    """Marks of one device, recorded by the main thread. `limit_s`: where nobody watches the rank from outside, it ends
    when its device has done nothing for so long; None: somebody does."""

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
    """The marks of a rank's device; None where it runs as the host does, or nobody watches."""
    if device.type == "cpu" or config.resilience.hang_timeout_s == "off":
        return None
    # An agent looks at what is told, and by its own patience.
    limit_s = config.comm.timeout_s if placement.shared is None else None
    wanted = config.resilience.hang_timeout_s
    still_s = IDLE_S if isinstance(wanted, str) else min(IDLE_S, wanted / 4)
    return DeviceProgress(progress_page, device, limit_s, still_s)
