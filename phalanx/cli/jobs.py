"""Commands for launched runs: launch, status, logs, cancel."""

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli import help
from phalanx.config import load
from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import RunPaths, redact_url
from phalanx.launch.schedulers.registry import DEFAULT, LOCAL, SCHEDULERS, find_scheduler
from phalanx.storage import files as storage
from phalanx.storage import mirror, permissions

jobs_app = typer.Typer()

OPTIONS = {"partition": "--partition", "account": "--account", "time": "--time", "gpus_per_node": "--gpus-per-node",
           "extra": "options of sbatch"}  # fmt: skip

RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its URL.")]


@jobs_app.command(rich_help_panel=help.TRAIN)
def launch(
    recipe_path: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, such as recipes/demo.yaml.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]... [-- SBATCH OPTIONS]",
            help="Keys to change, such as optim.lr=3e-4; after --, options of sbatch, such as --constraint=a100.",
        ),
    ] = None,
    node_count: Annotated[int, typer.Option("--nodes", min=1, help="Nodes that train.")] = 1,
    spares: Annotated[int, typer.Option(min=0, help="Spare nodes, which replace a lost one.")] = 0,
    partition: Annotated[
        list[str] | None,
        typer.Option("--partition", "-p", help="Partition; repeat as NAME:NODES for a heterogeneous job."),
    ] = None,
    account: Annotated[str | None, typer.Option("--account", "-A", help="Slurm account.")] = None,
    time_limit: Annotated[
        str | None, typer.Option("--time", "-t", help="Time limit: minutes, H:MM:SS or D-HH:MM:SS.")
    ] = None,
    gpus_per_node: Annotated[str | None, typer.Option(help="Accelerators per node, such as 8 or a100:4.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks per node. Default: one per accelerator; one on a node without accelerators."),
    ] = None,
    run_dir: Annotated[
        str | None, typer.Option(metavar="PATH", help="The run folder. Default: runs/ and the recipe's name.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run on this machine, in the background, without Slurm.")
    ] = False,
    scheduler_name: Annotated[
        str | None,
        typer.Option(
            "--scheduler", "--on", metavar="NAME", help=f"One of {', '.join(SCHEDULERS)}. Default: {DEFAULT}."
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show the run until it ends, and return its exit code.")] = False,
    until_done: Annotated[
        bool, typer.Option("--until-done", help="Restart after time limits, preemption and failures, until done.")
    ] = False,
    max_jobs: Annotated[
        int | None, typer.Option(min=1, help="With --until-done: maximum number of starts. Default: 100.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run/--apply", help="Print the script or the objects, and submit nothing; or submit.")
    ] = False,
) -> None:
    """Submit a run to Slurm or Kubernetes and return: an agent on each node, a run that survives the loss of a node.

    Options override the keys of the recipe's section slurm, or k8s.
    """
    from phalanx.launch import jobs
    from phalanx.launch.schedulers.scheduler import MAX_STARTS, LaunchOptions

    if max_jobs is not None and not until_done:
        raise ConfigError("--max-jobs has no effect without --until-done; add it, or remove --max-jobs")
    if dry_run and wait:
        raise ConfigError("--wait has no effect with --dry-run; use one of them")
    overrides, options = _split(words or [])
    wanted = load.load_recipe(recipe_path, overrides)
    if local and scheduler_name not in (None, LOCAL):
        raise ConfigError(f"--local is --scheduler {LOCAL}, not {scheduler_name}; use one of them")
    name = LOCAL if local else scheduler_name or DEFAULT
    scheduler = find_scheduler(name)
    wish = LaunchOptions(node_count, spares, ranks, until_done, max_jobs or MAX_STARTS)
    given = {"partition": partition or None, "account": account, "time": time_limit, "gpus_per_node": gpus_per_node,
             "extra": options or None}  # fmt: skip
    if scheduler.SECTION is None:
        _check_no_options(name, given)
    else:
        section = getattr(wanted, scheduler.SECTION)
        for key in [key for key in given if given[key] and key not in type(section).model_fields]:
            raise ConfigError(f"{OPTIONS[key]} has no effect with {scheduler.TITLE}; remove it")
        if options:
            given["extra"] = [*section.extra, *options]
        keys = {f"{scheduler.SECTION}.{key}": value for key, value in given.items() if value is not None}
        wanted = load.update_config(wanted, keys)
    paths = RunPaths(_run_folder(run_dir, recipe_path))
    if not dry_run:
        permissions.restrict_permissions(paths.root, wanted.storage.private)
    if dry_run:
        script = scheduler.make_script(wanted, paths, wish)
        if script is None:
            raise ConfigError(f"--dry-run shows the script of a Slurm job, and {_flag(name)} has none; use one of them")
        typer.echo(script, nl=False)
        return
    told = jobs.submit_run(name, wanted, paths, wish, os.environ)
    typer.echo(f"{paths.display_name} is {told}{_next_commands_hint(paths, wait)}")
    if wait:
        raise typer.Exit(jobs.wait_for_end(paths, wanted))


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split overrides of the recipe from options of sbatch, which begin with the first word that starts with -."""
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    return words[:first], words[first:]


def _run_folder(run_dir: str | None, recipe_path: Path) -> Path:
    if run_dir is None:
        return Path("runs") / recipe_path.stem
    if not run_dir:
        raise ConfigError("--run-dir is empty; give a folder, or remove it")
    if storage.is_url(run_dir):
        raise ConfigError(
            f"--run-dir {redact_url(run_dir)} is a URL, but a launched run needs a folder on a file system that "
            "all nodes share; give one, or give the URL to `phalanx train`"
        )
    return Path(run_dir)


def _flag(name: str) -> str:
    return "--local" if name == LOCAL else f"--scheduler {name}"


def _check_no_options(name: str, given: Mapping[str, object]) -> None:
    """Raises ConfigError for job options with a scheduler that has none."""
    for key, option in OPTIONS.items():
        if given[key] is not None:
            raise ConfigError(f"{option} has no effect without Slurm; remove it, or {_flag(name)}")


def _next_commands_hint(paths: RunPaths, wait: bool) -> str:
    return "" if wait else f"; phalanx status {paths.display_name} and phalanx logs -f {paths.display_name} show it"


@jobs_app.command("keep", hidden=True)
def keep(run: Annotated[Path, typer.Argument()]) -> None:
    """Agent of a launched run on each node (internal), restarted if it dies."""
    from phalanx.launch import job_supervisor

    try:
        code = job_supervisor.supervise(run, os.environ)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        for scheduler in SCHEDULERS.values():  # the run folder may be what this node does not see
            scheduler.cancel_task(os.environ)
        code = error.exit_code
    raise typer.Exit(code)


@jobs_app.command(rich_help_panel=help.WATCH)
def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run folder, or its URL. Default: a line for each run in runs/."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
) -> None:
    """Show the status of a run: progress, job, nodes, incidents, goodput."""
    if as_json and watch:
        raise ConfigError("--watch cannot be combined with --json; use one of them")
    while True:
        began = time.monotonic()
        text = _render_status(run, as_json)
        if watch and sys.stdout.isatty():
            typer.echo("\x1b[2J\x1b[H", nl=False)
        typer.echo(text, nl=False)
        if not watch:
            return
        try:
            time.sleep(max(2.0, 10 * (time.monotonic() - began)))  # reading the records of long runs takes time
        except KeyboardInterrupt:
            return


def _render_status(run: str | None, as_json: bool) -> str:
    from phalanx.elastic.supervisor import node_requests
    from phalanx.launch import launched_run
    from phalanx.report import status as run_status
    from phalanx.report.logs import open_terminal

    now = time.time()
    folders = list(map(str, _runs())) if run is None else [run]
    found = []
    for folder in folders:
        try:
            with mirror.open_records(folder) as paths:
                nodes = node_requests.list_nodes(paths) if paths.events.exists() else []
                found.append(run_status.read_status(paths, now, launched_run.describe_scheduler_state(paths), nodes))
        except PermissionError as error:
            if run is not None:
                raise
            typer.echo(f"skipped {folder}: {error.filename} cannot be read ({error.strerror})", err=True)
    if as_json:
        return json.dumps(found[0] if run is not None else found, indent=2, default=str) + "\n"
    terminal = open_terminal()
    with terminal.capture() as captured:
        if run is not None:
            terminal.print(run_status.render_status(found[0], now))
        elif not found:
            terminal.print("no runs in runs/; give the folder of a run", markup=False)
        else:
            terminal.print(run_status.render_runs_table(found))
    return captured.get()


def _runs() -> Iterator[Path]:
    folders = sorted(Path("runs").iterdir()) if Path("runs").is_dir() else []
    for folder in folders:
        paths = RunPaths(folder)
        with contextlib.suppress(PermissionError):  # another user's private folder
            if paths.events.exists() or paths.metrics.exists():
                yield folder


@jobs_app.command(rich_help_panel=help.WATCH)
def logs(
    run: RunFolder,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the run ends.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Log of this rank, in the newest attempt.")] = None,
    node: Annotated[int | None, typer.Option(min=0, help="Log of this node's agent.")] = None,
    first_error: Annotated[
        bool, typer.Option("--first-error", help="Root cause: the rank that died first in the newest incident.")
    ] = False,
) -> None:
    """Show the log of a run (of the leading node), of a node, of a rank, or of the first error."""
    from phalanx.report import logs as found

    if sum([rank is not None, node is not None, first_error]) > 1:
        raise ConfigError("--rank, --node and --first-error cannot be combined; use one of them")
    if first_error and follow:
        raise ConfigError("--follow has no effect with --first-error; use one of them")
    with mirror.open_records(run) as paths:
        if not paths.root.is_dir():
            raise ConfigError(f"no run folder {run}; give the folder of a run")
        if paths.url is not None:
            mirror.list_logs(paths)
        if first_error:
            for line in found.explain_first_error(paths, functools.partial(_fetch, paths)):
                typer.echo(line)
            return
        _show_logs(paths, rank, node, follow)


def _fetch(paths: RunPaths, file: Path) -> None:
    if paths.url is not None:
        mirror.refresh_file(paths, file)


def _show_logs(paths: RunPaths, rank: int | None, node: int | None, follow: bool) -> None:
    from phalanx.launch import launched_run
    from phalanx.report import logs as found

    looked = -mirror.PUSH_S

    def log() -> Path:
        nonlocal looked
        if paths.url is not None:
            time.sleep(max(0.0, looked + mirror.PUSH_S - time.monotonic()))  # more often nothing is copied there
            mirror.list_logs(paths)
        leads = None if rank is not None or node is not None else launched_run.find_leading_node(paths)
        file = found.find_log(paths, rank, leads or node)  # of node 0 there may be others as well
        if paths.url is not None:
            mirror.refresh_file(paths, file)
            looked = time.monotonic()
        return file

    if not follow:
        text = found.read_tail(file := log())
        typer.echo(text or f"{file} is empty; {found.ELSEWHERE}\n", nl=False, err=not text)
        return
    goes_on = launched_run.RunningPoller(paths)
    with contextlib.suppress(KeyboardInterrupt):
        if found.has_no_output(paths) and goes_on():
            typer.echo(f"{paths.display_name} has no output yet; waiting", err=True)
            while found.has_no_output(paths) and goes_on():
                time.sleep(found.LOOK_S)
        found.follow_file(log, lambda text: typer.echo(text, nl=False), lambda: not goes_on())


@jobs_app.command(rich_help_panel=help.WATCH)
def cancel(
    run: RunFolder,
    now: Annotated[
        bool, typer.Option("--now", help="End it at once; steps after the newest checkpoint are lost.")
    ] = False,
) -> None:
    """Stop a run after its step and save it; or end it at once. `phalanx launch` resumes it."""
    from phalanx.launch import jobs

    if not storage.is_url(run):
        permissions.restrict_permissions(Path(run))
    with mirror.open_records(run) as paths:
        typer.echo(jobs.cancel_run(paths, now))
