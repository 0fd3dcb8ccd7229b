"""Being asked by a signal to finish the step, save and leave."""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # of a rank that an agent starts, until it can heed them


@dataclass
class StopRequest:
    """Set by a signal handler; read once a step."""

    signal: str | None = None


@contextlib.contextmanager
def handle_stop_signals() -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGUSR1 and a lost terminal into a request to finish the step, save and leave."""
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number).name

    heeded = list(STOP_SIGNALS)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it, and so do we then
        heeded.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in heeded}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # one that has come already is heeded now
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
