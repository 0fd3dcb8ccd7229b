"""Adapters of a run: their initial values, the frozen weights that they belong to, and merging."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.run_paths import BASE_WEIGHTS, RunPaths
from phalanx.layout.model_shape import ADAPTED_MODULES, ModelSpec
from phalanx.models.families.catalog import block_options
from phalanx.models.hf_layout import find_adapter_places
from phalanx.models.hf_weights import Weights
from phalanx.models.lora import adapter_names, fingerprint_weights, merge_adapter
from phalanx.models.model import Architecture
from phalanx.models.peft import Adapter
from phalanx.models.user_model import build_on_meta, hf_name, shapes_of
from phalanx.storage import hub

if TYPE_CHECKING:  # the loop runs where pydantic is not installed
    from phalanx.config.model import LoraSection
    from phalanx.config.schema import Config

ReadTensor = Callable[[str], torch.Tensor]  # our parameter's name -> the whole of it


def open_adapter(section: "LoraSection", spec: ModelSpec, code: type[Architecture]) -> Adapter | None:
    """The adapter that a run starts from, or None where it starts from a fresh one."""
    if section.adapter is None:
        return None
    names, places = functools.partial(hf_name, model_class=code), find_adapter_places(code, spec)
    return Adapter(Path(section.adapter).expanduser(), spec.layers, names, places)


def resolve_adapter_options(config: "Config", spec: ModelSpec, code: type[Architecture]) -> list[tuple[str, Any, str]]:
    """(key, value, reason) of each `auto` of model.lora that the recipe alone could not resolve: those of an adapter
    that it names, and the matrices of a custom class. `spec` is the model's without adapters.

    Raises ConfigError where the adapter is of another shape than the recipe says, or where nothing can get one.
    """
    section = config.model.lora
    adapter = open_adapter(section, spec, code) if section is not None else None
    if section is None:
        return []
    if adapter is None:
        return [] if section.targets != "auto" else [("model.lora.targets", _targets_of(spec, code), "the model's own")]
    chosen = []
    lora = adapter.lora
    own: dict[str, Any] = {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets)}
    for name, value in own.items():
        given = getattr(section, name)
        if given == "auto":
            chosen.append((f"model.lora.{name}", value, "the adapter's"))
        elif given != value and not (isinstance(given, list) and set(given) == set(own["targets"])):
            raise ConfigError(
                f"model.lora.{name} is {given}, but the adapter {adapter.folder} has {value}; remove model.lora."
                f"{name}, or start from another adapter"
            )
    return chosen


def _targets_of(spec: ModelSpec, code: type[Architecture]) -> list[str]:
    """Which of ADAPTED_MODULES every block of a model has."""
    modules = dict(build_on_meta(spec, code).named_modules())
    found = [
        target
        for target, path in ADAPTED_MODULES.items()
        if all(isinstance(modules.get(f"layers.{index}.{path}"), nn.Linear) for index in range(spec.layers))
    ]
    if not found:
        raise ConfigError(
            f"the blocks of model.code have no linear layer by any of the names {', '.join(ADAPTED_MODULES.values())}, "
            "so no adapter could be added; use one of these names, or remove model.lora"
        )
    return found


def check_adapters(config: "Config", spec: ModelSpec, code: type[Architecture]) -> int:
    """The number of parameters of the adapters; raises ConfigError where the model or an adapter cannot take them."""
    model = build_on_meta(spec, code)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
    assert config.model.lora is not None
    adapter = open_adapter(config.model.lora, spec, code)
    if adapter is not None:
        adapter.check_shapes(shapes)
    return sum(math.prod(shape) for shape in shapes.values())


def adapter_warnings(config: "Config", spec: ModelSpec, code: type[Architecture]) -> list[str]:
    """A sentence where the adapter that a run starts from was trained beside other weights than the run's own."""
    assert config.model.lora is not None
    adapter = open_adapter(config.model.lora, spec, code)
    if adapter is None or adapter.base in (None, compute_base_fingerprint(config, spec, code)):
        return []
    return [
        f"the adapter {adapter.folder} was trained with other weights than those in model.from_hf "
        f"{config.model.from_hf} (which may be a copy of them in another type), so what it has learnt may not fit; "
        "name the folder that it belongs to, or start from a new adapter"
    ]


def compute_base_fingerprint(config: "Config", spec: ModelSpec, code: type[Architecture]) -> str:
    """The fingerprint of the frozen weights that the adapters of a run belong to."""
    return fingerprint_weights(_weights(config, spec, code).read, shapes_of(code, spec))


def _weights(config: "Config", spec: ModelSpec, code: type[Architecture]) -> Weights:
    assert config.model.from_hf is not None, "adapters need a model of which the weights are known"
    weights = Weights(Path(config.model.from_hf).expanduser(), code)
    weights.check(spec)
    return weights


def make_merged_reader(
    config: "Config", spec: ModelSpec, code: type[Architecture], paths: RunPaths, read_trained: ReadTensor
) -> ReadTensor:
    """Reads the parameters of the whole model: each frozen matrix with its adapter added, the others as they are.

    Raises RunError when the folder of the frozen weights holds others than the run began with.
    """
    assert spec.lora is not None
    check_base_weights(config, spec, code, paths)
    lora, weights, shapes = spec.lora, _weights(config, spec, code), shapes_of(code, spec)
    adapters = {matrix: (a, b) for matrix, a, b in adapter_names(lora, spec.layers)}

    def read(name: str) -> torch.Tensor:
        base = weights.read(name, 0, math.prod(shapes[name])).view(shapes[name])
        if name not in adapters:
            return base
        a, b = (read_trained(part) for part in adapters[name])
        return merge_adapter(base, a, b, lora.scale, block_options(spec).experts == "clamped")

    return read


def check_base_weights(config: "Config", spec: ModelSpec, code: type[Architecture], paths: RunPaths) -> None:
    """Raises RunError when the folder of the frozen weights holds others than the run began with."""
    noted = read_base_fingerprint(paths)
    if noted is None:
        raise RunError(f"{paths.data} does not say which weights the adapters belong to; restore it")
    if noted != compute_base_fingerprint(config, spec, code):
        raise RunError(
            f"model.from_hf {config.model.from_hf} does not have the weights that the adapters of {paths.root} were "
            "trained with; restore that folder, or export only the adapters, without --merge"
        )


def read_base_fingerprint(paths: RunPaths) -> str | None:
    """The fingerprint of the weights that a run's adapters are trained beside, or None where nothing says it."""
    try:
        return str(json.loads(paths.data.read_text(encoding="utf-8"))[BASE_WEIGHTS]["sha256"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def base_name(config: "Config") -> tuple[str, str | None]:
    """What an exported adapter says that its base model is: where the folder lies, or its name and revision on the
    hub."""
    assert config.model.from_hf is not None
    if hub.is_hub_name(config.model.from_hf):
        return hub.split_hub_name(config.model.from_hf)
    folder = Path(config.model.from_hf).expanduser()
    return str(folder.resolve()) if folder.is_dir() else config.model.from_hf, None
