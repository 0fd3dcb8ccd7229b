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

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from phalanx.errors import ConfigError
from phalanx.models import spec as shapes
from phalanx.models.spec import MOST_LAYERS, PRESETS, ModelSpec, RopeScaling

Auto = Literal["auto"]


def _no_bool(value: Any) -> Any:
    # Pydantic would read YAML's `true` as the number 1; in a recipe that is a slip of the pen.
    if isinstance(value, bool):
        raise ValueError("is a number, not true or false")
    return value


def _plain(value: str) -> str:
    # YAML can spell both as an escape; no file name and no text of a corpus holds them.
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("holds a character that is not text; remove it")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_plain)]
Count = Annotated[int, Field(ge=1, le=2**53), BeforeValidator(_no_bool)]
CountOrZero = Annotated[int, Field(ge=0, le=2**53), BeforeValidator(_no_bool)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_no_bool)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(_no_bool)]


def knob(default: Any, doc: str, *, trajectory: bool = False) -> Any:
    """A field with its documentation; `trajectory=True` where changing it changes the loss curve."""
    return Field(default=default, description=doc, json_schema_extra={"trajectory": trajectory})


class Section(BaseModel):
    """A group of knobs: immutable, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RopeScalingSection(Section):
    """The `llama3` rule that stretches rotary frequencies beyond the context they were trained for."""

    factor: Positive = knob(8.0, "how many times longer the context becomes", trajectory=True)
    low_freq_factor: Positive = knob(
        1.0, "wavelengths above original_max_seq_len / this are stretched", trajectory=True
    )
    high_freq_factor: Positive = knob(4.0, "wavelengths below original_max_seq_len / this are kept", trajectory=True)
    original_max_seq_len: Count = knob(8192, "the context length before stretching, tokens", trajectory=True)


class ModelSection(Section):
    """What is trained. Shapes come from `preset` or `from_hf`; a shape set here replaces the preset's."""

    preset: Text | None = knob(
        None, "a published shape, such as llama-3.2-1b; see `phalanx config presets`", trajectory=True
    )
    from_hf: Text | None = knob(None, "a local Hugging Face folder: its shapes and its weights", trajectory=True)
    vocab_size: Count | Auto = knob(
        "auto", "rows of the embedding; auto: the preset's, else the tokenizer's", trajectory=True
    )
    hidden: Count | None = knob(None, "width of the residual stream", trajectory=True)
    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS), BeforeValidator(_no_bool)] | None = knob(
        None, "number of blocks", trajectory=True
    )
    heads: Count | None = knob(None, "attention heads", trajectory=True)
    kv_heads: Count | None = knob(None, "key and value heads; default: as many as heads", trajectory=True)
    head_dim: Count | None = knob(None, "width of one head; default: hidden / heads", trajectory=True)
    intermediate: Count | None = knob(
        None, "width of the feed-forward layer; default: 8/3 hidden, up to a multiple of 64", trajectory=True
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


class DataSection(Section):
    """What it is trained on."""

    source: Annotated[list[Text], Field(min_length=1), BeforeValidator(_as_list)] = knob(
        ["stdlib"], "files or globs of text or JSONL; stdlib: this Python's own library", trajectory=True
    )
    tokenizer: Text = knob(
        "auto", "a tokenizer folder; train: byte-level BPE on the source; auto: from_hf's, else train", trajectory=True
    )
    tokenizer_vocab: Annotated[int, Field(ge=257, le=2**20), BeforeValidator(_no_bool)] = knob(
        4096, "vocabulary of a trained tokenizer, tokens", trajectory=True
    )
    text_key: Text = knob("text", "the key of a JSONL line that holds the text", trajectory=True)
    held_out: Fraction = knob(0.02, "share of documents kept for evaluation, chosen by their hash", trajectory=True)
    seq_len: Count = knob(512, "tokens of one sequence", trajectory=True)
    cache: Text = knob("~/.cache/phalanx", "folder for token files; safe to delete")


class TrainSection(Section):
    """How long and in what portions."""

    steps: CountOrZero = knob(1000, "optimizer steps; 0 only writes a checkpoint of the starting weights")
    global_batch: Count = knob(32, "sequences of one step, on any cluster", trajectory=True)
    micro_batch: Count | Auto = knob("auto", "sequences of one forward pass on one rank; auto: the most that fits")
    seed: CountOrZero = knob(0, "initial weights, data order and dropout", trajectory=True)
    dtype: Literal["auto", "bf16", "fp32", "fp64"] = knob(
        "auto",
        "compute type; master weights stay fp32 under bf16; auto: bf16 on accelerators, fp32 on CPU",
        trajectory=True,
    )
    compile: bool | Auto = knob("auto", "torch.compile each block; auto: on accelerators")
    eval_every: CountOrZero = knob(0, "steps between evaluations on held-out data; 0: only at the end")
    eval_sequences: CountOrZero = knob(64, "held-out sequences of one evaluation; 0: none at all")


class OptimSection(Section):
    """AdamW and its learning rate."""

    lr: Positive = knob(3e-4, "peak learning rate", trajectory=True)
    beta1: Fraction = knob(0.9, "decay of the gradient's mean", trajectory=True)
    beta2: Fraction = knob(0.95, "decay of the gradient's square", trajectory=True)
    eps: Positive = knob(1e-8, "added to the root of the squared gradient", trajectory=True)
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_no_bool)] = knob(
        0.1, "decoupled decay of matrices; norms and other vectors are not decayed", trajectory=True
    )
    clip_norm: Positive | None = knob(1.0, "largest norm of the whole gradient; null: no clipping", trajectory=True)
    schedule: Literal["cosine", "linear", "constant"] = knob(
        "cosine", "shape of the decay after warm-up", trajectory=True
    )
    warmup_steps: CountOrZero = knob(0, "steps of linear warm-up", trajectory=True)
    decay_steps: Count | Auto = knob(
        "auto", "step at which the decay ends; auto: train.steps at the start", trajectory=True
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_no_bool)] = knob(
        0.1, "learning rate at the end of the decay, as a share of lr", trajectory=True
    )


