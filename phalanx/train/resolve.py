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
from phalanx.data.tokens import TokenFile
from phalanx.errors import ConfigError, DataError
from phalanx.models.hf import Weights, read_config, spec_from_config
from phalanx.recipe import check, to_yaml, update
from phalanx.records import VOCABULARY_FILES
from phalanx.train.probe import check_state, largest_micro_batch

Chosen = list[tuple[str, Any, str]]  # key, value, reason


def resolve_with_files(
    recipe: str, devices: Sequence[str], world: int, local_world: int, progress: Progress | None
) -> dict[str, Any]:
    """Resolve the remaining `auto`s of a configuration (as YAML text); everything a user can get wrong is found here.

    `devices` has one of each model that this process's node has. Returns {"config": YAML, "chosen": [[key, value,
    reason]], "train", "held_out", "tokenizer": folders}.
    """
    config = check(yaml.safe_load(recipe), "the configuration")
    chosen: Chosen = []
    hf_spec = None
    if config.model.from_hf:
        folder = Path(config.model.from_hf).expanduser()
        hf_spec = spec_from_config(read_config(folder), str(folder))
        Weights(folder).check(hf_spec)
    if config.data.tokenizer == "auto":
        chosen.append(_tokenizer(config.model.from_hf))
        config = update(config, {chosen[-1][0]: chosen[-1][1]})
    if hf_spec is not None:
        spec_of(config, hf_spec)  # a sequence too long for it, say, before minutes are spent on data
    prepared = prepare(
        config.data.source,
        config.data.tokenizer,
        config.data.tokenizer_vocab,
        config.data.text_key,
        config.data.held_out,
        Path(config.data.cache).expanduser(),
        progress,
    )
    if config.model.vocab_size == "auto" and hf_spec is None and not config.model.preset:
        chosen.append(("model.vocab_size", prepared.vocab_size, "the tokenizer's"))
        config = update(config, {"model.vocab_size": prepared.vocab_size})
    spec = spec_of(config, hf_spec)
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
        "config": to_yaml(config),
        "chosen": chosen,
        "train": str(prepared.train),
        "held_out": str(prepared.held_out),
        "tokenizer": str(prepared.tokenizer_folder),
    }


def _tokenizer(from_hf: str | None) -> tuple[str, str, str]:
    if from_hf and any((Path(from_hf).expanduser() / name).is_file() for name in VOCABULARY_FILES):
        return "data.tokenizer", from_hf, "model.from_hf has one"
    if from_hf:
        raise ConfigError(
            f"model.from_hf {from_hf} has no tokenizer, and one trained anew would not match its weights; "
            "set data.tokenizer to the folder of its tokenizer"
        )
    return "data.tokenizer", "train", "no tokenizer was named"


def _check_data(prepared: Prepared, vocab_size: int, config: Config) -> None:
    if prepared.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer {prepared.tokenizer_folder} has {prepared.vocab_size} tokens but the model's vocabulary "
            f"only {vocab_size}; choose the tokenizer that belongs to the model, or raise model.vocab_size"
        )
    seq_len, batch = config.data.seq_len, config.train.global_batch
    Loader(TokenFile(prepared.train), seq_len, batch, seed=0, rank=0, micro_batch=1)
    held_out = TokenFile(prepared.held_out)
    for token_set in (TokenFile(prepared.train), held_out):
        token_set.verify_once()
    if config.train.eval_every and config.train.eval_sequences and held_out.tokens <= seq_len:
        raise DataError(
            f"train.eval_every asks for evaluations, but the held-out documents have only {held_out.tokens} tokens, "
            f"less than one sequence of {seq_len}; raise data.held_out, lower data.seq_len, or set train.eval_every=0"
        )
