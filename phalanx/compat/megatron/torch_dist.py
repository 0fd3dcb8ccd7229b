"""Megatron-core's distributed checkpoints (`torch_dist`): a folder of torch.distributed.checkpoint with `common.pt` of
arguments.

Tensors are whole in it, whatever the tensor and pipeline ranks. The layers of a tensor are stacked, or numbered over
the whole model; a gate and what it gates are one matrix, or two. Adam's state is beside the parameters, by their names
and in their shapes (`fully_reshardable`, and without a distributed optimizer), or in buffers of the optimizer, which
are not read. What is written is stacked, with the gate above what it gates, which all versions read. Source:
megatron.core.dist_checkpointing.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.compat.megatron.files import IDLE, LazyTensor, RankFile, plain_arguments
from phalanx.compat.megatron.optimizer_state import KINDS, MASTER
from phalanx.compat.pickles import load_pickled
from phalanx.compat.torch_checkpoints import TorchCheckpointReader, WrittenPart, write_torch_checkpoint
from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import MAX_LAYERS

COMMON = "common.pt"
_FORMAT = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
    "common_backend_version": 1,
}  # fmt: skip
# How what is written is laid out, by which Megatron asks for it.
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
SHARDING = "fully_reshardable"
# Modules with a state of Transformer Engine's beside their tensors: of FP8, so that it is empty.
_EXTRA_OF_LAYER = ("self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_qkv",
                   "mlp.linear_fc1", "mlp.linear_fc2")  # fmt: skip
_EXTRA = "_extra_state/shard"
_NUMBERED = re.compile(r"(decoder\.layers)\.(\d+)\.(.+)")
_STACKED = re.compile(r"(decoder\.layers)\.(?!\d)(.+)")
_HALVES = ("_w", "_v")  # the gate, and what it gates
_MASTER = "fp32_param"  # its name without a distributed optimizer
_STATE = re.compile(rf"optimizer\.state\.({'|'.join((*KINDS, _MASTER))})\.(.+)")


def is_torch_dist(folder: Path) -> bool:
    """Whether a folder is one of Megatron-core's distributed checkpoints."""
    return (folder / COMMON).is_file() and (folder / ".metadata").is_file()


def read_torch_dist(folder: Path) -> RankFile:
    """The tensors of a checkpoint, as those of one rank that has everything; each is read when it is asked for. Raises
    ConfigError for a folder that is not whole, and for one that would run code."""
    common = load_pickled(folder / COMMON)
    if not isinstance(common, dict):
        raise ConfigError(f"{folder / COMMON} holds no dictionary, so it is not of Megatron; download the file again.")
    reader = TorchCheckpointReader(folder)
    # Queries, keys and values are asked for one after another, as are a gate and what it gates.
    load = functools.lru_cache(maxsize=2)(reader.load)
    model: dict[str, LazyTensor] = {}
    states: dict[str, dict[str, LazyTensor]] = {}
    for key, about in reader.tensors().items():
        state = _STATE.fullmatch(key)
        if key.startswith(("optimizer.", "rng_state", "rerun")) and state is None:
            continue
        into = model if state is None else states.setdefault(MASTER if state[1] == _MASTER else state[1], {})
        _add(load, key, (state[2] if state else key).removeprefix("module.").removeprefix("model."), about, into)
    for into in (model, *states.values()):
        _join_halves(into, folder)
    whole = {(key, each.shape) for key, each in model.items() if not IDLE.fullmatch(key)}
    complete = all(whole <= {(key, each.shape) for key, each in states.get(kind, {}).items()} for kind in KINDS)
    iteration = common.get("iteration")
    args = plain_arguments(common.get("args"))
    if args is not None:  # every tensor is whole, whatever the ranks were
        args = {name: value for name, value in args.items() if not name.endswith("model_parallel_size")}
    return RankFile(
        args, iteration if isinstance(iteration, int) else None, [model],
        {kind: [states[kind]] for kind in KINDS} if complete else None,
    )  # fmt: skip


def _add(read: Callable[..., Tensor], key: str, name: str, about: Any, into: dict[str, LazyTensor]) -> None:
    shape, dtype = tuple(about.size), about.properties.dtype
    stacked = _STACKED.fullmatch(name)
    if stacked is None or not shape:
        into[name] = LazyTensor(shape, dtype, functools.partial(read, key))
        return
    if shape[0] > MAX_LAYERS:
        raise ConfigError(f"a model of {shape[0]} layers ({key}) cannot be true; download the checkpoint again")
    for layer in range(shape[0]):
        load = functools.partial(read, key, layer)
        into[f"{stacked[1]}.{layer}.{stacked[2]}"] = LazyTensor(shape[1:], dtype, load)


def _join_halves(into: dict[str, LazyTensor], folder: Path) -> None:
    """One matrix of a gate and of what it gates, where they are stored apart."""
    for name in [name for name in into if name.endswith(f".linear_fc1.weight{_HALVES[0]}")]:
        whole = name.removesuffix(_HALVES[0])
        gate, up = into.pop(name), into.pop(whole + _HALVES[1], None)
        if up is None:
            raise ConfigError(f"{folder} lacks {whole}{_HALVES[1]}, but has {name}; use a whole checkpoint")
        shape = (gate.shape[0] + up.shape[0], *gate.shape[1:])
        into[whole] = LazyTensor(shape, gate.dtype, functools.partial(_stack, gate, up))


def _stack(gate: LazyTensor, up: LazyTensor) -> Tensor:
    return torch.cat([gate.load(), up.load()])


def write_torch_dist(
    folder: Path, common: Mapping[str, Any], model: Mapping[str, LazyTensor],
    states: Mapping[str, Mapping[str, LazyTensor]], layers: int,
) -> None:  # fmt: skip
    """Write a checkpoint of whole tensors by the names of a model of one rank, with Transformer Engine; `states` are
    those of the optimizer, by kind. A file has one kind of a layer's tensors, and is in memory while it is written.
    `common` is what stands beside the tensors: `args`, `iteration` and the optimizer's settings."""
    files: dict[tuple[str, str], list[WrittenPart]] = {}
    for prefix, tensors in (("", model), *((f"optimizer.state.{kind}.", each) for kind, each in states.items())):
        for name, each in tensors.items():
            found = _NUMBERED.fullmatch(name)
            if found is None:
                part = WrittenPart(prefix + name, each.shape, (0,) * len(each.shape), each.shape, each.dtype, each.load)
            else:
                offsets, sizes = (int(found[2]), *(0 for _ in each.shape)), (1, *each.shape)
                load = functools.partial(_load_row, each)
                key = f"{prefix}{found[1]}.{found[3]}"
                part = WrittenPart(key, (layers, *each.shape), offsets, sizes, each.dtype, load)
            files.setdefault((prefix, name if found is None else found[2]), []).append(part)
    objects = [f"decoder.final_layernorm.{_EXTRA}_0_1"]
    objects += [
        f"decoder.layers.{name}.{_EXTRA}_{layer}_{layers}" for layer in range(layers) for name in _EXTRA_OF_LAYER
    ]
    write_torch_checkpoint(folder, list(files.values()), objects)
    content = _CONTENT | ({"distrib_optim_sharding_type": SHARDING} if states else {})
    torch.save({**common, "content_metadata": content}, folder / COMMON)
    (folder / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")


def _load_row(each: LazyTensor) -> Tensor:
    return each.load()[None]
