"""The communication thread: it moves data while the main thread computes, in the order of its tasks.

On an accelerator it queues its work in a separate stream, and a `StreamEvent` joins the two streams without either host
thread waiting for the device. On a CPU the thread itself does the work.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from phalanx.comm.collectives import Traffic
from phalanx.system import accelerator

JOIN_TIMEOUT_S = 1.0  # for the thread to end
POLL_S = 1.0  # how often a waiter checks that the thread is alive


class CommThread:
    """Runs tasks in order, in its own thread and without gradients.

    The first exception ends it: it is raised again in every wait for the communication thread, and no further task
    runs.
    """

    def __init__(self, device: torch.device, traffic: Traffic | None = None) -> None:
        """`traffic` is the main thread's."""
        self.device = device
        self._traffic = traffic or Traffic()
        if device.type != "cpu":
            self._traffic.before_device_collective = self.wait_until_idle
        self._stream = accelerator.side_stream(device)
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._wait_condition: Callable[[], bool] | None = (
            None  # says whether what this thread waits for is there; None: it works
        )
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    def report_wait(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds a wait of the main thread for this one, reported on the progress page."""
        return self._traffic.report_wait("lane")

    def __reduce__(self) -> str:
        raise TypeError(
            "a model on the sharded engine cannot be copied or pickled as a whole; take its state_dict() within "
            "full_parameters()"
        )

    def submit(self, task: Callable[[], None]) -> None:
        """Queue `task` after all earlier ones."""
        self.raise_error()
        with self._changed:
            assert not self._closed, "the communication thread is closed"
            self._tasks.append(task)
            self._changed.notify_all()
        if self._thread is None:  # on first use, since a process that forks must have one thread
            # Not waited for at exit: it may be held up by a peer that is gone.
            self._thread = threading.Thread(target=self._run, name="phalanx-lane", daemon=True)
            self._thread.start()

    def raise_error(self) -> None:
        """Raise the exception that ended the communication thread, if any."""
        if self.error is not None:
            raise self.error

    def wait_current_stream(self) -> None:
        """Later tasks run after what this thread has queued on the device."""
        if self._stream is not None:
            here = StreamEvent(self)
            here.record()
            self.submit(here.wait)

    def fail(self, error: BaseException) -> None:
        """End the communication thread after an error of the main thread; otherwise it would wait forever."""
        with self._changed:
            self.error = self.error or error
            self._tasks.clear()
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all queued tasks are done; later work of this thread runs after them."""
        if self._thread is not None:
            done = StreamEvent(self)
            self.submit(done.record)
            done.wait()
        self.raise_error()

    def wait_until_idle(self) -> None:
        """Wait until the communication thread has queued on the device all that it can before this thread reaches
        another mark.

        Where the communication thread and this thread both start collectives of the device, in separate groups, all
        ranks must start them in one order: a device with one queue for all streams would otherwise deadlock.
        """
        if self._thread is None or self._thread is threading.current_thread():
            return
        with self.report_wait(), self._changed:
            while not self._changed.wait_for(self._is_idle, POLL_S):
                pass
        self.raise_error()

    def _is_idle(self) -> bool:
        if self.error is not None or not (self._thread and self._thread.is_alive()):
            return True
        return self._wait_condition is not None and not self._wait_condition()

    @contextlib.contextmanager
    def declare_wait(self, is_ready: Callable[[], bool]) -> Iterator[None]:
        """Surrounds a wait of the communication thread for something; `is_ready` tells whether it is there."""
        if threading.current_thread() is not self._thread:
            yield
            return
        with self._changed:
            self._wait_condition = is_ready
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._wait_condition = None

    def close(self) -> None:
        """Let the thread end after its queued tasks; it accepts no more. Waits only briefly, since a peer may be
        gone."""
        self._traffic.before_device_collective = None
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(JOIN_TIMEOUT_S)
        if self._stream is not None and self.error is None and not self._thread.is_alive():
            # What this thread queues next may be in memory that the communication thread still uses.
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)

    def _run(self) -> None:
        try:
            with torch.no_grad(), self._stream if self._stream is not None else contextlib.nullcontext():
                while (task := self._next()) is not None:
                    task()
                    del task  # and what it holds, for the next may be long in coming
        except BaseException as error:
            with self._changed:
                self.error = self.error or error
                self._tasks.clear()
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._changed, self.declare_wait(lambda: bool(self._tasks) or self._closed):
            self._changed.wait_for(lambda: self._tasks or self._closed)
            return self._tasks.popleft() if self._tasks else None


class StreamEvent:
    """A point that one thread reaches and another waits for. Set again, it is where that thread is then."""

    def __init__(self, comm_thread: CommThread) -> None:
        self._comm_thread = comm_thread
        self._recorded = threading.Event()
        self._event: Any = None  # of the device's stream

    def record(self) -> None:
        """Reached, by all that this thread has queued so far."""
        if self._comm_thread.device.type != "cpu":
            # Reused, not created again: a waiter for an event that is set again must find a recorded one.
            self._event = self._event or torch.Event(self._comm_thread.device)
            self._event.record()
        self._recorded.set()

    @property
    def is_recorded(self) -> bool:
        return self._recorded.is_set()

    def wait(self, traffic: Traffic | None = None) -> None:
        """Block this thread until the event is set, and its later device work until the device has reached it.

        The host's time goes into `traffic`. Raises the exception that ended the communication thread.
        """
        if not self._recorded.is_set():
            start = time.perf_counter()
            with self._comm_thread.report_wait(), self._comm_thread.declare_wait(self._recorded.is_set):
                while not self._recorded.wait(POLL_S):
                    self._comm_thread.raise_error()
            if traffic is not None:
                traffic.add_wait(time.perf_counter() - start)
        self._comm_thread.raise_error()
        if self._event is not None:
            torch.accelerator.current_stream(self._comm_thread.device).wait_event(self._event)
