"""The orders of transfers by step: guessed at first, then made of what all ranks have measured.

Every rank makes them itself, of numbers that a sum or a maximum over the ranks gave to all of them alike. An order
holds from the second step on after that in which it was made, since another rank may have begun the next one by then.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.codec import PLAIN
from phalanx.comm.collectives import Traffic, all_reduce
from phalanx.comm.comm_thread import Lane, Mark
from phalanx.comm.mesh import Mesh
from phalanx.comm.routes import Ways
from phalanx.comm.topology import Topology
from phalanx.core.events import Kind
from phalanx.engine.interface import Precision
from phalanx.engine.sharding_spec import Orders, Sharding, guess, orders
from phalanx.engine.timing import DeviceLaps, HostLaps, Laps, Pacing
from phalanx.engine.units import Unit

NOTHING_SAVED = "rounds weights but makes nothing faster here, since all ranks are on one node"
WORTH_TELLING = 0.02  # of the time computed, in transfers


class Timetable:
    """Which orders hold for which step; `laps` clocks this rank's passes."""

    def __init__(
        self, units: Sequence[Unit], mesh: Mesh, sharding: Sharding, parts: int, precision: Precision, traffic: Traffic,
        ways: Ways,
    ) -> None:  # fmt: skip
        self._units, self._mesh, self._sharding, self._parts = list(units), mesh, sharding, parts
        self._precision, self._traffic, self._ways = precision, traffic, ways
        self._has_root = bool(units) and not units[0].name
        # Alone there is nothing to move. Devices send each bucket whole: only where gradients are not all there before
        # the first parameters leave can they do so in several orders.
        several = sharding.slots > 1 or sharding.zero == 3
        self._pacing = Pacing(len(self._units), mesh.device) if mesh.world > 1 and (mesh.on_host or several) else None
        # Events of a device are not made where nobody asks for its times.
        on_device = mesh.device.type != "cpu" and self._pacing is not None
        self.laps: Laps = (
            DeviceLaps(len(self._units), mesh.device) if on_device else HostLaps(len(self._units), mesh.traffic)
        )
        # By the first step that they hold for.
        self._orders = {1: orders(guess([unit.elements for unit in units], parts), sharding, self._has_root)}
        self._ended: dict[int, Mark] = {}
        self._notices: deque[tuple[str, dict[str, Any]]] = deque()  # the lane appends while others take
        if sharding.compress != PLAIN and len(mesh.topology.nodes) == 1:
            self._notices.append((Kind.WARNING, {"message": f"compress: {sharding.compress} {NOTHING_SAVED}"}))

    # ------------------------------------------------------------------------------------------------- the main thread

    def of(self, step: int) -> Orders:
        """The orders of a step. Waits until the lane is through with the second step before, as it is as a rule."""
        if (before := self._ended.pop(step - 2, None)) is not None:
            before.wait(self._mesh.traffic)
        known = [first for first in self._orders if first <= step]
        return self._orders[max(known) if known else min(self._orders)]  # none: a user has gone back to an old step

    def expect(self, step: int, lane: Lane) -> Mark:
        """To be set when the lane is through with a step, and has made what orders that step calls for."""
        self._ended[step] = Mark(lane)
        return self._ended[step]

    def notices(self) -> list[tuple[str, dict[str, Any]]]:
        """Events of orders that were made since the last call."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    # -------------------------------------------------------------------------------------------------------- the lane

    def mark(self) -> Any:
        """Where the lane is now; for the next two."""
        return self._pacing.mark() if self._pacing is not None else None

    def moved(self, size: float, begun: Any) -> None:
        """A transfer has ended; as for `Pacing.moved`."""
        if self._pacing is not None:
            self._pacing.moved(size, begun)

    def updated(self, unit: int, begun: Any) -> None:
        """The lane has updated a unit; as for `Pacing.updated`."""
        if self._pacing is not None:
            self._pacing.updated(unit, begun)

    def rates(self) -> list[float]:
        """A rank's part of the table of all ranks' rates in this step, which adds up to it. The device must be through
        with the step's sums."""
        mine = [0.0] * self._mesh.world
        mine[self._mesh.rank] = self._pacing.rate() if self._pacing is not None else 0.0
        return mine

    def told(self, rates: Sequence[float]) -> bool:
        """Take in that table; whether other orders are due."""
        return self._pacing is not None and self._pacing.told(rates)

    def make(self, step: int) -> None:
        """Make the orders that hold from `step` on, of what the slowest rank takes. Collective."""
        assert self._pacing is not None
        # Who came last has waited for nobody, so of restarts the shortest counts.
        mine = [*self.laps.table(), *self._pacing.updates(), -self._pacing.restart_s()]
        table = torch.tensor(mine, dtype=torch.float64)
        all_reduce(table, self._mesh.agreement, self._traffic, dist.ReduceOp.MAX).wait()
        *slowest, minus_restart_s = table.tolist()
        passes_s, updates_s = slowest[: -len(self._units)], slowest[-len(self._units) :]
        wide, shared = self._ways.reduced(self._precision.master), self._ways.gathered(self._precision.shared)
        sent = []
        for unit in self._units:
            trained = sum(held.bucket.carried for held in unit.trained)
            frozen = sum(held.bucket.carried for held in unit.helds) - trained if self._sharding.zero == 3 else 0
            sent.append((wide * trained, shared * trained + self._precision.shared.itemsize * frozen))
        work, rate = self._pacing.work(passes_s, updates_s, -minus_restart_s, sent, self._parts)
        last = max(self._orders)  # holds until then
        self._orders = {last: self._orders[last], step: orders(work, self._sharding, self._has_root)}
        moves_s = sum(work.reduce_s) + sum(work.gather_s)
        known = link_rate(rate, self._mesh.topology, self._sharding)
        told = {"step": step, "bytes_per_s": known, "compute_s": work.compute_s, "transfers_s": moves_s}
        # A link so fast is noise, whatever its rate, and on one node there is none.
        if len(self._mesh.topology.nodes) > 1 and moves_s > WORTH_TELLING * work.compute_s:
            self._notices.append((Kind.ORDERED, told))


def link_rate(rate: float, topology: Topology, sharding: Sharding) -> float | None:
    """`rate`, bytes per second of the transfers, where it is that of the network between the nodes.

    Ranks that share a node carry some of their bytes within it, copies of the state are apart, and parameters that are
    gathered for each pass wait for the passes: there it is the rate of something else.
    """
    one_copy = sharding.degree in (None, len(topology.node_of))
    return rate if topology.form == "ring" and one_copy and sharding.zero < 3 else None
