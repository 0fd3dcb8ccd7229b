"""Weights, norms and clipping: the only place that divides a loss or a gradient by a count.

The backward pass runs on sums of losses divided by the recipe's nominal weight, a constant that keeps magnitudes near
one; collectives sum. The step's true weight, counted over all ranks, the clip factor and the nominal weight are then
folded into one divisor that the update applies. So the mean does not depend on the batch split, the number of ranks, or
micro-batches.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from phalanx.comm.collectives import PendingCollective, Traffic, all_reduce
from phalanx.comm.mesh import Axis


class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018).

    A step whose gradient is not finite is skipped and halves it; `every` good steps in a row double it. It is updated
    on the device without synchronization; the divisor of the update cancels it. It is the same on all ranks, whatever
    type each computes in.
    """

    FLOOR = 1.0  # not halved below: a gradient that still overflows does not overflow because of the scale

    def __init__(self, first: float, every: int, device: torch.device) -> None:
        self.floor = min(self.FLOOR, first)
        self._every = every
        self.factor = torch.full((), first, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)  # steps in a row

    def update(self, skip: torch.Tensor) -> None:
        """Update the scale after a step with weight; `skip` is 1.0 where its gradient was not finite."""
        self._good_steps.add_(1)
        grown = self.factor * 2
        grows = (self._good_steps >= self._every) & torch.isfinite(grown)
        kept = torch.where(grows, grown, self.factor)
        halved = (self.factor / 2).clamp(min=self.floor)
        self.factor.copy_(torch.where(skip > 0, halved, kept))
        self._good_steps.copy_(torch.where((skip > 0) | grows, 0, self._good_steps))

    def state(self) -> dict[str, float]:
        """The state for a checkpoint; waits for the device."""
        return {"factor": self.factor.item(), "taken": self._good_steps.item()}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self.factor.fill_(state["factor"])
        self._good_steps.fill_(state["taken"])


def scale_loss(loss_sum: torch.Tensor, nominal_weight: int, scale: LossScale | None = None) -> torch.Tensor:
    """Scale a sum of losses for its backward pass: by the nominal weight, and the loss scale if given."""
    return loss_sum / nominal_weight if scale is None else loss_sum * (scale.factor / nominal_weight)


def backward(loss_sum: torch.Tensor, nominal_weight: int, scale: LossScale | None = None) -> None:
    """Run the backward pass of a sum of losses, scaled by `scale_loss`."""
    scale_loss(loss_sum, nominal_weight, scale).backward()


class TotalWeight:
    """The step's weight over all ranks, reduced on the control group while the backward pass runs."""

    def __init__(self, weight: int, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._sum = torch.tensor([weight], dtype=torch.int64)
        self._pending: PendingCollective = all_reduce(self._sum, group, traffic)
        self._lock = threading.Lock()

    def get(self) -> int:
        """Wait for the sum; any thread may call this."""
        with self._lock:
            self._pending.wait()
        return int(self._sum.item())  # a host tensor: no device is synchronised


def sum_of_squares(grads: Iterable[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Sum of squares of all elements, as one element of `dtype` on `device`."""
    some = [grad for grad in grads if grad.numel()] or [torch.zeros(1, dtype=dtype, device=device)]
    # `dtype` is given because the norm of a bfloat16 tensor is otherwise rounded to bfloat16, off by up to 0.4 %.
    return torch.stack(torch._foreach_norm(some, 2, dtype)).square_().sum()


def sum_of_squares_once(
    grads: Iterable[tuple[torch.Tensor, int]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Sum of squares of gradients paired with their number of replicas: in the sum over ranks each counts once."""
    alike: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for grad, copies in grads:
        alike[copies].append(grad)
    zero = torch.zeros((), dtype=dtype, device=device)
    return sum((sum_of_squares(some, dtype, device) / copies for copies, some in alike.items()), zero)


def sum_over_model(squares: torch.Tensor, model: Axis | None, traffic: Traffic) -> torch.Tensor:
    """All-reduce sums of squares over the ranks that hold other parts of the `model`, so that norm, clipping and
    skipping are the same on all of them. Waits for the device where there are such ranks."""
    if model is None:
        return squares
    total = squares.to("cpu", torch.float64, copy=True)  # their group is on the hosts
    all_reduce(total, model.group, traffic).wait()
    return total.to(squares)


def divisor_without_clipping(
    like: torch.Tensor, nominal_weight: int, total_weight: int, scale: LossScale | None = None
) -> torch.Tensor:
    """The divisor of an unclipped step, bitwise equal to that of `compute_norm_and_divisor` if the gradient is neither
    clipped nor skipped."""
    return _factor(like, nominal_weight, total_weight, scale).reciprocal()


def _factor(like: torch.Tensor, nominal_weight: int, total_weight: int, scale: LossScale | None) -> torch.Tensor:
    factor = torch.full_like(like, nominal_weight / max(total_weight, 1))
    return factor if scale is None else factor / scale.factor


def compute_norm_and_divisor(
    squares: torch.Tensor,
    *,
    nominal_weight: int,
    total_weight: int,
    clip: float | None,
    scale: LossScale | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient norm and clipping, from the global sum of squares of raw gradients: (norm of the mean gradient, divisor
    for the update, skip flag).

    All three are one-element tensors on the device. A step without weight or with a non-finite norm is skipped, and
    updates the loss scale, if given.
    """
    factor = _factor(squares, nominal_weight, total_weight, scale)
    norm = squares.sqrt() * factor
    if clip is not None:
        # As torch.nn.utils.clip_grad_norm_: never scale up.
        factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
    skip = (~torch.isfinite(norm)).float() if total_weight else torch.ones_like(norm, dtype=torch.float32)
    if scale is not None and total_weight:
        scale.update(skip)
    # A NaN divisor would have no effect, since the update is skipped, but keep it finite.
    divisor = torch.where(skip > 0, torch.ones_like(factor), factor).reciprocal()
    return norm, divisor, skip
