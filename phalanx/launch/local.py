"""Starting a run: the folder, each `auto`, the data, then local ranks under the agent, or one rank of a larger job."""

import contextlib
import dataclasses
import functools
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.config.validation import find_unused_keys
from phalanx.core import faults, format_versions
from phalanx.core.errors import ConfigError
from phalanx.core.events import EventKind, write_event
from phalanx.core.faults import Fault
from phalanx.core.incidents import IncidentConsole
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode, InMemoryCheckpoint, Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.rendezvous import refresh_listing
from phalanx.elastic.node import agent
from phalanx.elastic.node.signals import StopRequested, raise_on_stop_signal
from phalanx.elastic.node.watchdog import HangTimeouts, make_hang_timeouts
from phalanx.health.devices import (
    DEVICES_TIMEOUT_S,
    DeviceInfo,
    assign_devices,
    distinct_models,
    preload_and_find_devices,
)
from phalanx.launch import auto_layout, health_gate, outcome, prediction_check, preflight
from phalanx.launch.remote_run_dir import fetch_records, mirror_while_running
from phalanx.layout import hardware
from phalanx.recovery import inventory, shared_memory, state_file
from phalanx.recovery.shared_memory import SharedMemoryFolder
from phalanx.report.terminal import open_terminal
from phalanx.storage import files as storage
from phalanx.storage import mirror
from phalanx.system.fork import fork_call
from phalanx.system.torchrun_env import from_environment
from phalanx.trainer.stop_request import STOP_SIGNALS

if TYPE_CHECKING:
    from phalanx.report.console import Console
    from phalanx.trainer.callback import Callback


@dataclass(frozen=True)
class PreparedRun:
    """What is left to do once a run may start."""

    config: Config
    job: Any  # train.loop.Run; its module imports torch, so this one does not
    attempt: int
    parameters: int  # of the whole model, without adapters
    trainable: int
    unit: str  # what speed counts: tokens or samples
    weights: str | None  # what those it begins with are known by
    warnings: list[str]  # events already, written before anything follows the file
    layout_event: dict[str, Any] | None = None  # details of the event, where parallel.layout is auto


def train(
    wanted: Config,
    paths: RunPaths,
    ranks: int | None,
    environment: Mapping[str, str],
    on_cpu: bool = False,
    planned: Sequence[Fault] = (),
    callbacks: Sequence["Callback"] = (),
) -> int:
    """Train `wanted` in a run folder: as local ranks, or as the rank that torchrun's or Slurm's variables describe;
    `on_cpu` leaves accelerators alone; `planned` is what shall go wrong. `callbacks` are called beside the recipe's, in
    the process of rank 0: what they change there is not seen here.

    Returns the exit code, also of a stop signal that comes before there are ranks; raises PhalanxError for what a user
    can mend.
    """
    try:
        return _train(wanted, paths, ranks, environment, on_cpu, planned, tuple(callbacks))
    except StopRequested as asked:
        open_terminal().print(outcome.describe_early_stop(paths, str(asked)))
        return ExitCode.STOPPED


def _train(
    wanted: Config,
    paths: RunPaths,
    ranks: int | None,
    environment: Mapping[str, str],
    on_cpu: bool,
    planned: Sequence[Fault],
    callbacks: tuple["Callback", ...],
) -> int:
    with raise_on_stop_signal():
        if not paths.config.exists() and from_environment(environment, ()) is None:  # of a larger job one rank looks
            preflight.check_first_records(wanted)
        found, accelerators = preload_and_find_devices(on_cpu)
    given = None if ranks is not None else from_environment(environment, accelerators)
    if given is not None:
        return _join(wanted, paths, given, found[given.device], planned, callbacks)
    return _launch(wanted, paths, assign_devices(found, accelerators, ranks), planned, callbacks)


def _launch(
    wanted: Config,
    paths: RunPaths,
    devices: Sequence[DeviceInfo],
    planned: Sequence[Fault],
    callbacks: tuple["Callback", ...],
) -> int:
    """Run local ranks under the agent, which starts them again when one dies."""
    from phalanx.trainer import run_folder

    faults.check_faults(planned, len(devices), wanted.train.steps, local=paths.url is None)
    with contextlib.ExitStack() as held:
        with raise_on_stop_signal():  # the agent has handlers of its own; these are for what comes before
            held.enter_context(run_folder.hold_run_folder(paths))
            held.enter_context(mirror_while_running(paths))
            if (done := exit_code_if_complete(wanted, paths)) is not None:
                return done
            noticed = health_gate.check_node_if_enabled(wanted, paths, devices)
            prepared = add_faults(prepare_run(wanted, paths, devices, len(devices), len(devices), writes=True), planned)
            prepared = dataclasses.replace(prepared, job=dataclasses.replace(prepared.job, callbacks=callbacks))
        return run_ranks(prepared, paths, devices, health_event=noticed)


