"""That library's attention modules, by PyTorch's `scaled_dot_product_attention`, which picks the device's kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.errors import ConfigError

HEADS_FIRST, HEADS_LAST = "b h s d", "b s h d"


class FlashSelfAttention(nn.Module):
    """Self-attention. `triton_flash_attention` and `use_alibi` together let `forward` take an additive mask, such as
    ALiBi's; with them there is no dropout, as there. `scale` None: 1 / sqrt(head size)."""

    def __init__(
        self,
        attention_dropout_prob: float = 0.0,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        if triton_flash_attention and attention_dropout_prob > 0:
            raise ConfigError("triton_flash_attention has no dropout; set attention_dropout_prob to 0")
        self.dropout, self.scale, self.takes_mask = attention_dropout_prob, scale, triton_flash_attention and use_alibi

    def forward(
        self,
        qkv: Tensor | Sequence[Tensor],
        attn_mask: Tensor | None = None,
        causal: bool = False,
        cast_dtype: torch.dtype | None = None,
        layout: str = HEADS_FIRST,
    ) -> Tensor:
        """`qkv`: queries, keys and values one after another along the heads, or the three of them, in `layout`; the
        mask is added to scores, (batch, heads or 1, 1, sequence). Gives (batch, heads, sequence, head size)."""
        if attn_mask is not None and not self.takes_mask:
            raise ConfigError("attn_mask needs triton_flash_attention=True and use_alibi=True; set them, or no mask")
        query, key, value = _parts(qkv, 3, layout, cast_dtype)
        return _attend(query, key, value, attn_mask, causal, self.dropout if self.training else 0.0, self.scale)


class FlashGroupedQueryAttention(nn.Module):
    """Attention in which several heads of queries share one of keys and values."""

    def __init__(self, attention_dropout_prob: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.dropout, self.scale = attention_dropout_prob, scale

    def forward(
        self,
        q: Tensor,
        kv: Tensor | Sequence[Tensor],
        causal: bool = False,
        cast_dtype: torch.dtype | None = None,
        layout: str = HEADS_LAST,
    ) -> Tensor:
        """`kv`: keys and values one after another along the heads, or the two of them. Gives (batch, heads of queries,
        sequence, head size)."""
        (query,) = _parts([q], 1, layout, cast_dtype)
        key, value = _parts(kv, 2, layout, cast_dtype)
        return _attend(query, key, value, None, causal, self.dropout if self.training else 0.0, self.scale)


def _parts(many: Tensor | Sequence[Tensor], count: int, layout: str, dtype: torch.dtype | None) -> list[Tensor]:
    """`count` tensors of (batch, heads, sequence, head size)."""
    if layout not in (HEADS_FIRST, HEADS_LAST):
        raise ConfigError(f"layout is {layout!r}; give {HEADS_FIRST!r} or {HEADS_LAST!r}")
    axis = 1 if layout == HEADS_FIRST else 2
    parts = list(many.chunk(count, dim=axis)) if isinstance(many, Tensor) else list(many)
    if layout == HEADS_LAST:
        parts = [part.transpose(1, 2) for part in parts]
    return [part if dtype is None else part.to(dtype) for part in parts]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> Tensor:
    if mask is not None and causal:
        length = query.shape[-2]
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        mask, causal = mask.to(query.dtype).masked_fill(later, float("-inf")), False
    elif mask is not None:
        mask = mask.to(query.dtype)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
