"""Weights, norms and clipping: the only place that divides a loss or a gradient by a count.

The backward pass runs on sums of losses divided by the recipe's nominal weight, a constant that keeps magnitudes near
one; collectives sum. The step's true weight, counted over all ranks, the clip factor and the nominal weight are then
folded into one divisor that the update applies. So neither shares nor ranks nor micro-batches change the mean.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from phalanx.comm.collectives import Pending, Traffic, all_reduce


def backward(loss_sum: torch.Tensor, nominal_weight: int) -> None:
    """Run the backward pass of a sum of losses."""
    (loss_sum / nominal_weight).backward()


class TotalWeight:
    """The step's weight over all ranks, reduced on the control group while the backward pass runs."""

    def __init__(self, weight: int, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._sum = torch.tensor([weight], dtype=torch.int64)
        self._pending: Pending = all_reduce(self._sum, group, traffic)

    def get(self) -> int:
        self._pending.wait()
        return int(self._sum.item())  # a host tensor: no device is synchronised


def sum_of_squares(grads: Iterable[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Sum of squares of all elements, as one element of `dtype` on `device`."""
    some = [grad for grad in grads if grad.numel()] or [torch.zeros(1, dtype=dtype, device=device)]
    # Asked for in `dtype`: the norm of a bfloat16 tensor is otherwise rounded to bfloat16, off by up to 0.4 %.
    return torch.stack(torch._foreach_norm(some, 2, dtype)).square_().sum()


def fold(
    squares: torch.Tensor, *, nominal_weight: int, total_weight: int, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the global sum of squares of raw gradients: (norm of the mean gradient, divisor for the update, skip flag).

    All three are one-element tensors on the device. A step without weight, or of a norm that is not finite, is skipped.
    """
    to_mean = nominal_weight / max(total_weight, 1)
    norm = squares.sqrt() * to_mean
    factor = torch.full_like(norm, to_mean)
    if clip is not None:
        # As torch.nn.utils.clip_grad_norm_: never scale up.
        factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
    skip = (~torch.isfinite(norm)).float() if total_weight else torch.ones_like(norm, dtype=torch.float32)
    # A NaN divisor would reach nothing, since the update is skipped, but keep it a number.
    divisor = torch.where(skip > 0, torch.ones_like(factor), factor).reciprocal()
    return norm, divisor, skip
