"""One optimizer step's forward and backward passes, and evaluation: the only places that call the model, but for those
of a pipeline (pipeline_step.py)."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.engine.interface import Engine
from phalanx.models.counter_rng import CounterRNG
from phalanx.optim import gradients
from phalanx.system.trace import phase
from phalanx.tasks.task import Batch, Task
from phalanx.workload.step_hooks import StepHooks


def run_micro_batches(
    engine: Engine, model: nn.Module, task: Task, batches: Sequence[Batch], *, seed: int, step: int,
    nominal_weight: int, step_hooks: StepHooks | None = None, veto: Callable[[torch.Tensor], bool] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Forward and backward of every micro-batch; returns this rank's loss sum, on the device and not synchronised.

    `veto` is asked, with that sum, before the last backward pass whether the step shall not be taken.
    """
    step_hooks = step_hooks or StepHooks()
    total: torch.Tensor | None = None
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        with engine.micro_batch(last=last):
            step_hooks.enter_phase("forward", step, index)
            with phase("forward"):
                loss_sum = step_hooks.apply_loss_faults(
                    task.loss_sum(model, batch, CounterRNG(seed, step, batch.samples)), step
                )
            total = loss_sum.detach() if total is None else total + loss_sum.detach()
            step_hooks.enter_phase("backward", step, index)
            if last and veto is not None and veto(total):
                loss_sum = loss_sum * torch.nan  # which makes all ranks skip the step
            with phase("backward"):
                gradients.backward(loss_sum, nominal_weight, engine.loss_scale)
    assert total is not None, "every rank runs at least one micro-batch"
    return total


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    steps: Iterable[Sequence[Batch]],
    mesh: Mesh,
    reports_loss: bool = True,
    step_hooks: StepHooks | None = None,
) -> tuple[float, int, dict[str, float]]:
    """Mean loss over all ranks' batches, weighted as in training, the weight it is a mean of, and the task's scores;
    without dropout. Scores come from whole numbers, so that no order of adding up changes them. Of ranks that have the
    same batches one `reports_loss`."""
    loss, weight = 0.0, 0
    counts: dict[str, float] = {}
    for batches in steps:
        for batch in batches:
            if step_hooks is not None:
                step_hooks.progress_page.touch()
            here = batch.to(mesh.device)
            loss += float(task.loss_sum(model, here, None)) * reports_loss
            weight += batch.weight * reports_loss
            for name, count in task.counts(model, here).items():
                counts[name] = counts.get(name, 0.0) + float(count) * reports_loss
    # A batch may have nothing to count under a name (a class that none of its samples has), and so may a rank.
    names = sorted({name for one in JsonGroup(mesh.control).all_gather_objects(list(counts)) for name in one})
    total_loss, total_weight, *totals = mesh.sum([loss, float(weight), *(counts.get(name, 0.0) for name in names)])
    found = task.scores(dict(zip(names, totals, strict=True))) if names else {}
    scores = {name: float(score) for name, score in found.items() if math.isfinite(score)}  # of no counts there is none
    return total_loss / max(total_weight, 1.0), int(total_weight), scores
