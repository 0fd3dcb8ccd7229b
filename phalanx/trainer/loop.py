"""The training loop of a rank. `train_rank.py` starts and ends it."""

import functools
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import RunError
from phalanx.core.records import EventKind, ExpertStepRecord, Fp8StepRecord, StepRecord
from phalanx.engine.interface import StepOutcome
from phalanx.optim.lr_schedule import learning_rate
from phalanx.parallel.model_buffers import RunningStatistics
from phalanx.parallel.parallelize import compute_dtype
from phalanx.tasks.task import Batch
from phalanx.trainer import anomalies, best_checkpoint
from phalanx.trainer.anomalies import AnomalyDetector, RollbackRequest
from phalanx.trainer.callback import CallbackRequest
from phalanx.trainer.checksums import ChecksumMonitor
from phalanx.trainer.metrics import StepRecorder, make_mfu_calculator
from phalanx.trainer.profile import StepProfiler
from phalanx.trainer.restore import ResumePoint, restore_state
from phalanx.trainer.setup import TrainingSetup
from phalanx.trainer.skipped_batches import SkippedBatches
from phalanx.trainer.stop_request import SaveRequestFile, make_start_limit
from phalanx.trainer.stragglers import StragglerDetector
from phalanx.workload.clock import clock_of
from phalanx.workload.step import evaluate, evaluate_pipeline, run_micro_batches, run_pipeline

