"""Training on one rank: placement in, exit code out. It reads no environment and spawns nothing."""

import dataclasses
import time
from collections.abc import Sequence

import torch

from phalanx.autotune.rank_speeds import limit_after_out_of_memory
from phalanx.comm.mesh import join
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core import progress_page
from phalanx.core.errors import OutOfMemory
from phalanx.core.json_lines import read_last_line
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import RunPaths
from phalanx.system import accelerator
from phalanx.trainer.callback import CallbackRequest
from phalanx.trainer.loop import TrainingLoop, is_due
from phalanx.trainer.restore import ResumePoint
from phalanx.trainer.rollback import roll_back
from phalanx.trainer.setup import TrainingJob, set_up_training
from phalanx.trainer.stop_request import handle_stop_signals
from phalanx.workload.sinks import Sink

STORE_OPERATIONS = 10  # of a rank that others wait for during a save, each limited by resilience.storage_timeout_s


def run_training(
    job: TrainingJob, placement: Placement, sinks: Sequence[Sink] = (), attempt: int | None = None
) -> ExitCode:
    """Train from the newest checkpoint of the run folder, or from the start, to the last step or a request to stop.
    `attempt` is rank 0's count of attempts, if the launcher keeps none; other ranks pass 0. Raises PhalanxError for
    problems that a user can fix, and errors of a broken collective or device.
    """
    config = job.config
    threads = accelerator.threads_per_rank(placement.threads, placement.local_world)
    device = torch.device(placement.device)
    accelerator.set_device(device, threads)
    accelerator.set_arithmetic(device, tf32=config.train.tf32, deterministic=config.train.deterministic)
    storage_s = 0.0 if job.paths.url is None else STORE_OPERATIONS * config.resilience.storage_timeout_s
    page = progress_page.open_progress_page(placement.shared, placement.rank, placement.attempt)
    with (
        handle_stop_signals() as stop,
        join(placement, config.comm.timeout_s, storage_s, config.parallel.axes) as mesh,
    ):
        placement = dataclasses.replace(placement, keeps=bool(mesh.min([float(placement.keeps)])[0]))
        if attempt is not None:
            placement = dataclasses.replace(placement, attempt=int(mesh.max([attempt])[0]))
        setup = set_up_training(job, placement, mesh, page, stop, sinks)
        loop = TrainingLoop(setup)
        engine, step_hooks = setup.components.engine, setup.step_hooks
        try:
            with loop.profiler:
                start = loop.restore()
                step_hooks.check_faults(engine)
                with limit_after_out_of_memory(job.paths, mesh, setup.components.work_split, setup.components.workload):
                    return run_steps(loop, start)
        except OutOfMemory as error:
            error.add_note(f"step {engine.step + 1}")
            raise
        except RuntimeError as error:
            step_hooks.enter_phase("ending")  # hang detection is suspended while the error is attributed
            error.add_note(f"step {engine.step + 1}")
            named = mesh.roll_call.name_missing_ranks(error)
            if named is error:
                raise
            raise named from error
        finally:
            step_hooks.enter_phase("ending")
            setup.close()


