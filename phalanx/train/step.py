"""One optimizer step's forward and backward passes, and evaluation: the only places that call the model."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from phalanx.comm.mesh import Mesh
from phalanx.models.draws import Draws
from phalanx.optim import gradients
from phalanx.optim.engine import Engine
from phalanx.phases import phase
from phalanx.tasks.task import Batch, Task


def run_micro_batches(
    engine: Engine, model: nn.Module, task: Task, batches: Sequence[Batch], *, seed: int, step: int, nominal_weight: int
) -> torch.Tensor:
    """Forward and backward of every micro-batch; returns this rank's loss sum, on the device and not synchronised."""
    total: torch.Tensor | None = None
    for index, batch in enumerate(batches):
        with engine.micro_batch(last=index == len(batches) - 1):
            with phase("forward"):
                loss_sum = task.loss_sum(model, batch, Draws(seed, step, batch.samples))
            with phase("backward"):
                gradients.backward(loss_sum, nominal_weight, engine.loss_scale)
        total = loss_sum.detach() if total is None else total + loss_sum.detach()
    assert total is not None, "every rank runs at least one micro-batch"
    return total


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, steps: Iterable[Sequence[Batch]], mesh: Mesh) -> tuple[float, int]:
    """Mean loss over all ranks' batches, weighted as in training, and the weight it is a mean of; without dropout."""
    loss, weight = 0.0, 0
    for batches in steps:
        for batch in batches:
            loss += float(task.loss_sum(model, batch.to(mesh.device), None))
            weight += batch.weight
    total_loss, total_weight = mesh.sum([loss, float(weight)])
    return total_loss / max(total_weight, 1.0), int(total_weight)
