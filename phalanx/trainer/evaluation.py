"""What is measured on data that nothing is learnt from."""

import functools
import time

from phalanx.comm.mesh import Mesh
from phalanx.core.events import EventKind
from phalanx.workload.build import RunComponents
from phalanx.workload.pipeline_step import evaluate_pipeline
from phalanx.workload.sinks import RecordWriter
from phalanx.workload.step import evaluate
from phalanx.workload.step_hooks import StepHooks


def evaluate_all(
    components: RunComponents, mesh: Mesh, records: RecordWriter, step_hooks: StepHooks, step: int, limit: int
) -> dict[str, float]:
    """Loss on each held-out set, of `limit` sequences, weighted as in training; the same on all ranks."""
    step_hooks.enter_phase("evaluate", step)
    losses: dict[str, float] = {}
    if not components.held_out and limit:
        message = "no evaluation: the held-out documents make less than one sequence (data.held_out)"
        if components.workload.spec is None:
            message = "no evaluation: held_out() of task.code gives no samples"
        records.write_event(EventKind.WARNING, {"message": message})
    for name, held_out in components.held_out.items():
        begun = time.perf_counter()
        batches = held_out.evaluation_batches(components.work_split.split_evaluation, limit)
        collated = ([components.task.collate(samples) for samples in step_batches] for step_batches in batches)
        run = functools.partial(evaluate, step_hooks=step_hooks)
        if components.model_part.pipeline is not None:
            run = functools.partial(evaluate_pipeline, pipeline=components.model_part.pipeline)
        loss, tokens, scores = run(
            components.model, components.task, collated, mesh, components.model_part.reports_loss
        )
        seconds = time.perf_counter() - begun
        details = {"step": step, "set": name, "loss": loss, "tokens": tokens, "seconds": seconds}
        details |= {"scores": scores, "unit": components.workload.unit}
        records.write_event(EventKind.EVALUATED, details)
        losses[name] = loss
    return losses
