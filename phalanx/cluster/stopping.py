"""Being asked to stop while there is no rank yet that could finish a step: what was begun is cleared away first."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from phalanx.cluster.fork import heeded


class StopAsked(BaseException):
    """A stop signal came; its text is the signal's name. No error, so nothing that handles errors may catch it."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise StopAsked at a stop signal, once: more of them do not disturb the clearing away.

    Must be entered in the main thread; signal handlers are as before afterwards.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise StopAsked(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in heeded()}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
