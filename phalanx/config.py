"""Every knob of a run, typed and inert.

A recipe is a YAML file with the sections below (`recipe.py` reads it). Fields marked `trajectory` define the loss
curve: a run folder keeps them for good; all others may differ between two starts of the same run.
"""

import difflib
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from phalanx import balance, rules
from phalanx.errors import ConfigError
from phalanx.models import spec as shapes
from phalanx.models.spec import MOST_LAYERS, PRESETS, LoraSpec, ModelSpec, RopeScaling
from phalanx.values import Auto, Count, CountOrZero, Fraction, Positive, Steps, Text, as_list, as_sources, no_bool

LoraTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]


def knob(default: Any, doc: str, *, trajectory: bool = False) -> Any:
    """A field with its documentation; `trajectory=True` where changing it changes the loss curve."""
    return Field(default=default, description=doc, json_schema_extra={"trajectory": trajectory})


class Section(BaseModel):
    """A group of knobs: immutable, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RopeScalingSection(Section):
    """Rotary frequencies stretched beyond the context they were trained for, as transformers does it."""

    rule: Literal["linear", "dynamic", "yarn", "llama3"] = knob(
        "llama3", "which frequencies are stretched; dynamic: none up to model.max_seq_len", trajectory=True
    )
    factor: Positive = knob(8.0, "how many times longer the context becomes", trajectory=True)
    low_freq_factor: Positive = knob(
        1.0, "llama3: wavelengths above original_max_seq_len / this are stretched", trajectory=True
    )
    high_freq_factor: Positive = knob(
        4.0, "llama3: wavelengths below original_max_seq_len / this are kept", trajectory=True
    )
    original_max_seq_len: Count = knob(
        8192, "llama3 and yarn: the context length before stretching, tokens", trajectory=True
    )
    beta_fast: Positive = knob(
        32.0, "yarn: waves that turn more often than this in original_max_seq_len are kept", trajectory=True
    )
    beta_slow: Positive = knob(1.0, "yarn: waves that turn less often than this are stretched", trajectory=True)
    attention_factor: Positive | None = knob(
        None, "yarn: scale of cosines and sines; default: 0.1 ln(factor) + 1", trajectory=True
    )


class LoraSection(Section):
    """Low-rank adapters: each chosen matrix W becomes W + alpha / rank * B A, and only A and B are trained."""

    adapter: Text | None = knob(None, "a PEFT adapter folder to start from; default: A drawn, B zero", trajectory=True)
    rank: Count | Auto = knob("auto", "rows of A, columns of B; auto: the adapter's, else 16", trajectory=True)
    alpha: Positive | Auto = knob(
        "auto", "the product is scaled by alpha / rank; auto: the adapter's, else twice the rank", trajectory=True
    )
    dropout: Fraction = knob(0.0, "probability of zeroing an input element of A", trajectory=True)
    targets: Annotated[list[LoraTarget], Field(min_length=1), BeforeValidator(as_list)] | Auto = knob(
        "auto",
        "which matrices of each block get an adapter: q, k, v, o, gate, up, down; auto: the adapter's, else all",
        trajectory=True,
    )


class ModelSection(Section):
    """What is trained. Shapes come from `preset` or `from_hf`; a shape set here replaces the preset's."""

    preset: Text | None = knob(
        None, "a published shape, such as llama-3.2-1b; see `phalanx config presets`", trajectory=True
    )
    from_hf: Text | None = knob(None, "a Hugging Face folder: its shapes and its weights", trajectory=True)
    architecture: Literal["llama", "mistral", "qwen2", "qwen3"] | None = knob(
        None,
        "qwen2 adds biases to q, k and v, qwen3 norms to q and k; default: the preset's, else llama",
        trajectory=True,
    )
    code: Text | None = knob(
        None, "a Python file whose class Model is trained instead of the built-in", trajectory=True
    )
    vocab_size: Count | Auto = knob(
        "auto", "rows of the embedding; auto: the preset's, else the tokenizer's", trajectory=True
    )
    hidden: Count | None = knob(None, "width of the residual stream", trajectory=True)
    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS), BeforeValidator(no_bool)] | None = knob(
        None, "number of blocks", trajectory=True
    )
    heads: Count | None = knob(None, "attention heads", trajectory=True)
    kv_heads: Count | None = knob(None, "key and value heads; default: as many as heads", trajectory=True)
    head_dim: Count | None = knob(None, "width of one head; default: hidden / heads", trajectory=True)
    intermediate: Count | None = knob(
        None, "width of the feed-forward layer; default: 8/3 hidden, up to a multiple of 64", trajectory=True
    )
    sliding_window: Count | None = knob(
        None, "tokens back that a position attends to, itself included (not for llama); default: all", trajectory=True
    )
    max_seq_len: Count | None = knob(
        None, "longest sequence the model is declared for, tokens; default: data.seq_len", trajectory=True
    )
    rope_theta: Positive | None = knob(None, "base of the rotary frequencies; default: 10000", trajectory=True)
    rope_scaling: RopeScalingSection | None = knob(
        None, "stretched rotary frequencies (Llama 3.1 and later)", trajectory=True
    )
    norm_eps: Positive | None = knob(None, "epsilon inside RMSNorm; default: 1e-5", trajectory=True)
    tie_embeddings: bool | None = knob(None, "the head shares the embedding's weights; default: false", trajectory=True)
    init_std: Positive | None = knob(None, "standard deviation of initial weights; default: 0.02", trajectory=True)
    dropout: Fraction = knob(0.0, "probability of zeroing a residual branch's output element", trajectory=True)
    lora: LoraSection | None = knob(None, "train small adapters beside frozen weights", trajectory=True)


