"""Model shapes of a recipe, and validation of its model and task keys."""

from dataclasses import replace

from phalanx.config.expert_problems import find_expert_shape_problems
from phalanx.config.model import LoraSection, MoESection
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.layout import model_shape as shapes
from phalanx.layout import pipeline_stages
from phalanx.layout.model_shape import LATENT_WIDTHS, LONGROPE, LatentSpec, LoraSpec, ModelSpec, MoESpec, RopeScaling
from phalanx.models.families import catalog
from phalanx.models.families.catalog import DEFAULT_FAMILY, FAMILIES, PRESETS, describe_unknown_preset, family_of
from phalanx.models.families.family import ModelFamily, TaskChoice

LABELLED = ("tag", "classify")  # task.kind of records with labels


SHAPE_FIELDS = (
    "architecture", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "sliding_window",
    "max_seq_len", "rope_theta", "rope_scaling", "norm_eps", "tie_embeddings", "init_std", "latent",
)  # fmt: skip

FOLDER_FIELDS = ("max_seq_len", "rope_theta", "rope_scaling")  # that change no parameter of a Hugging Face folder's

MOE_SHAPE_FIELDS = (
    "experts", "experts_per_token", "intermediate", "renormalize", "dense_layers", "scale", "shared", "groups",
    "groups_per_token",
)  # fmt: skip
MOE_FIELDS = (*MOE_SHAPE_FIELDS, "balance", "group", "balance_weight", "bias_rate", "over")


def build_model_spec(config: Config, hf_spec: ModelSpec | None = None) -> ModelSpec:
    """The model's shapes from `config`, or from a Hugging Face folder's `hf_spec`. `model.vocab_size` must be resolved
    unless a preset or a folder gives it. Raises ConfigError with every invalid shape."""
    if config.model.preset is not None and config.model.preset not in PRESETS:
        raise ConfigError(describe_unknown_preset(config.model.preset))
    spec = build_requested_spec(config, hf_spec)
    if found := find_shape_problems(config, spec) + _find_folder_problems(config, hf_spec):
        raise ConfigError("invalid model shapes: " + "; ".join(found))
    return spec


def _find_folder_problems(config: Config, hf_spec: ModelSpec | None) -> list[str]:
    """Keys that a Hugging Face folder of shapes `hf_spec` cannot be combined with, though others can."""
    if hf_spec is None:
        return []
    given = [name for name in FOLDER_FIELDS if getattr(config.model, name) is not None]
    if given and catalog.block_options(hf_spec).learnt_positions:
        named = ", ".join(f"model.{name}" for name in given)
        return [f"{named} cannot be combined with model.from_hf of a model whose positions are learned; remove it"]
    rule = hf_spec.rope_scaling
    if rule is not None and rule.rule == LONGROPE and config.model.max_seq_len not in (None, hf_spec.max_seq_len):
        return [
            f"model.max_seq_len {config.model.max_seq_len} cannot be combined with model.from_hf of a model by "
            f"LongRoPE, whose factor is for {hf_spec.max_seq_len} positions; remove it"
        ]
    return []


def build_requested_spec(config: Config, hf_spec: ModelSpec | None, vocab_size: int = 0) -> ModelSpec:
    """The requested shapes, valid or not; `vocab_size` is the fallback."""
    model = config.model
    if hf_spec is not None:
        spec = hf_spec
    elif model.preset is not None:
        spec = PRESETS[model.preset]
        spec = replace(spec, block=_fit_block(spec, model.hidden or spec.hidden, model.head_dim or spec.head_dim))
    else:
        # `find_problems` requires these three.
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
        told, before = model.rope_scaling.model_dump(), spec.rope_scaling
        # What no recipe says of a rule stays as the folder or the preset has it.
        same = before is not None and before.rule == told["rule"]
        given["rope_scaling"] = replace(before, **told) if before is not None and same else RopeScaling(**told)
    if model.latent is not None:
        given["latent"] = LatentSpec(**dict(zip(LATENT_WIDTHS, model.latent, strict=True)))
    if model.vocab_size != "auto":
        given["vocab_size"] = model.vocab_size
    given_dropout = model.attention_dropout
    spec = replace(spec, **given, dropout=model.dropout, attention_dropout=given_dropout, lora=None)
    spec = replace(spec, moe=_moe(model.moe, spec))
    task = config.task
    labels = () if task.labels == "auto" else tuple(task.labels)
    spec = family_of(spec).complete(spec, given, TaskChoice(task.kind, task.next_sentence, labels))
    return replace(spec, lora=_lora(model.lora, spec))


