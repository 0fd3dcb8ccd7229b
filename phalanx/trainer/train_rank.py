"""Training on one rank: placement in, exit code out. It reads no environment and spawns nothing."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from phalanx.autotune import stage_sizes
from phalanx.autotune.measure import know, remembering
from phalanx.autotune.state_shares import keeping_of, settled_weights
from phalanx.checkpoint.disk.save import Saver
from phalanx.comm.json_objects import JsonGroup
from phalanx.comm.mesh import join
from phalanx.core import progress_page
from phalanx.core.errors import OutOfMemory
from phalanx.core.events import Kind
from phalanx.core.json_lines import last_line, read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.run_paths import RunPaths
from phalanx.recovery import fencing
from phalanx.storage import mirror
from phalanx.system import accelerator
from phalanx.system.trace import phase
from phalanx.trainer.callback import Request
from phalanx.trainer.callback_runner import hooks_of
from phalanx.trainer.device_compatibility import sharing_a_device, unlike_kernels
from phalanx.trainer.restore import Start, memory_of
from phalanx.trainer.rollback import go_back
from phalanx.trainer.stop_request import asked_to_stop
from phalanx.workload.build import build
from phalanx.workload.device_progress import marks_of
from phalanx.workload.engines import agreed
from phalanx.workload.injection import injector_of
from phalanx.workload.sinks import Records, Sink
from phalanx.workload.step_hooks import Moments
from phalanx.workload.workload import subject_of

if TYPE_CHECKING:
    pass


from phalanx.trainer.loop import Loop, Run, is_due

STORE_OPERATIONS = 10  # of a rank that the others wait for in a save, each tried for resilience.storage_timeout_s


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
    axes = config.parallel.axes
    storage_s = 0.0 if job.paths.url is None else STORE_OPERATIONS * config.resilience.storage_timeout_s
    beats = progress_page.opened(placement.shared, placement.rank, placement.attempt)
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
        config = stage_sizes.settled(config, subject, mesh, job.paths, records)
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
                    return train(loop, start)
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


def train(loop: Loop, start: int) -> ExitCode:
    """All steps behind `start`, with what is due between them: evaluations, checkpoints, going back. Collective."""
    config, began = loop.job.config, time.perf_counter()
    step, saved, evaluated = start, start if start else None, None  # the steps that are on disk, were evaluated
    if loop.start is not None and loop.start.in_memory:
        saved = make_up(loop, loop.start)
    loop.recorder.restart_clock()
    while step < config.train.steps and not loop.over:
        step += 1
        if loop.inside.at(step):
            loop.recorder.restart_clock()
        asked = loop.train_one(step)
        last = step == config.train.steps
        evaluates = is_due(step, config.train.eval_every) or Request.EVALUATE in loop.hooks.due
        pauses = asked or last or loop.hooks.due or evaluates or is_due(step, config.checkpoint.every)
        if pauses:
            loop.note(loop.recorder.flush())
        if loop.wrong is not None:
            step = saved = go_back(loop, loop.wrong)
            loop.recorder.restart_clock()
            continue
        if pauses:
            if Request.WEIGHTS in loop.hooks.due:
                loop.hooks.weights(loop.parts.engine)
            if evaluates and not last:
                evaluated = step
                with phase("evaluate"):
                    loop.evaluate(step)
            if loop.is_kept(step) and not (asked or last):
                with phase("checkpoint"):
                    saved = step if loop.save(step, wait=loop.job.paths.url is None) else saved
            loop.recorder.restart_clock()
        if asked:
            return _leave(loop, step, asked, saved)
    loop.inside.close()
    if saved != step:
        loop.save(step)
    if config.train.steps and not loop.best.over and evaluated != step:
        loop.evaluate(step)
    loop.finish_saving(step)
    loop.hooks.end(step, loop.over)
    why = {} if loop.over is None else {"reason": loop.over}
    loop.records.event(Kind.FINISHED, {"step": step, "seconds": time.perf_counter() - began, **why})
    loop.moments.pulse.done()
    return ExitCode.DONE


def done_after(step: int, paths: RunPaths, group: JsonGroup) -> tuple[bool, bool, bool]:
    """Whether the record of a step, an evaluation behind it, and its checkpoint are there. Collective."""
    found = None
    if group.gather_objects(None) is not None:  # rank 0: others may see the files later
        newest = last_line(paths.metrics) or {}
        events = [event for event in read_lines(paths.events) if event.get("step") == step]
        evaluated = any(event.get("kind") == Kind.EVALUATED for event in events)
        saved = any(event.get("kind") == Kind.CHECKPOINT_SAVED for event in events)
        found = [newest.get("step") == step, evaluated, saved]
    recorded, evaluated, saved = group.broadcast_object(found)
    return recorded, evaluated, saved


def make_up(loop: Loop, start: Start) -> int | None:
    """What those who committed a step in memory were to do behind it and did not live to do: its record, an evaluation,
    a checkpoint, what callbacks had requested. Returns the step if it is on disk. Collective."""
    step, config, due = start.step, loop.job.config, loop.hooks.due
    recorded, evaluated, saved = done_after(step, loop.job.paths, JsonGroup(loop.mesh.checkpoint))
    if start.left and not recorded:
        loop.records.step(loop.recorder.left(step, loop.placement.attempt, start.left))
        loop.hooks.tell()
    if Request.WEIGHTS in due:
        loop.hooks.weights(loop.parts.engine)
    evaluates = is_due(step, config.train.eval_every) or Request.EVALUATE in due
    if evaluates and step < config.train.steps and not evaluated:
        loop.evaluate(step)
    if loop.is_kept(step) and step < config.train.steps and not saved:
        saved = loop.save(step)
    return step if saved else None


def _leave(loop: Loop, step: int, why: str, saved: int | None) -> ExitCode:
    """Save and stop because a signal said so."""
    loop.inside.close()
    if saved != step:
        loop.save(step)
    loop.finish_saving(step)
    loop.hooks.end(step, why)
    loop.records.event(Kind.STOPPED, {"step": step, "reason": why})
    return ExitCode.STOPPED
