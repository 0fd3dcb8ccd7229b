"""The sharding of a model's state, and the order of its transfers; the same on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.comm.compression import NO_COMPRESSION
from phalanx.core.errors import ConfigError
from phalanx.layout.balance import in_lockstep
from phalanx.layout.comm_schedule import PARTS, StepTimings, plan_order
from phalanx.layout.comm_schedule_zero3 import plan_zero3
from phalanx.layout.comm_simulation import TransferOp
from phalanx.layout.memory_model import PREFETCH


@dataclass(frozen=True)
class ShardingSpec:
    """How the state is sharded, and when gradients and parameters are transferred.

    `weights`: each rank's share of every bucket (None: equal shares). `reduce`: per_step accumulates the micro-batches'
    gradients locally; per_micro_batch reduces each. `slots`: 2 keeps the previous step's state, so that a unit may be
    updated before the global norm is known, and restored if that was wrong. `parts`: the most operations that a
    transfer is cut into. `degree`: the number of neighbouring ranks that one copy of the state is sharded over, whose
    `weights` these are (None: all ranks). `compress`: the codec of transfers between nodes and of all gathers ("none":
    uncompressed). `fp8`: products of blocks are in FP8.
    """

    zero: int = 1
    reduce: str = "per_step"
    weights: tuple[float, ...] | None = None
    slots: int = 1
    parts: int = PARTS
    degree: int | None = None
    compress: str = NO_COMPRESSION
    fp8: bool = False

    @property
    def gathers_fp8(self) -> bool:
        """Whether weights that are only read in FP8 are gathered so."""
        return self.fp8 and self.zero == 3 and self.compress == NO_COMPRESSION

    @property
    def lockstep(self) -> bool:
        """Whether all ranks run the same number of micro-batches."""
        return in_lockstep(self.zero, self.reduce)

    @property
    def isolates_parameters(self) -> bool:
        """Whether no two parameters share a quantization block."""
        return self.compress != NO_COMPRESSION

    def shard_weights(self, world: int, homogeneous: bool) -> tuple[float, ...]:
        """The shares of the ranks that hold one copy of the state, for `world` ranks on devices that are `homogeneous`
        or not. Raises ConfigError for an impossible sharding."""
        degree = self.degree or world
        weights = self.weights or (1.0,) * degree
        if world % degree:
            raise ConfigError(
                f"a copy of the state cannot be sharded over {degree} ranks each, since there are {world}; choose a "
                "shard_degree that divides their number"
            )
        if degree < world and not homogeneous:
            raise ConfigError(
                "copies of the state on heterogeneous devices would drift apart, since each updates its own; remove "
                "shard_degree, which shards one copy over all ranks"
            )
        if len(weights) != degree:
            raise ConfigError(
                f"weights has {len(weights)} numbers, but a copy of the state is sharded over {degree} ranks; give "
                "one for each of these, or remove weights"
            )
        return weights

    @staticmethod
    def expert_weights(weights: Sequence[float], copies: Sequence[int]) -> tuple[float, ...]:
        """The shares of the ranks `copies` that hold the same experts, by those of all; equal where these have none."""
        mine = tuple(weights[rank] for rank in copies)
        return mine if any(mine) else (1.0,) * len(mine)


@dataclass(frozen=True)
class CommSchedules:
    """The orders of transfers for one set of measured times. Operations name units by number."""

    early: tuple[TransferOp, ...]
    late: tuple[TransferOp, ...]
    reduces: tuple[TransferOp, ...]  # of a micro-batch that is not the step's last
    forward: tuple[TransferOp, ...]  # of a forward pass without backward, where parameters are resharded

    def select(self, early: bool) -> tuple[TransferOp, ...]:
        """The order of a step's last micro-batch."""
        return self.early if early else self.late


def plan_schedules(timings: StepTimings, sharding: ShardingSpec, has_root: bool) -> CommSchedules:
    """Compute the orders for `timings`, whose first unit is the model itself if it `has_root`; that stays gathered for
    a pass."""
    if sharding.zero == 3:
        return _plan_zero3(timings, has_root)
    alone = replace(timings, micro_batches=1)
    late = plan_order(replace(alone, early=False))
    early = plan_order(replace(alone, early=True)) if sharding.slots > 1 else late
    _check(early)
    _check(late)
    return CommSchedules(early, late, tuple(op for op in late if op.kind == "reduce"), ())


def _check(order: Sequence[TransferOp]) -> None:
    """Check that parts come in turn: the last part marks the end of a transfer."""
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
    """Estimated times before any measurement: proportional to elements, communication as long as computation."""
    sizes = [float(max(1, each)) for each in elements]
    compute, moved = tuple(sizes), tuple(1.5 * size for size in sizes)
    return StepTimings(compute, tuple(2 * size for size in sizes), moved, moved, tuple(0.0 for _ in sizes), parts=parts)
