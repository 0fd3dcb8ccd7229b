"""A class in a Python file of the user's: loaded by its path, and everything wrong with the file as one sentence."""

import functools
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TypeVar

from phalanx.core.errors import ConfigError

C = TypeVar("C")


def load_class(key: str, code: str | Path, name: str, base: type[C]) -> type[C]:
    """The class `name` of the file `code`, a subclass of `base`; `key` is the knob that names the file.

    The file is run, as any program of the user's. Raises ConfigError that says what is wrong with it, and where.
    """
    path = Path(code).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{key} {path} is no file; name a Python file that defines the class {name}")
    found = _load(key, path, path.stat().st_mtime_ns).get(name)
    if found is None:
        raise ConfigError(f"{key} {path} defines no class {name}; give the {name.lower()}'s class that name")
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigError(
            f"{key} {path}: {name} is no subclass of {base.__module__}.{base.__qualname__}, which the trainer builds "
            "on; derive it from that class"
        )
    return found


@functools.cache  # a file that registers something runs once
def _load(key: str, path: Path, changed_ns: int) -> dict[str, object]:
    called = f"phalanx_{key.replace('.code', '')}"  # as a module
    spec = importlib.util.spec_from_file_location(called, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key} {path} is no Python file; name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[called] = module  # dataclasses and the like look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a program that ends itself would end this one, and in silence
        raise ConfigError(f"{key} {path} cannot be run: {describe_error(error, path)}; mend the file") from error
    return vars(module)


def describe_error(error: BaseException, path: str | Path) -> str:
    """The error, and the line of the user's file that it came from."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} in line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    said = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}{f': {said}' if said else ''}" + (f" in line {lines[-1]}" if lines else "")


def source_file(found: type) -> str:
    """The file that a class comes from."""
    return str(vars(sys.modules[found.__module__]).get("__file__") or "")
