"""What a benchmark makes of the system (namespaces, control groups) goes with it, also when it is told to end."""

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from phalanx.system.fork import active_stop_signals


@contextlib.contextmanager
def heeding_signals() -> Iterator[None]:
    """A signal to end raises SystemExit within, so that what was made is removed; a second one changes nothing."""

    def leave(number: int, _: object) -> None:
        for each in active_stop_signals():
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in active_stop_signals()}
    try:
        for number in before:
            signal.signal(number, leave)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals to end wait until this is over."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, active_stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def is_stale(name: str, pattern: str) -> bool:
    """Whether a name, which matches `pattern` with the number of its owner's process first, is of one that is dead."""
    owner = re.fullmatch(pattern, name)
    return owner is not None and not Path("/proc", owner[1]).exists()
