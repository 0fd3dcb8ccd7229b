"""First values for models of transformers that were built on meta, so that no process ever holds a whole one.

with torch.device("meta"):
    model = LlamaForCausalLM(config)
phalanx.rebuild_buffers(model)
sharded = phalanx.shard(model, lr=1e-4, fill=phalanx.start_of(model, seed=1))
"""

from typing import Any, cast

import torch
from torch import nn

from phalanx.core.errors import ConfigError
from phalanx.models.model import InitRule, draw_init_slice
from phalanx.optim.state import Shard
from phalanx.parallel.materialize import Fill
from phalanx.parallel.tensor import VocabParallelEmbedding
from phalanx.system import accelerator


def rebuild_buffers(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Make anew what modules of transformers compute in their constructors, such as rotary frequencies, where it is on
    meta: on `device`, by default this process's accelerator, or the host where there is none.

    Each module is made again from its own `config`. Raises ConfigError for a buffer of any other module.
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
        raise ConfigError(f"buffer {left[0]} is on meta still, since its module does not make it; give it values")


def _again(name: str, module: nn.Module, device: torch.device) -> nn.Module:
    leaf = next(leaf for leaf, buffer in module.named_buffers(recurse=False) if buffer.is_meta)
    why = f"buffer {name}.{leaf} is on meta" if name else f"buffer {leaf} is on meta"
    if "config" not in vars(module) or next(module.parameters(), None) is not None:
        raise ConfigError(f"{why}, and {type(module).__name__} keeps no config to make it from; give it values before")
    with torch.device(device):
        return cast(nn.Module, cast(Any, type(module))(vars(module)["config"]))


def start_of(model: nn.Module, seed: int) -> Fill:
    """What draws the first weights of a model of transformers, for `phalanx.shard(model, fill=...)`.

    Matrices are normal with the `initializer_range` of the model's config as standard deviation, the row of a token
    that pads is 0, norms begin with ones and biases with zeros. A weight depends on (seed, name, its place in the whole
    parameter) alone, so that no layout changes it. Raises ConfigError for a model without such a config.
    """
    std = getattr(getattr(model, "config", None), "initializer_range", None)
    if std is None:
        raise ConfigError(
            f"start_of draws by model.config.initializer_range, which {type(model).__name__} does not have; write a "
            "fill of your own"
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
    """The row of the token that pads, by the name of the embedding's weight."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            row = module.skipped if isinstance(module, VocabParallelEmbedding) else module.padding_idx
            if row is not None:
                found[f"{name}.weight"] = row
    return found
