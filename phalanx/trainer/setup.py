"""Setting up training on one rank: the objects that the loop uses, created once, in a frozen record."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from phalanx.autotune import stage_sizes
from phalanx.autotune.rank_speeds import find_rank_speeds
from phalanx.autotune.state_shares import find_in_memory_options, resolve_state_weights
from phalanx.checkpoint.disk.save import CheckpointSaver
from phalanx.checkpoint.memory.store import SharedMemoryStore
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup, this_host
from phalanx.core.faults import Fault
from phalanx.core.placement import Placement
from phalanx.core.progress_page import ProgressPage
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.layout.model_shape import ModelSpec
from phalanx.models import attention
from phalanx.recovery import fencing
from phalanx.storage import mirror
from phalanx.system import accelerator
from phalanx.trainer.callback import Callback
from phalanx.trainer.callback_runner import CallbackRunner, make_callback_runner
from phalanx.trainer.restore import make_in_memory_store
from phalanx.trainer.stop_request import StopRequest
from phalanx.workload.build import RunComponents, build_components
from phalanx.workload.clock import make_device_progress
from phalanx.workload.engines import agree_on_sharding
from phalanx.workload.injection import make_fault_injector
from phalanx.workload.sinks import RecordWriter, Sink
from phalanx.workload.step_hooks import StepHooks
from phalanx.workload.workload import make_workload

if TYPE_CHECKING:
    from phalanx.config.schema import Config


@dataclass(frozen=True)
class TrainingJob:
    """The job of every rank of a run; `config` has no `auto` left, and a custom network no `spec`. `train_tokens`:
    token sets with their weights in the mixture; `held_out_tokens`: evaluation sets by name; `faults`: injected faults;
    `callbacks`: those of the program that started the run, beside the recipe's.
    """

    config: "Config"
    spec: ModelSpec | None
    paths: RunPaths
    train_tokens: list[tuple[Path, float]]
    held_out_tokens: dict[str, Path]
    faults: tuple[Fault, ...] = ()
    callbacks: tuple[Callback, ...] = ()


@dataclass(frozen=True)
class TrainingSetup:
    """The objects that the training loop uses. `job.config` is the configuration that all ranks have agreed on."""

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

    def close(self) -> None:
        """Stop background work and write the remaining records."""
        self.step_hooks.close()
        self.components.close()
        if self.in_memory_store is not None:
            self.in_memory_store.close()
        self.records.close()


def set_up_training(
    job: TrainingJob,
    placement: Placement,
    mesh: Mesh,
    progress_page: ProgressPage,
    stop: StopRequest,
    sinks: Sequence[Sink] = (),
) -> TrainingSetup:
    """Create the objects of a run on this rank, after resolving with the other ranks what they must agree on.
    Collective. Raises PhalanxError for problems that a user can fix.
    """
    job = replace(job, config=agree_on_sharding(job.config, mesh))
    config, paths = job.config, job.paths
    callbacks = make_callback_runner(config, job.callbacks, paths, placement, mesh)
    records = RecordWriter(paths, placement.attempt, [*sinks, callbacks], active=mesh.rank == 0)
    injector = make_fault_injector(job.faults, paths, placement, records)
    step_hooks = StepHooks(
        progress_page, injector, make_device_progress(mesh.device, progress_page, placement, config)
    ).watch_collectives(mesh)
    callbacks.step_hooks = step_hooks
    may_commit = functools.partial(mirror.check_before_commit, paths, {})
    if paths.url is None:
        may_commit = functools.partial(fencing.check_before_commit, paths, placement.attempt, placement.epoch)
    saver = CheckpointSaver(
        paths.checkpoints,
        mesh.rank,
        JsonGroup(mesh.checkpoint),
        config.checkpoint.keep,
        injector.wrap_on_event(records.write_event),
        may_commit,
        injector.before_checkpoint_write,
    )
    workload = make_workload(config, job.spec, paths)
    for message in (*find_shared_devices(mesh), *find_kernel_differences(mesh, config.train.dtype, workload.spec)):
        records.write_event(EventKind.WARNING, {"message": message})
    same = placement.kept is not None and placement.nodes == 1  # the state is on this node already
    keeping, made = find_in_memory_options(config, placement, mesh), functools.cache(workload.model)
    weights = resolve_state_weights(config, workload, mesh, placement.local_world, paths, records, same, keeping, made)
    speeds, link = find_rank_speeds(config, workload, placement, mesh, paths, records, weights)
    config = stage_sizes.resolve_stage_sizes(config, workload, mesh, paths, records)
    job = replace(job, config=config)
    memory = make_in_memory_store(config, placement, mesh, paths, records)
    # A custom task is created again, as it may have state from the measurement.
    again = None if workload.spec is None else (workload, made())
    tokens = job.train_tokens, job.held_out_tokens
    components = build_components(config, job.spec, mesh, *tokens, paths, speeds, link, weights, memory, again)
    return TrainingSetup(job, placement, mesh, components, records, saver, stop, step_hooks, memory, callbacks)


# ------------------------------------------------------------------------------------------------ device compatibility
# Device compatibility: ranks that share a device, and ranks with different kernels.


HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_shared_devices(mesh: Mesh) -> list[str]:
    """Describe each accelerator that several ranks share. Collective."""
    devices, said = JsonGroup(mesh.control).all_gather_objects(accelerator.hardware_id(mesh.device, this_host())), []
    for device in sorted(set(devices) - {""}):
        ranks = [str(rank) for rank, each in enumerate(devices) if each == device]
        if len(ranks) > 1:
            said.append(
                f"ranks {', '.join(ranks)} share one accelerator, or parts of one, which its collectives do not "
                "support: ranks communicate through host memory, slowly; start one rank per accelerator"
            )
    return said


def find_kernel_differences(mesh: Mesh, dtype: str, spec: ModelSpec | None) -> list[str]:
    """Describe ranks whose device lacks an attention kernel that others of the same name have. Collective. Each
    rank tests before it allocates a model, so that a full memory does not change the result, which is cached.
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
                f"rank{'s' if len(lacking) > 1 else ''} {', '.join(map(str, lacking))} found no attention kernel for "
                f"packed documents on {name}, but rank {having[0]} did on the same model: they are slower and round "
                "differently; install the same driver and libraries on all nodes"
            )
    return said