class ParallelSection(Section):
    """How the work is spread over ranks."""

    data: Literal["auto", "single", "fsdp2"] = knob(
        "auto", "fsdp2: parameters and state sharded over all ranks; single: one rank, nothing to exchange"
    )


class MemorySection(Section):
    """Memory for time."""

    activations: Literal["none", "full"] = knob("none", "full: keep only each block's input and recompute the rest")


class CommSection(Section):
    """Collectives."""

    timeout_s: Annotated[float, Field(gt=0, le=604800), BeforeValidator(_no_bool)] = knob(
        600.0, "seconds after which a collective that does not end is an error; a week at most"
    )


class CheckpointSection(Section):
    """What survives."""

    every: CountOrZero = knob(100, "steps between checkpoints; 0: only at the end and when asked to stop")
    keep: Count = knob(3, "newest checkpoints kept")


class ResilienceSection(Section):
    """What happens when something breaks."""

    max_restarts: CountOrZero = knob(3, "restarts after failures without a new checkpoint in between, before giving up")


class ReportSection(Section):
    """What is shown."""

    tensorboard: bool = knob(True, "write TensorBoard event files")


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
    "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "max_seq_len",
    "rope_theta", "rope_scaling", "norm_eps", "tie_embeddings", "init_std",
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
    return replace(spec, **given, dropout=model.dropout)


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
    if train.micro_batch != "auto" and train.micro_batch > train.global_batch:
        found.append(
            f"train.micro_batch {train.micro_batch} is larger than train.global_batch {train.global_batch}; lower it"
        )
    if optim.decay_steps != "auto" and optim.warmup_steps > optim.decay_steps:
        found.append(f"optim.warmup_steps {optim.warmup_steps} exceeds optim.decay_steps {optim.decay_steps}; lower it")
    if data.held_out == 0 and train.eval_sequences > 0 and train.eval_every > 0:
        found.append("train.eval_every asks for evaluations but data.held_out is 0; set data.held_out or eval_every=0")
    return found


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
