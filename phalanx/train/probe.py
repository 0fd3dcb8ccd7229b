"""How many sequences fit into one forward and backward pass: measured with small models of the same width.

The memory of one sequence is `first + layers * block` bytes on top of the state. Four small runs (one and two layers,
two batch sizes) give both numbers; the state's size is known exactly. So a model that fits only when sharded can be
probed by one process. Run it in a forked child: it allocates, and on an accelerator it initialises the driver.
"""

import math
from dataclasses import dataclass, replace

import torch

from phalanx import accelerator
from phalanx.comm.mesh import join
from phalanx.config import Config
from phalanx.errors import ConfigError
from phalanx.models.custom import model_class, on_meta
from phalanx.models.layers import chunk_bytes
from phalanx.models.llama import Llama
from phalanx.models.spec import ModelSpec
from phalanx.optim.choose import make_rule
from phalanx.optim.engine import Precision
from phalanx.optim.single import Single
from phalanx.optim.update import Rule
from phalanx.parallel.apply import apply, compute_dtype
from phalanx.parallel.materialize import drawn, materialise, with_adapters
from phalanx.recipe import update
from phalanx.records import Placement
from phalanx.tasks.language import LanguageModel
from phalanx.tasks.task import Batch
from phalanx.train.step import run_micro_batches

# Left free: the allocator's fragmentation, the batch itself, collectives' buffers, and on CPU the neighbours' growth.
USABLE = 0.8


@dataclass(frozen=True)
class Finding:
    """The answer and what it rests on, in bytes."""

    micro_batch: int
    sequence_bytes: int
    state_bytes: int
    free_bytes: int

    def reason(self) -> str:
        gib = 2**30
        return (
            f"one sequence takes {self.sequence_bytes / gib:.3f} GiB, the state {self.state_bytes / gib:.2f} GiB, "
            f"and {self.free_bytes / gib:.1f} GiB are free for this rank"
        )


