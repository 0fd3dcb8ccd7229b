"""What is sharded, and the order in which a rank's lane moves it; the same on all ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.comm.compression import CODECS, NO_COMPRESSION
from phalanx.core.errors import ConfigError
from phalanx.engine.bucket import IN_FLIGHT
from phalanx.engine.interface import Precision
from phalanx.layout.balance import in_lockstep
from phalanx.layout.buckets import Bucket
from phalanx.layout.comm_schedule import StepTimings, plan_order
from phalanx.layout.comm_schedule_zero3 import plan_zero3
from phalanx.layout.comm_simulation import TransferOp
from phalanx.optim.update import UpdateRule

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


# -------------------------------------------------------------------------------------------------------- memory model
# Bytes that the sharded engine holds on a rank besides activations: a formula that tests compare with what is held.


# Of what is held, what is cut into shards of the state; where steps are kept, it lies in the memory of these.
STATE_ITEMS = ("master weights", "optimizer state")


def estimate_engine_bytes(
    buckets: Sequence[Bucket],
    rank: int,
    sharding: ShardingSpec,
    precision: Precision,
    rule: UpdateRule,
    accumulates: bool = False,
) -> dict[str, int]:
    """Bytes by what they hold; `accumulates`: a step has several micro-batches.

    With E elements in all buckets, own of them the rank's, and bytes c of the type computed in and m of the master's:
    zero 1 holds E c of parameters and E m of gradients, zero 2 own m of gradients and a few buckets' on their way, zero
    3 besides that of parameters only two units and the model's own, and one bucket's gradient at that time. Masters are
    own m, and what the rule keeps of own, once for each slot; but where c = m, there is one slot and parameters are
    kept as they are, masters are they.
    """
    compute, shared, master = (kind.itemsize for kind in (precision.compute, precision.transport, precision.master))
    trained = [bucket for bucket in buckets if bucket.trained]
    frozen = [bucket for bucket in buckets if not bucket.trained]
    own = sum(bucket.count_elements(rank) for bucket in trained)
    released = sharding.zero == 3
    if released:
        by_unit: Counter[str] = Counter()
        for bucket in buckets:
            by_unit[bucket.unit] += bucket.elements * compute
        root = by_unit.pop("", 0)
        parameters = root + sum(sorted(by_unit.values(), reverse=True)[: PREFETCH + 1])
        parameters += sum(bucket.count_elements(rank) for bucket in frozen) * shared
    else:
        parameters = sum(bucket.elements for bucket in buckets) * compute
    everything = sum(bucket.elements for bucket in trained)
    if sharding.zero == 1 and sharding.reduce == "per_step":
        sums = everything * master
    elif sharding.reduce == "per_step" and accumulates:
        sums = (own + everything) * master
    else:
        sizes = Counter(bucket.elements for bucket in trained)
        if released:  # one is sent while one unit is whole, or one is filled while two are
            sums = (own + max(sizes, default=0)) * master
        else:
            sums = (own + sum(size * min(count, IN_FLIGHT) for size, count in sizes.items())) * master
    masters_apart = released or sharding.slots > 1 or compute != master or sharding.compress != NO_COMPRESSION
    kept = _rule_state_bytes(trained, rank, master, rule)
    items = {
        "weights in use": parameters,
        "gradients": sums,
        "master weights": own * master * sharding.slots if masters_apart else 0,
        "optimizer state": int(kept) * sharding.slots,
    }
    if shared != compute:
        gathered = buckets if released else trained
        items["weights on their way"] = 2 * max((bucket.elements for bucket in gathered), default=0) * shared
    if sharding.compress != NO_COMPRESSION:
        # Two parts under way: what is sent of each, and what all others send of the own range.
        parts = [part for bucket in trained for part in bucket.parts]
        ranges = (part.range(rank) for part in parts)
        most = max((part.elements for part in parts), default=0)
        own_most = max((stop - start for start, stop in ranges), default=0) * (len(parts[0].cuts) - 2 if parts else 0)
        items["encoded on its way"] = 2 * CODECS[sharding.compress].byte_size(most + own_most)
    return items


def estimate_slot_bytes(
    buckets: Sequence[Bucket], rank: int, precision: Precision, rule: UpdateRule
) -> tuple[int, int]:
    """Bytes of a rank's state, which is committed, and of its gradient in the same type."""
    trained, master = [bucket for bucket in buckets if bucket.trained], precision.master.itemsize
    own = sum(fragment.stop - fragment.start for bucket in trained for fragment in bucket.fragments(rank)) * master
    return own + int(_rule_state_bytes(trained, rank, master, rule)), own


def _rule_state_bytes(trained: Sequence[Bucket], rank: int, master: int, rule: UpdateRule) -> float:
    """Bytes of what the rule keeps of a rank's own."""
    kept = 0.0
    for bucket in trained:
        for fragment in bucket.fragments(rank):
            whole = fragment.parameter
            kept += rule.state_bytes(whole.shape, master) * (fragment.stop - fragment.start) / whole.elements
    return kept
