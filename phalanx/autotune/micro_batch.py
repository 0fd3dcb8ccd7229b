"""How many samples fit into one forward and backward pass: measured with small models of the same width.

The memory of one sample is `first + layers * block` bytes on top of the state. Four small runs (one and two layers,
two batch sizes) give both numbers; the state's size is known exactly. So a model that fits only when sharded can be
probed by one process. A network of a user's own has no layers to choose: it is measured itself. Run it in a forked
child: it allocates, and on an accelerator it initialises the driver.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.autotune.footprint import make_all_footprints, make_rank_footprint
from phalanx.autotune.probe_model import open_probe_model
from phalanx.autotune.run_size import STATE_MEMORY_SHARE, single_engine_bytes
from phalanx.comm.mesh import join
from phalanx.config.load import update_config
from phalanx.config.optimizers import OPTIMIZERS
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, is_out_of_memory
from phalanx.core.placement import Placement
from phalanx.engine.interface import Precision
from phalanx.engine.schedule import describe_parameters
from phalanx.engine.sharding_spec import STATE_ITEMS, ShardingSpec, estimate_engine_bytes, estimate_slot_bytes
from phalanx.layout.buckets import Bucket, make_buckets
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.layers import chunk_bytes
from phalanx.models.model import Model, StagedArchitecture
from phalanx.optim.make_rule import make_rule
from phalanx.optim.update import UpdateRule
from phalanx.parallel.parallelize import compute_dtype, sharding_units
from phalanx.recovery.catalog import choose_copies, find_redundant, list_copy_options
from phalanx.system import accelerator
from phalanx.workload.engines import StateWeights, make_sharding_spec
from phalanx.workload.workload import Workload

# Left free: the allocator's fragmentation, the batch itself, collectives' buffers, and on CPU the neighbours' growth.
USABLE = 0.8
SIZES = (1, 3)  # samples of the small runs
UNBOUNDED = 1 << 62  # bytes, where all is kept that a recipe wants

Peaks = Mapping[int | None, Mapping[int, int]]  # layers (None: the model itself) -> samples -> bytes


@dataclass(frozen=True)
class MicroBatchFit:
    """The answer and what it rests on, in bytes."""

    micro_batch: int
    sequence_bytes: int
    state_bytes: int
    free_bytes: int

    def reason(self) -> str:
        gib = 2**30
        return (
            f"one sample takes {self.sequence_bytes / gib:.3f} GiB, the state {self.state_bytes / gib:.2f} GiB, "
            f"and {self.free_bytes / gib:.1f} GiB are free for this rank"
        )


def choose_probe_depths(workload: Workload, config: Config) -> Sequence[int | None]:
    """The layers of the models to try: one and two, or those that the model has. What moves to the host is seen only
    of a layer beyond those whose inputs stay. Under adapters one more: there is no gradient to the first one's input,
    so that its pass is unlike the others', and its input stays."""
    if workload.spec is None:
        return (None,)
    stay = config.memory.offload_prefetch_blocks if config.memory.activations == "offload" else 0
    first = max(1, min(stay + (1 if workload.spec.lora is None else 2), workload.spec.layers - 1))
    return (first, first + 1)


def largest_micro_batch(
    config: Config, workload: Workload, device_name: str, *, world: int, local_world: int, most: int
) -> MicroBatchFit:
    """Measure on this device and return the largest micro-batch, at most `most`, that leaves a fifth of memory free.

    Raises ConfigError when not even one sample fits.
    """
    device = torch.device(device_name)
    accelerator.set_device(device, 1)
    free = accelerator.memory_free(device, local_world)
    placement = Placement(rank=0, world=1, local_rank=0, local_world=1, node=0, device=str(device), store=None)
    peaks = {}
    try:
        with join(placement, config.comm.timeout_s) as mesh:
            for layers in choose_probe_depths(workload, config):
                with open_probe_model(config, workload, mesh, layers) as small:
                    peaks[layers] = {size: small.measure_peak_bytes(size) for size in SIZES}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        blocks = choose_probe_depths(workload, config)[-1]
        tried = (
            "the model and three samples"
            if blocks is None
            else f"{blocks if blocks > 2 else 'two'} blocks and three sequences"
        )
        raise ConfigError(
            f"train.micro_batch auto found no answer: of the {free / 2**30:.1f} GiB free for this rank {tried} "
            f"took more; set train.micro_batch yourself, or {suggest_remedy(workload)}"
        ) from None
    state = state_bytes(config, workload, device, world)
    kept = in_memory_checkpoint_bytes(config, workload, device, world=world, local_world=local_world, free=free - state)
    finding = fit_micro_batch(config, workload, device, peaks, free, state=state + kept, most=most)
    if finding.micro_batch < 1:  # with an equal part of the state; but others may hold it, and no step need be kept
        least = _least_state_bytes(config, workload, device, world)
        least += in_memory_checkpoint_bytes(config, workload, device, world=world, local_world=local_world)
        finding = fit_micro_batch(config, workload, device, peaks, free, state=least, most=most)
    if finding.micro_batch < 1:
        raise ConfigError(
            f"the model does not fit: {finding.reason()}; shard it over more ranks, "
            f"{_suggest_lighter_mode(config, device)}or {suggest_remedy(workload)}"
        )
    return finding


