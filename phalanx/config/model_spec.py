"""The model's shapes that a recipe asks for, and what is wrong with its keys of a model and its task."""

import difflib
import math
from dataclasses import replace

from phalanx.config.model import LoraSection
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.layout import model_shape as shapes
from phalanx.layout import model_shape_checks, pipeline_stages, tensor_shards
from phalanx.layout.model_shape import PRESETS, LoraSpec, ModelSpec, RopeScaling

LABELLED = ("tag", "classify")  # task.kind of records with labels


SHAPE_FIELDS = (
    "architecture", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "sliding_window",
    "max_seq_len", "rope_theta", "rope_scaling", "norm_eps", "tie_embeddings", "init_std",
)  # fmt: skip


def build_model_spec(config: Config, hf_spec: ModelSpec | None = None) -> ModelSpec:
    """The model's shapes from `config`, or from a Hugging Face folder's `hf_spec`. `model.vocab_size` must be resolved
    unless a preset or a folder gives it. Raises ConfigError with every impossible shape."""
    if config.model.preset is not None and config.model.preset not in PRESETS:
        raise ConfigError(describe_unknown_preset(config.model.preset))
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
            intermediate=default_intermediate(model.hidden),
            max_seq_len=config.data.seq_len,
        )
        if model.architecture == "bert":
            wide = 4 * model.hidden
            spec = replace(spec, intermediate=wide, norm_eps=1e-12, tie_embeddings=True, segment_kinds=2)
    given = {name: getattr(model, name) for name in SHAPE_FIELDS if getattr(model, name) is not None}
    if model.rope_scaling is not None:
        given["rope_scaling"] = RopeScaling(**model.rope_scaling.model_dump())
    if model.vocab_size != "auto":
        given["vocab_size"] = model.vocab_size
    spec = replace(spec, **given, dropout=model.dropout, lora=_lora(model.lora))
    spec = replace(spec, attention_dropout=model.attention_dropout)
    return _encoder(config, spec) if spec.architecture == "bert" else spec


def is_bert(config: Config) -> bool:
    """Whether the recipe alone says that the model is a BERT."""
    preset = PRESETS.get(config.model.preset or "")
    return (config.model.architecture or (preset.architecture if preset else "")) == "bert"


def _encoder(config: Config, spec: ModelSpec) -> ModelSpec:
    """A BERT with the head that its task needs."""
    model, task = config.model, config.task
    heads = {"masked": "masked-next" if task.next_sentence else "masked", "tag": "tags", "classify": "classes"}
    objective = heads.get("masked" if task.kind == "auto" else task.kind, "language")
    labels = tuple(task.labels) if task.labels != "auto" and objective in ("tags", "classes") else ()
    spec = replace(spec, objective=objective, labels=labels)
    if model.hidden is not None or model.heads is not None:  # nothing that a preset says about heads holds any more
        spec = replace(
            spec,
            kv_heads=spec.heads if model.kv_heads is None else spec.kv_heads,
            head_dim=max(1, spec.hidden // spec.heads) if model.head_dim is None else spec.head_dim,
        )
    return spec


def _lora(section: LoraSection | None) -> LoraSpec | None:
    """The adapters that are asked for; None also as long as an `auto` of theirs is not resolved."""
    if section is None or section.rank == "auto" or section.alpha == "auto" or section.targets == "auto":
        return None
    ordered = tuple(name for name in shapes.LORA_TARGETS if name in section.targets)
    return LoraSpec(rank=section.rank, alpha=section.alpha, targets=ordered, dropout=section.dropout)


def find_shape_problems(config: Config, spec: ModelSpec) -> list[str]:
    """Why no such model can be, or none for these sequences."""
    found = [sentence.rstrip(".") for sentence in model_shape_checks.find_shape_problems(spec)]
    bert, kind = spec.architecture == "bert", config.task.kind
    if bert and spec.objective == "language":
        found.append(f"a BERT does not do task.kind {kind}; set it to masked, tag or classify")
    if not bert and kind in ("masked", "tag", "classify"):
        found.append(
            f"task.kind {kind} needs a BERT, and the model is a {spec.architecture}; use another model or task"
        )
    if bert and (config.model.lora is not None or config.model.code is not None):
        key = "model.lora" if config.model.lora is not None else "model.code"
        found.append(f"{key} is for models that predict the next token, and the model is a BERT; remove it")
    parallel = config.parallel
    if not bert:
        own_code = config.model.code is not None
        found += tensor_shards.find_tensor_problems(
            spec, parallel.tensor, config.data.seq_len, parallel.sequence_parallel is True, own_code
        )
    if not bert and parallel.pipeline > 1:
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


def describe_unknown_preset(name: str) -> str:
    """A sentence on a preset that there is not."""
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(PRESETS)}"
    return f"model.preset {name!r} is not known; {hint}"


