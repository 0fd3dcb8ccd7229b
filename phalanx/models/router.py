"""The router of a mixture of experts: a function of one token alone, without noise, so that no division of a batch
changes it. Scores are in float32 or better, and of equal ones the expert of the lower number is chosen."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.layout.model_shape import ModelSpec
from phalanx.models.llama import block_options


class Router(nn.Module):
    """Scores of a layer's experts for each token, and the choice of the best."""

    bias: nn.Parameter | None
    correction: nn.Parameter | None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.moe is not None
        self.weight = nn.Parameter(torch.zeros(spec.moe.experts, spec.hidden))
        clamped = block_options(spec).experts == "clamped"
        self.register_parameter("bias", nn.Parameter(torch.zeros(spec.moe.experts)) if clamped else None)
        self.moe = spec.moe
        # No gradient: in the choice alone.
        correction = nn.Parameter(torch.zeros(spec.moe.experts)) if spec.moe.scores == "sigmoid" else None
        self.register_parameter("correction", correction)

    def forward(self, x: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, D) -> logits (T, E) in float32 or better, the chosen experts (T, k) int64, the best first, and their
        weights (T, k). A `correction` (E,) replaces the parameter, which an engine rounds to the compute type."""
        return self.route(x, self.weight, self.bias, correction)

    def route(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `forward`, by this weight and bias."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        scores = logits.softmax(-1) if self.correction is None else logits.sigmoid()
        # topk takes any of equal scores; a stable sort the first.
        chosen = _sort(self.rank(logits.detach(), scores.detach(), correction))[:, : self.moe.experts_per_token]
        weights = scores.gather(1, chosen)
        if self.moe.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, chosen, weights * self.moe.scale if self.moe.scale != 1.0 else weights

    def rank(self, logits: Tensor, scores: Tensor, correction: Tensor | None) -> Tensor:
        """By what experts are chosen, (T, E): logits, or corrected scores within the best groups. A group is as good as
        its best two."""
        if self.correction is None:
            return logits
        ranked = scores + (self.correction.detach() if correction is None else correction).to(scores.dtype)
        if self.moe.groups == 1:
            return ranked
        grouped = ranked.unflatten(1, (self.moe.groups, -1))
        best = _sort(grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1))[:, : self.moe.groups_per_token]
        within = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
        return grouped.masked_fill(~within[..., None], -torch.inf).flatten(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The shares of experts in what the load-balancing loss is of."""
        if self.correction is None:
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)


def _sort(scores: Tensor) -> Tensor:
    """The numbers of the last dim from the greatest score on, of equal ones the lower number first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices
