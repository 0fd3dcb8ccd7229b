"""What must be looked up or measured before step 0: tokenizer, token files, the model's shapes, the micro-batch.

It reads files and computes, so a launcher calls it in a child process and takes the JSON-able answer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from phalanx.autotune.activations import choose
from phalanx.autotune.measure import given, work_of
from phalanx.autotune.micro_batch import Finding, check_state, largest_micro_batch, least_zero
from phalanx.config.load import NOT_COMPILED_ON_CPU, check, to_yaml, update
from phalanx.config.schema import Config, spec_of
from phalanx.config.validation import LABELLED
from phalanx.core.errors import ConfigError, DataError
from phalanx.core.run_paths import HELD_OUT
from phalanx.data.loader import Loader
from phalanx.data.prepare import Prepared, Progress
from phalanx.data.prepare_records import prepare_for
from phalanx.data.record_files import Columns
from phalanx.data.token_files import TokenFile
from phalanx.data.tokenizer import default_tokenizer
from phalanx.layout import balance
from phalanx.models.hf_config import read_config, spec_from_config
from phalanx.models.hf_weights import Weights
from phalanx.models.lora import fingerprint
from phalanx.models.user_model import check_class, shapes_of
from phalanx.optim.make_rule import make_rule
from phalanx.parallel.activations import check_horizon
from phalanx.parallel.parallelize import why_not_compiled
from phalanx.trainer.callback_runner import callback_class
from phalanx.trainer.run_folder import of_tokens
from phalanx.workload import adapters, local_copies
from phalanx.workload.bert import default_labels, holds_records
from phalanx.workload.custom import Own
from phalanx.workload.custom_checks import check_own
from phalanx.workload.engines import sharding_of
from phalanx.workload.workload import Subject, class_of_run, subject_of

ZERO_WHY = {
    1: "parameters and gradients take no more than half of each memory",
    2: "gradients would take more than half of a memory, too",
    3: "parameters and gradients would take more than half of a memory",
}
MICRO_BATCHES = 4  # for each stage of a pipeline: it is idle for about a fifth of a step then
Chosen = list[tuple[str, Any, str]]  # key, value, reason


def resolve_with_files(
    recipe: str, devices: Sequence[str], world: int, local_world: int, progress: Progress | None
) -> dict[str, Any]:
    """Resolve the remaining `auto`s of a configuration (as YAML text); everything a user can get wrong is found here.

    `devices` has one of each model that this process's node has. Returns {"config": YAML, "chosen": [[key, value,
    reason]], "parameters": their number, "trainable": that of what is trained, "base": what the weights beside adapters
    are known by, "weights": what those of model.from_hf are known by, "warnings": what a user should know, "train":
    [[folder, weight]], "held_out": {name: folder}, "data": what each set is known by, by name, "tokenizer": folder or
    None, "unit": what speed counts}.
    """
    wanted = check(yaml.safe_load(recipe), "the configuration")
    callback_class(wanted)  # a mistake in it is found before anything is measured
    compiled = compiling(wanted, devices)
    wanted = update(wanted, {key: value for key, value, _ in compiled})
    if wanted.task.kind == "own":
        answer = _resolve_own(wanted, devices, world, local_world)
    else:
        answer = _resolve_model(wanted, devices, world, local_world, progress)
    return answer | {"chosen": compiled + answer["chosen"]}


def compiling(config: Config, devices: Sequence[str]) -> Chosen:
    """Whether this node compiles blocks, where that is `auto`: on accelerators, after a trial on each of `devices`."""
    if config.train.compile != "auto":
        return []
    if any(torch.device(device).type == "cpu" for device in devices):
        return [("train.compile", False, NOT_COMPILED_ON_CPU)]
    for device in devices:
        if failure := why_not_compiled(torch.device(device)):
            return [("train.compile", False, f"torch.compile fails on {device}: {failure}")]
    return [("train.compile", True, f"torch.compile works on {devices[0].partition(':')[0]}")]


def _resolve_model(
    wanted: Config, devices: Sequence[str], world: int, local_world: int, progress: Progress | None
) -> dict[str, Any]:
    config = local_copies.fetched(wanted)
    make_rule(config.optim)  # its class may refuse a value
    chosen: Chosen = []
    hf_spec, code, known_weights = None, class_of_run(config), None
    if config.model.from_hf:
        folder = Path(config.model.from_hf).expanduser()
        hf_spec = spec_from_config(read_config(folder), str(folder), code.hf_config)
        spec_of(config, hf_spec)  # a sequence too long for it, say, before anything else is done
        weights = Weights(folder, code)
        weights.check(hf_spec)
        stored = shapes_of(code, hf_spec).keys() - set(weights.lacking(hf_spec))
        known_weights = fingerprint(weights.read, {name: weights.shape(name) for name in sorted(stored)})
    if config.data.tokenizer == "auto":
        chosen.append(("data.tokenizer", *default_tokenizer(config.model.from_hf)))
        config = update(config, {chosen[-1][0]: chosen[-1][1]})
    if hf_spec is not None:
        of_adapter = adapters.resolve(config, hf_spec, code)
        chosen += of_adapter
        config = update(config, {key: value for key, value, _ in of_adapter})
    prepared = prepare_for(config, progress)
    if config.task.kind in LABELLED and config.task.labels == "auto":
        chosen.append(("task.labels", *default_labels(config, _labels(prepared))))
        config = update(config, {"task.labels": chosen[-1][1]})
    if config.model.vocab_size == "auto" and hf_spec is None and not config.model.preset:
        chosen.append(("model.vocab_size", prepared.vocab_size, "the tokenizer's"))
        config = update(config, {"model.vocab_size": prepared.vocab_size})
    spec = spec_of(config, hf_spec)
    parameters = check_class(code, spec)
    in_adapters = adapters.check(config, spec, code) if spec.lora is not None else None
    subject = subject_of(config, spec)
    _check_data(prepared, spec.vocab_size, config, subject)
    fitting = _fitting(config, subject, devices, world, local_world)
    chosen += fitting
    config = update(config, {key: value for key, value, _ in fitting})
    return {
        "config": to_yaml(local_copies.restored(config, wanted)),
        "chosen": [(key, local_copies.original(value, wanted), reason) for key, value, reason in chosen],
        "parameters": parameters,
        "trainable": parameters if in_adapters is None else in_adapters,
        "base": None if in_adapters is None else adapters.base_of(config, spec, code),
        "weights": known_weights,
        "warnings": [] if in_adapters is None else adapters.warnings(config, spec, code),
        "train": [[str(folder), weight] for folder, weight in prepared.train],
        "held_out": {name: str(folder) for name, folder in prepared.held_out.items()},
        "data": {name: _known_by(folder, config) for name, folder in _named(prepared).items()},
        "tokenizer": str(prepared.tokenizer_folder),
        "unit": subject.unit,
    }


def _fitting(config: Config, subject: Subject, devices: Sequence[str], world: int, local_world: int) -> Chosen:
    """What follows from memory, where it is `auto`. Raises ConfigError for a model that no device can hold, for offload
    that would move nothing, and for what was measured for another job."""
    chosen: Chosen = []
    if config.parallel.data == "sharded" and config.parallel.zero == "auto":
        zero, why = 1, "the gradients of a pipeline's stages are summed until its step ends"
        if config.parallel.pipeline == 1:
            zero = least_zero(config, subject, devices, world=world, local_world=local_world)
            why = ZERO_WHY[zero]
        chosen.append(("parallel.zero", zero, why))
        if zero == 3 and config.optim.slots == 2:
            chosen.append(("optim.slots", 1, "with parallel.zero 3 there is nothing to update early"))
        config = update(config, {key: value for key, value, _ in chosen})
    if config.parallel.data == "sharded" and config.parallel.reduce == "auto":
        chosen.append(("parallel.reduce", sharding_of(config).reduce, f"parallel.zero is {config.parallel.zero}"))
        config = update(config, {chosen[-1][0]: chosen[-1][1]})
    for device in devices:
        check_state(config, subject, device, world=world, local_world=local_world)
    # Where shares follow the devices one may get nearly all there is, though they are alike now.
    work, batch, copies = config.balance.work, config.train.global_batch, config.parallel.axes.data(world)
    most = max(work) if isinstance(work, list) else max(balance.even(batch, copies)) if work == "even" else batch
    if config.parallel.pipeline > 1:  # of few micro-batches all stages but one would wait for most of a step
        most = max(1, most // (MICRO_BATCHES * copies * config.parallel.pipeline))

    def probe(tried: Config) -> list[Finding]:
        return [
            largest_micro_batch(tried, subject, device, world=world, local_world=local_world, most=most)
            for device in devices
        ]

    answers: Sequence[Finding] = ()
    if config.memory.activations == "auto":
        mode, why, answers = choose(config, subject, devices, local_world, probe)
        chosen.append(("memory.activations", mode, why))
        config = update(config, {"memory.activations": mode})
    elif config.memory.activations == "offload":
        check_horizon(len(subject.model().blocks()), config.memory.horizon)
    file = config.balance.hardware
    if file is not None and (local_world == world or Path(file).expanduser().exists()):  # rank 0's node has to have it
        given(file, [None] * world, work_of(config, subject))
    if config.train.micro_batch == "auto":
        answers = answers or probe(config)
        # The most that any rank may have: how much of it fits where is measured by the ranks themselves.
        found = max(answers, key=lambda answer: answer.micro_batch)
        chosen.append(("train.micro_batch", found.micro_batch, found.reason()))
    return chosen


def _resolve_own(config: Config, devices: Sequence[str], world: int, local_world: int) -> dict[str, Any]:
    """The same for a task of a user's own, which needs no files but that one."""
    make_rule(config.optim)
    own = Own(config)
    parameters = check_own(own, config)
    chosen = _fitting(config, own, devices, world, local_world)
    return {
        "config": to_yaml(update(config, {key: value for key, value, _ in chosen})),
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


def _named(prepared: Prepared) -> dict[str, Path]:
    """What a run is trained and evaluated on, by the names in its data.json."""
    several = len(prepared.train) > 1
    trained = {f"train {number}" if several else "train": path for number, (path, _) in enumerate(prepared.train, 1)}
    held_out = prepared.held_out.items()
    return trained | {name if name == HELD_OUT else f"validation {name}": path for name, path in held_out}


def token_folders(answer: dict[str, Any]) -> tuple[list[tuple[Path, float]], dict[str, Path]]:
    """The training sets with their weights, and the sets to evaluate on by name, of such an answer."""
    train = [(Path(folder), float(weight)) for folder, weight in answer["train"]]
    return train, {name: Path(folder) for name, folder in answer["held_out"].items()}


def _labels(prepared: Prepared) -> list[str]:
    """All labels that the prepared data has."""
    sets = [Columns(folder) for folder in [*(folder for folder, _ in prepared.train), *prepared.held_out.values()]]
    return [label for each in sets for label in each.facts["labels"]]


def _known_by(folder: Path, config: Config) -> dict[str, Any]:
    """What a set is known by."""
    if holds_records(config):
        records = Columns(folder)
        return {"records": records.count, "crc32": records.checksum}
    return of_tokens(TokenFile(folder))


def _check_data(prepared: Prepared, vocab_size: int, config: Config, subject: Subject) -> None:
    if prepared.vocab_size > vocab_size:
        trained = config.data.tokenizer == "train"
        which = "trained tokenizer" if trained else f"tokenizer {prepared.tokenizer_folder}"
        remedy = "lower data.tokenizer_vocab" if trained else "choose the tokenizer that belongs to the model"
        raise ConfigError(
            f"the {which} has {prepared.vocab_size} tokens but the model's vocabulary only {vocab_size}; {remedy}, or "
            "raise model.vocab_size"
        )
    Loader(subject.train(prepared.train), config.train.global_batch, config.train.seed, rank=0)
    opened: type[Columns] | type[TokenFile] = Columns if holds_records(config) else TokenFile
    held_out = {name: opened(folder) for name, folder in prepared.held_out.items()}
    for token_set in [*(opened(folder) for folder, _ in prepared.train), *held_out.values()]:
        token_set.verify_once()
    if not config.train.eval_sequences:
        return
    for name, rows in subject.held_out(prepared.held_out).items():
        if rows.count:
            continue
        file = held_out[name]
        less = "no record that is short enough"
        remedy = "raise data.held_out, lower data.seq_len"
        if isinstance(file, TokenFile):
            less = f"only {file.tokens} tokens, less than one sequence of {config.data.seq_len}"
            if not file.documents and name == HELD_OUT:
                documents = sum(TokenFile(folder).documents for folder, _ in prepared.train)
                less = f"no tokens: data.held_out {config.data.held_out:g} chose no document of {documents}"
                remedy = "raise it, name a set in data.validation"
        if name != HELD_OUT:
            raise DataError(f"data.validation {name} has {less}; add documents, lower data.seq_len, or remove it")
        if config.train.eval_every and len(held_out) == 1:
            raise DataError(
                f"train.eval_every asks for evaluations, but the held-out documents have {less}; {remedy}, or set "
                "train.eval_every=0"
            )
