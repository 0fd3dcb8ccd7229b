"""The schedule of transfers by step: estimated at first, then computed from measurements of all ranks; and its queue.

Every rank computes the schedule itself, from numbers that an all-reduce made the same everywhere. A schedule applies
two steps after the one in which it was computed, since another rank may have begun the next step by then.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm.collectives import Traffic, all_reduce
from phalanx.comm.comm_thread import CommThread, StreamEvent
from phalanx.comm.compression import NO_COMPRESSION
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import Topology
from phalanx.comm.uneven_collectives import PendingTransfer, Routes
from phalanx.core.records import EventKind
from phalanx.engine.bucket import BucketGradient, GradientBufferPool, RankBucket
from phalanx.engine.interface import Precision
from phalanx.engine.sharding_spec import CommSchedules, ShardingSpec, guess_timings, plan_schedules
from phalanx.engine.timing import DevicePassTimer, HostPassTimer, LinkTimer, PassTimer
from phalanx.layout.buckets import FP8_GATHERED, BucketPart, ParameterSpec
from phalanx.layout.comm_simulation import TransferOp
from phalanx.layout.mesh_axes import EXPERT_COPIES
from phalanx.optim.update import UpdateRule

# --------------------------------------------------------------------------------------------------------------- units
# A model's units as an engine sees them: which parameters each uses, and the buckets that it has on this rank.


class Unit:
    """A unit with its buckets on this rank."""

    def __init__(self, number: int, name: str, module: nn.Module, buckets: Sequence[RankBucket]) -> None:
        """`name` is "" for the model itself, which has the parameters outside units."""
        self.number, self.name, self.module, self.buckets = number, name, module, list(buckets)
        self.trained_buckets = [held for held in self.buckets if held.bucket.trained]
        self.parts = len(self.buckets[0].bucket.parts) if self.buckets else 1
        self.elements = sum(held.bucket.elements for held in self.buckets)
        self.bytes = sum(held.values.untyped_storage().nbytes() for held in self.buckets)


def describe_parameters(
    model: nn.Module, units: Sequence[tuple[str, nn.Module]], rule: UpdateRule, gathered_in_fp8: Collection[str] = (),
    experts: Collection[str] = (),
) -> list[ParameterSpec]:  # fmt: skip
    """The parameters of a model in order of use, each with its unit; parameters that several units or none use belong
    to the model itself, and come first. Of `gathered_in_fp8`, those of one unit are. Of `experts` this rank holds some
    only."""
    users: dict[int, set[str]] = {}
    for unit, module in units:
        for parameter in module.parameters():
            users.setdefault(id(parameter), set()).add(unit)
    order = {unit: number for number, (unit, _) in enumerate(units, 1)}
    found = []
    for name, parameter in model.named_parameters():
        used_by = users.get(id(parameter), set())
        shape, trained = tuple(parameter.shape), parameter.requires_grad
        unit = next(iter(used_by)) if len(used_by) == 1 else ""
        dtype = FP8_GATHERED if unit and name in gathered_in_fp8 else str(parameter.dtype)
        axis = EXPERT_COPIES if name in experts else "data"
        spec = ParameterSpec(name, shape, unit, dtype, trained, axis=axis)
        found.append(replace(spec, together=rule.elements_together(spec.update_shape)) if trained else spec)
    return sorted(found, key=lambda parameter: order.get(parameter.unit, 0))


# -------------------------------------------------------------------------------------------------- the orders by step

NO_GAIN = "rounds weights but makes nothing faster here, since all ranks are on one node"
MIN_REPORTED_SHARE = 0.02  # of the time computed, in transfers


class TransferSchedule:
    """The schedules in use by step; `pass_timer` times this rank's passes."""

    def __init__(
        self, units: Sequence[Unit], mesh: Mesh, sharding: ShardingSpec, precision: Precision, traffic: Traffic,
        routes: Routes,
    ) -> None:  # fmt: skip
        self._units, self._mesh, self._sharding = list(units), mesh, sharding
        self._parts = parts = units[0].parts if units else 1
        self._precision, self._traffic, self._routes = precision, traffic, routes
        self._has_root = bool(units) and not units[0].name
        # A single rank transfers nothing. Devices send each bucket whole: the order matters only where parameters are
        # gathered before all gradients are complete.
        several = sharding.slots > 1 or sharding.zero == 3
        self._link_timer = (
            LinkTimer(len(self._units), mesh.device) if mesh.world > 1 and (mesh.devices.on_host or several) else None
        )
        # Device events are created only where the times are used.
        on_device = mesh.device.type != "cpu" and self._link_timer is not None
        self.pass_timer: PassTimer = (
            DevicePassTimer(len(self._units), mesh.device)
            if on_device
            else HostPassTimer(len(self._units), mesh.traffic)
        )
        # By the first step that they apply to.
        elements = [int(each) for each in self._find_largest([unit.elements for unit in units])]
        self._orders = {1: plan_schedules(guess_timings(elements, parts), sharding, self._has_root)}
        self._end_events: dict[int, StreamEvent] = {}
        self._notices: deque[tuple[str, dict[str, Any]]] = deque()  # the communication thread appends while others read
        if sharding.compress != NO_COMPRESSION and len(mesh.topology.nodes) == 1:
            self._notices.append((EventKind.WARNING, {"message": f"compress: {sharding.compress} {NO_GAIN}"}))

    # ------------------------------------------------------------------------------------------------- the main thread

    def orders_for(self, step: int) -> CommSchedules:
        """The schedules of a step. Waits until the communication thread has finished the step before the previous
        one."""
        if (before := self._end_events.pop(step - 2, None)) is not None:
            before.wait(self._mesh.traffic)
        known = [first for first in self._orders if first <= step]
        return self._orders[max(known) if known else min(self._orders)]  # after a user's return to an old step

    def forward_order(self) -> tuple[TransferOp, ...]:
        """The order of a forward pass without a backward pass, independent of measurements."""
        return next(iter(self._orders.values())).forward

    def add_end_event(self, step: int, comm_thread: CommThread) -> StreamEvent:
        """Add the event of a step's end, to be set when the communication thread has finished the step and its
        schedule."""
        self._end_events[step] = StreamEvent(comm_thread)
        return self._end_events[step]

    def take_notices(self) -> list[tuple[str, dict[str, Any]]]:
        """Events about new schedules since the last call."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    # ------------------------------------------------------------------------------------------ communication thread

    def record_time(self) -> Any:
        """The current time of the communication thread, for `record_transfer` and `record_update`."""
        return self._link_timer.record_time() if self._link_timer is not None else None

    def record_transfer(self, size: float, begun: Any) -> None:
        """Record a finished transfer; see `LinkTimer.record_transfer`."""
        if self._link_timer is not None:
            self._link_timer.record_transfer(size, begun)

    def record_update(self, unit: int, begun: Any) -> None:
        """Record the update of a unit; see `LinkTimer.record_update`."""
        if self._link_timer is not None:
            self._link_timer.record_update(unit, begun)

    def local_rates(self) -> list[float]:
        """This rank's summand of the table of all ranks' link rates in this step. The device must have finished the
        step's reductions."""
        mine = [0.0] * self._mesh.world
        mine[self._mesh.rank] = self._link_timer.measure_rate() if self._link_timer is not None else 0.0
        return mine

    def observe_rates(self, rates: Sequence[float]) -> bool:
        """Record the table of rates; returns whether a new schedule is due."""
        return self._link_timer is not None and self._link_timer.observe_rates(rates)

    def _gather_bytes(self, held: RankBucket) -> float:
        """Bytes that some link must carry to gather a bucket."""
        kind = held.gathered_dtype
        return held.bucket.link_elements * (self._routes.gather_bytes(kind) if held.bucket.trained else kind.itemsize)

    def _find_largest(self, sizes: Sequence[float]) -> list[float]:
        """The greatest of each size over all ranks, which differ where ranks hold different numbers of experts.
        Collective there."""
        return list(sizes) if self._mesh.expert is None else self._max(sizes)

    def _max(self, mine: Sequence[float]) -> list[float]:
        """The greatest of each number over all ranks. Collective."""
        table = torch.tensor(mine, dtype=torch.float64)
        all_reduce(table, self._mesh.agreement, self._traffic, dist.ReduceOp.MAX).wait()
        found: list[float] = table.tolist()
        return found

    def make_orders(self, step: int) -> None:
        """Compute the schedules from `step` on, from the times of the slowest rank. Collective."""
        assert self._link_timer is not None
        # The last rank to arrive has not waited, so the shortest restart counts.
        mine = [*self.pass_timer.median_seconds(), *self._link_timer.update_seconds(), -self._link_timer.restart_s()]
        *slowest, minus_restart_s = self._max(mine)
        passes_s, updates_s = slowest[: -len(self._units)], slowest[-len(self._units) :]
        wide = self._routes.reduce_bytes(self._precision.master)
        sent = []
        for unit in self._units:
            trained = sum(held.bucket.link_elements for held in unit.trained_buckets)
            gathered = unit.buckets if self._sharding.zero == 3 else unit.trained_buckets
            sent += [wide * trained, sum(self._gather_bytes(held) for held in gathered)]
        most = self._find_largest(sent)
        sent_by_unit = list(zip(most[::2], most[1::2], strict=True))
        work, rate = self._link_timer.make_timings(passes_s, updates_s, -minus_restart_s, sent_by_unit, self._parts)
        last = max(self._orders)  # holds until then
        self._orders = {last: self._orders[last], step: plan_schedules(work, self._sharding, self._has_root)}
        moves_s = sum(work.reduce_s) + sum(work.gather_s)
        known = network_rate(rate, self._mesh.topology, self._sharding)
        told = {"step": step, "bytes_per_s": known, "compute_s": work.compute_s, "transfers_s": moves_s}
        # The time of so fast a link is noise, and on one node there is no link.
        if len(self._mesh.topology.nodes) > 1 and moves_s > MIN_REPORTED_SHARE * work.compute_s:
            self._notices.append((EventKind.COMM_SCHEDULE_CHANGED, told))


