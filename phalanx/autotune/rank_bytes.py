"""Bytes that the ranks of a recipe hold besides activations: `layout.memory_model` for what a model on meta has."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.autotune.footprint import make_all_footprints, make_rank_footprint
from phalanx.comm.compression import CODECS, NO_COMPRESSION
from phalanx.config.optimizers import find_optimizer
from phalanx.config.schema import Config
from phalanx.engine.interface import Precision
from phalanx.engine.schedule import describe_parameters
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.layout import memory_model
from phalanx.layout.buckets import FP8_GATHERED, Bucket, Fragment, make_buckets, make_buckets_by_axis
from phalanx.layout.memory_model import ON_THEIR_WAY, STATE_ITEMS, ElementBytes, Holdings
from phalanx.layout.mesh_axes import EXPERT_COPIES
from phalanx.layout.model_shape import ModelSpec
from phalanx.layout.tensor_shards import EXPERTS
from phalanx.models.model import Model, StagedArchitecture
from phalanx.optim.make_rule import make_rule
from phalanx.optim.update import UpdateRule, count_state_bytes
from phalanx.parallel.fp8 import find_fp8_weights
from phalanx.parallel.parallelize import compute_dtype, sharding_units
from phalanx.recovery.catalog import choose_copies, list_copy_options, needs_replicas
from phalanx.workload.engines import StateWeights, make_sharding_spec
from phalanx.workload.workload import Workload

HEAD_GRADIENT = "gradient of the head"
ENCODED = "encoded on its way"


@dataclass(frozen=True)
class StateLayout:
    """The types of a model's state, the `ranks` it is spread over, and the sharded engine's `sharding`; without one the
    engine is fully_shard, or there is one rank. `expert` neighbours divide experts among them."""

    precision: Precision
    ranks: int
    rule: UpdateRule
    sharding: ShardingSpec | None = None
    expert: int = 1

    @property
    def element_bytes(self) -> ElementBytes:
        kinds = self.precision.compute, self.precision.transport, self.precision.master
        return ElementBytes(*(kind.itemsize for kind in kinds))


def find_state_layout(config: Config, device: torch.device, world: int, weights: StateWeights = None) -> StateLayout:
    """That of a resolved configuration; `weights` as for `make_sharding_spec`."""
    compute = compute_dtype(config.train.dtype, device)
    shared = torch.float32 if config.train.dtype == "mixed" and world > 1 else compute
    ranks = 1 if config.parallel.engine == "single" else config.parallel.axes.data_parallel_size(world)
    sharding = make_sharding_spec(config, weights) if config.parallel.engine == "sharded" else None
    return StateLayout(Precision(compute, shared), ranks, make_rule(config.optim), sharding, config.parallel.expert)


def state_items(model: Model, spec: ModelSpec | None, layout: StateLayout, rank: int | None = None) -> dict[str, int]:
    """Bytes that `rank`, or the one that holds most, holds besides activations, by what they hold. `model` is on meta,
    of the shapes `spec` where it has such. A step has several micro-batches."""
    each = layout.element_bytes
    if layout.sharding is not None:
        buckets, places = _lay_out_buckets(model, layout, rank)
        items = count_sharded_items(buckets, places, layout, accumulates=True)
    else:
        held = _even_holdings(model, layout)
        items = (
            memory_model.count_single_bytes(held, each)
            if layout.ranks == 1
            else memory_model.count_fsdp_bytes(held, each)
        )
    items[HEAD_GRADIENT] = memory_model.head_gradient_bytes(_head_elements(model, spec), each)
    return {name: int(count) for name, count in items.items()}


def count_sharded_items(
    buckets: Sequence[Bucket], places: Mapping[str, int], layout: StateLayout, accumulates: bool
) -> dict[str, float]:
    """What the sharded engine holds of its `buckets` on a rank with these numbers by axis; `accumulates`: a step has
    several micro-batches."""
    sharding = layout.sharding
    assert sharding is not None
    held = memory_model.count_holdings(buckets, places, _shard_state_bytes(buckets, places, layout))
    items = memory_model.count_sharded_bytes(
        held,
        layout.element_bytes,
        zero=sharding.zero,
        reduce=sharding.reduce,
        slots=sharding.slots,
        accumulates=accumulates,
        compressed=sharding.compress != NO_COMPRESSION,
    )
    if sharding.gathers_fp8:
        coded = max((bucket.elements for bucket in buckets if bucket.dtype == FP8_GATHERED), default=0)
        items[ON_THEIR_WAY] = items.get(ON_THEIR_WAY, 0) + 2 * coded
    if sharding.compress != NO_COMPRESSION:
        items[ENCODED] = _encoded_bytes(buckets, places["data"], sharding.compress)
    return items


def commit_bytes(model: Model, layout: StateLayout, rank: int | None = None) -> tuple[int, int]:
    """Bytes of what `rank`, or the one that holds most, commits of a step, masters and what the rule keeps; and of its
    gradient in the master's type."""
    master = layout.element_bytes.master
    if layout.sharding is None:
        held = _even_holdings(model, layout)
        return int(held.own * master + held.state_bytes), int(held.own * master)
    buckets, places = _lay_out_buckets(model, layout, rank)
    own = sum(each.stop - each.start for each in _list_fragments(buckets, places))
    return own * master + _shard_state_bytes(buckets, places, layout), own * master


