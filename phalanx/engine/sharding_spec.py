"""What is sharded, and the order in which a rank's lane moves it; the same on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.comm.codec import NO_COMPRESSION
from phalanx.core.errors import ConfigError
from phalanx.layout.balance import in_lockstep
from phalanx.layout.comm_schedule import StepTimings, plan_order
from phalanx.layout.comm_schedule_zero3 import plan_zero3
from phalanx.layout.comm_simulation import TransferOp

PREFETCH = 1  # units that are gathered ahead of the one that computes, where parameters are released
PARTS = 4  # operations that a bucket's transfer is cut into, so that an urgent one waits for a part at the most
PART_BYTES = 2**18  # a shorter part would be latency more than transfer


@dataclass(frozen=True)
class ShardingSpec:
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
    compress: str = NO_COMPRESSION

    @property
    def lockstep(self) -> bool:
        """Whether all ranks run as many micro-batches."""
        return in_lockstep(self.zero, self.reduce)

    @property
    def isolates_parameters(self) -> bool:
        """Whether no two parameters share what is rounded together."""
        return self.compress != NO_COMPRESSION

    def shard_weights(self, world: int, homogeneous: bool) -> tuple[float, ...]:
        """How much each of the ranks holds that keep a copy together, of `world` whose devices are `homogeneous` or
        not. Raises ConfigError for shards that there cannot be."""
        degree = self.degree or world
        weights = self.weights or (1.0,) * degree
        if world % degree:
            raise ConfigError(
                f"a copy of the state cannot be sharded over {degree} ranks each, since there are {world}; choose a "
                "shard_degree that divides their number"
            )
        if degree < world and not homogeneous:
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
class CommSchedules:
    """The orders for one set of measured times. Operations name units by number."""

    early: tuple[TransferOp, ...]
    late: tuple[TransferOp, ...]
    reduces: tuple[TransferOp, ...]  # of a micro-batch whose step goes on
    forward: tuple[TransferOp, ...]  # of a forward pass alone, where parameters are released

    def select(self, early: bool) -> tuple[TransferOp, ...]:
        """The order of a step's last micro-batch."""
        return self.early if early else self.late


def plan_schedules(timings: StepTimings, sharding: ShardingSpec, has_root: bool) -> CommSchedules:
    """The orders for `timings`, whose first unit is the model itself if it `has_root`: that stays whole for a pass."""
    if sharding.zero == 3:
        return _plan_zero3(timings, has_root)
    alone = replace(timings, micro_batches=1)
    late = plan_order(replace(alone, early=False))
    early = plan_order(replace(alone, early=True)) if sharding.slots > 1 else late
    _check(early)
    _check(late)
    return CommSchedules(early, late, tuple(op for op in late if op.kind == "reduce"), ())


def _check(order: Sequence[TransferOp]) -> None:
    """By the last part of a transfer its end is known, so parts must come in turn."""
    seen: dict[tuple[str, int], int] = {}
    for op in order:
        assert seen.get((op.kind, op.bucket), -1) < op.part, op
        seen[op.kind, op.bucket] = op.part


def _plan_zero3(timings: StepTimings, has_root: bool) -> CommSchedules:
    first = int(has_root)
    root_gathers = tuple(TransferOp("gather", 0, part) for part in range(timings.parts * first))
    root_reduces = tuple(TransferOp("reduce", 0, part) for part in range(timings.parts * first))
    units = range(first, timings.buckets)
    inner: tuple[TransferOp, ...] = ()
    if units:
        inner_work = StepTimings(
            forward_s=timings.forward_s[first:],
            backward_s=timings.backward_s[first:],
            reduce_s=timings.reduce_s[first:],
            gather_s=timings.gather_s[first:],
            update_s=timings.update_s[first:],
            reduce="per_micro_batch",
            parts=timings.parts,
            agreement_s=timings.agreement_s,
        )
        inner = tuple(replace(op, bucket=op.bucket + first) for op in plan_zero3(inner_work, PREFETCH))
    whole = (*root_gathers, *inner, *root_reduces)
    forward = (*root_gathers, *(TransferOp("gather", unit, part) for unit in units for part in range(timings.parts)))
    return CommSchedules(whole, whole, whole, forward)


def guess_timings(elements: Sequence[int], parts: int) -> StepTimings:
    """Times as long as nothing was measured: in proportion to elements, communication as long as computation."""
    sizes = [float(max(1, each)) for each in elements]
    compute, moved = tuple(sizes), tuple(1.5 * size for size in sizes)
    return StepTimings(compute, tuple(2 * size for size in sizes), moved, moved, tuple(0.0 for _ in sizes), parts=parts)
