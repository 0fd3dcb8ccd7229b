"""Giving memory and values to a model that was built on meta: each rank makes or reads only what it keeps."""

from collections.abc import Callable

import torch
from torch import nn

from phalanx.core.errors import ConfigError
from phalanx.engine.interface import Engine
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.hf_weights import Weights
from phalanx.models.lora import init_adapter_slice, is_adapter
from phalanx.models.model import Model, draw_init_slice
from phalanx.models.peft import Adapter
from phalanx.optim.state import Shard

Fill = Callable[[Shard], None]


def materialize(model: nn.Module, engine: Engine, fill: Fill) -> None:
    """Let the engine take memory and `fill` write each of its shards. Raises ConfigError for what nobody would fill,
    and names it: a buffer on meta, which may get memory but no values; a parameter that is on meta still."""
    _refuse([name for name, buffer in model.named_buffers() if buffer.is_meta])
    with torch.no_grad():
        engine.initialise(fill)
    _refuse([name for name, parameter in model.named_parameters() if parameter.is_meta])


def _refuse(left: list[str]) -> None:
    if left:
        are, them = ("are", "them") if len(left) > 1 else ("is", "it")
        raise ConfigError(
            f"{', '.join(left)} of the model {are} on meta, and nothing gives {them} values; use parameters, or make "
            f"{them} when the model is built"
        )


def make_random_fill(model: Model, seed: int) -> Fill:
    """Initial weights that depend on (seed, name, element) alone, so that no layout changes them."""

    def fill(shard: Shard) -> None:
        start, (device, dtype) = model.start(shard.name, shard.shape), (shard.tensor.device, shard.tensor.dtype)
        shard.tensor.copy_(draw_init_slice(start, seed, shard.name, shard.start, shard.stop, device, dtype))

    return fill


def make_hf_fill(weights: Weights, spec: ModelSpec) -> Fill:
    """Weights of a Hugging Face folder, each shard read by its byte range."""
    weights.check(spec)

    def fill(shard: Shard) -> None:
        weights.read_into(shard.name, shard.start, shard.stop, shard.tensor)

    return fill


def make_adapter_fill(base: Fill, seed: int, adapter: Adapter | None) -> Fill:
    """Adapters drawn by coordinates, or read where there is an `adapter` to start from; `base` fills the rest."""

    def fill(shard: Shard) -> None:
        if not is_adapter(shard.name):
            base(shard)
        elif adapter is not None:
            shard.tensor.copy_(adapter.read(shard.name, shard.start, shard.stop))
        else:
            device, dtype = shard.tensor.device, shard.tensor.dtype
            values = init_adapter_slice(seed, shard.name, shard.start, shard.stop, shard.shape, device, dtype)
            shard.tensor.copy_(values)

    return fill


def make_frozen_fill(fill: Fill) -> Fill:
    """Fill what is frozen by `fill`, and the rest with zeros: a checkpoint, which holds it, is about to be loaded."""

    def fill_frozen(shard: Shard) -> None:
        if shard.trainable:
            shard.tensor.zero_()
        else:
            fill(shard)

    return fill_frozen
