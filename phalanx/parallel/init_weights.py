"""Weight initialization of models on meta, shard by shard, so that no process ever holds a whole model.

with torch.device("meta"):
    model = LlamaForCausalLM(config)
phalanx.rebuild_buffers(model)
sharded = phalanx.shard(model, lr=1e-4, fill=phalanx.start_of(model, seed=1))
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from phalanx.core.errors import ConfigError
from phalanx.engine.interface import Engine
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.hf_weights import Weights
from phalanx.models.lora import init_adapter_slice, is_adapter
from phalanx.models.model import Architecture, InitRule, Model, draw_init_slice
from phalanx.models.peft import Adapter
from phalanx.optim.update import Shard
from phalanx.parallel.model_buffers import fill_buffers
from phalanx.parallel.tensor_layers import VocabParallelEmbedding
from phalanx.system import accelerator

# --------------------------------------------------------------------------------------------------------- materialize
# Allocation and initialization of a model on meta: each rank draws or reads only its shard.


Fill = Callable[[Shard], None]


def materialize(model: nn.Module, engine: Engine, fill: Fill) -> None:
    """Materialize a model: the engine allocates memory and `fill` writes each of its shards. Raises ConfigError that
    names what has no values: a buffer on meta, or a parameter that is still on meta."""
    fills_buffers = isinstance(model, Model) and not isinstance(model, Architecture)
    _refuse([name for name, buffer in model.named_buffers() if buffer.is_meta and not fills_buffers])
    with torch.no_grad():
        engine.initialise(fill)
    if fills_buffers:
        fill_buffers(cast(Model, model), next(model.parameters()).device)
    _refuse([name for name, parameter in model.named_parameters() if parameter.is_meta])


def _refuse(left: list[str]) -> None:
    if left:
        are, them = ("are", "them") if len(left) > 1 else ("is", "it")
        raise ConfigError(
            f"{', '.join(left)} of the model {are} on meta, without values; use parameters, or create "
            f"{them} when the model is built"
        )


def make_random_fill(model: Model, seed: int) -> Fill:
    """Make a `fill` of random initial weights that depend on (seed, name, element) only, so that no layout changes
    them."""

    def fill(shard: Shard) -> None:
        start, (device, dtype) = model.start(shard.name, shard.shape), (shard.tensor.device, shard.tensor.dtype)
        shard.tensor.copy_(draw_init_slice(start, seed, shard.name, shard.start, shard.stop, device, dtype))

    return fill


def make_hf_fill(weights: Weights, spec: ModelSpec) -> Fill:
    """Make a `fill` from the weights of a Hugging Face folder, each shard read by its byte range."""
    weights.check(spec)

    def fill(shard: Shard) -> None:
        weights.read_into(shard.name, shard.start, shard.stop, shard.tensor)

    return fill


def make_adapter_fill(base: Fill, seed: int, adapter: Adapter | None) -> Fill:
    """Make a `fill` of adapters, drawn by coordinates or read from `adapter`; `base` fills the rest."""

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
    """Make a `fill` of frozen parameters by `fill` and zeros elsewhere, before a checkpoint with the rest is loaded."""

    def fill_frozen(shard: Shard) -> None:
        if shard.trainable:
            shard.tensor.zero_()
        else:
            fill(shard)

    return fill_frozen


# ------------------------------------------------------------------------------------------------------- initial values


def rebuild_buffers(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Compute the buffers of a transformers model that was built on meta, such as rotary frequencies.

    Each module with such a buffer is built again from its own `config`.

    Args:
        model: A model of transformers, built under `torch.device("meta")`.
        device: Where the buffers go. Default: this process's accelerator, or the CPU.

    Raises:
        errors.ConfigError: a buffer belongs to a module without a `config`.

    Examples:
        >>> import transformers
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                                   num_attention_heads=2)
        >>> with torch.device("meta"):
        ...     model = transformers.LlamaForCausalLM(config)
        >>> phalanx.rebuild_buffers(model, "cpu")
        >>> any(buffer.is_meta for buffer in model.buffers())
        False
    """
    if device is None:
        device = (accelerator.list_devices() or ["cpu"])[0]
    for name, module in model.named_modules():
        if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        fresh = _again(name, module, torch.device(device))
        for leaf, buffer in fresh.named_buffers(recurse=False):
            if leaf in module._buffers:
                module._buffers[leaf] = buffer
        if "attention_scaling" in vars(fresh):
            vars(module)["attention_scaling"] = vars(fresh)["attention_scaling"]
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if left:
        raise ConfigError(f"buffer {left[0]} is still on meta, since its module does not create it; give it values")


def _again(name: str, module: nn.Module, device: torch.device) -> nn.Module:
    leaf = next(leaf for leaf, buffer in module.named_buffers(recurse=False) if buffer.is_meta)
    why = f"buffer {name}.{leaf} is on meta" if name else f"buffer {leaf} is on meta"
    if "config" not in vars(module) or next(module.parameters(), None) is not None:
        raise ConfigError(f"{why}, and {type(module).__name__} has no config to create it from; give it values before")
    with torch.device(device):
        return cast(nn.Module, cast(Any, type(module))(vars(module)["config"]))


def start_of(model: nn.Module, seed: int) -> Fill:
    """Make the `fill` of `shard` that draws the initial weights of a transformers model on meta.

    Matrices are normal with the config's `initializer_range` as standard deviation, the embedding of the padding
    token is 0, norms are ones and biases zeros. A weight depends on the seed, the name of its parameter and its
    position there, so no layout changes it.

    Args:
        model: A model of transformers, built under `torch.device("meta")`.
        seed: Seed of the random numbers.

    Returns:
        A function for `phalanx.shard(model, fill=...)`.

    Raises:
        errors.ConfigError: the model has no `config.initializer_range`.

    Examples:
        >>> import transformers
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                                   num_attention_heads=2)
        >>> with torch.device("meta"):
        ...     model = transformers.LlamaForCausalLM(config)
        >>> phalanx.rebuild_buffers(model, "cpu")
        >>> with phalanx.shard(model, lr=1e-4, fill=phalanx.start_of(model, seed=1)) as sharded:
        ...     sharded.steps
        0
    """
    std = getattr(getattr(model, "config", None), "initializer_range", None)
    if std is None:
        raise ConfigError(
            f"start_of draws by model.config.initializer_range, which {type(model).__name__} does not have; write a "
            "custom fill"
        )
    pads = _pads(model)

    def fill(shard: Shard) -> None:
        start: InitRule = ("normal", float(std))
        if len(shard.shape) < 2:
            start = ("ones",) if shard.name.endswith("weight") else ("zeros",)
        device, dtype = shard.tensor.device, shard.tensor.dtype
        shard.tensor.copy_(draw_init_slice(start, seed, shard.name, shard.start, shard.stop, device, dtype))
        if shard.name in pads:
            width, row = shard.shape[-1], pads[shard.name]
            first, last = max(row * width, shard.start), min((row + 1) * width, shard.stop)
            shard.tensor[max(0, first - shard.start) : max(0, last - shard.start)].zero_()

    return fill


def _pads(model: nn.Module) -> dict[str, int]:
    """The row of the padding token, by the name of the embedding's weight."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            row = module.skipped if isinstance(module, VocabParallelEmbedding) else module.padding_idx
            if row is not None:
                found[f"{name}.weight"] = row
    return found
