"""Preparing a run before its first step: resolving each `auto`, the data, and the configuration in the run folder; and
the function that its ranks run."""

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config import load, resolve
from phalanx.config.schema import Config, get_knob, iter_knobs
from phalanx.config.validation import find_unused_keys
from phalanx.core import faults, format_versions
from phalanx.core.errors import ConfigError
from phalanx.core.faults import Fault
from phalanx.core.json_lines import write_atomic
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.admission import redact
from phalanx.elastic.membership.rendezvous import refresh_listing
from phalanx.elastic.node import agent
from phalanx.elastic.node.watchdog import HangTimeouts, make_hang_timeouts
from phalanx.health.findings import (
    DEVICES_TIMEOUT_S,
    DeviceInfo,
    assign_devices,
    distinct_models,
    preload_and_find_devices,
)
from phalanx.launch import auto_layout, observer
from phalanx.layout import memory_limits
from phalanx.planner.recipe_keys import CHOICE_FIELDS
from phalanx.report.logs import open_terminal
from phalanx.storage import files as storage
from phalanx.system.fork import fork_call


@dataclass(frozen=True)
class PreparedRun:
    """The prepared run: what remains to be done once it may start."""

    config: Config
    job: Any  # trainer.setup.TrainingJob; its module imports torch, so this one does not
    attempt: int
    parameters: int  # of the whole model, without adapters
    trainable: int
    unit: str  # what speed counts: tokens or samples
    weights: str | None  # what those it begins with are known by
    warnings: list[str]  # events already, written before anything follows the file
    layout_event: dict[str, Any] | None = None  # details of the event, where parallel.layout is auto


def exit_code_if_complete(wanted: Config, paths: RunPaths, show: bool = True) -> int | None:
    """The exit code if the folder has this run and it is complete; None if steps remain."""
    from phalanx.report.console import render_run_summary
    from phalanx.trainer import run_folder

    saved, step = run_folder.read_run_config(paths), run_folder.find_final_step(paths)
    if saved is None or step is None:
        return None
    train = resolve.continue_config(wanted, saved, paths.display_name).train
    same = train.epochs is not None and train.epochs == saved.train.epochs  # whose steps are known by now
    if step < (saved.train.steps if same else train.most_steps):
        return None
    if show:
        terminal = open_terminal()
        terminal.print(
            f"this run is complete at step {step}; raise train.steps to continue, or choose another --run-dir"
        )
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
    from phalanx.trainer.resolve import make_training_job

    saved = run_folder.read_run_config(paths)
    everywhere = [*devices, *elsewhere]
    same = run_folder.last_devices(paths) in (None, (world, distinct_models(everywhere)))
    config = resolve.continue_config(wanted, saved, paths.display_name, same) if saved else wanted
    nodes, laid = nodes or [devices], None
    if wanted.parallel.layout == "auto":
        config, laid = auto_layout.resolve_layout(wanted, config, paths, nodes, meanwhile)
    kind, bf16 = devices[0].name.partition(":")[0], {device.bf16 for device in everywhere}
    config, chosen = resolve.resolve_autos(config, device=kind, world=world, bf16=all(bf16), differ=len(bf16) > 1)
    # Devices of one model are alike; of each model one is asked.
    unlike = list({device.model: device.name for device in devices}.values())
    if writes:
        observer.check_report(config.report)
    if writes and config.report.wandb is not None:  # before minutes are spent on data
        fork_call(_check_wandb, config.report.wandb, timeout_s=DEVICES_TIMEOUT_S)
    text = load.to_yaml(config)
    answer = fork_call(resolve_text, text, unlike, world, local_world, writes, timeout_s=None, meanwhile=meanwhile)
    config = load.from_yaml(answer["config"], "the resolved configuration")
    attempt = run_folder.next_attempt(paths)
    warnings = [*find_unused_keys(wanted, several=world > local_world), *answer["warnings"]]
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
    facts = {name: answer[name] for name in ("parameters", "trainable", "unit", "weights")}
    planned = None if laid is None else auto_layout.layout_event(laid)
    return PreparedRun(
        config, make_training_job(answer, paths), attempt, warnings=warnings, layout_event=planned, **facts
    )


def add_faults(prepared: PreparedRun, planned: Sequence[Fault]) -> PreparedRun:
    """Add faults to a prepared run, with attempts counted from the first one of this command."""
    job = dataclasses.replace(prepared.job, faults=faults.shift_attempts(planned, prepared.attempt))
    return dataclasses.replace(prepared, job=job)


def _predict_run(config: Config, paths: RunPaths, nodes: Sequence[Sequence[DeviceInfo]]) -> dict[str, Any] | None:
    """Predict the steps of a resolved configuration."""
    from phalanx.workload import local_copies
    from phalanx.workload.workload import find_model_shape

    spec = None if config.model.from_hf is None else find_model_shape(local_copies.use_local_copies(config), paths)
    return auto_layout.predict_layout(config, paths, auto_layout.planner_devices(nodes), spec)


def _write_prediction(paths: RunPaths, prediction: dict[str, Any] | None) -> None:
    """Write the prediction of the run's steps into its folder, replacing that of an earlier start."""
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


def _check_wandb(project: str) -> None:
    from phalanx.workload import wandb_sink

    wandb_sink.check_wandb(project)


def resolve_text(text: str, devices: list[str], world: int, local_world: int, show: bool) -> dict[str, Any]:
    """In a child process, since tokenizers start threads and a probe allocates."""
    from phalanx.report.logs import phase_progress
    from phalanx.trainer.resolve import resolve_with_files

    with phase_progress() if show else contextlib.nullcontext() as progress:
        return resolve_with_files(text, devices, world, local_world, progress)


