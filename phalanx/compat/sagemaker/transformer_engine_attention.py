"""Transformer Engine's MultiheadAttention and TransformerLayer, where it is not installed.

Parameters have Transformer Engine's names and shapes: the rows of the query-key-value projection are interleaved by
head (by group of heads with `num_gqa_groups`), unless `qkv_weight_interleaved=False`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.compat.sagemaker.transformer_engine import NORMS, LayerNormLinear, LayerNormMLP, Linear, refuse_options
from phalanx.core.errors import ConfigError

MASKS = ("causal", "no_mask", "padding", "padding_causal", "arbitrary")
FORMATS = ("sbhd", "bshd")


def _check(layer: str, name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"transformer_engine.pytorch.{layer} got {name}={value!r}; use one of {', '.join(known)}")


class MultiheadAttention(nn.Module):
    """Self-attention with its projections, `layernorm_qkv` (with `input_layernorm`) or `qkv`, and `proj`.

    Inputs are (sequence, batch, hidden), or (batch, sequence, hidden) with `qkv_format="bshd"`. Raises ConfigError for
    cross-attention and other arguments that need Transformer Engine.
    """

    def __init__(
        self, hidden_size: int, num_attention_heads: int, kv_channels: int | None = None,
        attention_dropout: float = 0.1, layernorm_epsilon: float = 1e-5,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None, layer_number: int | None = None,
        attn_mask_type: str = "causal", *, num_gqa_groups: int | None = None, input_layernorm: bool = False,
        attention_type: str = "self", normalization: str = "LayerNorm", bias: bool = True,
        qkv_weight_interleaved: bool = True, fuse_qkv_params: bool = True, qkv_format: str = "sbhd",
        params_dtype: torch.dtype | None = None, device: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_options("MultiheadAttention", options)
        _check("MultiheadAttention", "attention_type", attention_type, ("self",))
        _check("MultiheadAttention", "attn_mask_type", attn_mask_type, MASKS)
        _check("MultiheadAttention", "qkv_format", qkv_format, FORMATS)
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        if self.heads % self.groups:
            raise ConfigError(
                f"transformer_engine.pytorch.MultiheadAttention got {self.heads} heads in {self.groups} groups; choose "
                "num_gqa_groups that divides num_attention_heads"
            )
        self.channels = kv_channels or hidden_size // num_attention_heads
        self.attention_dropout, self.attn_mask_type = attention_dropout, attn_mask_type
        self.normalizes, self.interleaved, self.batch_first = (
            input_layernorm,
            qkv_weight_interleaved,
            qkv_format == "bshd",
        )
        made = {"params_dtype": params_dtype, "device": device}
        rows = (self.heads + 2 * self.groups) * self.channels
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size, rows, layernorm_epsilon, bias, normalization, init_method=init_method, **made
            )
        else:
            self.qkv = Linear(hidden_size, rows, bias, init_method=init_method, **made)
        width = self.heads * self.channels
        self.proj = Linear(width, hidden_size, bias, init_method=output_layer_init_method, **made)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, attn_mask_type: str | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None, checkpoint_core_attention: bool = False,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """hidden_states -> the same shape. `attention_mask` is True where attention is not paid, and broadcasts to
        (batch, heads, queries, keys); `rotary_pos_emb` has angles (sequence, 1, 1, channels)."""
        refuse_options("MultiheadAttention", options)
        kind = attn_mask_type or self.attn_mask_type
        _check("MultiheadAttention", "attn_mask_type", kind, MASKS)
        mixed = (self.layernorm_qkv if self.normalizes else self.qkv)(hidden_states)
        query, key, value = (self._by_head(each) for each in self._divide(mixed))
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            query, key = (_rotate(x, by) for x, by in zip((query, key), angles, strict=True))
        keep = None if attention_mask is None or kind in ("causal", "no_mask") else attention_mask.logical_not()
        causal = kind in ("causal", "padding_causal")
        if keep is not None and causal:
            length = query.shape[-2], key.shape[-2]
            keep, causal = keep & torch.ones(length, dtype=torch.bool, device=keep.device).tril(), False
        found = F.scaled_dot_product_attention(
            query, key, value, keep, self.attention_dropout if self.training else 0.0, is_causal=causal,
            enable_gqa=self.groups < self.heads,
        )  # fmt: skip
        merged: Tensor = found.transpose(1, 2).flatten(2)
        output: Tensor = self.proj(merged if self.batch_first else merged.transpose(0, 1))
        return output

    def _divide(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """(..., rows of the projection) -> queries, keys and values (..., heads, channels)."""
        each = self.heads // self.groups
        if self.interleaved:
            parts = mixed.unflatten(-1, (self.groups, each + 2, self.channels)).split([each, 1, 1], dim=-2)
            return tuple(part.flatten(-3, -2) for part in parts)
        return mixed.unflatten(-1, (-1, self.channels)).split([self.heads, self.groups, self.groups], dim=-2)

    def _by_head(self, x: Tensor) -> Tensor:
        """(sequence, batch, heads, channels), or batch first -> (batch, heads, sequence, channels)."""
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: x (batch, heads, sequence, channels), angles (sequence, 1, 1, up to channels)."""
    angles = angles[: x.shape[-2]].flatten(1)
    turned, rest = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


class TransformerLayer(nn.Module):
    """A decoder or encoder layer: `self_attention` and `layernorm_mlp`, each with its norm before and added to its
    input. Raises ConfigError for arguments that need Transformer Engine."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1, attention_dropout: float = 0.1,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None, layer_number: int | None = None, *,
        kv_channels: int | None = None, self_attn_mask_type: str = "causal", layer_type: str = "encoder",
        attn_input_format: str = "sbhd", normalization: str = "LayerNorm", bias: bool = True, activation: str = "gelu",
        fuse_qkv_params: bool = True, qkv_weight_interleaved: bool = True, params_dtype: torch.dtype | None = None,
        device: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_options("TransformerLayer", options)
        _check("TransformerLayer", "layer_type", layer_type, ("encoder",))
        _check("TransformerLayer", "normalization", normalization, tuple(NORMS))
        self.hidden_dropout = hidden_dropout
        made: dict[str, Any] = {"params_dtype": params_dtype, "device": device, "init_method": init_method}
        made |= {"output_layer_init_method": output_layer_init_method}
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon,
            attn_mask_type=self_attn_mask_type, num_gqa_groups=num_gqa_groups, input_layernorm=True,
            normalization=normalization, bias=bias, qkv_weight_interleaved=qkv_weight_interleaved,
            qkv_format=attn_input_format, **made,
        )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, bias, normalization, activation, **made
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, self_attn_mask_type: str | None = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """hidden_states -> the same shape; further arguments are those of `MultiheadAttention`."""
        found = self.self_attention(hidden_states, attention_mask, attn_mask_type=self_attn_mask_type, **options)
        hidden = hidden_states + self._drop(found)
        output: Tensor = hidden + self._drop(self.layernorm_mlp(hidden))
        return output

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.hidden_dropout, self.training)
