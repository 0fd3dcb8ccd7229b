"""The training loop: placement in, exit code out. It reads no environment and spawns nothing."""

import contextlib
import dataclasses
import functools
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from phalanx import accelerator, mirror
from phalanx.axes import axes_of
from phalanx.checkpoint.disk import Saver
from phalanx.checkpoint.read import find, newest_agreed
from phalanx.comm.compressed import other_nodes
from phalanx.comm.mesh import Mesh, join
from phalanx.comm.objects import JsonGroup
from phalanx.errors import Diverged, OutOfMemory, RunError
from phalanx.models.spec import ModelSpec
from phalanx.optim.schedule import learning_rate
from phalanx.parallel.apply import compute_dtype
from phalanx.parallel.materialize import frozen_only, materialise
from phalanx.phases import phase
from phalanx.records import ExitCode, Kind, Placement, RunPaths, StepRecord
from phalanx.tasks.task import Batch
from phalanx.train import stage_lengths
from phalanx.train.build import Parts, build
from phalanx.train.clock import clock_of
from phalanx.train.engines import agreed
from phalanx.train.measure import know, remembering
from phalanx.train.metrics import Recorder, speed_of
from phalanx.train.profile import Inspection
from phalanx.train.sinks import Records, Sink
from phalanx.train.staged import evaluate_pipeline, run_pipeline
from phalanx.train.state_shares import settled_weights
from phalanx.train.step import evaluate, run_micro_batches
from phalanx.train.subject import subject_of

if TYPE_CHECKING:
    from phalanx.config import Config


STORE_OPERATIONS = 10  # of a rank that the others wait for in a save, each tried for resilience.storage_timeout_s
NOT_FINITE_STEPS = 20  # in a row: a single one is skipped and forgotten


@dataclass(frozen=True)
class Run:
    """What every rank of a run is told; `config` has no `auto` left, and a network of a user's own no `spec`.

    `train_tokens`: token sets with their weights in the mixture; `held_out_tokens`: those to evaluate on, by name.
    """

    config: "Config"
    spec: ModelSpec | None
    paths: RunPaths
    train_tokens: list[tuple[Path, float]]
    held_out_tokens: dict[str, Path]


def run(job: Run, placement: Placement, sinks: Sequence[Sink] = (), attempt: int | None = None) -> ExitCode:
    """Train from the newest checkpoint of the run folder, or from the start, to the last step or a request to stop.

    `attempt` is rank 0's count of attempts, where whoever started the ranks keeps none; other ranks give 0 then.
    Raises PhalanxError for what a user can mend, and whatever a broken collective or device raises.
    """
    config = job.config
    threads = accelerator.threads_of(placement.threads, placement.local_world)
    accelerator.use(torch.device(placement.device), threads)
    axes = axes_of(config)
    storage_s = 0.0 if job.paths.url is None else STORE_OPERATIONS * config.resilience.storage_timeout_s
    with _asked_to_stop() as stop, join(placement, config.comm.timeout_s, storage_s, axes) as mesh:
        if attempt is not None:
            placement = dataclasses.replace(placement, attempt=int(mesh.max([attempt])[0]))
        job = dataclasses.replace(job, config=agreed(job.config, mesh))
        config = job.config
        records = Records(job.paths, placement.attempt, sinks, active=mesh.rank == 0)
        group, keep = JsonGroup(mesh.checkpoint), config.checkpoint.keep
        mirrored = None if job.paths.url is None else functools.partial(mirror.before_commit, job.paths, {})
        saver = Saver(job.paths.checkpoints, mesh.rank, group, keep, records.event, mirrored)
        subject = subject_of(config, job.spec, job.paths)
        weights = settled_weights(config, subject, mesh, placement.local_world, job.paths, records)
        speeds, link = know(config, subject, placement, mesh, job.paths, records, weights)
        config = stage_lengths.settled(config, subject, mesh, job.paths, records)
        parts = build(config, job.spec, mesh, job.train_tokens, job.held_out_tokens, job.paths, speeds, link, weights)
        loop = Loop(job, placement, mesh, parts, records, saver, stop)
        try:
            with loop.inside:
                start = loop.restore()
                with remembering(job.paths, mesh, parts.sharing, subject):
                    return loop.run(start)
        except OutOfMemory as error:
            error.add_note(f"step {parts.engine.step + 1}")
            raise
        except RuntimeError as error:
            error.add_note(f"step {parts.engine.step + 1}")
            named = mesh.blame(error)
            if named is error:
                raise
            raise named from error
        finally:
            parts.close()
            records.close()