def _fit_block(preset: ModelSpec, hidden: int, head_dim: int) -> shapes.BlockSpec:
    """What deviates in a preset's blocks, for a model and heads of other widths."""
    block, narrow = preset.block, preset.block.embedding_width
    return replace(
        block,
        query_scalar=block.query_scalar if head_dim == preset.head_dim else None,
        embedding_width=narrow and max(1, hidden * narrow // preset.hidden),
    )


def recipe_family(config: Config) -> ModelFamily:
    """The model family that the recipe gives."""
    preset = PRESETS.get(config.model.preset or "")
    name = config.model.architecture or (preset.architecture if preset else "")
    return FAMILIES.get(name, DEFAULT_FAMILY)


def is_custom_task(config: Config) -> bool:
    """Whether the task is custom."""
    return config.task.code is not None


def default_task(config: Config) -> tuple[str, str]:
    """Resolve `task.kind: auto`; returns the kind and the reason."""
    family = recipe_family(config)
    why = "task.code is not set" if family.writes_text else f"the model is a {family.title}"
    return ("custom", "task.code is set") if is_custom_task(config) else (family.tasks[0], why)


def _moe(section: MoESection, spec: ModelSpec) -> MoESpec | None:
    """The requested experts; None where nothing says how many there are. An `auto` that is not resolved yet counts as
    what it is without a folder."""
    given = {name: getattr(section, name) for name in MOE_FIELDS if getattr(section, name) not in (None, "auto")}
    if "dense_layers" in given:
        given["dense_layers"] = tuple(sorted(set(given["dense_layers"])))
    if given.get("balance") in ("sequence", "group", "bias", "none"):
        given.setdefault("over", "layer")  # which a folder may say otherwise
    if spec.moe is not None:
        return replace(spec.moe, **given, z_loss=section.z_loss)
    if section.experts is None or section.experts_per_token is None:
        return None
    if given.get("balance") == "bias":
        given.setdefault("balance_weight", 0.0)
    return MoESpec(**{"intermediate": spec.intermediate} | given, z_loss=section.z_loss)


def decide_experts(config: Config, hf_spec: ModelSpec | None) -> list[tuple[str, str, str]]:
    """Resolve how an even load of experts is kept, where that is `auto`, of a model of a folder's `hf_spec` or of drawn
    weights: keys, values and reasons. Raises ConfigError for a weight where there is no loss, and for settings of
    experts that a folder's model does not have."""
    moe, section = None if hf_spec is None else hf_spec.moe, config.model.moe
    if not (recipe_family(config) if hf_spec is None else family_of(hf_spec)).has_experts:
        if hf_spec is not None and section != MoESection():
            raise ConfigError("model.moe is set, but the model of model.from_hf has no experts; remove model.moe")
        return []
    balance, over, why = "sequence", "layer", "the weights are drawn"
    if moe is not None and moe.balance == "none":
        balance, why = "none", "config.json of model.from_hf asks for no loss (output_router_logits)"
        if section.balance == "auto" and section.balance_weight:
            raise ConfigError(
                f"model.moe.balance_weight is {section.balance_weight:g}, but model.moe.balance is auto, and {why}; "
                "set model.moe.balance, or remove model.moe.balance_weight"
            )
    elif moe is not None:
        balance, over = "step_before", "model"
        why = "transformers' loss, which config.json of model.from_hf asks for, depends on the micro-batch"
    if section.balance != "auto" and section.over == "auto":
        balance, why = section.balance, f"model.moe.balance is {section.balance}"
        over = over if balance in ("step_before", "step") else "layer"
    wanted = (("balance", balance), ("over", over))
    return [(f"model.moe.{name}", value, why) for name, value in wanted if getattr(section, name) == "auto"]


def _lora(section: LoraSection | None, spec: ModelSpec) -> LoraSpec | None:
    """The requested adapters, of all matrices that the model has while their `targets` are unresolved; None while
    another of their `auto` keys is."""
    if section is None or section.rank == "auto" or section.alpha == "auto":
        return None
    targets = catalog.find_adapter_targets(spec) if section.targets == "auto" else section.targets
    ordered = tuple(name for name in (*shapes.ADAPTED_MODULES, *shapes.EXPERT_TARGETS) if name in targets)
    return LoraSpec(rank=section.rank, alpha=section.alpha, targets=ordered, dropout=section.dropout)


def find_shape_problems(config: Config, spec: ModelSpec) -> list[str]:
    """Problems of the model's shapes, alone and with the sequence length."""
    found = [sentence.rstrip(".") for sentence in catalog.find_shape_problems(spec)]
    family, kind = family_of(spec), config.task.kind
    writes, options = family.writes_text, catalog.block_options(spec)
    if not writes and kind not in ("auto", *family.tasks):
        kinds = f"{', '.join(family.tasks[:-1])} or {family.tasks[-1]}"
        found.append(f"a {family.title} does not support task.kind {kind}; set it to {kinds}")
    able = [each for each in FAMILIES.values() if kind in each.tasks]
    if writes and able and family not in able:
        found.append(
            f"task.kind {kind} needs a {able[0].title}, and the model is a {family.name}; use another model or task"
        )
    if not writes and (config.model.lora is not None or config.model.code is not None):
        key = "model.lora" if config.model.lora is not None else "model.code"
        found.append(f"{key} requires a causal language model, and the model is a {family.title}; remove it")
    parallel = config.parallel
    found += find_expert_shape_problems(config, spec)
    if writes:
        own_code = config.model.code is not None
        found += catalog.find_tensor_problems(
            spec,
            parallel.tensor,
            config.data.seq_len,
            parallel.sequence_parallel is True,
            own_code,
            config.train.fp8 == "block",
        )
        if config.train.fp8 != "none" and 1 < parallel.tensor > spec.kv_heads:
            found.append(
                f"train.fp8 {config.train.fp8} rounds the gradients of keys and values, of which parallel.tensor="
                f"{parallel.tensor} gives several ranks parts, since model.kv_heads is {spec.kv_heads}; set "
                f"parallel.tensor={spec.kv_heads} or less, or train.fp8=none"
            )
        found += _find_context_problems(config, spec)
    if writes and parallel.pipeline > 1:
        numbers = None if parallel.layers_per_stage == "auto" else parallel.layers_per_stage
        keep, compiled = config.memory.activations, config.train.compile is True
        found += pipeline_stages.find_stage_problems(
            spec.layers, parallel.pipeline, parallel.schedule, numbers, activations=keep, compiled=compiled
        )
    if spec.moe is not None and spec.moe.balance in ("group", "step") and parallel.pipeline > 1:
        found.append(
            f"model.moe.balance {spec.moe.balance} counts choices in a forward pass ahead, which stages of "
            f"parallel.pipeline {parallel.pipeline} do not run; set model.moe.balance=step_before, or "
            "parallel.pipeline=1"
        )
    if writes and config.model.rope_theta not in (None, ModelSpec.rope_theta) and not options.rotary_share:
        found.append(f"model.rope_theta has no effect: a {family.title} has no rotary positions; remove it")
    if config.data.seq_len > spec.max_seq_len:
        found.append(
            f"data.seq_len {config.data.seq_len} is longer than the model's {spec.max_seq_len} positions; lower it, or "
            "set model.max_seq_len, for a trained model with model.rope_scaling"
        )
    return found


def _find_context_problems(config: Config, spec: ModelSpec) -> list[str]:
    """Problems of parallel.context with the shapes of a model."""
    parallel, size = config.parallel, config.parallel.context
    if size == 1:
        return []
    found = []
    if spec.moe is not None and spec.moe.balance in ("sequence", "group", "bias") and spec.moe.balance_weight:
        found.append(
            f"model.moe.balance {spec.moe.balance} with a loss counts over whole rows, which parallel.context {size} "
            "shares among ranks; set model.moe.balance=step_before, or model.moe.balance_weight=0"
        )
    options = catalog.block_options(spec)
    if options.alibi or options.sinks:
        found.append(
            f"parallel.context {size} shares no attention with {'ALiBi' if options.alibi else 'sinks'}, which "
            f"{family_of(spec).title} has; set parallel.context=1"
        )
    kv_heads = max(1, spec.kv_heads // parallel.tensor)
    if parallel.context_by == "heads" and kv_heads < size:
        found.append(
            f"parallel.context_by heads gives each of {size} ranks a key head at least, and there are {kv_heads}; set "
            "parallel.context_by=auto"
        )
    return found


def find_task_problems(config: Config) -> list[str]:
    task, found = config.task, []
    if task.kind == "custom" and task.code is None:
        found.append("task.kind custom needs task.code, the Python file with the class Task; set it")
    if task.code is not None and task.kind not in ("auto", "custom"):
        found.append(f"task.code defines a custom task, but task.kind is {task.kind}; remove one of them")
    found += _encoder_problems(config)
    if task.options and task.code is None:
        found.append("task.options has no effect without task.code; remove it")
    return found


def _encoder_problems(config: Config) -> list[str]:
    """Keys that only some BERT tasks read."""
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
        found += [
            f"data.{key} is for task.kind language, but it is {kind}; remove it"
            for key in ("isolate_documents", "mask_document_end")
            if getattr(data, key)
        ]
        if data.seq_len < 8:
            found.append(f"data.seq_len is {data.seq_len}, but a BERT sequence needs at least 8 tokens; raise it")
    if data.format == "masked" and kind != "masked":
        found.append(f"data.format masked is for task.kind masked of a BERT, but it is {kind}; set that, or remove it")
    if data.format == "masked" and task.whole_word:
        found.append(
            "task.whole_word has no effect with data.format masked, whose sequences are masked already; remove it"
        )
    if kind == "masked" and task.mask_share == 0:
        found.append("task.mask_share must be > 0, such as 0.15 (got 0)")
    if task.labels != "auto" and len(set(task.labels)) < len(task.labels):
        found.append("task.labels has a duplicate label; remove it")
    return found


def _custom_model_problems(config: Config) -> list[str]:
    """Keys of built-in models and data, which a custom task does not use."""
    found = []
    for name, kept in (("model", ()), ("data", ("cache", "read_ahead"))):
        section = getattr(config, name)
        given = [
            key
            for key, info in type(section).model_fields.items()
            if key not in kept and getattr(section, key) != info.default
        ]
        if given:
            found.append(
                f"{', '.join(f'{name}.{key}' for key in given)} has no effect with task.code, which defines a "
                f"custom {'network' if name == 'model' else 'data set'}; remove it, or move it to task.options"
            )
    return found


def find_model_problems(config: Config) -> list[str]:
    """Problems of the model's keys; a custom task has none."""
    if is_custom_task(config):
        return _custom_model_problems(config)
    found, model = [], config.model
    shape_given = [name for name in SHAPE_FIELDS if getattr(model, name) is not None]
    shape_given += [f"moe.{name}" for name in MOE_SHAPE_FIELDS if getattr(model.moe, name) is not None]
    counted = model.moe.experts is not None and model.moe.experts_per_token is not None  # which is a shape
    if not (model.from_hf or recipe_family(config).has_experts or counted) and model.moe != MoESection():
        able = ", ".join(each.name for each in FAMILIES.values() if each.has_experts)
        found.append(f"model.moe is set, but the model has no experts; set model.architecture to {able}, or remove it")
    if model.moe.bias_rate is not None and model.moe.balance != "bias":
        found.append(
            "model.moe.bias_rate has no effect without model.moe.balance bias; set model.moe.balance=bias, or remove it"
        )
    if (model.moe.group is None) == (model.moe.balance == "group"):
        found.append(
            "model.moe.group is the number of sequences of a group, for model.moe.balance group; set both, or none"
        )
    if model.code is not None and recipe_family(config).has_experts:
        found.append(
            "model.code replaces models without experts; use a model.architecture without, or remove model.code"
        )
    if model.preset and model.from_hf:
        found.append("model.preset and model.from_hf both set the shapes; remove one of them")
    elif model.from_hf:
        fixed = [name for name in shape_given if name not in FOLDER_FIELDS]
        fixed += ["vocab_size"] if model.vocab_size != "auto" else []
        if fixed:
            named = ", ".join(f"model.{name}" for name in fixed)
            found.append(f"{named} cannot be combined with model.from_hf, whose folder fixes the shapes; remove it")
    elif not model.preset and not model.from_hf:
        missing = [f"model.{name}" for name in ("hidden", "layers", "heads") if getattr(model, name) is None]
        if missing:
            found.append(f"{', '.join(missing)} must be set, or model.preset, or model.from_hf")
        else:
            # An unknown vocabulary counts as one that is trained.
            found += find_shape_problems(
                config, build_requested_spec(config, None, vocab_size=config.data.tokenizer_vocab)
            )
    elif model.preset and model.preset not in PRESETS:
        found.append(describe_unknown_preset(model.preset))
    elif model.preset:
        found += find_shape_problems(config, build_requested_spec(config, None))
    if model.lora is not None and not model.from_hf:
        why = "model.lora trains adapters beside frozen weights, which must be pre-trained"
        found.append(f"{why}; set model.from_hf to the folder of a trained model, or remove model.lora")
    return found