def _suggest_lighter_mode(config: Config, device: torch.device) -> str:
    """What holds less of activations than the configuration does, if anything."""
    match config.memory.activations:
        case "none" if config.parallel.pipeline > 1 and config.parallel.schedule == "zero_bubble":
            return "set parallel.schedule=1f1b and memory.activations=full, "
        case "none" | "selective":
            return "set memory.activations=full, "
        case "full" if device.type != "cpu" and config.parallel.pipeline == 1:
            return "set memory.activations=offload, "
    return ""


def suggest_remedy(workload: Workload) -> str:
    """What a user may do to have a sample take less memory."""
    return "make the model or its samples smaller" if workload.spec is None else "lower data.seq_len"


def fit_micro_batch(
    config: Config, workload: Workload, device: torch.device, peaks: Peaks, free: int, *, state: int, most: int
) -> MicroBatchFit:
    """What follows from `peaks`: bytes at the height of a step, with `free` bytes before it; the micro-batch may be
    0."""
    depths = choose_probe_depths(workload, config)
    slopes = [_sample_bytes(peaks[layers]) for layers in depths]
    dtype, spec = compute_dtype(config.train.dtype, device), workload.spec
    chunk = 0
    # Small models drown in the noise of a process's memory.
    if spec is None:
        inputs = workload.task().collate(workload.make_probe_samples(1)).inputs
        sample = max(slopes[0], 4.0 * sum(tensor.nbytes for tensor in inputs.values()), 1.0)
    else:
        block = max(slopes[1] - slopes[0], 0.0)
        # No sequence takes less than its residual stream.
        floor = config.data.seq_len * spec.hidden * dtype.itemsize * 4
        sample = max(slopes[0] + block * (spec.layers - (depths[0] or 0)), floor)
        # The same however many sequences there are, so it is not in the difference of two runs.
        chunk = chunk_bytes(spec.vocab_size, device, dtype)
    room = free * USABLE - state - chunk
    return MicroBatchFit(max(0, min(int(room // sample), most)), int(sample), state, free)


def _sample_bytes(peaks: Mapping[int, int]) -> float:
    few, many = min(peaks), max(peaks)
    return (peaks[many] - peaks[few]) / (many - few)


def check_state_fits(config: Config, workload: Workload, device_name: str, *, world: int, local_world: int) -> None:
    """Raises ConfigError when parameters and optimizer state alone are more than the device could ever hold."""
    device = torch.device(device_name)
    state = _least_state_bytes(config, workload, device, world)
    kept = in_memory_checkpoint_bytes(config, workload, device, world=world, local_world=local_world)
    total = accelerator.memory_total(device, local_world)
    if state + kept > total:
        also = (
            f" and steps that are kept (resilience.in_memory_checkpoints) {kept / 2**30:.1f} GiB"
            if kept and state <= total
            else ""
        )
        takes = f"{state_bytes(config, workload, device, world) / 2**30:.1f} GiB"
        if _may_be_uneven(config, world):
            takes += f" ({state / 2**30:.1f} if other ranks hold more)"
        raise ConfigError(
            f"the model does not fit: its parameters and optimizer state take {takes} on each of "
            f"{world} rank{'s' if world > 1 else ''}{also}, and a rank has {total / 2**30:.1f} GiB; "
            f"{'leave resilience.in_memory_checkpoints and resilience.replicate_every on auto, or ' if also else ''}"
            "use more ranks or a smaller model"
        )


def _least_state_bytes(config: Config, workload: Workload, device: torch.device, world: int) -> int:
    """What a rank holds at least: where the state may be cut unevenly, its whole part may be elsewhere."""
    state, copies = config.balance.optimizer_state, config.parallel.axes.data_parallel_size(world)
    if not _may_be_uneven(config, world):
        return state_bytes(config, workload, device, world)
    if isinstance(state, list):
        return state_bytes(config, workload, device, world, rank=state.index(min(state)))
    together = make_sharding_spec(config).degree or copies
    none_here = (0.0,) + (1.0,) * (together - 1) if together > 1 else None
    return state_bytes(config, workload, device, world, none_here, rank=0)


def _may_be_uneven(config: Config, world: int) -> bool:
    """Whether ranks may hold unlike parts of the state."""
    return (
        config.parallel.engine == "sharded"
        and config.parallel.axes.data_parallel_size(world) > 1
        and config.balance.optimizer_state != "even"
    )


def state_bytes(
    config: Config,
    workload: Workload,
    device: torch.device,
    world: int,
    weights: StateWeights = None,
    rank: int | None = None,
) -> int:
    """Bytes that a rank holds besides activations; `weights` as for `make_sharding_spec`, without a `rank` of that
    which holds most. Where several ranks hold one copy of the model, each holds its stages and slices of it; without a
    `rank` it is the one that holds most."""
    precision, ranks, sharding = _find_state_layout(config, device, world, weights)
    rule, place = make_rule(config.optim), None if rank is None else config.parallel.axes.coordinates(rank, world)
    helds = (
        make_all_footprints(workload, config) if place is None else [make_rank_footprint(workload, config, place.pipe)]
    )
    number = None if place is None else place.data
    items = (state_items(held.model, workload.spec, precision, ranks, rule, sharding, number) for held in helds)
    return max(sum(each.values()) for each in items)


def _find_state_layout(
    config: Config, device: torch.device, world: int, weights: StateWeights = None
) -> tuple[Precision, int, ShardingSpec | None]:
    """The types that ranks hold the state in, how many hold it together, and how where it is sharded by our engine."""
    compute = compute_dtype(config.train.dtype, device)
    shared = torch.float32 if config.train.dtype == "mixed" and world > 1 else compute
    ranks = 1 if config.parallel.engine == "single" else config.parallel.axes.data_parallel_size(world)
    sharding = make_sharding_spec(config, weights) if config.parallel.engine == "sharded" else None
    return Precision(compute, shared), ranks, sharding


def in_memory_checkpoint_bytes(
    config: Config, workload: Workload, device: torch.device, *, world: int, local_world: int, free: int | None = None
) -> int:
    """Bytes that a rank on a CPU takes for the steps that are kept in shared memory, beside `state_bytes`, of which the
    one that is computed with lives there: as the run would keep them with so many bytes `free`, or as it must at least
    (None), where it was asked to."""
    if device.type != "cpu" or (free is None and _may_be_uneven(config, world)):  # its part may be elsewhere
        return 0
    precision, ranks, sharding = _find_state_layout(config, device, world)
    degree = ranks if sharding is None else sharding.degree or ranks
    # Ranks of one number in their copies of the state hold the same: nodes with a whole copy each need none.
    parts = [rank % degree for rank in range(ranks)]
    nodes = [rank * config.parallel.tensor // local_world for rank in range(ranks)]
    several = world > local_world and not all(find_redundant(parts, nodes))
    replays = OPTIMIZERS[config.optim.name].replays and config.parallel.engine == "sharded"
    options = list_copy_options(
        config.resilience.in_memory_checkpoints, config.resilience.replicate_every, several, replays
    )
    rule, most = make_rule(config.optim), 0
    for held in make_all_footprints(workload, config):
        state, gradient, there = compute_commit_bytes(held.model, precision, ranks, rule, sharding), 0, 0
        if sharding is not None:
            buckets, place = _lay_out_buckets(held.model, ranks, rule, sharding)
            state, gradient = estimate_slot_bytes(buckets, place, precision, rule)
            items = state_items(held.model, workload.spec, precision, ranks, rule, sharding)
            there = sum(items[name] for name in STATE_ITEMS)
        keeps = options[-1] if free is None else choose_copies(options, state, gradient, free)
        most = max(most, int(keeps.total_bytes(state, gradient)) - there * (keeps.own > 0))
    return most


def find_least_zero(config: Config, workload: Workload, devices: Sequence[str], *, world: int, local_world: int) -> int:
    """The least `parallel.zero` with which the model takes no more than HALF of what each device has free, or 3: where
    there is one, the least with which that holds of the steps that are kept there, too."""
    for kept in (True, False):
        for zero in (1, 2, 3):
            early = {"optim.double_buffer": False} if zero == 3 else {}  # there is nothing to update early
            tried = update_config(config, {"parallel.zero": zero} | early)
            needed = 0.0
            for device in map(torch.device, devices):
                takes = state_bytes(tried, workload, device, world)
                if kept:
                    takes += in_memory_checkpoint_bytes(
                        tried, workload, device, world=world, local_world=local_world, free=UNBOUNDED
                    )
                needed = max(needed, takes / accelerator.memory_free(device, local_world))
            if needed <= STATE_MEMORY_SHARE:
                return zero
    return 3


def state_items(
    model: Model,
    spec: ModelSpec | None,
    precision: Precision,
    ranks: int,
    rule: UpdateRule,
    sharding: ShardingSpec | None = None,
    rank: int | None = None,
) -> dict[str, int]:
    """Bytes one of `ranks` holds besides activations, by what they hold: masters, the update rule's state, gradients,
    and what is gathered to be used. `model` is on meta, of the shapes `spec` where it has such. With a `sharding` it is
    the sharded engine that holds them, on `rank` or the one that holds most, else fully_shard or a single one."""
    if sharding is not None:
        buckets, place = _lay_out_buckets(model, ranks, rule, sharding, rank)
        return estimate_engine_bytes(
            buckets, place, sharding, precision, rule, accumulates=True
        ) | _head_gradient_bytes(model, spec, precision)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
    frozen = sum(each.numel() for each in model.parameters() if not each.requires_grad)
    elements = sum(math.prod(shape) for shape in shapes.values())
    shared, master = precision.transport.itemsize, 8 if precision.compute == torch.float64 else 4
    kept = int(sum(rule.state_bytes(shape, master) for shape in shapes.values()))
    items = single_engine_bytes(elements, frozen, kept, precision.compute.itemsize, master)
    if ranks > 1:
        items = {name: items[name] // ranks for name in STATE_ITEMS}
        if frozen:  # beside adapters: in the type they travel in, and nothing else is kept of them
            items["frozen weights"] = frozen * shared // ranks
        # Two blocks are whole at a time (one in use, one on its way) with one's gradients, and the ends with theirs.
        whole = _two_largest_blocks_and_rest(model, trained=True)
        # What is gathered in another type than it is used in is there in both for a moment: counted in the wider.
        items["weights in use"] = (whole + _two_largest_blocks_and_rest(model, trained=False)) * shared
        items["gradients"] = elements * master // ranks + whole * master
    return items | _head_gradient_bytes(model, spec, precision)


def compute_commit_bytes(
    model: Model, precision: Precision, ranks: int, rule: UpdateRule, sharding: ShardingSpec | None = None
) -> int:
    """Bytes of what one of `ranks` commits of a step, the one that holds most: masters and what the rule keeps; the
    rest as for `state_items`."""
    if sharding is not None:
        buckets, place = _lay_out_buckets(model, ranks, rule, sharding)
        return estimate_slot_bytes(buckets, place, precision, rule)[0]
    master = precision.master.itemsize
    trained = [tuple(each.shape) for each in model.parameters() if each.requires_grad]
    return sum(math.prod(shape) * master + rule.state_bytes(shape, master) for shape in trained) // ranks


def _lay_out_buckets(
    model: Model, ranks: int, rule: UpdateRule, sharding: ShardingSpec, rank: int | None = None
) -> tuple[Sequence[Bucket], int]:
    """The buckets of the sharded engine, and the rank, without a `rank` the one that holds most."""
    weights = sharding.weights or (1.0,) * (sharding.degree or ranks)
    buckets = make_buckets(
        describe_parameters(model, sharding_units(model), rule),
        weights,
        isolate_parameters=sharding.isolates_parameters,
    )
    return buckets, weights.index(max(weights)) if rank is None else rank % len(weights)


def _head_gradient_bytes(model: Model, spec: ModelSpec | None, precision: Precision) -> dict[str, int]:
    """The loss makes the head's gradient in the master's type before it is narrowed (layers.cross_entropy_sum)."""
    head = 0 if spec is None or spec.lora is not None else spec.vocab_size * spec.hidden
    if head and isinstance(model, StagedArchitecture):  # or a part: stages without a head, slices with some of its rows
        name = "embed.weight" if spec is not None and spec.tie_embeddings else "head.weight"
        head = model.get_parameter(name).numel() if model.losses() else 0
    return {"gradient of the head": head * (precision.master.itemsize + precision.compute.itemsize)}


def _two_largest_blocks_and_rest(model: Model, trained: bool) -> int:
    """Elements of the two largest blocks and of what is in none, of those that are trained or of the others."""

    def elements(module: torch.nn.Module) -> int:
        return sum(each.numel() for each in module.parameters() if each.requires_grad == trained)

    blocks = sorted(map(elements, model.blocks()), reverse=True)
    return elements(model) - sum(blocks[2:])
