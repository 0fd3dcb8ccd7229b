"""The update of the sharded engine, on its communication thread: agreement of the ranks, then unit by unit.

An update waits until all ranks have finished the previous step and agreed on the global gradient norm. With two slots
of the state a unit may be updated before that, with the divisor that is expected (optimistic update).
"""

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from phalanx.comm import collectives
from phalanx.comm.collectives import PendingCollective, Traffic
from phalanx.comm.comm_thread import CommThread, StreamEvent
from phalanx.comm.mesh import Mesh
from phalanx.engine.bucket import BucketGradient, RankBucket, iterate_gradients
from phalanx.engine.fp8_gather import Fp8Bucket, agree_on_scales
from phalanx.engine.schedule import CollectiveQueue, TransferSchedule, Unit
from phalanx.engine.state_slots import GlobalNorm, StateSlots
from phalanx.engine.timing import PassTimer
from phalanx.layout.mesh_axes import EXPERT_COPIES
from phalanx.optim import gradients
from phalanx.optim.update import StepUpdate

NEAR_CLIPPING = 0.8  # of the limit: after a norm below this the next step is expected not to be clipped

# ------------------------------------------------------------------------------------------------------ step consensus
# What all ranks agree on once a step's gradients are reduced: their norm, which exist, and link rates.


class StepConsensus:
    """An asynchronous all-reduce of a step's norm, link rates and present gradients. Collective."""

    def __init__(
        self, squares: float, rates: Sequence[float], names: Sequence[str], local_names: Set[str],
        group: dist.ProcessGroup, traffic: Traffic,
    ) -> None:  # fmt: skip
        """`squares`: sum of squares of this rank's gradients; `rates`: of `TransferSchedule.local_rates`;
        `local_names`: the parameters among `names` that have a gradient here."""
        self._names, self._rates = names, len(rates)
        told = [squares, *rates, *(float(name in local_names) for name in names)]
        self._table = torch.tensor(told, dtype=torch.float64)
        self._pending = collectives.all_reduce(self._table, group, traffic)

    def finish(self) -> tuple[torch.Tensor, list[float], set[str]]:
        """Wait; returns (sum of squares, rates of all ranks, names of parameters that have a gradient on any rank)."""
        self._pending.wait()
        rates, counts = self._table[1:].split([self._rates, len(self._names)])
        used = {name for name, count in zip(self._names, counts.tolist(), strict=True) if count}
        return self._table[0], rates.tolist(), used


# --------------------------------------------------------------------------------------------------- grad accumulation
# Gradients of several micro-batches whose passes mix, as in a pipeline: kept until a unit's last backward pass.


class GradAccumulation:
    """Gradient accumulation over interleaved passes, as a pipeline runs them within `micro_batch`."""

    def __init__(self, trained: Sequence[RankBucket], pass_timer: PassTimer) -> None:
        self._trained, self._pass_timer = list(trained), pass_timer

    def expect_last_backward(self, units: Collection[str]) -> None:
        """Announce the last backward pass of these units: each gradient is reduced once it is complete."""
        self._pass_timer.start()
        for held in self._trained:
            if held.bucket.unit in units:
                held.expect_last_backward()

    def gradient_sum(self, name: str) -> torch.Tensor:
        """The locally accumulated gradient of a parameter, flat, before its reduction; may be added to in place."""
        held = next(held for held in self._trained if name in held.names)
        return held.gradient_sum(held.names.index(name))


# ----------------------------------------------------------------------------------------------------- state of a step


@dataclass
class StepState:
    """The state of the step that the communication thread works on."""

    number: int
    lr: float
    clip: float | None
    weight: gradients.TotalWeight
    agreed: StreamEvent
    agreement: StepConsensus | None = None  # while it is in progress
    optimistic: bool = False  # units are updated as soon as they are reduced, with the expected divisor
    names_with_grad: list[set[str]] = field(default_factory=list)  # parameters that have a gradient on this rank
    change: StepUpdate | None = None  # the inputs of the update
    updated: set[int] = field(default_factory=set)  # units
    gathered: set[int] = field(default_factory=set)  # units, wholly or in part
    again: set[int] = field(default_factory=set)  # units that were gathered completely a second time
    pending_gathered: list[StreamEvent] = field(default_factory=list)  # to be set when the ranks have agreed
    norm: float = 0.0
    skipped: float = 0.0
    loss_scale: float | None = None  # of its losses
    needs_schedule: bool = False  # the link rate differs from that of the schedule