def network_rate(rate: float, topology: Topology, sharding: ShardingSpec) -> float | None:
    """The rate of the network between nodes: `rate`, bytes per second of the transfers, or None where it measures more.

    Ranks on one node exchange some bytes within it, copies of the state communicate separately, and parameters that are
    gathered for each pass wait for the passes: there it is not the network's rate.
    """
    one_copy = sharding.degree in (None, len(topology.node_of))
    return rate if topology.form == "ring" and one_copy and sharding.zero < 3 else None


# ---------------------------------------------------------------------------------------------------- collective queue
# Reduce-scatter and all-gather of parts of buckets, at most two in flight.


class CollectiveQueue:
    """A queue of collectives, run in the order of the calls; all calls come from the communication thread. `routes` are
    those of buckets by their axis."""

    def __init__(
        self, routes: Mapping[str, Routes], schedule: TransferSchedule, pool: GradientBufferPool | None
    ) -> None:
        self.routes, self._schedule, self.pool = routes, schedule, pool
        self._under_way: tuple[PendingTransfer, Callable[[], None]] | None = None
        self._summing = False  # the transfer in flight, if any, is a reduction

    def reduce(self, bucket: RankBucket, gradient: BucketGradient, number: int, on_done: Callable[[], None]) -> None:
        """Wait for a gradient and start to reduce part `number` of it; `on_done` is called when the sum has arrived."""
        self.wait(gradient.ready)
        buffer, into, summed = bucket.prepare_reduce(gradient, number)
        routes = self.routes[bucket.bucket.axis]

        def arrived() -> None:
            if routes.sum_over_replicas is not None and into.numel():
                routes.sum_over_replicas(into)
            summed()
            on_done()

        part = bucket.bucket.parts[number]
        start = functools.partial(routes.trained.reduce_scatter, buffer, part.cuts, into)
        self._begin(part, routes.reduce_bytes(buffer.dtype), start, arrived)
        self._summing = True

    def gather(self, buckets: Sequence[RankBucket], number: int, on_done: Callable[[], None]) -> None:
        """Start to gather part `number` of some buckets; `on_done` is called when the last has arrived."""
        for held in buckets[:-1]:
            self._gather(held, number, lambda: None)
        if buckets:
            self._gather(buckets[-1], number, on_done)
        else:
            on_done()

    def _gather(self, held: RankBucket, number: int, then: Callable[[], None]) -> None:
        tensor, arrived = held.prepare_gather(number)

        def both() -> None:
            arrived()
            then()

        part = held.bucket.parts[number]
        trained, routes = held.bucket.trained, self.routes[held.bucket.axis]
        moves, size = routes.trained if trained else routes.frozen, routes.gather_bytes(tensor.dtype)
        start = functools.partial(moves.all_gather, tensor, part.cuts)
        self._begin(part, size if trained else tensor.element_size(), start, both)
        self._summing = False

    def _begin(
        self, part: BucketPart, item_bytes: float, start: Callable[[], PendingTransfer], then: Callable[[], None]
    ) -> None:
        """Start a transfer, then finish the previous one, so that the link stays busy."""
        if not part.elements:
            self.flush()
            then()
            return
        begun, moving = self._schedule.record_time(), start()
        self.flush()

        def ended() -> None:
            self._schedule.record_transfer(part.link_elements * item_bytes, begun)
            then()

        self._under_way = (moving, ended)

    def flush(self) -> None:
        """Finish the transfer in flight."""
        if self._under_way is not None:
            (moving, then), self._under_way = self._under_way, None
            moving.wait()
            then()

    def flush_reduce(self) -> None:
        """Finish the transfer in flight if it is a reduction."""
        if self._summing:
            self.flush()

    def wait(self, event: StreamEvent) -> None:
        """Wait for the main thread, which must not wait for the communication thread meanwhile.

        Also needed where the main thread has already recorded the event: its device may not have reached it.
        """
        if not event.is_recorded:
            self.flush()
        with contextlib.nullcontext() if self.pool is None else self.pool.report_blocked_thread(event):
            event.wait()
