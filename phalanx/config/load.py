"""Reading recipes: YAML and `key=value` overrides into a checked Config, resolving `auto`, going on in a run folder.

Inert: it starts nothing, imports no torch and touches no file but the recipe. All problems are reported at once, as
sentences that name the key and what would be legal.
"""

import copy
import difflib
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from phalanx.config import bundled, optimizers
from phalanx.config.model import LoraTarget
from phalanx.config.schema import Config, default_task, get_knob, get_section_type, iter_knobs
from phalanx.config.validation import find_problems, find_problems_for_world
from phalanx.core.errors import ConfigError
from phalanx.core.renamed import KEYS, rename_keys, warn_of

# The layout is the cluster's business: one rank yesterday may be many today. And work is never resolved, nor are
# processes that tokenise.
RESOLVED_ANEW = (
    "parallel.layout", "parallel.engine", "parallel.zero", "parallel.grad_reduce", "parallel.shard_degree",
    "parallel.sequence_parallel", "balance.batch", "balance.optimizer_state", "data.workers",
)  # fmt: skip
NOT_COMPILED_ON_CPU = "compiling costs more than it saves on CPU"
BEGIN, END = "---\n", "...\n"  # of a YAML document
RESOLVED_FOR_DEVICES = ("train.micro_batch", "train.compile", "memory.activations")


EXPONENT = re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$")  # a number to YAML 1.2 and to people, text to YAML 1.1
EXPONENT_TAG = "tag:phalanx,2026:exponent"
IMPLICIT = {
    **yaml.SafeLoader.yaml_implicit_resolvers,
    **{
        first: [*yaml.SafeLoader.yaml_implicit_resolvers.get(first, []), (EXPONENT_TAG, EXPONENT)]
        for first in "-+.0123456789"
    },
}


