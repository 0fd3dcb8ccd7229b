"""Tasks: the definition of a batch and of its loss. A task never sees a rank: weights are counts of this batch
alone, and losses are sums."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.models.model import Model

if TYPE_CHECKING:
    from phalanx.models.counter_rng import CounterRNG

ALIGNED = 64  # byte alignment of each tensor of a batch during copies


class SampleLike(Protocol):
    """A sample of the loader: tokens of shape (seq_len + 1,), int64, and the sample's position in the run. `learnt`
    (seq_len,): which labels count, all if None; `lengths`: number of inputs of each document, None if all inputs attend
    to all before them.
    """

    @property
    def tokens(self) -> NDArray[np.int64]: ...

    @property
    def position(self) -> int: ...

    @property
    def learnt(self) -> NDArray[np.bool_] | None: ...

    @property
    def lengths(self) -> NDArray[np.int64] | None: ...


@dataclass(frozen=True)
class Batch:
    """A micro-batch: tensors by name, and the number of losses that their sum has.

    Args:
        inputs: Tensors by name.
        weight: The number of losses that `loss_sum` adds up, such as samples or labeled tokens.
        samples: Position of each sample in the run, (B,) int64, by which dropout draws; a task leaves it out.
        padding: Whether it is made of no samples, so that a rank without any takes part in collectives; a task leaves
            it out.

    Examples:
        >>> batch = phalanx.Batch({"x": torch.ones(3, 2)}, weight=3)
        >>> batch.to("cpu").inputs["x"].shape
        torch.Size([3, 2])
    """

    inputs: dict[str, Tensor]
    weight: int
    samples: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    padding: bool = False

    def to(self, device: torch.device | str) -> Self:
        """Copy the batch to a device, without the host waiting for the copies."""
        *inputs, samples = _to_device([*self.inputs.values(), self.samples], torch.device(device))
        return type(self)(dict(zip(self.inputs, inputs, strict=True)), self.weight, samples, self.padding)


class Task(Protocol):
    """Interface of a task: turns samples into a batch, and a batch into the sum of its losses. Derive from it to
    inherit the defaults."""

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Make a batch; without samples, one of weight 0 that still runs through the model."""
        ...

    def loss_sum(self, model: nn.Module, batch: Batch, draws: "CounterRNG | None") -> Tensor:
        """The sum (a scalar) of the losses that `batch.weight` counts."""
        ...

    def nominal_weight(self, global_batch: int) -> int:
        """The weight of a full global batch: a constant that keeps magnitudes near one."""
        ...

    def counts(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Counts or sums (one-element tensors) from which `scores` are computed, such as the number of correct
        answers; they are added up over batches and ranks, missing names as 0. A batch of weight 0 must count
        nothing."""
        return {}

    def scores(self, counts: dict[str, float]) -> dict[str, float]:
        """Metrics of an evaluation beside the loss, such as the accuracy, from the sums of all counts."""
        return {}


def _to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    if device.type in ("cpu", "meta"):
        return [tensor.to(device) for tensor in tensors]
    # A copy from pageable memory makes the host wait, even with non_blocking; and pinning each tensor would cost more
    # than its copy.
    ends = list(itertools.accumulate(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors))
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    starts = [0, *ends[:-1]]
    for tensor, start in zip(tensors, starts, strict=True):
        packed[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=True)
    ]


# ------------------------------------ custom tasks: a network, data and a loss, in a file that `task.code` names


if TYPE_CHECKING:
    from phalanx.models.counter_rng import CounterRNG


class DataSet(Protocol):
    """A map-style data set, such as `torch.utils.data.Dataset`: a length, and samples by number.

    The same number must give the same sample on every rank and at every start. A list is one.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class CustomTask(Task):
    """Base class of a custom task: a network, data and a loss, in a file that `task.code` of a recipe names.

    The file's class `Task` derives from it, and every rank constructs it as `Task(**task.options)`. Override
    `model`, `train`, `collate` and `loss_sum`; the rest is optional. Nothing may depend on the rank, on the
    process's random generators or on the order of calls: random numbers come from `draws`.

    Examples:
        >>> class Task(phalanx.Task):
        ...     def model(self):
        ...         return Net()  # a phalanx.Model
        ...     def train(self):
        ...         return [torch.full((3,), float(number)) for number in range(100)]
        ...     def collate(self, samples):
        ...         return phalanx.Batch({"x": torch.stack(samples)}, weight=len(samples))
        ...     def loss_sum(self, model, batch, draws):
        ...         return (model(batch.inputs["x"]) - 1).square().sum()
        >>> len(Task().train())
        100
    """

    def model(self) -> Model:
        """Build the network; it is called under `torch.device("meta")`."""
        raise TypeError("the class Task has no model()")

    def train(self) -> DataSet:
        """Return the training set."""
        raise TypeError("the class Task has no train()")

    def held_out(self) -> DataSet | Mapping[str, DataSet] | None:
        """Return the data set to evaluate on, several by name, or None for no evaluation."""
        return None

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Make a `Batch` of one sample or more.

        Args:
            samples: Items of a data set of `train` or `held_out`.
        """
        raise TypeError("the class Task has no collate(samples)")

    def loss_sum(self, model: nn.Module, batch: Batch, draws: "CounterRNG | None") -> Tensor:
        """Compute the sum of the losses that `batch.weight` counts.

        Args:
            model: The network of `model`; call it, not its methods.
            batch: A micro-batch, on the model's device, floating-point inputs in the compute type.
            draws: Random numbers for dropout; None in an evaluation.

        Returns:
            The sum as a scalar tensor, not the mean.
        """
        raise TypeError("the class Task has no loss_sum(model, batch, draws)")

    def nominal_weight(self, global_batch: int) -> int:
        """Return the weight of a full global batch, by which gradients are scaled. Default: its number of samples."""
        return global_batch

    def fingerprint(self, data: DataSet) -> str:
        """Identify a data set, so that a resumed run notices another one.

        Args:
            data: A data set of `train` or `held_out`.

        Returns:
            A text. Default: a checksum of its length and of its first and last samples.
        """
        digest = hashlib.sha256(str(len(data)).encode())
        last = len(data) - 1
        for number in sorted({*range(min(8, len(data))), last // 2, *range(max(0, last - 7), last + 1)}):
            batch = self.collate([data[number]])
            for name, tensor in sorted(batch.inputs.items()):
                digest.update(repr((name, batch.weight, tensor.dtype, tuple(tensor.shape))).encode())
                digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