def largest_micro_batch(
    config: Config, spec: ModelSpec, device_name: str, *, world: int, local_world: int, most: int
) -> Finding:
    """Measure on this device and return the largest micro-batch, at most `most`, that leaves a fifth of memory free.

    Raises ConfigError when not even one sequence fits.
    """
    device = torch.device(device_name)
    accelerator.use(device, 1)
    free = accelerator.memory_free(device, local_world)
    try:
        peaks = {(layers, batch): _peak(config, spec, device, layers, batch) for layers in (1, 2) for batch in (1, 3)}
    except (RuntimeError, MemoryError) as error:
        if not accelerator.is_out_of_memory(error):
            raise
        raise ConfigError(
            f"train.micro_batch auto found no answer: of the {free / 2**30:.1f} GiB free for this rank two blocks and "
            "three sequences took more; set train.micro_batch yourself, or lower data.seq_len"
        ) from None
    one, two = ((peaks[layers, 3] - peaks[layers, 1]) / 2 for layers in (1, 2))
    block = max(two - one, 0.0)
    # Small models drown in the noise of a process's memory; no sequence takes less than its residual stream.
    floor = config.data.seq_len * spec.hidden * compute_dtype(config.train.dtype, device).itemsize * 4
    sequence = max(one + block * (spec.layers - 1), floor)
    state = _state_bytes(config, spec, device, world)
    # The same however many sequences there are, so it is not in the difference of two runs.
    chunk = chunk_bytes(spec.vocab_size, device, compute_dtype(config.train.dtype, device))
    room = free * USABLE - state - chunk
    finding = Finding(min(int(room // sequence), most), int(sequence), state, free)
    if finding.micro_batch < 1:
        raise ConfigError(
            f"the model does not fit: {finding.reason()}; shard it over more ranks, set memory.activations=full, "
            "or lower data.seq_len"
        )
    return finding


def check_state(config: Config, spec: ModelSpec, device_name: str, *, world: int, local_world: int) -> None:
    """Raises ConfigError when parameters and optimizer state alone are more than the device could ever hold."""
    device = torch.device(device_name)
    state = _state_bytes(config, spec, device, world)
    total = accelerator.memory_total(device, local_world)
    if state > total:
        raise ConfigError(
            f"the model does not fit: its parameters and optimizer state take {state / 2**30:.1f} GiB on each of "
            f"{world} rank{'s' if world > 1 else ''}, and a rank has {total / 2**30:.1f} GiB; "
            "use more ranks or a smaller model"
        )


def _state_bytes(config: Config, spec: ModelSpec, device: torch.device, world: int) -> int:
    compute = compute_dtype(config.train.dtype, device)
    shared = torch.float32 if config.train.dtype == "mixed" and world > 1 else compute
    ranks = world if config.parallel.data == "fsdp2" else 1
    rule, code = make_rule(config.optim), model_class(config.model.code)
    return sum(state_items(spec, Precision(compute, shared), ranks, code, rule).values())


def state_items(spec: ModelSpec, precision: Precision, ranks: int, code: type[Llama], rule: Rule) -> dict[str, int]:
    """Bytes one of `ranks` holds besides activations, by what they hold: masters, the update rule's state, gradients,
    and what is gathered to be used."""
    dtype = precision.compute
    model = on_meta(spec, code)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
    frozen = {name: tuple(each.shape) for name, each in model.named_parameters() if not each.requires_grad}
    elements = sum(math.prod(shape) for shape in shapes.values())
    master = 8 if dtype == torch.float64 else 4
    narrow = dtype.itemsize < master
    kept = sum(rule.state_bytes(shape, master) for shape in shapes.values())
    items = {"master weights": elements * master // ranks, "optimizer state": kept // ranks}
    if frozen:  # beside adapters: in the type they travel in, and nothing else is kept of them
        count = sum(math.prod(shape) for shape in frozen.values())
        items["frozen weights"] = count * precision.shared.itemsize // ranks
    if ranks == 1:
        # Under bf16: the rounded copy, its gradient, and with several micro-batches their sum in fp32.
        items["weights in use"] = elements * dtype.itemsize if narrow else 0
        items["gradients"] = elements * (master + dtype.itemsize if narrow else master)
    else:
        # Two blocks are whole at a time (one in use, one on its way) with one's gradients, and the ends with theirs.
        whole = _two_blocks_and_ends(shapes, spec.layers)
        # What is gathered in another type than it is used in is there in both for a moment: counted in the wider.
        items["weights in use"] = (whole + _two_blocks_and_ends(frozen, spec.layers)) * precision.shared.itemsize
        items["gradients"] = elements * master // ranks + whole * master
    # The loss makes the head's gradient in the master's type before it is narrowed (layers.cross_entropy_sum).
    head = 0 if spec.lora is not None else spec.vocab_size * spec.hidden
    items["gradient of the head"] = head * (master + dtype.itemsize)
    return items


def _two_blocks_and_ends(shapes: dict[str, tuple[int, ...]], layers: int) -> int:
    """Elements of two blocks and of what is in none."""
    block = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers.0."))
    return sum(math.prod(shape) for shape in shapes.values()) - block * (layers - 2)


def _peak(config: Config, spec: ModelSpec, device: torch.device, layers: int, batch: int) -> int:
    """Bytes that one forward and backward pass adds at its height to a small model of `layers` blocks."""
    small = replace(spec, layers=layers)
    eager = update(config, {"train.compile": False, "parallel.data": "single"})
    placement = Placement(rank=0, world=1, local_rank=0, local_world=1, node=0, device=str(device), store=None)
    with join(placement, config.comm.timeout_s) as mesh:
        code = model_class(config.model.code)
        model = on_meta(small, code)
        engine = apply(model, eager, mesh, Single, nominal_weight=1)
        materialise(model, engine, with_adapters(drawn(small, 0, code), 0, None))
        task = LanguageModel(config.data.seq_len)
        tokens = torch.zeros(batch, config.data.seq_len, dtype=torch.int64, device=device)
        data = Batch({"tokens": tokens, "labels": tokens}, tokens.numel(), torch.arange(batch, device=device))
        accelerator.reset_peak_memory(device)
        before = accelerator.peak_memory(device)
        engine.begin_step(1, data.weight)
        run_micro_batches(engine, model, task, [data], seed=0, step=1, nominal_weight=1)
        engine.finish_step(0.0, None)
        return accelerator.peak_memory(device) - before
