"""Tensor-parallel collectives as one custom operator, known to autograd and torch.compile.

Its two arguments name the collective of the forward pass, and that of the gradient in the backward pass:

| word | what a rank gets |
|---|---|
| `same` | its own tensor |
| `sum` | the sum over all ranks (all-reduce) |
| `gather` | the parts of all ranks, concatenated along dim 1, the sequence (all-gather) |
| `scatter` | its part of the sum along dim 1 (reduce-scatter) |

`same` and `sum` are each other's transpose, and so are `gather` and `scatter`. Source: Shoeybi et al., "Megatron-LM",
2019 (f and g); Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import collectives
from phalanx.comm.collectives import Traffic
from phalanx.comm.mesh import Axis

NAMESPACE = "phalanx_exchange"  # of the operators
SUMS = ("sum", "scatter")  # those that sum
SCHEMA = "(Tensor x, str there, str back) -> Tensor"


class TensorParallelPeers:
    """The tensor-parallel peers of a rank, held by a model's modules. The reference to the axis is weak: a model may
    outlive its mesh, but must not keep the process group alive."""

    def __init__(self, axis: Axis, traffic: Traffic) -> None:
        self.rank, self.size = axis.rank, axis.size
        self._axis, self._traffic = weakref.ref(axis), traffic
        if NAMESPACE not in axis.cache:
            axis.cache[NAMESPACE] = _operator(self._axis, traffic)
        self._operator = axis.cache[NAMESPACE]

    @property
    def axis(self) -> Axis:
        """The axis; fails once its mesh is gone."""
        return _alive(self._axis)

    def exchange(self, x: Tensor, forward_op: str, backward_op: str) -> Tensor:
        """Apply the collective `forward_op` to `x`, and `backward_op` to its gradient; returns a new tensor."""
        out: Tensor = self._operator(x, forward_op, backward_op)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack the tensors of all ranks, of one shape; without a gradient."""
        return _all_gather(x, _alive(self._axis), self._traffic)


def _alive(here: weakref.ref[Axis]) -> Axis:
    axis = here()
    assert axis is not None, "a model is used whose mesh is gone"
    return axis


def _all_gather(x: Tensor, axis: Axis, traffic: Traffic) -> Tensor:
    out = x.new_empty((axis.size, *x.shape))
    if not x.is_meta:  # a pass on meta only counts
        collectives.all_gather(out.view(-1), x.contiguous().view(-1), axis.group, traffic).wait()
    return out


def _run_exchange(x: Tensor, op: str, axis: Axis, traffic: Traffic) -> Tensor:
    match op:
        case "same":
            return x.clone(memory_format=torch.contiguous_format)
        case "sum":
            out = x.clone(memory_format=torch.contiguous_format)
            collectives.all_reduce(out, axis.group, traffic).wait()
            return out
        case "gather":
            return _all_gather(x, axis, traffic).movedim(0, 1).flatten(1, 2)
        case "scatter":
            parts = x.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()
            part = x.new_empty(parts.shape[1:])
            collectives.reduce_scatter(part.view(-1), parts.view(-1), axis.group, traffic).wait()
            return part
        case other:
            raise AssertionError(f"{other} is no exchange")


def _operator(here: weakref.ref[Axis], traffic: Traffic) -> Any:
    """The custom operator of an axis. torch.compile treats it as opaque, and keeps the order of a rank's collectives.

    It outlives the axis, and has the same name at every start, so that compiled code is found in the cache.
    """
    axis = _alive(here)
    size, name = axis.size, f"of_{axis.group.group_name}"

    def run(x: Tensor, there: str, back: str) -> Tensor:
        return _run_exchange(x, there, _alive(here), traffic)

    def shape(x: Tensor, there: str, back: str) -> Tensor:
        if there == "gather":
            return x.new_empty((x.shape[0], x.shape[1] * size, *x.shape[2:]))
        if there == "scatter":
            return x.new_empty((x.shape[0], x.shape[1] // size, *x.shape[2:]))
        return x.new_empty(x.shape)

    def remember(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, ctx.there, ctx.back = inputs

    def transposed(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return operator(grad, ctx.back, ctx.there), None, None

    made = torch.library.custom_op(f"{NAMESPACE}::{name}", run, mutates_args=(), schema=SCHEMA)
    made.register_fake(shape)
    made.register_autograd(transposed, setup_context=remember)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operator