if TYPE_CHECKING:
    pass


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class TrainingLoop:
    """The training loop of a run on this rank, with its state between steps."""

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self.resume_point: ResumePoint | None = None
        self.skipped_batches = SkippedBatches()
        self.running_statistics = RunningStatistics(setup.components.model)
        self.rollback_request: RollbackRequest | None = None  # set when training must roll back
        self.profiler = StepProfiler(setup.job.config.train, setup.job.paths, setup.mesh, setup.records)
        self.clock = clock_of(setup.mesh, [unit for _, unit in setup.components.model.units()])
        self.start_limit = make_start_limit(setup.job.config.train, setup.job.paths, setup.mesh.rank)
        self.save_request = SaveRequestFile(setup.job.paths.save_request, setup.mesh.rank)
        self.stragglers = StragglerDetector(setup.mesh.axes.count_row_groups(setup.mesh.world))

    def restore(self) -> int:
        """Restore model and state from shared memory, the newest valid checkpoint or the initial weights; returns
        the step."""
        setup = self.setup
        setup.step_hooks.enter_phase("restore")
        job, mesh = setup.job, setup.mesh
        self.resume_point = start = restore_state(
            job.config,
            setup.placement,
            mesh,
            setup.components,
            job.paths,
            setup.records,
            setup.in_memory_store,
            setup.step_hooks.wrap_with_progress_touch,
        )
        if setup.in_memory_store is not None:
            setup.in_memory_store.set_metadata(self.checkpoint_header, self.collect_measurements)
        self.skipped_batches = SkippedBatches.from_header(start.header)
        self.resume_at(start.step, start.header, start.in_memory)
        if setup.in_memory_store is not None:
            setup.in_memory_store.remove_other_files()
        every = job.config.resilience.checksum_every
        self.checksum_monitor = ChecksumMonitor(
            every, setup.components.engine, mesh, job.paths, setup.records, start.step
        )
        return start.step

    def resume_at(self, step: int, header: dict[str, Any], in_memory: bool = False) -> None:
        """Resume after `step`, whose state is loaded, from the header of its checkpoint, or the one kept
        `in_memory`. No save may be running."""
        setup = self.setup
        config, workload, engine = setup.job.config, setup.components.workload, setup.components.engine
        group = JsonGroup(setup.mesh.checkpoint)
        if engine.loss_scale is not None and "loss_scale" in header:
            engine.loss_scale.restore(header["loss_scale"])
        if setup.components.expert_balance is not None:
            setup.components.expert_balance.restore(header)
        if setup.components.fp8_history is not None:
            setup.components.fp8_history.restore(header)
        speed = make_mfu_calculator(workload.flops(), setup.mesh, compute_dtype(config.train.dtype, setup.mesh.device))
        positions, sharing = config.train.global_batch * workload.positions, setup.components.work_split
        self.recorder = StepRecorder(
            setup.mesh, speed, setup.placement.attempt, int(header["tokens"]), positions, sharing
        )
        looks = config.resilience.on_spike != "off" and setup.mesh.rank == 0
        losses = group.broadcast_object(anomalies.read_losses(setup.job.paths, step) if looks else [])
        self.anomaly_detector = AnomalyDetector(config.resilience, [(int(of), float(loss)) for of, loss in losses])
        sharing.begin(step, header.get("division"), setup.job.paths, group, setup.records.write_event)
        self.best_evaluation = best_checkpoint.agree_on_best_evaluation(
            config.train.patience, step, setup.job.paths, group
        )
        setup.saver.protected = self.best_evaluation.step if config.checkpoint.best else None
        self.rollback_request = None
        if setup.in_memory_store is not None:
            setup.in_memory_store.tokens = int(header["tokens"])
        if step:
            self.running_statistics.restore(header)
        self.running_statistics.snapshot(step)
        engine.resume_after(step)
        setup.callbacks.resume_at(step, None if in_memory else header)

    def find_early_stop(self) -> str | None:
        """Why training ends before the first step of this attempt: the name of a signal that any rank got. Nothing is
        computed then that may take longer than a machine lives that will soon be gone. Collective."""
        stop = self.setup.stop.signal
        asked = self.setup.mesh.max([float(stop is not None)])[0] > 0
        return (stop or "another rank's request") if asked else None

    @property
    def stop_reason(self) -> str | None:
        """Why training ends before its last step, or None; the same on all ranks except for the wording."""
        return self.best_evaluation.stop_reason or self.setup.callbacks.stop_reason

    def train_step(self, step: int) -> str | None:
        """One optimizer step: draw, forward and backward, exchange, update, commit, record. Returns the reason to
        end after it, or None: the name of a signal that any rank got, or a key of the recipe."""
        setup = self.setup
        engine, optim = setup.components.engine, setup.job.config.optim
        self.clock.start()
        batches, data_s = self.draw(step)
        lr = learning_rate(optim, step)
        engine.begin_step(step, sum(batch.weight for batch in batches), lr, optim.clip_norm)
        loss_sum = self.run_passes(batches, step)
        self.exchange(step)
        # After the record of the previous step: the thread that commits this step waits for it, so that no record is
        # lost.
        self.recorder.add_passes(step, loss_sum, lr, data_s)
        stop = setup.stop.signal or self.start_limit.find_reason(step)
        wanted = setup.callbacks.take_requests()
        if self.save_request.take():
            wanted |= CallbackRequest.SAVE
        setup.components.work_split.announce(asked=stop is not None, requests=wanted)
        with setup.step_hooks.phase("update", step):
            outcome = engine.finish_step()
        if setup.components.expert_balance is not None:
            setup.components.expert_balance.note_outcome(outcome)
        if setup.components.fp8_history is not None:
            setup.components.fp8_history.note_outcome(outcome)
        engine.commit(step)
        if setup.in_memory_store is not None:
            setup.in_memory_store.decide(step)
        self.recorder.add_step(step, loss_sum, outcome, lr, data_s, setup.components.updates.lap())
        for kind, details in engine.take_notices():
            setup.records.write_event(kind, details)
        asked, requests = setup.components.work_split.settle()
        setup.callbacks.apply_requests(requests)
        self.clock.stop()
        setup.step_hooks.after_commit(engine, step)
        if is_due(step, self.checksum_monitor.every):
            self.rollback_request = self.checksum_monitor.check_step(step) or self.rollback_request
        return (stop or "another rank's request") if asked else None

    def draw(self, step: int) -> tuple[list[Batch], float]:
        """This rank's micro-batches of a step, on its device; and the seconds spent on making them."""
        setup = self.setup
        parts, begun = setup.components, time.perf_counter()
        setup.step_hooks.progress_page.set_largest_micro_batch(
            parts.work_split.largest_micro_batch(setup.mesh.row_group)
        )
        with setup.step_hooks.phase("data", step):
            drawn = parts.train.batches(
                step - 1, parts.work_split.divide_step(step), self.skipped_batches.count_before(step)
            )
            batches = [parts.task.collate(samples).to(setup.mesh.device) for samples in drawn]
        return batches, time.perf_counter() - begun

    def exchange(self, step: int) -> None:
        """Exchange the ranks' compute times, and write the record of the previous step: while the device computes
        this step, the previous results can be read."""
        setup = self.setup
        work_split = setup.components.work_split
        setup.step_hooks.enter_phase("exchange", step)
        with setup.step_hooks.waiting_for("device"):
            mine = self.recorder.rank_values()
        work_split.exchange(step, self.clock.late, self.clock.lap(), mine)
        self.process_record(self.recorder.flush(work_split.gather_rows()))

    def run_passes(self, batches: Sequence[Batch], step: int) -> torch.Tensor:
        """Run forward and backward passes of a step's micro-batches; returns the sum of this rank's losses."""
        setup = self.setup
        parts, config = setup.components, setup.job.config
        pipeline = parts.model_part.pipeline
        veto = self.anomaly_detector.make_spike_veto(
            step, sum(batch.weight for batch in batches), setup.mesh, parts.model_part.reports_loss
        )
        run = functools.partial(run_micro_batches, veto=veto)
        if pipeline is not None:
            run = functools.partial(run_pipeline, pipeline=pipeline)
        experts, fp8 = parts.expert_balance, parts.fp8_history
        if fp8 is not None:
            fp8.begin()
        if experts is not None:
            experts.begin(step, batches, parts.task, config.train.seed)
        loss_sum = run(
            parts.engine,
            parts.model,
            parts.task,
            batches,
            seed=config.train.seed,
            step=step,
            nominal_weight=parts.nominal_weight,
            step_hooks=setup.step_hooks,
        )
        if experts is not None:
            experts.end(step)
        if fp8 is not None:
            fp8.end(step)
        self.running_statistics.snapshot(step)
        return loss_sum if parts.model_part.reports_loss else torch.zeros_like(loss_sum)

    def process_record(self, record: StepRecord | None) -> None:
        """Write a step's record, and check training health. Raises Diverged if training must stop."""
        setup = self.setup
        if record is None:
            return
        experts, fp8 = setup.components.expert_balance, setup.components.fp8_history
        if fp8 is not None:
            record = Fp8StepRecord(**vars(record), fp8_clipped=fp8.count_clipped(record.step))
        if experts is not None and (load := experts.describe(record.step)) is not None:
            record = ExpertStepRecord(**vars(record), expert_entropy=load[0], expert_max_load=load[1])
        setup.records.write_step(record, self.anomaly_detector.skip_reason(record))
        setup.callbacks.dispatch()
        scale = setup.components.engine.loss_scale
        self.rollback_request = self.rollback_request or self.anomaly_detector.check_record(
            record, None if scale is None else scale.floor
        )
        for copy, times, seconds in self.stragglers.observe(
            record.time, setup.components.work_split.compute_copy_seconds()
        ):
            ranks = [
                rank for rank in range(setup.mesh.world) if setup.mesh.axes.row_group(rank, setup.mesh.world) == copy
            ]
            nodes = sorted({setup.mesh.topology.node_of[rank] for rank in ranks})
            setup.records.write_event(
                EventKind.STRAGGLER, {"ranks": ranks, "nodes": nodes, "factor": times, "seconds": seconds}
            )

    def evaluate(self, step: int) -> None:
        setup = self.setup
        config, fp8 = setup.job.config, setup.components.fp8_history
        with setup.step_hooks.phase("evaluate", step):
            if fp8 is not None:
                fp8.settle()
            losses = evaluate_all(self.setup, step, config.train.eval_sequences)
        if self.best_evaluation.update(step, losses) and config.checkpoint.best:
            setup.saver.protected = step
        setup.callbacks.dispatch()

    def send_weights(self) -> None:
        """Pass the weights to the callbacks. Collective."""
        parts = self.setup.components
        moved = {} if parts.expert_balance is None else parts.expert_balance.corrections()
        self.setup.callbacks.send_weights(parts.engine, moved)

    def needs_checkpoint(self, step: int) -> bool:
        """Whether a step is checkpointed: by `checkpoint.every`, as the best so far, or at a callback's request."""
        setup = self.setup
        due = is_due(step, setup.job.config.checkpoint.every)
        return due or setup.saver.protected == step or CallbackRequest.SAVE in setup.callbacks.due_requests

    def save(self, step: int, wait: bool = True) -> bool:
        """Start saving the state of `step` in the background. If the previous save is running, wait for it, or
        without `wait` skip this one, so that a stalled remote store does not stall training."""
        setup = self.setup
        with setup.step_hooks.phase("checkpoint", step):
            if not wait and setup.mesh.max([setup.saver.busy()])[0]:
                reason = "the previous save is still running; a larger checkpoint.every gives the store more time"
                setup.records.write_event(EventKind.CHECKPOINT_SKIPPED, {"step": step, "reason": reason})
                return False
            dtype = "float64" if setup.job.config.train.dtype == "fp64" else "float32"
            parameters = {name: (shape, dtype) for name, shape in setup.components.model_part.shapes.items()}
            pieces = setup.components.model_part.checkpoint_pieces(setup.components.engine)
            if setup.components.expert_balance is not None:
                pieces = setup.components.expert_balance.put_into(pieces)
            header = self.checkpoint_header(step, self.recorder.total_tokens) | setup.callbacks.to_header(step)
            setup.saver.save(header, parameters, pieces, setup.placement.attempt)
            return True

    def collect_measurements(self, step: int, outcome: StepOutcome) -> dict[str, Any] | None:
        """This rank's measurements of a step, for an attempt that resumes from it in memory."""
        return self.recorder.collect_measurements(step, outcome)

    def checkpoint_header(self, step: int, tokens: int, outcome: StepOutcome | None = None) -> dict[str, Any]:
        """The header of an in-memory checkpoint, with the step's `outcome`. In the sharded engine the
        communication thread calls it."""
        setup = self.setup
        header: dict[str, Any] = {
            "step": step,
            "tokens": tokens,
            **self.skipped_batches.to_header(step),
            "attempt": setup.placement.attempt,
            "world": setup.mesh.world,
            "nodes": list(setup.mesh.topology.node_of),
            "division": setup.components.work_split.to_header(),
            **self.running_statistics.to_header(step),
        }
        if setup.components.engine.loss_scale is not None:
            header["loss_scale"] = setup.components.engine.loss_scale.state()
        if setup.components.expert_balance is not None:
            header |= setup.components.expert_balance.to_header(step, outcome)
        if setup.components.fp8_history is not None:
            header |= setup.components.fp8_history.to_header(step, outcome)
        return header

    def finish_saving(self, step: int) -> None:
        """Wait for the last save. Raises RunError if it failed: without its last state a run is not finished, and
        a restart with free disk space finishes it."""
        setup = self.setup
        setup.step_hooks.enter_phase("ending", step)
        setup.saver.close()
        last = setup.saver.outcome
        if last is not None and not last.saved:
            raise RunError(
                f"the last checkpoint, of step {step}, was not saved: {last.reason}; then restart the run, which "
                "resumes from the previous checkpoint"
            )


