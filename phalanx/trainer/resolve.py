"""Resolving each `auto` before step 0: tokenizer, token files, the model's shapes, the micro-batch.

It reads files and computes, so a launcher calls it in a child process and takes the JSON answer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from phalanx.autotune.activations import choose_activation_mode
from phalanx.autotune.measure import describe_work
from phalanx.autotune.micro_batch import (
    MicroBatchFit,
    bytes_of_other_keys,
    bytes_of_scores,
    check_state_fits,
    find_least_zero,
    largest_micro_batch,
)
from phalanx.autotune.probe_model import shorten_rows
from phalanx.autotune.rank_speeds import read_hardware_file
from phalanx.config.load import from_yaml, to_yaml, update_config
from phalanx.config.model_spec import LABELLED, build_model_spec, decide_experts
from phalanx.config.resolve import NOT_COMPILED_ON_CPU, decide_decay_steps, find_compile_obstacle
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, DataError
from phalanx.core.faults import Fault
from phalanx.core.run_paths import HELD_OUT, RunPaths
from phalanx.data.loader import Loader
from phalanx.data.prepare import PreparedData, Progress, prepare_for
from phalanx.data.record_files import RecordFile, TokenFile
from phalanx.data.tokenizer import default_tokenizer
from phalanx.layout import balance
from phalanx.models.hf_config import read_config, spec_from_config
from phalanx.models.hf_weights import Weights
from phalanx.models.lora import fingerprint_weights
from phalanx.models.user_model import check_model_class, shapes_of
from phalanx.optim.lr_schedule import check_schedule
from phalanx.optim.make_rule import make_rule
from phalanx.optim.own_class import OwnClassRule
from phalanx.parallel.activations import check_horizon
from phalanx.parallel.parallelize import find_compile_problem
from phalanx.trainer import run_folder
from phalanx.trainer.callback_runner import load_callback_class
from phalanx.trainer.run_folder import fingerprint_tokens
from phalanx.trainer.setup import TrainingJob
from phalanx.workload import adapters, local_copies
from phalanx.workload.bert import default_labels, uses_record_files
from phalanx.workload.context_task import resolve_context
from phalanx.workload.custom import CustomWorkload
from phalanx.workload.custom_checks import check_custom_task
from phalanx.workload.engines import make_sharding_spec
from phalanx.workload.workload import Workload, find_model_shape, make_workload, resolve_model_class

ZERO_REASONS = {
    1: "parameters and gradients take no more than half of each memory",
    2: "gradients would take more than half of a memory, too",
    3: "parameters and gradients would take more than half of a memory",
}
MICRO_BATCHES = 4  # per stage of a pipeline, which leaves about a fifth of a step idle
Chosen = list[tuple[str, Any, str]]  # key, value, reason


def resolve_with_files(
    recipe: str, devices: Sequence[str], world: int, local_world: int, progress: Progress | None
) -> dict[str, Any]:
    """Resolve the remaining `auto`s of a configuration (as YAML text), and check everything that a user may have got
    wrong.

    `devices` has one of each model that this process's node has. Returns {"config": YAML, "chosen": [[key, value,
    reason]], "parameters": their number, "trainable": number of trained parameters, "base": fingerprint of the weights
    beside adapters, "weights": fingerprint of those of model.from_hf, "warnings": texts, "train": [[folder, weight]],
    "held_out": {name: folder}, "data": fingerprint of each set by name, "tokenizer": folder or None, "unit": unit of
    the speed}.
    """
    wanted = from_yaml(recipe, "the configuration")
    load_callback_class(wanted)  # to find errors in it before anything is measured
    if wanted.task.kind != "custom":
        return _resolve_model(wanted, devices, world, local_world, progress)
    compiled = resolve_compile(wanted, devices)
    wanted = update_config(wanted, {key: value for key, value, _ in compiled})
    answer = _resolve_custom(wanted, devices, world, local_world)
    return answer | {"chosen": compiled + answer["chosen"]}


def resolve_compile(config: Config, devices: Sequence[str], experts: bool = False) -> Chosen:
    """Resolve `train.compile` = auto: blocks are compiled on accelerators, if a trial on each of `devices` succeeds.
    `experts`: the model has some."""
    if config.train.compile != "auto":
        return []
    if why := find_compile_obstacle(config, experts):
        return [("train.compile", False, why)]
    if any(torch.device(device).type == "cpu" for device in devices):
        return [("train.compile", False, NOT_COMPILED_ON_CPU)]
    for device in devices:
        if failure := find_compile_problem(torch.device(device)):
            return [("train.compile", False, f"torch.compile fails on {device}: {failure}")]
    return [("train.compile", True, f"torch.compile works on {devices[0].partition(':')[0]}")]


def _resolve_model(
    wanted: Config, devices: Sequence[str], world: int, local_world: int, progress: Progress | None
) -> dict[str, Any]:
    pinned = local_copies.pin_commits(wanted)
    wanted = update_config(wanted, {key: value for key, value, _ in pinned})
    config = local_copies.fetch_local_copies(wanted)
    _check_optimizer(config)
    chosen: Chosen = list(pinned)
    hf_spec, code, known_weights = None, resolve_model_class(config), None
    if config.model.from_hf:
        folder = Path(config.model.from_hf).expanduser()
        hf_spec = spec_from_config(read_config(folder), str(folder), code.hf_config)
        # Raises, for example, if sequences are too long, before anything else is done
        build_model_spec(config, hf_spec)
        weights = Weights(folder, code)
        weights.check(hf_spec)
        stored = shapes_of(code, hf_spec).keys() - set(weights.missing_parameters(hf_spec))
        known_weights = fingerprint_weights(weights.read, {name: weights.shape(name) for name in sorted(stored)})
    compiled = resolve_compile(config, devices, hf_spec is not None and hf_spec.moe is not None)
    chosen += compiled
    config = update_config(config, {key: value for key, value, _ in compiled})
    if config.data.tokenizer == "auto":
        chosen.append(("data.tokenizer", *default_tokenizer(config.model.from_hf)))
        config = update_config(config, {chosen[-1][0]: chosen[-1][1]})
    if hf_spec is not None:
        of_adapter = adapters.resolve_adapter_options(config, hf_spec, code)
        chosen += of_adapter
        config = update_config(config, {key: value for key, value, _ in of_adapter})
    of_experts = decide_experts(config, hf_spec)
    chosen += of_experts
    config = update_config(config, {key: value for key, value, _ in of_experts})
    prepared = prepare_for(config, progress)
    if config.task.kind in LABELLED and config.task.labels == "auto":
        chosen.append(("task.labels", *default_labels(config, _labels(prepared))))
        config = update_config(config, {"task.labels": chosen[-1][1]})
    if config.model.vocab_size == "auto" and hf_spec is None and not config.model.preset:
        chosen.append(("model.vocab_size", prepared.vocab_size, "the tokenizer's"))
        config = update_config(config, {"model.vocab_size": prepared.vocab_size})
    spec = build_model_spec(config, hf_spec)
    parameters = check_model_class(code, spec)
    in_adapters = adapters.check_adapters(config, spec, code) if spec.lora is not None else None
    subject = make_workload(config, spec)
    _check_data(prepared, spec.vocab_size, config, subject)
    length = _resolve_epochs(config, subject, prepared.train)
    chosen += length
    config = update_config(config, {key: value for key, value, _ in length})
    of_context = resolve_context(config, spec)
    chosen += of_context
    config = update_config(config, {key: value for key, value, _ in of_context})
    fitting = _resolve_memory(config, subject, devices, world, local_world)
    chosen += fitting
    config = update_config(config, {key: value for key, value, _ in fitting})
    return {
        "config": to_yaml(local_copies.restore_urls(config, wanted)),
        "chosen": [(key, local_copies.find_original_url(value, wanted), reason) for key, value, reason in chosen],
        "parameters": parameters,
        "trainable": parameters if in_adapters is None else in_adapters,
        "base": None if in_adapters is None else adapters.compute_base_fingerprint(config, spec, code),
        "weights": known_weights,
        "warnings": [] if in_adapters is None else adapters.adapter_warnings(config, spec, code),
        "train": [[str(folder), weight] for folder, weight in prepared.train],
        "held_out": {name: str(folder) for name, folder in prepared.held_out.items()},
        "data": {name: _fingerprint_set(folder, config) for name, folder in _sets_by_name(prepared).items()},
        "tokenizer": str(prepared.tokenizer_folder),
        "unit": subject.unit,
    }


def _resolve_epochs(config: Config, workload: Workload, folders: Sequence[tuple[Path, float]]) -> Chosen:
    """Resolve `train.steps`, and the keys that depend on it, from `train.epochs`: over all sources together."""
    train = config.train
    if train.epochs is None:
        return []
    sequences = Loader(workload.train_data(folders), train.global_batch, train.seed, rank=0).sequences
    steps = train.batches.count_steps(train.epochs * sequences)
    chosen: Chosen = [("train.steps", steps, f"train.epochs is {train.epochs:g}, of {sequences} sequences")]
    return chosen + list(decide_decay_steps(update_config(config, {"train.steps": steps})))


def _check_optimizer(config: Config) -> None:
    """Raises ConfigError if the optimizer's class rejects a value or the layout, or if the schedule is invalid."""
    rule = make_rule(config.optim)
    check_schedule(config.optim, config.train.steps)
    if not isinstance(rule, OwnClassRule) or rule.granularity == "element":
        return
    parallel = config.parallel
    for axis in ("tensor", "expert") if rule.granularity == "matrix" else ("tensor",):
        if getattr(parallel, axis) > 1:
            raise ConfigError(
                f"optim.name {config.optim.name} needs a {rule.granularity} whole, and cannot be combined with "
                f"parallel.{axis}; set parallel.{axis}=1"
            )
    if rule.granularity == "matrix" and parallel.engine == "fsdp2":
        raise ConfigError(
            f"optim.name {config.optim.name} needs a matrix whole, which parallel.engine fsdp2 cuts; set "
            "parallel.engine=sharded"
        )


