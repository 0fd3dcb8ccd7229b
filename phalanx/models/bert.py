"""BERT in plain PyTorch, with heads for masked tokens, the next sentence, labels of tokens and labels of sequences.

The model knows nothing of ranks; it lists its units in order of use. Source: Devlin et al., "BERT: Pre-training of Deep
Bidirectional Transformers", 2018. Channel order and names of parameters as in Hugging Face's models.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.layout.model_shape import ModelSpec
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.families.bert import HF_NAMES, encoder_of
from phalanx.models.layers import Embedding, LayerNorm, cross_entropy_sum, sum_logit_losses
from phalanx.models.model import Architecture

DROPOUT_SITES_PER_BLOCK = 3  # per block: attention probabilities, and the outputs of its two halves


class BertEmbeddings(nn.Module):
    """BERT's embeddings of tokens, positions and segments, summed and normalized."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.words = Embedding(spec.vocab_size, spec.hidden)
        self.positions = nn.Embedding(spec.max_seq_len, spec.hidden)
        self.segments = Embedding(encoder_of(spec).segment_kinds, spec.hidden)
        self.norm = LayerNorm(spec.hidden, spec.norm_eps)

    def forward(self, tokens: Tensor, segments: Tensor | None) -> Tensor:
        """tokens and segments (B, S) int64 -> (B, S, D); without `segments` all are of the first kind."""
        kinds = torch.zeros_like(tokens) if segments is None else segments
        x = self.words(tokens) + self.segments(kinds) + self.positions.weight[: tokens.shape[1]]
        return self.norm(x)


class BertAttention(nn.Module):
    """Bidirectional self-attention, except to padding."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim, self.dropout = spec.head_dim, spec.attention_dropout
        self.q, self.k, self.v, self.o = (nn.Linear(spec.hidden, spec.hidden) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None, draws: CounterRNG | None, site: Tensor | None) -> Tensor:
        """x (B, S, D), mask bool (B, 1, 1, S) or None for all -> (B, S, D)."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if draws is None or site is None or self.dropout == 0.0:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            mixed = attention_with_dropout(q, k, v, mask, draws, site, self.dropout)
        return self.o(mixed.transpose(1, 2).flatten(2))


def attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, draws: CounterRNG, site: Tensor, p: float
) -> Tensor:
    """Attention with dropout of its probabilities, which are materialized: q, k, v (B, heads, S, head_dim) -> the same.

    A draw depends on the sample, both positions and the head, not on the padding of other samples.
    """
    scores = (q @ k.transpose(2, 3)) * (1.0 / math.sqrt(q.shape[3]))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    probabilities = torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    rows = probabilities.permute(0, 2, 3, 1)  # (B, S, S, heads): other positions and heads as channels
    kept = draws.dropout(rows.flatten(2), site, p).view(rows.shape).permute(0, 3, 1, 2)
    return kept @ v


class BertMLP(nn.Module):
    """BERT's feed-forward layer: down(gelu(up(x))), with the exact error function."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden, spec.intermediate)
        self.down = nn.Linear(spec.intermediate, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, D) -> (B, S, D)."""
        return self.down(F.gelu(self.up(x)))


class BertBlock(nn.Module):
    """A block of BERT: attention and MLP with residuals, each followed by a norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.attention = BertAttention(spec)
        self.attention_norm = LayerNorm(spec.hidden, spec.norm_eps)
        self.mlp = BertMLP(spec)
        self.mlp_norm = LayerNorm(spec.hidden, spec.norm_eps)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, draws: CounterRNG | None = None, site: Tensor | None = None
    ) -> Tensor:
        """x (B, S, D) -> (B, S, D). With `draws`, `site` is the 0-dim number of this block's first dropout."""
        if draws is None or site is None:
            x = self.attention_norm(x + self.attention(x, mask, None, None))
            return self.mlp_norm(x + self.mlp(x))
        mixed = draws.dropout(self.attention(x, mask, draws, site), site + 1, self.dropout)
        x = self.attention_norm(x + mixed)
        return self.mlp_norm(x + draws.dropout(self.mlp(x), site + 2, self.dropout))


class BertPretrainingHead(nn.Module):
    """BERT's head for masked language modeling and next-sentence prediction.

    Its last matrix is the embedding's, passed as an argument. `cross_entropy_sum` is an attribute so that another
    implementation (a compiled one) can be put in its place.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        pairs = encoder_of(spec).objective == "masked-next"
        self.pooler = nn.Linear(spec.hidden, spec.hidden) if pairs else None
        self.bias = nn.Parameter(torch.zeros(spec.vocab_size))
        self.transform = nn.Linear(spec.hidden, spec.hidden)
        self.norm = LayerNorm(spec.hidden, spec.norm_eps)
        self.next = nn.Linear(spec.hidden, 2) if pairs else None
        self.cross_entropy_sum: Callable[..., Tensor] = cross_entropy_sum

    def forward(
        self,
        hidden: Tensor,
        words: Tensor,
        places: Tensor | None,
        labels: Tensor | None,
        next_labels: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden (B, S, D) -> logits of tokens (B, P, V) at `places` int64 (B, P), all if None, and of the second
        segment (B, 2); or with `labels` (B, P) and `next_labels` (B,), -100 ignored, the two sums of losses."""
        follows = None
        if self.pooler is not None and self.next is not None:
            follows = self.next(torch.tanh(self.pooler(hidden[:, 0])))
        if places is not None:
            hidden = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[2]))
        hidden = self.norm(F.gelu(self.transform(hidden)))
        if labels is None:
            return F.linear(hidden, words, self.bias), follows
        loss = self.cross_entropy_sum(hidden.flatten(0, 1), words, labels.flatten(), self.bias)
        if follows is None:
            return loss, None
        assert next_labels is not None, "a head for pairs needs next_labels"
        return loss, sum_logit_losses(follows, next_labels)


