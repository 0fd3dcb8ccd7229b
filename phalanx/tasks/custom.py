"""A task of a user's own: a network, data and a loss, in a file that `task.code` names."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.models.model import Model
from phalanx.tasks.task import Batch, Task

if TYPE_CHECKING:
    from phalanx.models.counter_rng import CounterRNG


class DataSet(Protocol):
    """A map-style set of samples, such as torch's. The same number must give the same sample on every rank."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class CustomTask(Task):
    """The base of the class `Task` in a user's file; made on every rank as `Task(**task.options)`.

    It needs `model`, `train`, `collate` and `loss_sum`; all else may stay as it is. Nothing in it may depend on the
    rank, on a random generator of the process, or on the order of calls: what is random comes from `draws`.
    """

    def model(self) -> Model:
        """The network; it is built under `torch.device("meta")`."""
        raise TypeError("the class Task has no model()")

    def train(self) -> DataSet:
        """The samples to train on."""
        raise TypeError("the class Task has no train()")

    def held_out(self) -> DataSet | Mapping[str, DataSet] | None:
        """The samples to evaluate on, or several sets of them by name."""
        return None

    def collate(self, samples: Sequence[Any]) -> Batch:
        """`Batch(inputs, weight)` of one sample or more: tensors by name, and how many losses their sum is of."""
        raise TypeError("the class Task has no collate(samples)")

    def loss_sum(self, model: nn.Module, batch: Batch, draws: "CounterRNG | None") -> Tensor:
        """The sum (a scalar) of the losses that `batch.weight` counts. `draws` is None in an evaluation."""
        raise TypeError("the class Task has no loss_sum(model, batch, draws)")

    def nominal_weight(self, global_batch: int) -> int:
        """As many as samples, where each has one loss."""
        return global_batch

    def fingerprint(self, data: DataSet) -> str:
        """What tells this data set from another, to notice that it has changed when a run goes on.

        By default a checksum of its length and of its first and last samples.
        """
        digest = hashlib.sha256(str(len(data)).encode())
        last = len(data) - 1
        for number in sorted({*range(min(8, len(data))), last // 2, *range(max(0, last - 7), last + 1)}):
            batch = self.collate([data[number]])
            for name, tensor in sorted(batch.inputs.items()):
                digest.update(repr((name, batch.weight, tensor.dtype, tuple(tensor.shape))).encode())
                digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