class SourceSection(Section):
    """One source of a mixture."""

    path: Annotated[list[Text], Field(min_length=1), BeforeValidator(as_list)] = knob(
        ..., "files, folders, globs, URLs or hub: ids, as in data.source", trajectory=True
    )
    weight: Positive = knob(1.0, "its share of the sequences, relative to the other sources' weights", trajectory=True)


class DataSection(Section):
    """What it is trained on."""

    source: Annotated[list[Text | SourceSection], Field(min_length=1), BeforeValidator(as_sources)] = knob(
        ["stdlib"],
        "files, folders, globs, URLs or hub: ids; stdlib: this Python's own library; with path: and weight: a mixture",
        trajectory=True,
    )
    validation: dict[Text, Annotated[list[Text], Field(min_length=1), BeforeValidator(as_list)]] = knob(
        {}, "further sets to evaluate on, by name; all of their documents are held out", trajectory=True
    )
    format: Literal["text", "chat", "prompt"] = knob(
        "text", "text: running text; chat: conversations; prompt: prompts and completions", trajectory=True
    )
    tokenizer: Text = knob(
        "auto", "a tokenizer folder; train: byte-level BPE on the source; auto: from_hf's, else train", trajectory=True
    )
    tokenizer_vocab: Annotated[int, Field(ge=257, le=2**20), BeforeValidator(no_bool)] = knob(
        4096, "vocabulary of a trained tokenizer, tokens", trajectory=True
    )
    text_key: Text = knob("text", "the key of a JSONL line or Parquet row that holds the text", trajectory=True)
    messages_key: Text = knob("messages", "the key that holds the messages of a conversation", trajectory=True)
    prompt_key: Text = knob("prompt", "the key that holds a prompt", trajectory=True)
    completion_key: Text = knob("completion", "the key that holds its completion", trajectory=True)
    chat_template: Text | None = knob(
        None, "a Jinja file, or chatml, to use instead of the tokenizer's", trajectory=True
    )
    loss_on: Literal["assistant", "all"] = knob(
        "assistant", "chat and prompt: which tokens are learnt, the answers or everything", trajectory=True
    )
    too_long: Literal["truncate", "drop"] = knob(
        "truncate", "chat and prompt: what happens to a document longer than seq_len", trajectory=True
    )
    isolate_documents: bool = knob(
        False, "text: no attention across documents, as chat and prompt always have it", trajectory=True
    )
    held_out: Fraction = knob(0.02, "share of documents kept for evaluation, chosen by their hash", trajectory=True)
    seq_len: Count = knob(512, "tokens of one sequence", trajectory=True)
    cache: Text = knob("~/.cache/phalanx", "folder or URL for token files; safe to delete")
    workers: Count | Auto = knob("auto", "processes that tokenise; auto: one per core")


