"""Batch normalization over the global batch: the statistics do not depend on how its rows are divided over ranks.

Each rank computes count, mean and sum of squared deviations of its rows; those of all ranks are combined in rank order,
so that every rank gets the same bits (Chan, Golub and LeVeque 1983). The backward pass sums over all ranks too, since
each statistic depends on every row. Like `torch.nn.SyncBatchNorm`, with shares of any size, in float32 or wider, and
without the padding of a rank that has no rows.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

GatherRanks = Callable[[Tensor], Tensor]  # a vector -> those of all ranks, stacked in order of rank; collective
Statistics = tuple[Tensor, Tensor]  # mean and 1 / sqrt(variance + eps) of each channel


def gather_alone(vector: Tensor) -> Tensor:
    """Where there is one rank."""
    return vector[None]


class GlobalBatchNorm(_BatchNorm):
    """A batch norm layer of any number of dims; parameters and buffers are named as torch's.

    It computes as in evaluation, by the running statistics, until `begin_pass` says that a pass is one of training.
    """

    def __init__(self, like: _BatchNorm) -> None:
        nn.Module.__init__(self)
        self.num_features, self.eps, self.momentum = like.num_features, like.eps, like.momentum
        self.affine, self.track_running_stats = like.affine, like.track_running_stats
        self.weight, self.bias = like.weight, like.bias
        for name, buffer in like.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.gather: GatherRanks = gather_alone
        self.master = torch.float32  # of the running statistics
        self.keeps_statistics = False  # those of the pass before serve the next one too, for a trial
        self._learns, self._counts = False, True
        self._statistics: Statistics | None = None  # of the pass of training that runs

    def begin_pass(self, learns: bool, counts: bool = True) -> None:
        """Whether the next pass is one of training, and its rows count, or are padding."""
        self._learns, self._counts = learns, counts

    def reset_statistics(self, device: torch.device | str) -> None:
        """Give the running statistics memory, and the values that training begins with."""
        self.running_mean = torch.zeros(self.num_features, device=device, dtype=self.master)
        self.running_var = torch.ones(self.num_features, device=device, dtype=self.master)
        self.num_batches_tracked = torch.zeros((), device=device, dtype=torch.int64)

    def forward(self, input: Tensor) -> Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        if not self._learns:
            mean, variance = cast(Tensor, self.running_mean).to(wide), cast(Tensor, self.running_var).to(wide)
            weight, bias = (None if each is None else each.to(wide) for each in (self.weight, self.bias))
            normal = nn.functional.batch_norm(input.to(wide), mean, variance, weight, bias, False, 0.0, self.eps)
            return normal.to(input.dtype)
        again = torch._C._current_graph_task_id() != -1  # activations are computed again, in the backward pass
        if not (again or self.keeps_statistics):
            with torch.no_grad():
                self._statistics = self._measure(input.detach().to(wide))
        assert self._statistics is not None
        output: Tensor = _Normalize.apply(
            input, self.weight, self.bias, *self._statistics, self._total, self._counts, self.gather
        )
        return output

    def _measure(self, x: Tensor) -> Statistics:
        """The statistics of the global batch, which the running ones take in."""
        x = x.transpose(0, 1).flatten(1)  # (channels, rows and places)
        mean = x.mean(1) if self._counts else x.new_zeros(len(x))
        squares = (x - mean[:, None]).square().sum(1) if self._counts else x.new_zeros(len(x))
        count = x.new_full((1,), float(x.shape[1] * self._counts))
        table = self.gather(torch.cat([count, mean, squares]))
        counts, (means, deviations) = table[:, :1], table[:, 1:].split(len(x), 1)
        self._total = counts.sum()
        mean = (counts * means).sum(0) / self._total
        deviations = (deviations + counts * (means - mean).square()).sum(0)
        self._track(mean, deviations / (self._total - 1).clamp(min=1))
        return mean, (deviations / self._total + self.eps).rsqrt()

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """As torch's layer does; of a batch that is not finite, which no step is taken of, nothing is kept."""
        count = cast(Tensor, self.num_batches_tracked)
        sound = (torch.isfinite(mean) & torch.isfinite(variance)).all()
        count.add_(sound)
        weight = 1.0 / count.clamp(min=1).to(mean.dtype) if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.copy_(torch.where(sound, running + weight * (value.to(running) - running), running))


class _Normalize(torch.autograd.Function):
    """(x - mean) * inverse * weight + bias, whose gradient goes through the statistics as well."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, total: Tensor,
        counts: bool, gather: GatherRanks,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.counts, ctx.gather, ctx.has_bias = counts, gather, bias is not None
        shape = (1, -1, *[1] * (x.dim() - 2))
        out = (x.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        if weight is not None and bias is not None:
            out = out * weight.to(mean.dtype).view(shape) + bias.to(mean.dtype).view(shape)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, total = ctx.saved_tensors
        shape, others = (1, -1, *[1] * (x.dim() - 2)), [dim for dim in range(x.dim()) if dim != 1]
        grad, normal = grads[0].to(mean.dtype), (x.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        sums = torch.stack([grad.sum(others), (grad * normal).sum(others)])
        everyones = ctx.gather(sums.flatten()).sum(0).view_as(sums) / total
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        # Rows that are no part of the statistics have no part in their gradient either.
        inner = grad - everyones[0].view(shape) - normal * everyones[1].view(shape) if ctx.counts else grad
        to_input = (inner * scale.view(shape)).to(x.dtype)
        to_weight = None if weight is None else sums[1].to(weight.dtype)
        return to_input, to_weight, sums[0].to(weight.dtype) if ctx.has_bias else None, None, None, None, None, None


def convert_batch_norms(model: nn.Module) -> None:
    """Put a `GlobalBatchNorm` in place of every batch norm layer of a model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, GlobalBatchNorm):
                module.add_module(name, GlobalBatchNorm(child))


def batch_norms(model: nn.Module) -> dict[str, GlobalBatchNorm]:
    """The batch norm layers of a model, by name, in order of definition."""
    return {name: module for name, module in model.named_modules() if isinstance(module, GlobalBatchNorm)}
