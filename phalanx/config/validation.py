"""Validation of combinations of keys, without files: a sentence for each problem."""

from phalanx.config import optimizers
from phalanx.config.context_problems import find_context_problems
from phalanx.config.expert_problems import find_expert_problems
from phalanx.config.model import SourceSection
from phalanx.config.model_spec import LABELLED, find_model_problems, find_task_problems, is_custom_task, recipe_family
from phalanx.config.schema import Config, TrainSection
from phalanx.core.errors import ConfigError
from phalanx.layout import balance
from phalanx.layout.batch_ramp import find_ramp_problem


def find_problems(config: Config) -> list[str]:
    """Invalid combinations of keys, as sentences; reads no files."""
    train, optim, data = config.train, config.optim, config.data
    found = find_model_problems(config) + find_task_problems(config) + _callback_problems(config)
    if train.micro_batch != "auto" and train.micro_batch > train.global_batch:
        found.append(
            f"train.micro_batch {train.micro_batch} is larger than train.global_batch {train.global_batch}; lower it"
        )
    if problem := find_ramp_problem(train.global_batch, train.rampup_batch):
        found.append(problem)
    work = config.balance.batch
    if isinstance(work, list) and sum(work) != train.global_batch:
        found.append(
            f"balance.batch sums to {sum(work)} sequences, but train.global_batch is "
            f"{train.global_batch}; make them equal"
        )
    found += _sharding_problems(config) + _list_problems(config) + _model_parallel_problems(config)
    found += _layout_problems(config) + find_context_problems(config) + find_expert_problems(config)
    changed = {key for key, info in type(optim).model_fields.items() if getattr(optim, key) != info.default}
    found += optimizers.find_optim_problems(optim.model_dump(), changed)
    if data.held_out == 0 and not data.validation and train.eval_sequences > 0 and train.eval_every > 0:
        found.append(
            "train.eval_every needs held-out documents, but data.held_out is 0; set data.held_out or eval_every=0"
        )
    if "held_out" in data.validation:
        found.append("data.validation has a set named held_out, the name of the documents of data.held_out; rename it")
    found += _mixture_problems(data.source)
    if config.resilience.replicate_every not in ("auto", "off") and config.resilience.in_memory_checkpoints is False:
        found.append(
            f"resilience.replicate_every {config.resilience.replicate_every} needs "
            "resilience.in_memory_checkpoints, which is false; set "
            "resilience.in_memory_checkpoints=true or auto, or resilience.replicate_every=off"
        )
    if data.mask_document_end and (data.isolate_documents or data.format in ("chat", "prompt")):
        other = "data.isolate_documents" if data.isolate_documents else f"data.format {data.format}"
        found.append(f"data.mask_document_end has no effect with {other}, which masks that anyway; remove it")
    if not data.cache:
        found.append("data.cache is empty; set it to a folder or URL")
    if data.format in ("text", "masked"):
        unread = {"chat_template": None, "loss_on": "assistant", "too_long": "truncate"}
        if config.task.kind in LABELLED:
            del unread["too_long"]
        for name in [name for name, default in unread.items() if getattr(data, name) != default]:
            found.append(f"data.{name} is for conversations and prompts, but data.format is {data.format}; remove it")
    return found + _profile_problems(train)


def _sharding_problems(config: Config) -> list[str]:
    """Keys of the sharded engine that another engine ignores. One rank has nothing to shard, and a recipe for many
    ranks should run there."""
    if config.parallel.zero == 3 and config.optim.double_buffer:
        return [
            "optim.double_buffer true has no effect with parallel.zero 3, which gathers parameters for each pass; "
            "set optim.double_buffer=false, or parallel.zero=2"
        ]
    if config.comm.compress != "none" and config.parallel.engine in ("single", "fsdp2"):
        return [
            f"comm.compress {config.comm.compress} has no effect with parallel.engine {config.parallel.engine}; remove "
            "it, or set parallel.engine=sharded"
        ]
    if config.parallel.engine != "fsdp2":
        return []
    return [
        f"{key} has no effect with parallel.engine fsdp2; remove it, or set parallel.engine=sharded"
        for key in _asked_of_sharded(config)
    ]


def _asked_of_sharded(config: Config) -> list[str]:
    """Keys that are set and only the sharded engine reads."""
    is_set = {
        "parallel.zero": config.parallel.zero != "auto",
        "parallel.grad_reduce": config.parallel.grad_reduce != "auto",
        "parallel.shard_degree": config.parallel.shard_degree != "auto",
        "balance.optimizer_state": isinstance(config.balance.optimizer_state, list),
        "optim.double_buffer": config.optim.double_buffer,
    }
    return [key for key, asked in is_set.items() if asked]