def add_faults(prepared: PreparedRun, planned: Sequence[Fault]) -> PreparedRun:
    """What is left to do, with faults in it whose attempts count from the first one of this command."""
    job = dataclasses.replace(prepared.job, faults=faults.shift_attempts(planned, prepared.attempt))
    return dataclasses.replace(prepared, job=job)


def run_ranks(
    prepared: PreparedRun,
    paths: RunPaths,
    devices: Sequence[DeviceInfo],
    health_event: dict[str, Any] | None = None,
) -> int:
    """Run this node's ranks, one for each of `devices`, to the end of the run, and show its progress. `health_event`:
    what was worth a look when this node was looked at."""
    from phalanx.report.console import Console, Follower

    with raise_on_stop_signal():
        if prepared.config.report.tensorboard:
            preload_tensorboard()
        console = Console(prepared.config.train.steps, paths.name, unit=prepared.unit)
        told = IncidentConsole(
            console, lambda details: outcome.write_agent_event(paths, console, EventKind.INCIDENT, details)
        )
        follower = Follower(paths, told)
        said = describe_start(prepared, devices, len(devices)) | {"hosts": [platform.node()]}
        write_event(paths.events, EventKind.RUN_STARTED, prepared.attempt, **said)
        _show_warnings(prepared, console)
        if prepared.layout_event is not None:
            write_event(paths.events, EventKind.LAYOUT_CHOSEN, prepared.attempt, **prepared.layout_event)
        if health_event is not None:
            write_event(paths.events, EventKind.HEALTH, prepared.attempt, **health_event)
    watch = health_gate.HealthWatch(
        paths, health_gate.list_accelerator_uuids(devices), health_gate.make_event_writer(paths)
    )

    def note(kind: str, details: dict[str, Any]) -> None:
        outcome.write_agent_event(paths, console, kind, {"attempt": prepared.attempt} | details)
        told.on_agent_event(kind, details)
        if kind == EventKind.WORKER_DIED and "host" not in details and prepared.config.resilience.health != "off":
            watch.request_check(details["attempt"], f"the death of rank {details['rank']}")

    def idle() -> None:
        follower.poll()
        watch.poll_once()

    job = agent.NodeJob(
        world=len(devices),
        worker=functools.partial(worker, prepared.job),
        paths=paths,
        devices=[device.name for device in devices],
        max_restarts=prepared.config.resilience.max_restarts,
        hang_timeouts=hang_limits(prepared.config),
        max_identical_failures=prepared.config.resilience.max_identical_failures,
        on_event=note,
        on_idle=idle,
        first_attempt=prepared.attempt,
        grace_s=prepared.config.comm.timeout_s,
        blocked_signals=STOP_SIGNALS,
        after_out_of_memory=hardware.watch_limits(paths),
        after_kernel_kill=reduce_memory_of(prepared.job),
    )
    try:
        wanted = prepared.config.resilience.in_memory_checkpoints
        with shared_memory.hold_folder(paths, wanted=wanted is not False) as shared:
            if shared.reason is not None and wanted is True:
                raise ConfigError(
                    f"resilience.in_memory_checkpoints is true, but {shared.reason}; set it to auto or false, or fix "
                    "that"
                )
            if shared.reason is not None:
                note(
                    EventKind.WARNING,
                    {
                        "message": f"{shared.reason}, so no step is kept there: a failure costs the steps "
                        "since the newest checkpoint"
                    },
                )
            for folder in shared_memory.remove_stale_folders():
                note(
                    EventKind.WARNING, {"message": f"removed {folder}, which a run had left behind more than a day ago"}
                )
            code = _run_with_shared_memory(job, shared, prepared, paths)
    finally:
        watch.close()
        follower.poll()
        told.incidents.end({})
        follower.poll(final=True)
        console.close()
    code, asked = outcome.resolve_exit_code(paths, code, prepared.attempt)
    outcome.warn_missing_faults(paths, prepared.job.faults, prepared.attempt)
    outcome.finish_run(paths, code, asked, shared.folder if shared.persists else None)
    return code


