"""The training loop: placement in, exit code out. It reads no environment and spawns nothing."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx import accelerator, fencing, mirror, pulse
from phalanx.axes import axes_of
from phalanx.checkpoint.disk import Saver
from phalanx.checkpoint.memory import Memory
from phalanx.comm.mesh import Mesh, join
from phalanx.comm.objects import JsonGroup
from phalanx.errors import OutOfMemory, RunError
from phalanx.faults import Fault
from phalanx.models.spec import ModelSpec
from phalanx.optim.engine import Outcome
from phalanx.optim.schedule import learning_rate
from phalanx.parallel.apply import compute_dtype
from phalanx.phases import phase
from phalanx.records import ExitCode, Kind, Placement, RunPaths, StepRecord
from phalanx.tasks.task import Batch
from phalanx.train import anomalies, best, stage_lengths
from phalanx.train.anomalies import Anomalies, Wrong
from phalanx.train.build import Parts, build
from phalanx.train.callback import Callback, Request
from phalanx.train.checksums import Checks
from phalanx.train.clock import clock_of
from phalanx.train.device_marks import marks_of
from phalanx.train.engines import agreed
from phalanx.train.evaluation import evaluate_all
from phalanx.train.hooks import Hooks, hooks_of
from phalanx.train.injection import injector_of
from phalanx.train.measure import know, remembering
from phalanx.train.metrics import Recorder, speed_of
from phalanx.train.moments import Moments
from phalanx.train.profile import Inspection
from phalanx.train.restore import Start, is_due, make_up, memory_of, restore
from phalanx.train.rollback import go_back
from phalanx.train.sinks import Records, Sink
from phalanx.train.skips import Skips
from phalanx.train.staged import run_pipeline
from phalanx.train.state_shares import keeping_of, settled_weights
from phalanx.train.step import run_micro_batches
from phalanx.train.stopping import StopRequest, asked_to_stop
from phalanx.train.stragglers import Stragglers
from phalanx.train.subject import subject_of
from phalanx.train.unlike_devices import sharing_a_device, unlike_kernels

if TYPE_CHECKING:
    from phalanx.config import Config


STORE_OPERATIONS = 10  # of a rank that the others wait for in a save, each tried for resilience.storage_timeout_s


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


def run(job: Run, placement: Placement, sinks: Sequence[Sink] = (), attempt: int | None = None) -> ExitCode:
    """Train from the newest checkpoint of the run folder, or from the start, to the last step or a request to stop.

    `attempt` is rank 0's count of attempts, where whoever started the ranks keeps none; other ranks give 0 then.
    Raises PhalanxError for what a user can mend, and whatever a broken collective or device raises.
    """
    config = job.config
    threads = accelerator.threads_of(placement.threads, placement.local_world)
    device = torch.device(placement.device)
    accelerator.use(device, threads)
    accelerator.set_arithmetic(device, tf32=config.train.tf32, deterministic=config.train.deterministic)
    axes = axes_of(config)
    storage_s = 0.0 if job.paths.url is None else STORE_OPERATIONS * config.resilience.storage_timeout_s
    beats = pulse.opened(placement.shared, placement.rank, placement.attempt)
    with asked_to_stop() as stop, join(placement, config.comm.timeout_s, storage_s, axes) as mesh:
        placement = dataclasses.replace(placement, keeps=bool(mesh.min([float(placement.keeps)])[0]))
        if attempt is not None:
            placement = dataclasses.replace(placement, attempt=int(mesh.max([attempt])[0]))
        job = dataclasses.replace(job, config=agreed(job.config, mesh))
        config = job.config
        hooks = hooks_of(config, job.callbacks, job.paths, placement, mesh)
        records = Records(job.paths, placement.attempt, [*sinks, hooks], active=mesh.rank == 0)
        injector = injector_of(job.faults, job.paths, placement, records)
        moments = Moments(beats, injector, marks_of(device, beats, placement, config)).watching(mesh)
        hooks.moments = moments
        group, keep = JsonGroup(mesh.checkpoint), config.checkpoint.keep
        may_commit = functools.partial(mirror.before_commit, job.paths, {})
        if job.paths.url is None:
            may_commit = functools.partial(fencing.before_commit, job.paths, placement.attempt, placement.epoch)
        tell = injector.noting(records.event)
        saver = Saver(job.paths.checkpoints, mesh.rank, group, keep, tell, may_commit, injector.writing)
        subject = subject_of(config, job.spec, job.paths)
        for message in (*sharing_a_device(mesh), *unlike_kernels(mesh, config.train.dtype, subject.spec)):
            records.event(Kind.WARNING, {"message": message})
        same = placement.kept is not None and placement.nodes == 1  # where it has been all the time
        keeping, made = keeping_of(config, placement, mesh), functools.cache(subject.model)
        weights = settled_weights(config, subject, mesh, placement.local_world, job.paths, records, same, keeping, made)
        speeds, link = know(config, subject, placement, mesh, job.paths, records, weights)
        config = stage_lengths.settled(config, subject, mesh, job.paths, records)
        memory = memory_of(config, placement, mesh, job.paths, records)
        # A task of a user's own, which may remember what it was asked to measure, is asked anew.
        again = None if subject.spec is None else (subject, made())
        tokens = job.train_tokens, job.held_out_tokens
        parts = build(config, job.spec, mesh, *tokens, job.paths, speeds, link, weights, memory, again)
        loop = Loop(job, placement, mesh, parts, records, saver, stop, moments, memory, hooks)
        try:
            with loop.inside:
                start = loop.restore()
                injector.check(parts.engine)
                with remembering(job.paths, mesh, parts.sharing, subject):
                    return loop.run(start)
        except OutOfMemory as error:
            error.add_note(f"step {parts.engine.step + 1}")
            raise
        except RuntimeError as error:
            moments.at("ending")  # nobody is to be impatient while it is found out whose fault it is
            error.add_note(f"step {parts.engine.step + 1}")
            named = mesh.blame(error)
            if named is error:
                raise
            raise named from error
        finally:
            moments.at("ending")
            moments.close()
            parts.close()
            if memory is not None:
                memory.close()
            records.close()


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
        self.best = best.recorded(config.train.patience, step, self.job.paths, group)
        self.saver.spared = self.best.step if config.checkpoint.best else None
        self.wrong = None
        if self.memory is not None:
            self.memory.tokens = int(header["tokens"])
        engine.begin_after(step)
        self.hooks.begin(step, None if in_memory else header)

    def run(self, start: int) -> ExitCode:
        config, began = self.job.config, time.perf_counter()
        step, saved, evaluated = start, start if start else None, None  # the steps that are on disk, were evaluated
        if self.start is not None and self.start.in_memory:
            saved = make_up(self, self.start)
        self.recorder.restart_clock()
        while step < config.train.steps and not self.over:
            step += 1
            if self.inside.at(step):
                self.recorder.restart_clock()
            asked = self.train_one(step)
            last = step == config.train.steps
            evaluates = is_due(step, config.train.eval_every) or Request.EVALUATE in self.hooks.due
            pauses = asked or last or self.hooks.due or evaluates or is_due(step, config.checkpoint.every)
            if pauses:
                self.note(self.recorder.flush())
            if self.wrong is not None:
                step = saved = go_back(self, self.wrong)
                self.recorder.restart_clock()
                continue
            if pauses:
                if Request.WEIGHTS in self.hooks.due:
                    self.hooks.weights(self.parts.engine)
                if evaluates and not last:
                    evaluated = step
                    with phase("evaluate"):
                        self.evaluate(step)
                if self.is_kept(step) and not (asked or last):
                    with phase("checkpoint"):
                        saved = step if self.save(step, wait=self.job.paths.url is None) else saved
                self.recorder.restart_clock()
            if asked:
                return self.leave(step, asked, saved)
        self.inside.close()
        if saved != step:
            self.save(step)
        if config.train.steps and not self.best.over and evaluated != step:
            self.evaluate(step)
        self.finish_saving(step)
        self.hooks.end(step, self.over)
        why = {} if self.over is None else {"reason": self.over}
        self.records.event(Kind.FINISHED, {"step": step, "seconds": time.perf_counter() - began, **why})
        self.moments.pulse.done()
        return ExitCode.DONE

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

    def leave(self, step: int, why: str, saved: int | None) -> ExitCode:
        """Save and stop because a signal said so."""
        self.inside.close()
        if saved != step:
            self.save(step)
        self.finish_saving(step)
        self.hooks.end(step, why)
        self.records.event(Kind.STOPPED, {"step": step, "reason": why})
        return ExitCode.STOPPED
