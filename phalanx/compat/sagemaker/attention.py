"""That library's attention modules: by flash_attn where it is installed and its kernels fit, else by PyTorch's
`scaled_dot_product_attention`, which picks a kernel for any device."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.core.errors import ConfigError
from phalanx.system import accelerator

AMPERE = (8, 0)  # the least compute capability that flash_attn's kernels are for
MOST_HEAD_SIZE = 256  # of those kernels

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
    # Of unequal lengths the last positions belong together there, and the first ones here.
    if mask is None and (not causal or query.shape[2] == key.shape[2]):
        flash = flash_attention(accelerator.compute_capability(query.device), query.dtype, query.shape[3])
        if flash is not None:
            return by_flash_attention(flash, query, key, value, causal, dropout, scale)
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


def flash_attention(capability: tuple[int, int], dtype: torch.dtype, head_size: int) -> Callable[..., Tensor] | None:
    """flash_attn's `flash_attn_func` where it is installed and has a kernel for a GPU of this compute capability (0, 0:
    it is none), this type and heads of this size; else None."""
    if capability < AMPERE or dtype not in (torch.float16, torch.bfloat16) or head_size > MOST_HEAD_SIZE:
        return None
    return _installed()


def by_flash_attention(
    flash: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Attention by `flash_attn_func`, which has the heads behind the sequence; they are back in place in the result."""
    parts = (each.transpose(1, 2) for each in (query, key, value))
    return flash(*parts, dropout_p=dropout, softmax_scale=scale, causal=causal).transpose(1, 2)


@functools.cache
def _installed() -> Callable[..., Tensor] | None:
    try:
        from flash_attn import flash_attn_func
    except ImportError:  # also one that was built for another torch
        return None
    found: Callable[..., Tensor] = flash_attn_func
    return found
