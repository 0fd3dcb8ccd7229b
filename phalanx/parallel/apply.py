"""Parallelism applied to a plain model, from outside and in one place: the order is the knowledge."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from phalanx.comm.mesh import Mesh
from phalanx.models import layers
from phalanx.models.llama import Llama, units
from phalanx.models.spec import ModelSpec
from phalanx.optim.engine import Engine
from phalanx.optim.update import AdamW
from phalanx.parallel import activations

if TYPE_CHECKING:  # the loop runs where pydantic is not installed
    from phalanx.config import Config

MakeEngine = Callable[..., Engine]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def on_meta(spec: ModelSpec) -> Llama:
    """A model that holds no memory yet."""
    with torch.device("meta"):
        return Llama(spec)


def apply(model: Llama, config: "Config", mesh: Mesh, make_engine: MakeEngine, nominal_weight: int) -> Engine:
    """Prepare a model on meta for training by the resolved `config`; returns the engine that drives it."""
    blocks: list[nn.Module] = [unit for name, unit in units(model) if name.startswith("layers.")]
    if config.memory.activations == "full":
        activations.recompute(blocks)
    # Compile after recomputation, so that the compiler sees what is recomputed and can fuse across it.
    if config.train.compile:
        compile_units(model, blocks)
    # The engine after compilation: its hooks stay outside the compiled code and gather parameters before it runs.
    rule = AdamW(config.optim.beta1, config.optim.beta2, config.optim.eps, config.optim.weight_decay)
    # An embedding that the head uses too is no unit of its own: it must be whole for both, and so belongs to the root.
    own = [unit for unit in units(model) if not (model.spec.tie_embeddings and unit[0] == "embed")]
    engine = make_engine(
        model, own, mesh=mesh, rule=rule, nominal_weight=nominal_weight, dtype=DTYPES[config.train.dtype]
    )
    # Memory last of all: what each rank must hold is known only now (see materialize.py).
    return engine


def compile_units(model: Llama, blocks: list[nn.Module]) -> None:
    """Compile each block's forward, and the loss's inner function. Equal blocks share one compilation."""
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True)
    chunk = torch.compile(layers._chunk, fullgraph=True)
    model.head.cross_entropy_sum = functools.partial(layers.cross_entropy_sum, chunk_fn=chunk)