# --------------------------------------------------------------------------------------------- evaluation


def evaluate_all(setup: TrainingSetup, step: int, limit: int) -> dict[str, float]:
    """Evaluation loss on each held-out set, over `limit` sequences, weighted as in training; the same on all ranks."""
    components, records = setup.components, setup.records
    losses: dict[str, float] = {}
    if components.expert_balance is not None:
        components.expert_balance.use_last_step()
    if not components.held_out and limit:
        message = "no evaluation: the held-out documents are shorter than one sequence (data.held_out)"
        if components.workload.spec is None:
            message = "no evaluation: held_out() of task.code gives no samples"
        records.write_event(EventKind.WARNING, {"message": message})
    for name, held_out in components.held_out.items():
        begun = time.perf_counter()
        batches = held_out.evaluation_batches(components.work_split.split_evaluation, limit)
        collated: Iterable[list[Batch]] = (
            [components.task.collate(samples) for samples in step_batches] for step_batches in batches
        )
        if components.fp8_ranges is not None:
            collated = components.fp8_ranges.during_first(collated)
        run = functools.partial(evaluate, step_hooks=setup.step_hooks)
        if components.model_part.pipeline is not None:
            run = functools.partial(evaluate_pipeline, pipeline=components.model_part.pipeline)
        loss, tokens, scores = run(
            components.model, components.task, collated, setup.mesh, components.model_part.reports_loss
        )
        seconds = time.perf_counter() - begun
        details = {"step": step, "set": name, "loss": loss, "tokens": tokens, "seconds": seconds}
        details |= {"scores": scores, "unit": components.workload.unit}
        if components.fp8_ranges is not None:
            details["fp8"] = components.fp8_ranges.describe(setup.mesh)
        experts = components.expert_balance
        if experts is not None and not losses and (load := experts.describe_experts(step)) is not None:
            details["experts"] = load
        records.write_event(EventKind.EVALUATED, details)
        losses[name] = loss
    return losses