def state_bytes(
    config: Config, workload: Workload, device: torch.device, world: int, weights: StateWeights = None,
    rank: int | None = None, expert_counts: Sequence[int] = (),
) -> int:  # fmt: skip
    """Bytes that `rank`, or the one that holds most, holds besides activations. Where several ranks hold one copy of
    the model, each holds its stages and slices of it; `expert_counts`: as of `make_rank_footprint`."""
    layout = find_state_layout(config, device, world, weights)
    axes = config.parallel.axes
    place = None if rank is None else axes.coordinates(rank, world)
    helds = (
        make_all_footprints(workload, config)
        if place is None
        else [make_rank_footprint(workload, config, place.pipe, axes.expert_place(place), expert_counts)]
    )
    number = None if place is None else place.data
    return max(sum(state_items(held.model, workload.spec, layout, number).values()) for held in helds)


def in_memory_checkpoint_bytes(
    config: Config, workload: Workload, device: torch.device, *, world: int, local_world: int, free: int | None = None
) -> int:
    """Bytes that a rank on a CPU takes for the steps that are kept in shared memory, beside `state_bytes`, of which the
    one that is computed with lives there: as the run would keep them with so many bytes `free`, or as it must at least
    (None), where it was asked to."""
    if device.type != "cpu" or (free is None and may_be_uneven(config, world)):  # its part may be elsewhere
        return 0
    layout = find_state_layout(config, device, world)
    parts = config.parallel.axes.state_parts(world, None if layout.sharding is None else layout.sharding.degree)
    several = needs_replicas(parts, [rank // local_world for rank in range(world)])
    replays = find_optimizer(config.optim.name).replays and config.parallel.engine == "sharded"
    options = list_copy_options(
        config.resilience.in_memory_checkpoints, config.resilience.replicate_every, several, replays
    )
    most = 0.0
    for held in make_all_footprints(workload, config):
        state, gradient = commit_bytes(held.model, layout)
        there = 0
        if layout.sharding is not None:
            items = state_items(held.model, workload.spec, layout)
            there = sum(items[name] for name in STATE_ITEMS)
        keeps = options[-1] if free is None else choose_copies(options, state, gradient, free)
        most = max(most, keeps.bytes_beside(there, state, gradient) + keeps.replica_bytes(state, gradient))
    return int(most)


def may_be_uneven(config: Config, world: int) -> bool:
    """Whether state shares may be uneven: as a recipe says, or as memories are, of ranks with a whole model each."""
    state, axes = config.balance.optimizer_state, config.parallel.axes
    return (
        config.parallel.engine == "sharded"
        and axes.data_parallel_size(world) > 1
        and (isinstance(state, list) or (state == "auto" and axes.model_parallel_size * axes.expert == 1))
    )


# ------------------------------------------------------------------------------------------------------------ elements


def _lay_out_buckets(model: Model, layout: StateLayout, rank: int | None) -> tuple[Sequence[Bucket], Mapping[str, int]]:
    """The buckets of the sharded engine, and the numbers of the rank by axis, without a `rank` of the one that holds
    most."""
    sharding = layout.sharding
    assert sharding is not None
    weights = sharding.weights or (1.0,) * (sharding.degree or layout.ranks)
    fp8_weights = find_fp8_weights(model, model.blocks()) if sharding.gathers_fp8 else ()
    place = weights.index(max(weights)) if rank is None else rank % len(weights)
    if layout.expert == 1:
        parameters = describe_parameters(model, sharding_units(model), layout.rule, fp8_weights)
        return make_buckets(parameters, weights, isolate_parameters=sharding.isolates_parameters), {"data": place}
    experts = [name for name, _ in model.named_parameters() if EXPERTS in name]
    parameters = describe_parameters(model, sharding_units(model), layout.rule, fp8_weights, experts)
    of_copies = sharding.expert_weights(weights, range(place % layout.expert, len(weights), layout.expert))
    buckets = make_buckets_by_axis(parameters, {"data": weights, EXPERT_COPIES: of_copies}, 1, 1)
    return buckets, {"data": place, EXPERT_COPIES: place // layout.expert}


def _list_fragments(buckets: Sequence[Bucket], places: Mapping[str, int]) -> Iterator[Fragment]:
    """What a rank owns of what is trained."""
    for bucket in buckets:
        if bucket.trained:
            yield from bucket.fragments(places[bucket.axis])


def _shard_state_bytes(buckets: Sequence[Bucket], places: Mapping[str, int], layout: StateLayout) -> int:
    """Bytes of what the rule keeps of a rank's own."""
    shards, master = _list_fragments(buckets, places), layout.precision.master
    return sum(
        count_state_bytes(layout.rule, each.parameter.update_shape, each.stop - each.start, master) for each in shards
    )


def _even_holdings(model: Model, layout: StateLayout) -> Holdings:
    """What each of some ranks holds of a model that is cut into equal parts, without padding."""
    parameters = describe_parameters(model, sharding_units(model), layout.rule)
    by_unit: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for each in parameters:
        by_unit[each.trained][each.unit] += each.elements
    trained, frozen = (Counter(by_unit[learns].values()) for learns in (True, False))
    units = by_unit[True] + by_unit[False]
    root = units.pop("", 0)
    learning, master = (each for each in parameters if each.trained), layout.precision.master
    kept = sum(count_state_bytes(layout.rule, each.update_shape, each.elements, master) for each in learning)
    own, own_frozen = (memory_model.count_elements(sizes) // layout.ranks for sizes in (trained, frozen))
    return Holdings(trained, frozen, own, own_frozen, kept // layout.ranks, Counter(units.values()), root)


def _encoded_bytes(buckets: Sequence[Bucket], rank: int, compress: str) -> int:
    """Two parts under way: what is sent of each, and what all others send of the own range."""
    parts = [part for bucket in buckets if bucket.trained for part in bucket.parts]
    ranges = (part.range(rank) for part in parts)
    most = max((part.elements for part in parts), default=0)
    own_most = max((stop - start for start, stop in ranges), default=0) * (len(parts[0].cuts) - 2 if parts else 0)
    return 2 * CODECS[compress].byte_size(most + own_most)


def _head_elements(model: Model, spec: ModelSpec | None) -> int:
    """Elements of the head whose gradient the loss makes: those that `model`, a stage or a slice, has of it."""
    if spec is None or spec.lora is not None:
        return 0
    if not isinstance(model, StagedArchitecture):
        return spec.vocab_size * spec.hidden
    name = "embed.weight" if spec.tie_embeddings else "head.weight"
    return model.get_parameter(name).numel() if model.losses() else 0
