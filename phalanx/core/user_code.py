"""Loading of users' classes and functions from Python files that a recipe names."""

import functools
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from phalanx.core.errors import ConfigError

C = TypeVar("C")
REFERENCE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


def load_class(key: str, code: str | Path, name: str, base: type[C]) -> type[C]:
    """Load the class `name` from the file `code`, a subclass of `base`; `key` is the recipe key that names the file.
    The file is executed. Raises ConfigError with the error and its line.
    """
    found, path = load_member(key, code, name, f"the class {name}")
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigError(
            f"{key} {path}: {name} is not a subclass of {base.__module__}.{base.__qualname__}, which the trainer "
            "builds on; derive it from that class"
        )
    return found


def load_function(key: str, code: str | Path, name: str) -> Callable[..., Any]:
    """Load the function `name` from the file `code`, as `load_class` does."""
    found, path = load_member(key, code, name, f"the function {name}")
    if not callable(found):
        raise ConfigError(f"{key} {path}: {name} is not a function; define one of that name")
    return found


def load_member(key: str, code: str | Path, name: str, what: str) -> tuple[Any, Path]:
    """Load the member `name` of the file `code`; returns it and the file's path. Raises ConfigError if the file does
    not define it."""
    path = Path(code).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{key} {path} is not a file; name a Python file that defines {what}")
    defined = _load(key, path, path.stat().st_mtime_ns)
    if name not in defined:
        raise ConfigError(f"{key} {path} defines no {what.removeprefix('the ')}; give it that name")
    return defined[name], path


def split_reference(text: str) -> tuple[str, str] | None:
    """Split `my.py:name` into file and name; None for any other text."""
    match = REFERENCE.fullmatch(text)
    return (match[1], match[2]) if match else None


@functools.cache  # so that a file which registers something runs once
def _load(key: str, path: Path, changed_ns: int) -> dict[str, object]:
    called = f"phalanx_{key.replace('.code', '').replace('.', '_')}"  # module name
    spec = importlib.util.spec_from_file_location(called, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key} {path} is not a Python file; name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[called] = module  # dataclasses and others look up their module there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # SystemExit would end this process without a message
        raise ConfigError(f"{key} {path} cannot be run: {describe_error(error, path)}; fix the file") from error
    return vars(module)


def describe_error(error: BaseException, path: str | Path) -> str:
    """Describe an error with the line of the user's file that raised it."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} in line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    said = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}{f': {said}' if said else ''}" + (f" in line {lines[-1]}" if lines else "")


def source_file(found: type) -> str:
    """Source file of a class."""
    return str(vars(sys.modules[found.__module__]).get("__file__") or "")
