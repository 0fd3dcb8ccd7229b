"""A rank's training loop: one step after the other, and what belongs to a step. `train_rank.py` starts and ends it."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx.checkpoint.disk.save import CheckpointSaver
from phalanx.checkpoint.memory.store import SharedMemoryStore
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import RunError
from phalanx.core.faults import Fault
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, StepRecord
from phalanx.core.run_paths import RunPaths
from phalanx.engine.interface import StepOutcome
from phalanx.layout.model_shape import ModelSpec
from phalanx.optim.lr_schedule import learning_rate
from phalanx.parallel.parallelize import compute_dtype
from phalanx.tasks.task import Batch
from phalanx.trainer import anomalies, best_checkpoint
from phalanx.trainer.anomalies import AnomalyDetector, RollbackRequest
from phalanx.trainer.callback import Callback, CallbackRequest
from phalanx.trainer.callback_runner import CallbackRunner
from phalanx.trainer.checksums import ChecksumMonitor
from phalanx.trainer.metrics import StepRecorder, make_mfu_calculator
from phalanx.trainer.profile import StepProfiler
from phalanx.trainer.restore import ResumePoint, restore_state
from phalanx.trainer.skipped_batches import SkippedBatches
from phalanx.trainer.stop_request import StopRequest
from phalanx.trainer.stragglers import StragglerDetector
from phalanx.workload.build import RunComponents
from phalanx.workload.clock import clock_of
from phalanx.workload.sinks import RecordWriter
from phalanx.workload.step import evaluate, evaluate_pipeline, run_micro_batches, run_pipeline
from phalanx.workload.step_hooks import StepHooks

if TYPE_CHECKING:
    from phalanx.config.schema import Config


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass(frozen=True)
class TrainingJob:
    """What every rank of a run is told; `config` has no `auto` left, and a network of a user's own no `spec`.

    `train_tokens`: token sets with their weights in the mixture; `held_out_tokens`: those to evaluate on, by name;
    `faults`: what shall go wrong; `callbacks`: those of the program that started the run, beside the recipe's.
    """

    config: "Config"
    spec: ModelSpec | None
    paths: RunPaths
    train_tokens: list[tuple[Path, float]]
    held_out_tokens: dict[str, Path]
    faults: tuple[Fault, ...] = ()
    callbacks: tuple[Callback, ...] = ()


@dataclass
class TrainingLoop:
    job: TrainingJob
    placement: Placement
    mesh: Mesh
    components: RunComponents
    records: RecordWriter
    saver: CheckpointSaver
    stop: StopRequest
    step_hooks: StepHooks = field(default_factory=StepHooks)
    in_memory_store: SharedMemoryStore | None = None
    callbacks: CallbackRunner = field(default_factory=CallbackRunner)
    resume_point: ResumePoint | None = None
    skipped_batches: SkippedBatches = field(default_factory=SkippedBatches)
    rollback_request: RollbackRequest | None = None  # what training is to go back behind

    def __post_init__(self) -> None:
        self.profiler = StepProfiler(self.job.config.train, self.job.paths, self.mesh, self.records)
        self.clock = clock_of(self.mesh, [unit for _, unit in self.components.model.units()])
        self.stragglers = StragglerDetector(self.mesh.data.world)

    def restore(self) -> int:
        """Fill model and state from shared memory, the newest good checkpoint or the starting weights; returns the
        step."""
        self.step_hooks.enter_phase("restore")
        job, mesh = self.job, self.mesh
        self.resume_point = start = restore_state(
            job.config,
            self.placement,
            mesh,
            self.components,
            job.paths,
            self.records,
            self.in_memory_store,
            self.step_hooks.wrap_with_progress_touch,
        )
        if self.in_memory_store is not None:
            self.in_memory_store.set_metadata(self.checkpoint_header, self.collect_measurements)
        self.skipped_batches = SkippedBatches.from_header(start.header)
        self.resume_at(start.step, start.header, start.in_memory)
        if self.in_memory_store is not None:
            self.in_memory_store.remove_other_files()
        every = job.config.resilience.checksum_every
        self.checksum_monitor = ChecksumMonitor(
            every, self.components.engine, mesh, job.paths, self.records, start.step
        )
        return start.step

    def resume_at(self, step: int, header: dict[str, Any], in_memory: bool = False) -> None:
        """Go on behind `step`, whose state is there, from the header of its checkpoint, or that which was kept
        `in_memory`. No save may be running."""
        config, workload, engine = self.job.config, self.components.workload, self.components.engine
        group = JsonGroup(self.mesh.checkpoint)
        if engine.loss_scale is not None and "loss_scale" in header:
            engine.loss_scale.restore(header["loss_scale"])
        speed = make_mfu_calculator(workload.flops(), self.mesh, compute_dtype(config.train.dtype, self.mesh.device))
        positions, sharing = config.train.global_batch * workload.positions, self.components.work_split
        self.recorder = StepRecorder(
            self.mesh, speed, self.placement.attempt, int(header["tokens"]), positions, sharing
        )
        looks = config.resilience.on_spike != "off" and self.mesh.rank == 0
        losses = group.broadcast_object(anomalies.read_losses(self.job.paths, step) if looks else [])
        self.anomaly_detector = AnomalyDetector(config.resilience, [(int(of), float(loss)) for of, loss in losses])
        sharing.begin(step, header.get("division"), self.job.paths, group, self.records.write_event)
        self.best_evaluation = best_checkpoint.agree_on_best_evaluation(
            config.train.patience, step, self.job.paths, group
        )
        self.saver.protected = self.best_evaluation.step if config.checkpoint.best else None
        self.rollback_request = None
        if self.in_memory_store is not None:
            self.in_memory_store.tokens = int(header["tokens"])
        engine.resume_after(step)
        self.callbacks.resume_at(step, None if in_memory else header)

    @property
    def stop_reason(self) -> str | None:
        """Why training ends before its last step, if it does; the same on all ranks but for the wording."""
        return self.best_evaluation.stop_reason or self.callbacks.stop_reason

    def train_step(self, step: int) -> str | None:
        """One optimizer step: draw, forward and backward, exchange, update, commit, record. Returns the name of the
        signal by which any rank was asked to stop."""
        engine, optim = self.components.engine, self.job.config.optim
        self.clock.start()
        batches, data_s = self.draw(step)
        lr = learning_rate(optim, step)
        engine.begin_step(step, sum(batch.weight for batch in batches), lr, optim.clip_norm)
        loss_sum = self.run_passes(batches, step)
        self.exchange(step)
        # Behind the record of the step before: who commits this step waits for it, so that no record is ever missing.
        self.recorder.add_passes(step, loss_sum, lr, data_s)
        self.components.work_split.announce(asked=self.stop.signal is not None, requests=self.callbacks.take_requests())
        with self.step_hooks.phase("update", step):
            outcome = engine.finish_step()
        engine.commit(step)
        if self.in_memory_store is not None:
            self.in_memory_store.decide(step)
        self.recorder.add_step(step, loss_sum, outcome, lr, data_s, self.components.updates.lap())
        for kind, details in engine.take_notices():
            self.records.write_event(kind, details)
        asked, requests = self.components.work_split.settle()
        self.callbacks.apply_requests(requests)
        self.clock.stop()
        self.step_hooks.after_commit(engine, step)
        if is_due(step, self.checksum_monitor.every):
            self.rollback_request = self.checksum_monitor.check_step(step) or self.rollback_request
        return (self.stop.signal or "another rank's signal") if asked else None

    def draw(self, step: int) -> tuple[list[Batch], float]:
        """This rank's micro-batches of a step, on its device; and the seconds that it took to make them."""
        parts, begun = self.components, time.perf_counter()
        self.step_hooks.progress_page.set_largest_micro_batch(parts.work_split.largest_micro_batch(self.mesh.data.rank))
        with self.step_hooks.phase("data", step):
            drawn = parts.train.batches(step - 1, parts.work_split.division, self.skipped_batches.count_before(step))
            batches = [parts.task.collate(samples).to(self.mesh.device) for samples in drawn]
        return batches, time.perf_counter() - begun

    def exchange(self, step: int) -> None:
        """Tell the other ranks how long this one has worked, and write the record of the step before: while the device
        is busy with this step, its results can be read."""
        work_split = self.components.work_split
        self.step_hooks.enter_phase("exchange", step)
        with self.step_hooks.waiting_for("device"):
            mine = self.recorder.rank_values()
        work_split.exchange(step, self.clock.late, self.clock.lap(), mine)
        self.process_record(self.recorder.flush(work_split.gather_rows()))

    def run_passes(self, batches: Sequence[Batch], step: int) -> torch.Tensor:
        """Forward and backward of a step's micro-batches; the sum of the losses that this rank counts."""
        parts, config = self.components, self.job.config
        pipeline = parts.model_part.pipeline
        veto = self.anomaly_detector.make_spike_veto(
            step, sum(batch.weight for batch in batches), self.mesh, parts.model_part.reports_loss
        )
        run = functools.partial(run_micro_batches, veto=veto)
        if pipeline is not None:
            run = functools.partial(run_pipeline, pipeline=pipeline)
        loss_sum = run(
            parts.engine,
            parts.model,
            parts.task,
            batches,
            seed=config.train.seed,
            step=step,
            nominal_weight=parts.nominal_weight,
            step_hooks=self.step_hooks,
        )
        return loss_sum if parts.model_part.reports_loss else torch.zeros_like(loss_sum)

    def process_record(self, record: StepRecord | None) -> None:
        """Write a step's record, and see whether training goes well. Raises Diverged where it shall stop."""
        if record is None:
            return
        self.records.write_step(record, self.anomaly_detector.skip_reason(record))
        self.callbacks.dispatch()
        scale = self.components.engine.loss_scale
        self.rollback_request = self.rollback_request or self.anomaly_detector.check_record(
            record, None if scale is None else scale.floor
        )
        for copy, times, seconds in self.stragglers.observe(
            record.time, self.components.work_split.compute_copy_seconds()
        ):
            ranks = [
                rank
                for rank in range(self.mesh.world)
                if self.mesh.axes.coordinates(rank, self.mesh.world).data == copy
            ]
            nodes = sorted({self.mesh.topology.node_of[rank] for rank in ranks})
            self.records.write_event(
                EventKind.STRAGGLER, {"ranks": ranks, "nodes": nodes, "factor": times, "seconds": seconds}
            )

    def evaluate(self, step: int) -> None:
        config = self.job.config
        losses = evaluate_all(
            self.components, self.mesh, self.records, self.step_hooks, step, config.train.eval_sequences
        )
        if self.best_evaluation.update(step, losses) and config.checkpoint.best:
            self.saver.protected = step
        self.callbacks.dispatch()

    def needs_checkpoint(self, step: int) -> bool:
        """Whether a step has a checkpoint: its turn has come, it is the best so far, or a callback asks for it."""
        due = is_due(step, self.job.config.checkpoint.every)
        return due or self.saver.protected == step or CallbackRequest.SAVE in self.callbacks.due_requests

    def save(self, step: int, wait: bool = True) -> bool:
        """Start saving the state of `step`; training goes on meanwhile. A save that still runs is waited for; without
        `wait` none is started beside it, since a remote store that stalls must not stall training too."""
        self.step_hooks.enter_phase("checkpoint", step)
        if not wait and self.mesh.max([self.saver.busy()])[0]:
            reason = "the save before it is still running; a larger checkpoint.every leaves the store more time"
            self.records.write_event(EventKind.CHECKPOINT_SKIPPED, {"step": step, "reason": reason})
            return False
        dtype = "float64" if self.job.config.train.dtype == "fp64" else "float32"
        parameters = {name: (shape, dtype) for name, shape in self.components.model_part.shapes.items()}
        pieces = self.components.model_part.checkpoint_pieces(self.components.engine)
        header = self.checkpoint_header(step, self.recorder.total_tokens) | self.callbacks.to_header(step)
        self.saver.save(header, parameters, pieces, self.placement.attempt)
        return True

    def collect_measurements(self, step: int, outcome: StepOutcome) -> dict[str, Any] | None:
        """What this rank has measured of a step, for those who may have to go on from it in memory."""
        return self.recorder.collect_measurements(step, outcome)

    def checkpoint_header(self, step: int, tokens: int) -> dict[str, Any]:
        """What is kept of a step besides its state. In the sharded engine it is the lane that asks for it."""
        header: dict[str, Any] = {
            "step": step,
            "tokens": tokens,
            **self.skipped_batches.to_header(step),
            "attempt": self.placement.attempt,
            "world": self.mesh.world,
            "nodes": list(self.mesh.topology.node_of),
            "division": self.components.work_split.to_header(),
        }
        if self.components.engine.loss_scale is not None:
            header["loss_scale"] = self.components.engine.loss_scale.state()
        return header

    def finish_saving(self, step: int) -> None:
        """Wait for the last save. Raises RunError when it failed: a run whose last state is lost has not come to its
        end, and starting it again once there is room brings it there."""
        self.step_hooks.enter_phase("ending", step)
        self.saver.close()
        last = self.saver.outcome
        if last is not None and not last.saved:
            raise RunError(
                f"the last checkpoint, of step {step}, was not saved: {last.reason}; then start the run again, which "
                "goes on from the checkpoint before"
            )


# ---------------------------------------------------------------- what is measured on data that nothing is learnt from


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