def _run_with_shared_memory(
    job: agent.NodeJob, shared: SharedMemoryFolder, prepared: PreparedRun, paths: RunPaths
) -> int:
    """Run a job whose ranks have a folder in shared memory, which stays when it holds more than the disk does."""
    run = state_file.compute_run_id(paths.events)

    def progress() -> int:
        return max(outcome.newest_checkpoint_step(paths), inventory.find_committed_step(shared.folder, run))

    def kept() -> InMemoryCheckpoint | None:
        wanted = prepared.config.resilience.in_memory_checkpoints is not False and job.others is None
        for message in inventory.find_damage(shared.folder):
            job.on_event(EventKind.WARNING, {"message": message})
        return inventory.find_resume_checkpoint(
            shared.folder, run, outcome.newest_checkpoint_step(paths) if wanted else math.inf
        )

    def idle() -> None:
        job.on_idle()
        shared.touch()

    shared.persists = False
    inventory.remove_rolled_back(shared.folder, run, outcome.rollback_attempts(paths))
    code = int(ExitCode.FAILED)
    try:
        code = agent.run_local_job(
            dataclasses.replace(
                job,
                shared=shared.folder,
                keeps_state=shared.state,
                progress=progress,
                find_in_memory_state=kept,
                on_idle=idle,
            )
        )
    finally:
        in_memory = inventory.find_committed_step(shared.folder, run)
        shared.persists = code != ExitCode.DONE and in_memory > outcome.newest_checkpoint_step(paths)
    return code


def reduce_memory_of(job: Any) -> Callable[[int, int, int], str | None]:
    """What has a rank of a trainer's Run ask for less that the kernel has killed for want of memory."""
    return functools.partial(hardware.record_kernel_kill, job.paths)


def hang_limits(config: Config) -> HangTimeouts | None:
    """For how long nothing may change with a rank."""
    return make_hang_timeouts(config.resilience.hang_timeout_s, config.comm.timeout_s, config.train.compile is True)


def _join(
    wanted: Config,
    paths: RunPaths,
    placement: Placement,
    device: DeviceInfo,
    planned: Sequence[Fault],
    callbacks: tuple["Callback", ...],
) -> int:
    """Be one rank of a job that something else started; rank 0 keeps the folder and shows the progress."""
    from phalanx.report.console import Console
    from phalanx.trainer import run_folder, train_rank
    from phalanx.workload.sinks import Sink

    first = placement.rank == 0
    if wanted.parallel.layout == "auto" and placement.world > 1:
        raise ConfigError(
            "parallel.layout auto needs to know the devices of all ranks, and a rank that something else started knows "
            "its own only; start them by `phalanx train` itself (--nodes, or srun --auto-resume=1), or give the recipe "
            "the keys of `phalanx plan`"
        )
    faults.check_faults(planned, placement.world, wanted.train.steps, local=paths.url is None)
    if paths.url is not None:  # the ranks may be on one machine, or on many
        paths = mirror.make_working_paths(paths.url.text, wanted.data.cache, paths.url.timeout_s, placement.rank)
    with contextlib.ExitStack() as stack:
        if first:
            stack.enter_context(run_folder.hold_run_folder(paths))
            stack.enter_context(mirror_while_running(paths))
        elif paths.url is not None:
            fetch_records(paths)
        if (done := exit_code_if_complete(wanted, paths, show=first)) is not None:
            return done
        with raise_on_stop_signal():
            noticed = health_gate.check_node_if_enabled(wanted, paths, [device]) if placement.local_rank == 0 else None
            prepared = prepare_run(wanted, paths, [device], placement.world, placement.local_world, writes=first)
        # Who restarts the ranks starts this command again: attempts are those of the run folder.
        job = dataclasses.replace(prepared.job, faults=tuple(planned), callbacks=callbacks)
        sinks: list[Sink] = []
        if first:
            write_event(
                paths.events,
                EventKind.RUN_STARTED,
                prepared.attempt,
                **describe_start(prepared, [device], placement.world),
            )
            console = Console(prepared.config.train.steps, paths.name, unit=prepared.unit)
            _show_warnings(prepared, console)
            if prepared.layout_event is not None:
                console.on_event(
                    write_event(paths.events, EventKind.LAYOUT_CHOSEN, prepared.attempt, **prepared.layout_event)
                )
            if noticed is not None:
                console.on_event(write_event(paths.events, EventKind.HEALTH, prepared.attempt, **noticed))
            sinks = [console]
            sinks += _sinks(prepared.job, prepared.attempt, console.on_event)
        code = int(train_rank.run_training(job, placement, sinks, attempt=prepared.attempt if first else 0))
        if first:
            outcome.warn_missing_faults(paths, planned, prepared.attempt)
            outcome.finish_run(paths, code)
        return code