def run_steps(loop: TrainingLoop, start: int) -> ExitCode:
    """Run all steps after `start`, with evaluations, checkpoints and rollbacks between them. Collective."""
    setup = loop.setup
    config, began = setup.job.config, time.perf_counter()
    step, saved, evaluated = start, start if start else None, None  # the last steps saved and evaluated
    asked = loop.find_early_stop()
    if loop.resume_point is not None:
        saved = finish_interrupted_step(loop, loop.resume_point, stopping=asked is not None)
    if asked is not None:
        return _save_and_stop(loop, start, asked, saved if start else start)
    loop.recorder.restart_clock()
    while step < config.train.steps and not loop.stop_reason:
        step += 1
        if loop.profiler.begin_step(step):
            loop.recorder.restart_clock()
        asked = loop.train_step(step)
        last = step == config.train.steps
        evaluates = is_due(step, config.train.eval_every) or CallbackRequest.EVALUATE in setup.callbacks.due_requests
        pauses = asked or last or setup.callbacks.due_requests or evaluates or is_due(step, config.checkpoint.every)
        if pauses:
            loop.process_record(loop.recorder.flush())
        if loop.rollback_request is not None:
            step = saved = roll_back(loop, loop.rollback_request)
            loop.recorder.restart_clock()
            continue
        if pauses:
            if CallbackRequest.WEIGHTS in setup.callbacks.due_requests:
                loop.send_weights()
            if evaluates and not last:
                evaluated = step
                loop.evaluate(step)
            if loop.needs_checkpoint(step) and not (asked or last):
                saved = step if loop.save(step, wait=setup.job.paths.url is None) else saved
            loop.recorder.restart_clock()
        if asked:
            return _save_and_stop(loop, step, asked, saved)
    loop.profiler.close()
    if saved != step:
        loop.save(step)
    if config.train.steps and not loop.best_evaluation.stop_reason and evaluated != step:
        loop.evaluate(step)
    loop.finish_saving(step)
    setup.callbacks.end_training(step, loop.stop_reason)
    why = {} if loop.stop_reason is None else {"reason": loop.stop_reason}
    setup.records.write_event(EventKind.FINISHED, {"step": step, "seconds": time.perf_counter() - began, **why})
    setup.step_hooks.progress_page.finish()
    return ExitCode.DONE


def find_step_outputs(step: int, paths: RunPaths, group: JsonGroup) -> tuple[bool, bool, bool]:
    """Whether the record of a step, the evaluation after it, and its checkpoint exist. Collective."""
    found = None
    if group.gather_objects(None) is not None:  # rank 0: others may see the files later
        newest = read_last_line(paths.metrics) or {}
        events = [event for event in read_events(paths.events) if event.get("step") == step]
        evaluated = any(event.get("kind") == EventKind.EVALUATED for event in events)
        saved = any(event.get("kind") == EventKind.CHECKPOINT_SAVED for event in events)
        found = [newest.get("step") == step, evaluated, saved]
    recorded, evaluated, saved = group.broadcast_object(found)
    return recorded, evaluated, saved


def finish_interrupted_step(loop: TrainingLoop, resume_point: ResumePoint, stopping: bool) -> int | None:
    """Complete a step that earlier ranks committed in memory before they died: its record, an evaluation, a checkpoint,
    requests of callbacks; `stopping`: its record alone. Of a step on disk, an evaluation that a stop cut short. Returns
    the step if it is on disk. Collective."""
    setup = loop.setup
    step, config, due = resume_point.step, setup.job.config, setup.callbacks.due_requests
    if not resume_point.in_memory and (not step or stopping or not is_due(step, config.train.eval_every)):
        return step or None
    recorded, evaluated, saved = find_step_outputs(step, setup.job.paths, JsonGroup(setup.mesh.checkpoint))
    if resume_point.step_measurements and not recorded:
        setup.records.write_step(
            loop.recorder.rebuild_record(step, setup.placement.attempt, resume_point.step_measurements)
        )
        setup.callbacks.dispatch()
    if stopping:
        return step if saved else None
    if not resume_point.in_memory:
        if step < config.train.steps and not evaluated and setup.components.held_out:
            loop.evaluate(step)
        return step
    if CallbackRequest.WEIGHTS in due:
        loop.send_weights()
    evaluates = is_due(step, config.train.eval_every) or CallbackRequest.EVALUATE in due
    if evaluates and step < config.train.steps and not evaluated:
        loop.evaluate(step)
    if loop.needs_checkpoint(step) and step < config.train.steps and not saved:
        saved = loop.save(step)
    return step if saved else None


def _save_and_stop(loop: TrainingLoop, step: int, why: str, saved: int | None) -> ExitCode:
    """Save and stop, because of a signal or a limit of the recipe."""
    setup = loop.setup
    loop.profiler.close()
    if saved != step:
        loop.save(step)
    loop.finish_saving(step)
    setup.callbacks.end_training(step, why)
    setup.records.write_event(EventKind.STOPPED, {"step": step, "reason": why})
    return ExitCode.STOPPED
