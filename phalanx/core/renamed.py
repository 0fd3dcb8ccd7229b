"""Renamed recipe keys, import paths, commands and events of version 0.1.

Old recipe keys, import paths and commands work for one release, with a warning that names the new one. Event kinds of
existing run folders are translated without a warning, since users cannot change records.
"""

import importlib
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, cast

from phalanx.core.placement import ExitCode

KEYS = {
    "parallel.data": "parallel.engine",
    "parallel.reduce": "parallel.grad_reduce",
    "parallel.sequence": "parallel.sequence_parallel",
    "parallel.stages": "parallel.layers_per_stage",
    "balance.work": "balance.batch",
    "balance.state": "balance.optimizer_state",
    "optim.rule": "optim.name",
    "optim.slots": "optim.double_buffer",
    "memory.horizon": "memory.offload_prefetch_blocks",
    "train.loss_scale_steps": "train.loss_scale_growth_interval",
    "resilience.memory": "resilience.in_memory_checkpoints",
    "resilience.replicate": "resilience.replicate_every",
    "resilience.heartbeat_s": "resilience.heartbeat_timeout_s",
    "resilience.hang_s": "resilience.hang_timeout_s",
    "resilience.same_crash": "resilience.max_identical_failures",
    "resilience.grow": "resilience.rejoin_nodes",
}
# (new key, old value) -> new value.
VALUES: dict[tuple[str, Any], Any] = {
    ("task.kind", "own"): "custom",
    ("optim.double_buffer", 1): False,
    ("optim.double_buffer", 2): True,
}
EVENTS = {
    "resolved": "auto_resolved",
    "planned": "layout_chosen",
    "compared": "prediction_checked",
    "shared": "work_split",
    "reshared": "work_rebalanced",
    "ordered": "comm_schedule_changed",
    "slow": "straggler",
    "signalled": "stop_requested",
}
# Modules that users' programs, tasks and models import, and renamed members; with dots if the member is in another
# module now.
MODULES: dict[str, tuple[str, dict[str, str]]] = {
    "phalanx.axes": ("phalanx.layout.mesh_axes", {"Axes": "MeshAxes", "Place": "MeshCoordinates"}),
    "phalanx.balance": ("phalanx.layout.balance", {}),
    "phalanx.cluster.placement": ("phalanx.system.torchrun_env", {}),
    "phalanx.models.draws": (
        "phalanx.models.counter_rng",
        {"Draws": "CounterRNG", "key": "derive_key", "bits": "random_bits", "keep": "dropout_mask"},
    ),
    "phalanx.models.export": ("phalanx.models.hf_export", {}),
    "phalanx.models.hf": ("phalanx.models.hf_config", {"hf_name": "phalanx.models.user_model.hf_name"}),
    "phalanx.models.megatron": ("phalanx.compat.megatron.weights", {}),
    "phalanx.models.megatron_args": ("phalanx.compat.megatron.args", {"Told": "MegatronOverrides"}),
    "phalanx.models.rope": ("phalanx.models.rotary", {}),
    "phalanx.models.spec": (
        "phalanx.layout.model_shape",
        {
            name: f"phalanx.models.families.catalog.{name}"
            for name in ("PRESETS", "parameter_shapes", "parameter_count", "adapter_count", "flops_per_token")
        },
    ),
    "phalanx.models.weights": ("phalanx.models.hf_weights", {}),
    "phalanx.parallel.transform": (
        "phalanx.parallel.hf_transform",
        {name: f"phalanx.parallel.hf_state.{name}" for name in ("full_state_dict", "find_tensor_shards")},
    ),
    "phalanx.placement": ("phalanx.core.placement", {}),
    "phalanx.recipe": ("phalanx.config.load", {"load": "load_recipe", "load_saved": "load_saved_recipe"}),
    "phalanx.records": (
        "phalanx.core.run_paths",
        {"StepRecord": "phalanx.core.records.StepRecord", "read_steps": "phalanx.core.records.read_steps"},
    ),
    "phalanx.sharded_model": ("phalanx.api.sharded_model", {"Step": "phalanx.api.sharded_step.ShardedStep"}),
    "phalanx.sharding": ("phalanx.api.shard", {}),
    "phalanx.tasks.own": ("phalanx.tasks.task", {"OwnTask": "CustomTask"}),
    "phalanx.train.callback": ("phalanx.trainer.callback", {"Request": "CallbackRequest"}),
    "phalanx.train.clock": ("phalanx.workload.clock", {}),
    "phalanx.train.sharing": ("phalanx.workload.work_split", {"Sharing": "WorkSplit"}),
}
# Renamed members of modules that keep their path.
NAMES: dict[str, dict[str, str]] = {
    "phalanx.comm.backend": {"counters": "read_counters"},
    "phalanx.comm.mesh": {"alone": "single_rank_mesh", "beside": "attach_mesh"},
    "phalanx.data.images": {"mnist": "load_mnist"},
    "phalanx.launch": {"train": "phalanx.launch.run.train"},
    "phalanx.models.layers": {"IGNORED": "IGNORE_INDEX"},
    "phalanx.models.llama": {"initial": "llama_init_rule"},
    "phalanx.models.model": {"Start": "InitRule", "draw": "draw_init_slice", "plain_start": "default_init_rule"},
    "phalanx.tasks.language": {"IGNORED": "IGNORE_INDEX", "LanguageModel": "CausalLMTask"},
    "phalanx.tasks.labels": {"padded": "pad_rows", "width_of": "row_width"},
}
PACKAGES = {"phalanx.cluster", "phalanx.train"}  # removed packages, except for the modules above


