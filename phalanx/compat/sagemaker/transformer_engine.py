"""Transformer Engine's names that scripts use, where it is not installed.

Inside `fp8_autocast(enabled=True)` the linear layers here, and those of the layers of a transformed model, multiply in
FP8: with the delayed scaling that a script asks for (delayed_scaling.py), whose history has an entry for each step here
and not for each forward pass, so that the result does not depend on the number of micro-batches; or where there is no
place for a history, with block scaling (parallel/fp8.py).
"""

import contextlib
import enum
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from phalanx.compat.sagemaker.delayed_scaling import (
    LayerHistory,
    attach_history,
    check_recipe,
    find_recipe_problem,
)
from phalanx.core.errors import ConfigError
from phalanx.models.layers import Linear as OwnLinear
from phalanx.parallel import fp8, fp8_delayed

logger = logging.getLogger("phalanx.sagemaker")

NORMS: dict[str, Callable[..., nn.Module]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functools.partial(F.gelu, approximate="tanh"), "relu": F.relu, "silu": F.silu,
    "geglu": functools.partial(F.gelu, approximate="tanh"), "reglu": F.relu, "swiglu": F.silu,
}  # fmt: skip
GATED = ("geglu", "reglu", "swiglu")


@dataclass(frozen=True)
class _Mode:
    """Whether linear layers multiply in FP8, and the settings of a DelayedScaling."""

    enabled: bool = False
    settings: SimpleNamespace | None = None


class _Autocast:
    """The mode of the process, as Transformer Engine's is; and in which one each weight last was outside a backward
    pass: what is computed again in that, by activation checkpointing, multiplies as before. `newest` refers
    to the last DelayedScaling that was made."""

    def __init__(self) -> None:
        self.mode = _Mode()
        self.newest: Callable[[], DelayedScaling | None] = lambda: None
        self._last = self.mode  # of a weight that is another tensor whenever it is gathered
        self._by_weight: MutableMapping[Tensor, _Mode] = WeakTensorKeyDictionary()

    def heed(self, weight: Tensor) -> _Mode:
        if torch._C._current_graph_task_id() == -1:  # no backward pass runs
            self._last = self._by_weight[weight] = self.mode
        return self._by_weight.get(weight, self._last)


_autocast = _Autocast()


class Format(enum.Enum):
    """Formats of eight bits: forward and backward the same, or one each. Block scaling uses E4M3 in both, delayed
    scaling HYBRID."""

    E4M3 = enum.auto()
    E5M2 = enum.auto()
    HYBRID = enum.auto()


class DelayedScaling(SimpleNamespace):
    """Settings for `fp8_autocast`, kept as they are given; layers that are made while there is one have a history."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _autocast.newest = weakref.ref(self)


@functools.cache
def _tell(device: torch.device, why: str) -> None:
    delayed = fp8_delayed if not why else fp8
    problem = delayed.find_kernel_problem(device)
    how = f"emulated on {device} ({problem})" if problem else f"by the kernel of {device}"
    if why:
        logger.warning("fp8_autocast: FP8 products are scaled by blocks of 128, %s, since %s", how, why)
    else:
        logger.warning(
            "fp8_autocast: FP8 products have delayed scaling with one entry of the history for each step of the "
            "optimizer, over all ranks, %s; Transformer Engine has one for each forward pass",
            how,
        )


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, *, fp8_recipe: Any = None, **options: Any) -> Iterator[None]:
    """Multiply in FP8 within this block, if `enabled`; the first use logs what differs from Transformer Engine."""
    settings = SimpleNamespace(**vars(fp8_recipe)) if isinstance(fp8_recipe, DelayedScaling) else None
    before, _autocast.mode = _autocast.mode, _Mode(enabled, settings)
    try:
        yield
    finally:
        _autocast.mode = before


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, history: LayerHistory | None = None, product: int = 0
) -> Tensor:
    """F.linear(x, weight, bias), in FP8 within `fp8_autocast`; `history`: of the layer, whose product this is."""
    mode = _autocast.heed(weight)
    if not mode.enabled:
        return F.linear(x, weight, bias)
    why = _find_delayed_problem(mode.settings, history)
    _tell(x.device, why)
    with _cast(x, weight, bias) as (x, weight, bias):
        if why or history is None or mode.settings is None:
            return fp8.choose_linear(x.device)(x, weight, bias)
        check_recipe(history, mode.settings)
        return history.linear(product, x, weight, bias)


@contextlib.contextmanager
def _cast(*tensors: Any) -> Iterator[list[Any]]:
    """Tensors, or None, in the type of torch.autocast, which does not know products in FP8, and meanwhile is off."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        yield [*tensors]
        return
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        yield [each if each is None or each.dtype == torch.float64 else each.to(dtype) for each in tensors]


