"""Explanation of a recipe's keys, generated from `config/schema.py`."""

import functools
import json
import textwrap
from typing import Any

from pydantic import TypeAdapter

from phalanx.config.resolve import RESOLVED_ANEW, RESOLVED_FOR_DEVICES
from phalanx.config.schema import iter_knobs
from phalanx.config.sentences import suggest_key
from phalanx.core.errors import ConfigError
from phalanx.core.renamed import KEYS, warn_of

LEAST_SHARE = 0.7  # of a line for names and defaults; longer ones put the description below
EXACT = 2**53  # a limit that only keeps numbers exact


def explain_key(key: str, width: int) -> str:
    """Explain a key: meaning, legal values, how `auto` is resolved; of a section, or of all keys (""), a line each.
    Lines wrap at `width` characters. Raises ConfigError for an unknown key.
    """
    known = dict(iter_knobs())
    if key in KEYS:
        warn_of([(key, KEYS[key])], "the command line")
        key = KEYS[key]
    if key in known:
        return _in_full(key, known[key], width)
    listed = {name: info for name, info in known.items() if not key or name.startswith(f"{key}.")}
    if not listed:
        raise ConfigError(f"unknown key {key}; {suggest_key(key, key.rpartition('.')[2])}")
    name_room = 2 + max(map(len, listed))
    value_room = 1 + min(24, max(len(describe_default(info)) for info in listed.values()))
    rows = [
        f"{name:{name_room}}{describe_default(info):{value_room}} {info.description}" for name, info in listed.items()
    ]
    below = " " * (name_room + value_room + 1)
    if len(below) > width * LEAST_SHARE:  # too narrow beside names and defaults
        below = "    "
    wrap = functools.partial(textwrap.wrap, width=width, subsequent_indent=below, break_long_words=False)
    return "\n".join(line for row in rows for line in wrap(row, break_on_hyphens=False))


def _in_full(key: str, info: Any, width: int) -> str:
    rows = {"values": describe_values(info).replace("`", ""), "default": describe_default(info)}
    if describe_default(info) == "auto":
        rows["auto"] = _auto(key)
    rows["curve"] = (
        "yes: it defines the loss curve; a run folder keeps it"
        if info.json_schema_extra["trajectory"]
        else "no: it may differ from one start to the next"
    )
    room = max(map(len, rows)) + 2
    lines = textwrap.wrap(f"{key}: {info.description}", width)
    for name, text in rows.items():
        lines += textwrap.wrap(f"{name:{room}}{text}", width, initial_indent="  ", subsequent_indent=" " * (room + 2))
    return "\n".join(lines)


def _auto(key: str) -> str:
    """When `auto` is resolved."""
    if key in ("balance.batch", "data.workers"):
        return "stays auto: measured during the whole run"
    if key in ("balance.context", "balance.experts"):
        return "stays auto: decided at each start"
    if key in ("balance.optimizer_state", "parallel.layers_per_stage"):
        return "resolved at the first start, and again for other ranks; the event auto_resolved has the value"
    if key in RESOLVED_ANEW:
        return "resolved at each start; config.yaml of the run folder has the value"
    kept = " unless the run resumes on other devices" if key in RESOLVED_FOR_DEVICES else ""
    return f"resolved at the first start and kept{kept}; config.yaml of the run folder has the value"


def describe_default(info: Any) -> str:
    """The default of a key, as YAML."""
    return info.default if isinstance(info.default, str) else json.dumps(info.default)


def describe_values(info: Any) -> str:
    """Legal values of a key in words, literal ones in backticks."""
    return _values(TypeAdapter(info.rebuild_annotation()).json_schema())


def _values(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_values(option) for option in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    # Terms of JSON schema, and pydantic's for a limit after a custom validator.
    words = {("minimum", "ge"): "from", ("exclusiveMinimum", "gt"): "above", ("maximum", "le"): "to"}
    words |= {("exclusiveMaximum", "lt"): "below"}
    limits = [(word, schema[name]) for names, word in words.items() for name in names if name in schema]
    lists = {"integer": "a list of whole numbers", "number": "a list of numbers"}
    if schema.get("type") == "array" and schema["items"].get("type") in lists:
        return lists[schema["items"]["type"]]
    shown = [f"{word} {limit}" for word, limit in limits if limit != EXACT]
    names = {"integer": "whole number", "number": "number", "string": "text", "array": "text or a list of texts"}
    names |= {"boolean": "`true`, `false`", "null": "`null`", "object": "a mapping"}
    return " ".join([names[schema["type"]], *shown])
