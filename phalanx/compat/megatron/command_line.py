"""A command line of Megatron-LLaMA or Megatron-LM as a recipe, with the defaults of its `arguments.py`."""

from collections.abc import Mapping

from phalanx.compat.command_flags import BY_DEVICE, Flags, MappedCommand, to_number
from phalanx.compat.megatron.args import ACCEPTED
from phalanx.core.errors import ConfigError

_ALWAYS = "a LLaMA here always has it"
MEGATRON_REASONS = {
    **dict.fromkeys(
        ("use-rotary-position-embeddings", "no-position-embedding", "swiglu", "RMSNorm", "normalization",
         "disable-bias-linear", "causal-lm", "position-embedding-type", "untie-embeddings-and-output-weights",
         "rotary-percent"), _ALWAYS,
    ),
    **dict.fromkeys(
        ("use-flash-attn", "no-masked-softmax-fusion", "no-gradient-accumulation-fusion", "no-bias-gelu-fusion",
         "distributed-backend", "local-rank", "num-workers", "data-impl", "dataloader-type"), BY_DEVICE,
    ),
    **dict.fromkeys(
        ("overlapped-distributed-optimizer", "use-distributed-optimizer", "reduce-bucket-size",
         "last-bucket-split-count", "verify-grad-order", "accumulate-allreduce-grads-in-fp32",
         "distributed-checkpointing"), "state is sharded, sums are fp32 and transfers overlap anyway",
    ),
    **dict.fromkeys(
        ("load", "exit-on-missing-checkpoint", "finetune", "no-load-optim", "no-load-rng", "checkpoint-dir-name"),
        "the same command resumes; examples/import_megatron.py imports weights for model.from_hf",
    ),
    **dict.fromkeys(
        ("log-interval", "tensorboard-queue-size", "log-timers-to-tensorboard", "log-batch-size-to-tensorboard",
         "log-validation-ppl-to-tensorboard", "job-name", "wandb-exp-name"), "metrics.jsonl has every step",
    ),
    "exit-signal-handler": "signals always save first",
    "make-vocab-size-divisible-by": "shards are padded invisibly",
    "override-opt_param-scheduler": "the recipe's schedule holds",
}  # fmt: skip

_ISOLATE = ("reset-attention-mask", "reset-position-ids")

# Without one of each Megatron's model is none.
_OF_A_LLAMA = (("swiglu",), ("RMSNorm", "normalization"), ("use-rotary-position-embeddings", "position-embedding-type"),
               ("disable-bias-linear",))  # fmt: skip


def _check_llama(given: Mapping[str, list[str]]) -> None:
    for flags in _OF_A_LLAMA:
        if not given.keys() & set(flags):
            raise ConfigError(
                f"--{flags[0]} is missing, without which Megatron's model is no LLaMA; add it, or write a recipe for "
                "the model (model.architecture)"
            )
    for name, accepted in ACCEPTED.items():
        flag = name.replace("_", "-")
        word = (given.get(flag) or ["True"])[0]
        plain = {str(value) for value in accepted} | {f"{value}.0" for value in accepted}
        learned = word == "learned_absolute"  # which a checkpoint may state in vain
        if flag in given and (word not in plain or learned):
            raise ConfigError(f"--{flag} {word} makes another model than a LLaMA; write a recipe for the model")
    if given.get("expert-model-parallel-size", ["1"]) != ["1"]:
        raise ConfigError("--expert-model-parallel-size is of a model with experts; write a recipe with model.moe")


def map_megatron(given: Mapping[str, list[str]]) -> MappedCommand:
    """A recipe of the flags of Megatron-LLaMA or Megatron-LM."""
    flags, mapped = Flags(given), MappedCommand("Megatron")
    _check_llama(given)
    _megatron_model(flags, mapped)
    _megatron_data(flags, mapped)
    batch = _megatron_length(flags, mapped)
    _megatron_optimizer(flags, mapped)
    _megatron_layout(flags, mapped)
    put = mapped.put
    put("train.eval_every", flags.count("eval-interval", 1000))
    put("train.eval_sequences", flags.count("eval-iters", 100) * batch)
    put("checkpoint.every", flags.count("save-interval", 0))
    mapped.run_dir = flags.text("save")
    put("report.tensorboard", flags.has("tensorboard-dir"))
    if flags.has("wandb-project"):
        put("report.wandb", flags.text("wandb-project"))
    put("comm.timeout_s", 60.0 * flags.number("distributed-timeout-minutes", 10))
    flags.pass_over(mapped, MEGATRON_REASONS)
    return mapped


