"""The interval of in-memory checkpoints: how often an accelerator's state is copied to the host, and which slot holds
which step.

Each step is copied, or every Nth where each would cost too much. The cost is measured in the first steps of an attempt,
which are all kept: the time that the device's update waits for the copy of the previous step. Copies hidden behind the
next step's passes cost nothing.
"""

import itertools
import math
import statistics
import time
from collections.abc import Collection
from typing import Any

import torch

from phalanx.comm.mesh import Mesh
from phalanx.recovery.state_file import StateFile
from phalanx.system.event_times import record_time, seconds_between

MAX_OVERHEAD = 0.005  # of a step: the largest measured cost of keeping it
UNMEASURED, MEASURED = 2, 6  # first steps of an attempt, which are not representative; and the measured ones after them


class SnapshotInterval:
    """`unit`: every how many steps one is replicated to other nodes; the interval kept is a multiple of it."""

    def __init__(self, device: torch.device, wanted: bool, unit: int | None) -> None:
        """Without being `wanted` every step is kept."""
        self._device, self._unit = device, unit or 1
        self._measures = wanted
        self.every, self._from = 1, 0
        self._calls: list[float] = []  # when steps ended
        self._waits: list[tuple[Any, Any]] = []

    def is_due(self, step: int) -> bool:
        """Whether a step is kept."""
        return step < self._from or step % self.every == 0

    def take_stamp(self) -> Any:
        """Where this thread's stream is now, while it is measured."""
        return record_time(self._device) if self._measures else None

    def add_wait(self, since: Any) -> None:
        """The stream is free to write over the state again, which it has asked for at a stamp."""
        if since is not None and self._measures:
            self._waits.append((since, record_time(self._device)))

    def decide(self, step: int, mesh: Mesh) -> str | None:
        """A step has ended; when enough have, settle how often one is kept from the next but one on: then why, if that
        is not every one. Collective."""
        if not self._measures:
            return None
        self._calls.append(time.perf_counter())
        if len(self._calls) <= UNMEASURED + MEASURED:
            return None
        self._measures = False
        calls, waits = self._calls[UNMEASURED:], self._waits[UNMEASURED:]
        step_s = statistics.median(after - before for before, after in itertools.pairwise(calls))
        wait_s = statistics.median([seconds_between(*pair) for pair in waits] or [0.0])
        (share,) = mesh.max([wait_s / max(step_s - wait_s, 1e-9)])
        self._calls, self._waits = [], []
        self.every = choose_interval(share, self._unit)
        self._from = step + 2
        if self.every == 1:
            return None
        return (
            f"copying the state lengthens a step by {share:.0%} here, so the state is kept in memory every "
            f"{self.every} steps and a failure costs at most {self.every - 1} committed steps; "
            "resilience.in_memory_checkpoints=true keeps every step"
        )


def choose_interval(share: float, unit: int = 1) -> int:
    """Choose the interval from the relative cost of a step that is kept."""
    every = math.ceil(share / MAX_OVERHEAD)
    return 1 if every <= 1 else -(-every // unit) * unit


class SlotRotation:
    """Rotation of slots: which holds the newest step, which is written next, and which steps are replicated to other
    nodes: every one, or every Nth (`every`).

    In the latter case there is a third slot: in it the last step stays that all nodes have, which ranks that live go
    back to with those of a lost node. The next such step replaces it once no rank can have to return to it.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.current_index, self.current_step = 0, 0
        self._pinned: int | None = None  # the slot with a step that all nodes have
        # A step that other nodes get whatever its number is, as they lack what this attempt began with.
        self._base_step = 0

    @property
    def slot_count(self) -> int:
        return 2 if self.every is None else 3

    def next_index(self, file: StateFile) -> int:
        """The slot that the next step is written to, until that is committed: one that is not needed once all ranks
        have finished the step in the current slot, and its replicas are complete."""
        used = {self.current_index, self._pinned if not self._moves else None}
        return min((slot for slot in range(self.slot_count) if slot not in used), key=file.slot_step)

    @property
    def _moves(self) -> bool:
        """Whether the step that is gone back to with a lost node is the one in the current slot from here on."""
        return self.every is not None and self.current_step > 0 and self.is_due(self.current_step)

    def is_due(self, step: int) -> bool:
        """Whether other nodes get that step, or have had it."""
        base = self._base_step
        return self.every is None or step == base or (step % self.every == 0 and step != base - 1)

    def advance(self, step: int, file: StateFile) -> None:
        """The next slot holds `step`, and is the current one."""
        before, moves = self.current_index, self._moves
        self.current_index = self.next_index(file)
        self._pinned = before if moves else self._pinned
        self.current_step = step

    def adopt(self, step: int, file: StateFile, found: bool) -> None:
        """The current slot holds `step`, which was `found` in it or came from elsewhere; others but the pinned one are
        void."""
        self.current_step = step
        if not found:
            self._pinned, self._base_step = None, step + 1 if step else 0
        for slot in range(self.slot_count):
            if slot not in (self.current_index, self._pinned):
                file.invalidate(slot)

    def pin(self, file: StateFile, there: Collection[int] | None, mesh: Mesh) -> None:
        """Find, in files that were kept, the step that all nodes have besides the resumed one (`there`: those that the
        partner has; None: all); where there is none, or all should have this one, all get the next. Collective."""
        steps, current = file.metadata.steps, self.current_step
        shared = (each for each in steps if there is None or each in there)
        step = max((each for each in shared if each <= current and self.is_due(each)), default=-1)
        (least,), (most,) = mesh.min([float(step)]), mesh.max([float(step)])
        if least == most > 0 and step < current:
            self._pinned = steps[step]
        if least != most or (step != current and (self._pinned is None or self.is_due(current))):
            self._base_step = current + 1

    def unpin(self) -> None:
        """Void all kept steps."""
        self._pinned = None