def _with_exponent(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    """`1e3` as the whole number that it is, `1e-3` as a float."""
    text = str(loader.construct_scalar(node))
    value = float(text)
    return int(Decimal(text)) if value.is_integer() else value


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader with three changes: a key's second value does not win in silence, every mistake has a line,
    and `1e3` is a number."""

    yaml_implicit_resolvers = IMPLICIT
    yaml_constructors = {**yaml.SafeLoader.yaml_constructors, EXPONENT_TAG: _with_exponent}  # noqa: RUF012

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
            # Whatever the conversion of `!!bool x`, `2001-99-99` or a number of 5000 digits happened to raise.
            kind = node.tag.rpartition(":")[2]
            problem = f"{_format_value(node.value)} cannot be read as a YAML {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *defaults`, which the base class resolves
                continue
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


class _Dumper(yaml.SafeDumper):
    """YAML's safe dumper, which quotes texts that `_UniqueKeyLoader` would read as numbers."""

    yaml_implicit_resolvers = IMPLICIT


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse YAML text into a mapping; raises ConfigError with the line of a mistake."""
    tree = _parse_text(text, where)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{where}: a recipe is a mapping of sections such as `train:`, but this is {_kind_of(tree)}; "
            "name a recipe, such as one of recipes/"
        )
    return tree


def _parse_text(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)  # a subclass of SafeLoader
    except RecursionError:
        raise ConfigError(f"{where}: this is nested too deeply to be a recipe; mend the brackets") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = chr(error.character)
        raise ConfigError(f"{where}, line {line}: the character {character!r} is not text; remove it") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{place}: this is not valid YAML ({error.problem}); mend that line") from None


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe file into a mapping that is not yet checked."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(_no_recipe(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {path} cannot be read ({error}); name a YAML text file") from None
    tree, changed = rename_keys(parse_yaml(text, str(path)))
    warn_of(changed, str(path))
    return tree


def _no_recipe(path: Path) -> str:
    name = f"recipes/{path.stem}.yaml"
    if name in bundled.list_bundled_files():
        return f"there is no recipe {path}; `phalanx recipes copy {path.stem}` writes {name}"
    return f"there is no recipe {path}; `phalanx recipes list` shows those that come with Phalanx"


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `tree` with `section.key=value` overrides applied; values are YAML scalars or lists."""
    result, renamed = dict(tree), []
    for override in overrides:
        key, equals, text = override.partition("=")
        if key in KEYS:
            renamed.append((key, KEYS[key]))
            key = KEYS[key]
        *parents, leaf = key.split(".")
        if not equals or not all([*parents, leaf]):
            raise ConfigError(f"`{_cut(override)}` is not of the form section.key=value, such as optim.lr=3e-4")
        node, path = result, []
        for parent in parents:
            path.append(parent)
            child = node.get(parent)
            if child is not None and not isinstance(child, dict):
                raise ConfigError(
                    f"`{_cut(override)}` cannot be set, since {'.'.join(path)} is {_kind_of(child)} and has no keys of "
                    "its own; mend the recipe or the key"
                )
            node[parent] = dict(child or {})  # a copy: the recipe's own mapping stays as it was read
            node = node[parent]
        node[leaf] = _parse_text(text, f"the value of `{_cut(override)}`") if text else ""
    result, changed = rename_keys(result)
    warn_of(renamed + changed, "the command line")
    return result


def load_recipe(recipe: Path, overrides: Sequence[str] = ()) -> Config:
    """Read, override and check a recipe. Raises ConfigError listing every problem, one sentence a line."""
    return build_config(apply_overrides(read_recipe(recipe), overrides), str(recipe))


def build_config(tree: dict[str, Any], where: str) -> Config:
    """Turn a mapping into a Config; raises ConfigError with all its problems at once."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        wrong = error.errors()
        raise ConfigError(_list_of(where, [*_sentences(wrong), *_problems_of_the_rest(tree, wrong)])) from None
    if found := find_problems(config):
        raise ConfigError(_list_of(where, found))
    return config


def _problems_of_the_rest(tree: dict[str, Any], wrong: Sequence[Any]) -> list[str]:
    """Combinations that cannot work among the keys that are legal themselves, so that one look shows all mistakes."""
    rest = copy.deepcopy(tree)
    dropped = []
    for key in {".".join(_key_of(error["loc"])[0].split(".")[:2]) for error in wrong}:
        section, _, leaf = key.partition(".")
        parent = rest.get(section) if leaf else rest
        if not isinstance(parent, dict) or (leaf or section) not in parent:
            return []  # not a key of a section: no telling what the rest means
        del parent[leaf or section]
        dropped.append(key)
    try:
        config = Config.model_validate(rest)
    except ValidationError:
        return []
    # A sentence about a dropped key speaks of its default, not of what was written; so does one about the key that a
    # misspelt one was meant to be.
    meant = re.findall(r"did you mean ([\w.]+)\?", " ".join(_sentences(wrong)))
    return [sentence for sentence in find_problems(config) if not any(key in sentence for key in (*dropped, *meant))]


# ------------------------------------------------------------------------------------------------- resolving and saving


def update_config(config: Config, values: dict[str, Any]) -> Config:
    """A copy of `config` with dotted keys replaced, checked again; what was left out of it still counts as left out."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    for key, value in values.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return build_config(tree, "the resolved configuration")


def find_explicit_keys(config: Config) -> frozenset[str]:
    """The keys that a recipe, or its overrides, have a value for; all others have their default."""
    found = set()
    for key, _ in iter_knobs():
        node: Any = config
        for part in key.split("."):
            if node is None or part not in node.model_fields_set:
                break
            node = getattr(node, part)
        else:
            found.add(key)
    return frozenset(found)


def resolve_autos(
    config: Config, *, device: str, world: int, bf16: bool = True, differ: bool = False
) -> tuple[Config, list[tuple[str, Any, str]]]:
    """Give every `auto` that needs no measurement its value. Returns the config and (key, value, reason) of each.

    `device` is the kind of device, "cpu" or an accelerator's; `bf16` whether all of them compute in that type, and
    `differ` whether some do and some do not.
    `train.micro_batch`, `train.compile` on accelerators, `model.vocab_size` and `data.tokenizer` need a device or
    files, and are left to `trainer/resolve.py`. Raises ConfigError for what cannot be on so many ranks.
    """
    config.parallel.axes.data_parallel_size(world)  # else what follows speaks of `single`
    on_cpu = device == "cpu"
    chosen: list[tuple[str, Any, str]] = []
    if config.task.kind == "auto":
        chosen.append(("task.kind", *default_task(config)))
    if config.train.dtype == "auto" and differ:
        chosen.append(("train.dtype", "mixed", "some of the devices have bf16 and some have not"))
    elif config.train.dtype == "auto":
        why = f"the device is {device}" if on_cpu or bf16 else f"a device of kind {device} here has no bf16"
        chosen.append(("train.dtype", "fp32" if on_cpu else "bf16" if bf16 else "fp16", why))
    if config.train.compile == "auto":
        if config.parallel.pipeline > 1 and config.parallel.schedule == "zero_bubble":
            why = "parallel.schedule zero_bubble takes a backward pass apart, which cannot be done to a compiled one"
            chosen.append(("train.compile", False, why))
        elif on_cpu:
            chosen.append(("train.compile", False, NOT_COMPILED_ON_CPU))
    if config.optim.decay_steps == "auto" and config.train.steps:  # with no steps yet, the next start decides
        steps = optimizers.default_decay_steps(config.optim.model_dump(), max(config.train.steps, 1))
        longer = steps > max(config.train.steps, 1)
        why = "train.steps ends within the warm-up" if longer else "train.steps at the start of the run"
        chosen.append(("optim.decay_steps", steps, why))
    if config.optim.weight_decay == "auto":
        decay = optimizers.default_weight_decay(config.optim.name)
        chosen.append(("optim.weight_decay", decay, f"the update rule is {config.optim.name}"))
    lora = config.model.lora
    if lora is not None and lora.adapter is None:  # that of an adapter is read from its files
        rank = 16 if lora.rank == "auto" else lora.rank
        fresh: dict[str, Any] = {"rank": rank, "alpha": 2.0 * rank}
        if config.model.code is None:  # of a class of the user's own, those that it has
            fresh["targets"] = list(get_args(LoraTarget))
        for name, fitting in fresh.items():
            if getattr(lora, name) == "auto":
                chosen.append((f"model.lora.{name}", fitting, "no adapter was named"))
    if config.parallel.engine == "auto":
        rounds, ranks = config.comm.compress != "none", f"{world} rank{'s' if world > 1 else ''}"
        value = "single" if world == 1 and not rounds else "sharded"
        chosen.append(("parallel.engine", value, "comm.compress rounds weights" if rounds else ranks))
    if config.parallel.sequence_parallel == "auto" and config.parallel.tensor > 1:
        tensor, length = config.parallel.tensor, config.data.seq_len
        why = f"parallel.tensor is {tensor}" if length % tensor == 0 else f"data.seq_len is no multiple of {tensor}"
        chosen.append(("parallel.sequence_parallel", length % tensor == 0, why))
    resolved = update_config(config, {key: value for key, value, _ in chosen})
    if found := find_problems_for_world(resolved, world):
        raise ConfigError(found[0] if len(found) == 1 else _list_of("the recipe", found))
    return resolved, chosen


def to_yaml(config: Config) -> str:
    """The configuration as a recipe that `load_recipe` reads back to the same value."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, default_flow_style=False)


def render_saved_recipe(config: Config) -> str:
    """What a run folder keeps: the same as one YAML document with its begin and its end, so that one that was cut is
    known for it, which may be good YAML with other values."""
    return f"{BEGIN}{to_yaml(config)}{END}"


def load_saved_recipe(file: Path) -> Config:
    """Read what `render_saved_recipe` has written, or a release before it, which marked neither end. Raises ConfigError
    for a file that is damaged, or of another version of Phalanx."""
    try:
        text = file.read_text(encoding="utf-8")
        whole = text.endswith(END if text.startswith(BEGIN) else "\n")
        tree = parse_yaml(text, str(file)) if whole else None
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise _damaged(file, str(error).removeprefix(str(file))) from None
    if not tree:
        raise _damaged(file, "it holds nothing" if not text.strip() else "it ends too early")
    try:
        return build_config(rename_keys(tree)[0], str(file))
    except ConfigError as error:
        raise _damaged(file, f"or another version of Phalanx has written it: {error}") from None


def _damaged(file: Path, how: str) -> ConfigError:
    return ConfigError(
        f"{file}, which says what the run is, is damaged ({how.strip(' ,:')}); restore it from a copy, or choose "
        "another --run-dir: the checkpoints beside it are untouched"
    )


def continue_config(wanted: Config, saved: Config, folder: Path | str, same_devices: bool = True) -> Config:
    """The configuration for going on in `folder`: `wanted`, with each `auto` as it was resolved when the run began.

    What was resolved for the devices is resolved anew when they are not the `same_devices` any more, or when each holds
    another part of the model. Raises ConfigError when a knob that defines the loss curve differs from the saved one.
    """
    same_devices = same_devices and _rank_share(wanted) == _rank_share(saved)
    different, kept = [], {}
    for key, info in iter_knobs():
        mine, theirs = get_knob(wanted, key), get_knob(saved, key)
        fixed = bool((info.json_schema_extra or {}).get("trajectory"))
        if mine == theirs:
            continue
        if mine == "auto":
            kept[key] = theirs
        elif fixed:
            different.append(f"{key} is {mine!r} now and was {theirs!r}")
    if different:
        raise ConfigError(
            f"the run folder {folder} holds a run of another configuration: {'; '.join(different)}. "
            "Set these back to go on with it, or choose another --run-dir"
        )
    for key in (*RESOLVED_ANEW, *(() if same_devices else RESOLVED_FOR_DEVICES)):
        kept.pop(key, None)
    return update_config(wanted, kept)


def _rank_share(config: Config) -> tuple[Any, ...]:
    """What decides which part of a model a rank holds, and how many micro-batches are under way there."""
    return config.parallel.axes, config.parallel.schedule if config.parallel.pipeline > 1 else ""


# ------------------------------------------------------------------------------------------------------------ sentences


def _kind_of(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "empty" if value is None else type(value).__name__)


def _format_value(value: Any) -> str:
    brief = reprlib.Repr()  # a few aliases can make a YAML value whose plain repr() would fill the memory
    brief.maxstring = brief.maxother = brief.maxlong = 60
    return _cut(brief.repr(value))


def _cut(text: str) -> str:
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 60 else text[:57] + "..."


_LIMITS = {  # pydantic's kind of error -> our words, and where it keeps the limit
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text (quotes make it so)",
    "string_unicode": "text without broken characters",
    "list_type": "text or a list of texts",
    "dict_type": "a mapping of names to values",
    "finite_number": "a finite number",
    "too_short": "a list that is not empty",
    "int_parsing_size": "a smaller whole number",
}


@dataclass(frozen=True)
class _Problem:
    """A sentence, or the alternatives of one: `key must be` and what it could be, `found` being what it is."""

    key: str
    text: str
    found: str | None = None  # None: `text` is the whole sentence


def _sentences(errors: Sequence[Any]) -> list[str]:
    """What pydantic found, a sentence each; a key with alternatives has one error for each of them."""
    merged: dict[str, tuple[list[str], str]] = {}
    for error in errors:
        problem = _problem(error)
        if problem.found is None:
            merged.setdefault(problem.text, ([], ""))
        else:
            expected, _ = merged.setdefault(f"{problem.key} must be", ([], problem.found))
            if problem.text not in expected:
                expected.append(problem.text)
    return [
        f"{start} {' or '.join(expected)}, not {found}" if expected else start
        for start, (expected, found) in merged.items()
    ]


def _key_of(loc: Sequence[int | str]) -> tuple[str, str]:
    """The dotted key of an error and its last part; pydantic's own words for alternatives and list items are left out.

    A key that was not there to be declared (an unknown one) ends it.
    """
    path: list[str] = []
    section: type[BaseModel] | None = Config
    named = False  # whether the key before is a mapping of names
    for part in loc:
        if section is None and not named:
            break
        path.append(_cut(str(part)) or "''")
        info = section.model_fields.get(str(part)) if section else None
        section = get_section_type(info.annotation) if info else None
        named = info is not None and get_origin(info.annotation) is dict
    return ".".join(path), path[-1] if path else ""


def _problem(error: Any) -> _Problem:
    """One problem that pydantic found: the key, and what would be legal."""
    (key, last), kind, value = _key_of(error["loc"]), error["type"], error["input"]
    if kind == "extra_forbidden":
        return _Problem(key, f"unknown key {key}; {suggest_key(key, last)}")
    if kind == "invalid_key" or (kind == "string_unicode" and not key):
        return _Problem(key, f"the key {_format_value(value)} must be a name, such as train or optim")
    if kind in ("model_type", "model_attributes_type"):
        what = f"{key} is a section with keys of its own" if key else "a recipe is a mapping of sections"
        return _Problem(key, f"{what}, not {_kind_of(value)}; give it keys or leave it out")
    if kind == "value_error":
        return _Problem(key, f"{key} {error['ctx']['error']}")
    if kind in _LIMITS:
        relation, name = _LIMITS[kind]
        return _Problem(key, f"{relation} {error['ctx'][name]:.17g}", _format_value(value))
    if kind == "literal_error":
        return _Problem(key, error["ctx"]["expected"], _format_value(value))
    if kind in _EXPECTED:
        return _Problem(key, _EXPECTED[kind], _format_value(value))
    return _Problem(key, f"{key}: {error['msg']} (it is {_format_value(value)}); mend it")


def suggest_key(key: str, last: str) -> str:
    """What to write instead of an unknown key, whose `last` part may hold dots of its own: the nearest of its section,
    of all keys, or one that ends alike."""
    names = [name for name, _ in iter_knobs()]
    section = key.rpartition(".")[0]
    if key in names:  # a dot inside the YAML key
        return f"write {last.rpartition('.')[2]} below {section}:"
    siblings = {name.removeprefix(f"{section}."): name for name in names if section and name.startswith(f"{section}.")}
    near = [siblings[name] for name in difflib.get_close_matches(last, siblings, n=1)]
    near = near or [name for name in names if name.rpartition(".")[2] == last]
    if not siblings:
        near = near or difflib.get_close_matches(key, [*names, *Config.model_fields], n=1)
    if near:
        return f"did you mean {near[0]}?"
    known = f"the keys of {section} are {', '.join(siblings)}" if siblings else ""
    return known or f"the sections are {', '.join(Config.model_fields)}"


def _list_of(where: str, sentences: list[str]) -> str:
    if len(sentences) == 1:
        return f"{where}: {sentences[0]}"
    return f"{where} has {len(sentences)} problems:\n" + "\n".join(f"  - {sentence}" for sentence in sentences)
