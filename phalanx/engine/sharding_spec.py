"""What is sharded, and the order in which a rank's lane moves it; the same on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.comm.codec import PLAIN
from phalanx.core.errors import ConfigError
from phalanx.layout.balance import in_lockstep
from phalanx.layout.comm_schedule import Work, plan
from phalanx.layout.comm_schedule_zero3 import plan_zero3
from phalanx.layout.comm_simulation import Op

PREFETCH = 1  # units that are gathered ahead of the one that computes, where parameters are released
PARTS = 4  # operations that a bucket's transfer is cut into, so that an urgent one waits for a part at the most
PART_BYTES = 2**18  # a shorter part would be latency more than transfer


@dataclass(frozen=True)
class Sharding:
    """What is sharded, and when it travels.

    `weights`: how much of each bucket each rank owns (None: all the same). `reduce`: per_step sums the micro-batches'
    gradients on each rank first; per_micro_batch sends them each time. `slots`: 2 keeps the state of the step before,
    so that a unit may be updated before the whole gradient is known, and put back if that was wrong. `parts`: how many
    operations a transfer is cut into at the most. `degree`: over so many neighbouring ranks a copy of the state is
    sharded, and `weights` are theirs (None: over all ranks). `compress`: by which codec what crosses nodes is sent, and
    all that is gathered ("none": as it is).
    """

    zero: int = 1
    reduce: str = "per_step"
    weights: tuple[float, ...] | None = None
    slots: int = 1
    parts: int = PARTS
    degree: int | None = None
    compress: str = PLAIN

    @property
    def lockstep(self) -> bool:
        """Whether all ranks run as many micro-batches."""
        return in_lockstep(self.zero, self.reduce)

    @property
    def apart(self) -> bool:
        """Whether no two parameters share what is rounded together."""
        return self.compress != PLAIN

    def weights_over(self, world: int, alike: bool) -> tuple[float, ...]:
        """How much each of the ranks holds that keep a copy together, of `world` whose devices are `alike` or not.
        Raises ConfigError for shards that there cannot be."""
        degree = self.degree or world
        weights = self.weights or (1.0,) * degree
        if world % degree:
            raise ConfigError(
                f"a copy of the state cannot be sharded over {degree} ranks each, since there are {world}; choose a "
                "shard_degree that divides their number"
            )
        if degree < world and not alike:
            raise ConfigError(
                "copies of the state on devices of unlike kinds would drift apart, since each updates its own; leave "
                "shard_degree out, so that there is one copy"
            )
        if len(weights) != degree:
            raise ConfigError(
                f"weights has a number for each of {len(weights)} ranks, but {degree} hold a copy of the state "
                "together; give each of these one, or leave weights out"
            )
        return weights


@dataclass(frozen=True)
class Orders:
    """The orders for one set of measured times. Operations name units by number."""

    early: tuple[Op, ...]
    late: tuple[Op, ...]
    reduces: tuple[Op, ...]  # of a micro-batch whose step goes on
    forward: tuple[Op, ...]  # of a forward pass alone, where parameters are released

    def of(self, early: bool) -> tuple[Op, ...]:
        """The order of a step's last micro-batch."""
        return self.early if early else self.late


def orders(work: Work, sharding: Sharding, has_root: bool) -> Orders:
    """The orders for `work`, whose first unit is the model itself if it `has_root`: that stays whole for a pass."""
    if sharding.zero == 3:
        return _released(work, has_root)
    alone = replace(work, micro_batches=1)
    late = plan(replace(alone, early=False))
    early = plan(replace(alone, early=True)) if sharding.slots > 1 else late
    _check(early)
    _check(late)
    return Orders(early, late, tuple(op for op in late if op.kind == "reduce"), ())


def _check(order: Sequence[Op]) -> None:
    """By the last part of a transfer its end is known, so parts must come in turn."""
    seen: dict[tuple[str, int], int] = {}
    for op in order:
        assert seen.get((op.kind, op.bucket), -1) < op.part, op
        seen[op.kind, op.bucket] = op.part


def _released(work: Work, has_root: bool) -> Orders:
    first = int(has_root)
    root_gathers = tuple(Op("gather", 0, part) for part in range(work.parts * first))
    root_reduces = tuple(Op("reduce", 0, part) for part in range(work.parts * first))
    units = range(first, work.buckets)
    inner: tuple[Op, ...] = ()
    if units:
        inner_work = Work(
            forward_s=work.forward_s[first:],
            backward_s=work.backward_s[first:],
            reduce_s=work.reduce_s[first:],
            gather_s=work.gather_s[first:],
            update_s=work.update_s[first:],
            reduce="per_micro_batch",
            parts=work.parts,
            agree_s=work.agree_s,
        )
        inner = tuple(replace(op, bucket=op.bucket + first) for op in plan_zero3(inner_work, PREFETCH))
    whole = (*root_gathers, *inner, *root_reduces)
    forward = (*root_gathers, *(Op("gather", unit, part) for unit in units for part in range(work.parts)))
    return Orders(whole, whole, (), forward)


def guess(elements: Sequence[int], parts: int) -> Work:
    """Times as long as nothing was measured: in proportion to elements, communication as long as computation."""
    sizes = [float(max(1, each)) for each in elements]
    compute, moved = tuple(sizes), tuple(1.5 * size for size in sizes)
    return Work(compute, tuple(2 * size for size in sizes), moved, moved, tuple(0.0 for _ in sizes), parts=parts)
