"""Llama and the other decoders in plain PyTorch, by the block options of their families; a custom model can subclass
it.

The model is independent of ranks; it lists its units in order of use. Source: Touvron et al., "LLaMA", 2023, "The Llama
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
from phalanx.models.attention import Alibi, ScoreDropout, attention
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.families.catalog import block_options
from phalanx.models.families.decoder import HF_NAMES
from phalanx.models.layers import (
    Embedding,
    LayerNorm,
    Linear,
    PositionedEmbedding,
    RMSNorm,
    cap_softly,
    cross_entropy_sum,
    make_projection,
)
from phalanx.models.model import Architecture, InitRule, Model, StagedArchitecture, draw_init_slice
from phalanx.models.rotary import apply_rope, rope_table

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def make_norm(spec: ModelSpec, width: int) -> RMSNorm | LayerNorm:
    """The norm layer of the family over `width` channels."""
    options = block_options(spec)
    if options.norm == "layer":
        return LayerNorm(width, spec.norm_eps)
    return RMSNorm(width, spec.norm_eps, options.unit_offset)


class Attention(nn.Module):
    """Causal self-attention; `kv_heads` key and value heads are shared by `heads` query heads (grouped queries)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.window = spec.window_of(layer)
        options = block_options(spec)
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q = Linear(spec.hidden, queries, bias=options.qkv_bias)
        self.k = Linear(spec.hidden, keys, bias=options.qkv_bias)
        self.v = Linear(spec.hidden, keys, bias=options.qkv_bias)
        self.whole_norm = options.qk_norm == "whole"
        widths = (queries, keys) if self.whole_norm else (spec.head_dim, spec.head_dim)
        norms = (make_norm(spec, width) if options.qk_norm else nn.Identity() for width in widths)
        self.q_norm, self.k_norm = norms
        scalar = spec.block.query_scalar  # attention divides by the square root of the head's width
        self.query_scale = None if scalar in (None, spec.head_dim) else math.sqrt(spec.head_dim / scalar)
        self.rotary_pairs, self.score_cap = options.rotary_pairs, options.score_cap
        self.dropout, self.first_head = spec.attention_dropout, 0  # a tensor-parallel rank's first is another
        self.alibi, self.heads = options.alibi, spec.heads
        self.register_parameter("sinks", nn.Parameter(torch.zeros(spec.heads)) if options.sinks else None)
        self.attention_fn: Callable[..., Tensor] = attention  # parallel/context.py replaces it
        self.o = Linear(queries, spec.hidden, bias=options.o_bias)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        segments: Tensor | None = None,
        draws: CounterRNG | None = None,
        site: Tensor | None = None,
    ) -> Tensor:
        """x (B, S, D), cos and sin (S, turned / 2) or (B, S, turned / 2) -> (B, S, D).

        `draws` and `site` are for dropout of probabilities, and for matrices with adapters (lora.py).
        """
        # Head counts come from the tensors, not the spec: a tensor-parallel rank has only some of the heads.
        q, k, v = (project(x, draws, site) for project in (self.q, self.k, self.v))
        if self.whole_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        if not self.whole_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q = apply_rope(q, cos, sin, self.rotary_pairs).transpose(1, 2)
        q = q if self.query_scale is None else q * self.query_scale
        k = apply_rope(k, cos, sin, self.rotary_pairs).transpose(1, 2)
        more: dict[str, Any] = {}
        if draws is not None and site is not None and self.dropout > 0.0:
            more["dropout"] = ScoreDropout(draws, site, self.first_head, self.dropout)
        if self.alibi:
            more["alibi"] = Alibi(self.heads, self.first_head, self.alibi == "scaled")
        if self.sinks is not None:
            more["sinks"] = self.sinks
        v = v.transpose(1, 2)
        mixed = self.attention_fn(q, k, v, window=self.window, segments=segments, cap=self.score_cap, **more)
        return self.o(mixed.transpose(1, 2).flatten(2), draws, site)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or with another activation; without a gate down(activation(up(x))). Source: Shazeer,
    "GLU Variants Improve Transformer", 2020."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        options = block_options(spec)
        self.gated = options.gated
        if self.gated:
            self.gate = Linear(spec.hidden, spec.intermediate, bias=options.mlp_bias)
        self.up = Linear(spec.hidden, spec.intermediate, bias=options.mlp_bias)
        self.down = Linear(spec.intermediate, spec.hidden, bias=options.mlp_bias)
        self.activation = ACTIVATIONS[options.activation]

    def forward(self, x: Tensor, draws: CounterRNG | None = None, site: Tensor | None = None) -> Tensor:
        """x (B, S, D) -> (B, S, D). `draws` and `site` are for matrices with adapters (lora.py)."""
        if not self.gated:
            return self.down(self.activation(self.up(x, draws, site)), draws, site)
        return self.down(self.activation(self.gate(x, draws, site)) * self.up(x, draws, site), draws, site)


