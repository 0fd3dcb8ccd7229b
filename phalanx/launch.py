"""Starting a run: the folder, each `auto`, the data, then local ranks under the agent, or one rank of a larger job."""

import contextlib
import functools
import glob
import os
import select
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.text import Text

from phalanx import mirror, recipe
from phalanx.cluster import agent
from phalanx.cluster.fork import fork, fork_call
from phalanx.cluster.placement import device_of, from_environment
from phalanx.cluster.stopping import StopAsked, stoppable
from phalanx.config import Config
from phalanx.errors import PhalanxError, StorageError
from phalanx.records import HELD_OUT, ExitCode, Kind, Placement, RunPaths, Url, read_lines, write_event
from phalanx.report.terminal import open_terminal

# What a worker needs, imported once in the parent that forks the workers. Importing torch alone is not enough: the
# first optimizer step would import torch._dynamo in each worker.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "phalanx.train.trainer",
    "phalanx.train.resolve",
)
DEVICES_TIMEOUT_S = 120.0
NOTICE_S = 5.0  # what takes longer at the end is named


@dataclass(frozen=True)
class Device:
    """A device of this machine, as a child process that may touch it found it."""

    name: str  # "cpu", or an accelerator with its index
    model: str  # what its maker calls it
    bf16: bool  # whether it computes in that type


@dataclass(frozen=True)
class Prepared:
    """What is left to do once a run may start."""

    config: Config
    job: Any  # train.trainer.Run; its module imports torch, so this one does not
    attempt: int
    parameters: int  # of the whole model, without adapters
    trainable: int


def train(
    wanted: Config, paths: RunPaths, ranks: int | None, environment: Mapping[str, str], on_cpu: bool = False
) -> int:
    """Train `wanted` in a run folder: as local ranks, or as the rank that torchrun's or Slurm's variables describe;
    `on_cpu` leaves accelerators alone.

    Returns the exit code, also of a stop signal that comes before there are ranks; raises PhalanxError for what a user
    can mend.
    """
    try:
        return _train(wanted, paths, ranks, environment, on_cpu)
    except StopAsked as asked:
        open_terminal().print(f"stopped by {asked} before any step was done; the same command starts again")
        return ExitCode.STOPPED


def shrink(wanted: Config, show: bool = True) -> Config:
    """The recipe in tiny; says what it changed."""
    from phalanx import shrink as tiny

    agent.preload(["phalanx.data.chat"])  # with numpy, whose threads would forbid to fork later
    tiny_hf = fork_call(_tiny_hf, recipe.to_yaml(wanted), timeout_s=None) if wanted.model.from_hf else None
    config = tiny.shrunk(wanted, _is_here, tiny_hf)
    if show:
        terminal = open_terminal()
        terminal.print("shrunk; what differs from the recipe:")
        for line in tiny.changes(wanted, config):
            terminal.print(Text(f"  {line}", style="dim"))
    return config


def _is_here(source: str) -> bool:
    from phalanx.data.chat import TEMPLATES

    built_in = source in ("stdlib", "stdlib-chat") or source in TEMPLATES
    return built_in or bool(glob.glob(os.path.expanduser(source), recursive=True))


def _tiny_hf(text: str) -> tuple[str, bool]:
    from phalanx.train import copies
    from phalanx.train.tiny import tiny_folder

    return tiny_folder(copies.fetched(recipe.check(yaml.safe_load(text), "the recipe"), weights=False))


def _train(wanted: Config, paths: RunPaths, ranks: int | None, environment: Mapping[str, str], on_cpu: bool) -> int:
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environment):
        # Read once, when torch is loaded. By default waiting OpenMP threads spin: on cores that others use too, a step
        # then takes up to 40 times as long (measured on two cores with one other process).
        os.environ["GOMP_SPINCOUNT"] = "20000"
    terminal = open_terminal()
    if terminal.is_terminal:
        terminal.print("[dim]importing torch[/dim]", end="\r")
    with stoppable():
        agent.preload(PRELOAD)
        found = {row[0]: Device(*row) for row in fork_call(_devices, timeout_s=DEVICES_TIMEOUT_S)}
    accelerators = [name for name in found if name != "cpu" and not on_cpu]
    given = None if ranks is not None else from_environment(environment, accelerators)
    if given is not None:
        return _join(wanted, paths, given, found[given.device])
    world = ranks or len(accelerators) or 1
    return _launch(wanted, paths, [found[device_of(accelerators, rank, world)] for rank in range(world)])


def _devices() -> list[tuple[str, str, bool]]:
    from phalanx import accelerator

    names = ["cpu", *accelerator.found()]
    return [(name, accelerator.model_of(name), accelerator.supports_bf16(name)) for name in names]


def _launch(wanted: Config, paths: RunPaths, devices: Sequence[Device]) -> int:
    """Run local ranks under the agent, which starts them again when one dies."""
    from phalanx.report.console import Console, Follower
    from phalanx.train import folder

    with contextlib.ExitStack() as held:
        with stoppable():  # the agent has handlers of its own; these are for what comes before
            held.enter_context(folder.opened(paths))
            held.enter_context(_mirrored(paths))
            if (done := _finished(wanted, paths)) is not None:
                return done
            world = len(devices)
            prepared = _prepare(wanted, paths, devices, world, world, writes=True)
            if prepared.config.report.tensorboard:
                agent.preload(["torch.utils.tensorboard"])
            console = Console(prepared.config.train.steps, paths.name)
            follower = Follower(paths, console)
            write_event(paths.events, Kind.RUN_STARTED, prepared.attempt, **_facts(prepared, devices, world))
            job = agent.Job(
                world=world,
                worker=functools.partial(_worker, prepared.job),
                paths=paths,
                devices=[device.name for device in devices],
                max_restarts=prepared.config.resilience.max_restarts,
                on_event=lambda kind, details: _note(paths, console, kind, details),
                on_idle=follower.poll,
                first_attempt=prepared.attempt,
                grace_s=prepared.config.comm.timeout_s,
                progress=lambda: _committed(paths),
            )
            try:
                code = agent.run(job)
            finally:
                follower.poll()
                console.close()
        code, asked = _outcome(paths, code, prepared.attempt)
        _close(paths, code, asked)
        return code


def _join(wanted: Config, paths: RunPaths, placement: Placement, device: Device) -> int:
    """Be one rank of a job that something else started; rank 0 keeps the folder and shows the progress."""
    from phalanx.report.console import Console
    from phalanx.train import folder, trainer
    from phalanx.train.sinks import Sink

    first = placement.rank == 0
    if paths.url is not None:  # the ranks may be on one machine, or on many
        paths = mirror.working(paths.url.text, wanted.data.cache, paths.url.timeout_s, placement.rank)
    with contextlib.ExitStack() as stack:
        if first:
            stack.enter_context(folder.opened(paths))
            stack.enter_context(_mirrored(paths))
        elif paths.url is not None:
            fork_call(_fetch, str(paths.root), paths.url.text, paths.url.timeout_s, timeout_s=None)
        if (done := _finished(wanted, paths, show=first)) is not None:
            return done
        with stoppable():
            prepared = _prepare(wanted, paths, [device], placement.world, placement.local_world, writes=first)
        sinks: list[Sink] = []
        if first:
            write_event(paths.events, Kind.RUN_STARTED, prepared.attempt, **_facts(prepared, [device], placement.world))
            sinks = [Console(prepared.config.train.steps, paths.name)]
            sinks += _sinks(prepared.job, prepared.attempt)
        code = int(trainer.run(prepared.job, placement, sinks, attempt=prepared.attempt if first else 0))
        if first:
            _close(paths, code)
        return code


@contextlib.contextmanager
def _mirrored(paths: RunPaths) -> Iterator[None]:
    """While it lasts, a run folder at a URL is this process's alone, and a child copies the records there.

    Raises RunError when another process uses the run, and StorageError when not all has been copied at the end.
    """
    if paths.url is None:
        yield
        return
    place = (str(paths.root), paths.url.text, paths.url.timeout_s)
    fork_call(_take, *place, os.getpid(), timeout_s=None)
    reader, writer = os.pipe()
    pid, pidfd = fork(lambda: mirror.follow(paths, reader), keep=[reader])
    os.close(reader)

    def end() -> str | None:
        os.close(writer)  # which tells it to come to its end
        if not select.select([pidfd], [], [], NOTICE_S)[0]:
            open_terminal().print(f"copying the last records to {paths.shown}, which is tried for a while if need be")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(pidfd)
        if code == ExitCode.DONE:
            return None
        mends = "" if code == ExitCode.CONFIG else ", and the same command on this machine copies them"
        why = mirror.complaint(paths)
        return f"not all records of the run are at {paths.shown} ({why}); they are in {paths.root}{mends}"

    try:
        yield
    except BaseException:
        missing = end()
        if missing is not None:
            open_terminal().print(missing, style="yellow")
        raise
    missing = end()
    if missing is not None:
        raise StorageError(missing)


