"""One step of a training loop over a sharded model: its micro-batches, backward passes and results."""

import contextlib
import math
import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from phalanx.comm.collectives import PendingCollective, all_reduce
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError
from phalanx.engine.interface import StepOutcome
from phalanx.engine.sharded import ShardedEngine
from phalanx.optim import gradients

Batch = TypeVar("Batch")


class ShardedStep(Generic[Batch]):
    """One training step: iterate over it for its micro-batches, and call `backward` for each.

    `ShardedModel.step` makes it. Its results are known when its `with` block has ended.

    Examples:
        >>> net = torch.nn.Linear(2, 1)
        >>> with phalanx.shard(net, lr=0.1) as sharded:
        ...     with sharded.step([torch.ones(3, 2)], weight=3) as step:
        ...         for batch in step:
        ...             step.backward(net(batch).square().sum())
        ...     step.weight, step.skipped
        (3, False)
    """

    def __init__(
        self,
        engine: ShardedEngine,
        batches: Sequence[Batch],
        weight: int,
        sum_over_ranks: Callable[[float], list[float]],
        name_missing: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.count = max(1, len(batches))  # micro-batches, including empty ones
        self.outcome: StepOutcome | None = None
        self._engine, self._batches, self._weight = engine, batches, weight
        self._sum_over_ranks, self._name_missing = sum_over_ranks, name_missing
        self._loss: torch.Tensor | float = 0.0
        self._done, self._open, self._passed = 0, False, 0
        self._running: Generator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._running is not None:
            raise ConfigError("the micro-batches of a step can be iterated only once; use one loop per step")
        self._running = self._run()
        return self._running

    def _run(self) -> Generator[Batch]:
        for index in range(self.count):
            with self._engine.micro_batch(last=index == self.count - 1):
                if index < len(self._batches):
                    self._open = True
                    yield self._batches[index]
                    self._open = False
            self._done += 1

    def _abandon(self, error: BaseException) -> None:
        """Abort the engine's work on the step after an error: otherwise it waits for gradients that will not come."""
        if self._running is not None:
            with contextlib.suppress(type(error)):
                self._running.throw(error)

    def backward(self, loss_sum: torch.Tensor) -> None:
        """Run the backward pass of the current micro-batch; call it once for each that has losses.

        Args:
            loss_sum: The sum of the micro-batch's losses, a tensor of one element. Not their mean: the gradient is
                divided once, by the weight of all ranks.

        Raises:
            errors.ConfigError: called outside the loop over micro-batches or twice in one, or `loss_sum` is no
                scalar that needs gradients.
        """
        if not self._open:
            raise ConfigError(
                "step.backward() was called outside of `for batch in step`, where gradients would be lost; call it "
                "within"
            )
        if self._passed > self._done:
            raise ConfigError("step.backward() was called twice for a micro-batch; sum its losses and call it once")
        if loss_sum.numel() != 1 or not loss_sum.requires_grad:
            raise ConfigError(
                f"step.backward() got a tensor of shape {tuple(loss_sum.shape)}, which must be a scalar that "
                "requires gradients; sum the losses of the micro-batch"
            )
        self._passed = self._done + 1
        self._loss = self._loss + loss_sum.detach().reshape(()).to(torch.promote_types(loss_sum.dtype, torch.float32))
        gradients.backward(loss_sum, 1)

    def _end(self) -> None:
        """Raise ConfigError unless all micro-batches had a backward pass."""
        if self._done < self.count:
            raise ConfigError(
                f"a step ended after {self._done} of {self.count} micro-batches; iterate over all with `for batch in "
                "step`"
            )
        if self._weight and not self._passed:
            raise ConfigError(
                f"a step of weight {self._weight} had no step.backward(); call it for each micro-batch that has losses"
            )

    @property
    def weight(self) -> int:
        """The samples or tokens of the step, summed over all ranks."""
        return self._finished_outcome().weight

    @property
    def norm(self) -> float:
        """The norm of the mean gradient before clipping. Waits until all gradients are reduced."""
        return self._norm_and_skipped()[0]

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped: no weight, or a gradient that is not finite. Waits as `norm` does."""
        return bool(self._norm_and_skipped()[1])

    def mean_loss(self) -> float:
        """Compute the mean loss of the step over all ranks, each of which must call this. Waits for them."""
        weight = self._finished_outcome().weight
        return self._sum_over_ranks(float(self._loss))[0] / max(1, weight)

    def _norm_and_skipped(self) -> tuple[float, float]:
        with self._name_missing():
            return self._finished_outcome().get()

    def _finished_outcome(self) -> StepOutcome:
        if self.outcome is None:
            raise ConfigError("results of a step are available after its `with` block; read them there")
        return self.outcome


class StepAgreement:
    """Collective check that all ranks take a step with the same learning rate and number of micro-batches."""

    def __init__(self, count: int, rate: float, mesh: Mesh) -> None:
        self._table = torch.tensor([float(count), rate, -rate], dtype=torch.float64)
        self._pending: PendingCollective = all_reduce(self._table, mesh.control, mesh.bookkeeping, dist.ReduceOp.MAX)

    def max_micro_batches(self) -> int:
        """The greatest number of micro-batches."""
        self._pending.wait()
        return int(self._table[0])

    def check_learning_rates(self, step: int) -> None:
        """Raise ConfigError on all ranks where learning rates differ."""
        self._pending.wait()
        _, most, least = self._table.tolist()
        if most != -least:
            raise ConfigError(
                f"learning rates of step {step} are from {-least:g} to {most:g}; use the same on all ranks"
            )


def finite_rate(rate: Any, whose: str) -> float:
    """Convert a learning rate to a number. Raises ConfigError if it is invalid."""
    try:
        number = float(rate)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"{whose} has the learning rate {rate!r}; give a finite one, 0 or above")
    return number


def check_weight(weight: Any) -> int:
    """Convert the weight of a step to a count. Raises ConfigError if it is invalid."""
    try:
        counted = operator.index(weight)
    except TypeError:
        counted = -1
    if counted < 0 or isinstance(weight, bool):
        raise ConfigError(
            f"a step has weight={weight!r}, which is not a count; give the number of samples or tokens that its "
            "losses sum over"
        )
    return counted