class TrainSection(Section):
    """How long and in what portions."""

    steps: CountOrZero = knob(1000, "optimizer steps; 0 only writes a checkpoint of the starting weights")
    global_batch: Count = knob(32, "sequences of one step, on any cluster", trajectory=True)
    micro_batch: Count | Auto = knob("auto", "sequences of one forward pass on one rank; auto: the most that fits")
    seed: CountOrZero = knob(0, "initial weights, data order and dropout", trajectory=True)
    dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64", "mixed"] = knob(
        "auto",
        "compute type; master weights stay fp32 under bf16 and fp16; mixed: the best that each device has; "
        "auto: bf16 on accelerators that have it, else fp16, fp32 on CPU, mixed where devices differ",
        trajectory=True,
    )
    loss_scale: Annotated[float, Field(ge=0.001, le=1e30), BeforeValidator(no_bool)] = knob(
        65536.0, "fp16: first factor of the loss; halved when a gradient overflows", trajectory=True
    )
    loss_scale_steps: Count = knob(2000, "fp16: steps without overflow after which it doubles", trajectory=True)
    compile: bool | Auto = knob("auto", "torch.compile each block; auto: on accelerators")
    eval_every: CountOrZero = knob(0, "steps between evaluations on held-out data; 0: only at the end")
    eval_sequences: CountOrZero = knob(64, "held-out sequences of one evaluation of each set; 0: none at all")
    profile: Steps | None = knob(None, "first-last steps to trace with torch.profiler, such as 10-12")
    memory_snapshot: CountOrZero = knob(0, "step whose allocations are recorded in a memory snapshot; 0: none")


class OptimSection(Section):
    """The update rule and its learning rate."""

    rule: Text = knob(
        "adamw",
        "adamw, adamw8bit (moments in 8 bits), or an element-wise class of torch.optim, such as sgd or adadelta",
        trajectory=True,
    )
    options: dict[Text, bool | int | float] = knob(
        {}, "further arguments of that class, such as momentum", trajectory=True
    )
    lr: Positive = knob(3e-4, "peak learning rate", trajectory=True)
    beta1: Fraction = knob(0.9, "decay of the gradient's mean", trajectory=True)
    beta2: Fraction = knob(0.95, "decay of the gradient's square", trajectory=True)
    eps: Positive = knob(1e-8, "added to the root of the squared gradient", trajectory=True)
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(no_bool)] | Auto = knob(
        "auto",
        "decay of matrices, not of norms and other vectors; auto: 0.1 for adamw and adamw8bit, 0 for other rules",
        trajectory=True,
    )
    clip_norm: Positive | None = knob(1.0, "largest norm of the whole gradient; null: no clipping", trajectory=True)
    schedule: Literal["cosine", "linear", "constant", "polynomial", "wsd"] = knob(
        "cosine", "decay after warm-up; wsd: warm-up, stable, decay at the end", trajectory=True
    )
    power: Positive = knob(2.0, "exponent of the polynomial schedule", trajectory=True)
    decay_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), BeforeValidator(no_bool)] = knob(
        0.2, "wsd: the last share of decay_steps, in which the learning rate falls", trajectory=True
    )
    decay_shape: Literal["linear", "sqrt", "cosine"] = knob(
        "linear", "wsd: how it falls; sqrt: as 1 - sqrt(share done)", trajectory=True
    )
    warmup_steps: CountOrZero = knob(0, "steps of linear warm-up", trajectory=True)
    decay_steps: Count | Auto = knob(
        "auto", "step at which the decay ends; auto: train.steps at the start", trajectory=True
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(no_bool)] = knob(
        0.1, "learning rate at the end of the decay, as a share of lr", trajectory=True
    )


class ParallelSection(Section):
    """How the work is spread over ranks."""

    data: Literal["auto", "single", "fsdp2"] = knob(
        "auto", "fsdp2: parameters and state sharded over all ranks; single: one rank, nothing to exchange"
    )


class MemorySection(Section):
    """Memory for time."""

    activations: Literal["none", "selective", "full"] = knob(
        "none",
        "what is computed again in the backward pass; full: all but each block's input; selective: all but the results "
        "of attention and of matrix products",
    )


class CommSection(Section):
    """Collectives."""

    timeout_s: Annotated[float, Field(gt=0, le=604800), BeforeValidator(no_bool)] = knob(
        600.0, "seconds after which a collective that does not end is an error; a week at most"
    )


class CheckpointSection(Section):
    """What survives."""

    every: CountOrZero = knob(100, "steps between checkpoints; 0: only at the end and when asked to stop")
    keep: Count = knob(3, "newest checkpoints kept")