def _take(root: str, url: str, timeout_s: float, pid: int) -> None:
    paths = RunPaths(Path(root), Url(url, timeout_s))
    mirror.take(paths, pid)
    try:
        mirror.fetch(paths)
    except BaseException:
        mirror.release(paths)
        raise


def _fetch(root: str, url: str, timeout_s: float) -> None:
    paths = RunPaths(Path(root), Url(url, timeout_s))
    paths.root.mkdir(parents=True, exist_ok=True)
    mirror.fetch(paths)


def _worker(job: Any, placement: Placement) -> int:
    """What each local rank runs. The console is the agent's: it follows the files."""
    from phalanx.train import trainer

    sinks = _sinks(job, placement.attempt) if placement.rank == 0 else []
    return int(trainer.run(job, placement, sinks))


def _sinks(job: Any, attempt: int) -> list[Any]:
    """What rank 0 tells other programs of the run."""
    from phalanx.train.sinks import TensorBoard

    sinks: list[Any] = [TensorBoard(job.paths)] if job.config.report.tensorboard else []
    if job.config.report.wandb is not None:
        from phalanx.train.weights_and_biases import WeightsAndBiases

        sinks.append(WeightsAndBiases(job.paths, job.config, attempt))
    return sinks


def _finished(wanted: Config, paths: RunPaths, show: bool = True) -> int | None:
    """The exit code when the folder holds this run and it has come to its end; None when there is something to do."""
    from phalanx.report.console import summary
    from phalanx.train import folder

    saved, step = folder.saved_config(paths), folder.finished_step(paths)
    if saved is None or step is None:
        return None
    if step < recipe.continue_from(wanted, saved, paths.shown).train.steps:
        return None
    if show:
        terminal = open_terminal()
        terminal.print(f"this run is complete at step {step}; raise train.steps to go on, or choose another --run-dir")
        terminal.print(summary(paths))
    return ExitCode.DONE


def _prepare(
    wanted: Config, paths: RunPaths, devices: Sequence[Device], world: int, local_world: int, writes: bool
) -> Prepared:
    """Resolve every `auto`, make the token files, and (where `writes`) put the configuration into the folder."""
    from phalanx.data.tokens import TokenFile
    from phalanx.train import copies, folder
    from phalanx.train.build import spec_from_run
    from phalanx.train.resolve import token_folders
    from phalanx.train.trainer import Run

    saved = folder.saved_config(paths)
    same = folder.last_devices(paths) in (None, (world, _models(devices)))
    config = recipe.continue_from(wanted, saved, paths.shown, same) if saved else wanted
    kind, bf16 = devices[0].name.partition(":")[0], {device.bf16 for device in devices}
    config, chosen = recipe.resolve(config, device=kind, world=world, bf16=all(bf16), differ=len(bf16) > 1)
    # Devices of one model are alike; of each model one is asked.
    unlike = list({device.model: device.name for device in devices}.values())
    if writes and config.report.wandb is not None:  # before minutes are spent on data
        fork_call(_check_wandb, config.report.wandb, timeout_s=DEVICES_TIMEOUT_S)
    answer = fork_call(_resolve, recipe.to_yaml(config), unlike, world, local_world, writes, timeout_s=None)
    config = recipe.check(yaml.safe_load(answer["config"]), "the resolved configuration")
    attempt = folder.next_attempt(paths)
    train_tokens, held_out_tokens = token_folders(answer)
    if writes:
        token_sets = {name: TokenFile(path) for name, path in _token_sets(train_tokens, held_out_tokens).items()}
        with folder.writing(paths):
            folder.check_data(paths, token_sets, going_on=saved is not None, base=answer["base"])
            folder.check_code(paths, config, going_on=saved is not None)
            folder.write_start(paths, config, Path(answer["tokenizer"]))
            for key, value, reason in [*chosen, *answer["chosen"]]:
                write_event(paths.events, Kind.RESOLVED, attempt, key=key, value=value, reason=reason)
    here = copies.here(config)
    job = Run(here, spec_from_run(here, paths), paths, train_tokens, held_out_tokens)
    return Prepared(config, job, attempt, answer["parameters"], answer["trainable"])


