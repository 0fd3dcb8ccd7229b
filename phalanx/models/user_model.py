"""The class of a model: a family's, or a user's own `Model` in a Python file, which is trained in its place; and the
loading of any class from a file of the user's."""

import functools
import importlib
import importlib.util
import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import FAMILIES
from phalanx.models.llama import Llama, init_slice
from phalanx.models.lora import apply_lora
from phalanx.models.model import Architecture

_KEY = "model.code"
C = TypeVar("C")


@functools.cache
def load_family_class(name: str) -> type[Architecture]:
    """The class of the models of a family, whose parameters have the family's names in Hugging Face folders."""
    family = FAMILIES[name]
    module, _, called = family.network.partition(":")
    network: type[Architecture] = getattr(importlib.import_module(module), called)
    if network.hf_names == family.hf.names:
        return network
    own = {"hf_names": dict(family.hf.names), "__module__": module}
    return type(family.title.replace(" ", ""), (network,), own)


def hf_name(name: str, model_class: type[Architecture] = Llama) -> str:
    """The Hugging Face name of our parameter `name`. Raises ConfigError where a class of one's own says none."""
    found = re.fullmatch(r"(layers\.)(\d+)(\..+)", name)
    pattern = name if found is None else f"layers.{{i}}{found[3]}"
    if pattern not in model_class.hf_names:
        raise ConfigError(
            f"the class {model_class.__name__} of model.code says no Hugging Face name for its parameter {name}, so no "
            f"export could name it; add {pattern!r} to its hf_names"
        )
    return model_class.hf_names[pattern].replace("{i}", found[2] if found else "")


def load_model_class(code: str | Path | None, built_in: type[Architecture] = Llama) -> type[Architecture]:
    """The class `Model` of the file `code`, a subclass of the `built_in` one; without a file that one itself.

    The file is run, as any program of the user's. Raises ConfigError that says what is wrong with it, and where.
    """
    return built_in if code is None else load_class(_KEY, code, "Model", built_in)


def build_on_meta(spec: ModelSpec, model_class: type[Architecture] = Llama) -> Architecture:
    """A model that holds no memory yet, with its adapters. Raises ConfigError where a class of one's own cannot be
    built, or cannot take them."""
    try:
        with torch.device("meta"):
            model = model_class(spec)
    except Exception as error:
        if _is_built_in(model_class):
            raise
        raise ConfigError(f"the class Model of model.code cannot be built: {_built(error, model_class)}") from error
    if spec.lora is not None:
        apply_lora(model, spec.lora)
    return model


def _is_built_in(model_class: type[Architecture]) -> bool:
    return model_class.__module__.startswith("phalanx.models.")


def _built(error: Exception, model_class: type[Architecture]) -> str:
    return describe_error(error, source_file(model_class))


def check_model_class(model_class: type[Architecture], spec: ModelSpec) -> int:
    """Raises ConfigError for a class that could be trained only to fail later; returns the number of parameters.

    Everything must lie in a unit, be a parameter, start somehow, and have a name in a Hugging Face folder.
    """
    model = build_on_meta(replace(spec, lora=None), model_class)
    buffers = [name for name, _ in model.named_buffers()]
    outside = [name for name, _ in model.named_parameters() if not name.startswith(("embed.", "layers.", "head."))]
    if buffers:
        raise ConfigError(
            f"the class Model of model.code has the buffer {buffers[0]}, which nothing would fill; compute it in the "
            "forward pass or make it a parameter"
        )
    if outside:
        raise ConfigError(
            f"the class Model of model.code has the parameter {outside[0]} outside embed, layers and head, the units "
            "that are sharded and gathered; move it into one of them"
        )
    named = dict(model.named_parameters())
    if twice := [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in named]:
        raise ConfigError(
            f"the class Model of model.code has one parameter under several names ({twice[0]} is the second), which "
            "would part when they get memory; give each part its own, or hand the one on in the forward pass"
        )
    if frozen := [name for name, parameter in named.items() if not parameter.requires_grad]:
        raise ConfigError(
            f"the class Model of model.code freezes {frozen[0]}, which no checkpoint would hold and no export find; "
            "leave requires_grad as it is, or train adapters beside frozen weights (model.lora)"
        )
    count, ours = 0, dict[str, str]()
    for name, parameter in named.items():
        theirs = hf_name(name, model_class)
        if ours.setdefault(theirs, name) != name:
            raise ConfigError(
                f"the class Model of model.code gives {ours[theirs]} and {name} one Hugging Face name, {theirs}, so an "
                "export would lose one of them; mend hf_names"
            )
        try:
            init_slice(spec, 0, name, 0, 1, "cpu", torch.float32, model_class)
        except Exception as error:
            raise ConfigError(f"the class Model of model.code cannot start {name}: {error}; mend initial") from error
        count += parameter.numel()
    if not _is_built_in(model_class):
        _try_forward(model, model_class)
    return count


def _try_forward(model: Architecture, model_class: type[Architecture]) -> None:
    """One pass on meta, which costs nothing: a wrong call or shape is found before any data is prepared."""
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    try:
        loss = model(tokens, tokens, segments=torch.zeros(3, dtype=torch.int32, device="meta"))
    except Exception as error:
        raise ConfigError(f"the class Model of model.code cannot run: {_built(error, model_class)}") from error
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise ConfigError(
            "the class Model of model.code returns no sum of losses, a tensor without dimensions, when it is given "
            "labels; mend its forward"
        )


def shapes_of(model_class: type[Architecture], spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of such a model, in order of use; as `parameter_shapes(spec)` for the built-in one.

    Adapters are left out: what a Hugging Face folder holds.
    """
    model: nn.Module = build_on_meta(replace(spec, lora=None), model_class)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


# ------------------------------------------------------------------------------------ a class in a file of the user's


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