def default_intermediate(hidden: int) -> int:
    """Feed-forward width when none is given: 8/3 of the hidden width (Shazeer 2020), up to a multiple of 64."""
    return math.ceil(8 * hidden / 3 / 64) * 64


def is_custom_task(config: Config) -> bool:
    """Whether the task is of a user's own."""
    return config.task.code is not None


def find_task_problems(config: Config) -> list[str]:
    task, found = config.task, []
    if task.kind == "custom" and task.code is None:
        found.append("task.kind custom needs task.code, the Python file with the class Task; set it")
    if task.code is not None and task.kind not in ("auto", "custom"):
        found.append(f"task.code brings a task of its own, but task.kind is {task.kind}; remove one of them")
    found += _encoder_problems(config)
    if task.options and task.code is None:
        found.append("task.options are arguments of the class Task of task.code, which is not set; remove them")
    return found


def _encoder_problems(config: Config) -> list[str]:
    """Keys that only some tasks of a BERT read."""
    task, data, found = config.task, config.data, []
    kind = "masked" if task.kind == "auto" and is_bert(config) else task.kind
    readers = {
        "task.mask_share": ("masked",),
        "task.whole_word": ("masked",),
        "task.next_sentence": ("masked",),
        "task.labels": LABELLED,
        "data.tokens_key": ("tag",),
        "data.tags_key": ("tag",),
        "data.label_key": ("classify",),
        "data.pair_key": ("classify",),
    }
    for key, kinds in readers.items():
        section, name = key.split(".")
        given = getattr(config, section)
        if getattr(given, name) != type(given).model_fields[name].default and kind not in kinds:
            found.append(f"{key} is for task.kind {' and '.join(kinds)}, but it is {kind}; remove it")
    if kind in ("masked", *LABELLED):
        if data.format != "text" and (kind, data.format) != ("masked", "masked"):
            found.append(f"data.format {data.format} is for task.kind language, but it is {kind}; remove it")
        if data.isolate_documents:
            found.append(f"data.isolate_documents is for task.kind language, but it is {kind}; remove it")
        if data.seq_len < 8:
            found.append(f"data.seq_len is {data.seq_len}, but a sequence of BERT's needs 8 tokens at least; raise it")
    if data.format == "masked" and kind != "masked":
        found.append(f"data.format masked is for task.kind masked of a BERT, but it is {kind}; set that, or remove it")
    if data.format == "masked" and task.whole_word:
        found.append("task.whole_word chooses what is masked, but with data.format masked that is done; remove it")
    if kind == "masked" and task.mask_share == 0:
        found.append("task.mask_share is 0, so nothing would be predicted; set it to 0.15, say")
    if task.labels != "auto" and len(set(task.labels)) < len(task.labels):
        found.append("task.labels names a label twice; name each once")
    return found


def _custom_model_problems(config: Config) -> list[str]:
    """Keys of the built-in models and data, which a task of a user's own does without."""
    found = []
    for name, kept in (("model", ()), ("data", ("cache",))):
        section = getattr(config, name)
        given = [
            key
            for key, info in type(section).model_fields.items()
            if key not in kept and getattr(section, key) != info.default
        ]
        if given:
            found.append(
                f"{', '.join(f'{name}.{key}' for key in given)} cannot be set together with task.code, which brings a "
                f"{'network' if name == 'model' else 'data set'} of its own; remove it, or make it one of task.options"
            )
    return found


def find_model_problems(config: Config) -> list[str]:
    """What is wrong with the keys of the model; with a task of a user's own it has none."""
    if is_custom_task(config):
        return _custom_model_problems(config)
    found, model = [], config.model
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
            # A vocabulary that is not known yet has about as many tokens as one that would be trained.
            found += find_shape_problems(
                config, build_requested_spec(config, None, vocab_size=config.data.tokenizer_vocab)
            )
    elif model.preset and model.preset not in PRESETS:
        found.append(describe_unknown_preset(model.preset))
    elif model.preset:
        found += find_shape_problems(config, build_requested_spec(config, None))
    if model.lora is not None and not model.from_hf:
        why = "model.lora trains adapters beside frozen weights, and weights that were only drawn are worth no adapter"
        found.append(f"{why}; set model.from_hf to the folder of a trained model, or remove model.lora")
    return found
