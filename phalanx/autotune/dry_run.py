"""Dry run: parameters, memory by item, FLOPs and steps of a run, without data or device.

Sizes come from the true shapes of a model on meta and from the run's own functions; activations are measured by one
forward and backward pass with fake tensors, which have shapes and storages but no data.
"""

import contextlib
import functools
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.autotune.footprint import RankFootprint, compute_kept_activations, compute_slice_bytes, make_all_footprints
from phalanx.autotune.micro_batch import bytes_of_other_keys, bytes_of_scores, choose_probe_depths
from phalanx.autotune.probe_model import UNSHARDED, shorten_rows
from phalanx.autotune.rank_bytes import HEAD_GRADIENT, StateLayout, commit_bytes, state_items
from phalanx.autotune.run_size import (
    MODES,
    STATE_MEMORY_SHARE,
    RunSizes,
    activation_mode_to_assume,
    build_tables,
    count_by_part,
    describe_shape,
    find_longest_rows,
    max_samples_per_replica,
    micro_batch_to_assume,
)
from phalanx.config.load import update_config
from phalanx.config.resolve import has_vocabulary_of_tokenizer, resolve_autos
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.data.tokenizer import predict_vocab_size
from phalanx.engine.interface import Precision
from phalanx.models import layers as kernels
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.model import Model
from phalanx.optim import gradients
from phalanx.optim.make_rule import make_rule
from phalanx.parallel.activations import check_horizon
from phalanx.parallel.fp8_delayed import rehearse
from phalanx.parallel.offload import ActivationOffloader
from phalanx.parallel.parallelize import DTYPES, cast_at_edges, change_blocks
from phalanx.storage import files as storage
from phalanx.storage.local_copies import fetch_folder
from phalanx.tasks.language import CausalLMTask
from phalanx.tasks.task import Batch, Task
from phalanx.workload import adapters, local_copies
from phalanx.workload.context_task import resolve_context
from phalanx.workload.custom import CustomWorkload
from phalanx.workload.custom_checks import check_custom_task
from phalanx.workload.engines import make_sharding_spec
from phalanx.workload.workload import Workload, make_workload, read_model_shape, resolve_model_class

# Positions of a rank, of whose rows memory is walked: between them it grows about in proportion, as first the loss and
# then the blocks take most of what a longer row adds.
PART_LENGTHS = (4096, 16384, 32768, 65536, 131072)


def dry_run(config: Config, ranks: int) -> dict[str, Any]:
    """Sizes of the run that `config` describes on `ranks` ranks, as JSON-able tables; bytes are of one rank.

    Without a `train.dtype` it is reckoned for accelerators with bf16. Reads at most a tokenizer and a config.json.
    Raises ConfigError for what the run itself would refuse before it looks at data.
    """
    with tempfile.TemporaryDirectory() as temporary:
        config = _fetch_urls(config, Path(temporary))
        found = _dry_run(config, ranks)
        if config.parallel.context > 1:
            with contextlib.suppress(ConfigError):  # a table of positions has none for longer rows
                found["longest_rows"] = find_longest_rows({
                    length: _dry_run(other, ranks, [activation_mode_to_assume(other)])["memory_total"]
                    for length, other in (_with_rows_of(config, part) for part in PART_LENGTHS)
                })  # fmt: skip
        return found


def _with_rows_of(config: Config, part: int) -> tuple[int, Config]:
    """The recipe with rows of so many positions for each rank, up to what tensor parallelism cuts, of a model with as
    many; and their length."""
    length = part * config.parallel.context
    length += -length % config.parallel.tensor
    return length, update_config(config, {"data.seq_len": length, "model.max_seq_len": length})


def _fetch_urls(config: Config, temporary: Path) -> Config:
    """The recipe with local folders for those at URLs; of `model.from_hf` only the config.json is fetched."""
    url = config.model.from_hf
    if url is not None and storage.is_url(url):
        name = "config.json"
        try:
            storage.download(storage.join_url(url, name), temporary / name, config.resilience.storage_timeout_s)
        except FileNotFoundError:
            raise ConfigError(f"model.from_hf {url} has no {name}; name a Hugging Face folder") from None
        config = update_config(config, {"model.from_hf": str(temporary)})
    elif url is not None:
        folder = fetch_folder(url, config.data.cache, weights=False)
        config = update_config(config, {"model.from_hf": str(folder)})
    keys = [key for key in local_copies.FOLDER_KEYS if key != "data.tokenizer" or has_vocabulary_of_tokenizer(config)]
    return local_copies.fetch_local_copies(config, keys=keys)


