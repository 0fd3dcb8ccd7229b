"""The pulse of a rank: where it is in its work, in a few words of shared memory that its agent reads without asking.

The rank writes them by plain stores whenever it begins something else, which costs about a microsecond; nothing waits
for anybody. Who reads them may see words of two moments: they are good enough to judge by what stays as it is. No torch
here.
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

# What a rank does in a step, in this order for each micro-batch; and what it does beside steps.
STEP_PHASES = ("data", "forward", "backward", "exchange", "update")
PHASES = ("starting", "restore", *STEP_PHASES, "evaluate", "checkpoint", "callback", "profile", "ending")
# What its main thread waits for: collectives, the thread that moves data, the device. The first means nothing.
WAITS = ("", "reduce", "gather", "message", "lane", "device")

MAGIC = 0x5048_4C58_0001
SIZE_BYTES = 4096
REMEMBERED_STEPS = 16  # steps, the longest of which counts
_MAGIC, _ATTEMPT, _STEP, _PHASE, _MICRO_BATCH, _CHANGED_NS, _WAITS, _STEPS, _LONGEST_NS, _LARGEST, _DONE = range(11)
_DEVICE_STEP, _DEVICE_PHASE, _DEVICE_MICRO_BATCH, _DEVICE_NS = range(11, 15)
_LAST = _DEVICE_NS


class ProgressPage:
    """A rank's own words. Without `memory` nobody else sees them."""

    def __init__(self, memory: mmap.mmap | None = None, attempt: int = 1) -> None:
        self._words = memoryview(memory if memory is not None else bytearray(SIZE_BYTES)).cast("q")
        self._thread = threading.get_ident()
        self._durations: deque[int] = deque(maxlen=REMEMBERED_STEPS)
        self._step_start_ns: int | None = None  # when the step under way was begun
        self._words[_MAGIC] = 0  # what a rank of an older attempt left means nothing while it is replaced
        for index in range(_ATTEMPT, _LAST + 1):
            self._words[index] = 0
        self._words[_ATTEMPT], self._words[_CHANGED_NS] = attempt, time.monotonic_ns()
        self._words[_MAGIC] = MAGIC

    def enter_phase(self, phase: str, step: int | None = None, micro_batch: int = 0) -> None:
        """This rank begins `phase`, one of PHASES; without a `step`, that of before."""
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
        """Its micro-batches have so many sequences at most from now on; 0: it runs none."""
        self._words[_LARGEST] = largest

    def finish(self) -> None:
        """The run is done, and its last step saved: whatever becomes of this rank or others from now on."""
        self._words[_DONE] = 1

    def touch(self) -> None:
        """It gets on with what it does."""
        self._words[_CHANGED_NS] = time.monotonic_ns()

    def idle_s(self) -> float:
        """For how long it has told of no change."""
        return (time.monotonic_ns() - self._words[_CHANGED_NS]) / 1e9

    def enter_device_phase(self, phase: str, step: int, micro_batch: int) -> None:
        """Its device is there, maybe behind the main thread. It counts until that one begins something else."""
        words = self._words
        words[_DEVICE_STEP], words[_DEVICE_PHASE] = step, PHASES.index(phase)
        words[_DEVICE_MICRO_BATCH], words[_DEVICE_NS] = micro_batch, time.monotonic_ns()

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """While it lasts, this rank waits for `what`, one of WAITS; other threads than the main one may wait unseen."""
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
    """What a rank's pulse said: where it is, what it waits for, for how long nothing has changed, how many steps it has
    done in this attempt, and the longest of the last ones; sequences of the largest micro-batch that it runs;
    whether the run is done."""

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
    device_behind: tuple[int, str, int] | None = (
        None  # (step, phase, micro-batch): where its device is, if not there yet
    )

    @property
    def is_waiting(self) -> bool:
        """Whether it waits, for others or for its own device, which may wait for others."""
        return bool(self.waits_for) or self.device_behind is not None


def progress_page_path(folder: str | Path, rank: int) -> Path:
    """Where a rank's pulse is in the folder in shared memory that its node keeps."""
    return Path(folder) / f"pulse-{rank:05d}"


def open_progress_page(folder: str | None, rank: int, attempt: int) -> ProgressPage:
    """A rank's pulse, where its agent finds it; with no folder, one that nobody sees. Raises RunError where there is no
    room for it."""
    if folder is None:
        return ProgressPage(None, attempt)
    path = progress_page_path(folder, rank)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE_BYTES)  # a page without memory behind it would be a SIGBUS
            return ProgressPage(mmap.mmap(descriptor, SIZE_BYTES), attempt)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RunError(
            f"{path} cannot be made in shared memory ({error.strerror}), by which an agent sees that a rank hangs; "
            "give the machine or container a larger /dev/shm"
        ) from None


def read_progress(content: bytes, rank: int, attempt: int, now_ns: int) -> RankProgress | None:
    """What a pulse says, from the file's first bytes; None where it is not of this attempt, or makes no sense."""
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
