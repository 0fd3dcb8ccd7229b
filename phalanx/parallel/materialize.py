"""Giving memory and values to a model that was built on meta: each rank makes or reads only what it keeps."""

import itertools
from collections.abc import Callable

import torch
from torch import nn

from phalanx.errors import ConfigError
from phalanx.models.hf import Weights
from phalanx.models.llama import init_slice
from phalanx.models.spec import ModelSpec
from phalanx.optim.engine import Engine, Shard

Fill = Callable[[Shard], None]


def materialise(model: nn.Module, engine: Engine, fill: Fill) -> None:
    """Let the engine take memory and `fill` write each of its shards; nothing may be left on meta."""
    with torch.no_grad():
        engine.initialise(fill)
    left = [name for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
    assert not left, f"left on meta after initialisation: {', '.join(left)}"


def drawn(spec: ModelSpec, seed: int) -> Fill:
    """Initial weights that depend on (seed, name, element) alone, so that no layout changes them."""

    def fill(shard: Shard) -> None:
        values = init_slice(spec, seed, shard.name, shard.start, shard.stop, shard.tensor.device, shard.tensor.dtype)
        shard.tensor.copy_(values)

    return fill


def imported(weights: Weights, spec: ModelSpec) -> Fill:
    """Weights of a Hugging Face folder, each shard read by its byte range."""
    weights.check(spec)

    def fill(shard: Shard) -> None:
        values = weights.read(shard.name, shard.start, shard.stop)
        if values.numel() != shard.tensor.numel():
            raise ConfigError(f"{shard.name} has {values.numel()} elements in the folder, not {shard.tensor.numel()}")
        shard.tensor.copy_(values)

    return fill


def nothing(shard: Shard) -> None:
    """Leave zeros: a checkpoint is about to be loaded."""
    shard.tensor.zero_()
