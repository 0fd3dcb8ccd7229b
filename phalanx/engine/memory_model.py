"""Bytes that the sharded engine holds on a rank besides activations: a formula that tests compare with what is held."""

from collections import Counter
from collections.abc import Sequence

from phalanx.comm.codec import CODECS, NO_COMPRESSION
from phalanx.engine.bucket import IN_FLIGHT
from phalanx.engine.interface import Precision
from phalanx.engine.sharding_spec import PREFETCH, ShardingSpec
from phalanx.layout.buckets import Bucket
from phalanx.optim.update import UpdateRule

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