def _find_delayed_problem(recipe: SimpleNamespace | None, history: LayerHistory | None) -> str:
    if recipe is None:
        return "it got no DelayedScaling"
    if (problem := find_recipe_problem(recipe)) or history is not None:
        return problem
    return (
        "DelayedScaling was made after the model, into which no checkpoint could then bring the history; make it "
        "before the model's layers, or before tsm.transform"
    )


def heed_autocast(model: nn.Module, layers: frozenset[type]) -> None:
    """Have the linear layers inside a model's `layers` follow `fp8_autocast`."""
    for layer in [module for module in model.modules() if type(module) in layers]:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                history = attach_history(module, 1, _autocast.newest())
                fp8.replace_linear([module], functools.partial(multiply, history=history))


# They ask for nothing here: sizes to warm up kernels with, a parallel mode without sizes, and when to quantize weights,
# which is in every pass.
IDLE = ("set_parallel_mode", "seq_length", "micro_batch_size", "is_first_microbatch")
WHOLE = (None, 0, 1, "", (-1, -1), [-1, -1])  # the last two are of a window


def refuse_options(layer: str, options: dict[str, Any]) -> None:
    """Raise ConfigError for arguments that would have no effect; None, False, 0, a size of 1 and a window without ends
    ask for nothing."""
    asked = [
        name for name, value in options.items()
        if name not in IDLE and (value is True or isinstance(value, Tensor) or value not in WHOLE)
    ]  # fmt: skip
    if asked:
        raise ConfigError(
            f"transformer_engine.pytorch.{layer} got {', '.join(asked)}, which needs Transformer Engine itself; remove "
            "it, or install transformer_engine"
        )


def _made(device: Any, params_dtype: torch.dtype | None) -> dict[str, Any]:
    # Transformer Engine's layers are on the GPU by default; here on torch's default device.
    return {"device": device, "dtype": params_dtype}


class Linear(OwnLinear):
    """A linear layer that follows `fp8_autocast`; parameters `weight` and `bias`."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *,
        init_method: Callable[[Tensor], Any] | None = None, params_dtype: torch.dtype | None = None, device: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        refuse_options("Linear", options)
        super().__init__(in_features, out_features, bias, **_made(device, params_dtype))
        _initialize(self, init_method)
        self.multiply = functools.partial(multiply, history=attach_history(self, 1, _autocast.newest()))

    def forward(self, inp: Tensor, **options: Any) -> Tensor:  # type: ignore[override]
        """inp (..., in) -> (..., out)."""
        refuse_options("Linear", options)
        return self.multiply(inp, self.weight, self.bias)


def _initialize(linear: nn.Linear, init_method: Callable[[Tensor], Any] | None) -> nn.Linear:
    if init_method is not None:
        with torch.no_grad():
            init_method(linear.weight)
    return linear


class LayerNorm(nn.LayerNorm):
    """Layer normalization."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, *, params_dtype: torch.dtype | None = None, device: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        refuse_options("LayerNorm", options)
        super().__init__(hidden_size, eps, **_made(device, params_dtype))


