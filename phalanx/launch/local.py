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
from phalanx.config.validation import unused
from phalanx.core import faults, format_versions
from phalanx.core.errors import ConfigError
from phalanx.core.events import Kind, write_event
from phalanx.core.faults import Fault
from phalanx.core.incidents import Told
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode, Kept, Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.rendezvous import look_again
from phalanx.elastic.node import agent
from phalanx.elastic.node.signals import StopAsked, stoppable
from phalanx.elastic.node.watchdog import Patience, patience_of
from phalanx.health.devices import DEVICES_TIMEOUT_S, Device, devices_of_ranks, models, warmed
from phalanx.launch import auto_layout, health_gate, outcome, prediction_check, preflight
from phalanx.launch.remote_run_dir import fetch_records, mirrored
from phalanx.layout import hardware
from phalanx.recovery import inventory, shared_memory, state_file
from phalanx.recovery.shared_memory import SharedMemory
from phalanx.report.terminal import open_terminal
from phalanx.storage import files as storage
from phalanx.storage import mirror
from phalanx.system.fork import fork_call
from phalanx.system.torchrun_env import from_environment
from phalanx.trainer.stop_request import HELD

if TYPE_CHECKING:
    from phalanx.report.console import Console
    from phalanx.trainer.callback import Callback


@dataclass(frozen=True)
class Prepared:
    """What is left to do once a run may start."""

    config: Config
    job: Any  # train.loop.Run; its module imports torch, so this one does not
    attempt: int
    parameters: int  # of the whole model, without adapters
    trainable: int
    unit: str  # what speed counts: tokens or samples
    weights: str | None  # what those it begins with are known by
    warnings: list[str]  # events already, written before anything follows the file
    planned: dict[str, Any] | None = None  # details of the event, where parallel.layout is auto


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
    except StopAsked as asked:
        open_terminal().print(outcome.stopped_early(paths, str(asked)))
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
    with stoppable():
        if not paths.config.exists() and from_environment(environment, ()) is None:  # of a larger job one rank looks
            preflight.look_at_data(wanted)
        found, accelerators = warmed(on_cpu)
    given = None if ranks is not None else from_environment(environment, accelerators)
    if given is not None:
        return _join(wanted, paths, given, found[given.device], planned, callbacks)
    return _launch(wanted, paths, devices_of_ranks(found, accelerators, ranks), planned, callbacks)


def _launch(
    wanted: Config,
    paths: RunPaths,
    devices: Sequence[Device],
    planned: Sequence[Fault],
    callbacks: tuple["Callback", ...],
) -> int:
    """Run local ranks under the agent, which starts them again when one dies."""
    from phalanx.trainer import run_folder

    faults.check(planned, len(devices), wanted.train.steps, local=paths.url is None)
    with contextlib.ExitStack() as held:
        with stoppable():  # the agent has handlers of its own; these are for what comes before
            held.enter_context(run_folder.opened(paths))
            held.enter_context(mirrored(paths))
            if (done := finished(wanted, paths)) is not None:
                return done
            noticed = health_gate.checked(wanted, paths, devices)
            prepared = armed(prepare(wanted, paths, devices, len(devices), len(devices), writes=True), planned)
            prepared = dataclasses.replace(prepared, job=dataclasses.replace(prepared.job, callbacks=callbacks))
        return run_ranks(prepared, paths, devices, noticed=noticed)


def armed(prepared: Prepared, planned: Sequence[Fault]) -> Prepared:
    """What is left to do, with faults in it whose attempts count from the first one of this command."""
    job = dataclasses.replace(prepared.job, faults=faults.absolute(planned, prepared.attempt))
    return dataclasses.replace(prepared, job=job)


