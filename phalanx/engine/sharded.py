"""The sharded engine (ZeRO): each rank owns and updates a range of every bucket; communication overlaps computation.

A unit's parameters are views of flat buffers. Once its gradients are complete, they are reduce-scattered to their
owners during the rest of the backward pass; each rank updates its ranges; parameters are all-gathered during the next
forward pass, which waits for each unit before it uses it. One communication thread (comm_thread.py) does all of this in
an order that is the same on every rank, whatever is ready first (comm_schedule.py computes it). Sources: ZeRO
(Rajbhandari et al. 2020) for what is sharded, Megatron-LLaMA's OverlappedDistributedOptimizer for hiding both; unequal
ranges are ours.

This file is the main thread's side. The update on the communication thread is in sharded_update.py; where whole
parameters are, and what passes wait for, in zero1_2.py and zero3.py.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from phalanx.comm.collectives import Traffic
from phalanx.comm.comm_thread import CommThread, StreamEvent
from phalanx.comm.compression import NO_COMPRESSION
from phalanx.comm.mesh import Mesh
from phalanx.comm.uneven_collectives import make_expert_routes, make_routes
from phalanx.engine.bucket import RankBucket, replace_meta_tensors
from phalanx.engine.hooks import ParameterResidency, UnitHooks
from phalanx.engine.interface import InMemoryStore, Precision, StepOutcome
from phalanx.engine.schedule import CollectiveQueue, TransferSchedule, Unit, describe_parameters
from phalanx.engine.sharded_update import GlobalNorm, GradAccumulation, ShardedUpdate, StepState
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.engine.state_slots import OwnedShards, StateSlots
from phalanx.engine.zero1_2 import KeptParameters
from phalanx.engine.zero3 import GatheredParameters
from phalanx.layout import buckets
from phalanx.layout.comm_schedule import PART_BYTES
from phalanx.layout.mesh_axes import EXPERT_COPIES
from phalanx.optim import gradients
from phalanx.optim.update import NO_REPLICAS, Allocator, ReadState, Shard, StatePiece, UpdateRule, allocate_zeros

EVEN_SHARDING = ShardingSpec()
# Early updates: after so many gathers the agreement starts, and must be finished; the link stays busy meanwhile.
START_AGREEMENT_AFTER, FINISH_AGREEMENT_AFTER = 1, 3


class ShardedEngine:
    """The sharded engine. Master parameters and optimizer state exist only for this rank's ranges, in fp32 (or
    fp64)."""

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
        fp8_weights: Collection[str] = (),
        experts: Collection[str] = (),
    ) -> None:
        """`model` is on meta, or has values. `copies`: the number of ranks of `mesh.model` that replicate a parameter,
        by name. `keeper`: the store of in-memory checkpoints. `fp8_weights`: parameters that are only read in FP8 and
        may be gathered so. `experts`: stacks of which only some ranks, an axis of the mesh, hold the same part. Raises
        ConfigError for an impossible sharding."""
        self.model, self.mesh, self.step, self.loss_scale, self.sharding = model, mesh, 0, loss_scale, sharding
        self._precision, degree = precision, sharding.degree or mesh.world
        weights = sharding.shard_weights(mesh.world, mesh.devices.homogeneous)
        by_fp8 = fp8_weights if sharding.gathers_fp8 and degree > 1 else ()
        parameters = describe_parameters(model, units, rule, by_fp8, experts)
        if sharding.compress == "int8":
            buckets.check_whole_rows(parameters)
        self.trainable = {parameter.name: parameter.shape for parameter in parameters if parameter.trained}
        # On a CPU buckets are sent in parts, so that an urgent one waits for one part at most.
        parts, least = (
            sharding.parts if degree > 1 and mesh.devices.on_host else 1,
            PART_BYTES // precision.transport.itemsize,
        )
        self._places = {"data": mesh.rank % degree}  # among the ranks that share parameters, by axis
        if experts:
            self._places[EXPERT_COPIES] = mesh.extra.axes[EXPERT_COPIES].rank
            alike = mesh.axes.copies_with_experts_of(mesh.rank, mesh.world)
            by_axis = {"data": weights, EXPERT_COPIES: sharding.expert_weights(weights, alike)}
            self.buckets = buckets.make_buckets_by_axis(parameters, by_axis, parts, least)
        else:
            self.buckets = buckets.make_buckets(parameters, weights, parts, least, sharding.isolates_parameters)
        self._modules = dict(units)
        self.traffic = Traffic()  # of the communication thread, the only one that waits for it
        self._comm_thread = CommThread(mesh.device, mesh.traffic)
        trained = (bucket for bucket in self.buckets if bucket.trained)
        owned = (each for bucket in trained for each in bucket.fragments(self._places[bucket.axis]))
        shards = OwnedShards(tuple(owned), rule, precision.master, mesh.device)
        self._state = StateSlots(shards, allocate, sharding.slots, keeper)
        zero = torch.zeros((), dtype=precision.master, device=mesh.device)
        self._norm = GlobalNorm(nominal_weight, loss_scale, copies, zero, mesh.world // degree)

    # --------------------------------------------------------------------------------------------------- taking memory

    def initialise(self, fill: Callable[[Shard], None]) -> None:
        mesh, sharding, precision, comm_thread = self.mesh, self.sharding, self._precision, self._comm_thread
        routes = {"data": make_routes(mesh, sharding.degree or mesh.world, self.traffic, sharding.compress)}
        if EXPERT_COPIES in self._places:
            routes[EXPERT_COPIES] = make_expert_routes(mesh, self.traffic)
        residency = GatheredParameters if sharding.zero == 3 else KeptParameters
        # Where parameters are sent in the masters' type, and one slot is in plain memory, the model's range is the
        # master.
        itself = precision.compute == precision.master and sharding.compress == NO_COMPRESSION
        itself &= self._state.is_plain and not residency.releases
        self._state.open(masters=not itself)
        parameters, replaced = dict(self.model.named_parameters()), dict[int, nn.Parameter]()
        pool, helds = residency.make_pool(sharding), list[RankBucket]()
        for bucket in self.buckets:  # one at a time: with ZeRO 3 the whole model never fits at once
            shared = precision, comm_thread, pool, self._state.allocate_working
            held = residency.make_bucket(bucket, self._places[bucket.axis], mesh.device, *shared)
            held.adopt_parameters([parameters[member.parameter.name] for member in bucket.members], replaced)
            for fragment in held.fragments if itself and bucket.trained else ():
                self._state.source[fragment.key]["param"] = held.fragment_values(fragment)
            for shard in held.frozen_shards() if not bucket.trained else self._state.shards_to_fill(held.fragments):
                fill(shard)
            held.reshard()
            helds.append(held)
        replace_meta_tensors(self.model, replaced, mesh.device)
        unit_names = list(dict.fromkeys(held.bucket.unit for held in helds))
        self._units = [
            Unit(number, name, self._modules.get(name, self.model), [h for h in helds if h.bucket.unit == name])
            for number, name in enumerate(unit_names)
        ]
        schedule = TransferSchedule(self._units, mesh, sharding, precision, self.traffic, routes["data"])
        queue = CollectiveQueue(routes, schedule, pool)
        trained = [held for held in helds if held.bucket.trained]
        # On all ranks the same: also experts of which this one holds none.
        names = [name for name, shape in self.trainable.items() if math.prod(shape) or EXPERT_COPIES in routes]
        self._update = ShardedUpdate(
            trained, self._state, self._norm, queue, schedule, mesh, self.traffic, comm_thread, names
        )
        self._parameters: ParameterResidency = residency(
            self.model, self._units, self._update, comm_thread, mesh.traffic, schedule.pass_timer
        )
        self._hooks = UnitHooks(self.model, self._units, self._parameters, comm_thread, schedule.pass_timer)
        self.grad_accumulation = GradAccumulation(trained, schedule.pass_timer)
        self._state.wait_until_ready()
        self._parameters.publish_masters(wait=not self._state.has_state)  # then nothing else may be written there

    def memory_ids(self) -> dict[str, tuple[int, ...]]:
        """Identify the memory of parameters, by name."""
        return {name: held.memory_ids for unit in self._units for held in unit.buckets for name in held.names}

    # ---------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int, weight: int, lr: float, clip: float | None) -> None:
        assert step == self.step + 1, (step, self.step)
        self._comm_thread.raise_error()
        weights = gradients.TotalWeight(weight, self.mesh.control, self.mesh.traffic)
        self._current_step = StepState(step, lr, clip, weights, StreamEvent(self._comm_thread))
        for held in self._update.trained:
            held.begin_step()
        if self.mesh.pipe is not None:  # other stages must not wait for this stage's passes to receive it
            self._comm_thread.submit(self._update.barrier.confirm)

    @contextlib.contextmanager
    def micro_batch(self, last: bool, interleaved: bool = False) -> Iterator[None]:
        """A context around one micro-batch; `interleaved`: passes of several micro-batches mix inside, and
        `self.grad_accumulation` gets the last ones."""
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
            if self._update.queue.pool is None:  # the previous gradient may still be read
                self._parameters.wait_for_gathers()
            for held in reversed(trained):
                held.submit_gradient()  # without a gradient
        self._hooks.end_micro_batch(last)

    def _submit_micro_batch(self, now: StepState, reduces: bool, last: bool) -> None:
        """Submit the transfers of this micro-batch to the communication thread, and after the last one the step's
        end."""
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
        """Continue with what the ranks have agreed on. Runs on the communication thread."""
        if not self._update.finish_agreement(now):
            self._parameters.redo(now)
        now.agreed.record()  # parameters that arrive from here on are valid
        for fresh in now.pending_gathered:
            fresh.record()

    def _end_step(self, now: StepState, ended: StreamEvent) -> None:
        """End a step. Runs on the communication thread."""
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
        self.__dict__.pop("_current_step", None)  # it has process groups, too

    # ------------------------------------------------------------------------------------------------------------ state

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        self._comm_thread.drain()
        with self._parameters.unshard_all():
            yield {name: parameter.data for name, parameter in self.model.named_parameters()}

    def pieces(self, replicas: bool = False) -> Iterator[StatePiece]:
        """This rank's state (see `Engine.pieces`), without shards that another rank also has, unless `replicas` are
        requested."""
        self._comm_thread.drain()
        wanted = replicas or self.mesh.rank == self._places["data"]
        return self._state.shards.pieces(self._state.source) if wanted else iter(())

    def load(self, read: ReadState) -> None:
        self._comm_thread.drain()
        self._state.shards.load(self._state.source, read)
        self._parameters.publish_masters()
