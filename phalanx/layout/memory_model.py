"""The memory model of training state: bytes of a rank by item, besides activations. Pure numbers, without torch.

A dry run, the search for a micro-batch and the shares of the state count the elements of real buckets
(`count_holdings`); the planner derives them from shapes, as floats. The terms are the same for both. A test holds them
against the living storages of real engines.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.layout.buckets import Bucket

PARAMETERS, GRADIENTS, ON_THEIR_WAY = "weights in use", "gradients", "weights on their way"
MASTERS, OPTIMIZER_STATE, FROZEN = "master weights", "optimizer state", "frozen weights"
STATE_ITEMS = (MASTERS, OPTIMIZER_STATE)  # cut into shards; where steps are kept in memory, they live there
PREFETCH = 1  # units that are gathered ahead of the one that computes, where parameters are released
IN_FLIGHT = 3  # gradient buffers of one size: one that is filled, one that is sent, one between
# Tokens of a chunk of the loss, and bytes of its logits in fp32. On a CPU a chunk's logits stay in the cache (measured
# fastest of 2 to 64 MiB), but fewer tokens make products too thin: at a vocabulary of 32,768 a tenth slower with 128.
CPU_CHUNK_TOKENS, CPU_CHUNK_BYTES = 512, 4 << 20
# On an accelerator each chunk also reads and writes all of dW in float32. Per element of dW that is 8 bytes, 2.4 ps at
# 3.3 TB/s, against 6 FLOP for each token of the chunk, 10 ps for 1,000 tokens at 600 TFLOP/s: a quarter more for 1,000
# tokens, 6 % for 4,096. So at least 4,096 tokens, unless their logits outgrow 2 GiB (4,096 x 128,256 x 4 bytes are
# 2.1 GB, just inside). By arithmetic with the figures of an H100, not measured.
CHUNK_TOKENS, CHUNK_LEAST_BYTES, CHUNK_MOST_BYTES = 4096, 512 << 20, 2 << 30

Sizes = Mapping[int, int] | Mapping[float, int]  # elements of a bucket or a unit -> how many have so many


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of an element: of the compute type, of the type that parameters travel in, and of master weights, which is
    also that of moments and of sums of gradients."""

    compute: int
    transport: int
    master: int

    @property
    def narrow(self) -> bool:
        """Whether parameters are rounded copies of their masters."""
        return self.compute != self.master


@dataclass(frozen=True)
class Holdings:
    """Elements that a rank uses, and those that it owns.

    `trained`, `frozen`: buckets of the whole model by size; `own`, `own_frozen`: elements of the rank's shards, and
    `state_bytes` what the update rule keeps of the former. `units` are sharded one by one, by size; `root` is what
    belongs to none of them and so stays whole for a pass.
    """

    trained: Sizes
    frozen: Sizes
    own: float
    own_frozen: float
    state_bytes: float
    units: Sizes
    root: float


def count_holdings(buckets: Sequence[Bucket], places: Mapping[str, int], state_bytes: float) -> Holdings:
    """Elements of `buckets` on the rank whose numbers by axis are `places`, padding included."""
    trained = [bucket for bucket in buckets if bucket.trained]
    frozen = [bucket for bucket in buckets if not bucket.trained]
    units: Counter[str] = Counter()
    for bucket in buckets:
        units[bucket.unit] += bucket.elements
    root = units.pop("", 0)
    return Holdings(
        Counter(bucket.elements for bucket in trained),
        Counter(bucket.elements for bucket in frozen),
        sum(bucket.count_elements(places[bucket.axis]) for bucket in trained),
        sum(bucket.count_elements(places[bucket.axis]) for bucket in frozen),
        state_bytes,
        Counter(units.values()),
        root,
    )


def count_elements(sizes: Sizes) -> float:
    """The elements of all together."""
    return sum(size * count for size, count in sizes.items())


def largest(sizes: Sizes, count: int = 1) -> float:
    """The elements of the `count` largest together."""
    total = 0.0
    for size, there in sorted(sizes.items(), reverse=True):
        total += size * min(count, there)
        count -= min(count, there)
    return total