class BertLabelHead(nn.Module):
    """BERT's classification head: a label for each token, or through the pooler one for each sequence."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dropout, self.site = spec.dropout, DROPOUT_SITES_PER_BLOCK * spec.layers + 1
        self.pooler = nn.Linear(spec.hidden, spec.hidden) if encoder_of(spec).objective == "classes" else None
        self.classifier = nn.Linear(spec.hidden, len(encoder_of(spec).labels))

    def forward(self, hidden: Tensor, labels: Tensor | None, draws: CounterRNG | None) -> Tensor:
        """hidden (B, S, D) -> logits (B, S, C), with a pooler (B, C); or with `labels` (B, S) or (B,), -100 ignored,
        the sum of the losses."""
        x = hidden if self.pooler is None else torch.tanh(self.pooler(hidden[:, :1]))
        if draws is not None:
            x = draws.dropout(x, self.site, self.dropout)
        logits = self.classifier(x if self.pooler is None else x[:, 0])
        return logits if labels is None else sum_logit_losses(logits, labels)


class Bert(Architecture):
    """BERT of the shape `spec` with the head of its objective; parameters are uninitialized until drawn or loaded.

    Build it under `torch.device("meta")` to allocate no memory. `embed...`, `layers.{i}...`, `head...` are its
    parameters, in order of use and named as `parameter_shapes(spec)` says.
    """

    hf_names: ClassVar[dict[str, str]] = HF_NAMES
    may_draw: ClassVar[tuple[str, ...]] = ("head.",)

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.embed = BertEmbeddings(spec)
        self.layers = nn.ModuleList(BertBlock(spec) for _ in range(spec.layers))
        self.masks = encoder_of(spec).objective in ("masked", "masked-next")
        self.head: BertPretrainingHead | BertLabelHead = (
            BertPretrainingHead(spec) if self.masks else BertLabelHead(spec)
        )

    def encode(
        self, tokens: Tensor, segments: Tensor | None, lengths: Tensor | None, draws: CounterRNG | None
    ) -> Tensor:
        """Encode tokens (B, S) int64 -> hidden states (B, S, D)."""
        p = self.spec.dropout
        draws = draws if p > 0.0 or self.spec.attention_dropout > 0.0 else None
        # Dropout sites are numbers in a tensor, so that one compiled block serves all layers.
        places = (
            torch.arange(DROPOUT_SITES_PER_BLOCK * len(self.layers) + 1, device=tokens.device)
            if draws is not None
            else None
        )
        seen = None
        if lengths is not None:
            seen = (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None])[:, None, None]
        x = self.embed(tokens, segments)
        if draws is not None:
            x = draws.dropout(x, 0, p)
        for index, block in enumerate(self.layers):
            x = block(x, seen, draws, None if places is None else places[DROPOUT_SITES_PER_BLOCK * index + 1])
        return x

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        draws: CounterRNG | None = None,
        segments: Tensor | None = None,
        lengths: Tensor | None = None,
        places: Tensor | None = None,
        next_labels: Tensor | None = None,
    ) -> Any:
        """tokens (B, S) int64 -> logits, or the sum of losses if `labels` are given; see the heads for both.

        `segments` int64 (B, S): 0 and 1 for the two texts of a pair; `lengths` int64 (B,): positions from there on are
        padding, masked in attention. `draws` enables dropout; without it the model computes as in evaluation,
        regardless of `training`.
        """
        hidden = self.encode(tokens, segments, lengths, draws)
        if isinstance(self.head, BertLabelHead):
            return self.head(hidden, labels, draws)
        return self.head(hidden, self.embed.words.weight, places, labels, next_labels)

    def shared_units(self) -> tuple[str, ...]:
        return ("embed",) if self.masks else ()

    def losses(self) -> list[nn.Module]:
        return [self.head] if self.masks else []

    @staticmethod
    def other_hf_names(theirs: str) -> Sequence[str]:
        """Other names that a folder may have for a tensor: those of a bare BertModel, the decoder's bias, and norms
        under names of TensorFlow checkpoints."""
        names = [theirs]
        if theirs == "cls.predictions.bias":
            names.append("cls.predictions.decoder.bias")
        names += [name.removeprefix("bert.") for name in names if name.startswith("bert.")]
        old = [re.sub(r"(LayerNorm\.)(weight|bias)$", _old_norm, name) for name in names]
        return [name for name in dict.fromkeys([*names[1:], *old]) if name != theirs]

    @staticmethod
    def ignores_hf_name(theirs: str) -> bool:
        """Whether a tensor of a folder is not needed: another head, the decoder, which is the embedding, and stored
        position ids of old versions."""
        return theirs.startswith(("cls.", "classifier.", "bert.pooler.", "pooler.")) or theirs.endswith("position_ids")


def _old_norm(found: re.Match[str]) -> str:
    return found[1] + {"weight": "gamma", "bias": "beta"}[found[2]]