def resolve_on_node(
    config: Config, devices: Sequence[DeviceInfo], world: int, meanwhile: Callable[[], None]
) -> dict[str, Any]:
    """Run `resolve_with_files` on this node for a configuration that another node has resolved."""
    unlike = list({device.model: device.name for device in devices}.values())
    refresh_listing(storage.local_cache(config.data.cache))  # that node may just have made there what this one needs
    text = load.to_yaml(config)
    return fork_call(resolve_text, text, unlike, world, len(devices), True, timeout_s=None, meanwhile=meanwhile)


def describe_start(prepared: PreparedRun, devices: Sequence[DeviceInfo], world: int) -> dict[str, Any]:
    """Details of the event of a start; `devices` are those of all ranks where they are known."""
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
        "global_batch": prepared.config.train.global_batch,
        "tensor": prepared.config.parallel.tensor,
        "pipeline": prepared.config.parallel.pipeline,
        "unit": prepared.unit,
    }


def worker(job: Any, placement: Placement) -> int:
    """What each local rank runs. The console is the agent's: it follows the files."""
    from phalanx.trainer import train_rank

    if placement.world > placement.local_world:
        for folder in (job.paths.root, job.paths.has_checkpoints, job.paths.memory_limit(0).parent):
            refresh_listing(folder)
    sinks = make_sinks(job, placement.attempt) if placement.rank == 0 else []
    return int(train_rank.run_training(job, placement, sinks))


def make_sinks(job: Any, attempt: int, say: Callable[[dict[str, Any]], None] | None = None) -> list[Any]:
    """Rank 0's sinks: exports to other programs, and the comparison of steps with the prediction; `say` shows events
    that have no other display."""
    from phalanx.workload.sinks import TensorBoardSink

    sinks: list[Any] = [TensorBoardSink(job.paths)] if job.config.report.tensorboard else []
    if job.config.report.wandb is not None:
        from phalanx.workload.wandb_sink import WandbSink

        sinks.append(WandbSink(job.paths, job.config, attempt))
    sinks.append(auto_layout.PredictionCheck(job.config, job.spec, job.paths, attempt, say))
    return sinks


def hang_limits(config: Config) -> HangTimeouts | None:
    """Hang limits of a rank: how long it may make no progress."""
    return make_hang_timeouts(config.resilience.hang_timeout_s, config.comm.timeout_s, config.train.compile is True)


def reduce_memory_of(job: Any) -> Callable[[int, int, int], str | None]:
    """Reduces the memory of a rank of a TrainingJob that the kernel killed because memory ran out."""
    return functools.partial(memory_limits.record_kernel_kill, job.paths)


def preload_tensorboard() -> None:
    agent.preload(["torch.utils.tensorboard"])


# ------------------------------------------------------ whether what a leader offers is what this node was started for
# Whether a leader's offer matches this node's settings. Pure functions. An offer decides which code is imported and
# which files are opened here. So each node compares it with its own recipe, spares and returning nodes too: they were
# all started with one.


SHOWN = 3  # keys that a sentence names


def check_offer(requested: Config, offered: Config) -> None:
    """Raise ConfigError where a leader's resolved configuration does not follow from `requested`, this node's
    recipe."""
    different = [key for key, info in iter_knobs() if not _follows(key, info.annotation, requested, offered)]
    if different:
        both = [(key, _plain(offered, key), _plain(requested, key)) for key in different[:SHOWN]]
        said = "; ".join(f"{key} is {theirs!r} there and {mine!r} here" for key, theirs, mine in both)
        raise ConfigError(
            f"the leader's recipe differs from this node's: {said}; start all nodes with the same recipe and the "
            "same keys"
        )


def _follows(key: str, annotation: Any, wanted: Config, offered: Config) -> bool:
    """Whether the offered value of a key may result from the recipe's. Besides equal values, these are: the resolved
    value of an `auto`; the planner's choice, if parallel.layout is auto and the recipe does not set the key; and the
    second copy of the state and a file of measurements, which are dropped in layouts that do not use them."""
    mine, theirs = get_knob(wanted, key), get_knob(offered, key)
    if mine == theirs:
        return True
    if mine == "auto":
        return theirs in ("train", wanted.model.from_hf) if key == "data.tokenizer" else _resolves(annotation)
    planned = wanted.parallel.layout == "auto"
    if key == "parallel.layout":
        return planned and theirs == "given"
    if key == "balance.hardware":
        return planned and theirs is None
    if key == "optim.double_buffer" and not theirs:
        return True
    return planned and key in CHOICE_FIELDS and key not in load.find_explicit_keys(wanted)


def _resolves(annotation: Any) -> bool:
    """Whether the `auto` of a key of this type resolves to a value that is not arbitrary text, which could name a file
    or a program."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if is_union else (annotation,)
    plain = [option.__origin__ if typing.get_origin(option) is typing.Annotated else option for option in options]
    return str not in plain and any("auto" in typing.get_args(option) for option in plain)


def _plain(config: Config, key: str) -> Any:
    """A value as JSON has it, as others may read it."""
    tree: Any = config.model_dump(mode="json")
    for part in key.split("."):
        tree = None if tree is None else tree[part]
    return redact(tree)


def check_faults(asked: Sequence[Fault], offered: Sequence[Fault]) -> None:
    """Raise ConfigError where a leader offers other faults than this node was asked for; their attempts count from the
    first one of the run folder."""
    later = {theirs.attempt - mine.attempt for mine, theirs in zip(asked, offered, strict=False)}
    same = [replace(each, attempt=1) for each in asked] == [replace(each, attempt=1) for each in offered]
    if not same or len(later) > 1 or any(by < 0 for by in later):
        raise ConfigError("the leader's faults differ from this node's --inject; start all nodes with the same faults")
