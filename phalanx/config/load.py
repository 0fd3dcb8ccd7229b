"""Load recipes: YAML and `key=value` overrides into a validated Config, and the config.yaml of a run folder.

It imports no torch and reads only the recipe. All problems are reported at once: a sentence each, with the key and its
legal values.
"""

import ast
import copy
import itertools
import json
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from phalanx.config.schema import Config, iter_knobs
from phalanx.config.sentences import (
    cut_text,
    describe_errors,
    describe_kind,
    find_error_key,
    format_value,
    list_problems,
)
from phalanx.config.validation import find_problems
from phalanx.core.errors import ConfigError
from phalanx.core.renamed import KEYS, rename_keys, warn_of

BEGIN, END = "---\n", "...\n"  # of a YAML document
EXPONENT = re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$")  # a number in YAML 1.2, text in YAML 1.1
EXPONENT_TAG = "tag:phalanx,2026:exponent"
IMPLICIT = {
    **yaml.SafeLoader.yaml_implicit_resolvers,
    **{
        first: [*yaml.SafeLoader.yaml_implicit_resolvers.get(first, []), (EXPONENT_TAG, EXPONENT)]
        for first in "-+.0123456789"
    },
}


def _with_exponent(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    """Parse a number: `1e3` as an int, `1e-3` as a float."""
    text = str(loader.construct_scalar(node))
    value = float(text)
    return int(Decimal(text)) if value.is_integer() else value


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader with three changes: a duplicate key is an error, every error has a line, and `1e3` is a
    number."""

    yaml_implicit_resolvers = IMPLICIT
    yaml_constructors = {**yaml.SafeLoader.yaml_constructors, EXPONENT_TAG: _with_exponent}  # noqa: RUF012

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
            # Converting `!!bool x`, `2001-99-99` or a number of 5000 digits raises various errors.
            kind = node.tag.rpartition(":")[2]
            problem = f"{format_value(node.value)} cannot be read as a YAML {kind}"
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
                repeated = False  # the base class reports an unhashable key
            if repeated:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
        return super().construct_mapping(node, deep)


# Ten times as fast, where libyaml is there. A user's recipe is read by the other one, which words mistakes.
_FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FastDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_FastDumper):
    """YAML's safe dumper; quotes text that `_UniqueKeyLoader` would read as a number."""

    yaml_implicit_resolvers = IMPLICIT


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse YAML text into a mapping; raises ConfigError with the line of an error."""
    tree = _parse_text(text, where)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{where}: a recipe is a mapping of sections such as `train:`, but this is {describe_kind(tree)}; "
            "name a recipe, such as one of recipes/"
        )
    return tree


def _parse_text(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)  # a subclass of SafeLoader
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply for a recipe; fix the brackets") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = chr(error.character)
        raise ConfigError(f"{where}, line {line}: the character {character!r} is not text; remove it") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{place}: not valid YAML ({error.problem}); fix that line") from None


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe file into a mapping, without validation."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(_no_recipe(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {path} ({error}); give a YAML text file") from None
    tree, changed = rename_keys(parse_yaml(text, str(path)))
    warn_of(changed, str(path))
    return tree


def _no_recipe(path: Path) -> str:
    name = f"recipes/{path.stem}.yaml"
    if name in list_bundled_files():
        return f"no recipe {path}; `phalanx recipes copy {path.stem}` writes {name}"
    return f"no recipe {path}; `phalanx recipes list` shows the bundled ones"


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `section.key=value` overrides to a copy of `tree`; values are YAML scalars or lists."""
    result, renamed = dict(tree), []
    for override in overrides:
        key, equals, text = override.partition("=")
        if key in KEYS:
            renamed.append((key, KEYS[key]))
            key = KEYS[key]
        *parents, leaf = key.split(".")
        if not equals or not all([*parents, leaf]):
            raise ConfigError(f"`{cut_text(override)}` does not have the form section.key=value, such as optim.lr=3e-4")
        node, path = result, []
        for parent in parents:
            path.append(parent)
            child = node.get(parent)
            if child is not None and not isinstance(child, dict):
                raise ConfigError(
                    f"`{cut_text(override)}` cannot be set: {'.'.join(path)} is {describe_kind(child)} without "
                    "keys; fix the recipe or the key"
                )
            node[parent] = dict(child or {})  # a copy: the recipe's mapping does not change
            node = node[parent]
        node[leaf] = _parse_text(text, f"the value of `{cut_text(override)}`") if text else ""
    result, changed = rename_keys(result)
    warn_of(renamed + changed, "the command line")
    return result


def load_recipe(recipe: Path, overrides: Sequence[str] = ()) -> Config:
    """Load a recipe file, apply overrides and validate it. Raises ConfigError with all problems, a line each."""
    return check_recipe(build_config(apply_overrides(read_recipe(recipe), overrides), str(recipe)), str(recipe))


def check_recipe(config: Config, where: str) -> Config:
    """Check a user's recipe for keys that contradict each other. Raises ConfigError."""
    if {"train.steps", "train.epochs"} <= find_explicit_keys(config) and config.train.epochs is not None:
        raise ConfigError(f"{where}: train.steps and train.epochs both set the length of training; remove one of them")
    return config


def build_config(tree: dict[str, Any], where: str) -> Config:
    """Validate a mapping as a Config. Raises ConfigError with all problems at once."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        wrong = error.errors()
        raise ConfigError(
            list_problems(where, [*describe_errors(wrong), *_problems_of_the_rest(tree, wrong)])
        ) from None
    if found := find_problems(config):
        raise ConfigError(list_problems(where, found))
    return config


def _problems_of_the_rest(tree: dict[str, Any], wrong: Sequence[Any]) -> list[str]:
    """Invalid combinations among the valid keys, so that one run reports all errors."""
    rest = copy.deepcopy(tree)
    dropped = []
    for parts in {tuple(find_error_key(error["loc"])[0].split(".")) for error in wrong}:
        parent, depth = rest, 1
        while depth < len(parts) and isinstance(parent.get(parts[depth - 1]), dict):
            parent, depth = parent[parts[depth - 1]], depth + 1
        if parts[depth - 1] not in parent:
            return []  # a key that is missing: the rest has no meaning
        del parent[parts[depth - 1]]
        dropped.append(".".join(parts[:depth]))
    try:
        config = Config.model_validate(rest)
    except ValidationError:
        return []
    # Drop sentences about a dropped key, which would name its default, and about the key that a
    # misspelt one means.
    meant = re.findall(r"did you mean ([\w.]+)\?", " ".join(describe_errors(wrong)))
    return [sentence for sentence in find_problems(config) if not any(key in sentence for key in (*dropped, *meant))]


def update_config(config: Config, values: dict[str, Any]) -> Config:
    """Copy of `config` with dotted keys replaced, validated again; keys that were not set stay unset."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    for key, value in values.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return build_config(tree, "the resolved configuration")


def find_explicit_keys(config: Config) -> frozenset[str]:
    """The keys that a recipe or its overrides set; all others have their default."""
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


def to_yaml(config: Config) -> str:
    """Serialize a configuration as YAML that `load_recipe` reads back to the same value."""
    return dump_tree(config.model_dump(mode="json"))


def from_yaml(text: str, where: str) -> Config:
    """The configuration that `to_yaml` has serialized. Raises ConfigError."""
    return build_config(yaml.load(text, Loader=_FastLoader), where)


def dump_tree(tree: dict[str, Any]) -> str:
    """Serialize a mapping of sections as YAML."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=False)


def render_saved_recipe(config: Config) -> str:
    """Serialize a configuration for a run folder: one YAML document with start and end markers, since a truncated file
    may be valid YAML with other values."""
    return f"{BEGIN}{to_yaml(config)}{END}"


def load_saved_recipe(file: Path) -> Config:
    """Load a run folder's configuration, written by `render_saved_recipe` or by an earlier release without markers.
    Raises ConfigError for a damaged file, or one of another version of Phalanx."""
    try:
        text = file.read_text(encoding="utf-8")
        whole = text.endswith(END if text.startswith(BEGIN) else "\n")
        tree = parse_yaml(text, str(file)) if whole else None
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise _damaged(file, str(error).removeprefix(str(file))) from None
    if not tree:
        raise _damaged(file, "it is empty" if not text.strip() else "it ends too early")
    try:
        return build_config(rename_keys(tree)[0], str(file))
    except ConfigError as error:
        raise _damaged(file, f"or written by another version of Phalanx: {error}") from None


def _damaged(file: Path, how: str) -> ConfigError:
    return ConfigError(
        f"{file}, the run's configuration, is damaged ({how.strip(' ,:')}); restore it from a copy, or choose "
        "another --run-dir; the checkpoints are intact"
    )


# ------------------------------------------------------------------------------------------------------------- bundled
# Bundled recipes and examples: package data, or folders of the repository.


FOLDERS = ("recipes", "examples")


def package_data_root() -> Path:
    """The folder with recipes/ and examples/: the installed package, or the repository."""
    package = Path(__file__).resolve().parents[1]
    return package if (package / FOLDERS[0]).is_dir() else package.parent


def list_bundled_files() -> list[str]:
    """Bundled recipes and examples, by the paths of the documentation: recipes/demo.yaml, examples/own_loop.py."""
    found = [
        path
        for folder in FOLDERS
        for kind in ("yaml", "py", "ipynb")
        for path in (package_data_root() / folder).rglob(f"*.{kind}")
    ]
    return sorted(
        (path.relative_to(package_data_root()).as_posix() for path in found), key=lambda name: (name[0] != "r", name)
    )


def short_name(name: str) -> str:
    """Short name of a recipe or an example: demo, own_loop, sagemaker/plain_fsdp."""
    return name.partition("/")[2].rpartition(".")[0]


def describe_bundled_file(name: str) -> str:
    """Description of a bundled file: the first sentence of its comment, docstring or text, on one line."""
    text = (package_data_root() / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        said = ast.get_docstring(ast.parse(text)) or ""
    elif name.endswith(".ipynb"):
        said = "".join(json.loads(text)["cells"][0]["source"]).partition("\n\n")[2]
    else:
        said = "\n".join(line[2:] for line in itertools.takewhile(lambda line: line[:1] == "#", text.splitlines()))
    first = " ".join(said.partition("\n\n")[0].split())
    return re.split(r"\. |\.$", first, maxsplit=1)[0]


def find_bundled_file(name: str) -> str:
    """Path of the bundled file `name`: demo, demo.yaml or recipes/demo.yaml; for a subfolder of the examples, such as
    sagemaker, its first file. Raises ConfigError."""
    found = [path for path in list_bundled_files() if name in (path, short_name(path), *Path(path).parts[1:])]
    if not found:
        raise ConfigError(f"no recipe or example is named {name}; `phalanx recipes list` shows all")
    return found[0]


def copy_bundled_files(name: str, folder: Path) -> list[Path]:
    """Copy a recipe or an example below `folder`, to the same path as in the documentation, with what it needs.

    A recipe brings the example that it names as its code; an example of a subfolder brings those beside it. Returns all
    these files; an existing file stays. Raises ConfigError, before it writes anything, if a file with other content
    exists.
    """
    first = find_bundled_file(name)
    wanted = [
        first,
        *re.findall(r"^ +code: (examples/\S+)", (package_data_root() / first).read_text(encoding="utf-8"), re.M),
    ]
    if first.count("/") > 1:
        wanted = [path for path in list_bundled_files() if path.rpartition("/")[0] == first.rpartition("/")[0]]
    missing = {}
    for path in wanted:
        content, target = (package_data_root() / path).read_bytes(), folder / path
        if not target.exists():
            missing[target] = content
        elif target.read_bytes() != content:
            raise ConfigError(
                f"{target} exists with other content and was not overwritten; move it away, or give another folder "
                "with --to"
            )
    for target, content in missing.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return [folder / path for path in wanted]
