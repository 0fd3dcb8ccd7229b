"""FP8 (E4M3) matrix products with block scaling, defined so that no layout changes the result.

Inputs and gradients are scaled in blocks of 1 x 128 along the channels, weights in tiles of 128 x 128; a scale depends
on nothing but its block, so micro-batches, ranks, and slices of a matrix at multiples of 128 round alike. Scales are
powers of two, rounded up: nothing saturates, and quantizing twice changes nothing. The gradient of a weight is computed
from unquantized tensors: its blocks would run along tokens, of which another micro-batch has others.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; block sizes as in "DeepSeek-V3 Technical Report",
2024.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm.fp8_tiles import BLOCK, FP8, power_of_two_scale
from phalanx.core.errors import ConfigError, is_out_of_memory
from phalanx.models.grouped_mm import multiply_group_gradients, multiply_groups
from phalanx.models.layers import Linear
from phalanx.models.moe import Experts
from phalanx.system import accelerator

_observers: list[Callable[[Tensor, Tensor], None]] = []


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., C) -> FP8 values (..., B, 128) of its B blocks of 1 x 128, and their scales (..., B, 1).

    The last block is filled up with zeros.
    """
    blocks = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    values, scale = _quantize(blocks, power_of_two_scale(blocks.abs().amax(-1, keepdim=True)))
    report_rows(blocks, values)
    return values, scale


def report_rows(inputs: Tensor, values: Tensor) -> None:
    """Have those who `observe_rows` see an input and its FP8 values."""
    for observer in _observers:
        observer(inputs, values)


