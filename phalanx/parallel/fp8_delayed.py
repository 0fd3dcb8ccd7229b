"""FP8 matrix products with delayed scaling: a tensor has one scale, from its largest magnitudes in the steps before.

Formats are those of a hybrid recipe: E4M3 for inputs and weights, E5M2 for gradients, and all three products are in
FP8. In other libraries a history has an entry for each forward pass, so that other micro-batches give other scales.
Here it has one for each step, over all micro-batches and ranks (workload/fp8_history.py): a scale is known before the
step and the same everywhere, and rounding an element depends on nothing else. Scales are powers of two, rounded up, so
that magnitudes which differ in their last bits, as on different devices, give the same scale.

Without a history (in the first step, or where all magnitudes were zero) a tensor is not rounded. What exceeds the range
of the history becomes the largest number of its format, and is counted; infinities and NaN make the tensor NaN.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; history and margin as in the documentation of
NVIDIA's Transformer Engine.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm.fp8_tiles import FP8, power_of_two_scale
from phalanx.models import grouped_mm
from phalanx.models.moe import Experts
from phalanx.parallel import fp8
from phalanx.parallel.tensor_layers import ColumnParallelLinear, RowParallelLinear
from phalanx.system import accelerator

INPUT, WEIGHT, GRADIENT = TENSORS = range(3)
FORMATS = (FP8, FP8, torch.float8_e5m2)
LARGEST = tuple(torch.finfo(each).max for each in FORMATS)
_WIDER = 2.0**7  # the largest number of E5M2 over that of E4M3
_KEY = "_fp8_scalings"  # of a module's attributes
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, "DelayedScaling"] = weakref.WeakValueDictionary()


class DelayedScaling:
    """The scales of one product's input, weight and gradient in a step, and what the step finds of them.

    `counts`: whether this rank counts inputs and gradients that are clipped; of ranks with the same tensor one does.
    """

    def __init__(self, counts: tuple[bool, bool] = (True, True)) -> None:
        self.scales: list[float | None] = [None, None, None]  # None: not rounded
        self.recording = False
        self._maxima: list[Tensor | None] = [None, None, None]
        self._clipped: Tensor | None = None
        self._counts = {INPUT: counts[0], GRADIENT: counts[1]}
        self.handle = torch.tensor(next(_numbers), device="cpu")  # by which compiled code finds it
        _by_number[int(self.handle)] = self

    def begin(self) -> None:
        """Record from here on."""
        self.recording, self._maxima, self._clipped = True, [None, None, None], None

    def end(self) -> tuple[list[Tensor | None], Tensor | None]:
        """Record no more; returns the largest magnitudes, 0-dim in float32, and how many values were clipped; None of
        what there was not."""
        self.recording = False
        return self._maxima, self._clipped

    def rehearse(self) -> None:
        """Quantize and record as in a later step."""
        self.scales, self.recording = [1.0, 1.0, 1.0], True

    def note(self, which: int, x: Tensor, again: bool = False) -> None:
        """Record a tensor; `again`: what is clipped of it is counted in another pass."""
        known, scale = self._maxima[which], self.scales[which]
        if not self.recording or not x.numel() or (which == WEIGHT and known is not None):  # the same in all passes
            return
        size = x.detach().abs()
        largest = size.amax().float()
        self._maxima[which] = largest if known is None else torch.maximum(known, largest)
        if scale is not None and not again and self._counts.get(which, False):
            clipped = (size > LARGEST[which] * scale).sum()
            self._clipped = clipped if self._clipped is None else self._clipped + clipped

    def quantize(self, which: int, x: Tensor) -> Tensor:
        """FP8 values of a tensor that has a scale; NaN if any element is not finite."""
        scale, most = self.scales[which], LARGEST[which]
        assert scale is not None
        factor: float | Tensor = 1.0 / scale
        if x.numel():  # an infinity would become the largest number
            factor = torch.where(x.abs().amax().isfinite(), factor, torch.nan)
        # Factors of small tensors, as of most gradients, exceed the range of float16.
        wide = x.float() if x.dtype == torch.float16 else x
        values = (wide * factor).clamp(-most, most).to(FORMATS[which])
        if which == INPUT:
            fp8.report_rows(x, values)
        return values

    def round(self, which: int, x: Tensor) -> Tensor:
        """A tensor rounded to FP8 and back, in its own dtype; as it is without a scale."""
        scale = self.scales[which]
        if scale is not None:
            return self.quantize(which, x).to(x.dtype) * scale
        if which == INPUT:
            fp8.report_rows(x, x)
        return x

    def multiply(self, a: Tensor, b: Tensor, a_is: int, b_is: int, kernel: bool) -> Tensor:
        """a (M, K) @ b (N, K).T of two tensors, rounded; `kernel`: by the device's, where it can."""
        a_scale, b_scale = self.scales[a_is], self.scales[b_is]
        fits = a.dtype == b.dtype == torch.bfloat16 and a.numel() and not (a.shape[1] % 16 or b.shape[0] % 16)
        if not kernel or not fits or a_scale is None or b_scale is None:
            return self.round(a_is, a) @ self.round(b_is, b).T
        return accelerator.tensor_scaled_mm(self.quantize(a_is, a), a_scale, self.quantize(b_is, b), b_scale)