class Block(nn.Module):
    """A decoder block, layer number `layer`: attention and MLP with residuals, each with a norm before, after or both,
    or of the sum; sequential or parallel, by the family's options."""

    attends: ClassVar[type[Attention]] = Attention

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.adapters_drop = spec.lora is not None and spec.lora.dropout > 0.0
        self.scores_drop = spec.attention_dropout > 0.0
        options = block_options(spec)
        self.parallel, self.norm_sums = options.parallel, options.norm_sums

        def norm(wanted: bool) -> nn.Module:
            return make_norm(spec, spec.hidden) if wanted else nn.Identity()

        own = options.pre_norms and not options.shared_norm
        self.norm = norm(options.shared_norm)
        self.attention_norm = norm(own)
        self.attention = type(self).attends(spec, layer)
        self.attention_post_norm = norm(options.post_norms)
        self.mlp_norm = norm(own)
        self.mlp: nn.Module = MLP(spec)
        self.mlp_post_norm = norm(options.post_norms)

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
        x, given = self.attend(x, cos, sin, draws, site, segments)
        return self.add_fed(x, self.feed_forward(given, draws, site), draws, site)

    def attend(
        self, x: Tensor, cos: Tensor, sin: Tensor, draws: CounterRNG | None, site: Tensor | None,
        segments: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The attention with its residual: x (B, S, D) -> (B, S, D), and the MLP's input (B, S, D)."""
        scores = (draws, site) if draws is not None and (self.adapters_drop or self.scores_drop) else ()
        given = self.norm(x)
        inner = given if self.norm_sums else self.attention_norm(given)
        mixed = self.attention_post_norm(self.attention(inner, cos, sin, segments, *scores))
        if draws is not None and site is not None:
            mixed = draws.dropout(mixed, site, self.dropout)
        x = x + mixed
        if self.norm_sums:
            x = self.attention_norm(x)
            return x, x
        return x, self.mlp_norm(given if self.parallel else x)

    def feed_forward(self, given: Tensor, draws: CounterRNG | None, site: Tensor | None) -> Tensor:
        """The MLP: (B, S, D) -> (B, S, D)."""
        inner = (draws, site) if draws is not None and self.adapters_drop else ()  # custom parts may not accept them
        fed: Tensor = self.mlp(given, *inner)
        return fed

    def add_fed(self, x: Tensor, fed: Tensor, draws: CounterRNG | None, site: Tensor | None) -> Tensor:
        """The residual of the MLP: x and its output `fed` (B, S, D) -> (B, S, D)."""
        fed = self.mlp_post_norm(fed)
        if draws is not None and site is not None:
            fed = draws.dropout(fed, site + 1, self.dropout)
        x = x + fed
        return self.mlp_norm(x) if self.norm_sums else x


class Head(nn.Module):
    """The language model head: final norm and projection to the vocabulary. It also computes the loss, so that hooks on
    this unit run.

    A tied head has no weight (`weight` is None): the embedding's is passed to it. `cross_entropy_sum` is an
    attribute so that another implementation (compiled, or split over ranks) can be put in its place.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        options = block_options(spec)
        self.norm = nn.Identity() if options.norm_sums else make_norm(spec, spec.hidden)
        self.project = make_projection(spec.hidden, spec.embedding_width)
        # Sharing one Parameter between two modules would not survive to_empty() or sharding by unit.
        own = None if spec.tie_embeddings else nn.Parameter(torch.zeros(spec.vocab_size, spec.embedding_width))
        self.register_parameter("weight", own)
        self.register_parameter("bias", nn.Parameter(torch.zeros(spec.vocab_size)) if options.head == "bias" else None)
        self.normalized, self.cap = options.head == "normalized", options.logit_cap
        self.cross_entropy_sum: Callable[..., Tensor] = cross_entropy_sum

    def forward(self, hidden: Tensor, labels: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """hidden (B, S, D) -> logits (B, S, V), or the loss sum (a scalar) if `labels` (B, S) are given."""
        used = self.weight if weight is None else weight
        assert used is not None, "a tied head needs the embedding's weight"
        hidden = self.project(self.norm(hidden))
        if self.normalized:
            used = F.normalize(used)
        if labels is None:
            logits = F.linear(hidden, used, self.bias)
            return cap_softly(logits, self.cap) if self.cap else logits
        more = (self.bias,) if self.bias is not None else ()
        cap = {"cap": self.cap} if self.cap else {}
        return self.cross_entropy_sum(hidden.flatten(0, 1), used, labels.flatten(), *more, **cap)


def llama_init_rule(name: str, spec: ModelSpec) -> InitRule:
    """The initialization rule of parameter `name`: ("ones",), ("zeros",) or ("normal", standard deviation).

    Projections that write into the residual stream are scaled by 1 / sqrt(2 * layers), so that its variance does not
    grow with depth. Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    if name.endswith(".bias"):
        return ("zeros",)
    if "norm" in name:
        return ("zeros",) if block_options(spec).unit_offset else ("ones",)
    if name.endswith((".attention.o.weight", ".mlp.down.weight")):
        return ("normal", spec.init_std / math.sqrt(2 * spec.layers))
    return ("normal", spec.init_std)


class Llama(StagedArchitecture):
    """The Llama language model, and the decoders of all other families.

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
        options = block_options(spec)
        self.embed: Embedding = (
            PositionedEmbedding(
                spec.vocab_size, spec.embedding_width, spec.max_seq_len, options.position_offset, spec.hidden
            )
            if options.position_offset is not None
            else Embedding(spec.vocab_size, spec.hidden)
        )
        make = type(self).block
        self.layers = nn.ModuleList(make(spec, layer) for layer in range(spec.layers))
        self.head = Head(spec)

    def units(self) -> list[tuple[str, nn.Module]]:
        return Model.units(self)  # the modules that are present: a pipeline stage lacks some

    def losses(self) -> list[Any]:
        return [module for name, module in self.named_children() if name == "head"]

    def run_block(self, number: int, block: nn.Module, labels: Tensor | None, *args: Any) -> Tensor:
        """Call layer number `number` with the arguments of `Block.forward`; `labels` are the model's."""
        hidden: Tensor = block(*args)
        return hidden

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
        length: int | None = None,
    ) -> Tensor:
        """tokens (B, S) int64 -> logits (B, S, V), or the loss sum over labels (B, S), -100 ignored, if given.

        `draws` enables dropout; without it the model computes as in evaluation, regardless of `training`. `positions`
        int64 (B, S) are the rotary positions, 0 .. S - 1 if not given. `segments` int32 (n + 1,) are the offsets of
        documents in the B * S tokens, from 0 to B * S (may be repeated); each lies within one row, and no position
        attends to another document's.

        `stage`: the layers to run, all if not given. The first of them takes `hidden` (B, S, D) of the previous stage,
        and the hidden states (B, S, D) of the last are returned, unless it is the model's last. `length`: positions of
        a whole row, where the tokens are a slice of it.
        """
        p = self.spec.dropout
        adapters_drop = self.spec.lora is not None and self.spec.lora.dropout > 0.0
        draws = draws if p > 0.0 or adapters_drop or self.spec.attention_dropout > 0.0 else None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rope_table(self.spec, positions, length=length)
        own_base = self.spec.block.window_rope_theta is not None
        near = rope_table(self.spec, positions, windowed=True, length=length) if own_base else (cos, sin)
        # Dropout sites are numbers in a tensor, so that one compiled block serves all layers.
        places = torch.arange(2 * self.spec.layers + 1, device=tokens.device) if draws is not None else None
        stage = range(self.spec.layers) if stage is None else stage
        if hidden is None:
            options = block_options(self.spec)
            hidden = self.embed(tokens, positions) if options.learnt_positions else self.embed(tokens)
            if options.scaled_embedding:  # in the dtype of the embedding
                root = torch.tensor(math.sqrt(self.spec.hidden), dtype=torch.float32, device="cpu")
                hidden = hidden * root.to(hidden.dtype).item()
            if draws is not None:
                hidden = draws.dropout(hidden, 0, p)
        for name, block in self.layers.named_children():
            if (number := int(name)) in stage:
                place = None if places is None else places[2 * number + 1]
                angles = (cos, sin) if self.spec.window_of(number) is None else near
                hidden = self.run_block(number, block, labels, hidden, *angles, draws, place, segments)
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

    Raises ValueError where a custom class returns an unknown rule.
    """
    return draw_init_slice(model_class.initial(name, spec), seed, name, start, stop, device, dtype)


__getattr__ = renamed.old_names(__name__)