@contextlib.contextmanager
def observe_rows(observer: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Meanwhile `observer(inputs, values)` is called with each tensor that is quantized by rows and its FP8 values, in
    one shape, in code that is not compiled."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def quantize_tiles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (..., out, in) -> FP8 values (..., R, 128, C, 128) of R x C tiles, and their scales (..., R, 1, C, 1).

    The last tiles are filled up with zeros.
    """
    out, into = weight.shape[-2:]
    padded = F.pad(weight, (0, -into % BLOCK, 0, -out % BLOCK))
    tiles = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    return _quantize(tiles, power_of_two_scale(tiles.abs().amax((-3, -1), keepdim=True)))


def _quantize(blocks: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (blocks / scale).to(FP8), scale


def round_rows(x: Tensor) -> Tensor:
    """x (..., C) rounded to FP8 in blocks of 1 x 128 and back, in its own dtype."""
    values, scale = quantize_rows(x)
    return (values.to(scale.dtype) * scale).to(x.dtype).flatten(-2)[..., : x.shape[-1]]


def round_tiles(weight: Tensor) -> Tensor:
    """weight (..., out, in) rounded to FP8 in tiles of 128 x 128 and back, in its own dtype."""
    values, scale = quantize_tiles(weight)
    rounded = (values.to(scale.dtype) * scale).to(weight.dtype)
    return rounded.flatten(-2).flatten(-3, -2)[..., : weight.shape[-2], : weight.shape[-1]]


def _product_by_emulation(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(round_rows(x), round_tiles(weight))


def _product_by_kernel(x: Tensor, weight: Tensor) -> Tensor:
    """The same by the device's kernel, where both are of whole blocks and there are rows at all."""
    if x.shape[-1] % BLOCK or weight.shape[0] % BLOCK or x.dtype != torch.bfloat16 or not x.numel():
        return _product_by_emulation(x, weight)
    values, scale = quantize_rows(x.flatten(0, -2))
    tiles, tile_scale = quantize_tiles(weight)
    product = accelerator.block_scaled_mm(
        values.flatten(1), scale.flatten(1), tiles.flatten(2).flatten(0, 1), tile_scale[:, 0, :, 0]
    )
    return product.view(*x.shape[:-1], weight.shape[0])


class _BlockScaledLinear(torch.autograd.Function):
    """Two of the three products in FP8. It saves what F.linear saves; the weight is quantized again in the backward
    pass, where parameters may have been gathered again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_kernel: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product = _product_by_kernel if by_kernel else _product_by_emulation
        product: Tensor = ctx.product(x, weight)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = ctx.product(grad, weight.T)
        if ctx.needs_input_grad[1]:
            to_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return to_x, to_weight, None


class _BlockScaledGroups(torch.autograd.Function):
    """As `_BlockScaledLinear`, of rows that are sorted by group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return multiply_groups(round_rows(x), round_tiles(weight), ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        (grad,) = grads
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = multiply_groups(round_rows(grad), round_tiles(weight).transpose(1, 2), ends)
        if ctx.needs_input_grad[1]:
            to_weight = multiply_group_gradients(grad, x, ends)
        return to_x, to_weight, None


def multiply_groups_by_emulation(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """grouped_mm.multiply_groups(x, weight, ends) with FP8 inputs, weights and gradients."""
    product: Tensor = _BlockScaledGroups.apply(x, weight, ends)
    return product


def linear_by_emulation(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias) with FP8 inputs, weights and gradients, computed in the dtype of `x`.

    x (..., in), weight (out, in), bias (out,) -> (..., out). Runs on any device and in float64.
    """
    product: Tensor = _BlockScaledLinear.apply(x, weight, False)
    return product if bias is None else product + bias


def linear_by_kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear_by_emulation`, by the device's FP8 kernel for bfloat16 matrices whose sizes are multiples of 128."""
    product: Tensor = _BlockScaledLinear.apply(x, weight, True)
    return product if bias is None else product + bias


@functools.cache
def find_kernel_problem(device: torch.device) -> str:
    """Why `device` emulates FP8 products, in one line; "" where its kernel computes what the emulation does."""
    if not accelerator.has_block_scaled_mm(device):
        return "no kernel for FP8 products with block scaling"
    return try_kernel(
        device, lambda x, weight, kernel: (_product_by_kernel if kernel else _product_by_emulation)(x, weight)
    )


def try_kernel(device: torch.device, product: Callable[[Tensor, Tensor, bool], Tensor]) -> str:
    """Try `product(x, weight, kernel)` by the device's kernel and emulated: an error in one line, or "" where they
    agree."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(256, 256, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    try:
        by_kernel, emulated = (product(x, weight, kernel).float() for kernel in (True, False))
        relative = float((by_kernel - emulated).norm() / emulated.norm())
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):  # not the kernel's fault; an exception is not cached
            raise
        return " ".join(str(error).split())[:200]
    return "" if relative < 0.01 else f"its FP8 kernel differs from the emulation by {relative:.1e}"


def choose_linear(device: torch.device) -> Callable[..., Tensor]:
    """`linear_by_kernel` where `device` has a kernel that agrees with the emulation, else `linear_by_emulation`."""
    return linear_by_emulation if find_kernel_problem(device) else linear_by_kernel


def replace_linear(modules: Iterable[nn.Module], linear: Callable[..., Tensor]) -> None:
    """Have the linear layers among `modules` call `linear(x, weight, bias)` instead of F.linear."""
    for module in modules:
        if isinstance(module, Linear):
            module.multiply = linear
        elif isinstance(module, nn.Linear):  # of a custom model or of transformers
            module.forward = functools.partial(_forward, linear, module)  # type: ignore[method-assign]


def _forward(linear: Callable[..., Tensor], layer: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


def find_layers(blocks: Iterable[nn.Module], scaling: str) -> list[nn.Module]:
    """The linear layers and experts of a model's blocks. Raises ConfigError where there are none, as in a custom model
    without a ModuleList."""
    found = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear | Experts)]
    if not found:
        raise ConfigError(
            f"train.fp8 {scaling} multiplies in the linear layers of a model's blocks (the members of its "
            "nn.ModuleList), and this model has none; set train.fp8=none"
        )
    return found


def train_in_fp8(blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Have the linear layers and experts of a model's blocks multiply in FP8; embeddings, norms, attention, routers and
    the head stay. Raises ConfigError for blocks without linear layers."""
    found = find_layers(blocks, "block")
    replace_linear(found, choose_linear(device))
    for module in found:
        if isinstance(module, Experts):
            module.multiply = multiply_groups_by_emulation


def find_fp8_weights(model: nn.Module, blocks: Iterable[nn.Module]) -> list[str]:
    """Names of the parameters that nothing but FP8 products reads: weights of our own layers in a built-in model's
    blocks. Custom code may read any weight itself."""
    if type(model).__module__.partition(".")[0] != __name__.partition(".")[0]:
        return []
    modules = [module for block in blocks for module in block.modules()]
    linear = (module.weight for module in modules if isinstance(module, Linear))
    experts = (weight for module in modules if isinstance(module, Experts) for weight in (module.gate_up, module.down))
    weights = {id(weight) for weight in (*linear, *experts)}
    return [name for name, parameter in model.named_parameters() if id(parameter) in weights]
