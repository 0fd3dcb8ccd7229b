"""Being asked to stop: as an exception while there is no rank yet, as something to look at while ranks run."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType, TracebackType

from phalanx.system.fork import STOP_SIGNALS, active_stop_signals


class StopRequested(BaseException):
    """A stop signal came; its text is the signal's name. No error, so nothing that handles errors may catch it."""


@contextlib.contextmanager
def raise_on_stop_signal() -> Iterator[None]:
    """Raise StopAsked at a stop signal, once: more of them do not disturb the clearing away.

    Must be entered in the main thread; signal handlers are as before afterwards.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise StopRequested(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in active_stop_signals()}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """Stop signals as bytes on a socket that poll() sees, instead of interruptions at any line."""

    def __init__(self) -> None:
        self.all_signals: list[signal.Signals] = []  # stop signals so far, over all attempts
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> "StopSignals":
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _noted) for number in active_stop_signals()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """Stop signals since the last call."""
        try:
            received = self._reader.recv(4096)
        except BlockingIOError:
            return []
        new = [signal.Signals(number) for number in received if number in STOP_SIGNALS]
        self.all_signals += new
        return new


def _noted(number: int, frame: FrameType | None) -> None:
    """The byte on the wake-up descriptor is all that is needed."""