def worker(job: Any, placement: Placement) -> int:
    """What each local rank runs. The console is the agent's: it follows the files."""
    from phalanx.trainer import train_rank

    if placement.world > placement.local_world:
        for folder in (job.paths.root, job.paths.has_checkpoints, job.paths.memory_limit(0).parent):
            refresh_listing(folder)
    sinks = _sinks(job, placement.attempt) if placement.rank == 0 else []
    return int(train_rank.run_training(job, placement, sinks))


def _sinks(job: Any, attempt: int, say: Callable[[dict[str, Any]], None] | None = None) -> list[Any]:
    """What rank 0 tells other programs of the run, and what compares its steps with what was expected; `say` is told
    of events that nobody else shows."""
    from phalanx.workload.sinks import TensorBoardSink

    sinks: list[Any] = [TensorBoardSink(job.paths)] if job.config.report.tensorboard else []
    if job.config.report.wandb is not None:
        from phalanx.workload.wandb_sink import WandbSink

        sinks.append(WandbSink(job.paths, job.config, attempt))
    sinks.append(prediction_check.PredictionCheck(job.config, job.spec, job.paths, attempt, say))
    return sinks


def exit_code_if_complete(wanted: Config, paths: RunPaths, show: bool = True) -> int | None:
    """The exit code when the folder holds this run and it has come to its end; None when there is something to do."""
    from phalanx.report.console import render_run_summary
    from phalanx.trainer import run_folder

    saved, step = run_folder.read_run_config(paths), run_folder.find_final_step(paths)
    if saved is None or step is None:
        return None
    if step < load.continue_config(wanted, saved, paths.display_name).train.steps:
        return None
    if show:
        terminal = open_terminal()
        terminal.print(f"this run is complete at step {step}; raise train.steps to go on, or choose another --run-dir")
        terminal.print(render_run_summary(paths))
    return ExitCode.DONE


def prepare_run(
    wanted: Config,
    paths: RunPaths,
    devices: Sequence[DeviceInfo],
    world: int,
    local_world: int,
    writes: bool,
    elsewhere: Sequence[DeviceInfo] = (),
    meanwhile: Callable[[], None] | None = None,
    nodes: Sequence[Sequence[DeviceInfo]] | None = None,
) -> PreparedRun:
    """Resolve every `auto`, make the token files, and (where `writes`) put the configuration into the folder.

    `devices` are this node's, `elsewhere` those of other nodes, and `nodes` those of all ranks in their order, by node,
    if this is not the only one; `meanwhile` is called while this takes long.
    """
    from phalanx.trainer import run_folder
    from phalanx.trainer.loop import TrainingJob
    from phalanx.trainer.resolve import token_folders
    from phalanx.workload import local_copies
    from phalanx.workload.workload import find_model_shape

    saved = run_folder.read_run_config(paths)
    everywhere = [*devices, *elsewhere]
    same = run_folder.last_devices(paths) in (None, (world, distinct_models(everywhere)))
    config = load.continue_config(wanted, saved, paths.display_name, same) if saved else wanted
    nodes, laid = nodes or [devices], None
    if wanted.parallel.layout == "auto":
        config, laid = auto_layout.resolve_layout(wanted, config, paths, nodes, meanwhile)
    kind, bf16 = devices[0].name.partition(":")[0], {device.bf16 for device in everywhere}
    config, chosen = load.resolve_autos(config, device=kind, world=world, bf16=all(bf16), differ=len(bf16) > 1)
    # Devices of one model are alike; of each model one is asked.
    unlike = list({device.model: device.name for device in devices}.values())
    if writes and config.report.wandb is not None:  # before minutes are spent on data
        fork_call(_check_wandb, config.report.wandb, timeout_s=DEVICES_TIMEOUT_S)
    text = load.to_yaml(config)
    answer = fork_call(resolve_text, text, unlike, world, local_world, writes, timeout_s=None, meanwhile=meanwhile)
    config = load.build_config(yaml.safe_load(answer["config"]), "the resolved configuration")
    attempt = run_folder.next_attempt(paths)
    warnings = [*find_unused_keys(wanted, several=world > local_world), *answer["warnings"]]
    train_tokens, held_out_tokens = token_folders(answer)
    if writes:
        with run_folder.report_disk_errors(paths):
            run_folder.check_run_data(paths, answer["data"], resuming=saved is not None, base=answer["base"])
            run_folder.check_run_code(paths, config, resuming=saved is not None)
            run_folder.write_start(paths, config, answer["tokenizer"])
            known = sum(map(len, nodes)) == world  # a rank that something else started knows its own device only
            _write_prediction(paths, laid or (_predict_run(config, paths, nodes) if known else None))
            for key, value, reason in [*chosen, *answer["chosen"]]:
                write_event(paths.events, EventKind.AUTO_RESOLVED, attempt, key=key, value=value, reason=reason)
            for message in warnings:
                write_event(paths.events, EventKind.WARNING, attempt, message=message)
    here = local_copies.use_local_copies(config)
    job = TrainingJob(here, find_model_shape(here, paths), paths, train_tokens, held_out_tokens)
    facts = {name: answer[name] for name in ("parameters", "trainable", "unit", "weights")}
    planned = None if laid is None else auto_layout.layout_event(laid)
    return PreparedRun(config, job, attempt, warnings=warnings, layout_event=planned, **facts)