def run_ranks(
    prepared: Prepared,
    paths: RunPaths,
    devices: Sequence[Device],
    noticed: dict[str, Any] | None = None,
) -> int:
    """Run this node's ranks, one for each of `devices`, to the end of the run, and show its progress. `noticed`: what
    was worth a look when this node was looked at."""
    from phalanx.report.console import Console, Follower

    with stoppable():
        if prepared.config.report.tensorboard:
            preload_tensorboard()
        console = Console(prepared.config.train.steps, paths.name, unit=prepared.unit)
        told = Told(console, lambda details: outcome.note(paths, console, Kind.INCIDENT, details))
        follower = Follower(paths, told)
        said = facts(prepared, devices, len(devices)) | {"hosts": [platform.node()]}
        write_event(paths.events, Kind.RUN_STARTED, prepared.attempt, **said)
        _show_warnings(prepared, console)
        if prepared.planned is not None:
            write_event(paths.events, Kind.PLANNED, prepared.attempt, **prepared.planned)
        if noticed is not None:
            write_event(paths.events, Kind.HEALTH, prepared.attempt, **noticed)
    watch = health_gate.Watch(paths, health_gate.used(devices), health_gate.into_events(paths))

    def note(kind: str, details: dict[str, Any]) -> None:
        outcome.note(paths, console, kind, {"attempt": prepared.attempt} | details)
        told.note(kind, details)
        if kind == Kind.WORKER_DIED and "host" not in details and prepared.config.resilience.health != "off":
            watch.look(details["attempt"], f"the death of rank {details['rank']}")

    def idle() -> None:
        follower.poll()
        watch.tend()

    job = agent.Job(
        world=len(devices),
        worker=functools.partial(worker, prepared.job),
        paths=paths,
        devices=[device.name for device in devices],
        max_restarts=prepared.config.resilience.max_restarts,
        patience=patience(prepared.config),
        same_crash=prepared.config.resilience.same_crash,
        on_event=note,
        on_idle=idle,
        first_attempt=prepared.attempt,
        grace_s=prepared.config.comm.timeout_s,
        held=HELD,
        after_out_of_memory=hardware.lowered(paths),
        after_kernel_kill=less_for(prepared.job),
    )
    try:
        wanted = prepared.config.resilience.memory
        with shared_memory.held(paths, wanted=wanted is not False) as shared:
            if shared.why is not None and wanted is True:
                raise ConfigError(f"resilience.memory is true, but {shared.why}; set it to auto or false, or fix that")
            if shared.why is not None:
                note(Kind.WARNING, {"message": f"{shared.why}, so no step is kept there: a failure costs the steps "
                                               "since the newest checkpoint"})  # fmt: skip
            for folder in shared_memory.sweep():
                note(Kind.WARNING, {"message": f"removed {folder}, which a run had left behind more than a day ago"})
            code = _in_memory(job, shared, prepared, paths)
    finally:
        watch.close()
        follower.poll()
        told.incidents.end({})
        follower.poll(last=True)
        console.close()
    code, asked = outcome.outcome(paths, code, prepared.attempt)
    outcome.tell_missed(paths, prepared.job.faults, prepared.attempt)
    outcome.close(paths, code, asked, shared.folder if shared.keeps else None)
    return code


def _in_memory(job: agent.Job, shared: SharedMemory, prepared: Prepared, paths: RunPaths) -> int:
    """Run a job whose ranks have a folder in shared memory, which stays when it holds more than the disk does."""
    run = state_file.run_of(paths.events)

    def progress() -> int:
        return max(outcome.committed(paths), inventory.committed(shared.folder, run))

    def kept() -> Kept | None:
        wanted = prepared.config.resilience.memory is not False and job.others is None
        for message in inventory.damage_in(shared.folder):
            job.on_event(Kind.WARNING, {"message": message})
        return inventory.to_go_on_from(shared.folder, run, outcome.committed(paths) if wanted else math.inf)

    def idle() -> None:
        job.on_idle()
        shared.touch()

    shared.keeps = False
    inventory.remove_passed(shared.folder, run, outcome.rolled_back(paths))
    code = int(ExitCode.FAILED)
    try:
        code = agent.run(
            dataclasses.replace(
                job, shared=shared.folder, keeps=shared.state, progress=progress, kept=kept, on_idle=idle
            )
        )
    finally:
        in_memory = inventory.committed(shared.folder, run)
        shared.keeps = code != ExitCode.DONE and in_memory > outcome.committed(paths)
    return code


def less_for(job: Any) -> Callable[[int, int, int], str | None]:
    """What has a rank of a trainer's Run ask for less that the kernel has killed for want of memory."""
    return functools.partial(hardware.after_kernel_kill, job.paths)


def patience(config: Config) -> Patience | None:
    """For how long nothing may change with a rank."""
    return patience_of(config.resilience.hang_s, config.comm.timeout_s, config.train.compile is True)


