"""Every knob of a run, typed and inert.

A recipe is a YAML file with the sections below (`load.py` reads it). Fields marked `trajectory` define the loss
curve: a run folder keeps them for good; all others may differ between two starts of the same run.
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue

from phalanx.config.fields import (
    Auto,
    Count,
    CountOrZero,
    Fraction,
    Positive,
    Section,
    Share,
    Steps,
    Text,
    as_list,
    as_shares,
    as_sources,
    as_stages,
    as_work,
    knob,
    reject_bool,
)
from phalanx.config.model import LoraSection, ModelSection
from phalanx.config.report import CallbackSection, ReportSection
from phalanx.config.resilience import ResilienceSection
from phalanx.config.slurm import SlurmSection
from phalanx.core.errors import ConfigError
from phalanx.layout import model_shape as shapes
from phalanx.layout import pipeline_stages
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.layout.model_shape import EncoderSpec, LoraSpec, ModelSpec, RopeScaling
from phalanx.models.families import catalog
from phalanx.models.families.catalog import DEFAULT_FAMILY, FAMILIES, PRESETS, family_of
from phalanx.models.families.family import ModelFamily, TaskChoice


class TaskSection(Section):
    """What a sample and its loss are."""

    kind: Literal["auto", "language", "masked", "tag", "classify", "custom"] = knob(
        "auto",
        "language: the next token; of a BERT masked: masked tokens, tag: a label for each word, classify: one for each "
        "text; custom: what task.code says; auto: custom where that is set, masked for a BERT, else language",
        trajectory=True,
    )
    mask_share: Fraction = knob(0.15, "masked: share of a sequence's tokens that are predicted", trajectory=True)
    whole_word: bool = knob(False, "masked: all pieces of a word are predicted, or none", trajectory=True)
    next_sentence: bool = knob(
        False, "masked: also whether the second of two segments follows the first", trajectory=True
    )
    labels: Annotated[list[Text], Field(min_length=1)] | Auto = knob(
        "auto",
        "tag and classify: names of the labels, in their order in the model; auto: those of from_hf where they are "
        "enough, else all that the data has",
        trajectory=True,
    )
    code: Text | None = knob(
        None, "a Python file whose class Task brings a network, data and a loss of one's own", trajectory=True
    )
    options: dict[Text, JsonValue] = knob({}, "arguments of that class", trajectory=True)


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
    format: Literal["text", "chat", "prompt", "masked"] = knob(
        "text",
        "text: running text; chat: conversations; prompt: prompts and completions; masked: HDF5 shards of sequences "
        "that are masked already",
        trajectory=True,
    )
    tokenizer: Text = knob(
        "auto", "a tokenizer folder; train: byte-level BPE on the source; auto: from_hf's, else train", trajectory=True
    )
    tokenizer_vocab: Annotated[int, Field(ge=257, le=2**20), BeforeValidator(reject_bool)] = knob(
        4096, "vocabulary of a trained tokenizer, tokens", trajectory=True
    )
    text_key: Text = knob("text", "the key of a JSONL line or Parquet row that holds the text", trajectory=True)
    messages_key: Text = knob("messages", "the key that holds the messages of a conversation", trajectory=True)
    prompt_key: Text = knob("prompt", "the key that holds a prompt", trajectory=True)
    completion_key: Text = knob("completion", "the key that holds its completion", trajectory=True)
    tokens_key: Text = knob("tokens", "tag: the key that holds the words of a sentence", trajectory=True)
    tags_key: Text = knob("ner_tags", "tag: the key that holds their tags", trajectory=True)
    label_key: Text = knob("label", "classify: the key or column that holds the label of a text", trajectory=True)
    pair_key: Text | None = knob(
        None, "classify: the key or column that holds a second text; default: there is none", trajectory=True
    )
    chat_template: Text | None = knob(
        None, "a Jinja file, or chatml, to use instead of the tokenizer's", trajectory=True
    )
    loss_on: Literal["assistant", "all"] = knob(
        "assistant", "chat and prompt: which tokens are learnt, the answers or everything", trajectory=True
    )
    too_long: Literal["truncate", "drop"] = knob(
        "truncate", "chat, prompt, tag, classify: what happens to a document longer than seq_len", trajectory=True
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
    loss_scale: Annotated[float, Field(ge=0.001, le=1e30), BeforeValidator(reject_bool)] = knob(
        65536.0, "fp16: first factor of the loss; halved when a gradient overflows", trajectory=True
    )
    loss_scale_growth_interval: Count = knob(
        2000, "fp16: steps without overflow after which it doubles", trajectory=True
    )
    tf32: bool = knob(False, "fp32 products in TF32, where the device has that: faster, and rounded", trajectory=True)
    deterministic: bool = knob(False, "only kernels that give the same bits each time; slower")
    compile: bool | Auto = knob("auto", "torch.compile each block; auto: on accelerators where a trial succeeds")
    eval_every: CountOrZero = knob(0, "steps between evaluations on held-out data; 0: only at the end")
    patience: CountOrZero = knob(
        0, "evaluations in a row with no lower held-out loss after which training ends; 0: it goes on to train.steps"
    )
    eval_sequences: CountOrZero = knob(64, "held-out sequences of one evaluation of each set; 0: none at all")
    profile: Steps | None = knob(None, "first-last steps to trace with torch.profiler, such as 10-12")
    memory_snapshot: CountOrZero = knob(0, "step whose allocations are recorded in a memory snapshot; 0: none")


class OptimSection(Section):
    """The update rule and its learning rate."""

    name: Text = knob(
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
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(reject_bool)] | Auto = knob(
        "auto",
        "decay of matrices, not of norms and other vectors; auto: 0.1 for adamw and adamw8bit, 0 for other rules",
        trajectory=True,
    )
    clip_norm: Positive | None = knob(1.0, "largest norm of the whole gradient; null: no clipping", trajectory=True)
    schedule: Literal["cosine", "linear", "constant", "polynomial", "wsd"] = knob(
        "cosine", "decay after warm-up; wsd: warm-up, stable, decay at the end", trajectory=True
    )
    power: Positive = knob(2.0, "exponent of the polynomial schedule", trajectory=True)
    decay_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), BeforeValidator(reject_bool)] = knob(
        0.2, "wsd: the last share of decay_steps, in which the learning rate falls", trajectory=True
    )
    decay_shape: Literal["linear", "sqrt", "cosine"] = knob(
        "linear", "wsd: how it falls; sqrt: as 1 - sqrt(share done)", trajectory=True
    )
    warmup_steps: CountOrZero = knob(0, "steps of linear warm-up", trajectory=True)
    double_buffer: bool = knob(
        False,
        "keep the state of the step before beside the new one, so that sharded ranks may update before all is reduced",
    )
    decay_steps: Count | Auto = knob(
        "auto", "step at which the decay ends; auto: train.steps at the start", trajectory=True
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(reject_bool)] = knob(
        0.1, "learning rate at the end of the decay, as a share of lr", trajectory=True
    )


class ParallelSection(Section):
    """How the work is spread over ranks."""

    layout: Literal["given", "auto"] = knob(
        "given",
        "auto: what `phalanx plan` finds fastest on the devices that are there, but for keys that the recipe writes; "
        "given: as the keys say",
    )
    engine: Literal["auto", "single", "sharded", "fsdp2"] = knob(
        "auto",
        "sharded: state and updates sharded over all ranks, in shares of any size; fsdp2: PyTorch's fully_shard; "
        "single: one rank, nothing to exchange",
    )
    zero: Literal["auto", 1, 2, 3] = knob(
        "auto",
        "what sharded keeps in shards between uses; 1: the optimizer's state; 2: gradients, too; 3: parameters, too; "
        "auto: the least with which the model takes no more than half of each memory",
    )
    shard_degree: Count | Auto = knob(
        "auto",
        "neighbouring ranks that hold one copy of the state together, as the next ones do; auto: all ranks hold one",
    )
    grad_reduce: Literal["auto", "per_step", "per_micro_batch"] = knob(
        "auto",
        "when gradients are summed over ranks; per_micro_batch keeps no whole gradients, but sends them each time; "
        "auto: per_step with zero 1, else per_micro_batch",
    )
    tensor: Count = knob(
        1, "neighbouring ranks that share every layer, each with a slice of its matrices; a divisor of the heads"
    )
    sequence_parallel: bool | Auto = knob(
        "auto",
        "with tensor, cut what is between the matrices along the sequence; auto: where data.seq_len divides",
    )
    pipeline: Count = knob(1, "stages, each some of the blocks on ranks of its own, one behind the other")
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = knob(
        "1f1b",
        "which stage works on which micro-batch when; gpipe: all forward, then all backward; 1f1b: in turns, holding "
        "less; interleaved: two stages for each rank; zero_bubble: gradients of weights fill the gaps",
    )
    layers_per_stage: Annotated[Literal["auto"] | list[Count], BeforeValidator(as_stages)] = knob(
        "auto", "blocks of each stage, in order; auto: as even as the head lets them be, fewer where devices are slower"
    )

    @property
    def resolve_sharding(self) -> tuple[int, Literal["per_step", "per_micro_batch"]]:
        """`zero` and `grad_reduce`, where nobody has looked at memories with as little sharded as possible; of fsdp2
        what it amounts to."""
        zero = 3 if self.engine == "fsdp2" else 1 if self.zero == "auto" else self.zero
        if self.grad_reduce != "auto":
            return zero, self.grad_reduce
        # Micro-batches of a pipeline overlap, so that there is no end of one to reduce at.
        return zero, "per_step" if zero == 1 or self.pipeline > 1 else "per_micro_batch"

    @property
    def axes(self) -> MeshAxes:
        """How many ranks hold one copy of the model."""
        return MeshAxes(self.tensor, self.pipeline)


class BalanceSection(Section):
    """Which rank does how much."""

    batch: Annotated[Literal["auto", "even", "measured-once"] | list[CountOrZero], BeforeValidator(as_work)] = knob(
        "auto",
        "sequences of a step for each rank; auto: as each is measured, again and again; measured-once: by "
        "hardware.json alone; even: the same for all; a list: the numbers themselves, in order of rank",
    )
    hardware: Text | None = knob(
        None,
        "a file that `phalanx hardware` wrote; null: that of the run folder, measured at the start if it is missing",
    )
    optimizer_state: Annotated[Literal["auto", "even"] | list[Share], BeforeValidator(as_shares)] = knob(
        "auto",
        "which part of the optimizer's state each rank holds; auto: equal parts, less where memory is short; even: "
        "equal parts; a list: in proportion to these numbers, in order of rank",
    )


class MemorySection(Section):
    """Memory for time."""

    activations: Literal["none", "selective", "full", "offload", "auto"] = knob(
        "none",
        "what is computed again in the backward pass; full: all but each block's input; selective: all but the results "
        "of attention and of matrix products; offload: as full, and the inputs wait in the host's memory; auto: the "
        "first of none, selective, and offload or full that fits",
    )
    offload_prefetch_blocks: Count = knob(
        2,
        "blocks ahead of the backward pass for which inputs come back with activations=offload; so many more stay on "
        "the device",
    )


class CommSection(Section):
    """Collectives."""

    timeout_s: Annotated[float, Field(gt=0, le=604800), BeforeValidator(reject_bool)] = knob(
        600.0, "seconds after which a collective that does not end is an error; a week at most"
    )
    compress: Literal["none", "bf16", "int8"] = knob(
        "none",
        "how gradients that cross nodes, and all weights, are rounded, which makes them shorter and the curve another; "
        "int8: blocks of 64 numbers with a scale; bf16: each by itself",
        trajectory=True,
    )


class CheckpointSection(Section):
    """What survives."""

    every: CountOrZero = knob(100, "steps between checkpoints; 0: only at the end and when asked to stop")
    keep: Count = knob(3, "newest checkpoints kept")
    best: bool = knob(False, "keep the checkpoint of the evaluation with the least held-out loss beside these")


class StorageSection(Section):
    """Who may read what is written."""

    private: bool = knob(
        False,
        "true: the run folder gets mode 0700 and its files 0600, and so does what else the run writes, such as token "
        "files in data.cache; false: as the umask says",
    )


class Config(Section):
    """A whole run."""

    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    parallel: ParallelSection = ParallelSection()
    balance: BalanceSection = BalanceSection()
    memory: MemorySection = MemorySection()
    comm: CommSection = CommSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resilience: ResilienceSection = ResilienceSection()
    storage: StorageSection = StorageSection()
    callback: CallbackSection = CallbackSection()
    report: ReportSection = ReportSection()
    slurm: SlurmSection = SlurmSection()


SHAPE_FIELDS = (
    "architecture", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "sliding_window",
    "max_seq_len", "rope_theta", "rope_scaling", "norm_eps", "tie_embeddings", "init_std",
)  # fmt: skip


def build_model_spec(config: Config, hf_spec: ModelSpec | None = None) -> ModelSpec:
    """The model's shapes from `config`, or from a Hugging Face folder's `hf_spec`. `model.vocab_size` must be resolved
    unless a preset or a folder gives it. Raises ConfigError with every impossible shape."""
    if config.model.preset is not None and config.model.preset not in PRESETS:
        raise ConfigError(catalog.describe_unknown_preset(config.model.preset))
    spec = build_requested_spec(config, hf_spec)
    if found := find_shape_problems(config, spec):
        raise ConfigError("the model's shapes are impossible: " + "; ".join(found))
    return spec


def build_requested_spec(config: Config, hf_spec: ModelSpec | None, vocab_size: int = 0) -> ModelSpec:
    """The shapes as they are asked for, possible or not; `vocab_size` stands in where nothing gives one."""
    model = config.model
    if hf_spec is not None:
        spec = hf_spec
    elif model.preset is not None:
        spec = PRESETS[model.preset]
    else:
        # `find_problems` has asked for these three.
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
            intermediate=catalog.default_intermediate(model.hidden),
            max_seq_len=config.data.seq_len,
        )
        spec = recipe_family(config).start(spec)
    given = {name: getattr(model, name) for name in SHAPE_FIELDS if getattr(model, name) is not None}
    if model.rope_scaling is not None:
        given["rope_scaling"] = RopeScaling(**model.rope_scaling.model_dump())
    if model.vocab_size != "auto":
        given["vocab_size"] = model.vocab_size
    spec = replace(spec, **given, dropout=model.dropout, lora=_lora(model.lora))
    if spec.encoder is not None or model.attention_dropout:
        encoder = spec.encoder or EncoderSpec()
        spec = replace(spec, encoder=replace(encoder, attention_dropout=model.attention_dropout))
    task = config.task
    labels = () if task.labels == "auto" else tuple(task.labels)
    return family_of(spec).complete(spec, given, TaskChoice(task.kind, task.next_sentence, labels))


def recipe_family(config: Config) -> ModelFamily:
    """The family that the recipe alone says the model is of."""
    preset = PRESETS.get(config.model.preset or "")
    name = config.model.architecture or (preset.architecture if preset else "")
    return FAMILIES.get(name, DEFAULT_FAMILY)


def is_custom_task(config: Config) -> bool:
    """Whether the task is of a user's own."""
    return config.task.code is not None