def find_unused_keys(config: Config, several: bool = True) -> list[str]:
    """Warnings for keys without effect: keys of many ranks on one rank, or of many nodes if not `several`."""
    keys = _asked_of_sharded(config) if config.parallel.engine == "single" else []
    why = "has no effect with parallel.engine single, which shards nothing; remove it, or set parallel.engine=auto"
    found = [f"{key} {why}" for key in keys] + _unused_of_resilience(config)
    replicate = config.resilience.replicate_every
    if not several and replicate not in ("auto", "off"):
        found.append(
            f"resilience.replicate_every {replicate} has no effect on one node; if it is lost, the run resumes "
            "from a checkpoint"
        )
    if config.train.tf32 and config.train.dtype not in ("fp32", "mixed"):
        dtype = config.train.dtype
        found.append(f"train.tf32 rounds products in fp32 and has no effect with train.dtype {dtype}; remove it")
    if config.train.fp8 != "delayed":
        defaults = type(config.train).model_fields
        found += [
            f"train.{key} has no effect with train.fp8 {config.train.fp8}; remove it, or set train.fp8=delayed"
            for key in ("fp8_history", "fp8_margin")
            if getattr(config.train, key) != defaults[key].default
        ]
    moe, layers = config.model.moe, config.model.layers
    if moe.balance == "none" and moe.balance_weight:
        found.append(
            "model.moe.balance_weight has no effect with model.moe.balance none; remove it, or set another "
            "model.moe.balance"
        )
    if layers is not None and (beyond := [each for each in moe.dense_layers or () if each >= layers]):
        found.append(f"model.moe.dense_layers names {beyond[0]}, but the model has layers 0 to {layers - 1}; remove it")
    return found


def _unused_of_resilience(config: Config) -> list[str]:
    """Keys of a feature that is off."""
    given = config.resilience
    reads = {
        "spike_factor": (given.on_spike != "off", "on_spike off; set resilience.on_spike"),
        "rollback_steps": (
            "rollback" in (given.on_nan, given.on_spike),
            f"on_nan {given.on_nan} and on_spike {given.on_spike}; set one of them to rollback",
        ),
        "wait_for_node_s": ("wait" in given.on_lost_node, "an on_lost_node without wait; add that"),
    }
    return [
        f"resilience.{key} has no effect with {why}, or remove resilience.{key}"
        for key, (is_read, why) in reads.items()
        if not is_read and getattr(given, key) != type(given).model_fields[key].default
    ]


def _layout_problems(config: Config) -> list[str]:
    """Keys that require parallel.layout given, if it is auto."""
    if config.parallel.layout != "auto":
        return []
    asked = {
        "parallel.engine fsdp2": config.parallel.engine == "fsdp2",
        "parallel.layers_per_stage": config.parallel.layers_per_stage != "auto",
        "balance.batch": isinstance(config.balance.batch, list),
        "balance.optimizer_state": isinstance(config.balance.optimizer_state, list),
    }
    return [
        f"{what} requires parallel.layout given, but it is auto; remove one of them"
        for what, is_set in asked.items()
        if is_set
    ]


def _list_problems(config: Config) -> list[str]:
    """Lists by rank that contradict each other on any number of ranks."""
    work, state, degree = config.balance.batch, config.balance.optimizer_state, config.parallel.shard_degree
    rows = config.parallel.context  # ranks for each number of balance.batch
    found = []
    if isinstance(state, list) and degree not in ("auto", len(state)):
        found.append(
            f"balance.optimizer_state has {len(state)} numbers, but parallel.shard_degree is {degree}; give it "
            f"{degree} numbers"
        )
    if isinstance(work, list) and isinstance(state, list) and degree == "auto" and len(work) * rows != len(state):
        found.append(
            f"balance.batch has numbers for {len(work)} ranks and balance.optimizer_state for {len(state)}; give both "
            "one for each rank"
        )
    if isinstance(work, list) and degree != "auto" and len(work) * rows > 1 and len(work) * rows % degree:
        found.append(
            f"balance.batch has numbers for {len(work)} ranks, which parallel.shard_degree {degree} does not divide; "
            "choose a divisor, or set parallel.shard_degree=auto"
        )
    return found


def find_problems_for_world(config: Config, world: int) -> list[str]:
    """Invalid keys for `world` ranks, as sentences; `parallel.engine` is resolved."""
    found = []
    if config.parallel.engine == "single" and world > 1:
        found.append(f"parallel.engine single trains on one rank, but there are {world}; set parallel.engine=auto")
    try:
        copies = config.parallel.axes.data_parallel_size(world)
        groups = config.parallel.axes.count_row_groups(world)
    except ConfigError as error:
        return [*found, str(error)]
    degree = config.parallel.shard_degree
    if degree not in ("auto", 1) and copies == 1 < world:  # one rank alone has nothing to shard
        found.append(
            f"parallel.shard_degree {degree} shards the state over {degree} copies of the model, but there is 1; set "
            "parallel.shard_degree=auto"
        )
    elif degree != "auto" and copies > 1 and copies % degree:
        ranks = f"{world} ranks" if copies == world else f"{copies} ranks with the same part of the model"
        found.append(
            f"parallel.shard_degree {degree} does not divide the {ranks}; choose a divisor, or set "
            "parallel.shard_degree=auto"
        )
    together = copies if degree == "auto" or copies == 1 else degree
    lists = (
        ("balance.batch", config.balance.batch, groups),
        ("balance.optimizer_state", config.balance.optimizer_state, together),
    )
    for key, numbers, count in lists:
        if not isinstance(numbers, list) or len(numbers) == count:
            continue
        there = "is 1" if count == 1 else f"are {count}"
        whose = "ranks of a copy of the state" if count == together else "groups of ranks that share rows"
        if count == copies:
            whose = "ranks" if copies == world else "copies of the model"
        found.append(
            f"{key} has {len(numbers)} numbers for {whose}, but there {there}; give each one, or set {key}=auto"
        )
    return found