def _dry_run(config: Config, ranks: int, modes: Sequence[str] = ()) -> dict[str, Any]:
    """`modes`: those of `memory.activations` that are walked, all if not given."""
    config, _ = resolve_autos(config, device="accelerator", world=ranks)
    labels_assumed = config.task.kind in ("tag", "classify") and config.task.labels == "auto"
    if labels_assumed:  # the data are not read
        config = update_config(config, {"task.labels": ["one", "other"]})
    config, subject, trained_vocabulary = _make_workload(config)
    model, spec = subject.model(), subject.spec
    counts = {name: each.numel() for name, each in model.named_parameters()}
    parts = count_by_part(counts) if spec is not None else _parts_by_name(counts)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)

    dtype, rule = _compute_dtype(config), make_rule(config.optim)
    copies = config.parallel.axes.data_parallel_size(ranks)
    shard_over = 1 if config.parallel.engine == "single" else copies
    sharding = make_sharding_spec(config) if config.parallel.engine == "sharded" else None
    shared = torch.float32 if config.train.dtype == "mixed" and ranks > 1 else dtype
    layout = StateLayout(Precision(dtype, shared), shard_over, rule, sharding, config.parallel.expert)
    held = make_all_footprints(subject, config)
    zero_needs = {}
    if (
        sharding is not None and config.parallel.zero == "auto" and config.parallel.pipeline == 1
    ):  # as probe.least_zero decides, once there is a device
        for zero in (1, 2):
            tried = replace(layout, sharding=make_sharding_spec(update_config(config, {"parallel.zero": zero})))
            needed = max(sum(state_items(each.model, spec, tried).values()) for each in held)
            zero_needs[str(zero)] = int(needed / STATE_MEMORY_SHARE)
    most, micro_batch = max_samples_per_replica(config, ranks), micro_batch_to_assume(config, ranks)
    row_part, part_subject = shorten_rows(config, subject)  # of an even part of each row
    walked = {
        mode: _scale_to_largest_part(
            config, compute_activation_bytes(update_config(row_part, {"memory.activations": mode}), part_subject)
        )
        for mode in modes or _modes(config)
    }
    if config.memory.activations == "offload":
        check_horizon(len(model.blocks()), config.memory.offload_prefetch_blocks)
    chosen = activation_mode_to_assume(config)
    memories, sequences = [], {}
    for each in held:
        state = state_items(each.model, spec, layout)
        # What the loss makes at once is measured with the activations, with the head's gradient in it.
        head = state.pop(HEAD_GRADIENT)
        kept = {
            mode: _kept_activation_bytes(config, part_subject, each, walked[mode], mode, micro_batch, most)
            for mode in walked
        }
        # Of the loss a stage has nothing without a head, and a slice of a head has no more gradient than that.
        whole_head = state_items(model, spec, replace(layout, ranks=1, sharding=None))[HEAD_GRADIENT]
        loss = max(0, walked[chosen][0] - (whole_head - head)) if head or spec is None or not whole_head else 0
        state["activations"] = kept[chosen][1]
        if keys := bytes_of_other_keys(config, subject):
            state["keys and values of other ranks"] = micro_batch * keys
            state["scores of attention"] = micro_batch * bytes_of_scores(config, subject)
        state["loss and the head's gradient" if spec is not None else "loss"] = loss
        memories.append(state)
        sequences[len(memories) - 1] = {mode: one // micro_batch for mode, (one, _) in kept.items()}
    fullest = max(range(len(held)), key=lambda number: sum(memories[number].values()))
    found = RunSizes(
        shape=type(model).__name__ if spec is None else describe_shape(spec),
        parts=parts,
        trained=trained,
        zero=None if sharding is None else sharding.zero,
        zero_needs=zero_needs,
        micro_batch=micro_batch,
        memory=memories[fullest],
        committed=commit_bytes(held[fullest].model, layout)[0],
        sequence=sequences[fullest],
        moments=len(rule.state_kinds),
        unit=subject.unit,
        positions=subject.positions,
        flops=subject.flops() or (0, 0),
        layout=_layout(config, copies, held, memories),
        vocabulary_trained=trained_vocabulary,
        labels_assumed=labels_assumed,
    )
    return build_tables(config, ranks, found)


def _scale_to_largest_part(config: Config, walked: tuple[int, int, int]) -> tuple[int, int, int]:
    """What was walked with an even part of each row, for the rank that has the largest part."""
    shares, (once, ends, block) = config.balance.context, walked
    if not isinstance(shares, list):
        return walked
    factor = max(shares) / sum(shares) * len(shares)
    return once, int(ends * factor), int(block * factor)


def _layout(
    config: Config, copies: int, held: Sequence[RankFootprint], memories: Sequence[dict[str, int]]
) -> dict[str, Any] | None:
    """The parts of the model by rank, where several ranks hold one copy; None where each holds all of it."""
    if config.parallel.axes.model_parallel_size == 1:
        return None
    return {
        "tensor": config.parallel.tensor,
        "sequence": config.parallel.sequence_parallel is True,
        "pipeline": config.parallel.pipeline,
        "schedule": config.parallel.schedule,
        "copies": copies,
        "ranks": [
            {
                "stages": [[stage, layers.start, layers.stop] for stage, layers in each.layers.items()],
                "parameters": each.parameters,
                "memory": sum(memory.values()),
            }
            for each, memory in zip(held, memories, strict=True)
        ],
    }


def _modes(config: Config) -> Sequence[str]:
    """The modes of `memory.activations` that the run may have."""
    if config.parallel.pipeline == 1:
        return MODES
    return ("none",) if config.parallel.schedule == "zero_bubble" else ("none", "selective", "full")


def _kept_activation_bytes(
    config: Config,
    workload: Workload,
    held: RankFootprint,
    walked: tuple[int, int, int],
    mode: str,
    micro_batch: int,
    most: int,
) -> tuple[int, int]:
    """Bytes of activations that a rank keeps of one micro-batch, and of all that it has under way; `most` is how many
    samples a copy of the model has in a step."""
    _, ends, block = walked
    if workload.spec is None:
        return (micro_batch * ends,) * 2
    stream = workload.positions * workload.spec.hidden * _compute_dtype(config).itemsize
    passes, mine = -(-most // micro_batch), micro_batch * compute_slice_bytes(config, block, stream, mode)
    behind = micro_batch * compute_slice_bytes(config, ends, stream, "none")
    return compute_kept_activations(config, held, passes, workload.spec.layers, behind, mine)


def _make_workload(config: Config) -> tuple[Config, Workload, bool]:
    """The configuration without `auto`s of the model, its subject, and whether a vocabulary is still to be trained."""
    if config.task.kind == "custom":
        own = CustomWorkload(config)
        check_custom_task(own, config)
        return config, own, False
    vocabulary = None
    if has_vocabulary_of_tokenizer(config):
        vocabulary = predict_vocab_size(config.data)
        config = update_config(config, {"model.vocab_size": vocabulary})
    spec = read_model_shape(config)
    config = update_config(config, {key: value for key, value, _ in resolve_context(config, spec)})
    if of_adapter := adapters.resolve_adapter_options(config, spec, resolve_model_class(config)):
        config = update_config(config, {key: value for key, value, _ in of_adapter})
        spec = read_model_shape(config)
    to_train = vocabulary is not None and config.data.tokenizer in ("train", "auto")
    return config, make_workload(config, spec), to_train


def _compute_dtype(config: Config) -> torch.dtype:
    """The compute type; of `mixed` that of the devices that have it in 16 bits."""
    return DTYPES["bf16" if config.train.dtype == "mixed" else config.train.dtype]


def compute_activation_bytes(config: Config, workload: Workload) -> tuple[int, int, int]:
    """What a forward and backward pass adds at its height, in bytes of the device: once, for each sample outside of
    the blocks, and for each sample in each block; a custom network counts as outside.

    Walked with one and two blocks and one and three samples, as the probe of `train.micro_batch` does with memory; for
    what moves to the host with one more than stay and another.
    """
    depths = choose_probe_depths(workload, config)
    peaks = {
        (depth, batch): _measure_peak_with_fakes(config, workload, depth, batch) for depth in depths for batch in (1, 3)
    }
    each = {depth: (peaks[depth, 3] - peaks[depth, 1]) // 2 for depth in depths}
    once = max(peaks[depth, 1] - each[depth] for depth in depths)
    first = each[depths[0]]
    if workload.spec is None:
        return once, first, 0
    block = max(each[depths[1]] - first, 0)
    return once, first - block * (depths[0] or 0), block


def _measure_peak_with_fakes(config: Config, workload: Workload, layers: int | None, batch: int) -> int:
    """Bytes at the height of one forward and backward pass, beside parameters; a gradient goes as soon as it is made,
    as what becomes of gradients is the engine's affair."""
    model, task, dtype = workload.model(layers), workload.task(), _compute_dtype(config)
    eager = update_config(config, UNSHARDED)
    # Only what is done to the model's own code is wanted: there are no ranks and there is no state.
    mover = change_blocks(model, eager, torch.device("cpu"))
    rehearse(model)
    if workload.spec is None:
        cast_at_edges(model, dtype)
    else:  # as on an accelerator: there a chunk of logits is larger than on a CPU
        chunk = kernels.default_chunk(workload.spec.vocab_size, torch.device("meta"))
        for module in model.losses():
            module.cross_entropy_sum = functools.partial(kernels.cross_entropy_sum, chunk=chunk)
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


def _parts_by_name(counts: dict[str, int]) -> dict[str, int]:
    """Parameters of a custom network, by the first part of their names."""
    parts: dict[str, int] = {}
    for name, count in counts.items():
        part = name.partition(".")[0]
        parts[part] = parts.get(part, 0) + count
    return parts
