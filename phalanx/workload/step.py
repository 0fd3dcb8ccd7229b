"""One optimizer step's forward and backward passes, evaluation, and the next token's logits, of a whole model and of
pipeline stages: the only code that calls the model."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.engine.interface import Engine
from phalanx.engine.sharded import ShardedEngine
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.model import StagedArchitecture
from phalanx.optim import gradients
from phalanx.parallel.model_part import TIED_WEIGHT, holds_one_tied_end
from phalanx.parallel.parallelize import sharding_units
from phalanx.parallel.pipeline import Pipeline
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
            with step_hooks.phase("forward", step, index):
                loss_sum = step_hooks.apply_loss_faults(
                    task.loss_sum(model, batch, CounterRNG(seed, step, batch.samples)), step
                )
            total = loss_sum.detach() if total is None else total + loss_sum.detach()
            with step_hooks.phase("backward", step, index):
                if last and veto is not None and veto(total):
                    loss_sum = loss_sum * torch.nan  # which makes all ranks skip the step
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


# ------------------------------------------------------------------------------------------------------- pipeline step
# A step's passes, evaluation and generation, where the model's stages lie on the ranks of a pipeline.


def run_pipeline(
    engine: Engine, model: nn.Module, task: Task, batches: Sequence[Batch], *, seed: int, step: int,
    nominal_weight: int, pipeline: Pipeline, step_hooks: StepHooks | None = None,
) -> Tensor:  # fmt: skip
    """As `run_micro_batches`, of stages. All ranks of a pipeline have the same batches; the loss sum is returned on the
    one that holds the last stage, and 0 on the others."""
    assert isinstance(engine, ShardedEngine) and isinstance(model, StagedArchitecture)  # as the configuration sees to
    total = torch.zeros((), dtype=pipeline.precision.master, device=batches[0].samples.device)

    step_hooks = step_hooks or StepHooks()
    step_hooks.enter_phase("forward", step)

    def run(part: nn.Module, batch: Batch) -> Tensor:
        step_hooks.progress_page.touch()
        return task.loss_sum(part, batch, CounterRNG(seed, step, batch.samples))

    def end(loss_sum: Tensor) -> Tensor:
        loss_sum = step_hooks.apply_loss_faults(loss_sum, step)
        total.add_(loss_sum.detach())
        return gradients.scale_loss(loss_sum, nominal_weight, engine.loss_scale)

    with engine.micro_batch(last=True, interleaved=True):
        pipeline.train(len(batches), _PipelineStageWork(pipeline, model, batches, run, end, engine))
        if holds_one_tied_end(model, pipeline) and TIED_WEIGHT in engine.trainable:
            pipeline.sum_tied_gradient(engine.grad_accumulation.gradient_sum(TIED_WEIGHT))
    return total


def evaluate_pipeline(
    model: nn.Module, task: Task, steps: Iterable[Sequence[Batch]], mesh: Mesh, reports_loss: bool, pipeline: Pipeline
) -> tuple[float, int, dict[str, float]]:
    """As `evaluate`, of stages: losses are there where the last one is. `mesh` is that of all ranks."""
    assert isinstance(model, StagedArchitecture)
    counted: list[float] = []

    def run(part: nn.Module, batch: Batch) -> Tensor:
        return task.loss_sum(part, batch, None)

    def end(loss_sum: Tensor) -> Tensor:
        counted.append(float(loss_sum))
        return loss_sum

    weight = 0
    for batches in steps:
        here = [batch.to(mesh.device) for batch in batches]
        pipeline.forward(len(here), _PipelineStageWork(pipeline, model, here, run, end))
        weight += sum(batch.weight for batch in here)
    total_loss, total_weight = mesh.sum([sum(counted), float(weight)] if reports_loss else [0.0, 0.0])
    return total_loss / max(total_weight, 1.0), int(total_weight), {}


def compute_next_logits(model: StagedArchitecture, tokens: Tensor, pipeline: Pipeline) -> Tensor | None:
    """What comes behind `tokens` (1, S) int64: the logits (V,) of the next one on the ranks of the last stage, and None
    on the others. All ranks of a pipeline call this."""
    found: list[Tensor] = []

    def run(part: nn.Module, batch: Batch) -> Tensor:
        output: Tensor = part(batch.inputs["tokens"])
        return output

    def end(logits: Tensor) -> Tensor:
        found.append(logits[0, -1])
        return logits

    batches = [Batch({"tokens": tokens}, 0)]
    pipeline.forward(1, _PipelineStageWork(pipeline, model, batches, run, end))
    return found[0] if found else None


class _PipelineStageWork:
    """What a pipeline asks for. `run` calls a stage as if it were the model, and so gets what that gives: hidden states
    but from the last; `end` takes what the last gives, and returns what the backward pass begins with."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: StagedArchitecture,
        batches: Sequence[Batch],
        run: Callable[[nn.Module, Batch], Tensor],
        end: Callable[[Tensor], Tensor],
        engine: ShardedEngine | None = None,
    ) -> None:
        self._plan, self._model, self._batches, self._run, self._end = pipeline.plan, model, batches, run, end
        self._engine, self._sequence = engine, pipeline.sequence
        self._modules: dict[int, list[tuple[str, nn.Module]]] = {}
        units = sharding_units(model)
        for stage in pipeline.stages:
            names = {f"layers.{layer}" for layer in self._plan.layers[stage]}
            names |= {"embed"} if stage == 0 else set()
            names |= {"head"} if stage == self._plan.last else set()
            self._modules[stage] = [unit for unit in units if unit[0] in names]

    def hidden_shape(self, micro_batch: int) -> Sequence[int]:
        rows, length = self._batches[micro_batch].inputs["tokens"].shape
        return rows, length // self._sequence, self._model.spec.hidden

    def forward(self, stage: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        part = functools.partial(self._model, stage=self._plan.layers[stage], hidden=hidden)
        output = self._run(cast(nn.Module, part), self._batches[micro_batch])
        return self._end(output) if stage == self._plan.last else output

    def parameters(self, stage: int) -> Iterator[nn.Parameter]:
        for _, module in self._modules[stage]:
            yield from (parameter for parameter in module.parameters() if parameter.requires_grad)
        if self._model.spec.tie_embeddings and stage in (0, self._plan.last):
            yield cast(nn.Parameter, self._model.embed.weight)

    def before_last_backward(self, stage: int) -> None:
        assert self._engine is not None
        # A tied weight is not among them: it is sent when the ends have added up what they have.
        self._engine.grad_accumulation.expect_last_backward([name for name, _ in self._modules[stage]])

    def after_weight_gradients(self, stage: int) -> None:
        assert self._engine is not None
        for name in (*(name for name, _ in self._modules[stage]), ""):
            self._engine.grads_ready(name)
