"""Grouped matrix product: rows sorted by group, each group multiplied by its matrix, as one operator.

`torch.nn.functional.grouped_mm` does not support float64 and leaves rows after the last group uninitialized. The
operator here takes it where there is a kernel, which no loop over groups is faster than, and else loops. It is the same
to autograd and the compiler in every type, and gives zeros for rows of no group.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 16  # bytes that rows' strides must be multiples of for torch's own operator


def reference_multiply_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """What `multiply_groups` means, by plain indexing."""
    out, start = x.new_zeros(x.shape[0], weight.shape[1]), 0
    for group, stop in enumerate(ends.tolist()):
        out[start:stop] = x[start:stop] @ weight[group].T
        start = stop
    return out


def multiply_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows `ends[g - 1]` to `ends[g]` of `x` by the matrix of group g, transposed; differentiable.

    x (T, in), weight (G, out, in), ends (G,) of integers, not falling -> (T, out). Rows from ends[-1] on are zeros, and
    get zeros as their gradient. A group without rows is fine; its matrix's gradient is zeros.
    """
    out: Tensor = _Product.apply(x, weight, ends)
    return out


def multiply_group_gradients(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The gradient of `multiply_groups` to its matrices: grad (T, out), x (T, in), ends (G,) -> (G, out, in)."""
    function = _grouped_mm_weight_grad if _starts_sooner(x, grad.shape[1]) else torch.ops.phalanx.grouped_mm_weight_grad
    out: Tensor = function(grad, x, ends)
    return out


def _multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`multiply_groups` without its gradient."""
    function = _grouped_mm if _starts_sooner(x, weight.shape[1]) else torch.ops.phalanx.grouped_mm
    out: Tensor = function(x, weight, ends)
    return out


def _starts_sooner(x: Tensor, out: int) -> bool:
    """Whether to call torch's kernel by itself and not by our operator, which takes as long as a small product on a CPU
    to start. A compiler, and tensors without values, need the operator."""
    return type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling() and _has_kernel(x, out)


def _has_kernel(x: Tensor, out: int) -> bool:
    """Whether torch has a kernel for products of `x` that are `out` wide."""
    (rows, into), size = x.shape, x.dtype.itemsize
    if size > 4 or (into | out) * size % _ALIGNMENT or rows == 0:
        return False
    return x.is_cpu or x.dtype == torch.bfloat16


def _counts(ends: Tensor) -> list[int]:
    """Rows of each group. Waits for the device."""
    counts: list[int] = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return counts


def _without_tail(x: Tensor, ends: Tensor) -> Tensor:
    """`x` with zeros from ends[-1] on, without waiting for the device."""
    if x.is_cpu and int(ends[-1]) == x.shape[0]:
        return x
    return x.masked_fill_(torch.arange(x.shape[0], device=x.device)[:, None] >= ends[-1], 0)


LIBRARY = torch.library.Library("phalanx", "FRAGMENT")


def make_operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function an operator. Not torch.library.custom_op, whose wrappers take as long as a small product."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        LIBRARY.define(schema)
        LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
        return function

    return define


@make_operator("grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor")
def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(x, width := weight.shape[1]):
        product = F.grouped_mm(x.contiguous(), weight.mT, offs=ends.to(torch.int32))
        return _without_tail(product, ends)
    counts, out = _counts(ends), x.new_empty(x.shape[0], width)
    rest = x.shape[0] - sum(counts)
    # Indexing weight[g] instead would cost a whole gradient of the stack for each group where autograd sees it.
    for part, matrix, into in zip(x.split([*counts, rest]), weight.unbind(0), out.split([*counts, rest]), strict=False):
        torch.mm(part, matrix.T, out=into)
    out[x.shape[0] - rest :].zero_()
    return out


@make_operator("grouped_mm_weight_grad(Tensor grad, Tensor x, Tensor ends) -> Tensor")
def _grouped_mm_weight_grad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(x, grad.shape[1]):
        return F.grouped_mm(grad.contiguous().mT, x.contiguous(), offs=ends.to(torch.int32))
    counts = _counts(ends)
    parts = [*counts, x.shape[0] - sum(counts)]
    out = x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])
    for mine, given, into in zip(grad.split(parts), x.split(parts), out.unbind(0), strict=False):
        torch.mm(mine.T, given, out=into)
    return out


@torch.library.register_fake("phalanx::grouped_mm", lib=LIBRARY)
def _grouped_mm_shape(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.register_fake("phalanx::grouped_mm_weight_grad", lib=LIBRARY)
def _grouped_mm_weight_grad_shape(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ends = ends.to(torch.int32)  # once for the three products
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, ends)
        return _multiply(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        to_x = None if weight is None else _multiply(grads[0], weight.mT, ends)
        to_weight = None if x is None else multiply_group_gradients(grads[0], x, ends)
        return to_x, to_weight, None


# --------------------------------------------------------------------------------------------------- rows to and fro


class _SortRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse).unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


class _UnsortRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None, None


# A permutation's gradient is the inverse permutation. Autograd would add rows up instead, in an order that accelerators
# do not fix.
sort_rows: Callable[..., Tensor] = _SortRows.apply  # (x (T, D), order (T * k,), its inverse, k) -> (T * k, D)
unsort_rows: Callable[..., Tensor] = _UnsortRows.apply  # (rows (T * k, D), order, its inverse) -> (T * k, D)