class ShardedStepOutcome:
    """The outcome of a step, known once the communication thread has it."""

    def __init__(self, step: StepState, traffic: Traffic) -> None:
        self._step, self._traffic = step, traffic
        self.weight = step.weight.get()
        self.loss_scale: float | None = None

    def get(self) -> tuple[float, float]:
        self._step.agreed.wait(self._traffic)
        self.loss_scale = self._step.loss_scale
        return self._step.norm, self._step.skipped


# ---------------------------------------------------------------------------------------------------------- the update


class StepBarrier:
    """A barrier: no update begins before all ranks of the whole model have finished and committed the previous step."""

    def __init__(self, mesh: Mesh, traffic: Traffic, wait_for_commit: Callable[[], None]) -> None:
        self._group, self._traffic = mesh.all_ranks or mesh.agreement, traffic
        self._wait_for_commit = wait_for_commit
        self._unconfirmed = False  # this rank has not yet confirmed its step
        self._pending: PendingCollective | None = None

    def end_step(self) -> None:
        """Mark this rank's step as finished."""
        self._unconfirmed = True

    def confirm(self) -> None:
        """Start the confirmation to all ranks, unless it was started."""
        if self._unconfirmed:
            self._wait_for_commit()
            self._pending = collectives.all_reduce(torch.ones((), dtype=torch.int32), self._group, self._traffic)
            self._unconfirmed = False

    def wait_for_ranks(self) -> None:
        """Wait until all ranks have confirmed."""
        self.confirm()
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


