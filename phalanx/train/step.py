"""One optimizer step's forward and backward passes, and evaluation: the only places that call the model, but for those
of a pipeline (staged.py)."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from phalanx.comm.mesh import Mesh
from phalanx.comm.objects import JsonGroup
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
def evaluate(
    model: nn.Module, task: Task, steps: Iterable[Sequence[Batch]], mesh: Mesh
) -> tuple[float, int, dict[str, float]]:
    """Mean loss over all ranks' batches, weighted as in training, the weight it is a mean of, and the task's scores;
    without dropout. Scores come from whole numbers, so that no order of adding up changes them."""
    loss, weight = 0.0, 0
    counts: dict[str, float] = {}
    for batches in steps:
        for batch in batches:
            here = batch.to(mesh.device)
            loss += float(task.loss_sum(model, here, None))
            weight += batch.weight
            for name, count in task.counts(model, here).items():
                counts[name] = counts.get(name, 0.0) + float(count)
    # A batch may have nothing to count under a name (a class that none of its samples has), and so may a rank.
    names = sorted({name for one in JsonGroup(mesh.control).all_objects(list(counts)) for name in one})
    total_loss, total_weight, *totals = mesh.sum([loss, float(weight), *(counts.get(name, 0.0) for name in names)])
    found = task.scores(dict(zip(names, totals, strict=True))) if names else {}
    scores = {name: float(score) for name, score in found.items() if math.isfinite(score)}  # of no counts there is none
    return total_loss / max(total_weight, 1.0), int(total_weight), scores
