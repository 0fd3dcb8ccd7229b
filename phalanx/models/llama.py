"""Llama 1, 2 and 3 in plain PyTorch. The model knows nothing of ranks; it lists its units in order of use.

Source: Touvron et al., "LLaMA", 2023, and "The Llama 3 Herd of Models", 2024; channel order of Hugging Face's Llama.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.draws import Draws, key, normal
from phalanx.models.layers import Embedding, RMSNorm, apply_rope, causal_attention, cross_entropy_sum, rope_table
from phalanx.models.spec import ModelSpec

# Our name -> the name in a Hugging Face folder; {i} is the layer.
HF_NAMES: dict[str, str] = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.o.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


class Attention(nn.Module):
    """Causal self-attention; `kv_heads` key and value heads are shared by `heads` query heads (grouped queries)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q = nn.Linear(spec.hidden, spec.heads * spec.head_dim, bias=False)
        self.k = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=False)
        self.v = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=False)
        self.o = nn.Linear(spec.heads * spec.head_dim, spec.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, S, D), cos and sin (S, head_dim / 2) -> (B, S, D)."""
        # Head counts come from the tensors, not from the spec: a tensor-parallel rank holds only some of the heads.
        q = apply_rope(self.q(x).unflatten(-1, (-1, self.head_dim)), cos, sin).transpose(1, 2)
        k = apply_rope(self.k(x).unflatten(-1, (-1, self.head_dim)), cos, sin).transpose(1, 2)
        v = self.v(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        mixed = causal_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)). Source: Shazeer, "GLU Variants Improve Transformer", 2020."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden, spec.intermediate, bias=False)
        self.up = nn.Linear(spec.hidden, spec.intermediate, bias=False)
        self.down = nn.Linear(spec.intermediate, spec.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, D) -> (B, S, D)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.attention = Attention(spec)
        self.mlp_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.mlp = MLP(spec)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, draws: Draws | None = None, place: Tensor | None = None
    ) -> Tensor:
        """x (B, S, D) -> (B, S, D). With `draws`, `place` is the 0-dim number of this block's first dropout."""
        if draws is None or place is None:
            x = x + self.attention(self.attention_norm(x), cos, sin)
            return x + self.mlp(self.mlp_norm(x))
        x = x + draws.dropout(self.attention(self.attention_norm(x), cos, sin), place, self.dropout)
        return x + draws.dropout(self.mlp(self.mlp_norm(x)), place + 1, self.dropout)


class Head(nn.Module):
    """The last norm and the projection to the vocabulary; computes the loss itself, so that hooks on this unit fire.

    A tied head has no weight of its own (`weight` is None): it is handed the embedding's. `cross_entropy_sum` is an
    attribute so that another implementation (compiled, or split over ranks) can be put in its place.
    """

    weight: nn.Parameter | None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)
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


class Llama(nn.Module):
    """A Llama of the shape `spec`; parameters hold no useful values until they are drawn or read.

    Build it under `torch.device("meta")` to spend no memory. `embed.weight`, `layers.{i}...`, `head...` are its
    parameters, in order of use and named as `parameter_shapes(spec)` says.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec.vocab_size, spec.hidden)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.head = Head(spec)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, draws: Draws | None = None) -> Tensor:
        """tokens (B, S) int64 -> logits (B, S, V), or the loss sum over labels (B, S), -100 ignored, if given.

        `draws` turns dropout on; without it the model computes as in evaluation, whatever `training` says.
        """
        p = self.spec.dropout
        draws = draws if p > 0.0 else None
        cos, sin = rope_table(self.spec, tokens.shape[1], tokens.device)
        # Places of dropout are numbers in a tensor, so that one compiled block serves all layers.
        places = torch.arange(2 * len(self.layers) + 1, device=tokens.device) if draws is not None else None
        x = self.embed(tokens)
        if draws is not None:
            x = draws.dropout(x, 0, p)
        for index, block in enumerate(self.layers):
            x = block(x, cos, sin, draws, None if places is None else places[2 * index + 1])
        return self.head(x, labels, self.embed.weight if self.spec.tie_embeddings else None)


def units(model: Llama) -> list[tuple[str, nn.Module]]:
    """The parts of the model that are sharded, gathered and compiled as one, by name, in order of use."""
    blocks: list[tuple[str, nn.Module]] = [(f"layers.{index}", block) for index, block in enumerate(model.layers)]
    return [("embed", model.embed), *blocks, ("head", model.head)]


def initial(name: str, spec: ModelSpec) -> tuple[str, float] | tuple[str]:
    """How parameter `name` starts: ("ones",) or ("normal", standard deviation).

    Projections that write into the residual stream are scaled by 1 / sqrt(2 * layers), so that its variance does not
    grow with depth. Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    if "norm" in name:
        return ("ones",)
    if name.endswith((".attention.o.weight", ".mlp.down.weight")):
        return ("normal", spec.init_std / math.sqrt(2 * spec.layers))
    return ("normal", spec.init_std)


def init_slice(
    spec: ModelSpec, seed: int, name: str, start: int, stop: int, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """Initial values of elements [start, stop) of the flattened parameter `name`, 1-D; the same however it is cut."""
    match initial(name, spec):
        case ("normal", float(std)):
            wide = torch.promote_types(dtype, torch.float32)
            return normal(key(seed, name), start, stop, device=device, dtype=wide).mul_(std).to(dtype)
        case _:
            return torch.ones(stop - start, device=device, dtype=dtype)
