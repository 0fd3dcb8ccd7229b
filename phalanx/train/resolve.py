"""What must be looked up or measured before step 0: tokenizer, token files, the model's shapes, the micro-batch.

It reads files and computes, so a launcher calls it in a child process and takes the JSON-able answer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from phalanx import balance
from phalanx.config import Config, spec_of
from phalanx.data.loader import Loader
from phalanx.data.prepare import Prepared, Progress, prepare
from phalanx.data.tokenizer import default_tokenizer
from phalanx.data.tokens import TokenFile
from phalanx.errors import ConfigError, DataError
from phalanx.models.custom import check_class, model_class
from phalanx.models.hf import read_config, spec_from_config
from phalanx.models.weights import Weights
from phalanx.optim.choose import make_rule
from phalanx.recipe import check, to_yaml, update
from phalanx.records import HELD_OUT
from phalanx.train import adapters, copies
from phalanx.train.build import form_of
from phalanx.train.probe import check_state, largest_micro_batch

Chosen = list[tuple[str, Any, str]]  # key, value, reason


def resolve_with_files(
    recipe: str, devices: Sequence[str], world: int, local_world: int, progress: Progress | None
) -> dict[str, Any]:
    """Resolve the remaining `auto`s of a configuration (as YAML text); everything a user can get wrong is found here.

    `devices` has one of each model that this process's node has. Returns {"config": YAML, "chosen": [[key, value,
    reason]], "parameters": their number, "trainable": that of what is trained, "base": what the weights beside adapters
    are known by, "train": [[folder, weight]], "held_out": {name: folder}, "tokenizer": folder}.
    """
    wanted = check(yaml.safe_load(recipe), "the configuration")
    config = copies.fetched(wanted)
    make_rule(config.optim)  # its class may refuse a value
    chosen: Chosen = []
    hf_spec, code = None, model_class(config.model.code)
    if config.model.from_hf:
        folder = Path(config.model.from_hf).expanduser()
        hf_spec = spec_from_config(read_config(folder), str(folder), code)
        Weights(folder, code).check(hf_spec)
    if config.data.tokenizer == "auto":
        chosen.append(("data.tokenizer", *default_tokenizer(config.model.from_hf)))
        config = update(config, {chosen[-1][0]: chosen[-1][1]})
    if hf_spec is not None:
        of_adapter = adapters.resolve(config, hf_spec.layers, code)
        chosen += of_adapter
        config = update(config, {key: value for key, value, _ in of_adapter})
        spec_of(config, hf_spec)  # a sequence too long for it, say, before minutes are spent on data
    prepared = prepare(config.data, progress, storage_timeout_s=config.resilience.storage_timeout_s)
    if config.model.vocab_size == "auto" and hf_spec is None and not config.model.preset:
        chosen.append(("model.vocab_size", prepared.vocab_size, "the tokenizer's"))
        config = update(config, {"model.vocab_size": prepared.vocab_size})
    spec = spec_of(config, hf_spec)
    parameters = check_class(code, spec)
    in_adapters = adapters.check(config, spec, code) if spec.lora is not None else None
    _check_data(prepared, spec.vocab_size, config)
    for device in devices:
        check_state(config, spec, device, world=world, local_world=local_world)
    if config.train.micro_batch == "auto":
        most = max(balance.even(config.train.global_batch, world))
        answers = [
            largest_micro_batch(config, spec, device, world=world, local_world=local_world, most=most)
            for device in devices
        ]
        found = min(answers, key=lambda answer: answer.micro_batch)
        chosen.append(("train.micro_batch", found.micro_batch, found.reason()))
        config = update(config, {"train.micro_batch": found.micro_batch})
    return {
        "config": to_yaml(copies.restored(config, wanted)),
        "chosen": [(key, copies.original(value, wanted), reason) for key, value, reason in chosen],
        "parameters": parameters,
        "trainable": parameters if in_adapters is None else in_adapters,
        "base": None if in_adapters is None else adapters.base_of(config, spec, code),
        "train": [[str(folder), weight] for folder, weight in prepared.train],
        "held_out": {name: str(folder) for name, folder in prepared.held_out.items()},
        "tokenizer": str(prepared.tokenizer_folder),
    }


def token_folders(answer: dict[str, Any]) -> tuple[list[tuple[Path, float]], dict[str, Path]]:
    """The training sets with their weights, and the sets to evaluate on by name, of such an answer."""
    train = [(Path(folder), float(weight)) for folder, weight in answer["train"]]
    return train, {name: Path(folder) for name, folder in answer["held_out"].items()}


def _check_data(prepared: Prepared, vocab_size: int, config: Config) -> None:
    if prepared.vocab_size > vocab_size:
        trained = config.data.tokenizer == "train"
        which = "trained tokenizer" if trained else f"tokenizer {prepared.tokenizer_folder}"
        remedy = "lower data.tokenizer_vocab" if trained else "choose the tokenizer that belongs to the model"
        raise ConfigError(
            f"the {which} has {prepared.vocab_size} tokens but the model's vocabulary only {vocab_size}; {remedy}, or "
            "raise model.vocab_size"
        )
    form, batch = form_of(config), config.train.global_batch
    train = [(TokenFile(folder), weight) for folder, weight in prepared.train]
    held_out = {name: TokenFile(folder) for name, folder in prepared.held_out.items()}
    Loader(train, form, batch, config.train.seed, rank=0, micro_batch=1)
    for token_set in [*(file for file, _ in train), *held_out.values()]:
        token_set.verify_once()
    for name, file in held_out.items() if config.train.eval_sequences else ():
        if Loader([(file, 1.0)], form, batch, 0, rank=0, micro_batch=1, held_out=True).sequences:
            continue
        less = f"only {file.tokens} tokens, less than one sequence of {form.seq_len}"
        if name != HELD_OUT:
            raise DataError(f"data.validation {name} has {less}; add documents, lower data.seq_len, or remove it")
        if config.train.eval_every and len(held_out) == 1:
            raise DataError(
                f"train.eval_every asks for evaluations, but the held-out documents have {less}; raise data.held_out, "
                "lower data.seq_len, or set train.eval_every=0"
            )