def _model_parallel_problems(config: Config) -> list[str]:
    """Invalid keys with model parallelism, and keys of model parallelism without it."""
    parallel, balance_of = config.parallel, config.balance
    found = []
    unread = {
        "tensor": {"parallel.sequence_parallel": parallel.sequence_parallel is True},
        "pipeline": {
            "parallel.schedule": parallel.schedule != "1f1b",
            "parallel.layers_per_stage": parallel.layers_per_stage != "auto",
        },
    }
    for axis, keys in unread.items():
        found += [
            f"{key} has no effect with parallel.{axis} 1; remove it, or set parallel.{axis}"
            for key, is_set in keys.items()
            if is_set and getattr(parallel, axis) == 1
        ]
    together = [name for name in ("tensor", "pipeline") if getattr(parallel, name) > 1]
    if not together:
        return found
    what = " and ".join(f"parallel.{name}" for name in together)
    if parallel.engine in ("single", "fsdp2"):
        found.append(f"{what} cannot be combined with parallel.engine {parallel.engine}; set parallel.engine=sharded")
    family, own_task = recipe_family(config), is_custom_task(config)
    if own_task or not family.tensor_plan or (config.model.code is not None and parallel.tensor == 1):
        kind = "a custom task" if own_task else "model.code" if config.model.code is not None else f"a {family.title}"
        cuts, it = ("cut", "them") if len(together) > 1 else ("cuts", "it")
        found.append(f"{what} {cuts} models of the Llama family only, not that of {kind}; remove {it}")
    if config.model.lora is not None and parallel.tensor == 1:
        found.append(f"{what} cannot be combined with model.lora; remove one of them")
    rule = optimizers.OPTIMIZERS.get(config.optim.name)
    if parallel.tensor > 1 and rule is not None and rule.granularity == "row":
        found.append(
            f"optim.name {config.optim.name} updates whole rows of a matrix, which parallel.tensor splits; set "
            "optim.name=adamw"
        )
    if parallel.pipeline > 1 and config.resilience.on_spike == "skip":
        found.append(
            "resilience.on_spike skip needs the loss before the last backward pass, which a pipeline starts "
            "earlier; set resilience.on_spike=rollback"
        )
    if parallel.pipeline > 1 and parallel.zero == 3:
        found.append("parallel.zero 3 gathers every block for each micro-batch of a pipeline; set parallel.zero=2")
    if parallel.pipeline > 1 and parallel.grad_reduce == "per_micro_batch":
        found.append(
            "parallel.grad_reduce per_micro_batch cannot be combined with parallel.pipeline, whose micro-batches "
            "overlap; set parallel.grad_reduce=per_step"
        )
    if balance_of.batch == "measured-once" or balance_of.hardware is not None:
        key = "balance.batch measured-once" if balance_of.batch == "measured-once" else "balance.hardware"
        found.append(f"{key} needs measurements of the whole model on each device, which {what} rules out; remove it")
    return found


def _profile_problems(train: TrainSection) -> list[str]:
    """Problems of the steps to profile."""
    found = []
    snapshot = train.memory_snapshot
    if snapshot > train.most_steps:
        found.append(f"train.memory_snapshot {snapshot} comes after the last step {train.steps}; lower it")
    if train.profile is not None:
        first, last = (int(part) for part in train.profile.split("-"))
        if first > last:
            found.append(f"train.profile {train.profile} ends before it begins; write the first step first")
        elif last > train.most_steps:
            found.append(f"train.profile {train.profile} goes beyond the last step {train.steps}; lower it")
        elif first <= snapshot <= last:
            found.append(
                f"train.memory_snapshot {snapshot} lies within train.profile {train.profile}, and both record; "
                "choose a step outside it"
            )
    return found


def _mixture_problems(sources: list[str | SourceSection]) -> list[str]:
    weights = [source.weight if isinstance(source, SourceSection) else 1.0 for source in sources]
    if not any(isinstance(source, SourceSection) for source in sources):
        return []
    least = sum(weights) / balance.MIXTURE_BLOCK
    # A larger weight also raises the sum; round up.
    enough = sum(weight for weight in weights if weight >= least) / max(1, balance.MIXTURE_BLOCK - len(weights)) * 1.01
    return [
        f"data.source gives {', '.join(source.path)} the weight {source.weight:g}, less than one sequence in "
        f"{balance.MIXTURE_BLOCK}; raise it to {enough:.3g} or more, or remove that source"
        for source in sources
        if isinstance(source, SourceSection) and source.weight < least
    ]


def _callback_problems(config: Config) -> list[str]:
    if config.callback.options and config.callback.code is None:
        return ["callback.options has no effect without callback.code; remove it"]
    return []
