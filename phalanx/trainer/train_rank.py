"""Training on one rank: placement in, exit code out. It reads no environment and spawns nothing."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from phalanx.autotune import stage_sizes
from phalanx.autotune.measure import find_rank_speeds, limit_after_out_of_memory
from phalanx.autotune.state_shares import find_in_memory_options, resolve_state_weights
from phalanx.checkpoint.disk.save import CheckpointSaver
from phalanx.comm.mesh import Mesh, join
from phalanx.comm.rendezvous import JsonGroup, this_host
from phalanx.core import progress_page
from phalanx.core.errors import OutOfMemory
from phalanx.core.json_lines import read_last_line
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, read_events
from phalanx.core.run_paths import RunPaths
from phalanx.layout.model_shape import ModelSpec
from phalanx.models import attention
from phalanx.recovery import fencing
from phalanx.storage import mirror
from phalanx.system import accelerator
from phalanx.system.trace import phase
from phalanx.trainer.callback import CallbackRequest
from phalanx.trainer.callback_runner import make_callback_runner
from phalanx.trainer.loop import TrainingJob, TrainingLoop, is_due
from phalanx.trainer.restore import ResumePoint, make_in_memory_store
from phalanx.trainer.rollback import roll_back
from phalanx.trainer.stop_request import handle_stop_signals
from phalanx.workload.build import build_components
from phalanx.workload.clock import make_device_progress
from phalanx.workload.engines import agree_on_sharding
from phalanx.workload.injection import make_fault_injector
from phalanx.workload.sinks import RecordWriter, Sink
from phalanx.workload.step_hooks import StepHooks
from phalanx.workload.workload import make_workload

if TYPE_CHECKING:
    pass


STORE_OPERATIONS = 10  # of a rank that the others wait for in a save, each tried for resilience.storage_timeout_s


def run_training(
    job: TrainingJob, placement: Placement, sinks: Sequence[Sink] = (), attempt: int | None = None
) -> ExitCode:
    """Train from the newest checkpoint of the run folder, or from the start, to the last step or a request to stop.

    `attempt` is rank 0's count of attempts, where whoever started the ranks keeps none; other ranks give 0 then.
    Raises PhalanxError for what a user can mend, and whatever a broken collective or device raises.
    """
    config = job.config
    threads = accelerator.threads_per_rank(placement.threads, placement.local_world)
    device = torch.device(placement.device)
    accelerator.set_device(device, threads)
    accelerator.set_arithmetic(device, tf32=config.train.tf32, deterministic=config.train.deterministic)
    axes = config.parallel.axes
    storage_s = 0.0 if job.paths.url is None else STORE_OPERATIONS * config.resilience.storage_timeout_s
    beats = progress_page.open_progress_page(placement.shared, placement.rank, placement.attempt)
    with handle_stop_signals() as stop, join(placement, config.comm.timeout_s, storage_s, axes) as mesh:
        placement = dataclasses.replace(placement, keeps=bool(mesh.min([float(placement.keeps)])[0]))
        if attempt is not None:
            placement = dataclasses.replace(placement, attempt=int(mesh.max([attempt])[0]))
        job = dataclasses.replace(job, config=agree_on_sharding(job.config, mesh))
        config = job.config
        hooks = make_callback_runner(config, job.callbacks, job.paths, placement, mesh)
        records = RecordWriter(job.paths, placement.attempt, [*sinks, hooks], active=mesh.rank == 0)
        injector = make_fault_injector(job.faults, job.paths, placement, records)
        step_hooks = StepHooks(
            beats, injector, make_device_progress(device, beats, placement, config)
        ).watch_collectives(mesh)
        hooks.step_hooks = step_hooks
        group, keep = JsonGroup(mesh.checkpoint), config.checkpoint.keep
        may_commit = functools.partial(mirror.check_before_commit, job.paths, {})
        if job.paths.url is None:
            may_commit = functools.partial(fencing.check_before_commit, job.paths, placement.attempt, placement.epoch)
        tell = injector.wrap_on_event(records.write_event)
        saver = CheckpointSaver(
            job.paths.checkpoints, mesh.rank, group, keep, tell, may_commit, injector.before_checkpoint_write
        )
        workload = make_workload(config, job.spec, job.paths)
        for message in (*find_shared_devices(mesh), *find_kernel_differences(mesh, config.train.dtype, workload.spec)):
            records.write_event(EventKind.WARNING, {"message": message})
        same = placement.kept is not None and placement.nodes == 1  # where it has been all the time
        keeping, made = find_in_memory_options(config, placement, mesh), functools.cache(workload.model)
        weights = resolve_state_weights(
            config, workload, mesh, placement.local_world, job.paths, records, same, keeping, made
        )
        speeds, link = find_rank_speeds(config, workload, placement, mesh, job.paths, records, weights)
        config = stage_sizes.resolve_stage_sizes(config, workload, mesh, job.paths, records)
        memory = make_in_memory_store(config, placement, mesh, job.paths, records)
        # A task of a user's own, which may remember what it was asked to measure, is asked anew.
        again = None if workload.spec is None else (workload, made())
        tokens = job.train_tokens, job.held_out_tokens
        parts = build_components(config, job.spec, mesh, *tokens, job.paths, speeds, link, weights, memory, again)
        loop = TrainingLoop(job, placement, mesh, parts, records, saver, stop, step_hooks, memory, hooks)
        try:
            with loop.profiler:
                start = loop.restore()
                injector.check_bit_flips(parts.engine)
                with limit_after_out_of_memory(job.paths, mesh, parts.work_split, workload):
                    return run_steps(loop, start)
        except OutOfMemory as error:
            error.add_note(f"step {parts.engine.step + 1}")
            raise
        except RuntimeError as error:
            step_hooks.enter_phase("ending")  # nobody is to be impatient while it is found out whose fault it is
            error.add_note(f"step {parts.engine.step + 1}")
            named = mesh.roll_call.name_missing_ranks(error)
            if named is error:
                raise
            raise named from error
        finally:
            step_hooks.enter_phase("ending")
            step_hooks.close()
            parts.close()
            if memory is not None:
                memory.close()
            records.close()


def run_steps(loop: TrainingLoop, start: int) -> ExitCode:
    """All steps behind `start`, with what is due between them: evaluations, checkpoints, going back. Collective."""
    config, began = loop.job.config, time.perf_counter()
    step, saved, evaluated = start, start if start else None, None  # the steps that are on disk, were evaluated
    if loop.resume_point is not None and loop.resume_point.in_memory:
        saved = finish_interrupted_step(loop, loop.resume_point)
    loop.recorder.restart_clock()
    while step < config.train.steps and not loop.stop_reason:
        step += 1
        if loop.profiler.begin_step(step):
            loop.recorder.restart_clock()
        asked = loop.train_step(step)
        last = step == config.train.steps
        evaluates = is_due(step, config.train.eval_every) or CallbackRequest.EVALUATE in loop.callbacks.due_requests
        pauses = asked or last or loop.callbacks.due_requests or evaluates or is_due(step, config.checkpoint.every)
        if pauses:
            loop.process_record(loop.recorder.flush())
        if loop.rollback_request is not None:
            step = saved = roll_back(loop, loop.rollback_request)
            loop.recorder.restart_clock()
            continue
        if pauses:
            if CallbackRequest.WEIGHTS in loop.callbacks.due_requests:
                loop.callbacks.send_weights(loop.components.engine)
            if evaluates and not last:
                evaluated = step
                with phase("evaluate"):
                    loop.evaluate(step)
            if loop.needs_checkpoint(step) and not (asked or last):
                with phase("checkpoint"):
                    saved = step if loop.save(step, wait=loop.job.paths.url is None) else saved
            loop.recorder.restart_clock()
        if asked:
            return _save_and_stop(loop, step, asked, saved)
    loop.profiler.close()
    if saved != step:
        loop.save(step)
    if config.train.steps and not loop.best_evaluation.stop_reason and evaluated != step:
        loop.evaluate(step)
    loop.finish_saving(step)
    loop.callbacks.end_training(step, loop.stop_reason)
    why = {} if loop.stop_reason is None else {"reason": loop.stop_reason}
    loop.records.write_event(EventKind.FINISHED, {"step": step, "seconds": time.perf_counter() - began, **why})
    loop.step_hooks.progress_page.finish()
    return ExitCode.DONE


def find_step_outputs(step: int, paths: RunPaths, group: JsonGroup) -> tuple[bool, bool, bool]:
    """Whether the record of a step, an evaluation behind it, and its checkpoint are there. Collective."""
    found = None
    if group.gather_objects(None) is not None:  # rank 0: others may see the files later
        newest = read_last_line(paths.metrics) or {}
        events = [event for event in read_events(paths.events) if event.get("step") == step]
        evaluated = any(event.get("kind") == EventKind.EVALUATED for event in events)
        saved = any(event.get("kind") == EventKind.CHECKPOINT_SAVED for event in events)
        found = [newest.get("step") == step, evaluated, saved]
    recorded, evaluated, saved = group.broadcast_object(found)
    return recorded, evaluated, saved


def finish_interrupted_step(loop: TrainingLoop, resume_point: ResumePoint) -> int | None:
    """What those who committed a step in memory were to do behind it and did not live to do: its record, an evaluation,
    a checkpoint, what callbacks had requested. Returns the step if it is on disk. Collective."""
    step, config, due = resume_point.step, loop.job.config, loop.callbacks.due_requests
    recorded, evaluated, saved = find_step_outputs(step, loop.job.paths, JsonGroup(loop.mesh.checkpoint))
    if resume_point.step_measurements and not recorded:
        loop.records.write_step(
            loop.recorder.rebuild_record(step, loop.placement.attempt, resume_point.step_measurements)
        )
        loop.callbacks.dispatch()
    if CallbackRequest.WEIGHTS in due:
        loop.callbacks.send_weights(loop.components.engine)
    evaluates = is_due(step, config.train.eval_every) or CallbackRequest.EVALUATE in due
    if evaluates and step < config.train.steps and not evaluated:
        loop.evaluate(step)
    if loop.needs_checkpoint(step) and step < config.train.steps and not saved:
        saved = loop.save(step)
    return step if saved else None


def _save_and_stop(loop: TrainingLoop, step: int, why: str, saved: int | None) -> ExitCode:
    """Save and stop because a signal said so."""
    loop.profiler.close()
    if saved != step:
        loop.save(step)
    loop.finish_saving(step)
    loop.callbacks.end_training(step, why)
    loop.records.write_event(EventKind.STOPPED, {"step": step, "reason": why})
    return ExitCode.STOPPED


# ------------------------------------------------------------------------------------------------ device compatibility
# What ranks must know of each other's devices before they train: who shares one, and whose kernels are others.


HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_shared_devices(mesh: Mesh) -> list[str]:
    """A sentence on each accelerator that several ranks are on. Collective."""
    devices, said = JsonGroup(mesh.control).all_gather_objects(accelerator.hardware_id(mesh.device, this_host())), []
    for device in sorted(set(devices) - {""}):
        ranks = [str(rank) for rank, each in enumerate(devices) if each == device]
        if len(ranks) > 1:
            said.append(
                f"ranks {', '.join(ranks)} are on one accelerator, or on parts of one, whose own collectives refuse "
                "that: what ranks exchange goes through host memory, slowly; start one rank per accelerator"
            )
    return said


def find_kernel_differences(mesh: Mesh, dtype: str, spec: ModelSpec | None) -> list[str]:
    """A sentence on ranks whose device has no kernel for attention that others of the same name have. Collective.

    Each rank asks before it holds a model, so that the answer, which it remembers, is not one of a full memory.
    """
    mine = False
    if spec is not None and mesh.device.type != "cpu" and dtype in HALF_DTYPES:
        mine = attention.has_kernel(mesh.device, HALF_DTYPES[dtype], spec.head_dim)
    everyones, said = JsonGroup(mesh.control).all_gather_objects([accelerator.get_device_name(mesh.device), mine]), []
    for name in sorted({name for name, _ in everyones}):
        having = [rank for rank, each in enumerate(everyones) if each == [name, True]]
        lacking = [rank for rank, each in enumerate(everyones) if each == [name, False]]
        if having and lacking:
            said.append(
                f"rank{'s' if len(lacking) > 1 else ''} {', '.join(map(str, lacking))} found no kernel for attention "
                f"of several documents on {name}, as rank {having[0]} did on the same: they compute the same more "
                "slowly, and round otherwise; see that driver and libraries are the same on all nodes"
            )
    return said