class ResilienceSection(Section):
    """What happens when something breaks."""

    max_restarts: CountOrZero = knob(3, "restarts after failures without a new checkpoint in between, before giving up")
    storage_timeout_s: Annotated[float, Field(gt=0, le=604800), BeforeValidator(no_bool)] = knob(
        300.0, "seconds for which an operation of a remote store that fails or stalls is tried again"
    )


class ReportSection(Section):
    """What is shown."""

    tensorboard: bool = knob(True, "write TensorBoard event files")
    wandb: Text | None = knob(None, "Weights & Biases project to log to; needs the wandb package")


class Config(Section):
    """A whole run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    parallel: ParallelSection = ParallelSection()
    memory: MemorySection = MemorySection()
    comm: CommSection = CommSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resilience: ResilienceSection = ResilienceSection()
    report: ReportSection = ReportSection()


SHAPE_FIELDS = (
    "architecture", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "sliding_window",
    "max_seq_len", "rope_theta", "rope_scaling", "norm_eps", "tie_embeddings", "init_std",
)  # fmt: skip


def spec_of(config: Config, hf_spec: ModelSpec | None = None) -> ModelSpec:
    """The model's shapes from `config`, or from a Hugging Face folder's `hf_spec`. `model.vocab_size` must be resolved
    unless a preset or a folder gives it. Raises ConfigError with every impossible shape."""
    if config.model.preset is not None and config.model.preset not in PRESETS:
        raise ConfigError(_unknown_preset(config.model.preset))
    spec = _shape(config, hf_spec)
    if found := _shape_problems(config, spec):
        raise ConfigError("the model's shapes are impossible: " + "; ".join(found))
    return spec


def _shape(config: Config, hf_spec: ModelSpec | None, vocab_size: int = 0) -> ModelSpec:
    """The shapes as they are asked for, possible or not; `vocab_size` stands in where nothing gives one."""
    model = config.model
    if hf_spec is not None:
        spec = hf_spec
    elif model.preset is not None:
        spec = PRESETS[model.preset]
    else:
        # `problems` has asked for these three.
        assert model.hidden
        assert model.layers
        assert model.heads
        spec = ModelSpec(
            vocab_size=vocab_size,
            hidden=model.hidden,
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.heads,
            head_dim=max(1, model.hidden // model.heads),
            intermediate=default_intermediate(model.hidden),
            max_seq_len=config.data.seq_len,
        )
    given = {name: getattr(model, name) for name in SHAPE_FIELDS if getattr(model, name) is not None}
    if model.rope_scaling is not None:
        given["rope_scaling"] = RopeScaling(**model.rope_scaling.model_dump())
    if model.vocab_size != "auto":
        given["vocab_size"] = model.vocab_size
    return replace(spec, **given, dropout=model.dropout, lora=_lora(model.lora))


def _lora(section: LoraSection | None) -> LoraSpec | None:
    """The adapters that are asked for; None also as long as an `auto` of theirs is not resolved."""
    if section is None or section.rank == "auto" or section.alpha == "auto" or section.targets == "auto":
        return None
    ordered = tuple(name for name in shapes.LORA_TARGETS if name in section.targets)
    return LoraSpec(rank=section.rank, alpha=section.alpha, targets=ordered, dropout=section.dropout)


def _shape_problems(config: Config, spec: ModelSpec) -> list[str]:
    found = [sentence.rstrip(".") for sentence in shapes.problems(spec)]
    if config.data.seq_len > spec.max_seq_len:
        found.append(
            f"data.seq_len {config.data.seq_len} is longer than the model's {spec.max_seq_len} positions "
            "(model.max_seq_len); lower it"
        )
    return found


def _unknown_preset(name: str) -> str:
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(PRESETS)}"
    return f"model.preset {name!r} is not known; {hint}"


def problems(config: Config) -> list[str]:
    """Combinations that cannot work, as sentences; pure numbers and no files."""
    found = []
    model, train, optim, data = config.model, config.train, config.optim, config.data
    shape_given = [name for name in SHAPE_FIELDS if getattr(model, name) is not None]
    if model.preset and model.from_hf:
        found.append("model.preset and model.from_hf both say what the shapes are; remove one of them")
    elif model.from_hf and (shape_given or model.vocab_size != "auto"):
        named = ", ".join(
            f"model.{name}" for name in [*shape_given, *(["vocab_size"] if model.vocab_size != "auto" else [])]
        )
        found.append(f"{named} cannot be set together with model.from_hf, whose folder fixes the shapes; remove it")
    elif not model.preset and not model.from_hf:
        missing = [f"model.{name}" for name in ("hidden", "layers", "heads") if getattr(model, name) is None]
        if missing:
            found.append(f"{', '.join(missing)} must be set, or model.preset, or model.from_hf")
        else:
            found += _shape_problems(config, _shape(config, None, vocab_size=1))
    elif model.preset and model.preset not in PRESETS:
        found.append(_unknown_preset(model.preset))
    elif model.preset:
        found += _shape_problems(config, _shape(config, None))
    if model.lora is not None and not model.from_hf:
        why = "model.lora trains adapters beside frozen weights, and weights that were only drawn are worth no adapter"
        found.append(f"{why}; set model.from_hf to the folder of a trained model, or remove model.lora")
    if train.micro_batch != "auto" and train.micro_batch > train.global_batch:
        found.append(
            f"train.micro_batch {train.micro_batch} is larger than train.global_batch {train.global_batch}; lower it"
        )
    changed = {key for key, info in type(optim).model_fields.items() if getattr(optim, key) != info.default}
    found += rules.problems(optim.model_dump(), changed)
    if data.held_out == 0 and not data.validation and train.eval_sequences > 0 and train.eval_every > 0:
        found.append("train.eval_every asks for evaluations but data.held_out is 0; set data.held_out or eval_every=0")
    if "held_out" in data.validation:
        found.append("data.validation names a set held_out, as what data.held_out keeps back is called; rename it")
    found += _mixture_problems(data.source)
    if not data.cache:
        found.append("data.cache is empty, so token files would lie all over the working folder; name a folder or URL")
    if data.format == "text":
        unread = {"chat_template": None, "loss_on": "assistant", "too_long": "truncate"}
        for name in [name for name, default in unread.items() if getattr(data, name) != default]:
            found.append(f"data.{name} is for conversations and prompts, but data.format is text; remove it")
    return found + _inside_problems(train)


def _inside_problems(train: TrainSection) -> list[str]:
    """What is wrong with the steps that are to be looked into."""
    found = []
    snapshot = train.memory_snapshot
    if snapshot > train.steps:
        found.append(f"train.memory_snapshot {snapshot} comes after the last step {train.steps}; lower it")
    if train.profile is not None:
        first, last = (int(part) for part in train.profile.split("-"))
        if first > last:
            found.append(f"train.profile {train.profile} ends before it begins; write the first step first")
        elif last > train.steps:
            found.append(f"train.profile {train.profile} goes beyond the last step {train.steps}; lower it")
        elif first <= snapshot <= last:
            found.append(
                f"train.memory_snapshot {snapshot} lies within train.profile {train.profile}, and both trace; choose a "
                "step outside"
            )
    return found


def _mixture_problems(sources: list[str | SourceSection]) -> list[str]:
    weights = [source.weight if isinstance(source, SourceSection) else 1.0 for source in sources]
    if not any(isinstance(source, SourceSection) for source in sources):
        return []
    least = sum(weights) / balance.MIXTURE_BLOCK
    # Raising it raises the sum, too, and what is rounded must be rounded up.
    enough = sum(weight for weight in weights if weight >= least) / max(1, balance.MIXTURE_BLOCK - len(weights)) * 1.01
    return [
        f"data.source gives {', '.join(source.path)} the weight {source.weight:g}, less than one sequence in "
        f"{balance.MIXTURE_BLOCK}; raise it to {enough:.3g} or more, or remove that source"
        for source in sources
        if isinstance(source, SourceSection) and source.weight < least
    ]


def leaves(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, pydantic FieldInfo) of every knob."""
    for name, info in model.model_fields.items():
        section = section_of(info.annotation)
        if section is not None:
            yield from leaves(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def get(config: Config, key: str) -> Any:
    """The value of a dotted key; None below an absent optional section."""
    value: Any = config
    for part in key.split("."):
        value = None if value is None else getattr(value, part)
    return value


def section_of(annotation: Any) -> type[BaseModel] | None:
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    found = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    return found[0] if found else None


def default_intermediate(hidden: int) -> int:
    """Feed-forward width when none is given: 8/3 of the hidden width (Shazeer 2020), up to a multiple of 64."""
    return math.ceil(8 * hidden / 3 / 64) * 64
