"""Decoders of Llama's kind in plain PyTorch, as the options of their families say; a model of one's own begins as a
subclass.

The model knows nothing of ranks; it lists its units in order of use. Source: Touvron et al., "LLaMA", 2023, "The Llama
3 Herd of Models", 2024; Jiang et al., "Mistral 7B", 2023 (sliding window); "Qwen2 Technical Report", 2024 (biases);
"Qwen3 Technical Report", 2025 (norms of queries and keys). Channel order as in Hugging Face's models.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core import renamed
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.attention import attention
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.families.catalog import family_of
from phalanx.models.families.decoder import HF_NAMES
from phalanx.models.layers import Embedding, Linear, RMSNorm, apply_rope, cross_entropy_sum, rope_table
from phalanx.models.model import Architecture, InitRule, Model, StagedArchitecture, draw_init_slice

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def make_norm(spec: ModelSpec, width: int) -> RMSNorm:
    """A norm over `width` channels, as the family has it."""
    return RMSNorm(width, spec.norm_eps, family_of(spec).options.unit_offset)


class Attention(nn.Module):
    """Causal self-attention; `kv_heads` key and value heads are shared by `heads` query heads (grouped queries)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.window = spec.window_of(layer)
        options = family_of(spec).options
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q = Linear(spec.hidden, queries, bias=options.qkv_bias)
        self.k = Linear(spec.hidden, keys, bias=options.qkv_bias)
        self.v = Linear(spec.hidden, keys, bias=options.qkv_bias)
        self.q_norm = make_norm(spec, spec.head_dim) if options.qk_norm else nn.Identity()
        self.k_norm = make_norm(spec, spec.head_dim) if options.qk_norm else nn.Identity()
        scalar = spec.attention.query_scalar  # attention itself divides by the square root of the head's width
        self.query_scale = None if scalar in (None, spec.head_dim) else math.sqrt(spec.head_dim / scalar)
        self.o = Linear(queries, spec.hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        segments: Tensor | None = None,
        draws: CounterRNG | None = None,
        site: Tensor | None = None,
    ) -> Tensor:
        """x (B, S, D), cos and sin (S, head_dim / 2) or (B, S, head_dim / 2) -> (B, S, D).

        `draws` and `site` are for matrices with adapters (lora.py).
        """
        # Head counts come from the tensors, not from the spec: a tensor-parallel rank holds only some of the heads.
        q, k, v = (project(x, draws, site).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        q = apply_rope(self.q_norm(q), cos, sin).transpose(1, 2)
        q = q if self.query_scale is None else q * self.query_scale
        k = apply_rope(self.k_norm(k), cos, sin).transpose(1, 2)
        mixed = attention(q, k, v.transpose(1, 2), window=self.window, segments=segments)
        return self.o(mixed.transpose(1, 2).flatten(2), draws, site)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or with another activation. Source: Shazeer, "GLU Variants Improve Transformer",
    2020."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = Linear(spec.hidden, spec.intermediate, bias=False)
        self.up = Linear(spec.hidden, spec.intermediate, bias=False)
        self.down = Linear(spec.intermediate, spec.hidden, bias=False)
        self.activation = ACTIVATIONS[family_of(spec).options.activation]

    def forward(self, x: Tensor, draws: CounterRNG | None = None, site: Tensor | None = None) -> Tensor:
        """x (B, S, D) -> (B, S, D). `draws` and `site` are for matrices with adapters (lora.py)."""
        return self.down(self.activation(self.gate(x, draws, site)) * self.up(x, draws, site), draws, site)


class Block(nn.Module):
    """Layer number `layer`: attention and MLP, each behind a norm (and in some families before one) and beside a
    residual."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.adapters_drop = spec.lora is not None and spec.lora.dropout > 0.0
        both = family_of(spec).options.post_norms
        self.attention_norm = make_norm(spec, spec.hidden)
        self.attention = Attention(spec, layer)
        self.attention_post_norm = make_norm(spec, spec.hidden) if both else nn.Identity()
        self.mlp_norm = make_norm(spec, spec.hidden)
        self.mlp: nn.Module = MLP(spec)
        self.mlp_post_norm = make_norm(spec, spec.hidden) if both else nn.Identity()

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        draws: CounterRNG | None = None,
        site: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """x (B, S, D) -> (B, S, D). With `draws`, `site` is the 0-dim number of this block's first dropout."""
        if draws is None or site is None:
            x = x + self.attention_post_norm(self.attention(self.attention_norm(x), cos, sin, segments))
            return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))
        inner = (draws, site) if self.adapters_drop else ()  # parts of one's own need not know of draws otherwise
        mixed = self.attention_post_norm(self.attention(self.attention_norm(x), cos, sin, segments, *inner))
        x = x + draws.dropout(mixed, site, self.dropout)
        return x + draws.dropout(self.mlp_post_norm(self.mlp(self.mlp_norm(x), *inner)), site + 1, self.dropout)