def rename_keys(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Translate a recipe's mapping to the current keys and values; returns also (old, new) of each renamed key. If the
    old and the new key are both set, both stay, and validation rejects the old one.
    """
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    changed = []
    for old, new in KEYS.items():
        section, _, leaf = old.partition(".")
        node, name = result.get(section), new.partition(".")[2]
        if isinstance(node, dict) and leaf in node and name not in node:
            result[section] = {name if key == leaf else key: value for key, value in node.items()}
            changed.append((old, new))
    for (key, before), after in VALUES.items():
        section, _, leaf = key.partition(".")
        node = result.get(section)
        if isinstance(node, dict) and type(node.get(leaf)) is type(before) and node[leaf] == before:
            node[leaf] = after
            if key not in KEYS.values():
                changed.append((f"{key}={before}", f"{key}={after}"))
    return result, changed


def rename_words(words: Sequence[str]) -> list[str]:
    """Translate words "section.key=value" to the current keys."""
    split = [word.partition("=") for word in words]
    return ["".join((KEYS.get(key, key), equals, value)) for key, equals, value in split]


def rename_dotted(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a record's mapping of dotted keys, such as those of a plan, to the current keys and values."""
    return {KEYS.get(key, key): _rename_value(KEYS.get(key, key), value) for key, value in keys.items()}


def _rename_value(key: str, value: Any) -> Any:
    """Translate a value of a key by its current name."""
    for (of, before), after in VALUES.items():
        if of == key and type(value) is type(before) and value == before:
            return after
    return value


def rename_event(event: dict[str, Any]) -> dict[str, Any]:
    """Translate an event of an old run, and its recipe keys, to the current names."""
    kind = event.get("kind")
    if isinstance(kind, str) and kind in EVENTS:
        event = {**event, "kind": EVENTS[kind]}
    if isinstance(key := event.get("key"), str) and "value" in event:
        [(key, value)] = rename_dotted({key: event["value"]}).items()
        event = {**event, "key": key, "value": value}
    if isinstance(keys := event.get("keys"), Mapping):
        event = {**event, "keys": rename_dotted(keys)}
    return event


class RenamedWarning(FutureWarning):
    """Warning about an old name, which the next release does not accept."""

    exit_code = ExitCode.CONFIG  # of a command, if Python turns warnings into errors


def warn_of(changed: Sequence[tuple[str, str]], where: str) -> None:
    """Warn once of each renamed name, with the new one."""
    for old, new in changed:
        sentence = f"{where}: {old} is called {new} now; the next release reads the new name alone"
        warnings.warn(sentence, RenamedWarning, stacklevel=3)


class _OldPackage(types.ModuleType):
    """A removed package; callable if `phalanx` has a function of that name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("phalanx").__getattr__(self.__name__.rpartition(".")[2])(*args, **kwargs)


class OldNames:
    """Importer of modules by their old import paths."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name in MODULES or name in PACKAGES:
            return ModuleSpec(name, cast(Any, self), is_package=name in PACKAGES)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return (_OldPackage if spec.name in PACKAGES else types.ModuleType)(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in PACKAGES:
            return
        new, names = MODULES[module.__name__]
        found = importlib.import_module(new)
        warn_of([(module.__name__, new)], "an import")
        vars(module).update({key: value for key, value in vars(found).items() if not key.startswith("__")})
        setattr(module, "__getattr__", _finder_of(module.__name__, new, names))  # noqa: B010


def old_names(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__` for its renamed members."""
    return _finder_of(module, module, NAMES[module])


def _finder_of(module: str, today: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for `module`, whose old `names` are found in the module `today`, or in the one that a dotted name
    gives."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        path = full_path(today, names[name])
        warn_of([(f"{module}.{name}", path)], "an import")
        where, _, called = path.rpartition(".")
        return getattr(importlib.import_module(where), called)

    return find


def full_path(module: str, name: str) -> str:
    """Dotted path of a renamed member: in `module`, unless the name has dots."""
    return name if "." in name else f"{module}.{name}"


def install() -> None:
    """Install the importer of old import paths, once."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())  # before a folder that an older version has left
