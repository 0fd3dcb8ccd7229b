"""A command line of HetSeq 1.0.1 as a recipe, with the defaults of its `options.py`."""

import json
from collections.abc import Mapping
from pathlib import Path

from phalanx.compat.command_flags import BY_DEVICE, Flags, MappedCommand, to_number
from phalanx.core.errors import ConfigError
from phalanx.system.fork import fork_call

READ_TIMEOUT_S = 300.0  # of the heads of all shards
HETSEQ_REASONS = {
    **dict.fromkeys(
        ("distributed-init-method", "distributed-rank", "distributed-gpus", "distributed-no-spawn", "local-rank",
         "device-id"), "options of `phalanx train`: --nodes, --node-rank, --rendezvous, --ranks",
    ),
    **dict.fromkeys(
        ("distributed-backend", "ddp-backend", "bucket-cap-mb", "find-unused-parameters", "fix-batches-to-gpus",
         "fast-stat-sync", "num-workers", "cpu"), BY_DEVICE,
    ),
    **dict.fromkeys(("use-bmuf", "curriculum", "required-batch-size-multiple"), "samples are always shuffled"),
    **dict.fromkeys(
        ("restore-file", "reset-optimizer", "reset-lr-scheduler", "reset-dataloader", "reset-meters",
         "optimizer-overrides"), "the same command resumes",
    ),
    **dict.fromkeys(("log-format", "log-interval", "no-progress-bar"), "metrics.jsonl has every step"),
    **dict.fromkeys(
        ("save-interval", "save-interval-updates", "no-save", "no-epoch-checkpoints", "no-last-checkpoints",
         "keep-last-epochs"), "set checkpoint.every and checkpoint.keep, in steps",
    ),
    "hetseq-state-dict": "set model.from_hf to a Hugging Face folder",
    "num-file": "name files in data.source",
    "max-pred-length": "the shards hold the masked tokens",
    "max-tokens": "set data.seq_len and train.global_batch",
}  # fmt: skip


def map_hetseq(given: Mapping[str, list[str]]) -> MappedCommand:
    """A recipe of HetSeq's flags. Raises ConfigError for a task that needs a file of the user's."""
    flags, mapped = Flags(given), MappedCommand("HetSeq")
    put, task = mapped.put, flags.text("task")
    if task == "bert":
        _hetseq_bert(flags, mapped)
    elif task == "BertForTokenClassification":
        _hetseq_tags(flags, mapped)
    else:
        example = "vision_task" if task == "mnist" else "entity_linking"
        raise ConfigError(
            f"--task {task} has its own network; write it as a task (`phalanx recipes copy {example}`, task.code), "
            "which takes the other flags as keys of the recipe"
        )
    each = flags.count("max-sentences", flags.count("batch-size"))
    if each is None:
        raise ConfigError("--max-sentences is missing: the sequences of one GPU's batch")
    world, often = flags.count("distributed-world-size", 1), flags.count("update-freq", 1)
    put("train.global_batch", each * world * often)
    put("train.seed", flags.count("seed", 19940802))
    steps, epochs = flags.count("max-update", 0), flags.number("max-epoch", 0.0)
    if not steps and not epochs:
        raise ConfigError("neither --max-update nor --max-epoch says how long to train; give one of them")
    put("train.steps" if steps else "train.epochs", steps or epochs)
    if steps and epochs:
        mapped.passed_over["max-epoch"] = f"--max-update {steps} holds"
    mapped.run_dir = flags.text("save-dir", "checkpoints")
    if flags.has("disable-validation"):
        put("train.eval_sequences", 0)
    _hetseq_optimizer(flags, mapped)
    flags.pass_over(mapped, HETSEQ_REASONS)
    return mapped


