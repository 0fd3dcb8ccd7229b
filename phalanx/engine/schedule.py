"""The orders of transfers by step, guessed at first, then made of what all ranks have measured; and their queue.

Every rank makes them itself, of numbers that a sum or a maximum over the ranks gave to all of them alike. An order
holds from the second step on after that in which it was made, since another rank may have begun the next one by then.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
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
from phalanx.layout.buckets import BucketPart, ParameterSpec
from phalanx.layout.comm_simulation import TransferOp
from phalanx.optim.update import UpdateRule

# --------------------------------------------------------------------------------------------------------------- units
# A model's units as an engine sees them: which parameters each uses, and the buckets that it has on this rank.


class Unit:
    """A unit with its buckets on this rank."""

    def __init__(self, number: int, name: str, module: nn.Module, buckets: Sequence[RankBucket]) -> None:
        """`name` is "" for the model itself, which holds what no unit has for itself."""
        self.number, self.name, self.module, self.buckets = number, name, module, list(buckets)
        self.trained_buckets = [held for held in self.buckets if held.bucket.trained]
        self.parts = len(self.buckets[0].bucket.parts) if self.buckets else 1
        self.elements = sum(held.bucket.elements for held in self.buckets)
        self.bytes = sum(held.values.untyped_storage().nbytes() for held in self.buckets)


def describe_parameters(
    model: nn.Module, units: Sequence[tuple[str, nn.Module]], rule: UpdateRule
) -> list[ParameterSpec]:
    """The parameters of a model in order of use, each with the unit that uses it; what several units use, or none, is
    the model's own, and comes first."""
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
        rows = trained and rule.needs_whole_rows(shape)
        found.append(ParameterSpec(name, shape, unit, str(parameter.dtype), trained, rows))
    return sorted(found, key=lambda parameter: order.get(parameter.unit, 0))


# -------------------------------------------------------------------------------------------------- the orders by step

NO_GAIN = "rounds weights but makes nothing faster here, since all ranks are on one node"
MIN_REPORTED_SHARE = 0.02  # of the time computed, in transfers


class TransferSchedule:
    """Which orders hold for which step; `pass_timer` clocks this rank's passes."""

    def __init__(
        self, units: Sequence[Unit], mesh: Mesh, sharding: ShardingSpec, precision: Precision, traffic: Traffic,
        routes: Routes,
    ) -> None:  # fmt: skip
        self._units, self._mesh, self._sharding = list(units), mesh, sharding
        self._parts = parts = units[0].parts if units else 1
        self._precision, self._traffic, self._routes = precision, traffic, routes
        self._has_root = bool(units) and not units[0].name
        # Alone there is nothing to move. Devices send each bucket whole: only where gradients are not all there before
        # the first parameters leave can they do so in several orders.
        several = sharding.slots > 1 or sharding.zero == 3
        self._link_timer = (
            LinkTimer(len(self._units), mesh.device) if mesh.world > 1 and (mesh.devices.on_host or several) else None
        )
        # Events of a device are not made where nobody asks for its times.
        on_device = mesh.device.type != "cpu" and self._link_timer is not None
        self.pass_timer: PassTimer = (
            DevicePassTimer(len(self._units), mesh.device)
            if on_device
            else HostPassTimer(len(self._units), mesh.traffic)
        )
        # By the first step that they hold for.
        self._orders = {
            1: plan_schedules(guess_timings([unit.elements for unit in units], parts), sharding, self._has_root)
        }
        self._end_events: dict[int, StreamEvent] = {}
        self._notices: deque[tuple[str, dict[str, Any]]] = deque()  # the lane appends while others take
        if sharding.compress != NO_COMPRESSION and len(mesh.topology.nodes) == 1:
            self._notices.append((EventKind.WARNING, {"message": f"compress: {sharding.compress} {NO_GAIN}"}))

    # ------------------------------------------------------------------------------------------------- the main thread

    def orders_for(self, step: int) -> CommSchedules:
        """The orders of a step. Waits until the lane is through with the second step before, as it is as a rule."""
        if (before := self._end_events.pop(step - 2, None)) is not None:
            before.wait(self._mesh.traffic)
        known = [first for first in self._orders if first <= step]
        return self._orders[max(known) if known else min(self._orders)]  # none: a user has gone back to an old step

    def forward_order(self) -> tuple[TransferOp, ...]:
        """The order of a forward pass alone, whatever was measured."""
        return next(iter(self._orders.values())).forward

    def add_end_event(self, step: int, comm_thread: CommThread) -> StreamEvent:
        """To be set when the lane is through with a step, and has made what orders that step calls for."""
        self._end_events[step] = StreamEvent(comm_thread)
        return self._end_events[step]

    def take_notices(self) -> list[tuple[str, dict[str, Any]]]:
        """Events of orders that were made since the last call."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    # -------------------------------------------------------------------------------------------------------- the lane

    def record_time(self) -> Any:
        """Where the lane is now; for the next two."""
        return self._link_timer.record_time() if self._link_timer is not None else None

    def record_transfer(self, size: float, begun: Any) -> None:
        """A transfer has ended; as for `LinkTimer.record_transfer`."""
        if self._link_timer is not None:
            self._link_timer.record_transfer(size, begun)

    def record_update(self, unit: int, begun: Any) -> None:
        """The lane has updated a unit; as for `LinkTimer.record_update`."""
        if self._link_timer is not None:
            self._link_timer.record_update(unit, begun)

    def local_rates(self) -> list[float]:
        """A rank's part of the table of all ranks' rates in this step, which adds up to it. The device must be through
        with the step's sums."""
        mine = [0.0] * self._mesh.world
        mine[self._mesh.rank] = self._link_timer.measure_rate() if self._link_timer is not None else 0.0
        return mine

    def observe_rates(self, rates: Sequence[float]) -> bool:
        """Take in that table; whether other orders are due."""
        return self._link_timer is not None and self._link_timer.observe_rates(rates)

    def make_orders(self, step: int) -> None:
        """Make the orders that hold from `step` on, of what the slowest rank takes. Collective."""
        assert self._link_timer is not None
        # Who came last has waited for nobody, so of restarts the shortest counts.
        mine = [*self.pass_timer.median_seconds(), *self._link_timer.update_seconds(), -self._link_timer.restart_s()]
        table = torch.tensor(mine, dtype=torch.float64)
        all_reduce(table, self._mesh.agreement, self._traffic, dist.ReduceOp.MAX).wait()
        *slowest, minus_restart_s = table.tolist()
        passes_s, updates_s = slowest[: -len(self._units)], slowest[-len(self._units) :]
        wide, shared = (
            self._routes.reduce_bytes(self._precision.master),
            self._routes.gather_bytes(self._precision.transport),
        )
        sent = []
        for unit in self._units:
            trained = sum(held.bucket.link_elements for held in unit.trained_buckets)
            frozen = (
                sum(held.bucket.link_elements for held in unit.buckets) - trained if self._sharding.zero == 3 else 0
            )
            sent.append((wide * trained, shared * trained + self._precision.transport.itemsize * frozen))
        work, rate = self._link_timer.make_timings(passes_s, updates_s, -minus_restart_s, sent, self._parts)
        last = max(self._orders)  # holds until then
        self._orders = {last: self._orders[last], step: plan_schedules(work, self._sharding, self._has_root)}
        moves_s = sum(work.reduce_s) + sum(work.gather_s)
        known = network_rate(rate, self._mesh.topology, self._sharding)
        told = {"step": step, "bytes_per_s": known, "compute_s": work.compute_s, "transfers_s": moves_s}
        # A link so fast is noise, whatever its rate, and on one node there is none.
        if len(self._mesh.topology.nodes) > 1 and moves_s > MIN_REPORTED_SHARE * work.compute_s:
            self._notices.append((EventKind.COMM_SCHEDULE_CHANGED, told))


