"""What is measured on data that nothing is learnt from."""

import functools
import time

from phalanx.comm.mesh import Mesh
from phalanx.core.events import Kind
from phalanx.workload.build import Parts
from phalanx.workload.pipeline_step import evaluate_pipeline
from phalanx.workload.sinks import Records
from phalanx.workload.step import evaluate
from phalanx.workload.step_hooks import Moments


def evaluate_all(
    parts: Parts, mesh: Mesh, records: Records, moments: Moments, step: int, limit: int
) -> dict[str, float]:
    """Loss on each held-out set, of `limit` sequences, weighted as in training; the same on all ranks."""
    moments.at("evaluate", step)
    losses: dict[str, float] = {}
    if not parts.held_out and limit:
        message = "no evaluation: the held-out documents make less than one sequence (data.held_out)"
        if parts.subject.spec is None:
            message = "no evaluation: held_out() of task.code gives no samples"
        records.event(Kind.WARNING, {"message": message})
    for name, held_out in parts.held_out.items():
        begun = time.perf_counter()
        batches = held_out.evaluation(parts.sharing.of_evaluation, limit)
        collated = ([parts.task.collate(samples) for samples in step_batches] for step_batches in batches)
        run = functools.partial(evaluate, moments=moments)
        if parts.parted.pipeline is not None:
            run = functools.partial(evaluate_pipeline, pipeline=parts.parted.pipeline)
        loss, tokens, scores = run(parts.model, parts.task, collated, mesh, parts.parted.speaks)
        seconds = time.perf_counter() - begun
        details = {"step": step, "set": name, "loss": loss, "tokens": tokens, "seconds": seconds}
        details |= {"scores": scores, "unit": parts.subject.unit}
        records.event(Kind.EVALUATED, details)
        losses[name] = loss
    return losses