def _hetseq_bert(flags: Flags, mapped: MappedCommand) -> None:
    put, file, data = mapped.put, flags.text("config-file"), flags.text("data")
    if file is None or data is None:
        raise ConfigError("--task bert needs --config_file and --data; its script needs them, too")
    try:
        shape = json.loads(Path(file).read_text(encoding="utf-8"))
        sizes = {
            "model.vocab_size": int(shape["vocab_size"]), "model.hidden": int(shape["hidden_size"]),
            "model.layers": int(shape["num_hidden_layers"]), "model.heads": int(shape["num_attention_heads"]),
            "model.intermediate": int(shape["intermediate_size"]),
            "model.max_seq_len": int(shape.get("max_position_embeddings", 512)),
            "model.dropout": float(shape.get("hidden_dropout_prob", 0.1)),
            "model.attention_dropout": float(shape.get("attention_probs_dropout_prob", 0.1)),
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--config_file {file} is no configuration of a BERT ({error}); correct it") from None
    put("model.architecture", "bert")
    for key, value in sizes.items():
        put(key, value)
    put("task.kind", "masked")
    put("task.next_sentence", True)
    put("data.source", [data])
    put("data.format", "masked")
    shards = [str(path) for path in Path(data).rglob("*") if path.suffix in (".hdf5", ".h5")]
    # NumPy, which HDF5 needs, starts threads, with which no ranks can be forked.
    length: int = fork_call(_find_row_length, shards, timeout_s=READ_TIMEOUT_S) if shards else 0
    put("data.seq_len", length or sizes["model.max_seq_len"])
    vocabulary = flags.text("dict")
    if vocabulary is None:
        raise ConfigError("--dict is missing: the vocab.txt of the tokenizer that made the shards")
    put("data.tokenizer", str(Path(vocabulary).parent))


def _find_row_length(shards: list[str]) -> int:
    from phalanx.data.file_formats import find_row_length

    return find_row_length(shards)


def _hetseq_tags(flags: Flags, mapped: MappedCommand) -> None:
    put, train = mapped.put, flags.text("train-file")
    if train is None:
        raise ConfigError("--train_file is missing: JSON lines of words and their tags")
    put("task.kind", "tag")
    folder = flags.text("transformers-state-dict")
    if folder is None:
        raise ConfigError("--transformers_state_dict is missing: a Hugging Face folder of a BERT to begin with")
    put("model.from_hf", folder)
    put("data.source", [train])
    if validation := flags.text("validation-file"):
        put("data.validation", {"validation": [validation]})


def _hetseq_optimizer(flags: Flags, mapped: MappedCommand) -> None:
    put, lr = mapped.put, flags.number("lr", 0.25)
    put("optim.lr", lr)
    put("optim.clip_norm", flags.number("clip-norm", 25.0) or None)
    chosen = str(flags.text("optimizer", "adam"))
    if chosen not in _OPTIMIZERS:
        raise ConfigError(f"--optimizer {chosen} is not HetSeq's; choose {' or '.join(_OPTIMIZERS)}")
    _OPTIMIZERS[chosen](flags, mapped)
    put("optim.schedule", "polynomial")
    put("optim.power", flags.number("power", 1.0))
    put("optim.warmup_steps", flags.count("warmup-updates", 0))
    put("optim.decay_steps", flags.count("total-num-update", 1_000_000))
    put("optim.min_lr_ratio", flags.number("end-learning-rate", 0.0) / lr)
    flags.has("lr-scheduler")


def _adam(flags: Flags, mapped: MappedCommand) -> None:
    put, betas = mapped.put, str(flags.text("adam-betas", "(0.9, 0.999)")).strip("()").split(",")
    put("optim.beta1", to_number("adam-betas", betas[0]))
    put("optim.beta2", to_number("adam-betas", betas[-1]))
    put("optim.eps", flags.number("adam-eps", 1e-8))
    put("optim.weight_decay", flags.number("weight-decay", 0.0))


def _adadelta(flags: Flags, mapped: MappedCommand) -> None:
    put, rho, eps = mapped.put, flags.number("adadelta-rho", 0.9), flags.number("adadelta-eps", 1e-6)
    put("optim.name", "adadelta")
    put("optim.options", {"rho": rho, "eps": eps})
    put("optim.weight_decay", flags.number("dadelta-weight-decay", 0.0))


_OPTIMIZERS = {"adam": _adam, "adadelta": _adadelta}
