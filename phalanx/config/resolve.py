"""Resolve a recipe: give each `auto` its value.

A recipe is resolved in this order, and `launch/prepare.py` calls it from top to bottom:

1. `continue_config`: values resolved when the run began are kept (here).
2. `resolve_layout`: the layout of the ranks, where the planner chooses it (`launch/auto_layout.py`).
3. `resolve_autos`: values that depend on other keys, the number of ranks and their devices (here).
4. `resolve_with_files`: values that depend on data, models and memory (`trainer/resolve.py`, in a child process).
5. `agree_on_sharding` and `resolve_stage_sizes`: values that ranks agree on once connected (`trainer/setup.py`).

Each step returns a new Config and its decisions, which become events.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from phalanx.config import optimizers
from phalanx.config.load import update_config
from phalanx.config.model_spec import default_task, recipe_family
from phalanx.config.schema import Config, get_knob, iter_knobs
from phalanx.config.sentences import list_problems
from phalanx.config.validation import find_problems_for_world
from phalanx.core.errors import ConfigError

Decision = tuple[str, Any, str]  # key, value, reason

# The layout depends on the cluster, which may change between starts. Stages, parts of rows, of experts and of the
# batch, and the number of tokenising processes, are never resolved.
RESOLVED_ANEW = (
    "parallel.layout", "parallel.engine", "parallel.zero", "parallel.grad_reduce", "parallel.shard_degree",
    "parallel.sequence_parallel", "parallel.layers_per_stage", "parallel.context_by", "balance.batch",
    "balance.optimizer_state", "balance.context", "balance.experts", "data.workers",
)  # fmt: skip
RESOLVED_FOR_DEVICES = ("train.micro_batch", "train.compile", "memory.activations")
HUB_COMMIT = re.compile(r"([^/@]+/[^/@]+)@[0-9a-f]{40}")  # organization/name@commit
NOT_COMPILED_ON_CPU = "compiling costs more than it saves on CPU"


def apply_decisions(config: Config, decisions: Iterable[Decision]) -> Config:
    """Apply decisions to `config`."""
    return update_config(config, {key: value for key, value, _ in decisions})


def continue_config(wanted: Config, saved: Config, folder: Path | str, same_devices: bool = True) -> Config:
    """Configuration to resume the run in `folder`: `wanted`, with each `auto` as resolved when the run began. Values
    that depend on devices are resolved again unless they are the `same_devices` with the same parts of the model.
    Raises ConfigError if a key that defines the loss curve differs from the saved one.
    """
    same_devices = same_devices and _rank_share(wanted) == _rank_share(saved)
    different, kept = [], {}
    for key, info in iter_knobs():
        mine, theirs = get_knob(wanted, key), get_knob(saved, key)
        fixed = bool((info.json_schema_extra or {}).get("trajectory"))
        if mine == theirs:
            continue
        if mine == "auto" or _is_pinned_as(mine, theirs):
            kept[key] = theirs
        elif fixed:
            different.append(f"{key} is {mine!r} now and was {theirs!r}")
    if different:
        raise ConfigError(
            f"the run folder {folder} has a run of another configuration: {'; '.join(different)}. Restore these "
            "values to resume it, or choose another --run-dir"
        )
    for key in (*RESOLVED_ANEW, *(() if same_devices else RESOLVED_FOR_DEVICES)):
        kept.pop(key, None)
    return update_config(wanted, kept)


def _is_pinned_as(mine: Any, theirs: Any) -> bool:
    """Whether `theirs` is the commit of a repository on the hub that `mine` names without one."""
    if not isinstance(mine, str) or not isinstance(theirs, str) or HUB_COMMIT.fullmatch(mine):
        return False
    found = HUB_COMMIT.fullmatch(theirs)
    return found is not None and found[1] == mine.partition("@")[0]


def _rank_share(config: Config) -> tuple[Any, ...]:
    """Keys that decide a rank's part of the model and its micro-batches in flight."""
    return config.parallel.axes, config.parallel.schedule if config.parallel.pipeline > 1 else ""


