"""ZeRO 1 and 2: whole parameters stay on every rank, and the forward pass waits for their all-gather.

Once a unit's gradient is reduced, its shards are updated, and gathered during the next forward pass. With 1 whole
gradients stay; with 2 their buffers are freed as soon as they are reduced.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from phalanx.comm.comm_thread import StreamEvent
from phalanx.engine.bucket import GradientBufferPool
from phalanx.engine.hooks import ParameterResidency
from phalanx.engine.schedule import Unit
from phalanx.engine.sharded_update import StepState
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.layout.comm_simulation import TransferOp


class KeptParameters(ParameterResidency):
    """Residency of parameters that stay whole on every rank (ZeRO 1 and 2)."""

    @staticmethod
    def make_pool(sharding: ShardingSpec) -> GradientBufferPool | None:
        return None if sharding.zero == 1 and sharding.reduce == "per_step" else GradientBufferPool()

    def __init__(self, model: nn.Module, units: Sequence[Unit], *shared: Any) -> None:
        super().__init__(model, units, *shared)
        self.gathered = [StreamEvent(self._comm_thread) for _ in units]  # of the step before
        self.next_gathered = self.gathered

    # ------------------------------------------------------------------------------------------- the main thread: waits

    def begin_micro_batch(self, last: bool) -> None:
        if last:
            self.next_gathered = [StreamEvent(self._comm_thread) for _ in self._units]

    def end_micro_batch(self, last: bool) -> None:
        if last:
            self.gathered = self.next_gathered

    def pre_forward(self, unit: Unit) -> None:
        self.gathered[unit.number].wait(self._traffic)
        self._pass_timer.exclude_wait()

    def wait_for_gathers(self) -> None:
        for mark in self.gathered:
            mark.wait(self._traffic)

    def check_state_dict(self, in_micro_batch: bool) -> None:
        if in_micro_batch:
            raise RuntimeError(
                "a state_dict was asked for within a step, whose end it would have to wait for; ask between steps"
            )
        if not self._comm_thread.closed:
            self._comm_thread.drain()  # some may still be in flight

    # ------------------------------------------------------------------------------------- the main thread: submissions

    def submit_gather(self, now: StepState, unit: Unit, op: TransferOp) -> None:
        fresh = self.next_gathered[unit.number]
        self._comm_thread.submit(partial(self._gather_updated, now, unit, op.part, fresh))

    def publish_masters(self, wait: bool = True) -> None:
        self._update.run_for_units(self._units, self._gather_masters)
        if wait:
            self._comm_thread.drain()

    # ------------------------------------------------------------------------------------------ communication thread

    def _gather_masters(self, unit: Unit) -> None:
        self._update.stage_masters(unit)
        for part in range(unit.parts):
            then = self.gathered[unit.number].record if part == unit.parts - 1 else _nothing
            self._update.queue.gather(unit.trained_buckets, part, then)

    def _gather_updated(self, now: StepState, unit: Unit, part: int, fresh: StreamEvent | None) -> None:
        """Gather the updated parameters; `fresh` is set when the last part has arrived and the ranks have agreed."""
        if unit.trained_buckets and unit.number not in now.updated:
            self._update.queue.flush()  # which may update it
            if unit.number not in now.updated:
                self._update.update_unit(now, unit)
        now.gathered.add(unit.number)

        def then() -> None:
            if fresh is not None and part == unit.parts - 1:
                if now.agreed.is_recorded:
                    fresh.record()
                else:
                    now.pending_gathered.append(fresh)

        self._update.queue.gather([] if unit.number in now.again else unit.trained_buckets, part, then)

    def redo(self, now: StepState) -> None:
        """Redo wrong early updates from the previous state."""
        now.updated = set()
        for number in sorted(now.gathered):
            unit = self._units[number]
            for part in range(unit.parts):
                self._gather_updated(now, unit, part, None)
        self._update.queue.flush()
        now.again = now.gathered.copy()


def _nothing() -> None: ...
