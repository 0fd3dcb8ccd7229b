"""A model of one's own: a Python file whose class `Model` is trained in the place of the built-in one."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.hf_mapping import hf_name
from phalanx.models.llama import Llama, init_slice
from phalanx.models.lora import apply_lora
from phalanx.models.model import Architecture
from phalanx.models.user_code import describe_error, load_class, source_file

_KEY = "model.code"


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