def _megatron_model(flags: Flags, mapped: MappedCommand) -> None:
    put, hidden, heads = mapped.put, flags.need("hidden-size"), flags.need("num-attention-heads")
    put("model.layers", flags.need("num-layers"))
    put("model.hidden", hidden)
    put("model.heads", heads)
    # Megatron rounds a gated layer's two thirds down to a multiple of 64.
    put("model.intermediate", flags.count("ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64))
    if flags.has("group-query-attention"):
        put("model.kv_heads", flags.count("num-query-groups", 1))
    if flags.has("kv-channels"):
        put("model.head_dim", flags.count("kv-channels"))
    put("model.norm_eps", flags.number("layernorm-epsilon", flags.number("norm-epsilon", 1e-5)))
    put("model.tie_embeddings", not flags.has("untie-embeddings-and-output-weights"))
    put("model.init_std", flags.number("init-method-std", 0.02))
    put("model.rope_theta", flags.number("rotary-base", 10000.0))
    if flags.has("max-position-embeddings"):
        put("model.max_seq_len", flags.count("max-position-embeddings"))
    put("model.dropout", flags.number("hidden-dropout", 0.1))
    put("model.attention_dropout", flags.number("attention-dropout", 0.1))
    factor = flags.number("rotary-seq-len-interpolation-factor", 1.0)
    if flags.has("use-rope-scaling"):
        if factor != 1.0:
            raise ConfigError(
                "--use-rope-scaling and --rotary-seq-len-interpolation-factor scale rotary positions by two rules; "
                "give one of them"
            )
        put("model.rope_scaling", {"rule": "llama3", "factor": flags.number("rope-scaling-factor", 8.0)})
    elif factor != 1.0:
        put("model.rope_scaling", {"rule": "linear", "factor": factor})


def _megatron_data(flags: Flags, mapped: MappedCommand) -> None:
    put, words = mapped.put, flags.words("data-path")
    if not words:
        raise ConfigError("--data-path is missing: name the prefix of an indexed data set")
    if len(words) == 1:
        put("data.source", [f"{words[0]}.idx"])
    else:
        if len(words) % 2:
            raise ConfigError("--data-path has neither one prefix nor pairs of weight and prefix; correct it")
        pairs = zip(words[::2], words[1::2], strict=True)
        put("data.source", [{"path": [f"{path}.idx"], "weight": to_number("data-path", w)} for w, path in pairs])
    parts = [to_number("split", part) for part in str(flags.text("split", "969, 30, 1")).replace("/", ",").split(",")]
    put("data.held_out", round(sum(parts[1:2]) / sum(parts), 6))
    put("data.seq_len", flags.need("seq-length"))
    if flags.text("tokenizer-type", "") == "PretrainedFromHF" and flags.has("tokenizer-name-or-path"):
        put("data.tokenizer", flags.text("tokenizer-name-or-path"))
    elif not flags.has("tokenizer-name-or-path"):
        raise ConfigError(
            "the tokenizer that made the data is not named as a folder; give --tokenizer-type PretrainedFromHF "
            "--tokenizer-name-or-path FOLDER"
        )
    isolated = flags.given.keys() >= set(_ISOLATE)
    flags.read |= set(_ISOLATE) if isolated else set()  # one of them alone has no counterpart
    put("data.isolate_documents", isolated)
    put("data.mask_document_end", flags.has("eod-mask-loss") and not isolated)


def _megatron_length(flags: Flags, mapped: MappedCommand) -> int:
    """Steps and batches; returns the global batch."""
    put, batch = mapped.put, flags.need("global-batch-size")
    put("train.global_batch", batch)
    put("train.micro_batch", flags.need("micro-batch-size"))
    if flags.has("rampup-batch-size"):
        put(
            "train.rampup_batch",
            [int(to_number("rampup-batch-size", word)) for word in flags.words("rampup-batch-size")],
        )
    samples = flags.count("train-samples")
    if samples is not None and flags.has("rampup-batch-size"):
        raise ConfigError("--train-samples with --rampup-batch-size: give the number of steps as --train-iters")
    put("train.steps", flags.need("train-iters") if samples is None else samples // batch)
    put("train.seed", flags.count("seed", 1234))
    if flags.has("exit-duration-in-mins"):
        put("train.stop_after", f"{flags.count('exit-duration-in-mins')}min")
    put("train.stop_every", flags.count("exit-interval", 0))
    half = [kind for kind in ("bf16", "fp16") if flags.has(kind)]
    put("train.dtype", half[0] if half else "fp32")
    if half == ["fp16"]:
        put("train.loss_scale", flags.number("loss-scale", flags.number("initial-loss-scale", 2.0**32)))
        put("train.loss_scale_growth_interval", flags.count("loss-scale-window", 1000))
    return batch


def _megatron_optimizer(flags: Flags, mapped: MappedCommand) -> None:
    put, lr, steps = mapped.put, flags.number("lr"), mapped.recipe["train"]["steps"]
    if not lr:
        raise ConfigError("--lr is missing; its script needs it, too")
    put("optim.lr", lr)
    put("optim.min_lr_ratio", flags.number("min-lr", 0.0) / lr)
    style = flags.text("lr-decay-style", "linear")
    if style not in ("constant", "linear", "cosine"):
        raise ConfigError(f"--lr-decay-style {style} is not known here; choose constant, linear or cosine")
    put("optim.schedule", style)
    batch = mapped.recipe["train"]["global_batch"]
    decay_samples, warmup_samples = (flags.count(f"lr-{name}-samples") for name in ("decay", "warmup"))
    decay = flags.count("lr-decay-iters", max(1, round(decay_samples / batch)) if decay_samples else steps)
    put("optim.decay_steps", decay)
    warmup = int(flags.number("lr-warmup-fraction", 0.0) * decay)
    warmup = max(1, round(warmup_samples / batch)) if warmup_samples else warmup
    put("optim.warmup_steps", flags.count("lr-warmup-iters", warmup))
    put("optim.weight_decay", flags.number("weight-decay", 0.01))
    put("optim.clip_norm", flags.number("clip-grad", 1.0) or None)
    chosen = str(flags.text("optimizer", "adam"))
    if chosen not in _OPTIMIZERS:
        raise ConfigError(f"--optimizer {chosen} is not Megatron's; choose {' or '.join(_OPTIMIZERS)}")
    _OPTIMIZERS[chosen](flags, mapped)


def _sgd(flags: Flags, mapped: MappedCommand) -> None:
    mapped.put("optim.name", "sgd")
    mapped.put("optim.options", {"momentum": flags.number("sgd-momentum", 0.9)})


def _adam(flags: Flags, mapped: MappedCommand) -> None:
    put = mapped.put
    put("optim.beta1", flags.number("adam-beta1", 0.9))
    put("optim.beta2", flags.number("adam-beta2", 0.999))
    put("optim.eps", flags.number("adam-eps", 1e-8))


_OPTIMIZERS = {"adam": _adam, "sgd": _sgd}


def _megatron_layout(flags: Flags, mapped: MappedCommand) -> None:
    put, tensor = mapped.put, flags.count("tensor-model-parallel-size", 1)
    put("parallel.tensor", tensor)
    if flags.has("sequence-parallel") and tensor > 1:
        put("parallel.sequence_parallel", True)
    put("parallel.pipeline", flags.count("pipeline-model-parallel-size", 1))
    put("parallel.context", flags.count("context-parallel-size", 1))
    if flags.has("num-layers-per-virtual-pipeline-stage"):
        put("parallel.schedule", "interleaved")
    granularity = flags.text("recompute-granularity", "selective" if flags.has("recompute-activations") else "none")
    put("memory.activations", granularity)
    flags.read |= {"recompute-activations", "recompute-method", "recompute-num-layers"}