def _product(scaling: DelayedScaling, x: Tensor, weight: Tensor, ends: Tensor | None, kernel: bool) -> Tensor:
    """F.linear(x, weight), or with `ends` grouped_mm.multiply_groups, which is emulated."""
    if ends is not None:
        return grouped_mm.multiply_groups(scaling.round(INPUT, x), scaling.round(WEIGHT, weight), ends)
    product = scaling.multiply(x.flatten(0, -2), weight, INPUT, WEIGHT, kernel)
    return product.view(*x.shape[:-1], weight.shape[0])


def _gradients(
    scaling: DelayedScaling, grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor | None, kernel: bool,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Those of `_product` to x and weight, where these `needs` say so."""
    to_x = to_weight = None
    if ends is not None:
        rounded = scaling.round(GRADIENT, grad)
        if needs[0]:
            to_x = grouped_mm.multiply_groups(rounded, scaling.round(WEIGHT, weight).transpose(1, 2), ends)
        if needs[1]:
            to_weight = grouped_mm.multiply_group_gradients(rounded, scaling.round(INPUT, x), ends)
        return to_x, to_weight
    flat = grad.flatten(0, -2)
    if needs[0]:
        to_x = scaling.multiply(flat, weight.T, GRADIENT, WEIGHT, kernel).view_as(x)
    if needs[1]:
        to_weight = scaling.multiply(flat.T, x.flatten(0, -2).T, GRADIENT, INPUT, kernel)
    return to_x, to_weight


class DelayedProduct(torch.autograd.Function):
    """All three products in FP8. It saves what F.linear saves; tensors are quantized again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor | None, scaling: DelayedScaling, kernel: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.scaling, ctx.kernel, ctx.again = scaling, kernel, False
        return _product(scaling, x, weight, ends, kernel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, ends = ctx.saved_tensors
        ctx.scaling.note(GRADIENT, grads[0], ctx.again)
        ctx.again = True  # a backward pass in two halves comes here twice
        needs = ctx.needs_input_grad[:2]
        return *_gradients(ctx.scaling, grads[0], x, weight, ends, ctx.kernel, needs), None, None, None


# ---------------------------------------------------------------------------------------------------- in compiled code
# Compilers see two operators, which find their scaling by a number in a tensor: so equal blocks share their code, and
# what a product records is recorded when it runs.


@grouped_mm.make_operator(
    "delayed_product(Tensor x, Tensor weight, Tensor? ends, Tensor handle, bool kernel, bool trains) -> Tensor"
)
def _compiled_product(
    x: Tensor, weight: Tensor, ends: Tensor | None, handle: Tensor, kernel: bool, trains: bool
) -> Tensor:
    scaling = _by_number[int(handle)]
    _note_forward(scaling, x, weight, trains)
    return _product(scaling, x, weight, ends, kernel)


@grouped_mm.make_operator(
    "delayed_gradients(Tensor grad, Tensor x, Tensor weight, Tensor? ends, Tensor handle, bool kernel, bool to_x, "
    "bool to_weight) -> (Tensor, Tensor)"
)
def _compiled_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor | None, handle: Tensor, kernel: bool, *needs: bool
) -> tuple[Tensor, Tensor]:
    scaling = _by_number[int(handle)]
    scaling.note(GRADIENT, grad)
    to_x, to_weight = _gradients(scaling, grad, x, weight, ends, kernel, (needs[0], needs[1]))
    return tuple(grad.new_empty(0) if each is None else each for each in (to_x, to_weight))  # type: ignore[return-value]


@torch.library.register_fake("phalanx::delayed_product", lib=grouped_mm.LIBRARY)
def _product_shape(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[-2])


@torch.library.register_fake("phalanx::delayed_gradients", lib=grouped_mm.LIBRARY)
def _gradient_shapes(
    grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor | None, handle: Tensor, kernel: bool, *needs: bool
) -> tuple[Tensor, ...]:
    return tuple(grad.new_empty(each.shape if need else 0) for each, need in zip((x, weight), needs, strict=True))


class _CompiledProduct(torch.autograd.Function):
    """As `DelayedProduct`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor | None, handle: Tensor, kernel: bool, trains: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends, handle)
        ctx.kernel = kernel
        product: Tensor = torch.ops.phalanx.delayed_product(x, weight, ends, handle, kernel, trains)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends, handle = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        found = torch.ops.phalanx.delayed_gradients(grads[0], x, weight, ends, handle, ctx.kernel, *needs)
        to_x, to_weight = (each if need else None for each, need in zip(found, needs, strict=True))
        return to_x, to_weight, None, None, None, None


def _multiply(
    scaling: DelayedScaling, x: Tensor, weight: Tensor, ends: Tensor | None = None, kernel: bool = False
) -> Tensor:
    if torch.compiler.is_compiling():
        compiled: Tensor = _CompiledProduct.apply(x, weight, ends, scaling.handle, kernel, torch.is_grad_enabled())
        return compiled
    _note_forward(scaling, x, weight, torch.is_grad_enabled())
    product: Tensor = DelayedProduct.apply(x, weight, ends, scaling, kernel)
    return product


def _note_forward(scaling: DelayedScaling, x: Tensor, weight: Tensor, trains: bool) -> None:
    if torch._C._current_graph_task_id() == -1:  # else recomputed in a backward pass
        scaling.note(INPUT, x, again=not trains)
        scaling.note(WEIGHT, weight)


def linear(scaling: DelayedScaling, kernel: bool, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias) with FP8 inputs, weights and gradients, by the device's `kernel` or emulated, which
    runs on any device and in float64.

    x (..., in), weight (out, in), bias (out,) -> (..., out).
    """
    product = _multiply(scaling, x, weight, kernel=kernel)
    return product if bias is None else product + bias


def multiply_groups(
    scalings: Mapping[tuple[int, ...], DelayedScaling], x: Tensor, weight: Tensor, ends: Tensor
) -> Tensor:
    """grouped_mm.multiply_groups(x, weight, ends) with FP8 inputs, weights and gradients. `scalings`: of each stack, by
    its `_widths`."""
    return _multiply(scalings[_widths(weight)], x, weight, ends)


def _widths(stack: Tensor) -> tuple[int, ...]:
    """The widths (D, 2 F) or (D, F) of a stack of experts, either way round, which tell its two from one another."""
    return tuple(sorted(stack.shape[-2:]))


def find_scales(largest: Tensor, margin: int) -> list[list[float | None]]:
    """The scales of products' tensors, from their `largest` magnitudes (products, 3) float32 on the host, each doubled
    `margin` times; None where that is zero."""
    scales = power_of_two_scale(largest * 2.0**margin)
    scales[:, GRADIENT] /= _WIDER
    rows = zip(largest.tolist(), scales.tolist(), strict=True)
    return [[scale if most > 0 else None for most, scale in zip(*row, strict=True)] for row in rows]


@functools.cache
def find_kernel_problem(device: torch.device) -> str:
    """Why `device` emulates FP8 products with delayed scaling, in one line; "" where its kernel computes what the
    emulation does."""
    if not accelerator.has_tensor_scaled_mm(device):
        return "no kernel for FP8 products of E4M3 and E5M2"
    return fp8.try_kernel(device, _try_product)


def _try_product(x: Tensor, weight: Tensor, kernel: bool) -> Tensor:
    scaling = DelayedScaling()
    (scaling.scales,) = find_scales(torch.full((1, 3), 6.0), 0)
    forward = scaling.multiply(x, weight, INPUT, WEIGHT, kernel)
    return torch.cat((forward, scaling.multiply(x, weight, GRADIENT, WEIGHT, kernel)))


def train_in_fp8(blocks: Iterable[nn.Module], device: torch.device, first: bool = True) -> None:
    """As `fp8.train_in_fp8`, with delayed scaling: each product gets its `DelayedScaling` (`find_scalings`). `first`:
    this rank is the first of its tensor-parallel peers, which have the same inputs or gradients of a layer."""
    kernel = not find_kernel_problem(device)
    for module in fp8.find_layers(blocks, "delayed"):
        if isinstance(module, Experts):
            scalings = [DelayedScaling(), DelayedScaling()]
            widths = map(_widths, (module.gate_up, module.down))
            module.multiply = functools.partial(multiply_groups, dict(zip(widths, scalings, strict=True)))
        else:
            counts = (
                first or not isinstance(module, ColumnParallelLinear),
                first or not isinstance(module, RowParallelLinear),
            )
            scalings = [DelayedScaling(counts)]
            fp8.replace_linear([module], functools.partial(linear, scalings[0], kernel))
        vars(module)[_KEY] = scalings


def find_scalings(model: nn.Module) -> dict[str, DelayedScaling]:
    """The scalings of a model's products, by name of the module and number within it."""
    return {
        f"{name}:{number}": scaling
        for name, module in model.named_modules()
        for number, scaling in enumerate(vars(module).get(_KEY, ()))
    }


def rehearse(model: nn.Module) -> None:
    """Have a model that is only measured quantize as in a later step."""
    for scaling in find_scalings(model).values():
        scaling.rehearse()


def make_measured_linear(device: torch.device) -> Callable[..., Tensor]:
    """A linear layer on `device`, to be measured."""
    scaling = DelayedScaling()
    scaling.rehearse()
    return functools.partial(linear, scaling, not find_kernel_problem(device))