def count_sharded_bytes(
    held: Holdings, each: ElementBytes, *, zero: int, reduce: str, slots: int, accumulates: bool, compressed: bool
) -> dict[str, float]:
    """Bytes by what the sharded engine holds; `accumulates`: a step has several micro-batches.

    With E elements, own of them the rank's, and bytes c of the compute type and m of the master's: zero 1 holds E c of
    parameters and E m of gradients; zero 2 own m of gradients and a few buckets' on their way; zero 3 besides that the
    parameters of two units and the model's own, and one bucket's gradient, or of one unit and two buckets'. Masters are
    own m, and what the rule keeps of own, once for each slot; but where c = m, there is one slot and parameters stay
    whole, they are the masters.
    """
    released, everything = zero == 3, count_elements(held.trained)
    parameters = (everything + count_elements(held.frozen)) * each.compute
    if released:
        parameters = (held.root + largest(held.units, PREFETCH + 1)) * each.compute + held.own_frozen * each.transport
    if zero == 1 and reduce == "per_step":
        sums = everything
    elif reduce == "per_step" and accumulates:
        sums = held.own + everything
    elif released:  # one gradient while two units are whole, or, where it is the wider, two while one is
        sums = held.own + largest(held.trained) * (2 - each.compute / each.master)
    else:
        sums = held.own + sum(size * min(count, IN_FLIGHT) for size, count in held.trained.items())
    apart = released or slots > 1 or each.narrow or compressed
    items = {
        PARAMETERS: parameters,
        GRADIENTS: sums * each.master,
        MASTERS: held.own * each.master * slots if apart else 0,
        OPTIMIZER_STATE: held.state_bytes * slots,
    }
    if each.transport != each.compute:  # each rank makes its own type of what it gets
        gathered = max(largest(held.trained), largest(held.frozen) if released else 0)
        items[ON_THEIR_WAY] = 2 * gathered * each.transport
    return items


def count_single_bytes(held: Holdings, each: ElementBytes) -> dict[str, float]:
    """The same of the engine of a single rank. In a narrow type there are the rounded copy, its gradient, and with
    several micro-batches their sum in the master's type."""
    trained = count_elements(held.trained)
    items = {MASTERS: trained * each.master, OPTIMIZER_STATE: held.state_bytes}
    if held.frozen:
        items[FROZEN] = count_elements(held.frozen) * each.compute
    items[PARAMETERS] = trained * each.compute if each.narrow else 0
    items[GRADIENTS] = trained * (each.master + each.compute if each.narrow else each.master)
    return items


def count_fsdp_bytes(held: Holdings, each: ElementBytes, reshards: bool = True) -> dict[str, float]:
    """The same of PyTorch's fully_shard, of two units at a time: one in use, and one that is gathered or reduced. What
    is gathered in another type than it is used in is there in both for a moment: counted in the wider. `reshards`:
    parameters are released after a forward pass (zero 3)."""
    items = {MASTERS: held.own * each.master, OPTIMIZER_STATE: held.state_bytes}
    if held.frozen:
        items[FROZEN] = held.own_frozen * each.transport
    whole = held.root + largest(held.units, PREFETCH + 1)
    learning = largest(held.trained, PREFETCH + 1) if held.frozen else whole
    items[PARAMETERS] = (
        whole if reshards else count_elements(held.trained) + count_elements(held.frozen)
    ) * each.transport
    items[GRADIENTS] = (held.own + learning) * each.master
    return items


def loss_chunk_tokens(vocabulary: float, on_host: bool) -> int:
    """Tokens that the loss takes at a time, of whose logits a rank has `vocabulary` columns."""
    row = 4 * vocabulary
    if on_host:
        return int(max(CPU_CHUNK_TOKENS, CPU_CHUNK_BYTES // row))
    return int(max(1, min(CHUNK_TOKENS, CHUNK_MOST_BYTES // row), CHUNK_LEAST_BYTES // row))


def head_gradient_bytes(elements: float, each: ElementBytes) -> float:
    """The loss makes the head's gradient in the master's type before it is narrowed."""
    return elements * (each.master + each.compute)
