"""What a key of a recipe means, in words; made from `config/schema.py` alone."""

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

LEAST_SHARE = 0.7  # of a line, that names and defaults may take before what keys mean goes below them
EXACT = 2**53  # a limit that only keeps numbers exact


def explain_key(key: str, width: int) -> str:
    """What a key means, which values it takes and what becomes of it; of a section, or of all keys (""), what each is.

    Lines have at most `width` characters, and nothing is cut: what does not fit goes on below. Raises ConfigError for a
    key that there is not.
    """
    known = dict(iter_knobs())
    if key in KEYS:
        warn_of([(key, KEYS[key])], "the command line")
        key = KEYS[key]
    if key in known:
        return _in_full(key, known[key], width)
    listed = {name: info for name, info in known.items() if not key or name.startswith(f"{key}.")}
    if not listed:
        raise ConfigError(f"there is no key {key}; {suggest_key(key, key.rpartition('.')[2])}")
    name_room = 2 + max(map(len, listed))
    value_room = 1 + min(24, max(len(describe_default(info)) for info in listed.values()))
    rows = [
        f"{name:{name_room}}{describe_default(info):{value_room}} {info.description}" for name, info in listed.items()
    ]
    below = " " * (name_room + value_room + 1)
    if len(below) > width * LEAST_SHARE:  # beside names and defaults hardly a word would fit
        below = "    "
    wrap = functools.partial(textwrap.wrap, width=width, subsequent_indent=below, break_long_words=False)
    return "\n".join(line for row in rows for line in wrap(row, break_on_hyphens=False))


def _in_full(key: str, info: Any, width: int) -> str:
    rows = {"values": describe_values(info).replace("`", ""), "default": describe_default(info)}
    if describe_default(info) == "auto":
        rows["auto"] = _auto(key)
    rows["curve"] = (
        "yes: it defines the loss curve, so a run folder keeps it"
        if info.json_schema_extra["trajectory"]
        else "no: it may differ from one start to the next"
    )
    room = max(map(len, rows)) + 2
    lines = textwrap.wrap(f"{key}: {info.description}", width)
    for name, text in rows.items():
        lines += textwrap.wrap(f"{name:{room}}{text}", width, initial_indent="  ", subsequent_indent=" " * (room + 2))
    return "\n".join(lines)


def _auto(key: str) -> str:
    """When an `auto` gets its value."""
    if key in ("balance.batch", "data.workers"):
        return "stays auto in the run folder, since it is found all the time"
    if key == "balance.optimizer_state":
        return "gets its value at the first start, and anew for other ranks; an event of kind auto_resolved names it"
    if key in RESOLVED_ANEW:
        return "gets its value at each start; config.yaml of the run folder names it"
    kept = " unless the run goes on with other devices" if key in RESOLVED_FOR_DEVICES else ""
    return f"gets its value at the first start and keeps it{kept}; config.yaml of the run folder names it"


def describe_default(info: Any) -> str:
    """The default of a key, as YAML reads it."""
    return info.default if isinstance(info.default, str) else json.dumps(info.default)


def describe_values(info: Any) -> str:
    """Legal values of a key in words, literal ones in backticks."""
    return _values(TypeAdapter(info.rebuild_annotation()).json_schema())


def _values(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_values(option) for option in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    # JSON schema's words, and those that pydantic uses for a limit behind a validator of our own.
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
