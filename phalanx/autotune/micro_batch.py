"""Find the largest micro-batch that fits (`train.micro_batch: auto`), measured with small models of the same width.

The memory of one sample is `first + layers * block` bytes on top of the state. Four small runs (one and two layers,
two batch sizes) give both numbers; the state's size is known exactly. So a model that fits only when sharded can be
probed by one process. A custom network is measured as a whole. Run it in a forked child: it allocates, and on an
accelerator it initializes the driver.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.autotune.probe_model import open_probe_model
from phalanx.autotune.rank_bytes import in_memory_checkpoint_bytes, may_be_uneven, state_bytes
from phalanx.autotune.run_size import STATE_MEMORY_SHARE
from phalanx.comm.mesh import join
from phalanx.config.load import update_config
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, is_out_of_memory
from phalanx.core.placement import Placement
from phalanx.layout.context_exchange import TILE_QUERIES, TILE_SCORE_BYTES, count_held_keys
from phalanx.models.families.catalog import block_options
from phalanx.models.layers import chunk_bytes
from phalanx.parallel.parallelize import DTYPES, compute_dtype
from phalanx.system import accelerator
from phalanx.workload.engines import make_sharding_spec
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
    of a layer beyond those whose inputs stay. With adapters one more: the first layer's input has no gradient, so that
    its pass differs from the others', and its input stays."""
    if workload.spec is None:
        return (None,)
    stay = config.memory.offload_prefetch_blocks if config.memory.activations == "offload" else 0
    first = max(1, min(stay + (1 if workload.spec.lora is None else 2), workload.spec.layers - 1))
    return (first, first + 1)


def bytes_of_other_keys(config: Config, workload: Workload) -> int:
    """Bytes that the rank with the largest part keeps, for one sequence, of the keys and values of ranks that share it:
    with `gather` those of each layer whose activations are kept, with `ring` of two parts of a row."""
    spec, by = workload.spec, config.parallel.context_by
    if config.parallel.context == 1 or spec is None:
        return 0
    wide = DTYPES["bf16" if config.train.dtype == "mixed" else config.train.dtype].itemsize
    kv_heads = max(1, spec.kv_heads // config.parallel.tensor)
    others = count_held_keys(by, _row_parts(config), config.data.seq_len) * 2 * kv_heads * spec.attention_width * wide
    kept = by == "gather" and config.memory.activations in ("none", "selective")
    return others * (spec.layers if kept else 1)


def _row_parts(config: Config) -> list[float]:
    """The parts of a row of the ranks that share it; even ones, where the run measures how fast each is."""
    shares = config.balance.context
    return list(shares) if isinstance(shares, list) else [1.0] * config.parallel.context


def bytes_of_scores(config: Config, workload: Workload, on_host: bool = False) -> int:
    """Bytes that a rank holds at the height of a layer's backward pass, for one sequence, of scores that `gather` and
    `ring` materialize: of some queries and the keys of a rank, at most of the one that has most, at a time. On a host
    torch's kernel holds none."""
    parts, spec, by = config.parallel.context, workload.spec, config.parallel.context_by
    if parts == 1 or spec is None or by == "heads":
        return 0
    drops = spec.attention_dropout > 0 or block_options(spec).score_cap > 0 or spec.sliding_window is not None
    if on_host and not drops:
        return 0
    shares = _row_parts(config)
    keys = math.ceil(config.data.seq_len * max(shares) / sum(shares))
    return TILE_QUERIES * keys * spec.heads // config.parallel.tensor * TILE_SCORE_BYTES


def bytes_of_more_rows(config: Config, workload: Workload, counts: Sequence[int], place: int) -> int:
    """Bytes that the rank at `place` of those that divide experts keeps, for one sequence, of rows that it gets beyond
    those that it sends: with balanced experts its rows follow the `counts`. Of each row the inputs and results of the
    products and of what is between."""
    spec = workload.spec
    assert spec is not None and spec.moe is not None
    wide = DTYPES["bf16" if config.train.dtype == "mixed" else config.train.dtype].itemsize
    row = (2 * spec.hidden + 4 * spec.moe.intermediate) * wide
    layers = spec.layers if config.memory.activations in ("none", "selective") else 1
    rows = config.data.seq_len * spec.moe.experts_per_token
    return max(0, rows * counts[place] * len(counts) // sum(counts) - rows) * row * layers


def largest_micro_batch(
    config: Config, workload: Workload, device_name: str, *, world: int, local_world: int, most: int,
    more_sample_bytes: int = 0,
) -> MicroBatchFit:  # fmt: skip
    """Measure on this device and return the largest micro-batch, at most `most`, that leaves a fifth of memory free.
    `more_sample_bytes`: what a sample takes beside what is measured.

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
    fit = functools.partial(fit_micro_batch, config, workload, device, peaks, free, more_sample_bytes=more_sample_bytes)
    finding = fit(state=state + kept, most=most)
    if finding.micro_batch < 1:  # with an equal part of the state; but others may hold it, and no step need be kept
        least = _least_state_bytes(config, workload, device, world)
        least += in_memory_checkpoint_bytes(config, workload, device, world=world, local_world=local_world)
        finding = fit(state=least, most=most)
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
    config: Config, workload: Workload, device: torch.device, peaks: Peaks, free: int, *, state: int, most: int,
    more_sample_bytes: int = 0,
) -> MicroBatchFit:  # fmt: skip
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
    sample += more_sample_bytes
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
        if may_be_uneven(config, world):
            takes += f" ({state / 2**30:.1f} if other ranks hold more)"
        raise ConfigError(
            f"the model does not fit: its parameters and optimizer state take {takes} on each of "
            f"{world} rank{'s' if world > 1 else ''}{also}, and a rank has {total / 2**30:.1f} GiB; "
            f"{'leave resilience.in_memory_checkpoints and resilience.replicate_every on auto, or ' if also else ''}"
            "use more ranks or a smaller model"
        )


def _least_state_bytes(config: Config, workload: Workload, device: torch.device, world: int) -> int:
    """The least bytes of a rank: where state shares may be uneven, other ranks may have all of its share."""
    state, copies = config.balance.optimizer_state, config.parallel.axes.data_parallel_size(world)
    if not may_be_uneven(config, world):
        return state_bytes(config, workload, device, world)
    if isinstance(state, list):
        return state_bytes(config, workload, device, world, rank=state.index(min(state)))
    together = make_sharding_spec(config).degree or copies
    none_here = (0.0,) + (1.0,) * (together - 1) if together > 1 else None
    return state_bytes(config, workload, device, world, none_here, rank=0)


def find_least_zero(config: Config, workload: Workload, devices: Sequence[str], *, world: int, local_world: int) -> int:
    """Choose `parallel.zero`: the least with which the model, and in-memory checkpoints where they can fit, take no
    more than HALF of each device's free memory; else 3."""
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
