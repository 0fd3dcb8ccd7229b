"""Multi-head latent attention: keys and values of all heads come from one narrow vector of each token, and so may
queries (DeepSeek-AI, "DeepSeek-V2", 2024); with experts around it, the network of DeepSeek-V3.

Here, in training, the wide keys and values are computed and attended to as in any decoder.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.layout.model_shape import ModelSpec
from phalanx.models.attention import attention
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.layers import Linear, RMSNorm
from phalanx.models.llama import Attention
from phalanx.models.moe import MoEBlock, MoEDecoder
from phalanx.models.rotary import apply_rope

_EPS = 1e-6  # of the norms of narrow vectors, whatever that of others


class LatentAttention(Attention):
    """Causal self-attention of `spec.latent`. A head's queries and keys are channels without positions and then
    `spec.head_dim` rotated ones, which the keys of all heads share."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        nn.Module.__init__(self)
        latent = spec.latent
        assert latent is not None
        self.latent, self.head_dim, self.value_dim, self.heads = latent, spec.head_dim, latent.value_dim, spec.heads
        queries = spec.heads * (latent.plain_dim + spec.head_dim)
        if latent.query_rank:
            self.q_down = Linear(spec.hidden, latent.query_rank, bias=False)
            self.q_down_norm = RMSNorm(latent.query_rank, _EPS)
            self.q_up = Linear(latent.query_rank, queries, bias=False)
        else:
            self.q = Linear(spec.hidden, queries, bias=False)
        self.kv_down = Linear(spec.hidden, latent.key_rank + spec.head_dim, bias=False)
        self.kv_down_norm = RMSNorm(latent.key_rank, _EPS)
        self.kv_up = Linear(latent.key_rank, spec.heads * (latent.plain_dim + latent.value_dim), bias=False)
        self.o = Linear(spec.heads * latent.value_dim, spec.hidden, bias=False)
        rule = spec.rope_scaling
        sharper = rule.mscale_all_dim if rule is not None and rule.factor > 1 else None
        # YaRN's factor is that of scores here, of all channels.
        self.sharper = 1.0 if not sharper or rule is None else (0.1 * sharper * math.log(rule.factor) + 1.0) ** 2
        self.window, self.dropout, self.first_head = spec.window_of(layer), spec.attention_dropout, 0
        self.alibi, self.score_cap, self.sinks = "", 0.0, None
        self.attention_fn: Callable[..., Tensor] = attention  # parallel/context.py replaces it

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor, draws: CounterRNG | None, site: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Attention`; values are as wide as queries."""
        plain, turned, value = self.latent.plain_dim, self.head_dim, self.value_dim
        at = draws, site
        q = self.q_up(self.q_down_norm(self.q_down(x, *at)), *at) if self.latent.query_rank else self.q(x, *at)
        q_plain, q_turned = q.unflatten(-1, (-1, plain + turned)).split((plain, turned), dim=-1)
        narrow, k_turned = self.kv_down(x, *at).split((self.latent.key_rank, turned), dim=-1)
        wide = self.kv_up(self.kv_down_norm(narrow), *at).unflatten(-1, (-1, plain + value))
        k_plain, v = wide.split((plain, value), dim=-1)
        q = torch.cat((q_plain, apply_rope(q_turned, cos, sin, pairs=True)), dim=-1) * self.sharper
        k_turned = apply_rope(k_turned[:, :, None], cos, sin, pairs=True).expand(*k_plain.shape[:3], -1)
        k = torch.cat((k_plain, k_turned), dim=-1)
        # Kernels want values as wide as queries; zeros give zeros.
        v = F.pad(v, (0, plain + turned - value))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class LatentMoEBlock(MoEBlock):
    """A block with latent attention."""

    attends: ClassVar[type[Attention]] = LatentAttention


class LatentMoEDecoder(MoEDecoder):
    """The network of DeepSeek-V3."""

    block: ClassVar[type[nn.Module]] = LatentMoEBlock