@dataclass
class StopRequest:
    """Set by a signal handler; read once a step."""

    signal: str | None = None


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGUSR1 and a lost terminal into a request to finish the step, save and leave."""
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number).name

    heeded = [signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it, and so do we then
        heeded.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Loop:
    job: Run
    placement: Placement
    mesh: Mesh
    parts: Parts
    records: Records
    saver: Saver
    stop: StopRequest
    not_finite: int = 0  # steps in a row that were skipped because the gradient was not finite

    def __post_init__(self) -> None:
        self.inside = Inspection(self.job.config.train, self.job.paths, self.mesh, self.records)
        self.clock = clock_of(self.mesh, [unit for _, unit in self.parts.model.units()])

    def restore(self) -> int:
        """Fill model and state from the newest good checkpoint, or with the starting weights; returns the step."""
        group = JsonGroup(self.mesh.checkpoint)  # nothing is being saved yet, and it has patience with a store
        folder = self.job.paths.checkpoints
        checkpoint = newest_agreed(folder, self.mesh.rank, group, None, self.records.event)
        if checkpoint is None and group.broadcast_object(len(find(folder))):
            # Beginning anew would write over what may only be unreadable for the moment.
            raise RunError(
                f"none of the checkpoints in {folder} can be used (their reasons are in {self.job.paths.events}); "
                "restore one, or move that folder away to begin again"
            )
        fill = self.parts.starting_weights
        materialise(self.parts.model, self.parts.engine, frozen_only(fill) if checkpoint else fill)
        computes_in = compute_dtype(self.job.config.train.dtype, self.mesh.device)
        subject = self.parts.subject
        speed = speed_of(subject.flops(), self.mesh, computes_in)
        positions = self.job.config.train.global_batch * subject.positions
        header: dict[str, Any] = checkpoint.header if checkpoint else {"step": 0, "skipped": 0, "tokens": 0}
        self.skipped = int(header["skipped"])
        sharing = self.parts.sharing
        self.recorder = Recorder(self.mesh, speed, self.placement.attempt, int(header["tokens"]), positions, sharing)
        step = int(header["step"])
        if checkpoint is not None:
            with torch.no_grad():
                self.parts.engine.load(self.parts.parted.reading(checkpoint.read))
            if self.parts.engine.loss_scale is not None and "loss_scale" in header:
                self.parts.engine.loss_scale.restore(header["loss_scale"])
            self.records.event(Kind.RESUMED, {"step": step, "checkpoint": checkpoint.path.name})
            moved = other_nodes(self.job.config.comm.compress, header.get("nodes"), self.mesh.topology)
            if moved is not None:
                self.records.event(Kind.WARNING, {"message": moved})
            checkpoint.close()
        elif self.placement.attempt > 1:
            self.records.event(Kind.WARNING, {"message": "there is no checkpoint yet: starting again from step 1"})
        if not step:
            for message in [*self.parts.subject.warnings(), *self.parts.train.warnings()]:
                self.records.event(Kind.WARNING, {"message": message})
        sharing.begin(step, header.get("division"), self.job.paths, group, self.records.event)
        self.parts.engine.commit(step)
        return step

    def run(self, start: int) -> ExitCode:
        config, began = self.job.config, time.perf_counter()
        saved = start if start else None  # the step that is on disk
        self.recorder.restart_clock()
        for step in range(start + 1, config.train.steps + 1):
            if self.inside.at(step):
                self.recorder.restart_clock()
            asked = self.train_one(step)
            last = step == config.train.steps
            if asked or last or _due(step, config.checkpoint.every) or _due(step, config.train.eval_every):
                self.note(self.recorder.flush())
                if _due(step, config.train.eval_every) and not last:
                    with phase("evaluate"):
                        self.evaluate(step)
                if _due(step, config.checkpoint.every) and not (asked or last):
                    with phase("checkpoint"):
                        saved = step if self.save(step, wait=self.job.paths.url is None) else saved
                self.recorder.restart_clock()
            if asked:
                return self.leave(step, asked, saved)
        self.inside.close()
        steps = max(start, config.train.steps)
        if saved != steps:
            self.save(steps)
        if config.train.steps:
            self.evaluate(steps)
        self.finish_saving(steps)
        self.records.event(Kind.FINISHED, {"step": steps, "seconds": time.perf_counter() - began})
        return ExitCode.DONE

    def train_one(self, step: int) -> str | None:
        """One optimizer step. Returns the name of the signal by which any rank was asked to stop."""
        parts, config = self.parts, self.job.config
        begun = time.perf_counter()
        self.clock.start()
        with phase("data"):
            batches = self.to_batches(parts.train.batches(step - 1, parts.sharing.division, self.skipped))
        data_s = time.perf_counter() - begun
        lr = learning_rate(config.optim, step)
        parts.engine.begin_step(step, sum(batch.weight for batch in batches), lr, config.optim.clip_norm)
        loss_sum = self.passes(batches, step)
        # The device is busy with this step now: a good moment to read the results of the one before.
        parts.sharing.exchange(step, self.clock.late, self.clock.lap(), self.recorder.mine())
        self.note(self.recorder.flush(parts.sharing.rows()))
        parts.sharing.announce(asked=self.stop.signal is not None)
        with phase("update"):
            outcome = parts.engine.finish_step()
        parts.engine.commit(step)
        self.recorder.measured(step, loss_sum, outcome, lr, data_s)
        for kind, details in parts.engine.notices():
            self.records.event(kind, details)
        asked = parts.sharing.settle()
        self.clock.stop()
        return (self.stop.signal or "another rank's signal") if asked else None

    def passes(self, batches: Sequence[Batch], step: int) -> torch.Tensor:
        """Forward and backward of a step's micro-batches; the sum of the losses that this rank counts."""
        parts, config = self.parts, self.job.config
        pipeline = parts.parted.pipeline
        run = run_micro_batches if pipeline is None else functools.partial(run_pipeline, pipeline=pipeline)
        loss_sum = run(
            parts.engine,
            parts.model,
            parts.task,
            batches,
            seed=config.train.seed,
            step=step,
            nominal_weight=parts.nominal_weight,
        )
        return loss_sum if parts.parted.speaks else torch.zeros_like(loss_sum)

    def note(self, record: StepRecord | None) -> None:
        """Write a step's record; give up when the gradient stays infinite, since then nothing is learnt any more."""
        self.records.step(record)
        if record is None:
            return
        scale = self.parts.engine.loss_scale
        if scale is not None and record.loss_scale is not None and record.loss_scale > scale.floor and record.skipped:
            return  # the scale was too high: it is halved until it fits, or until it can be halved no more
        self.not_finite = self.not_finite + 1 if record.skipped and record.tokens else 0
        if self.not_finite >= NOT_FINITE_STEPS:
            raise Diverged(
                f"the gradient has not been finite since step {record.step - NOT_FINITE_STEPS + 1}; start a new run "
                "with a lower optim.lr or a longer optim.warmup_steps, or look at the data of these steps"
            )

    def to_batches(self, micro_batches: list[list[Any]]) -> list[Batch]:
        return [self.parts.task.collate(samples).to(self.mesh.device) for samples in micro_batches]

    def evaluate(self, step: int) -> None:
        """Loss on each held-out set, weighted as in training."""
        limit = self.job.config.train.eval_sequences
        if not self.parts.held_out and limit:
            message = "no evaluation: the held-out documents make less than one sequence (data.held_out)"
            if self.job.spec is None:
                message = "no evaluation: held_out() of task.code gives no samples"
            self.records.event(Kind.WARNING, {"message": message})
        for name, held_out in self.parts.held_out.items():
            begun = time.perf_counter()
            batches = held_out.evaluation(self.parts.sharing.of_evaluation, limit)
            collated = ([self.parts.task.collate(samples) for samples in step_batches] for step_batches in batches)
            parted = self.parts.parted
            run = evaluate
            if parted.pipeline is not None:
                run = functools.partial(evaluate_pipeline, pipeline=parted.pipeline)
            loss, tokens, scores = run(self.parts.model, self.parts.task, collated, self.mesh, parted.speaks)
            seconds = time.perf_counter() - begun
            details = {"step": step, "set": name, "loss": loss, "tokens": tokens, "seconds": seconds}
            details |= {"scores": scores, "unit": self.parts.subject.unit}
            self.records.event(Kind.EVALUATED, details)

    def save(self, step: int, wait: bool = True) -> bool:
        """Start saving the state of `step`; training goes on meanwhile. A save that still runs is waited for; without
        `wait` none is started beside it, since a remote store that stalls must not stall training too."""
        if not wait and self.mesh.max([self.saver.busy()])[0]:
            reason = "the save before it is still running; a larger checkpoint.every leaves the store more time"
            self.records.event(Kind.CHECKPOINT_SKIPPED, {"step": step, "reason": reason})
            return False
        header: dict[str, Any] = {
            "step": step,
            "tokens": self.recorder.total_tokens,
            "skipped": self.skipped,
            "attempt": self.placement.attempt,
            "world": self.mesh.world,
            "nodes": list(self.mesh.topology.node_of),
            "division": self.parts.sharing.header(),
        }
        if self.parts.engine.loss_scale is not None:
            header["loss_scale"] = self.parts.engine.loss_scale.state()
        dtype = "float64" if self.job.config.train.dtype == "fp64" else "float32"
        parameters = {name: (shape, dtype) for name, shape in self.parts.parted.shapes.items()}
        pieces = self.parts.parted.pieces(self.parts.engine)
        self.saver.save(header, parameters, pieces, self.placement.attempt)
        return True

    def finish_saving(self, step: int) -> None:
        """Wait for the last save. Raises RunError when it failed: a run whose last state is lost has not come to its
        end, and starting it again once there is room brings it there."""
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
        self.records.event(Kind.STOPPED, {"step": step, "reason": why})
        return ExitCode.STOPPED


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
