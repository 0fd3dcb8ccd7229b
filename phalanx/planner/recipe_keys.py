"""Convert between recipes and plans: a recipe's work, the layouts that it allows, and the keys of a plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.config import load
from phalanx.config.model_spec import build_model_spec, is_custom_task
from phalanx.config.optimizers import find_optimizer
from phalanx.config.schema import Config
from phalanx.config.validation import find_problems_for_world
from phalanx.core.errors import ConfigError
from phalanx.layout.buckets import COMPRESSED_BYTES
from phalanx.layout.model_shape import EXPERT_TARGETS, ModelSpec
from phalanx.models.families.catalog import block_options
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.plan import Plan
from phalanx.planner.search_space import SearchSpace, list_degrees, list_row_degrees
from phalanx.planner.work import WIDTH, StepWork, find_ffn_widths, find_head_widths

FRESH_RANK = 16  # the default rank of adapters
# Keys of a recipe that a plan chooses, and the field of a Choice that each is.
CHOICE_FIELDS = {
    "parallel.engine": "engine",
    "parallel.zero": "zero",
    "parallel.shard_degree": "shard_degree",
    "parallel.grad_reduce": "reduce",
    "parallel.tensor": "tensor",
    "parallel.sequence_parallel": "sequence",
    "parallel.pipeline": "pipeline",
    "parallel.context": "context",
    "parallel.expert": "expert",
    "parallel.schedule": "virtual",
    "parallel.layers_per_stage": "stages",
    "train.micro_batch": "micro_batch",
    "memory.activations": "recompute",
    "optim.double_buffer": "slots",
    "balance.batch": "shares",
    "balance.optimizer_state": "state",
}
# Keys that a plan determines itself, whatever a recipe made for another cluster says.
AUTO_LAYOUT: dict[str, Any] = {
    "parallel.layout": "given",
    "parallel.engine": "auto", "parallel.zero": "auto", "parallel.shard_degree": "auto", "parallel.grad_reduce": "auto",
    "parallel.tensor": 1, "parallel.sequence_parallel": "auto", "parallel.pipeline": 1, "parallel.schedule": "1f1b",
    "parallel.layers_per_stage": "auto", "parallel.context": 1, "parallel.context_by": "auto", "parallel.expert": 1,
    "balance.context": "auto", "balance.experts": "auto", "train.micro_batch": "auto", "memory.activations": "none",
    "optim.double_buffer": False, "balance.batch": "auto", "balance.optimizer_state": "auto", "balance.hardware": None,
}  # fmt: skip
SCHEDULES = {"1f1b": 1, "interleaved": 2}
# Fields of a Choice by parallel.engine.
ENGINE_FIELDS: dict[str, dict[str, Any]] = {
    "single": {"devices": 1},
    "sharded": {"engine": "sharded"},
    "fsdp2": {"engine": "fsdp", "zero": 3, "reduce": "per_micro_batch", "shard_degree": 0},
}


def shape_of(config: Config, folder_spec: ModelSpec | None = None) -> ModelSpec:
    """The model's shapes; a vocabulary that is not known yet is taken to be as large as the one that would be trained.
    `folder_spec` is that of `model.from_hf`. Raises ConfigError for a custom network, and for unequal parts of rows or
    experts."""
    if is_custom_task(config) or config.model.code is not None:
        key = "task.code" if is_custom_task(config) else "model.code"
        raise ConfigError(
            f"a plan needs the shapes of a built-in model, and {key} names a custom network; start it with "
            "few steps on one node, or `phalanx train --dry-run` for its memory"
        )
    for key, shares in (("context", config.balance.context), ("experts", config.balance.experts)):
        if isinstance(shares, list) and len(set(shares)) > 1:
            raise ConfigError(
                f"a plan takes equal parts of rows and of experts, but balance.{key} is {shares}; set "
                f"balance.{key}=even, or `phalanx train --dry-run` for its memory"
            )
    if folder_spec is None and config.model.preset is None and config.model.vocab_size == "auto":
        config = load.update_config(config, {"model.vocab_size": config.data.tokenizer_vocab})
    spec = build_model_spec(_with_adapters(config), folder_spec)
    if spec.lora is not None and spec.latent is not None:
        raise ConfigError(
            "a plan does not know adapters of latent attention, which the model has; remove model.lora, or "
            "`phalanx train --dry-run` for its memory"
        )
    if spec.lora is not None and set(EXPERT_TARGETS) & set(spec.lora.targets):
        raise ConfigError(
            "a plan does not know adapters of experts, which model.lora.targets names; set model.lora.targets to some "
            "of q, k, v, o, or `phalanx train --dry-run` for its memory"
        )
    return spec


def _with_adapters(config: Config) -> Config:
    """With fresh adapters where `model.lora` leaves them open: those of a folder are not known before it is read, and
    are nearer to fresh ones than to training all weights."""
    lora = config.model.lora
    if lora is None:
        return config
    rank = FRESH_RANK if lora.rank == "auto" else lora.rank
    fresh = {"rank": rank, "alpha": 2.0 * rank}
    return load.update_config(
        config, {f"model.lora.{name}": value for name, value in fresh.items() if getattr(lora, name) == "auto"}
    )


def precision_of(config: Config, cluster: ClusterSpec) -> tuple[str, bool]:
    """(type of matrix products, whether each device makes its own of what travels): as `train.dtype` says, or auto
    chooses where it runs."""
    kinds, wanted = cluster.kinds, config.train.dtype
    if wanted in WIDTH:
        for kind in kinds:
            kind.peak_flop_per_s(wanted)  # raises for what one of them cannot
        return wanted, False
    if any(kind.on_host for kind in kinds):
        return "fp32", False
    if all("bf16" in kind.flop_per_s for kind in kinds):
        return "bf16", wanted == "mixed"
    return "fp16", wanted == "mixed" or any("bf16" in kind.flop_per_s for kind in kinds)


def work_of(config: Config, spec: ModelSpec, cluster: ClusterSpec) -> StepWork:
    """A step of the recipe, as the cost model takes it."""
    computes = block_options(spec)
    precision, mixed = precision_of(config, cluster)
    rule = find_optimizer(config.optim.name)
    number_bytes = 8 if precision == "fp64" else 4  # of masters, moments and gradients
    return StepWork(
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        **find_ffn_widths(spec.layers, spec.intermediate, spec.moe),
        vocabulary=spec.vocab_size,
        seq_len=config.data.seq_len,
        global_batch=config.train.global_batch,
        tied=spec.tie_embeddings,
        gated=computes.gated,
        biases=computes.biases or ("qkv" if computes.qkv_bias else False),
        dropout=spec.dropout > 0,
        # Scores are held where they are cut, as they are where some are dropped.
        attention_dropout=computes.needs_scores or spec.attention_dropout > 0,
        positions=0 if computes.position_offset is None else spec.max_seq_len + computes.position_offset,
        embedding_width=spec.block.embedding_width or 0,
        **find_head_widths(spec),
        precision=precision,
        fp8_blocks=config.train.fp8 == "block",
        fp8_tensors=config.train.fp8 == "delayed",
        master_bytes=number_bytes,
        state_bytes=rule.state_bytes(config.optim.options, number_bytes, spec.hidden),
        reduce_bytes=number_bytes,
        gather_bytes=4 if mixed else WIDTH[precision],
        far_bytes=COMPRESSED_BYTES[config.comm.compress],
        lora=spec.lora,
        window=spec.sliding_window or 0,
        full_layers=sum(layer < spec.layers for layer in spec.full_attention_layers),
        both_ways=not computes.causal,
        horizon=config.memory.offload_prefetch_blocks,
        memory=config.resilience.in_memory_checkpoints,
        replicate=config.resilience.replicate_every,
        replays=rule.replays,
        qk_norm=bool(computes.qk_norm),
        own_positions=config.data.format in ("chat", "prompt") or config.data.isolate_documents,
        context_by=config.parallel.context_by,
        counts_ahead=spec.moe is not None and spec.moe.balance in ("step", "group"),
    )


# --------------------------------------------------------------------------------------------------------- what may be


def free_layout(config: Config, overrides: Sequence[str]) -> Config:
    """The recipe without its own layout, but with the keys of the command line."""
    said = {word.partition("=")[0] for word in overrides}
    values = {key: value for key, value in AUTO_LAYOUT.items() if key not in said}
    return load.update_config(config, values | {"parallel.layout": "given"})  # chosen by the plan, not by the run


def pins_of(config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    """Fields of a Choice that the command line holds to a value; of `shares` and `state` that may be "even"."""
    pins: dict[str, Any] = {}
    for word in overrides:
        key = word.partition("=")[0]
        if key not in CHOICE_FIELDS:
            continue
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value in ("auto", "measured-once"):
            continue
        if key == "parallel.engine":
            pins |= ENGINE_FIELDS[value]
            continue
        if isinstance(value, list):
            value = tuple(value)
        if key == "optim.double_buffer":
            value = 1 + value
        if key == "parallel.schedule":
            if value not in SCHEDULES:
                raise ConfigError(
                    f"a plan supports parallel.schedule {' and '.join(SCHEDULES)}, not {value}; remove it"
                )
            value = SCHEDULES[value]
        if key == "memory.activations":
            pins["offload"] = value == "offload"
            value = "full" if value == "offload" else value
        pins[CHOICE_FIELDS[key]] = value
    return pins


def space_of(
    config: Config, folder_spec: ModelSpec | None, work: StepWork, cluster: ClusterSpec, pins: Mapping[str, Any]
) -> SearchSpace:
    """Which degrees the recipe can run with on this cluster: those that come out even and that it does not refuse.
    `folder_spec` is that of `model.from_hf`. Raises ConfigError with its own words where it refuses all that are asked
    for."""
    if pins.get("offload") and work.layers <= work.horizon:
        raise ConfigError(
            f"memory.activations=offload would move nothing: the inputs of the last {work.horizon} blocks stay on the "
            f"device (memory.offload_prefetch_blocks) and the model has {work.layers}; set memory.activations=full"
        )
    asked = {f"parallel.{name}": pins[name] for name in ("tensor", "pipeline", "context", "expert") if name in pins}
    if why := _why_not(config, folder_spec, asked):
        raise ConfigError(why)
    # The architecture of a folder's model is not in the recipe, and a start would refuse to split it.
    kind = "a BERT" if work.both_ways else "adapters (model.lora)" if config.model.lora is not None else None
    if kind is not None and any(degree > 1 for degree in asked.values()):
        words = " and ".join(f"{key}={value}" for key, value in asked.items() if value > 1)
        raise ConfigError(
            f"{words} cuts models of the Llama family whose weights are all trained, not {kind}; remove it"
        )
    refused: dict[tuple[int, bool], bool] = {}  # the check of a pipeline does not depend on its length
    found = []
    for tensor, pipeline in list_degrees(work, cluster, pins.get("pipeline", 0)):
        if (pins.get("tensor", tensor), pins.get("pipeline", pipeline)) != (tensor, pipeline):
            continue
        if kind is not None and tensor * pipeline > 1:
            continue
        key = (tensor, pipeline > 1)
        if key not in refused:
            values = {"parallel.tensor": tensor, "parallel.pipeline": pipeline}
            refused[key] = tensor * pipeline > 1 and _why_not(config, folder_spec, values) is not None
        if not refused[key]:
            found.append((tensor, pipeline))
    if not found:
        words = " and ".join(f"{key}={value}" for key, value in asked.items())
        raise ConfigError(
            f"{words} does not come out even on {cluster.devices} devices and a model of {work.layers} layers and "
            f"{work.heads} heads; choose divisors, and slices that fit on one node"
        )
    usual = {"context": (1,), "expert": (1,)} if work.both_ways else list_row_degrees(work, cluster)
    contexts, experts = (_row_degrees(config, folder_spec, axis, degrees, pins) for axis, degrees in usual.items())
    return SearchSpace(tuple(found), contexts, experts, pins=dict(pins))


def _row_degrees(
    config: Config, folder_spec: ModelSpec | None, axis: str, usual: Sequence[int], pins: Mapping[str, Any]
) -> tuple[int, ...]:
    """Degrees of context or expert parallelism that the recipe can have: the one that is asked for, or `usual` ones."""
    if axis in pins:
        return (pins[axis],)
    before = {
        f"parallel.{axis}": 1,
        "parallel.context_by": "auto",
        "balance.context": "auto",
        "balance.experts": "auto",
    }
    plain = load.update_config(config, before)
    return tuple(
        each for each in usual if each == 1 or _why_not(plain, folder_spec, {f"parallel.{axis}": each}) is None
    )


def _why_not(config: Config, folder_spec: ModelSpec | None, values: Mapping[str, int]) -> str | None:
    """Why the recipe cannot run with such degrees; None where it can."""
    try:
        divided = load.update_config(config, dict(values))
        if folder_spec is not None and any(degree > 1 for degree in values.values()):
            build_model_spec(divided, folder_spec)
    except ConfigError as error:
        return str(error)
    return None


# ---------------------------------------------------------------------------------------------------- keys of a plan


def keys_of(plan: Plan, config: Config) -> dict[str, Any]:
    """The recipe keys of this layout, complete, so that no default interferes. `config`: the recipe, which says
    whether a single rank must use the sharded engine."""
    choice, fsdp = plan.choice, plan.choice.engine == "fsdp"
    sharded = plan.devices > 1 or config.parallel.engine == "sharded" or config.comm.compress != "none"
    keys: dict[str, Any] = {
        "parallel.engine": "fsdp2" if fsdp else "sharded" if sharded else "single",
        "parallel.zero": "auto" if plan.copies == 1 or fsdp else choice.zero,
        "parallel.shard_degree": choice.shard_degree or "auto",
        "parallel.grad_reduce": "auto" if plan.copies == 1 or fsdp else choice.reduce,
        "parallel.tensor": choice.tensor,
        "parallel.sequence_parallel": choice.sequence if choice.tensor > 1 else "auto",
        "parallel.pipeline": choice.pipeline,
        "parallel.schedule": "interleaved" if choice.virtual > 1 else "1f1b",
        "parallel.layers_per_stage": list(choice.stages) if choice.stages else "auto",
        "parallel.context": choice.context,
        "parallel.context_by": config.parallel.context_by if choice.context > 1 else "auto",
        "parallel.expert": choice.expert,
        "train.micro_batch": choice.micro_batch,
        "memory.activations": activations_key(choice),
        "optim.double_buffer": choice.slots == 2,
        "balance.batch": list(choice.shares) if choice.shares else "auto",
        "balance.optimizer_state": list(choice.state) if choice.state else "auto",
    }
    return keys


def activations_key(choice: LayoutChoice) -> str:
    """`memory.activations` of a layout."""
    return "offload" if choice.offload else choice.recompute


def apply_plan(config: Config, plan: Plan) -> Config:
    """The recipe with the plan's keys, checked as a start would. Raises ConfigError where it refuses them."""
    chosen = load.update_config(config, keys_of(plan, config))
    if found := find_problems_for_world(chosen, plan.devices):
        raise ConfigError("; ".join(found))
    return chosen