def resolve_autos(
    config: Config, *, device: str, world: int, bf16: bool = True, differ: bool = False
) -> tuple[Config, list[Decision]]:
    """Resolve each `auto` that needs no measurement. Returns the config and the decisions.

    `device` is the kind of device, "cpu" or an accelerator's; `bf16` whether all of them compute in that type, and
    `differ` whether some do and some do not. Raises ConfigError for keys that are invalid on `world` ranks.
    """
    config.parallel.axes.data_parallel_size(world)  # the checks below need the engine
    decisions = [
        *_decide_task(config),
        *_decide_arithmetic(config, device, bf16, differ),
        *_decide_optimizer(config),
        *_decide_adapters(config),
        *_decide_engine(config, world),
    ]
    resolved = apply_decisions(config, decisions)
    if found := find_problems_for_world(resolved, world):
        raise ConfigError(found[0] if len(found) == 1 else list_problems("the recipe", found))
    return resolved, decisions


def _decide_task(config: Config) -> Iterator[Decision]:
    if config.task.kind == "auto":
        yield ("task.kind", *default_task(config))


def find_compile_obstacle(config: Config, experts: bool) -> str:
    """Why blocks that exchange with other ranks are not compiled; "" where they may be. `experts`: the model has
    some."""
    axes = ("context", "expert", "tensor") if experts else ("context", "expert")
    divided = [axis for axis in axes if getattr(config.parallel, axis) > 1]
    if not divided or config.memory.activations not in ("auto", "selective"):
        return ""
    why = f"with parallel.{divided[0]} a block is compiled only where it is recomputed as a whole or not at all"
    return f"{why}, and memory.activations is {config.memory.activations}"


def _decide_arithmetic(config: Config, device: str, bf16: bool, differ: bool) -> Iterator[Decision]:
    on_cpu = device == "cpu"
    if config.train.dtype == "auto" and differ:
        yield "train.dtype", "mixed", "only some of the devices have bf16"
    elif config.train.dtype == "auto":
        why = f"the device is {device}" if on_cpu or bf16 else f"a {device} device has no bf16"
        yield "train.dtype", "fp32" if on_cpu else "bf16" if bf16 else "fp16", why
    if config.train.compile == "auto":
        if why := find_compile_obstacle(config, recipe_family(config).has_experts):
            yield "train.compile", False, why
        elif config.parallel.pipeline > 1 and config.parallel.schedule == "zero_bubble":
            why = "parallel.schedule zero_bubble splits the backward pass, which a compiled block does not support"
            yield "train.compile", False, why
        elif on_cpu:
            yield "train.compile", False, NOT_COMPILED_ON_CPU


def _decide_optimizer(config: Config) -> Iterator[Decision]:
    if config.train.epochs is None:
        yield from decide_decay_steps(config)
    if config.optim.weight_decay == "auto":
        decay = optimizers.default_weight_decay(config.optim.name)
        yield "optim.weight_decay", decay, f"the update rule is {config.optim.name}"


def decide_decay_steps(config: Config) -> Iterator[Decision]:
    """`optim.decay_steps`, once `train.steps` is known; with no steps yet, the next start decides."""
    most = max(config.train.steps, 1)
    if config.optim.decay_steps == "auto" and config.train.steps:
        steps = optimizers.default_decay_steps(config.optim.model_dump(), most)
        why = "train.steps ends within the warm-up" if steps > most else "train.steps at the start of the run"
        yield "optim.decay_steps", steps, why


def _decide_adapters(config: Config) -> Iterator[Decision]:
    lora = config.model.lora
    if lora is None or lora.adapter is not None:  # values of an adapter come from its files
        return
    rank = 16 if lora.rank == "auto" else lora.rank
    fresh: dict[str, Any] = {"rank": rank, "alpha": 2.0 * rank}
    for name, fitting in fresh.items():
        if getattr(lora, name) == "auto":
            yield f"model.lora.{name}", fitting, "no adapter is given"


def _decide_engine(config: Config, world: int) -> Iterator[Decision]:
    if config.parallel.engine == "auto":
        rounds, ranks = config.comm.compress != "none", f"{world} rank{'s' if world > 1 else ''}"
        value = "single" if world == 1 and not rounds else "sharded"
        yield "parallel.engine", value, "comm.compress rounds weights" if rounds else ranks
    if config.parallel.sequence_parallel == "auto" and config.parallel.tensor > 1:
        tensor, length = config.parallel.tensor, config.data.seq_len
        why = f"parallel.tensor is {tensor}" if length % tensor == 0 else f"data.seq_len is not a multiple of {tensor}"
        yield "parallel.sequence_parallel", length % tensor == 0, why


def has_vocabulary_of_tokenizer(config: Config) -> bool:
    """Whether the size of the vocabulary is that of the tokenizer: no recipe, preset or folder sets it."""
    return config.model.vocab_size == "auto" and not config.model.preset and not config.model.from_hf
