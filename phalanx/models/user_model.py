"""Custom model classes: a `Model` in the user's Python file (`model.code`), or a family's built-in class."""

import functools
import importlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.core.errors import ConfigError
from phalanx.core.user_code import describe_error, load_class, source_file
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.families.catalog import FAMILIES
from phalanx.models.families.family import HuggingFaceMapping
from phalanx.models.llama import Attention, Llama, init_slice
from phalanx.models.lora import apply_lora
from phalanx.models.model import Architecture

_KEY = "model.code"


@functools.cache
def load_family_class(name: str) -> type[Architecture]:
    """Load the built-in model class of a family, with the family's parameter names in Hugging Face folders."""
    family = FAMILIES[name]
    module, _, called = family.network.partition(":")
    network: type[Architecture] = getattr(importlib.import_module(module), called)
    if network.hf_names == family.hf.names:
        return network
    own: dict[str, Any] = {"hf_names": dict(family.hf.names), "__module__": module}
    own |= {
        "hf_stacks": family.hf.stacks,
        "hf_grouped": family.hf.grouped,
        "hf_transposed": family.hf.transposed,
        "hf_wide": family.hf.wide,
        "hf_ahead": family.hf.ahead,
        "other_hf_names": staticmethod(functools.partial(_list_other_names, family.hf)),
        "ignores_hf_name": staticmethod(lambda theirs: theirs.endswith(family.hf.ignored)),
    }
    return type(family.title.replace(" ", ""), (network,), own)


def _list_other_names(hf: HuggingFaceMapping, theirs: str) -> list[str]:
    named = [hf.other_names[theirs]] if theirs in hf.other_names else []
    return named + ([theirs.removeprefix(hf.prefix)] if hf.prefix and theirs.startswith(hf.prefix) else [])


def hf_stack(name: str, shape: Sequence[int], model_class: type[Architecture]) -> list[str]:
    """The Hugging Face names of the matrices that our parameter `name`, of that `shape`, stacks, in order; empty where
    it is none of `hf_stacks`."""
    pattern, layer = _pattern(name)
    theirs = model_class.hf_stacks.get(pattern, ())
    named = [each.replace("{i}", layer) for each in theirs]
    return [each.replace("{e}", str(expert)) for expert in range(shape[0] if named else 0) for each in named]


def _pattern(name: str) -> tuple[str, str]:
    """A name of ours with {i} for its layer, and that layer's number."""
    found = re.fullmatch(r"(layers\.)(\d+)(\..+)", name)
    return (name, "") if found is None else (f"layers.{{i}}{found[3]}", found[2])


def hf_name(name: str, model_class: type[Architecture] = Llama) -> str:
    """The Hugging Face name of our parameter `name`. Raises ConfigError where a custom class has none."""
    pattern, layer = _pattern(name)
    if pattern not in model_class.hf_names:
        raise ConfigError(
            f"the class {model_class.__name__} of model.code has no Hugging Face name for its parameter {name}, so it "
            f"could not be exported; add {pattern!r} to its hf_names"
        )
    return model_class.hf_names[pattern].replace("{i}", layer)


def load_model_class(code: str | Path | None, built_in: type[Architecture] = Llama) -> type[Architecture]:
    """Load the class `Model` of the file `code`, a subclass of `built_in`; without a file returns `built_in`.

    Runs the file, as any Python module. Raises ConfigError with the file's error and its line.
    """
    return built_in if code is None else load_class(_KEY, code, "Model", built_in)


def build_on_meta(spec: ModelSpec, model_class: type[Architecture] = Llama) -> Architecture:
    """Build a model on meta, with its adapters. Raises ConfigError where a custom class cannot be built, or does not
    support adapters."""
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
    """Check a custom model class before a run; returns the number of parameters. Raises ConfigError.

    All tensors must be parameters within a unit, with an initialization and a Hugging Face name.
    """
    model = build_on_meta(replace(spec, lora=None), model_class)
    buffers = [name for name, _ in model.named_buffers()]
    outside = [name for name, _ in model.named_parameters() if not name.startswith(("embed.", "layers.", "head."))]
    if buffers:
        raise ConfigError(
            f"the class Model of model.code has the buffer {buffers[0]}, which would stay empty; compute it in the "
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
            "would become separate when allocated; use separate parameters, or pass the one on in the forward pass"
        )
    if frozen := [name for name, parameter in named.items() if not parameter.requires_grad]:
        raise ConfigError(
            f"the class Model of model.code freezes {frozen[0]}, which would be in no checkpoint and no export; "
            "do not set requires_grad, or train adapters with frozen weights (model.lora)"
        )
    count, ours = 0, dict[str, str]()
    for name, parameter in named.items():
        stack = hf_stack(name, parameter.shape, model_class)
        theirs = stack[0] if stack else hf_name(name, model_class)
        if ours.setdefault(theirs, name) != name and not _is_built_in(model_class):
            raise ConfigError(
                f"the class Model of model.code gives {ours[theirs]} and {name} one Hugging Face name, {theirs}, so an "
                "export would lose one of them; correct hf_names"
            )
        try:
            init_slice(spec, 0, name, 0, 1, "cpu", torch.float32, model_class)
        except Exception as error:
            raise ConfigError(
                f"the class Model of model.code cannot initialize {name}: {error}; correct initial"
            ) from error
        count += parameter.numel()
    if not _is_built_in(model_class):
        _try_forward(model, model_class)
    return count


def _try_forward(model: Architecture, model_class: type[Architecture]) -> None:
    """Run one forward pass on meta, which finds a wrong call or shape before any data is prepared."""
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    draws = CounterRNG(0, 0, torch.zeros(1, dtype=torch.int64, device="meta"))
    heard: list[nn.Module] = []

    def note(module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
        if any(isinstance(value, CounterRNG) for value in (*inputs, *named.values())):
            heard.append(module)

    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    for module in attentions:
        module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        loss = model(tokens, tokens, draws, segments=torch.zeros(3, dtype=torch.int32, device="meta"))
    except Exception as error:
        raise ConfigError(f"the class Model of model.code cannot run: {_built(error, model_class)}") from error
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise ConfigError(
            "the class Model of model.code returns no sum of losses, a tensor without dimensions, when it is given "
            "labels; fix its forward"
        )
    if model.spec.attention_dropout and len(heard) < max(1, len(attentions)):
        raise ConfigError(
            "model.attention_dropout needs blocks that hand `draws` and `site` on to their attention, a "
            "phalanx.models.llama.Attention, which those of model.code do not; set it to 0, or hand them on"
        )


def shapes_of(model_class: type[Architecture], spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Parameter shapes of a custom model, in order of use; equal to `parameter_shapes(spec)` for the built-in one.

    Without adapters, as in a Hugging Face folder.
    """
    model: nn.Module = build_on_meta(replace(spec, lora=None), model_class)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