def _predict_run(config: Config, paths: RunPaths, nodes: Sequence[Sequence[DeviceInfo]]) -> dict[str, Any] | None:
    """What the steps of a resolved configuration are expected to take."""
    from phalanx.workload import local_copies
    from phalanx.workload.workload import find_model_shape

    spec = None if config.model.from_hf is None else find_model_shape(local_copies.use_local_copies(config), paths)
    return auto_layout.predict_layout(config, paths, auto_layout.planner_devices(nodes), spec)


def _write_prediction(paths: RunPaths, prediction: dict[str, Any] | None) -> None:
    """Put what is expected of the run's steps into its folder; what an earlier start expected goes."""
    if prediction is None:
        paths.plan.unlink(missing_ok=True)
    else:
        write_atomic(paths.plan, auto_layout.render_plan_json(prediction))


def choose_local_layout(
    wanted: Config, paths: RunPaths, ranks: int | None, on_cpu: bool
) -> tuple[Config, int, dict[str, Any]]:
    """The recipe in the layout that a run on this machine's devices would choose, how many ranks that is for, and the
    details of its choice. For a dry run: nothing is written."""
    found, accelerators = preload_and_find_devices(on_cpu)
    devices = assign_devices(found, accelerators, ranks)
    config, told = auto_layout.resolve_layout(wanted, wanted, paths, [devices])
    return config, len(devices), auto_layout.layout_event(told)


def _show_warnings(prepared: PreparedRun, console: "Console") -> None:
    for message in prepared.warnings:
        console.on_event({"kind": EventKind.WARNING, "message": message})


def _check_wandb(project: str) -> None:
    from phalanx.workload import wandb_sink

    wandb_sink.check_wandb(project)


def resolve_text(text: str, devices: list[str], world: int, local_world: int, show: bool) -> dict[str, Any]:
    """In a child process, since tokenizers start threads and a probe allocates."""
    from phalanx.report.progress import phase_progress
    from phalanx.trainer.resolve import resolve_with_files

    with phase_progress() if show else contextlib.nullcontext() as progress:
        return resolve_with_files(text, devices, world, local_world, progress)


def resolve_on_node(
    config: Config, devices: Sequence[DeviceInfo], world: int, meanwhile: Callable[[], None]
) -> dict[str, Any]:
    """What `train.resolve` says on this node of a configuration that another node has resolved."""
    unlike = list({device.model: device.name for device in devices}.values())
    refresh_listing(storage.local_cache(config.data.cache))  # that node may just have made there what this one needs
    text = load.to_yaml(config)
    return fork_call(resolve_text, text, unlike, world, len(devices), True, timeout_s=None, meanwhile=meanwhile)


def preload_tensorboard() -> None:
    agent.preload(["torch.utils.tensorboard"])


def describe_start(prepared: PreparedRun, devices: Sequence[DeviceInfo], world: int) -> dict[str, Any]:
    """What the records say of a start; `devices` are those of all ranks where they are known."""
    return {
        format_versions.KEY: format_versions.RUN_FOLDER,
        "parameters": prepared.parameters,
        "trainable": prepared.trainable,
        "world": world,
        "device": devices[0].name.partition(":")[0],
        "device_names": distinct_models(devices),
        # By rank; a rank that something else started knows its own device only.
        "models": [device.model for device in devices] if len(devices) == world else None,
        "dtype": prepared.config.train.dtype,
        "engine": prepared.config.parallel.engine,
        "steps": prepared.config.train.steps,
        "unit": prepared.unit,
    }