def _token_sets(train: Sequence[tuple[Path, float]], held_out: Mapping[str, Path]) -> dict[str, Path]:
    """What a run is trained and evaluated on, by the names in its data.json."""
    several = len(train) > 1
    trained = {f"train {number}" if several else "train": path for number, (path, _) in enumerate(train, 1)}
    return trained | {name if name == HELD_OUT else f"validation {name}": path for name, path in held_out.items()}


def _check_wandb(project: str) -> None:
    from phalanx.train import weights_and_biases

    weights_and_biases.check(project)


def _models(devices: Sequence[Device]) -> list[str]:
    return sorted({device.model for device in devices})


def _resolve(text: str, devices: list[str], world: int, local_world: int, show: bool) -> dict[str, Any]:
    """In a child process, since tokenizers start threads and a probe allocates."""
    from phalanx.report.progress import phases
    from phalanx.train.resolve import resolve_with_files

    with phases() if show else contextlib.nullcontext() as progress:
        return resolve_with_files(text, devices, world, local_world, progress)


def _facts(prepared: Prepared, devices: Sequence[Device], world: int) -> dict[str, Any]:
    return {
        "parameters": prepared.parameters,
        "trainable": prepared.trainable,
        "world": world,
        "device": devices[0].name.partition(":")[0],
        "device_names": _models(devices),
        "dtype": prepared.config.train.dtype,
        "engine": prepared.config.parallel.data,
        "steps": prepared.config.train.steps,
    }


def _note(paths: RunPaths, console: Any, kind: str, details: dict[str, Any]) -> None:
    """Write an event of the agent's. A full disk must not end a run that can go on: then it is only shown."""
    try:
        write_event(paths.events, kind, **details)
    except OSError as error:
        console.on_event({"kind": kind, **details})
        console.say(f"{paths.events} could not take this: {error.strerror}", kind=Kind.WARNING)


def _committed(paths: RunPaths) -> int:
    """The step of the newest checkpoint; 0 where there is none. A store is not asked: that would start threads."""
    from phalanx.checkpoint.read import find

    if isinstance(paths.checkpoints, Url):
        saved = (event for event in read_lines(paths.events) if event.get("kind") == Kind.CHECKPOINT_SAVED)
        return max((event["step"] for event in saved if type(event.get("step")) is int), default=0)
    return max(find(paths.checkpoints), default=0)


def _outcome(paths: RunPaths, code: int, first_attempt: int) -> tuple[int, bool]:
    """The exit code of a start whose agent ended with `code`, and whether it had been asked to stop.

    What was saved has not failed: ranks that are killed (a second Ctrl-C) while they leave have done their work.
    """
    kinds = [
        event.get("kind")
        for event in read_lines(paths.events)
        if type(event.get("attempt")) is int and event["attempt"] >= first_attempt
    ]
    asked = Kind.SIGNALLED in kinds
    if code == ExitCode.FAILED and asked and Kind.FINISHED in kinds:
        return ExitCode.DONE, asked
    if code == ExitCode.FAILED and asked and Kind.STOPPED in kinds:
        return ExitCode.STOPPED, asked
    return code, asked


def _close(paths: RunPaths, code: int, asked: bool = False) -> None:
    """Write the report and say where everything is; a report that fails must not hide how the run ended."""
    from phalanx.report import html
    from phalanx.report.console import summary

    terminal = open_terminal()
    try:
        html.write(paths)
    except (PhalanxError, OSError) as error:
        terminal.print(f"no report was written: {error}", style="yellow")
    if code in (ExitCode.DONE, ExitCode.STOPPED):
        terminal.print(summary(paths))
    elif asked:
        step = _committed(paths)
        on = f"goes on from the checkpoint of step {step}" if step else "begins again, as there is no checkpoint"
        terminal.print(
            f"asked to stop, the run ended before it had saved (exit code {code}); the same command {on}",
            style="yellow",
        )
    else:
        terminal.print(
            f"the run failed (exit code {code}); the ranks' own words are in {paths.root / 'logs'}", style="red"
        )
