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
from phalanx.models.spec import ModelSpec, parameter_shapes
from phalanx.optim.single import Single
from phalanx.parallel.apply import DTYPES, apply, on_meta
from phalanx.parallel.materialize import drawn, materialise
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
    floor = config.data.seq_len * spec.hidden * DTYPES[config.train.dtype].itemsize * 4
    sequence = max(one + block * (spec.layers - 1), floor)
    state = state_bytes(spec, DTYPES[config.train.dtype], world if config.parallel.data == "fsdp2" else 1)
    room = free * USABLE - state
    finding = Finding(min(int(room // sequence), most), int(sequence), state, free)
    if finding.micro_batch < 1:
        raise ConfigError(
            f"the model does not fit: {finding.reason()}; shard it over more ranks, set memory.activations=full, "
            "or lower data.seq_len"
        )
    return finding


def check_state(config: Config, spec: ModelSpec, device_name: str, *, world: int, local_world: int) -> None:
    """Raises ConfigError when parameters and optimizer state alone are more than the device could ever hold."""
    state = state_bytes(spec, DTYPES[config.train.dtype], world if config.parallel.data == "fsdp2" else 1)
    total = accelerator.memory_total(torch.device(device_name), local_world)
    if state > total:
        raise ConfigError(
            f"the model does not fit: its parameters and optimizer state take {state / 2**30:.1f} GiB on each of "
            f"{world} rank{'s' if world > 1 else ''}, and a rank has {total / 2**30:.1f} GiB; "
            "use more ranks or a smaller model"
        )


def state_bytes(spec: ModelSpec, dtype: torch.dtype, ranks: int) -> int:
    """Bytes one of `ranks` holds besides activations: masters, moments, gradients, and what is gathered to be used."""
    shapes = parameter_shapes(spec)
    elements = sum(math.prod(shape) for shape in shapes.values())
    master = 8 if dtype == torch.float64 else 4
    # The loss makes the head's gradient in the master's type before it is narrowed (layers.cross_entropy_sum).
    head = spec.vocab_size * spec.hidden * (master + dtype.itemsize)
    if ranks == 1:
        # Under bf16: the rounded copy, its gradient, and with several micro-batches their sum in fp32.
        grads = 2 * dtype.itemsize + master if dtype == torch.bfloat16 else master
        return elements * (3 * master + grads) + head
    block = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers.0."))
    ends = elements - block * spec.layers
    # Two blocks are whole at a time (one in use, one on its way) with one's gradients, and the ends with theirs.
    whole = 2 * block * (dtype.itemsize + master) + ends * (dtype.itemsize + master)
    return elements * 4 * master // ranks + whole + head


def _peak(config: Config, spec: ModelSpec, device: torch.device, layers: int, batch: int) -> int:
    """Bytes that one forward and backward pass adds at its height to a small model of `layers` blocks."""
    small = replace(spec, layers=layers)
    eager = update(config, {"train.compile": False, "parallel.data": "single"})
    placement = Placement(rank=0, world=1, local_rank=0, local_world=1, node=0, device=str(device), store=None)
    with join(placement, config.comm.timeout_s) as mesh:
        model = on_meta(small)
        engine = apply(model, eager, mesh, Single, nominal_weight=1)
        materialise(model, engine, drawn(small, seed=0))
        task = LanguageModel(config.data.seq_len)
        tokens = torch.zeros(batch, config.data.seq_len, dtype=torch.int64, device=device)
        data = Batch({"tokens": tokens, "labels": tokens}, tokens.numel(), torch.arange(batch, device=device))
        accelerator.reset_peak_memory(device)
        before = accelerator.peak_memory(device)
        engine.begin_step(1, data.weight)
        run_micro_batches(engine, model, task, [data], seed=0, step=1, nominal_weight=1)
        engine.finish_step(0.0, None)
        return accelerator.peak_memory(device) - before
