"""Requests to stop before the last step, by a signal or by the recipe, and to save a checkpoint, by a file in the run
folder.

To stop, the run finishes its step, saves and exits with code 10.
"""

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from phalanx.core.durations import parse_duration
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import RunPaths

if TYPE_CHECKING:
    from phalanx.config.schema import TrainSection

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # blocked in a rank that an agent starts, until it handles them


@dataclass
class StopRequest:
    """Set by a signal handler; read once a step."""

    signal: str | None = None


@contextlib.contextmanager
def handle_stop_signals() -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGUSR1 and a lost terminal into a request to finish the step, save and exit."""
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number).name

    heeded = list(STOP_SIGNALS)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it, and this process must too
        heeded.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in heeded}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a pending signal is handled now
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SaveRequestFile:
    """A request to save a checkpoint now: a file in the run folder, which rank 0 checks once a second."""

    LOOK_S = 1.0

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._due = path, 0.0 if rank == 0 else math.inf

    def take(self) -> bool:
        """Whether a checkpoint was requested since the last call; on rank 0 only."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self.LOOK_S
        try:
            self._path.unlink()
        except OSError:  # usually there is none
            return False
        return True


@dataclass(frozen=True)
class StartLimit:
    """`train.stop_after` and `train.stop_every`. `end`: the time limit in seconds since 1970; on rank 0 only,
    whose clock counts."""

    train: "TrainSection"
    end: float | None = None

    def find_reason(self, step: int) -> str | None:
        """The reason to end after `step`; None to continue. After the last step the run finishes as usual."""
        if step >= self.train.steps:
            return None
        if self.train.stop_every and step % self.train.stop_every == 0:
            return f"train.stop_every {self.train.stop_every}"
        if self.end is not None and time.time() >= self.end:
            return f"train.stop_after {self.train.stop_after}"
        return None


def make_start_limit(train: "TrainSection", paths: RunPaths, rank: int) -> StartLimit:
    """The limit of the current start, which begins with the event `run_started`: restarts within it do not count."""
    if train.stop_after is None or rank:
        return StartLimit(train)
    began = time.time()
    for event in read_events(paths.events):
        when = event.get("time")
        if event.get("kind") == EventKind.RUN_STARTED and not event.get("again") and isinstance(when, float):
            began = when
    return StartLimit(train, began + parse_duration(train.stop_after, "train.stop_after"))
