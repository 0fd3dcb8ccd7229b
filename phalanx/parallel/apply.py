"""Parallelism applied to a plain model, from outside and in one place: the order is the knowledge."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from phalanx import accelerator
from phalanx.comm.mesh import Mesh
from phalanx.models import layers
from phalanx.models.llama import Llama, units
from phalanx.optim.choose import make_rule
from phalanx.optim.engine import Engine, Precision
from phalanx.optim.gradients import LossScale
from phalanx.parallel import activations

if TYPE_CHECKING:  # the loop runs where pydantic is not installed
    from phalanx.config import Config

MakeEngine = Callable[..., Engine]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The type of a rank's arithmetic on `device` under a resolved `train.dtype`."""
    return accelerator.best_dtype(device) if dtype == "mixed" else DTYPES[dtype]


def precision_of(dtype: str, mesh: Mesh) -> Precision:
    """The types that this rank computes and exchanges in under a resolved `train.dtype`."""
    compute = compute_dtype(dtype, mesh.device)
    return Precision(compute, torch.float32 if dtype == "mixed" and mesh.world > 1 else compute)


def apply(model: Llama, config: "Config", mesh: Mesh, make_engine: MakeEngine, nominal_weight: int) -> Engine:
    """Prepare a model on meta for training by the resolved `config`; returns the engine that drives it."""
    change_blocks(model, config)
    # The engine after compilation: its hooks stay outside the compiled code and gather parameters before it runs.
    train, precision = config.train, precision_of(config.train.dtype, mesh)
    # All ranks scale their losses alike, also those that need not, since their gradients are added up.
    (scaled,) = mesh.max([float(precision.compute == torch.float16)])
    # An embedding that the head uses too is no unit of its own: it must be whole for both, and so belongs to the root.
    own = [unit for unit in units(model) if not (model.spec.tie_embeddings and unit[0] == "embed")]
    engine = make_engine(
        model,
        own,
        mesh=mesh,
        rule=make_rule(config.optim),
        nominal_weight=nominal_weight,
        precision=precision,
        loss_scale=LossScale(train.loss_scale, train.loss_scale_steps, mesh.device) if scaled else None,
    )
    # Memory last of all: what each rank must hold is known only now (see materialize.py).
    return engine


def change_blocks(model: Llama, config: "Config") -> None:
    """What is done to the model's own code, whatever drives it."""
    blocks: list[nn.Module] = [unit for name, unit in units(model) if name.startswith("layers.")]
    if config.memory.activations != "none":
        activations.recompute(blocks, selective=config.memory.activations == "selective")
    # Compile after recomputation, so that the compiler sees what is recomputed and can fuse across it.
    if config.train.compile:
        compile_units(model, blocks)


def compile_units(model: Llama, blocks: list[nn.Module]) -> None:
    """Compile each block's forward, and the loss's inner function. Equal blocks share one compilation."""
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True)
    chunk = torch.compile(layers._chunk, fullgraph=True)
    model.head.cross_entropy_sum = functools.partial(layers.cross_entropy_sum, chunk_fn=chunk)
