"""The state of Megatron's distributed optimizer, `distrib_optim.pt` beside a rank's model: flat buffers of fp32 masters
and Adam's two moments, {number of the virtual stage: {types: {"param", "exp_avg", "exp_avg_sq", "numel_unpadded"}}}.

A buffer holds a stage's parameters in the reverse of their order in the model, each from a multiple of 64 elements on.
Buckets follow one another without the padding of their ends, so where all parameters are multiples of 64, as in any
real LLaMA, the number and size of buckets do not matter, nor does the number of data-parallel ranks. Source:
megatron.core.distributed.param_and_grad_buffer and megatron.core.optimizer.distrib_optimizer.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.compat.megatron.files import IDLE, LazyTensor
from phalanx.compat.pickles import load_pickled
from phalanx.core.errors import ConfigError

OPTIMIZER_FILE = "distrib_optim.pt"
MASTER, KINDS = "param", ("param", "exp_avg", "exp_avg_sq")
ALIGNMENT = 64  # elements
_HEADS = ("embedding.word_embeddings.weight", "output_layer.weight")  # in separate buckets, if tied


@dataclass(frozen=True)
class AdamSettings:
    """What a checkpoint says of Adam beside its tensors. `step` is the last that was done; `done` steps, `warmup` and
    `decay` are in sequences, as Megatron counts them."""

    step: int
    lr: float
    min_lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decay_style: str
    done: int
    warmup: int
    decay: int


def lay_out_buffer(
    parameters: Sequence[tuple[str, int]], alone: Container[str] = (), alignment: int = ALIGNMENT,
    bucket_elements: int | None = None,
) -> tuple[dict[str, int], int]:  # fmt: skip
    """The first element of each of `parameters` (name, elements; in the model's order) in a buffer, and its length.

    Those that are `alone` are alone in a bucket; another is full with `bucket_elements` or more.
    """
    starts, done, at = dict[str, int](), 0, 0
    for name, count in reversed(parameters):
        at = math.ceil(at / alignment) * alignment
        if name in alone and at:
            done, at = done + at, 0
        starts[name] = done + at
        at += count
        if name in alone or (bucket_elements is not None and at >= bucket_elements):
            done, at = done + at, 0
    return starts, done + at


def pack_buffer(sizes: Sequence[tuple[str, int]], model: Iterable[tuple[str, Tensor]], tied: bool) -> Tensor:
    """A stage's tensors, by Megatron-core's names, as one fp32 buffer; one after another is taken from `model`.
    `sizes`: (name, elements) in its order."""
    starts, length = lay_out_buffer(sizes, _HEADS if tied else ())
    flat = torch.zeros(length, dtype=torch.float32)
    for name, found in model:
        flat[starts[name] : starts[name] + found.numel()] = found.reshape(-1)
    return flat


def describe_optimizer(adam: AdamSettings) -> dict[str, Any]:
    """Entries of the model's file of a checkpoint with this state: `optimizer` and `opt_param_scheduler`."""
    group = {
        "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True, "lr_mult": 1.0,
        "max_lr": adam.lr, "min_lr": adam.min_lr, "lr": adam.lr, "betas": adam.betas, "eps": adam.eps,
        "weight_decay": adam.weight_decay, "bias_correction": True, "step": adam.step,
    }  # fmt: skip
    scheduler = {
        "max_lr": adam.lr, "lr_warmup_steps": adam.warmup, "num_steps": adam.done,
        "lr_decay_style": adam.decay_style, "lr_decay_steps": adam.decay,
        "min_lr": adam.min_lr, "start_wd": adam.weight_decay, "end_wd": adam.weight_decay,
        "wd_incr_style": "constant", "wd_incr_steps": adam.decay,
    }  # fmt: skip
    groups = [group | {"wd_mult": 1.0}, group | {"wd_mult": 0.0, "weight_decay": 0.0}]
    return {"optimizer": {"optimizer": {"param_groups": groups}}, "opt_param_scheduler": scheduler}


def read_states(
    model_file: Path, chunks: list[dict[str, LazyTensor]], args: Mapping[str, Any]
) -> dict[str, list[dict[str, LazyTensor]]] | None:
    """Masters and moments of a rank's `chunks` (virtual stages), by kind; None where there is no file of them beside
    `model_file`. Raises ConfigError for one whose masters, rounded, are not the model's parameters: it is of another
    step, or laid out otherwise."""
    path = model_file.parent / OPTIMIZER_FILE
    if not path.is_file():
        return None
    content = load_pickled(path)
    if isinstance(content, list) and len(content) == 1:  # of a chain of optimizers
        content = content[0]
    found: dict[str, list[dict[str, LazyTensor]]] = {kind: [] for kind in KINDS}
    for number, chunk in enumerate(chunks):
        flat = content.get(number) if isinstance(content, dict) else None
        buffers = next(iter(flat.values())) if isinstance(flat, dict) and len(flat) == 1 else None
        if not isinstance(buffers, dict) or not all(_is_flat(buffers.get(kind)) for kind in KINDS):
            raise ConfigError(
                f"{path} holds the optimizer's state in a layout that is not known here; save it with Megatron-core's "
                "distributed optimizer (--use-distributed-optimizer), or convert the weights alone"
            )
        model = {key: each for key, each in chunk.items() if not IDLE.fullmatch(key)}
        starts = _find_starts(model, buffers[MASTER], args, path)
        for kind in KINDS:
            found[kind].append({key: _part_of(buffers[kind], starts[key], each) for key, each in model.items()})
    return found


def _is_flat(buffer: Any) -> bool:
    return isinstance(buffer, Tensor) and buffer.dim() == 1 and buffer.dtype == torch.float32


def _part_of(flat: Tensor, start: int, like: LazyTensor) -> LazyTensor:
    count = math.prod(like.shape)
    return LazyTensor.of(flat[start : start + count].view(like.shape))


def _find_starts(
    model: Mapping[str, LazyTensor], masters: Tensor, args: Mapping[str, Any], path: Path
) -> dict[str, int]:
    """Where each parameter begins, by the layout under which the rounded masters are the model's parameters."""
    sizes = [(key, math.prod(each.shape)) for key, each in model.items()]
    for starts, length in _layouts(sizes, args):
        if length == masters.numel() and all(
            torch.equal(_part_of(masters, starts[key], each).load().to(each.dtype), each.load())
            for key, each in model.items()
        ):
            return starts
    raise ConfigError(
        f"{path} holds masters of {masters.numel()} elements that are not the parameters of the model beside it in any "
        "layout that is known here; use files of one step, or convert the weights alone"
    )


def _layouts(sizes: list[tuple[str, int]], args: Mapping[str, Any]) -> Iterator[tuple[dict[str, int], int]]:
    ranks = args.get("data_parallel_size")
    stated = args.get("ddp_bucket_size")
    full = stated if isinstance(stated, int) else max(40_000_000, 1_000_000 * ranks) if isinstance(ranks, int) else None
    for bucket in dict.fromkeys((None, full)):
        for alone in ((), _HEADS):
            for alignment in (ALIGNMENT, 1):  # 1: before parameters were aligned
                yield lay_out_buffer(sizes, alone, alignment, bucket)
