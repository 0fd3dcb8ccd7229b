"""Reading recipes: YAML and `key=value` overrides into a checked Config, resolving `auto`, going on in a run folder.

Inert: it starts nothing, imports no torch and touches no file but the recipe. All problems are reported at once, as
sentences that name the key and what would be legal.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from phalanx.config import SHAPE_FIELDS, Config, get, leaves, problems
from phalanx.errors import ConfigError


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which otherwise lets a key's second value win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            try:
                repeated = key in seen
                seen.add(key)
            except TypeError:
                repeated = False  # an unhashable key is reported by the base class
            if repeated:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse YAML text into a mapping; raises ConfigError with the line of a mistake."""
    try:
        tree = yaml.load(text, Loader=_UniqueKeyLoader)  # a subclass of SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}{line}: this is not valid YAML ({problem}); mend that line") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: a recipe is a mapping of sections such as `train:`, this is {_kind_of(tree)}")
    return tree


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe file into a mapping that is not yet checked."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe {path}; `ls recipes` shows those that come with Phalanx") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {path} cannot be read ({error}); name a YAML text file") from None
    return parse_yaml(text, str(path))


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `tree` with `section.key=value` overrides applied; values are YAML scalars or lists."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip("."):
            raise ConfigError(f"`{override}` is not of the form section.key=value, such as optim.lr=3e-4")
        try:
            value = yaml.safe_load(text) if text else ""
        except yaml.YAMLError:
            raise ConfigError(f"the value of `{override}` is not valid YAML; quote it") from None
        node: Any = result
        *parents, leaf = key.split(".")
        for parent in parents:
            child = node.get(parent)
            node[parent] = dict(child) if isinstance(child, dict) else {}
            node = node[parent]
        node[leaf] = value
    return result


def load(recipe: Path, overrides: Sequence[str] = ()) -> Config:
    """Read, override and check a recipe. Raises ConfigError listing every problem, one sentence a line."""
    return check(apply_overrides(read_recipe(recipe), overrides), str(recipe))


def check(tree: dict[str, Any], where: str) -> Config:
    """Turn a mapping into a Config; raises ConfigError with all its problems at once."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_list_of(where, _merged([_sentence(item) for item in error.errors()]))) from None
    if found := problems(config):
        raise ConfigError(_list_of(where, found))
    return config


# ------------------------------------------------------------------------------------------------- resolving and saving


def update(config: Config, values: dict[str, Any]) -> Config:
    """A copy of `config` with dotted keys replaced, checked again."""
    tree = config.model_dump(mode="json")
    for key, value in values.items():
        section, _, leaf = key.partition(".")
        tree[section][leaf] = value
    return check(tree, "the resolved configuration")


def resolve(config: Config, *, device: str, world: int) -> tuple[Config, list[tuple[str, Any, str]]]:
    """Give every `auto` that needs no measurement its value. Returns the config and (key, value, reason) of each.

    `device` is the kind of device, "cpu" or an accelerator's name. `train.micro_batch`, `model.vocab_size` and
    `data.tokenizer` need a device or files, and are left to the trainer and the data preparation.
    """
    on_cpu = device == "cpu"
    chosen: list[tuple[str, Any, str]] = []
    if config.train.dtype == "auto":
        chosen.append(("train.dtype", "fp32" if on_cpu else "bf16", f"the device is {device}"))
    if config.train.compile == "auto":
        why = "compiling costs more than it saves on CPU" if on_cpu else f"the device is {device}"
        chosen.append(("train.compile", not on_cpu, why))
    if config.optim.decay_steps == "auto":
        steps = max(config.train.steps, 1)
        chosen.append(
            ("optim.decay_steps", max(steps, config.optim.warmup_steps), "train.steps at the start of the run")
        )
    if config.parallel.data == "auto":
        value = "single" if world == 1 else "fsdp2"
        chosen.append(("parallel.data", value, f"{world} rank{'s' if world > 1 else ''}"))
    if config.parallel.data == "single" and world > 1:
        raise ConfigError(f"parallel.data single trains on one rank, but there are {world}; set parallel.data=auto")
    return update(config, {key: value for key, value, _ in chosen}), chosen


def to_yaml(config: Config) -> str:
    """The configuration as a recipe that `load` reads back to the same value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, default_flow_style=False)


