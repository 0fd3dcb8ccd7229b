"""What knobs are made of: sections, documentation, the kinds of values they take, and what is said of others."""

import math
import re
import reprlib
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]
STEPS = r"^[1-9]\d{0,14}-[1-9]\d{0,14}$"


def reject_bool(value: Any) -> Any:
    """Refuse true and false, which pydantic would read as 1 and 0; in a recipe that is a slip of the pen."""
    if isinstance(value, bool):
        raise ValueError("is a number, not true or false")
    return value


def accept_off(value: Any) -> Any:
    """The word off, which YAML reads as false; of other values that are no numbers no_bool speaks."""
    return "off" if value is False else reject_bool(value)


def reject_escapes(value: str) -> str:
    """Refuse what YAML can spell as an escape and no file name or text of a corpus holds."""
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("holds a character that is not text; remove it")
    return value


def as_list(value: Any) -> Any:
    """One entry may be written without the brackets of a list."""
    return [value] if isinstance(value, str | dict) else value


def as_steps(value: Any) -> Any:
    """Steps as `first-last`; YAML reads one alone as a number."""
    if value is not None and not (isinstance(value, str) and re.fullmatch(STEPS, value)):
        raise ValueError(f"must be the first and the last step, such as 10-12, not {reprlib.repr(value)}")
    return value


def as_work(value: Any) -> Any:
    """One of three words, or numbers of sequences in order of rank."""
    numbers = value if isinstance(value, list) else [None]
    if value not in ("auto", "even", "measured-once") and not all(type(n) is int and n >= 0 for n in numbers or [None]):
        raise ValueError(
            f"must be 'auto', 'even', 'measured-once' or a list of whole numbers from 0, not {reprlib.repr(value)}"
        )
    return value


def as_shares(value: Any) -> Any:
    """One of two words, or numbers in order of rank of which one at least is positive."""
    numbers = value if isinstance(value, list) else [None]
    fine = [isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < math.inf for n in numbers or [None]]
    if value not in ("auto", "even") and not (all(fine) and any(numbers)):
        raise ValueError(
            "must be 'auto', 'even' or a list of numbers from 0, of which one at least is not 0, not "
            f"{reprlib.repr(value)}"
        )
    return value


def as_stages(value: Any) -> Any:
    """One word, or numbers of blocks in order of stage."""
    numbers = value if isinstance(value, list) else [None]
    if value != "auto" and not all(type(n) is int and n >= 1 for n in numbers or [None]):
        raise ValueError(f"must be 'auto' or a list of whole numbers from 1, not {reprlib.repr(value)}")
    return value


def as_sources(value: Any) -> Any:
    """Sources in one list; what is wrong with an entry of a mixture in words that name it."""
    entries = as_list(value)
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, str):
            reject_escapes(entry)  # here, or it would be refused twice: as text, and for not being a section
        if isinstance(entry, str | BaseModel):
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"must be text (quotes make it so), not {reprlib.repr(entry)}")
        path, weight = entry.get("path"), entry.get("weight", 1.0)
        paths = [path] if isinstance(path, str) else path
        if not isinstance(paths, list) or not paths or not all(isinstance(name, str) for name in paths):
            raise ValueError(
                f"has an entry whose path is {reprlib.repr(path)}; write it as {{path: FILES, weight: NUMBER}}"
            )
        if type(weight) not in (int, float) or not 0 < weight < math.inf:
            raise ValueError(f"has an entry whose weight is {reprlib.repr(weight)}; give it a number above 0")
        if unknown := sorted(map(str, entry.keys() - {"path", "weight"})):
            raise ValueError(f"has an entry with the unknown key {unknown[0][:60]!r}; it may have path and weight")
    return entries


Text = Annotated[str, AfterValidator(reject_escapes)]
Steps = Annotated[str, Field(pattern=STEPS), BeforeValidator(as_steps)]
Count = Annotated[int, Field(ge=1, le=2**53), BeforeValidator(reject_bool)]
CountOrZero = Annotated[int, Field(ge=0, le=2**53), BeforeValidator(reject_bool)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(reject_bool)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(reject_bool)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(reject_bool)]


def knob(default: Any, doc: str, *, trajectory: bool = False) -> Any:
    """A field with its documentation; `trajectory=True` where changing it changes the loss curve."""
    return Field(default=default, description=doc, json_schema_extra={"trajectory": trajectory})


class Section(BaseModel):
    """A group of knobs: immutable, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