class ShardedUpdate:
    """The update of the sharded engine; all but `may_update_early` and `finish_step` run on the communication
    thread."""

    def __init__(
        self, trained: Sequence[RankBucket], state: StateSlots, norm: GlobalNorm, queue: CollectiveQueue,
        schedule: TransferSchedule, mesh: Mesh, traffic: Traffic, comm_thread: CommThread, names: Sequence[str],
    ) -> None:  # fmt: skip
        """`traffic` counts the communication thread's transfers; `names` are those of the trained parameters, the same
        on all ranks."""
        self.trained, self.state, self.queue, self.schedule = list(trained), state, queue, schedule
        self.barrier = StepBarrier(mesh, traffic, state.wait_for_commit)
        self._norm, self._mesh, self._traffic, self._comm_thread = norm, mesh, traffic, comm_thread
        self._last_norm: float | None = None  # of a step that was not skipped
        self._names, self._names_with_grad = list(names), set(names)  # all; by the last step, on any rank
        self._previous_agreed: StreamEvent | None = None  # of the agreement on the previous step

    def close(self) -> None:
        """Drop references to process groups: they end with the last reference, and none may outlive the interpreter."""
        for name in ("queue", "schedule", "barrier"):
            self.__dict__.pop(name, None)

    def may_update_early(self, clip: float | None) -> bool:
        """Whether units are updated as soon as they are reduced; the same on all ranks, as the previous norm is."""
        if self.state.count == 1:
            return False
        if self._previous_agreed is not None:
            # The communication thread writes the norm; nothing is computed before that anyway.
            self._previous_agreed.wait(self._mesh.traffic)
        return clip is None or (self._last_norm is not None and self._last_norm < NEAR_CLIPPING * clip)

    def finish_step(self, now: StepState) -> ShardedStepOutcome:
        """Finish a step: the main thread has submitted all of it."""
        self._previous_agreed = now.agreed
        return ShardedStepOutcome(now, self._mesh.traffic)

    def reduce(
        self, now: StepState, unit: Unit, held: RankBucket, gradient: BucketGradient, part: int, last: bool
    ) -> None:
        """Reduce-scatter part `part` of a bucket's gradient."""

        def then() -> None:
            if last and now.optimistic and part == unit.parts - 1 and held is unit.trained_buckets[-1]:
                self._optimistic_update(now)
                self.update_unit(now, unit)

        self.queue.reduce(held, gradient, part, then)

    def _optimistic_update(self, now: StepState) -> None:
        """Continue with the agreement that is expected unless this step is clipped or skipped."""
        if now.change is None:
            self.barrier.wait_for_ranks()
            divisor = self._norm.likely_divisor(now.weight.get())
            now.change = self._make_update(now, divisor, torch.zeros_like(divisor).float())

    def _make_update(self, now: StepState, divisor: torch.Tensor, skip: torch.Tensor) -> StepUpdate:
        return StepUpdate(now.number, now.lr, self.state.shards.no_decay, divisor, skip)

    def start_agreement(self, now: StepState) -> None:
        """Start the agreement on the global gradient norm and on which parameters have a gradient."""
        self.queue.flush_reduce()
        self.barrier.wait_for_ranks()
        squares = self._norm.local_squares(iterate_gradients(self.trained, self._norm.replica_counts))
        mine, rates = squares.item() / self._norm.copies, self.schedule.local_rates()
        here = set().union(*now.names_with_grad)
        now.agreement = StepConsensus(mine, rates, self._names, here, self._mesh.agreement, self._traffic)

    def finish_agreement(self, now: StepState) -> bool:
        """Finish the agreement of the ranks; returns whether the optimistic update stands."""
        assert now.agreement is not None
        squares, rates, used = now.agreement.finish()
        now.needs_schedule = self.schedule.observe_rates(rates)
        scale = self._norm.loss_scale
        now.loss_scale = scale.factor.item() if scale is not None else None
        # Other stages may still wait for sends of the main thread.
        with self._comm_thread.declare_wait(lambda: False):
            squares = gradients.sum_over_model(squares, self._mesh.model, self._traffic)
        norm, divisor, skip = self._norm.divisor(squares, now.weight.get(), now.clip)
        # Only the communication thread waits for the device here.
        now.norm, now.skipped = norm.item(), skip.item()
        likely = now.change is None or (
            not now.skipped and torch.equal(divisor, now.change.divisor) and used == self._names_with_grad
        )
        now.change = self._make_update(now, divisor, skip)
        self._names_with_grad, self._last_norm = used, None if now.skipped else now.norm
        return likely

    def update_unit(self, now: StepState, unit: Unit, stages: bool = True) -> None:
        """Update this rank's shards of a unit; `stages`: and copy the masters to the input of the next all-gather."""
        assert now.change is not None
        begun = self.schedule.record_time()
        self.state.begin_write()
        source, target = self.state.source, self.state.target
        for held in unit.trained_buckets:
            keys = [fragment.key for fragment in held.fragments]
            grads = {f.key: held.gradient_of(f) for f in held.fragments if f.parameter.name in self._names_with_grad}
            self.state.note_updates(keys, grads, now.change)
            if now.optimistic:  # an undone update needs them again
                grads = {key: grad.clone() for key, grad in grads.items()}
            sources, targets = ({key: slot[key] for key in keys} for slot in (source, target))
            self.state.shards.rule.apply(sources, targets, grads, now.change)
            if stages:
                held.stage_masters(target)
        now.updated.add(unit.number)
        self.schedule.record_update(unit.number, begun)

    def end_step(self, now: StepState) -> None:
        """End a step: all units are updated."""
        self.queue.flush()
        self.state.advance(now.number, ShardedStepOutcome(now, self._traffic))
        self.barrier.end_step()
        if not self.state.commits_async:  # else the next update waits for it
            self.barrier.confirm()
        if now.needs_schedule:
            self.schedule.make_orders(now.number + 2)

    def stage_masters(self, unit: Unit) -> None:
        """Copy this rank's masters of a unit to the input of its all-gather."""
        for held in unit.trained_buckets:
            held.stage_masters(self.state.source)

    def agree_on_scales(self, buckets: Sequence[Fp8Bucket]) -> None:
        """Agree on the scales of weights that are gathered in FP8. Collective."""
        groups = {"data": self._mesh.agreement}
        if (copies := self._mesh.extra.axes.get(EXPERT_COPIES)) is not None:
            self.queue.flush()  # shards travel in the same group
            groups[EXPERT_COPIES] = copies.group
        agree_on_scales(buckets, self.state.source, groups, self._traffic)

    def run_for_units(self, units: Sequence[Unit], work: Callable[[Unit], None]) -> None:
        """Run `work` for each unit on the communication thread, after this thread's queued device work, and finish
        transfers."""
        self._comm_thread.wait_current_stream()
        for unit in units:
            self._comm_thread.submit(partial(work, unit))
        self._comm_thread.submit(self.queue.flush)
