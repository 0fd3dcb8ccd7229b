"""Progress page of a rank: where it is in its work, in a few words of shared memory that its agent polls.

The rank updates them by plain stores whenever a phase begins, which costs about a microsecond; no process waits for
another. A reader may see words of two moments, which is sufficient, since hang detection relies on values that stay the
same. No torch here.
"""

import contextlib
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import RunError

# Phases of a step, in this order for each micro-batch; then the phases outside of steps.
STEP_PHASES = ("data", "forward", "backward", "exchange", "update")
PHASES = ("starting", "restore", *STEP_PHASES, "evaluate", "checkpoint", "callback", "profile", "ending")
# What the main thread may wait for: collectives, the thread that moves data, the device. The first means none.
WAITS = ("", "reduce", "gather", "message", "lane", "device")

MAGIC = 0x5048_4C58_0001
SIZE_BYTES = 4096
REMEMBERED_STEPS = 16  # steps, of which the longest is reported
_MAGIC, _ATTEMPT, _STEP, _PHASE, _MICRO_BATCH, _CHANGED_NS, _WAITS, _STEPS, _LONGEST_NS, _LARGEST, _DONE = range(11)
_DEVICE_STEP, _DEVICE_PHASE, _DEVICE_MICRO_BATCH, _DEVICE_NS = range(11, 15)
_LAST = _DEVICE_NS


class ProgressPage:
    """Writer of a rank's progress page. Without `memory` no other process sees it."""

    def __init__(self, memory: mmap.mmap | None = None, attempt: int = 1) -> None:
        self._words = memoryview(memory if memory is not None else bytearray(SIZE_BYTES)).cast("q")
        self._thread = threading.get_ident()
        self._durations: deque[int] = deque(maxlen=REMEMBERED_STEPS)
        self._step_start_ns: int | None = None  # start of the current step
        self._words[_MAGIC] = 0  # invalidate an older attempt's page while it is overwritten
        for index in range(_ATTEMPT, _LAST + 1):
            self._words[index] = 0
        self._words[_ATTEMPT], self._words[_CHANGED_NS] = attempt, time.monotonic_ns()
        self._words[_MAGIC] = MAGIC

    def enter_phase(self, phase: str, step: int | None = None, micro_batch: int = 0) -> None:
        """Begin `phase`, one of PHASES; without a `step`, in the current step."""
        now = time.monotonic_ns()
        if phase == "data" or phase not in STEP_PHASES:
            self._end_step(now)
        if phase == "data":
            self._step_start_ns = now
        words = self._words
        if step is not None:
            words[_STEP] = step
        words[_PHASE], words[_MICRO_BATCH], words[_WAITS] = PHASES.index(phase), micro_batch, 0
        words[_CHANGED_NS] = now

    def set_largest_micro_batch(self, largest: int) -> None:
        """Set the sequences of the largest micro-batch from now on; 0: none is run."""
        self._words[_LARGEST] = largest

    def finish(self) -> None:
        """Mark the run as finished, with its last step saved: later failures of ranks do not matter."""
        self._words[_DONE] = 1

    def touch(self) -> None:
        """Report progress within a phase."""
        self._words[_CHANGED_NS] = time.monotonic_ns()

    def idle_s(self) -> float:
        """Seconds since the last change."""
        return (time.monotonic_ns() - self._words[_CHANGED_NS]) / 1e9

    def enter_device_phase(self, phase: str, step: int, micro_batch: int) -> None:
        """Record the phase of the device, which may be behind the main thread. It counts until the main thread begins
        another phase."""
        words = self._words
        words[_DEVICE_STEP], words[_DEVICE_PHASE] = step, PHASES.index(phase)
        words[_DEVICE_MICRO_BATCH], words[_DEVICE_NS] = micro_batch, time.monotonic_ns()

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """While the context is open, this rank waits for `what`, one of WAITS. Waits of other threads are not
        recorded."""
        if threading.get_ident() != self._thread:
            yield
            return
        before, self._words[_WAITS] = self._words[_WAITS], WAITS.index(what)
        try:
            yield
        finally:
            self._words[_WAITS] = before

    def _end_step(self, now: int) -> None:
        if self._step_start_ns is not None:
            self._durations.append(now - self._step_start_ns)
            self._words[_LONGEST_NS] = max(self._durations)
            self._words[_STEPS] += 1
            self._step_start_ns = None


@dataclass(frozen=True)
class RankProgress:
    """Progress of a rank as read from its page: phase, wait, time since the last change, completed steps of this
    attempt, and the longest of the last ones; sequences of its largest micro-batch; whether the run is finished."""

    rank: int
    step: int
    phase: str
    micro_batch: int
    waits_for: str
    idle_s: float
    steps: int
    longest_s: float
    largest: int = 0
    done: bool = False
    device_behind: tuple[int, str, int] | None = None  # (step, phase, micro-batch) of the device, if it is behind

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks, or for its device, which may wait for other ranks."""
        return bool(self.waits_for) or self.device_behind is not None


def progress_page_path(folder: str | Path, rank: int) -> Path:
    """Path of a rank's progress page in its node's folder in shared memory."""
    return Path(folder) / f"pulse-{rank:05d}"


def open_progress_page(folder: str | None, rank: int, attempt: int) -> ProgressPage:
    """Open a rank's progress page for writing; without a folder, a private one. Raises RunError if there is no room for
    it."""
    if folder is None:
        return ProgressPage(None, attempt)
    path = progress_page_path(folder, rank)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE_BYTES)  # access to a page without memory would raise SIGBUS
            return ProgressPage(mmap.mmap(descriptor, SIZE_BYTES), attempt)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RunError(
            f"{path} cannot be made in shared memory ({error.strerror}), by which an agent sees that a rank hangs; "
            "give the machine or container a larger /dev/shm"
        ) from None


def read_progress(content: bytes, rank: int, attempt: int, now_ns: int) -> RankProgress | None:
    """Parse a progress page from the file's first bytes; None if it is of another attempt, or invalid."""
    if len(content) < 8 * (_LAST + 1):
        return None
    words = memoryview(content[: 8 * (_LAST + 1)]).cast("q")
    known = words[_PHASE] in range(len(PHASES)) and words[_WAITS] in range(len(WAITS))
    if words[_MAGIC] != MAGIC or words[_ATTEMPT] != attempt or not known:
        return None
    behind = None
    if words[_DEVICE_NS] > words[_CHANGED_NS] and words[_DEVICE_PHASE] in range(len(PHASES)):
        behind = words[_DEVICE_STEP], PHASES[words[_DEVICE_PHASE]], words[_DEVICE_MICRO_BATCH]
    here = words[_STEP], PHASES[words[_PHASE]], words[_MICRO_BATCH]
    return RankProgress(
        rank=rank,
        step=words[_STEP],
        phase=PHASES[words[_PHASE]],
        micro_batch=words[_MICRO_BATCH],
        waits_for=WAITS[words[_WAITS]],
        idle_s=max(0.0, (now_ns - words[_CHANGED_NS]) / 1e9),
        steps=words[_STEPS],
        longest_s=words[_LONGEST_NS] / 1e9,
        largest=words[_LARGEST],
        done=words[_DONE] == 1,
        device_behind=None if behind == here else behind,
    )