def default_task(config: Config) -> tuple[str, str]:
    """What `task.kind: auto` stands for, and why."""
    family = recipe_family(config)
    why = "task.code is not set" if family.writes_text else f"the model is a {family.title}"
    return ("custom", "task.code is set") if is_custom_task(config) else (family.tasks[0], why)


def _lora(section: LoraSection | None) -> LoraSpec | None:
    """The adapters that are asked for; None also as long as an `auto` of theirs is not resolved."""
    if section is None or section.rank == "auto" or section.alpha == "auto" or section.targets == "auto":
        return None
    ordered = tuple(name for name in shapes.LORA_TARGETS if name in section.targets)
    return LoraSpec(rank=section.rank, alpha=section.alpha, targets=ordered, dropout=section.dropout)


def find_shape_problems(config: Config, spec: ModelSpec) -> list[str]:
    """Why no such model can be, or none for these sequences."""
    found = [sentence.rstrip(".") for sentence in catalog.find_shape_problems(spec)]
    family, kind = family_of(spec), config.task.kind
    writes = family.writes_text
    if not writes and kind not in ("auto", *family.tasks):
        kinds = f"{', '.join(family.tasks[:-1])} or {family.tasks[-1]}"
        found.append(f"a {family.title} does not do task.kind {kind}; set it to {kinds}")
    able = [each for each in FAMILIES.values() if kind in each.tasks]
    if writes and able and family not in able:
        found.append(
            f"task.kind {kind} needs a {able[0].title}, and the model is a {family.name}; use another model or task"
        )
    if not writes and (config.model.lora is not None or config.model.code is not None):
        key = "model.lora" if config.model.lora is not None else "model.code"
        found.append(f"{key} is for models that predict the next token, and the model is a {family.title}; remove it")
    parallel = config.parallel
    if writes:
        own_code = config.model.code is not None
        found += catalog.find_tensor_problems(
            spec, parallel.tensor, config.data.seq_len, parallel.sequence_parallel is True, own_code
        )
    if writes and parallel.pipeline > 1:
        numbers = None if parallel.layers_per_stage == "auto" else parallel.layers_per_stage
        keep, compiled = config.memory.activations, config.train.compile is True
        found += pipeline_stages.find_stage_problems(
            spec.layers, parallel.pipeline, parallel.schedule, numbers, activations=keep, compiled=compiled
        )
    if config.data.seq_len > spec.max_seq_len:
        found.append(
            f"data.seq_len {config.data.seq_len} is longer than the model's {spec.max_seq_len} positions "
            "(model.max_seq_len); lower it"
        )
    return found


def iter_knobs(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, pydantic FieldInfo) of every knob."""
    for name, info in model.model_fields.items():
        section = get_section_type(info.annotation)
        if section is not None:
            yield from iter_knobs(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def get_knob(config: Config, key: str) -> Any:
    """The value of a dotted key; None below an absent optional section."""
    value: Any = config
    for part in key.split("."):
        value = None if value is None else getattr(value, part)
    return value


def get_section_type(annotation: Any) -> type[BaseModel] | None:
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    found = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    return found[0] if found else None
