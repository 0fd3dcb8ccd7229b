"""Fields of a recipe: sections, documented keys, and validators of their values."""

import math
import re
import reprlib
import urllib.parse
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from phalanx.core.durations import parse_duration
from phalanx.core.errors import ConfigError
from phalanx.core.user_code import split_reference

Auto = Literal["auto"]
STEPS = r"^[1-9]\d{0,14}-[1-9]\d{0,14}$"


def reject_bool(value: Any) -> Any:
    """Refuse true and false, which pydantic would read as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("is a number, not true or false")
    return value


def accept_off(value: Any) -> Any:
    """Read `off`, which YAML parses as false; no_bool reports other values that are not numbers."""
    return "off" if value is False else reject_bool(value)


def reject_escapes(value: str) -> str:
    """Refuse surrogates and NUL, which YAML escapes can spell and no file name or text may contain."""
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("has a character that is not text; remove it")
    return value


def as_list(value: Any) -> Any:
    """Accept one entry without the brackets of a list."""
    return [value] if isinstance(value, str | dict) else value


def as_steps(value: Any) -> Any:
    """Parse a range of steps `first-last`; YAML reads a single step as a number."""
    if value is not None and not (isinstance(value, str) and re.fullmatch(STEPS, value)):
        raise ValueError(f"must be the first and the last step, such as 10-12, not {reprlib.repr(value)}")
    return value


def as_duration(value: Any) -> Any:
    """A time with its unit."""
    try:
        parse_duration(value if isinstance(value, str) else "", "it")
    except ConfigError:
        raise ValueError(f"must be a time such as 90s, 45min or 3h, not {reprlib.repr(value)}") from None
    return value


def parse_address(value: Any) -> tuple[str, int]:
    """Host and port of a port number, of this machine alone, or of `ADDRESS:PORT`. Raises ValueError."""
    host, _, port = ("127.0.0.1", "", str(value)) if isinstance(value, int) else str(value).rpartition(":")
    if isinstance(value, bool) or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"must be a port, or ADDRESS:PORT such as 0.0.0.0:9420, not {reprlib.repr(value)}")
    return host.strip("[]"), int(port)


def as_address(value: Any) -> Any:
    """A port, or an address and a port."""
    if value is not None:
        parse_address(value)
    return value


def as_web_address(value: Any) -> Any:
    """The base address of a service."""
    parts = urllib.parse.urlsplit(value) if isinstance(value, str) else None
    if value is not None and (parts is None or parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError(f"must be an address such as http://127.0.0.1:1338, not {reprlib.repr(value)}")
    return value


def as_schedule(value: Any) -> Any:
    """The name of a schedule, or of a function in a file."""
    known = ("cosine", "linear", "constant", "polynomial", "wsd")
    if not isinstance(value, str) or (value not in known and split_reference(value) is None):
        raise ValueError(
            "must be 'cosine', 'linear', 'constant', 'polynomial', 'wsd' or a function of the user's, such as "
            f"my.py:name, not {reprlib.repr(value)}"
        )
    return value


def as_work(value: Any) -> Any:
    """Parse balance.batch: one of three words, or sequences by rank."""
    numbers = value if isinstance(value, list) else [None]
    if value not in ("auto", "even", "measured-once") and not all(type(n) is int and n >= 0 for n in numbers or [None]):
        raise ValueError(
            f"must be 'auto', 'even', 'measured-once' or a list of whole numbers >= 0, not {reprlib.repr(value)}"
        )
    return value


def as_ramp(value: Any) -> Any:
    """Three numbers of sequences."""
    if value is not None and not (isinstance(value, list) and [type(n) is int and n >= 1 for n in value] == [True] * 3):
        raise ValueError(
            f"must be the first batch, the increment and the sequences of the ramp, such as [32, 32, 100000], not "
            f"{reprlib.repr(value)}"
        )
    return value


def as_shares(value: Any) -> Any:
    """Parse balance.optimizer_state: one of two words, or numbers by rank, at least one positive."""
    numbers = value if isinstance(value, list) else [None]
    fine = [isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < math.inf for n in numbers or [None]]
    if value not in ("auto", "even") and not (all(fine) and any(numbers)):
        raise ValueError(
            f"must be 'auto', 'even' or a list of numbers >= 0, at least one of them > 0, not {reprlib.repr(value)}"
        )
    return value


def as_stages(value: Any) -> Any:
    """Parse parallel.layers_per_stage: auto, or blocks by stage."""
    numbers = value if isinstance(value, list) else [None]
    if value != "auto" and not all(type(n) is int and n >= 1 for n in numbers or [None]):
        raise ValueError(f"must be 'auto' or a list of whole numbers >= 1, not {reprlib.repr(value)}")
    return value


def as_sources(value: Any) -> Any:
    """Parse data.source into a list; errors name the entry of a mixture."""
    entries = as_list(value)
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, str):
            reject_escapes(entry)  # checked here: pydantic would report it twice, as text and as a section
        if isinstance(entry, str | BaseModel):
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"must be text (put it in quotes), not {reprlib.repr(entry)}")
        path, weight = entry.get("path"), entry.get("weight", 1.0)
        paths = [path] if isinstance(path, str) else path
        if not isinstance(paths, list) or not paths or not all(isinstance(name, str) for name in paths):
            raise ValueError(
                f"has an entry whose path is {reprlib.repr(path)}; write it as {{path: FILES, weight: NUMBER}}"
            )
        if type(weight) not in (int, float) or not 0 < weight < math.inf:
            raise ValueError(f"has an entry whose weight is {reprlib.repr(weight)}; give it a number > 0")
        if unknown := sorted(map(str, entry.keys() - {"path", "weight"})):
            raise ValueError(f"has an entry with the unknown key {unknown[0][:60]!r}; it may have path and weight")
    return entries


Text = Annotated[str, AfterValidator(reject_escapes)]
Duration = Annotated[Text, BeforeValidator(as_duration)]
Steps = Annotated[str, Field(pattern=STEPS), BeforeValidator(as_steps)]
Count = Annotated[int, Field(ge=1, le=2**53), BeforeValidator(reject_bool)]
CountOrZero = Annotated[int, Field(ge=0, le=2**53), BeforeValidator(reject_bool)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(reject_bool)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(reject_bool)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(reject_bool)]


def knob(default: Any, doc: str, *, trajectory: bool = False) -> Any:
    """A field with its documentation; `trajectory=True` if it defines the loss curve."""
    return Field(default=default, description=doc, json_schema_extra={"trajectory": trajectory})


class Section(BaseModel):
    """A section of keys: immutable, refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