class Head(nn.Module):
    """The last norm and the projection to the vocabulary; computes the loss itself, so that hooks on this unit fire.

    A tied head has no weight of its own (`weight` is None): it is handed the embedding's. `cross_entropy_sum` is an
    attribute so that another implementation (compiled, or split over ranks) can be put in its place.
    """

    weight: nn.Parameter | None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm = make_norm(spec, spec.hidden)
        # Sharing one Parameter between two modules would not outlive to_empty() or sharding by unit.
        own = None if spec.tie_embeddings else nn.Parameter(torch.zeros(spec.vocab_size, spec.hidden))
        self.register_parameter("weight", own)
        self.cross_entropy_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = cross_entropy_sum

    def forward(self, hidden: Tensor, labels: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """hidden (B, S, D) -> logits (B, S, V), or the loss sum (a scalar) if `labels` (B, S) are given."""
        used = self.weight if weight is None else weight
        assert used is not None, "a tied head needs the embedding's weight"
        hidden = self.norm(hidden)
        if labels is None:
            return F.linear(hidden, used)
        return self.cross_entropy_sum(hidden.flatten(0, 1), used, labels.flatten())


def llama_init_rule(name: str, spec: ModelSpec) -> InitRule:
    """How parameter `name` starts: ("ones",), ("zeros",) or ("normal", standard deviation).

    Projections that write into the residual stream are scaled by 1 / sqrt(2 * layers), so that its variance does not
    grow with depth. Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    if "norm" in name:
        return ("zeros",) if family_of(spec).options.unit_offset else ("ones",)
    if name.endswith(".bias"):
        return ("zeros",)
    if name.endswith((".attention.o.weight", ".mlp.down.weight")):
        return ("normal", spec.init_std / math.sqrt(2 * spec.layers))
    return ("normal", spec.init_std)


class Llama(StagedArchitecture):
    """The Llama language model, and the families that share its layers (Mistral, Qwen, Gemma).

    A subclass named `Model` in a file is a custom model (`model.code`). It may replace `block`, the class of a
    layer, and says in `hf_names`, `hf_config` and `initial` how its parameters are named in a Hugging Face folder
    and initialized, where that differs. Parameters have no useful values until they are drawn or loaded; build it under
    `torch.device("meta")` to use no memory.

    Args:
        spec: The shape of the model.

    Examples:
        >>> spec = phalanx.ModelSpec(vocab_size=64, hidden=16, layers=2, heads=2, kv_heads=2, head_dim=8,
        ...                          intermediate=32, max_seq_len=32)
        >>> model = phalanx.Llama(spec)
        >>> model(torch.zeros(1, 5, dtype=torch.int64)).shape
        torch.Size([1, 5, 64])
    """

    block: ClassVar[type[nn.Module]] = Block
    hf_names: ClassVar[dict[str, str]] = HF_NAMES
    initial: ClassVar[Callable[[str, ModelSpec], InitRule]] = staticmethod(llama_init_rule)

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.embed = Embedding(spec.vocab_size, spec.hidden)
        make = type(self).block
        self.layers = nn.ModuleList(make(spec, layer) for layer in range(spec.layers))
        self.head = Head(spec)

    def units(self) -> list[tuple[str, nn.Module]]:
        return Model.units(self)  # what is held: a stage of a pipeline is not all of it

    def losses(self) -> list[Any]:
        return [module for name, module in self.named_children() if name == "head"]

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        draws: CounterRNG | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        *,
        stage: range | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, S) int64 -> logits (B, S, V), or the loss sum over labels (B, S), -100 ignored, if given.

        `draws` turns dropout on; without it the model computes as in evaluation, whatever `training` says. `positions`
        int64 (B, S) are the rotary positions, 0 .. S - 1 if not given. `segments` int32 (n + 1,) are the offsets of
        documents in the B * S tokens, from 0 to B * S (repeated as often as one likes); each lies within one row, and
        no position sees another document's.

        `stage`: the layers to be run, all if not given. The first of them takes `hidden` (B, S, D) from the one before,
        and what is behind the last (B, S, D) is returned, unless that is the model's own.
        """
        p = self.spec.dropout
        adapters_drop = self.spec.lora is not None and self.spec.lora.dropout > 0.0
        draws = draws if p > 0.0 or adapters_drop else None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rope_table(self.spec, positions)
        own_base = self.spec.attention.window_rope_theta is not None
        near = rope_table(self.spec, positions, windowed=True) if own_base else (cos, sin)
        # Places of dropout are numbers in a tensor, so that one compiled block serves all layers.
        places = torch.arange(2 * self.spec.layers + 1, device=tokens.device) if draws is not None else None
        stage = range(self.spec.layers) if stage is None else stage
        if hidden is None:
            hidden = self.embed(tokens)
            if family_of(self.spec).options.scaled_embedding:  # rounded as the embedding is
                root = torch.tensor(math.sqrt(self.spec.hidden), dtype=torch.float32, device="cpu")
                hidden = hidden * root.to(hidden.dtype).item()
            if draws is not None:
                hidden = draws.dropout(hidden, 0, p)
        for name, block in self.layers.named_children():
            if (number := int(name)) in stage:
                place = None if places is None else places[2 * number + 1]
                angles = (cos, sin) if self.spec.window_of(number) is None else near
                hidden = block(hidden, *angles, draws, place, segments)
        if stage.stop < self.spec.layers:
            return hidden
        return self.head(hidden, labels, self.embed.weight if self.spec.tie_embeddings else None)


def init_slice(
    spec: ModelSpec,
    seed: int,
    name: str,
    start: int,
    stop: int,
    device: torch.device | str,
    dtype: torch.dtype,
    model_class: type[Architecture] = Llama,
) -> Tensor:
    """Initial values of elements [start, stop) of the flattened parameter `name`, 1-D; the same however it is cut.

    Raises ValueError where a class of one's own names a start that there is not.
    """
    return draw_init_slice(model_class.initial(name, spec), seed, name, start, stop, device, dtype)


__getattr__ = renamed.old_names(__name__)
