"""The model's shapes that a recipe asks for, and what is wrong with its keys of a model and its task."""

from dataclasses import replace

from phalanx.config.model import LoraSection
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.layout import model_shape as shapes
from phalanx.layout import pipeline_stages
from phalanx.layout.model_shape import EncoderSpec, LoraSpec, ModelSpec, RopeScaling
from phalanx.models.families import catalog
from phalanx.models.families.catalog import DEFAULT_FAMILY, FAMILIES, PRESETS, describe_unknown_preset, family_of
from phalanx.models.families.family import ModelFamily, TaskChoice

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
    kind = default_task(config)[0] if task.kind == "auto" else task.kind
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
