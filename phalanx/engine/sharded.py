"""The sharded engine: each rank keeps and updates a range of every bucket, while gradients and parameters travel.

A unit's parameters are views of flat buffers. When its gradients are complete, they are summed to their owners
(reduce-scatter) while the backward pass goes on; each rank updates its ranges; parameters are gathered while the next
forward pass goes on, which waits for each unit as it comes to it. All of this is done by one lane (comm_thread.py) in
an order that is the same on every rank, whatever becomes ready first (comm_schedule.py makes it). Sources: ZeRO
(Rajbhandari et al.
2020) for what is sharded, Megatron-LLaMA's OverlappedDistributedOptimizer for hiding both; unequal ranges are ours.

With `zero` 1 gradients stay whole on every rank; with 2 their buffers are given back as soon as they are summed; with 3
parameters are whole only while they are used, and gathered for the forward and again for the backward pass.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.comm import collectives
from phalanx.comm.codec import NO_COMPRESSION
from phalanx.comm.collectives import PendingCollective, Traffic
from phalanx.comm.comm_thread import CommThread, StreamEvent
from phalanx.comm.mesh import Mesh
from phalanx.comm.routes import make_routes
from phalanx.engine.bucket import (
    IN_FLIGHT_ZERO3,
    BucketGradient,
    GradientBufferPool,
    RankBucket,
    iterate_gradients,
    replace_meta_tensors,
)
from phalanx.engine.collective_queue import CollectiveQueue
from phalanx.engine.hooks import PassEvents, UnitHooks
from phalanx.engine.interface import InMemoryStore, Precision, StepOutcome
from phalanx.engine.schedule import TransferSchedule
from phalanx.engine.sharding_spec import PART_BYTES, PREFETCH, ShardingSpec
from phalanx.engine.state_slots import OwnedShards, StateSlots
from phalanx.engine.step_state import GradAccumulation, ShardedStepOutcome, StepConsensus, StepState
from phalanx.engine.units import Unit, describe_parameters
from phalanx.layout import buckets
from phalanx.layout.comm_simulation import TransferOp
from phalanx.optim import gradients
from phalanx.optim.state import Allocator, Shard, StatePiece
from phalanx.optim.update import NO_REPLICAS, ReadState, StepUpdate, UpdateRule, allocate_zeros

EVEN_SHARDING = ShardingSpec()
# Early updates: after so many gathers the ranks begin to agree, and must have agreed; the link is not idle meanwhile.
START_AGREEMENT_AFTER, FINISH_AGREEMENT_AFTER = 1, 3
NEAR_CLIPPING = 0.8  # of the limit: a norm that was below is taken to stay below it in the next step


class ShardedEngine:
    """Master parameters and what the rule keeps of them exist only for the own ranges, in fp32 (or fp64)."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[tuple[str, nn.Module]],
        *,
        mesh: Mesh,
        rule: UpdateRule,
        nominal_weight: int,
        precision: Precision,
        loss_scale: gradients.LossScale | None = None,
        allocate: Allocator = allocate_zeros,
        sharding: ShardingSpec = EVEN_SHARDING,
        copies: Mapping[str, int] = NO_REPLICAS,
        keeper: InMemoryStore | None = None,
    ) -> None:
        """`model` is on meta, or holds values. `copies`: of parameters that several ranks of `mesh.model` hold alike,
        how many do. `keeper`: what outlives the process. Raises ConfigError for shards that there cannot be."""
        self.model, self.mesh, self.rule, self.nominal_weight = model, mesh, rule, nominal_weight
        self.step, self.loss_scale, self.sharding = 0, loss_scale, sharding
        self._precision, self._allocate, self._replica_counts, self._store = precision, allocate, copies, keeper
        self._degree = degree = sharding.degree or mesh.world
        weights = sharding.shard_weights(mesh.world, mesh.homogeneous)
        parameters = describe_parameters(model, units, rule)
        if sharding.compress == "int8":
            buckets.check_whole_rows(parameters)
        self._shapes = {parameter.name: parameter.shape for parameter in parameters}
        self._trainable_names = [parameter.name for parameter in parameters if parameter.trained]
        # Where the host moves them, buckets travel in parts, so that an urgent one waits for a part at the most.
        parts, least = sharding.parts if degree > 1 and mesh.on_host else 1, PART_BYTES // precision.transport.itemsize
        self.buckets = buckets.make_buckets(parameters, weights, parts, least, sharding.isolates_parameters)
        self._parts = max((len(bucket.parts) for bucket in self.buckets), default=1)
        self._modules, self._resharded = dict(units), sharding.zero == 3
        self.traffic = Traffic()  # the lane's: nobody but the lane is held up by it
        self._comm_thread = CommThread(mesh.device, mesh.traffic)
        self._rank, self._copies = mesh.rank % degree, mesh.world // degree
        owned = (each for bucket in self.buckets if bucket.trained for each in bucket.fragments(self._rank))
        self._shards = OwnedShards(tuple(owned), rule, precision.master, mesh.device)
        self._zero = torch.zeros((), dtype=precision.master, device=mesh.device)
        self._routes = make_routes(mesh, degree, self.traffic, sharding.compress)
        self._unsharded_units: deque[tuple[Unit, StreamEvent, StreamEvent]] = (
            deque()
        )  # units, when they may be released, when they are there
        self._root: tuple[Unit, StreamEvent, StreamEvent] | None = (
            None  # the model's own parameters, likewise, for a whole pass
        )
        self._pending_confirmation: PendingCollective | None = (
            None  # all ranks have finished, and committed, the step before
        )
        self._unconfirmed = False  # this one has not said so
        self._last_norm: float | None = None  # of a step that was taken
        self._names_with_grad = set(self._trainable_names)  # by the last step, on any rank
        self._previous_agreed: StreamEvent | None = None  # the ranks have agreed on the step before

    @property
    def trainable(self) -> dict[str, tuple[int, ...]]:
        return {name: self._shapes[name] for name in self._trainable_names}

    # --------------------------------------------------------------------------------------------------- taking memory

    def initialise(self, fill: Callable[[Shard], None]) -> None:
        parameters = dict(self.model.named_parameters())
        whole = self.sharding.zero == 1 and self.sharding.reduce == "per_step"
        self._pool = pool = (
            None
            if whole
            else GradientBufferPool(IN_FLIGHT_ZERO3, keeps=False)
            if self._resharded
            else GradientBufferPool()
        )
        helds: list[RankBucket] = []
        replaced: dict[int, nn.Parameter] = {}
        # In the masters' type and all its digits, with one slot in plain memory, the model's range is the master.
        itself = self._precision.compute == self._precision.master and self.sharding.compress == NO_COMPRESSION
        itself &= (
            self.sharding.slots == 1
            and self._allocate is allocate_zeros
            and not self._resharded
            and self._store is None
        )
        make = functools.partial(self._shards.make_slot, masters=not itself)
        self._state = StateSlots(make, self._shards.pieces, self._allocate, self.sharding.slots, self._store)
        for bucket in self.buckets:  # one after the other: what is released between uses was never there all at once
            shared = self._precision, self._comm_thread, pool, self._resharded, self._state.allocate_working
            held = RankBucket(bucket, self._rank, self.mesh.device, *shared)
            held.adopt_parameters([parameters[member.parameter.name] for member in bucket.members], replaced)
            for fragment in held.fragments if itself and bucket.trained else ():
                self._state.source[fragment.key]["param"] = held.fragment_values(fragment)
            self._fill(held, fill)
            if self._resharded:
                held.reshard()
            helds.append(held)
        replace_meta_tensors(self.model, replaced, self.mesh.device)
        self._trained_buckets = [held for held in helds if held.bucket.trained]
        names = list(dict.fromkeys(held.bucket.unit for held in helds))
        self._units = [
            Unit(number, name, self._modules.get(name, self.model), [h for h in helds if h.bucket.unit == name])
            for number, name in enumerate(names)
        ]
        self._schedule = TransferSchedule(
            self._units, self.mesh, self.sharding, self._parts, self._precision, self.traffic, self._routes
        )
        self._queue = CollectiveQueue(self._routes, self._schedule, pool)
        self._hooks = UnitHooks(
            self.model, self._units, self._comm_thread, self.mesh.traffic, self._resharded, self._submit_evaluation,
            self._schedule.pass_timer,
        )  # fmt: skip
        self.grad_accumulation = GradAccumulation(self._trained_buckets, self._schedule.pass_timer)
        self._state.wait_until_ready()
        if self._resharded:
            self._comm_thread.wait_current_stream()
        else:
            self._gather_masters(wait=not self._state.has_state)  # nothing else is to be written there then

    def _fill(self, held: RankBucket, fill: Callable[[Shard], None]) -> None:
        if held.bucket.trained and self._state.has_state:
            return  # it is filled
        if held.bucket.trained or self._resharded:
            for fragment in held.fragments:
                name, shape = fragment.parameter.name, fragment.parameter.shape
                into = (
                    self._state.source[fragment.key]["param"] if held.bucket.trained else held.fragment_values(fragment)
                )
                fill(Shard(name, fragment.start, fragment.stop, shape, into, trainable=held.bucket.trained))
        else:
            for member, values in held.members():
                fill(Shard(member.parameter.name, 0, values.numel(), member.parameter.shape, values, trainable=False))

    def memory_ids(self) -> dict[str, tuple[int, ...]]:
        """Where parameters may be: by name, what identifies their memory."""
        return {name: held.memory_ids for unit in self._units for held in unit.buckets for name in held.names}

    # ------------------------------------------------------------------------------------------------- the main thread

    def begin_step(self, step: int, weight: int, lr: float, clip: float | None) -> None:
        assert step == self.step + 1, (step, self.step)
        self._comm_thread.raise_error()
        weights = gradients.TotalWeight(weight, self.mesh.control, self.mesh.traffic)
        self._current_step = StepState(step, lr, clip, weights, StreamEvent(self._comm_thread))
        for held in self._trained_buckets:
            held.begin_step()
        if self.mesh.pipe is not None:  # other stages must not wait for this one's passes to hear it
            self._submit(self._confirm_step)

    @contextlib.contextmanager
    def micro_batch(self, last: bool, interleaved: bool = False) -> Iterator[None]:
        """`interleaved`: inside, passes of several micro-batches mix; `self.grad_accumulation` is told of the last."""
        reduces = last or self.sharding.reduce == "per_micro_batch"
        for held in self._trained_buckets:
            held.begin_micro_batch(reduces and not interleaved)
        self._hooks.begin_micro_batch(last)
        if last:
            self._current_step.names_with_grad = [held.names_with_grad for held in self._trained_buckets]
            self._current_step.optimistic = self._may_update_early(self._current_step.clip)
        if reduces or self._resharded:
            self._submit_micro_batch(reduces, last)
        try:
            yield
        except BaseException as error:
            self._comm_thread.fail(error)
            raise
        if reduces:
            if self._pool is None:  # there the lane may still read what a unit that is not used now had before
                self._hooks.wait_for_gathers()
            for held in reversed(self._trained_buckets):
                held.submit_gradient()  # what no gradient has come for
        self._hooks.end_micro_batch(last)

    def _may_update_early(self, clip: float | None) -> bool:
        """Whether units are updated as soon as they are reduced; the same on all ranks, as the norm before is."""
        if self.sharding.slots == 1 or self._resharded:
            return False
        if self._previous_agreed is not None:
            self._previous_agreed.wait(
                self.mesh.traffic
            )  # the lane writes the norm; nothing is computed before that anyway
        return clip is None or (self._last_norm is not None and self._last_norm < NEAR_CLIPPING * clip)

    def _submit_micro_batch(self, reduces: bool, last: bool) -> None:
        """Tell the lane what to do in this micro-batch, and behind the last one."""
        now, passes = self._current_step, self._hooks
        sent = {id(held): held.gradient for held in self._trained_buckets}
        known = self._schedule.orders_for(now.number)
        order = known.select(now.optimistic) if last or self._resharded else known.reduces
        summed = max((at for at, op in enumerate(order) if op.kind == "reduce"), default=-1)
        asks, hears = (
            min(summed + later, len(order) - 1)
            for later in ((START_AGREEMENT_AFTER, FINISH_AGREEMENT_AFTER) if now.optimistic else (0, 0))
        )
        for at, op in enumerate(order):
            unit = self._units[op.bucket]
            if self._resharded and op.kind != "reduce":
                self._submit(self._gather_unit, unit, op, passes.events)
            elif op.kind != "reduce":
                self._submit(self._gather_updated, now, unit, op.part, passes.next_gathered[op.bucket])
            elif reduces:
                for held in unit.trained_buckets:
                    if self._resharded and op.part == 0:
                        self._submit(self._reshard_after_backward, unit, sent[id(held)], passes.events)
                    self._submit(self._reduce, now, unit, held, sent[id(held)], op.part, last)
            if last and at == asks:
                self._submit(self._start_agreement, now)
            if last and at == hears:
                self._submit(self._finish_agreement, now)
        if self._resharded:
            self._submit(self._reshard_all)
        if last:
            self._submit(self._end_step, now, self._schedule.add_end_event(now.number, self._comm_thread))

    def _submit(self, work: Callable[..., None], *args: object) -> None:
        self._comm_thread.submit(lambda: work(*args))

    def _submit_evaluation(self, marks: PassEvents) -> None:
        """A forward pass alone begins: have the lane gather what is released between uses."""
        for op in self._schedule.orders_for(self.step + 1).forward:
            self._submit(self._gather_unit, self._units[op.bucket], op, marks)
        self._submit(self._reshard_all)

    def grads_ready(self, unit: str) -> None:
        for held in self._trained_buckets:
            if held.bucket.unit == (unit if unit in self._modules else ""):
                held.accumulate_all()

    def finish_step(self) -> StepOutcome:
        self.mesh.traffic.add(self.traffic.take())
        self._previous_agreed = self._current_step.agreed
        return ShardedStepOutcome(self._current_step, self.mesh.traffic)

    def take_notices(self) -> list[tuple[str, dict[str, Any]]]:
        return self._schedule.take_notices()

    def commit(self, step: int) -> None:
        self.step = step

    def resume_after(self, step: int) -> None:
        if not self._state.has_state:
            self._comm_thread.drain()
        self._state.adopt_state(step)
        self.step = step

    def close(self) -> None:
        self._comm_thread.close()
        if "_hooks" in self.__dict__:
            self._hooks.remove()
        # Their groups end with the last reference, and none may outlive the interpreter, as this engine may.
        self._pending_confirmation = None
        for name in ("_routes", "_queue", "_schedule", "_current_step"):
            self.__dict__.pop(name, None)

    # -------------------------------------------------------------------------------------------------------- the lane

    def _reduce(
        self, now: StepState, unit: Unit, held: RankBucket, gradient: BucketGradient, part: int, last: bool
    ) -> None:
        def then() -> None:
            if last and now.optimistic and part == self._parts - 1 and held is unit.trained_buckets[-1]:
                self._update(now, unit, self._optimistic_update(now))

        self._queue.reduce(held, gradient, part, then)

    def _optimistic_update(self, now: StepState) -> StepUpdate:
        """What the ranks will agree on unless this step is clipped or skipped."""
        if now.change is None:
            self._wait_for_all_ranks()
            divisor = gradients.divisor_without_clipping(
                self._zero, self.nominal_weight, now.weight.get(), self.loss_scale
            )
            now.change = StepUpdate(
                now.number, now.lr, self._shards.no_decay, divisor, torch.zeros_like(divisor).float()
            )
        return now.change

    def _wait_for_all_ranks(self) -> None:
        """No update begins before all ranks are through with the step before, and have committed it."""
        self._confirm_step()
        if self._pending_confirmation is not None:
            self._pending_confirmation.wait()
            self._pending_confirmation = None

    def _confirm_step(self) -> None:
        """Begin to tell all ranks, those of other parts of the model, too, that this one is through with its step."""
        if self._unconfirmed:
            self._state.wait_for_commit()
            group = self.mesh.all_ranks or self.mesh.agreement
            self._pending_confirmation = collectives.all_reduce(torch.ones((), dtype=torch.int32), group, self.traffic)
            self._unconfirmed = False

    def _start_agreement(self, now: StepState) -> None:
        """Begin to agree on the norm of the whole gradient, and on which parameters have one."""
        self._queue.flush_reduce()
        self._wait_for_all_ranks()
        ours, zero = iterate_gradients(self._trained_buckets, self._replica_counts), self._zero
        squares = gradients.sum_of_squares_once(ours, zero.dtype, zero.device)
        names = [name for held in self._trained_buckets for name in held.names]
        mine, rates, here = (
            squares.item() / self._copies,
            self._schedule.local_rates(),
            set().union(*now.names_with_grad),
        )
        now.agreement = StepConsensus(mine, rates, names, here, self.mesh.agreement, self.traffic)

    def _finish_agreement(self, now: StepState) -> None:
        """What the ranks have agreed on: the same on all of them from here on."""
        assert now.agreement is not None
        squares, rates, used = now.agreement.finish()
        now.needs_schedule = self._schedule.observe_rates(rates)
        now.loss_scale = self.loss_scale.factor.item() if self.loss_scale is not None else None
        with self._comm_thread.declare_wait(
            lambda: False
        ):  # other stages, to whom the main thread may still have to send
            squares = gradients.sum_over_model(squares, self.mesh.model, self.traffic)
        norm, divisor, skip = gradients.compute_norm_and_divisor(
            squares.to(self._zero), nominal_weight=self.nominal_weight, total_weight=now.weight.get(), clip=now.clip,
            scale=self.loss_scale,
        )  # fmt: skip
        # The lane, and nobody else, waits for the device here.
        now.norm, now.skipped = norm.item(), skip.item()
        likely = now.change is None or (
            not now.skipped and torch.equal(divisor, now.change.divisor) and used == self._names_with_grad
        )
        now.change = StepUpdate(now.number, now.lr, self._shards.no_decay, divisor, skip)
        self._names_with_grad, self._last_norm = used, None if now.skipped else now.norm
        if not likely:
            self._redo_update(now)
        now.agreed.record()  # behind that: what arrives from here on is good
        for fresh in now.pending_gathered:
            fresh.record()

    def _redo_update(self, now: StepState) -> None:
        """What was updated early was updated wrongly: once more, from the state that was kept."""
        now.updated = set()
        for number in sorted(now.gathered):
            for part in range(self._parts):
                self._gather_updated(now, self._units[number], part, None)
        self._queue.flush()
        now.again = now.gathered.copy()

    def _update(self, now: StepState, unit: Unit, change: StepUpdate) -> None:
        begun = self._schedule.record_time()
        self._state.begin_write()
        source, target = self._state.source, self._state.target
        for held in unit.trained_buckets:
            keys = [fragment.key for fragment in held.fragments]
            grads = {f.key: held.gradient_of(f) for f in held.fragments if f.parameter.name in self._names_with_grad}
            self._state.note_updates(keys, grads, change)
            if now.optimistic:  # they may be needed again
                grads = {key: grad.clone() for key, grad in grads.items()}
            self.rule.apply({key: source[key] for key in keys}, {key: target[key] for key in keys}, grads, change)
            if not self._resharded:
                held.stage_masters([target[key]["param"] for key in keys])
        now.updated.add(unit.number)
        self._schedule.record_update(unit.number, begun)

    def _gather_updated(self, now: StepState, unit: Unit, part: int, fresh: StreamEvent | None) -> None:
        """`fresh` is set when the last part has arrived, and the ranks have agreed."""
        if unit.trained_buckets and unit.number not in now.updated:
            self._queue.flush()  # which may update it
            if unit.number not in now.updated:
                assert now.change is not None
                self._update(now, unit, now.change)
        now.gathered.add(unit.number)

        def then() -> None:
            if fresh is not None and part == self._parts - 1:
                if now.agreed.is_recorded:
                    fresh.record()
                else:
                    now.pending_gathered.append(fresh)

        self._queue.gather([] if unit.number in now.again else unit.trained_buckets, part, then)

    def _end_step(self, now: StepState, ended: StreamEvent) -> None:
        if self._resharded:
            assert now.change is not None
            for unit in self._units:
                self._update(now, unit, now.change)
        self._queue.flush()
        self._state.advance(now.number, ShardedStepOutcome(now, self.traffic))
        self._unconfirmed = True
        if not self._state.commits_async:  # else the next update asks
            self._confirm_step()
        if now.needs_schedule:
            self._schedule.make_orders(now.number + 2)
        ended.record()

    # ------------------------------------------------------------------------------ the lane, where units are released

    def _gather_unit(self, unit: Unit, op: TransferOp, marks: PassEvents) -> None:
        """Gather a part of a unit for the pass that `op` is of; before its first, release what is not needed."""
        again = op.kind == "regather"
        mark = (marks.regathered if again else marks.gathered)[unit.number]
        if op.part == 0:
            while len(self._unsharded_units) > PREFETCH:
                self._reshard(self._unsharded_units.popleft())
            self._unshard(unit)
            used = (marks.backward_done if again else marks.forward_done)[unit.number]
            if unit.module is self.model:
                self._root = unit, marks.backward_done[unit.number] if marks.training else used, mark
            else:
                self._unsharded_units.append((unit, used, mark))
        self._queue.gather(unit.buckets, op.part, lambda: mark.record() if op.part == self._parts - 1 else None)

    def _reshard_after_backward(self, unit: Unit, gradient: BucketGradient, marks: PassEvents) -> None:
        """The backward pass of a unit is through: its parameters need not be there while its gradient is sent."""
        self._queue.wait(gradient.ready)
        if self._unsharded_units and unit.number > (
            self._units[0].module is self.model
        ):  # of the first nothing tells the end
            self._queue.wait(marks.backward_done[unit.number])
        while self._unsharded_units and all(
            mark.is_recorded for mark in self._unsharded_units[0][1:]
        ):  # what nobody uses may still arrive
            self._reshard(self._unsharded_units.popleft())

    def _unshard(self, unit: Unit) -> None:
        slot = self._state.source
        for held in unit.buckets:
            held.unshard()
            if held.bucket.trained:
                held.stage_masters([slot[fragment.key]["param"] for fragment in held.fragments])

    def _reshard(self, whole: tuple[Unit, StreamEvent, StreamEvent]) -> None:
        self._queue.wait(whole[1])
        for held in whole[0].buckets:
            held.reshard()

    def _reshard_all(self) -> None:
        self._queue.flush()  # the last to be gathered may still arrive, where nothing has used it
        while self._unsharded_units:
            self._reshard(self._unsharded_units.popleft())
        if self._root is not None:
            self._reshard(self._root)
            self._root = None

    # ------------------------------------------------------------------------------------------------------------ state

    def _gather_masters(self, wait: bool = True) -> None:
        """Bring the masters, and whatever else ranks own of the parameters, into the model; units wait for theirs."""

        def bring(unit: Unit) -> None:
            if self._resharded:
                self._unshard(unit)
            else:
                slot = self._state.source
                for held in unit.trained_buckets:
                    held.stage_masters([slot[fragment.key]["param"] for fragment in held.fragments])
            helds, fresh = unit.buckets if self._resharded else unit.trained_buckets, self._hooks.gathered[unit.number]
            for part in range(self._parts):
                self._queue.gather(helds, part, fresh.record if part == self._parts - 1 else lambda: None)

        self._comm_thread.wait_current_stream()
        for unit in self._units:
            self._submit(bring, unit)
        self._submit(self._queue.flush)
        if wait:
            self._comm_thread.drain()

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        self._comm_thread.drain()
        if self._resharded:
            self._gather_masters()
            self._hooks.unsharded = True
        try:
            yield {name: parameter.data for name, parameter in self.model.named_parameters()}
        finally:
            if self._resharded:
                self._hooks.unsharded = False
                self._comm_thread.wait_current_stream()  # whose memory it is, and who may use it again at once
                for unit in self._units:
                    for held in unit.buckets:
                        held.reshard()

    def pieces(self, replicas: bool = False) -> Iterator[StatePiece]:
        """As the interface has it: nothing where another rank holds the same, unless `replicas` are wanted too."""
        self._comm_thread.drain()
        return self._shards.pieces(self._state.source) if replicas or self.mesh.rank < self._degree else iter(())

    def load(self, read: ReadState) -> None:
        self._comm_thread.drain()
        self._shards.load(self._state.source, read)
        if self._resharded:
            self._comm_thread.wait_current_stream()
        else:
            self._gather_masters()
