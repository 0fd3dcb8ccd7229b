"""The sharded engine: each rank keeps and updates a range of every bucket, while gradients and parameters travel.

A unit's parameters are views of flat buffers. When its gradients are complete, they are summed to their owners
(reduce-scatter) while the backward pass goes on; each rank updates its ranges; parameters are gathered while the next
forward pass goes on, which waits for each unit as it comes to it. All of this is done by one lane (comm_thread.py) in
an order that is the same on every rank, whatever becomes ready first (comm_schedule.py makes it). Sources: ZeRO
(Rajbhandari et al. 2020) for what is sharded, Megatron-LLaMA's OverlappedDistributedOptimizer for hiding both; unequal
ranges are ours.

Here is the main thread's side. What the lane does to update is in sharded_update.py; where whole parameters are, and
what passes wait for, in zero1_2.py and zero3.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from phalanx.comm.collectives import Traffic
from phalanx.comm.comm_thread import CommThread, StreamEvent
from phalanx.comm.compression import NO_COMPRESSION
from phalanx.comm.mesh import Mesh
from phalanx.comm.uneven_collectives import make_routes
from phalanx.engine.bucket import RankBucket, replace_meta_tensors
from phalanx.engine.hooks import ParameterResidency, UnitHooks
from phalanx.engine.interface import InMemoryStore, Precision, StepOutcome
from phalanx.engine.schedule import CollectiveQueue, TransferSchedule, Unit, describe_parameters
from phalanx.engine.sharded_update import GlobalNorm, GradAccumulation, ShardedUpdate, StepState
from phalanx.engine.sharding_spec import PART_BYTES, ShardingSpec
from phalanx.engine.state_slots import OwnedShards, StateSlots
from phalanx.engine.zero1_2 import KeptParameters
from phalanx.engine.zero3 import GatheredParameters
from phalanx.layout import buckets
from phalanx.optim import gradients
from phalanx.optim.update import NO_REPLICAS, Allocator, ReadState, Shard, StatePiece, UpdateRule, allocate_zeros

EVEN_SHARDING = ShardingSpec()
# Early updates: after so many gathers the ranks begin to agree, and must have agreed; the link is not idle meanwhile.
START_AGREEMENT_AFTER, FINISH_AGREEMENT_AFTER = 1, 3


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
        self.model, self.mesh, self.step, self.loss_scale, self.sharding = model, mesh, 0, loss_scale, sharding
        self._precision, degree = precision, sharding.degree or mesh.world
        weights = sharding.shard_weights(mesh.world, mesh.devices.homogeneous)
        parameters = describe_parameters(model, units, rule)
        if sharding.compress == "int8":
            buckets.check_whole_rows(parameters)
        self.trainable = {parameter.name: parameter.shape for parameter in parameters if parameter.trained}
        # Where the host moves them, buckets travel in parts, so that an urgent one waits for a part at the most.
        parts, least = (
            sharding.parts if degree > 1 and mesh.devices.on_host else 1,
            PART_BYTES // precision.transport.itemsize,
        )
        self.buckets = buckets.make_buckets(parameters, weights, parts, least, sharding.isolates_parameters)
        self._modules = dict(units)
        self.traffic = Traffic()  # the lane's: nobody but the lane is held up by it
        self._comm_thread = CommThread(mesh.device, mesh.traffic)
        self._rank = mesh.rank % degree
        owned = (each for bucket in self.buckets if bucket.trained for each in bucket.fragments(self._rank))
        shards = OwnedShards(tuple(owned), rule, precision.master, mesh.device)
        self._state = StateSlots(shards, allocate, sharding.slots, keeper)
        zero = torch.zeros((), dtype=precision.master, device=mesh.device)
        self._norm = GlobalNorm(nominal_weight, loss_scale, copies, zero, mesh.world // degree)

    # --------------------------------------------------------------------------------------------------- taking memory

    def initialise(self, fill: Callable[[Shard], None]) -> None:
        mesh, sharding, precision, comm_thread = self.mesh, self.sharding, self._precision, self._comm_thread
        routes = make_routes(mesh, sharding.degree or mesh.world, self.traffic, sharding.compress)
        residency = GatheredParameters if sharding.zero == 3 else KeptParameters
        # In the masters' type and all its digits, with one slot in plain memory, the model's range is the master.
        itself = precision.compute == precision.master and sharding.compress == NO_COMPRESSION
        itself &= self._state.is_plain and not residency.releases
        self._state.open(masters=not itself)
        parameters, replaced = dict(self.model.named_parameters()), dict[int, nn.Parameter]()
        pool, helds = residency.make_pool(sharding), list[RankBucket]()
        for bucket in self.buckets:  # one after the other: what is released between uses was never there all at once
            shared = precision, comm_thread, pool, self._state.allocate_working
            held = residency.make_bucket(bucket, self._rank, mesh.device, *shared)
            held.adopt_parameters([parameters[member.parameter.name] for member in bucket.members], replaced)
            for fragment in held.fragments if itself and bucket.trained else ():
                self._state.source[fragment.key]["param"] = held.fragment_values(fragment)
            for shard in held.frozen_shards() if not bucket.trained else self._state.shards_to_fill(held.fragments):
                fill(shard)
            held.reshard()
            helds.append(held)
        replace_meta_tensors(self.model, replaced, mesh.device)
        names = list(dict.fromkeys(held.bucket.unit for held in helds))
        self._units = [
            Unit(number, name, self._modules.get(name, self.model), [h for h in helds if h.bucket.unit == name])
            for number, name in enumerate(names)
        ]
        schedule = TransferSchedule(self._units, mesh, sharding, precision, self.traffic, routes)
        queue = CollectiveQueue(routes, schedule, pool)
        trained = [held for held in helds if held.bucket.trained]
        self._update = ShardedUpdate(trained, self._state, self._norm, queue, schedule, mesh, self.traffic, comm_thread)
        self._parameters: ParameterResidency = residency(
            self.model, self._units, self._update, comm_thread, mesh.traffic, schedule.pass_timer
        )
        self._hooks = UnitHooks(self.model, self._units, self._parameters, comm_thread, schedule.pass_timer)
        self.grad_accumulation = GradAccumulation(trained, schedule.pass_timer)
        self._state.wait_until_ready()
        self._parameters.publish_masters(wait=not self._state.has_state)  # nothing else is to be written there then

    def memory_ids(self) -> dict[str, tuple[int, ...]]:
        """Where parameters may be: by name, what identifies their memory."""
        return {name: held.memory_ids for unit in self._units for held in unit.buckets for name in held.names}

    # ---------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int, weight: int, lr: float, clip: float | None) -> None:
        assert step == self.step + 1, (step, self.step)
        self._comm_thread.raise_error()
        weights = gradients.TotalWeight(weight, self.mesh.control, self.mesh.traffic)
        self._current_step = StepState(step, lr, clip, weights, StreamEvent(self._comm_thread))
        for held in self._update.trained:
            held.begin_step()
        if self.mesh.pipe is not None:  # other stages must not wait for this one's passes to hear it
            self._comm_thread.submit(self._update.barrier.confirm)

    @contextlib.contextmanager
    def micro_batch(self, last: bool, interleaved: bool = False) -> Iterator[None]:
        """`interleaved`: inside, passes of several micro-batches mix; `self.grad_accumulation` is told of the last."""
        now, trained = self._current_step, self._update.trained
        reduces = last or self.sharding.reduce == "per_micro_batch"
        for held in trained:
            held.begin_micro_batch(reduces and not interleaved)
        self._hooks.begin_micro_batch(last)
        if last:
            now.names_with_grad = [held.names_with_grad for held in trained]
            now.optimistic = not self._parameters.releases and self._update.may_update_early(now.clip)
        if reduces or self._parameters.releases:
            self._submit_micro_batch(now, reduces, last)
        try:
            yield
        except BaseException as error:
            self._comm_thread.fail(error)
            raise
        if reduces:
            if self._update.queue.pool is None:  # there the lane may still read what a unit not used now had before
                self._parameters.wait_for_gathers()
            for held in reversed(trained):
                held.submit_gradient()  # what no gradient has come for
        self._hooks.end_micro_batch(last)

    def _submit_micro_batch(self, now: StepState, reduces: bool, last: bool) -> None:
        """Tell the lane what to do in this micro-batch, and behind the last one."""
        submit, update = self._comm_thread.submit, self._update
        known = update.schedule.orders_for(now.number)
        order = known.select(now.optimistic) if last else known.reduces
        summed = max((at for at, op in enumerate(order) if op.kind == "reduce"), default=-1)
        asks, hears = (
            min(summed + later, len(order) - 1)
            for later in ((START_AGREEMENT_AFTER, FINISH_AGREEMENT_AFTER) if now.optimistic else (0, 0))
        )
        for at, op in enumerate(order):
            unit = self._units[op.bucket]
            if op.kind != "reduce":
                self._parameters.submit_gather(now, unit, op)
            elif reduces:
                for held in unit.trained_buckets:
                    if op.part == 0:
                        self._parameters.submit_release(unit, held.gradient)
                    submit(partial(update.reduce, now, unit, held, held.gradient, op.part, last))
            if last and at == asks:
                submit(partial(update.start_agreement, now))
            if last and at == hears:
                submit(partial(self._finish_agreement, now))
        self._parameters.submit_end_of_pass()
        if last:
            submit(partial(self._end_step, now, update.schedule.add_end_event(now.number, self._comm_thread)))

    def _finish_agreement(self, now: StepState) -> None:
        """On the lane: go by what the ranks have agreed on."""
        if not self._update.finish_agreement(now):
            self._parameters.redo(now)
        now.agreed.record()  # behind that: what arrives from here on is good
        for fresh in now.pending_gathered:
            fresh.record()

    def _end_step(self, now: StepState, ended: StreamEvent) -> None:
        """On the lane."""
        self._parameters.finish_step(now)
        self._update.end_step(now)
        ended.record()

    def grads_ready(self, unit: str) -> None:
        for held in self._update.trained:
            if held.bucket.unit == (unit if unit in self._modules else ""):
                held.accumulate_all()

    def finish_step(self) -> StepOutcome:
        self.mesh.traffic.add(self.traffic.take())
        return self._update.finish_step(self._current_step)

    def take_notices(self) -> list[tuple[str, dict[str, Any]]]:
        return self._update.schedule.take_notices()

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
            self._update.close()
        self.__dict__.pop("_current_step", None)  # which has groups, too

    # ------------------------------------------------------------------------------------------------------------ state

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        self._comm_thread.drain()
        with self._parameters.unshard_all():
            yield {name: parameter.data for name, parameter in self.model.named_parameters()}

    def pieces(self, replicas: bool = False) -> Iterator[StatePiece]:
        """As the interface has it: nothing where another rank holds the same, unless `replicas` are wanted too."""
        self._comm_thread.drain()
        wanted = replicas or self.mesh.rank == self._rank
        return self._state.shards.pieces(self._state.source) if wanted else iter(())

    def load(self, read: ReadState) -> None:
        self._comm_thread.drain()
        self._state.shards.load(self._state.source, read)
        self._parameters.publish_masters()
