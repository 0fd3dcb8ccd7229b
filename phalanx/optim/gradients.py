"""Weights, norms and clipping: the only place that divides a loss or a gradient by a count.

The backward pass runs on sums of losses divided by the recipe's nominal weight, a constant that keeps magnitudes near
one; collectives sum. The step's true weight, counted over all ranks, the clip factor and the nominal weight are then
folded into one divisor that the update applies. So neither shares nor ranks nor micro-batches change the mean.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from phalanx.comm.collectives import PendingCollective, Traffic, all_reduce
from phalanx.comm.mesh import Axis


class LossScale:
    """A factor of the loss that keeps small gradients above float16's least number (Micikevicius et al. 2018).

    It is halved by a step whose gradient is not finite, which is skipped, and doubled after `every` steps in a row that
    were taken. It lives on the device, and is updated there without the host waiting; the divisor of the update takes
    it out again. It is the same on all ranks, whatever each computes in.
    """

    FLOOR = 1.0  # it is not halved below: a gradient that overflows even so is no matter of scale

    def __init__(self, first: float, every: int, device: torch.device) -> None:
        self.floor = min(self.FLOOR, first)
        self._every = every
        self.factor = torch.full((), first, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)  # steps in a row

    def update(self, skip: torch.Tensor) -> None:
        """Take note of a step that had weight; `skip` is 1.0 where its gradient was not finite."""
        self._good_steps.add_(1)
        grown = self.factor * 2
        grows = (self._good_steps >= self._every) & torch.isfinite(grown)
        kept = torch.where(grows, grown, self.factor)
        halved = (self.factor / 2).clamp(min=self.floor)
        self.factor.copy_(torch.where(skip > 0, halved, kept))
        self._good_steps.copy_(torch.where((skip > 0) | grows, 0, self._good_steps))

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; waits for the device."""
        return {"factor": self.factor.item(), "taken": self._good_steps.item()}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave."""
        self.factor.fill_(state["factor"])
        self._good_steps.fill_(state["taken"])


def scale_loss(loss_sum: torch.Tensor, nominal_weight: int, scale: LossScale | None = None) -> torch.Tensor:
    """What the backward pass of a sum of losses begins with."""
    return loss_sum / nominal_weight if scale is None else loss_sum * (scale.factor / nominal_weight)


def backward(loss_sum: torch.Tensor, nominal_weight: int, scale: LossScale | None = None) -> None:
    """Run the backward pass of a sum of losses."""
    scale_loss(loss_sum, nominal_weight, scale).backward()


class TotalWeight:
    """The step's weight over all ranks, reduced on the control group while the backward pass runs."""

    def __init__(self, weight: int, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._sum = torch.tensor([weight], dtype=torch.int64)
        self._pending: PendingCollective = all_reduce(self._sum, group, traffic)
        self._lock = threading.Lock()

    def get(self) -> int:
        """The sum, when it is there; any thread may ask."""
        with self._lock:
            self._pending.wait()
        return int(self._sum.item())  # a host tensor: no device is synchronised


def sum_of_squares(grads: Iterable[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Sum of squares of all elements, as one element of `dtype` on `device`."""
    some = [grad for grad in grads if grad.numel()] or [torch.zeros(1, dtype=dtype, device=device)]
    # Asked for in `dtype`: the norm of a bfloat16 tensor is otherwise rounded to bfloat16, off by up to 0.4 %.
    return torch.stack(torch._foreach_norm(some, 2, dtype)).square_().sum()


def sum_of_squares_once(
    grads: Iterable[tuple[torch.Tensor, int]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """As `sum_of_squares`, of gradients with how many ranks hold each alike: in the sum over them it counts once."""
    alike: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for grad, copies in grads:
        alike[copies].append(grad)
    zero = torch.zeros((), dtype=dtype, device=device)
    return sum((sum_of_squares(some, dtype, device) / copies for copies, some in alike.items()), zero)


def sum_over_model(squares: torch.Tensor, model: Axis | None, traffic: Traffic) -> torch.Tensor:
    """Sums of squares added up over the ranks that hold other parts of the `model`: norm, clipping and skipping are
    then the same on all of them. Waits for the device where there are such ranks."""
    if model is None:
        return squares
    total = squares.to("cpu", torch.float64, copy=True)  # their group is one of hosts
    all_reduce(total, model.group, traffic).wait()
    return total.to(squares)


def divisor_without_clipping(
    like: torch.Tensor, nominal_weight: int, total_weight: int, scale: LossScale | None = None
) -> torch.Tensor:
    """The divisor that `compute_norm_and_divisor` gives for a gradient that is neither clipped nor skipped, bit by
    bit."""
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
    """From the global sum of squares of raw gradients: (norm of the mean gradient, divisor for the update, skip flag).

    All three are one-element tensors on the device. A step without weight, or of a norm that is not finite, is skipped;
    the loss scale, if there is one, is updated by it.
    """
    factor = _factor(squares, nominal_weight, total_weight, scale)
    norm = squares.sqrt() * factor
    if clip is not None:
        # As torch.nn.utils.clip_grad_norm_: never scale up.
        factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
    skip = (~torch.isfinite(norm)).float() if total_weight else torch.ones_like(norm, dtype=torch.float32)
    if scale is not None and total_weight:
        scale.update(skip)
    # A NaN divisor would reach nothing, since the update is skipped, but keep it a number.
    divisor = torch.where(skip > 0, torch.ones_like(factor), factor).reciprocal()
    return norm, divisor, skip
