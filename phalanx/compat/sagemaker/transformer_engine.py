"""Transformer Engine's names that scripts use, where it is not installed: FP8 with block scaling (parallel/fp8.py).

Inside `fp8_autocast(enabled=True)` the linear layers here, and those of the layers of a transformed model, multiply in
FP8. The delayed scaling that a script asks for is not used: its history has an entry for each forward pass, so that the
result would depend on the number of micro-batches.
"""

import contextlib
import enum
import functools
import logging
from collections.abc import Callable, Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from phalanx.core.errors import ConfigError
from phalanx.models.layers import Linear as OwnLinear
from phalanx.parallel.fp8 import choose_linear, find_kernel_problem, replace_linear

logger = logging.getLogger("phalanx.sagemaker")

NORMS: dict[str, Callable[..., nn.Module]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functools.partial(F.gelu, approximate="tanh"), "relu": F.relu, "silu": F.silu,
    "geglu": functools.partial(F.gelu, approximate="tanh"), "reglu": F.relu, "swiglu": F.silu,
}  # fmt: skip
GATED = ("geglu", "reglu", "swiglu")


class _Autocast:
    """Whether linear layers multiply in FP8, of the process, as Transformer Engine's is; and whether each weight last
    did outside a backward pass: what is computed again in that, by activation checkpointing, multiplies as before."""

    def __init__(self) -> None:
        self.enabled = False
        self._last = False  # of a weight that is another tensor whenever it is gathered
        self._by_weight: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()

    def heed(self, weight: Tensor) -> bool:
        if torch._C._current_graph_task_id() == -1:  # no backward pass runs
            self._last = self._by_weight[weight] = self.enabled
        return self._by_weight.get(weight, self._last)


_autocast = _Autocast()


class Format(enum.Enum):
    """Formats of eight bits: forward and backward the same, or one each. Block scaling uses E4M3 in both."""

    E4M3 = enum.auto()
    E5M2 = enum.auto()
    HYBRID = enum.auto()


class DelayedScaling(SimpleNamespace):
    """Settings for `fp8_autocast`, kept as they are given."""


@functools.cache
def _tell(device: torch.device) -> None:
    problem = find_kernel_problem(device)
    how = f"emulated on {device} ({problem})" if problem else f"by the kernel of {device}"
    logger.warning(
        "fp8_autocast: FP8 products are scaled by blocks of 128, %s; the recipe's delayed scaling is not used, since "
        "its result depends on the number of micro-batches",
        how,
    )


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, **options: Any) -> Iterator[None]:
    """Multiply in FP8 within this block, if `enabled`; the first use logs what differs from Transformer Engine."""
    before, _autocast.enabled = _autocast.enabled, enabled
    try:
        yield
    finally:
        _autocast.enabled = before


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias), in FP8 within `fp8_autocast`."""
    if not _autocast.heed(weight):
        return F.linear(x, weight, bias)
    _tell(x.device)
    return choose_linear(x.device)(x, weight, bias)


def heed_autocast(model: nn.Module, layers: frozenset[type]) -> None:
    """Have the linear layers inside a model's `layers` follow `fp8_autocast`."""
    for layer in [module for module in model.modules() if type(module) in layers]:
        replace_linear(layer.modules(), multiply)


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

    multiply = staticmethod(multiply)

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *,
        init_method: Callable[[Tensor], Any] | None = None, params_dtype: torch.dtype | None = None, device: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        refuse_options("Linear", options)
        super().__init__(in_features, out_features, bias, **_made(device, params_dtype))
        if init_method is not None:
            with torch.no_grad():
                init_method(self.weight)

    def forward(self, inp: Tensor, **options: Any) -> Tensor:  # type: ignore[override]
        """inp (..., in) -> (..., out)."""
        refuse_options("Linear", options)
        return self.multiply(inp, self.weight, self.bias)


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
        linear = Linear(
            in_features, out_features, bias, init_method=init_method, params_dtype=params_dtype, device=device
        )
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, inp: Tensor, **options: Any) -> Tensor:
        """inp (..., in) -> (..., out)."""
        refuse_options("LayerNormLinear", options)
        return multiply(_normalize(self, inp), self.weight, self.bias)


class LayerNormMLP(nn.Module):
    """A norm, a linear layer, an activation and a linear layer; parameters `layer_norm_weight`, `layer_norm_bias`,
    `fc1_weight`, `fc1_bias`, `fc2_weight` and `fc2_bias`. Of a gated activation fc1 has the gate's rows first."""

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
        kinds: dict[str, Any] = {"params_dtype": params_dtype, "device": device}
        rows = ffn_hidden_size * (2 if activation in GATED else 1)
        first = Linear(hidden_size, rows, bias, init_method=init_method, **kinds)
        second = Linear(ffn_hidden_size, hidden_size, bias, init_method=output_layer_init_method, **kinds)
        self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias = (
            first.weight,
            first.bias,
            second.weight,
            second.bias,
        )

    def forward(self, inp: Tensor, **options: Any) -> Tensor:
        """inp (..., hidden) -> the same shape."""
        refuse_options("LayerNormMLP", options)
        inner = multiply(_normalize(self, inp), self.fc1_weight, self.fc1_bias)
        activate = ACTIVATIONS[self.activation]
        if self.activation in GATED:
            gate, up = inner.chunk(2, dim=-1)
            inner = activate(gate) * up
        else:
            inner = activate(inner)
        return multiply(inner, self.fc2_weight, self.fc2_bias)


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