def _resolve_memory(config: Config, workload: Workload, devices: Sequence[str], world: int, local_world: int) -> Chosen:
    """Resolve keys that depend on memory. Raises ConfigError for a model that no device can hold, for offload that
    would move nothing, and for measurements of a different job."""
    chosen: Chosen = []
    if config.parallel.engine == "sharded" and config.parallel.zero == "auto":
        zero, why = 1, "the gradients of a pipeline's stages are summed until its step ends"
        if config.parallel.pipeline == 1:
            zero = find_least_zero(config, workload, devices, world=world, local_world=local_world)
            why = ZERO_REASONS[zero]
        chosen.append(("parallel.zero", zero, why))
        if zero == 3 and config.optim.double_buffer:
            chosen.append(("optim.double_buffer", False, "with parallel.zero 3 no update can start early"))
        config = update_config(config, {key: value for key, value, _ in chosen})
    if config.parallel.engine == "sharded" and config.parallel.grad_reduce == "auto":
        chosen.append(
            ("parallel.grad_reduce", make_sharding_spec(config).reduce, f"parallel.zero is {config.parallel.zero}")
        )
        config = update_config(config, {chosen[-1][0]: chosen[-1][1]})
    for device in devices:
        check_state_fits(config, workload, device, world=world, local_world=local_world)
    # If shares follow the devices, one rank may get nearly all of a batch, even if they are equal now.
    work, batch, copies = (
        config.balance.batch,
        config.train.global_batch,
        config.parallel.axes.count_row_groups(world),
    )
    most = (
        max(work) if isinstance(work, list) else max(balance.split_evenly(batch, copies)) if work == "even" else batch
    )
    if config.parallel.pipeline > 1:  # with few micro-batches all stages but one would wait for most of a step
        most = max(1, most // (MICRO_BATCHES * copies * config.parallel.pipeline))

    def probe(tried: Config) -> list[MicroBatchFit]:
        keys, (short, part) = bytes_of_other_keys(tried, workload), shorten_rows(tried, workload)
        return [
            largest_micro_batch(
                short, part, device, world=world, local_world=local_world, most=most,
                more_sample_bytes=keys + bytes_of_scores(tried, workload, torch.device(device).type == "cpu"),
            )
            for device in devices
        ]  # fmt: skip

    answers: Sequence[MicroBatchFit] = ()
    if config.memory.activations == "auto":
        mode, why, answers = choose_activation_mode(config, workload, devices, local_world, probe)
        chosen.append(("memory.activations", mode, why))
        config = update_config(config, {"memory.activations": mode})
    elif config.memory.activations == "offload":
        check_horizon(len(workload.model().blocks()), config.memory.offload_prefetch_blocks)
    file = config.balance.hardware
    if file is not None and (local_world == world or Path(file).expanduser().exists()):  # rank 0's node must have it
        read_hardware_file(file, [None] * world, describe_work(config, workload))
    if config.train.micro_batch == "auto":
        answers = answers or probe(config)
        # The upper limit of any rank: the ranks themselves measure how much of it fits.
        found = max(answers, key=lambda answer: answer.micro_batch)
        why = found.reason()
        if config.parallel.context > 1:
            why += f"; a sample is an even part of one (parallel.context {config.parallel.context})"
        chosen.append(("train.micro_batch", found.micro_batch, why))
    return chosen


def _resolve_custom(config: Config, devices: Sequence[str], world: int, local_world: int) -> dict[str, Any]:
    """`resolve_with_files` for a custom task, which needs no other files."""
    _check_optimizer(config)
    own = CustomWorkload(config)
    parameters = check_custom_task(own, config)
    chosen = _resolve_epochs(config, own, [])
    if own.takes_whole_share:
        why = "batch norm is over the global batch, so a rank takes its share of a step at once"
        chosen.append(("train.micro_batch", config.train.global_batch, why))
    config = update_config(config, {key: value for key, value, _ in chosen})
    chosen += _resolve_memory(config, own, devices, world, local_world)
    return {
        "config": to_yaml(update_config(config, {key: value for key, value, _ in chosen})),
        "chosen": chosen,
        "parameters": parameters,
        "trainable": parameters,
        "base": None,
        "weights": None,
        "warnings": [],
        "train": [],
        "held_out": {},
        "data": own.fingerprints(),
        "tokenizer": None,
        "unit": own.unit,
    }


def _sets_by_name(prepared: PreparedData) -> dict[str, Path]:
    """The training and evaluation sets of a run, by the names in its data.json."""
    several = len(prepared.train) > 1
    trained = {f"train {number}" if several else "train": path for number, (path, _) in enumerate(prepared.train, 1)}
    held_out = prepared.held_out.items()
    return trained | {name if name == HELD_OUT else f"validation {name}": path for name, path in held_out}


def token_folders(answer: dict[str, Any]) -> tuple[list[tuple[Path, float]], dict[str, Path]]:
    """The training sets with their weights, and the evaluation sets by name, from the answer of
    `resolve_with_files`."""
    train = [(Path(folder), float(weight)) for folder, weight in answer["train"]]
    return train, {name: Path(folder) for name, folder in answer["held_out"].items()}


def make_training_job(answer: dict[str, Any], paths: RunPaths, faults: Sequence[Fault] = ()) -> TrainingJob:
    """The job of this node's ranks, from the answer of `resolve_with_files`."""
    config = from_yaml(answer["config"], "the resolved configuration")
    config = run_folder.use_kept_code(local_copies.use_local_copies(config), paths)
    return TrainingJob(config, find_model_shape(config, paths), paths, *token_folders(answer), faults=tuple(faults))


def _labels(prepared: PreparedData) -> list[str]:
    """All labels of the prepared data."""
    sets = [RecordFile(folder) for folder in [*(folder for folder, _ in prepared.train), *prepared.held_out.values()]]
    return [label for each in sets for label in each.facts["labels"]]


def _fingerprint_set(folder: Path, config: Config) -> dict[str, Any]:
    """Fingerprint of a set."""
    if uses_record_files(config):
        records = RecordFile(folder)
        return {"records": records.count, "crc32": records.checksum}
    return fingerprint_tokens(TokenFile(folder))


def _check_data(prepared: PreparedData, vocab_size: int, config: Config, workload: Workload) -> None:
    if prepared.vocab_size > vocab_size:
        trained = config.data.tokenizer == "train"
        which = "trained tokenizer" if trained else f"tokenizer {prepared.tokenizer_folder}"
        remedy = "lower data.tokenizer_vocab" if trained else "choose the tokenizer that belongs to the model"
        raise ConfigError(
            f"the {which} has {prepared.vocab_size} tokens but the model's vocabulary only {vocab_size}; {remedy}, or "
            "raise model.vocab_size"
        )
    Loader(workload.train_data(prepared.train), config.train.global_batch, config.train.seed, rank=0)
    opened: type[RecordFile] | type[TokenFile] = RecordFile if uses_record_files(config) else TokenFile
    held_out = {name: opened(folder) for name, folder in prepared.held_out.items()}
    for token_set in [*(opened(folder) for folder, _ in prepared.train), *held_out.values()]:
        token_set.verify_once()
    if not config.train.eval_sequences:
        return
    for name, rows in workload.eval_data(prepared.held_out).items():
        if rows.count:
            continue
        file = held_out[name]
        less = "no record short enough"
        remedy = "raise data.held_out, lower data.seq_len"
        if isinstance(file, TokenFile):
            less = f"only {file.tokens} tokens, less than one sequence of {config.data.seq_len}"
            if not file.documents and name == HELD_OUT:
                documents = sum(TokenFile(folder).documents for folder, _ in prepared.train)
                less = f"no tokens: data.held_out {config.data.held_out:g} chose no document of {documents}"
                remedy = "raise it, or give a set in data.validation"
        if name != HELD_OUT:
            raise DataError(f"data.validation {name} has {less}; add documents, lower data.seq_len, or remove it")
        if config.train.eval_every and len(held_out) == 1:
            raise DataError(
                f"train.eval_every asks for evaluations, but the held-out documents have {less}; {remedy}, or set "
                "train.eval_every=0"
            )
