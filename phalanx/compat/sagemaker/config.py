"""The nine keys of SageMaker's model parallel library, read and checked before anything is started. Pure, no torch."""

import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError

DEFAULTS: dict[str, int | bool] = {
    "hybrid_shard_degree": 0,
    "sm_activation_offloading": True,
    "activation_loading_horizon": 2,
    "fsdp_cache_flush_warnings": True,
    "allow_empty_shards": False,
    "tensor_parallel_degree": 1,
    "context_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "random_seed": 12345,
}
OLD_NAMES = {"tensor_parallel_seed": "random_seed"}
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
LAUNCHER = "the launcher's parameters"


@dataclass(frozen=True)
class Settings:
    """A value for each of the nine keys; `given` are those that were written out, `notes` what a user should hear."""

    values: Mapping[str, int | bool]
    given: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __getitem__(self, key: str) -> int:
        return self.values[key]


def parse(text: str, where: str) -> dict[str, Any]:
    """A JSON object. Raises ConfigError with the line of a mistake; Python's True is named as what it is."""
    try:
        found = json.loads(text, object_pairs_hook=functools.partial(_once, where))
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        word = re.match(r"True|False|None", rest)
        if word is not None:
            right = PYTHON_WORDS[word[0]]
            what = f"{word[0]} is Python syntax; in JSON write {right}"
        elif rest.startswith("'"):
            what = "JSON needs double quotes, not single quotes"
        else:
            what = f"this is not JSON ({error.msg}); fix it"
        raise ConfigError(f"{where}, line {error.lineno}: {what}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is not a JSON object; write keys and values in braces")
    return found


def _once(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for number, (key, _) in enumerate(pairs):
        if key in dict(pairs[:number]):
            raise ConfigError(f"{where} has {key} twice; remove one")
    return dict(pairs)


def read_config(config: Mapping[str, Any] | str | Path | None, where: str = "tsm.init") -> dict[str, Any]:
    """The argument of `tsm.init`: nothing, a mapping, or the path of a JSON file."""
    if config is None:
        return {}
    if isinstance(config, str | Path):
        try:
            return parse(Path(config).read_text(encoding="utf-8"), str(config))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot read {config} ({error}); name a JSON file, or give a dict") from None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} takes a dict, the path of a JSON file, or nothing, not {type(config).__name__}")
    return dict(config)


def merge_settings(script: Mapping[str, Any], launcher: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Both together, the launcher's winning, and a sentence for each key in which it does."""
    script, launcher = ({OLD_NAMES.get(key, key): value for key, value in each.items()} for each in (script, launcher))
    notes = [
        f"{key} is {launcher[key]!r} from {LAUNCHER}, which override {value!r} in the script"
        for key, value in script.items()
        if key in launcher and launcher[key] != value
    ]
    return {**script, **launcher}, notes


def check_settings(given: Mapping[str, Any], world: int, where: str = "tsm.init") -> Settings:
    """Settings for `world` ranks. Raises ConfigError listing every problem, one sentence a line."""
    problems: list[str] = []
    notes: list[str] = []
    values: dict[str, int | bool] = {}
    for key, value in given.items():
        name = OLD_NAMES.get(key, key)
        if name != key and name in given:
            problems.append(f"{key} is an old name of {name}, and both are given; remove {key}")
        elif name != key:
            notes.append(f"{key} is the old name of {name}, which has its value now")
        if name not in DEFAULTS:
            problems.append(_unknown(key))
        elif (wrong := _wrong_type(key, value, DEFAULTS[name])) is not None:
            problems.append(wrong)
        else:
            values[name] = value
    settings = Settings({**DEFAULTS, **values}, frozenset(values), tuple(notes))
    # A key with an unreadable value has no further problems.
    unread = {OLD_NAMES.get(key, key) for key in given} - set(values)
    problems += [sentence for keys, sentence in _contradictions(settings, world) if not keys & unread]
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  ".join([f"{where}:", *problems]))
    return settings


def _unknown(key: object) -> str:
    near = difflib.get_close_matches(str(key), [*DEFAULTS, *OLD_NAMES], 1)
    return f"unknown key {key!r}; " + (f"did you mean {near[0]}?" if near else f"known keys: {', '.join(DEFAULTS)}")


def _wrong_type(key: str, value: Any, default: int | bool) -> str | None:
    wanted = "true or false" if isinstance(default, bool) else "an integer"
    if type(value) is type(default):
        return None
    if isinstance(value, str) and re.fullmatch(r"\s*(-?\d+|true|false)\s*", value, re.IGNORECASE):
        return f"{key} is {value!r}, which is text; write it without quotes"
    return f"{key} is {value!r}; give {wanted}"


def _contradictions(settings: Settings, world: int) -> list[tuple[set[str], str]]:
    """All problems with so many ranks: (keys, sentence)."""
    found: list[tuple[set[str], str]] = []
    shard, horizon = settings["hybrid_shard_degree"], settings["activation_loading_horizon"]
    tensor, context, experts = (settings[f"{kind}_parallel_degree"] for kind in ("tensor", "context", "expert"))
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    if not 0 <= shard <= world:
        found.append(({"hybrid_shard_degree"}, f"hybrid_shard_degree is {shard}; for {ranks} give 0 to {world}"))
    if horizon < 1:
        found.append(
            ({"activation_loading_horizon"}, f"activation_loading_horizon is {horizon}; give a number above 0")
        )
    for kind, degree in (("tensor", tensor), ("context", context), ("expert", experts)):
        key = f"{kind}_parallel_degree"
        if not 1 <= degree <= world:
            found.append(({key}, f"{key} is {degree}; for {ranks} give 1 to {world}"))
        elif world % degree:
            found.append(({key}, f"{key} is {degree}, which does not divide the {ranks}; give a divisor"))
    if found:
        return found
    if tensor > 1 and experts > 1:
        found.append((
            {"tensor_parallel_degree", "expert_parallel_degree"},
            f"tensor_parallel_degree {tensor} and expert_parallel_degree {experts} cannot be combined; set one to 1",
        ))  # fmt: skip
    elif world % (max(shard, 1) * tensor * experts):
        found.append((
            {"hybrid_shard_degree", "tensor_parallel_degree", "expert_parallel_degree"},
            f"hybrid_shard_degree {shard} x tensor_parallel_degree {tensor} x expert_parallel_degree {experts} does "
            f"not divide the {ranks}; give degrees whose product does",
        ))  # fmt: skip
    if world % (tensor * context):
        found.append((
            {"tensor_parallel_degree", "context_parallel_degree"},
            f"tensor_parallel_degree {tensor} x context_parallel_degree {context} does not divide the {ranks}; give "
            "degrees whose product does",
        ))  # fmt: skip
    if context > 1 and shard and context > shard:
        found.append((
            {"context_parallel_degree", "hybrid_shard_degree"},
            f"context_parallel_degree {context} is above hybrid_shard_degree {shard}; give at most that",
        ))  # fmt: skip
    if context > 1 and experts > 1:
        found.append((
            {"context_parallel_degree", "expert_parallel_degree"},
            f"context_parallel_degree {context} and expert_parallel_degree {experts} cannot be combined; set one to 1",
        ))  # fmt: skip
    return found
