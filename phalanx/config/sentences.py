"""Validation errors of a recipe as sentences with the key and its legal values."""

import difflib
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_origin

from pydantic import BaseModel

from phalanx.config.schema import Config, get_section_type, iter_knobs


def describe_kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "empty" if value is None else type(value).__name__)


def format_value(value: Any) -> str:
    brief = reprlib.Repr()  # YAML aliases can make a value whose repr() would fill the memory
    brief.maxstring = brief.maxother = brief.maxlong = 60
    return cut_text(brief.repr(value))


def cut_text(text: str) -> str:
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 60 else text[:57] + "..."


_LIMITS = {  # pydantic's kind of error -> our text, and where it has the limit
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
    "string_type": "text (put it in quotes)",
    "string_unicode": "text without broken characters",
    "list_type": "text or a list of texts",
    "dict_type": "a mapping of names to values",
    "finite_number": "a finite number",
    "too_short": "a non-empty list",
    "int_parsing_size": "a smaller whole number",
}


@dataclass(frozen=True)
class _Problem:
    """A problem of a key: `key must be` one of the alternatives, and `found`, its value."""

    key: str
    text: str
    found: str | None = None  # None: `text` is the whole sentence


def describe_errors(errors: Sequence[Any]) -> list[str]:
    """pydantic's errors, a sentence for each key; a key with alternatives has one error for each."""
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


def find_error_key(loc: Sequence[int | str]) -> tuple[str, str]:
    """The dotted key of an error and its last part, without pydantic's names of alternatives and list items. An unknown
    key ends it.
    """
    path: list[str] = []
    section: type[BaseModel] | None = Config
    named = False  # whether the key before is a mapping of names
    for part in loc:
        if section is None and not named:
            break
        path.append(cut_text(str(part)) or "''")
        info = section.model_fields.get(str(part)) if section else None
        section = get_section_type(info.annotation) if info else None
        named = info is not None and get_origin(info.annotation) is dict
    return ".".join(path), path[-1] if path else ""


def _problem(error: Any) -> _Problem:
    """One error of pydantic: the key and its legal values."""
    (key, last), kind, value = find_error_key(error["loc"]), error["type"], error["input"]
    if kind == "extra_forbidden":
        return _Problem(key, f"unknown key {key}; {suggest_key(key, last)}")
    if kind == "invalid_key" or (kind == "string_unicode" and not key):
        return _Problem(key, f"the key {format_value(value)} must be a name, such as train or optim")
    if kind in ("model_type", "model_attributes_type"):
        what = f"{key} is a section" if key else "a recipe is a mapping of sections"
        return _Problem(key, f"{what}, not {describe_kind(value)}; give it keys or remove it")
    if kind == "value_error":
        return _Problem(key, f"{key} {error['ctx']['error']}")
    if kind in _LIMITS:
        relation, name = _LIMITS[kind]
        return _Problem(key, f"{relation} {error['ctx'][name]:.17g}", format_value(value))
    if kind == "literal_error":
        return _Problem(key, error["ctx"]["expected"], format_value(value))
    if kind in _EXPECTED:
        return _Problem(key, _EXPECTED[kind], format_value(value))
    return _Problem(key, f"{key}: {error['msg']} (it is {format_value(value)}); fix it")


def suggest_key(key: str, last: str) -> str:
    """Suggestion for an unknown key, whose `last` part may have dots: the nearest of its section, of all keys, or one
    with the same end."""
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


def list_problems(where: str, sentences: list[str]) -> str:
    if len(sentences) == 1:
        return f"{where}: {sentences[0]}"
    return f"{where} has {len(sentences)} problems:\n" + "\n".join(f"  - {sentence}" for sentence in sentences)
