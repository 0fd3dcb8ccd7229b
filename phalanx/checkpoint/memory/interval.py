"""How often an accelerator's state is copied to the host: each step, or every Nth where each would cost too much.

What it costs is measured in the first steps of an attempt, which are all kept: for how long the device itself could not
update, as the step before was still being copied. What is hidden behind the next step's passes costs nothing.
"""

import itertools
import math
import statistics
import time
from typing import Any

import torch

from phalanx.comm.mesh import Mesh
from phalanx.system.event_times import record_time, seconds_between

MAX_OVERHEAD = 0.005  # of a step, that keeping it may take by what is measured here: memory and link are shared besides
UNMEASURED, MEASURED = 2, 6  # first steps of an attempt, in which much is made once; and those that are looked at then


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
            f"the copy of the state lengthens a step by {share:.0%} here, so that every {self.every} steps are kept in "
            f"memory, and a failure costs {self.every - 1} committed steps at most; "
            "resilience.in_memory_checkpoints=true keeps each"
        )


def choose_interval(share: float, unit: int = 1) -> int:
    """Which steps are kept where one that is takes so much longer, as a share of one that is not."""
    every = math.ceil(share / MAX_OVERHEAD)
    return 1 if every <= 1 else -(-every // unit) * unit
