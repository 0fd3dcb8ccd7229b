"""Flags of other systems' command lines, and their conversion to a recipe (used by `command_lines.py`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.errors import ConfigError

BY_DEVICE = "the devices decide"  # why a flag of kernels and transports is passed over


@dataclass
class MappedCommand:
    """The `recipe` of a command line, its run folder if it names one, and why flags are `passed_over`, by flag."""

    system: str
    recipe: dict[str, dict[str, Any]] = field(default_factory=dict)
    run_dir: str | None = None
    passed_over: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any) -> None:
        section, _, leaf = key.partition(".")
        self.recipe.setdefault(section, {})[leaf] = value


def read_flags(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Values by flag, of which the last counts; words with a dash and a digit are values."""
    found: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values = found[name.replace("_", "-")] = [value] if equals else []
        elif values is None:
            raise ConfigError(f"{word!r} stands before the first flag, and these scripts take flags only; remove it")
        else:
            values.append(word)
    return found


class Flags:
    """Reads flags by name, and knows which have been read."""

    def __init__(self, given: Mapping[str, list[str]]) -> None:
        self.given, self.read = given, set[str]()

    def has(self, name: str) -> bool:
        self.read.add(name)
        return name in self.given

    def words(self, name: str) -> list[str]:
        self.read.add(name)
        return self.given.get(name, [])

    def text(self, name: str, default: str | None = None) -> str | None:
        words = self.words(name)
        return words[0] if words else default

    def number(self, name: str, default: Any = None, kind: Callable[[str], Any] = float) -> Any:
        word = self.text(name)
        if word is None:
            return default
        try:
            return kind(word)
        except ValueError:
            raise ConfigError(f"--{name} {word!r} is no number; correct it") from None

    def count(self, name: str, default: Any = None) -> Any:
        return self.number(name, default, int)

    def need(self, name: str) -> int:
        value: int | None = self.count(name)
        if value is None:
            raise ConfigError(f"--{name} is missing; its script needs it, too")
        return value

    def pass_over(self, mapped: MappedCommand, reasons: Mapping[str, str]) -> None:
        """Name all that is left."""
        for name in self.given:
            if name not in self.read:
                mapped.passed_over[name] = reasons.get(name, "nothing here corresponds to it")


def to_number(name: str, text: str) -> float:
    """A number among the words of a flag."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{name}: {text!r} is no number; correct it") from None