def network_rate(rate: float, topology: Topology, sharding: ShardingSpec) -> float | None:
    """`rate`, bytes per second of the transfers, where it is that of the network between the nodes.

    Ranks that share a node carry some of their bytes within it, copies of the state are apart, and parameters that are
    gathered for each pass wait for the passes: there it is the rate of something else.
    """
    one_copy = sharding.degree in (None, len(topology.node_of))
    return rate if topology.form == "ring" and one_copy and sharding.zero < 3 else None


# ---------------------------------------------------------------------------------------------------- collective queue
# What the lane does with parts of buckets: sum them to their owners, or gather them from there, two at a time.


class CollectiveQueue:
    """Transfers in the order of the calls; all calls come from the lane."""

    def __init__(self, routes: Routes, schedule: TransferSchedule, pool: GradientBufferPool | None) -> None:
        self.routes, self._schedule, self.pool = routes, schedule, pool
        self._under_way: tuple[PendingTransfer, Callable[[], None]] | None = None
        self._summing = False  # what is under way, if anything is, is a sum

    def reduce(self, bucket: RankBucket, gradient: BucketGradient, number: int, on_done: Callable[[], None]) -> None:
        """Wait for a gradient and begin to sum part `number` of it; `on_done`, when the sum is there."""
        self.wait(gradient.ready)
        buffer, into, summed = bucket.prepare_reduce(gradient, number)

        def arrived() -> None:
            if self.routes.sum_over_replicas is not None and into.numel():
                self.routes.sum_over_replicas(into)
            summed()
            on_done()

        part = bucket.bucket.parts[number]
        start = functools.partial(self.routes.trained.reduce_scatter, buffer, part.cuts, into)
        self._begin(part, self.routes.reduce_bytes(buffer.dtype), start, arrived)
        self._summing = True

    def gather(self, buckets: Sequence[RankBucket], number: int, on_done: Callable[[], None]) -> None:
        """Begin to gather part `number` of some buckets; `on_done`, when the last has arrived."""
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
        trained = held.bucket.trained
        moves, size = self.routes.trained if trained else self.routes.frozen, self.routes.gather_bytes(tensor.dtype)
        start = functools.partial(moves.all_gather, tensor, part.cuts)
        self._begin(part, size if trained else tensor.element_size(), start, both)
        self._summing = False

    def _begin(
        self, part: BucketPart, item_bytes: float, start: Callable[[], PendingTransfer], then: Callable[[], None]
    ) -> None:
        """Start a transfer, then finish the one before: so the link is busy between the two."""
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
        """Finish what is under way."""
        if self._under_way is not None:
            (moving, then), self._under_way = self._under_way, None
            moving.wait()
            then()

    def flush_reduce(self) -> None:
        """Finish what is under way if it is a sum, as those before it are finished."""
        if self._summing:
            self.flush()

    def wait(self, event: StreamEvent) -> None:
        """Wait for the main thread; it must not wait for the lane meanwhile.

        Also where the main thread has already passed the mark: its device may still have to get there.
        """
        if not event.is_recorded:
            self.flush()
        with contextlib.nullcontext() if self.pool is None else self.pool.report_blocked_thread(event):
            event.wait()
