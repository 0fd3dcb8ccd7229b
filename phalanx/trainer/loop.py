"""A rank's training loop: one step after the other, and what belongs to a step. `train_rank.py` starts and ends it."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx.checkpoint.disk.save import Saver
from phalanx.checkpoint.memory.store import Memory
from phalanx.comm.json_objects import JsonGroup
from phalanx.comm.mesh import Mesh
from phalanx.core.errors import RunError
from phalanx.core.events import Kind
from phalanx.core.faults import Fault
from phalanx.core.placement import Placement
from phalanx.core.records import StepRecord
from phalanx.core.run_paths import RunPaths
from phalanx.engine.interface import Outcome
from phalanx.layout.model_shape import ModelSpec
from phalanx.optim.lr_schedule import learning_rate
from phalanx.parallel.parallelize import compute_dtype
from phalanx.system.trace import phase
from phalanx.tasks.task import Batch
from phalanx.trainer import anomalies, best_checkpoint
from phalanx.trainer.anomalies import Anomalies, Wrong
from phalanx.trainer.callback import Callback, Request
from phalanx.trainer.callback_runner import Hooks
from phalanx.trainer.checksums import Checks
from phalanx.trainer.evaluation import evaluate_all
from phalanx.trainer.metrics import Recorder, speed_of
from phalanx.trainer.profile import Inspection
from phalanx.trainer.restore import Start, restore
from phalanx.trainer.skipped_batches import Skips
from phalanx.trainer.stop_request import StopRequest
from phalanx.trainer.stragglers import Stragglers
from phalanx.workload.build import Parts
from phalanx.workload.clock import clock_of
from phalanx.workload.pipeline_step import run_pipeline
from phalanx.workload.sinks import Records
from phalanx.workload.step import run_micro_batches
from phalanx.workload.step_hooks import Moments

if TYPE_CHECKING:
    from phalanx.config.schema import Config


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass(frozen=True)
class Run:
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
class Loop:
    job: Run
    placement: Placement
    mesh: Mesh
    parts: Parts
    records: Records
    saver: Saver
    stop: StopRequest
    moments: Moments = field(default_factory=Moments)
    memory: Memory | None = None
    hooks: Hooks = field(default_factory=Hooks)
    start: Start | None = None
    skips: Skips = field(default_factory=Skips)
    wrong: Wrong | None = None  # what training is to go back behind

    def __post_init__(self) -> None:
        self.inside = Inspection(self.job.config.train, self.job.paths, self.mesh, self.records)
        self.clock = clock_of(self.mesh, [unit for _, unit in self.parts.model.units()])
        self.stragglers = Stragglers(self.mesh.data.world)

    def restore(self) -> int:
        """Fill model and state from shared memory, the newest good checkpoint or the starting weights; returns the
        step."""
        self.moments.at("restore")
        job, mesh = self.job, self.mesh
        self.start = start = restore(
            job.config, self.placement, mesh, self.parts, job.paths, self.records, self.memory, self.moments.beating
        )
        if self.memory is not None:
            self.memory.describe(self.header, self.kept)
        self.skips = Skips.of(start.header)
        self.begin_at(start.step, start.header, start.in_memory)
        if self.memory is not None:
            self.memory.forget_others()
        every = job.config.resilience.checksum_every
        self.checks = Checks(every, self.parts.engine, mesh, job.paths, self.records, start.step)
        return start.step

    def begin_at(self, step: int, header: dict[str, Any], in_memory: bool = False) -> None:
        """Go on behind `step`, whose state is there, from the header of its checkpoint, or that which was kept
        `in_memory`. No save may be running."""
        config, subject, engine = self.job.config, self.parts.subject, self.parts.engine
        group = JsonGroup(self.mesh.checkpoint)
        if engine.loss_scale is not None and "loss_scale" in header:
            engine.loss_scale.restore(header["loss_scale"])
        speed = speed_of(subject.flops(), self.mesh, compute_dtype(config.train.dtype, self.mesh.device))
        positions, sharing = config.train.global_batch * subject.positions, self.parts.sharing
        self.recorder = Recorder(self.mesh, speed, self.placement.attempt, int(header["tokens"]), positions, sharing)
        looks = config.resilience.on_spike != "off" and self.mesh.rank == 0
        losses = group.broadcast_object(anomalies.recorded(self.job.paths, step) if looks else [])
        self.anomalies = Anomalies(config.resilience, [(int(of), float(loss)) for of, loss in losses])
        sharing.begin(step, header.get("division"), self.job.paths, group, self.records.event)
        self.best = best_checkpoint.recorded(config.train.patience, step, self.job.paths, group)
        self.saver.spared = self.best.step if config.checkpoint.best else None
        self.wrong = None
        if self.memory is not None:
            self.memory.tokens = int(header["tokens"])
        engine.begin_after(step)
        self.hooks.begin(step, None if in_memory else header)

    @property
    def over(self) -> str | None:
        """Why training ends before its last step, if it does; the same on all ranks but for the wording."""
        return self.best.over or self.hooks.over

    def train_one(self, step: int) -> str | None:
        """One optimizer step. Returns the name of the signal by which any rank was asked to stop."""
        parts, config = self.parts, self.job.config
        begun = time.perf_counter()
        self.clock.start()
        self.moments.at("data", step)
        self.moments.pulse.runs(parts.sharing.largest(self.mesh.data.rank))
        with phase("data"):
            drawn = parts.train.batches(step - 1, parts.sharing.division, self.skips.before(step))
            batches = [parts.task.collate(samples).to(self.mesh.device) for samples in drawn]
        data_s = time.perf_counter() - begun
        lr = learning_rate(config.optim, step)
        parts.engine.begin_step(step, sum(batch.weight for batch in batches), lr, config.optim.clip_norm)
        loss_sum = self.passes(batches, step)
        # The device is busy with this step now: a good moment to read the results of the one before.
        self.moments.at("exchange", step)
        with self.moments.waiting("device"):
            mine = self.recorder.mine()
        parts.sharing.exchange(step, self.clock.late, self.clock.lap(), mine)
        self.note(self.recorder.flush(parts.sharing.rows()))
        # Behind the record of the step before: who commits this step waits for it, so that no record is ever missing.
        self.recorder.computed(step, loss_sum, lr, data_s)
        parts.sharing.announce(asked=self.stop.signal is not None, requests=self.hooks.take())
        self.moments.at("update", step)
        with phase("update"):
            outcome = parts.engine.finish_step()
        parts.engine.commit(step)
        if self.memory is not None:
            self.memory.decide(step)
        self.recorder.measured(step, loss_sum, outcome, lr, data_s, parts.updates.lap())
        for kind, details in parts.engine.notices():
            self.records.event(kind, details)
        asked, requests = parts.sharing.settle()
        self.hooks.agree(requests)
        self.clock.stop()
        self.moments.committed(parts.engine, step)
        if is_due(step, self.checks.every):
            self.wrong = self.checks.look(step) or self.wrong
        return (self.stop.signal or "another rank's signal") if asked else None

    def passes(self, batches: Sequence[Batch], step: int) -> torch.Tensor:
        """Forward and backward of a step's micro-batches; the sum of the losses that this rank counts."""
        parts, config = self.parts, self.job.config
        pipeline = parts.parted.pipeline
        veto = self.anomalies.veto(step, sum(batch.weight for batch in batches), self.mesh, parts.parted.speaks)
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
            moments=self.moments,
        )
        return loss_sum if parts.parted.speaks else torch.zeros_like(loss_sum)

    def note(self, record: StepRecord | None) -> None:
        """Write a step's record, and see whether training goes well. Raises Diverged where it shall stop."""
        if record is None:
            return
        self.records.step(record, self.anomalies.why(record))
        self.hooks.tell()
        scale = self.parts.engine.loss_scale
        self.wrong = self.wrong or self.anomalies.judge(record, None if scale is None else scale.floor)
        for copy, times, seconds in self.stragglers.observe(record.time, self.parts.sharing.paces()):
            ranks = [
                rank for rank in range(self.mesh.world) if self.mesh.axes.place(rank, self.mesh.world).data == copy
            ]
            nodes = sorted({self.mesh.topology.node_of[rank] for rank in ranks})
            self.records.event(Kind.SLOW, {"ranks": ranks, "nodes": nodes, "factor": times, "seconds": seconds})

    def evaluate(self, step: int) -> None:
        config = self.job.config
        losses = evaluate_all(self.parts, self.mesh, self.records, self.moments, step, config.train.eval_sequences)
        if self.best.take(step, losses) and config.checkpoint.best:
            self.saver.spared = step
        self.hooks.tell()

    def is_kept(self, step: int) -> bool:
        """Whether a step has a checkpoint: its turn has come, it is the best so far, or a callback asks for it."""
        due = is_due(step, self.job.config.checkpoint.every)
        return due or self.saver.spared == step or Request.SAVE in self.hooks.due

    def save(self, step: int, wait: bool = True) -> bool:
        """Start saving the state of `step`; training goes on meanwhile. A save that still runs is waited for; without
        `wait` none is started beside it, since a remote store that stalls must not stall training too."""
        self.moments.at("checkpoint", step)
        if not wait and self.mesh.max([self.saver.busy()])[0]:
            reason = "the save before it is still running; a larger checkpoint.every leaves the store more time"
            self.records.event(Kind.CHECKPOINT_SKIPPED, {"step": step, "reason": reason})
            return False
        dtype = "float64" if self.job.config.train.dtype == "fp64" else "float32"
        parameters = {name: (shape, dtype) for name, shape in self.parts.parted.shapes.items()}
        pieces = self.parts.parted.pieces(self.parts.engine)
        header = self.header(step, self.recorder.total_tokens) | self.hooks.header(step)
        self.saver.save(header, parameters, pieces, self.placement.attempt)
        return True

    def kept(self, step: int, outcome: Outcome) -> dict[str, Any] | None:
        """What this rank has measured of a step, for those who may have to go on from it in memory."""
        return self.recorder.kept(step, outcome)

    def header(self, step: int, tokens: int) -> dict[str, Any]:
        """What is kept of a step besides its state. In the sharded engine it is the lane that asks for it."""
        header: dict[str, Any] = {
            "step": step,
            "tokens": tokens,
            **self.skips.header(step),
            "attempt": self.placement.attempt,
            "world": self.mesh.world,
            "nodes": list(self.mesh.topology.node_of),
            "division": self.parts.sharing.header(),
        }
        if self.parts.engine.loss_scale is not None:
            header["loss_scale"] = self.parts.engine.loss_scale.state()
        return header

    def finish_saving(self, step: int) -> None:
        """Wait for the last save. Raises RunError when it failed: a run whose last state is lost has not come to its
        end, and starting it again once there is room brings it there."""
        self.moments.at("ending", step)
        self.saver.close()
        last = self.saver.outcome
        if last is not None and not last.saved:
            raise RunError(
                f"the last checkpoint, of step {step}, was not saved: {last.reason}; then start the run again, which "
                "goes on from the checkpoint before"
            )