class RMSNorm(nn.RMSNorm):
    """Root mean square normalization."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, *, params_dtype: torch.dtype | None = None, device: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        refuse_options("RMSNorm", options)
        super().__init__(hidden_size, eps, **_made(device, params_dtype))


def _check_norm(layer: str, normalization: str) -> None:
    if normalization not in NORMS:
        raise ConfigError(
            f"transformer_engine.pytorch.{layer} got normalization={normalization!r}; use {' or '.join(NORMS)}"
        )


class LayerNormLinear(nn.Module):
    """A norm and a linear layer; parameters `layer_norm_weight`, `layer_norm_bias`, `weight` and `bias`."""

    fp8_history: LayerHistory | None

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, bias: bool = True,
        normalization: str = "LayerNorm", *, init_method: Callable[[Tensor], Any] | None = None,
        params_dtype: torch.dtype | None = None, device: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_options("LayerNormLinear", options)
        _check_norm("LayerNormLinear", normalization)
        made = _made(device, params_dtype)
        self.eps = eps
        _add_norm(self, normalization, in_features, made)
        linear = _initialize(OwnLinear(in_features, out_features, bias, **made), init_method)
        self.weight, self.bias = linear.weight, linear.bias
        attach_history(self, 1, _autocast.newest())

    def forward(self, inp: Tensor, **options: Any) -> Tensor:
        """inp (..., in) -> (..., out)."""
        refuse_options("LayerNormLinear", options)
        return multiply(_normalize(self, inp), self.weight, self.bias, history=self.fp8_history)


class LayerNormMLP(nn.Module):
    """A norm, a linear layer, an activation and a linear layer; parameters `layer_norm_weight`, `layer_norm_bias`,
    `fc1_weight`, `fc1_bias`, `fc2_weight` and `fc2_bias`. Of a gated activation fc1 has the gate's rows first."""

    fp8_history: LayerHistory | None

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, bias: bool = True,
        normalization: str = "LayerNorm", activation: str = "gelu", *,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None, params_dtype: torch.dtype | None = None,
        device: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_options("LayerNormMLP", options)
        _check_norm("LayerNormMLP", normalization)
        if activation not in ACTIVATIONS:
            raise ConfigError(
                f"transformer_engine.pytorch.LayerNormMLP got activation={activation!r}; use one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        made = _made(device, params_dtype)
        self.eps, self.activation = eps, activation
        _add_norm(self, normalization, hidden_size, made)
        rows = ffn_hidden_size * (2 if activation in GATED else 1)
        first = _initialize(OwnLinear(hidden_size, rows, bias, **made), init_method)
        second = _initialize(OwnLinear(ffn_hidden_size, hidden_size, bias, **made), output_layer_init_method)
        self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias = (
            first.weight,
            first.bias,
            second.weight,
            second.bias,
        )
        attach_history(self, 2, _autocast.newest())

    def forward(self, inp: Tensor, **options: Any) -> Tensor:
        """inp (..., hidden) -> the same shape."""
        refuse_options("LayerNormMLP", options)
        inner = multiply(_normalize(self, inp), self.fc1_weight, self.fc1_bias, history=self.fp8_history)
        activate = ACTIVATIONS[self.activation]
        if self.activation in GATED:
            gate, up = inner.chunk(2, dim=-1)
            inner = activate(gate) * up
        else:
            inner = activate(inner)
        return multiply(inner, self.fc2_weight, self.fc2_bias, history=self.fp8_history, product=1)


def _add_norm(layer: nn.Module, normalization: str, width: int, made: dict[str, Any]) -> None:
    norm = NORMS[normalization](width, **made)
    layer.register_parameter("layer_norm_weight", norm.get_parameter("weight"))
    layer.register_parameter("layer_norm_bias", norm.get_parameter("bias") if normalization == "LayerNorm" else None)


def _normalize(layer: Any, x: Tensor) -> Tensor:
    if layer.layer_norm_bias is None:
        return F.rms_norm(x, x.shape[-1:], layer.layer_norm_weight, layer.eps)
    return F.layer_norm(x, x.shape[-1:], layer.layer_norm_weight, layer.layer_norm_bias, layer.eps)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Activation checkpointing of `function(*args)`; arguments that place or divide what is saved ask for nothing."""
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group", "use_reentrant"):
        kwargs.pop(name, None)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
