"""`phalanx.BatchSplitter`: load balancing of batches over heterogeneous ranks, for a custom training loop."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.api.model_checks import find_units, join_mesh
from phalanx.comm.collectives import all_reduce
from phalanx.core.errors import ConfigError
from phalanx.data.loader import Loader
from phalanx.layout.balance import UNBOUND, Speed
from phalanx.tasks.task import DataSet
from phalanx.workload.clock import clock_of
from phalanx.workload.work_split import WorkSplit


class BatchSplitter:
    """Divides each global batch over the ranks by their measured speed, and averages gradients by sample.

    Every rank makes one, with its copy of the model. Each gets as many samples of a step as it computes in the time
    that the others need for theirs, measured at every step. The mean gradient is that of the global batch, so the
    loss curve is that of one device whatever the division. The order of samples depends on `seed` alone.

    The ranks are those of `torch.distributed` if it is initialized, else those that torchrun or `srun` started,
    else this process alone. Use it as a context manager.

    Args:
        model: The module to train, on this rank's device, the same on all ranks.
        data: The samples: a map-style data set, the same on all ranks.
        global_batch: Number of samples of a step, over all ranks.
        seed: Of the order of samples.
        max_micro_batch: Most samples that this rank takes at a time. Default: all of its share.
        completed_steps: How many steps were done before, by a run that is resumed.
        timeout_s: Seconds that ranks wait for one another.

    Attributes:
        rank: This process's number, from 0.
        world: Number of ranks.
        steps: Number of completed steps.

    Raises:
        errors.DataError: the data set has fewer samples than a global batch.
        errors.CollectiveError: ranks did not arrive within `timeout_s`.

    Examples:
        >>> net, data = torch.nn.Linear(1, 1), [float(number) for number in range(100)]
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
        >>> with phalanx.BatchSplitter(net, data, global_batch=10) as splitter:
        ...     for _ in range(3):
        ...         with splitter.step() as micro_batches:
        ...             loss_sum, weight = 0.0, 0
        ...             for samples in micro_batches:
        ...                 loss = net(torch.tensor(samples)[:, None]).square().sum()
        ...                 loss.backward()
        ...                 loss_sum, weight = loss_sum + loss.item(), weight + len(samples)
        ...             mean_loss = splitter.reduce_gradients(loss_sum, weight)
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...     splitter.steps
        3
    """

    def __init__(
        self,
        model: nn.Module,
        data: DataSet,
        global_batch: int,
        *,
        seed: int = 0,
        max_micro_batch: int | None = None,
        completed_steps: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        self._model, self.steps = model, completed_steps
        self._loader = Loader([(_NumberedSamples(data), 1.0)], global_batch, seed, rank=0)
        self._exit_stack = contextlib.ExitStack()
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._mesh = self._exit_stack.enter_context(join_mesh(device, timeout_s))
        self.rank, self.world = self._mesh.rank, self._mesh.world
        self._loader.rank = self.rank
        limits = self._mesh.gather(float(max_micro_batch or UNBOUND))
        self._split = WorkSplit("auto", global_batch, [Speed(1.0, most=int(most)) for most in limits], self._mesh)
        self._clock = clock_of(self._mesh, [unit for _, unit in find_units(model)])
        self._exchanged = False

    @property
    def shares(self) -> tuple[int, ...]:
        """How many samples of the next step each rank gets, in order of rank."""
        return self._split.division.shares

    @contextlib.contextmanager
    def step(self) -> Iterator[Iterator[list[Any]]]:
        """Open a training step: passes, `reduce_gradients` and the optimizer belong inside the `with` block.

        Returns:
            A context manager of an iterator over this rank's micro-batches, lists of samples of `data`. A rank may
            have none. Iterate to the end: there the ranks exchange how long each has worked.
        """
        self._clock.start()
        self._exchanged = False
        yield self._micro_batches()
        if not self._exchanged:
            raise ConfigError("a step ended before its last micro-batch; iterate over all micro-batches of step()")
        self._split.settle()
        self._clock.stop()
        self.steps += 1

    def _micro_batches(self) -> Iterator[list[Any]]:
        for samples in self._loader.batches(self.steps, self._split.division):
            if samples:
                yield samples
        self._split.exchange(self.steps + 1, self._clock.late, self._clock.lap())
        self._exchanged = True

    def reduce_gradients(self, loss_sum: Tensor | float, weight: int) -> float:
        """Replace the gradients by the mean over all samples of all ranks. Collective.

        Args:
            loss_sum: The sum of this rank's losses of the step, whose gradients `backward()` accumulated.
            weight: The number of samples or tokens in that sum.

        Returns:
            The mean loss of the step over all ranks.
        """
        loss, total = self._mesh.sum([float(loss_sum), float(weight)])
        by_type: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                by_type[parameter.dtype].append(parameter)
        for parameters in by_type.values():
            grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            all_reduce(flat, self._mesh.shard.get_group(), self._mesh.traffic).wait()
            flat /= max(1.0, total)
            for parameter, mean in zip(parameters, flat.split([grad.numel() for grad in grads]), strict=True):
                parameter.grad = mean.view_as(parameter).clone()
        return loss / max(1.0, total)

    def close(self) -> None:
        """Leave the process groups."""
        self._exit_stack.close()

    def __enter__(self) -> "BatchSplitter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _NumberedSamples:
    """A data set with the interface of the loader."""

    def __init__(self, data: DataSet) -> None:
        self.count, self._data = len(data), data

    def sample(self, number: int, position: int) -> Any:
        return self._data[number]

    def describe(self) -> str:
        return f"the data set has {self.count} samples"

    def warnings(self) -> list[str]:
        return []
