"""The update of the sharded engine, on its communication thread: what the ranks agree on, and units one by one.

Nothing is updated before all ranks have finished the step before, nor before they have agreed on the norm of the whole
gradient; but with two slots of the state a unit may be updated ahead of that, by a divisor that is likely.
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
from phalanx.engine.schedule import CollectiveQueue, TransferSchedule, Unit
from phalanx.engine.state_slots import GlobalNorm, StateSlots
from phalanx.engine.timing import PassTimer
from phalanx.optim import gradients
from phalanx.optim.update import StepUpdate

NEAR_CLIPPING = 0.8  # of the limit: a norm that was below is taken to stay below it in the next step

# ------------------------------------------------------------------------------------------------------ step consensus
# What all ranks agree on once a step's gradients are summed: their norm, who has one, and how fast the links were.


class StepConsensus:
    """A sum over the ranks that is under way. Collective."""

    def __init__(
        self, squares: float, rates: Sequence[float], names: Sequence[str], local_names: Set[str],
        group: dist.ProcessGroup, traffic: Traffic,
    ) -> None:  # fmt: skip
        """`squares` of what this rank owns of the gradients, `rates` as `TransferSchedule.local_rates` gives them, and
        which of the parameters of these `names` have a gradient here (`local_names`)."""
        self._names, self._rates = names, len(rates)
        told = [squares, *rates, *(float(name in local_names) for name in names)]
        self._table = torch.tensor(told, dtype=torch.float64)
        self._pending = collectives.all_reduce(self._table, group, traffic)

    def finish(self) -> tuple[torch.Tensor, list[float], set[str]]:
        """(the sum of squares, everyone's rates, names of parameters that have a gradient on any rank)."""
        self._pending.wait()
        rates, counts = self._table[1:].split([self._rates, len(self._names)])
        used = {name for name, count in zip(self._names, counts.tolist(), strict=True) if count}
        return self._table[0], rates.tolist(), used


# --------------------------------------------------------------------------------------------------- grad accumulation
# Gradients of several micro-batches whose passes mix, as in a pipeline: kept until a unit's last backward pass.


class GradAccumulation:
    """What one who runs such passes tells the engine within its `micro_batch`."""

    def __init__(self, trained: Sequence[RankBucket], pass_timer: PassTimer) -> None:
        self._trained, self._pass_timer = list(trained), pass_timer

    def expect_last_backward(self, units: Collection[str]) -> None:
        """The next backward pass is the last that gives these units gradients: each is sent when it is complete."""
        self._pass_timer.start()
        for held in self._trained:
            if held.bucket.unit in units:
                held.expect_last_backward()

    def gradient_sum(self, name: str) -> torch.Tensor:
        """What this rank has added up of a parameter's gradient, flat, before it is sent; may be added to."""
        held = next(held for held in self._trained if name in held.names)
        return held.gradient_sum(held.names.index(name))


# ----------------------------------------------------------------------------------------------------- state of a step


@dataclass
class StepState:
    """What is known of the step that the lane works on."""

    number: int
    lr: float
    clip: float | None
    weight: gradients.TotalWeight
    agreed: StreamEvent
    agreement: StepConsensus | None = None  # while it is under way
    optimistic: bool = False  # a unit is updated as soon as it is reduced, by a divisor that is likely
    names_with_grad: list[set[str]] = field(default_factory=list)  # parameters that have a gradient on this rank
    change: StepUpdate | None = None  # what updates go by
    updated: set[int] = field(default_factory=set)  # units
    gathered: set[int] = field(default_factory=set)  # units, wholly or in part
    again: set[int] = field(default_factory=set)  # units that were gathered a second time, and wholly
    pending_gathered: list[StreamEvent] = field(default_factory=list)  # to be set when the ranks have agreed
    norm: float = 0.0
    skipped: float = 0.0
    loss_scale: float | None = None  # of its losses
    needs_schedule: bool = False  # the link is another than the order was made for


class ShardedStepOutcome:
    """What came of a step, as soon as the lane knows."""

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
    """No update begins before all ranks, those of other parts of the model, too, have finished and committed a step."""

    def __init__(self, mesh: Mesh, traffic: Traffic, wait_for_commit: Callable[[], None]) -> None:
        self._group, self._traffic = mesh.all_ranks or mesh.agreement, traffic
        self._wait_for_commit = wait_for_commit
        self._unconfirmed = False  # this rank has not said that it is through with its step
        self._pending: PendingCollective | None = None

    def end_step(self) -> None:
        """This rank is through with a step."""
        self._unconfirmed = True

    def confirm(self) -> None:
        """Begin to tell all ranks so, if that was not done."""
        if self._unconfirmed:
            self._wait_for_commit()
            self._pending = collectives.all_reduce(torch.ones((), dtype=torch.int32), self._group, self._traffic)
            self._unconfirmed = False

    def wait_for_ranks(self) -> None:
        """Wait until all are."""
        self.confirm()
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


class ShardedUpdate:
    """All but `may_update_early` and `finish_step` is called on the lane."""

    def __init__(
        self, trained: Sequence[RankBucket], state: StateSlots, norm: GlobalNorm, queue: CollectiveQueue,
        schedule: TransferSchedule, mesh: Mesh, traffic: Traffic, comm_thread: CommThread,
    ) -> None:  # fmt: skip
        """`traffic` is the lane's."""
        self.trained, self.state, self.queue, self.schedule = list(trained), state, queue, schedule
        self.barrier = StepBarrier(mesh, traffic, state.wait_for_commit)
        self._norm, self._mesh, self._traffic, self._comm_thread = norm, mesh, traffic, comm_thread
        self._last_norm: float | None = None  # of a step that was taken
        self._names_with_grad = {name for held in trained for name in held.names}  # by the last step, on any rank
        self._previous_agreed: StreamEvent | None = None  # the ranks have agreed on the step before

    def close(self) -> None:
        """Let go of what has groups: they end with the last reference, and none may outlive the interpreter, as what is
        held of an engine may."""
        for name in ("queue", "schedule", "barrier"):
            self.__dict__.pop(name, None)

    def may_update_early(self, clip: float | None) -> bool:
        """Whether units are updated as soon as they are reduced; the same on all ranks, as the norm before is."""
        if self.state.count == 1:
            return False
        if self._previous_agreed is not None:
            # The lane writes the norm; nothing is computed before that anyway.
            self._previous_agreed.wait(self._mesh.traffic)
        return clip is None or (self._last_norm is not None and self._last_norm < NEAR_CLIPPING * clip)

    def finish_step(self, now: StepState) -> ShardedStepOutcome:
        """The main thread has handed over all of a step."""
        self._previous_agreed = now.agreed
        return ShardedStepOutcome(now, self._mesh.traffic)

    def reduce(
        self, now: StepState, unit: Unit, held: RankBucket, gradient: BucketGradient, part: int, last: bool
    ) -> None:
        """Sum part `part` of a bucket's gradient to its owners."""

        def then() -> None:
            if last and now.optimistic and part == unit.parts - 1 and held is unit.trained_buckets[-1]:
                self._optimistic_update(now)
                self.update_unit(now, unit)

        self.queue.reduce(held, gradient, part, then)

    def _optimistic_update(self, now: StepState) -> None:
        """Go by what the ranks will agree on unless this step is clipped or skipped."""
        if now.change is None:
            self.barrier.wait_for_ranks()
            divisor = self._norm.likely_divisor(now.weight.get())
            now.change = self._make_update(now, divisor, torch.zeros_like(divisor).float())

    def _make_update(self, now: StepState, divisor: torch.Tensor, skip: torch.Tensor) -> StepUpdate:
        return StepUpdate(now.number, now.lr, self.state.shards.no_decay, divisor, skip)

    def start_agreement(self, now: StepState) -> None:
        """Begin to agree on the norm of the whole gradient, and on which parameters have one."""
        self.queue.flush_reduce()
        self.barrier.wait_for_ranks()
        squares = self._norm.local_squares(iterate_gradients(self.trained, self._norm.replica_counts))
        names = [name for held in self.trained for name in held.names]
        mine, rates = squares.item() / self._norm.copies, self.schedule.local_rates()
        here = set().union(*now.names_with_grad)
        now.agreement = StepConsensus(mine, rates, names, here, self._mesh.agreement, self._traffic)

    def finish_agreement(self, now: StepState) -> bool:
        """What the ranks have agreed on: the same on all of them from here on. Whether it is what was likely."""
        assert now.agreement is not None
        squares, rates, used = now.agreement.finish()
        now.needs_schedule = self.schedule.observe_rates(rates)
        scale = self._norm.loss_scale
        now.loss_scale = scale.factor.item() if scale is not None else None
        # Other stages, to whom the main thread may still have to send.
        with self._comm_thread.declare_wait(lambda: False):
            squares = gradients.sum_over_model(squares, self._mesh.model, self._traffic)
        norm, divisor, skip = self._norm.divisor(squares, now.weight.get(), now.clip)
        # The lane, and nobody else, waits for the device here.
        now.norm, now.skipped = norm.item(), skip.item()
        likely = now.change is None or (
            not now.skipped and torch.equal(divisor, now.change.divisor) and used == self._names_with_grad
        )
        now.change = self._make_update(now, divisor, skip)
        self._names_with_grad, self._last_norm = used, None if now.skipped else now.norm
        return likely

    def update_unit(self, now: StepState, unit: Unit, stages: bool = True) -> None:
        """Update this rank's shards of a unit; `stages`: and put the masters where the next gathering takes them."""
        assert now.change is not None
        begun = self.schedule.record_time()
        self.state.begin_write()
        source, target = self.state.source, self.state.target
        for held in unit.trained_buckets:
            keys = [fragment.key for fragment in held.fragments]
            grads = {f.key: held.gradient_of(f) for f in held.fragments if f.parameter.name in self._names_with_grad}
            self.state.note_updates(keys, grads, now.change)
            if now.optimistic:  # they may be needed again
                grads = {key: grad.clone() for key, grad in grads.items()}
            sources, targets = ({key: slot[key] for key in keys} for slot in (source, target))
            self.state.shards.rule.apply(sources, targets, grads, now.change)
            if stages:
                held.stage_masters(target)
        now.updated.add(unit.number)
        self.schedule.record_update(unit.number, begun)

    def end_step(self, now: StepState) -> None:
        """All units are updated."""
        self.queue.flush()
        self.state.advance(now.number, ShardedStepOutcome(now, self._traffic))
        self.barrier.end_step()
        if not self.state.commits_async:  # else the next update asks
            self.barrier.confirm()
        if now.needs_schedule:
            self.schedule.make_orders(now.number + 2)

    def stage_masters(self, unit: Unit) -> None:
        """Put this rank's masters of a unit where its gathering takes them from."""
        for held in unit.trained_buckets:
            held.stage_masters(self.state.source)

    def run_for_units(self, units: Sequence[Unit], work: Callable[[Unit], None]) -> None:
        """Have the lane do `work` for each unit, behind what this thread's device was told, and finish transfers."""
        self._comm_thread.wait_current_stream()
        for unit in units:
            self._comm_thread.submit(partial(work, unit))
        self._comm_thread.submit(self.queue.flush)
