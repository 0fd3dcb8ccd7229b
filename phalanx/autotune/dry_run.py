"""Dry run: parameters, memory by item, FLOPs and steps of a run, without data or device.

Sizes come from the true shapes of a model on meta and from the run's own functions; activations are measured by one
forward and backward pass with fake tensors, which have shapes and storages but no data.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from phalanx.autotune.fake_passes import compute_activation_bytes, compute_dtype_of
from phalanx.autotune.footprint import RankFootprint, compute_kept_activations, compute_slice_bytes, make_all_footprints
from phalanx.autotune.micro_batch import bytes_of_other_keys, bytes_of_scores
from phalanx.autotune.probe_model import shorten_rows
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
from phalanx.optim.make_rule import make_rule
from phalanx.parallel.activations import check_horizon
from phalanx.storage import files as storage
from phalanx.storage.local_copies import fetch_folder
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
            found["longest_rows"] = _find_longest_rows(config, ranks)
        return found


def _find_longest_rows(config: Config, ranks: int) -> dict[str, int]:
    """The longest row by GiB of a device, of a model with as many positions; of a folder's model that has no more than
    its own at most these."""
    even = config.parallel.context * config.parallel.tensor  # what ranks cut comes out even
    lengths = [-(-part * config.parallel.context // even) * even for part in PART_LENGTHS]
    try:
        return find_longest_rows({
            length: _count_total(config, ranks, {"data.seq_len": length, "model.max_seq_len": length})
            for length in lengths
        })  # fmt: skip
    except ConfigError:  # a table of positions, or a rule for so many
        spec = _make_workload(config)[1].spec
    assert spec is not None
    most = spec.max_seq_len // even * even
    half = max(2 * even, most // 2 // even * even)
    if half >= most:
        return {}
    known = {length: _count_total(config, ranks, {"data.seq_len": length}) for length in (half, most)}
    return {gib: min(length, most) for gib, length in find_longest_rows(known).items()}


def _count_total(config: Config, ranks: int, changes: dict[str, int]) -> int:
    """Bytes of a rank in all, of the recipe with these `changes`."""
    other = update_config(config, changes)
    total: int = _dry_run(other, ranks, [activation_mode_to_assume(other)])["memory_total"]
    return total


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

    dtype, rule = compute_dtype_of(config), make_rule(config.optim)
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
            config,
            compute_activation_bytes(
                update_config(row_part, {"memory.activations": mode}), part_subject, config.parallel.context > 1
            ),
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
    stream = workload.positions * workload.spec.hidden * compute_dtype_of(config).itemsize
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


def _parts_by_name(counts: dict[str, int]) -> dict[str, int]:
    """Parameters of a custom network, by the first part of their names."""
    parts: dict[str, int] = {}
    for name, count in counts.items():
        part = name.partition(".")[0]
        parts[part] = parts.get(part, 0) + count
    return parts