def _join(
    wanted: Config,
    paths: RunPaths,
    placement: Placement,
    device: Device,
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
    faults.check(planned, placement.world, wanted.train.steps, local=paths.url is None)
    if paths.url is not None:  # the ranks may be on one machine, or on many
        paths = mirror.working(paths.url.text, wanted.data.cache, paths.url.timeout_s, placement.rank)
    with contextlib.ExitStack() as stack:
        if first:
            stack.enter_context(run_folder.opened(paths))
            stack.enter_context(mirrored(paths))
        elif paths.url is not None:
            fetch_records(paths)
        if (done := finished(wanted, paths, show=first)) is not None:
            return done
        with stoppable():
            noticed = health_gate.checked(wanted, paths, [device]) if placement.local_rank == 0 else None
            prepared = prepare(wanted, paths, [device], placement.world, placement.local_world, writes=first)
        # Who restarts the ranks starts this command again: attempts are those of the run folder.
        job = dataclasses.replace(prepared.job, faults=tuple(planned), callbacks=callbacks)
        sinks: list[Sink] = []
        if first:
            write_event(paths.events, Kind.RUN_STARTED, prepared.attempt, **facts(prepared, [device], placement.world))
            console = Console(prepared.config.train.steps, paths.name, unit=prepared.unit)
            _show_warnings(prepared, console)
            if prepared.planned is not None:
                console.on_event(write_event(paths.events, Kind.PLANNED, prepared.attempt, **prepared.planned))
            if noticed is not None:
                console.on_event(write_event(paths.events, Kind.HEALTH, prepared.attempt, **noticed))
            sinks = [console]
            sinks += _sinks(prepared.job, prepared.attempt, console.on_event)
        code = int(train_rank.run(job, placement, sinks, attempt=prepared.attempt if first else 0))
        if first:
            outcome.tell_missed(paths, planned, prepared.attempt)
            outcome.close(paths, code)
        return code


def worker(job: Any, placement: Placement) -> int:
    """What each local rank runs. The console is the agent's: it follows the files."""
    from phalanx.trainer import train_rank

    if placement.world > placement.local_world:
        for folder in (job.paths.root, job.paths.has_checkpoints, job.paths.limit(0).parent):
            look_again(folder)
    sinks = _sinks(job, placement.attempt) if placement.rank == 0 else []
    return int(train_rank.run(job, placement, sinks))


def _sinks(job: Any, attempt: int, say: Callable[[dict[str, Any]], None] | None = None) -> list[Any]:
    """What rank 0 tells other programs of the run, and what compares its steps with what was expected; `say` is told
    of events that nobody else shows."""
    from phalanx.workload.sinks import TensorBoard

    sinks: list[Any] = [TensorBoard(job.paths)] if job.config.report.tensorboard else []
    if job.config.report.wandb is not None:
        from phalanx.workload.wandb_sink import WeightsAndBiases

        sinks.append(WeightsAndBiases(job.paths, job.config, attempt))
    sinks.append(prediction_check.Comparison(job.config, job.spec, job.paths, attempt, say))
    return sinks


def finished(wanted: Config, paths: RunPaths, show: bool = True) -> int | None:
    """The exit code when the folder holds this run and it has come to its end; None when there is something to do."""
    from phalanx.report.console import summary
    from phalanx.trainer import run_folder

    saved, step = run_folder.saved_config(paths), run_folder.finished_step(paths)
    if saved is None or step is None:
        return None
    if step < load.continue_from(wanted, saved, paths.shown).train.steps:
        return None
    if show:
        terminal = open_terminal()
        terminal.print(f"this run is complete at step {step}; raise train.steps to go on, or choose another --run-dir")
        terminal.print(summary(paths))
    return ExitCode.DONE


def prepare(
    wanted: Config,
    paths: RunPaths,
    devices: Sequence[Device],
    world: int,
    local_world: int,
    writes: bool,
    elsewhere: Sequence[Device] = (),
    meanwhile: Callable[[], None] | None = None,
    nodes: Sequence[Sequence[Device]] | None = None,
) -> Prepared:
    """Resolve every `auto`, make the token files, and (where `writes`) put the configuration into the folder.

    `devices` are this node's, `elsewhere` those of other nodes, and `nodes` those of all ranks in their order, by node,
    if this is not the only one; `meanwhile` is called while this takes long.
    """
    from phalanx.trainer import run_folder
    from phalanx.trainer.loop import Run
    from phalanx.trainer.resolve import token_folders
    from phalanx.workload import local_copies
    from phalanx.workload.workload import spec_if_any

    saved = run_folder.saved_config(paths)
    everywhere = [*devices, *elsewhere]
    same = run_folder.last_devices(paths) in (None, (world, models(everywhere)))
    config = load.continue_from(wanted, saved, paths.shown, same) if saved else wanted
    nodes, laid = nodes or [devices], None
    if wanted.parallel.layout == "auto":
        config, laid = auto_layout.laid_out(wanted, config, paths, nodes, meanwhile)
    kind, bf16 = devices[0].name.partition(":")[0], {device.bf16 for device in everywhere}
    config, chosen = load.resolve(config, device=kind, world=world, bf16=all(bf16), differ=len(bf16) > 1)
    # Devices of one model are alike; of each model one is asked.
    unlike = list({device.model: device.name for device in devices}.values())
    if writes and config.report.wandb is not None:  # before minutes are spent on data
        fork_call(_check_wandb, config.report.wandb, timeout_s=DEVICES_TIMEOUT_S)
    text = load.to_yaml(config)
    answer = fork_call(resolve, text, unlike, world, local_world, writes, timeout_s=None, meanwhile=meanwhile)
    config = load.check(yaml.safe_load(answer["config"]), "the resolved configuration")
    attempt = run_folder.next_attempt(paths)
    warnings = [*unused(wanted, several=world > local_world), *answer["warnings"]]
    train_tokens, held_out_tokens = token_folders(answer)
    if writes:
        with run_folder.writing(paths):
            run_folder.check_data(paths, answer["data"], going_on=saved is not None, base=answer["base"])
            run_folder.check_code(paths, config, going_on=saved is not None)
            run_folder.write_start(paths, config, answer["tokenizer"])
            known = sum(map(len, nodes)) == world  # a rank that something else started knows its own device only
            _keep_plan(paths, laid or (_foretold(config, paths, nodes) if known else None))
            for key, value, reason in [*chosen, *answer["chosen"]]:
                write_event(paths.events, Kind.RESOLVED, attempt, key=key, value=value, reason=reason)
            for message in warnings:
                write_event(paths.events, Kind.WARNING, attempt, message=message)
    here = local_copies.here(config)
    job = Run(here, spec_if_any(here, paths), paths, train_tokens, held_out_tokens)
    facts = {name: answer[name] for name in ("parameters", "trainable", "unit", "weights")}
    planned = None if laid is None else auto_layout.event_of(laid)
    return Prepared(config, job, attempt, warnings=warnings, planned=planned, **facts)


def _foretold(config: Config, paths: RunPaths, nodes: Sequence[Sequence[Device]]) -> dict[str, Any] | None:
    """What the steps of a resolved configuration are expected to take."""
    from phalanx.workload import local_copies
    from phalanx.workload.workload import spec_if_any

    spec = None if config.model.from_hf is None else spec_if_any(local_copies.here(config), paths)
    return auto_layout.foretold(config, paths, auto_layout.present_on(nodes), spec)


def _keep_plan(paths: RunPaths, told: dict[str, Any] | None) -> None:
    """Put what is expected of the run's steps into its folder; what an earlier start expected goes."""
    if told is None:
        paths.plan.unlink(missing_ok=True)
    else:
        write_atomic(paths.plan, auto_layout.text_of(told))


def laid_out_here(
    wanted: Config, paths: RunPaths, ranks: int | None, on_cpu: bool
) -> tuple[Config, int, dict[str, Any]]:
    """The recipe in the layout that a run on this machine's devices would choose, how many ranks that is for, and the
    details of its choice. For a dry run: nothing is written."""
    found, accelerators = warmed(on_cpu)
    devices = devices_of_ranks(found, accelerators, ranks)
    config, told = auto_layout.laid_out(wanted, wanted, paths, [devices])
    return config, len(devices), auto_layout.event_of(told)


def _show_warnings(prepared: Prepared, console: "Console") -> None:
    for message in prepared.warnings:
        console.on_event({"kind": Kind.WARNING, "message": message})


def _check_wandb(project: str) -> None:
    from phalanx.workload import wandb_sink

    wandb_sink.check(project)


def resolve(text: str, devices: list[str], world: int, local_world: int, show: bool) -> dict[str, Any]:
    """In a child process, since tokenizers start threads and a probe allocates."""
    from phalanx.report.progress import phases
    from phalanx.trainer.resolve import resolve_with_files

    with phases() if show else contextlib.nullcontext() as progress:
        return resolve_with_files(text, devices, world, local_world, progress)


def resolved(config: Config, devices: Sequence[Device], world: int, meanwhile: Callable[[], None]) -> dict[str, Any]:
    """What `train.resolve` says on this node of a configuration that another node has resolved."""
    unlike = list({device.model: device.name for device in devices}.values())
    look_again(storage.local_cache(config.data.cache))  # that node may just have made there what this one needs
    text = load.to_yaml(config)
    return fork_call(resolve, text, unlike, world, len(devices), True, timeout_s=None, meanwhile=meanwhile)


def preload_tensorboard() -> None:
    agent.preload(["torch.utils.tensorboard"])


def facts(prepared: Prepared, devices: Sequence[Device], world: int) -> dict[str, Any]:
    """What the records say of a start; `devices` are those of all ranks where they are known."""
    return {
        format_versions.KEY: format_versions.RUN_FOLDER,
        "parameters": prepared.parameters,
        "trainable": prepared.trainable,
        "world": world,
        "device": devices[0].name.partition(":")[0],
        "device_names": models(devices),
        # By rank; a rank that something else started knows its own device only.
        "models": [device.model for device in devices] if len(devices) == world else None,
        "dtype": prepared.config.train.dtype,
        "engine": prepared.config.parallel.data,
        "steps": prepared.config.train.steps,
        "unit": prepared.unit,
    }