def continue_from(wanted: Config, saved: Config, folder: Path) -> Config:
    """The configuration for going on in `folder`: `wanted`, with each `auto` as it was resolved when the run began.

    Raises ConfigError when a knob that defines the loss curve differs from the saved one.
    """
    different, kept = [], {}
    for key, info in leaves():
        mine, theirs = get(wanted, key), get(saved, key)
        fixed = bool((info.json_schema_extra or {}).get("trajectory"))
        if mine == theirs:
            continue
        if mine == "auto" or (mine is None and key.removeprefix("model.") in SHAPE_FIELDS):
            kept[key] = theirs
        elif fixed:
            different.append(f"{key} is {mine!r} now and was {theirs!r}")
    if different:
        raise ConfigError(
            f"the run folder {folder} holds a run of another configuration: {'; '.join(different)}. "
            "Set these back to go on with it, or choose another --run-dir"
        )
    # The layout is the cluster's business: one rank yesterday may be many today.
    kept.pop("parallel.data", None)
    return update(wanted, kept)


# ------------------------------------------------------------------------------------------------------------ sentences


def _kind_of(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "empty" if value is None else type(value).__name__)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_RELATIONS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "finite_number": "a finite number",
    "too_short": "a list that is not empty",
    "int_parsing_size": "a smaller whole number",
}


def _merged(sentences: list[str]) -> list[str]:
    """One sentence for a key with alternatives: `x must be a whole number or 'auto', not 3.5`."""
    merged: dict[str, list[str]] = {}
    for sentence in sentences:
        key, found, rest = sentence.partition(" must be ")
        merged.setdefault(key if found else sentence, []).append(rest)
    return [
        key
        if not rests[0]
        else f"{key} must be {' or '.join([r.rpartition(', not ')[0] for r in rests[:-1]] + rests[-1:])}"
        for key, rests in merged.items()
    ]


def _sentence(item: Any) -> str:
    """One problem that pydantic found, as a sentence that names the key and what would be legal."""
    path = [str(part) for part in item["loc"] if isinstance(part, str) and "[" not in part and "(" not in part]
    path = [part for part in path if part not in ("int", "float", "str", "bool", "literal['auto']")]
    key, kind, value = ".".join(path), item["type"], item["input"]
    if kind == "extra_forbidden":
        names = [name for name, _ in leaves()] + list(Config.model_fields)
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5) or [
            name for name in names if name.split(".")[-1] == path[-1]
        ]
        return f"unknown key {key}" + (
            f"; did you mean {near[0]}?" if near else f"; the sections are {', '.join(Config.model_fields)}"
        )
    if kind in ("model_type", "model_attributes_type"):
        return f"{key or 'the recipe'} is a section with keys of its own, not {_kind_of(value)}"
    if kind == "value_error":
        return f"{key} {item['ctx']['error']}"
    limits = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    if kind in limits:
        return f"{key} must be {_RELATIONS[kind]} {item['ctx'][limits[kind]]}, not {_shown(value)}"
    if kind == "literal_error":
        return f"{key} must be {item['ctx']['expected']}, not {_shown(value)}"
    expected = _EXPECTED.get(kind)
    return (
        f"{key} must be {expected}, not {_shown(value)}"
        if expected
        else f"{key}: {item['msg']} (it is {_shown(value)})"
    )


def _list_of(where: str, sentences: list[str]) -> str:
    if len(sentences) == 1:
        return f"{where}: {sentences[0]}"
    return f"{where} has {len(sentences)} problems:\n" + "\n".join(f"  - {sentence}" for sentence in sentences)
