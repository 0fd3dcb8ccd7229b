"""Bytes of activations on meta: forward and backward passes with fake tensors, which have shapes and storages but no
data."""

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.autotune.micro_batch import choose_probe_depths
from phalanx.autotune.probe_model import UNSHARDED
from phalanx.config.load import update_config
from phalanx.config.schema import Config
from phalanx.models import layers as kernels
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.model import Model
from phalanx.optim import gradients
from phalanx.parallel.fp8_delayed import rehearse
from phalanx.parallel.offload import ActivationOffloader
from phalanx.parallel.parallelize import DTYPES, cast_at_edges, change_blocks
from phalanx.tasks.language import CausalLMTask
from phalanx.tasks.task import Batch, Task
from phalanx.workload.workload import Workload


def compute_dtype_of(config: Config) -> torch.dtype:
    """The compute type; of `mixed` that of the devices that have it in 16 bits."""
    return DTYPES["bf16" if config.train.dtype == "mixed" else config.train.dtype]


def compute_activation_bytes(config: Config, workload: Workload, grows: bool = False) -> tuple[int, int, int]:
    """What a forward and backward pass adds at its height, in bytes of the device: once, for each sample outside of
    the blocks, and for each sample in each block; a custom network counts as outside.

    Walked with one and two blocks and one and three samples, as the probe of `train.micro_batch` does with memory; for
    what moves to the host with one more than stay and another. Where what is told `grows` with the length of rows,
    longer ones than a chunk of the loss are walked in chunks of one size, and a whole chunk of logits is counted: equal
    chunks of a row a little longer than one have half as many tokens.
    """
    depths, spec, chunk, more = choose_probe_depths(workload, config), workload.spec, None, 0
    if spec is not None:  # as on an accelerator: there a chunk of logits is larger than on a CPU
        chunk = whole = kernels.default_chunk(spec.vocab_size, torch.device("meta"))
        if workload.positions > whole and grows:
            chunk = math.ceil(workload.positions / math.ceil(workload.positions / whole))
            more = (whole - chunk) * spec.vocab_size * _logit_bytes(compute_dtype_of(config))
    peaks = {
        (depth, batch): _measure_peak_with_fakes(config, workload, depth, batch, chunk)
        for depth in depths
        for batch in (1, 3)
    }
    each = {depth: (peaks[depth, 3] - peaks[depth, 1]) // 2 for depth in depths}
    once = max(peaks[depth, 1] - each[depth] for depth in depths) + more
    first = each[depths[0]]
    if workload.spec is None:
        return once, first, 0
    block = max(each[depths[1]] - first, 0)
    return once, first - block * (depths[0] or 0), block


def _logit_bytes(dtype: torch.dtype) -> int:
    """Bytes of a logit at the height of the loss: itself, in float32 or better, its logarithm where that is not in the
    same memory, and the gradient to that of the chunk before."""
    wide = torch.promote_types(dtype, torch.float32).itemsize
    return 2 * dtype.itemsize + wide + (4 if dtype.itemsize < 4 else 0)


def _measure_peak_with_fakes(
    config: Config, workload: Workload, layers: int | None, batch: int, chunk: int | None
) -> int:
    """Bytes at the height of one forward and backward pass, beside parameters, with `chunk` tokens of the loss at a
    time; a gradient goes as soon as it is made, as what becomes of gradients is the engine's affair."""
    model, task, dtype = workload.model(layers), workload.task(), compute_dtype_of(config)
    eager = update_config(config, UNSHARDED)
    # Only what is done to the model's own code is wanted: there are no ranks and there is no state.
    mover = change_blocks(model, eager, torch.device("cpu"))
    rehearse(model)
    if workload.spec is None:
        cast_at_edges(model, dtype)
    else:
        for module in model.losses():
            module.cross_entropy_sum = functools.partial(kernels.cross_entropy_sum, chunk=chunk, sizes_only=True)
    real = task.collate(workload.make_probe_samples(batch))
    inputs: dict[str, torch.Tensor] = dict(real.inputs)
    # Offsets of documents are walked by their values, which a fake tensor has not; here each row is one document.
    if isinstance(task, CausalLMTask):
        inputs.pop("segments", None)
    with FakeTensorMode() as fake:
        _replace_by_fakes(model, dtype)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_forget)
        inputs = {name: fake.from_tensor(tensor) for name, tensor in inputs.items()}
        return measure_peak_bytes(model, task, Batch(inputs, real.weight, fake.from_tensor(real.samples)), mover)


def measure_peak_bytes(model: Model, task: Task, batch: Batch, mover: ActivationOffloader | None = None) -> int:
    """Most bytes that a forward and backward pass of `model` holds beside its parameters and `batch`, and beside what
    `mover` has on the host."""
    live = LiveBytes([*model.parameters(), *batch.inputs.values(), batch.samples])
    if mover is not None:
        mover.pool.make = live.exclude_allocations(mover.pool.make)
    with live:
        loss = task.loss_sum(model, batch, CounterRNG(0, 1, batch.samples))
        gradients.backward(loss, 1)
    return live.peak


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _replace_by_fakes(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fake = torch.empty(parameter.shape, dtype=dtype)
            module.register_parameter(name, nn.Parameter(fake, requires_grad=parameter.requires_grad))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, until each is freed; those of `known` do not count."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._here = True
        # By address: a storage is freed before its address can come again.
        self._alive = dict.fromkeys((tensor.untyped_storage()._cdata for tensor in known), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for memory in _storages(made):
            address, size = memory._cdata, memory.nbytes()
            if address not in self._alive:
                self._alive[address] = size = size if self._here else 0
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(memory, self._release, address)
        return made

    def exclude_allocations(self, make: Callable[[int, bool], torch.Tensor]) -> Callable[[int, bool], torch.Tensor]:
        """`make` for memory that is not the device's, and so does not count."""

        def made(size: int, pinned: bool) -> torch.Tensor:
            self._here = False
            try:
                return make(size, pinned)
            finally:
                self._here = True

        return made

    def _release(self, address: int) -> None:
        self.now -= self._alive.pop(address, 0)


def _storages(made: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in _pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor))
